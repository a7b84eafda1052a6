"""tune, compare and predict, from a user's files to a user's files."""

from __future__ import annotations

import csv
import dataclasses
import json
import math
import shutil
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from scipy import stats

from inlay import InlayError, Spec, compare, predict, tune
from inlay.portrait import summarise
from inlay.records.store import Store
from inlay.workflow.comparison import pooled
from inlay.workflow.predict import join
from inlay.workflow.settle import with_method_defaults
from inlay.workflow.statistics import half_width


def test_own_table_is_adapted_evaluated_recorded_and_found_again(review_spec: Spec, tmp_path: Path) -> None:
    said: list[str] = []
    run = tune(review_spec, tmp_path / "runs", progress=False, say=said.append)
    assert run.status == "finished"
    assert set(run.metrics) == {"validation", "test"}
    assert run.record["metric"] == "accuracy"
    assert run.record["task"]["schema"]["label_names"] == ["1", "2", "3"]
    assert run.portrait["parameters"]["trained"] < run.portrait["parameters"]["total"]
    assert any("validation" in line for line in said)
    before = (run.folder / "record.json").read_bytes()
    again = tune(review_spec, tmp_path / "runs", progress=False, say=said.append)
    assert again.id == run.id
    assert (run.folder / "record.json").read_bytes() == before
    assert said[-1] == f"already done: {run.id}"


def test_same_contents_elsewhere_are_the_same_run_and_edited_ones_are_not(
    review_spec: Spec, reviews: Path, tmp_path: Path
) -> None:
    run = tune(review_spec, tmp_path / "runs", progress=False)
    moved = shutil.copytree(review_spec.model, tmp_path / "elsewhere" / "my-model")
    copied = shutil.copy(reviews, tmp_path / "elsewhere" / "reviews.csv")
    assert tune(review_spec.with_(model=str(moved), data=copied), tmp_path / "runs", progress=False).id == run.id
    with Path(copied).open("a", newline="") as file:
        csv.writer(file).writerow([60, "w1 w1 w9", 1])
    assert tune(review_spec.with_(data=copied), tmp_path / "runs", progress=False).id != run.id
    assert len(Store(tmp_path / "runs").list()) == 2


@pytest.mark.parametrize("method", ["linear-probe", "bias", "lora", "full"])
def test_predictions_are_those_of_the_evaluation(method: str, review_spec: Spec, reviews: Path, tmp_path: Path) -> None:
    """All forms of saving: what a fresh load answers on the test rows scores exactly what the run recorded."""
    run = tune(review_spec.with_(method=method), tmp_path / "runs", progress=False)
    answers = predict(run.folder, reviews, tmp_path / "answers.jsonl")
    written = [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
    assert written == answers
    assert len(answers) == 60
    rows = list(csv.DictReader(reviews.open()))
    assert [answer["body"] for answer in answers] == [row["body"] for row in rows]
    from inlay import tasks

    held_out = tasks.load(run.spec).test
    truth = {row["body"]: row["stars"] for row in rows}
    by_text = {answer["body"]: answer["label"] for answer in answers}
    right = [by_text[text] == truth[text] for text in held_out["body"]]
    assert sum(right) / len(right) == run.metrics["test"]["accuracy"]


def test_folder_of_photos(image_model: Path, photos: Path, tmp_path: Path) -> None:
    spec = Spec(model=str(image_model), data=str(photos), method="linear-probe", max_steps=20, batch_size=8, seed=1)
    run = tune(spec.with_(learning_rate=0.05), tmp_path / "runs", progress=False)
    assert run.metrics["test"]["accuracy"] > 0.9
    answers = predict(run.folder, photos / "dark")
    assert {answer["label"] for answer in answers} == {"dark"}
    assert answers[0]["image"].endswith("0.png")


def test_one_run_serves_the_command_line_name_too(review_spec: Spec, reviews: Path, tmp_path: Path) -> None:
    run = tune(review_spec, tmp_path / "runs", progress=False)
    assert predict(run.id[-10:], reviews, out=tmp_path / "runs") == predict(run, reviews)


def test_prediction_refuses_other_base_weights(review_spec: Spec, reviews: Path, tmp_path: Path) -> None:
    run = tune(review_spec, tmp_path / "runs", progress=False)
    other = shutil.copytree(review_spec.model, tmp_path / "other")
    weights = load_file(other / "model.safetensors")
    name = next(name for name in weights if "layer.0" in name and weights[name].ndim == 2)
    weights[name] = weights[name] + 0.01
    save_file(weights, other / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InlayError, match="fingerprint"):
        predict(run, reviews, model=str(other))


def test_prediction_refuses_a_tampered_adapter(review_spec: Spec, reviews: Path, tmp_path: Path) -> None:
    run = tune(review_spec, tmp_path / "runs", progress=False)
    weights = next(run.adapter.rglob("*.safetensors"))
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(bytes(data))
    with pytest.raises(InlayError, match="was changed after it was written"):
        predict(run.folder, reviews)


def test_prediction_needs_the_columns_and_some_rows(review_spec: Spec, tmp_path: Path) -> None:
    run = tune(review_spec, tmp_path / "runs", progress=False)
    other = tmp_path / "other.csv"
    other.write_text("title\nw1 w2\n")
    with pytest.raises(InlayError, match="lacks the column 'body'"):
        predict(run, other)
    empty = tmp_path / "empty.csv"
    empty.write_text("body\n")
    with pytest.raises(InlayError, match="no rows"):
        predict(run, empty)


def test_text_task_on_an_image_model_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    with pytest.raises(InlayError, match=r"'rte' is about texts, and the model 'embedded:vit' reads images"):
        tune(Spec(model="embedded:vit", task="rte", method="lora"), tmp_path / "runs", progress=False)
    assert not (tmp_path / "runs").exists()


def test_unknown_method_offers_the_nearest(review_spec: Spec, tmp_path: Path) -> None:
    with pytest.raises(InlayError, match="Did you mean 'lora'"):
        tune(review_spec.with_(method="loora"), tmp_path / "runs", progress=False)


def test_a_run_that_is_refused_leaves_no_folder(review_spec: Spec, tmp_path: Path) -> None:
    spec = review_spec.with_(method="lora", settings={"target_modules": ["LayerNorm"]})  # which LoRA cannot adapt
    with pytest.raises(InlayError, match="LayerNorm"):
        tune(spec, tmp_path / "runs", progress=False)
    assert list((tmp_path / "runs").iterdir()) == []


def test_comparison_goes_on_after_a_failure_and_sorts_by_the_mean(review_spec: Spec, tmp_path: Path) -> None:
    said: list[str] = []
    spec = dataclasses.replace(review_spec, settings={"target_modules": ["LayerNorm"]})  # which LoRA cannot adapt
    found = compare(spec, ["bias", "lora"], 2, tmp_path / "runs", progress=False, say=said.append)
    assert [row.method for row in found.rows] == ["bias"]
    assert set(found.failures) == {"lora, seed 0", "lora, seed 1"}
    assert "LayerNorm" in found.failures["lora, seed 0"]
    row = found.rows[0]
    assert len(row.values) == 2
    assert row.mean == pytest.approx(sum(row.values) / 2)
    assert {run.status for run in Store(tmp_path / "runs").list()} == {"finished", "failed"}


def test_comparison_takes_finished_runs_as_they_are(review_spec: Spec, tmp_path: Path) -> None:
    done = tune(review_spec.with_(seed=1), tmp_path / "runs", progress=False)
    stamp = done.record["finished"]
    found = compare(review_spec, ["bias", "linear-probe"], [1], tmp_path / "runs", progress=False)
    assert {run.id: run.record["finished"] for run in found.runs}[done.id] == stamp
    assert found.rows[0].mean >= found.rows[1].mean


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@given(st.lists(st.floats(-5, 5), min_size=2, max_size=12))
def test_interval_is_student_s(values: list[float]) -> None:
    array = torch.tensor(values, dtype=torch.float64).numpy()
    low, high = stats.t.interval(0.95, len(values) - 1, loc=array.mean(), scale=stats.sem(array))
    width = half_width(values)
    assert width is not None
    if math.isnan(low):  # no spread at all, or one that underflows
        assert width == pytest.approx(0, abs=1e-9)
    else:
        assert width == pytest.approx((high - low) / 2, abs=1e-9)


def test_one_value_has_no_interval() -> None:
    assert half_width([0.5]) is None


Blocks = st.lists(st.tuples(st.integers(1, 100), st.floats(0.1, 10)), min_size=1, max_size=4)


@given(st.lists(Blocks, min_size=1, max_size=4), st.sampled_from([None, 50]))
def test_repetitions_of_several_runs_are_pooled_as_if_made_in_one(runs: list[Any], rows: int | None) -> None:
    found = pooled([{"rate": summarise(blocks, rows)} for blocks in runs] + [{"rate": None}, {}], "rate")
    whole = summarise([block for blocks in runs for block in blocks], rows)
    assert found is not None
    assert whole is not None
    assert found.repetitions == whole["repetitions"]
    assert found.mean == pytest.approx(whole["mean"])
    assert (found.spread is None) == (whole["spread"] is None)
    assert pooled([{}], "rate") is None


def test_runs_of_an_earlier_inlay_are_pooled_by_their_repetitions() -> None:
    known = [{"mean": 1.0, "spread": None, "repetitions": 1}, {"mean": 4.0, "spread": 2**0.5, "repetitions": 2}]
    found = pooled([{"rate": each} for each in known], "rate")
    assert found is not None
    assert (found.mean, found.repetitions) == (3.0, 3)
    assert found.spread == pytest.approx(statistics.stdev([1.0, 3.0, 5.0]))


def test_the_same_numbers_and_the_same_task_are_the_same_run(review_spec: Spec) -> None:
    assert review_spec.with_(epochs=3).digest() == review_spec.with_(epochs=3.0).digest()
    named = Spec(model="embedded:vit", method="bias", task="semeval")
    assert with_method_defaults(named) == with_method_defaults(named.with_(task="semeval2010"))


def test_another_tokenizer_or_code_is_another_run(review_spec: Spec, tmp_path: Path) -> None:
    run = tune(review_spec, tmp_path / "runs", progress=False)
    (Path(review_spec.model) / "README.md").write_text("a card")
    assert tune(review_spec, tmp_path / "runs", progress=False).id == run.id
    (Path(review_spec.model) / "added_tokens.txt").write_text("w1")
    assert tune(review_spec, tmp_path / "runs", progress=False).id != run.id


def test_data_set_of_the_hub_by_its_id_gets_as_far_as_the_hub(tmp_path: Path) -> None:
    with pytest.raises(InlayError, match="nobody/nothing"):
        tune(Spec(model="embedded:vit", task="nobody/nothing", method="bias"), tmp_path / "runs", progress=False)


def test_no_field_of_the_input_is_hidden_by_the_answer() -> None:
    row, answer = {"text": "the prompt", "score": "3"}, {"text": "the answer", "score": 0.5, "label": "a"}
    assert join(row, answer) == {
        "text": "the prompt",
        "score": "3",
        "predicted_text": "the answer",
        "predicted_score": 0.5,
        "label": "a",
    }


def test_output_that_cannot_be_written_is_refused_before_the_model_is_loaded(
    review_spec: Spec, reviews: Path, tmp_path: Path
) -> None:
    run = tune(review_spec, tmp_path / "runs", progress=False)
    shutil.rmtree(review_spec.model)
    with pytest.raises(InlayError, match="is a folder: give the name of a file"):
        predict(run, reviews, tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(InlayError, match="Cannot write"):
        predict(run, reviews, tmp_path / "file" / "answers.jsonl")


def test_adapter_of_an_embedded_model_names_it_as_inlay_does(tmp_path: Path) -> None:
    """A model that ships with inlay is on no hub, and its folder is this machine's affair. The adapter's config is the
    same every time."""
    from peft import PeftConfig, PeftModel

    import inlay

    spec = Spec(model="embedded:resnet", task="digits", method="lora", shots=20, max_steps=1, batch_size=4)
    run = tune(spec, tmp_path / "runs", progress=False)
    config = PeftConfig.from_pretrained(run.adapter)
    assert config.base_model_name_or_path == "embedded:resnet"
    base = inlay.load_backbone(config.base_model_name_or_path, num_labels=10).model
    assert PeftModel.from_pretrained(base, str(run.adapter)).config.num_labels == 10
    written = json.loads((run.adapter / "adapter_config.json").read_text())
    assert written["target_modules"] == sorted(written["target_modules"])


def test_predictions_that_are_not_finite_are_said_with_the_step(review_spec: Spec, tmp_path: Path) -> None:
    with pytest.raises(InlayError, match=r"not a? ?finite number.*step \d+ of 6.*learning rate.*Try a lower"):
        tune(review_spec.with_(method="full", learning_rate=1e30, evaluations=6), tmp_path / "runs", progress=False)
    (run,) = Store(tmp_path / "runs").list()
    assert run.status == "failed"


def test_an_argument_by_an_unknown_name_is_an_error(review_spec: Spec, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"tune\(\) got an unexpected keyword argument 'wachers'"):
        tune(review_spec, tmp_path, wachers=[])
    with pytest.raises(TypeError, match=r"compare\(\) got an unexpected keyword argument 'minuts'"):
        compare(review_spec, ["bias"], 1, tmp_path, minuts=1)
    assert tune(review_spec, tmp_path, progress=False, opened=None, stop=None).status == "finished"
