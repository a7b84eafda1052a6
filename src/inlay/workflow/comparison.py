"""Compare finished runs of several methods: a row a method, learning rates selected, differences, sentences."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from inlay.errors import InlayError
from inlay.records.spec import Spec
from inlay.records.store import Run
from inlay.workflow import chance, statistics
from inlay.workflow.chance import Standing
from inlay.workflow.statistics import Verdict, half_width, standard_error

COSTS = {"parameters": "trained parameters", "memory": "peak memory", "time": "seconds an epoch"}


@dataclass(frozen=True)
class Measurement:
    """Mean, standard deviation (None for a single repetition) and number of the repetitions of a measurement."""

    mean: float
    spread: float | None
    repetitions: int


@dataclass(frozen=True)
class Row:
    """One method: its test metric over the seeds, and its cost.

    `first_epoch` is the seconds of an epoch that also computes the frozen trunk, where later ones do not. `rate` is the
    learning rate of its runs. `front` names the costs for which every cheaper method is significantly worse than this
    one. `standing` is how it compares with the majority class.
    """

    method: str
    metric: str
    greater_is_better: bool
    values: tuple[float, ...]
    trained: int
    seconds_per_epoch: Measurement | None
    first_epoch: float | None
    peak_memory: float | None
    train_rate: Measurement | None
    inference_rate: Measurement | None
    saved_bytes: int
    seeds: tuple[int, ...] = ()
    rate: float | None = None
    front: tuple[str, ...] = ()
    standing: Standing | None = None

    @property
    def mean(self) -> float:
        """The mean over seeds."""
        return fmean(self.values)

    @property
    def interval(self) -> float | None:
        """Half the width of the 95 % confidence interval of the mean; None for a single seed."""
        return half_width(self.values)

    def cost(self, name: str) -> float | None:
        """One of the `COSTS`."""
        if name == "time":
            return None if self.seconds_per_epoch is None else self.seconds_per_epoch.mean
        return self.peak_memory if name == "memory" else float(self.trained)

    def cost_spread(self, name: str) -> float | None:
        """The standard deviation of a cost that was measured again and again; None for the others."""
        return self.seconds_per_epoch.spread if name == "time" and self.seconds_per_epoch is not None else None


@dataclass(frozen=True)
class Tried:
    """One method at one learning rate: the validation metric of its runs, by which the rate is selected."""

    method: str
    rate: float | None
    validation: float
    seeds: tuple[int, ...]
    chosen: bool


@dataclass(frozen=True)
class Comparison:
    """The finished runs of a comparison, a row a method, and what did not finish.

    `runs` are those of the selected learning rates, whose test metrics are in the rows; `tried` are all the rates that
    were tried. `unfinished` are runs that were not begun, or stopped, because time was up. `others` are the runs on
    disk that are in no row: of other rates, failed, unfinished. `lost` are failures that left no run behind.
    """

    rows: list[Row]
    runs: list[Run]
    failures: dict[str, str] = field(default_factory=dict)
    spec: Spec | None = None
    left_out: dict[str, str] = field(default_factory=dict)
    unfinished: dict[str, str] = field(default_factory=dict)
    tried: list[Tried] = field(default_factory=list)
    complete: bool = True  # whether every method that was named one by one could be run
    others: list[Run] = field(default_factory=list)
    lost: list[tuple[Spec, str]] = field(default_factory=list)

    @property
    def title(self) -> str:
        """The task or the data's name, and the model."""
        if self.spec is None:
            return ""
        what = self.spec.subject if self.spec.data is None else Path(self.spec.data).name
        return f"{what} on {self.spec.model}" + (f", {self.spec.shots} examples" if self.spec.shots else "")

    @property
    def greater_is_better(self) -> bool:
        """Which way the metric improves."""
        return self.rows[0].greater_is_better


@dataclass(frozen=True)
class Difference:
    """One method less a baseline, over the seeds that both have finished.

    `error` and `difference_error` are standard errors of the means; `low` and `high` are the paired bootstrap's 95 %
    interval of the difference; `p` is the two-sided paired t-test's, None where there are too few seeds or nothing
    differs. `verdict` is what both tests allow together (see `inlay.workflow.statistics`).
    """

    method: str
    mean: float
    error: float | None
    difference: float | None = None
    difference_error: float | None = None
    p: float | None = None
    low: float | None = None
    high: float | None = None
    verdict: Verdict | None = None


def against(found: Comparison, baseline: str, *, named: bool = True) -> list[Difference]:
    """Every method's mean and standard error, and how it differs from the baseline, paired by seed.

    `named`: the baseline was named before the results were seen; otherwise the tests are stricter.
    """
    by_method = {row.method: dict(zip(row.seeds, row.values, strict=True)) for row in found.rows}
    if baseline not in by_method:
        raise InlayError(f"baseline={baseline!r} is not among the methods that finished: {', '.join(by_method)}.")
    return differences_from(baseline, by_method, greater_is_better=found.greater_is_better, named=named)


def differences_from(
    baseline: str, by_method: Mapping[str, Mapping[int, float]], *, greater_is_better: bool, named: bool
) -> list[Difference]:
    """As `against`, of methods with a value for each seed."""
    known = by_method[baseline]
    tests: dict[str, statistics.Paired] = {}
    for name, values in by_method.items():
        common = sorted(values.keys() & known.keys())
        if name != baseline and common:
            tests[name] = statistics.paired([values[seed] for seed in common], [known[seed] for seed in common])
    family = None if named else statistics.pairs_among(len(by_method))
    raised = dict(zip(tests, statistics.holm([test.p for test in tests.values()], family), strict=True))

    found = []
    for name, by_seed in by_method.items():
        all_seeds = list(by_seed.values())
        own: tuple[Any, ...] = ()
        if (test := tests.get(name)) is not None:
            word = statistics.verdict(test, raised[name], greater_is_better=greater_is_better)
            own = (test.difference, test.error, test.p, test.low, test.high, word)
        found.append(Difference(name, fmean(all_seeds), standard_error(all_seeds), *own))
    return found


def words(found: Comparison, baseline: str | None = None) -> list[str]:
    """What the numbers show, in sentences: which methods differ significantly from the baseline, or from the best."""
    beside = chance.sentences([row.standing for row in found.rows if row.standing is not None])
    if len(found.rows) < 2:
        return beside
    told = []
    if baseline is not None and all(row.method != baseline for row in found.rows):
        told.append(f"The baseline {baseline} has no finished run here: the best method is used instead.")
        baseline = None
    told += beside
    reference = baseline or found.rows[0].method
    by_verdict: dict[Verdict, list[str]] = {}
    for each in against(found, reference, named=baseline is not None):
        if each.verdict is not None:
            by_verdict.setdefault(each.verdict, []).append(each.method)
    who = f"the baseline {reference}" if baseline else f"{reference}, the best here"
    than = {"better": "Better than", "worse": "Worse than", "not distinguishable": "No significant difference from"}
    told += [f"{than[word]} {who}: {', '.join(names)}." for word, names in by_verdict.items() if word in than]
    if few := by_verdict.get("too few seeds"):
        told.append(
            f"Too few seeds to tell from {who}: {', '.join(few)}. Use {statistics.FEWEST} at least, better 5 or more."
        )
    return told


def select(runs: Sequence[tuple[Spec, Run]], failed: Sequence[Spec] = ()) -> tuple[list[Run], list[Tried]]:
    """The runs of each method at its best learning rate, and how every rate did.

    A rate is selected on the validation set, by the mean over the seeds that all rates of the method have finished. Of
    rates at which equally many runs `failed`, whole or in a task, the lowest of equals is taken (see
    `inlay.workflow.statistics.pick`).
    """
    by_method: dict[str, dict[float | None, dict[int, Run]]] = {}
    for spec, run in runs:
        by_method.setdefault(spec.method, {}).setdefault(spec.learning_rate, {})[spec.seed] = run
    lost = Counter((spec.method, spec.learning_rate) for spec in failed)
    lost.update((spec.method, spec.learning_rate) for spec, run in runs if run.record.get("failed"))
    chosen: list[Run] = []
    tried: list[Tried] = []
    for method, by_rate in by_method.items():
        if len(by_rate) == 1:
            chosen += next(iter(by_rate.values())).values()
            continue
        rates = sorted(by_rate, key=lambda rate: rate or 0.0)
        values = [{seed: _selected_by(run) for seed, run in by_rate[rate].items()} for rate in rates]
        best, scores = statistics.pick(values, [lost[method, rate] for rate in rates])
        sign = _sign(next(iter(by_rate[rates[best]].values())))
        chosen += by_rate[rates[best]].values()
        tried += [
            Tried(method, rate, sign * score, tuple(sorted(by_rate[rate])), rate == rates[best])
            for rate, score in zip(rates, scores, strict=True)
            if score is not None
        ]
    return chosen, tried


def improves_upwards(record: Mapping[str, Any], metric: str) -> bool:
    """Whether a greater value of a finished run's metric is better.

    A run of several tasks has the direction of their average on record; an older one has the metric of each task. A
    metric that is not known is taken to improve upwards.
    """
    from inlay.tasks.metrics import LOWER_IS_BETTER

    tasks = record.get("tasks")
    if tasks and metric == record["metric"]:
        said = record.get("greater_is_better")
        return any(task["metric"] not in LOWER_IS_BETTER for task in tasks.values()) if said is None else said
    return metric not in LOWER_IS_BETTER and metric != "loss"


def _sign(run: Run) -> int:
    return 1 if improves_upwards(run.record, _metric(run)) else -1


def _selected_by(run: Run) -> float:
    """A run's value on the validation set, greater for better."""
    if "validation" not in run.metrics:
        raise InlayError(
            f"{run.id} has no metrics on a validation set, by which learning rates are selected. Give one of them."
        )
    return _sign(run) * run.metrics["validation"][_metric(run)]


def _metric(run: Run) -> str:
    """The task's first metric, or its loss where that metric is only known on the test set."""
    name = run.record["metric"]
    return name if name in run.metrics.get("validation", {name: 0}) else "loss"


def rows_of(runs: Sequence[Run]) -> list[Row]:
    """One row a method, the best mean first, with the fronts it is on."""
    by_method: dict[str, list[Run]] = {}
    for run in runs:
        by_method.setdefault(run.spec.method, []).append(run)
    rows = [row_of(name, group) for name, group in by_method.items()]
    up = rows[0].greater_is_better
    rows = sorted(rows, key=lambda row: -row.mean if up else row.mean)
    better = statistics.better_than(
        [dict(zip(row.seeds, row.values, strict=True)) for row in rows], greater_is_better=up
    )
    fronts = {
        cost: statistics.front([row.cost(cost) for row in rows], better, [row.cost_spread(cost) for row in rows])
        for cost in COSTS
    }
    return [replace(row, front=tuple(cost for cost in COSTS if fronts[cost][index])) for index, row in enumerate(rows)]


def row_of(method: str, runs: Sequence[Run]) -> Row:
    """One method's runs in one row: means over the seeds."""
    runs = sorted(runs, key=lambda run: run.spec.seed)
    portraits = [run.portrait for run in runs]
    split = "test" if "test" in runs[0].metrics else "validation"
    metric = runs[0].record["metric"]
    values = tuple(run.metrics[split][metric] for run in runs)
    return Row(
        method=method,
        metric=metric,
        greater_is_better=improves_upwards(runs[0].record, metric),
        values=values,
        trained=portraits[0]["parameters"]["trained"],
        seconds_per_epoch=pooled(portraits, "seconds_per_epoch"),
        first_epoch=mean_of(portraits, "trunk", "first_epoch_seconds"),
        peak_memory=mean_of(portraits, "peak_memory", "bytes"),
        train_rate=pooled(portraits, "train_examples_per_second"),
        inference_rate=pooled(portraits, "inference_examples_per_second"),
        saved_bytes=portraits[0]["saved_bytes"],
        seeds=tuple(run.spec.seed for run in runs),
        rate=runs[0].spec.learning_rate,
        standing=chance.standing(method, metric, values, [(run.spec.seed, run.record) for run in runs]),
    )


def pooled(portraits: Sequence[Mapping[str, Any]], entry: str) -> Measurement | None:
    """One measurement's repetitions over several runs, as if they had been made in one: its mean is that of all
    examples and all seconds, where the runs say how many there were."""
    known = [portrait[entry] for portrait in portraits if portrait.get(entry)]
    if not known:
        return None
    count = sum(one["repetitions"] for one in known)
    weighted = all((one.get("weight") or 0) > 0 for one in known)  # not in runs of an earlier inlay
    weights = [one["weight"] if weighted else one["repetitions"] for one in known]
    mean = sum(one["mean"] * weight for one, weight in zip(known, weights, strict=True)) / sum(weights)
    squares = sum(
        (one["spread"] or 0.0) ** 2 * (one["repetitions"] - 1) + one["repetitions"] * (one["mean"] - mean) ** 2
        for one in known
    )
    return Measurement(mean, math.sqrt(squares / (count - 1)) if count > 1 else None, count)


def mean_of(portraits: Sequence[Mapping[str, Any]], entry: str, key: str) -> float | None:
    """The mean of one entry over several portraits, of those that have it."""
    known = [portrait[entry][key] for portrait in portraits if (portrait.get(entry) or {}).get(key) is not None]
    return fmean(known) if known else None
