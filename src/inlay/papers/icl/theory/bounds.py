"""Theorems 1 and 2: assumptions, constants, step sizes, rate and iteration bound, for a given model at its start."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from inlay.errors import InlayError
from inlay.papers.findings import MeasuredClaim, verdict
from inlay.papers.icl.theory.model import OneLayer, attention
from inlay.papers.icl.theory.problem import InContextProblem
from inlay.papers.icl.theory.proposition import distinct_row

ROUNDING = 1e-12


@dataclass(frozen=True)
class BoundConstants:
    """What Theorem 1 is made of. `norm` is `|Zbar|_2`, `f_max` is (12), `delta_0` the gap at the start, `zeta_0` (14).

    `gamma` is any number that satisfies (15). With it `alpha` (44) is fixed, and `L` (61):

        L^2 = 2 ( (2 gamma |Zbar|^2 (2 gamma H alpha + |A|))^2 / K + gamma^4 H^2 |Zbar|^4 / K^2 )
              + 16 gamma^2 f_max^2 |Zbar|^2 / K
                * max(1, 4 K alpha^2) ((alpha gamma H)^2 + 4 N (alpha gamma H + |A|)^2)

    The last term is what (58) gives. The paper's has `8 gamma f_max |Zbar|` in its first factor: the square was lost on
    the way from (58) to (59), and with it 1/K; `L_printed` is that one.
    """

    K: int
    N: int
    H: int
    norm: float
    f_max: float
    A: float
    delta_0: float
    zeta_0: float
    gamma: float

    @property
    def least_gamma(self) -> float:
        """The right-hand side of (15)."""
        inner = 128 * math.sqrt(2) / (math.sqrt(2) - 1) * self.norm**2 * math.sqrt(self.H) * self.f_max
        return self.zeta_0**-1.25 * math.sqrt(inner * self.K**1.5 * self.delta_0)

    @property
    def alpha(self) -> float:
        """(44): the bound on `|w_h| / gamma` during training."""
        return 4 * self.norm * math.sqrt(2 * self.K * self.delta_0) / (self.gamma * self.zeta_0)

    def _L(self, first: float) -> float:
        gamma, alpha, H, K = self.gamma, self.alpha, self.H, self.K
        by_w = (2 * gamma * self.norm**2 * (2 * gamma * H * alpha + self.A)) ** 2 / K
        by_w += gamma**4 * H**2 * self.norm**4 / K**2
        ag = alpha * gamma * H
        by_Q = max(1.0, 4 * K * alpha**2) * (ag**2 + 4 * self.N * (ag + self.A) ** 2)
        return math.sqrt(2 * by_w + first * by_Q)

    @property
    def L(self) -> float:
        return self._L(16 * (self.gamma * self.f_max * self.norm) ** 2 / self.K)

    @property
    def L_printed(self) -> float:
        return self._L(8 * self.gamma * self.f_max * self.norm)

    @property
    def eta_Q(self) -> float:
        """(16), the largest."""
        return 1 / self.L

    @property
    def eta_w(self) -> float:
        return self.gamma**2 / self.L

    @property
    def rate(self) -> float:
        """What (18) takes off the gap in a step: `eta_w zeta_0 / (2 K)`."""
        return self.eta_w * self.zeta_0 / (2 * self.K)

    def bound(self, steps: Tensor) -> Tensor:
        """(18) at each of the steps."""
        return self.delta_0 * torch.exp(steps * math.log1p(-self.rate))


def zeta_0(model: OneLayer) -> float:
    """(14), `min_k lambda_min(B_k B_k^T)` with `B_k = Zbar C_k`, at the model's present Q.

    In float64 whatever the model's own precision: rounding would make a singular matrix seem regular.
    """
    problem = model.problem
    if model.heads < problem.N:
        return 0.0
    with torch.no_grad():
        s = attention(problem.tokens, model.Q.to(torch.float64), problem.N).permute(2, 0, 1).cpu()  # C_k^T, (K, H, N)
        values, vectors = torch.linalg.eigh(problem.moments().S.cpu())
        root = vectors * values.clamp(min=0).sqrt() @ vectors.T
        return float(torch.linalg.svdvals(s @ root)[:, -1].min() ** 2)


def constants(model: OneLayer, gamma: float | None = None) -> BoundConstants:
    """Theorem 1's constants for a model at its start (`w = 0`); `gamma` None: twenty times the least of (15).

    A larger gamma brings the rate nearer to its limit `zeta_0 / (2 sqrt(2) H |Zbar|^2)`.
    """
    problem = model.problem
    if not bool((model.w == 0).all()):
        raise InlayError("Theorem 1's constants are those of the start: this model has been trained. Make a new one.")
    eigenvalues = torch.linalg.eigvalsh(problem.moments().S)
    if float(eigenvalues[0]) <= ROUNDING * float(eigenvalues[-1]):
        raise InlayError(
            f"tau = {problem.tau}, N = {problem.N}, m = {problem.m}: Z^T Z + m tau I is singular, so zeta_0 = 0 and "
            "Theorem 1 says nothing. It needs tau > 0, or N <= m with independent f(v_i)."
        )
    zeta = zeta_0(model)
    norm = math.sqrt(float(eigenvalues[-1]))
    if zeta <= ROUNDING * norm**2:
        why = (
            f"{model.heads} heads for N = {problem.N} tokens"
            if model.heads < problem.N
            else "attention without full rank"
        )
        raise InlayError(
            f"zeta_0 = {zeta:.2g} ({why}): Assumption 2 does not hold in floating point, and Theorem 1 says nothing. "
            f"Take H >= N = {problem.N}, tokens of norm 1, and few of them."
        )
    f_max = math.sqrt(float(problem.moments().S.diagonal().max()))
    A = float(torch.linalg.matrix_norm(problem.moments().minimiser(), 2))
    found = BoundConstants(problem.K, problem.N, model.heads, norm, f_max, A, model.gap(), zeta, 1.0)
    least = found.least_gamma
    if gamma is not None and gamma < least:
        raise InlayError(f"gamma = {gamma}: (15) asks for {least:.6g} or more.")
    return BoundConstants(**{**vars(found), "gamma": 20 * least if gamma is None else gamma})


def needed_steps(problem: InContextProblem, found: BoundConstants, epsilon: float, delta: float, B: float) -> int:
    """Theorem 2's T (21), for `|lambda| <= B`, error epsilon and probability 1 - delta."""
    if problem.tau == 0:
        raise InlayError(
            "tau = 0: Theorem 2 divides by m tau and says nothing. The ridge solution itself is there: star()."
        )
    if not (epsilon > 0 and 0 < delta < 1 and B > 0):
        raise InlayError(f"epsilon = {epsilon}, delta = {delta}, B = {B}: give epsilon > 0, 0 < delta < 1, B > 0.")
    rest = math.log(1 / delta)
    spread = float(torch.linalg.matrix_norm(problem.Z, 2))
    spread += math.sqrt(problem.tau * (2 * math.sqrt(problem.N * rest) + 2 * rest + problem.N))
    inside = B**2 * found.delta_0 * spread**2 / (problem.m * problem.tau * epsilon)
    return max(1, math.ceil(math.log(inside) / -math.log1p(-found.rate)))


def assumptions(model: OneLayer, B: float | None = None) -> list[MeasuredClaim]:
    """Assumptions 1 to 4, and what the proofs use besides, on this instance."""
    problem = model.problem
    tasks, lengths = problem.tasks, problem.tokens.norm(dim=1)
    entry = distinct_row(problem.tokens, problem.N)
    sizes = torch.linalg.eigvalsh(problem.moments().S)
    zeta, largest = zeta_0(model), float(sizes[-1])
    singular = float(sizes[0]) <= ROUNDING * largest
    return [
        MeasuredClaim(
            "Assumption 1: E[lambda_i] = 0, E[lambda_i^2] = 1",
            f"mean {tasks.mean:g}, second moment {tasks.variance + tasks.mean**2:g}",
            verdict(tasks.mean == 0 and tasks.variance == 1),
        ),
        MeasuredClaim(
            "Assumption 2: every B_k at the start has full row rank",
            f"zeta_0 = {zeta:.2g} beside |Zbar|^2 = {largest:.2g}; {model.heads} heads, N = {problem.N}"
            + (f"; Zbar itself is singular: tau = {problem.tau:g}, m = {problem.m}" if singular else ""),
            verdict(zeta > ROUNDING * largest),
        ),
        MeasuredClaim(
            "Assumption 3: one entry distinguishes all tokens of the prompt",
            "none" if entry is None else f"entry {entry}",
            verdict(entry is not None),
        ),
        MeasuredClaim(
            "Assumption 4: |lambda| <= B at inference",
            "no bound was given; normal lambda have none" if B is None else f"B = {B:g}",
            "cannot tell" if B is None else verdict(B > 0),
        ),
        MeasuredClaim(
            "section 2: tokens of norm 1 (Lemma 7 uses it)",
            f"norms {float(lengths.min()):.3g} to {float(lengths.max()):.3g}",
            verdict(bool(((lengths - 1).abs() < 1e-9).all())),
        ),
    ]
