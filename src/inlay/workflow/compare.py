"""Make the runs of several methods over several seeds, and compare them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TypedDict, Unpack

from inlay.engines import Engine, Job, JobOutcome, make
from inlay.errors import InlayError, check_keywords
from inlay.records.spec import Spec
from inlay.records.store import Run, load
from inlay.workflow.comparison import Comparison, rows_of, select
from inlay.workflow.notes import Say, or_log
from inlay.workflow.planning import DEFAULT, Planned, Rates, plan
from inlay.workflow.progress import RunsProgress
from inlay.workflow.tune import DEFAULT_OUT


class Execution(TypedDict, total=False):
    """How runs are made.

    `engine` has been entered; without one, this process makes one run after another. After `minutes` nothing is begun,
    and what is running stops where it can be resumed. Runs on record as failed are only tried again if `retry_failed`.
    """

    engine: Engine | None
    minutes: float | None
    retry_failed: bool
    progress: bool
    say: Say | None


def compare(
    spec: Spec,
    methods: Sequence[str],
    seeds: int | Sequence[int] = 3,
    out: Path | str = DEFAULT_OUT,
    *,
    rates: Rates = DEFAULT,
    **how: Unpack[Execution],
) -> Comparison:
    """Run `spec` with every method and seed and compare the results, best first; for `how` see `Execution`.

    `spec` gives all but the method and the seed; its own are replaced. Runs that were made before are found, not made
    again. A run that fails is noted and does not stop the rest. With several learning rates (see
    `inlay.workflow.planning.plan`) each method's is selected on the validation set.
    """
    check_keywords("compare", how, Execution)
    how["say"] = or_log(how.get("say"))
    planned = plan(spec, methods, seeds, rates=rates, say=how["say"])
    (found,) = carry_out([planned], out, **how)
    return found


def carry_out(plans: Sequence[Planned], out: Path | str = DEFAULT_OUT, **how: Unpack[Execution]) -> list[Comparison]:
    """Make all runs of all plans, and compare them: one comparison for each plan and size of the training set."""
    specs = [spec for planned in plans for spec in planned.specs]
    outcomes = make_runs([(name_of(spec, specs), spec) for spec in specs], out, **how)
    done = list(zip(specs, outcomes, strict=True))
    found: list[Comparison] = []
    start = 0
    for planned in plans:
        mine = done[start : start + len(planned.specs)]
        start += len(planned.specs)
        sizes = dict.fromkeys(spec.shots for spec, _ in mine)
        found += [gather([pair for pair in mine if pair[0].shots == size], planned, out) for size in sizes]
    if any(each.rows for each in found):
        return found
    if (why := next((reason for each in found for reason in each.failures.values()), None)) is not None:
        raise InlayError(f"No run finished. {why}")
    raise InlayError(
        f"No run finished within {how.get('minutes') or 0:g} minutes. Give the same command again: it goes on where it "
        "stopped."
    )


def make_runs(named: Sequence[tuple[str, Spec]], out: Path | str, **how: Unpack[Execution]) -> list[JobOutcome]:
    """Make the runs of these specs, each with the name that people see; what came of each, in order."""
    check_keywords("make_runs", how, Execution)
    minutes = how.get("minutes")
    if minutes is not None and not minutes > 0:
        raise InlayError(f"minutes={minutes!r} must be greater than 0.")
    deadline = None if minutes is None else time.monotonic() + 60 * minutes
    jobs = [job_of(spec, out, retry_failed=how.get("retry_failed", False)) for _, spec in named]
    names = [name for name, _ in named]
    with RunsProgress(names, show=how.get("progress", True), say=how.get("say")) as followed:
        outcomes = (how.get("engine") or make()).run(jobs, followed, deadline)
    if refused := next((each.error for each in outcomes if each.status == "unwritable"), None):
        raise InlayError(refused)
    return outcomes


def job_of(spec: Spec, out: Path | str, *, retry_failed: bool = False) -> Job:
    """A run for an engine to make."""
    return Job(spec, str(out), retry_failed, maker="inlay.workflow.tune")


def name_of(spec: Spec, others: Sequence[Spec]) -> str:
    """A run's name for people: what differs between it and the others."""
    parts = [spec.method]
    if len({each.model for each in others}) > 1:
        parts.append(spec.model)
    if len({each.subject for each in others}) > 1:
        parts.append(spec.subject)
    if len({each.shots for each in others}) > 1:
        parts.append(f"{spec.shots or 'all'} examples")
    if len({each.learning_rate for each in others if each.method == spec.method}) > 1:
        parts.append(f"learning rate {spec.learning_rate:g}")
    return ", ".join([*parts, f"seed {spec.seed}"])


def gather(done: Sequence[tuple[Spec, JobOutcome]], planned: Planned, out: Path | str) -> Comparison:
    """The comparison of some finished runs, with what failed or did not finish."""
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
        reasons = failures if outcome.status == "failed" else unfinished
        reasons[name_of(spec, specs)] = outcome.error or outcome.status
        if run is not None:
            others.append(run)
        elif outcome.status == "failed":
            lost.append((spec, str(outcome.error)))
    chosen, tried = select(runs, [spec for spec, outcome in done if outcome.status == "failed"])
    kept = {run.id for run in chosen}
    return Comparison(
        rows=rows_of(chosen) if chosen else [],
        runs=chosen,
        failures=failures,
        spec=specs[0],
        left_out=dict(planned.left_out),
        unfinished=unfinished,
        tried=tried,
        complete=not planned.asked,
        others=[*(run for _, run in runs if run.id not in kept), *others],
        lost=lost,
    )
