"""Curves drawn with characters, and the same kept up to date while they grow."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Literal

from inlay.console import can_redraw, has_colour, tell

if TYPE_CHECKING:
    from rich.live import Live
    from rich.text import Text

MARKS = "*o+x#@"
STYLES = ("blue", "red", "green", "magenta", "yellow", "cyan")
Points = tuple[Sequence[float], Sequence[float]]


def cells(curves: Mapping[str, Points], width: int, height: int) -> tuple[list[list[int]], float, float, float, float]:
    """Which curve (its number, or -1) is drawn in each cell, top row first; and the limits: x, x, log10 y, log10 y.

    What cannot be on a logarithmic axis (zero, NaN, infinite) is left out. Later curves lie above earlier ones.
    """
    points = [
        (index, float(x), math.log10(y))
        for index, (xs, ys) in enumerate(curves.values())
        for x, y in zip(xs, ys, strict=True)
        if 0 < y < math.inf
    ]
    grid = [[-1] * width for _ in range(height)]
    if not points:
        return grid, 0.0, 0.0, 0.0, 0.0
    left, right = min(x for _, x, _ in points), max(x for _, x, _ in points)
    low, high = min(y for _, _, y in points), max(y for _, _, y in points)
    for index, x, y in points:
        column = round((x - left) / (right - left) * (width - 1)) if right > left else 0
        row = round((high - y) / (high - low) * (height - 1)) if high > low else 0
        grid[row][column] = index
    return grid, left, right, low, high


def chart(curves: Mapping[str, Points], title: str, width: int = 70, height: int = 16) -> Text:
    """The curves on a logarithmic axis of numbers, with their names below."""
    from rich.text import Text

    grid, left, right, low, high = cells(curves, width, height)
    drawn = Text(f"{title}\n")
    for place, row in enumerate(grid):
        level = high - (high - low) * place / max(1, height - 1)
        drawn.append(f"{10**level:8.2g} |" if place % 5 == 0 or place == height - 1 else f"{'':8} |")
        for index in row:
            drawn.append(" " if index < 0 else MARKS[index % len(MARKS)], STYLES[index % len(STYLES)])
        drawn.append("\n")
    drawn.append(f"{'':9}+{'-' * width}\n{'':10}{left:<{width // 2}.0f}{right:>{width - width // 2}.0f}\n")
    for index, (name, (_, ys)) in enumerate(curves.items()):
        last = f"{ys[-1]:.4g}" if ys else "-"
        drawn.append(f"{'':10}{MARKS[index % len(MARKS)]} {name}: {last}\n", STYLES[index % len(STYLES)])
    return drawn


class LiveCurves(AbstractContextManager["LiveCurves"]):
    """Curves that redraw themselves on a terminal at most eight times a second; elsewhere a line every few seconds."""

    def __init__(self, title: str, every: float = 5.0) -> None:
        self.title, self.every, self._last = title, every, 0.0
        self._latest: Mapping[str, Points] = {}
        self._live: Live | None = None
        if can_redraw(sys.stderr):
            from rich.console import Console
            from rich.live import Live

            colours: Literal["auto"] | None = "auto" if has_colour(sys.stderr) else None
            console = Console(stderr=True, highlight=False, color_system=colours)
            self._live = Live(console=console, auto_refresh=False)

    def __enter__(self) -> LiveCurves:
        if self._live is not None:
            self._live.start()
        return self

    def update(self, curves: Mapping[str, Points], *, now: bool = False) -> None:
        """Show the curves as they are, unless that was just done (`now`: all the same)."""
        self._latest = curves
        pause = 0.125 if self._live is not None else self.every
        if not now and time.monotonic() - self._last < pause:
            return
        self._last = time.monotonic()
        if self._live is not None:
            self._live.update(chart(curves, self.title), refresh=True)
            return
        at = max((xs[-1] for xs, _ in curves.values() if xs), default=0)
        told = ", ".join(f"{name} {ys[-1]:.4g}" for name, (_, ys) in curves.items() if ys)
        tell(f"{self.title}: step {at:g}: {told}")

    def __exit__(self, *error: object) -> None:
        if self._latest:
            self.update(self._latest, now=True)  # the end is to be seen too
        if self._live is not None:
            self._live.stop()
