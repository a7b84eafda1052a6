"""Tests of differences over a few seeds: intervals, paired tests, and one word for what they allow.

All tests are paired by seed: two methods with the same seed had the same data, the same split and the same new head.
Two methods differ significantly only where two tests agree. The paired bootstrap assumes little about the distribution,
but its interval is too narrow with a handful of seeds. The paired t-test is valid for few seeds, but assumes normal
values. Several methods against one baseline are several chances to be wrong: Holm's correction raises the t-test's p
accordingly. A reference that was not named beforehand, but is the best of the results, was selected among all pairs and
is corrected for all of them. Otherwise one in ten comparisons of ten equal methods, and two in ten of twenty, would
call some of them worse.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Literal

import numpy as np

DRAWS = 10_000
LEVEL = 0.95
ROUNDING = 1e-12  # relative: gaps that differ by less are the same
FEWEST = 3  # pairs: two differences are too few for a test
Verdict = Literal["better", "worse", "not distinguishable", "too few seeds"]


@dataclass(frozen=True)
class Paired:
    """One set of values less another, pair by pair: the mean difference, its standard error, a bootstrap interval of
    `LEVEL`, and the paired t-test's p (the sign test's, where all differ by the same amount). None where there are too
    few pairs; p also where nothing differs."""

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
    """t * s / sqrt(n): half the width of the confidence interval of a mean; None for a single value."""
    from scipy.stats import t

    if len(values) < 2:
        return None
    return float(t.ppf((1 + level) / 2, len(values) - 1)) * stdev(values) / math.sqrt(len(values))


def bootstrap(
    gaps: Sequence[float], *, seed: int = 0, draws: int = DRAWS, level: float = LEVEL
) -> tuple[float, float] | None:
    """The percentile bootstrap interval of the mean of `gaps`; None for a single one."""
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


def holm(values: Sequence[float | None], family: int | None = None) -> list[float | None]:
    """p-values of several tests, corrected for their number by Holm's method.

    `family` is the number of tests that these were selected from; None: these are all.
    """
    order = sorted((p, index) for index, p in enumerate(values) if p is not None)
    raised: list[float | None] = [None] * len(values)
    largest = 0.0
    for rank, (p, index) in enumerate(order):
        largest = max(largest, min(1.0, p * ((family or len(order)) - rank)))
        raised[index] = largest
    return raised


def pairs_among(methods: int) -> int:
    """The number of pairs: the family of tests where each method is tested against the best of all."""
    return methods * (methods - 1) // 2


def pick(tried: Sequence[Mapping[int, float]], failed: Sequence[int]) -> tuple[int, list[float | None]]:
    """Which of several variants of a method is the best on the validation set, and the score of each.

    `tried` has a value for each seed, greater for better; `failed`, how many runs of each variant failed. Scores are
    means over the seeds that all have; where there is none, only those with the most seeds are scored. A variant of
    which more runs failed than of another is not picked. Of equals the first is.
    """
    shared = set.intersection(*map(set, tried))
    most = max(map(len, tried))
    scores = [
        fmean(value for seed, value in each.items() if not shared or seed in shared)
        if each and (shared or len(each) == most)
        else None
        for each in tried
    ]
    known = [index for index, score in enumerate(scores) if score is not None]
    return min(known, key=lambda index: (failed[index], -(scores[index] or 0.0), index)), scores


def verdict(found: Paired, p: float | None, *, greater_is_better: bool) -> Verdict:
    """The verdict on a difference; `p` is the t-test's, corrected for the number of tests."""
    if found.pairs < FEWEST:
        return "too few seeds"
    low, high = found.low or 0.0, found.high or 0.0
    if p is None or p >= 1 - LEVEL or low <= 0 <= high:
        return "not distinguishable"
    return "better" if (found.difference > 0) == greater_is_better else "worse"


def better_than(values: Sequence[Mapping[int, float]], *, greater_is_better: bool = True) -> list[set[int]]:
    """For each of several methods (a value for each seed), the indices of those that it is significantly better than.

    All pairs are tested, over the seeds that both have, and corrected for all of them.
    """
    tests = {
        (one, other): paired([values[one][seed] for seed in common], [values[other][seed] for seed in common])
        for one in range(len(values))
        for other in range(one)
        if (common := sorted(values[one].keys() & values[other].keys()))
    }
    found: list[set[int]] = [set() for _ in values]
    for ((one, other), test), p in zip(tests.items(), holm([test.p for test in tests.values()]), strict=True):
        word = verdict(test, p, greater_is_better=greater_is_better)
        if word == "better":
            found[one].add(other)
        elif word == "worse":
            found[other].add(one)
    return found


def front(
    costs: Sequence[float | None], better: Sequence[set[int]], spreads: Sequence[float | None] | None = None
) -> list[bool]:
    """Which methods are worth their cost: significantly better than all that cost less, and no method of the same cost
    is significantly better. A method whose cost is not known is on no front.

    Of costs that were measured, with `spreads`, one that may be less, as the two overlap, counts as less: whatever the
    spread alone decides is on no front.
    """
    widths = [width or 0.0 for width in spreads] if spreads is not None else [0.0] * len(costs)

    def beaten(one: int, cost: float) -> bool:
        def may_be_less(other: int, price: float) -> bool:
            return price != cost and price - widths[other] < cost + widths[one]

        return any(
            (may_be_less(other, price) and other not in better[one]) or (price == cost and one in better[other])
            for other, price in enumerate(costs)
            if price is not None
        )

    return [cost is not None and not beaten(one, cost) for one, cost in enumerate(costs)]
