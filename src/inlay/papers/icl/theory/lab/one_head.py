"""Section 3.3: what the trained transformer stands for, and why one head cannot learn it."""

from __future__ import annotations

import torch
from scipy.optimize import nnls
from torch import Tensor

from inlay.papers.findings import Finding, MeasuredClaim, Row, Tick, verdict
from inlay.papers.icl.theory import ridge
from inlay.papers.icl.theory.descent import train
from inlay.papers.icl.theory.model import OneLayer, quadratic
from inlay.papers.icl.theory.problem import InContextProblem
from inlay.papers.icl.theory.setting import InContextSetting, Show, span

N, K, D, M, TAU = 6, 12, 5, 4, 0.1
TOO_FEW = 3  # examples, fewer than m
DRAWS, TRAINED, STEPS, RATE = 20, 5, 2000, 0.01
EXACT = 1e-9  # what counts as equal in float64
LABEL, LABEL_FEW = "error of (26), N >= m", "error of (26), N < m"
STAR, SIGNS = "y* of (20) from <y, A_k>", "share of the columns of A with both signs"
POSSIBLE, ONE, MANY = "least gap of one head", "gap of one head, trained", "gap of N heads, trained"


def drawn(seed: int, examples: int = N, tau: float = TAU) -> InContextProblem:
    """A problem of this experiment: tokens of norm 1, as section 2 has them."""
    return InContextProblem.sample(examples, K, D, M, tau, seed, unit=True)


def label_error(problem: InContextProblem, seed: int) -> float:
    """The largest `|y_k - <y, Z^+ Zhat_k>|` (26) over 200 prompts, relative to the largest label."""
    prompts = problem.prompts(200, seed)
    found = prompts.shown @ (torch.linalg.pinv(problem.Z) @ torch.cat([problem.Z, problem.ZQ], 1))
    return float((found - prompts.y).abs().max() / prompts.y.abs().max())


def star_error(problem: InContextProblem) -> float:
    """The largest difference of `A = S^-1 C` (34) and the ridge regression of (20): (27)."""
    return float((problem.moments().minimiser() - ridge.star(problem)).abs().max())


def one_signed(problem: InContextProblem) -> Tensor:
    """Of coefficients whose columns have entries of one sign, as `w softmax(.)` has, those of the least loss (9).

    Column by column two non-negative least squares: `min |L^T a - L^-1 c_k|` with `S = L L^T`, for `a` and for `-a`.
    """
    moments = problem.moments()
    lower = torch.linalg.cholesky(moments.S)
    wanted = torch.linalg.solve_triangular(lower, moments.C, upper=False)
    columns = []
    for k in range(problem.K):
        tried = [(*nnls(lower.mT.numpy(), (sign * wanted[:, k]).numpy()), sign) for sign in (1.0, -1.0)]
        found, _, sign = min(tried, key=lambda one: one[1])
        columns.append(sign * torch.from_numpy(found))
    return torch.stack(columns, 1)


def least_gap(problem: InContextProblem) -> float:
    """`L - inf L` of those coefficients, as (36) has it: no one head has less."""
    moments = problem.moments()
    return float(quadratic(one_signed(problem) - moments.minimiser(), moments.S)) / 2


def section_3_3(setting: InContextSetting, tick: Tick, show: Show) -> Finding:
    """(26) and (27) as identities; the least gap that one head leaves, whatever Q and w; trainings of 1 and N heads."""
    tick("section 3.3")
    numbers: dict[str, list[float]] = {name: [] for name in (LABEL, LABEL_FEW, STAR, SIGNS, POSSIBLE, ONE, MANY)}
    for draw in range(DRAWS):
        seed = setting.seed * DRAWS + draw
        numbers[LABEL].append(label_error(drawn(seed, tau=0.0), seed))
        numbers[LABEL_FEW].append(label_error(drawn(seed, TOO_FEW, tau=0.0), seed))
        problem = drawn(seed)
        A = problem.moments().minimiser()
        numbers[STAR].append(star_error(problem))
        numbers[SIGNS].append(float(((A.amin(0) < -EXACT) & (A.amax(0) > EXACT)).double().mean()))
        numbers[POSSIBLE].append(least_gap(problem))
        for name, heads in ((ONE, 1), (MANY, N)) if draw < TRAINED else ():
            trace = train(OneLayer(problem, heads, seed=seed), STEPS, rate=RATE, every=STEPS)
            numbers[name].append(trace.gap[-1])
    rows: list[Row] = [(name, draw, value) for name, values in numbers.items() for draw, value in enumerate(values)]
    facts = {**setting.facts("section-3-3"), "N": N, "K": K, "d": D, "m": M, "tau": TAU, "unit": True}
    facts |= {"draws": DRAWS, "trained": TRAINED, "training steps": STEPS, "training rate": RATE}
    return Finding("icl-section-3-3", ("number", "draw", "value"), rows, _claims(numbers), facts)


def _claims(numbers: dict[str, list[float]]) -> list[MeasuredClaim]:
    possible, one, many = (numbers[name] for name in (POSSIBLE, ONE, MANY))
    passed = [end < least for end, least in zip(many, possible, strict=False)]
    return [
        MeasuredClaim(
            "without noise and with N >= m the label is <y, Z^+ Zhat_k> (26)",
            f"relative error {span(numbers[LABEL], '.1g')} in {DRAWS} draws; with N < m {span(numbers[LABEL_FEW])}",
            verdict(max(numbers[LABEL]) < EXACT < min(numbers[LABEL_FEW])),
        ),
        MeasuredClaim(
            "y* is <y, A_k> (27)",
            f"A of (34) and the ridge regression (20) differ by at most {max(numbers[STAR]):.1g}",
            verdict(max(numbers[STAR]) < EXACT),
        ),
        MeasuredClaim(
            "one head cannot reach the least loss, as the entries of w softmax(.) have one sign",
            f"{span(numbers[SIGNS], '.0%')} of A's columns have both signs; any one head leaves a gap of at least "
            f"{span(possible)}",
            verdict(min(possible) > EXACT),
        ),
        MeasuredClaim(
            "trained, one head stays above that",
            f"after {STEPS} steps of Adam a gap of {span(one)} in {TRAINED} draws",
            verdict(all(end >= least for end, least in zip(one, possible, strict=False))),
        ),
        MeasuredClaim(
            f"trained, N = {N} heads come below what one head can reach",
            f"after {STEPS} steps of Adam a gap of {span(many)}; below it in {sum(passed)} of {TRAINED} draws",
            verdict(all(passed)),
        ),
    ]
