"""`tune` on a causal language model and a column of answers, without a kind: the run learns to write them."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from test_chat_runs import checkpoint

import inlay
from inlay import InlayError, Spec
from inlay.backbones import writes_texts
from inlay.workflow.explain.models import draw_examples
from inlay.workflow.forecast import forecast
from inlay.workflow.planning import kind_of
from inlay.workflow.settle import settle

Typed = Callable[..., tuple[int, str, str]]


def prefs(path: Path, count: int = 80) -> Path:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["instruction", "answer"])
        writer.writerows([f"what is {i}?", f"gold is number {i}"] for i in range(count))
    return path


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return checkpoint(tmp_path / "llama")


@pytest.fixture
def spec(llama: Path, tmp_path: Path) -> Spec:
    how = {"text": ("instruction",), "label": "answer", "max_steps": 2, "batch_size": 8}
    return Spec(model=str(llama), method="ntk-attention", data=str(prefs(tmp_path / "prefs.csv")), **how)


def test_the_command_of_a_user(typed: Typed, spec: Spec, tmp_path: Path) -> None:
    names = ("--model", "./llama", "--data", "prefs.csv", "--text", "instruction", "--label", "answer")
    how = ("--method", "ntk-attention", "--max-steps", "2")
    status, _, said = typed("tune", *names, *how)
    assert status == 0, said
    assert "kind: causal-lm, because 'answer' holds 80 different texts in 80 rows" in said
    assert "(--kind classification says otherwise)" in said
    (folder,) = (tmp_path / "runs").iterdir()
    status, _, said = typed("tune", *names, *how, "--kind", "causal-lm")
    assert (status, [*(tmp_path / "runs").iterdir()]) == (0, [folder])
    assert f"already done: {folder.name}" in said
    status, out, _ = typed("tune", *names, *how, "--print-config")
    assert (status, yaml.safe_load(out)["kind"]) == (0, "causal-lm")
    status, _, said = typed("tune", *names, *how, "--kind", "classification")
    assert status != 0
    assert "too few to hold some out" in said
    for command in (
        ("evaluate", "--run", f"runs/{folder.name}", "--data", "prefs.csv"),
        ("predict", "--run", f"runs/{folder.name}", "--input", "prefs.csv", "--output", "said.jsonl"),
        ("generate", "--run", f"runs/{folder.name}", "what is 3?", "--max-tokens", "3"),
    ):
        status, _, said = typed(*command)
        assert status == 0, said
    assert '"text"' in (tmp_path / "said.jsonl").read_text()


def test_the_run_says_its_kind(spec: Spec, tmp_path: Path) -> None:
    run = inlay.tune(spec, tmp_path / "runs", progress=False)
    assert (run.spec.kind, run.record["task"]["schema"]["kind"]) == ("causal-lm", "causal-lm")
    assert run.digest == settle(spec.with_(kind="causal-lm")).digest == settle(run.spec).digest
    assert forecast([spec], tmp_path / "runs").status == ("finished",)
    assert kind_of(spec) == "causal-lm"
    assert inlay.load(run).evaluate(spec.data).metrics.keys() >= {"perplexity", "exact-match"}


def test_several_tasks(spec: Spec, tmp_path: Path) -> None:
    own = {name: {"data": str(prefs(tmp_path / f"{name}.csv", count))} for name, count in (("a", 60), ("b", 70))}
    joint = spec.with_(data=None, tasks=("a", "b"), task_fields=own, method="lora")
    settled = settle(joint)
    assert {fields["kind"] for fields in settled.spec.task_fields.values()} == {"causal-lm"}
    assert settled.digest == settle(joint.with_(kind="causal-lm")).digest == settle(settled.spec).digest


def test_a_head_of_classes_alone_says_what_to_give(spec: Spec) -> None:
    with pytest.raises(InlayError, match=r"'linear-probe' trains a new head alone.*'answer'.*--kind classification"):
        settle(spec.with_(method="linear-probe"))


def test_an_encoder_keeps_its_classes(spec: Spec, text_model: Path) -> None:
    with pytest.raises(InlayError, match="with 80 classes"):
        settle(spec.with_(model=str(text_model), method="lora"))


def test_few_labels_stay_classes_and_the_same_run(spec: Spec) -> None:
    path = Path(str(spec.data))
    path.write_text("instruction,answer\n" + "".join(f"w {i},{'no' if i % 2 else 'yes'}\n" for i in range(80)))
    settled = settle(spec.with_(method="lora"))
    assert (settled.spec.kind, settled.first.kind) == (None, "classification")
    assert settled.digest == settle(spec.with_(method="lora", kind="classification")).digest


def test_a_run_from_before_is_named(spec: Spec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Made by the code of before: every model's labels are classes."""
    path, out = Path(str(spec.data)), tmp_path / "runs"
    rows = "".join(f"what is {i}?,gold is number {i % 520}\n" for i in range(1000))
    path.write_text(f"instruction,answer\n{rows}")
    spec = spec.with_(method="lora", max_steps=1)
    with monkeypatch.context() as patch:
        patch.setattr("inlay.backbones.writes_texts", lambda *_: False)
        earlier = inlay.tune(spec, out, progress=False)
    assert (earlier.spec.kind, earlier.record["task"]["schema"]["kind"]) == (None, "classification")
    said: list[str] = []
    new = inlay.tune(spec, out, progress=False, say=said.append)
    assert (new.id != earlier.id, new.spec.kind) == (True, "causal-lm")
    told = f"an earlier run took the labels for classes: --kind classification finds it ({earlier.id})"
    assert told in said
    assert inlay.tune(spec.with_(kind="classification"), out, progress=False).id == earlier.id


def test_explaining_reads_the_task_as_training_does(spec: Spec) -> None:
    assert draw_examples(spec, "train", 16, smallest=4).kind == "causal-lm"


@pytest.mark.parametrize(
    ("changes", "writes"),
    [
        ({}, True),
        ({"architectures": None}, True),
        ({"architectures": ["LlamaForSequenceClassification"]}, False),
        ({"architectures": ["LlamaModel"]}, False),
        ({"model_type": "bert", "architectures": ["BertLMHeadModel"]}, False),
        ({"model_type": "bert", "architectures": ["BertLMHeadModel"], "is_decoder": True}, True),
        ({"model_type": "t5", "architectures": ["T5ForConditionalGeneration"]}, False),
    ],
    ids=str,
)
def test_which_models_write(llama: Path, changes: dict[str, object], writes: bool) -> None:
    import json

    config = json.loads((llama / "config.json").read_text())
    (llama / "config.json").write_text(json.dumps({k: v for k, v in (config | changes).items() if v is not None}))
    assert writes_texts(str(llama)) is writes
