"""Labels that nearly every row has to itself are texts to write, where the model writes; few labels are classes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from inlay import tasks
from inlay.errors import InlayError
from inlay.records.spec import Spec
from inlay.tasks import kinds
from inlay.tasks.labels import are_texts

Write = Callable[[str, str], Path]
MakeSpec = Callable[..., Spec]


# Labels that are all different and no texts, made of two numbers.
NO_TEXTS = (
    "intent_{}",
    "about {}",
    "2024-10-{}",
    "AB-{:04}",
    "{1:x}f{0:x}a",
    "A{}.{}",
    "{} kg",
    "{}-{}",
    "{}:{}",
    "A{} > B{} > C",
    "Home and Garden > Tools for Hands > Hammer {}",
    "Home>Garden tools>Hammer {}",
    "x = {}",
)


def table(labels: list[Any], **more: Any) -> str:
    return "\n".join(json.dumps({"ask": f"w {i}", "answer": label} | more) for i, label in enumerate(labels))


@pytest.mark.parametrize(
    ("labels", "texts"),
    [
        ([f"it is about {i}" for i in range(80)], True),
        ([f"it is about {i % 3000}" for i in range(5000)], True),
        ([f"it is about {i % 2500}" for i in range(5000)], False),  # two rows share each
        ([f"it is about {i % 150}" for i in range(200)], False),  # of few rows, nearly all are different
        ([f"it is about {i % 190}" for i in range(200)], True),
        ([f"Rain is thing number {i}." for i in range(120)], True),
        ([f"it is about {i}" for i in range(70)] + [f"about {i}" for i in range(10)], True),
        ([f"it is about {i}" for i in range(60)] + [f"about {i}" for i in range(20)], False),
        *(([each.format(i, 100 + i) for i in range(80)], False) for each in NO_TEXTS),
        (["yes", "no"] * 40, False),
        ([f"{i}.5" for i in range(80)], False),
        ([f"$ {i},50" for i in range(80)], False),
        ([str(i) for i in range(80)], False),
        (["good", "bad", "good", "fair", "poor"], False),  # too few rows to say so
        (["it is a cat", "here are two dogs", "there is one bird"], True),
        ([f"{'abcdefgh'[i % 8]}|{'klmnopqr'[i // 8]}" for i in range(64)], False),  # several labels a row
        ([f"first comes {i}, and then comes {i + 1}; and | so on" for i in range(64)], True),
    ],
)
def test_which_labels_are_texts(labels: list[str], texts: bool) -> None:
    assert are_texts(labels) is texts


def load(spec: Spec, *, writes: bool = True) -> tasks.Task:
    return tasks.load(spec, writes=lambda: writes)


def test_a_model_that_writes_takes_them_for_texts(write: Write, spec: MakeSpec) -> None:
    path = write("a.jsonl", table([f"it is about {i}" for i in range(80)]))
    asked = spec(data=path, text=("ask",), label="answer")
    task = load(asked)
    assert (task.kind, task.schema.answers) == (kinds.CAUSAL_LM, True)
    said = "kind: causal-lm, because 'answer' holds 80 different texts in 80 rows, and the model writes texts"
    assert f"{said} (--kind classification says otherwise)" in task.notes
    assert task.decided == {"kind": "causal-lm", "text": ("ask",), "label": "answer"}
    typed = load(asked.with_(kind="causal-lm"))
    assert (typed.digest, typed.spelled_out) == (task.digest, task.spelled_out)
    assert dict(typed.decided) == {}
    assert list(task.train) == list(typed.train)
    with pytest.raises(InlayError, match=r"too few.*with 80 classes"):
        load(asked, writes=False)
    with pytest.raises(InlayError, match=r"too few.*with 80 classes"):
        load(asked.with_(kind="classification"))


def test_columns_that_were_found_are_written_down(write: Write, spec: MakeSpec) -> None:
    path = write("a.jsonl", table([f"it is about {i}" for i in range(80)]).replace('"answer"', '"label"'))
    task = load(spec(data=path))
    assert task.decided == {"kind": "causal-lm", "text": ("ask",), "label": "label"}
    assert "text from 'ask', label from 'label'" in task.notes
    assert load(spec(data=path, text=("ask",), label="label", kind="causal-lm")).digest == task.digest


def test_many_rows_that_could_be_classes(write: Write, spec: MakeSpec) -> None:
    path = write("a.jsonl", table([f"it is about {i % 540}" for i in range(1000)]))
    asked = spec(data=path, text=("ask",), label="answer")
    assert load(asked).kind == kinds.CAUSAL_LM
    classes = load(asked.with_(kind="classification"))
    assert (classes.kind, classes.num_labels) == (kinds.CLASSIFICATION, 540)
    before = load(asked, writes=False)
    assert (before.kind, before.digest) == (kinds.CLASSIFICATION, classes.digest)
    assert "kind" in classes.spelled_out  # so that a run from before is the run of --kind classification


def test_an_answer_that_is_too_long_for_a_label(write: Write, spec: MakeSpec) -> None:
    path = write("a.jsonl", table([f"about {i} " + "and so on " * 200 for i in range(40)]))
    asked = spec(data=path, text=("ask",), label="answer")
    assert load(asked).kind == kinds.CAUSAL_LM
    with pytest.raises(InlayError, match="at most 1,000 are a name"):
        load(asked, writes=False)


@pytest.mark.parametrize(
    "more",
    [
        {"class_weights": "balanced"},
        {"calibrate": True},
        {"pooling": "mean"},
        {"shots": 50},
        {"kind": "classification"},
        {"text": ("ask", "beside")},
    ],
    ids=str,
)
def test_who_speaks_of_classes_has_them(write: Write, spec: MakeSpec, more: dict[str, Any]) -> None:
    path = write("a.jsonl", table([f"it is about {i % 540}" for i in range(1000)], beside="y"))
    task = load(spec(**{"data": path, "text": ("ask",), "label": "answer"} | more))
    assert task.schema.predicts == "class"
    assert dict(task.decided) == {}


@pytest.mark.parametrize(
    ("labels", "kind"),
    [
        (["good", "bad", "fair"] * 20, kinds.CLASSIFICATION),
        (list(range(60)), kinds.CLASSIFICATION),
        ([i / 7 for i in range(60)], kinds.REGRESSION),
        ([["a", "b"], ["b"], ["a"]] * 20, kinds.MULTI_LABEL),
    ],
)
def test_other_labels_stay_what_they_were(write: Write, spec: MakeSpec, labels: list[Any], kind: str) -> None:
    path = write("a.jsonl", table(labels * 2 if kind == kinds.CLASSIFICATION else labels))
    asked = spec(data=path, text=("ask",), label="answer")
    task, before = load(asked), load(asked, writes=False)
    assert (task.kind, task.digest, task.notes) == (kind, before.digest, before.notes)


@pytest.mark.parametrize("given", ["splits", "test_data"])
def test_rows_to_test_count_too(tmp_path: Path, spec: MakeSpec, given: str) -> None:
    """Few rows to learn from have a class each, and the rows to test say that they are classes."""
    folder = tmp_path / "intents"
    folder.mkdir()
    (folder / "train.jsonl").write_text(table([f"it is about {i}" for i in range(60)]))
    (folder / "test.jsonl").write_text(table([f"it is about {i % 60}" for i in range(600)]))
    asked = spec(data=folder, text=("ask",), label="answer")
    if given == "test_data":
        (tmp_path / "test.jsonl").write_text((folder / "test.jsonl").read_text())
        (folder / "test.jsonl").unlink()
        assert load(asked).kind == kinds.CAUSAL_LM
        asked = asked.with_(test_data=str(tmp_path / "test.jsonl"))
    # The error is that of before: a row for each class cannot be divided.
    with pytest.raises(InlayError) as before:
        load(asked, writes=False)
    with pytest.raises(InlayError) as error:
        load(asked)
    assert str(error.value) == str(before.value)


def test_the_same_rows_to_test_change_nothing(write: Write, spec: MakeSpec) -> None:
    path = write("a.jsonl", table([f"it is about {i}" for i in range(80)]))
    asked = spec(data=path, text=("ask",), label="answer", test_data=str(path))
    assert load(asked).kind == kinds.CAUSAL_LM
