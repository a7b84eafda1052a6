"""What a run's head reads is said, recorded, read again by predict, and a part of what the run is."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from sklearn.metrics import matthews_corrcoef
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from inlay import InlayError, Spec, predict, tasks, tune
from inlay.records.command import arguments
from inlay.records.sealed import sealed
from inlay.records.store import Store
from inlay.report.collect import collect
from inlay.training import Interrupted
from inlay.workflow.answer import answer
from inlay.workflow.export import export
from inlay.workflow.planning import plan
from inlay.workflow.tune import identify

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@pytest.fixture
def encoder(text_model: Path) -> Path:
    """The tiny BERT as a sentence encoder that was made for the mean."""
    (text_model / "1_Pooling").mkdir()
    (text_model / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_mean_tokens": True}))
    modules = [{"path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}]
    (text_model / "modules.json").write_text(json.dumps(modules))
    return text_model


def forget_the_choice(run: Any) -> None:
    """Make a run one that an earlier inlay made: its spec knows no pooling and has no seal, nor is it in the record."""
    for name, seal in (("spec.json", False), ("record.json", True)):
        data = json.loads((run.folder / name).read_text())
        del data["checksum"]
        if name == "spec.json":
            del data["spec"]["pooling"]
        else:
            del data["spec"], data["backbone"]["pooling"]
        (run.folder / name).write_text(json.dumps(sealed(data) if seal else data))


@pytest.mark.parametrize("method", ["linear-probe", "lora", "full"])
def test_a_run_says_records_and_reads_again_what_its_head_reads(
    method: str, encoder: Path, review_spec: Spec, reviews: Path, tmp_path: Path
) -> None:
    said: list[str] = []
    run = tune(review_spec.with_(method=method), tmp_path / "runs", progress=False, say=said.append)
    assert "the head reads the mean of the tokens' states (--pooling chooses)" in said
    assert run.record["backbone"]["pooling"] == "mean"
    assert Store(tmp_path / "runs").get(run.id).spec.pooling == "mean"
    by_text = {row["body"]: row["label"] for row in predict(run.folder, reviews)}
    held_out = tasks.load(run.spec).test
    right = [by_text[row["body"]] == str(row["label"] + 1) for row in held_out]
    assert sum(right) / len(right) == run.metrics["test"]["accuracy"]


def test_a_run_from_before_is_found_by_what_it_read_and_not_by_the_default(
    encoder: Path, review_spec: Spec, reviews: Path, tmp_path: Path
) -> None:
    out = tmp_path / "runs"
    old = tune(review_spec.with_(pooling="pooler"), out, progress=False)
    assert old.record["backbone"]["pooling"] == "pooler"
    before = predict(old.folder, reviews)
    forget_the_choice(old)
    reread = Store(out).get(old.id)
    assert reread.spec.pooling == "own"
    assert predict(old.folder, reviews) == before
    assert tune(review_spec.with_(pooling="own"), out, progress=False).id == old.id
    assert tune(reread.spec, out, progress=False).id == old.id
    new = tune(review_spec, out, progress=False)
    assert new.id != old.id
    assert new.metrics["test"] != old.metrics["test"]
    assert tune(review_spec.with_(pooling="mean"), out, progress=False).id == new.id
    assert identify(new.spec) == (new.spec, new.digest), "settled once for all"
    words = arguments(reread.spec)
    assert words[words.index("--pooling") + 1] == "own"
    found = collect(out)
    assert sorted(each.more for each in found.sets) == ["", "pooling mean"], "unlike features are not side by side"


@pytest.mark.parametrize("status", ["finished", "interrupted"])
def test_a_run_from_before_is_named_to_who_gives_its_command_again(
    status: str, encoder: Path, review_spec: Spec, tmp_path: Path
) -> None:
    out, said = tmp_path / "runs", list[str]()
    if status == "finished":
        old = tune(review_spec.with_(pooling="own"), out, progress=False, say=said.append)
    else:
        with pytest.raises(Interrupted):
            tune(review_spec.with_(pooling="own"), out, progress=False, say=said.append, stop=lambda: True)
        (old,) = Store(out).list()
    assert old.status == status
    assert not [line for line in said if "earlier run" in line]
    new = tune(review_spec, out, progress=False, say=said.append)
    does = "finds" if status == "finished" else "resumes"
    found = [line for line in said if "earlier run" in line]
    assert found == [f"an earlier run read the architecture's own feature: --pooling own {does} it ({old.id})"]
    said.clear()
    assert tune(review_spec, out, progress=False, say=said.append).id == new.id
    assert said == [f"already done: {new.id}"]
    assert tune(review_spec.with_(pooling="own"), out, progress=False).id == old.id
    tune(review_spec.with_(pooling="first"), out, progress=False, say=said.append)
    assert not [line for line in said if "earlier run" in line], "who chooses knows"


def test_runs_from_before_and_after_are_one_line_where_nothing_was_replaced(review_spec: Spec, tmp_path: Path) -> None:
    out = tmp_path / "runs"
    old = tune(review_spec, out, progress=False)
    assert tune(review_spec.with_(pooling="pooler"), out, progress=False).metrics == old.metrics
    forget_the_choice(old)
    tune(review_spec.with_(seed=1), out, progress=False)
    found = collect(out)
    assert [len(row.results) for row in found.rows] == [2]
    assert [each.more for each in found.sets] == [""]


def test_a_model_that_says_nothing_has_the_runs_it_had(review_spec: Spec) -> None:
    spec, digest = identify(review_spec)
    assert spec.pooling == "auto"
    for same in ("own", "pooler"):
        assert identify(review_spec.with_(pooling=same))[1] == digest
    assert "--pooling" not in arguments(spec)
    assert identify(review_spec.with_(pooling="first"))[1] != digest


def test_pooling_is_refused_where_there_is_nothing_to_choose(review_spec: Spec, tmp_path: Path) -> None:
    with pytest.raises(InlayError, match=r"warp has class vectors.*reads no pooler\. Give mean, first or last"):
        tune(review_spec.with_(method="warp", pooling="pooler"), tmp_path, progress=False)
    with pytest.raises(InlayError, match="Unknown pooling 'average'"):
        review_spec.with_(pooling="average")
    with pytest.raises(InlayError, match="pooling='mean': image-classification has no single feature"):
        identify(Spec(model="embedded:vit", task="digits", method="bias", pooling="mean"))
    planned = plan(review_spec.with_(pooling="pooler"), ["warp", "bias"], 1)
    assert planned.methods == ["bias"]
    assert "reads no pooler" in planned.left_out["warp"]


@pytest.mark.parametrize("chosen", ["auto", "first"])
def test_every_method_of_a_comparison_reads_the_same_feature(
    chosen: str, encoder: Path, review_spec: Spec, tmp_path: Path
) -> None:
    found = set()
    for method in ("warp", "bias"):
        run = tune(review_spec.with_(method=method, pooling=chosen), tmp_path / "runs", progress=False)
        config = json.loads((run.adapter / "adapter_config.json").read_text())
        found |= {run.spec.pooling, run.record["backbone"]["pooling"], config["pooling"], config.get("state", chosen)}
    assert found - {"auto"} == {"mean" if chosen == "auto" else "first"}


def test_several_tasks_in_one_run_answer_from_the_feature_they_were_trained_on(encoder: Path, tmp_path: Path) -> None:
    rng = random.Random(0)
    for name, fields, labels in (
        ("cola", ("sentence",), ["unacceptable", "acceptable"]),
        ("cb", ("premise", "hypothesis"), ["entailment", "contradiction", "neutral"]),
    ):
        (tmp_path / "data" / name).mkdir(parents=True)
        for split, count in (("train", 24), ("test", 9)):
            rows = [
                {field: " ".join(f"w{rng.choice([i % len(labels), 20])}" for _ in range(6)) for field in fields}
                | {"label": labels[i % len(labels)]}
                for i in range(count)
            ]
            (tmp_path / "data" / name / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    spec = Spec(
        model=str(encoder),
        method="multi-lora",
        tasks=("cola", "cb"),
        data_dir=str(tmp_path / "data"),
        max_steps=12,
        batch_size=8,
        evaluations=1,
        learning_rate=0.1,
    )
    run = tune(spec, tmp_path / "runs", progress=False)
    facts = json.loads((run.adapter / "tasks.json").read_text())
    assert facts["pooling"] == run.record["backbone"]["pooling"] == run.spec.pooling == "mean"
    rows = [json.loads(line) for line in (tmp_path / "data" / "cola" / "test.jsonl").read_text().splitlines()]
    requests = tmp_path / "requests.jsonl"
    requests.write_text("".join(json.dumps({"task": "cola", "sentence": row["sentence"]}) + "\n" for row in rows))
    answers = answer(run.adapter, requests)
    found = matthews_corrcoef([row["label"] for row in rows], [given["label"] for given in answers])
    assert found == pytest.approx(run.metrics["test"]["cola/matthews"])
    assert found != 0, "not one class for all"
    lora = export(run.adapter, "cola", tmp_path / "cola-lora")
    plain = AutoModelForSequenceClassification.from_pretrained(encoder, num_labels=2)
    model = PeftModel.from_pretrained(plain, lora).eval()
    tokens = AutoTokenizer.from_pretrained(encoder)(
        [row["sentence"] for row in rows], padding=True, return_tensors="pt"
    )
    with torch.no_grad():
        best = model(**{name: tokens[name] for name in ("input_ids", "attention_mask")}).logits.argmax(1).tolist()
    assert [("unacceptable", "acceptable")[each] for each in best] == [given["label"] for given in answers]


def test_the_command_line_offers_it(encoder: Path, reviews: Path, typed: Any) -> None:
    given = ("--model", encoder, "--data", reviews, "--text", "body", "--label", "stars", "--method", "bias")
    status, _, error = typed("tune", *given, "--pooling", "middle")
    assert status != 0
    assert "Unknown pooling 'middle'" in error
    status, output, error = typed("tune", *given, "--pooling", "last", "--max-steps", "2")
    assert (status, "the head reads the last token's state" in output + error) == (0, True), error
