"""Rows as a task reads them: what the model sees of a row and what its label says.

Training, evaluation and prediction read their rows here, from tables, folders and Python's own data. `read` is for new
rows to predict, `read_labelled` for rows to evaluate a trained task on.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from inlay.errors import InlayError, unknown
from inlay.tasks import (
    chat_rows,
    conversations,
    folders,
    given_labels,
    images,
    kinds,
    labels,
    prepare,
    questions,
    tables,
)
from inlay.tasks.cells import as_text, as_words, is_chat, is_missing, is_null, reach
from inlay.tasks.columns import add_columns, usual_labels
from inlay.tasks.schema import TaskSchema
from inlay.tasks.tables import Table

if TYPE_CHECKING:
    from datasets import Dataset

    from inlay.tasks.task import Task

Row = dict[str, Any]
PYTHON = "rows"  # what rows that come from no file are called in a message


@dataclass(frozen=True)
class Inputs:
    """`given` are the rows as they came, `rows` what the model reads of them, one for one."""

    given: list[Row]
    rows: list[Row]


# -------------------------------------------------------------------------------------------------------- one row


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


# ------------------------------------------------------------------------------------------------ rows to predict


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


Reader = Callable[[], Row]


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
    table.add_paths(_columns_named(schema))
    return given, _readers(
        find_image_column(schema, table.rows, repr(path.name)), table.numbered, repr(path.name), path
    )


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


_IMAGE = "image"


def holds_images(values: Iterable[Any]) -> bool:
    """Whether values are images, or end as the name of one; some may be missing."""
    present = [value for value in values if not is_missing(value)]
    return bool(present) and all(
        (isinstance(value, str | os.PathLike) and tables.is_image(Path(value)))
        or isinstance(value, bytes | np.ndarray)
        or hasattr(value, "getpixel")
        for value in present
    )


def _readers(
    schema: TaskSchema, rows: Iterable[tuple[int, Row]], name: str, folder: Path | None = None
) -> list[Reader]:
    return [
        partial(read_input, schema, with_paths(schema, row), f"{name}, row {number}", folder) for number, row in rows
    ]


def with_paths(schema: TaskSchema, values: Mapping[str, Any]) -> Mapping[str, Any]:
    """A row with what the dotted paths lead to that the model reads."""
    inner = {name: reach(values, name) for name in _columns_named(schema) if name not in values}
    return {**values, **{name: value for name, value in inner.items() if value is not None}}


def _image_files(path: Path) -> list[Row]:
    found = [p for p in folders.files_below(path) if tables.is_image(p)] if path.is_dir() else [path]
    if not found:
        raise InlayError(f"There is no image in {str(path)!r} ({', '.join(tables.IMAGES)}).")
    return [{"image": str(p)} for p in found]


def is_path(source: Any) -> bool:
    """Whether what was given names a file: a text by itself does, texts to predict come in a list."""
    return isinstance(source, (str, os.PathLike))


def _columns_named(schema: TaskSchema) -> list[str]:
    """The user's columns, by their names or their dotted paths, that the schema names."""
    return list(dict.fromkeys([schema.columns.get(name, name) for name in schema.fields] + [*schema.columns.values()]))


def columns_read(schema: TaskSchema) -> list[str]:
    """The user's columns that the model reads."""
    if schema.predicts == "vector" and not schema.pairs_images:
        return ["text"]
    fields = prepare.INPUTS[schema.prepare][-1] if schema.prepare else schema.fields
    return [schema.columns.get(name, name) for name in fields]


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


# ----------------------------------------------------------------------------------------------- rows to evaluate


def read_labelled(schema: TaskSchema, source: Any, label: str | None = None) -> Task:
    """A task whose test split is all of these rows; the other splits are empty, and nothing is learnt from them.

    `source` is a path, or rows as `as_rows` takes them. `label` names the column of the labels; without it, it is found
    where only one choice is sensible. Rows without a label are left out and counted in the notes.
    """
    notes: list[str] = []
    table = _table(schema, source, notes, label)
    add_columns(table, [*_columns_scored(schema), *filter(None, [label])])
    if schema.chat:
        return _to_evaluate(schema, read_conversations(schema, table, table.path.name, notes), table, notes)
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


def read_conversations(schema: TaskSchema, table: Table, name: str, notes: list[str]) -> Dataset:
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

    made = chat_rows.gather(found())
    told.check()
    notes += told.notes(conversations.describe(form, schema.columns))
    return made


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
