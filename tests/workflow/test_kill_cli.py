"""`inlay tune`, interrupted and killed: the same command goes on, and ends in the bytes of a run left alone."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

STEPS = 300
PATIENCE = 120


def lines(folder: Path) -> int:
    """How many lines of metrics the one run in `folder` has written: fifty are a whole training."""
    found = list(folder.glob("*/metrics.jsonl"))
    return len(found[0].read_text().splitlines()) if found else 0


def test_interrupted_and_killed_the_same_command_ends_the_same(text_model: Path, reviews: Path, tmp_path: Path) -> None:
    command = [
        *(sys.executable, "-m", "inlay", "tune", "--model", text_model, "--data", reviews),
        *("--text", "body", "--label", "stars", "--method", "bias"),
        *("--max-steps", str(STEPS), "--batch-size", "8", "--learning-rate", "0.01", "--evaluations", "4"),
    ]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}

    def tune(out: Path, number: signal.Signals | None = None, after: int = 0) -> subprocess.CompletedProcess[str]:
        """Run it; send it a signal once this many lines of metrics are there."""
        with subprocess.Popen(
            [*command, "--out", out], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as process:
            end = time.monotonic() + PATIENCE
            while number is not None and process.poll() is None and time.monotonic() < end:
                if lines(out) >= after:
                    process.send_signal(number)
                    break
                time.sleep(0.005)
            try:
                said, complained = process.communicate(timeout=PATIENCE)
            except subprocess.TimeoutExpired:
                process.kill()
                raise
        return subprocess.CompletedProcess(command, process.returncode, said, complained)

    whole, cut = tmp_path / "whole", tmp_path / "cut"
    done = tune(whole)
    assert done.returncode == 0, done.stderr

    stopped = tune(cut, signal.SIGINT, after=10)
    assert stopped.returncode == 130, stopped.stderr
    assert "the same command" in stopped.stderr.lower()
    (run,) = (path for path in cut.iterdir() if path.is_dir() and not path.name.startswith("."))
    assert not (run / "record.json").exists()
    checkpoint = max((run / "checkpoints").glob("step-*"))  # the one before it may be there too

    # The checkpoint has at least ten lines, which are written again at once: fifteen more are well after resuming.
    killed = tune(cut, signal.SIGKILL, after=lines(cut) + 15)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert not (run / "record.json").exists()
    assert lines(cut) > 20

    done = tune(cut)
    assert done.returncode == 0, done.stderr
    assert (run / "log.txt").read_text().count("resumes at step") == 2
    assert 0 < int(checkpoint.name.rpartition("-")[2]) < STEPS

    (expected,) = whole.glob(run.name)
    adapter = {path.name: path.read_bytes() for path in (run / "adapter").iterdir()}
    assert adapter == {path.name: path.read_bytes() for path in (expected / "adapter").iterdir()}
    assert (run / "metrics.jsonl").read_bytes() == (expected / "metrics.jsonl").read_bytes()
    mine, its = (json.loads((folder / "record.json").read_text()) for folder in (run, expected))
    assert mine["metrics"] == its["metrics"]
    assert mine["files"] == its["files"]
