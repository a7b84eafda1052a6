"""How far attention by Taylor polynomials can be from attention.

`rho(x) = P(x) exp(-x)` has the derivative `-x^p / p! exp(-x)`, which for even p is never positive. So for `|x| <= B`
the weight of a key is off by a factor between

    m = P(B) exp(-B) <= 1   and   M = P(-B) exp(B) >= 1.

Weights that are multiplied by factors in [m, M] and normalised again move at most `tanh(log(M / m) / 4)` of their mass:
the worst case is two groups of keys, one with each factor, of which that with M has the share
`sqrt(m) / (sqrt(m) + sqrt(M))`. Moving a mass t changes a mean of values by at most `2 t max|v|`, hence

    |out - attention| <= 2 tanh(log(M / m) / 4) max|v|,      log m <= lse - log-sum-exp <= log M.

For small B the first is about `B^(p + 1) / (p + 1)! max|v|`. A feature term with a positive denominator has the factor
1, within [m, M]: the bound holds for the whole, with its value n / D among the v. The keys of a prefix are seen by the
polynomial as well, about a mean of their own: B is then the larger of both. Rounding comes on top.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from inlay.attention.call import make_call
from inlay.attention.taylor import TaylorAttention, View
from inlay.errors import InlayError

ROWS = 256
"""Queries whose scores are held at once."""


@dataclass(frozen=True)
class TaylorBound:
    """`largest` is B, or what it is known to be at most; `error` bounds the output's, relative to the largest |v|."""

    largest: float
    error: float


def taylor_error(largest: float, order: int = 2) -> float:
    """The error of the output, relative to the largest |v|, that scores with `|x| <= largest` guarantee; at most 2."""
    _check(order)
    if not largest >= 0:
        raise InlayError(f"largest is {largest}; it must be 0 or more: the largest absolute value of a centred score.")
    try:
        top, bottom = (_polynomial(sign * largest, order) for sign in (-1, 1))
    except OverflowError:
        return 2.0
    # Never negative but by rounding, where the error is below that of float64.
    return 2 * math.tanh(max(0.0, 2 * largest + math.log(top / bottom)) / 4)


@torch.no_grad()
def taylor_bound(
    query: Tensor,
    key: Tensor,
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    order: int = 2,
    exact: bool = True,
    prefix_key: Tensor | None = None,
) -> TaylorBound:
    """What the backend of this order guarantees for these queries and keys; with `prefix_key`, as `prefix_attention`
    takes it, for both.

    B is the largest `|scale q_i . (k_j - mu_i)|` over all heads, in memory linear in the length and time as of the
    scores of attention. Without `exact` it is `scale max_i |q_i| (max_j |k_j - m| + |mu_i - m|)`, in linear time: never
    less, and for vectors in many dimensions several times more.
    """
    _check(order)
    call = make_call(query, key, key, attn_mask=attn_mask, is_causal=is_causal, scale=scale)
    if (reason := TaylorAttention(order).refuses(call)) is not None:
        raise InlayError(f"There is no bound for this call: {reason}.")
    view = View.of(
        call.query.double(), call.key.double(), call.key[..., :0].double(), call.mask, is_causal, call.scale, order
    )
    largest = _largest(view) if exact else _at_most(view)
    if prefix_key is not None:
        shared = prefix_key.unsqueeze(0) if prefix_key.dim() == 3 else prefix_key
        shared = shared.expand(query.shape[0], -1, -1, -1)
        largest = max(largest, taylor_bound(query, shared, scale=scale, order=order, exact=exact).largest)
    return TaylorBound(largest, taylor_error(largest, order))


def _largest(view: View) -> float:
    """Rows of scores, one head of keys at a time."""
    found = 0.0
    length, keys = view.query.shape[2], view.key.shape[1]
    for head in range(len(view.key)):
        for start in range(0, length, ROWS):
            here = slice(start, min(start + ROWS, length))
            on = here.stop if view.causal else keys
            x = view.query[head, :, here] @ view.key[head, :on].mT
            if view.shift is not None:
                x -= view.shift[head, :, here]
                x = x.tril(start)
            x *= view.value[head, :on, 0]
            found = max(found, float(x.abs().max()))
    return found


def _at_most(view: View) -> float:
    away = view.key.norm(dim=-1).amax(-1).reshape(-1, 1, 1)
    if view.drift is not None:
        away = away + view.drift.norm(dim=-1)
    return float((view.query.norm(dim=-1) * away).max())


def _polynomial(x: float, order: int) -> float:
    return math.fsum(x**n / math.factorial(n) for n in range(order + 1))


def _check(order: int) -> None:
    if order < 2 or order % 2:
        raise InlayError(f"order={order}: it must be even and at least 2, so that the polynomial is positive.")
