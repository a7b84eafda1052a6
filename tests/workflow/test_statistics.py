"""Statistics against plain float64 versions written here."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from inlay.workflow.statistics import (
    Paired,
    better_than,
    bootstrap,
    front,
    holm,
    paired,
    pairs_among,
    pick,
    standard_error,
    verdict,
)

numbers = st.floats(-3, 3).map(lambda x: round(x, 3))


def exact_bootstrap(gaps: list[float], level: float) -> tuple[float, float]:
    """The percentile interval over every way to draw with replacement, all equally likely; inverted empirical CDF."""
    means = sorted(sum(draw) / len(gaps) for draw in itertools.product(gaps, repeat=len(gaps)))
    return tuple(means[min(len(means) - 1, math.floor(q * len(means)))] for q in ((1 - level) / 2, (1 + level) / 2))


@pytest.mark.parametrize("gaps", [[0.1, 0.3, -0.2, 0.25], [1.0, 2.0, 3.0], [0.01, 0.02, 0.04, 0.03, 0.05]])
def test_bootstrap_is_that_of_all_draws(gaps: list[float]) -> None:
    low, high = bootstrap(gaps)
    wanted = exact_bootstrap(gaps, 0.95)
    # One step of the exact distribution either way: 10,000 draws place a quantile no closer.
    steps = sorted({round(sum(draw) / len(gaps), 12) for draw in itertools.product(gaps, repeat=len(gaps))})
    coarse = max(b - a for a, b in itertools.pairwise(steps))
    assert low == pytest.approx(wanted[0], abs=coarse)
    assert high == pytest.approx(wanted[1], abs=coarse)
    assert bootstrap(gaps) == (low, high), "the same seed draws the same"
    assert bootstrap([0.5]) is None


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(numbers, numbers), min_size=1, max_size=6))
def test_pairs_against_plain_formulas(pairs: list[tuple[float, float]]) -> None:
    mine, theirs = [a for a, _ in pairs], [b for _, b in pairs]
    found = paired(mine, theirs)
    gaps = [a - b for a, b in pairs]
    n, mean = len(gaps), sum(gaps) / len(gaps)
    assert found.pairs == n
    assert found.difference == pytest.approx(mean, abs=1e-12)
    if n == 1:
        assert (found.error, found.low, found.high, found.p) == (None, None, None, None)
        return
    variance = sum((gap - mean) ** 2 for gap in gaps) / (n - 1)
    assert found.error == pytest.approx(math.sqrt(variance / n), abs=1e-12)
    assert min(gaps) - 1e-12 <= found.low <= found.high <= max(gaps) + 1e-12
    if variance > 1e-12:
        t = mean / math.sqrt(variance / n)
        assert found.p == pytest.approx(2 * stats.t.sf(abs(t), n - 1), rel=1e-6)


def test_equal_gaps_are_judged_by_their_signs() -> None:
    assert paired([0.9, 0.8, 0.7], [0.8, 0.7, 0.6]).p == 0.25, "0.9 - 0.8 is not quite 0.7 - 0.6"
    assert paired([1.0, 2.0], [1.0, 2.0]).p is None


@given(st.lists(st.one_of(st.none(), st.floats(0, 1)), max_size=8))
def test_holm_against_its_definition(values: list[float | None]) -> None:
    """The adjusted p of a hypothesis: the largest of (m - j + 1) p_(j) over all that are no larger, at most 1."""
    raised, known = holm(values), sorted(p for p in values if p is not None)
    for p, found in zip(values, raised, strict=True):
        if p is None:
            assert found is None
            continue
        last = max(j for j, q in enumerate(known) if q == p)
        wanted = max((len(known) - j) * q for j, q in enumerate(known[: last + 1]))
        assert found is not None
        assert found <= min(1.0, wanted) + 1e-12
        assert found >= p


def test_the_best_of_several_equals_is_not_called_better() -> None:
    """Ten equal methods, five seeds, 200 times: held against the best of them, too many would be called worse unless
    all pairs are corrected for."""
    rng, wrong = random.Random(0), Counter[str]()
    for _ in range(200):
        rows = sorted(([rng.gauss(0.8, 0.02) for _ in range(5)] for _ in range(10)), key=sum)
        tests = [stats.ttest_rel(row, rows[-1]).pvalue for row in rows[:-1]]
        wrong["as if named before"] += min(holm(tests)) < 0.05
        wrong["over all pairs"] += min(holm(tests, pairs_among(10))) < 0.05
    assert wrong["over all pairs"] / 200 <= 0.07 < wrong["as if named before"] / 200


def test_the_pick_is_by_common_seeds_and_does_not_reward_failures() -> None:
    assert pick([{0: 0.5, 1: 0.9}, {0: 0.6}], [0, 0]) == (1, [0.5, 0.6]), "seed 1 is not common"
    assert pick([{0: 0.5, 1: 0.5}, {0: 0.9}], [0, 1]) == (0, [0.5, 0.9]), "one of its runs failed"
    assert pick([{0: 0.5, 1: 0.5}, {2: 0.9}], [0, 0]) == (0, [0.5, None]), "nothing common: by the most seeds"
    assert pick([{0: 0.5}, {0: 0.5}], [0, 0])[0] == 0
    assert pick([{}, {0: 0.1}], [0, 0]) == (1, [None, 0.1])


def test_verdicts() -> None:
    clear = paired([0.9, 0.91, 0.92, 0.93], [0.5, 0.52, 0.51, 0.54])
    assert verdict(clear, clear.p, greater_is_better=True) == "better"
    assert verdict(clear, clear.p, greater_is_better=False) == "worse"
    assert verdict(clear, 0.06, greater_is_better=True) == "not distinguishable"
    assert verdict(Paired(0.1, 0.01, -0.1, 0.2, 0.001, 5), 0.001, greater_is_better=True) == "not distinguishable"
    assert verdict(paired([1.0, 1.1], [0.1, 0.2]), 0.001, greater_is_better=True) == "too few seeds"
    assert verdict(paired([1.0] * 3, [1.0] * 3), None, greater_is_better=True) == "not distinguishable"


def test_equal_methods_are_seldom_told_apart() -> None:
    """Numbers from one distribution, five seeds, 400 times: at most the 5 % that the level allows."""
    rng, wrong = random.Random(0), 0
    for _ in range(400):
        mine, theirs = ([rng.gauss(0.8, 0.02) for _ in range(5)] for _ in range(2))
        found = paired(mine, theirs)
        wrong += verdict(found, found.p, greater_is_better=True) != "not distinguishable"
    assert wrong / 400 <= 0.07


@given(st.lists(st.tuples(st.one_of(st.none(), st.integers(0, 5)), st.integers(0, 5)), max_size=7))
def test_the_front_of_methods_that_differ_is_paretos(points: list[tuple[int | None, int]]) -> None:
    """Where every difference is significant, no other costs as little and scores higher, or scores as high for less."""
    better = [{other for other, (_, s) in enumerate(points) if s < score} for _, score in points]
    found = front([cost for cost, _ in points], better)
    for (cost, score), on in zip(points, found, strict=True):
        if cost is None:
            assert not on
            continue
        rivals = [(c, s) for c, s in points if c is not None]
        assert on == (not any((c <= cost and s > score) or (c < cost and s >= score) for c, s in rivals))


@given(st.lists(st.one_of(st.none(), st.integers(0, 5)), max_size=7))
def test_where_nothing_differs_only_the_cheapest_are_on_the_front(costs: list[int | None]) -> None:
    known = [cost for cost in costs if cost is not None]
    expected = [cost is not None and cost == min(known) for cost in costs]
    assert front(costs, [set() for _ in costs]) == expected


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 3), st.integers(0, 5)), min_size=1, max_size=6),
)
def test_what_the_spread_of_costs_decides_is_on_no_front(points: list[tuple[int, int, int]]) -> None:
    """On the front is only what is on it wherever in its spread each cost lies, ties left aside; none is added."""
    better = [{other for other, (_, _, s) in enumerate(points) if s < score} for _, _, score in points]
    costs, spreads = [float(cost) for cost, _, _ in points], [float(spread) for _, spread, _ in points]
    found = front(costs, better, spreads)
    plain = front(costs, better)
    assert not any(on and not before for on, before in zip(found, plain, strict=True))
    assert front(costs, better, [0.0] * len(points)) == plain == front(costs, better, [None] * len(points))
    for one, on in enumerate(found):
        rivals = [other for other in range(len(points)) if costs[other] != costs[one]]
        reached = [other for other in rivals if costs[other] - spreads[other] < costs[one] + spreads[one]]
        alike = [other for other in range(len(points)) if costs[other] == costs[one]]
        beaten = any(other not in better[one] for other in reached) or any(one in better[other] for other in alike)
        assert on == (not beaten)


def test_better_than_is_over_common_seeds_and_corrected_for_all_pairs() -> None:
    noise = (0.0, 0.011, -0.02, 0.015, -0.005)
    good, bad = ({seed: mean + more for seed, more in enumerate(noise)} for mean in (0.9, 0.5))
    same = {seed: 0.9 - more for seed, more in enumerate(noise)}
    bad = {seed: value + 0.001 * seed for seed, value in bad.items()}
    assert better_than([good, bad, same]) == [{1}, set(), {1}]
    assert better_than([good, bad, same], greater_is_better=False) == [set(), {0, 2}, set()]
    assert better_than([good, {9: 0.1}]) == [set(), set()], "no seed in common"
    assert better_than([{0: 0.9, 1: 0.91}, {0: 0.1, 1: 0.12}]) == [set(), set()], "two seeds decide nothing"


def test_standard_error_of_one_is_unknown() -> None:
    assert standard_error([1.0]) is None
