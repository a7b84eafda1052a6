"""Tables in plain text: which character divides the columns, and the rows with their lines."""

from __future__ import annotations

import csv
import io
import itertools
from collections.abc import Iterator
from pathlib import Path

from inlay.errors import InlayError

DELIMITERS = (",", ";", "\t", "|")
_LOOKED_AT, _ROWS = 1 << 16, 50  # characters and rows by which a delimiter is found


def read_delimited(path: Path, text: str, usual: str) -> tuple[list[str], list[dict[str, str]], list[str]]:
    """The columns, the rows and notes. `usual` is the delimiter that the file's ending implies."""
    notes: list[str] = []
    delimiter = delimiter_of(text, usual)
    if delimiter != usual:
        notes.append(f"{path.name}: columns are divided by {delimiter!r}")
    lines = _unquoted(text) if delimiter == "\t" else None
    numbered = iter(lines) if lines is not None else _quoted(path, text, delimiter)
    _, columns = next(numbered)
    columns = [name.strip() for name in columns]
    index = columns[0] == "" and len(columns) > 1
    if index:
        columns[0] = "(row number)"
        notes.append(f"{path.name}: the first column has no name and is taken for row numbers")
    doubled = sorted({name for name in columns if columns.count(name) > 1})
    if doubled or "" in columns:
        what = f"twice: {', '.join(doubled)}" if doubled else "without a name"
        raise InlayError(f"{str(path)!r} has a column {what}. The first line must name every column once.")
    rows = []
    for number, values in numbered:
        if len(values) != len(columns):
            raise InlayError(
                f"{str(path)!r}, line {number}: {len(values)} values where the header names {len(columns)} columns "
                f"({', '.join(columns)}). A value that holds the separator {delimiter!r} or a line break must stand in "
                "double quotes."
            )
        rows.append(dict(zip(columns[index:], values[index:], strict=True)))
    return columns[index:], rows, notes


def delimiter_of(text: str, usual: str) -> str:
    """What divides the columns: the usual, unless another divides header and rows alike and the usual does not.

    Where none does, it is one that the header has, so that the error is about the right columns.
    """
    start = text if len(text) <= _LOOKED_AT else text[: text.rfind("\n", 0, _LOOKED_AT) + 1] or text[:_LOOKED_AT]
    candidates = (usual, *(each for each in DELIMITERS if each != usual))
    for each in candidates:
        widths = _widths(start, each)
        # The last row of a part may be cut within quotes.
        if len(start) < len(text) and len(widths) > 1:
            widths.pop()
        if widths and widths[0] > 1 and len(set(widths)) == 1:
            return each
    header = start.partition("\n")[0]
    return next((each for each in candidates if each in header), usual)


def _widths(start: str, delimiter: str) -> list[int]:
    """How many values each of the first rows has."""
    if delimiter == "\t" and (lines := _unquoted(start)) is not None:
        return [len(values) for _, values in lines[:_ROWS]]
    reader = csv.reader(io.StringIO(start, newline=""), delimiter=delimiter)
    try:
        return [len(values) for values in itertools.islice(filter(None, reader), _ROWS)]
    except csv.Error:
        return []


def _quoted(path: Path, text: str, delimiter: str) -> Iterator[tuple[int, list[str]]]:
    """The rows of a file with quotes, each with the number of its last line; blank lines are no rows."""
    csv.field_size_limit(1 << 30)
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    try:
        for values in reader:
            if values:
                yield reader.line_num, values
    except csv.Error as error:
        raise InlayError(f"{str(path)!r}, line {reader.line_num}: {error}. Check the quotes around there.") from None


def _unquoted(text: str) -> list[tuple[int, list[str]]] | None:
    """The rows of a tab-separated file without multi-line quotes (where a quote is mostly just a quote), or None.

    Every line then has the same number of tabs. A value wholly in quotes, as spreadsheets write it, loses them.
    """
    found = enumerate(text.split("\n"), start=1)
    lines = [(number, line.rstrip("\r").split("\t")) for number, line in found if line.strip()]
    if len({len(values) for _, values in lines}) > 1:
        return None
    return [(number, [_bare(value) for value in values]) for number, values in lines]


def _bare(value: str) -> str:
    inner = value[1:-1]
    quoted = len(value) > 1 and value[0] == value[-1] == '"' and '"' not in inner.replace('""', "")
    return inner.replace('""', '"') if quoted else value
