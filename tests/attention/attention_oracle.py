"""Attention by loops in float64: one query at a time, one key at a time. Slow, and plain to read."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor


def visible(mask: Tensor | None, is_causal: bool, b: int, h: int, i: int, j: int) -> Tensor | None:
    """What the mask adds to the score of query i and key j; None where j is hidden."""
    if is_causal and j > i:
        return None
    if mask is None:
        return torch.zeros((), dtype=torch.float64)
    while mask.dim() < 4:
        mask = mask.unsqueeze(0)
    place = tuple(min(at, size - 1) for at, size in zip((b, h, i, j), mask.shape, strict=True))
    found = mask[place]
    if mask.dtype == torch.bool:
        return torch.zeros((), dtype=torch.float64) if found else None
    return None if found == -math.inf else found.double()


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    prefix_key: Tensor | None = None,
    prefix_value: Tensor | None = None,
    prefix_bias: Tensor | None = None,
    phi: Callable[[Tensor], Tensor] | None = None,
    Z: Tensor | None = None,
    kappa: Tensor | None = None,
    alone: Callable[[Tensor], float] = lambda q: 1.0,
) -> tuple[Tensor, Tensor]:
    """T = (sum_j exp(s_j) v_j + phi Z) / (sum_j exp(s_j) + phi kappa) and the logarithm of its denominator; with phi, a
    query that sees no key sees one of weight `alone` and value 0."""
    batch, heads, length, size = query.shape
    groups = heads // key.shape[1]
    scale = size**-0.5 if scale is None else scale
    outputs, logs = [], []
    for b in range(batch):
        for h in range(heads):
            for i in range(length):
                q = query[b, h, i]
                seen = []
                if prefix_key is not None and prefix_value is not None:
                    own = b if prefix_key.dim() == 4 else None
                    pk = prefix_key if own is None else prefix_key[own]
                    pv = prefix_value if own is None else prefix_value[own]
                    group = h // (heads // pk.shape[0])
                    for j in range(pk.shape[1]):
                        more = q.new_zeros(())
                        if prefix_bias is not None:
                            more = (prefix_bias if own is None else prefix_bias[own])[group, j]
                        if more > -math.inf:
                            seen.append((q @ pk[group, j] * scale + more, pv[group, j]))
                for j in range(key.shape[2]):
                    added = visible(mask, is_causal, b, h, i, j)
                    if added is not None:
                        seen.append((q @ key[b, h // groups, j] * scale + added, value[b, h // groups, j]))
                most = max((float(score.detach()) for score, _ in seen), default=0.0)
                top, bottom = 0 * value[b, h // groups].sum(0), 0 * q.sum()
                for score, v in seen:
                    top = top + (score - most).exp() * v
                    bottom = bottom + (score - most).exp()
                if phi is not None and Z is not None and kappa is not None:
                    bottom = bottom if seen else bottom + alone(q)
                    top = top + math.exp(-most) * (phi(q) @ Z[h])
                    bottom = bottom + math.exp(-most) * (phi(q) @ kappa[h])
                if bottom == 0:
                    outputs.append(top)
                    logs.append(torch.tensor(-math.inf, dtype=torch.float64))
                else:
                    outputs.append(top / bottom)
                    logs.append(bottom.log() + most)
    shape = (batch, heads, length)
    return torch.stack(outputs).reshape(*shape, -1), torch.stack(logs).reshape(shape)


def gap(found: Tensor, right: Tensor) -> float:
    """The largest difference, relative to the largest entry."""
    assert found.shape == right.shape
    size = float(right.detach().abs().max()) if right.numel() else 0.0
    return float((found.detach().double() - right.detach()).abs().max()) / max(size, 1e-6) if right.numel() else 0.0
