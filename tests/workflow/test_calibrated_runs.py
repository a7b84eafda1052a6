"""`tune --calibrate`: a temperature that is kept with the run, and what is answered with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

import inlay
from inlay import InlayError, Spec
from inlay.records.predictions import FOLDER
from inlay.report.collect import collect
from inlay.report.inside import look_into
from inlay.tasks.calibration import choose_temperature, measure_calibration, to_probabilities
from inlay.training.evaluation import outputs_of
from inlay.workflow.settle import settle

TEXTS = ["w1 w1 w7", "w2 w9 w2", "w3 w3 w8"]


def spec_of(model: Path, data: Path, **changes: Any) -> Spec:
    how: dict[str, Any] = {"max_steps": 12, "batch_size": 8, "learning_rate": 0.05, "label": "stars", "text": ("body",)}
    return Spec(model=str(model), method="bias", data=str(data), **how | changes)


def silent(line: str) -> None:
    pass


def test_a_run_keeps_its_temperature(text_model: Path, reviews: Path, tmp_path: Path) -> None:
    plain = inlay.tune(spec_of(text_model, reviews), tmp_path / "runs", progress=False, say=silent)
    said: list[str] = []
    run = inlay.tune(spec_of(text_model, reviews, calibrate=True), tmp_path / "runs", progress=False, say=said.append)
    assert run.id != plain.id
    assert run.record["metrics"] == plain.record["metrics"]
    assert "calibration" not in plain.record

    loaded = inlay.load(run)
    task = settle(run.spec).first
    found = run.record["calibration"]
    for split in ("validation", "test"):
        outputs, _ = outputs_of(loaded.model, task, split, loaded.processor, run.spec)
        labels = np.asarray(task.split(split)["label"])
        if split == "validation":
            assert found["temperature"] == pytest.approx(choose_temperature(outputs, labels), rel=1e-6)
        entry = found[split]
        assert entry["rows"] == len(labels)
        assert entry["before"] == pytest.approx(measure_calibration(outputs, labels), rel=1e-5)
        assert entry["after"] == pytest.approx(measure_calibration(outputs, labels, found["temperature"]), rel=1e-5)
    assert any(line.startswith("probabilities are calibrated on ") for line in said)
    assert any(line.startswith("calibration on ") for line in said)

    assert loaded.schema.temperature == found["temperature"]
    before, after = (inlay.load(each).predict(TEXTS, probabilities=True) for each in (plain, run))
    for old, new in zip(before, after, strict=True):
        assert old["label"] == new["label"]
        shares = np.array(list(old["probabilities"].values())) ** (1 / found["temperature"])
        assert list(new["probabilities"].values()) == pytest.approx((shares / shares.sum()).tolist(), abs=1e-5)
    for each, when in ((plain, "before"), (run, "after")):
        (page,) = look_into(collect([each]).rows[0], 0)
        assert page["ece"] == pytest.approx(found["test"][when]["ece"], rel=1e-4)
    scores = []
    for each in (plain, run):
        (file,) = (each.folder / FOLDER).glob("*.parquet")
        scores.append([row["score"] for row in pq.read_table(file).to_pylist() if row["split"] == "test"])
    outputs, _ = outputs_of(loaded.model, task, "test", loaded.processor, run.spec)
    for kept, temperature in zip(scores, (None, found["temperature"]), strict=True):
        assert kept == pytest.approx(to_probabilities(outputs, temperature).max(-1).tolist(), rel=1e-4)


def test_what_cannot_be_calibrated_is_refused(text_model: Path, reviews: Path, tmp_path: Path) -> None:
    values = spec_of(text_model, reviews, kind="regression", calibrate=True)
    with pytest.raises(InlayError, match=r"one class a row.*'regression'"):
        inlay.tune(values, tmp_path / "runs", progress=False, say=silent)
    with pytest.raises(InlayError, match="calibrate is for a run of one task"):
        Spec(model=str(text_model), method="lora", tasks=("rte", "mrpc"), calibrate=True)


def test_runs_from_before_keep_their_name(text_model: Path, reviews: Path) -> None:
    spec = spec_of(text_model, reviews)
    data = spec.to_json()
    del data["calibrate"]
    assert settle(Spec.from_json(data)).digest == settle(spec).digest
    assert settle(spec.with_(calibrate=True)).digest != settle(spec).digest
