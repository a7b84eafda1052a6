"""`--class-weights`: what each class counts in the loss, what a task keeps of it, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.utils.class_weight import compute_class_weight

from inlay import tasks
from inlay.errors import InlayError
from inlay.records.spec import Spec
from inlay.tasks import labels
from inlay.tasks.schema import TaskSchema

Write = Callable[[str, str], Path]
MakeSpec = Callable[..., Spec]
NAMES = ("bad", "ok", "good")


@given(st.lists(st.integers(0, 2), min_size=1, max_size=60))
def test_balanced_is_that_of_scikit_learn(classes: list[int]) -> None:
    found = labels.weigh("balanced", NAMES, classes)
    present = sorted(set(classes))
    expected = compute_class_weight("balanced", classes=np.array(present), y=classes)
    assert [found[i] for i in present] == pytest.approx(expected)
    assert np.mean([found[i] for i in classes]) == pytest.approx(1)
    assert all(found[i] == 1 for i in set(range(3)) - set(present))


@given(st.lists(st.integers(0, 2), min_size=1, max_size=60), st.floats(0.01, 100))
def test_weights_by_name_keep_their_ratios(classes: list[int], weight: float) -> None:
    found = labels.weigh(f"bad={weight!r}, good = 2", NAMES, classes)
    assert np.array(found) / found[1] == pytest.approx([weight, 1, 2])
    assert np.mean([found[i] for i in classes]) == pytest.approx(1)


def test_names_with_commas_and_equal_signs() -> None:
    assert labels.weigh("a,b=2,c=d=3", ("a,b", "c=d"), [0, 1]) == pytest.approx((0.8, 1.2))


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ("awful=2", r"Unknown class in --class-weights 'awful'.* Known: bad, good, ok"),
        ("bad=0", r"bad=0: a weight must be greater than 0"),
        ("bad=-1", r"must be greater than 0"),
        ("bad=1,bad=2", r"names the class 'bad' twice"),
        ("bad", r"takes balanced, or weights by name as in rare=3,common=1; got 'bad'"),
        ("bad=heavy", r"got 'bad=heavy'"),
        ("bad=nan", r"got 'bad=nan'"),
        ("", r"got ''"),
    ],
)
def test_what_is_no_weight(said: str, message: str) -> None:
    with pytest.raises(InlayError, match=message):
        labels.weigh(said, NAMES, [0, 1, 2])


def rows(count: int = 60) -> str:
    return "text,label\n" + "\n".join(f"number {i} of them,{'rare' if i % 6 == 0 else 'common'}" for i in range(count))


def test_a_task_has_weights_of_its_training_rows(write: Write, spec: MakeSpec) -> None:
    path = write("a.csv", rows())
    task = tasks.load(spec(data=path, class_weights="balanced"))
    counts = np.bincount(task.train["label"])
    assert task.schema.class_weights == pytest.approx(counts.sum() / (2 * counts))
    common, rare = task.schema.class_weights or ()
    assert f"class weights in the loss: common {common:.3g}, rare {rare:.3g}" in task.notes
    assert TaskSchema.from_json(task.to_json()) == task.schema
    plain = tasks.load(spec(data=path))
    assert plain.schema.class_weights is None
    assert plain.digest == task.digest


def test_what_has_no_classes_has_no_weights(write: Write, spec: MakeSpec) -> None:
    path = write("a.csv", "text,label\n" + "\n".join(f"number {i},{i / 7}" for i in range(60)))
    with pytest.raises(InlayError, match=r"class_weights='balanced' is for tasks of one class a row, .*'regression'"):
        tasks.load(spec(data=path, class_weights="balanced"))


def test_runs_without_weights_keep_their_name_and_several_tasks_have_none() -> None:
    plain = Spec(model="m", method="lora", task="sst2")
    assert plain.digest() != plain.with_(class_weights="balanced").digest()
    before = {name: value for name, value in plain.to_json().items() if name != "class_weights"}
    assert Spec.from_json(before).digest() == plain.digest()
    for name, value in (("class_weights", "balanced"), ("label_separator", "|"), ("classes", ("low", "high"))):
        with pytest.raises(InlayError, match=rf"{name}=.* is for a run of one task"):
            Spec(model="m", method="lora", tasks=("sst2", "rte"), **{name: value})
