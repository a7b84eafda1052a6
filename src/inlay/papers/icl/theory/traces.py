"""Trainings as the rows of a table, and back: claims are read from kept rows, and can be read again."""

from __future__ import annotations

import math
from itertools import pairwise

from inlay.papers.findings import Finding, Row, number
from inlay.papers.icl.theory.descent import Trace

COLUMNS = ("step", "epoch", "loss", "gap", "in-domain", "out-of-domain", "seconds")
# Below this share of the start a gap in single precision is rounding, and its ups and downs are not counted.
ROUNDING = 1e-6


def trace_rows(trace: Trace, epoch: int, *name: str | int) -> list[Row]:
    """A training in `COLUMNS`, after its name; `epoch` is the number of steps that see every sample once."""
    tests = [trace.inference.get(test, [None] * len(trace.steps)) for test in ("in-domain", "out-of-domain")]
    return [
        (*name, step, step / epoch, trace.loss[at], trace.gap[at], tests[0][at], tests[1][at], trace.seconds[at])
        for at, step in enumerate(trace.steps)
    ]


def read_traces(found: Finding, *keys: str) -> dict[tuple[str | int | float | None, ...], Trace]:
    """The trainings behind the rows, by the columns `keys`; each with the tests that its rows have."""
    places = {name: place for place, name in enumerate(found.columns)}
    made: dict[tuple[str | int | float | None, ...], Trace] = {}
    for row in found.rows:
        trace = made.setdefault(tuple(row[places[key]] for key in keys), Trace(found.facts["infimum"]))
        tests: dict[str, float] = {
            name: number(row[places[name]])
            for name in ("in-domain", "out-of-domain")
            if name in places and row[places[name]] is not None
        }
        step, loss, gap = (number(row[places[name]]) for name in ("step", "loss", "gap"))
        seconds = number(row[places["seconds"]]) if "seconds" in places else 0.0
        trace.note(int(step), loss, gap, tests, seconds)
    return made


def rises(gap: list[float], thin: int) -> list[tuple[int, float | None]]:
    """Every `thin`-th place and the last, each with the largest factor from one gap to the next since the one before.

    What is below rounding counts as that. A gap that is no number any more has risen without limit.
    """
    floor = ROUNDING * gap[0]
    places = sorted({*range(0, len(gap), thin), len(gap) - 1})
    found: list[tuple[int, float | None]] = [(0, None)]
    for begin, end in pairwise(places):
        pairs = pairwise(gap[begin : end + 1])
        found.append((end, max(b / max(a, floor) if math.isfinite(a + b) else math.inf for a, b in pairs)))
    return found
