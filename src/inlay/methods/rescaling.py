"""A scale and a shift for every channel of a module's output, and how both go into its weight and bias.

Shared by SSF and by the scaling of attention, which differ only in what they scale and in where the numbers come from.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer, check_adapters_to_merge
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from inlay.anatomy import NORMS, is_norm
from inlay.errors import InlayError
from inlay.methods.channels import LINEAR, PLAIN_NORMS, channel_axis, is_plain
from inlay.methods.column_sums import LEAST
from inlay.methods.folding import FoldingLayer
from inlay.methods.scaled_linear import scaled_linear
from inlay.methods.tuner import ChildLayer, InlayTuner

LEFT_ALONE = frozenset(
    {"bert", "clip", "convnext", "deberta_v2", "deit", "dinov2", "distilbert", "electra", "gemma3", "gpt2", "llama"}
    | {"modernbert", "mpnet", "opt", "resnet", "roberta", "swin", "t5", "vit"}
)
"""Architectures of Transformers that never change the output of a linear layer in place: tested on each."""

STEPS = 16


@dataclass
class SmallScale:
    """Whether one adapter of a layer has a small scale, asked at its first pass and then every `STEPS`-th time that
    its parameters have changed. Changes past autograd, by `.data`, are not noticed: no version counts them."""

    versions: list[tuple[int, int]] | None = None
    """Of which parameters, and how often each had been changed."""
    changes: int = 0
    answer: bool = False

    def of(self, versions: list[tuple[int, int]], gamma: Tensor, ask: bool) -> bool:
        """The answer for parameters of these versions; `ask`: whether the device may be waited for."""
        if versions != self.versions:
            self.versions = versions
            if ask and self.changes % STEPS == 0:
                self.answer = _is_small(gamma)
            self.changes += 1
        return self.answer


def _is_small(gamma: Tensor) -> bool:
    return bool((gamma.detach().abs() < LEAST).any())


class RescalingLayer(FoldingLayer):
    """Scales and shifts the channels of its host `f`:

        y = gamma * f(x) + beta,      gamma = 1, beta = 0 at the start.

    An adapter's piece, called, gives `(gamma, beta)`; beta is None for a host that has no bias to take it. Merged, the
    host itself computes `y`, with

        W' = gamma W,      b' = gamma b + beta.

    Several adapters act one after the other. One by itself is folded into the parameters in training too, so that no
    pass over the output is needed: of a layer, RMS or group norm of torch's always, of a linear layer where it computes
    in half precision (scaled_linear.py). Other hosts (convolutions, batch norms, norms that an architecture writes for
    itself) are scaled on their output, which is kept for the backward pass.
    """

    merges_into = ("weight", "bias")
    folds = LINEAR | PLAIN_NORMS
    outputs_stay: bool | None = None
    """Whether the model leaves the output of the host alone, so that it need not be copied to be kept; None: the next
    pass will tell."""

    def __init__(self, host: nn.Module) -> None:
        super().__init__(host)
        self._axis = channel_axis(host)
        self._known: dict[str, SmallScale] = {}

    def folded(self, host: Any, names: list[str], x: Tensor) -> Tensor | None:
        """`y`, of the one adapter that runs."""
        if len(names) > 1:
            return None
        kind, piece = type(host), self.pieces[names[0]]
        if kind in LINEAR and not x.is_nested:
            return scaled_linear(self, host, x, names[0])
        # Of rows that differ in length (torch's encoder in eval mode, with padding) an output cannot be scaled.
        compute = LINEAR[kind] if kind is nn.Linear else PLAIN_NORMS.get(kind)
        weight, bias = host.weight, getattr(host, "bias", None)
        if compute is None or not is_plain(weight):
            return None
        gamma, beta = piece()
        scale = (weight * (gamma.unsqueeze(1) if kind is nn.Linear else gamma)).to(weight.dtype)
        if bias is not None:
            bias = (bias * gamma if beta is None else torch.addcmul(beta, bias, gamma)).to(bias.dtype)
        return compute(host, x, scale, bias)

    def has_small_scale(self, adapter_name: str, gamma: Tensor) -> bool:
        """Whether some scale of an adapter is below `LEAST`: its gradient then needs what it multiplies.

        A GPU has to be waited for, so there an adapter's answer is kept (`SmallScale`). A pass that is recomputed in
        the backward pass gets the answer of the first.
        """
        if not gamma.is_cuda:
            return _is_small(gamma)
        known = self._known.setdefault(adapter_name, SmallScale())
        versions = [(id(one), one._version) for one in self.pieces[adapter_name].parameters()]
        return known.of(versions, gamma, ask=not torch.cuda.is_current_stream_capturing())

    def act(self, adapter_name: str, output: Tensor) -> Tensor:
        """`gamma * output + beta`."""
        gamma, beta = self.pieces[adapter_name]()
        if gamma.dtype != output.dtype:
            gamma, beta = gamma.to(output.dtype), None if beta is None else beta.to(output.dtype)
        if self._axis != -1:
            shape = [1] * output.ndim
            shape[self._axis] = -1
            gamma, beta = gamma.view(shape), None if beta is None else beta.view(shape)
        # One pass over the features, not two.
        return output * gamma if beta is None else torch.addcmul(beta, output, gamma)

    @torch.no_grad()
    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Put scales and shifts into the host's weight and bias."""
        for name in check_adapters_to_merge(self, adapter_names):
            if name not in self.pieces:
                continue
            self.merge_values(name, _folded(self.host, *self.pieces[name]()), safe=safe_merge)


class RescalingTuner(InlayTuner):
    """Knows which models leave the outputs of their layers alone."""

    def inject_adapter(self, model: nn.Module, adapter_name: str, *args: Any, **kwargs: Any) -> None:
        """As always. Another method's layers around ours may change their outputs in place, as some of PEFT's do."""
        super().inject_adapter(model, adapter_name, *args, **kwargs)
        others = any(isinstance(one, BaseTunerLayer) and not isinstance(one, ChildLayer) for one in model.modules())
        package, _, rest = type(model).__module__.partition("transformers.models.")
        if not package and rest.partition(".")[0] in LEFT_ALONE and not others:
            for layer in self._layers():
                layer.outputs_stay = True


def _folded(host: nn.Module, gamma: Tensor, beta: Tensor | None) -> dict[str, Tensor]:
    """The weight and the bias with which the host computes `gamma * f(x) + beta`, in gamma's precision or better."""
    weight = host.weight.data
    if not weight.is_floating_point():
        raise InlayError(f"{type(host).__name__} holds quantised weights ({weight.dtype}): nothing merges into them.")
    # Channels run along the first axis of a weight; GPT-2's Conv1D keeps its own transposed.
    rows = gamma.view(1, -1) if isinstance(host, Conv1D) else gamma.view(-1, *[1] * (weight.ndim - 1))
    offset = _offset(host) if is_norm(host) else 0.0
    folded = {"weight": (weight.to(torch.promote_types(weight.dtype, gamma.dtype)) + offset) * rows - offset}
    bias = getattr(host, "bias", None)
    if bias is not None:
        folded["bias"] = bias.data * gamma if beta is None else bias.data * gamma + beta
    return folded


def _offset(norm: nn.Module) -> float:
    """`c` of a norm that multiplies by `c + weight`: 0, or 1 as Gemma has it.

    Every architecture writes its own RMS norm, so it is asked: the right `c` is the one for which a weight of `-c`
    leaves nothing but the bias.
    """
    if isinstance(norm, NORMS):
        return 0.0
    weight, bias = norm.weight, getattr(norm, "bias", None)
    kept = weight.data
    some = torch.arange(1, weight.numel() + 1, dtype=weight.dtype, device=weight.device)
    try:
        for offset in (0.0, 1.0):
            weight.data = torch.full_like(kept, -offset)
            left = type(norm).forward(norm, some)
            if torch.equal(left, torch.zeros_like(left) if bias is None else bias.to(left)):
                return offset
    finally:
        weight.data = kept
    raise InlayError(
        f"{type(norm).__name__} does not multiply by its weight, nor by 1 + weight: nothing merges into it."
    )
