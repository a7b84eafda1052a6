"""Rows to evaluate a trained task on: new data with labels, of which nothing is learnt."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inlay.errors import InlayError, unknown
from inlay.tasks import chat_rows, folders, images, kinds, labels, questions, tables
from inlay.tasks.column_values import add_columns
from inlay.tasks.given_rows import as_rows
from inlay.tasks.label_columns import usual_labels
from inlay.tasks.new_rows import find_image_column, is_path
from inlay.tasks.rows import PYTHON, Row, columns_read, number_labels, read_input, read_labelled_row
from inlay.tasks.schema import TaskSchema
from inlay.tasks.tables import Table

if TYPE_CHECKING:
    from datasets import Dataset

    from inlay.tasks.task import Task


def read_labelled(schema: TaskSchema, source: Any, label: str | None = None) -> Task:
    """A task whose test split is all of these rows; the other splits are empty, and nothing is learnt from them.

    `source` is a path, or rows as `as_rows` takes them. `label` names the column of the labels; without it, it is found
    where only one choice is sensible. Rows without a label are left out and counted in the notes.
    """
    notes: list[str] = []
    table = _table(schema, source, notes, label)
    add_columns(table, [*_columns_scored(schema), *filter(None, [label])])
    if schema.chat:
        return _to_evaluate(schema, chat_rows.from_table(schema, table, table.path.name, notes), table, notes)
    if schema.predicts == "span":
        return _to_evaluate(schema, _answered(schema, table, label, notes), table, notes)
    reading = schema
    if schema.modality == "image" and table.path.is_dir():
        reading = replace(schema, columns={})  # trained on a table, evaluated on a folder
    reading = find_image_column(reading, table.rows, repr(table.path.name))
    column = None if _has_no_label(schema) else _label_column(reading, table, label)
    spelled = table.untyped and not schema.writes_text
    numbered = list(table.numbered)
    kept = [(n, row) for n, row in numbered if column is None or not labels.is_absent(row.get(column), spelled)]
    name = table.path.name
    if dropped := len(numbered) - len(kept):
        notes.append(f"{name}: {dropped:,} of {len(numbered):,} rows have no {column!r} and are left out")
    if not kept:
        raise InlayError(f"{name!r} has no row with a label: there is nothing to evaluate on.")
    rows = [read_labelled_row(reading, row, table, column, f"{name}, row {number}") for number, row in kept]
    rows = rows if column is None else number_labels(schema, rows, name)
    if schema.predicts in ("class", "rank"):
        notes += labels.find_untested((row["label"] for row in rows), schema.label_names or (), name)
    if schema.modality == "image":
        images.check_all([row["image"] for row in rows])
    return _to_evaluate(schema, rows, table, notes)


def _answered(schema: TaskSchema, table: Table, label: str | None, notes: list[str]) -> list[Row]:
    """Questions with their answers, which are scored wherever they stand."""
    if label is not None and label not in table.columns:
        raise _unknown_label(table, label)
    column = label or next((name for name in table.columns if name.lower() in questions.ANSWERS), None)
    if column is None:
        raise InlayError(
            f"{table.path.name!r} has no column of answers. Name it with --label (label=...). Columns: "
            f"{', '.join(table.columns) or 'none'}."
        )
    rows, located = [], questions.Located(learnt=False)
    for number, row in table.numbered:
        where = f"{table.path.name}, row {number}"
        made = read_input(schema, row, where)
        rows.append({**made, "label": located.read(row, column, made["context"], where)})
    notes += located.notes(table.path.name, len(rows))
    return rows


def _to_evaluate(schema: TaskSchema, rows: list[Row] | Dataset, table: Table, notes: list[str]) -> Task:
    from inlay.tasks.task import Task, dataset

    empty = dataset([], schema.kind, schema.fields)
    made = dataset(rows, schema.kind, schema.fields) if isinstance(rows, list) else rows
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
        parts = folders.read_folder(path)
    elif _learns_from_text_alone(schema) and tables.suffix(path) == ".txt":
        parts = {"all": tables.read_lines(path, schema.fields[0])}
    else:
        parts = folders.by_split(tables.read_table(path), used=[*_columns_scored(schema), label or ""])
    table = parts.get("test") or next(iter(parts.values()))
    notes += table.notes
    if len(parts) > 1:
        which = "test" if "test" in parts else next(iter(parts))
        notes.append(f"{path.name} is divided ({', '.join(parts)}): only its {which} rows are scored")
    return table


def _learns_from_text_alone(schema: TaskSchema) -> bool:
    return schema.kind in kinds.OF_RUNNING_TEXT and not schema.answers and not schema.chat


def _has_no_label(schema: TaskSchema) -> bool:
    return _learns_from_text_alone(schema) or (schema.predicts == "vector" and not schema.scored)


def _columns_scored(schema: TaskSchema) -> list[str]:
    """The user's columns of rows to evaluate on, labels aside: texts are embedded one by one, and scored in pairs."""
    if schema.predicts != "vector":
        return columns_read(schema)
    return [schema.columns.get(name, name) for name in schema.fields]


def _unknown_label(table: Table, label: str) -> InlayError:
    return unknown(f"column of {table.path.name!r}", label, table.columns, "--label (label=...) names another.")


def _label_column(schema: TaskSchema, table: Table, label: str | None) -> str:
    if label in table.columns:
        return str(label)
    if label is not None and not table.path.is_dir():  # a folder's classes are called as its folders are
        raise _unknown_label(table, label)
    left = [name for name in table.columns if name not in _columns_scored(schema)]
    usual = usual_labels(left)
    chosen = usual or left
    if len(chosen) == 1:
        return chosen[0]
    what = f"several columns may be the label ({', '.join(usual)})" if usual else "no column is plainly the label"
    raise InlayError(
        f"{table.path.name!r}: {what}. Name it with --label (label=...). Columns: {', '.join(table.columns) or 'none'}."
    )
