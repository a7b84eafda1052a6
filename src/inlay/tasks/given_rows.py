"""Rows given in Python: lists, mappings of columns and DataFrames."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from inlay.errors import InlayError
from inlay.tasks.cells import is_chat
from inlay.tasks.rows import Row, columns_read
from inlay.tasks.schema import TaskSchema


def as_rows(source: Any, schema: TaskSchema) -> list[Row]:
    """Rows of Python as dicts.

    Taken are a list of mappings; a list of texts (of images, or of their paths) where a row is just that; a mapping
    of columns; and tables of pandas, polars, PyArrow and datasets, none of which has to be installed. Images are
    Pillow's, encoded bytes, or arrays of NumPy's, height x width or height x width x channels, also several in one.
    """
    one_array = isinstance(source, np.ndarray) and source.ndim in (2, 3)
    if schema.modality == "image" and (one_array or hasattr(source, "getpixel")):
        source = [source]
    columns = columns_read(schema)
    single = columns[0] if len(columns) == 1 else None
    found = []
    for number, row in enumerate(_listed(source), start=1):
        if isinstance(row, Mapping):
            found.append({str(name): value for name, value in row.items()})
        elif single is not None and (
            isinstance(row, str) or schema.modality == "image" or (schema.chat and is_chat(row))
        ):
            found.append({single: row})
        else:
            wanted = ", ".join(map(repr, columns))
            also = "" if single is None else " (or just its text)"
            raise InlayError(
                f"Row {number} is {_named(row)}: give a mapping with {wanted}{also} for each row, or a DataFrame with "
                "these columns."
            )
    return found


def _listed(source: Any) -> Iterable[Any]:
    """The rows of whatever holds them."""
    if isinstance(source, Mapping):
        return _of_columns(source)
    for name, arguments in (("to_dicts", ()), ("to_pylist", ())):  # polars, PyArrow
        if callable(getattr(source, name, None)):
            return getattr(source, name)(*arguments)
    if hasattr(source, "columns") and callable(getattr(source, "to_dict", None)):  # pandas
        return source.to_dict("records")
    if callable(getattr(source, "to_list", None)):  # a column of pandas, a data set
        return source.to_list()
    if isinstance(source, Iterable) and not isinstance(source, bytes):
        return source
    raise InlayError(
        f"{_named(source)} holds no rows: give a path, a list of mappings or of texts, a mapping of columns, or a "
        "DataFrame."
    )


def _of_columns(columns: Mapping[Any, Any]) -> list[Row]:
    """Rows of a mapping of columns, which must be equally long."""
    wrong = [name for name, values in columns.items() if not isinstance(values, Sequence) or isinstance(values, str)]
    wrong = [name for name in wrong if not callable(getattr(columns[name], "tolist", None))]  # NumPy's, pandas'
    if wrong:
        raise InlayError(
            f"The mapping is taken for columns, and {wrong[0]!r} holds {_named(columns[wrong[0]])}. Give a list for "
            "each column; one row by itself comes in a list, as in [{...}]."
        )
    lists = {str(name): list(values) for name, values in columns.items()}
    if len({len(values) for values in lists.values()}) > 1:
        counts = ", ".join(f"{name}: {len(values)}" for name, values in lists.items())
        raise InlayError(f"The columns are not equally long ({counts}).")
    return [dict(zip(lists, values, strict=True)) for values in zip(*lists.values(), strict=True)]


def _named(value: Any) -> str:
    return "None" if value is None else f"a {type(value).__name__}"
