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


def table(labels: list[Any], **more: Any) -> str:
    return "\n".join(json.dumps({"ask": f"w {i}", "answer": label} | more) for i, label in enumerate(labels))


@pytest.mark.parametrize(
    ("labels", "texts"),
    [
        ([f"about {i}" for i in range(80)], True),
        ([f"about {i % 4700}" for i in range(5000)], True),
        ([f"about {i % 40}" for i in range(80)], False),  # two rows share each
        ([f"about {i % 41}" for i in range(80)], True),
        (["yes", "no"] * 40, False),
        ([f"{i}.5" for i in range(80)], False),
        ([f"$ {i},50" for i in range(80)], False),
        ([str(i) for i in range(80)], False),
        ([str(i) for i in range(40)] + [f"x = {i}" for i in range(40)], True),
        (["good", "bad", "good", "fair", "poor"], False),  # too few rows to say so
        (["a cat", "two dogs", "one bird"], True),
        ([f"{'abcdefgh'[i % 8]}|{'klmnopqr'[i // 8]}" for i in range(64)], False),  # several labels a row
        ([f"first {i}, then {i + 1}; and | so on" for i in range(64)], True),
    ],
)
def test_which_labels_are_texts(labels: list[str], texts: bool) -> None:
    assert are_texts(labels) is texts


def load(spec: Spec, *, writes: bool = True) -> tasks.Task:
    return tasks.load(spec, writes=writes)


def test_a_model_that_writes_takes_them_for_texts(write: Write, spec: MakeSpec) -> None:
    path = write("a.jsonl", table([f"about {i}" for i in range(80)]))
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
    path = write("a.jsonl", table([f"about {i}" for i in range(80)]).replace('"answer"', '"label"'))
    task = load(spec(data=path))
    assert task.decided == {"kind": "causal-lm", "text": ("ask",), "label": "label"}
    assert "text from 'ask', label from 'label'" in task.notes
    assert load(spec(data=path, text=("ask",), label="label", kind="causal-lm")).digest == task.digest


def test_many_rows_that_could_be_classes(write: Write, spec: MakeSpec) -> None:
    path = write("a.jsonl", table([f"about {i % 270}" for i in range(500)]))
    asked = spec(data=path, text=("ask",), label="answer")
    assert load(asked).kind == kinds.CAUSAL_LM
    classes = load(asked.with_(kind="classification"))
    assert (classes.kind, classes.num_labels) == (kinds.CLASSIFICATION, 270)
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
        {"kind": "classification"},
        {"text": ("ask", "beside")},
    ],
    ids=str,
)
def test_who_speaks_of_classes_has_them(write: Write, spec: MakeSpec, more: dict[str, Any]) -> None:
    path = write("a.jsonl", table([f"about {i % 60}" for i in range(100)], beside="y"))
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
