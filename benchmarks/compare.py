"""What `inlay compare` costs beside the training that it asks for, what two workers gain, and what a kill costs.

- Overhead: one comparison in this process, everything imported. Its time, from the plan to the files and the page,
  over the sum of the times that its runs spent in training and evaluating (`inlay.training.fit`). What is left is
  finding the data and loading the model for each run, records, statistics, the page. Bound: 1.05.
- Workers: the same comparison as a command, once with one worker that has all cores and once with a worker a core,
  taking turns. From start to end, so that starting the workers counts. Goal: 1.3 times as fast with two on two cores.
- Kill: a comparison of 20 runs is killed when half of them are finished and one is in flight, and given again. How
  often runs were taken up stands in their logs. Bound: one run twice.

    python benchmarks/compare.py            # about five minutes on two quiet cores; writes results/compare-cpu.json
    python benchmarks/compare.py --only kill
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
OVERHEAD, GAIN, REPEATED = 1.05, 1.3, 1
METHODS = ("linear-probe", "norm", "lora", "full")


def overhead(shots: int, epochs: float) -> dict[str, Any]:
    """One comparison in this process, and how much of it was training."""
    from inlay import Spec, compare
    from inlay.report.comparison_files import keep
    from inlay.report.html import write_report
    from inlay.training import fitting

    spent: list[float] = []
    real = fitting.fit

    def timed(*args: Any, **kwargs: Any) -> Any:
        begin = time.perf_counter()
        outcome = real(*args, **kwargs)
        spent.append(time.perf_counter() - begin)
        return outcome

    spec = Spec(model="embedded:vit", task="digits", method="", shots=shots, epochs=epochs, batch_size=16)
    with tempfile.TemporaryDirectory() as place:
        compare(spec.with_(max_steps=1), ["norm"], 1, Path(place) / "warm", progress=False)
        out = Path(place) / "runs"
        fitting.fit = timed
        try:
            begin = time.perf_counter()
            found = compare(spec, METHODS, 2, out, progress=False)
            keep([found], out, baseline="linear-probe")
            write_report(found.runs, out / "report.html")
            whole = time.perf_counter() - begin
        finally:
            fitting.fit = real
    return {
        "seconds": whole,
        "training": sum(spent),
        "runs": len(spent),
        "ratio": whole / sum(spent),
        "bound": OVERHEAD,
        "met": whole / sum(spent) <= OVERHEAD,
    }


def command(out: Path, *more: str) -> list[str]:
    """`inlay compare` on digits."""
    start = [sys.executable, "-m", "inlay", "compare", "--model", "embedded:vit", "--task", "digits", "--quiet"]
    return [*start, "--batch-size", "16", "--out", str(out), *more]


def gain(shots: int, epochs: float, rounds: int, workers: int) -> dict[str, Any]:
    """The same comparison with one worker that has all cores, and with several that share them."""
    what = ["--methods", ",".join(METHODS), "--seeds", "2", "--shots", str(shots), "--epochs", str(epochs)]
    taken: dict[int, list[float]] = {1: [], workers: []}
    environment = {
        name: value for name, value in os.environ.items() if name not in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
    }
    for _ in range(rounds):
        for count, times in taken.items():
            with tempfile.TemporaryDirectory() as place:
                begin = time.perf_counter()
                full = command(Path(place) / "runs", *what, "--workers", str(count))
                subprocess.run(full, check=True, env=environment, capture_output=True)
                times.append(time.perf_counter() - begin)
            print(f"{count} worker{'s' * (count > 1)}: {times[-1]:.1f} s", flush=True)
    ratio = statistics.median(taken[1]) / statistics.median(taken[workers])
    return {"seconds": taken, "workers": workers, "ratio": ratio, "goal": GAIN, "met": ratio >= GAIN}


def kill(runs: int) -> dict[str, Any]:
    """A comparison killed in the middle of a run, and given again."""
    from inlay.records.store import Store

    with tempfile.TemporaryDirectory() as place:
        out = Path(place) / "runs"
        full = command(out, "--methods", "lora", "--seeds", str(runs), "--shots", "50", "--max-steps", "8")
        with subprocess.Popen(full, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
            while process.poll() is None:
                states = [run.status for run in Store(out).list()]
                if states.count("finished") >= runs // 2 and "running" in states:
                    process.send_signal(signal.SIGKILL)
                    break
                time.sleep(0.01)
        before = {run.id: run.record["finished"] for run in Store(out).list() if run.status == "finished"}
        subprocess.run(full, check=True, capture_output=True)
        after = Store(out).list()
        begun = {run.id: (run.folder / "log.txt").read_text().count(" running") for run in after}
        touched = [run.id for run in after if run.id in before and run.record["finished"] != before[run.id]]
    repeated = sum(begun.values()) - len(begun)
    return {
        "runs": runs,
        "finished when it was killed": len(before),
        "finished runs made again": len(touched),
        "taken up twice": repeated,
        "bound": REPEATED,
        "met": repeated <= REPEATED and not touched and len(after) == runs,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("overhead", "workers", "kill"))
    parser.add_argument("--shots", type=int, default=300)
    parser.add_argument("--epochs", type=float, default=3)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--workers", type=int, default=max(2, os.cpu_count() or 2))
    parser.add_argument("--output", type=Path, default=RESULTS / "compare-cpu.json")
    options = parser.parse_args()

    load = os.getloadavg()[0]
    found: dict[str, Any] = {}
    if options.only in (None, "workers"):
        found["workers"] = gain(options.shots, options.epochs, options.rounds, options.workers)
    if options.only in (None, "kill"):
        found["kill"] = kill(20)
    if options.only in (None, "overhead"):
        found["overhead"] = overhead(options.shots, options.epochs)
    from inlay.records.versions import versions

    for name, each in found.items():
        print(f"{name}: {json.dumps(each)}")
    result = {
        "what": "inlay compare: overhead, workers, a kill",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "model": "embedded:vit",
        "task": "digits",
        "methods": METHODS,
        "load before": load,
        **found,
        "versions": versions(),
    }
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
