"""How far attention reaches: from its weights and the places of its tokens to one number a head.

Two definitions. Raghu et al., NeurIPS 2021 (https://arxiv.org/abs/2108.08810): the distance between a query and the
keys, weighted by the attention. The activation-prompt paper, section 5: the distance to the one key with the largest
inner product, `sum_i |i - argmax_j <k_j, q_i>| / P`. The softmax keeps the order, so the key with the largest inner
product is the one with the largest weight (up to an additive position bias, where a model has one).
"""

from __future__ import annotations

import torch
from torch import Tensor


def grid(height: int, width: int, stride: float) -> Tensor:
    """Places of patches, row by row, in pixels: (height * width, 2)."""
    rows, columns = torch.arange(height).double() * stride, torch.arange(width).double() * stride
    return torch.cartesian_prod(rows, columns)


def line(count: int) -> Tensor:
    """Places of tokens in a text: (count, 1)."""
    return torch.arange(count).double()[:, None]


def pairwise(places: Tensor) -> Tensor:
    """Euclidean distance between every two places."""
    return (places[:, None] - places[None]).square().sum(-1).sqrt()


def weighted_distance(weights: Tensor, distances: Tensor, real: Tensor | None = None) -> Tensor:
    """The mean over queries i of what attention covers, (n, heads) from weights (n, heads, P, P):

        1/P sum_i  sum_j a_ij d_ij / sum_j a_ij.

    The division makes up for tokens that were left out (a class token, padding, prompts): `a` is what remains of each
    query's attention. `real` (n, P) says which tokens are no padding, as queries and as keys; a query with nothing
    left is not counted.
    """
    weights = _only_real(weights.double(), real)
    left = weights.sum(-1)
    counted = left > 0
    reach = (weights * distances.to(weights)).sum(-1) / torch.where(counted, left, 1.0)
    return _mean_over_queries(reach, counted, real)


def largest_distance(weights: Tensor, distances: Tensor, real: Tensor | None = None) -> Tensor:
    """The mean over queries i of the distance to the key with the largest weight, (n, heads):

        1/P sum_i d(i, argmax_j a_ij).

    Of several equal ones the nearest counts, which is what Lemma 1 needs to hold.
    """
    weights = _only_real(weights.double(), real)
    best = weights.amax(-1, keepdim=True)
    nearest = torch.where(weights == best, distances.to(weights), torch.inf).amin(-1)
    return _mean_over_queries(nearest, best[..., 0] > 0, real)


def _only_real(weights: Tensor, real: Tensor | None) -> Tensor:
    return weights if real is None else weights * real[:, None, None, :].to(weights)


def _mean_over_queries(values: Tensor, counted: Tensor, real: Tensor | None) -> Tensor:
    if real is not None:
        counted = counted & real[:, None, :].bool()
    return torch.where(counted, values, 0.0).sum(-1) / counted.sum(-1)
