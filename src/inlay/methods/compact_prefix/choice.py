"""Which keys of a prompt are kept, and for how many each stands: of all key-value heads of a layer at once, from the
products of their softmax weights alone.

P, `[n, c]`, holds one head's weights of n queries for c candidates, and b, `[n]`, what they should add up to:
`squares` is `P^T P`, `wanted` is `P^T b`, heads stacked. Nothing here waits for the device: rounds have a fixed number.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from itertools import pairwise

import torch
from torch import Tensor

ROUNDS = 600
PURSUED = 60
"""Rounds for the weights in each step of a pursuit, which begin at those of the step before."""
STEPS = 32
"""Steps of a pursuit: it takes several keys in each."""


def by_pursuit(squares: Tensor, wanted: Tensor, counts: Sequence[int]) -> list[Tensor]:
    """Of each head the candidates whose weights, each times a number of at least 0, add up best to what is wanted:
    those that correlate most with what is left, step by step (orthogonal matching pursuit)."""
    heads, candidates = wanted.shape
    size, end, width = _root(squares), on_device(counts, wanted.device), max(counts)
    unseen = squares.diagonal(dim1=1, dim2=2) == 0  # hidden keys: after those that are only of no more use
    # What one head takes and another does not goes to the last place, which nothing reads.
    taken = torch.zeros(heads, width + 1, dtype=torch.long, device=wanted.device)
    chosen = torch.zeros(heads, candidates + 1, dtype=torch.bool, device=wanted.device)
    rest, mass, have = wanted, wanted.new_zeros(heads, 0), torch.zeros_like(end)
    paces = [math.ceil(count / STEPS) for count in counts]
    for step in range(1, 1 + max(math.ceil(count / pace) for count, pace in zip(counts, paces, strict=True))):
        ranked = (rest / size).masked_fill(unseen, torch.finfo(rest.dtype).min)
        ranked = ranked.masked_fill(chosen[:, :candidates], -torch.inf)
        best = ranked.topk(max(paces)).indices
        places = have[:, None] + torch.arange(max(paces), device=wanted.device)
        have = torch.minimum(end, have + (end + STEPS - 1) // STEPS)
        more = places < have[:, None]
        taken.scatter_(1, places.where(more, width), best)
        chosen.scatter_(1, best.where(more, candidates), True)
        at = taken[:, : max(min(count, step * pace) for count, pace in zip(counts, paces, strict=True))]
        begin = torch.nn.functional.pad(mass, (0, at.shape[1] - mass.shape[1]))
        mass = weights_of(squares, wanted, at, have, begin, PURSUED)
        rest = wanted - (squares @ wanted.new_zeros(heads, candidates).scatter_add_(1, at, mass)[..., None])[..., 0]
    return [row[:count] for row, count in zip(taken, counts, strict=True)]


def on_device(counts: Sequence[int], device: torch.device) -> Tensor:
    """Small numbers, made on the device: one that is sent there waits for all that is to be done before."""
    return torch.stack([torch.full((), count, device=device) for count in counts])


def weights_of(
    squares: Tensor, wanted: Tensor, at: Tensor, have: Tensor, begin: Tensor | None = None, rounds: int = ROUNDS
) -> Tensor:
    """The weights of the candidates `at`, `[heads, t]`, of which a head has the first `have`; 0 for the others."""
    there = torch.arange(at.shape[1], device=at.device) < have[:, None]
    rows = squares.gather(1, at[..., None].expand(-1, -1, squares.shape[-1]))
    part = rows.gather(2, at[:, None].expand(-1, at.shape[1], -1))
    part = part * (there[:, None] & there[..., None])
    return non_negative(part, wanted.gather(1, at) * there, begin, rounds) * there


def non_negative(squares: Tensor, wanted: Tensor, begin: Tensor | None = None, rounds: int = ROUNDS) -> Tensor:
    """`argmin_{w >= 0} w^T G w / 2 - b^T w` of every head, by accelerated projected gradients, G scaled to a diagonal
    of 1; by default every key begins with a weight of 1, as in the prompt.

    A fit has tens of thousands of rounds of small products: on a GPU what they cost is how many kernels each has. So
    the gradient step is one product with `I - step G`, and the momentum is looked up.
    """
    size = _root(squares)[..., None]
    scaled = squares / size / size.mT
    step = 1 / scaled.abs().sum(-1).amax(-1)[:, None, None].clamp(min=1)
    onward = torch.eye(squares.shape[-1], dtype=squares.dtype, device=squares.device) - step * scaled
    target = step * wanted[..., None] / size
    found = size if begin is None else begin[..., None] * size
    ahead, momentum = found, _momentum(rounds, squares.dtype, squares.device)
    since = torch.zeros(len(squares), 1, 1, dtype=torch.long, device=squares.device)
    for _ in range(rounds):
        new = torch.baddbmm(target, onward, ahead).clamp_(min=0)
        moved = new - found
        overshot = torch.bmm((ahead - new).mT, moved) > 0  # begin the acceleration again
        since.masked_fill_(overshot, 0)
        ahead = torch.addcmul(new, momentum.take(since), moved)
        since += 1
        found = new
    return (found / size)[..., 0]


@cache
def _momentum(rounds: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """`(a_k - 1) / a_{k + 1}` after k rounds of Nesterov's sequence, `a_{k + 1} = (1 + sqrt(1 + 4 a_k^2)) / 2`."""
    paces = [1.0]
    for _ in range(rounds):
        paces.append((1 + math.sqrt(1 + 4 * paces[-1] ** 2)) / 2)
    return torch.tensor([(now - 1) / after for now, after in pairwise(paces)], dtype=dtype, device=device)


def _root(squares: Tensor) -> Tensor:
    """The root mean square weights, up to a factor."""
    return squares.diagonal(dim1=-2, dim2=-1).sqrt().clamp(min=torch.finfo(squares.dtype).tiny)
