"""Labels that are taken for classes and may be amounts, texts or several labels: the notes and errors say so."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inlay import tasks
from inlay.errors import InlayError
from inlay.records.spec import Spec
from inlay.tasks import kinds
from inlay.tasks.labels import doubts

Write = Callable[[str, str], Path]
MakeSpec = Callable[..., Spec]


def table(labels: list[str]) -> str:
    return "text;label\n" + "".join(f"w {i};{label}\n" for i, label in enumerate(labels))


def said(labels: list[str]) -> str:
    return ". ".join(doubts("price", list(enumerate(labels, start=1))))


@pytest.mark.parametrize("label", ["1,120", "10,42", "1.234,56", "$ 12.50", "12 %", "1'200", "-3,5"])
def test_amounts_that_are_spelled_otherwise(label: str) -> None:
    note = said([label, "7,5"] * 30)
    assert "60 of 60 labels in 'price' are numbers, and they are taken for 2 classes" in note
    assert f"write {label!r} (row 1)" in note
    assert note.endswith("give --kind regression")


def test_german_decimals_are_counted_as_classes_and_said(write: Write, spec: MakeSpec) -> None:
    text = table([f"{i % 20},5" for i in range(60)])
    task = tasks.load(spec(data=write("a.csv", text)))
    assert task.kind == kinds.CLASSIFICATION
    assert "kind: classification, because 'label' holds 20 classes (--kind says otherwise)" in task.notes
    assert any("60 of 60 labels in 'label' are numbers, and they are taken for 20 classes" in n for n in task.notes)
    with pytest.raises(
        InlayError, match=r"row 1: the value '0,5' of 'label' is not a number\. Write numbers with a point"
    ):
        tasks.load(spec(data=write("a.csv", text), kind="regression"))
    task = tasks.load(spec(data=write("b.csv", text.replace(",", ".")), kind="regression"))
    assert task.kind == kinds.REGRESSION


def test_one_word_among_amounts(write: Write, spec: MakeSpec) -> None:
    """All are different, and no class has two rows: the error says why."""
    labels = [f"{i}.25" for i in range(59)]
    labels.insert(16, "unknown")
    with pytest.raises(
        InlayError, match=r"too few to hold some out.*with 60 classes.*This may be why: 59 of 60 labels"
    ):
        tasks.load(spec(data=write("a.csv", table(labels))))
    note = said(labels)
    assert "59 of 60 labels in 'price' are numbers, and they are taken for 60 classes" in note
    assert "correct or remove row 17 ('unknown'); give --kind regression" in note
    kept = [label for label in labels if label != "unknown"]
    assert tasks.load(spec(data=write("b.csv", table(kept)))).kind == kinds.REGRESSION


def test_nearly_as_many_classes_as_rows(write: Write, spec: MakeSpec) -> None:
    assert "'price' has 40 classes in 60 rows: hardly two rows share one" in said([f"c {i % 40}" for i in range(60)])
    assert said([f"c {i % 30}" for i in range(60)]) == ""
    with pytest.raises(InlayError, match=r"too few.*This may be why: 'label' has 30 classes in 30 rows"):
        tasks.load(spec(data=write("a.csv", table([f"c {i}" for i in range(30)]))))


@pytest.mark.parametrize(
    ("labels", "example"),
    [
        (["positive|long", "positive|short", "negative|long"], "positive|long"),
        (["positive|long", "negative|short", "neutral"], "positive|long"),
        (["a; b", "b; c", "c; a"], "a; b"),
        (["food, price", "food, staff", "price, staff"], "food, price"),
    ],
)
def test_several_labels_in_one(write: Write, spec: MakeSpec, labels: list[str], example: str) -> None:
    assert f"'price' looks like several labels a row ({example!r})" in said(labels * 20)
    text = "\n".join(["text\tlabel", *(f"w {i}\t{label}" for i, label in enumerate(labels * 20))])
    task = tasks.load(spec(data=write("a.tsv", text)))
    assert any("looks like several labels a row" in note for note in task.notes)
    sure = tasks.load(spec(data=write("a.tsv", text), kind="classification"))
    assert not any("looks like" in note for note in sure.notes)


@pytest.mark.parametrize(
    "labels",
    [
        ["1", "2", "3", "4", "5"],
        ["Paris, France", "Lyon, France", "Rome, Italy"],
        ["and/or", "neither"],
        ["yes", "no"],
        ["B-PER", "I-PER", "O"],
        ["C++", "C", "C#"],
        ["1.2.3", "1.2.4"],
        ["R&D", "Sales"],
        ["True", "False"],
    ],
)
def test_classes_are_not_doubted(labels: list[str]) -> None:
    assert said(labels * 20) == ""


names = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8)


@given(st.lists(names, min_size=1, max_size=40))
def test_no_label_breaks_it(labels: list[str]) -> None:
    for note in doubts("price", list(enumerate(labels, start=1))):
        assert "'price'" in note
