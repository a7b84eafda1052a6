"""The global loss of Multi-LoRA, section 4.2 (Definition 4.1): k tasks that share x, each with a y_i of its own.

    L(x, y) = sum_i L_i(x, y_i),        x in R^d,  y = (y_1, .., y_k),  y_i in R^m

The paper writes one L for all tasks and remarks that each may have its own; here each has its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from inlay.errors import InlayError
from inlay.papers.infoprompt import theory as softmax_regression


class TaskLoss(Protocol):
    """A task's loss as a function of `v = (x, y_i)`, d + m numbers, with its derivatives in closed form."""

    @property
    def size(self) -> int:
        """d + m."""

    def loss(self, v: Tensor) -> Tensor: ...

    def gradient(self, v: Tensor) -> Tensor: ...

    def hessian(self, v: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class Quadratic:
    """`L(v) = 0.5 v^T Q v + <q, v>`, Q symmetric: its constants are known exactly."""

    Q: Tensor
    q: Tensor

    def __post_init__(self) -> None:
        n = self.q.shape[0] if self.q.ndim == 1 else -1
        if self.Q.shape != (n, n) or not torch.equal(self.Q, self.Q.T):
            raise InlayError(
                f"Q of shape {tuple(self.Q.shape)}, q of {tuple(self.q.shape)}: Q must be symmetric, n x n."
            )
        if not bool(self.Q.isfinite().all() and self.q.isfinite().all()):
            raise InlayError("Q or q has entries that are NaN or infinite.")

    @property
    def size(self) -> int:
        return len(self.q)

    def loss(self, v: Tensor) -> Tensor:
        return 0.5 * v @ self.Q @ v + self.q @ v

    def gradient(self, v: Tensor) -> Tensor:
        return self.Q @ v + self.q

    def hessian(self, v: Tensor) -> Tensor:
        return self.Q


@dataclass(frozen=True)
class Decomposable:
    """`L(x, y) = sum_i L_i(x, y_i)`, as a function of x (d) and y (k, m)."""

    parts: tuple[TaskLoss, ...]
    shared: int

    def __post_init__(self) -> None:
        if not self.parts:
            raise InlayError("No tasks: give one part or more.")
        sizes = {part.size for part in self.parts}
        if len(sizes) > 1:
            raise InlayError(f"Parts of {sorted(sizes)} numbers: every task has the same d + m.")
        if not 0 <= self.shared < self.parts[0].size:
            raise InlayError(f"{self.shared} shared of {self.parts[0].size} numbers: leave each task one of its own.")

    @property
    def tasks(self) -> int:
        """k."""
        return len(self.parts)

    @property
    def own(self) -> int:
        """m."""
        return self.parts[0].size - self.shared

    def points(self, x: Tensor, y: Tensor) -> list[Tensor]:
        """`(x, y_i)` of every task."""
        if x.shape != (self.shared,) or y.shape != (self.tasks, self.own):
            raise InlayError(
                f"x of shape {tuple(x.shape)}, y of {tuple(y.shape)}: give {self.shared} numbers and "
                f"{self.tasks} x {self.own}."
            )
        if not bool(x.isfinite().all() and y.isfinite().all()):
            raise InlayError("x or y has entries that are NaN or infinite.")
        return [torch.cat([x, own]) for own in y]

    def _pairs(self, x: Tensor, y: Tensor) -> list[tuple[TaskLoss, Tensor]]:
        return list(zip(self.parts, self.points(x, y), strict=True))

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.stack([part.loss(v) for part, v in self._pairs(x, y)]).sum()

    def gradients(self, x: Tensor, y: Tensor) -> Tensor:
        """Of each part, (k, d + m)."""
        return torch.stack([part.gradient(v) for part, v in self._pairs(x, y)])

    def hessians(self, x: Tensor, y: Tensor) -> Tensor:
        """Of each part, (k, d + m, d + m)."""
        return torch.stack([part.hessian(v) for part, v in self._pairs(x, y)])

    def gradient(self, x: Tensor, y: Tensor) -> Tensor:
        """Claim 4.2: `(sum_i dL_i/dx, dL_1/dy_1, .., dL_k/dy_k)`, (d + k m)."""
        each = self.gradients(x, y)
        return torch.cat([each[:, : self.shared].sum(0), each[:, self.shared :].reshape(-1)])

    def hessian(self, x: Tensor, y: Tensor) -> Tensor:
        """The true one: its corner is the sum of the tasks' corners."""
        each = self.hessians(x, y)
        return arrow(each, each[:, : self.shared, : self.shared].sum(0), self.shared)

    def printed_hessian(self, x: Tensor, y: Tensor) -> Tensor:
        """As the proof of Lemma 4.8 has it: `H_00` of one task (here their mean) as the corner."""
        each = self.hessians(x, y)
        return arrow(each, each[:, : self.shared, : self.shared].mean(0), self.shared)


def arrow(blocks: Tensor, corner: Tensor, shared: int) -> Tensor:
    """The matrix with `corner` (d, d), each task's `H_0i` beside and below it, and `H_ii` on the diagonal."""
    k, own = len(blocks), blocks.shape[1] - shared
    found = blocks.new_zeros(shared + k * own, shared + k * own)
    found[:shared, :shared] = corner
    for index, block in enumerate(blocks):
        place = slice(shared + index * own, shared + (index + 1) * own)
        found[:shared, place] = block[:shared, shared:]
        found[place, :shared] = block[shared:, :shared]
        found[place, place] = block[shared:, shared:]
    return found


def counterexample(tasks: int) -> Decomposable:
    """The losses whose blocks Lemma A.1 uses: `[[4, -3], [-3, 4]]` for every task, d = m = 1."""
    if tasks < 1:
        raise InlayError(f"{tasks} tasks: give 1 or more.")
    part = Quadratic(torch.tensor([[4.0, -3.0], [-3.0, 4.0]], dtype=torch.float64), torch.zeros(2, dtype=torch.float64))
    return Decomposable((part,) * tasks, shared=1)


def quadratics(tasks: int, shared: int, own: int, seed: int, condition: float = 10.0) -> Decomposable:
    """Tasks with Hessians in random directions and eigenvalues from 1 to `condition`, spread evenly."""
    if condition < 1:
        raise InlayError(f"Condition number {condition}: give 1 or more.")
    generator = torch.Generator().manual_seed(seed)
    values = torch.linspace(1, condition, shared + own, dtype=torch.float64)
    parts = []
    for _ in range(tasks):
        square = torch.randn(shared + own, shared + own, generator=generator, dtype=torch.float64)
        turn = torch.linalg.qr(square).Q
        Q = turn @ torch.diag(values) @ turn.T
        q = torch.randn(shared + own, generator=generator, dtype=torch.float64)
        parts.append(Quadratic((Q + Q.T) / 2, q))
    return Decomposable(tuple(parts), shared)


def softmax_tasks(tasks: int, shared: int, own: int, rows: int, seed: int, least: float = 1.0) -> Decomposable:
    """Tasks of softmax regression on `(x, y_i)`, all three losses, with weights that make each `least`-convex."""
    parts = []
    for index in range(tasks):
        problem = softmax_regression.draw(rows, shared + own, seed + 1_000_003 * index)
        weight = softmax_regression.enough_weight(problem.A, problem.b, least)
        parts.append(problem.with_weights(torch.full_like(problem.b, weight**0.5)))
    return Decomposable(tuple(parts), shared)
