"""Make the runs of several methods over several seeds, and say what they amount to."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from inlay.errors import InlayError
from inlay.methods import registry
from inlay.records.spec import Spec
from inlay.records.store import Run
from inlay.workflow.tune import DEFAULT_OUT, Say, tune


@dataclass(frozen=True)
class Measured:
    """Mean, standard deviation (None for a single repetition) and number of the repetitions of a measurement."""

    mean: float
    spread: float | None
    repetitions: int


@dataclass(frozen=True)
class Row:
    """One method's line: its test metric over the seeds, and what it cost.

    `first_epoch` is the seconds of an epoch that has to compute the frozen trunk as well, where later ones do not.
    """

    method: str
    metric: str
    values: tuple[float, ...]
    trained: int
    seconds_per_epoch: Measured | None
    first_epoch: float | None
    peak_memory: float | None
    train_rate: Measured | None
    inference_rate: Measured | None
    saved_bytes: int

    @property
    def mean(self) -> float:
        """The mean over seeds."""
        return fmean(self.values)

    @property
    def interval(self) -> float | None:
        """Half the width of the 95 % confidence interval of the mean; None for a single seed."""
        return half_width(self.values)


@dataclass(frozen=True)
class Comparison:
    """The finished runs of a comparison, a line a method, and what did not finish."""

    rows: list[Row]
    runs: list[Run]
    failures: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Difference:
    """One method beside a named baseline, over the seeds that both have finished.

    `error` and `difference_error` are standard errors of the means; `p` is the two-sided paired t-test's, None where
    there are too few seeds or nothing differs.
    """

    method: str
    mean: float
    error: float | None
    difference: float | None = None
    difference_error: float | None = None
    p: float | None = None


def against(found: Comparison, baseline: str) -> list[Difference]:
    """Every method's mean and standard error, and how it differs from the baseline, paired by seed."""
    by_method = {row.method: _by_seed(found.runs, row.method, row.metric) for row in found.rows}
    if baseline not in by_method:
        raise InlayError(f"baseline={baseline!r} is not among the methods that finished: {', '.join(by_method)}.")
    known = by_method[baseline]
    return [_difference(name, values, None if name == baseline else known) for name, values in by_method.items()]


def _by_seed(runs: Sequence[Run], method: str, metric: str) -> dict[int, float]:
    mine = [run for run in runs if run.spec.method == method]
    return {run.spec.seed: run.metrics["test" if "test" in run.metrics else "validation"][metric] for run in mine}


def _difference(method: str, values: dict[int, float], known: dict[int, float] | None) -> Difference:
    from scipy.stats import ttest_rel

    mean, error = fmean(values.values()), standard_error(list(values.values()))
    common = sorted(values.keys() & (known or {}).keys())
    if known is None or not common:
        return Difference(method, mean, error)
    mine, theirs = [values[seed] for seed in common], [known[seed] for seed in common]
    gaps = [a - b for a, b in zip(mine, theirs, strict=True)]
    told = len(gaps) > 1 and stdev(gaps) > 0
    p = float(ttest_rel(mine, theirs).pvalue) if told else None
    return Difference(method, mean, error, fmean(gaps), standard_error(gaps), p)


def standard_error(values: Sequence[float]) -> float | None:
    """s / sqrt(n); None for a single value."""
    return stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None


def compare(
    spec: Spec,
    methods: Sequence[str],
    seeds: int | Sequence[int] = 3,
    out: Path | str = DEFAULT_OUT,
    *,
    progress: bool = True,
    say: Say | None = None,
) -> Comparison:
    """Run `spec` with every method and seed and put the results side by side, best first.

    `spec` gives all but the method and the seed; its own are replaced. Runs that were made before are taken as they
    are. One that fails is noted and does not stop the rest.
    """
    say = say or (lambda line: None)
    chosen = [registry.get(name).name for name in dict.fromkeys(methods)]
    numbers = list(range(seeds)) if isinstance(seeds, int) else list(seeds)
    if not chosen or not numbers:
        raise InlayError(f"Nothing to compare: methods={list(methods)!r}, seeds={seeds!r}. Give one of each at least.")
    finished: list[Run] = []
    failures: dict[str, str] = {}
    told: set[str] = set()

    def say_once(line: str) -> None:
        if line not in told:
            told.add(line)
            say(line)

    for number, (name, seed) in enumerate([(name, seed) for name in chosen for seed in numbers], start=1):
        say(f"[{number}/{len(chosen) * len(numbers)}] {name}, seed {seed}")
        try:
            made = with_own_layers(spec.with_(method=name, seed=seed), say_once)
            finished.append(tune(made, out, progress=progress, say=say_once))
        except InlayError as error:
            failures[f"{name}, seed {seed}"] = str(error)
            say(f"{name}, seed {seed}: {error}")
    if not finished:
        raise InlayError(f"No run finished. {next(iter(failures.values()))}")
    return Comparison(rows_of(finished), finished, failures)


def with_own_layers(spec: Spec, say: Say) -> Spec:
    """The spec without a choice of layers where its method has none: the choice is for the others."""
    if "layers" not in spec.settings or registry.get(spec.method).takes("layers"):
        return spec
    say(f"layers={spec.settings['layers']!r} says nothing to {spec.method}, which has no layers to choose")
    return spec.with_(settings={key: value for key, value in spec.settings.items() if key != "layers"})


def rows_of(runs: Sequence[Run]) -> list[Row]:
    """One line a method, the best mean first."""
    from inlay.tasks.metrics import greater_is_better

    by_method: dict[str, list[Run]] = {}
    for run in runs:
        by_method.setdefault(run.spec.method, []).append(run)
    rows = [row_of(name, group) for name, group in by_method.items()]
    sign = 1 if greater_is_better(rows[0].metric) else -1
    return sorted(rows, key=lambda row: -sign * row.mean)


def row_of(method: str, runs: Sequence[Run]) -> Row:
    """One method's runs in one line: means over the seeds."""
    portraits = [run.portrait for run in runs]
    split = "test" if "test" in runs[0].metrics else "validation"
    metric = runs[0].record["metric"]
    return Row(
        method=method,
        metric=metric,
        values=tuple(run.metrics[split][metric] for run in runs),
        trained=portraits[0]["parameters"]["trained"],
        seconds_per_epoch=pooled(portraits, "seconds_per_epoch"),
        first_epoch=mean_of(portraits, "trunk", "first_epoch_seconds"),
        peak_memory=mean_of(portraits, "peak_memory", "bytes"),
        train_rate=pooled(portraits, "train_examples_per_second"),
        inference_rate=pooled(portraits, "inference_examples_per_second"),
        saved_bytes=portraits[0]["saved_bytes"],
    )


def pooled(portraits: Sequence[dict[str, Any]], entry: str) -> Measured | None:
    """One measurement's repetitions over several runs, as if they had been made in one."""
    known = [portrait[entry] for portrait in portraits if portrait.get(entry)]
    if not known:
        return None
    count = sum(one["repetitions"] for one in known)
    mean = sum(one["mean"] * one["repetitions"] for one in known) / count
    squares = sum(
        (one["spread"] or 0.0) ** 2 * (one["repetitions"] - 1) + one["repetitions"] * (one["mean"] - mean) ** 2
        for one in known
    )
    return Measured(mean, math.sqrt(squares / (count - 1)) if count > 1 else None, count)


def mean_of(portraits: Sequence[dict[str, Any]], entry: str, key: str) -> float | None:
    """The mean of one entry over several portraits, of those that have it."""
    known = [portrait[entry][key] for portrait in portraits if (portrait.get(entry) or {}).get(key) is not None]
    return fmean(known) if known else None


def half_width(values: Sequence[float], level: float = 0.95) -> float | None:
    """t * s / sqrt(n): half of the confidence interval of a mean; None when one value says nothing of the spread."""
    from scipy.stats import t

    if len(values) < 2:
        return None
    return float(t.ppf((1 + level) / 2, len(values) - 1)) * stdev(values) / math.sqrt(len(values))
