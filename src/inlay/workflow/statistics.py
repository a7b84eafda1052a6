"""What numbers over a few seeds allow one to say: intervals, paired tests, and words for what cannot be told apart.

All is paired by seed: two methods with the same seed had the same data, the same split and the same new head. A
difference is called one only where two tests agree. The paired bootstrap assumes little of how the numbers are
distributed, but with a handful of seeds it is too sure of itself; the paired t-test is honest about few seeds, but
believes in normal numbers. Several methods against one baseline are several chances to be wrong: Holm's correction
raises the t-test's p accordingly.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Literal

import numpy as np

DRAWS = 10_000
LEVEL = 0.95
ROUNDING = 1e-12  # relative: gaps that differ by less are the same
FEWEST = 3  # pairs: two differences and their one number of spread decide nothing
Verdict = Literal["better", "worse", "not distinguishable", "too few seeds"]


@dataclass(frozen=True)
class Paired:
    """One set of numbers less another, pair by pair: the mean difference, its standard error, a bootstrap interval of
    `LEVEL`, and the paired t-test's p (the sign test's, where all differ by the same amount); None where there are too
    few pairs, or for p where nothing differs."""

    difference: float
    error: float | None
    low: float | None
    high: float | None
    p: float | None
    pairs: int


def standard_error(values: Sequence[float]) -> float | None:
    """s / sqrt(n); None for a single value."""
    return stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None


def half_width(values: Sequence[float], level: float = LEVEL) -> float | None:
    """t * s / sqrt(n): half of the confidence interval of a mean; None when one value says nothing of the spread."""
    from scipy.stats import t

    if len(values) < 2:
        return None
    return float(t.ppf((1 + level) / 2, len(values) - 1)) * stdev(values) / math.sqrt(len(values))


def bootstrap(
    gaps: Sequence[float], *, seed: int = 0, draws: int = DRAWS, level: float = LEVEL
) -> tuple[float, float] | None:
    """The percentile interval of the mean of `gaps`, drawn anew with replacement; None for a single one."""
    if len(gaps) < 2:
        return None
    values = np.asarray(gaps, dtype=np.float64)
    drawn = np.random.Generator(np.random.PCG64(seed)).integers(len(values), size=(draws, len(values)))
    low, high = np.quantile(values[drawn].mean(axis=1), [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def paired(mine: Sequence[float], theirs: Sequence[float], *, seed: int = 0) -> Paired:
    """`mine` less `theirs`, pair by pair."""
    from scipy.stats import ttest_rel

    gaps = [a - b for a, b in zip(mine, theirs, strict=True)]
    p, rounding = None, ROUNDING * max(map(abs, (*mine, *theirs)))
    if len(gaps) > 1 and max(gaps) - min(gaps) > rounding:
        p = float(ttest_rel(mine, theirs).pvalue)
    elif len(gaps) > 1 and abs(gaps[0]) > rounding:
        p = 2.0 ** (1 - len(gaps))  # all by the same amount: no spread for a t-test, so by their signs
    low, high = bootstrap(gaps, seed=seed) or (None, None)
    return Paired(fmean(gaps), standard_error(gaps), low, high, p, len(gaps))


def holm(values: Sequence[float | None]) -> list[float | None]:
    """p-values of several tests, raised so that one wrong verdict among them all is as unlikely as they say (Holm)."""
    order = sorted((p, index) for index, p in enumerate(values) if p is not None)
    raised: list[float | None] = [None] * len(values)
    largest = 0.0
    for rank, (p, index) in enumerate(order):
        largest = max(largest, min(1.0, p * (len(order) - rank)))
        raised[index] = largest
    return raised


def verdict(found: Paired, p: float | None, *, greater_is_better: bool) -> Verdict:
    """One word for a difference; `p` is the t-test's, corrected for the number of tests."""
    if found.pairs < FEWEST:
        return "too few seeds"
    low, high = found.low or 0.0, found.high or 0.0
    if p is None or p >= 1 - LEVEL or low <= 0 <= high:
        return "not distinguishable"
    return "better" if (found.difference > 0) == greater_is_better else "worse"


def pareto(points: Sequence[tuple[float | None, float]], *, greater_is_better: bool = True) -> list[bool]:
    """Which (cost, score) points no other beats: none costs as little and scores higher, or scores as high for less.

    A point without a cost is on no front.
    """
    sign = 1 if greater_is_better else -1
    known = [(cost, sign * score) for cost, score in points if cost is not None]

    def on_front(cost: float, score: float) -> bool:
        return not any(c <= cost and s >= score and (c < cost or s > score) for c, s in known)

    return [cost is not None and on_front(cost, sign * score) for cost, score in points]
