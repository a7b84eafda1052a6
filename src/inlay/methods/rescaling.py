"""A scale and a shift for every channel of a module's output, and how both go into its weight and bias.

Shared by SSF and by the scaling of attention, which differ only in what they scale and in where the numbers come from.
"""

from __future__ import annotations

import torch
from peft.tuners.tuners_utils import check_adapters_to_merge
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from inlay.anatomy import NORMS, is_norm
from inlay.errors import InlayError
from inlay.methods.channels import channel_axis
from inlay.methods.tuner import ChannelLayer


class RescalingLayer(ChannelLayer):
    """Scales and shifts the channels of its host `f`:

        y = gamma * f(x) + beta,      gamma = 1, beta = 0 at the start.

    An adapter's piece, called, gives `(gamma, beta)`; beta is None for a host that has no bias to take it. Merged, the
    host itself computes `y`, with

        W' = gamma W,      b' = gamma b + beta.

    Several adapters act one after the other.
    """

    merges_into = ("weight", "bias")

    def act(self, adapter_name: str, output: Tensor) -> Tensor:
        """`gamma * output + beta`."""
        shape = [1] * output.ndim
        shape[channel_axis(self.host)] = -1
        gamma, beta = (None if one is None else one.to(output.dtype).view(shape) for one in self.pieces[adapter_name]())
        # One pass over the features, not two.
        return output * gamma if beta is None else torch.addcmul(beta, output, gamma)

    @torch.no_grad()
    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Put scales and shifts into the host's weight and bias."""
        for name in check_adapters_to_merge(self, adapter_names):
            if name not in self.pieces:
                continue
            self.merge_values(name, _folded(self.host, *self.pieces[name]()), safe=safe_merge)


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
