"""New rows, from a file or from Python: as they came, with every column, and as the model reads them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inlay.errors import InlayError
from inlay.tasks import kinds, prepare

if TYPE_CHECKING:
    from inlay.tasks.schema import TaskSchema

Row = dict[str, Any]
PYTHON = "rows"  # what rows that come from no file are called in a message


@dataclass(frozen=True)
class Inputs:
    """`given` are the rows as they came, `rows` what the model reads of them, one for one."""

    given: list[Row]
    rows: list[Row]


def read(schema: TaskSchema, source: Any) -> Inputs:
    """The rows of a file or a folder of pictures, where `source` is a path; otherwise see `as_rows`."""
    if is_path(source):
        return schema.read_given(Path(source).expanduser())
    given = as_rows(source, schema)
    if schema.kind == kinds.IMAGES:
        (column,) = columns_read(schema)
        places = [f"{PYTHON}, row {number}" for number in range(1, len(given) + 1)]
        found = [picture(row, column, Path.cwd(), where) for row, where in zip(given, places, strict=True)]
        return Inputs(given, [{"image": each} for each in found])
    return Inputs(given, [schema.row(row, PYTHON, number) for number, row in enumerate(given, start=1)])


def is_path(source: Any) -> bool:
    """Whether what was given names a file: a text by itself does, texts to predict come in a list."""
    return isinstance(source, (str, os.PathLike))


def columns_read(schema: TaskSchema) -> list[str]:
    """The user's columns that the model reads."""
    fields = prepare.INPUTS[schema.prepare][-1] if schema.prepare else schema.fields
    return [schema.columns.get(name, name) for name in fields]


def as_rows(source: Any, schema: TaskSchema) -> list[Row]:
    """Rows of Python as dicts.

    Taken are a list of mappings; a list of texts (of pictures, or of their paths) where a row is just that; a mapping
    of columns; and tables of pandas, polars, PyArrow and datasets, none of which has to be installed.
    """
    columns = columns_read(schema)
    single = columns[0] if len(columns) == 1 else None
    found = []
    for number, row in enumerate(_listed(source), start=1):
        if isinstance(row, Mapping):
            found.append({str(name): value for name, value in row.items()})
        elif single is not None and (isinstance(row, str) or schema.kind == kinds.IMAGES):
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


def picture(row: Row, column: str, folder: Path, where: str) -> Any:
    """The picture of a row: an image of Pillow's, encoded bytes, or a path that counts from a folder or a table."""
    from PIL import Image

    from inlay.tasks.own import locate

    if column not in row:
        has = ", ".join(map(repr, row)) or "nothing"
        raise InlayError(f"{where} lacks {column!r}, the picture (it has {has}).")
    value = row[column]
    if isinstance(value, Image.Image):
        return value
    return locate(os.fspath(value) if isinstance(value, os.PathLike) else value, folder, column, where)


def _named(value: Any) -> str:
    return "None" if value is None else f"a {type(value).__name__}"
