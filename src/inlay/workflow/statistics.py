"""What numbers over a few seeds allow one to say: intervals, paired tests, and words for what cannot be told apart.

All is paired by seed: two methods with the same seed had the same data, the same split and the same new head. A
difference is called one only where two tests agree. The paired bootstrap assumes little of how the numbers are
distributed, but with a handful of seeds it is too sure of itself; the paired t-test is honest about few seeds, but
believes in normal numbers. Several methods against one baseline are several chances to be wrong: Holm's correction
raises the t-test's p accordingly. A reference that was not named beforehand but is the best of what came out has been
chosen among all pairs, and is corrected for all of them: otherwise one in ten comparisons of ten equal methods, and two
in ten of twenty, would call some of them worse.
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


def holm(values: Sequence[float | None], family: int | None = None) -> list[float | None]:
    """p-values of several tests, raised so that one wrong verdict among them all is as unlikely as they say (Holm).

    `family` is the number of tests that these are the pick of; None: these are all.
    """
    order = sorted((p, index) for index, p in enumerate(values) if p is not None)
    raised: list[float | None] = [None] * len(values)
    largest = 0.0
    for rank, (p, index) in enumerate(order):
        largest = max(largest, min(1.0, p * ((family or len(order)) - rank)))
        raised[index] = largest
    return raised


def pairs_among(methods: int) -> int:
    """How many pairs there are: the family of tests where each method is held against the best of them all."""
    return methods * (methods - 1) // 2


def pick(tried: Sequence[Mapping[int, float]], failed: Sequence[int]) -> tuple[int, list[float | None]]:
    """Which of several variants of a method is the best by validation, and the score of each.

    `tried` are a value a seed, greater for better; `failed`, how many of each one's runs failed. Scores are means over
    the seeds that all have; where there is none, only those with the most seeds are scored. A variant whose runs failed
    more often than another's is not picked, however well the rest of them did. The first of equals is.
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
    """One word for a difference; `p` is the t-test's, corrected for the number of tests."""
    if found.pairs < FEWEST:
        return "too few seeds"
    low, high = found.low or 0.0, found.high or 0.0
    if p is None or p >= 1 - LEVEL or low <= 0 <= high:
        return "not distinguishable"
    return "better" if (found.difference > 0) == greater_is_better else "worse"


def better_than(values: Sequence[Mapping[int, float]], *, greater_is_better: bool = True) -> list[set[int]]:
    """For each of several methods (a value a seed), the numbers of those that it is significantly better than.

    All pairs are tested, over the seeds that both have, and corrected for all of them.
    """
    pairs = [(one, other) for one in range(len(values)) for other in range(one)]
    tests = [
        paired([values[one][seed] for seed in common], [values[other][seed] for seed in common])
        for one, other in pairs
        if (common := sorted(values[one].keys() & values[other].keys()))
    ]
    tested = [pair for pair in pairs if values[pair[0]].keys() & values[pair[1]].keys()]
    found: list[set[int]] = [set() for _ in values]
    for (one, other), test, p in zip(tested, tests, holm([test.p for test in tests]), strict=True):
        word = verdict(test, p, greater_is_better=greater_is_better)
        if word == "better":
            found[one].add(other)
        elif word == "worse":
            found[other].add(one)
    return found


def front(costs: Sequence[float | None], better: Sequence[set[int]]) -> list[bool]:
    """Which methods are worth their cost: each is significantly better than all that cost less, and no other that costs
    the same is better than it. A method whose cost is not known is on no front."""

    def beaten(one: int, cost: float) -> bool:
        return any(
            (price < cost and other not in better[one]) or (price == cost and one in better[other])
            for other, price in enumerate(costs)
            if price is not None
        )

    return [cost is not None and not beaten(one, cost) for one, cost in enumerate(costs)]
