"""What is left of planned runs: which are finished, and about how long the others take, by finished ones like them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from inlay.errors import InlayError
from inlay.records.spec import Spec
from inlay.records.store import Store
from inlay.workflow.settle import load_tasks, settle

# What data a run reads does not hang on these.
_ASIDE: Mapping[str, Any] = {"method": "-", "learning_rate": None, "settings": {}}


@dataclass(frozen=True)
class Forecast:
    """`status` of each planned run: finished, interrupted, failed, running; None where there is no such run yet.

    `seconds` are about those that all others take together, as far as there are finished runs like them in the folder;
    of `unknown` runs there is none.
    """

    status: tuple[str | None, ...]
    seconds: float
    unknown: int


def forecast(specs: Sequence[Spec], out: Path | str) -> Forecast:
    """Look for the runs of these specs in a folder. Data are read, once for all runs that share them; no model is."""
    store, read = Store(out), {}
    status: list[str | None] = []
    for spec in specs:
        key = str(spec.with_(**_ASIDE).to_json())
        try:
            if key not in read:
                read[key] = load_tasks(spec)
            run = store.find(settle(spec, read[key]).digest_in(out))
        except InlayError:  # it will be told when the run is made
            run = None
        status.append(None if run is None else run.status)
    times: dict[tuple[Any, ...], list[float]] = {}
    for run in store.list():
        if run.status == "finished" and not run.record.get("resumed_from") and run.record.get("seconds"):
            times.setdefault(_alike(run.spec), []).append(float(run.record["seconds"]))
    left = [spec for spec, found in zip(specs, status, strict=True) if found != "finished"]
    known = [fmean(times[_alike(spec)]) for spec in left if _alike(spec) in times]
    return Forecast(tuple(status), sum(known), len(left) - len(known))


def _alike(spec: Spec) -> tuple[Any, ...]:
    """Runs that take about the same time: only seed, learning rate and the like are different."""
    return spec.model, spec.subject, spec.method, spec.shots


def in_words(found: Forecast, workers: int = 1) -> str:
    """About how long it takes, for people."""
    finished = sum(status == "finished" for status in found.status)
    left = len(found.status) - finished
    if not left:
        return f"All {finished} are finished already and not repeated." if finished > 1 else "It is finished already."
    told = f"{finished} finished already and not repeated, {left} to make"
    if found.unknown == left:
        return f"{told}; how long they take is not known, as no run like them is finished here."
    about = f"about {_duration(found.seconds / workers)} by finished runs like them"
    return f"{told}: {about}" + (f", and {found.unknown} of which none is finished here." if found.unknown else ".")


def _duration(seconds: float) -> str:
    for size, unit in ((3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} s"
