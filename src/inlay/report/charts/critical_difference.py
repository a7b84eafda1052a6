"""The critical-difference diagram: methods at their mean ranks over tasks, bars over those that do not differ."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from inlay.errors import InlayError
from inlay.records.atomic import writing
from inlay.report.charts import drawing as charts
from inlay.workflow.over_tasks import OverTasks, sentences

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WIDTH, LINE, BAR = 7.5, 0.24, 0.13  # of the figure, between names, between bars; in inches
TITLE = {"signed-rank": "Wilcoxon signed-rank test", "sign": "sign test"}


def draw(found: OverTasks) -> Figure:
    """The diagram of one ranking. A bar joins neighbours of which no two differ significantly."""
    count = len(found.methods)
    left = math.ceil(count / 2)
    levels = _levels(found.cliques)
    bars = 0.12 + BAR * max([1, *(level + 1 for level in levels)])
    height = 1.05 + bars + LINE * left
    figure = charts.blank(WIDTH, height)
    axes = figure.subplots()
    span = count - 1
    axes.set_xlim(1 - 0.42 * span, count + 0.42 * span)
    axes.set_ylim(bars + LINE * left, -0.36)  # in inches, downwards from the axis
    axes.set_axis_off()
    axes.plot([1, count], [0, 0], color="black", linewidth=1)
    for tick in range(1, count + 1, max(1, math.ceil(count / 12))):
        axes.plot([tick, tick], [0, -0.06], color="black", linewidth=1)
        axes.text(tick, -0.1, str(tick), ha="center", va="bottom", fontsize=9)
    for level, (first, last) in zip(levels, found.cliques, strict=True):
        y = 0.12 + BAR * level
        ends = [found.ranks[first] - 0.012 * span, found.ranks[last] + 0.012 * span]
        axes.plot(ends, [y, y], color=charts.COLOURS[1], linewidth=4, solid_capstyle="butt")
    for place, (name, mean) in enumerate(zip(found.methods, found.ranks, strict=True)):
        on_left = place < left
        y = bars + LINE * ((place if on_left else count - 1 - place) + 0.5)
        end = 1 - 0.05 * span if on_left else count + 0.05 * span
        axes.plot([mean, mean, end], [0, y, y], color=charts.GREY, linewidth=0.8)
        axes.plot([mean], [0], "o", color=charts.COLOURS[0], markersize=4, zorder=3)
        told = f"{name}  {mean:.2f}" if on_left else f"{mean:.2f}  {name}"
        side = -0.015 if on_left else 0.015
        axes.text(end + side * span, y, told, ha="right" if on_left else "left", va="center", fontsize=9)
    said = "" if found.p is None else f"Friedman p {'< 0.001' if found.p < 0.001 else f'= {found.p:.3f}'}; "
    axes.set_title(
        f"Mean ranks over {len(found.tasks)} tasks: {found.title} (1 is best)\n"
        f"{said}bars join methods that do not differ ({TITLE[found.test]}, Holm)",
        loc="left",
        fontsize=10,
    )
    return figure


def _levels(cliques: Sequence[tuple[int, int]]) -> list[int]:
    """On which line each bar is drawn, the first where it touches no other."""
    ends: list[int] = []
    levels = []
    for first, last in cliques:
        level = next((number for number, end in enumerate(ends) if end < first), len(ends))
        ends[level:] = [last, *ends[level + 1 :]]
        levels.append(level)
    return levels


def write(found: Sequence[OverTasks], path: Path) -> list[Path]:
    """Draw every ranking, in files `path`, `path` with -2, and so on; an error where there is none to draw."""
    charts.check_format(path)
    ranked = [each for each in found if each.refusal is None]
    if not ranked:
        why = " ".join(line for each in found for line in sentences(each))
        raise InlayError(f"There is no ranking to draw in {path.name}. {why or 'There are no runs of single tasks.'}")
    written = []
    for number, each in enumerate(ranked, 1):
        place = path if number == 1 else path.with_stem(f"{path.stem}-{number}")
        with writing(place):
            place.parent.mkdir(parents=True, exist_ok=True)
            charts.save(draw(each), place)
        written.append(place)
    return written
