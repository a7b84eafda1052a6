"""Which runs of a folder a person asked for, in which order."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from inlay.errors import InlayError, unknown
from inlay.records.store import Run
from inlay.workflow.comparison import improves_upwards

KEYS = ("date", "name", "result", "rate", "examples")


def choose(runs: Sequence[Run], wanted: Sequence[str], by: str = "date") -> list[Run]:
    """The runs that have all that is `wanted`, sorted: by date or by name, by the result (the best first), by learning
    rate or by the number of training examples.

    Wanted are words of a run's name, or `field=value`: a field of its spec, or its status.
    """
    if by not in KEYS:
        raise unknown("order", by, KEYS, "As in --sort result.")
    tests = [_test(each) for each in wanted]
    found = [run for run in runs if all(test(run) for test in tests)]
    return found if by == "date" else sorted(found, key=_ORDERS[by])


def _test(wanted: str) -> Callable[[Run], bool]:
    name, sign, value = wanted.partition("=")
    if not sign:
        return lambda run: wanted.casefold() in run.id.casefold()

    def test(run: Run) -> bool:
        fields: Mapping[str, Any] = {**run.spec.to_json(), "status": run.status}
        if name not in fields:
            raise unknown("field to filter by", name, fields, "As in --filter method=lora, or a word of the name.")
        return _matches(fields[name], value)

    return test


def _matches(value: Any, wanted: str) -> bool:
    if isinstance(value, list):
        return any(_matches(each, wanted) for each in value)
    if value is None or wanted.casefold() == "none":
        return value is None and wanted.casefold() == "none"
    if isinstance(value, (bool, str)):
        return str(value).casefold() == wanted.casefold()
    if isinstance(value, (int, float)):
        try:
            return float(wanted) == float(value)
        except ValueError:
            raise InlayError(f"{wanted!r} is compared with a number, {value:g}: give one.") from None
    return wanted.casefold() in str(value).casefold()


def _result(run: Run) -> tuple[Any, ...]:
    """Runs without a result last; metrics by their names, and of each the best run first."""
    if run.status != "finished":
        return (1, "", 0.0)
    metric = run.record["metric"]
    value = run.metrics.get("test", run.metrics.get("validation", {})).get(metric, math.nan)
    return (0, metric, math.inf if math.isnan(value) else -value if improves_upwards(run.record, metric) else value)


_ORDERS: Mapping[str, Callable[[Run], Any]] = {
    "name": lambda run: run.id,
    "result": _result,
    "rate": lambda run: (run.spec.learning_rate or 0.0, run.id),
    "examples": lambda run: (run.spec.shots or math.inf, run.id),
}
