"""Make the runs of several methods over several seeds, and put them side by side."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from inlay.engines import Engine, Job, Outcome, make
from inlay.errors import InlayError
from inlay.records.spec import Spec
from inlay.records.store import Run, load
from inlay.workflow.comparison import Comparison, Difference, Measured, Row, against, mean_of, pooled, rows_of, select
from inlay.workflow.notes import Say, or_log
from inlay.workflow.planning import DEFAULT, Planned, Rates, plan
from inlay.workflow.progress import RunsProgress
from inlay.workflow.statistics import half_width, standard_error
from inlay.workflow.tune import DEFAULT_OUT

# What a comparison is made of and read with, for those who start from the verb.
__all__ = [
    "Comparison",
    "Difference",
    "Measured",
    "Row",
    "against",
    "carry_out",
    "compare",
    "half_width",
    "job_of",
    "make_runs",
    "mean_of",
    "pooled",
    "rows_of",
    "standard_error",
]


def compare(
    spec: Spec,
    methods: Sequence[str],
    seeds: int | Sequence[int] = 3,
    out: Path | str = DEFAULT_OUT,
    *,
    rates: Rates = DEFAULT,
    engine: Engine | None = None,
    minutes: float | None = None,
    retry_failed: bool = False,
    progress: bool = True,
    say: Say | None = None,
) -> Comparison:
    """Run `spec` with every method and seed and put the results side by side, best first.

    `spec` gives all but the method and the seed; its own are replaced. Runs that were made before are taken as they
    are. One that fails is noted and does not stop the rest; it is tried again only if `retry_failed`. With several
    learning rates (see `inlay.workflow.planning.plan`) each method's is chosen on the validation split.
    """
    say = or_log(say)
    planned = plan(spec, methods, seeds, rates=rates, say=say)
    (found,) = carry_out([planned], out, engine, minutes=minutes, retry_failed=retry_failed, progress=progress, say=say)
    return found


def carry_out(
    plans: Sequence[Planned],
    out: Path | str = DEFAULT_OUT,
    engine: Engine | None = None,
    *,
    minutes: float | None = None,
    retry_failed: bool = False,
    progress: bool = True,
    say: Say | None = None,
) -> list[Comparison]:
    """Make all runs of all plans, and compare them: one comparison for each plan and size of the training set.

    `engine` has been entered, or is None: this process then makes one run after another. After `minutes` nothing is
    begun, and what is at work stops where it can be resumed.
    """
    if minutes is not None and not minutes > 0:
        raise InlayError(f"minutes={minutes!r} must be greater than 0.")
    deadline = None if minutes is None else time.monotonic() + 60 * minutes
    specs = [spec for planned in plans for spec in planned.specs]
    named = [(name_of(spec, specs), spec) for spec in specs]
    outcomes = make_runs(named, out, engine, deadline=deadline, retry_failed=retry_failed, progress=progress, say=say)
    done = list(zip(specs, outcomes, strict=True))
    found: list[Comparison] = []
    start = 0
    for planned in plans:
        mine = done[start : start + len(planned.specs)]
        start += len(planned.specs)
        sizes = dict.fromkeys(spec.shots for spec, _ in mine)
        found += [gather([pair for pair in mine if pair[0].shots == size], planned, out) for size in sizes]
    if not any(each.rows for each in found):
        raise InlayError(nothing(found, minutes))
    return found


def make_runs(
    named: Sequence[tuple[str, Spec]],
    out: Path | str,
    engine: Engine | None = None,
    *,
    deadline: float | None = None,
    retry_failed: bool = False,
    progress: bool = True,
    say: Say | None = None,
) -> list[Outcome]:
    """Make the runs of these specs, each with the name that people see; what came of each, in order."""
    jobs = [job_of(spec, out, retry_failed=retry_failed) for _, spec in named]
    with RunsProgress([name for name, _ in named], show=progress, say=say) as followed:
        outcomes = (engine or make()).run(jobs, followed, deadline)
    if refused := next((each.error for each in outcomes if each.status == "unwritable"), None):
        raise InlayError(refused)
    return outcomes


def job_of(spec: Spec, out: Path | str, *, retry_failed: bool = False) -> Job:
    """A run for an engine to make."""
    return Job(spec, str(out), retry_failed, maker="inlay.workflow.tune")


def nothing(found: Sequence[Comparison], minutes: float | None) -> str:
    """Why there is no result at all."""
    why = next((reason for each in found for reason in each.failures.values()), None)
    if why is not None:
        return f"No run finished. {why}"
    return f"No run finished within {minutes:g} minutes. Give the same command again: it goes on where it stopped."


def name_of(spec: Spec, others: Sequence[Spec]) -> str:
    """What tells a run from the others, for people."""
    parts = [spec.method]
    if len({each.model for each in others}) > 1:
        parts.append(spec.model)
    if len({each.task or each.data for each in others}) > 1:
        parts.append(str(spec.task or spec.data))
    if len({each.shots for each in others}) > 1:
        parts.append(f"{spec.shots or 'all'} examples")
    if len({each.learning_rate for each in others if each.method == spec.method}) > 1:
        parts.append(f"learning rate {spec.learning_rate:g}")
    return ", ".join([*parts, f"seed {spec.seed}"])


def gather(done: Sequence[tuple[Spec, Outcome]], planned: Planned, out: Path | str) -> Comparison:
    """What one comparison's runs amount to."""
    specs = [spec for spec, _ in done]
    runs: list[tuple[Spec, Run]] = []
    others: list[Run] = []
    failures: dict[str, str] = {}
    unfinished: dict[str, str] = {}
    lost: list[tuple[Spec, str]] = []
    for spec, outcome in done:
        run = None if outcome.run is None else load(Path(out) / outcome.run)
        if outcome.status == "finished" and run is not None:
            runs.append((spec, run))
            continue
        told = failures if outcome.status == "failed" else unfinished
        told[name_of(spec, specs)] = outcome.error or outcome.status
        if run is not None:
            others.append(run)
        elif outcome.status == "failed":
            lost.append((spec, str(outcome.error)))
    failed = [spec for spec, outcome in done if outcome.status == "failed"]
    chosen, tried = select(runs, failed)
    kept = {run.id for run in chosen}
    return Comparison(
        rows_of(chosen) if chosen else [],
        chosen,
        failures,
        specs[0],
        dict(planned.left_out),
        unfinished,
        tried,
        not planned.asked,
        [*(run for _, run in runs if run.id not in kept), *others],
        lost,
    )
