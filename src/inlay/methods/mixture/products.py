"""The products of Multi-LoRA: `x A` once, then each row's own `B`, forward and backward, without a loop over tasks.

`A` and the base are frozen, so that neither needs `x` in the backward pass: it keeps `z = x A` (r numbers a token) and
the rows' `B`s. The number of kernels does not depend on the number of tasks, and rows do not meet: what is not a number
in one of them stays there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from inlay.attention.call import without_autocast

Parts: TypeAlias = tuple[tuple[int, int], ...]  # from where to where, along the output's channels
# Of each part each row's `B`, (rows, r, width), or one for all rows, (1, r, width); and what the product is scaled by.
Factors: TypeAlias = tuple[Sequence[Tensor], float]


def add_products(output: Tensor, z: Tensor, factors: Factors, parts: Parts, *, first: bool = False) -> Tensor:
    """`output` with each row's low-rank product added to it, of its size and perhaps with other axes for the tokens:

        y[i] = output[i] + scale * z[i] B[i].

    `output` is (rows, tokens, m) and `z` likewise, with s r channels for the s `parts` of the output that are adapted;
    where one `B` is for all rows, tokens may lie in any axes. Where channels come `first`, as a convolution's do, it is
    (rows, m, pixels), and all of the output is adapted.
    """
    each, scale = factors
    z = z if z.dtype == output.dtype else z.to(output.dtype)
    trains, whole = torch.is_grad_enabled(), each[0].shape[2] == output.shape[-1]
    if not first and len(each[0]) == 1:
        if trains and whole:  # takes the host, for which small models wait, the least time
            flat = output.reshape(-1, output.shape[-1])
            return torch.addmm(flat, z.reshape(-1, z.shape[-1]), each[0].squeeze(0), alpha=scale)
        output, z = (tensor.reshape(1, -1, tensor.shape[-1]) for tensor in (output, z))
    # Nothing else holds what a layer has just computed: it is written over, except where a compiler decides that.
    target = output.clone() if not trains and torch.compiler.is_compiling() else output
    if first:
        turned = each[0].mT.expand(len(output), -1, -1)
        return torch.baddbmm(output, turned, z, alpha=scale) if trains else target.baddbmm_(turned, z, alpha=scale)
    if whole:
        return torch.baddbmm(output, z, each[0], alpha=scale) if trains else target.baddbmm_(z, each[0], alpha=scale)
    return _AddParts.apply(output, z, scale, parts, *each) if trains else _add_parts(target, z, each, scale, parts)


def _add_parts(target: Tensor, z: Tensor, factors: Sequence[Tensor], scale: float, parts: Parts) -> Tensor:
    for small, (begin, end), factor in zip(z.chunk(len(parts), dim=2), parts, factors, strict=True):
        target[..., begin:end].baddbmm_(small, factor, alpha=scale)
    return target


class _AddParts(torch.autograd.Function):
    """`add_products` where parts of the output are adapted, in one copy of it; G is the gradient of y:

    dL/dz[i] = scale * G[i] B[i]^T,      dL/dB[i] = scale * z[i]^T G[i].
    """

    @staticmethod
    def forward(ctx: Any, output: Tensor, z: Tensor, scale: float, parts: Parts, *factors: Tensor) -> Tensor:
        ctx.save_for_backward(z, *factors)
        ctx.given = scale, parts
        return _add_parts(output.clone(), z, factors, scale, parts)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        z, *factors = ctx.saved_tensors
        scale, parts = ctx.given
        of_z, of_factors = None, [None] * len(factors)
        with without_autocast(gradient):
            wides = [gradient[..., begin:end] for begin, end in parts]
            if ctx.needs_input_grad[1]:
                of_z = torch.cat([_product(g, b.mT, scale) for g, b in zip(wides, factors, strict=True)], dim=2)
            if any(ctx.needs_input_grad[4:]):
                smalls = z.chunk(len(parts), dim=2)
                of_factors = [_product(s.mT, g, scale) for s, g in zip(smalls, wides, strict=True)]
        return gradient, of_z, None, None, *of_factors


def _product(left: Tensor, right: Tensor, scale: float) -> Tensor:
    """`scale left right`, each pair of matrices by itself, by one kernel."""
    if scale == 1:
        return torch.bmm(left, right)
    return torch.baddbmm(left.new_empty(()), left, right, beta=0, alpha=scale)
