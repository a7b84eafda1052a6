"""Rows that are read from their compact form whenever they are asked for.

Conversations as Python objects take several times the memory of their text. A table of them keeps the text, and gives
rows a few at a time, which are gone when nobody holds them: what is changed in one is not kept.
"""

from __future__ import annotations

import itertools
import json
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, overload

from inlay.errors import InlayError, first_line

Row = dict[str, Any]
_TOGETHER = 500  # rows that are read at a time


class LazyRows(Sequence[Row]):
    """Rows of which `read` gives a stretch."""

    def __len__(self) -> int:
        raise NotImplementedError

    def read(self, first: int, last: int) -> list[Row]:
        """The rows from one place to before another."""
        raise NotImplementedError

    @overload
    def __getitem__(self, index: int) -> Row: ...

    @overload
    def __getitem__(self, index: slice) -> list[Row]: ...

    def __getitem__(self, index: int | slice) -> Row | list[Row]:
        if isinstance(index, slice):
            return [self[place] for place in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        place = index % len(self)
        return self.read(place, place + 1)[0]

    def __iter__(self) -> Iterator[Row]:
        for first in range(0, len(self), _TOGETHER):
            yield from self.read(first, min(first + _TOGETHER, len(self)))


class JsonRows(LazyRows):
    """Rows of lines of JSON, each known to be an object; the columns are all keys that occur."""

    def __init__(self) -> None:
        self._text, self._ends = bytearray(), array("q", [0])
        self.columns: dict[str, None] = {}

    def add(self, line: str, record: Row) -> None:
        """Another line, and what it says."""
        self._text += line.strip().encode("utf-8", "surrogatepass")
        self._ends.append(len(self._text))
        self.columns |= dict.fromkeys(record)

    def __len__(self) -> int:
        return len(self._ends) - 1

    def read(self, first: int, last: int) -> list[Row]:
        ends = self._ends[first : last + 1]
        lines = (self._text[begin:end].decode("utf-8", "surrogatepass") for begin, end in itertools.pairwise(ends))
        records = map(json.loads, lines)
        return [{name: record.get(name) for name in self.columns} for record in records]


class ArrowRows(LazyRows):
    """Rows of a table of Arrow's."""

    def __init__(self, path: Path, table: Any) -> None:
        self._path, self._table = path, table

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def read(self, first: int, last: int) -> list[Row]:
        import pyarrow as pa

        try:
            return list(self._table.slice(first, last - first).to_pylist())
        except (pa.ArrowException, ValueError, OverflowError, RecursionError) as error:
            raise InlayError(
                f"{str(self._path)!r} cannot be read in rows {first + 1:,} to {last:,} ({first_line(error)})."
            ) from None
