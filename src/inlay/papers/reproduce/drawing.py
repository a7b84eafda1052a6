"""Pictures of results: curves over numbered columns, one plot a panel, the paper's dashed where it prints them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from inlay.papers.reproduce.predicates import numbered
from inlay.papers.reproduce.results import ResultCell, Results

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ANY = "any"  # the column of a row that has one value for all: drawn as a line across


def curves(
    title: str, x: str, y: str, *, log_x: bool = False, log_y: bool = False
) -> Callable[[Results | None, Results], Figure]:
    """A picture with a line for each row, against the numbers that name the columns. `y` "": the panel's name."""

    def draw(printed: Results | None, ours: Results) -> Figure:
        from inlay.report.charts import drawing as charts

        panels = ours.panels or [""]
        figure = charts.blank(1.5 + 4.8 * len(panels), 4.2)
        plots = figure.subplots(1, len(panels), squeeze=False)[0]
        for axes, panel in zip(plots, panels, strict=True):
            for index, row in enumerate(ours.rows(panel)):
                colour, marker, filled = style(index)
                _line(axes, ours, panel, row, colour, marker, filled)
                if printed is not None and numbered(printed, row, panel):
                    places, cells = zip(*numbered(printed, row, panel), strict=True)
                    axes.plot(places, [cell.mean for cell in cells], color=colour, ls="--", label=f"{row}, paper")
            if log_x:
                axes.set_xscale("log")
            if log_y:
                axes.set_yscale("log")
            charts.dress(axes, f"{title}: {panel}" if panel and y else title, x, y or panel)
            axes.legend(frameon=False, fontsize=8)
        return figure

    return draw


def style(index: int) -> tuple[str, str, bool]:
    """The colour and the marker of a line, and whether it is filled: no two of the first 98 are alike. After all
    colours the markers move on by one, and every other round they are hollow."""
    from inlay.report.charts import drawing as charts

    turn, place = divmod(index, len(charts.COLOURS))
    return charts.COLOURS[place], charts.MARKERS[(place + turn) % len(charts.MARKERS)], turn % 2 == 0


def _line(axes: Axes, results: Results, panel: str, row: str, colour: str, marker: str, filled: bool) -> None:
    """A curve with its intervals; a row with one value for all as a line across."""
    across = results.get(row, ANY, panel)
    if across is not None:
        axes.axhline(across.mean, color=colour, lw=1, ls=":", label=row)
        return
    curve = numbered(results, row, panel)
    if not curve:
        return
    places = [place for place, _ in curve]
    means = [cell.mean for _, cell in curve]
    dash = "-" if filled else "-."
    face = colour if filled else "white"
    axes.plot(places, means, color=colour, ls=dash, marker=marker, ms=4, mfc=face, label=row)
    if all(cell.half is not None for _, cell in curve):
        low, high = zip(*(_span(cell) for _, cell in curve), strict=True)
        axes.fill_between(places, low, high, color=colour, alpha=0.15, linewidth=0)


def _span(cell: ResultCell) -> tuple[float, float]:
    half = cell.half or 0.0
    return cell.mean - half, cell.mean + half
