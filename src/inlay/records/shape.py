"""What a record's entries look like: checked when a record is read, so that who shows it need not doubt every value.

An entry may be missing or null, as in the records of earlier versions; one that is there is of the right kind.
"""

from __future__ import annotations

import math
from typing import Any

from inlay.records.spec_values import shown

NUMBER, WHOLE = "a number", "a whole number"
ANY = "*"  # as a key: every entry, whatever its name
LARGEST = 1e100  # what can still be squared, averaged and printed

RATE = {"mean": NUMBER, "spread": NUMBER, "repetitions": WHOLE, "weight": NUMBER}
TASK = {"source": str, "digest": str, "notes": [str], "schema": dict, "classes": {ANY: {ANY: WHOLE}}}
RECORD: dict[str, Any] = {
    "id": str,
    "digest": str,
    "created": str,
    "finished": str,
    "spec": dict,
    "files": {ANY: {"sha256": str, "bytes": WHOLE}},
    "metric": str,
    "metrics": {ANY: {ANY: NUMBER}},
    "greater_is_better": bool,
    "seconds": NUMBER,
    "steps": WHOLE,
    "resumed_from": WHOLE,
    "best_step": WHOLE,
    "stopped_early": bool,
    "examples": {ANY: WHOLE},
    "task": TASK,
    "tasks": {ANY: TASK},
    "failed": {ANY: str},
    "notes": [str],
    "backbone": {
        "name": str,
        "source": str,
        "fingerprint": str,
        "newly_initialised": [str],
        "notes": [str],
        "quantize": str,
        "image_size": WHOLE,
    },
    "versions": {ANY: (str, int, float)},
    "portrait": {
        "parameters": {"trained": WHOLE, "total": WHOLE, "share": NUMBER, "shared": WHOLE},
        "saved_bytes": NUMBER,
        "peak_memory": {"bytes": NUMBER, "device": str, "how": str},
        "seconds_per_epoch": RATE,
        "train_examples_per_second": RATE,
        "inference_examples_per_second": RATE,
        "device": str,
        "precision": str,
        "processes": WHOLE,
        "trunk": {
            "cached": bool,
            "reason": str,
            "blocks": WHOLE,
            "blocks_skipped": WHOLE,
            "bytes": NUMBER,
            "where": str,
            "seconds": NUMBER,
            "first_epoch_seconds": NUMBER,
            "check_seconds": NUMBER,
        },
    },
}


def misfit(data: Any, shape: Any = RECORD, where: str = "") -> str | None:
    """The first entry of `data` that has not the shape it should have, in words; None where all have."""
    if data is None:
        return None
    if isinstance(shape, dict):
        if not isinstance(data, dict):
            return _wrong(data, where, "an object")
        pairs = [(name, data[name], shape[name]) for name in shape if name in data]
        pairs += [(name, value, shape[ANY]) for name, value in data.items() if ANY in shape]
        found = (misfit(value, inner, f"{where}.{name}".lstrip(".")) for name, value, inner in pairs)
        wrong = next(filter(None, found), None)
        if wrong is None and shape is RATE and not (_is_given(data) and data["repetitions"] > 0):
            return _wrong(data, where, "a mean and a spread over one repetition or more")
        return wrong
    if isinstance(shape, list):
        if not isinstance(data, list):
            return _wrong(data, where, "a list")
        return next(filter(None, (misfit(each, shape[0], where) for each in data)), None)
    if shape in (NUMBER, WHOLE):
        right = isinstance(data, int if shape == WHOLE else int | float) and not isinstance(data, bool)
        right = right and (abs(data) < LARGEST or (isinstance(data, float) and not math.isfinite(data)))
        return None if right else _wrong(data, where, shape)
    return None if isinstance(data, shape) else _wrong(data, where, "of another kind")


def _is_given(rate: dict[str, Any]) -> bool:
    return rate.keys() >= RATE.keys() - {"weight"} and rate["mean"] is not None and rate["repetitions"] is not None


def _wrong(data: Any, where: str, expected: str) -> str:
    return f"{where}={shown(data)} should be {expected}"
