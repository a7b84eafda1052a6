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
        means = _mean_gaps(results, better, worse, columns, panels)
        if not means:
            return Verdict.untested(f"the table does not have {better} beside {worse}")
        worst = min(means, key=lambda gap: gap.mean)
        return Verdict.of(worst.mean > by, "; ".join(map(str, means)), worst.interval, by)

    return test


def _mean_gaps(
    results: Results, one: str, other: str, columns: Sequence[str] | None, panels: Sequence[str] | None
) -> list[Gap]:
    """The mean over columns of the difference of two rows, panel by panel."""
    means = []
    for panel in results.panels if panels is None else panels:
        pairs = [
            (mine, theirs)
            for column in (results.columns if columns is None else columns)
            if (mine := results.get(one, column, panel)) and (theirs := results.get(other, column, panel))
        ]
        if pairs:
            means.append(_mean_gap(panel, pairs))
    return means


def _mean_gap(panel: str, pairs: Sequence[tuple[Cell, Cell]]) -> Gap:
    """The mean of several differences; of each seed first, where all have the same seeds."""
    whole = together([difference(one, other) for one, other in pairs])
    return Gap(panel, f"mean of {len(pairs)}", whole.mean, whole.half)


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
        return Verdict.of(least.mean > -slack, values, least.interval, -slack)

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


def within(
    one: str, other: str, most: float, *, columns: Sequence[str] | None = None, panels: Sequence[str] | None = None
) -> Test:
    """Two rows differ by at most this much wherever the table has both."""

    def test(results: Results) -> Verdict:
        found = gaps(results, one, other, columns, panels)
        if not found:
            return Verdict.untested(f"the table does not have {one} beside {other}")
        worst = max(found, key=lambda gap: abs(gap.mean))
        return Verdict.of(
            abs(worst.mean) <= most, f"largest {worst}", worst.interval, math.copysign(most, worst.mean or 1.0)
        )

    return test


def within_on_average(
    one: str, other: str, most: float, *, columns: Sequence[str] | None = None, panels: Sequence[str] | None = None
) -> Test:
    """Two rows differ by at most this much in their means over columns, in every panel."""

    def test(results: Results) -> Verdict:
        means = _mean_gaps(results, one, other, columns, panels)
        if not means:
            return Verdict.untested(f"the table does not have {one} beside {other}")
        worst = max(means, key=lambda gap: abs(gap.mean))
        limit = math.copysign(most, worst.mean or 1.0)
        return Verdict.of(abs(worst.mean) <= most, "; ".join(map(str, means)), worst.interval, limit)

    return test


def above_at_most(
    one: str, other: str, most: float, *, columns: Sequence[str] | None = None, panels: Sequence[str] | None = None
) -> Test:
    """A row is above another by at most this much: more of something gains little."""

    def test(results: Results) -> Verdict:
        found = gaps(results, one, other, columns, panels)
        if not found:
            return Verdict.untested(f"the table does not have {one} beside {other}")
        most_gained = max(found, key=lambda gap: gap.mean)
        return Verdict.of(most_gained.mean <= most, f"largest {most_gained}", most_gained.interval, most)

    return test


def ranked(
    row: str,
    among: Sequence[str],
    best: int,
    worst: int,
    *,
    columns: Sequence[str],
    lowest: bool = False,
    panel: str = "",
) -> Test:
    """In every column `row` has a place from `best` to `worst` among the rows; 1 is the largest, or the `lowest`."""

    def test(results: Results) -> Verdict:
        places = {}
        for column in columns:
            mine = results.get(row, column, panel)
            others = [cell for name in among if name != row and (cell := results.get(name, column, panel)) is not None]
            if mine is not None and others:
                ahead = [cell.mean < mine.mean if lowest else cell.mean > mine.mean for cell in others]
                places[column] = (1 + sum(ahead), 1 + len(others))
        if not places:
            return Verdict.untested(f"the table does not have {row} beside the others")
        told = ", ".join(f"{place} of {count} ({column})" for column, (place, count) in places.items())
        return Verdict.of(all(best <= place <= worst for place, _ in places.values()), told)

    return test


def times(one: str, other: str, column: str, at_least: float, *, panel: str = "") -> Test:
    """A cell is at least so many times another."""

    def test(results: Results) -> Verdict:
        cells = [results.get(row, column, panel) for row in (one, other)]
        if cells[0] is None or cells[1] is None:
            return Verdict.untested(f"the table does not have {one} beside {other}")
        ratio = cells[0].mean / cells[1].mean
        return Verdict.of(ratio >= at_least, f"{ratio:.3g} times")

    return test


def mean_of_columns(name: str = "Average", tolerance: float = 0.01) -> Test:
    """A column is the mean of all others, row by row: whether a printed table agrees with itself."""

    def test(results: Results) -> Verdict:
        off = {}
        if any(len(cell.values) > 1 for cell in results.cells.values()):
            return Verdict.untested("it is about the print: ours are computed")
        for panel in results.panels:
            for row in results.rows(panel):
                others = [
                    cell.mean
                    for (where, who, column), cell in results.cells.items()
                    if (where, who) == (panel, row) and column != name
                ]
                said = results.get(row, name, panel)
                if said is not None and len(others) > 1:
                    off[", ".join(part for part in (panel, row) if part)] = said.mean - fmean(others)
        if not off:
            return Verdict.untested(f"the table has no {name} of several columns")
        worst = max(off, key=lambda place: abs(off[place]))
        wrong = sum(abs(gap) > tolerance for gap in off.values())
        return Verdict.of(wrong == 0, f"off in {wrong} of {len(off)}; most by {off[worst]:+.2f} ({worst})")

    return test


def prefers(row: str, end: str, *, panel: str = "", columns: Sequence[str] | None = None) -> Test:
    """Along its numbered columns a row is higher in the `early` or in the `late` half, by the means of the halves.

    Columns that are not numbers, and the middle one of an odd number, are left out.
    """
    assert end in ("early", "late")

    def test(results: Results) -> Verdict:
        curve = numbered(results, row, panel)
        if columns is not None:
            curve = [(place, cell) for place, cell in curve if brief(place) in columns]
        if len(curve) < 2:
            return Verdict.untested(f"the table has no curve of {row}" + (f" on {panel}" if panel else ""))
        half = len(curve) // 2
        halves = [together([cell for _, cell in part]) for part in (curve[:half], curve[-half:])]
        gap = difference(halves[1], halves[0]) if end == "late" else difference(halves[0], halves[1])
        best = max(curve, key=lambda entry: entry[1].mean)[0]
        told = f"the {end} half is above the other by {gap.mean:+.3g}; best at {brief(best)} of {brief(curve[-1][0])}"
        return Verdict.of(gap.mean > 0, told, gap.interval)

    return test


def numbered(results: Results, row: str, panel: str = "") -> list[tuple[float, Cell]]:
    """The cells of a row whose columns are numbers, in their order: a curve."""
    found = []
    for column in results.columns:
        cell = results.get(row, column, panel)
        if cell is not None and column.replace(".", "", 1).replace(",", "").isdigit():
            found.append((float(column.replace(",", "")), cell))
    return sorted(found, key=lambda entry: entry[0])


def together(cells: Sequence[Cell]) -> Cell:
    """The mean of several cells, seed by seed where they have the same seeds; else with errors as if independent."""
    if len({len(cell.values) for cell in cells}) == 1 and len(cells[0].values) > 1:
        return Cell(tuple(map(fmean, zip(*(cell.values for cell in cells), strict=True))))
    errors = [cell.half for cell in cells if cell.half is not None]
    error = math.hypot(*errors) / len(cells) if len(errors) == len(cells) else None
    return Cell((fmean(cell.mean for cell in cells),), error)
