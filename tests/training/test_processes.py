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
        **{method: processes.described(processes.train_tasks(method, folder / method)) for method in processes.JOINT},
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


@pytest.mark.parametrize("method", processes.JOINT)
def test_several_tasks_learn_what_they_learn_in_one_process(found: dict[str, dict], method: str) -> None:
    """In float64. One of them fails, and one stops before the others."""
    one, two = found[method], found["first"][method]
    assert found["second"][method] == two
    assert two["failed"].keys() == one["failed"].keys() == {"stsb"}
    assert two["notes"] == one["notes"]
    assert any("stopped at step" in note for note in one["notes"])
    assert [list(entry) for entry in two["history"]] == [list(entry) for entry in one["history"]]
    # In the update in which a task fails, what is logged of the sum has those of its rows that were computed apart from
    # the one that is no number: which ones, depends on how the update was divided. The tasks' own losses do not.
    failing = next(entry["step"] for entry in one["history"] if "loss" in entry and "stsb_loss" not in entry)
    for mine, its in zip(one["history"], two["history"], strict=True):
        for name in mine:
            apart = name == "loss" and mine["step"] == failing
            if name not in ("validation", "final") and not apart:  # metrics: below
                assert its[name] == pytest.approx(mine[name], rel=1e-5), name
    for split in ("validation", "test"):
        assert two["metrics"][split] == pytest.approx(one["metrics"][split], rel=1e-5)


def test_several_tasks_are_interrupted_and_resumed(found: dict[str, dict]) -> None:
    whole, resumed = (found["first"][name] for name in (processes.JOINT[0], "tasks resumed"))
    assert resumed["resumed_from"] == 10
    assert resumed | {"resumed_from": None} == whole


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
