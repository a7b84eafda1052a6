"""Labelled rows for a task that was learnt before: its schema says what they mean, and nothing is learnt from them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from inlay.errors import InlayError, unknown
from inlay.tasks import files, images, kinds, labels
from inlay.tasks.assemble import dataset
from inlay.tasks.cells import as_text, as_words, is_missing
from inlay.tasks.columns import usual_labels
from inlay.tasks.files import Table
from inlay.tasks.inputs import PYTHON, Row, as_rows, columns_read, is_path, picture
from inlay.tasks.schema import TaskSchema
from inlay.tasks.task import Task


def load(schema: TaskSchema, source: Any, label: str | None = None) -> Task:
    """A task whose test split is all of these rows; the other splits are empty.

    `source` is a path, or rows as `inlay.tasks.inputs.read` takes them. `label` names the column of the labels; without
    it, it is found where only one choice is sensible. Rows without a label are left out and counted in the notes.
    """
    notes: list[str] = []
    table = _table(schema, source, notes, label)
    table.add_paths([*columns_read(schema), *filter(None, [label])])
    column = None if _learns_from_text_alone(schema) else _label_column(schema, table, label)
    numbered = [(number, row) for number, row in table.numbered]
    kept = [each for each in numbered if column is None or not _absent(each[1].get(column), table, schema)]
    if dropped := len(numbered) - len(kept):
        notes.append(f"{table.path.name}: {dropped:,} of {len(numbered):,} rows have no {column!r} and are left out")
    if not kept:
        raise InlayError(f"{table.path.name!r} has no row with a label: there is nothing to evaluate on.")
    read = _reader(schema, table)
    rows = [read(row, number) for number, row in kept]
    if column is not None:
        for (number, given), row in zip(kept, rows, strict=True):
            row |= _truth(schema, given[column], table, column, f"{table.path.name}, row {number}")
        _number(schema, rows, table.path.name)
    if schema.kind == kinds.IMAGES:
        images.check_all([row["image"] for row in rows])
    empty, made = (dataset(each, schema.kind, schema.fields) for each in ([], rows))
    return Task(schema, empty, empty, made, source=str(table.path), digest="", notes=tuple(notes))


def _table(schema: TaskSchema, source: Any, notes: list[str], label: str | None) -> Table:
    """The rows as a table; of data that are divided the test split alone: the rest may have been trained on."""
    if not is_path(source):
        rows = as_rows(source, schema)
        return Table(Path(PYTHON), list(rows[0]) if rows else [], rows)
    path = Path(source).expanduser()
    if not path.exists():
        raise InlayError(f"There is no file or folder {str(path)!r}. Check the path.")
    if path.is_dir():
        parts = files.read_folder(path)
    elif _learns_from_text_alone(schema) and files.suffix(path) == ".txt":
        parts = {"all": files.read_lines(path, schema.fields[0])}
    else:
        parts = files.by_split(files.read_table(path), used=[*columns_read(schema), label or ""])
    table = parts.get("test") or next(iter(parts.values()))
    notes += table.notes
    if len(parts) > 1:
        which = "test" if "test" in parts else next(iter(parts))
        notes.append(f"{path.name} is divided ({', '.join(parts)}): only its {which} rows are scored")
    return table


def _learns_from_text_alone(schema: TaskSchema) -> bool:
    return schema.kind == kinds.CAUSAL_LM and not schema.answers


def _label_column(schema: TaskSchema, table: Table, label: str | None) -> str:
    if label in table.columns:
        return str(label)
    if label is not None and not table.path.is_dir():  # a folder's classes are called as its folders are
        raise unknown(f"column of {table.path.name!r}", label, table.columns, "--label (label=...) names another.")
    left = [name for name in table.columns if name not in columns_read(schema)]
    usual = usual_labels(left)
    chosen = usual or left
    if len(chosen) == 1:
        return chosen[0]
    what = f"several columns may be the label ({', '.join(usual)})" if usual else "no column is plainly the label"
    raise InlayError(
        f"{table.path.name!r}: {what}. Name it with --label (label=...). Columns: {', '.join(table.columns) or 'none'}."
    )


def _absent(value: Any, table: Table, schema: TaskSchema) -> bool:
    spelled = table.untyped and schema.kind not in kinds.LANGUAGE_MODELS
    return is_missing(value) or (spelled and labels.says_missing(value))


def _reader(schema: TaskSchema, table: Table) -> Callable[[Row, int], Row]:
    """What reads a row of the table as the model does; the path of a picture counts from where its table lies."""
    if schema.kind != kinds.IMAGES:
        return lambda row, number: schema.row(row, table.path.name, number)
    (column,) = columns_read(schema)
    if column not in table.columns and table.path.is_dir():
        column = "image"  # trained on a table, evaluated on a folder
    folder = Path.cwd() if table.path.name == PYTHON else table.path
    return lambda row, number: {"image": picture(row, column, folder, f"{table.path.name}, row {number}")}


def _truth(schema: TaskSchema, value: Any, table: Table, column: str, where: str) -> dict[str, Any]:
    """What the row's label says, under the name that its kind has it by."""
    if schema.kind == kinds.REGRESSION:
        numbers = labels.as_numbers([value])
        if numbers is None:
            raise InlayError(
                f"{where}: the value {as_text(value, column, where)[:40]!r} of {column!r} is not a number."
            )
        return {"label": numbers[0]}
    if schema.kind == kinds.TOKENS:
        return {"label": [labels.as_name(tag, column, where) for tag in as_words(value, column, where)]}
    if schema.kind == kinds.DATA_TO_TEXT:
        texts = value if isinstance(value, list) else [value]
        return {"references": [as_text(text, column, where) for text in texts]}
    if schema.kind == kinds.CAUSAL_LM:
        return {"target": as_text(value, column, where)}
    names = table.class_names
    if names is not None and isinstance(value, int) and 0 <= value < len(names):
        return {"label": names[value]}
    return {"label": labels.as_name(value, column, where)}


def _number(schema: TaskSchema, rows: list[dict[str, Any]], where: str) -> None:
    """Class names and tags as the numbers that the model has for them."""
    known = schema.label_names or ()
    if schema.kind in kinds.ONE_LABEL:
        for row, number in zip(rows, labels.number([row["label"] for row in rows], known, where), strict=True):
            row["label"] = number
    elif schema.kind == kinds.TOKENS:
        for row in rows:
            if len(row["label"]) != len(row["tokens"]):
                raise InlayError(
                    f"{where}: {len(row['tokens'])} words and {len(row['label'])} labels; each word needs one."
                )
            row["label"] = labels.number(row["label"], known, where)
