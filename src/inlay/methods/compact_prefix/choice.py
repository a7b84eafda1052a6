"""Which keys of a prompt are kept, and for how many each stands: of all key-value heads of a layer at once, from the
products of their softmax weights alone.

P, `[n, c]`, holds one head's weights of n queries for c candidates, and b, `[n]`, what they should add up to:
`squares` is `P^T P`, `wanted` is `P^T b`, heads stacked. Nothing here waits for the device: rounds have a fixed number.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

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
    size = _root(squares)
    unseen = squares.diagonal(dim1=1, dim2=2) == 0  # hidden keys: after those that are only of no more use
    taken = torch.zeros(heads, max(counts), dtype=torch.long, device=wanted.device)
    chosen = torch.zeros(heads, candidates, dtype=torch.bool, device=wanted.device)
    mass = wanted.new_zeros(heads, 0)
    rest, have = wanted, [0] * heads
    while have != list(counts):
        more = [min(math.ceil(count / STEPS), count - got) for count, got in zip(counts, have, strict=True)]
        ranked = (rest / size).masked_fill(unseen, torch.finfo(rest.dtype).min).masked_fill(chosen, -torch.inf)
        best = ranked.topk(max(more)).indices
        for head, (got, new) in enumerate(zip(have, more, strict=True)):  # counts are known here: nothing waits
            taken[head, got : got + new] = best[head, :new]
            chosen[head].index_fill_(0, best[head, :new], True)
        have = [got + new for got, new in zip(have, more, strict=True)]
        at = taken[:, : max(have)]
        begin = torch.nn.functional.pad(mass, (0, at.shape[1] - mass.shape[1]))
        mass = weights_of(squares, wanted, at, have, begin, PURSUED)
        rest = wanted - (squares @ wanted.new_zeros(heads, candidates).scatter_add_(1, at, mass)[..., None])[..., 0]
    return [row[:count] for row, count in zip(taken, counts, strict=True)]


def weights_of(
    squares: Tensor, wanted: Tensor, at: Tensor, have: Sequence[int], begin: Tensor | None = None, rounds: int = ROUNDS
) -> Tensor:
    """The weights of the candidates `at`, `[heads, t]`, of which a head has the first `have`; 0 for the others."""
    there = torch.arange(at.shape[1], device=at.device) < torch.tensor(have, device=at.device)[:, None]
    rows = squares.gather(1, at[..., None].expand(-1, -1, squares.shape[-1]))
    part = rows.gather(2, at[:, None].expand(-1, at.shape[1], -1))
    part = part * (there[:, None] & there[..., None])
    return non_negative(part, wanted.gather(1, at) * there, begin, rounds) * there


def non_negative(squares: Tensor, wanted: Tensor, begin: Tensor | None = None, rounds: int = ROUNDS) -> Tensor:
    """`argmin_{w >= 0} w^T G w / 2 - b^T w` of every head, by accelerated projected gradients, G scaled to a diagonal
    of 1; by default every key begins with a weight of 1, as in the prompt."""
    size = _root(squares)
    scaled, target = squares / size[..., None] / size[..., None, :], wanted / size
    step = 1 / scaled.abs().sum(-1).amax(-1, keepdim=True).clamp(min=1)
    found = size if begin is None else begin * size
    ahead, pace = found, torch.ones_like(step)
    for _ in range(rounds):
        new = (ahead - step * ((scaled @ ahead[..., None])[..., 0] - target)).clamp(min=0)
        overshot = ((ahead - new) * (new - found)).sum(-1, keepdim=True) > 0  # begin the acceleration again
        pace = torch.where(overshot, 1.0, pace)
        quicker = (1 + (1 + 4 * pace.square()).sqrt()) / 2
        ahead = new + (pace - 1) / quicker * (new - found)
        found, pace = new, quicker
    return found / size


def _root(squares: Tensor) -> Tensor:
    """The root mean square weights, up to a factor."""
    return squares.diagonal(dim1=-2, dim2=-1).sqrt().clamp(min=torch.finfo(squares.dtype).tiny)
