"""Attention with its log-sum-exp, NTK-Attention and exact prefix attention (NTK-Attention, Algorithms 1 and 2)."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from inlay.attention.backends import choose
from inlay.attention.call import autocasts, make_call
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
    key gets 0 and -inf. Dropout acts on the softmax, not on the log-sum-exp.
    """
    call = make_call(query, key, value, attn_mask=attn_mask, is_causal=is_causal, scale=scale, dropout_p=dropout_p)
    with _full_precision(query):
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
    call = make_call(query, key, value, attn_mask=attn_mask, is_causal=is_causal, scale=scale, dropout_p=dropout_p)
    features = find_map(feature_map)
    with _full_precision(query):
        state = _state(Z, kappa, signed, call.query, call.value, features.positive)
        features.check(kappa.shape[1], query.shape[-1])
        return choose(backend, call).joined(call, features, state)


def prefix_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    prefix_key: Tensor,
    prefix_value: Tensor,
    *,
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
    )
    with _full_precision(query):
        return choose(backend, call).joined(call, None, None)


def _full_precision(query: Tensor) -> AbstractContextManager[object]:
    """Our own products stay in the type we chose; `make_call` has already cast what autocast would have."""
    if not autocasts(query):
        return nullcontext()
    device = query.device.type
    return torch.autocast(device, enabled=False) if torch.compiler.is_compiling() else _WithoutAutocast(device)


class _WithoutAutocast(AbstractContextManager[None]):
    """As `torch.autocast(device, enabled=False)` inside an enabled one, at a tenth of its cost."""

    def __init__(self, device: str) -> None:
        self.device = device

    def __enter__(self) -> None:
        torch.set_autocast_enabled(self.device, False)

    def __exit__(self, *error: object) -> None:
        torch.set_autocast_enabled(self.device, True)


def _state(
    Z: Tensor | tuple[Tensor, Tensor], kappa: Tensor, signed: bool, query: Tensor, value: Tensor, positive: bool
) -> State:
    """Z and kappa, checked against the query and the value, and with positive features against 0."""
    heads, size = query.shape[1], value.shape[-1]
    if kappa.dim() != 2 or kappa.shape[0] != heads:
        raise InlayError(f"kappa has shape {list(kappa.shape)}; it must be [heads, r] with {heads} heads.")
    rows = kappa.shape[1]
    left, right = (Z, None) if isinstance(Z, Tensor) else Z
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
    # Elsewhere looking would wait for the device, and inside a compiled graph break it.
    on_cpu = kappa.device.type == "cpu" and not torch.compiler.is_compiling()
    if positive and not signed and on_cpu and not bool((kappa.detach() >= 0).all()):
        raise InlayError(
            f"kappa has values below 0 or NaN (the least is {float(kappa.detach().min()):g}): the softmax could divide "
            "by 0. Give its absolute value, or rho with signed=True."
        )
    return State(left, right, kappa, signed)
