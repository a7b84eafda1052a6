"""Lemmas C.15 and C.16 of InfoPrompt: what they print, what can be proved without exponentials, what is measured.

The paper's constants have `exp(O(R^2 + log n))`. With f a probability vector, `|diag(f) - f f^T| <= 1/2` and triangle
inequalities over the terms of B give bounds that are linear in |b| and free of n; they are stated at the functions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from inlay.errors import InlayError
from inlay.papers.infoprompt.theory.problem import SoftmaxProblem


@dataclass(frozen=True)
class Printed:
    """The paper's constants as powers of ten, with 1 where it writes O. R >= 4 bounds |x|, |A| and |b|."""

    rows: int
    R: float

    def __post_init__(self) -> None:
        if self.R < 4 or self.rows < 1:
            raise InlayError(f"R = {self.R}, n = {self.rows}: the lemmas have R >= 4 and n >= 1.")

    @property
    def R_0(self) -> float:
        """log10 of `R_0 = M = exp(R^2 + log n)`."""
        return (self.R**2 + math.log(self.rows)) / math.log(10)

    @property
    def lipschitz(self) -> float:
        """log10 of Lemma C.16's `n^4 exp(R^2 + log n)`."""
        return 4 * math.log10(self.rows) + self.R_0

    def weight(self, A: Tensor, least: float, factor: float) -> float:
        """`factor R_0 + l / sigma_min(A)^2`: factor 10 in C.15, part 1, 10^4 in part 2, 100 in theorem D.1."""
        return factor * 10**self.R_0 + least / sigma_min(A) ** 2


def sigma_min(A: Tensor) -> float:
    """The least singular value, which must not be 0: the lemmas divide by it."""
    values = torch.linalg.svdvals(A)
    if float(values[-1]) <= 1e-12 * float(values[0]):
        raise InlayError(
            f"A of shape {tuple(A.shape)} has rank below {A.shape[1]}: no weights make H positive definite."
        )
    return float(values[-1])


def curvature_bound(b: Tensor) -> float:
    """`|B(x)| <= 10 + 6 |b| + |<1, b>| / 2` for every x, L_exp and L_cent together.

    In the order of the terms of B for L_exp: 3 + 2|b|, 2|b|, 1 + |b|, 2 + |b|, 4.
    """
    return 10 + 6 * float(b.norm()) + abs(float(b.sum())) / 2


def enough_weight(A: Tensor, b: Tensor, least: float) -> float:
    """With every `w_i^2` this or more, `H(x) >= l I` for every x: `|B|`'s bound `+ l / sigma_min(A)^2`."""
    return curvature_bound(b) + least / sigma_min(A) ** 2


def lipschitz_bound(A: Tensor, b: Tensor) -> float:
    """`|H(x) - H(y)| <= |A|^3 (31 + 13 |b| + 3 |<1, b>|) / 2 |x - y|` for all x and y.

    `|df| <= |dz| / 2`; the terms of B for L_exp change by (12 + 6|b|), 4|b|, (3 + 2|b|), (4 + |b|) and 12 times |df|.
    """
    norm = float(torch.linalg.matrix_norm(A, 2))
    return norm**3 * (31 + 13 * float(b.norm()) + 3 * abs(float(b.sum()))) / 2


def least_eigenvalue(problem: SoftmaxProblem, x: Tensor) -> float:
    """Of the Hessian: Lemma C.15, part 1, has it at l or more."""
    return float(torch.linalg.eigvalsh(problem.hessian(x))[0])


def weight_ratio(problem: SoftmaxProblem, x: Tensor) -> tuple[float, float]:
    """The least and largest c with `W^2 = c B~` in some direction; part 2 of C.15 has them in [0.99, 1.01].

    The eigenvalues of `W (B(x) + W^2)^-1 W`. Where B~ is not positive definite there is no such statement.
    """
    whole = problem.curvature(x) + torch.diag(problem.w.square())
    factor, failed = torch.linalg.cholesky_ex(whole)
    if int(failed):
        raise InlayError("B(x) + W^2 is not positive definite: give larger weights w.")
    half = torch.linalg.solve_triangular(factor, torch.diag(problem.w), upper=False)
    values = torch.linalg.eigvalsh(half.T @ half)
    return float(values[0]), float(values[-1])


def hessian_change(problem: SoftmaxProblem, x: Tensor, y: Tensor) -> float:
    """`|H(x) - H(y)| / |x - y|`, which Lemma C.16 bounds."""
    distance = float((x - y).norm())
    if not distance:
        raise InlayError("The Hessian at one point twice: give two different points.")
    return float(torch.linalg.matrix_norm(problem.hessian(x) - problem.hessian(y), 2)) / distance


def ball(count: int, size: int, radius: float, seed: int) -> Tensor:
    """Points uniform in the ball of that radius, (count, d)."""
    generator = torch.Generator().manual_seed(seed)
    found = torch.randn(count, size, generator=generator, dtype=torch.float64)
    far = torch.rand(count, 1, generator=generator, dtype=torch.float64) ** (1 / size)
    return radius * far * found / found.norm(dim=1, keepdim=True)
