"""Data of the user's own: a table, a folder of class folders, a table of images. Read, checked, normalised."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from inlay.errors import InlayError, misspelt
from inlay.records.spec import Spec
from inlay.tasks import chat_rows, folders, given_labels, images, kinds, labels, tables, templates
from inlay.tasks.answer_spans import SHORTEST_LIMIT
from inlay.tasks.catalogue import Hub
from inlay.tasks.cells import is_missing, is_null
from inlay.tasks.column_values import Choice, add_columns
from inlay.tasks.columns import choose, spelled_out
from inlay.tasks.conversations import FIELD, NUMBER
from inlay.tasks.folders import split_of
from inlay.tasks.places import Places
from inlay.tasks.questions import FORM, Located
from inlay.tasks.rows import Row, read_input, read_labelled_row
from inlay.tasks.schema import TaskSchema, UndividedTask
from inlay.tasks.tables import Table

# The numbers of rows in their table, and the rows: a list, of conversations a `datasets.Dataset`.
Numbered = tuple[list[int], Any]
FEWEST_CONTEXTS = 10
_BIO = re.compile(r"O|[BI]-.+")
# What a normalised row or a template has under these names is not a column of the user's.
_TAKEN = ("label", "target", "references", "image", templates.SEPARATOR, templates.MASK)


def load(spec: Spec, *, writes: Callable[[], bool] | None = None) -> UndividedTask:
    """The user's data as a task; `writes` says whether the model writes texts."""
    assert spec.data is not None
    path = Path(spec.data).expanduser()
    source = f"your {'folder' if path.is_dir() else 'file'} {path}"
    return from_tables(spec, read(path, spec), path.name.split(".")[0], source, writes=writes)


def load_hub_id(spec: Spec, *, writes: Callable[[], bool] | None = None) -> UndividedTask:
    """A data set of the hub that the catalogue does not have, `owner/name` or `owner/name:config`."""
    from inlay.tasks import sources

    assert spec.task is not None
    path, _, config = spec.task.partition(":")
    whole = sources.load_unnamed(Hub(path, config or None))
    names: dict[str, str] = {}
    for each in whole:
        if (split := split_of(each)) is not None:
            names.setdefault(split, each)
    parts = {split: Table(Path(path), whole[each].column_names, whole[each].to_list()) for split, each in names.items()}
    if "train" not in parts:
        raise InlayError(f"The hub's {spec.task!r} has the splits {', '.join(whole)}, and none of them is train.")
    if others := [each for each in whole if each not in names.values()]:
        parts["train"].notes.append(f"splits of the hub that are not used: {', '.join(others)}")
    return from_tables(spec, parts, path.rpartition("/")[2], f"the hub: {spec.task}", writes=writes)


def from_tables(
    spec: Spec, parts: dict[str, Table], name: str, source: str, *, writes: Callable[[], bool] | None = None
) -> UndividedTask:
    """The task that tables by split make."""
    for table in parts.values():
        add_columns(table, named_columns(spec))
    notes = [note for table in parts.values() for note in table.notes]
    first = parts.get("train") or next(iter(parts.values()))
    beside = [table for table in parts.values() if table is not first]
    asked = writes is not None and writes()  # data that cannot be read are told before a model that is not there
    if asked and spec.test_data is not None:
        beside.append(_test_table(spec))
    choice = choose(first, spec, notes, writes=asked, beside=beside)
    spec = spec.with_(**choice.decided)
    if not choice.chat:
        for table in parts.values():
            table.settle()
    if spec.label_separator is not None and kinds.get(choice.kind).predicts != "labels":
        raise InlayError(
            f"label_separator={spec.label_separator!r} is for several labels a row, and kind {choice.kind!r} has none. "
            f"Leave it out, or give --kind {kinds.MULTI_LABEL}."
        )
    separator, label = spec.label_separator, choice.label or ""
    if separator is not None and not any(separator in str(row.get(label)) for row in first.rows):
        notes.append(f"no row of {first.path.name} has the separator {separator!r} in {label!r}")
    schema = replace(
        _described(name, choice, first), label_separator=separator, label_names=_names_beforehand(spec, choice, first)
    )
    read = _reader(choice, _trained_on(spec, parts))
    # What is trained on comes first: its labels are those that the others may have.
    learnt = next((split for split in ("train", "all") if split in parts), next(iter(parts)))
    numbered = {learnt: read(parts[learnt], choice, schema, learnt, notes)}
    schema = _with_labels(schema, numbered[learnt][1], first.class_names)
    numbered |= {split: read(table, choice, schema, split, notes) for split, table in parts.items() if split != learnt}
    numbered = {split: numbered[split] for split in parts}
    places = _places({split: (table.path, numbered[split]) for split, table in parts.items()})
    if spec.test_data is not None:
        path, numbered["test"] = _test_data(spec, choice, schema, notes)
        places |= _places({"test": (path, numbered["test"])})
    splits = {split: rows for split, (_, rows) in numbered.items()}
    if choice.image:
        notes += images.check_all([row["image"] for rows in splits.values() for row in rows])
    return UndividedTask(
        schema=schema,
        splits=splits,
        source=source,
        group=_group(schema, splits[learnt], notes),
        standardise=schema.predicts in ("value", "values"),
        notes=(*notes, *choice.doubts),
        doubts=choice.doubts,
        spelled_out=spelled_out(first, spec, choice),
        decided=choice.decided,
        places=places,
    )


def _trained_on(spec: Spec, parts: Mapping[str, Table]) -> set[str]:
    """The splits that are learnt from, or drawn from to learn; the others are only scored."""
    found = {"all", "train"} & set(parts)
    return found | {"validation"} if spec.protocol == "vtab-1k" or not found else found


def _places(found: Mapping[str, tuple[Path, Numbered]]) -> dict[str, Places]:
    """Where the rows of each split stand: in which table, or in which files below the folder that holds them all."""
    above = [path if path.is_dir() else path.parent for path, _ in found.values()]
    made = {}
    for split, (path, (numbers, rows)) in found.items():
        images_of = rows if isinstance(rows, list) else []
        paths = [row["image"] for row in images_of if isinstance(row.get("image"), str)]
        if paths and len(paths) == len(rows):
            made[split] = Places.of_files(paths, Path(os.path.commonpath(above)), numbers)
        else:
            made[split] = Places.of(path.name, numbers)
    return made


def _group(schema: TaskSchema, rows: Any, notes: list[str]) -> str | None:
    """The field whose rows stay together: all that belongs to a source, an anchor or, of more than a few, a context."""
    if schema.predicts == "vector":
        return schema.fields[0]
    if schema.predicts == "span":
        if (count := len({row["context"] for row in rows})) >= FEWEST_CONTEXTS:
            return "context"
        notes.append(
            f"{count} different contexts are too few to hold some out: splits share them, and differ in questions"
        )
        return None
    return "source" if schema.kind == kinds.DATA_TO_TEXT else None


def read(path: Path, spec: Spec) -> dict[str, Table]:
    """The tables at a path by split, "all" where there is no division."""
    if not path.exists():
        raise InlayError(f"There is no file or folder {str(path)!r}.{misspelt(path)} Check the path.")
    if path.is_dir():
        return folders.read_folder(path)
    if tables.suffix(path) == ".txt" and spec.kind in kinds.OF_RUNNING_TEXT:
        return {"all": tables.read_lines(path)}
    return folders.by_split(tables.read_table(path), used=named_columns(spec))


def named_columns(spec: Spec) -> list[str]:
    """The columns that a spec names."""
    return [*spec.text, *filter(None, (spec.label, spec.image))]


def _test_table(spec: Spec) -> Table:
    assert spec.test_data is not None
    parts = read(Path(spec.test_data).expanduser(), spec)
    table = parts.get("test") or next(iter(parts.values()))
    add_columns(table, named_columns(spec))
    return table


def _test_data(spec: Spec, choice: Choice, schema: TaskSchema, notes: list[str]) -> tuple[Path, Numbered]:
    """Where the test rows stand, and the rows with their numbers there."""
    table = _test_table(spec)
    for name in (*choice.texts, choice.label, choice.image):
        if name is not None and name not in table.columns:
            raise InlayError(
                f"{table.path.name!r} lacks the column {name!r} that the training data has (columns: "
                f"{', '.join(table.columns)})."
            )
    return table.path, _reader(choice)(table, choice, schema, "test", notes)


def _reader(
    choice: Choice, trained_on: Collection[str] = ()
) -> Callable[[Table, Choice, TaskSchema, str, list[str]], Numbered]:
    if choice.chat:
        return _conversations
    return partial(_questions, trained_on) if choice.kind == kinds.QUESTION_ANSWERING else _normalise


def _conversations(table: Table, choice: Choice, schema: TaskSchema, split: str, notes: list[str]) -> Numbered:
    """The conversations of a table; what is none is left out and counted."""
    made = chat_rows.from_table(
        schema, table, table.path.name if split == "all" else f"{table.path.name} ({split})", notes
    )
    return list(made[NUMBER]), made


def _questions(
    trained_on: Collection[str], table: Table, choice: Choice, schema: TaskSchema, split: str, notes: list[str]
) -> Numbered:
    """The questions of a table with their contexts and answers; of what is trained on, rows whose answer cannot be
    found are left out and counted."""
    where = table.path.name if split == "all" else f"{table.path.name} ({split})"
    columns = {name for table_of in (choice.texts, (choice.label,), choice.beside) for name in table_of if name}
    located, numbers, made, empty = Located(learnt=split in trained_on), [], [], 0
    for number, row in table.numbered:
        if any(is_missing(row.get(name)) for name in choice.texts):
            empty += 1
            continue
        at = f"{where}, row {number}"
        read = read_input(schema, row, at)
        label = located.read(
            {name: row[name] for name in columns if name in row}, choice.label or "", read["context"], at
        )
        if label is not None:
            numbers.append(number)
            made.append({**read, "label": label})
    if empty:
        texts = " or ".join(map(repr, choice.texts))
        notes.append(f"{where}: {empty:,} of {len(table.rows):,} rows dropped for missing values in {texts}")
    if not any(row["label"]["text"] or not located.learnt for row in made):
        why = located.why() or ("no question has an answer" if made else "something is missing in every row")
        shown = f" (first {located.example})" if located.example else ""
        raise InlayError(
            f"{where}: none of {len(table.rows):,} rows has an answer that can be learnt: {why}{shown}. An answer is a "
            f"stretch of its context; {FORM}."
        )
    notes += located.notes(where, len(table.rows))
    return numbers, made


def _normalise(table: Table, choice: Choice, schema: TaskSchema, split: str, notes: list[str]) -> Numbered:
    """The rows of a table with the columns of their kind; rows with something missing are dropped and counted."""
    needed = [name for name in (*choice.texts, choice.label, choice.image) if name is not None]
    needed += ["start", "end"] if choice.kind == kinds.SPANS else []
    running_text = choice.kind == kinds.CAUSAL_LM and choice.label is None  # where a blank line is a line
    # Only of a label: a text may be "None", and so may the answer that a language model is to write.
    spelled = choice.label if table.untyped and not schema.writes_text else None

    def absent(row: Row, name: str) -> bool:
        value = row.get(name)
        return is_null(value) if running_text else labels.is_absent(value, name == spelled)

    whole = {number: row for number, row in table.numbered if not any(absent(row, name) for name in needed)}
    dropped = len(table.rows) - len(whole)
    where = table.path.name if split == "all" else f"{table.path.name} ({split})"
    if spelled and (taken := _taken_for_missing(table, spelled)):
        left = {row[spelled] for row in whole.values()}
        if schema.predicts == "class" and split in ("all", "train") and len(left) < 2:
            raise InlayError(f"{where}: {taken}. Without it there are not two classes to tell apart.")
        notes.append(f"{where}: {taken}")
    if not whole:
        empty = [name for name in needed if all(absent(row, name) for row in table.rows)]
        about = f"nothing in {', '.join(map(repr, empty))}" if empty else "something missing in every row"
        raise InlayError(f"{where}: all {dropped} rows are unusable, with {about}.")
    if dropped:
        which = " or ".join(map(repr, needed))
        notes.append(f"{where}: {dropped:,} of {len(table.rows):,} rows dropped for missing values in {which}")
    return list(whole), [
        read_labelled_row(schema, {c: row[c] for c in needed}, table, choice.label, f"{where}, row {number}")
        for number, row in whole.items()
    ]


def _taken_for_missing(table: Table, label: str) -> str | None:
    """What the labels say that is taken for nothing, in words, and what to do if it is not."""
    said = Counter(row[label] for row in table.rows if labels.says_missing(row.get(label)))
    if not said:
        return None
    shown = ", ".join(f"{word!r} ({count:,} rows)" for word, count in said.most_common(3))
    return (
        f"{shown} in {label!r} is taken for a missing value; if it is a class, rename it, or save the table as JSON "
        "lines"
    )


def field_of(column: str) -> str:
    """The name under which a column's text is kept: its own, unless that has a meaning in a row or a template."""
    plain = re.sub(r"[{}:!]", "_", column)
    return f"{plain}_text" if plain in _TAKEN else plain


def _described(name: str, choice: Choice, table: Table) -> TaskSchema:
    """What is known of the task before its rows are read."""
    kind = kinds.get(choice.kind)
    answers = kind.predicts == "text" and choice.label is not None
    lm = None
    if choice.kind == kinds.CAUSAL_LM and not answers and not choice.chat:
        lm = "lines" if tables.suffix(table.path) == ".txt" else "documents"
    if choice.kind == kinds.MASKED_LM:
        lm = "texts"
    return TaskSchema(
        name=re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or "data",
        kind=choice.kind,
        fields=(FIELD,) if choice.chat else kind.fields or tuple(field_of(name) for name in choice.texts),
        metrics=_metrics(kind, choice, lm),
        prepare="spans" if choice.kind == kinds.SPANS else None,
        columns=_input_columns(choice, kind),
        answers=answers,
        lm=lm,
        chat=choice.chat,
    )


def _metrics(kind: kinds.TaskKind, choice: Choice, lm: str | None) -> tuple[str, ...]:
    if kind.predicts == "vector" and choice.label is not None:
        return ("spearman", "pearson")
    return ("perplexity",) if lm in ("lines", "documents") or choice.chat else kind.metrics


def _input_columns(choice: Choice, kind: kinds.TaskKind) -> dict[str, str]:
    """Which column of the user's files each normalised field was read from, where the two differ."""
    if choice.chat:
        return dict(choice.parts)
    if kind.pairs_images:
        return {"image": str(choice.image), "text": choice.texts[0]}
    if kind.predicts == "span":
        return dict(zip(kind.fields, choice.texts, strict=True))
    if kind.fields:
        return {kind.fields[0]: choice.image or choice.texts[0]}
    return {field_of(name): name for name in choice.texts if field_of(name) != name}


def _names_beforehand(spec: Spec, choice: Choice, table: Table) -> tuple[str, ...] | None:
    """The names of classes or values that rows are read by: those that the spec says, or the cells themselves."""
    predicts = kinds.get(choice.kind).predicts
    if spec.classes:
        if predicts not in ("shares", "rank"):
            raise InlayError(
                f"classes={list(spec.classes)!r} is for ordered classes (--kind {kinds.ORDINAL}) and for probabilities "
                f"({kinds.SOFT_LABELS}), and the kind is {choice.kind!r}. Leave --classes out."
            )
        names = tuple(labels.as_name(name) for name in spec.classes)
        if len(set(names)) < max(2, len(names)):
            raise InlayError(f"classes={list(spec.classes)!r}: give two or more, each once.")
        return names
    if predicts not in ("shares", "values") or choice.label is None:
        return None
    cells = [row.get(choice.label) for row in table.rows]
    found = given_labels.names_in((c for c in cells if not is_null(c)), choice.label, predicts == "shares")
    if predicts == "shares" and len(found) < 2:
        raise InlayError(
            f"{table.path.name!r}: {choice.label!r} holds no probabilities of classes. Give an object or a list a row, "
            "or a column for each class, as in --label bad,ok,good."
        )
    return found


def _ranked(found: set[str], class_names: list[str] | None) -> tuple[str, ...]:
    """Ordered classes that nobody has put into order: as the file has them, or numbers by value."""
    if class_names and found <= set(class_names):
        return tuple(class_names)
    ordered = labels.in_order(found)
    if any(labels.number_in(name) is None for name in ordered):
        raise InlayError(
            f"The order of the classes must be said, from the lowest to the highest, as in --classes "
            f"{','.join(ordered[:10])}{',...' if len(ordered) > 10 else ''} put into their order (classes=)."
        )
    return tuple(ordered)


def _with_labels(schema: TaskSchema, training: list[Row], class_names: list[str] | None) -> TaskSchema:
    """The schema with the labels of the training rows, and the metrics that these have."""
    if schema.predicts == "class":
        found = {row["label"] for row in training}
        ordered = class_names if class_names and found <= set(class_names) else labels.in_order(found)
        return replace(schema, label_names=tuple(ordered))
    if schema.predicts == "rank" and schema.label_names is None:
        return replace(schema, label_names=_ranked({row["label"] for row in training}, class_names))
    if schema.predicts == "labels":
        return replace(schema, label_names=tuple(labels.in_order(name for row in training for name in row["label"])))
    if schema.predicts == "span":
        answers = [row["label"]["text"] for row in training]
        longest = max((len(text) for texts in answers for text in texts), default=0)
        return replace(
            schema,
            longest_answer=max(longest, SHORTEST_LIMIT),
            no_answer=None if all(answers) else 0.0,
        )
    if schema.predicts == "tags":
        names = tuple(labels.in_order(tag for row in training for tag in row["label"]))
        entity = all(_BIO.fullmatch(name) for name in names)
        return replace(schema, label_names=names, metrics=schema.metrics if entity else ("token-accuracy",))
    return schema
