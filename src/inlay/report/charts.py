"""Pictures of a comparison, as PNG or SVG by the file's ending."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from inlay.errors import InlayError
from inlay.records.atomic import writing

if TYPE_CHECKING:
    from inlay.workflow.compare import Row

FORMATS = (".png", ".svg", ".pdf")


def check_format(path: Path) -> None:
    """Refuse an ending that no picture has, before the work is done and not after."""
    if path.suffix.lower() not in FORMATS:
        raise InlayError(f"{str(path)!r} is not a picture's name: end it in one of {', '.join(FORMATS)}.")


def comparison(rows: Sequence[Row], path: Path, title: str) -> None:
    """The metric of each method against the parameters it trains: seeds as points, means with their intervals."""
    check_format(path)
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.2), dpi=150, layout="constrained")
    axes = figure.subplots()
    for index, row in enumerate(rows):
        colour = f"C{index % 10}"
        axes.scatter([row.trained] * len(row.values), row.values, s=14, color=colour, alpha=0.35, linewidths=0)
        axes.errorbar(row.trained, row.mean, yerr=row.interval, fmt="o", color=colour, capsize=4, label=row.method)
    axes.set_xscale("log")
    axes.set_xlabel("trained parameters")
    axes.set_ylabel(f"test {rows[0].metric}")
    axes.set_title(title, loc="left")
    axes.grid(alpha=0.25)
    # Beside the axes: methods that train about as much would otherwise write their names over each other.
    axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False)
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path)
