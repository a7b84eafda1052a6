"""Predicates over a table of results, of which claims are made. Each takes `Results` and gives a `Verdict`.

Differences are paired by seed where two cells have the same number of values. They decide by their means; the interval
that is told is that of the number which decides (the smallest difference of "on every set", say). Whether a verdict is
clear is for certainty.py. A printed table has no seeds and decides without an interval, unless its ± is known to be
one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from statistics import fmean

from inlay.papers.reproduce.certainty import Evidence, Gap, clear, every, lone
from inlay.papers.reproduce.recipe import FAILS, HOLDS, ONE_SEED, Verdict
from inlay.papers.reproduce.results import AVERAGES, DIFFERS, MEAN_OF, ResultCell, Results, brief

Test = Callable[[Results], Verdict]


def difference(one: ResultCell, other: ResultCell) -> ResultCell:
    """One cell less another: seed by seed where they pair up, else by their means and errors."""
    if len(one.values) == len(other.values) > 1:
        return ResultCell(tuple(a - b for a, b in zip(one.values, other.values, strict=True)))
    lone = one.lone or other.lone
    known = [cell.half for cell in (one, other) if cell.half is not None]
    # Beside what was repeated, one value that is not lone is exact: a count, an untrained model.
    exact = len(known) == 1 and max(len(one.values), len(other.values)) > 1
    error = None if lone or not (len(known) == 2 or exact) else math.hypot(*known)
    return ResultCell((one.mean - other.mean,), error, lone)


def gaps(
    results: Results, one: str, other: str, columns: Sequence[str] | None = None, panels: Sequence[str] | None = None
) -> list[Gap]:
    """The differences of two rows in every panel and column that has both."""
    found = []
    for panel in results.panels if panels is None else panels:
        for column in asked(results, columns, panel):
            cells = [results.get(row, column, panel) for row in (one, other)]
            if cells[0] is not None and cells[1] is not None:
                cell = difference(cells[0], cells[1])
                found.append(Gap(panel, column, cell.mean, cell.half, cell.lone))
    return found


def asked(results: Results, columns: Sequence[str] | None, panel: str) -> list[str]:
    """The columns that a claim is about; by default all but means. Where a table has no Average as the paper's, but a
    mean of other columns, a claim on average is about that one, and is told with its name."""
    if columns is None:
        return [name for name in results.columns if name not in AVERAGES and not name.startswith(MEAN_OF)]
    own = [column for where, _, column in results.cells if where == panel]
    means = [column for column in dict.fromkeys(own) if column.startswith(MEAN_OF)]
    found = ([column] if column not in AVERAGES or column in own else means for column in columns)
    return [column for columns_found in found for column in columns_found]


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
        return every(told, [Evidence(gap, gap.mean > by, low=by) for gap in found], worst.interval)

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
        parts = [Evidence(gap, gap.mean > by, low=by) for gap in means]
        return every("; ".join(map(str, means)), parts, worst.interval)

    return test


def _mean_gaps(
    results: Results, one: str, other: str, columns: Sequence[str] | None, panels: Sequence[str] | None
) -> list[Gap]:
    """The mean over columns of the difference of two rows, panel by panel."""
    means = []
    for panel in results.panels if panels is None else panels:
        pairs = {
            column: difference(mine, theirs)
            for column in asked(results, columns, panel)
            if (mine := results.get(one, column, panel)) and (theirs := results.get(other, column, panel))
        }
        if pairs:
            whole = together(list(pairs.values()))
            name = f"{MEAN_OF}{len(pairs)}" if len(pairs) > 1 else next(iter(pairs))
            means.append(Gap(panel, name, whole.mean, whole.half, whole.lone))
    return means


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
        tried = []
        for panel in results.panels if panels is None else panels:
            for column in results.columns if columns is None else columns:
                mine, others = rivals(results, row, among, column, panel)
                if mine is not None and all(others.values()):
                    gaps_here = [difference(mine, cell) for cell in others.values() if cell is not None]
                    tried.append([Evidence(gap, gap.mean >= 0, low=0) for gap in gaps_here])
        if not tried:
            return Verdict.untested(f"the table does not have {row} beside {', '.join(among)}")
        won = [all(part.passes for part in parts) for parts in tried]
        sure = [clear(parts) for parts in tried]
        needed = at_least * len(tried)
        holds = sum(won) >= needed
        # What is open in a column may go either way.
        least = sum(yes and known is not False for yes, known in zip(won, sure, strict=True))
        most = least + sure.count(False)
        settled = None if not any(known is not None for known in sure) else least >= needed or most < needed
        told = f"best in {sum(won)} of {len(tried)} (claimed: {needed:.3g})"
        return Verdict(
            HOLDS if holds else FAILS,
            told + (f"; {least} to {most} by the intervals" if least < most else ""),
            None,
            settled,
            lone([part for parts in tried for part in parts], settled),
        )

    return test


def rivals(
    results: Results, row: str, among: Sequence[str], column: str, panel: str
) -> tuple[ResultCell | None, dict[str, ResultCell | None]]:
    """A row's cell, and those of the others that it is held against."""
    return results.get(row, column, panel), {name: results.get(name, column, panel) for name in among if name != row}


def near(row: str, column: str, value: float, *, panel: str = "", relative: float = 0.05) -> Test:
    """A cell has this value, to within a share of it."""

    def test(results: Results) -> Verdict:
        cell = results.get(row, column, panel)
        if cell is None:
            return Verdict.untested(f"the table has no {row}, {column}" + (f" of {panel}" if panel else ""))
        slack = relative * abs(value)
        part = Evidence(cell, abs(cell.mean - value) <= slack, value - slack, value + slack)
        return every(f"{brief(cell.mean)} against {brief(value)}", [part], cell.interval)

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
        return every(values, [Evidence(step, step.mean > -slack, low=-slack) for step in steps], least.interval)

    return test


def stated(begins: str) -> Test:
    """What the lab itself judged: the claim that begins with these words."""

    return judged(lambda claim: claim.startswith(begins))


def judged(fits: Callable[[str], bool]) -> Test:
    """What the lab itself judged: the claim whose words fit. For claims that begin with a number of their own."""

    def test(results: Results) -> Verdict:
        for claim in results.stated:
            if fits(claim.claim):
                why = [part for part in (claim.short, ONE_SEED if claim.seeds == 1 else "") if part]
                told = Verdict.untested(claim.measured)
                if claim.holds != "cannot tell":
                    # Starts that differ leave it open.
                    clear = False if claim.holds == DIFFERS else None
                    told = Verdict(HOLDS if claim.holds == "yes" else FAILS, claim.measured, clear=clear)
                return replace(told, unjudged=", ".join(why))
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
        parts = [Evidence(gap, abs(gap.mean) <= most, -most, most) for gap in found]
        return every(f"largest {worst}", parts, worst.interval)

    return test


def within_on_average(
    one: str,
    other: str,
    most: float,
    *,
    below: bool = False,
    columns: Sequence[str] | None = None,
    panels: Sequence[str] | None = None,
) -> Test:
    """Two rows differ by at most this much in their means over columns, in every panel; `below`: the first may be
    above the other by any amount."""

    def test(results: Results) -> Verdict:
        means = _mean_gaps(results, one, other, columns, panels)
        if not means:
            return Verdict.untested(f"the table does not have {one} beside {other}")
        worst = max(means, key=lambda gap: -gap.mean if below else abs(gap.mean))
        high = math.inf if below else most
        parts = [Evidence(gap, -most <= gap.mean <= high, -most, high) for gap in means]
        return every("; ".join(map(str, means)), parts, worst.interval)

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
        parts = [Evidence(gap, gap.mean <= most, high=most) for gap in found]
        return every(f"largest {most_gained}", parts, most_gained.interval)

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
    """In every column `row` has a place from `best` to `worst` among the rows; 1 is the largest, or the `lowest`.

    A column that lacks one of the rows is not looked at: a place among fewer is another place.
    """

    def test(results: Results) -> Verdict:
        places: dict[str, tuple[int, int, int]] = {}
        exact, lacking, seen = True, list[str](), list[Evidence]()
        for column in columns:
            mine, others = rivals(results, row, among, column, panel)
            lacking += [name for name, cell in others.items() if mine is not None and cell is None]
            if mine is None or not all(others.values()):
                continue
            behind = [difference(mine, cell) if lowest else difference(cell, mine) for cell in others.values() if cell]
            parts = [Evidence(gap, gap.mean > 0, low=0) for gap in behind]
            seen += parts
            exact = exact and clear(parts) is None
            surely = sum(part.passes and part.settled for part in parts)
            place = 1 + sum(part.passes for part in parts)
            places[column] = (place, 1 + surely, 1 + surely + sum(not part.settled for part in parts))
        if not places:
            names = ", ".join(dict.fromkeys(lacking))
            return Verdict.untested(f"not measured: {names}" if names else f"the table does not have {row}")
        holds = all(best <= place <= worst for place, _, _ in places.values())
        inside = all(best <= first and last <= worst for _, first, last in places.values())
        outside = any(last < best or worst < first for _, first, last in places.values())
        told = ", ".join(
            f"{place} of {1 + len(set(among) - {row})} ({column}" + (f": {first} to {last})" if first < last else ")")
            for column, (place, first, last) in places.items()
        )
        settled = None if exact else (inside if holds else outside)
        return Verdict(HOLDS if holds else FAILS, told, None, settled, lone(seen, settled))

    return test


def times(one: str, other: str, column: str, at_least: float, *, panel: str = "") -> Test:
    """A cell is at least so many times another."""

    def test(results: Results) -> Verdict:
        cells = [results.get(row, column, panel) for row in (one, other)]
        if cells[0] is None or cells[1] is None:
            return Verdict.untested(f"the table does not have {one} beside {other}")
        mine, unit = cells[0], cells[1]
        ratio = mine.mean / unit.mean
        # "At least k times" as a difference, which pairs by seed: one less k times the other is not below 0.
        rest = difference(mine, ResultCell(tuple(at_least * value for value in unit.values), lone=unit.lone))
        span = None if rest.interval is None else tuple(at_least + end / unit.mean for end in rest.interval)
        told = f"{ratio:.3g} times" + (f" [{span[0]:.3g}, {span[1]:.3g}]" if span else "")
        return every(told, [Evidence(rest, ratio >= at_least, low=0)])

    return test


def mean_of_columns(name: str = "Average", tolerance: float = 0.01) -> Test:
    """A column is the mean of all others, row by row: whether a printed table agrees with itself."""

    def test(results: Results) -> Verdict:
        if not results.printed:
            return Verdict.untested("it is about the print: ours are computed")
        off = {}
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

    Columns that are not numbers, and the middle one of an odd number, are left out; so is 0, which is no block: it is
    the pixels, the stem. The same halves as those of `inlay explain layers`.
    """
    assert end in ("early", "late")

    def test(results: Results) -> Verdict:
        curve = [(place, cell) for place, cell in numbered(results, row, panel) if place > 0]
        if columns is not None:
            curve = [(place, cell) for place, cell in curve if brief(place) in columns]
        if len(curve) < 2:
            return Verdict.untested(f"the table has no curve of {row}" + (f" on {panel}" if panel else ""))
        half = len(curve) // 2
        halves = [together([cell for _, cell in part]) for part in (curve[:half], curve[-half:])]
        gap = difference(halves[1], halves[0]) if end == "late" else difference(halves[0], halves[1])
        best = max(curve, key=lambda entry: entry[1].mean)[0]
        told = f"the {end} half is above the other by {gap.mean:+.3g}; best at {brief(best)} of {brief(curve[-1][0])}"
        return every(told, [Evidence(gap, gap.mean > 0, low=0)], gap.interval)

    return test


def numbered(results: Results, row: str, panel: str = "") -> list[tuple[float, ResultCell]]:
    """The cells of a row whose columns are numbers, in their order: a curve."""
    found = []
    for column in results.columns:
        cell = results.get(row, column, panel)
        if cell is not None and column.replace(".", "", 1).replace(",", "").isdigit():
            found.append((float(column.replace(",", "")), cell))
    return sorted(found, key=lambda entry: entry[0])


def together(cells: Sequence[ResultCell]) -> ResultCell:
    """The mean of several cells, seed by seed where they have the same seeds; else with errors as if independent."""
    if len({len(cell.values) for cell in cells}) == 1 and len(cells[0].values) > 1:
        return ResultCell(tuple(map(fmean, zip(*(cell.values for cell in cells), strict=True))))
    errors = [cell.half for cell in cells if cell.half is not None]
    error = math.hypot(*errors) / len(cells) if len(errors) == len(cells) else None
    return ResultCell((fmean(cell.mean for cell in cells),), error, any(cell.lone for cell in cells))
