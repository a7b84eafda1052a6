"""What every fused backend shares: gradients through the log-sum-exp, parts joined, features added, heads grouped.

A kernel computes attention forward and backward in memory linear in the length. Its backward pass uses the output it is
given only in `delta = sum(g_out * out)` and the log-sum-exp only in the weights `P = exp(score - lse)`:

    g_value = P^T g_out,    g_score = P * (g_out value^T - delta).

Two consequences, both exact:

- Of a sum of parts with total `T` and log-denominator `lse_T`, each part's gradients are the kernel's when it is handed
  `T` and `lse_T` in place of its own: a part's scores meet the others only through these. So NTK-Attention and prefix
  attention pay nothing for the gradient of the log-sum-exp.
- Alone, `g_lse` enters as `delta - g_lse`: one more value column of zeros with `g_out = 1` and `out = -g_lse` in it.

Dropout keeps both. It multiplies weights of the numerator by `m_j`, 0 or `1 / (1 - p)`, and leaves the log-sum-exp:

    T = sum_j m_j P_j v_j + ...,    g_value = (m P)^T g_out,    g_score = P * (m * g_out value^T - delta),

with `delta = sum(g_out * T)` as before. A kernel with dropout gives back the state of its random numbers, two tensors,
and drops the same weights when it is handed that state again.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import pad

from inlay.attention.biased import LEAST_BIAS, lift, lower, unseen
from inlay.attention.call import Call
from inlay.attention.features import FeatureMap
from inlay.attention.join import UNSEEN, finite, mix, weigh
from inlay.attention.once import differentiable_once
from inlay.attention.term import State, Term, lean_term

Attended: TypeAlias = tuple[Tensor, Tensor, Tensor | None, Tensor | None]
"""Output, log-sum-exp, and with dropout the two tensors of the random numbers' state."""


class Kernel(ABC):
    """Attention to one part of the keys, of as many heads of keys as of queries."""

    one_size: ClassVar[bool] = True
    """Values must be of the size of keys."""

    def shares_keys(self, query: Tensor, key: Tensor, mask: Tensor | None, is_causal: bool) -> bool:
        """Whether this call may also have fewer heads of keys than of queries."""
        return False

    @abstractmethod
    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        is_causal: bool,
        scale: float,
        dropout_p: float,
    ) -> Attended:
        """Output, and log-sum-exp `[batch, heads, length]` in the working type: 0 and -inf where nothing is seen; with
        dropout also the state of the random numbers."""

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
        dropout_p: float,
        seed: Tensor | None,
        offset: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of query, key and value, by the formulas above; `lse` is finite."""


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
    kernel: Kernel,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    scale: float,
    dropout_p: float = 0.0,
) -> Attended:
    layout = Layout.of(kernel, query, key, mask, is_causal)
    rows = layout.rows(query), layout.keys(key), layout.keys(value)
    out, lse, seed, offset = kernel.forward(*rows, mask, is_causal, scale, dropout_p)
    return layout.back(out), layout.back(lse), seed, offset


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
    dropout_p: float = 0.0,
    seed: Tensor | None = None,
    offset: Tensor | None = None,
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
        *(mask, is_causal, scale, dropout_p, seed, offset),
    )
    return layout.back(g_query), layout.keys_back(g_key), layout.keys_back(g_value)


def share_lost_rows(g_out: Tensor, mask: Tensor | None, is_causal: bool, total: Tensor, share: Tensor | None) -> Tensor:
    """The gradient as kernels must be handed it where a mask adds numbers so negative that a query's scores are lost.

    A query whose n keys all got the most negative number of a type weighs them alike, by `share / n`; but neither that
    nor the scores can be told from `score - total`, for which a kernel's weight is 1. Its gradients are linear in g_out
    and in the weight: the factor goes to g_out. `share` is the keys' part of the whole, None for all of it. With a
    feature term the gradients of query and key are approximate there: the kernel takes T for the keys' own mean.
    """
    if mask is None or mask.dtype == torch.bool:
        return g_out
    lost = (total < UNSEEN) & (total > -torch.inf) & (total.abs() * torch.finfo(total.dtype).eps > 0.25)
    low = (mask < UNSEEN) & (mask > -torch.inf)
    if not is_causal:
        count = low.sum(-1)
    elif mask.shape[2] == 1:
        seen = low.squeeze(2).cumsum(-1)
        count = seen[..., torch.arange(total.shape[2], device=seen.device).clamp(max=seen.shape[-1] - 1)]
    else:
        count = low.tril().sum(-1)
    factor = count.clamp(min=1).reciprocal() if share is None else share / count.clamp(min=1)
    return torch.where(lost.unsqueeze(-1), g_out * factor.unsqueeze(-1).to(g_out.dtype), g_out)


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
        dropout_p: float,
    ) -> tuple[Tensor, Tensor]:
        out, lse, *state = forward_part(kernel, query, key, value, mask, is_causal, scale, dropout_p)
        ctx.save_for_backward(query, key, value, mask, out, lse, *state)
        ctx.kernel, ctx.is_causal, ctx.scale, ctx.dropout_p = kernel, is_causal, scale, dropout_p
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, g_out: Tensor | None, g_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        query, key, value, mask, out, lse, *state = ctx.saved_tensors
        none = (None,) * 4
        if g_out is None and g_lse is None:
            return None, None, None, None, *none
        how = mask, ctx.is_causal, ctx.scale
        if g_out is not None:
            g_out = share_lost_rows(g_out, mask, ctx.is_causal, lse, None)
        lse = finite(lse)
        if g_lse is not None and ctx.dropout_p:
            of_lse = _of_lse(ctx.kernel, g_lse, query, key, lse, *how)
            if g_out is None:
                return None, *of_lse, None, *none
            given = g_out, query, key, value, out, lse, *how, ctx.dropout_p, *state
            g_query, g_key, g_value = backward_part(ctx.kernel, *given)
            return None, g_query + of_lse[0], g_key + of_lse[1], g_value, *none
        if g_out is None:
            g_out = torch.zeros_like(out)
        if g_lse is not None:
            value = pad(value, (0, 1))
            if ctx.kernel.one_size:
                query, key = pad(query, (0, 1)), pad(key, (0, 1))
            g_out = pad(g_out, (0, 1), value=1.0)
            out = torch.cat([out, -g_lse.unsqueeze(-1).to(out.dtype)], -1)
        given = g_out, query, key, value, out, lse, *how, ctx.dropout_p, *state
        g_query, g_key, g_value = backward_part(ctx.kernel, *given)
        if g_lse is not None:
            g_value = g_value[..., :-1]
            if ctx.kernel.one_size:
                g_query, g_key = g_query[..., :-1], g_key[..., :-1]
        return None, g_query, g_key, g_value, *none


def _of_lse(
    kernel: Kernel,
    g_lse: Tensor,
    query: Tensor,
    key: Tensor,
    lse: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """What `g_lse` adds to the gradients of query and key where weights are dropped: another head size, as one more
    value column would make it, may drop others. With P not dropped,

        g_score = P g_lse:    g_query = scale g_lse P key,    g_key = scale P^T (g_lse query).
    """
    weight = (g_lse * scale).unsqueeze(-1)
    through = forward_part(kernel, query, key, key, mask, is_causal, scale)[0]
    g_out = (weight * query).to(query.dtype)
    g_key = backward_part(kernel, g_out, query, key, key, torch.zeros_like(query), lse, mask, is_causal, scale)[2]
    return (weight * through).to(query.dtype), g_key


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
        dropout_p: float,
        prefix_key: Tensor | None,
        prefix_value: Tensor | None,
        prefix_bias: Tensor | None,
        product: Tensor | None,
        log_scale: Tensor | None,
    ) -> Tensor:
        out, lse, *state = forward_part(kernel, query, key, value, mask, is_causal, scale, dropout_p)
        outputs, lses, of_prefix = [out], [lse], [None, None]
        if prefix_key is not None and prefix_value is not None:
            lifted = lift(query, prefix_key, prefix_value, prefix_bias, scale)
            out, lse, *of_prefix = forward_part(kernel, *lifted, None, False, scale, dropout_p)
            if prefix_bias is not None:
                out, lse = out[..., : prefix_value.shape[-1]], unseen(lse)
            outputs.append(out)
            lses.append(lse)
        term = None if product is None else Term(product, log_scale)
        weights = weigh(lses, term and term.denominator, log_scale)
        found = mix(outputs, weights, term and term.numerator, query.dtype)
        sums = found, weights.total, weights.feature
        prefix = prefix_key, prefix_value, prefix_bias
        ctx.save_for_backward(query, key, value, mask, *prefix, *sums, *state, *of_prefix)
        ctx.kernel, ctx.is_causal, ctx.scale, ctx.dropout_p = kernel, is_causal, scale, dropout_p
        return found

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, g_out: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, mask, prefix_key, prefix_value, prefix_bias, *rest = ctx.saved_tensors
        found, total, feature, *states = rest
        needs = ctx.needs_input_grad
        g_query = g_key = g_value = g_product = None
        g_prefix_key = g_prefix_value = g_prefix_bias = None
        if any(needs[1:4]):
            # For a query that sees no key the features weigh as much as the keys: see join.py.
            g_keys = share_lost_rows(g_out, mask, ctx.is_causal, total, feature)
            how = mask, ctx.is_causal, ctx.scale, ctx.dropout_p, *states[:2]
            g_query, g_key, g_value = backward_part(ctx.kernel, g_keys, query, key, value, found, finite(total), *how)
        total = finite(total)
        if prefix_key is not None and (needs[1] or any(needs[8:11])):
            lifted = lift(query, prefix_key, prefix_value, prefix_bias, ctx.scale)
            more = lifted[0].shape[-1] - query.shape[-1]
            wide = (pad(g_out, (0, more)), *lifted, pad(found, (0, more))) if more else (g_out, *lifted, found)
            # A query may see nothing but keys of the most negative number, and no prefix: exp(score - total) is then 0.
            whole = total if prefix_bias is None else total.clamp(min=LEAST_BIAS / 2)
            how = whole, None, False, ctx.scale, ctx.dropout_p, *states[2:]
            grads = backward_part(ctx.kernel, *wide, *how)
            g_more, g_prefix_key, g_prefix_value, g_prefix_bias = lower(grads, query.shape[-1], prefix_bias, ctx.scale)
            g_query = g_more if g_query is None else g_query + g_more
        if feature is not None and needs[11]:
            # T = ... + feature n,  dT/dD = -feature T
            g = g_out.to(feature.dtype)
            delta = (g * found).sum(-1, keepdim=True)
            g_product = torch.cat([g, -delta], -1).mul_(feature.unsqueeze(-1))
        return None, g_query, g_key, g_value, *(None,) * 4, g_prefix_key, g_prefix_value, g_prefix_bias, g_product, None


class Fused(ABC):
    """A backend made of one kernel."""

    name: str
    kernel: Kernel

    @abstractmethod
    def refuses(self, call: Call) -> str | None:
        """Why the kernel cannot do this; None if it can."""

    def with_lse(self, call: Call) -> tuple[Tensor, Tensor]:
        how = call.mask, call.is_causal, call.scale, call.dropout_p
        found: tuple[Tensor, Tensor] = _WithLse.apply(self.kernel, call.query, call.key, call.value, *how)
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
            call.dropout_p,
            call.prefix and call.prefix.key,
            call.prefix and call.prefix.value,
            call.prefix and call.prefix.bias,
            term and term.product,
            term and term.log_scale,
        )
        return found
