"""Language models with adapters under lm-evaluation-harness, beside the same scores computed by hand."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import inlay
import zoo
from checkpoints import write_tokenizer
from inlay import InlayError, Spec, tune
from inlay.workflow.harness import evaluate_harness
from inlay.workflow.speakers import open_speaker

pytest.importorskip("lm_eval")
Typed = Callable[..., tuple[int, str, str]]
QUESTIONS = [
    {"question": f"w{6 + i} w{7 + i}", "choices": ["w20 w21", "w22", "w23 w9"], "answer": i % 3} for i in range(9)
]
YAML = """task: my_questions
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: answer
metric_list:
  - metric: acc
  - metric: acc_norm
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Llama, a task of the harness with its data, and conversations to learn from."""
    folder = tmp_path_factory.mktemp("harness")
    model: Any = zoo.tiny("llama", "causal-lm")[0]
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(6)
    model.save_pretrained(folder / "my-llama")
    write_tokenizer(folder / "my-llama")
    (folder / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in QUESTIONS))
    (folder / "mine.yaml").write_text(YAML.format(data=folder / "questions.jsonl"))
    rows = [{"q": f"w{6 + i % 30} w{8 + i % 7}", "a": ["w20 w21", "w22"][i % 2]} for i in range(40)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def by_hand(model: Any, tokenizer: Any) -> dict[str, float]:
    """The share of questions whose likeliest choice is right; once as a sum, once by the letters of the choice."""
    model = model.double().eval()
    right = {"acc": 0, "acc_norm": 0}
    for row in QUESTIONS:
        sums = []
        for choice in row["choices"]:
            ids = tokenizer(f"{row['question']} {choice}", add_special_tokens=False)["input_ids"]
            count = len(choice.split())
            with torch.no_grad():
                logits = model(input_ids=torch.tensor([ids])).logits[0, -len(ids) :]
            logs = logits.log_softmax(-1)
            sums.append(sum(float(logs[at - 1, ids[at]]) for at in range(len(ids) - count, len(ids))))
        letters = [value / len(choice) for value, choice in zip(sums, row["choices"], strict=True)]
        right["acc"] += sums.index(max(sums)) == row["answer"]
        right["acc_norm"] += letters.index(max(letters)) == row["answer"]
    return {name: count / len(QUESTIONS) for name, count in right.items()}


@pytest.mark.parametrize("method", ["lora", "adaptformer", "compact-prefix", "prompt"])
def test_every_method_acts_under_the_harness(method: str, place: Path, tmp_path: Path) -> None:
    settings = {"num_virtual_tokens": 3} if method == "prompt" else {}
    given: dict[str, Any] = {"text": ("q",), "label": "a", "kind": "causal-lm", "max_steps": 6, "batch_size": 8}
    spec = Spec(
        model=str(place / "my-llama"), data=str(place / "rows.jsonl"), method=method, settings=settings, **given
    )
    run = tune(spec.with_(learning_rate=0.3, max_length=16), place / "runs", progress=False)
    found = evaluate_harness(open_speaker(run.folder), [str(place / "mine.yaml")], output=tmp_path / "scores.json")
    loaded = inlay.load(run)
    wanted = by_hand(loaded.model, loaded.processor)
    assert {score.metric: score.value for score in found.scores} == pytest.approx(wanted)
    assert {score.examples for score in found.scores} == {len(QUESTIONS)}
    written = json.loads((tmp_path / "scores.json").read_text())
    assert written == found.to_json()
    assert written["model"].endswith(run.id)


def test_the_model_alone_by_the_command(
    place: Path, typed: Typed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    git = tmp_path / "bin" / "git"
    git.parent.mkdir()
    git.write_text(f"#!/bin/sh\ntouch {tmp_path}/asked\n")
    git.chmod(0o755)
    monkeypatch.setenv("PATH", str(git.parent), prepend=os.pathsep)
    status, out, errors = typed(
        "evaluate", "--model", place / "my-llama", "--harness", place / "mine.yaml", "--limit", 5, "--output", "o.json"
    )
    assert status == 0, errors
    assert "only the first 5 questions of each task" in errors
    assert not (tmp_path / "asked").exists(), "git complains where the working folder is no repository"
    lines = [line.split("\t") for line in out.splitlines() if line.startswith("my_questions")]
    model = transformers.AutoModelForCausalLM.from_pretrained(place / "my-llama")
    wanted = by_hand(model, transformers.AutoTokenizer.from_pretrained(place / "my-llama"))
    assert [line[1] for line in lines] == list(wanted)
    assert {line[4] for line in lines} == {"5"}


def test_what_is_refused_is_one_error(place: Path, typed: Typed, tmp_path: Path) -> None:
    with_code = tmp_path / "code.yaml"
    with_code.write_text(YAML.format(data="x.jsonl") + "process_docs: !function beside.prepare\n")
    (tmp_path / "beside.py").write_text("raise SystemExit('this code was run')")
    nameless = tmp_path / "nameless.yaml"
    nameless.write_text("dataset_path: json\n")
    lacking = tmp_path / "lacking.yaml"
    lacking.write_text(YAML.format(data=tmp_path / "not-there.jsonl").replace("my_questions", "lacking"))
    for tasks, wanted in (
        (with_code, "names functions (!function) of a Python file beside it"),
        (nameless, "has no `task:` with a name"),
        (tmp_path / "absent.yaml", "There is no file"),
        (lacking, "lacking"),
        ("arc_easy", "could not be had from the Hub"),
    ):
        status, _, errors = typed("evaluate", "--model", place / "my-llama", "--harness", tasks)
        assert (status, wanted in errors) == (2, True), errors
        assert [line[:7] for line in errors.splitlines()].count("Error: ") == 1
        assert "Traceback" not in errors
    assert typed("evaluate", "--model", place / "my-llama")[0] == 2
    status, _, errors = typed("evaluate", "--data", place / "rows.jsonl", "--shots", 3)
    assert (status, "--data scores a run" in errors) == (2, True)
    for option in ("--label", "--kind", "--text", "--image", "--template"):
        status, _, errors = typed("evaluate", "--run", "any", "--harness", place / "mine.yaml", option, "stars")
        assert (status, errors.count("Error: ")) == (2, 1)
        assert f"{option} stars is for --data; a task of --harness says itself" in errors
    with pytest.raises(InlayError, match="is a folder"):
        evaluate_harness(open_speaker(model=str(place / "my-llama")), [str(place / "mine.yaml")], output=tmp_path)
