"""A run that was killed at any moment ends as if it had not been: the same metrics, history and weights, to the bit."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("kill.py")


@pytest.mark.parametrize(
    ("scenario", "kills"),
    [
        ("lora", 7),
        ("full", 4),
        ("batch-norm", 3),
        pytest.param("lora", 60, marks=pytest.mark.slow),
        pytest.param("full", 40, marks=pytest.mark.slow),
    ],
)
def test_killed_at_any_moment_ends_the_same(tmp_path: Path, scenario: str, kills: int) -> None:
    done = subprocess.run(
        [sys.executable, SCRIPT, tmp_path, scenario, str(kills)], capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["different"] == {}
    assert found["moments"] > 50
    resumed = [step for step in found["resumed"] if step != "None"]
    assert len(set(resumed)) > min(kills, 9) // 3, "the kills did not fall into different parts of the run"
    expected = found["expected"]
    if scenario == "lora":
        assert expected["stopped_early"]
        assert 0 < expected["best_step"] < expected["steps"]
    else:
        assert expected["steps"] == {"full": 7, "batch-norm": 6}[scenario]
