"""Probabilities of classes, ordered classes and several values: read, found, trained for, scored and answered."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from scipy.stats import entropy, pearsonr, spearmanr
from sklearn.metrics import cohen_kappa_score, mean_squared_error, r2_score

from inlay import tasks
from inlay.errors import InlayError
from inlay.methods.infoprompt.task import _label_words
from inlay.records.spec import Spec
from inlay.tasks import answers, kinds, label_metrics
from inlay.tasks.schema import TaskSchema
from inlay.tasks.scored_rows import read_labelled
from inlay.tasks.targets import to_targets

Write = Callable[[str, str], Path]
MakeSpec = Callable[..., Spec]


def lines(rows: list[dict[str, Any]]) -> str:
    return "\n".join(json.dumps({"text": f"this is number {i}", **row}) for i, row in enumerate(rows))


def by_text(task: Any) -> dict[str, Any]:
    return {row["text"]: row["label"] for part in (task.train, task.validation, task.test) for row in part}


# ----------------------------------------------------------------------------------------------- probabilities

VOTES = [{"no": 0.1 * (i % 11), "yes": 1 - 0.1 * (i % 11)} for i in range(44)]


def test_columns_objects_and_lists_of_probabilities_are_one_task(write: Write, spec: MakeSpec) -> None:
    columns = tasks.load(spec(data=write("a.jsonl", lines(VOTES)), text=("text",), label="no,yes"))
    assert (columns.kind, columns.label_names, columns.schema.num_labels) == (kinds.SOFT_LABELS, ("no", "yes"), 2)
    assert any("the columns 'no,yes' hold numbers that add up to 1" in note for note in columns.notes)
    assert by_text(columns)["this is number 3"] == pytest.approx([0.3, 0.7])
    objects = write("b.jsonl", lines([{"votes": row} for row in VOTES]))
    lists = write("c.jsonl", lines([{"votes": [row["no"], row["yes"]]} for row in VOTES]))
    table = "text,votes\n" + "\n".join(
        f'this is number {i},"{json.dumps(row).replace(chr(34), chr(34) * 2)}"' for i, row in enumerate(VOTES)
    )
    for options in (
        {"data": objects, "kind": "soft-labels"},
        {"data": lists, "classes": ("no", "yes")},
        {"data": write("d.csv", table), "kind": "soft-labels"},
    ):
        assert by_text(tasks.load(spec(label="votes", **options))) == by_text(columns)
    counted = tasks.load(spec(data=lists, label="votes"))
    assert (counted.kind, counted.label_names) == (kinds.SOFT_LABELS, ("0", "1"))


def test_votes_that_were_rounded_are_divided_by_their_sum_and_a_class_may_be_left_out(
    write: Write, spec: MakeSpec
) -> None:
    rows = [{"votes": {"a": 0.333, "b": 0.333, "c": 0.333} if i % 2 else {"b": 1.0}} for i in range(40)]
    found = by_text(tasks.load(spec(data=write("a.jsonl", lines(rows)), label="votes", kind="soft-labels")))
    assert found["this is number 1"] == pytest.approx([1 / 3] * 3, rel=1e-12)
    assert found["this is number 0"] == [0, 1, 0]


@pytest.mark.parametrize(
    ("votes", "message"),
    [
        ({"no": 0.5, "yes": 0.2}, r"row 5: .* must add up to 1; they are no 0.5, yes 0.2, 0.7 together. Divide counts"),
        ({"no": -0.5, "yes": 1.5}, r"row 5: the probabilities of the classes must not be negative"),
        ({"no": 0.5, "yes": "much"}, r"row 5: the value 'much' of 'yes' is not a number"),
        ([0.5, 0.3, 0.2], r"row 5: 'votes' holds 3 numbers, and there are 2 names: no, yes"),
    ],
)
def test_what_are_no_probabilities(write: Write, spec: MakeSpec, votes: Any, message: str) -> None:
    rows: list[dict[str, Any]] = [{"votes": row} for row in VOTES]
    rows[4] = {"votes": votes}
    with pytest.raises(InlayError, match=message.replace("must add up", ".*must not be negative and must add up")):
        tasks.load(spec(data=write("a.jsonl", lines(rows)), label="votes", kind="soft-labels", classes=("no", "yes")))


def test_unknown_classes_in_later_data_are_an_error_with_the_row(write: Write, spec: MakeSpec) -> None:
    path = write("a.jsonl", lines([{"votes": row} for row in VOTES]))
    schema = tasks.load(spec(data=path, label="votes", kind="soft-labels")).schema
    more = write("t.jsonl", lines([{"votes": {"no": 1.0}}, {"votes": {"maybe": 1.0}}]))
    with pytest.raises(InlayError, match=r"row 2: 'votes' says 'maybe', which is none of them. Every row has no, yes"):
        read_labelled(schema, more, "votes")


LOGITS = hnp.arrays(np.float64, st.tuples(st.integers(2, 12), st.just(3)), elements=st.floats(-4, 4))


@given(LOGITS, st.integers(0, 2**32 - 1))
def test_metrics_of_probabilities(outputs: np.ndarray, seed: int) -> None:
    true = np.random.default_rng(seed).dirichlet([0.3] * 3, len(outputs))
    true[0] = [1, 0, 0]
    schema = TaskSchema("t", "soft-labels", ("text",), ("kl", "brier", "accuracy"), ("a", "b", "c"))
    found = answers.score(schema, outputs, true)
    shares = np.exp(outputs) / np.exp(outputs).sum(1, keepdims=True)
    assert found["kl"] == pytest.approx(np.mean([entropy(t, p) for t, p in zip(true, shares, strict=True)]), abs=1e-12)
    assert found["brier"] == pytest.approx(3 * mean_squared_error(true, shares))
    assert found["accuracy"] == np.mean(shares.argmax(1) == true.argmax(1))
    (first, *_) = schema.decode(outputs, probabilities=True)
    assert list(first["probabilities"].values()) == pytest.approx(shares[0])
    assert first["score"] == max(first["probabilities"].values())


# --------------------------------------------------------------------------------------------- ordered classes


def test_words_need_their_order_and_numbers_have_one(write: Write, spec: MakeSpec) -> None:
    words = write("a.jsonl", lines([{"mood": ("low", "mid", "high")[i % 3]} for i in range(45)]))
    with pytest.raises(InlayError, match=r"order of the classes must be said.*--classes high,low,mid put into"):
        tasks.load(spec(data=words, label="mood", kind="ordinal"))
    task = tasks.load(spec(data=words, label="mood", kind="ordinal", classes=("low", "mid", "high")))
    assert task.label_names == ("low", "mid", "high")
    assert task.schema.output_names == ("above low", "above mid")
    assert task.schema.num_labels == 2
    assert by_text(task)["this is number 2"] == 2
    assert to_targets(task.schema, [0, 1, 2]) == [[0.0, 0.0], [1.0, 0.0], [1.0, 1.0]]
    numbers = write("b.jsonl", lines([{"stars": (1, 2, 10)[i % 3]} for i in range(45)]))
    assert tasks.load(spec(data=numbers, label="stars", kind="ordinal")).label_names == ("1", "2", "10")
    with pytest.raises(InlayError, match=r"row 2: the label 'mid' does not occur in training. Known: low, high"):
        tasks.load(spec(data=words, label="mood", kind="ordinal", classes=("low", "high")))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "classification", "classes": ("low", "mid", "high")}, "is for ordered classes"),
        ({"kind": "ordinal", "classes": ("low", "low")}, "give two or more, each once"),
        ({"kind": "ordinal", "classes": ("low",)}, "give two or more, each once"),
    ],
)
def test_what_is_no_order(write: Write, spec: MakeSpec, options: Any, message: str) -> None:
    words = write("a.jsonl", lines([{"mood": ("low", "mid", "high")[i % 3]} for i in range(45)]))
    with pytest.raises(InlayError, match=message):
        tasks.load(spec(data=words, label="mood", **options))


@given(hnp.arrays(np.float64, st.tuples(st.integers(1, 8), st.integers(1, 5)), elements=st.floats(-30, 30)))
def test_probabilities_of_ordered_classes(outputs: np.ndarray) -> None:
    """Against products of conditional probabilities; they add up to 1, and being above a class is ever less likely."""
    names = tuple(map(str, range(outputs.shape[1] + 1)))
    schema = TaskSchema("t", "ordinal", ("text",), ("rank-mae",), names)
    found = answers.to_shares(schema, outputs)
    above = 1 / (1 + np.exp(-outputs))
    for row, conditional in zip(found, above, strict=True):
        expected = [np.prod(conditional[:k]) * (1 - conditional[k]) for k in range(len(conditional))]
        assert row == pytest.approx([*expected, np.prod(conditional)], abs=1e-9)
    assert found.sum(1) == pytest.approx(1)
    for answer, row in zip(schema.decode(outputs, probabilities=True), found, strict=True):
        rank = names.index(answer["label"])
        assert row[: rank + 1].sum() >= 0.5 - 1e-9 >= row[:rank].sum() - 2e-9, "the median"
        assert answer["score"] == row[rank] == answer["probabilities"][answer["label"]]


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=30))
def test_metrics_of_ranks(pairs: list[tuple[int, int]]) -> None:
    predicted, true = map(np.array, zip(*pairs, strict=True))
    found = label_metrics.of_ranks(("quadratic-kappa", "rank-mae", "within-one", "accuracy"), predicted, true, 4)
    distance = np.abs(predicted - true)
    assert (found["rank-mae"], found["within-one"]) == (np.mean(distance), np.mean(distance < 2))
    assert found["accuracy"] == np.mean(distance == 0)
    if len(set(predicted) | set(true)) > 1:
        expected = cohen_kappa_score(true, predicted, weights="quadratic", labels=range(4))
        assert found["quadratic-kappa"] == pytest.approx(expected)
    else:
        assert found["quadratic-kappa"] == 0


def test_scores_are_of_the_answers() -> None:
    schema = TaskSchema("t", "ordinal", ("text",), ("rank-mae", "accuracy"), ("a", "b", "c"))
    outputs = np.array([[-3.0, 2], [3, -2], [3, 2]])
    targets = np.array(to_targets(schema, [0, 1, 0]))
    assert answers.score(schema, outputs, targets) == {"rank-mae": 2 / 3, "accuracy": 2 / 3}
    assert [answer["label"] for answer in schema.decode(outputs)] == ["a", "b", "c"]


# ---------------------------------------------------------------------------------------------- several values

FACTS = [{"price": 1000.0 + 10 * (i % 7), "rooms": i % 5, "age": 0.5 * (i % 3)} for i in range(50)]


def test_several_columns_of_numbers_are_standardised_each(write: Write, spec: MakeSpec) -> None:
    path = write("a.jsonl", lines(FACTS))
    task = tasks.load(spec(data=path, text=("text",), label="price,rooms,age"))
    assert (task.kind, task.label_names) == (kinds.MULTI_REGRESSION, ("price", "rooms", "age"))
    assert tasks.load(spec(data=path, text=("text",), label="price,rooms,age", kind="regression")).digest == task.digest
    values = np.array(task.train["label"])
    assert task.schema.means == pytest.approx(values.mean(0))
    assert task.schema.deviations == pytest.approx(values.std(0))
    targets = np.array(to_targets(task.schema, task.train["label"]))
    assert targets.mean(0) == pytest.approx([0] * 3, abs=1e-9)
    assert targets.std(0) == pytest.approx([1] * 3)
    assert answers.unscale(task.schema, targets) == pytest.approx(values)
    assert task.schema.decode(targets)[0]["values"] == pytest.approx(
        dict(zip(("price", "rooms", "age"), values[0], strict=True))
    )
    assert TaskSchema.from_json(task.to_json()) == task.schema
    objects = write("b.jsonl", lines([{"facts": row} for row in FACTS]))
    assert tasks.load(spec(data=objects, label="facts", kind="multi-regression")).digest == task.digest


def test_columns_of_ones_are_labels_and_whole_numbers_are_not(write: Write, spec: MakeSpec) -> None:
    ones = [{"a": i % 2, "b": i // 2 % 2} for i in range(40)]
    assert tasks.load(spec(data=write("a.jsonl", lines(ones)), text=("text",), label="a,b")).kind == kinds.MULTI_LABEL
    wholes = [{"a": i % 4, "b": i % 3} for i in range(40)]
    found = tasks.load(spec(data=write("b.jsonl", lines(wholes)), text=("text",), label="a,b"))
    assert found.kind == kinds.MULTI_REGRESSION


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"facts": {"price": 3.5, "rooms": 2}}, r"row 7: 'facts' lacks 'age'. Every row has price, rooms, age"),
        ({"facts": {**FACTS[0], "colour": 2}}, r"row 7: 'facts' says 'colour', which is none of them"),
        ({"facts": {**FACTS[0], "age": "old"}}, r"row 7: the value 'old' of 'age' is not a number"),
    ],
)
def test_what_are_no_values(write: Write, spec: MakeSpec, changed: Any, message: str) -> None:
    rows: list[dict[str, Any]] = [{"facts": row} for row in FACTS]
    rows[6] = changed
    with pytest.raises(InlayError, match=message):
        tasks.load(spec(data=write("a.jsonl", lines(rows)), label="facts", kind="multi-regression"))


def test_rows_that_lack_a_value_are_dropped_and_a_constant_is_refused(write: Write, spec: MakeSpec) -> None:
    text = "text,a,b\n" + "\n".join(f"number {i},{i / 7},{'NA' if i == 4 else i / 3}" for i in range(40))
    task = tasks.load(spec(data=write("a.csv", text), text=("text",), label="a,b"))
    assert len(by_text(task)) == 39
    assert any("1 of 40 rows dropped for missing values in 'text' or 'a,b'" in note for note in task.notes)
    same = "text,a,b\n" + "\n".join(f"number {i},{i / 7},2.5" for i in range(40))
    with pytest.raises(InlayError, match=r"'b': every training row has the value 2.5"):
        tasks.load(spec(data=write("b.csv", same), text=("text",), label="a,b"))
    with pytest.raises(InlayError, match=r"Unknown column of 'b.csv' 'bb'. Did you mean 'b'"):
        tasks.load(spec(data=write("b.csv", same), text=("text",), label="a,bb"))


@given(hnp.arrays(np.float64, st.tuples(st.integers(3, 12), st.just(2)), elements=st.floats(-4, 4)), st.integers(0, 99))
def test_metrics_of_columns(outputs: np.ndarray, seed: int) -> None:
    rng = np.random.default_rng(seed)
    outputs = outputs + rng.normal(size=outputs.shape)
    targets = rng.normal(size=outputs.shape)
    names = ("pearson", "spearman", "r2", "mse")
    schema = TaskSchema(
        "t", "multi-regression", ("text",), names, ("a", "b"), means=(3.0, -1.0), deviations=(10.0, 2.0)
    )
    found = answers.score(schema, outputs, targets)
    p, t = outputs * (10, 2) + (3, -1), targets * (10, 2) + (3, -1)
    oracles = {
        "pearson": lambda x, y: pearsonr(x, y).statistic,
        "spearman": lambda x, y: spearmanr(x, y).statistic,
        "r2": lambda x, y: r2_score(y, x),
        "mse": mean_squared_error,
    }
    for name, oracle in oracles.items():
        each = [oracle(p[:, k], t[:, k]) for k in range(2)]
        assert [found[f"{name}[a]"], found[f"{name}[b]"]] == pytest.approx(each)
        assert found[name] == pytest.approx(np.mean(each))
    one = TaskSchema("t", "image-regression", ("image",), names, ("a",), means=(3.0,), deviations=(10.0,))
    assert answers.score(one, outputs[:, :1], targets[:, :1]) == {name: found[f"{name}[a]"] for name in names}


def test_words_for_outputs_are_of_labels_alone() -> None:
    made = {
        kind: _label_words({}, TaskSchema("t", kind, ("text",), (), ("bad", "ok", "good")))
        for kind in ("multi-label", "soft-labels", "ordinal", "multi-regression")
    }
    assert made == {
        "multi-label": ["bad", "ok", "good"],
        "soft-labels": ["bad", "ok", "good"],
        "ordinal": ["above bad", "above ok"],
        "multi-regression": None,
    }
