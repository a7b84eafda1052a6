"""Line 5 of Algorithm 1 (InfoPrompt, appendix D): a sparse diagonal `D~` with `A^T D~ A` near `A^T D A`.

Rows are drawn by their leverage scores and reweighted. The exact scores cost as much as the Hessian, O(n d^2); here
they come from a sketch: `S D^1/2 A` with a sparse sign matrix S, a QR of its few rows, and random directions. That is
O(nnz(A) + d^3), the theorem's `(nnz(A) + d^omega) poly(log n)` with omega = 3.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from inlay.errors import InlayError
from inlay.papers.infoprompt.theory.losses import BLOCK, gram

# Rows of the sketch for a column of A, and random directions: scores within a factor of two or so, which is enough.
BUCKETS, DIRECTIONS = 8, 8


@dataclass(frozen=True)
class SparseDiagonal:
    """`D~`: `values` at the places `rows` (a row drawn twice stands there twice)."""

    rows: Tensor
    values: Tensor

    def gram(self, A: Tensor) -> Tensor:
        """`A^T D~ A`, (d, d), from the drawn rows alone."""
        return gram(A[self.rows], self.values)


def rows_for(size: int, error: float, delta: float) -> int:
    """How many draws give `(1 - e) A^T D A <= A^T D~ A <= (1 + e) A^T D A` with probability 1 - delta.

    `2 (1 + e/3) d log(2 d / delta) / e^2`: the matrix Bernstein inequality for draws by exact scores, each term at most
    d / rows. It is O(d log(d / delta)), as the paper's sparsity.
    """
    if not 0 < error < 1 or not 0 < delta < 1:
        raise InlayError(f"Error {error}, failure probability {delta}: give numbers between 0 and 1.")
    return math.ceil(2 * (1 + error / 3) * size * math.log(2 * size / delta) / error**2)


def leverage_scores(A: Tensor, D: Tensor) -> Tensor:
    """`tau_i = D_i a_i^T (A^T D A)^-1 a_i`, exactly, (n); they add up to the rank."""
    return torch.linalg.qr(D.sqrt()[:, None] * A).Q.square().sum(1)


def sketched_lengths(A: Tensor, D: Tensor, generator: torch.Generator) -> Tensor:
    """`a_i^T (A^T D A)^-1 a_i` to a small factor, in two passes over A, (n); times D_i it is the score."""
    n, d = A.shape
    buckets = min(n, BUCKETS * d)
    signs = torch.randint(0, 2, (n,), generator=generator).to(A) * 2 - 1
    place = torch.randint(0, buckets, (n,), generator=generator)
    signs *= D.sqrt()
    sketch = A.new_zeros(buckets, d)
    for rows, there, sign in zip(A.split(BLOCK), place.split(BLOCK), signs.split(BLOCK), strict=True):
        sketch.index_add_(0, there, sign[:, None] * rows)
    triangle = torch.linalg.qr(sketch, mode="r").R
    if float(triangle.diagonal().abs().min()) <= 1e-12 * float(triangle.diagonal().abs().max()):
        raise InlayError(
            f"A of shape {n} x {d} has rank below {d} where D is not 0: its leverage scores are not defined."
        )
    directions = torch.randn(d, DIRECTIONS, generator=generator, dtype=A.dtype) / DIRECTIONS**0.5
    return (A @ torch.linalg.solve_triangular(triangle, directions, upper=True)).square().sum(1)


def sparsify(A: Tensor, D: Tensor, rows: int, scores: Tensor, generator: torch.Generator) -> SparseDiagonal:
    """Draw `rows` rows in proportion to `scores`, with replacement: `D~_i = D_i / (rows p_i)` a draw.

    Entries of D may have any sign. With as many draws as there are rows nothing is saved, and every row is kept.
    """
    n, d = A.shape
    if rows < d:
        raise InlayError(f"{rows} rows for {d} columns: A^T D~ A would be singular. Draw {d} rows or more.")
    if rows >= n:
        return SparseDiagonal(torch.arange(n), D)
    chances = scores / scores.sum()
    chosen = torch.multinomial(chances, rows, replacement=True, generator=generator)
    return SparseDiagonal(chosen, D[chosen] / (rows * chances[chosen]))


def spectral_error(A: Tensor, D: Tensor, found: SparseDiagonal) -> float:
    """The least e with `(1 - e) A^T D A <= A^T D~ A <= (1 + e) A^T D A`, for D above 0."""
    factor = torch.linalg.cholesky(gram(A, D))
    half = torch.linalg.solve_triangular(factor, found.gram(A), upper=False)
    whole = torch.linalg.solve_triangular(factor, half.T, upper=False)
    return float((torch.linalg.eigvalsh((whole + whole.T) / 2) - 1).abs().max())
