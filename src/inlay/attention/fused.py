"""What every fused backend shares: gradients through the log-sum-exp, parts joined, features added, heads grouped.

A kernel computes attention forward and backward in memory linear in the length. Its backward pass uses the output it is
given only in `delta = sum(g_out * out)` and the log-sum-exp only in the weights `P = exp(score - lse)`:

    g_value = P^T g_out,    g_score = P * (g_out value^T - delta).

Two consequences, both exact:

- Of a sum of parts with total `T` and log-denominator `lse_T`, each part's gradients are the kernel's when it is handed
  `T` and `lse_T` in place of its own: a part's scores meet the others only through these. So NTK-Attention and prefix
  attention pay nothing for the gradient of the log-sum-exp.
- Alone, `g_lse` enters as `delta - g_lse`: one more value column of zeros with `g_out = 1` and `out = -g_lse` in it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

from inlay.attention.call import Call
from inlay.attention.features import FeatureMap
from inlay.attention.join import finite, mix, weigh
from inlay.attention.term import State, Term, lean_term


class Kernel(ABC):
    """Attention to one part of the keys, of as many heads of keys as of queries."""

    def shares_keys(self, query: Tensor, key: Tensor, mask: Tensor | None, is_causal: bool) -> bool:
        """Whether this call may also have fewer heads of keys than of queries."""
        return False

    @abstractmethod
    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Output, and log-sum-exp `[batch, heads, length]` in the working type: 0 and -inf where nothing is seen."""

    @abstractmethod
    def backward(
        self,
        g_out: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        lse: Tensor,
        mask: Tensor | None,
        is_causal: bool,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of query, key and value, by the two formulas above; `lse` is finite."""


@dataclass(frozen=True)
class Layout:
    """How queries of several heads, or of several examples, meet keys that they share.

    Where no mask tells rows apart, queries of the same keys become rows of one head (`"groups"`), and those of all
    examples for a prefix shared by the batch (`"batch"`): the keys are never copied. Nor are they for a kernel that
    shares them itself. Otherwise keys are repeated.
    """

    fold: str
    batch: int
    kv_heads: int
    groups: int
    length: int
    repeats: bool

    @classmethod
    def of(cls, kernel: Kernel, query: Tensor, key: Tensor, mask: Tensor | None, is_causal: bool) -> Layout:
        batch, heads, length, _ = query.shape
        groups = heads // key.shape[1]
        rows_alike = not is_causal and (mask is None or mask.shape[1] == mask.shape[2] == 1)
        shared = groups == 1 or kernel.shares_keys(query, key, mask, is_causal)
        fold = "batch" if key.shape[0] < batch else "groups" if rows_alike and not shared else "none"
        return cls(fold, batch, key.shape[1], groups, length, fold == "none" and not shared)

    def rows(self, x: Tensor) -> Tensor:
        """`[batch, heads, length, ...]` as the kernel sees it."""
        if self.fold == "groups":
            return x.reshape(self.batch, self.kv_heads, self.groups * self.length, *x.shape[3:])
        if self.fold == "batch":
            parted = x.reshape(self.batch, self.kv_heads, self.groups, self.length, *x.shape[3:]).transpose(0, 1)
            return parted.reshape(1, self.kv_heads, self.batch * self.groups * self.length, *x.shape[3:])
        return x

    def back(self, x: Tensor) -> Tensor:
        """The inverse of `rows`."""
        if self.fold == "none":
            return x
        if self.fold == "batch":
            x = x.reshape(self.kv_heads, self.batch, self.groups * self.length, *x.shape[3:]).transpose(0, 1)
        return x.reshape(self.batch, self.kv_heads * self.groups, self.length, *x.shape[3:])

    def keys(self, x: Tensor) -> Tensor:
        return x.repeat_interleave(self.groups, 1) if self.repeats else x

    def keys_back(self, g: Tensor) -> Tensor:
        return g.unflatten(1, (self.kv_heads, self.groups)).sum(2) if self.repeats else g


def forward_part(
    kernel: Kernel, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    layout = Layout.of(kernel, query, key, mask, is_causal)
    out, lse = kernel.forward(layout.rows(query), layout.keys(key), layout.keys(value), mask, is_causal, scale)
    return layout.back(out), layout.back(lse)


def backward_part(
    kernel: Kernel,
    g_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """`lse` is finite."""
    layout = Layout.of(kernel, query, key, mask, is_causal)
    g_query, g_key, g_value = kernel.backward(
        layout.rows(g_out),
        layout.rows(query),
        layout.keys(key),
        layout.keys(value),
        layout.rows(out),
        layout.rows(lse),
        mask,
        is_causal,
        scale,
    )
    return layout.back(g_query), layout.keys_back(g_key), layout.keys_back(g_value)


class _WithLse(torch.autograd.Function):
    """Output and log-sum-exp, both with their gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        kernel: Kernel,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        is_causal: bool,
        scale: float,
    ) -> tuple[Tensor, Tensor]:
        out, lse = forward_part(kernel, query, key, value, mask, is_causal, scale)
        ctx.save_for_backward(query, key, value, mask, out, lse)
        ctx.kernel, ctx.is_causal, ctx.scale = kernel, is_causal, scale
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g_out: Tensor | None, g_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        query, key, value, mask, out, lse = ctx.saved_tensors
        if g_out is None and g_lse is None:
            return (None,) * 7
        if g_out is None:
            g_out = torch.zeros_like(out)
        if g_lse is not None:
            query, key, value = (pad(x, (0, 1)) for x in (query, key, value))
            g_out = pad(g_out, (0, 1), value=1.0)
            out = torch.cat([out, -g_lse.unsqueeze(-1).to(out.dtype)], -1)
        g_query, g_key, g_value = backward_part(
            ctx.kernel, g_out, query, key, value, out, finite(lse), mask, ctx.is_causal, ctx.scale
        )
        if g_lse is not None:
            g_query, g_key, g_value = (g[..., :-1] for g in (g_query, g_key, g_value))
        return None, g_query, g_key, g_value, None, None, None


class _Joined(torch.autograd.Function):
    """`T` of join.py: keys, perhaps a prefix, perhaps a feature term."""

    @staticmethod
    def forward(
        ctx: Any,
        kernel: Kernel,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        is_causal: bool,
        scale: float,
        prefix_key: Tensor | None,
        prefix_value: Tensor | None,
        product: Tensor | None,
        log_scale: Tensor | None,
    ) -> Tensor:
        parts = [forward_part(kernel, query, key, value, mask, is_causal, scale)]
        if prefix_key is not None and prefix_value is not None:
            parts.append(forward_part(kernel, query, prefix_key, prefix_value, None, False, scale))
        outputs, lses = zip(*parts, strict=True)
        term = None if product is None else Term(product, log_scale)
        weights = weigh(lses, term and term.denominator, log_scale)
        found = mix(outputs, weights, term and term.numerator, query.dtype)
        ctx.save_for_backward(query, key, value, mask, prefix_key, prefix_value, found, weights.total, weights.feature)
        ctx.kernel, ctx.is_causal, ctx.scale = kernel, is_causal, scale
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g_out: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, mask, prefix_key, prefix_value, found, total, feature = ctx.saved_tensors
        needs = ctx.needs_input_grad
        g_query = g_key = g_value = g_prefix_key = g_prefix_value = g_product = None
        total = finite(total)
        if any(needs[1:4]):
            g_query, g_key, g_value = backward_part(
                ctx.kernel, g_out, query, key, value, found, total, mask, ctx.is_causal, ctx.scale
            )
        if prefix_key is not None and (needs[1] or any(needs[7:9])):
            g_more, g_prefix_key, g_prefix_value = backward_part(
                ctx.kernel, g_out, query, prefix_key, prefix_value, found, total, None, False, ctx.scale
            )
            g_query = g_more if g_query is None else g_query + g_more
        if feature is not None and needs[9]:
            # T = ... + feature n,  dT/dD = -feature T
            g = g_out.to(feature.dtype)
            delta = (g * found).sum(-1, keepdim=True)
            g_product = torch.cat([g, -delta], -1).mul_(feature.unsqueeze(-1))
        return None, g_query, g_key, g_value, None, None, None, g_prefix_key, g_prefix_value, g_product, None


class Fused(ABC):
    """A backend made of one kernel."""

    name: str
    kernel: Kernel

    @abstractmethod
    def refuses(self, call: Call) -> str | None:
        """Why the kernel cannot do this; None if it can."""

    def with_lse(self, call: Call) -> tuple[Tensor, Tensor]:
        found: tuple[Tensor, Tensor] = _WithLse.apply(
            self.kernel, call.query, call.key, call.value, call.mask, call.is_causal, call.scale
        )
        return found

    def joined(self, call: Call, features: FeatureMap | None, state: State | None) -> Tensor:
        term = None
        if features is not None and state is not None:
            term = lean_term(features, call.query, state, call.scale)
        found: Tensor = _Joined.apply(
            self.kernel,
            call.query,
            call.key,
            call.value,
            call.mask,
            call.is_causal,
            call.scale,
            call.prefix and call.prefix.key,
            call.prefix and call.prefix.value,
            term and term.product,
            term and term.log_scale,
        )
        return found
