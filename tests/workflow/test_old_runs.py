"""Run folders written by an earlier inlay (commit 039d01f): they list, report, predict and resume as they did."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_digits

import inlay
from inlay.records.store import Store
from inlay.report.collect import collect
from inlay.workflow.tune import tune

OLD = Path(__file__).parents[1] / "fixtures" / "old_runs"
# What that commit answered to the first six digits, drawn as below.
ANSWERS = ("8", "1", "4", "8", "1", "5")
SCORES = (0.1767528, 0.2701563, 0.1456215, 0.1554466, 0.1471491, 0.1727765)


@pytest.fixture
def old(tmp_path: Path) -> Path:
    return Path(shutil.copytree(OLD, tmp_path / "old"))


def test_they_are_read_and_reported(old: Path) -> None:
    runs, problems = Store(old / "finished").read()
    assert not problems
    assert sorted(run.spec.method for run in runs) == ["linear-probe", "norm"]
    assert {run.status for run in runs} == {"finished"}
    found = collect(old / "finished")
    assert not found.damaged
    assert {row.spec.method: round(row.mean, 4) for row in found.rows}["norm"] == 0.4318


def test_they_predict_what_they_did(old: Path, tmp_path: Path) -> None:
    run = next(run for run in Store(old / "finished").read()[0] if run.spec.method == "norm")
    (tmp_path / "digits").mkdir()
    for number, drawn in enumerate(load_digits().images[:6]):
        Image.fromarray((drawn * 15.9).astype("uint8")).resize((32, 32)).save(tmp_path / "digits" / f"{number}.png")
    answers = inlay.predict(run, str(tmp_path / "digits"))
    assert tuple(answer["label"] for answer in answers) == ANSWERS
    np.testing.assert_allclose([answer["score"] for answer in answers], SCORES, rtol=1e-4)


def test_one_that_was_interrupted_goes_on_to_the_same_end(old: Path) -> None:
    """From its checkpoint at step 7 of 12 to what the uninterrupted run of that commit had."""
    (run,), _ = Store(old / "interrupted").read()
    whole = next(run for run in Store(old / "finished").read()[0] if run.spec.method == "norm")
    done = tune(run.spec, old / "interrupted", progress=False)
    assert (done.id, done.record["resumed_from"], done.record["steps"]) == (run.id, 7, 12)
    for split in ("validation", "test"):
        assert done.metrics[split]["loss"] == pytest.approx(whole.metrics[split]["loss"], rel=1e-4)


def test_a_finished_one_is_found_and_not_made_again(old: Path) -> None:
    for run in Store(old / "finished").read()[0]:
        said: list[str] = []
        found = tune(run.spec, old / "finished", progress=False, say=said.append)
        assert found.id == run.id
        assert said == [f"already done: {run.id}"]
