"""Lipschitz, smoothness and convexity constants of parts and whole (Multi-LoRA, Lemmas 4.4, 4.6 and 4.8).

For each part `|grad L_i| <= gamma`, `|hess L_i| <= beta`, `hess L_i >= alpha I`. The lemmas claim `k gamma`, `k beta`
and, under a condition, `alpha / 2` for the whole. With the Hessian as the sum it is,

    z^T H z = sum_i (z_0, z_i)^T H_i (z_0, z_i) >= alpha sum_i (|z_0|^2 + |z_i|^2) >= alpha |z|^2,

so the whole is alpha-strongly convex and no condition is needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from inlay.errors import InlayError
from inlay.papers.infoprompt.theory import SoftmaxProblem, curvature_bound
from inlay.papers.infoprompt.theory.bounds import ball, sigma_min
from inlay.papers.multi_lora.theory.loss import Decomposable

Point = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class LossConstants:
    """gamma (Lipschitz), beta (smoothness), alpha (strong convexity) on some set."""

    gamma: float
    beta: float
    alpha: float


@dataclass(frozen=True)
class Estimates:
    """At the same points: the worst part, the whole, and the whole with the corner of one task, as it is printed.

    `alpha_0` is the largest eigenvalue of a part's `d^2 L / dx^2`, which Lemma 4.8 wants near alpha. `frozen`: the
    constants of the whole in y alone, x standing still, which is how Multi-LoRA's algorithm runs it.
    """

    tasks: int
    part: LossConstants
    whole: LossConstants
    frozen: LossConstants
    printed_alpha: float
    alpha_0: float

    @property
    def condition(self) -> bool:
        """Lemma 4.8's `(k - 1)(alpha_0 - alpha) <= alpha / 2`."""
        return (self.tasks - 1) * (self.alpha_0 - self.part.alpha) <= self.part.alpha / 2


def lemma_bounds(part: LossConstants, tasks: int) -> LossConstants:
    """What follows for the whole: `k gamma` (4.4), `k beta` (4.6), `alpha` (4.8 corrected)."""
    if tasks < 1:
        raise InlayError(f"{tasks} tasks: give 1 or more.")
    return LossConstants(tasks * part.gamma, tasks * part.beta, part.alpha)


def points(loss: Decomposable, count: int, radius: float, seed: int) -> list[Point]:
    """x and every y_i uniform in balls of that radius."""
    if count < 1 or radius <= 0:
        raise InlayError(f"{count} points in balls of radius {radius}: give 1 point or more and a radius above 0.")
    xs = ball(count, loss.shared, radius, seed) if loss.shared else torch.zeros(count, 0, dtype=torch.float64)
    ys = ball(count * loss.tasks, loss.own, radius, seed + 1_000_003).reshape(count, loss.tasks, loss.own)
    return list(zip(xs, ys, strict=True))


def estimate(loss: Decomposable, where: Sequence[Point]) -> Estimates:
    """The largest gradient and the extreme eigenvalues over the points: the true gamma and beta are these or larger,
    the true alpha is this or smaller."""
    if not where:
        raise InlayError("No points: give one or more.")
    d = loss.shared
    parts, wholes, frozen = [], [], []
    printed, alpha_0 = [], []
    for x, y in where:
        gradients, hessians = loss.gradients(x, y), loss.hessians(x, y)
        spectra = torch.linalg.eigvalsh(hessians)
        parts.append((gradients.norm(dim=1).max(), spectra.abs().max(), spectra.min()))
        whole = loss.hessian(x, y)
        values, by_y = torch.linalg.eigvalsh(whole), torch.linalg.eigvalsh(whole[d:, d:])
        gradient = loss.gradient(x, y)
        wholes.append((gradient.norm(), values.abs().max(), values.min()))
        frozen.append((gradient[d:].norm(), by_y.abs().max(), by_y.min()))
        printed.append(torch.linalg.eigvalsh(loss.printed_hessian(x, y))[0])
        alpha_0.append(torch.linalg.eigvalsh(hessians[:, :d, :d]).max() if d else torch.zeros(()))

    def worst(found: list[tuple[Tensor, Tensor, Tensor]]) -> LossConstants:
        gamma, beta, alpha = (torch.stack(column) for column in zip(*found, strict=True))
        return LossConstants(float(gamma.max()), float(beta.max()), float(alpha.min()))

    return Estimates(loss.tasks, worst(parts), worst(wholes), worst(frozen), float(min(printed)), float(max(alpha_0)))


def softmax_bounds(problem: SoftmaxProblem, radius: float) -> LossConstants:
    """Constants of one softmax-regression loss that hold at every v with `|v| <= radius`.

    gamma: `|A| ((1 + |b|) / 2 + |<1, b>| + |b| + max w^2 |A| radius)`, from `|diag(f) - f f^T| <= 1/2`;
    beta: `|A|^2 (|B| + max w^2)`; alpha: `sigma_min(A)^2 (min w^2 - |B|)`, with the bound on |B| of `curvature_bound`.
    """
    norm, size = float(torch.linalg.matrix_norm(problem.A, 2)), float(problem.b.norm())
    squares = problem.w.square()
    curvature = curvature_bound(problem.b)
    slope = (1 + size) / 2 + abs(float(problem.b.sum())) + size + float(squares.max()) * norm * radius
    return LossConstants(
        norm * slope,
        norm**2 * (curvature + float(squares.max())),
        sigma_min(problem.A) ** 2 * (float(squares.min()) - curvature),
    )
