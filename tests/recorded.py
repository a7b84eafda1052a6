"""Finished and unfinished runs on disk without training: records like `tune`'s, by the store's own functions."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

from inlay import Spec
from inlay.records.store import Run, Store

RATE = {"mean": 10.0, "spread": 1.0, "repetitions": 4}
RECORD: dict[str, Any] = {
    "metrics": {"validation": {"accuracy": 0.8, "loss": 0.5}, "test": {"accuracy": 0.7, "loss": 0.6}},
    "metric": "accuracy",
    "portrait": {
        "parameters": {"trained": 1000, "total": 100_000, "share": 0.01},
        "saved_bytes": 4096,
        "peak_memory": {"bytes": 5 * 2**20, "device": "cpu", "how": "resident set"},
        "seconds_per_epoch": RATE,
        "train_examples_per_second": RATE,
        "inference_examples_per_second": RATE,
        "device": "cpu",
        "precision": "float32",
        "processes": 1,
        "trunk": {"cached": False, "reason": "none"},
    },
    "steps": 30,
    "best_step": None,
    "stopped_early": False,
    "examples": {"train": 100, "validation": 20, "test": 50},
    "task": {"schema": {}, "source": "nowhere", "digest": "d" * 64, "notes": []},
    "backbone": {"name": "m", "source": "a folder", "fingerprint": "f" * 64, "newly_initialised": [], "notes": []},
    "versions": {"python": "3.11", "inlay": "0.1.0", "torch": "2.13.0", "cpu": "a processor", "threads": 1},
}


def spec_of(method: str = "bias", seed: int = 0, **fields: Any) -> Spec:
    """A spec of some task on some model."""
    return Spec(
        **{"model": "embedded:vit", "task": "digits", "learning_rate": 0.001, **fields, "method": method, "seed": seed}
    )


def finished(out: Path, spec: Spec, value: float = 0.7, tables: Any = None, **changes: Any) -> Run:
    """A finished run with this test accuracy, and `tables` of predictions. `changes` replace parts of the record by
    dotted names."""
    record = copy.deepcopy(RECORD)
    record["metrics"]["test"]["accuracy"] = value
    for name, change in changes.items():
        *path, last = name.split("__")
        place = record
        for part in path:
            place = place[part]
        place[last] = change
    with Store(out).open(spec, spec.digest()) as run:
        lines = [{"step": step, "epoch": step / 10, "loss": 3 / step} for step in range(1, 31)]
        lines += [{"step": 10 * n, "epoch": n, "validation": {"accuracy": value * n / 3}} for n in (1, 2, 3)]
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (run.folder / "metrics.jsonl").write_text(text, encoding="utf-8")
        run.keep(tables or {})
        run.finish(record)
    return run


def failed(out: Path, spec: Spec, error: str) -> Run:
    """A run that failed."""
    with Store(out).open(spec, spec.digest()) as run:
        run.fail(error)
    return run
