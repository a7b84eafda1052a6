"""What a sweep shows, in one or two sentences that claim no more than the intervals allow."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import TYPE_CHECKING

from inlay.workflow.compare import half_width

if TYPE_CHECKING:
    from inlay.workflow.explain_runs import Point, Sweep

ONE_SEED = "One seed has no interval, so differences cannot be told from chance: give --seeds 3 or more."


def score(mean: float, interval: float | None) -> str:
    """A mean with its interval."""
    return f"{mean:.4f}" + ("" if interval is None else f" ± {interval:.4f}")


def selected(found: Sweep, points: Sequence[Point]) -> tuple[Point, str]:
    """The best point, and the split that says so: validation if there is one; choosing on test would flatter."""
    split = "validation" if all(point.validation for point in points) else "test"
    sign = 1 if found.greater_is_better else -1
    return max(points, key=lambda point: sign * (point.mean(split) or 0.0)), split


def overlap(first: tuple[float, float | None], second: tuple[float, float | None]) -> bool:
    """Whether two intervals, each a mean and half a width, have a value in common; without a width they do."""
    if first[1] is None or second[1] is None:
        return True
    return abs(first[0] - second[0]) <= first[1] + second[1]


def of_layers(found: Sweep) -> str:
    """The best layer, whether it stands out, and which half of the model is the better place."""
    best, split = selected(found, found.points)
    told = f"Layer {best.layer} is best by {split} ({score(best.mean(split) or 0.0, best.interval(split))})"
    if split == "validation" and best.test:
        told += f", with test {found.metric} {score(best.mean() or 0.0, best.interval())}"
    if len(best.seeds) < 2:
        return f"{told}. {ONE_SEED}"
    near = [
        str(point.layer)
        for point in found.points
        if point is not best and overlap(_span(point, split), _span(best, split))
    ]
    several = f"layer{'s' if len(near) > 1 else ''} {', '.join(near)}"
    told += f"; not distinguishable from {several}. " if near else "; it stands out from every other. "
    return told + _halves(found)


def _span(point: Point, split: str) -> tuple[float, float | None]:
    return point.mean(split) or 0.0, point.interval(split)


def _halves(found: Sweep) -> str:
    """Early against late: the mean over the layers of each half, a value a seed."""
    early = [point for point in found.points if (point.layer or 0) <= found.depth / 2]
    late = [point for point in found.points if (point.layer or 0) > found.depth / 2]
    if not early or not late:
        return "Only one half of the model was tried."
    spans = []
    for half in (early, late):
        split = "test" if half[0].test else "validation"
        seeds = set.intersection(*(set(point.seeds) for point in half))
        values = [
            fmean(dict(zip(p.seeds, getattr(p, split), strict=True))[seed] for p in half) for seed in sorted(seeds)
        ]
        if not values:
            return "Too few runs finished to compare early with late layers."
        spans.append((fmean(values), half_width(values)))
    numbers = f"early {score(*spans[0])}, late {score(*spans[1])} {found.metric} on average"
    if overlap(*spans):
        return f"Early and late layers are not distinguishable ({numbers})."
    early_better = (spans[0][0] > spans[1][0]) == found.greater_is_better
    return f"{'Early' if early_better else 'Late'} layers are better ({numbers})."


def of_samples(found: Sweep) -> str:
    """The best curve at the largest training set, and what it cannot be told from."""
    largest = max(point.examples for point in found.points)
    points = [point for point in found.points if point.examples == largest]
    best, split = selected(found, points)
    told = (
        f"With {largest:,} training examples {best.label} is best by {split} "
        f"({score(best.mean(split) or 0.0, best.interval(split))})"
    )
    if split == "validation" and best.test:
        told += f", with test {found.metric} {score(best.mean() or 0.0, best.interval())}"
    if len(best.seeds) < 2:
        return f"{told}. {ONE_SEED}"
    near = [p.label for p in points if p is not best and overlap(_span(p, split), _span(best, split))]
    if len(points) == 1:
        return told + "."
    return told + (f"; not distinguishable from {'; '.join(near)}." if near else "; it stands out from every other.")


def of_norms(found: Sweep) -> str:
    """Whether larger prompts go with better or worse results: Spearman's rank correlation over all runs."""
    from scipy.stats import spearmanr

    pairs = [
        (norm, value)
        for point in found.points
        for norm, value in zip(point.norms, point.test or point.validation, strict=True)
    ]
    norms, values = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    best, split = selected(found, found.points)
    told = (
        f"The best by {split} has a prompt of norm {best.norm or 0.0:.3g} "
        f"({best.norm_per_position or 0.0:.3g} a position), {best.label}, learning rate {best.rate:g}."
    )
    if len(pairs) < 4 or len(set(norms)) < 2 or len(set(values)) < 2:
        return f"{told} {len(pairs)} runs are too few to say how the norm and {found.metric} go together."
    correlation, chance = spearmanr(norms, values)
    verdict = (
        f"go together with rank correlation {correlation:+.2f}"
        if chance < 0.05
        else f"show no rank correlation beyond chance ({correlation:+.2f})"
    )
    return f"{told} Over {len(pairs)} runs the norm and {found.metric} {verdict} (p = {chance:.2g})."
