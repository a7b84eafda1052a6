"""Bias tuning of one module (BitFit, Ben Zaken et al. 2022, section 2)."""

from __future__ import annotations

import torch
from peft.tuners.tuners_utils import check_adapters_to_merge
from torch import Tensor, nn

from inlay.methods.bias.config import BiasTuningConfig
from inlay.methods.channels import channel_axis
from inlay.methods.tuner import ChannelLayer


class Delta(nn.Module):
    """`delta` of one adapter. A module of its own, so that FSDP's wrapping sees a trainable `weight`."""

    def __init__(self, bias: Tensor, axis: int) -> None:
        super().__init__()
        self.axis = axis
        self.weight = nn.Parameter(torch.zeros_like(bias))

    def forward(self, output: Tensor) -> Tensor:
        """`output + delta`, along the axis of the channels."""
        shape = [1] * output.ndim
        shape[self.axis] = -1
        return output + self.weight.to(output.dtype).view(shape)


class BiasLayer(ChannelLayer):
    """Adds a trained `delta` to the output of its host, which has the bias `b`:

        y = f(x; W) + b + delta,      delta = 0 at the start.

    The biases BitFit trains are `b + delta`. A sum on the output serves a frozen, quantised or LoRA-wrapped weight
    alike, and a small step is not lost in the rounding of a bfloat16 bias: PEFT keeps `delta` in float32.
    """

    adapter_layer_names = ("inlay_bias_delta",)
    merges_into = ("bias",)

    def update_layer(self, adapter_name: str, config: BiasTuningConfig) -> None:
        self.pieces[adapter_name] = Delta(self.host.bias, channel_axis(self.host))

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
