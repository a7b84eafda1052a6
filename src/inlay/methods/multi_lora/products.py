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
Factors: TypeAlias = tuple[Sequence[Tensor], float]  # of each part each row's `B`, (rows, r, width), and its scale
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
    z = z if z.dtype == output.dtype else z.to(output.dtype)
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (output, z, *weights)):
        if slots is None and first and _is_whole(output, parts, first):  # torch's own keeps no more than ours
            factor = weights[0].squeeze(0).mT.to(output.dtype).expand(len(output), -1, -1)
            return torch.baddbmm(output, factor, z, alpha=scale)
        return _AddProducts.apply(output, z, slots, scale, parts, first, fetch, *no_leaves(weights))
    # Nothing else holds what a layer has just computed: it is written over, except where a compiler decides that.
    result = output.clone() if torch.compiler.is_compiling() else output
    return add_into(result, z, *_factors(weights, slots, scale, result, fetch), parts, first)


def no_leaves(weights: Sequence[Tensor]) -> list[Tensor]:
    """Parameters as a function of autograd that is written in Python may take them where threads share a model: views.

    torch 2.13 looks for the node that sums a parameter's gradients under a lock of the parameter, and may wait there
    for the interpreter's. Who asks for that node while holding the interpreter's, waits for the other, and neither
    goes on. Such functions do, and so do `.mT` and indices: of a parameter, take `squeeze` or `view_as` first.
    """
    return [weight.view_as(weight) for weight in weights]


def add_product(output: Tensor, z: Tensor, scale: float, weight: Tensor) -> Tensor:
    """The same where all rows belong to one task and all channels, which come last, to one part: `torch.addmm`.

    It keeps no more than ours, and takes the host, for which small models wait, the least time.
    """
    factor = weight.squeeze(0).to(output.dtype)
    z = z if z.dtype == output.dtype else z.to(output.dtype)
    flat = output.reshape(-1, output.shape[-1])
    return torch.addmm(flat, z.reshape(-1, z.shape[-1]), factor, alpha=scale).view(output.shape)


def add_into(result: Tensor, z: Tensor, factors: Sequence[Tensor], alpha: float, parts: Parts, first: bool) -> Tensor:
    """`add_products` given each row's `B`, in place."""
    z = z if z.dtype == result.dtype else z.to(result.dtype)
    if len(parts) == 1 and not first and factors[0].shape[2] == result.shape[2]:
        return result.baddbmm_(z, factors[0], alpha=alpha)
    for small, part, factor in zip(_smalls(z, parts, first), _wides(result, parts, first), factors, strict=True):
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
        ctx.save_for_backward(z, slots, *weights)
        ctx.given = scale, parts, first, fetch
        return add_into(output.clone(), z, *_factors(weights, slots, scale, output, fetch), parts, first)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        z, slots, *weights = ctx.saved_tensors
        scale, parts, first, fetch = ctx.given
        wanted = ctx.needs_input_grad[7:]
        of_z, of_weights = None, [None] * len(weights)
        with without_autocast(gradient):
            wides = _wides(gradient, parts, first)
            if ctx.needs_input_grad[1]:
                factors, alpha = _factors(weights, slots, scale, gradient, fetch)
                pairs = zip(wides, factors, strict=True)
                of_z = [_product(b, g, alpha) if first else _product(g, b.mT, alpha) for g, b in pairs]
                of_z = of_z[0] if len(of_z) == 1 else torch.cat(of_z, dim=1 if first else 2)
            if any(wanted):
                alpha = 1.0 if isinstance(scale, Tensor) else scale
                pairs = zip(_smalls(z, parts, first), wides, strict=True)
                found = [_product(s, g.mT, alpha) if first else _product(s.mT, g, alpha) for s, g in pairs]
                by_row = found[0].unsqueeze(1) if len(found) == 1 else torch.stack(found, dim=1)
                by_task = _by_task(by_row.to(weights[0].dtype), slots, scale, len(weights))
                of_weights = [each if needed else None for each, needed in zip(by_task, wanted, strict=True)]
        return gradient, of_z, None, None, None, None, None, *of_weights


def _by_task(by_row: Tensor, slots: Tensor | None, scale: Scale, tasks: int) -> Sequence[Tensor]:
    """The sums over each task's rows."""
    if slots is None:
        return by_row.sum(dim=0, keepdim=True).unbind()
    found = by_row.new_zeros(tasks, *by_row.shape[1:]).index_add_(0, slots, by_row)
    return (found * scale.view(-1, 1, 1, 1).to(found.dtype) if isinstance(scale, Tensor) else found).unbind()


def _product(left: Tensor, right: Tensor, alpha: float) -> Tensor:
    """`alpha left right`, each pair of matrices by itself, by one kernel."""
    if alpha == 1:
        return torch.bmm(left, right)
    return torch.baddbmm(left.new_empty(()), left, right, beta=0, alpha=alpha)


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
    return rows.unbind(1), 1.0 if isinstance(scale, Tensor) else scale


def _is_whole(wide: Tensor, parts: Parts, first: bool) -> bool:
    return len(parts) == 1 and parts[0][1] - parts[0][0] == wide.shape[1 if first else 2]


def _wides(wide: Tensor, parts: Parts, first: bool) -> Sequence[Tensor]:
    """The adapted parts of what is as wide as the output."""
    if _is_whole(wide, parts, first):
        return (wide,)
    return [wide[:, begin:end] if first else wide[..., begin:end] for begin, end in parts]


def _smalls(z: Tensor, parts: Parts, first: bool) -> Sequence[Tensor]:
    """What belongs to each part of `z`."""
    return (z,) if len(parts) == 1 else z.chunk(len(parts), dim=1 if first else 2)


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
