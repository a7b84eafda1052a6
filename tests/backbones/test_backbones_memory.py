"""Peak memory of loading, with the benchmark's own measure on a smaller checkpoint."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).resolve().parents[2] / "benchmarks" / "loading.py"


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the kernel's figures in /proc")
def test_peak_memory_of_loading_is_little_more_than_the_model(tmp_path: Path) -> None:
    description = importlib.util.spec_from_file_location("loading_benchmark", BENCHMARK)
    assert description is not None
    assert description.loader is not None
    benchmark = importlib.util.module_from_spec(description)
    description.loader.exec_module(benchmark)
    benchmark.write_checkpoint(tmp_path, layers=8)
    for stored in ("float32", "float16"):
        command = [sys.executable, str(BENCHMARK), "--measure", str(tmp_path / stored), "inlay"]
        run = subprocess.run(command, check=True, capture_output=True, text=True)
        measured = json.loads(run.stdout)
        assert measured["bytes"] > 500e6
        assert measured["ratio"] <= benchmark.BOUND, stored
