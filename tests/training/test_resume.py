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
        {"lora": 7, "full": 4, "batch-norm": 3},
        pytest.param({"lora": 60, "full": 40, "batch-norm": 20}, marks=pytest.mark.slow),
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
        assert found["moments"] > 50
        resumed = {step for step in found["resumed"] if step != "None"}
        assert len(resumed) >= 2, "the kills did not fall into different parts of the run"
        expected = found["expected"]
        if scenario == "lora":
            assert expected["stopped_early"]
            assert 0 < expected["best_step"] < expected["steps"]
        else:
            assert expected["steps"] == {"full": 7, "batch-norm": 6}[scenario]
