"""Bias tuning of one module (BitFit, Ben Zaken et al. 2022, section 2)."""

from __future__ import annotations

from typing import Any

import torch
from peft.tuners.tuners_utils import check_adapters_to_merge
from torch import Tensor, nn

from inlay.methods.bias.config import BiasTuningConfig
from inlay.methods.channels import LINEAR, channel_axis, is_plain
from inlay.methods.folding import FoldingLayer


class Delta(nn.Module):
    """`delta` of one adapter. A module of its own, so that FSDP's wrapping sees a trainable `weight`."""

    def __init__(self, bias: Tensor, axis: int) -> None:
        super().__init__()
        self.axis = axis
        self.weight = nn.Parameter(torch.zeros_like(bias))

    def forward(self, values: Tensor, to_bias: bool = False) -> Tensor:
        """`values + delta`: of an output along the axis of its channels, or of a bias, in the better of two precisions.

        Always a new tensor: FSDP may take the weight away as soon as this returns.
        """
        if to_bias:
            return values + self.weight
        shape = [1] * values.ndim
        shape[self.axis] = -1
        return values + self.weight.to(values.dtype).view(shape)


class BiasLayer(FoldingLayer):
    """Adds a trained `delta` to the output of its host, which has the bias `b`:

        y = f(x; W) + b + delta,      delta = 0 at the start.

    The biases BitFit trains are `b + delta`. Linear layers, convolutions, layer and group norms compute with that sum
    in place of `b`, by torch's own operations and gradients: no further pass over the output. It is made in float32
    where `delta` is, and rounded once to the precision of `b`: PEFT keeps `delta` in float32, so that small steps are
    not lost in the rounding of a bfloat16 bias. Any other host, quantised or of a class of its own, gets the sum on its
    output.
    """

    adapter_layer_names = ("inlay_bias_delta",)
    merges_into = ("bias",)

    def update_layer(self, adapter_name: str, config: BiasTuningConfig) -> None:
        self.pieces[adapter_name] = Delta(self.host.bias, channel_axis(self.host))

    def folded(self, host: Any, names: list[str], x: Tensor) -> Tensor | None:
        """`f(x; W) + (b + delta)`, `delta` the sum of the running adapters'."""
        weight, bias, compute = host.weight, host.bias, self.folds.get(type(host))
        if compute is None or not is_plain(weight):
            return None
        if type(host) not in LINEAR and torch.is_grad_enabled() and not x.requires_grad:
            return None  # the first of the graph: it would keep its input for a gradient that is a sum of the output's
        shift = bias
        for name in names:
            shift = self.pieces[name](shift, to_bias=True)
        return compute(host, x, weight, shift.to(bias.dtype))

    def act(self, adapter_name: str, output: Tensor) -> Tensor:
        """`output + delta`."""
        return self.pieces[adapter_name](output)

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Put the deltas into the host's bias."""
        names = [name for name in check_adapters_to_merge(self, adapter_names) if name in self.pieces]
        bias = self.host.bias
        for name in names:
            merged = (bias.data + self.pieces[name].weight.data).to(bias.dtype)
            self.merge_values(name, {"bias": merged}, safe=safe_merge)
