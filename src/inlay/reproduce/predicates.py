"""Predicates over a table of results, of which claims are made. Each takes `Results` and gives a `Verdict`.

Differences are paired by seed where two cells have the same number of values. They decide by their means; the interval
that is told is that of the number which decides (the smallest difference of "on every set", say). A printed table has
no seeds, so that it decides without an interval, unless it prints one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean

from inlay.reproduce.recipe import Verdict
from inlay.reproduce.results import Cell, Results, brief

Test = Callable[[Results], Verdict]


@dataclass(frozen=True)
class Gap:
    """How far one cell is above another, and half of the interval of that."""

    panel: str
    column: str
    mean: float
    half: float | None

    @property
    def interval(self) -> tuple[float, float] | None:
        return None if self.half is None else (self.mean - self.half, self.mean + self.half)

    def __str__(self) -> str:
        place = ", ".join(part for part in (self.panel, self.column) if part)
        return f"{self.mean:+.3g}" + ("" if self.half is None else f" ± {self.half:.2g}") + f" ({place})"


def difference(one: Cell, other: Cell) -> Cell:
    """One cell less another: seed by seed where they pair up, else by their means and errors."""
    if len(one.values) == len(other.values) > 1:
        return Cell(tuple(a - b for a, b in zip(one.values, other.values, strict=True)))
    errors = [cell.half for cell in (one, other)]
    known = [error for error in errors if error is not None]
    return Cell((one.mean - other.mean,), math.hypot(*known) if len(known) == 2 else None)


def gaps(
    results: Results, one: str, other: str, columns: Sequence[str] | None = None, panels: Sequence[str] | None = None
) -> list[Gap]:
    """The differences of two rows in every panel and column that has both."""
    found = []
    for panel in results.panels if panels is None else panels:
        for column in results.columns if columns is None else columns:
            cells = [results.get(row, column, panel) for row in (one, other)]
            if cells[0] is not None and cells[1] is not None:
                cell = difference(cells[0], cells[1])
                found.append(Gap(panel, column, cell.mean, cell.half))
    return found


def above(
    better: str,
    worse: str,
    *,
    columns: Sequence[str] | None = None,
    panels: Sequence[str] | None = None,
    by: float = 0.0,
) -> Test:
    """`better` is above `worse` by more than `by` wherever the table has both. For "below", exchange the two."""

    def test(results: Results) -> Verdict:
        found = gaps(results, better, worse, columns, panels)
        if not found:
            return Verdict.untested(f"the table does not have {better} beside {worse}")
        worst = min(found, key=lambda gap: gap.mean)
        count = sum(gap.mean > by for gap in found)
        told = f"in {count} of {len(found)}; least {worst}" if len(found) > 1 else str(worst)
        return Verdict.of(worst.mean > by, told, worst.interval, by)

    return test


def above_on_average(
    better: str,
    worse: str,
    *,
    columns: Sequence[str] | None = None,
    panels: Sequence[str] | None = None,
    by: float = 0.0,
) -> Test:
    """The mean over columns of `better` less `worse` is above `by`, in every panel."""

    def test(results: Results) -> Verdict:
        means = []
        for panel in results.panels if panels is None else panels:
            pairs = [
                (one, other)
                for column in (results.columns if columns is None else columns)
                if (one := results.get(better, column, panel)) and (other := results.get(worse, column, panel))
            ]
            if pairs:
                means.append(_mean_gap(panel, pairs))
        if not means:
            return Verdict.untested(f"the table does not have {better} beside {worse}")
        worst = min(means, key=lambda gap: gap.mean)
        return Verdict.of(worst.mean > by, "; ".join(map(str, means)), worst.interval, by)

    return test


def _mean_gap(panel: str, pairs: Sequence[tuple[Cell, Cell]]) -> Gap:
    """The mean of several differences; of each seed first, where all have the same seeds."""
    cells = [difference(one, other) for one, other in pairs]
    seeds = {len(cell.values) for cell in cells}
    if len(seeds) == 1 and seeds != {1}:
        whole = Cell(tuple(fmean(values) for values in zip(*(cell.values for cell in cells), strict=True)))
        return Gap(panel, f"mean of {len(cells)}", whole.mean, whole.half)
    return Gap(panel, f"mean of {len(cells)}", fmean(cell.mean for cell in cells), None)


def best_in(
    row: str,
    among: Sequence[str],
    at_least: float,
    *,
    columns: Sequence[str] | None = None,
    panels: Sequence[str] | None = None,
) -> Test:
    """`row` has the largest value among the rows in at least this share of columns (of those that have them all)."""

    def test(results: Results) -> Verdict:
        won, tried = 0, 0
        for panel in results.panels if panels is None else panels:
            for column in results.columns if columns is None else columns:
                cells = {name: results.get(name, column, panel) for name in {row, *among}}
                if all(cells.values()):
                    tried += 1
                    won += max(cells, key=lambda name: cells[name].mean) == row  # type: ignore[union-attr]
        if not tried:
            return Verdict.untested(f"the table does not have {row} beside {', '.join(among)}")
        return Verdict.of(won >= at_least * tried, f"best in {won} of {tried} (claimed: {at_least * tried:.3g})")

    return test


def near(row: str, column: str, value: float, *, panel: str = "", relative: float = 0.05) -> Test:
    """A cell has this value, to within a share of it."""

    def test(results: Results) -> Verdict:
        cell = results.get(row, column, panel)
        if cell is None:
            return Verdict.untested(f"the table has no {row}, {column}" + (f" of {panel}" if panel else ""))
        return Verdict.of(abs(cell.mean - value) <= relative * abs(value), f"{brief(cell.mean)} against {brief(value)}")

    return test


def rises(row: str, columns: Sequence[str], *, panel: str = "", slack: float = 0.0) -> Test:
    """A row's values grow along these columns, each above the one before less `slack`."""

    def test(results: Results) -> Verdict:
        cells = [(column, cell) for column in columns if (cell := results.get(row, column, panel)) is not None]
        if len(cells) < 2:
            return Verdict.untested(f"the table has fewer than two values of {row}")
        steps = [difference(after, before) for (_, before), (_, after) in pairwise(cells)]
        least = min(steps, key=lambda step: step.mean)
        values = " -> ".join(brief(cell.mean) for _, cell in cells)
        half = least.half
        interval = None if half is None else (least.mean - half, least.mean + half)
        return Verdict.of(least.mean > -slack, values, interval, -slack)

    return test


def stated(begins: str) -> Test:
    """What the lab itself judged: the claim that begins with these words."""

    def test(results: Results) -> Verdict:
        for claim in results.stated:
            if claim.claim.startswith(begins):
                if claim.holds == "cannot tell":
                    return Verdict.untested(claim.measured)
                return Verdict.of(claim.holds == "yes", claim.measured)
        return Verdict.untested("the lab did not look at it at this scale" if results.stated else "no numbers")

    return test
