"""Several labels a row: how they are read, found, divided, scored and answered."""

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
from PIL import Image
from sklearn.metrics import average_precision_score, f1_score

from inlay import tasks
from inlay.errors import InlayError
from inlay.records.spec import Spec
from inlay.tasks import answers, kinds, label_metrics
from inlay.tasks.given_labels import read_set
from inlay.tasks.schema import TaskSchema
from inlay.tasks.scored_rows import read_labelled

Write = Callable[[str, str], Path]
MakeSpec = Callable[..., Spec]
NAMES = ("new", "old", "red")


def sets(count: int = 60) -> list[list[str]]:
    return [[name for k, name in enumerate(NAMES) if (i >> k) & 1] for i in range(count)]


def lines(labels: list[Any], count: int = 60) -> str:
    return "\n".join(json.dumps({"text": f"this is number {i}", "tags": labels[i]}) for i in range(count))


def as_names(task: Any) -> dict[str, set[str]]:
    return {
        row["text"]: {NAMES[i] for i in row["label"]}
        for part in (task.train, task.validation, task.test)
        for row in part
    }


def test_lists_texts_and_columns_of_ones_are_one_task(write: Write, spec: MakeSpec) -> None:
    expected = {f"this is number {i}": set(found) for i, found in enumerate(sets())}
    lists = tasks.load(spec(data=write("a.jsonl", lines(sets())), label="tags"))
    assert (lists.kind, lists.label_names, lists.schema.num_labels) == (kinds.MULTI_LABEL, NAMES, 3)
    assert as_names(lists) == expected
    joined = [" | ".join(found) or "none" for found in sets()]
    kept = {text: found for text, found in expected.items() if found}
    text = "text,tags\n" + "\n".join(f"this is number {i},{name}" for i, name in enumerate(joined) if name != "none")
    table = tasks.load(spec(data=write("a.csv", text), label="tags", label_separator="|"))
    assert as_names(table) == kept
    ones = "text,new,old,red\n" + "\n".join(
        f"this is number {i},{','.join(str(int(name in found)) for name in NAMES)}" for i, found in enumerate(sets())
    )
    columns = tasks.load(spec(data=write("b.csv", ones), text=("text",), label="new, old,red", kind="multi-label"))
    assert as_names(columns) == expected
    assert columns.digest == lists.digest


def test_pairs_and_images(write: Write, spec: MakeSpec, tmp_path: Path) -> None:
    pairs = "\n".join(json.dumps({"one": f"a {i}", "two": f"b {i}", "tags": f}) for i, f in enumerate(sets()))
    task = tasks.load(spec(data=write("p.jsonl", pairs), text=("one", "two"), label="tags"))
    assert (task.kind, task.fields) == (kinds.MULTI_LABEL, ("one", "two"))
    for i in range(30):
        Image.new("RGB", (8, 8), (8 * i, 0, 0)).save(tmp_path / f"{i}.png")
    table = "\n".join(json.dumps({"image": f"{i}.png", "label": found}) for i, found in enumerate(sets(30)))
    for kind in (None, "multi-label", "image-multi-label"):
        found = tasks.load(spec(data=write("list.jsonl", table), kind=kind))
        assert (found.kind, found.label_names) == (kinds.IMAGE_MULTI_LABEL, NAMES)
        assert sorted(map(len, [*found.train["label"], *found.test["label"]]))[-1] == 3


def test_tags_of_words_stay_tags_even_where_a_row_is_wrong(write: Write, spec: MakeSpec) -> None:
    rows = [{"text": "a dog ran", "tags": ["O", "B-X", "O"]} for _ in range(20)]
    rows[3]["tags"] = ["O"]
    with pytest.raises(InlayError, match=r"row 4: 3 words and 1 labels; .* Several labels for one text are --kind"):
        tasks.load(spec(data=write("a.jsonl", "\n".join(map(json.dumps, rows))), label="tags"))


@pytest.mark.parametrize(
    ("value", "separator", "expected"),
    [
        (["b", "a", "b"], None, ["b", "a"]),
        ([1, 2.0, True], None, ["1", "2", "True"]),
        ("a| b |", "|", ["a", "b"]),
        ('["x|y", "z"]', "|", ["x|y", "z"]),
        ({"a": 1, "b": 0, "c": "True", "d": None}, None, ["a", "c"]),
        ([], None, []),
        (3, None, ["3"]),
    ],
)
def test_what_a_cell_says(value: Any, separator: str | None, expected: list[str]) -> None:
    assert read_set(value, separator, "tags", "row 1") == expected


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("a|b", r"row 1: 'tags' holds the text 'a\|b'.*--label-separator '\|'"),
        ({"a": 0.4}, r"row 1: 'a' says '0.4'; whether a row has a label is said by 1 or 0"),
        (["a", None], r"row 1: a label is missing in 'tags'"),
    ],
)
def test_what_a_cell_cannot_say(value: Any, message: str) -> None:
    with pytest.raises(InlayError, match=message):
        read_set(value, None, "tags", "row 1")


def test_unknown_labels_are_an_error_with_the_row(write: Write, spec: MakeSpec) -> None:
    path, more = write("a.jsonl", lines(sets())), sets(8)
    more[5] = ["new", "blue"]
    with pytest.raises(InlayError, match=r"row 6: the label 'blue' does not occur in training. Known: new, old, red"):
        tasks.load(spec(data=path, label="tags", test_data=write("t.jsonl", lines(more, 8))))
    schema = tasks.load(spec(data=path, label="tags")).schema
    with pytest.raises(InlayError, match=r"row 6: the label 'blue'"):
        read_labelled(schema, write("t.jsonl", lines(more, 8)), "tags")
    assert len(read_labelled(schema, path, "tags").test) == 60


def test_a_separator_is_for_sets(write: Write, spec: MakeSpec) -> None:
    path = write("a.csv", "text,label\n" + "\n".join(f"number {i},{'ab'[i % 2]}" for i in range(40)))
    with pytest.raises(InlayError, match=r"label_separator='\|' is for several labels a row"):
        tasks.load(spec(data=path, kind="classification", label_separator="|"))
    found = tasks.load(spec(data=path, label_separator="|"))
    assert any("no row of a.csv has the separator '|'" in note for note in found.notes)


def test_rare_labels_are_drawn_into_every_split(write: Write, spec: MakeSpec) -> None:
    labels = [["common", "rare"] if i % 10 == 0 else ["common"] if i % 2 else [] for i in range(100)]
    task = tasks.load(spec(data=write("a.jsonl", lines(labels, 100)), label="tags"))
    assert [sum(1 in found for found in part["label"]) for part in (task.train, task.validation, task.test)] == [
        7,
        1,
        2,
    ]
    assert any(note.startswith("2 labels, ") and "training rows have none" in note for note in task.notes)
    with pytest.raises(InlayError, match="no training row has a label"):
        tasks.load(spec(data=write("b.jsonl", lines([[]] * 60)), label="tags"))


# ------------------------------------------------------------------------------------------------ metrics, answers

ROWS = hnp.arrays(np.float64, st.tuples(st.integers(1, 12), st.integers(1, 4)), elements=st.floats(-4, 4))


@given(ROWS, st.integers(0, 2**32 - 1))
def test_metrics_are_those_of_scikit_learn(outputs: np.ndarray, seed: int) -> None:
    true = np.random.default_rng(seed).random(outputs.shape) < 0.4
    shares, chosen = 1 / (1 + np.exp(-outputs)), outputs > 0
    found = label_metrics.of_label_sets(kinds.get("multi-label").metrics, shares, chosen, true)
    occurring = [k for k in range(true.shape[1]) if (true | chosen)[:, k].any()]
    some = true.any(0)
    assert found["micro-f1"] == pytest.approx(f1_score(true.ravel(), chosen.ravel(), zero_division=0))
    each = [f1_score(true[:, k], chosen[:, k], zero_division=0) for k in occurring]
    assert found["macro-f1"] == pytest.approx(np.mean(each) if each else 0)
    expected = [average_precision_score(true[:, k], shares[:, k]) for k in np.flatnonzero(some)]
    assert found["average-precision"] == pytest.approx(np.mean(expected) if expected else 0)
    right = [list(a) == list(b) for a, b in zip(chosen, true, strict=True)]
    assert found["subset-accuracy"] == pytest.approx(np.mean(right))


@given(ROWS, st.integers(0, 2**32 - 1))
def test_a_threshold_is_the_best_of_all(outputs: np.ndarray, seed: int) -> None:
    """Against F1 at every probability that occurs, and just above the highest."""
    outputs = np.round(outputs, 1)[:, :1]
    true = np.random.default_rng(seed).random(outputs.shape) < 0.5
    shares = 1 / (1 + np.exp(-outputs))
    (found,) = answers.choose_thresholds(outputs, true.astype(float))
    scores = {at: f1_score(true, shares >= at, zero_division=0) for at in (*np.unique(shares), found)}
    assert scores[found] == pytest.approx(max(scores.values()))
    assert 0 < found < 1


def test_rare_labels_share_a_threshold_and_a_half_is_kept_where_it_is_as_good() -> None:
    rng = np.random.default_rng(0)
    true = np.stack([rng.random(80) < 0.5, np.arange(80) < 3], axis=1)
    outputs = np.where(true, 2.0, -2.0)
    assert answers.choose_thresholds(outputs, true.astype(float)) == (0.5, 0.5)
    shifted = outputs - 3.0
    own, shared = answers.choose_thresholds(shifted, true.astype(float))
    assert own == shared < 0.5
    assert answers.choose_thresholds(np.zeros((3, 2)), np.zeros((3, 2))) == (0.5, 0.5)


def test_answers_are_sets_with_their_probabilities() -> None:
    schema = TaskSchema("t", "multi-label", ("text",), ("micro-f1",), NAMES)
    outputs = np.log([[3.0, 1 / 3, 9.0], [1 / 3, 1 / 3, 1 / 9]])
    first, second = schema.decode(outputs)
    assert first == {"labels": ["red", "new"], "scores": pytest.approx([0.9, 0.75])}
    assert second == {"labels": [], "scores": []}
    lower = TaskSchema.from_json({**schema.to_json(), "thresholds": [0.9, 0.2, 0.95]})
    assert lower.decode(outputs, probabilities=True)[0] == {
        "labels": ["old"],
        "scores": pytest.approx([0.25]),
        "probabilities": pytest.approx({"new": 0.75, "old": 0.25, "red": 0.9}),
    }
    assert lower.compute_metrics(outputs, np.array([[0.0, 1, 0], [0, 1, 0]]))["micro-f1"] == 1
