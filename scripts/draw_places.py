"""Draws what scripts/document_places.py found: the way through a block, and beside each place the methods there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.patches import FancyBboxPatch

WIDTH, LEFT, RIGHT, ROW, CHIP, GAP = 8.8, 0.55, 3.35, 0.42, 0.27, 0.09  # inches
LABELS = {
    "the pixels": "image",
    "embedding": "embedding",
    "the first tokens": "tokens before block 1",
    "what enters a block": "tokens entering a block",
    "norm 1": "norm",
    "norm 2": "norm",
    "query": "query",
    "key": "key",
    "value": "value",
    "attention": "attention",
    "output": "output projection",
    "up": "feed-forward, up",
    "down": "feed-forward, down",
    "final norm": "final norm",
}
RESNET = {
    "embedding": "first convolution and norm",
    "what enters a block": "feature map entering a block",
    "convolution 1": "convolution 1 x 1",
    "convolution 2": "convolution 3 x 3",
    "convolution 3": "convolution 1 x 1",
    "norm 3": "norm",
    "shortcut convolution": "shortcut: convolution",
    "shortcut norm": "shortcut: norm",
}
OUTSIDE = ("the pixels", "embedding", "the first tokens", "final norm")  # not in the block
BESIDE = ("query", "key", "value")  # side by side: each reads what comes before, none reads another
APART = ("shortcut convolution", "shortcut norm")  # a way of their own, from what enters the block
TITLES = {"transformer": "A transformer", "resnet": "A ResNet"}


@dataclass(frozen=True)
class Colours:
    """A theme."""

    paper: str
    ink: str
    faint: str
    block: str
    part: str
    ours: str
    pefts: str


THEMES = {
    "light": Colours("#ffffff", "#1f2328", "#8a9199", "#eef2f4", "#ffffff", "#b2dfdb", "#ffe0b2"),
    "dark": Colours("#1e2129", "#e6e8ec", "#8a9199", "#2a2f3a", "#1e2129", "#00695c", "#8d5a12"),
}


def draw(places: Mapping[str, Mapping[str, Sequence[str]]], of_peft: set[str], folder: Path) -> None:
    """One picture for each kind of model and each theme; `of_peft` are the methods that PEFT itself has."""
    folder.mkdir(parents=True, exist_ok=True)
    for kind, at in places.items():
        for name, colours in THEMES.items():
            _Picture(kind, at, of_peft, colours).save(folder / f"places-{kind}-{name}.png")


class _Picture:
    def __init__(self, kind: str, at: Mapping[str, Sequence[str]], of_peft: set[str], colours: Colours) -> None:
        self.at, self.of_peft, self.colours = at, of_peft, colours
        self.labels = LABELS | (RESNET if kind == "resnet" else {})
        self.figure, self.axes = pyplot.subplots(figsize=(WIDTH, 1), dpi=160)
        lines = {place: self._lines(names) for place, names in at.items()}
        heights = {place: max(ROW, len(rows) * (CHIP + GAP) + GAP) for place, rows in lines.items()}
        inside = [place for place in at if place not in OUTSIDE]
        height = sum(heights.values()) + 1.75
        self.figure.set_size_inches(WIDTH, height)
        self.figure.patch.set_facecolor(colours.paper)
        self.axes.set(xlim=(0, WIDTH), ylim=(height, 0), aspect="equal")
        self.axes.axis("off")
        self.figure.subplots_adjust(0, 0, 1, 1)
        self._text(LEFT - 0.25, 0.3, TITLES[kind], size=13, weight="bold")
        self._legend()
        middles = self._parts(heights, inside)
        self._ways(middles)
        self._text(
            LEFT - 0.25,
            height - 0.22,
            "Residual sums are not drawn. Every method trains the new head, too; full trains everything, linear-probe "
            "the head alone.",
            size=8,
            colour=colours.faint,
        )

    def _parts(self, heights: Mapping[str, float], inside: Sequence[str]) -> dict[str, float]:
        """Draw the boxes with their methods, from the top down; the middle of each."""
        y, middles = 0.62, {}
        for place in self.at:
            if place == inside[0]:
                self._frame(y + 0.1, sum(heights[each] for each in inside) + 0.3)
                y += 0.37
            middles[place] = y + heights[place] / 2
            left = LEFT + 0.5 if place in BESIDE else LEFT
            self._part(self.labels[place], left, middles[place])
            self._row(self._lines(self.at[place]), middles[place])
            y += heights[place] + (0.12 if place == inside[-1] else 0.0)
        return middles

    def _ways(self, middles: Mapping[str, float]) -> None:
        """Draw what leads from box to box."""
        order, centre, rail = list(middles), (LEFT + RIGHT) / 2, LEFT + 0.22
        for before, after in pairwise(order):
            start, end = middles[before] + 0.15, middles[after] - 0.15
            if before in BESIDE and after in BESIDE:
                continue
            if after in BESIDE:
                last = max(middles[place] for place in BESIDE)
                self._line((rail, rail), (start, last))
                for place in BESIDE:
                    self._arrow((rail, middles[place]), (LEFT + 0.5, middles[place]))
            elif after in APART and before not in APART:
                side, entry = LEFT - 0.13, middles["what enters a block"]
                self._line((LEFT, side, side), (entry, entry, middles[after]))
                self._arrow((side, middles[after]), (LEFT, middles[after]))
            else:
                self._arrow((centre, start), (centre, end))

    def save(self, path: Path) -> None:
        """Write the picture."""
        self.figure.savefig(path, facecolor=self.colours.paper, metadata={"Software": None})
        pyplot.close(self.figure)

    def _width(self, name: str) -> float:
        drawn = self.axes.text(0, 0, name, fontsize=8.5)
        box = drawn.get_window_extent(self.figure.canvas.get_renderer())  # type: ignore[attr-defined]
        drawn.remove()
        return box.width / self.figure.dpi + 0.2

    def _lines(self, names: Sequence[str]) -> list[list[tuple[str, float]]]:
        """Names in lines that fit, each with its width."""
        rows: list[list[tuple[str, float]]] = [[]]
        used = 0.0
        for name in names:
            width = self._width(name)
            if rows[-1] and used + width > WIDTH - RIGHT - 0.65:
                rows.append([])
                used = 0.0
            rows[-1].append((name, width))
            used += width + GAP
        return rows

    def _row(self, rows: list[list[tuple[str, float]]], middle: float) -> None:
        y = middle - (len(rows) * (CHIP + GAP) - GAP) / 2
        self.axes.plot((RIGHT, RIGHT + 0.32), (middle, middle), color=self.colours.faint, linewidth=0.8)
        for row in rows:
            x = RIGHT + 0.4
            for name, width in row:
                self._chip(x, y, width, name)
                x += width + GAP
            y += CHIP + GAP

    def _chip(self, x: float, y: float, width: float, name: str) -> None:
        colour = self.colours.pefts if name in self.of_peft else self.colours.ours
        self._box(x, y, width, CHIP, colour, "none", 0.08)
        self._text(x + width / 2, y + CHIP / 2, name, size=8.5, align="center")

    def _part(self, label: str, left: float, middle: float) -> None:
        self._box(left, middle - 0.15, RIGHT - left, 0.3, self.colours.part, self.colours.faint, 0.05)
        self._text((left + RIGHT) / 2, middle, label, size=9.5, align="center")

    def _frame(self, y: float, height: float) -> None:
        self._box(LEFT - 0.25, y, RIGHT - LEFT + 0.45, height + 0.02, self.colours.block, "none", 0.1)
        self._text(LEFT - 0.13, y + 0.14, "every block", size=8, colour=self.colours.faint)

    def _legend(self) -> None:
        for x, label, colour in ((4.6, "of inlay", self.colours.ours), (5.8, "of PEFT", self.colours.pefts)):
            self._box(x, 0.21, 0.2, 0.18, colour, "none", 0.05)
            self._text(x + 0.28, 0.3, label, size=8.5)

    def _line(self, x: Sequence[float], y: Sequence[float]) -> None:
        self.axes.plot(x, y, color=self.colours.faint, linewidth=0.9, zorder=1.5)

    def _arrow(self, start: tuple[float, float], end: tuple[float, float]) -> None:
        style = {"arrowstyle": "-|>", "color": self.colours.faint, "linewidth": 0.9, "shrinkA": 0, "shrinkB": 0}
        self.axes.annotate("", end, start, arrowprops=style | {"mutation_scale": 7}, zorder=1.5)

    def _box(self, x: float, y: float, width: float, height: float, colour: str, edge: str, corner: float) -> None:
        style = f"round,pad=0,rounding_size={corner}"
        self.axes.add_patch(
            FancyBboxPatch((x, y), width, height, boxstyle=style, facecolor=colour, edgecolor=edge, linewidth=0.8)
        )

    def _text(self, x: float, y: float, text: str, *, size: float, align: str = "left", **style: Any) -> None:
        colour = style.pop("colour", self.colours.ink)
        self.axes.text(x, y, text, fontsize=size, color=colour, ha=align, va="center", zorder=4, **style)
