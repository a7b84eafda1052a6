"""Figures of results: how they look, and the one place that saves them with their data.

Figures are made without pyplot, which keeps figures alive and has a state of its own. Colours are Okabe and Ito's,
which people with any kind of colour vision can distinguish.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inlay.errors import InlayError
from inlay.records.atomic import write_folder, write_json, write_text, writing
from inlay.records.tables import csv_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from inlay.workflow.comparison import Row

FORMATS = (".png", ".svg", ".pdf")
KEPT = (".png", ".svg", ".csv", ".json")
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = "osD^vPX"
GREY = "#666666"
Value = str | int | float | None


def check_format(path: Path) -> None:
    """Refuse an ending that no figure has, before the work is done."""
    if path.suffix.lower() not in FORMATS:
        raise InlayError(f"{str(path)!r} is not the name of a figure: end it in one of {', '.join(FORMATS)}.")


def blank(width: float = 7.0, height: float = 4.2) -> Figure:
    """An empty figure."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), dpi=150, layout="constrained")


def dress(axes: Axes, title: str, x: str, y: str) -> None:
    """What every chart has: a title that says what is shown, and axes with units."""
    axes.set_title(title, loc="left", fontsize=10)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(alpha=0.25)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def legend_beside(axes: Axes) -> None:
    """The legend beside the axes, where it hides no point."""
    axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False, fontsize=9)


def check_folder(folder: Path, name: str) -> None:
    """Find out before the work that its result can be written, and that nothing of another's would be lost by it."""
    if folder.exists() and not folder.is_dir():
        raise InlayError(f"{str(folder)!r} is a file: choose another folder with --out.")
    expected = {f"{name}{ending}" for ending in KEPT}
    others = sorted(path.name for path in folder.iterdir() if path.name not in expected) if folder.is_dir() else []
    if others:
        raise InlayError(
            f"{str(folder)!r} holds other files ({', '.join(others[:3])}), and the result would replace the folder. "
            "Choose another folder with --out, or move them away."
        )
    with writing(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
    if not os.access(folder.parent, os.W_OK):
        raise InlayError(f"No permission to write into {folder.parent}. Choose a folder of your own with --out.")


def keep(
    folder: Path,
    name: str,
    figure: Figure,
    columns: Sequence[str],
    rows: Sequence[Sequence[Value]],
    facts: Mapping[str, Any],
) -> None:
    """Put `name`.png, .svg, .csv and .json into `folder`, all or nothing.

    `facts` go into the JSON: what was measured, with what, by which command. An earlier result there is replaced where
    the same command made it; one of another command is put aside, under a number.
    """
    check_folder(folder, name)
    if _command_in(folder / f"{name}.json") not in (None, facts.get("command")):
        numbered = (folder.with_name(f"{folder.name}-{number}") for number in itertools.count(1))
        folder.rename(next(place for place in numbered if not place.exists()))

    def fill(place: Path) -> None:
        save(figure, place / f"{name}.png")
        save(figure, place / f"{name}.svg")
        write_text(place / f"{name}.csv", csv_text([columns, *rows], "\r\n"))
        write_json(place / f"{name}.json", facts)

    write_folder(folder, fill)


def _command_in(path: Path) -> Any:
    """The command on record of an earlier result; None where there is none."""
    try:
        return json.loads(path.read_text(encoding="utf-8")).get("command")
    except (OSError, ValueError):
        return None


def save(figure: Figure, path: Path) -> None:
    """Save a figure by its ending; the same figure is the same file, with no date and no random names in it."""
    from matplotlib import rc_context

    metadata = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}.get(path.suffix.lower())
    with rc_context({"svg.hashsalt": "inlay"}):
        figure.savefig(path, metadata=metadata)


def comparison(rows: Sequence[Row], path: Path, title: str) -> None:
    """The metric of each method against the parameters it trains: seeds as points, means with their intervals."""
    check_format(path)
    figure = blank()
    axes = figure.subplots()
    for index, row in enumerate(rows):
        colour = COLOURS[index % len(COLOURS)]
        shape = MARKERS[index // len(COLOURS) % len(MARKERS)]
        axes.scatter([row.trained] * len(row.values), row.values, s=14, color=colour, alpha=0.35, linewidths=0)
        axes.errorbar(row.trained, row.mean, yerr=row.interval, fmt=shape, color=colour, capsize=4, label=row.method)
    axes.set_xscale("log")
    dress(axes, title, "trained parameters", f"test {rows[0].metric}")
    # Methods that train about as much would otherwise write their names over each other.
    legend_beside(axes)
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        save(figure, path)
