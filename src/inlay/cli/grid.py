"""A table as lines that fit a terminal: side by side where every word has room, otherwise one row below the other."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from rich.cells import cell_len, chop_cells

GAP = 2  # blanks between two columns
NARROWEST = 20  # a terminal that says it is narrower is given lines of this width
LONGEST = 20  # of a word that is kept whole in a column; longer ones (paths, JSON) are broken where they must be
NOWHERE = r"(?!)"
INDENT = 2
WITHIN = r"(?<=[-/_])(?=[^-/_])"  # where a line may end within a word: behind a hyphen, a slash, an underscore


@dataclass(frozen=True)
class TableLine:
    """A line of a table, without its end; a `heading` is set off where that can be done."""

    text: str
    heading: bool = False


def lay_out(
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    width: int,
    *,
    right: Collection[int] = (),
    whole: Collection[int] = (),
    cut: Collection[int] = (),
) -> list[TableLine]:
    """The lines of a table. Cells of the columns `whole` stay on one line; those of `cut` are cut to fit."""
    width = max(width, NARROWEST)
    shares = share_width(columns, rows, width, whole=whole, cut=cut)
    if shares is None:
        return stack(columns, rows, width, whole=whole)
    head = [wrap(column, share) for column, share in zip(columns, shares, strict=True)]
    lines = [TableLine(line, heading=True) for line in join_cells(head, shares, right)]
    lines.append(TableLine("─" * (sum(shares) + GAP * (len(shares) - 1))))
    for row in rows:
        cells = [
            [shorten(cell, share)] if index in cut else wrap(cell, share)
            for index, (cell, share) in enumerate(zip(row, shares, strict=True))
        ]
        lines += [TableLine(line) for line in join_cells(cells, shares, right)]
    return lines


def fits(columns: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> bool:
    """Whether a table has room with every cell on one line, headers broken between words."""
    least = [
        max(longest(" ", column), *(cell_len(row[index]) for row in rows), 0) for index, column in enumerate(columns)
    ]
    return sum(least) + GAP * (len(least) - 1) <= width


def share_width(
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    width: int,
    *,
    whole: Collection[int],
    cut: Collection[int],
) -> list[int] | None:
    """How wide each column is: as wide as its contents, or the widest ones less wide; None where there is no room."""
    contents = [max((cell_len(row[index]) for row in rows), default=0) for index in range(len(columns))]
    least, most = [], []
    for index, column in enumerate(columns):
        if index in whole and index not in cut:
            needed = contents[index]
        else:
            parting = NOWHERE if index in cut else f"{WITHIN}| "
            needed = min(LONGEST, max((longest(parting, row[index]) for row in rows), default=0))
        least.append(max(needed, longest(" ", column)))
        most.append(max(contents[index], least[-1]))
    room = width - GAP * (len(columns) - 1)
    if sum(least) > room:
        return None
    headed = [max(most[index], cell_len(column)) for index, column in enumerate(columns)]
    if sum(headed) <= room:
        return headed
    limit = max(most, default=0)
    while sum(shares := [max(low, min(high, limit)) for low, high in zip(least, most, strict=True)]) > room:
        limit -= 1
    for index, high in enumerate(headed):  # what the last step down has left over
        shares[index] += min(max(0, high - shares[index]), room - sum(shares))
    return shares


def join_cells(cells: Sequence[Sequence[str]], shares: Sequence[int], right: Collection[int]) -> list[str]:
    """The lines of one row, each cell a list of lines itself."""
    lines = []
    for number in range(max(map(len, cells), default=0)):
        parts = [cell[number] if number < len(cell) else "" for cell in cells]
        blanks = [" " * (share - cell_len(part)) for part, share in zip(parts, shares, strict=True)]
        padded = [
            blank + part if index in right else part + blank
            for index, (part, blank) in enumerate(zip(parts, blanks, strict=True))
        ]
        lines.append((" " * GAP).join(padded).rstrip())
    return lines


def stack(
    columns: Sequence[str], rows: Sequence[Sequence[str]], width: int, *, whole: Collection[int]
) -> list[TableLine]:
    """Each row as a paragraph: what it is about, whole if it is a name; then the other cells with their columns' names,
    as many on a line as fit."""
    lines = []
    room = width - 2 * INDENT
    for row in rows:
        lines += [TableLine(line, heading=True) for line in ([row[0]] if 0 in whole else wrap(row[0], width))]
        facts = [f"{column}: {cell}" if column else cell for column, cell in zip(columns[1:], row[1:], strict=True)]
        filled: list[str] = []
        for fact in facts:
            joined = f"{filled[-1]}   {fact}" if filled else fact
            if filled and cell_len(joined) <= room:
                filled[-1] = joined
            else:
                filled.append(fact)
        for fact in filled:
            first, *more = wrap(fact, room) if cell_len(fact) > room else [fact]
            lines += [TableLine(" " * INDENT + first), *(TableLine(" " * 2 * INDENT + line) for line in more)]
    return lines


def longest(parting: str, text: str) -> int:
    """The width of the longest piece of a text."""
    return max(map(cell_len, re.split(parting, text)))


def wrap(text: str, width: int) -> list[str]:
    """A text in lines of at most `width`: ended at blanks, else behind a hyphen or a slash, else anywhere."""
    lines = [""]
    for word in text.split(" "):
        joined = f"{lines[-1]} {word}" if lines[-1] else word
        if cell_len(joined) <= width:
            lines[-1] = joined
            continue
        if lines[-1]:
            lines.append("")
        for part in (chopped for piece in re.split(WITHIN, word) for chopped in chop_cells(piece, width)):
            if cell_len(lines[-1] + part) <= width:
                lines[-1] += part
            else:
                lines.append(part)
    return lines


def shorten(text: str, width: int) -> str:
    """A text on one line, its end left out where there is no room."""
    return text if cell_len(text) <= width else f"{chop_cells(text, max(1, width - 1))[0].rstrip()}…"
