"""What the curves of an explanation show, in one or two sentences that claim no more than the intervals allow."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import fmean
from typing import TYPE_CHECKING

from inlay.workflow.statistics import FEWEST, half_width

if TYPE_CHECKING:
    from inlay.workflow.explain.runs import Curves, Point

TOO_FEW = (
    f"Fewer than {FEWEST} seeds have no interval to rely on, so no difference can be tested: give --seeds 3 or more."
)
# Runs below which a rank correlation is not worth a number.
FEW = 4


def score(mean: float, interval: float | None) -> str:
    """A mean with its interval."""
    return f"{mean:.4f}" + ("" if interval is None else f" ± {interval:.4f}")


def select_best(found: Curves, points: Sequence[Point]) -> tuple[Point, str]:
    """The best point, and the split that it was selected on: validation if there is one, since test would be biased."""
    split = "validation" if all(point.validation for point in points) else "test"
    sign = 1 if found.greater_is_better else -1
    return max(points, key=lambda point: sign * (point.mean(split) or 0.0)), split


def overlap(first: tuple[float, float | None], second: tuple[float, float | None]) -> bool:
    """Whether two intervals, each a mean and half a width, have a value in common; without a width they do."""
    if first[1] is None or second[1] is None:
        return True
    return abs(first[0] - second[0]) <= first[1] + second[1]


def of_layers(found: Curves) -> str:
    """The best layer, whether it is distinguishable, which half of the model is better, and at what learning rates."""
    best = _best(
        found, found.points, lambda point: f"Layer {point.layer}", lambda near: f"layer{_many(near)} {_layers(near)}"
    )
    halves = _halves(found) if any(len(point.seeds) >= FEWEST for point in found.points) else ""
    return " ".join(part for part in (best, halves, _rates(found)) if part)


def of_samples(found: Curves) -> str:
    """The best curve at the largest training set, and what it is not distinguishable from."""
    largest = max(point.examples for point in found.points)
    points = [point for point in found.points if point.examples == largest]
    return _best(
        found,
        points,
        lambda point: f"With {largest:,} training examples {point.label}",
        lambda near: "; ".join(point.label for point in near),
    )


def _best(
    found: Curves, points: Sequence[Point], name: Callable[[Point], str], several: Callable[[list[Point]], str]
) -> str:
    """The best of some points, its test value where it was selected on validation, and what it is not distinguishable
    from: points whose intervals overlap."""
    best, split = select_best(found, points)
    told = f"{name(best)} is best by {split} ({score(*_span(best, split))})"
    if split == "validation" and best.test:
        told += f", with test {found.metric} {score(*_span(best, 'test'))}"
    if len(best.seeds) < FEWEST:
        return f"{told}. {TOO_FEW}"
    if len(points) == 1:
        return f"{told}."
    near = [point for point in points if point is not best and overlap(_span(point, split), _span(best, split))]
    return f"{told}; " + (
        f"not distinguishable from {several(near)}." if near else "it is distinguishable from every other."
    )


def _span(point: Point, split: str) -> tuple[float, float | None]:
    """A point's mean, and half of its interval where there are seeds enough for one."""
    return point.mean(split) or 0.0, point.interval(split) if len(point.seeds) >= FEWEST else None


def _layers(points: Sequence[Point]) -> str:
    return ", ".join(str(point.layer) for point in points)


def _many(points: Sequence[Point]) -> str:
    return "s" if len(points) > 1 else ""


def _halves(found: Curves) -> str:
    """Early against late blocks: the mean over each half, a value for each seed.

    The pixels (layer 0) are no block, and the middle one of an odd number is neither early nor late.
    """
    half = found.depth // 2
    early = [point for point in found.points if point.layer and point.layer <= half]
    late = [point for point in found.points if point.layer and point.layer > found.depth - half]
    if not early or not late:
        return "Only one half of the blocks was tried."
    spans = []
    for points in (early, late):
        split = "test" if points[0].test else "validation"
        seeds = set.intersection(*(set(point.seeds) for point in points))
        values = [
            fmean(dict(zip(p.seeds, getattr(p, split), strict=True))[seed] for p in points) for seed in sorted(seeds)
        ]
        if not values:
            return "Too few runs finished to compare early with late blocks."
        spans.append((fmean(values), half_width(values) if len(values) >= FEWEST else None))
    numbers = f"early {score(*spans[0])}, late {score(*spans[1])} {found.metric} on average"
    if overlap(*spans):
        return f"Early and late blocks are not distinguishable ({numbers})."
    early_better = (spans[0][0] > spans[1][0]) == found.greater_is_better
    return f"{'Early' if early_better else 'Late'} blocks are better ({numbers})."


def _rates(found: Curves) -> str:
    """The learning rates of the layers, which can decide which layer looks best."""
    if not found.tried:
        rate = found.points[0].rate
        return (
            f"Every layer ran with the same learning rate{'' if rate is None else f' ({rate:g})'}, which may suit some "
            "layers better than others: --rates chooses one for each."
        )
    by_rate: dict[float, list[Point]] = {}
    for point in found.points:
        by_rate.setdefault(point.rate or 0.0, []).append(point)
    chosen = "; ".join(
        f"{rate:g} at layer{_many(points)} {_layers(points)}" for rate, points in sorted(by_rate.items())
    )
    return f"Learning rates were selected for each layer on validation of seed {found.tried[0].seeds[0]}: {chosen}."


def of_norms(found: Curves) -> str:
    """Spearman's rank correlation of the prompt's norm with the metric, within a layer.

    Only within a layer, because layers differ in the scale of their activations. Without a p-value, because runs that
    share a learning rate, a seed or their data are not independent.
    """
    from scipy.stats import spearmanr

    best, split = select_best(found, found.points)
    told = (
        f"The best by {split} has a prompt of norm {best.norm_per_position or 0.0:.3g} a position, {best.label}, "
        f"learning rate {best.rate:g}."
    )
    by_label: dict[str, list[Point]] = {}
    for point in found.points:
        by_label.setdefault(point.label, []).append(point)
    correlations, few = [], []
    for label, points in by_label.items():
        norms = [norm for point in points for norm in point.norms_per_position]
        values = [value for point in points for value in point.test or point.validation]
        if len(norms) < FEW or len(set(norms)) < 2 or len(set(values)) < 2:
            few.append(label)
        else:
            correlations.append(f"{spearmanr(norms, values).statistic:+.2f} for {label} ({len(norms)} runs)")
    if correlations:
        told += (
            f" Rank correlation of the norm with {found.metric} over learning rates and seeds: "
            f"{'; '.join(correlations)}. It describes these runs and tests nothing: the learning rate changes both."
        )
    if few:
        told += f" Too few or too equal runs to correlate the norm with {found.metric}: {'; '.join(few)}."
    return told
