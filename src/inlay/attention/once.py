"""Gradients that cannot be differentiated again, and say so.

torch's `once_differentiable` lets a gradient pass as a constant where only the inputs of the forward pass need another
derivative: a penalty on that gradient would be lost without a word. Here such a gradient is tied to the inputs, and
differentiating it is an error.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from inlay.errors import InlayError

Backward = Callable[..., tuple[Tensor | None, ...]]


def differentiable_once(backward: Backward) -> Backward:
    """For the `backward` of a torch.autograd.Function that has saved its inputs."""

    @wraps(backward)
    def once(ctx: Any, *gradients: Any) -> tuple[Tensor | None, ...]:
        if not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return backward(ctx, *gradients)
        with torch.no_grad():
            found = backward(ctx, *gradients)
        given = [x for x in (*ctx.saved_tensors, *gradients) if isinstance(x, Tensor) and x.requires_grad]
        return tuple(None if each is None else _Last.apply(each, *given) for each in found)

    return once


class _Last(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gradient: Tensor, *given: Tensor) -> Tensor:
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        raise InlayError(
            "A fused operation gives first derivatives only, and this gradient is differentiated again. Leave out "
            'create_graph=True; inlay.attention has second derivatives with backend="plain", and scales of channels in '
            "float32."
        )
