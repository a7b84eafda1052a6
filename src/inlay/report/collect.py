"""Runs as plain data for a report: each run's result, cost, curve and command, and the rows that they amount to.

A row is all runs whose specs differ in the seed alone: nothing else may be averaged over. A set is what can be put side
by side at all: the same task, model, number of examples, metric and split. Rows of one method within a set are its
variants, told apart by what differs between them.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from inlay.errors import InlayError, misspelt
from inlay.records.command import command
from inlay.records.spec import Spec
from inlay.records.store import Run, Store

if TYPE_CHECKING:
    from inlay.workflow.chance import Standing
    from inlay.workflow.comparison import Comparison
    from inlay.workflow.statistics import Verdict

CURVE_POINTS = 40
LESS = " (less is better)"  # of an average over tasks, whose name does not say it
# What says which set a run belongs to, and the seed: none of them tells two variants of a method apart.
OF_THE_SET = (
    "model",
    "method",
    "task",
    "tasks",
    "data",
    "test_data",
    "data_dir",
    "protocol",
    "revision",
    "pooling",
    "shots",
    "seed",
)
SHORT = {"learning_rate": "rate", "max_steps": "steps", "batch_size": "batch", "gradient_accumulation": "accumulation"}


@dataclass
class Result:
    """A finished run, with what a report shows of it; `watched` is the metric that validation is given in. `greater`
    and `watched_greater`: whether more of these metrics is better."""

    id: str
    spec: Spec
    metric: str
    greater: bool
    split: str
    value: float
    watched: str
    watched_greater: bool
    validation: float | None
    metrics: Mapping[str, Mapping[str, float]]
    portrait: Mapping[str, Any]
    record: Mapping[str, Any]
    curve: dict[str, list[list[float]]]
    command: str


@dataclass(eq=False)
class Row:
    """The runs of one spec over its seeds; `place` is its set's number. The best variant of its method is `chosen`."""

    spec: Spec
    place: int
    results: list[Result]
    variant: str = ""
    chosen: bool = True
    best: bool = False
    verdict: Verdict | None = None  # beside the best row of its set
    leads: bool = False  # whether it is the best, and some other is significantly worse
    beats: list[Row] = field(default_factory=list)  # the rows of its set that are significantly worse

    @property
    def records(self) -> list[Mapping[str, Any]]:
        """The records of its runs."""
        return [result.record for result in self.results]

    @property
    def values(self) -> list[float]:
        """The metric, a value a seed."""
        return [result.value for result in self.results]

    @property
    def mean(self) -> float:
        """The mean over seeds."""
        return fmean(self.values)

    @property
    def interval(self) -> float | None:
        """Half the width of the 95 % confidence interval of the mean; None for a single seed."""
        from inlay.workflow.statistics import half_width

        return half_width(self.values)

    @property
    def standing(self) -> Standing:
        """How it compares with the majority class."""
        from inlay.workflow.chance import standing

        tested = [result for result in self.results if result.split == "test"]
        return standing(
            self.label,
            self.results[0].metric,
            self.values,
            [(result.spec.seed, result.record) for result in tested],
        )

    @property
    def label(self) -> str:
        """The method, and which variant of it."""
        return self.spec.method + (f" ({self.variant})" if self.variant else "")


@dataclass(frozen=True)
class Set:
    """What is the same in all rows that can be put side by side."""

    task: str
    model: str
    shots: int | None
    metric: str
    split: str
    more: str = ""

    @property
    def label(self) -> str:
        """The set in words."""
        shots = "all examples" if self.shots is None else f"{self.shots:,} examples"
        return " · ".join(part for part in (self.task, self.model, shots, self.more) if part)


@dataclass
class Unfinished:
    """A run without a result, and why."""

    id: str
    spec: Spec
    status: str
    error: str | None
    command: str


@dataclass
class Collected:
    """All that a report tells of a folder of runs."""

    name: str
    results: list[Result] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    sets: list[Set] = field(default_factory=list)
    unfinished: list[Unfinished] = field(default_factory=list)
    damaged: list[str] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)  # methods that were not run, and why
    unvouched: list[str] = field(default_factory=list)  # runs of an earlier inlay, some of whose files have no digest
    said: list[str] = field(default_factory=list)  # of a baseline that was named, and of tasks that failed

    @property
    def specs(self) -> list[Spec]:
        """Of all runs, with and without a result."""
        return [result.spec for result in self.results] + [run.spec for run in self.unfinished]


def of_comparisons(comparisons: Sequence[Comparison], baseline: str | None = None) -> Collected:
    """All that came of some comparisons: their rows, the rates that were not chosen, what failed, what was left out;
    and what can be said of the methods beside a baseline that was named."""
    from inlay.workflow.comparison import words

    runs = {run.folder: run for each in comparisons for run in (*each.runs, *each.others)}
    lost = [
        Unfinished(f"{spec.method}, seed {spec.seed}", spec, "failed", error, command(spec))
        for each in comparisons
        for spec, error in each.lost
    ]
    found = collect(list(runs.values()), lost)
    for each in comparisons:
        found.left_out |= each.left_out
        if baseline in [row.method for row in each.rows]:
            found.said += [f"{each.title}: {line}" for line in words(each, baseline)]
    return found


def collect(runs: Path | str | Sequence[Run], lost: Sequence[Unfinished] = ()) -> Collected:
    """Read runs, of a folder or given; an error where there is no finished one to report on.

    `lost` are those that failed before they had a folder.
    """
    if isinstance(runs, Path | str):
        found, listed = _in_folder(Path(runs))
    else:
        listed = list(runs)
        found = Collected(listed[0].folder.resolve().parent.name if listed else "no runs")
    found.unfinished += lost
    for run in listed:
        try:
            with run.reading():
                _add(found, run)
        except InlayError as error:
            found.damaged.append(str(error))
    if not found.results:
        raise InlayError(_nothing(found, runs))
    _arrange(found)
    return found


def _in_folder(folder: Path) -> tuple[Collected, list[Run]]:
    if not folder.is_dir():
        kind = "a file" if folder.exists() else "not there"
        raise InlayError(
            f"{str(folder)!r} is {kind}: give a folder of runs, as `inlay tune --out` makes it.{misspelt(folder)}"
        )
    runs, problems = Store(folder).read()
    return Collected(folder.resolve().name, damaged=list(problems.values())), runs


def _nothing(found: Collected, runs: Path | str | Sequence[Run]) -> str:
    folder = Path(runs) if isinstance(runs, Path | str) else None
    where = "among those given" if folder is None else f"in {str(folder)!r}"
    if found.unfinished:
        first = found.unfinished[0]
        why = f": {first.error}" if first.error else ""
        return (
            f"No finished run {where}, so there is nothing to report yet: {len(found.unfinished)} unfinished; "
            f"{first.id} is {first.status}{why}. Give its command again to resume it: {first.command}"
        )
    if found.damaged:
        return f"No readable run {where}: {found.damaged[0]}"
    below = sorted({path.parent.parent.as_posix() for path in folder.glob("*/*/spec.json")}) if folder else []
    hint = f" There are some in {', '.join(below[:3])}." if below else " `inlay tune` or `inlay compare` makes some."
    return f"No runs {where}.{hint}"


def _add(found: Collected, run: Run) -> None:
    from inlay.workflow.comparison import upwards

    line = command(run.spec, _out(run))
    if run.status != "finished":
        found.unfinished.append(Unfinished(run.id, run.spec, run.status, run.error, line))
        return
    record = run.record
    metric, metrics = record["metric"], run.metrics
    split = "test" if "test" in metrics else "validation"
    # Tasks that are scored by written texts are followed by their loss alone.
    watched = metric if metric in metrics.get("validation", {metric: 0}) else "loss"
    result = Result(
        id=run.id,
        spec=run.spec,
        metric=metric,
        greater=upwards(record, metric),
        split=split,
        value=float(metrics[split][metric]),
        watched=watched,
        watched_greater=upwards(record, watched),
        validation=metrics.get("validation", {}).get(watched),
        metrics=metrics,
        portrait=run.portrait,
        record=record,
        curve=curve(run.history(), watched),
        command=line,
    )
    if not isinstance(result.portrait["parameters"]["trained"], int):
        raise TypeError("parameters")
    if not math.isfinite(result.value):
        raise InlayError(f"The run {run.id} ended with {split} {metric} = {result.value}: left out of the tables.")
    found.results.append(result)
    if run.unvouched:
        found.unvouched.append(run.id)
    if run.failed_tasks:
        told = "; ".join(f"{name}: {why}" for name, why in run.failed_tasks.items())
        found.said.append(f"{run.id}: the average leaves out what failed in training. {told}.")


def _out(run: Run) -> str | None:
    """The folder to be named in a command: one that means the same elsewhere, and is not the default."""
    folder = run.folder.parent
    return None if folder.is_absolute() or folder == Path("runs") else str(folder)


def curve(history: Iterable[Mapping[str, Any]], metric: str) -> dict[str, list[list[float]]]:
    """Epochs and values of the training loss and of the validation metric, a moderate number of points each.

    A run that was resumed has some steps twice: the later entry is the one that counts.
    """
    series: dict[str, dict[float, float]] = {"loss": {}, "validation": {}}
    for entry in history:
        values = {"loss": entry.get("loss"), "validation": (entry.get("validation") or {}).get(metric)}
        for name, value in values.items():
            if isinstance(value, int | float) and math.isfinite(value) and "epoch" in entry:
                series[name][entry["epoch"]] = value
    return {name: _thin(sorted(points.items())) for name, points in series.items() if points}


def _thin(points: list[tuple[float, float]]) -> list[list[float]]:
    step = max(1, math.ceil(len(points) / CURVE_POINTS))
    kept = points[::step] if (len(points) - 1) % step == 0 else [*points[::step], points[-1]]
    return [[float(f"{x:.4g}") for x, _ in kept], [float(f"{y:.4g}") for _, y in kept]]


# ------------------------------------------------------------------------------------------------------- rows and sets


def _arrange(found: Collected) -> None:
    sets: dict[Set, int] = {}
    groups: dict[str, list[Result]] = {}
    for result in found.results:
        sets.setdefault(set_of(result), len(sets))
        groups.setdefault(_but_for_the_seed(result.spec) + repr(set_of(result)), []).append(result)
    found.sets = list(sets)
    failed = Counter(_but_for_the_seed(run.spec) for run in found.unfinished if run.status == "failed")
    # An average over fewer tasks may flatter: as a run that failed, it stands behind those over all.
    failed.update(_but_for_the_seed(result.spec) for result in found.results if result.record.get("failed"))
    for results in groups.values():
        results.sort(key=lambda result: result.spec.seed)
        found.rows.append(Row(results[0].spec, sets[set_of(results[0])], results))
    for place, name in enumerate(found.sets):
        rows = [row for row in found.rows if row.place == place]
        sign = 1 if greater_is_better(name.metric) else -1
        for method in dict.fromkeys(row.spec.method for row in rows):
            _tell_apart([row for row in rows if row.spec.method == method], failed)
        _compare_with_best([row for row in rows if row.chosen], sign)
    signs = [1 if greater_is_better(name.metric) else -1 for name in found.sets]
    found.rows.sort(key=lambda row: (row.place, -signs[row.place] * row.mean))


def _but_for_the_seed(spec: Spec) -> str:
    return json.dumps(spec.with_(seed=0, pooling=replaced(spec) or "own").to_json(), sort_keys=True)


def replaced(spec: Spec) -> str | None:
    """What a run's head read in place of its architecture's own feature: what auto finds is written into a spec."""
    return None if spec.pooling in ("auto", "own") else spec.pooling


def set_of(result: Result) -> Set:
    """The set that a run belongs to."""
    spec = result.spec
    more = (
        spec.protocol,
        spec.revision and f"revision {spec.revision}",
        spec.test_data and f"test {spec.test_data}",
        (pooling := replaced(spec)) and f"pooling {pooling}",
    )
    return Set(
        task=spec.task or " + ".join(spec.tasks) or str(spec.data),
        model=spec.model,
        shots=spec.shots,
        metric=result.metric + LESS * (result.greater != greater_is_better(result.metric)),
        split=result.split,
        more=", ".join(part for part in more if part),
    )


def greater_is_better(metric: str) -> bool:
    """Which way a set's metric improves; what an older inlay measured, upwards."""
    from inlay.tasks.metrics import LOWER_IS_BETTER

    return metric not in LOWER_IS_BETTER and metric != "loss" and not metric.endswith(LESS)


def settings_of(spec: Spec) -> dict[str, Any]:
    """What may differ between variants of a method: the spec's fields but for those of the set, settings one by one."""
    fields = {name: value for name, value in spec.to_json().items() if name not in OF_THE_SET}
    settings = fields.pop("settings")
    return {**fields, **settings}


def _tell_apart(rows: list[Row], failed: Mapping[str, int]) -> None:
    """Name what differs between the variants of a method, and choose one by validation, as `inlay compare` does."""
    from inlay.workflow.statistics import pick

    if len(rows) < 2:
        return
    settings = [settings_of(row.spec) for row in rows]
    names = dict.fromkeys(name for each in settings for name in each)
    missing = object()
    varying = [
        name for name in names if any(each.get(name, missing) != settings[0].get(name, missing) for each in settings)
    ]
    for row, each in zip(rows, settings, strict=True):
        told = [f"{SHORT.get(name, name.replace('_', ' '))} {_said(each.get(name))}" for name in varying]
        row.variant = ", ".join(told)
    rows = sorted(rows, key=lambda row: (row.spec.learning_rate or 0.0, row.variant))
    values = [
        {
            result.spec.seed: result.validation if result.watched_greater else -result.validation
            for result in row.results
            if result.validation is not None
        }
        for row in rows
    ]
    best = pick(values, [failed.get(_but_for_the_seed(row.spec), 0) for row in rows])[0] if any(values) else 0
    for index, row in enumerate(rows):
        row.chosen = index == best


def _said(value: Any) -> str:
    if isinstance(value, list):
        return "+".join(map(str, value))
    return f"{value:g}" if isinstance(value, float) else "default" if value is None else str(value)


def _compare_with_best(rows: list[Row], sign: int) -> None:
    """What can be said of each row beside the best one, over the seeds that both have."""
    from inlay.workflow.statistics import better_than, holm, paired, pairs_among, verdict

    best = max(rows, key=lambda row: sign * row.mean)
    best.best = True
    known = {result.spec.seed: result.value for result in best.results}
    tests = []
    for row in rows:
        pairs = [(each.value, known[each.spec.seed]) for each in row.results if each.spec.seed in known]
        if row is not best and pairs:
            mine, theirs = zip(*pairs, strict=True)
            tests.append((row, paired(mine, theirs)))
        elif row is not best:
            row.verdict = "too few seeds"
    # Which one is the best was seen in the same numbers: it stands for every pair.
    raised = holm([test.p for _, test in tests], pairs_among(len(rows)))
    for (row, test), p in zip(tests, raised, strict=True):
        row.verdict = verdict(test, p, greater_is_better=sign > 0)
    best.leads = any(row.verdict == "worse" for row in rows)
    values = [{result.spec.seed: result.value for result in row.results} for row in rows]
    for row, worse in zip(rows, better_than(values, greater_is_better=sign > 0), strict=True):
        row.beats = [rows[index] for index in sorted(worse)]
