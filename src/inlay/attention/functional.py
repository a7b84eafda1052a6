"""Attention with its log-sum-exp, NTK-Attention and exact prefix attention (NTK-Attention, Algorithms 1 and 2)."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeAlias

import torch
from torch import Tensor

from inlay.attention.backends import Backend, choose
from inlay.attention.call import Call, autocasts, lowered, make_call, transformed, without_autocast
from inlay.attention.features import FeatureMap
from inlay.attention.features import feature_map as find_map
from inlay.attention.term import State
from inlay.errors import InlayError


def attention_with_lse(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    dropout_p: float = 0.0,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """`softmax(s) v` and `log sum exp(s)` with `s = scale q k^T + mask`, both differentiable.

    query `[batch, heads, length, d]`, key and value `[batch, kv_heads, keys, d]`, heads a multiple of kv_heads. The
    first result has the query's type, the second (`[batch, heads, length]`) at least float32. A query that may see no
    key gets 0 and -inf. Dropout acts on the softmax, not on the log-sum-exp. `backend` names one of `BACKENDS`; by
    default an exact one is chosen. `taylor` and `taylor-4` are approximate, and linear in the length (taylor.py).
    """
    call = make_call(query, key, value, attn_mask=attn_mask, is_causal=is_causal, scale=scale, dropout_p=dropout_p)
    with without_autocast(query):
        return choose(backend, call).with_lse(call)


def ntk_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    Z: Tensor | tuple[Tensor, Tensor],
    kappa: Tensor,
    *,
    feature_map: str | FeatureMap = "elu",
    scale: float | None = None,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    dropout_p: float = 0.0,
    signed: bool = False,
    backend: str | None = None,
) -> Tensor:
    """NTK-Attention (Algorithm 2), differentiable in every tensor:

        T = (exp(scale q k^T) v + phi(q) Z) / (exp(scale q k^T) 1 + phi(q) kappa)

    Z is `[heads, r, head_dim]` or the pair `(Z_A [heads, r, s], Z_B [heads, s, head_dim])` of which it is the product;
    kappa is `[heads, r]` and must not be negative (with `taylor`: must come from Eq. (4)), which is looked at on a CPU;
    or, with `signed`, the rho of which it is the absolute value, taken with derivative +1 at 0. Mask, causality and
    dropout concern the keys alone. It is computed in log space: finite for scores of any size, for queries that may
    see no key (they get `phi Z / (1 + phi kappa)`; join.py says why) and for kappa = 0.
    """
    features = find_map(feature_map) if isinstance(feature_map, str) else feature_map
    left, right = (Z, None) if isinstance(Z, Tensor) else Z
    casts = autocasts(query)
    if casts:
        query, key, value = lowered(query, key, value)
    how = attn_mask, is_causal, None if scale is None else float(scale), dropout_p
    state = State(left, right, kappa, signed)
    choose_for = _chosen if torch.compiler.is_compiling() or transformed() else _chosen_once
    chosen, call = choose_for(backend, query, key, value, how, features, state)
    if kappa.device.type == "cpu" and features.positive and not signed:
        _refuse_negative(kappa)
    with without_autocast(query) if casts else _AS_IS:
        return chosen.joined(call, features, state)


Scoring: TypeAlias = tuple[Tensor | None, bool, float | None, float]
"""attn_mask, is_causal, scale and dropout_p, as a caller gave them."""
_AS_IS: AbstractContextManager[None] = nullcontext()
_KNOWN: dict[tuple[Any, ...], tuple[Backend, float]] = {}
MOST_KNOWN = 4096


def _chosen(
    name: str | None, query: Tensor, key: Tensor, value: Tensor, how: Scoring, features: FeatureMap, state: State
) -> tuple[Backend, Call]:
    """Everything checked against each other, and the backend for it."""
    mask, is_causal, scale, dropout_p = how
    call = make_call(query, key, value, attn_mask=mask, is_causal=is_causal, scale=scale, dropout_p=dropout_p)
    _check_state(state, call.query, call.value)
    find_map(features).check(state.kappa.shape[1], query.shape[-1])
    return choose(name, call), call


def _chosen_once(
    name: str | None, query: Tensor, key: Tensor, value: Tensor, how: Scoring, features: FeatureMap, state: State
) -> tuple[Backend, Call]:
    """The same, done once for equal calls: a small model, or one token of a large one, waits for the host."""
    mask, is_causal, scale, dropout_p = how
    left, right, kappa, _ = state
    if type(features).__hash__ is None:
        return _chosen(name, query, key, value, how, features, state)
    signature = (
        *(query.shape, key.shape, value.shape, left.shape, kappa.shape, None if right is None else right.shape),
        *(query.dtype, key.dtype, value.dtype, query.device, key.device, value.device),
        *(None if mask is None else (mask.shape, mask.dtype, mask.requires_grad), type(features), hash(features)),
        *(is_causal, scale, dropout_p, name),
    )
    known = _KNOWN.get(signature)
    if known is None:
        chosen, call = _chosen(name, query, key, value, how, features, state)
        if len(_KNOWN) >= MOST_KNOWN:
            _KNOWN.clear()
        _KNOWN[signature] = chosen, call.scale
        return chosen, call
    if mask is not None and mask.dim() < 4:
        mask = mask.reshape((1,) * (4 - mask.dim()) + tuple(mask.shape))
    return known[0], Call(query, key, value, mask, is_causal, known[1], dropout_p)


def prefix_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    prefix_key: Tensor,
    prefix_value: Tensor,
    *,
    prefix_bias: Tensor | None = None,
    scale: float | None = None,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    dropout_p: float = 0.0,
    backend: str | None = None,
) -> Tensor:
    """Prefix attention (Algorithm 1), exact: attention over the prefix's keys and the text's.

    prefix_key and prefix_value are `[kv_heads, m, head_dim]`, shared by the batch, or `[batch, kv_heads, m, head_dim]`.
    Every query sees the whole prefix; mask and causality concern the text. Prefix and text are attended to apart and
    joined by their log-sum-exps, so that neither is copied. The time is linear in m.

    prefix_bias, `[kv_heads, m]` or `[batch, kv_heads, m]`, is added to the prefix's scores: key j counts as
    `exp(prefix_bias_j)` keys. A bias of `LEAST_BIAS` (-10,000) or less, -inf included, hides a key: prefixes of
    different lengths are filled up to one length so.
    """
    call = make_call(
        query,
        key,
        value,
        attn_mask=attn_mask,
        is_causal=is_causal,
        scale=scale,
        dropout_p=dropout_p,
        prefix_key=prefix_key,
        prefix_value=prefix_value,
        prefix_bias=prefix_bias,
    )
    with without_autocast(query):
        return choose(backend, call).joined(call, None, None)


def _check_state(state: State, query: Tensor, value: Tensor) -> None:
    """Z and kappa against the query and the value."""
    left, right, kappa, _ = state
    heads, size = query.shape[1], value.shape[-1]
    if kappa.dim() != 2 or kappa.shape[0] != heads:
        raise InlayError(f"kappa has shape {list(kappa.shape)}; it must be [heads, r] with {heads} heads.")
    rows = kappa.shape[1]
    if right is not None and (left.dim() != 3 or right.dim() != 3 or left.shape[2] != right.shape[1]):
        raise InlayError(
            f"Z_A and Z_B have shapes {list(left.shape)} and {list(right.shape)}; they must be [heads, r, s] and "
            "[heads, s, head_dim] with one s."
        )
    found = left.shape if right is None else (*left.shape[:2], right.shape[2])
    if found != (heads, rows, size) or (right is not None and right.shape[0] != heads):
        raise InlayError(
            f"Z is {list(found)}; with this query, value and kappa it must be [heads, r, head_dim] = "
            f"{[heads, rows, size]}."
        )


def _refuse_negative(kappa: Tensor) -> None:
    """Elsewhere than on a CPU looking would wait for the device, and inside a compiled graph break it."""
    if not torch.compiler.is_compiling() and not bool((kappa.detach() >= 0).all()):
        raise InlayError(
            f"kappa has values below 0 or NaN (the least is {float(kappa.detach().min()):g}): the softmax could divide "
            "by 0. Give its absolute value, or rho with signed=True."
        )
