"""Runs as plain data for a report: each run's result, cost, curve and command, and the rows that they amount to.

A row is all runs whose specs differ in the seed alone: nothing else may be averaged over. A set is what can be compared
at all: the same task, model, number of examples, metric and split. Rows of one method within a set are its variants,
named by what differs between them.
"""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from inlay.errors import InlayError, misspelt, unknown
from inlay.records.command import asked, command
from inlay.records.spec import Spec
from inlay.records.store import Run, Store

if TYPE_CHECKING:
    from inlay.workflow.chance import Standing
    from inlay.workflow.comparison import Comparison
    from inlay.workflow.statistics import Verdict

CURVE_POINTS = 40
DEPTH, MOST_FOLDERS = 4, 2000  # folders within the folder of runs: levels, and how many on each
LESS = " (less is better)"  # of an average over tasks, whose name does not say it
# What says which set a run belongs to, and the seed: none of them distinguishes two variants of a method.
OF_THE_SET = (
    *("model", "method", "task", "tasks", "data", "test_data", "data_dir", "protocol", "revision", "pooling", "shots"),
    "seed",
)


@dataclass(frozen=True)
class Set:
    """What is the same in all rows that can be compared. `greater`: whether more of the metric is better."""

    task: str
    model: str
    shots: int | None
    metric: str
    greater: bool
    split: str
    more: str = ""

    @property
    def label(self) -> str:
        """The set in words."""
        shots = "all examples" if self.shots is None else f"{self.shots:,} examples"
        return " · ".join(part for part in (self.task, self.model, shots, self.more) if part)


@dataclass
class Result:
    """A finished run, with what a report shows of it. `watched` is the metric that validation is given in."""

    run: Run
    of: Set
    metric: str
    value: float
    watched: str
    validation: float | None
    curve: dict[str, list[list[float]]]
    command: str

    @property
    def spec(self) -> Spec:
        """What was asked for."""
        return self.run.spec

    @property
    def record(self) -> Mapping[str, Any]:
        """All that is on record of the run."""
        return self.run.record


@dataclass(eq=False)
class ResultRow:
    """The runs of one spec over its seeds; `place` is its set's number. The best variant of its method is `chosen`."""

    spec: Spec
    place: int
    results: list[Result]
    variant: str = ""
    chosen: bool = True
    best: bool = False
    verdict: Verdict | None = None  # beside the best row of its set
    leads: bool = False  # whether it is the best, and some other is significantly worse
    beats: list[ResultRow] = field(default_factory=list)  # the rows of its set that are significantly worse

    @property
    def label(self) -> str:
        """The method, and which variant of it."""
        return self.spec.method + (f" ({self.variant})" if self.variant else "")

    @property
    def records(self) -> list[Mapping[str, Any]]:
        """The records of its runs."""
        return [result.record for result in self.results]

    @property
    def values(self) -> dict[int, float]:
        """The metric of each seed."""
        return {result.spec.seed: result.value for result in self.results}

    @property
    def mean(self) -> float:
        """The mean over seeds."""
        return fmean(result.value for result in self.results)

    @property
    def interval(self) -> float | None:
        """Half the width of the 95 % confidence interval of the mean; None for a single seed."""
        from inlay.workflow.statistics import half_width

        return half_width([result.value for result in self.results])

    @property
    def badge(self) -> bool:
        """Whether it is marked as the best: it leads, and its own interval excludes a row that is worse."""
        half = self.interval
        return self.leads and half is not None and any(abs(self.mean - row.mean) > half for row in self.beats)

    @property
    def standing(self) -> Standing:
        """How it compares with the majority class."""
        from inlay.workflow.chance import standing

        tested = [(result.spec.seed, result.record) for result in self.results if result.of.split == "test"]
        return standing(self.label, self.results[0].metric, [result.value for result in self.results], tested)


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
    rows: list[ResultRow] = field(default_factory=list)
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

    @property
    def tasks(self) -> set[str]:
        """The tasks of its sets."""
        return {each.task for each in self.sets}

    @property
    def by_set(self) -> list[tuple[Set, list[ResultRow]]]:
        """Each set with its rows."""
        return [(each, [row for row in self.rows if row.place == place]) for place, each in enumerate(self.sets)]


def collect_comparisons(comparisons: Sequence[Comparison], baseline: str | None = None) -> Collected:
    """All that came of some comparisons: their rows, the learning rates that were not chosen, what failed, what was
    left out; and how the methods differ from a baseline that was named."""
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


def collect(
    runs: Path | str | Sequence[Run],
    lost: Sequence[Unfinished] = (),
    *,
    but: Path | None = None,
    methods: Sequence[str] = (),
) -> Collected:
    """Read runs, of a folder and the folders in it, or given; an error where there is no finished one to report on.

    `lost` are those that failed before they had a folder. A folder `but` within the folder is passed over. `methods`
    are the only ones to be read; without any, all are.
    """
    folder = Path(runs) if isinstance(runs, Path | str) else None
    if isinstance(runs, Path | str):
        found, listed = _in_folder(Path(runs), but)
    else:
        listed = list(runs)
        found = Collected(listed[0].folder.resolve().parent.name if listed else "no runs")
    found.unfinished += lost
    if methods:
        there = {run.spec.method for run in listed}
        if strange := next((name for name in methods if name not in there), None):
            raise unknown("method among these runs", strange, there)
        listed = [run for run in listed if run.spec.method in methods]
        found.unfinished = [run for run in found.unfinished if run.spec.method in methods]
    for run in listed:
        try:
            with run.reading():
                _add(found, run)
        except InlayError as error:
            found.damaged.append(str(error))
    if not found.results:
        raise InlayError(_explain_nothing(found, folder))
    _arrange(found)
    return found


def _in_folder(folder: Path, but: Path | None) -> tuple[Collected, list[Run]]:
    if not folder.is_dir():
        kind = "a file" if folder.exists() else "not there"
        raise InlayError(
            f"{str(folder)!r} is {kind}: give a folder of runs, as `inlay tune --out` makes it.{misspelt(folder)}"
        )
    found, newest = Collected(folder.resolve().name), dict[str, Run]()
    twice = 0
    for place in folders_below(folder):
        if but is not None and place != folder and place.resolve().is_relative_to(but.resolve()):
            continue
        runs, problems = Store(place).read()
        found.damaged += problems.values()
        for run in runs:
            known = newest.get(run.digest)
            twice += known is not None
            if known is None or (run.status == "finished", run.created) > (known.status == "finished", known.created):
                newest[run.digest] = run
    if twice:
        found.said.append(f"{twice} runs lie in more than one folder: of each only the newest copy is counted.")
    return found, sorted(newest.values(), key=lambda run: (run.created, run.id))


def folders_below(folder: Path) -> list[Path]:
    """The folder itself and those within it that hold runs, a few levels deep; links are not followed."""
    found, level = [folder], [folder]
    for _ in range(DEPTH):
        inner = [path for place in level for path in sorted(place.iterdir()) if _may_hold_runs(path)]
        level = inner[:MOST_FOLDERS]
        found += [path for path in level if any(path.glob("*/spec.json"))]
    return found


def _may_hold_runs(path: Path) -> bool:
    """Whether this is a folder that is not itself a run."""
    hidden = path.name.startswith(".")
    if hidden or path.is_symlink() or not path.is_dir() or not os.access(path, os.R_OK | os.X_OK):
        return False
    return not os.path.lexists(path / "spec.json")


def _explain_nothing(found: Collected, folder: Path | None) -> str:
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
    return f"No runs {where}. `inlay tune` or `inlay compare` makes some."


def _add(found: Collected, run: Run) -> None:
    # The folder is named in a command where it means the same elsewhere, and is not the default.
    out = run.folder.parent
    line = command(asked(run), None if out.is_absolute() or out == Path("runs") else str(out))
    if run.status != "finished":
        found.unfinished.append(Unfinished(run.id, run.spec, run.status, run.error, line))
        return
    metric, metrics = run.record["metric"], run.metrics
    split = "test" if "test" in metrics else "validation"
    # Tasks that are scored by written texts are followed by their loss alone.
    watched = metric if metric in metrics.get("validation", {metric: 0}) else "loss"
    value, validation = float(metrics[split][metric]), metrics.get("validation", {}).get(watched)
    result = Result(
        run, set_of(run, metric, split), metric, value, watched, validation, curve(run.history(), watched), line
    )
    if not isinstance(run.portrait["parameters"]["trained"], int):
        raise TypeError("parameters")
    if not math.isfinite(value):
        raise InlayError(f"The run {run.id} ended with {split} {metric} = {value}: left out of the tables.")
    found.results.append(result)
    if run.unvouched:
        found.unvouched.append(run.id)
    if run.failed_tasks:
        told = "; ".join(f"{name}: {why}" for name, why in run.failed_tasks.items())
        found.said.append(f"{run.id}: the average leaves out what failed in training. {told}.")


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
    groups: dict[tuple[str, int], list[Result]] = {}
    for result in found.results:
        place = sets.setdefault(result.of, len(sets))
        groups.setdefault((_but_for_the_seed(result.spec), place), []).append(result)
    found.sets = list(sets)
    failed = Counter(_but_for_the_seed(run.spec) for run in found.unfinished if run.status == "failed")
    # An average over fewer tasks may flatter: as a run that failed, it stands behind those over all.
    failed.update(_but_for_the_seed(result.spec) for result in found.results if result.record.get("failed"))
    for (_, place), results in groups.items():
        results.sort(key=lambda result: result.spec.seed)
        found.rows.append(ResultRow(results[0].spec, place, results))
    for each, rows in found.by_set:
        for method in dict.fromkeys(row.spec.method for row in rows):
            _name_variants([row for row in rows if row.spec.method == method], failed)
        _compare_with_best([row for row in rows if row.chosen], each.greater)
    found.rows.sort(key=lambda row: (row.place, -row.mean if found.sets[row.place].greater else row.mean))


def _but_for_the_seed(spec: Spec) -> str:
    same = {"seed": 0, "pooling": replaced_pooling(spec) or "own"}
    return json.dumps(_of_today(spec).with_(**same).to_json(), sort_keys=True)


def _of_today(spec: Spec) -> Spec:
    """The spec with what an earlier inlay wrote where nobody had said anything as it is written today."""
    return spec.with_(gradient_checkpointing=spec.gradient_checkpointing or None)


def replaced_pooling(spec: Spec) -> str | None:
    """What a run's head read in place of its architecture's own feature: what auto finds is written into a spec."""
    return None if spec.pooling in ("auto", "own") else spec.pooling


def set_of(run: Run, metric: str, split: str) -> Set:
    """The set that a run belongs to."""
    from inlay.workflow.comparison import improves_upwards

    spec = run.spec
    greater = improves_upwards(run.record, metric)
    return Set(
        task=spec.subject,
        model=spec.model,
        shots=spec.shots,
        metric=metric + LESS * (greater != improves_upwards({}, metric)),
        greater=greater,
        split=split,
        more=more_of(spec),
    )


def more_of(spec: Spec) -> str:
    """What else is the same in a set: protocol, revision, test file, pooling."""
    more = (
        spec.protocol,
        spec.revision and f"revision {spec.revision}",
        spec.test_data and f"test {spec.test_data}",
        (pooling := replaced_pooling(spec)) and f"pooling {pooling}",
    )
    return ", ".join(part for part in more if part)


def settings_of(spec: Spec) -> dict[str, Any]:
    """What may differ between variants of a method: the spec's fields but for those of the set, settings one by one."""
    fields = {name: value for name, value in _of_today(spec).to_json().items() if name not in OF_THE_SET}
    settings = fields.pop("settings")
    return {**fields, **settings}


def _name_variants(rows: list[ResultRow], failed: Mapping[str, int]) -> None:
    """Name what differs between the variants of a method; choose one on the validation set, as `inlay compare` does."""
    from inlay.workflow.comparison import improves_upwards
    from inlay.workflow.statistics import pick

    if len(rows) < 2:
        return
    settings = [settings_of(row.spec) for row in rows]
    missing = object()
    varying = [
        name
        for name in dict.fromkeys(name for each in settings for name in each)
        if any(each.get(name, missing) != settings[0].get(name, missing) for each in settings)
    ]
    for row, each in zip(rows, settings, strict=True):
        row.variant = ", ".join(f"{name.replace('_', ' ')} {_format_setting(each.get(name))}" for name in varying)
    rows = sorted(rows, key=lambda row: (row.spec.learning_rate or 0.0, row.variant))
    values = [
        {
            result.spec.seed: result.validation
            if improves_upwards(result.record, result.watched)
            else -result.validation
            for result in row.results
            if result.validation is not None
        }
        for row in rows
    ]
    best = pick(values, [failed.get(_but_for_the_seed(row.spec), 0) for row in rows])[0] if any(values) else 0
    for index, row in enumerate(rows):
        row.chosen = index == best


def _format_setting(value: Any) -> str:
    if isinstance(value, list):
        return "+".join(map(str, value))
    return f"{value:g}" if isinstance(value, float) else "default" if value is None else str(value)


def _compare_with_best(rows: list[ResultRow], greater: bool) -> None:
    """What can be said of each row beside the best one, over the seeds that both have."""
    from inlay.workflow.comparison import differences_from
    from inlay.workflow.statistics import better_than

    best = max(rows, key=lambda row: row.mean if greater else -row.mean)
    best.best = True
    values = {row.spec.method: row.values for row in rows}
    # Which one is the best was seen in the same numbers: no baseline that was named before.
    beside = differences_from(best.spec.method, values, greater_is_better=greater, named=False)
    better = better_than(list(values.values()), greater_is_better=greater)
    for row, difference, worse in zip(rows, beside, better, strict=True):
        row.verdict = None if row is best else difference.verdict or "too few seeds"
        row.beats = [rows[index] for index in sorted(worse)]
    best.leads = any(row.verdict == "worse" for row in rows)
