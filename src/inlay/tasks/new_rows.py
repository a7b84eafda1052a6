"""Rows to predict: new data, in which no label is needed."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from inlay.errors import InlayError
from inlay.tasks import folders, images, kinds, tables
from inlay.tasks.cells import is_missing
from inlay.tasks.given_rows import as_rows
from inlay.tasks.rows import PYTHON, Row, columns_named, columns_read, read_input, with_paths
from inlay.tasks.schema import TaskSchema

_IMAGE = "image"
Reader = Callable[[], Row]


@dataclass(frozen=True)
class Inputs:
    """`given` are the rows as they came, `rows` what the model reads of them, one for one."""

    given: list[Row]
    rows: list[Row]


def read(schema: TaskSchema, source: Any, left_out: dict[int, str] | None = None) -> Inputs:
    """The rows of new data to predict: of a table, a folder of images or one image, or of Python (see `as_rows`).

    Only the columns that the model reads are looked at: a label column may be there or not, and whatever it says is
    ignored. An empty text is predicted like any other; one that is missing (null, NaN) is an error. Where there is a
    `left_out`, rows and images that cannot be read go there, by their positions and with the reason; an error where
    there is no other.
    """
    given, readers = _unread(schema, source)
    if left_out is None:
        return Inputs(given, [reader() for reader in readers])
    rows: dict[int, Row] = {}
    for number, reader in enumerate(readers):
        try:
            rows[number] = reader()
        except InlayError as error:
            left_out[number] = str(error)
    if schema.modality == "image":
        found = images.faults([row["image"] for row in rows.values()])
        left_out |= {number: fault for number, fault in zip(rows, found, strict=True) if fault is not None}
    kept = [number for number in rows if number not in left_out]
    if left_out and not kept:
        raise InlayError(f"None of the {len(given):,} rows can be read. {left_out[min(left_out)]}")
    return Inputs([given[number] for number in kept], [rows[number] for number in kept])


def _unread(schema: TaskSchema, source: Any) -> tuple[list[Row], list[Reader]]:
    """The rows as they came, and for each what reads it."""
    if not is_path(source):
        given = as_rows(source, schema)
        named = PYTHON if schema.modality == "image" else repr(PYTHON)
        return given, _readers(find_image_column(schema, given, named), enumerate(given, start=1), named)
    path = Path(source).expanduser()
    if schema.modality == "image" and (path.is_dir() or tables.is_image(path)):
        found = _image_files(path)
        return found, [partial(dict, row) for row in found]
    if path.is_dir():
        raise InlayError(f"{str(path)!r} is a folder; give a table ({', '.join(tables.TABLES)}).")
    if schema.modality == "image" and path.exists() and tables.suffix(path) not in tables.TABLES:
        raise InlayError(
            f"{str(path)!r} is neither an image ({', '.join(tables.IMAGES)}) nor a table of images "
            f"({', '.join(tables.TABLES)}), by its ending."
        )
    lines = schema.kind in kinds.OF_RUNNING_TEXT and tables.suffix(path) == ".txt"
    table = tables.read_lines(path, columns_read(schema)[0]) if lines else tables.read_table(path)
    given = [dict(row) for row in table.rows]  # as they came, without the columns of dotted paths
    table.add_paths(columns_named(schema))
    return given, _readers(
        find_image_column(schema, table.rows, repr(path.name)), table.numbered, repr(path.name), path
    )


def _readers(
    schema: TaskSchema, rows: Iterable[tuple[int, Row]], name: str, folder: Path | None = None
) -> list[Reader]:
    return [
        partial(read_input, schema, with_paths(schema, row), f"{name}, row {number}", folder) for number, row in rows
    ]


def is_path(source: Any) -> bool:
    """Whether what was given names a file: a text by itself does, texts to predict come in a list."""
    return isinstance(source, (str, os.PathLike))


def find_image_column(schema: TaskSchema, rows: Sequence[Mapping[str, Any]], where: str) -> TaskSchema:
    """The schema with the column that holds the images, where it was trained on a folder, which has no such name.

    It is the only column of which every value that is there is an image or ends as the name of one.
    """
    if schema.modality != "image" or not rows or schema.columns.get(_IMAGE, _IMAGE) != _IMAGE:
        return schema
    names = list(dict.fromkeys(name for row in rows for name in row))
    if _IMAGE in names:
        return schema
    found = [name for name in names if holds_images([row.get(name) for row in rows])]
    if len(found) != 1:
        which = f"several do ({', '.join(map(repr, found))})" if found else "none does"
        raise InlayError(
            f"{where} lacks the column {_IMAGE!r}, and of its columns ({', '.join(map(repr, names)) or 'none'}) one "
            f"should hold images or their paths: {which}. Name that column {_IMAGE!r}."
        )
    return replace(schema, columns={**schema.columns, _IMAGE: found[0]})


def holds_images(values: Iterable[Any]) -> bool:
    """Whether values are images, or end as the name of one; some may be missing."""
    present = [value for value in values if not is_missing(value)]
    return bool(present) and all(
        (isinstance(value, str | os.PathLike) and tables.is_image(Path(value)))
        or isinstance(value, bytes | np.ndarray)
        or hasattr(value, "getpixel")
        for value in present
    )


def _image_files(path: Path) -> list[Row]:
    found = [p for p in folders.files_below(path) if tables.is_image(p)] if path.is_dir() else [path]
    if not found:
        raise InlayError(f"There is no image in {str(path)!r} ({', '.join(tables.IMAGES)}).")
    return [{"image": str(p)} for p in found]
