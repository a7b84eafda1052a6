"""Table 3 of Multi-LoRA (appendix B): the constants of softmax regression at random points.

`L(x) = 0.5 |f(x) - b|^2` with `H(x) = A^T B(x) A`. Lemma B.4 prints a wrong B: the sign of `<f - b, f> diag(f)`, and it
lacks `-2 ((f.f) f^T + f (f.f)^T)`. Both are computed. The paper does not say how it draws A, b and x.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from inlay.errors import InlayError, unknown
from inlay.papers.infoprompt.theory import gradient, hessian, predict

SIZES = ((10, 5), (10, 10), (10, 20), (20, 5), (20, 10), (20, 20), (20, 40))
# alpha, beta, M, gamma as the paper prints them.
PAPER = {
    (10, 5): (0.00, 148.03, 26.83, 0.60),
    (10, 10): (0.00, 272.52, 23.65, 0.74),
    (10, 20): (0.00, 540.98, 21.49, 0.89),
    (20, 5): (0.00, 447.95, 74.38, 0.54),
    (20, 10): (0.00, 361.00, 26.47, 0.77),
    (20, 20): (0.00, 1309.38, 52.23, 0.91),
    (20, 40): (0.00, 2511.67, 58.29, 1.24),
}
SAMPLINGS = ("gaussian", "probabilities")
HESSIANS = ("corrected", "printed")
CHUNK = 2000


@dataclass(frozen=True)
class Sampled:
    """At every sample: alpha, beta, M near (the Hessian's change over a step of 0.001), M far (between two draws of x),
    gamma; each (samples)."""

    alpha: Tensor
    beta: Tensor
    near: Tensor
    far: Tensor
    gamma: Tensor


def printed_hessian(A: Tensor, b: Tensor, x: Tensor) -> Tensor:
    """Lemma B.4 as printed:

    `B = <3f - 2b, f> f f^T + (b.f) f^T + f (b.f)^T + <f - b, f> diag(f) + diag((2f - b).f)`.
    """
    f = predict(A, x)
    outer = (b * f)[..., :, None] * f[..., None, :]
    scale = ((3 * f - 2 * b) * f).sum(-1)[..., None, None]
    diagonal = ((f - b) * f).sum(-1, keepdim=True) * f + (2 * f - b) * f
    B = scale * f[..., :, None] * f[..., None, :] + outer + outer.mT + torch.diag_embed(diagonal)
    return A.mT @ B @ A


def corrected_hessian(A: Tensor, b: Tensor, x: Tensor) -> Tensor:
    """The Hessian of `0.5 |f(x) - b|^2` in x."""
    return hessian(A, b, torch.zeros_like(b), x, ("exp",))


def sample(
    rows: int, size: int, samples: int, seed: int = 0, *, sampling: str = "gaussian", kind: str = "corrected"
) -> Sampled:
    """Fresh A, b, x (and a second x) for every sample.

    `gaussian`: every entry of A, b and x is N(0, 1). `probabilities`: the same A and x, b = softmax of N(0, 1).
    """
    if min(rows, size) < 1 or samples < 2:
        raise InlayError(f"n = {rows}, d = {size}, {samples} samples: give n and d from 1 on, 2 samples or more.")
    if sampling not in SAMPLINGS:
        raise unknown("sampling", sampling, SAMPLINGS)
    if kind not in HESSIANS:
        raise unknown("Hessian", kind, HESSIANS)
    curve = corrected_hessian if kind == "corrected" else printed_hessian
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    found: list[tuple[Tensor, ...]] = []
    for count in [CHUNK] * (samples // CHUNK) + [samples % CHUNK] * (samples % CHUNK > 0):
        A, b, x, y = normal(count, rows, size), normal(count, rows), normal(count, size), normal(count, size)
        if sampling == "probabilities":
            b = b.softmax(-1)
        apart = (x - y).norm(dim=-1, keepdim=True)
        step = 1e-3
        here = curve(A, b, x)
        values = torch.linalg.eigvalsh(here)
        near = _norm(here - curve(A, b, x + step * (y - x) / apart)) / step
        far = _norm(here - curve(A, b, y)) / apart[..., 0]
        slope = gradient(A, b, torch.zeros_like(b), x, ("exp",)).norm(dim=-1)
        found.append((values[..., 0], values.abs().amax(-1), near, far, slope))
    return Sampled(*(torch.cat(column) for column in zip(*found, strict=True)))


def _norm(symmetric: Tensor) -> Tensor:
    """Spectral norms of a batch."""
    return torch.linalg.eigvalsh(symmetric).abs().amax(-1)
