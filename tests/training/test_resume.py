"""A run that was killed at any moment ends as if it had not been: the same metrics, history and weights, to the bit."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("kill.py")


@pytest.mark.parametrize(
    "kills",
    [
        {"lora": 7, "full": 4, "batch-norm": 3, "trunk": 4},
        pytest.param({"lora": 60, "full": 40, "batch-norm": 20, "trunk": 40}, marks=pytest.mark.slow),
    ],
    ids=["some", "many"],
)
def test_killed_at_any_moment_ends_the_same(tmp_path: Path, kills: dict[str, int]) -> None:
    done = subprocess.run(
        [sys.executable, SCRIPT, tmp_path, *(f"{scenario}:{count}" for scenario, count in kills.items())],
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert done.returncode == 0, done.stderr
    for scenario, found in json.loads(done.stdout).items():
        assert found["different"] == {}, scenario
        assert found["fell_back"] == {}, "resumed from before a checkpoint that had been completed"
        assert found["moments"] > 50
        resumed = {step for step in found["resumed"] if step != "None"}
        assert len(resumed) >= 2, "the kills did not fall into different parts of the run"
        expected = found["expected"]
        if scenario == "lora":
            assert expected["stopped_early"]
            assert 0 < expected["best_step"] < expected["steps"]
        else:
            assert expected["steps"] == {"full": 7, "batch-norm": 6, "trunk": 9}[scenario]


def test_a_whole_checkpoint_is_never_lost_to_the_next_one(tmp_path: Path) -> None:
    """Not even to one of the same step, at whatever moment its writing is killed."""
    done = subprocess.run(
        [sys.executable, SCRIPT, tmp_path, "checkpoints"], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    pairs = json.loads(done.stdout)["pairs"]
    assert len(pairs) > 30
    assert {known for known, _ in pairs} == {-1, 0, 1, 2, 3, 4}
    assert all(found in (known, known + 1) for known, found in pairs), pairs
