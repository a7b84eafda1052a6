"""Question answering: the forms that answers come in, what cannot be learnt, and whole runs with every verb."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf

import inlay
import zoo
from checkpoints import write_tokenizer
from inlay import InlayError, Spec, evaluate, predict, tasks, tune
from inlay.records.store import Run
from inlay.serve.hosting import host
from inlay.tasks import row_scores
from inlay.tasks.questions import read_answers
from inlay.tasks.schema import TaskSchema
from inlay.tasks.scored_rows import read_labelled
from inlay.training.progress import Interrupted
from inlay.workflow.adapted import find_source, load_adapted
from inlay.workflow.answer import Request
from inlay.workflow.onnx import _check_kind

CONTEXT = "w5 w6 w7 w6 w8"
Rows = list[dict[str, Any]]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "bert"
    zoo.tiny("bert", "base")[0].save_pretrained(folder)
    write_tokenizer(folder, model_max_length=40)
    return folder


def questions(count: int = 120, *, impossible: bool = True) -> Rows:
    """Which of six words stands in the text? Some texts take several windows; every fifth question has no answer."""
    rng, rows = random.Random(0), []
    for number in range(count):
        words = [f"w{rng.randrange(10, 40)}" for _ in range(rng.choice([6, 12, 36]))]
        place, mark = rng.randrange(len(words)), f"w{rng.randrange(6)}"
        if impossible and number % 5 == 0:
            answers: dict[str, Any] = {"text": [], "answer_start": []}
        else:
            words[place] = mark
            answers = {"text": [mark], "answer_start": [len(" ".join(words[:place])) + (place > 0)]}
        asked = f"{mark} w8" if answers["text"] else f"{mark} w9"
        rows.append({"id": number, "question": asked, "context": " ".join(words), "answers": answers})
    return rows


@pytest.fixture
def spec(model: Path, tmp_path: Path) -> Callable[..., Spec]:
    def make(rows: Rows | None = None, **options: Any) -> Spec:
        path = tmp_path / "asked.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in (questions() if rows is None else rows)))
        usual = {"data": str(path), "method": "lora", "max_steps": 4, "batch_size": 16, "max_length": 20}
        return Spec(model=str(model), **usual | options)

    return make


def load(path: Path, **options: Any) -> tasks.Task:
    return tasks.load(Spec(model="unused", method="lora", data=str(path), **options))


def written(tmp_path: Path, rows: Any, name: str = "rows.jsonl") -> Path:
    path = tmp_path / name
    if name.endswith(".jsonl"):
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif name.endswith(".parquet"):
        import pyarrow as pa
        import pyarrow.parquet as pq

        pq.write_table(pa.Table.from_pylist(rows), path)
    elif name.endswith(".csv"):
        import csv

        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    else:
        path.write_text(json.dumps(rows))
    return path


FORMS: dict[str, dict[str, Any]] = {
    "squad": {"answers": {"text": ["w7", "w7 w6"], "answer_start": [6, 6]}},
    "objects": {"answers": [{"text": "w7", "answer_start": 6}, {"text": "w7 w6", "answer_start": 6}]},
    "texts": {"answers": ["w7", "w7 w6"]},
}
FLAT: dict[str, dict[str, Any]] = {
    "with start": {"answer": "w6", "answer_start": 9},
    "once": {"answer": "w7"},
    "renamed": {"answer_text": "w7"},
    "json": {"answers": json.dumps({"text": ["w7"], "answer_start": [6]})},
    "list in json": {"answers": '["w7"]'},
    "objects in json": {"answers": '[{"text": "w7", "answer_start": 6}]'},
    "object in python": {"answers": "{'text': ['w7'], 'answer_start': [6]}"},
    "list in python": {"answers": "['w7']"},
}


@pytest.mark.parametrize("ending", ["jsonl", "json", "parquet"])
@pytest.mark.parametrize("form", FORMS)
def test_forms_of_several_answers(form: str, ending: str, tmp_path: Path) -> None:
    rows = [{"question": f"w{i}", "context": f"{CONTEXT} w{i + 10}", **FORMS[form]} for i in range(12)]
    task = load(written(tmp_path, rows, f"rows.{ending}"))
    assert task.kind == "question-answering"
    assert {json.dumps(row["label"]) for row in task.train} == {json.dumps({"text": ["w7", "w7 w6"], "start": [6, 6]})}
    assert (task.schema.no_answer, task.schema.longest_answer) == (None, 150)


@pytest.mark.parametrize("ending", ["jsonl", "csv", "parquet"])
@pytest.mark.parametrize("form", FLAT)
def test_forms_of_one_answer(form: str, ending: str, tmp_path: Path) -> None:
    rows = [{"question": f"w{i}", "context": f"{CONTEXT} w{i + 10}", **FLAT[form]} for i in range(12)]
    task = load(written(tmp_path, rows, f"rows.{ending}"))
    said, place = (FLAT[form].get("answer", "w7"), 9 if form == "with start" else 6)
    assert all(row["label"] == {"text": [said], "start": [place]} for row in task.train)
    named = load(written(tmp_path, rows, f"rows.{ending}"), kind="question-answering")
    assert named.digest == task.digest


@pytest.mark.parametrize(
    ("cell", "context", "said"),
    [
        ('["w7"]', 'w5 ["w7"] w8', ['["w7"]']),  # it stands there
        ("[7]", "w5 w7", ["[7]"]),
        ("{w7}", "w5 w7", ["{w7}"]),
        ("{'w7'}", "w5 w7", ["{'w7'}"]),
        ("[" * 5000, "w5 w7", ["[" * 5000]),
        ("[]", "w5 w7", []),
    ],
)
def test_texts_that_begin_with_a_bracket(cell: str, context: str, said: list[str]) -> None:
    assert read_answers({"answers": cell}, "answers", "row 1", context)[0] == said


def test_squads_own_file(tmp_path: Path) -> None:
    asked = [
        {"id": str(i), "question": f"w{i}", "answers": [{"text": "w7", "answer_start": 6}], "is_impossible": False}
        for i in range(10)
    ]
    asked.append({"id": "n", "question": "w3", "answers": [], "plausible_answers": [], "is_impossible": True})
    data = {
        "version": "v2.0",
        "data": [
            {"title": "T", "paragraphs": [{"context": CONTEXT + " " + "w9 " * k, "qas": asked} for k in range(11)]}
        ],
    }
    task = load(written(tmp_path, data, "dev-v2.0.json"))
    assert len(task.train) + len(task.validation) + len(task.test) == 121
    assert task.schema.no_answer == 0.0
    assert "dev-v2.0.json: 11 of 121 questions have no answer, which is learnt too" in task.notes
    # All questions about a context stay together.
    assert not set(task.train["context"]) & set(task.test["context"])
    with pytest.raises(InlayError, match=r"broken.json.*one of them lacks a context, its questions"):
        load(written(tmp_path, {"data": [{"paragraphs": [{"qas": [{"question": "w1"}]}]}]}, "broken.json"))


def test_what_is_left_out_is_counted(tmp_path: Path) -> None:
    good = [
        {"question": f"w{i}", "context": f"{CONTEXT} w{i + 10}", "answer": "w7", "answer_start": 6} for i in range(12)
    ]
    bad = [
        {**good[0], "answer": "w6", "answer_start": None},  # twice
        {**good[1], "answer": "w30", "answer_start": 2},  # not there
        {**good[2], "answer": "w8", "answer_start": 3},  # elsewhere, once
        {**good[3], "answer": "", "answer_start": None},  # none
        {**good[4], "context": " "},
        {**good[5], "question": None},
    ]
    task = load(written(tmp_path, good + bad))
    assert len(task.train) + len(task.validation) + len(task.test) == 14
    told = "\n".join(task.notes)
    assert (
        "2 of 18 rows left out: the answer of 1 is not in the context; the answer of 1 is there several times" in told
    )
    assert "(first rows.jsonl, row 13: 'w6')" in told
    assert "the answer of 1 rows stands elsewhere than their start says" in told
    assert "1 of 18 questions have no answer" in told
    assert "2 of 18 rows dropped for missing values in 'question' or 'context'" in told


def test_rows_that_are_only_scored_need_no_place(tmp_path: Path) -> None:
    good = [{"question": f"w{i}", "context": f"{CONTEXT} w{i + 10}", "answer": "w7"} for i in range(12)]
    other = [{**good[0], "answer": "w6"}, {**good[1], "answer": "w30"}, {**good[2], "answer": ""}]  # twice, not there
    splits = {"train": good + other, "validation": other, "test": other}
    task = load(written(tmp_path, [{**row, "split": name} for name, rows in splits.items() for row in rows]))
    assert (len(task.train), len(task.validation), len(task.test)) == (13, 3, 3)
    assert [row["start"] for row in task.test["label"]] == [[-1], [-1], []]
    assert "rows.jsonl (test): 1 of 3 questions have no answer" in task.notes
    assert len(load(written(tmp_path, good), test_data=str(written(tmp_path, other[2:], "test.jsonl"))).test) == 1
    alone = written(tmp_path, [{**other[2], "split": "test"}], "alone.jsonl")
    assert len(tasks.load(Spec(model="unused", method="lora", data=str(alone)), need_train=False).test) == 1
    # What is trained on is filtered, whatever it is called.
    splits = {"validation": good + other, "test": other}
    task = load(written(tmp_path, [{**row, "split": name} for name, rows in splits.items() for row in rows]))
    assert (len(task.train) + len(task.validation), len(task.test)) == (13, 3)
    with pytest.raises(InlayError, match=r"test.jsonl \(test\): none of 1 rows .* something is missing in every row"):
        load(written(tmp_path, good), test_data=str(written(tmp_path, [{**good[0], "context": ""}], "test.jsonl")))


@pytest.mark.parametrize(
    ("changed", "options", "wrong"),
    [
        (
            {"answer": "yes"},
            {},
            r"none of 12 rows has an answer.*the answer of 12 is not in the context \(first .*'yes'",
        ),
        ({"answer": ""}, {}, r"none of 12 rows has an answer that can be learnt: no question has an answer"),
        ({"answer": {"start": 3}}, {}, r"row 1: 'answer' holds an object without 'text'; an answer is"),
        ({"answer": ["w7"], "answer_start": [6, 7]}, {}, r"row 1: 1 answers and 2 starts"),
        ({"answer_start": "x"}, {}, r"'answer_start' is 'x'; places are whole numbers"),
        ({}, {"text": ("question",)}, r"needs a question and a context, not 'question'"),
        ({}, {"text": ("question", "context"), "label": "context"}, r"'context' names one twice|names one twice"),
        ({}, {"template": "{question}"}, r"A template has no meaning for kind 'question-answering'"),
        ({}, {"label": "id"}, r"unknown column|no column|id"),
    ],
)
def test_what_cannot_be_learnt(changed: Any, options: Any, wrong: str, tmp_path: Path) -> None:
    rows = [{"question": f"w{i}", "context": f"{CONTEXT} w{i + 10}", "answer": "w7", **changed} for i in range(12)]
    with pytest.raises(InlayError, match=wrong):
        load(written(tmp_path, rows), **{"kind": "question-answering", **options})


def test_columns_that_are_not_there(tmp_path: Path) -> None:
    path = written(tmp_path, [{"a": f"w{i}", "b": CONTEXT, "c": "w7"} for i in range(12)])
    with pytest.raises(
        InlayError, match=r"needs a question, a context and the answers.*--text QUESTION --text CONTEXT"
    ):
        load(path, kind="question-answering")
    with pytest.raises(InlayError, match=r"needs the answers: name them with --label ANSWERS"):
        load(path, kind="question-answering", text=("a", "b"))
    task = load(path, kind="question-answering", text=("a", "b"), label="c")
    assert task.schema.columns == {"question": "a", "context": "b"}
    assert set(task.train.column_names) == {"question", "context", "label"}
    assert "1 different contexts are too few to hold some out: splits share them, and differ in questions" in task.notes


@pytest.mark.parametrize("family", ["bert", "llama"])
def test_it_learns_and_scores_the_same_again(
    family: str, spec: Callable[..., Spec], model: Path, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    zoo.tiny(family, "base" if family == "bert" else "causal-lm")[0].save_pretrained(model)
    out = tmp_path / "runs"
    run = tune(spec(method="full", max_steps=40, learning_rate=0.01), out, progress=False)
    assert run.metrics["test"]["squad-f1"] > 0.9
    test = tasks.load(run.spec).test
    rows = [{"question": row["question"], "context": row["context"], "answers": row["label"]["text"]} for row in test]
    again = evaluate(run.folder, rows)
    assert {name: again.metrics[name] for name in ("squad-f1", "squad-exact")} == pytest.approx(
        {name: run.metrics["test"][name] for name in ("squad-f1", "squad-exact")}
    )
    said = predict(run.folder, rows)
    for row, each in zip(rows, said, strict=True):
        if each["start"] is None:
            assert (each["answer"], each["end"]) == ("", None)
        else:
            assert row["context"][each["start"] : each["end"]] == each["answer"]
        assert 0 <= each["score"] <= 1
    kept = read_kept(run)
    assert kept["prediction"] == [each["answer"] for each in said]
    assert np.mean(kept["f1"]) == pytest.approx(run.metrics["test"]["squad-f1"])


def read_kept(run: Run) -> dict[str, list[Any]]:
    (name,) = run.predictions
    table = run.read_predictions(name)
    return table.filter(np.array([split == "test" for split in table["split"].to_pylist()])).to_pydict()


def test_rows_to_evaluate_name_their_column_and_say_what_is_not_there() -> None:
    schema = TaskSchema("asked", "question-answering", ("question", "context"), ("squad-f1",))
    given = {"question": "w1", "context": CONTEXT}
    answers = ["w7", "w6", "w30", '["w8"]', "{'text': ['w5'], 'answer_start': [0]}", ""]
    rows = [{**given, "answers": each} for each in answers]
    with pytest.raises(InlayError, match=r"column of 'rows' 'answer'.*answers"):
        read_labelled(schema, rows, "answer")
    task = read_labelled(schema, rows)
    assert [row["text"] for row in task.test["label"]] == [["w7"], ["w6"], ["w30"], ["w8"], ["w5"], []]
    assert [row["start"] for row in task.test["label"]] == [[6], [-1], [-1], [12], [0], []]
    assert task.notes == (
        (
            "rows: 1 of 6 rows have an answer that cannot be found: the answer of 1 is not in the context (first "
            "rows, row 3: 'w30')"
        ),
        "rows: 1 of 6 questions have no answer",
    )


def test_the_threshold_is_kept_and_used(spec: Callable[..., Spec], tmp_path: Path) -> None:
    from dataclasses import replace

    run = tune(spec(max_steps=8), tmp_path / "runs", progress=False)
    loaded = inlay.load(run)
    assert loaded.schema.no_answer is not None
    assert any("no answer is given where its score" in note for note in run.record["task"]["notes"])
    rows = [{"question": "w1 w8", "context": "w3 w4 w1"}]
    never, always = (replace(loaded.schema, no_answer=at) for at in (1e9, -1e9))
    loaded.schema = never
    assert loaded.predict(rows)[0]["answer"] != ""
    loaded.schema = always
    assert loaded.predict(rows)[0]["answer"] == ""


def test_where_every_question_has_an_answer_one_is_always_given(spec: Callable[..., Spec], tmp_path: Path) -> None:
    run = tune(spec(questions(impossible=False)), tmp_path / "runs", progress=False)
    assert inlay.load(run).schema.no_answer is None
    assert all(each["answer"] for each in predict(run.folder, [{"question": "w1", "context": "w2 w3"}] * 2))
    assert predict(run.folder, [{"question": "w1", "context": ""}])[0]["answer"] == ""


@pytest.mark.parametrize("method", ["lora", "prefix", "prompt", "ntk-attention", "linear-probe", "multi-lora"])
def test_methods_reload_and_are_served(method: str, spec: Callable[..., Spec], tmp_path: Path) -> None:
    run = tune(spec(method=method, learning_rate=0.01), tmp_path / "runs", progress=False)
    kept = read_kept(run)
    test = tasks.load(run.spec).test
    rows = [{"question": row["question"], "context": row["context"]} for row in test]
    said = predict(run.folder, rows)
    assert [each["answer"] for each in said] == kept["prediction"]
    assert [each["score"] for each in said] == pytest.approx(kept["score"], rel=1e-4)
    hosted = host(run.folder, batch=4)
    ((name, schema),) = hosted.schemas.items()
    answers = hosted.answer([Request(name, row, schema.row(row, "test", 1)) for row in rows[:3]])
    assert [each["answer"] for each in answers] == [each["answer"] for each in said[:3]]


def test_an_interrupted_run_comes_to_the_same_bits(spec: Callable[..., Spec], tmp_path: Path) -> None:
    whole = tune(spec(max_steps=8), tmp_path / "whole", progress=False)
    steps = iter(range(1000))
    with pytest.raises(Interrupted):
        tune(spec(max_steps=8), tmp_path / "cut", progress=False, stop=lambda: next(steps) > 6)
    again = tune(spec(max_steps=8), tmp_path / "cut", progress=False)
    assert again.record["resumed_from"] is not None
    assert again.metrics == whole.metrics
    weights = [(run.adapter / "adapter_model.safetensors").read_bytes() for run in (whole, again)]
    assert weights[0] == weights[1]


def test_a_batch_in_parts_is_the_same_update(spec: Callable[..., Spec], tmp_path: Path) -> None:
    """Rows whose answer stands in another window, or nowhere, count as all others do."""
    whole, parts = (
        tune(spec(max_steps=3, learning_rate=0.01, gradient_accumulation=n), tmp_path / "runs", progress=False)
        for n in (1, 4)
    )
    for split in ("validation", "test"):
        assert whole.metrics[split]["loss"] == pytest.approx(parts.metrics[split]["loss"], rel=1e-5)


def test_evaluations_of_a_part_score_whole_rows(spec: Callable[..., Spec], tmp_path: Path) -> None:
    run = tune(spec(questions(200), max_eval=5), tmp_path / "runs", progress=False)
    assert list(run.record["evaluated_rows"].values()) == [5]
    assert set(run.metrics["validation"]) == {"squad-f1", "squad-exact", "loss"}


def test_a_merged_checkpoint_is_transformers_own(spec: Callable[..., Spec], tmp_path: Path) -> None:
    run = tune(spec(learning_rate=0.01), tmp_path / "runs", progress=False)
    inlay.merge(run.folder, tmp_path / "merged")
    plain = hf.AutoModelForQuestionAnswering.from_pretrained(tmp_path / "merged").eval()
    loaded = inlay.load(run)
    encoded = loaded.schema.encode_inputs([{"question": "w1 w8", "context": "w3 w1 w5"}], loaded.processor)
    batch = loaded.schema.collator(loaded.processor)([encoded[0]])
    with torch.no_grad():
        mine, theirs = loaded.model(**batch), plain(**batch)
    assert torch.allclose(mine["start_logits"], theirs["start_logits"], atol=1e-5)
    assert torch.allclose(mine["logits"][..., 1], theirs["end_logits"], atol=1e-5)
    assert "the first token stands for no answer" in (tmp_path / "merged" / "README.md").read_text()


def test_a_head_that_a_checkpoint_has_is_kept(model: Path, spec: Callable[..., Spec], tmp_path: Path) -> None:
    found = hf.BertForQuestionAnswering.from_pretrained(model)
    found.save_pretrained(model)
    backbone = inlay.load_backbone(str(model), kind="question-answering")
    assert torch.equal(backbone.model.qa_outputs.weight, found.qa_outputs.weight)
    assert backbone.newly_initialised == ["qa_outputs"]
    assert any("training goes on from it" in note for note in backbone.notes)


def test_rows_are_scored_by_their_f1(spec: Callable[..., Spec], tmp_path: Path) -> None:
    from inlay.training.evaluation import outputs_of

    run = tune(spec(max_steps=8), tmp_path / "runs", progress=False)
    loaded = inlay.load(run)
    task = tasks.load(run.spec).with_schema(loaded.schema)
    outputs, encoded = outputs_of(loaded.model, task, "test", loaded.processor, run.spec)
    found = row_scores.score_rows(loaded.schema, task.test, encoded, outputs)
    assert float(np.mean(found)) == pytest.approx(run.metrics["test"]["squad-f1"])


def test_what_is_refused(spec: Callable[..., Spec], model: Path, tmp_path: Path) -> None:
    out = tmp_path / "runs"
    with pytest.raises(
        InlayError, match=r"infoprompt does not work on BertForQuestionAnswering .* These work on it: .*lora"
    ):
        tune(spec(method="infoprompt"), out, progress=False)
    run = tune(spec(), out, progress=False)
    with pytest.raises(InlayError, match=r"'question-answering', which is not written as ONNX"):
        _check_kind(load_adapted(find_source(run.folder)))
    with pytest.raises(InlayError, match=r"probabilities are those of a row's classes"):
        predict(run.folder, [{"question": "w1", "context": "w2"}], probabilities=True)
    with pytest.raises(InlayError, match=r"lacks the column 'context'"):
        predict(run.folder, [{"question": "w1"}])
    with pytest.raises(InlayError, match=r"has no column of answers. Name it with --label"):
        evaluate(run.folder, [{"question": "w1", "context": "w2"}])
    two = {name: {"data": spec().data} for name in ("one", "other")}
    with pytest.raises(InlayError, match=r"Tasks of these kinds are trained each in a run of its own"):
        tune(spec().with_(data=None, tasks=tuple(two), task_fields=two), out, progress=False)
    zoo.tiny("t5", "sequence-to-sequence")[0].save_pretrained(model)
    with pytest.raises(InlayError, match=r"cannot do question-answering, because it has an encoder and a decoder"):
        tune(spec(), out, progress=False)
