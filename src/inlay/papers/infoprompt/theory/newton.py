"""Algorithm 1 of InfoPrompt (appendix D): Newton's method with a sparsified Hessian, and the exact one beside it.

    x_{t+1} = x_t - H~^-1 g(x_t),        H~ = A^T D~ A

Line 8 is printed with a plus, which climbs; `sign=1` is the printed one. The paper refers to another for D: since
`W^2` is near `B(x) + W^2` where the weights are as large as Lemma C.15 wants (part 2), D may be `W^2`
(`diagonal="weights"`). Without such weights D is the diagonal part of `B(x) + W^2`, and the rest of B, which has rank
two, is kept as it is at the cost of two products with A (`diagonal="hessian"`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from time import process_time

import torch
from torch import Tensor

from inlay.errors import InlayError, unknown
from inlay.papers.infoprompt.theory.losses import gram, products
from inlay.papers.infoprompt.theory.problem import SoftmaxProblem
from inlay.papers.infoprompt.theory.sampling import SparseDiagonal, rows_for, sketched_lengths, sparsify

DIAGONALS = ("hessian", "weights")
SCORES = ("leverage", "even")
ANEW = ("nothing", "rows", "scores")


@dataclass(frozen=True)
class Sparsified:
    """How the Hessian is approximated.

    `rows` rows are drawn, or as many as `error` and `delta` ask for (see `rows_for`), by leverage scores or evenly.
    `anew` is what each step makes again. `scores`: all of it, as line 5 stands in the loop. `rows`: the scores of the
    first step serve throughout, corrected for the change of D, and rows are drawn afresh, so that errors of different
    steps do not add up. `nothing`: one draw whose weights follow D.
    """

    rows: int | None = None
    error: float = 0.25
    delta: float = 0.01
    diagonal: str = "hessian"
    scores: str = "leverage"
    anew: str = "scores"
    seed: int = 0

    def __post_init__(self) -> None:
        if self.diagonal not in DIAGONALS:
            raise unknown("diagonal", self.diagonal, DIAGONALS)
        if self.scores not in SCORES:
            raise unknown("way to draw rows", self.scores, SCORES)
        if self.anew not in ANEW:
            raise unknown("thing to make anew", self.anew, ANEW)
        if self.rows is not None and self.rows < 1:
            raise InlayError(f"{self.rows} rows: give a whole number from 1 on, or None.")
        rows_for(1, self.error, self.delta)

    def count(self, size: int) -> int:
        """How many rows are drawn for d columns."""
        return rows_for(size, self.error, self.delta) if self.rows is None else self.rows


@dataclass(frozen=True)
class Path:
    """x_0 .. x_T, (T + 1, d), with the processor seconds each had taken, all threads together, which do not depend on
    what else runs; `drawn` is how many rows a Hessian was made of."""

    points: Tensor
    seconds: list[float]
    drawn: int

    @property
    def steps(self) -> int:
        return len(self.points) - 1

    def errors(self, solution: Tensor) -> Tensor:
        """`|x_t - x*|`, (T + 1)."""
        return (self.points - solution).norm(dim=1)

    def reached(self, solution: Tensor, epsilon: float) -> int | None:
        """The first t with `|x_t - x*| <= epsilon`; None where there is none."""
        places = (self.errors(solution) <= epsilon).nonzero()
        return int(places[0]) if len(places) else None


def iterations(distance: float, epsilon: float) -> int:
    """Theorem D.1: `T = log(|x_0 - x*| / epsilon)`, rounded up; 0 where the start is near enough."""
    if distance < 0 or epsilon <= 0:
        raise InlayError(f"Distance {distance}, epsilon {epsilon}: give 0 or more, and a number above 0.")
    return max(0, math.ceil(math.log(distance / epsilon))) if distance else 0


class _Drawn:
    """`A^T D~ A` through a run, with what is kept from step to step."""

    def __init__(self, A: Tensor, how: Sparsified) -> None:
        self.A, self.how = A, how
        self.generator = torch.Generator().manual_seed(how.seed)
        self.rows = min(len(A), how.count(A.shape[1]))
        self.lengths: Tensor | None = None  # a_i^T (A^T D A)^-1 a_i: a score is D_i times that
        self.draw: SparseDiagonal | None = None  # which rows, with 1 / (rows p_i) as their values

    def __call__(self, D: Tensor) -> Tensor:
        A, anew = self.A, self.how.anew
        if self.rows >= len(A):  # nothing to draw
            return gram(A, D)
        if self.draw is None or anew != "nothing":
            self.draw = sparsify(A, torch.ones_like(D), self.rows, self._scores(D.abs()), self.generator)
        return gram(A[self.draw.rows], self.draw.values * D[self.draw.rows])

    def _scores(self, D: Tensor) -> Tensor:
        if self.how.scores == "even":
            return torch.ones_like(D)
        if self.lengths is None or self.how.anew == "scores":
            self.lengths = sketched_lengths(self.A, D, self.generator)
        return D * self.lengths


def newton(
    problem: SoftmaxProblem,
    x0: Tensor,
    steps: int,
    *,
    approximate: Sparsified | None = None,
    sign: int = -1,
    until: float = 0.0,
) -> Path:
    """`steps` steps of Newton's method from x0, exact or `approximate`; fewer once `|g| <= until`."""
    problem.check_point(x0, "x0")
    if steps < 0:
        raise InlayError(f"{steps} steps: give 0 or more.")
    if sign not in (-1, 1):
        raise InlayError(f"sign = {sign}: give -1, or 1 for line 8 as it is printed.")
    A = problem.A
    drawn = _Drawn(A, approximate) if approximate else None
    start = process_time()
    x, points, seconds = x0, [x0], [0.0]
    for _ in range(steps):
        here = problem.local(x)
        g, by_f, by_h = products(A, here.r, here.f, here.h)
        if float(g.norm()) <= until:
            break
        if drawn and drawn.how.diagonal == "weights":
            H = drawn(problem.w.square())
        else:
            cross = torch.outer(by_f, by_h)
            H = (drawn(here.D) if drawn else gram(A, here.D)) + cross + cross.T
        factor, failed = torch.linalg.cholesky_ex(H)
        if int(failed):
            raise InlayError(
                f"The Hessian at step {len(points)} is not positive definite: give larger weights w (Lemma C.15), "
                "or draw more rows."
            )
        x = x + sign * torch.cholesky_solve(g[:, None], factor)[:, 0]
        points.append(x)
        seconds.append(process_time() - start)
    return Path(torch.stack(points), seconds, drawn.rows if drawn else problem.rows)


def solve(problem: SoftmaxProblem, x0: Tensor | None = None, steps: int = 100) -> Tensor:
    """x*, by exact Newton steps down to rounding, each halved until it makes the gradient smaller."""
    x = torch.zeros_like(problem.A[0]) if x0 is None else x0
    g = problem.gradient(x)
    first = float(g.norm())
    for _ in range(steps):
        step = newton(problem, x, 1).points[-1] - x
        for _ in range(30):
            ahead = problem.gradient(x + step)
            if float(ahead.norm()) < float(g.norm()):
                break
            step = step / 2
        else:
            break
        x, g = x + step, ahead
    if float(g.norm()) > torch.finfo(x.dtype).eps ** 0.4 * first:  # 5e-7 in float64
        raise InlayError(f"{steps} Newton steps took |g| from {first:.2g} to {float(g.norm()):.2g} only: enlarge w.")
    return x
