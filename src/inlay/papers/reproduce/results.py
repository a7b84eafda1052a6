"""A table of results: one shape for what a paper prints and for what was measured, so that one predicate reads both.

A cell has a panel (a backbone, a data set; "" where a table has one part), a row (a method) and a column (a set, a
measure). What was measured has one value a seed; what was printed has one value, with or without its error.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from inlay.errors import InlayError

if TYPE_CHECKING:
    from inlay.papers.findings import Finding

Key = tuple[str, str, str]
PLUS_MINUS = "±"
AVERAGES = ("Average", "Avg.")  # what papers call the mean of a row
DIFFERS = "differs from start to start"
MEAN_OF = "mean of "  # what a mean of other columns than the paper's is called, with their number


@dataclass(frozen=True)
class ResultCell:
    """One value a seed, in the order of the seeds; `error` is half of the interval, where only that is known.

    `lone`: the value of one seed where others would give others, so that nothing is known of the spread. A count of
    parameters is one value too, and not lone. `printed`: what a paper prints after its ±, whatever it means by it.
    `doubt`: why a value that is told judges nothing, however many seeds it has.
    """

    values: tuple[float, ...]
    error: float | None = None
    lone: bool = False
    printed: float | None = None
    doubt: str = ""

    @classmethod
    def of_seeds(cls, values: Iterable[float]) -> ResultCell:
        """What runs gave, a value a seed: of one seed, a lone value."""
        known = tuple(map(float, values))
        return cls(known, lone=len(known) == 1)

    @property
    def mean(self) -> float:
        return fmean(self.values)

    @property
    def half(self) -> float | None:
        """Half of the mean's 95 % interval; None where nothing is known of the spread."""
        from inlay.workflow.statistics import half_width

        return half_width(self.values) if len(self.values) > 1 else self.error

    @property
    def interval(self) -> tuple[float, float] | None:
        """The mean's 95 % interval; None where nothing is known of the spread."""
        return None if self.half is None else (self.mean - self.half, self.mean + self.half)

    def __str__(self) -> str:
        half = self.printed if self.half is None else self.half
        return brief(self.mean) + ("" if half is None else f" {PLUS_MINUS} {rough(half)}")


def brief(value: float) -> str:
    """A number as a table shows it: to four significant digits."""
    if not math.isfinite(value):
        return str(value)
    return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:.4g}"


def rough(value: float) -> str:
    """What comes after a ±: two significant digits."""
    return f"{value:,.0f}" if 100 <= abs(value) < math.inf else f"{value:.2g}"


@dataclass(frozen=True)
class Stated:
    """A claim that an experiment of the lab has judged itself: `inlay.papers.findings.MeasuredClaim` as plain data.

    Of several starts together `holds` is `DIFFERS` where one says yes and another no.
    """

    claim: str
    measured: str
    holds: str
    seeds: int | None = None
    short: str = ""


@dataclass(frozen=True)
class Results:
    """Cells by (panel, row, column), in the order in which a table shows them.

    `stated` are claims that came judged from the lab, `failures` what did not finish, `notes` what a reader must know.
    `printed`: it is a paper's table.
    """

    cells: Mapping[Key, ResultCell] = field(default_factory=dict)
    stated: tuple[Stated, ...] = ()
    failures: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    printed: bool = False

    @classmethod
    def read(cls, path: Path, *, intervals: bool = False) -> Results:
        """A CSV with the columns `panel` (may be absent), `row`, and one for each column of the table.

        A cell is a number, `81.3±0.4`, or empty where the paper prints nothing. What comes after ± is shown; only with
        `intervals` is it half of a 95 % interval.
        """
        cells: dict[Key, ResultCell] = {}
        with open(path, encoding="utf-8", newline="") as file:
            reader = csv.DictReader(file)
            names = [name for name in reader.fieldnames or () if name not in ("panel", "row")]
            if not names or "row" not in (reader.fieldnames or ()):
                raise InlayError(f"{path}: printed numbers need a column 'row' and one for each column of the table.")
            for line in reader:
                for name in names:
                    if (text := (line[name] or "").strip()) != "":
                        value, _, error = text.partition(PLUS_MINUS)
                        half = float(error) if error else None
                        cell = (
                            ResultCell((float(value),), half)
                            if intervals
                            else ResultCell((float(value),), printed=half)
                        )
                        cells[line.get("panel") or "", line["row"], name] = cell
        return cls(cells, printed=True)

    @classmethod
    def of(cls, cells: Mapping[Key, float | Sequence[float] | ResultCell], **more: Any) -> Results:
        """Results from plain numbers, which are exact, or from lists of one number a seed."""
        return cls({key: _cell(value) for key, value in cells.items()}, **more)

    def get(self, row: str, column: str, panel: str = "") -> ResultCell | None:
        """One cell; None where there is none."""
        return self.cells.get((panel, row, column))

    @property
    def panels(self) -> list[str]:
        return list(dict.fromkeys(panel for panel, _, _ in self.cells))

    @property
    def columns(self) -> list[str]:
        return list(dict.fromkeys(column for _, _, column in self.cells))

    def rows(self, panel: str | None = None) -> list[str]:
        """The rows, of one panel or of all."""
        return list(dict.fromkeys(row for where, row, _ in self.cells if panel is None or where == panel))

    def with_(self, others: Iterable[Results]) -> Results:
        """These results and others in one table."""
        every = [self, *others]
        return Results(
            {key: cell for one in every for key, cell in one.cells.items()},
            tuple(claim for one in every for claim in one.stated),
            {which: why for one in every for which, why in one.failures.items()},
            tuple(dict.fromkeys(note for one in every for note in one.notes)),
            self.printed,
        )

    def without_trained(self, panels: Sequence[str] | None = None) -> Results:
        """The same without what varies from seed to seed, in these panels or in all: what is left is exact there."""
        cells = {
            key: cell
            for key, cell in self.cells.items()
            if not (cell.lone or len(cell.values) > 1) or (panels is not None and key[0] not in panels)
        }
        return replace(self, cells=cells)

    @property
    def doubts(self) -> list[str]:
        """Why some of the values judge nothing."""
        return list(dict.fromkeys(cell.doubt for cell in self.cells.values() if cell.doubt))

    def without_doubtful(self) -> Results:
        """The same without the values that judge nothing."""
        return replace(self, cells={key: cell for key, cell in self.cells.items() if not cell.doubt})

    def with_average(self, name: str = "Average", columns: Sequence[str] | None = None) -> Results:
        """The same with each row's mean over these columns (default: its panel's), seed by seed, where it has them all.

        A recipe names the columns of the printed table: a mean over others is not the paper's Average.
        """
        cells = dict(self.cells)
        for panel in self.panels:
            own = dict.fromkeys(column for where, _, column in self.cells if where == panel)
            wanted = own if columns is None else columns
            for row in self.rows(panel):
                found = [cell for column in wanted if (cell := self.get(row, column, panel)) is not None]
                if len(found) == len(wanted) and len({len(cell.values) for cell in found}) == 1:
                    means = map(fmean, zip(*(cell.values for cell in found), strict=True))
                    doubt = next((cell.doubt for cell in found if cell.doubt), "")
                    alone = any(cell.lone for cell in found)
                    cells[panel, row, name] = ResultCell(tuple(means), lone=alone, doubt=doubt)
        return replace(self, cells=cells)

    def with_columns_named(self, names: Mapping[Key, str | None]) -> Results:
        """The same with other names for the columns of some cells; None leaves a cell out."""
        cells = {(*key[:2], name): cell for key, cell in self.cells.items() if (name := names.get(key, key[2]))}
        return replace(self, cells=cells)

    @property
    def seeds(self) -> list[int]:
        """How many values the cells have that have one a seed, from few to many; nothing where all are exact."""
        return sorted({len(cell.values) for cell in self.cells.values() if cell.lone or len(cell.values) > 1})

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Columns and rows of text, for people and for the CSV."""
        with_panel = self.panels not in ([], [""])
        head = [*(["panel"] if with_panel else []), "row", *self.columns]
        lines = []
        for panel in self.panels:
            for row in self.rows(panel):
                found = [self.get(row, column, panel) for column in self.columns]
                cells = ["" if cell is None else str(cell) for cell in found]
                lines.append([*([panel] if with_panel else []), row, *cells])
        return head, lines

    def to_json(self) -> dict[str, Any]:
        """As JSON-ready data."""
        return {
            "cells": [
                {"panel": panel, "row": row, "column": column, "values": list(cell.values), "error": cell.error}
                | ({"lone": True} if cell.lone else {})
                | ({"doubt": cell.doubt} if cell.doubt else {})
                for (panel, row, column), cell in self.cells.items()
            ],
            "stated": [vars(claim) for claim in self.stated],
            "failures": dict(self.failures),
            "notes": list(self.notes),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Results:
        """What `to_json` made."""
        return cls(
            {
                (one["panel"], one["row"], one["column"]): ResultCell(
                    tuple(one["values"]), one["error"], one.get("lone", False), doubt=one.get("doubt", "")
                )
                for one in data["cells"]
            },
            tuple(Stated(**claim) for claim in data["stated"]),
            dict(data["failures"]),
            tuple(data["notes"]),
        )


def _cell(value: float | Sequence[float] | ResultCell) -> ResultCell:
    if isinstance(value, ResultCell):
        return value
    return ResultCell((float(value),)) if isinstance(value, int | float) else ResultCell.of_seeds(value)


def from_finding(
    found: Finding,
    row: Sequence[str] = (),
    panel: str | None = None,
    columns: Sequence[str] = (),
    curve: tuple[str, str] | None = None,
) -> Results:
    """A lab's `Finding` as results: its claims as they were judged, and of its rows a table of numbers.

    `row` names the columns whose values, put together, name a row; `panel` the one that names a panel; `columns` are
    the numbers to show (default: all that are left). `curve` (x, y) makes a column of each value of x, with y in it.
    Rows of the same name are repetitions: one value each.
    """
    names = list(found.columns)
    shown = list(columns) or [name for name in names if name not in row and name != panel]
    cells: dict[Key, ResultCell] = {}
    for line in found.rows:
        by_name = dict(zip(names, line, strict=True))
        label = ", ".join(_short(by_name[name], name) for name in row) or "all"
        where = "" if panel is None else str(by_name[panel])
        entries = {name: by_name[name] for name in shown}
        if curve is not None:
            entries = {_short(by_name[curve[0]]): by_name[curve[1]]}
        for name, value in entries.items():
            if isinstance(value, int | float):
                key = (where, label, name)
                cells[key] = ResultCell((*(cells[key].values if key in cells else ()), float(value)))
    return Results(cells, tuple(Stated(**vars(claim)) for claim in found.claims))


def _short(value: Any, name: str = "") -> str:
    """A value as part of a name: a number with what it is a number of."""
    if isinstance(value, str):
        return value
    return f"{name} {brief(value)}".strip() if isinstance(value, int | float) else str(value)
