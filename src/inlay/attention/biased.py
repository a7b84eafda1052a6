"""A bias for every key of a prefix, in kernels that know none: one more channel of queries and keys.

    scale [q, c] . [k_j, b_j / (scale c)] = scale q . k_j + b_j

So the kernel stays what it is, forward and backward, and the gradient of b_j is that of the key's last channel, divided
by `scale c`. Here c is the power of two nearest to `1 / scale`, which every type holds exactly. Half precision has too
few digits for a bias: there a second channel holds the rest of it. Values are filled up with zeros, since kernels want
keys and values of one size.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import pad

LEAST_BIAS = -1e4
"""A key with this bias, or less, weighs nothing: exp(-10,000) is 0 in every type."""


def hiding(bias: Tensor) -> Tensor:
    """-inf where a key is hidden."""
    return bias.masked_fill(bias <= LEAST_BIAS, -torch.inf)


def unseen(lse: Tensor) -> Tensor:
    """The log-sum-exp of a prefix, -inf for a query from which all of it is hidden: no scores are that small."""
    return lse.masked_fill(lse < LEAST_BIAS / 2, -torch.inf)


def lift(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value with channels for the bias; as they are where there is none."""
    if bias is None:
        return query, key, value
    ones, unit = _unit(scale)
    # Finite, also where a key is hidden by -inf: 0 times infinity would be no number.
    wanted = bias.to(torch.promote_types(bias.dtype, torch.float32)).clamp(min=LEAST_BIAS) / unit
    columns = [wanted.to(query.dtype)]
    if query.dtype.itemsize == 2:
        columns.append((wanted - columns[0]).to(query.dtype))
    more = len(columns)
    return (
        pad(query, (0, more), value=ones),
        torch.cat([key, torch.stack(columns, -1).expand(*key.shape[:3], more)], -1),
        pad(value, (0, more)),
    )


def lower(
    grads: tuple[Tensor, Tensor, Tensor], size: int, bias: Tensor | None, scale: float
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """The gradients of query, key, value and bias, from those of what `lift` gave."""
    g_query, g_key, g_value = grads
    if bias is None:
        return g_query, g_key, g_value, None
    g_bias = (g_key[..., size].to(torch.promote_types(bias.dtype, torch.float32)) / _unit(scale)[1]).to(bias.dtype)
    g_bias = g_bias.masked_fill(bias <= LEAST_BIAS, 0)
    return g_query[..., :size], g_key[..., :size], g_value[..., :size], g_bias


def _unit(scale: float) -> tuple[float, float]:
    """c, and `scale c`, which lies between 0.7 and 1.5."""
    ones = 2.0 ** -round(math.log2(scale))
    return ones, scale * ones
