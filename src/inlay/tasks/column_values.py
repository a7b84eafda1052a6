"""Columns of a user's table: what a name stands for, what a column holds, and how an error lists them."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from inlay.errors import unknown
from inlay.tasks import cells, labels, tables
from inlay.tasks.tables import Table


@dataclass(frozen=True)
class Choice:
    """The columns of a task, its kind, and what may be wrong with the labels.

    `chat` is the form of conversations, and `parts` the columns that each part of one is read from. `beside` are
    further columns that say something of the label. `decided` are the fields of a spec without which the same data make
    another task: the model decided it.
    """

    kind: str
    texts: tuple[str, ...] = ()
    label: str | None = None
    image: str | None = None
    doubts: tuple[str, ...] = ()
    chat: str | None = None
    parts: Mapping[str, str] = field(default_factory=dict)
    beside: tuple[str, ...] = ()
    decided: Mapping[str, Any] = field(default_factory=dict)


def add_columns(table: Table, names: Iterable[str]) -> None:
    """Add the columns that names stand for: dotted paths, and several columns in one, as in a,b,c.

    The last have an object of the columns' values; nothing where one of them is missing.
    """
    names = list(names)
    table.add_paths([part for name in names for part in (name, *_parts_of(name))])
    for name in names:
        parts = _parts_of(name)
        if name in table.columns or len(parts) < 2 or not set(parts) <= set(table.columns):
            continue
        table.settle()
        table.columns.append(name)
        for row in table.rows:
            found = {part: row.get(part) for part in parts}
            lacks = any(labels.is_absent(value, table.untyped) for value in found.values())
            row[name] = None if lacks else found


def _parts_of(name: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in name.split(",")) if "," in name else ()


def is_joined(table: Table, name: str) -> bool:
    """Whether a column was made of several."""
    return bool(_parts_of(name)) and isinstance(next(iter(values_of(table, name, 1)), None), Mapping)


def require(name: str, table: Table) -> str:
    for part in _parts_of(name) if name not in table.columns else ():
        require(part, table)
    if name not in table.columns:
        inner = [path for column in table.columns for path in _paths(table, column)]
        raise unknown(f"column of {table.path.name!r}", name, [*table.columns, *inner])
    return name


def listed(table: Table) -> str:
    """The columns for an error; of one that holds objects what is in them, too."""
    shown = [f"{name} ({', '.join(paths)})" if (paths := _paths(table, name)) else name for name in table.columns]
    return f"columns: {', '.join(shown)}"


def _paths(table: Table, column: str) -> list[str]:
    """The dotted paths into a column's objects, as the first of them has them."""
    first = next(iter(values_of(table, column, 1)), None)
    return cells.paths_of(first, column) if isinstance(first, Mapping) and not looks_like_image(first) else []


def values_of(table: Table, column: str, most: int = 1000) -> list[Any]:
    found = (row[column] for row in table.rows)
    there = (v for v in found if not cells.is_missing(v) and not (table.untyped and labels.says_missing(v)))
    return list(itertools.islice(there, most))


def looks_like_image(value: Any) -> bool:
    if isinstance(value, Mapping):
        return isinstance(value.get("bytes"), bytes) or looks_like_image(value.get("path"))
    return isinstance(value, bytes) or (isinstance(value, str) and value.lower().endswith(tables.IMAGES))
