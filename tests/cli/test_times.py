"""The times at the end of a run are of the whole, agree with one another, and leave nothing out."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from inlay.cli import show
from inlay.records.store import Run, Store


@pytest.fixture
def run(trunks_are_kept: None, typed: Any, image_model: Path, photos: Path, tmp_path: Path) -> tuple[Run, str]:
    """A run whose trunk is cached, and what it printed."""
    given = ("--model", image_model, "--data", photos, "--method", "linear-probe", "--epochs", "6", "--batch-size", "7")
    status, out, err = typed("tune", *given)
    assert status == 0, err
    return Store(tmp_path / "runs").list()[0], out


def test_the_rate_and_the_time_of_an_epoch_are_one_measurement(run: tuple[Run, str]) -> None:
    """With a last, smaller batch in every epoch, blocks are of different sizes."""
    portrait = run[0].portrait
    rate, epoch = portrait["train_examples_per_second"], portrait["seconds_per_epoch"]
    assert rate["repetitions"] == epoch["repetitions"] > 1
    assert rate["spread"] > 0
    assert rate["mean"] * epoch["mean"] == pytest.approx(run[0].record["examples"]["train"])


def test_the_whole_time_and_that_of_the_checks_are_shown(run: tuple[Run, str]) -> None:
    record, out = run[0].record, run[1]
    trunk = record["portrait"]["trunk"]
    assert trunk["cached"]
    assert 0 < trunk["check_seconds"] < record["seconds"]
    assert re.search(rf"time of the whole run\t{re.escape(show.figure(record['seconds']))} s", out)
    told = dict(show.trunk({"trunk": trunk | {"check_seconds": 1.23}}))
    assert told["trunk"].endswith(" s, checked in 1.23 s")
    told = dict(show.trunk({"trunk": {"cached": False, "reason": "so", "check_seconds": 4.56}}))
    assert told["trunk"] == "not cached: so, checked in 4.56 s"


def test_a_record_from_before_has_neither(run: tuple[Run, str]) -> None:
    trunk = {name: value for name, value in run[0].portrait["trunk"].items() if name != "check_seconds"}
    assert "checked" not in dict(show.trunk({"trunk": trunk}))["trunk"]
    assert show.whole_time({}) == []
    assert show.whole_time({"seconds": 2.0, "resumed_from": 7}) == [
        ("time of the whole run", "2 s, from step 7 on, where it was resumed")
    ]
