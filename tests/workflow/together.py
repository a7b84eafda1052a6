"""Comparisons in several processes on one folder, and killed ones: run by test_compare_runs.py in a process of its own.

    python together.py FOLDER MODEL DATA two|killed

Everything is imported once and every comparison runs in a fork. Prints what was found, as JSON.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch

from inlay import Spec, compare
from inlay.records.store import Store
from inlay.workflow import tune as tuning


def forked(work: Any) -> int:
    child = os.fork()
    if child == 0:
        status = 1
        try:
            work()
            status = 0
        finally:
            os._exit(status)
    return child


def status(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def begun(out: Path) -> dict[str, int]:
    """How often each run was taken up, from its log."""
    return {run.folder.name: (run.folder / "log.txt").read_text().count(" running") for run in Store(out).list()}


def two_at_once(spec: Spec, out: Path) -> dict[str, Any]:
    """Two comparisons of the same runs at the same time: each run is made once, and both end with the whole table."""

    def work(name: str) -> None:
        found = compare(spec, ["bias", "linear-probe"], 2, out, progress=False)
        rows = {row.method: row.values for row in found.rows}
        (out.parent / f"table-{name}.json").write_text(json.dumps(rows))

    out.mkdir()
    children = [forked(lambda name=name: work(name)) for name in ("a", "b")]
    return {
        "statuses": [status(child) for child in children],
        "begun": begun(out),
        "tables": [json.loads((out.parent / f"table-{name}.json").read_text()) for name in ("a", "b")],
        "states": [run.status for run in Store(out).list()],
    }


def killed(spec: Spec, out: Path, runs: int) -> dict[str, Any]:
    """A comparison of many runs is killed in the middle of one; the same again makes the rest."""
    half = runs // 2

    def work() -> None:
        compare(spec, ["bias"], runs, out, progress=False)

    child = forked(work)
    end = time.monotonic() + 300
    while time.monotonic() < end:
        states = [run.status for run in Store(out).list()] if out.exists() else []
        if states.count("finished") >= half and "running" in states:
            break
        time.sleep(0.002)
    os.kill(child, signal.SIGKILL)
    first = status(child)
    finished = {run.id: run.record["finished"] for run in Store(out).list() if run.status == "finished"}
    again = status(forked(work))
    after = {run.id: run.record["finished"] for run in Store(out).list()}
    return {
        "statuses": [first, again],
        "finished": len(finished),
        "after": len(after),
        "touched": [name for name, stamp in finished.items() if after[name] != stamp],
        "begun": begun(out),
    }


def main(folder: Path, model: str, data: str, scenario: str) -> None:
    torch.set_num_threads(1)
    spec = Spec(
        model=model, data=data, text=("body",), label="stars", method="bias", max_steps=6, batch_size=8,
        learning_rate=0.01,
    )  # fmt: skip
    tuning.tune(spec.with_(max_steps=1), folder / "warm", progress=False)  # so that the forks need not import
    gc.collect()
    gc.freeze()  # nor look for garbage in what was imported
    found = two_at_once(spec, folder / "two") if scenario == "two" else killed(spec, folder / "killed", 20)
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
