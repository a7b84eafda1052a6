"""One softmax made of several sums: what attention kernels return, and what NTK-Attention adds.

Each part i of the keys, attended to by itself, gives an output `o_i` and a log-sum-exp `a_i`. With the feature term
`n = phi(q) Z` and `D = phi(q) kappa` (NTK-Attention, Algorithm 2) the whole is

    T = (sum_i exp(a_i) o_i + n) / (sum_i exp(a_i) + D).

A query that sees no key has no sum of its own, and `n / D` would have a gradient of `1 / D`, which at the start of
training (`n = D = 0`) is no number. It is treated as if it saw one key of weight 1 and of the value `o` that the kernel
gave for it: 0, or the mean of all values where a mask adds a large negative number instead of -inf, as in the base:

    T = (o + n) / (1 + D).

Nothing then weighs more than for a query whose keys sum to 1. With n = D = 0 it is the base's output, and of a long
prefix, for which D is large, the limit `n / D`. Where features come with a factor `exp(c)` above 1, that key weighs as
much: `T = (exp(c) o + n) / (exp(c) + D)`.

Appendix F's listing multiplies by `(exp(a) + D) / exp(a)` where it must divide; this is the formula of Algorithm 2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

LIGHTEST = -40.0
"""Keys never weigh less than exp(-40) against a feature of 1, so that a weight and its square (the gradient of kappa)
can be held in float32. It shows only where all of a query's scores and log(phi kappa) are below -20 or so; with
kappa = 0 and Z = 0 the output is still the keys' alone."""

UNSEEN = -3e4
"""A log-sum-exp below this is a mask's doing: one adds the most negative number of its type, in float16 -65504."""

LEAST_TOTAL = 1e-6
"""What is left of the denominator, relative to the keys' share, where negative features (`taylor`) would eat it up."""


@dataclass(frozen=True)
class Weights:
    """`T = sum_i parts[i] o_i + feature n`; every tensor is `[batch, heads, length]`.

    `total` is the logarithm of the whole denominator, -inf where there is nothing to attend to.
    """

    parts: list[Tensor]
    feature: Tensor | None
    total: Tensor


def weigh(lses: Sequence[Tensor], denominator: Tensor | None, log_scale: Tensor | None) -> Weights:
    """The weights of the parts and of the feature term, without ever taking exp of a large number.

    With `a` the log-sum-exp over all parts, `exp(c)` the factor of the features and `t = exp(c - a)`:
    `exp(a) / (exp(a) + exp(c) D) = 1 / (1 + t D)`, and the feature term weighs `t / (1 + t D)`. For a query that sees
    no key `t = exp(min(c, 0))`.
    """
    keys, shares = _shares(lses)
    if denominator is None:
        return Weights(shares or [torch.ones_like(keys)], None, keys)
    factor = -keys.masked_fill(keys < UNSEEN, 0)
    if log_scale is not None:
        factor = factor + torch.where(keys < UNSEEN, log_scale.clamp(max=0), log_scale)
    t = factor.clamp(max=-LIGHTEST).exp()
    whole = torch.addcmul(torch.ones_like(t), t, denominator).clamp(min=LEAST_TOTAL)
    of_keys = whole.reciprocal()
    # t / whole, not t * of_keys: the gradient of the second would square of_keys, which may be as small as exp(-40).
    return Weights([of_keys * share for share in shares] or [of_keys], t / whole, keys + whole.log())


def _shares(lses: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """The log-sum-exp of all parts and each one's share of it; no shares where there is one part only."""
    if len(lses) == 1:
        return lses[0], []
    stacked = torch.stack(list(lses))
    most = finite(stacked.detach().amax(0))
    weights = (stacked - most).exp()
    whole = weights.sum(0)
    nothing = whole == 0  # every part is masked for this query
    safe = whole.masked_fill(nothing, 1)
    keys = (most + safe.log()).masked_fill(nothing, -torch.inf)
    return keys, list(weights / safe)


def finite(lse: Tensor) -> Tensor:
    """0 in place of -inf: for a shift, or for exp(score - lse) where every score is -inf."""
    return lse.masked_fill(lse == -torch.inf, 0)


def mix(outputs: Sequence[Tensor], weights: Weights, numerator: Tensor | None, dtype: torch.dtype) -> Tensor:
    """T, in this type; no number is too large for it."""
    found: Tensor | None = None
    for output, weight in zip(outputs, weights.parts, strict=True):
        part = output * weight.unsqueeze(-1)
        found = part if found is None else found + part
    assert found is not None
    if numerator is not None and weights.feature is not None:
        found.addcmul_(weights.feature.unsqueeze(-1), numerator)  # found is ours, and nobody's gradient needs it
    if dtype == torch.float16:  # an infinity would become NaN at the first mask that multiplies it by 0
        most = torch.finfo(dtype).max
        found = found.clamp(-most, most)
    return found.to(dtype)
