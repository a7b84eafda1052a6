"""Figures of explanations: one function for each kind, from the data alone."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inlay.report.charts import drawing as charts
from inlay.workflow.explain.explanation import Explanation, facts, model_name, subject_name

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from inlay.workflow.explain.models import AttentionDistance, Similarity
    from inlay.workflow.explain.runs import Curves, Point


def write(
    found: Explanation, folder: Path, command: Sequence[str] = (), picture: Callable[[Any], Figure] | None = None
) -> None:
    """Draw an explanation (by `picture`, or as its kind is) and keep figure, data and metadata in `folder`."""
    charts.keep(folder, found.what, (picture or draw)(found), found.columns, found.rows(), facts(found, command))


def draw(found: Any) -> Figure:
    """The figure of any explanation."""
    return DRAWN[found.what](found)


def _subject(found: Explanation) -> str:
    return f"{subject_name(found.spec)}, {model_name(found.spec.model)}"


def _curve(axes: Axes, x: Sequence[float], points: Sequence[Point], split: str, **look: Any) -> None:
    """A line of means with its band of intervals, and the seeds as points. Two seeds have no band: it would say more
    than they know."""
    from inlay.workflow.statistics import FEWEST

    means = [_height(point, split) for point in points]
    axes.plot(x, means, **look)
    for place, point in zip(x, points, strict=True):
        values = getattr(point, split)
        axes.scatter([place] * len(values), values, s=8, color=look["color"], alpha=0.35, linewidths=0)
    widths = [width for point in points if (width := point.interval(split)) is not None]
    if len(widths) == len(points) and min(len(getattr(point, split)) for point in points) >= FEWEST:
        low = [mean - width for mean, width in zip(means, widths, strict=True)]
        high = [mean + width for mean, width in zip(means, widths, strict=True)]
        axes.fill_between(x, low, high, color=look["color"], alpha=0.15, linewidth=0)


def _height(point: Point, split: str) -> float:
    """A point's mean; a gap in the line where there is none."""
    mean = point.mean(split)
    return math.nan if mean is None else mean


def _within_bounds(axes: Axes, found: Curves) -> None:
    """Shares lie between 0 and 1, also where the interval of two or three seeds does not know it."""
    values = [value for point in found.points for value in (*point.test, *point.validation)]
    if found.greater_is_better and all(0 <= value <= 1 for value in values):
        low, high = axes.get_ylim()
        axes.set_ylim(max(low, -0.02), min(high, 1.02))


def _seeds(points: Sequence[Point]) -> str:
    most = max(len(point.seeds) for point in points)
    return "one seed" if most == 1 else f"mean and 95 % interval of {most} seeds"


def layers(found: Curves) -> Figure:
    """The metric at every layer, on test and on validation, with other methods as lines across."""
    from matplotlib.ticker import MaxNLocator

    from inlay.workflow.explain.words import select_best

    figure = charts.blank(8.0, 4.4)
    axes = figure.subplots()
    points = found.points
    x = [float(point.layer or 0) for point in points]
    method = points[0].method
    if all(point.test for point in points):
        _curve(axes, x, points, "test", color=charts.COLOURS[0], marker="o", ms=4, label=f"{method}, test")
    if all(point.validation for point in points):
        means = [_height(point, "validation") for point in points]
        axes.plot(x, means, color=charts.GREY, linestyle=":", linewidth=1.2, label=f"{method}, validation")
    for colour, point in zip(charts.COLOURS[1:] * 2, found.baselines, strict=False):
        split = "test" if point.test else "validation"
        mean, width = _height(point, split), point.interval(split)
        told = f"{point.method}, {split}: {mean:.3f}" + ("" if width is None else f" ± {width:.3f}")
        axes.axhline(mean, color=colour, linestyle="--", linewidth=1.2, label=told)
    best, by = select_best(found, points)
    height = _height(best, "test" if best.test else "validation")
    axes.plot(
        float(best.layer or 0),
        height,
        "*",
        ms=15,
        color=charts.COLOURS[4],
        mec="black",
        label=f"best by {by}",
        zorder=5,
    )
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    _within_bounds(axes, found)
    rate = "chosen for each layer" if found.tried else "the same for every layer"
    title = f"{method} at one layer at a time: {_subject(found)}\n{_seeds(points)}; learning rate {rate}"
    zero = "; 0 is the pixels" if any(point.layer == 0 for point in points) else ""
    charts.dress(axes, title, f"layer (of {found.depth}{zero})", found.metric)
    charts.legend_beside(axes)
    return figure


def samples(found: Curves) -> Figure:
    """The metric against the training-set size, a curve a method or layer; below it the prompt's norm, if any."""
    prompted = any(point.norms for point in found.points)
    figure = charts.blank(8.0, 6.4 if prompted else 4.4)
    upper, *lower = figure.subplots(2 if prompted else 1, 1, sharex=True, squeeze=False)[:, 0]
    curves: dict[str, list[Point]] = {}
    for point in found.points:
        curves.setdefault(point.label, []).append(point)
    split = "test" if all(point.test for point in found.points) else "validation"
    for index, (label, points) in enumerate(curves.items()):
        x = [float(point.examples) for point in points]
        colour, marker = _look(index)
        _curve(upper, x, points, split, color=colour, marker=marker, ms=4, label=label)
        norms = [point.norm_per_position for point in points]
        if lower and all(norm is not None for norm in norms):
            lower[0].plot(x, norms, color=colour, marker=marker, ms=4)
    sizes = sorted({point.examples for point in found.points})
    for axes in (upper, *lower):
        axes.set_xscale("log")
        axes.set_xticks(sizes, [f"{size:,}" for size in sizes])
        axes.minorticks_off()
    _within_bounds(upper, found)
    title = f"{found.metric.capitalize()} as the training set grows: {_subject(found)}\n{_seeds(found.points)}"
    below = "training examples"
    charts.dress(upper, title, "" if lower else below, f"{split} {found.metric}")
    if lower:
        charts.dress(lower[0], "Size of the trained prompt", below, "norm per position (root mean square)")
    charts.legend_beside(upper)
    return figure


def prompt_norm(found: Curves) -> Figure:
    """The metric of every run against the norm of its trained prompt: colours for layers, marks for learning rates."""
    figure = charts.blank(8.0, 4.4)
    axes = figure.subplots()
    rates = sorted({point.rate or 0.0 for point in found.points})
    labels = list(dict.fromkeys(point.label for point in found.points))
    split = "test" if all(point.test for point in found.points) else "validation"
    for point in found.points:
        colour, _ = _look(labels.index(point.label))
        shape = charts.MARKERS[rates.index(point.rate or 0.0) % len(charts.MARKERS)]
        norms, values = point.norms_per_position, getattr(point, split)
        axes.scatter(norms, values, s=26, color=colour, marker=shape, alpha=0.8, linewidths=0)
    for index, label in enumerate(labels):
        axes.plot([], [], "o", color=_look(index)[0], label=label)
    for index, rate in enumerate(rates):
        axes.plot(
            [], [], charts.MARKERS[index % len(charts.MARKERS)], color=charts.GREY, label=f"learning rate {rate:g}"
        )
    if all(norm > 0 for point in found.points for norm in point.norms_per_position):
        axes.set_xscale("log")
    title = f"{found.metric.capitalize()} against the size of the trained prompt: {_subject(found)}\na point a run"
    charts.dress(axes, title, "norm of the trained prompt per position (root mean square)", f"{split} {found.metric}")
    charts.legend_beside(axes)
    return figure


def cka(found: Similarity) -> Figure:
    """The table of CKA as a heat map, the stems in the lower left corner."""
    import numpy as np

    table = np.array(found.values)
    figure = charts.blank(6.4, 5.4)
    axes = figure.subplots()
    low = min(0.0, float(np.nanmin(table)))
    shown = axes.imshow(table, origin="lower", cmap="magma", vmin=low, vmax=1.0, aspect="auto")
    figure.colorbar(shown, ax=axes, label="linear CKA, unbiased (1: the same up to rotation and scale)")
    if table.size <= 200:
        for (i, j), value in np.ndenumerate(table):
            axes.text(
                j, i, f"{value:.2f}", ha="center", va="center", fontsize=6, color="black" if value > 0.6 else "white"
            )
    seen = f"{found.examples:,} {found.split} examples, {found.features} features"
    left = "; mean of the usual tokens where others drown them" if any(found.outlying) else ""
    title = f"How alike layers are: {subject_name(found.spec)}\n{seen}{left}"
    charts.dress(axes, title, f"layer of {_short(found.second)} (0: stem)", f"layer of {_short(found.first)} (0: stem)")
    axes.grid(False)
    for axis, count in ((axes.xaxis, table.shape[1]), (axes.yaxis, table.shape[0])):
        axis.set_ticks(range(0, count, max(1, count // 12)))
    return figure


def attention_distance(found: AttentionDistance) -> Figure:
    """Left, heads sorted by how far they reach, a curve a block; right, the mean over heads by both definitions."""
    import numpy as np
    from matplotlib import colormaps
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize
    from matplotlib.ticker import MaxNLocator

    figure = charts.blank(10.0, 4.4)
    heads, by_layer = figure.subplots(1, 2)
    depth = len(found.weighted)
    colours, scale = colormaps["viridis"], Normalize(1, max(depth, 2))
    for layer, values in enumerate(found.weighted, start=1):
        x = range(1, len(values) + 1)
        heads.plot(x, sorted(values, reverse=True), color=colours(scale(layer)), marker="o", ms=3, linewidth=1.2)
    figure.colorbar(ScalarMappable(scale, colours), ax=heads, label="block", ticks=MaxNLocator(integer=True))
    blocks = range(1, depth + 1)
    weighted = [float(np.mean(values)) for values in found.weighted]
    largest = [float(np.mean(values)) for values in found.largest]
    for layer, values in zip(blocks, found.weighted, strict=True):
        by_layer.scatter([layer] * len(values), values, s=10, color=charts.COLOURS[0], alpha=0.35, linewidths=0)
    by_layer.plot(blocks, weighted, color=charts.COLOURS[0], marker="o", ms=4, label="weighted by attention")
    by_layer.plot(blocks, largest, color=charts.COLOURS[1], marker="s", ms=4, label="to the key attended most")
    if found.uniform:
        by_layer.plot(
            blocks, found.uniform, color=charts.GREY, linestyle="--", linewidth=1, label="attention to all alike"
        )
    for axes in (heads, by_layer):
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_ylim(bottom=0)
    where = f"{subject_name(found.spec)}, {_short(found.model)}"
    unit = f"attention distance ({found.unit})"
    charts.dress(
        heads, f"How far heads reach: {where}\n{found.examples:,} {found.split} examples", "heads, sorted", unit
    )
    charts.dress(by_layer, "Mean over heads by block\npoints are heads", "block", unit)
    by_layer.legend(frameon=False, fontsize=9)
    return figure


def _look(index: int) -> tuple[str, str]:
    """Colour and mark of the curve with this number; the same pair does not come again soon."""
    turn = index // len(charts.COLOURS)
    return charts.COLOURS[index % len(charts.COLOURS)], charts.MARKERS[(index + turn) % len(charts.MARKERS)]


def _short(label: str) -> str:
    """A subject's label without the long name of its run."""
    return re.sub(r" \(.*\)$", "", label)


DRAWN: dict[str, Callable[[Any], Figure]] = {
    "layers": layers,
    "samples": samples,
    "prompt-norm": prompt_norm,
    "cka": cka,
    "attention-distance": attention_distance,
}
