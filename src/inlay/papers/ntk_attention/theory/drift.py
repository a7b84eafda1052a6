"""Lemma B.1 (K.3): how far the kernel moves when every column of W moves by at most R."""

from __future__ import annotations

import torch
from torch import Tensor

from inlay.errors import InlayError
from inlay.papers.ntk_attention.theory.kernel import KERNELS
from inlay.papers.ntk_attention.theory.network import PrefixProblem


def drift(problem: PrefixProblem, direction: Tensor, radius: float, kernel: str = "printed") -> float:
    """`|H(W + R D) - H(W)|_F`, the columns of `direction` made unit vectors."""
    function = KERNELS[kernel]
    moved = problem.W + radius * direction / direction.norm(dim=0)
    return float((function(moved, problem.x, problem.a) - function(problem.W, problem.x, problem.a)).norm())


def random_drift(
    problem: PrefixProblem, radius: float, draws: int = 10, seed: int = 0, kernel: str = "printed"
) -> float:
    """The largest change over `draws` directions drawn at random."""
    generator = torch.Generator().manual_seed(seed)
    return max(
        drift(problem, torch.randn(problem.W.shape, generator=generator, dtype=torch.float64), radius, kernel)
        for _ in range(draws)
    )


def worst_drift(
    problem: PrefixProblem, radius: float, steps: int = 20, seed: int = 0, kernel: str = "printed"
) -> float:
    """The largest change found by ascent from a random direction: a lower bound of the true worst case.

    Each step goes to where the linearised change is largest on the ball of every column: along the column's gradient.
    """
    if radius <= 0:
        raise InlayError(f"R = {radius}: give a radius above 0.")
    function = KERNELS[kernel]
    first = function(problem.W, problem.x, problem.a)
    generator = torch.Generator().manual_seed(seed)
    direction = torch.randn(problem.W.shape, generator=generator, dtype=torch.float64)
    best = drift(problem, direction, radius, kernel)
    for _ in range(steps):
        moved = (problem.W + radius * direction / direction.norm(dim=0)).requires_grad_()
        change = (function(moved, problem.x, problem.a) - first).norm()
        (direction,) = torch.autograd.grad(change, moved)
        best = max(best, drift(problem, direction, radius, kernel))
    return best
