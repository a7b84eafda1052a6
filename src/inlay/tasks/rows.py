"""One row as a task reads it: what the model sees of it, and what its label says.

Training, evaluation and prediction read their rows here, from tables, folders and Python's own data.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from inlay.errors import InlayError, unknown
from inlay.tasks import conversations, given_labels, images, kinds, labels, prepare
from inlay.tasks.cells import as_text, as_words, is_missing, is_null, reach
from inlay.tasks.schema import TaskSchema
from inlay.tasks.tables import Table

Row = dict[str, Any]
PYTHON = "rows"  # what rows that come from no file are called in a message


def read_input(schema: TaskSchema, values: Mapping[str, Any], where: str, folder: Path | None = None) -> Row:
    """What the model reads of a row, normalised. `where` says which row it is, for errors; paths of images count from
    `folder`, or from where the table `folder` lies."""
    if schema.prepare:
        return _prepared(schema, values, where)
    if schema.chat:
        return {conversations.FIELD: conversations.read_question(schema.columns, values, where)}
    if schema.predicts == "vector" and not schema.pairs_images:
        return {"text": _text_to_embed(schema, values, where)}
    taken = {name: schema.columns.get(name, name) for name in schema.fields}
    if lacking := [column for column in taken.values() if column not in values]:
        if folder is None and schema.modality == "image":
            has = ", ".join(map(repr, values)) or "nothing"
            raise InlayError(f"{where} lacks {lacking[0]!r}, the image (it has {has}).")
        raise InlayError(
            f"{where.partition(', row')[0]} lacks the column {lacking[0]!r} that the model was trained on (columns: "
            f"{', '.join(values)})."
        )
    if schema.modality == "image":
        return {"image": find_image(values[taken["image"]], folder or Path.cwd(), taken["image"], where)}
    if schema.predicts == "tags":
        return {name: _without_gaps("word", values[column], column, where) for name, column in taken.items()}
    return {name: as_text(values[column], column, where) for name, column in taken.items()}


def _text_to_embed(schema: TaskSchema, values: Mapping[str, Any], where: str) -> str:
    """The one text of a row: the column `text`, or that of the anchors, or the only one there is."""
    usual = ("text", schema.columns.get(schema.fields[0], schema.fields[0]))
    found = next((name for name in usual if name in values), None)
    if found is None:
        if len(values) != 1:
            raise InlayError(
                f"{where} has no column {' or '.join(dict.fromkeys(map(repr, usual)))} with the text to embed "
                f"(columns: {', '.join(values) or 'none'}). `inlay embed --text COLUMN` names one."
            )
        found = next(iter(values))
    if is_null(values[found]):
        raise InlayError(f"{where}: there is no text in the column {found!r}.")
    return as_text(values[found], found, where)


def _without_gaps(what: str, value: Any, column: str, where: str) -> list[str]:
    if isinstance(value, list) and any(map(is_null, value)):
        raise InlayError(f"{where}: a {what} is missing (null or NaN in the list).")
    return as_words(value, column, where)


def _prepared(schema: TaskSchema, row: Mapping[str, Any], where: str) -> Row:
    needed = prepare.INPUTS.get(str(schema.prepare))
    if needed is None:
        raise unknown(
            "way to prepare a task's rows", str(schema.prepare), prepare.INPUTS, "Its description was edited."
        )
    renamed = {ours: row.get(theirs) for ours, theirs in schema.columns.items()}
    values = {**row, **{name: value for name, value in renamed.items() if not is_null(value)}}
    found = next((names for names in needed if all(not is_null(values.get(n)) for n in names)), None)
    if found is None:
        wanted = " or ".join(", ".join(map(repr, names)) for names in needed)
        has = ", ".join(name for name, value in row.items() if not is_null(value)) or "none"
        raise InlayError(f"{where}: it needs the columns {wanted} (it has {has}).")
    given = {name: values[name] for name in found}
    if isinstance(given.get("text"), list):
        given["tokens"] = given.pop("text")
    try:
        (made,) = prepare.PREPARE[schema.prepare or ""](given)
    except InlayError as error:
        raise InlayError(f"{where}: {error}") from None
    return made


def find_image(value: Any, table: Path, column: str, where: str) -> Any:
    """An image of a row: Pillow's own or encoded bytes as they are, a path relative to the table or folder."""
    if isinstance(value, Mapping) and {"bytes", "path"} & set(value):
        return value if value.get("bytes") else find_image(value.get("path"), table, column, where)
    if isinstance(value, bytes) or hasattr(value, "getpixel"):
        return value
    if isinstance(value, np.ndarray):
        return images.from_array(value, where)
    if is_missing(value):
        raise InlayError(f"{where}: there is no image in the column {column!r}.")
    path = Path(as_text(os.fspath(value) if isinstance(value, os.PathLike) else value, column, where)).expanduser()
    folder = table if table.is_dir() else table.parent
    return str(path if path.is_absolute() else folder / path)


def read_labelled_row(schema: TaskSchema, row: Row, table: Table, label: str | None, where: str) -> Row:
    """What the model reads of a row of a table, and what its label says; `label` is the column, None for texts that
    are learnt by themselves."""
    if schema.pairs_images:
        made = _image_and_text(schema, row, table, where)
    elif schema.predicts == "vector":
        made = {name: _text_of_pair(row, schema.columns.get(name, name), where) for name in schema.fields}
    else:
        made = read_input(schema, row, where, None if table.path == Path(PYTHON) else table.path)
    if label is None:
        return made
    made |= _read_label(schema, row[label], table, label, where)
    if schema.predicts == "tags" and len(made["tokens"]) != len(made["label"]):
        several = isinstance(row[schema.columns.get("tokens", "tokens")], str) and isinstance(row[label], list)
        raise InlayError(
            f"{where}: {len(made['tokens'])} words and {len(made['label'])} labels; each word needs one."
            + (" Several labels for one text are --kind multi-label." if several else "")
        )
    return made


def _image_and_text(schema: TaskSchema, row: Row, table: Table, where: str) -> Row:
    image, text = (schema.columns.get(name, name) for name in schema.fields)
    folder = Path.cwd() if table.path == Path(PYTHON) else table.path
    return {"image": find_image(row.get(image), folder, image, where), "text": _text_of_pair(row, text, where)}


def _text_of_pair(row: Row, column: str, where: str) -> str:
    if column not in row or is_missing(row[column]):
        raise InlayError(f"{where}: there is no text in the column {column!r}, which a pair needs.")
    return as_text(row[column], column, where)


def _read_label(schema: TaskSchema, value: Any, table: Table, column: str, where: str) -> Row:
    """What a label says, under the name that its kind has it by; classes and tags are named, not numbered."""
    if schema.predicts == "labels":
        found = given_labels.read_set(value, schema.label_separator, column, where)
        if schema.label_names is not None:
            given_labels.check_known(found, schema.label_names, where)
        return {"label": found}
    if schema.predicts in ("shares", "values"):
        return {"label": given_labels.read_all(value, schema, column, where)}
    if schema.predicts in ("value", "vector"):
        numbers = labels.as_numbers([value])
        if numbers is None:
            said = as_text(value, column, where)
            raise InlayError(
                f"{where}: the value {said[:40]!r} of {column!r} is not a number. Write numbers with a point and "
                "nothing else, as in 1120 or 10.42, or remove the row."
            )
        return {"label": numbers[0]}
    if schema.predicts == "tags":
        tags = _without_gaps("label of a word", value, column, where)
        return {"label": [labels.as_name(tag, column, where) for tag in tags]}
    if schema.kind == kinds.DATA_TO_TEXT:
        texts = value if isinstance(value, list) else [value]
        return {"references": [as_text(text, column, where) for text in texts]}
    if schema.predicts == "text":
        return {"target": as_text(value, column, where)}
    names = table.class_names
    if names is not None and isinstance(value, int) and 0 <= value < len(names):
        return {"label": names[value]}
    name = labels.as_name(value, column, where)
    if schema.predicts == "rank" and schema.label_names is not None:
        given_labels.check_known([name], schema.label_names, where)
    return {"label": name}


def number_labels(schema: TaskSchema, rows: list[Row], where: str) -> list[Row]:
    """The rows with numbers for their classes and tags."""
    known = schema.label_names or ()
    if schema.predicts in ("class", "rank"):
        numbers = labels.number([row["label"] for row in rows], known, where)
        return [{**row, "label": number} for row, number in zip(rows, numbers, strict=True)]
    if schema.predicts in ("tags", "labels"):
        return [{**row, "label": labels.number(row["label"], known, where)} for row in rows]
    return rows


def with_paths(schema: TaskSchema, values: Mapping[str, Any]) -> Mapping[str, Any]:
    """A row with what the dotted paths lead to that the model reads."""
    inner = {name: reach(values, name) for name in columns_named(schema) if name not in values}
    return {**values, **{name: value for name, value in inner.items() if value is not None}}


def columns_named(schema: TaskSchema) -> list[str]:
    """The user's columns, by their names or their dotted paths, that the schema names."""
    return list(dict.fromkeys([schema.columns.get(name, name) for name in schema.fields] + [*schema.columns.values()]))


def columns_read(schema: TaskSchema) -> list[str]:
    """The user's columns that the model reads."""
    if schema.predicts == "vector" and not schema.pairs_images:
        return ["text"]
    fields = prepare.INPUTS[schema.prepare][-1] if schema.prepare else schema.fields
    return [schema.columns.get(name, name) for name in fields]
