"""The products of Multi-LoRA: `x A` once, then each row's own `B`, forward and backward, without a loop over tasks.

`A` and the base are frozen, so that neither needs `x` in the backward pass: it keeps `z = x A` (r numbers a token) and
the rows' places, and fetches the `B`s again. The number of kernels does not depend on the number of tasks, and rows do
not meet: what is not a number in one of them stays there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import conv2d
from torch.nn.grad import conv2d_input

Scale: TypeAlias = float | Tensor  # one for all tasks, or one a task
Parts: TypeAlias = tuple[tuple[int, int], ...]  # from where to where, along the output's channels
Factors: TypeAlias = tuple[Tensor, float]  # each row's `B`, (rows, s, r, width), and what the product is multiplied by
Fetch: TypeAlias = Callable[[torch.dtype], Factors | None]


def add_products(
    output: Tensor,
    z: Tensor,
    slots: Tensor | None,
    scale: Scale,
    parts: Parts,
    first: bool,
    weights: Sequence[Tensor],
    fetch: Fetch | None = None,
) -> Tensor:
    """`output` with each row's low-rank product added to it:

        y[i] = output[i] + scale[t] * z[i] B_t,      t = slots[i].

    `output` is (rows, tokens, m), or (rows, m, pixels) where the channels are `first`; `z` likewise with s r channels
    for the s `parts` of the output that are adapted. A weight is one task's `B`: (s, r, width of a part). `slots` gives
    each row's place among the weights; None: all rows belong to the only one. `fetch` may know a shorter way to the
    rows' `B`s than through the weights.
    """
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (output, z, *weights)):
        return _AddProducts.apply(output, z, slots, scale, parts, first, fetch, *weights)
    # Nothing else holds what a layer has just computed: it is written over, except where a compiler decides that.
    result = output.clone() if torch.compiler.is_compiling() else output
    with without_autocast(result):
        return add_into(result, z, *_factors(weights, slots, scale, result, fetch), parts, first)


def add_into(result: Tensor, z: Tensor, factors: Tensor, alpha: float, parts: Parts, first: bool) -> Tensor:
    """`add_products` given each row's `B`, (rows, s, r, width), in place."""
    z = z if z.dtype == result.dtype else z.to(result.dtype)
    for small, part, factor in _by_part(z, result, factors, parts, first):
        part.baddbmm_(*((factor.mT, small) if first else (small, factor)), alpha=alpha)
    return result


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
        fetch: Fetch | None,
        *weights: Tensor,
    ) -> Tensor:
        z = z.to(output.dtype)
        ctx.save_for_backward(z, slots, *weights)
        ctx.scale, ctx.parts, ctx.first, ctx.fetch = scale, parts, first, fetch
        with without_autocast(output):
            factors, alpha = _factors(weights, slots, scale, output, fetch)
            return add_into(output.clone(), z, factors, alpha, parts, first)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        z, slots, *weights = ctx.saved_tensors
        wanted = ctx.needs_input_grad[7:]
        of_weights: list[Tensor | None] = [None] * len(weights)
        with without_autocast(gradient):
            of_z = _gradient_of_z(ctx, gradient, slots, weights) if ctx.needs_input_grad[1] else None
            if any(wanted):
                found = _gradients_of_weights(ctx, gradient, z, slots, weights)
                of_weights = [each if needed else None for each, needed in zip(found, wanted, strict=True)]
        return gradient, of_z, None, None, None, None, None, *of_weights


def _gradient_of_z(ctx: Any, gradient: Tensor, slots: Tensor | None, weights: Sequence[Tensor]) -> Tensor:
    factors, alpha = _factors(weights, slots, ctx.scale, gradient, ctx.fetch)
    found = []
    for _, part, factor in _by_part(None, gradient, factors, ctx.parts, ctx.first):
        found.append(_product(factor, part, alpha) if ctx.first else _product(part, factor.mT, alpha))
    return found[0] if len(found) == 1 else torch.cat(found, dim=1 if ctx.first else 2)


def _gradients_of_weights(
    ctx: Any, gradient: Tensor, z: Tensor, slots: Tensor | None, weights: Sequence[Tensor]
) -> Sequence[Tensor]:
    alpha = 1.0 if isinstance(ctx.scale, Tensor) else ctx.scale
    found = []
    for small, part, _ in _by_part(z, gradient, weights[0].unsqueeze(0), ctx.parts, ctx.first):
        found.append(_product(small, part.mT, alpha) if ctx.first else _product(small.mT, part, alpha))
    by_row = found[0].unsqueeze(1) if len(found) == 1 else torch.stack(found, dim=1)
    by_row = by_row.to(weights[0].dtype)
    if slots is None:
        by_task = by_row.sum(dim=0, keepdim=True) if len(by_row) > 1 else by_row
    else:
        by_task = by_row.new_zeros(len(weights), *by_row.shape[1:]).index_add_(0, slots, by_row)
    if isinstance(ctx.scale, Tensor):
        by_task = by_task * ctx.scale.view(-1, 1, 1, 1).to(by_task.dtype)
    return by_task.unbind()


def _product(left: Tensor, right: Tensor, alpha: float) -> Tensor:
    """`alpha left right`, each matrix by itself, by one kernel."""
    nothing = left.new_empty(())
    return torch.bmm(left, right) if alpha == 1 else torch.baddbmm(nothing, left, right, beta=0, alpha=alpha)


def _factors(
    weights: Sequence[Tensor], slots: Tensor | None, scale: Scale, like: Tensor, fetch: Fetch | None
) -> Factors:
    """Each row's `B` in the precision of `like`, and what the product is multiplied by."""
    fetched = None if fetch is None else fetch(like.dtype)
    if fetched is not None:
        return fetched
    stacked = (torch.cat(list(weights)) if len(weights) > 1 else weights[0]).to(like.dtype)
    stacked = stacked.view(len(weights), *weights[0].shape)
    if isinstance(scale, Tensor):
        stacked = stacked * scale.to(like.dtype).view(-1, 1, 1, 1)
    rows = stacked.expand(len(like), -1, -1, -1) if slots is None else stacked.index_select(0, slots)
    return rows, 1.0 if isinstance(scale, Tensor) else scale


def _by_part(
    z: Tensor | None, wide: Tensor, factors: Tensor, parts: Parts, first: bool
) -> list[tuple[Any, Tensor, Tensor]]:
    """What belongs together of `z`, of what is as wide as the output, and of each row's `B`."""
    if len(parts) == 1 and parts[0][1] - parts[0][0] == wide.shape[1 if first else 2]:
        return [(z, wide, factors[:, 0])]
    rank, found = factors.shape[-2], []
    for number, (begin, end) in enumerate(parts):
        small = None if z is None else _channels(z, number * rank, (number + 1) * rank, first)
        found.append((small, _channels(wide, begin, end, first), factors[:, number]))
    return found


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
