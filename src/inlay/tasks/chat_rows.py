"""Conversations as a `datasets.Dataset`, made and read in little memory."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from inlay.tasks import conversations
from inlay.tasks.conversations import FIELD, NUMBER
from inlay.tasks.schema import TaskSchema
from inlay.tasks.tables import Table

if TYPE_CHECKING:
    from datasets import Dataset

_CHUNK = 1000


def from_table(schema: TaskSchema, table: Table, name: str, notes: list[str]) -> Dataset:
    """The conversations of a table to learn from or to score; what is none is left out and counted in the notes.

    The table is emptied on the way: of many conversations, both forms would take much memory.
    """
    form = schema.chat
    assert form is not None
    told = conversations.Sorted(name, len(table.rows), unread=conversations.unread(schema.columns, table.columns))

    def found() -> Iterator[tuple[str, int]]:
        for number, row in table.numbered:
            try:
                messages = conversations.read_example(form, schema.columns, row, f"{name}, row {number}", told)
            except conversations.Unusable as error:
                told.leave_out(number, error)
                continue
            finally:
                row.clear()  # where rows are not lazy
            yield conversations.pack(messages), number

    made = gather(found())
    told.check()
    notes += told.notes(conversations.describe(form, schema.columns))
    return made


def gather(found: Iterable[tuple[str, int]]) -> Dataset:
    """Conversations, each as one text and with the number of its row, as they come. No fingerprint is made of a pickle
    of all of them, as `Dataset` would by itself."""
    import datasets
    import pyarrow as pa
    from datasets.table import InMemoryTable

    kinds = pa.schema([(FIELD, pa.large_string()), (NUMBER, pa.int64())])
    seen, parts = hashlib.sha256(), [kinds.empty_table()]
    some: tuple[list[str], list[int]] = ([], [])

    def flush() -> None:
        parts.append(pa.table(list(map(pa.array, some, kinds.types)), schema=kinds))
        for each in some:
            each.clear()

    for text, number in found:
        seen.update(text.encode())
        some[0].append(text)
        some[1].append(number)
        if len(some[0]) == _CHUNK:
            flush()
    flush()
    return datasets.Dataset(InMemoryTable(pa.concat_tables(parts)), fingerprint=seen.hexdigest()[:16])


def read(data: Any) -> Iterator[Mapping[str, Any]]:
    """The rows of a data set, read a thousand at a time: one by one, chosen rows take several times as long."""
    for start in range(0, len(data), _CHUNK):
        part = data[start : start + _CHUNK]
        for values in zip(*part.values(), strict=True):
            yield dict(zip(part, values, strict=True))
