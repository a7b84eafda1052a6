"""The feature term of NTK-Attention: `phi(q) [Z | kappa]`, numerator and denominator in one product."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import leaky_relu

from inlay.attention.features import Elementwise, FeatureMap
from inlay.attention.once import differentiable_once


class State(NamedTuple):
    """What stands for the prefix: `Z` `[heads, r, head_dim]`, given as `left`, or as the product of `left`
    `[heads, r, s]` and `right` `[heads, s, head_dim]`; and `kappa` `[heads, r]`, or with `signed` the rho of which it
    is the magnitude."""

    left: Tensor
    right: Tensor | None
    kappa: Tensor
    signed: bool = False

    def whole(self, dtype: torch.dtype) -> Tensor:
        """`[Z | kappa]`, `[heads, r, head_dim + 1]`."""
        left = self.left.to(dtype)
        z = left if self.right is None else left @ self.right.to(dtype)
        kappa = magnitude(self.kappa) if self.signed else self.kappa
        return torch.cat([z, kappa.to(dtype).unsqueeze(-1)], -1)


def magnitude(rho: Tensor) -> Tensor:
    """`|rho|`, with derivative +1 at 0."""
    if not torch.is_grad_enabled():
        return rho.abs()
    return leaky_relu(-rho, -1.0)  # -x up to x = 0, so that rho = 0 is on the side of slope +1


class Term(NamedTuple):
    """`product` is `[batch, heads, length, head_dim + 1]`: `phi(q) Z`, and `phi(q) kappa` in the last column."""

    product: Tensor
    log_scale: Tensor | None

    @property
    def numerator(self) -> Tensor:
        return self.product[..., :-1]

    @property
    def denominator(self) -> Tensor:
        return self.product[..., -1]


def working_type(dtype: torch.dtype) -> torch.dtype:
    """The type that sums are held in: float32 for half precision."""
    return torch.promote_types(dtype, torch.float32)


SHORT = 16
"""Queries at most that are called short: for so few the fused CUDA kernels hold in float32 what they round of many."""


def kept(query: Tensor) -> int:
    """How many float32 numbers of a row the fused CUDA kernels keep for the backward pass: the joint log-denominator
    and the weight of the feature term; and of short queries in half precision the output before it was rounded."""
    return 2 + query.shape[3] if query.shape[2] <= SHORT and query.dtype.itemsize == 2 else 2


def plain_term(features: FeatureMap, query: Tensor, state: State, scale: float) -> Term:
    """By ordinary differentiable operations."""
    dtype = working_type(query.dtype)
    phi, log_scale = features.of_query(query.to(dtype), state.kappa.shape[1], scale)
    return Term(phi @ state.whole(dtype), log_scale)


def lean_term(features: FeatureMap, query: Tensor, state: State, scale: float) -> Term:
    """The same; for maps of single coordinates nothing but the query is kept for the backward pass."""
    if isinstance(features, Elementwise):
        return Term(_ElementwiseTerm.apply(query, state.whole(working_type(query.dtype)), features, scale), None)
    return plain_term(features, query, state, scale)


class _ElementwiseTerm(torch.autograd.Function):
    """`phi(q) state` with phi computed again for the gradient: cheaper than keeping it."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, state: Tensor, features: Elementwise, scale: float) -> Tensor:
        ctx.save_for_backward(query, state)
        ctx.features, ctx.scale = features, scale
        rows = state.shape[1]
        # The norm goes into the small matrix.
        return features.raw(query.to(state.dtype), rows, scale) @ (state * features.norm(rows))

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, g_product: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        query, state = ctx.saved_tensors
        features, scale, rows = ctx.features, ctx.scale, state.shape[1]
        z = query.to(state.dtype)
        raw = features.raw(z, rows, scale)
        norm = features.norm(rows)
        g_query = g_state = None
        if ctx.needs_input_grad[1]:
            g_state = (raw.mT @ g_product).sum(0) * norm
        if ctx.needs_input_grad[0]:
            g_query = features.pull(z, raw, g_product @ (state * norm).mT, scale).to(query.dtype)
        return g_query, g_state, None, None
