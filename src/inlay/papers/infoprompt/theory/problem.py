"""An instance of `min_x L_exp(x) + L_cent(x) + L_reg(x)` (InfoPrompt, theorem D.1), checked, and random ones."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from inlay.errors import InlayError, unknown
from inlay.papers.infoprompt.theory import losses
from inlay.papers.infoprompt.theory.losses import PARTS

TARGETS = ("probabilities", "gaussian")


@dataclass(frozen=True)
class LocalTerms:
    """At one x, all (n): f, the slope `r = dL/dz`, and D and h of `B + W^2 = diag(D) + f h^T + h f^T`."""

    f: Tensor
    r: Tensor
    D: Tensor
    h: Tensor


@dataclass(frozen=True)
class SoftmaxProblem:
    """`L(x) = L_exp(x) + L_cent(x) + L_reg(x)`, A (n, d) with n >= d, b (n), w (n) and not negative.

    `parts` leaves losses out. It is the regulariser that makes the Hessian positive definite: Lemma C.15.
    """

    A: Tensor
    b: Tensor
    w: Tensor
    parts: tuple[str, ...] = PARTS

    def __post_init__(self) -> None:
        if self.A.ndim != 2 or 0 in self.A.shape:
            raise InlayError(f"A of shape {tuple(self.A.shape)}: give a matrix, n x d.")
        n, d = self.A.shape
        for name, vector in (("b", self.b), ("w", self.w)):
            if vector.shape != (n,):
                raise InlayError(
                    f"{name} of shape {tuple(vector.shape)} beside A of {n} x {d}: give a vector of {n} numbers."
                )
        if n < d:
            raise InlayError(
                f"A is {n} x {d}: with fewer rows than columns its least singular value is 0 and no weights make the "
                "Hessian positive definite. Give n >= d."
            )
        for name, values in (("A", self.A), ("b", self.b), ("w", self.w)):
            if values.dtype not in (torch.float32, torch.float64) or values.dtype != self.A.dtype:
                raise InlayError(f"{name} is {values.dtype}: give A, b and w all in float64, or all in float32.")
            if not bool(values.isfinite().all()):
                raise InlayError(f"{name} has {int((~values.isfinite()).sum())} entries that are NaN or infinite.")
        if bool((self.w < 0).any()):
            raise InlayError(f"w has a negative entry ({float(self.w.min()):g}): give weights of 0 or more.")
        losses.check_parts(self.parts)

    @property
    def rows(self) -> int:
        """n."""
        return self.A.shape[0]

    @property
    def size(self) -> int:
        """d."""
        return self.A.shape[1]

    def check_point(self, x: Tensor, name: str = "x") -> None:
        """A point must be d finite numbers."""
        if x.shape != (self.size,) or not bool(x.isfinite().all()):
            raise InlayError(f"{name} of shape {tuple(x.shape)}: give {self.size} finite numbers.")

    def with_weights(self, w: Tensor) -> SoftmaxProblem:
        """The same data with another regulariser."""
        return replace(self, w=w)

    def losses(self, x: Tensor) -> dict[str, Tensor]:
        """Each part of the loss by its name."""
        self.check_point(x)
        A, b, w = self.A, self.b, self.w
        by_name = {"exp": lambda: losses.l_exp(A, b, x), "cent": lambda: losses.l_cent(A, b, x)}
        by_name["reg"] = lambda: losses.l_reg(A, w, x)
        return {part: by_name[part]() for part in self.parts}

    def loss(self, x: Tensor) -> Tensor:
        """Their sum."""
        return torch.stack(list(self.losses(x).values())).sum()

    def gradient(self, x: Tensor) -> Tensor:
        """`g(x)`, (d)."""
        return losses.gradient(self.A, self.b, self.w, x, self.parts)

    def hessian(self, x: Tensor) -> Tensor:
        """`H(x)`, (d, d)."""
        return losses.hessian(self.A, self.b, self.w, x, self.parts)

    def local(self, x: Tensor) -> LocalTerms:
        """What Newton's method needs at x, before any product with A^T."""
        z = losses.times(self.A, x)
        f = z.softmax(-1)
        r, (D, h) = losses.slope(f, self.b, self.parts), losses.curvature(f, self.b, self.parts)
        if "reg" in self.parts:
            r, D = r + self.w.square() * z, D + self.w.square()
        return LocalTerms(f, r, D, h)

    def curvature(self, x: Tensor) -> Tensor:
        """`B(x)` of Lemma C.15 without `W^2`, (n, n): for small n."""
        f = losses.predict(self.A, x)
        D, h = losses.curvature(f, self.b, self.parts)
        return torch.diag(D) + torch.outer(f, h) + torch.outer(h, f)


def draw(
    rows: int,
    size: int,
    seed: int = 0,
    *,
    norm: float | None = None,
    targets: str = "probabilities",
    weight: float | None = None,
    spread: float = 0.5,
    heavy: float = 0.0,
) -> SoftmaxProblem:
    """A random instance in float64.

    A has entries N(0, 1/d): rows of norm about 1 whatever n. With `norm` it is scaled to `|A| = norm`, as theorem D.1
    wants (`|A| <= R`); the rows are then short where n is large. With `heavy` one row in 200 is that many times longer,
    and only those rows have a last column: rows drawn evenly miss it.
    `probabilities`: b = softmax(A x + noise) for a random x with entries of size `spread`; `gaussian`: b of norm 4, any
    sign. Every `w_i^2` is `weight`, by default 1/n: the size of the entries of B.
    """
    if size < 1 or rows < size:
        raise InlayError(f"n = {rows}, d = {size}: give whole numbers with n >= d >= 1.")
    if targets not in TARGETS:
        raise unknown("kind of targets", targets, TARGETS)
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    A = normal(rows, size).div_(size**0.5)
    if heavy:
        A[:, -1] = 0
        long = torch.arange(0, rows, 200)
        A[long] = heavy * normal(len(long), size) / size**0.5
    if norm is not None:
        A *= norm / float(torch.linalg.matrix_norm(A.T @ A, 2)) ** 0.5
    if targets == "probabilities":
        b = (A @ (spread * normal(size)) + 0.5 * normal(rows)).softmax(0)
    else:
        b = normal(rows)
        b = 4 * b / b.norm()
    squared = 1 / rows if weight is None else weight
    return SoftmaxProblem(A, b, torch.full((rows,), squared, dtype=torch.float64).sqrt())
