"""Several processes train one run: the same result as one, written once, interrupted and resumed together."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import processes
import pytest

from inlay.records import Store


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict]:
    """What one process, this one, and what each of two found."""
    folder = tmp_path_factory.mktemp("processes")
    # accelerate starts several processes for GPUs only, unless MPI is there; what it starts is told to use the CPU.
    launch = "accelerate.commands.launch --multi_gpu --num_processes 2 --num_machines 1 --mixed_precision no"
    options = "--dynamo_backend no --main_process_port 0"
    done = subprocess.run(
        [sys.executable, "-m", *launch.split(), *options.split(), processes.__file__, folder],
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"},
    )
    assert done.returncode == 0, done.stderr
    (run,) = Store(folder / "runs").list()
    run.verify()
    one = processes.train(folder / "one")
    return {
        "one": processes.described(one) | {"predictions": processes.predictions(one)},
        "first": json.loads((folder / "found-0.json").read_text()),
        "second": json.loads((folder / "found-1.json").read_text()),
        "record": run.record,
    }


def test_two_processes_learn_what_one_learns(found: dict[str, dict]) -> None:
    one, two = found["one"], found["first"]["whole"]
    assert [entry["step"] for entry in one["history"]] == [entry["step"] for entry in two["history"]]
    for mine, its in zip(one["history"], two["history"], strict=True):
        for name in ("loss", "grad_norm"):
            if name in mine:
                assert its[name] == pytest.approx(mine[name], rel=1e-3)
    assert two["metrics"]["test"]["loss"] == pytest.approx(one["metrics"]["test"]["loss"], rel=1e-3)
    assert two["metrics"]["test"]["accuracy"] == one["metrics"]["test"]["accuracy"]


def test_predictions_are_in_the_order_of_the_split(found: dict[str, dict]) -> None:
    one = found["one"]["predictions"]
    for process in ("first", "second"):
        for mine, its in zip(one, found[process]["predictions"], strict=True):
            assert its == pytest.approx(mine, rel=1e-2, abs=1e-3)


def test_every_process_holds_the_same_and_the_first_writes(found: dict[str, dict]) -> None:
    assert found["first"]["whole"] == found["second"]["whole"]
    assert found["record"]["metrics"] == found["first"]["whole"]["metrics"]
    assert found["record"]["portrait"]["processes"] == 2


def test_interrupted_in_one_process_resumed_in_both(found: dict[str, dict]) -> None:
    for process in ("first", "second"):
        whole, resumed = (found[process][name] for name in ("whole", "resumed"))
        assert resumed.pop("resumed_from") is not None
        whole = {name: value for name, value in whole.items() if name != "resumed_from"}
        assert resumed == whole


def test_processes_decide_together_when_to_save(found: dict[str, dict]) -> None:
    """Writing takes all of them: where one alone thought it due, it would wait for the others for ever."""
    for process in ("first", "second"):
        assert found[process]["disagreeing"] == found[process]["whole"]
