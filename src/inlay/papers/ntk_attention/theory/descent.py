"""Theorem B.2 (M.2): gradient descent on the stylised network, beside what its proof says of every step."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from inlay.errors import InlayError
from inlay.papers.ntk_attention.theory.kernel import spectrum
from inlay.papers.ntk_attention.theory.network import PrefixProblem, gradient


def usable_step(kernel: Tensor, width: int, c: float = 1.0) -> float:
    """`eta = c / (m lambda_max(H))`. With the true kernel c < 2 is where the linearised descent converges."""
    if c <= 0:
        raise InlayError(f"c = {c}: a step size needs a number above 0.")
    return c / (width * float(spectrum(kernel)[-1]))


@dataclass(frozen=True)
class PrefixConstants:
    """What the theorem asks for, as powers of ten: most of them are beyond every floating-point number.

    `B = max(C sigma sqrt(log(n d / delta)), 1)` with C > 10 (here 10, the least) and sigma = 1. Where the paper writes
    O or Omega, the constant is 1.
    """

    examples: int
    size: int
    width: int
    least: float
    delta: float = 0.05

    @property
    def B(self) -> float:
        return max(10 * math.sqrt(math.log(self.examples * self.size / self.delta)), 1.0)

    def _log10(self, number: float, power: float) -> float:
        """log10 of `number * exp(power * B)`."""
        return math.log10(number) + power * self.B / math.log(10)

    @property
    def step(self) -> float:
        """log10 of `eta = lambda / (m n^2 d^2 exp(16 B))` (before (20))."""
        return self._log10(self.least / (self.width * (self.examples * self.size) ** 2), -16)

    @property
    def needed_width(self) -> float:
        """log10 of `m >= lambda^-2 n^2 d^2 exp(30 B) sqrt(log(n d / delta))` (before (20))."""
        nd = self.examples * self.size
        return self._log10((nd / self.least) ** 2 * math.sqrt(math.log(nd / self.delta)), 30)

    def drift(self, radius: float) -> float:
        """log10 of Lemma K.3's bound on the kernel's change within R: `8 R sqrt(n d) exp(22 B)`."""
        return self._log10(8 * radius * math.sqrt(self.examples * self.size), 22)


@dataclass(frozen=True)
class Descent:
    """`losses` are `|F(t) - Y|_F^2` for t = 0..T (twice Eq. (7)), `W` is where it ended."""

    start: PrefixProblem
    step: float
    losses: Tensor
    W: Tensor

    @property
    def moved(self) -> Tensor:
        """`|w_r(T) - w_r(0)|`, (m)."""
        return (self.W - self.start.W).norm(dim=0)

    def decay(self, least: float) -> Tensor:
        """Lemma M.4's bound on each of the losses: `(1 - m eta lambda / 2)^t |F(0) - Y|_F^2`."""
        factor = 1 - self.start.width * self.step * least / 2
        return self.losses[0] * factor ** torch.arange(len(self.losses), dtype=torch.float64)

    def above(self, least: float) -> Tensor:
        """The steps at which the loss is above that bound, beyond rounding: least squares do not reach 0 exactly."""
        floor = 1e-24 * self.losses[0]
        return (self.losses > self.decay(least).clamp(min=floor) * (1 + 1e-9)).nonzero().flatten()

    def linearised(self, kernel: Tensor) -> Tensor:
        """What the losses would be if the kernel stood still: `sum_j (1 - m eta lambda_j)^(2t) <u_j, F(0) - Y>^2`."""
        eigenvalues, vectors = torch.linalg.eigh((kernel + kernel.T) / 2)
        parts = (vectors.T @ self.start.residual).square()
        times = torch.arange(len(self.losses), dtype=torch.float64)[:, None]
        return ((1 - self.start.width * self.step * eigenvalues).abs() ** (2 * times)) @ parts


def descend(start: PrefixProblem, step: float, steps: int) -> Descent:
    """Eq. (8), `steps` times."""
    if steps < 1:
        raise InlayError(f"{steps} steps: give a whole number from 1 on.")
    here = start
    losses = [start.residual.square().sum()]
    for _ in range(steps):
        here = here.at(here.W - step * gradient(here))
        losses.append(here.residual.square().sum())
    return Descent(start, step, torch.stack(losses), here.W)


@dataclass(frozen=True)
class Decomposition:
    """Lemma L.1 for one step: `|F(1) - Y|^2 = |F(0) - Y|^2 + C_0 + C_11 + C_12 + C_2 + C_3`.

    C_0 is from the change of `theta = beta / alpha`. C_11 and C_12 are the first order of the change of
    `u = exp(W^T x)` by the two parts of the gradient, C_2 is the rest of it, and `C_3 = |F(1) - F(0)|^2`.
    """

    before: float
    after: float
    c_0: float
    c_11: float
    c_12: float
    c_2: float
    c_3: float


def decomposition(start: PrefixProblem, step: float) -> Decomposition:
    """The terms of Lemma L.1, each from its definition."""
    x, W, a, m = start.x, start.W, start.a, start.width
    pull = gradient(start)
    S = (x @ W).softmax(1)
    r = m * S @ (W * a).T - start.y
    by_sign = m * r.T @ (S * a)  # the part of the gradient with a_r e_k

    def theta_u(W: Tensor) -> tuple[Tensor, Tensor]:
        u = (x @ W).exp()
        return (W * a) / u.sum(1)[:, None, None], u[:, None]

    theta, u = theta_u(W)
    theta_after, u_after = theta_u(W - step * pull)

    def c(change: Tensor) -> float:
        """`2 <vec(F - Y), m sum_r ...>` for the summands (n, d, m)."""
        return float(2 * m * (r * change.sum(-1)).sum())

    first = theta * u * (-step)
    c_11 = c(first * (x @ (pull - by_sign))[:, None])
    c_12 = c(first * (x @ by_sign)[:, None])
    c_2 = c(theta * (u_after - u)) - c_11 - c_12
    moved = m * ((theta_after * u_after).sum(-1) - (theta * u).sum(-1))
    return Decomposition(
        before=float(r.square().sum()),
        after=float((r + moved).square().sum()),
        c_0=c((theta_after - theta) * u_after),
        c_11=c_11,
        c_12=c_12,
        c_2=c_2,
        c_3=float(moved.square().sum()),
    )
