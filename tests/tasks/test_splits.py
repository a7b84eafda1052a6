"""Splits and draws: stratified, disjoint, and a function of the rows and the seed alone."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inlay.errors import InlayError
from inlay.tasks import splits
from inlay.tasks.splits import RowKeys


def rows_of(classes: list[int]) -> RowKeys:
    return RowKeys([f"row {i:05d}" for i in range(len(classes))], classes)


@st.composite
def some_rows(draw: st.DrawFn) -> RowKeys:
    classes = draw(st.lists(st.integers(0, 4), min_size=12, max_size=120))
    return rows_of(classes)


seeds = st.integers(0, 2**31)


@given(some_rows(), st.integers(1, 40), seeds)
def test_what_is_held_out_and_the_rest_are_everything_once(rows: RowKeys, size: int, seed: int) -> None:
    rest, held = splits.hold_out(rows, size, seed, "validation")
    assert sorted([*rest, *held]) == list(range(len(rows)))
    assert list(held) == sorted(held)


@given(some_rows(), st.integers(1, 40), seeds)
def test_every_class_stays_in_training_and_is_held_out_in_proportion(rows: RowKeys, size: int, seed: int) -> None:
    rest, held = splits.hold_out(rows, size, seed, "validation")
    whole, left = Counter(rows.strata), Counter(rows.strata[i] for i in rest)
    assert set(left) == set(whole)
    taken = Counter(rows.strata[i] for i in held)
    room = sum(count - 1 for count in whole.values())
    assert len(held) == min(size, room)
    if size <= room / 2:
        for name, count in whole.items():
            assert abs(taken[name] - size * count / len(rows)) <= 1 + sum(c == 1 for c in whole.values())


@given(some_rows(), st.integers(1, 40), seeds, st.randoms(use_true_random=False))
def test_the_order_of_the_rows_does_not_matter(rows: RowKeys, size: int, seed: int, shuffle) -> None:
    order = list(range(len(rows)))
    shuffle.shuffle(order)
    other = rows.take(np.asarray(order))
    _, held = splits.hold_out(rows, size, seed, "test")
    _, other_held = splits.hold_out(other, size, seed, "test")
    assert sorted(rows.keys[i] for i in held) == sorted(other.keys[i] for i in other_held)
    shots = splits.draw_shots(rows, 10, seed)
    other_shots = splits.draw_shots(other, 10, seed)
    assert sorted(rows.keys[i] for i in shots) == sorted(other.keys[i] for i in other_shots)


@given(st.lists(st.integers(0, 9), min_size=20, max_size=60), seeds)
def test_rows_that_are_the_same_stay_together(contents: list[int], seed: int) -> None:
    if len(set(contents)) < 3:
        return
    rows = RowKeys([f"content {c}" for c in contents], [c % 2 for c in contents])
    rest, held = splits.hold_out(rows, 4, seed, "test")
    assert not {contents[i] for i in rest} & {contents[i] for i in held}


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 3)), min_size=20, max_size=60),
    st.integers(1, 30),
    seeds,
    st.randoms(use_true_random=False),
)
def test_rows_of_one_input_stay_together_whatever_their_labels(
    contents: list[tuple[int, int]], size: int, seed: int, shuffle: Any
) -> None:
    def rows_in(order: list[tuple[int, int]]) -> RowKeys:
        return RowKeys([f"{c}" for c in order], [label for _, label in order], None, [f"{shown}" for shown, _ in order])

    def held(order: list[tuple[int, int]]) -> Counter[tuple[int, int]] | None:
        try:
            rest, held = splits.hold_out(rows_in(order), size, seed, "test")
        except InlayError:
            return None
        assert not {order[i][0] for i in rest} & {order[i][0] for i in held}
        assert {order[i][1] for i in rest} == {label for _, label in order}
        return Counter(order[i] for i in held)

    other = list(contents)
    shuffle.shuffle(other)
    assert held(contents) == held(other)


@given(st.lists(st.integers(0, 9), min_size=20, max_size=60), seeds)
def test_rows_of_a_group_stay_together(groups: list[int], seed: int) -> None:
    if len(set(groups)) < 2:
        return
    rows = RowKeys([f"{i}" for i in range(len(groups))], None, [str(g) for g in groups])
    rest, held = splits.hold_out(rows, 4, seed, "validation")
    assert not {groups[i] for i in rest} & {groups[i] for i in held}
    assert len(rest)
    assert len(held)


@given(some_rows(), st.integers(1, 60), seeds)
def test_shots_are_that_many_and_as_even_as_the_classes_allow(rows: RowKeys, shots: int, seed: int) -> None:
    if shots > len(rows):
        with pytest.raises(InlayError, match=f"shots={shots} asks for more examples than the {len(rows)}"):
            splits.draw_shots(rows, shots, seed)
        return
    drawn = splits.draw_shots(rows, shots, seed)
    assert len(set(drawn.tolist())) == shots
    got, there = Counter(rows.strata[i] for i in drawn), Counter(rows.strata)
    for one in there:
        for other in there:
            # A class has fewer than another less one only when it has no more to give.
            assert got[one] >= got[other] - 1 or got[one] == there[one]


@settings(max_examples=10)
@given(seeds)
def test_vtab_draws_800_and_200(seed: int) -> None:
    rows = rows_of([i % 7 for i in range(1500)])
    train, validation = splits.draw_vtab(rows, seed)
    assert (len(train), len(validation)) == (800, 200)
    assert not set(train.tolist()) & set(validation.tolist())
    counts = Counter(rows.strata[i] for i in [*train, *validation])
    assert max(counts.values()) - min(counts.values()) <= 1


@settings(max_examples=10)
@given(seeds)
def test_vtab_selects_on_nothing_that_it_trains_on(seed: int) -> None:
    shown = [i % 1100 for i in range(2000)]  # 900 inputs twice, half of those with another label
    labels = [i % 7 if i < 1500 else (i + 1) % 7 for i in range(2000)]
    rows = RowKeys([f"{s} {c}" for s, c in zip(shown, labels, strict=True)], labels, None, [f"{s}" for s in shown])
    train, validation = splits.draw_vtab(rows, seed)
    assert (len(train), len(validation)) == (800, 200)
    assert not {shown[i] for i in train} & {shown[i] for i in validation}


def test_vtab_needs_a_thousand() -> None:
    with pytest.raises(InlayError, match=r"needs 1,000 different training examples and there are 999"):
        splits.draw_vtab(rows_of([0, 1, 2] * 333), 0)
    copies = RowKeys([f"{i % 999}" for i in range(2000)], [i % 999 % 3 for i in range(2000)])
    with pytest.raises(InlayError, match=r"different training examples and there are 999"):
        splits.draw_vtab(copies, 0)


def test_seeds_and_purposes_differ_and_the_same_seed_does_not() -> None:
    rows = rows_of([i % 2 for i in range(400)])

    def held(seed: int, purpose: str) -> list[int]:
        return splits.hold_out(rows, 50, seed, purpose)[1].tolist()

    assert held(1, "test") == held(1, "test")
    assert held(1, "test") != held(2, "test")
    assert held(1, "test") != held(1, "validation")


def test_global_random_state_and_hash_seed_have_no_say() -> None:
    code = (
        "import numpy as np, random; np.random.seed({n}); random.seed({n});"
        "from inlay.tasks import splits;"
        "r = splits.RowKeys([str(i * 7919 % 997) for i in range(300)], [i % 3 for i in range(300)]);"
        "print(splits.hold_out(r, 40, 5, 'test')[1].tolist(), splits.draw_shots(r, 31, 5).tolist())"
    )
    said = [
        subprocess.run(
            [sys.executable, "-c", code.format(n=n)],
            env={"PYTHONHASHSEED": str(n), "PATH": ""},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for n in (1, 2)
    ]
    assert said[0] == said[1] != ""


def test_a_draw_is_what_it_has_always_been() -> None:
    """Changing the draws would silently change every run: this is the draw of the first release."""
    rows = rows_of([0, 0, 0, 1, 1, 1, 1, 1, 2, 2])
    assert splits.hold_out(rows, 3, 0, "test")[1].tolist() == [2, 5, 8]
    assert splits.draw_shots(rows, 4, 0).tolist() == [1, 4, 8, 9]


def test_too_few_rows_is_an_error() -> None:
    with pytest.raises(InlayError, match=r"2 rows are too few to hold some out for test with 2 classes"):
        splits.hold_out(rows_of([0, 1]), 1, 0, "test")
    with pytest.raises(InlayError, match="too few"):
        splits.hold_out(RowKeys(["a", "b"], None, ["same", "same"]), 1, 0, "validation")
