"""Whether methods are above chance: compared with the majority class, and whether they predict one class only.

Where vectors are trained, or captions of classes are compared with images, so is the frozen model.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from inlay.records.spec import Spec

NAME = "majority class"
NORMAL = 1.96  # standard errors to either side of a 95 % interval


@dataclass(frozen=True)
class Standing:
    """One method and the majority class, over its runs: `constant` are the seeds that predict one class only.

    `values` and `majority` are the metric on the test set, a value for each run. Old runs, which did not record it,
    have no `majority`. `frozen` is what the model has before training, where that can be asked.
    """

    method: str
    metric: str
    values: tuple[float, ...]
    majority: tuple[float, ...] = ()
    answer: str = ""
    examples: int = 0
    constant: tuple[int, ...] = ()
    frozen: float | None = None

    @property
    def above_chance(self) -> bool | None:
        """Whether the mean is better than the majority class; of an accuracy, by more than the 95 % sampling error of a
        test set of this size, which more seeds do not lower. None where it is not known."""
        if not self.majority:
            return None
        gain = fmean(self.values) - fmean(self.majority)
        return (gain if self.better == "above" else -gain) > self.sampling_error

    @property
    def better(self) -> Literal["above", "below"]:
        """On which side of the majority class a value is better."""
        from inlay.tasks.metrics import LOWER_IS_BETTER

        return "below" if self.metric in LOWER_IS_BETTER else "above"

    @property
    def sampling_error(self) -> float:
        """The 95 % sampling error of the majority class's accuracy on the test examples; 0 for other metrics."""
        if not self.majority or self.metric != "accuracy":
            return 0.0
        chance = fmean(self.majority)
        return NORMAL * math.sqrt(max(0.0, chance * (1 - chance)) / self.examples)


def standing(
    method: str, metric: str, values: Sequence[float], runs: Sequence[tuple[int, Mapping[str, Any]]]
) -> Standing:
    """A method's standing from its seeds and records; only where every record has what it takes."""
    constant = tuple(seed for seed, record in runs if record.get("classes_predicted") == 1)
    known: list[Any] = [record.get("chance") for _, record in runs]
    usable = [each for each in known if _says(each, metric)]
    frozen = [_frozen(record, metric) for _, record in runs]
    same = frozen[0] if frozen and len(set(frozen)) == 1 else None  # the test rows are the same for every seed
    if not usable or len(usable) < len(known):
        return Standing(method, metric, tuple(values), constant=constant, frozen=same)
    first, majority = usable[0], tuple(float(each["metrics"][metric]) for each in usable)
    return Standing(method, metric, tuple(values), majority, str(first["answer"]), first["examples"], constant, same)


def _says(entry: Any, metric: str) -> bool:
    """Whether a record's entry, which may be anything, is of the majority class and has the metric."""
    if not isinstance(entry, Mapping) or not isinstance(entry.get("metrics"), Mapping) or "answer" not in entry:
        return False
    value, examples = entry["metrics"].get(metric), entry.get("examples")
    return type(value) in (int, float) and math.isfinite(value) and type(examples) is int and examples > 0


def _frozen(record: Mapping[str, Any], metric: str) -> float | None:
    """What a record, which may hold anything, says of the model's vectors before training."""
    entry = record.get("frozen")
    metrics = entry.get("metrics") if isinstance(entry, Mapping) else None
    value = metrics.get(metric) if isinstance(metrics, Mapping) else None
    known = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if known else None  # type: ignore[arg-type]


def sentences(found: Sequence[Standing]) -> list[str]:
    """What to know before methods are ranked."""
    told = []
    known = [each for each in found if each.majority]
    if known:
        first = known[0]
        told.append(
            f"Always answering {first.answer!r}, the most frequent class in training, has {first.metric} "
            f"{fmean(first.majority):.4f} on {first.examples:,} test examples."
        )
        below = [each.method for each in known if not each.above_chance]
        within = f", within the sampling error of {first.examples:,} examples" if first.metric == "accuracy" else ""
        if len(below) == len(known):
            told.append(f"No method is {first.better} that{within}: do not rank them.")
        elif below:
            told.append(f"Not {first.better} that{within}: {', '.join(below)}.")
    if tuned := [each for each in found if each.frozen is not None]:
        first = tuned[0]
        told.append(f"The frozen model has {first.metric} {first.frozen:.4f} on these test examples.")
        if worse := [each.method for each in tuned if fmean(each.values) <= (each.frozen or 0.0)]:
            told.append(f"Not above that: {', '.join(worse)}.")
    for each in found:
        if each.constant:
            seeds = "every seed" if len(each.constant) == len(each.values) else f"seed {_listed(each.constant)}"
            told.append(f"{each.method} gave all test examples the same class ({seeds}).")
    return told


def of_one(spec: Spec, metric: str, metrics: Mapping[str, Mapping[str, float]], beside: Mapping[str, Any]) -> list[str]:
    """The same for a single run: nothing where it is above chance and predicts several classes."""
    if metric not in metrics.get("test", {}):
        return []
    each = standing(spec.method, metric, [metrics["test"][metric]], [(spec.seed, beside)])
    told = []
    if each.constant:
        told.append("all test examples were given the same class")
    if each.above_chance is False:
        within = f" (the 95 % sampling error there is {each.sampling_error:.4f})" if each.sampling_error else ""
        told.append(
            f"test {metric} {each.values[0]:.4f} does not differ from chance: always answering {each.answer!r}, the "
            f"most frequent class in training, has {each.majority[0]:.4f} on these {each.examples:,} examples{within}"
        )
    if each.frozen is not None:
        told.append(f"test {metric} {each.values[0]:.4f}; the frozen model has {each.frozen:.4f} on the same examples")
    return told


def _listed(seeds: Sequence[int]) -> str:
    return ", ".join(map(str, seeds))
