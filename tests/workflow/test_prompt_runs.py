"""Prompt methods from a user's files to a user's files: places in the text, parts of the loss, predictions."""

from __future__ import annotations

import json
import re
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import pytest
from scipy import stats
from typer.testing import CliRunner

from inlay import InlayError, Spec, backbones, compare, predict, tasks, tune
from inlay.cli.app import app
from inlay.methods.registry import get
from inlay.records.command import command
from inlay.records.store import Store
from inlay.training import FitOptions, Interrupted, fit
from inlay.workflow.comparison import against
from inlay.workflow.settle import with_training_defaults
from inlay.workflow.tune import identify


@pytest.mark.parametrize("method", ["infoprompt", "warp"])
def test_a_prompt_run_predicts_what_it_was_scored_on_and_logs_its_losses(
    method: str, review_spec: Spec, reviews: Path, tmp_path: Path
) -> None:
    said: list[str] = []
    run = tune(review_spec.with_(method=method), tmp_path / "runs", progress=False, say=said.append)
    schema = run.record["task"]["schema"]
    assert schema["prompt_tokens"] == 4
    assert schema["prompt_template"].count("{soft_prompt}") == 4
    assert any("Z is read at the mean" in line for line in said), "the model on disk is a bare encoder"
    answers = predict(run.folder, reviews)
    held_out = tasks.load(run.spec).test
    by_text = {answer["body"]: answer["label"] for answer in answers}
    right = [by_text[row["body"]] == str(row["label"] + 1) for row in held_out]
    assert sum(right) / len(right) == run.metrics["test"]["accuracy"]
    entries = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    logged = [entry for entry in entries if "loss" in entry]
    parts = {name for entry in logged for name in entry if name.endswith("_loss")}
    assert parts == ({"task_loss", "head_loss", "representation_loss"} if method == "infoprompt" else {"task_loss"})
    for entry in logged:
        whole = entry["task_loss"] + 0.05 * entry.get("head_loss", 0) + 0.1 * entry.get("representation_loss", 0)
        assert whole == pytest.approx(entry["loss"], abs=2e-5)


@pytest.mark.parametrize(
    ("method", "settings", "repetitions"),
    [("infoprompt", {}, 2), ("idpg", {}, 2), ("infoprompt", {"cache": False}, 4), ("warp", {}, 4)],
)
def test_only_passes_that_were_computed_tell_how_fast_a_model_infers(
    method: str, settings: dict[str, Any], repetitions: int, review_spec: Spec, tmp_path: Path
) -> None:
    """The first pass over the validation split and the test: from then on `Phi(X)` comes from memory, if it is kept."""
    spec = review_spec.with_(method=method, settings=settings, max_steps=3, evaluations=3)
    run = tune(spec, tmp_path / "runs", progress=False)
    assert run.record["portrait"]["inference_examples_per_second"]["repetitions"] == repetitions


def test_accumulated_parts_are_those_of_the_whole_batch(review_spec: Spec, tmp_path: Path) -> None:
    found = []
    for parts in (1, 4):
        spec = review_spec.with_(method="warp", gradient_accumulation=parts)
        run = tune(spec, tmp_path / "runs", progress=False)
        lines = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
        found.append([entry["task_loss"] for entry in lines if "task_loss" in entry])
    assert found[0] == pytest.approx(found[1], abs=1e-4)


def test_a_user_s_template_and_words(review_spec: Spec, tmp_path: Path) -> None:
    settings = {"num_prompt_tokens": 2, "label_words": ["w1", "w2", "w3"], "initial_words": "w4 w5"}
    spec = review_spec.with_(method="warp", template="{body} {soft_prompt} w7 {soft_prompt}", settings=settings)
    run = tune(spec, tmp_path / "runs", progress=False)
    config = json.loads((run.adapter / "adapter_config.json").read_text())
    assert config["template"] == "{body} {soft_prompt} w7 {soft_prompt}"
    assert len(config["label_ids"]) == 3
    assert len(config["initial_ids"]) == 2
    for wrong, words in (
        ({"settings": {"label_words": ["w1"]}}, "give 3, one for each"),
        ({"settings": {"template": "{text} {soft_prompt}"}}, "placeholder"),
        ({"template": "{body} {soft_prompt}", "settings": {"state": "mask"}}, r"has no \{mask\}"),
        ({"settings": {"initial_words": "unheard"}}, "no word that the tokenizer knows"),
    ):
        with pytest.raises(InlayError, match=words):
            tune(review_spec.with_(method="warp", **wrong), tmp_path / "runs", progress=False)


def test_classes_whose_names_the_tokenizer_does_not_know(review_spec: Spec, reviews: Path, tmp_path: Path) -> None:
    """Their vectors start from random numbers; only words that were given are refused."""
    other = tmp_path / "other.csv"
    lines = reviews.read_text().splitlines()
    names = {"1": "gut", "2": "naja", "3": "arg"}
    rows = [",".join((*row.split(",")[:2], names[row.split(",")[2]])) for row in lines[1:]]
    other.write_text("\n".join([lines[0], *rows]) + "\n")
    said: list[str] = []
    spec = review_spec.with_(data=str(other), method="warp", max_steps=1)
    run = tune(spec, tmp_path / "runs", progress=False, say=said.append)
    assert json.loads((run.adapter / "adapter_config.json").read_text())["label_ids"] is None
    assert any("does not know arg, gut, naja" in line for line in said)


def test_an_adapter_of_tune_is_used_in_peft_by_one_function(review_spec: Spec, reviews: Path, tmp_path: Path) -> None:
    import torch
    from peft import PeftModel

    from inlay.tasks import prompts

    run = tune(review_spec.with_(method="infoprompt"), tmp_path / "runs", progress=False)
    answers = predict(run.folder, reviews)[:5]
    backbone = backbones.load(review_spec.model, kind="classification", num_labels=3)
    model = PeftModel.from_pretrained(backbone.model, str(run.adapter)).eval()
    config = model.active_peft_config
    with torch.no_grad():
        batch = prompts.encode([{"body": answer["body"]} for answer in answers], backbone.processor, config)
        found = model(**batch).logits.softmax(-1)
    assert [str(i + 1) for i in found.argmax(1).tolist()] == [answer["label"] for answer in answers]
    assert found.max(1).values.tolist() == pytest.approx([answer["score"] for answer in answers], abs=1e-4)
    with pytest.raises(InlayError, match="Row 0 lacks body"):
        prompts.encode([{"text": "w1"}], backbone.processor, config)


def test_full_is_a_size_among_others(reviews: Path, text_model: Path, tmp_path: Path) -> None:
    given = ["--model", str(text_model), "--data", str(reviews), "--text", "body", "--label", "stars", "--seeds", "1"]
    given += ["--methods", "warp", "--max-steps", "1", "--out", str(tmp_path / "runs")]
    told = CliRunner().invoke(app, ["compare", *given, "--shots", "9,full"])
    assert told.exit_code == 0, told.output
    found = {run.spec.shots: run.record["examples"]["train"] for run in Store(tmp_path / "runs").list()}
    assert found[9] == 9
    assert found[None] > 9
    assert "12,x" in str(CliRunner().invoke(app, ["compare", *given, "--shots", "12,x"]).exception)


def test_one_task_object_serves_methods_with_and_without_prompts(review_spec: Spec, tmp_path: Path) -> None:
    task = tasks.load(review_spec)
    plain = task.schema
    for method in ("warp", "bias"):
        spec = review_spec.with_(method=method, max_steps=1)
        backbone = backbones.load(
            spec.model, kind=task.kind, num_labels=task.num_labels, label_names=task.label_names, seed=0
        )
        outcome = fit(backbone, task, get(method), spec, tmp_path / method, FitOptions(progress=False))
        encoded = outcome.tasks[task.name].encode("test", backbone.processor, 32)[0]["input_ids"]
        assert (min(encoded) < 0) == (method == "warp")
    assert task.schema == plain


def test_methods_are_tested_against_a_baseline_paired_by_seed(review_spec: Spec, tmp_path: Path) -> None:
    found = compare(review_spec.with_(max_steps=2, shots=12), ["warp", "bias"], 3, tmp_path / "runs", progress=False)
    differences = {each.method: each for each in against(found, "bias")}
    values = {
        method: [run.metrics["test"]["accuracy"] for run in found.runs if run.spec.method == method]
        for method in ("warp", "bias")
    }
    assert differences["bias"].difference is None
    for method, each in differences.items():
        assert each.mean == pytest.approx(fmean(values[method]))
        assert each.error == pytest.approx(stdev(values[method]) / 3**0.5)
    gaps = [a - b for a, b in zip(values["warp"], values["bias"], strict=True)]
    assert differences["warp"].difference == pytest.approx(fmean(gaps))
    if stdev(gaps):
        assert differences["warp"].p == pytest.approx(float(stats.ttest_rel(values["warp"], values["bias"]).pvalue))
    with pytest.raises(InlayError, match="not among the methods"):
        against(found, "lora")


def test_several_sizes_make_a_table_each(review_spec: Spec, tmp_path: Path) -> None:
    data = f"--model {review_spec.model} --data {review_spec.data} --text body --label stars"
    what = "--methods warp,bias --baseline bias --shots 6,12 --seeds 1 --max-steps 1"
    made = CliRunner().invoke(app, f"compare {data} {what} --out {tmp_path / 'runs'} --quiet".split())
    assert made.exit_code == 0, made.output
    assert made.output.count("minus bias") == 2
    assert len(Store(tmp_path / "runs").list()) == 4


@pytest.mark.parametrize(
    ("examples", "changes", "words"),
    [
        (64, {"batch_size": 32}, "64 examples make 6 updates in 3 epochs of batches of 32, .*--epochs 30 .* make 240"),
        (8, {"epochs": 1, "batch_size": 8}, "8 examples make 1 update in 1 epochs.*would make 30"),
        (64, {"epochs": 30, "batch_size": 8}, None),
        (64, {"epochs": 30}, None),
        (64, {"max_steps": 3}, None),
        (5000, {}, None),
        (None, {}, None),
        (0, {}, None),
    ],
)
def test_too_few_updates_are_said_to_be_few(examples: int | None, changes: dict[str, Any], words: str | None) -> None:
    given = Spec(model="a", task="rte", method="warp", **changes)
    spec, said = with_training_defaults(given, examples)
    assert len(said) == (words is not None)
    assert words is None or re.search(words, said[0])
    if changes:
        assert spec == given, "what was given is what is done"


@pytest.mark.parametrize(
    ("examples", "changes", "amount"),
    [
        (1, {}, (30.0, 8)),
        (64, {}, (30.0, 8)),
        (512, {}, (30.0, 8)),
        (513, {}, (3.0, 32)),
        (None, {}, (3.0, 32)),
        (64, {"gradient_accumulation": 4}, (30.0, 8)),
        (64, {"gradient_accumulation": 16}, (30.0, 16)),
        (64, {"epochs": 4}, (4.0, 32)),
        (64, {"batch_size": 4}, (3.0, 4)),
        (64, {"max_steps": 4}, (3.0, 32)),
    ],
)
def test_few_examples_are_trained_on_for_longer(
    examples: int | None, changes: dict[str, Any], amount: tuple[float, int]
) -> None:
    spec, _ = with_training_defaults(Spec(model="a", task="rte", method="warp", **changes), examples)
    assert (spec.epochs, spec.batch_size) == amount
    assert with_training_defaults(spec, 10**6) == (spec, []), "what was settled stays"


def test_a_few_examples_need_no_options(review_spec: Spec, tmp_path: Path) -> None:
    """The numbers that were taken are said and recorded, and giving them is the same run, cut short or done."""
    bare = review_spec.with_(epochs=None, batch_size=None, max_steps=None, shots=12, evaluations=1)
    given, said = bare.with_(epochs=30, batch_size=8), list[str]()

    stops = iter([False] * 20)
    with pytest.raises(Interrupted):
        tune(bare, tmp_path / "runs", progress=False, say=said.append, stop=lambda: next(stops, True))
    assert any("12 examples make 60 updates in 30 epochs of batches of 8: the default for so few" in x for x in said)
    run = tune(given, tmp_path / "runs", progress=False)
    assert run.record["resumed_from"] is not None
    assert run.record["steps"] == 60
    assert (run.spec.epochs, run.spec.batch_size) == (30.0, 8)
    assert identify(bare) == identify(given) == identify(run.spec)
    assert tune(bare, tmp_path / "runs", progress=False, say=said.append).id == run.id
    assert "--epochs 30 --batch-size 8" in command(run.spec)
    assert len(Store(tmp_path / "runs").list()) == 1


def test_running_text_is_not_counted_by_its_rows(text_model: Path, tmp_path: Path) -> None:
    """Twelve lines may be a book."""
    (tmp_path / "book.txt").write_text("\n".join(f"w{i} w1 w2 w3" for i in range(30)))
    spec = Spec(model=str(text_model), method="bias", data=str(tmp_path / "book.txt"), kind="causal-lm")
    assert tasks.load(spec).examples is None
    assert identify(spec)[0].amount() == (3.0, 32)
