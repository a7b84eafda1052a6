"""Methods over tasks: ranks and tests against scipy and against plain enumeration written here."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy import stats

from inlay.workflow.over_tasks import (
    FEWEST_TASKS,
    cliques,
    fewest_tasks,
    friedman,
    over_tasks,
    rank,
    sentences,
    sign_test,
    signed_rank,
)
from inlay.workflow.statistics import holm

few = st.integers(-4, 4).map(float)  # coarse, so that ties and zeros are common
gaps_of = st.lists(few, min_size=1, max_size=9)


def tables(tasks: tuple[int, int], methods: tuple[int, int]) -> st.SearchStrategy[np.ndarray]:
    """Scores, many of them equal."""
    return st.tuples(st.integers(*tasks), st.integers(*methods)).flatmap(
        lambda shape: st.lists(
            st.lists(few, min_size=shape[1], max_size=shape[1]), min_size=shape[0], max_size=shape[0]
        ).map(np.array)
    )


def scored(table: np.ndarray, names: str = "abcdefghijkl") -> dict[str, dict[str, float]]:
    return {f"task {i}": {names[j]: float(v) for j, v in enumerate(row)} for i, row in enumerate(table)}


def every_sign(gaps: list[float]) -> float:
    """Pratt's signed-rank test by trying all signs, in plain Python."""
    sizes = [abs(gap) for gap in gaps]
    ranks = [(sum(s < size for s in sizes) + sum(s <= size for s in sizes) + 1) / 2 for size in sizes]
    mine = [(r, gap) for r, gap in zip(ranks, gaps, strict=True) if gap != 0]
    seen = sum(r if gap > 0 else -r for r, gap in mine)
    all_sums = [
        sum(sign * r for sign, (r, _) in zip(signs, mine, strict=True))
        for signs in itertools.product((1, -1), repeat=len(mine))
    ]
    return sum(abs(total) >= abs(seen) - 1e-9 for total in all_sums) / len(all_sums)


@given(gaps_of)
@settings(max_examples=150, deadline=None)
def test_signed_rank_is_that_of_all_signs(gaps: list[float]) -> None:
    assert signed_rank(gaps) == pytest.approx(every_sign(gaps), abs=1e-12)


@pytest.mark.parametrize("count", [5, 8, 20, 60])
def test_signed_rank_is_scipys_where_there_are_no_ties(count: int) -> None:
    chance = random.Random(count)
    gaps = [chance.gauss(0.3, 1) for _ in range(count)]
    assert signed_rank(gaps) == pytest.approx(stats.wilcoxon(gaps, method="exact").pvalue, abs=1e-10)


@given(gaps_of)
@settings(max_examples=60, deadline=None)
def test_signed_rank_has_no_side_and_no_unit(gaps: list[float]) -> None:
    assert signed_rank([-gap for gap in gaps]) == pytest.approx(signed_rank(gaps))
    assert signed_rank([gap / 1000 for gap in gaps]) == pytest.approx(signed_rank(gaps))


def test_sign_test() -> None:
    assert sign_test(6, 0) == pytest.approx(2 / 64)
    assert sign_test(0, 0) == 1.0
    assert sign_test(3, 2) == sign_test(2, 3) == 1.0


@given(tables((2, 8), (2, 6)))
@settings(max_examples=60, deadline=None)
def test_ranks_are_scipys_and_sum_to_the_same_in_every_task(table: np.ndarray) -> None:
    ranks = rank(table)
    assert ranks.tolist() == [stats.rankdata([-value for value in row]).tolist() for row in table]
    methods = table.shape[1]
    assert ranks.sum(axis=1) == pytest.approx([methods * (methods + 1) / 2] * len(table))


@given(tables((2, 8), (3, 6)))
@settings(max_examples=60, deadline=None)
def test_friedmans_statistic_is_scipys(table: np.ndarray) -> None:
    chi2, p = friedman(rank(table), draws=50)
    if all(len(set(row)) == 1 for row in table.tolist()):
        assert (chi2, p) == (0.0, 1.0)
    else:
        assert chi2 == pytest.approx(stats.friedmanchisquare(*table.T).statistic)
        assert 0 < p <= 1


def test_friedmans_p_with_few_tasks_is_that_of_all_orders() -> None:
    """3 methods on 4 tasks: 6^4 orders."""
    table = np.array([[3, 2, 1], [3, 1, 2], [3, 2, 1], [2, 3, 1.0]])
    orders = list(itertools.permutations((1, 2, 3)))
    seen = ((rank(table).sum(axis=0) - 8) ** 2).sum()
    sums = [np.sum(rows, axis=0) for rows in itertools.product(orders, repeat=4)]
    exact = np.mean([((total - 8) ** 2).sum() >= seen for total in sums])
    p = friedman(rank(table))[1]
    assert p == pytest.approx(exact, abs=0.01)
    # The chi-square approximation would be off by more than that.
    assert abs(stats.friedmanchisquare(*table.T).pvalue - exact) > 0.01


def test_friedmans_p_with_many_tasks_is_iman_and_davenports() -> None:
    chance = np.random.default_rng(0)
    table = chance.normal(size=(14, 7)) + np.linspace(0, 0.8, 7)
    chi2, p = friedman(rank(table))
    drawn = stats.friedmanchisquare(*table.T).statistic
    assert p == pytest.approx(stats.f.sf(13 * drawn / (14 * 6 - drawn), 6, 6 * 13))
    shuffled = [friedman(rank(chance.permuted(table, axis=1)))[0] for _ in range(2000)]
    assert np.mean(np.array(shuffled) >= chi2) == pytest.approx(p, abs=0.02)
    assert friedman(rank(np.tile(np.arange(7.0), (14, 1))))[1] == 0.0


@pytest.mark.parametrize("methods", [2, 3, 6])
def test_equal_methods_are_seldom_said_to_differ(methods: int) -> None:
    """Methods of pure noise on 9 tasks: a false finding in at most one of twenty tables."""
    chance = np.random.default_rng(methods)
    wrong = sum(
        any(pair.differs for pair in over_tasks("noise", scored(chance.normal(size=(9, methods)))).pairs)
        for _ in range(300)
    )
    assert wrong / 300 <= 0.05 + 3 * (0.05 * 0.95 / 300) ** 0.5


NEAR_THE_LIMIT = np.array([[0.0, 0, 1], [0, 1, 2], [0, -1, 1], [0, -1, 1], [0, -1, 1], [-1, 1, 0], [-1, 1, 0]])


@given(tables((FEWEST_TASKS, 9), (2, 5)), st.randoms())
@example(NEAR_THE_LIMIT, random.Random(2))  # p by draws of 0.05 and a little, or less: by the order of the tasks
@settings(max_examples=40, deadline=None)
def test_the_order_of_tasks_and_methods_does_not_matter(table: np.ndarray, chance: random.Random) -> None:
    scores = scored(table)
    shuffled = {
        task: dict(chance.sample(list(each.items()), len(each)))
        for task, each in chance.sample(list(scores.items()), len(scores))
    }
    one, other = over_tasks("t", scores), over_tasks("t", shuffled)
    assert (one.methods, one.cliques) == (other.methods, other.cliques)
    assert one.ranks == pytest.approx(other.ranks)
    assert list(one.ranks) == sorted(one.ranks)
    of = {frozenset((pair.one, pair.other)): pair.p for pair in other.pairs}
    assert [pair.p for pair in one.pairs] == pytest.approx([of[frozenset((p.one, p.other))] for p in one.pairs])
    assert all(pair.better + pair.equal + pair.worse == len(table) for pair in one.pairs)
    apart = {frozenset((pair.one, pair.other)) for pair in one.pairs if pair.differs}
    for first, last in one.cliques:
        assert not any(frozenset(two) in apart for two in itertools.combinations(one.methods[first : last + 1], 2))


def test_pairs_are_corrected_by_holm() -> None:
    chance = np.random.default_rng(3)
    table = chance.normal(size=(10, 3)) + np.array([0, 1.0, 2.0])
    found = over_tasks("t", scored(table))
    column = {"a": 0, "b": 1, "c": 2}
    raw = [
        stats.wilcoxon(table[:, column[p.one]] - table[:, column[p.other]], method="exact").pvalue for p in found.pairs
    ]
    assert [pair.p for pair in found.pairs] == pytest.approx(holm(raw))


def test_a_clear_order_is_found() -> None:
    """c beats b beats a on all of nine tasks, d is c with noise."""
    chance = np.random.default_rng(1)
    table = np.array([[0.5, 0.6, 0.7, 0.7 + chance.normal() / 100] for _ in range(9)])
    found = over_tasks("m, all examples", scored(table))
    assert set(found.methods[:2]) == {"c", "d"}
    assert found.methods[2:] == ("b", "a")
    assert found.cliques == ((0, 1),)
    (said,) = sentences(found)
    assert said.startswith("Over 9 tasks (m, all examples) the methods differ (Friedman test, p < 0.001).")
    assert f"{found.methods[0]} is significantly better than b, a." in said
    assert f"No significant difference from {found.methods[0]}: {found.methods[1]}." in said
    assert "too few" not in said


def test_a_pair_is_told_by_its_own_test() -> None:
    """b beats a on 13 of 14 tasks; on the last one all others come between them, so a has the better mean rank."""
    others = [f"m{i:02d}" for i in range(16)]
    scores = {
        f"t{t}": {"b": 0.9, "a": 0.8 - t / 1000} | {o: 0.3 + 0.01 * i for i, o in enumerate(others)} for t in range(13)
    }
    scores["t13"] = {"a": 0.9, "b": 0.85} | {o: 0.86 + 0.001 * i for i, o in enumerate(others)}
    found = over_tasks("t", scores)
    assert found.methods[:2] == ("a", "b")
    pair = found.pairs[0]
    assert (pair.one, pair.other, pair.better, pair.worse, pair.differs) == ("a", "b", 1, 13, True)
    assert (pair.favours, pair.gap < 0) == ("b", True)
    (said,) = sentences(found)
    assert "a is significantly better than m15, m14," in said
    assert "b: significantly better than a, against the mean ranks." in said


@pytest.mark.parametrize(("one_unit", "ahead"), [(True, "b"), (False, "a")])
def test_the_direction_is_that_of_the_test(one_unit: bool, ahead: str) -> None:
    """b is far better on 4 tasks, a slightly better on 5: ranks of gaps say b, signs a; equal methods are level."""
    table = np.array([[0.0, 1.0 + i] for i in range(4)] + [[0.0, -0.1 * i] for i in range(1, 6)])
    assert over_tasks("t", scored(table), one_unit=one_unit).pairs[0].favours == ahead
    assert over_tasks("t", scored(np.ones((6, 2))), one_unit=one_unit).pairs[0].favours is None


def test_too_few_tasks_to_tell_pairs_is_said() -> None:
    """Five tasks can show that three methods differ, but no pair of them."""
    found = over_tasks("t", scored(np.tile([0.1, 0.2, 0.3], (5, 1)) + np.arange(5)[:, None] / 7))
    assert found.needed == fewest_tasks(3) == 7
    assert not any(pair.differs for pair in found.pairs)
    assert found.cliques == ((0, 2),)
    (said,) = sentences(found)
    assert "the methods differ (Friedman test, p < 0.001)" in said
    assert "5 tasks are too few for any pair of 3 methods to differ, whatever the scores: that takes 7 tasks." in said


@pytest.mark.parametrize("methods", [2, 3, 4, 8])
def test_the_fewest_tasks_are_the_fewest(methods: int) -> None:
    """On so many tasks methods that win everywhere differ, and on one less they do not."""
    needed = fewest_tasks(methods)
    for tasks, differs in ((needed, True), (needed - 1, False)):
        table = np.add.outer(np.arange(tasks) * 10.0, 2.0 ** np.arange(methods))
        found = over_tasks("t", scored(table))
        assert any(pair.differs for pair in found.pairs) == (differs and tasks >= FEWEST_TASKS)


def test_without_one_unit_only_signs_count() -> None:
    """One method is far better on three tasks of ten and slightly worse on seven."""
    table = np.array([[0.0, 100.0 + i] for i in range(3)] + [[0.0, -0.1 * i] for i in range(1, 8)])
    sizes, signs = (over_tasks("t", scored(table), one_unit=unit) for unit in (True, False))
    assert sizes.pairs[0].p == pytest.approx(stats.wilcoxon(table[:, 1], method="exact").pvalue)
    assert signs.pairs[0].p == pytest.approx(stats.binomtest(3, 10).pvalue)
    assert signs.test == "sign"


def test_rounding_is_no_difference() -> None:
    """0.1 + 0.2 and 0.3 are a tie; gaps of 0.1 between other values are gaps of one size."""
    table = np.array([[(0.1 + 0.2), 0.3]] * 5)
    found = over_tasks("t", scored(table))
    assert found.ranks == (1.5, 1.5)
    assert (found.pairs[0].equal, found.pairs[0].p) == (5, 1.0)
    steps = np.array([[0.3, 0.2], [0.2, 0.1], [0.8, 0.7], [1.1, 1.0], [0.5, 0.6]])
    assert over_tasks("t", scored(steps)).pairs[0].p == pytest.approx(every_sign([1.0, 1, 1, 1, -1]))


def test_all_tied_methods_do_not_differ() -> None:
    found = over_tasks("t", scored(np.ones((6, 4))))
    assert (found.p, found.cliques, found.differ) == (1.0, ((0, 3),), False)
    assert "no difference between the methods is shown (Friedman test, p = 1.000)" in sentences(found)[0]


def test_few_tasks_are_not_ranked() -> None:
    found = over_tasks("vit, all examples", scored(np.eye(4)))
    assert found.refusal == "a ranking needs 5 tasks, and there are 4"
    assert not found.methods
    assert sentences(found) == [f"Methods are not ranked over tasks (vit, all examples): {found.refusal}."]
    assert over_tasks("t", scored(np.ones((6, 1)))).refusal == "a ranking needs two methods, and there is 1"


def test_missing_cells_are_listed() -> None:
    scores = scored(np.arange(24.0).reshape(6, 4))
    del scores["task 1"]["b"], scores["task 4"]["d"]
    found = over_tasks("t", scores)
    assert found.missing == (("task 1", "b"), ("task 4", "d"))
    assert found.refusal == "2 of 24 results are missing: b on task 1, d on task 4"
    assert "Finish these runs, or report on fewer methods (inlay report --methods)." in sentences(found)[0]


@given(st.integers(1, 7), st.sets(st.tuples(st.integers(0, 6), st.integers(0, 6)).filter(lambda two: two[0] < two[1])))
@settings(max_examples=100, deadline=None)
def test_cliques_are_the_longest_stretches_without_a_difference(count: int, apart: set[tuple[int, int]]) -> None:
    def whole(first: int, last: int) -> bool:
        return not any(two in apart for two in itertools.combinations(range(first, last + 1), 2))

    stretches = [(i, j) for i in range(count) for j in range(i + 1, count) if whole(i, j)]
    longest = [(i, j) for i, j in stretches if not any((a, b) != (i, j) and a <= i and j <= b for a, b in stretches)]
    assert cliques(count, apart) == sorted(longest)
