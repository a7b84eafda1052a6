"""The products of Multi-LoRA: `x A` once, then each row's own `B`, forward and backward, without a loop over tasks.

`A` and the base are frozen, so that neither needs `x` in the backward pass: it keeps `z = x A` (r numbers a token) and
the rows' places, and gathers the `B`s again. The number of kernels does not depend on the number of tasks, and rows do
not meet: what is not a number in one of them stays there.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import conv2d
from torch.nn.grad import conv2d_input

Scale: TypeAlias = float | Tensor  # one for all tasks, or one a task
Parts: TypeAlias = tuple[tuple[int, int], ...]  # from where to where, along the output's channels


def add_products(
    output: Tensor, z: Tensor, slots: Tensor | None, scale: Scale, parts: Parts, first: bool, weights: Sequence[Tensor]
) -> Tensor:
    """`output` with each row's low-rank product added to it:

        y[i] = output[i] + scale[t] * z[i] B_t,      t = slots[i].

    `output` is (rows, tokens, m), or (rows, m, pixels) where the channels are `first`; `z` likewise with s r channels
    for the s `parts` of the output that are adapted. A weight is one task's `B`: (s, r, width of a part). `slots` gives
    each row's place among the weights; None: all rows belong to the only one.
    """
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (output, z, *weights)):
        return _AddProducts.apply(output, z, slots, scale, parts, first, *weights)
    # Nothing else holds what a layer has just computed: it is written over, except where a compiler decides that.
    result = output.clone() if torch.compiler.is_compiling() else output
    return _add_into(result, z, slots, scale, parts, first, weights)


class _AddProducts(torch.autograd.Function):
    """`add_products`, keeping `z` and the weights, which are there anyway, for the backward pass:

    dL/dz[i] = scale[t] * G[i] B_t^T,      dL/dB_t = scale[t] * sum over the rows i of task t of z[i]^T G[i].
    """

    @staticmethod
    def forward(
        ctx: Any,
        output: Tensor,
        z: Tensor,
        slots: Tensor | None,
        scale: Scale,
        parts: Parts,
        first: bool,
        *weights: Tensor,
    ) -> Tensor:
        z = z.to(output.dtype)
        ctx.save_for_backward(z, slots, *weights)
        ctx.scale, ctx.parts, ctx.first = scale, parts, first
        return _add_into(output.clone(), z, slots, scale, parts, first, weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        z, slots, *weights = ctx.saved_tensors
        with without_autocast(gradient):
            of_z = _gradient_of_z(ctx, gradient, z, slots, weights) if ctx.needs_input_grad[1] else None
            wanted = ctx.needs_input_grad[6:]
            found = _gradients_of_weights(ctx, gradient, z, slots, weights) if any(wanted) else [None] * len(weights)
        of_weights = (each if needed else None for each, needed in zip(found, wanted, strict=True))
        return gradient, of_z, None, None, None, None, *of_weights


def _add_into(
    result: Tensor,
    z: Tensor,
    slots: Tensor | None,
    scale: Scale,
    parts: Parts,
    first: bool,
    weights: Sequence[Tensor],
) -> Tensor:
    with without_autocast(result):
        factors, alpha = _factors(weights, slots, scale, result)
        rank = factors.shape[-2]
        for number, (begin, end) in enumerate(parts):
            small = _channels(z.to(result.dtype), number * rank, (number + 1) * rank, first)
            pair = (factors[:, number].mT, small) if first else (small, factors[:, number])
            _channels(result, begin, end, first).baddbmm_(*pair, alpha=alpha)
    return result


def _gradient_of_z(ctx: Any, gradient: Tensor, z: Tensor, slots: Tensor | None, weights: Sequence[Tensor]) -> Tensor:
    factors, alpha = _factors(weights, slots, ctx.scale, gradient)
    found = []
    for number, (begin, end) in enumerate(ctx.parts):
        part, factor = _channels(gradient, begin, end, ctx.first), factors[:, number]
        found.append(torch.bmm(factor, part) if ctx.first else torch.bmm(part, factor.mT))
    whole = found[0] if len(found) == 1 else torch.cat(found, dim=1 if ctx.first else 2)
    return whole if alpha == 1 else whole * alpha


def _gradients_of_weights(
    ctx: Any, gradient: Tensor, z: Tensor, slots: Tensor | None, weights: Sequence[Tensor]
) -> list[Tensor]:
    rank = weights[0].shape[-2]
    found = []
    for number, (begin, end) in enumerate(ctx.parts):
        small = _channels(z, number * rank, (number + 1) * rank, ctx.first)
        part = _channels(gradient, begin, end, ctx.first)
        found.append(torch.bmm(small, part.mT) if ctx.first else torch.bmm(small.mT, part))
    by_row = torch.stack(found, dim=1).to(weights[0].dtype)
    if slots is None:
        by_task = by_row.sum(dim=0, keepdim=True) if len(by_row) > 1 else by_row
    else:
        by_task = by_row.new_zeros(len(weights), *by_row.shape[1:]).index_add_(0, slots, by_row)
    scale = ctx.scale.view(-1, 1, 1, 1) if isinstance(ctx.scale, Tensor) else ctx.scale
    return list((by_task * scale).unbind())


def _factors(weights: Sequence[Tensor], slots: Tensor | None, scale: Scale, like: Tensor) -> tuple[Tensor, float]:
    """Each row's `B`, (rows, s, r, width), and the number that the product is still to be multiplied by."""
    stacked = (torch.cat(list(weights)) if len(weights) > 1 else weights[0]).to(like.dtype)
    stacked = stacked.view(len(weights), *weights[0].shape)
    if isinstance(scale, Tensor):
        stacked = stacked * scale.to(like.dtype).view(-1, 1, 1, 1)
    rows = stacked.expand(len(like), -1, -1, -1) if slots is None else stacked.index_select(0, slots)
    return rows, 1.0 if isinstance(scale, Tensor) else scale


def _channels(tensor: Tensor, begin: int, end: int, first: bool) -> Tensor:
    return tensor[:, begin:end] if first else tensor[..., begin:end]


class ConvolveFrozen(torch.autograd.Function):
    """A convolution with frozen filters that does not keep its input: torch's own does, for filters it never trains."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        filters: Tensor,
        stride: tuple[int, int],
        padding: tuple[int, int],
        dilation: tuple[int, int],
    ) -> Tensor:
        ctx.save_for_backward(filters)
        ctx.shape, ctx.how = x.shape, (stride, padding, dilation)
        return conv2d(x, filters, None, stride, padding, dilation)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (filters,) = ctx.saved_tensors
        of_x = conv2d_input(ctx.shape, filters, gradient, *ctx.how) if ctx.needs_input_grad[0] else None
        return of_x, None, None, None, None


def without_autocast(tensor: Tensor) -> AbstractContextManager[Any]:
    """Precision is chosen by hand here."""
    kind = tensor.device.type
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()
