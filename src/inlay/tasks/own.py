"""Data of the user's own: a table, a folder of class folders, a table of pictures. Read, checked, normalised."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from inlay.errors import InlayError, misspelt
from inlay.records.spec import Spec
from inlay.tasks import files, images, kinds, labels, prepare, templates
from inlay.tasks.catalogue import Hub
from inlay.tasks.cells import as_text, as_words, is_missing, is_null
from inlay.tasks.columns import Choice, choose
from inlay.tasks.draft import Draft, Row
from inlay.tasks.files import Table
from inlay.tasks.split_names import split_of

_BIO = re.compile(r"O|[BI]-.+")
# What a normalised row or a template has under these names is not a column of the user's.
_TAKEN = ("label", "target", "references", "image", templates.SEPARATOR, templates.MASK)


def load(spec: Spec) -> Draft:
    """The user's data as a draft of a task."""
    assert spec.data is not None
    path = Path(spec.data).expanduser()
    source = f"your {'folder' if path.is_dir() else 'file'} {path}"
    return from_tables(spec, read(path, spec), path.name.split(".")[0], source)


def load_hub_id(spec: Spec) -> Draft:
    """A data set of the hub that the catalogue does not have, `owner/name` or `owner/name:config`."""
    from inlay.tasks import sources

    assert spec.task is not None
    path, _, config = spec.task.partition(":")
    whole = sources.load_unnamed(Hub(path, config or None))
    names: dict[str, str] = {}
    for each in whole:
        if (split := split_of(each)) is not None:
            names.setdefault(split, each)
    tables = {
        split: Table(Path(path), whole[each].column_names, whole[each].to_list()) for split, each in names.items()
    }
    if "train" not in tables:
        raise InlayError(f"The hub's {spec.task!r} has the splits {', '.join(whole)}, and none of them is train.")
    if others := [each for each in whole if each not in names.values()]:
        tables["train"].notes.append(f"splits of the hub that are not used: {', '.join(others)}")
    return from_tables(spec, tables, path.rpartition("/")[2], f"the hub: {spec.task}")


def from_tables(spec: Spec, tables: dict[str, Table], name: str, source: str) -> Draft:
    """A draft of tables by split."""
    for table in tables.values():
        table.add_paths(named_columns(spec))
    notes = [note for table in tables.values() for note in table.notes]
    first = tables.get("train") or next(iter(tables.values()))
    choice = choose(first, spec, notes)
    splits = {split: _normalise(table, choice, split, notes) for split, table in tables.items()}
    if spec.test_data is not None:
        splits["test"] = _test_data(spec, choice, notes)
    if choice.image:
        images.check_all([row["image"] for rows in splits.values() for row in rows])
    draft = _draft(name, choice, splits, notes, first.class_names)
    draft.source = source
    draft.lm = "lines" if draft.lm and files.suffix(first.path) == ".txt" else draft.lm
    return draft


def read(path: Path, spec: Spec) -> dict[str, Table]:
    """The tables at a path by split, "all" where there is no division."""
    if not path.exists():
        raise InlayError(f"There is no file or folder {str(path)!r}.{misspelt(path)} Check the path.")
    if path.is_dir():
        return files.read_folder(path)
    if files.suffix(path) == ".txt" and spec.kind == kinds.CAUSAL_LM:
        return {"all": files.read_lines(path)}
    return files.by_split(files.read_table(path), used=named_columns(spec))


def named_columns(spec: Spec) -> list[str]:
    """The columns that a spec names."""
    return [*spec.text, *filter(None, (spec.label, spec.image))]


def _test_data(spec: Spec, choice: Choice, notes: list[str]) -> list[Row]:
    assert spec.test_data is not None
    tables = read(Path(spec.test_data).expanduser(), spec)
    table = tables.get("test") or next(iter(tables.values()))
    table.add_paths(named_columns(spec))
    for name in (*choice.texts, choice.label, choice.image):
        if name is not None and name not in table.columns:
            raise InlayError(
                f"{table.path.name!r} lacks the column {name!r} that the training data has (columns: "
                f"{', '.join(table.columns)})."
            )
    return _normalise(table, choice, "test", notes)


def _normalise(table: Table, choice: Choice, split: str, notes: list[str]) -> list[Row]:
    """The rows of a table with the columns of their kind; rows with something missing are dropped and counted."""
    needed = [name for name in (*choice.texts, choice.label, choice.image) if name is not None]
    needed += ["start", "end"] if choice.kind == kinds.SPANS else []
    running_text = choice.kind == kinds.CAUSAL_LM and choice.label is None  # where a blank line is a line
    # Only of a label: a text may be "None", and so may the answer that a language model is to write.
    spelled = choice.label if table.untyped and choice.kind not in kinds.LANGUAGE_MODELS else None

    def absent(row: Row, name: str) -> bool:
        value = row.get(name)
        if running_text:
            return is_null(value)
        return is_missing(value) or (name == spelled and labels.says_missing(value))

    whole = {number: row for number, row in table.numbered if not any(absent(row, name) for name in needed)}
    dropped = len(table.rows) - len(whole)
    where = table.path.name if split == "all" else f"{table.path.name} ({split})"
    if spelled and (taken := _taken_for_missing(table, spelled)):
        left = {row[spelled] for row in whole.values()}
        if choice.kind in kinds.ONE_LABEL and split in ("all", "train") and len(left) < 2:
            raise InlayError(f"{where}: {taken}. Without it there are not two classes to tell apart.")
        notes.append(f"{where}: {taken}")
    if not whole:
        empty = [name for name in needed if all(absent(row, name) for row in table.rows)]
        about = f"nothing in {', '.join(map(repr, empty))}" if empty else "something missing in every row"
        raise InlayError(f"{where}: all {dropped} rows are unusable, with {about}.")
    if dropped:
        which = " or ".join(map(repr, needed))
        notes.append(f"{where}: {dropped:,} of {len(table.rows):,} rows dropped for missing values in {which}")
    return [_FORMS[choice.kind](row, choice, table, f"{where}, row {number}") for number, row in whole.items()]


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


def _texts(row: Row, choice: Choice, where: str) -> Row:
    return {field_of(name): as_text(row[name], name, where) for name in choice.texts}


def _classified(row: Row, choice: Choice, table: Table, where: str) -> Row:
    return _texts(row, choice, where) | {"label": _class(row, choice, table, where)}


def _valued(row: Row, choice: Choice, table: Table, where: str) -> Row:
    value = row[choice.label or ""]
    numbers = labels.as_numbers([value])
    if numbers is None:
        said = as_text(value, choice.label or "", where)
        raise InlayError(
            f"{where}: the value {said[:40]!r} of {choice.label!r} is not a number. Write numbers with a point and "
            "nothing else, as in 1120 or 10.42, or remove the row."
        )
    return _texts(row, choice, where) | {"label": numbers[0]}


def _pictured(row: Row, choice: Choice, table: Table, where: str) -> Row:
    image = locate(row[choice.image or ""], table.path, choice.image or "", where)
    return {"image": image, "label": _class(row, choice, table, where)}


def _continued(row: Row, choice: Choice, table: Table, where: str) -> Row:
    said = {} if choice.label is None else {"target": as_text(row[choice.label], choice.label, where)}
    return _texts(row, choice, where) | said


def _written(row: Row, choice: Choice, table: Table, where: str) -> Row:
    (source,), label = choice.texts, choice.label or ""
    texts = row[label] if isinstance(row[label], list) else [row[label]]
    return {
        "source": as_text(row[source], source, where),
        "references": [as_text(text, label, where) for text in texts],
    }


def _class(row: Row, choice: Choice, table: Table, where: str) -> str:
    """A class's name; a number stands for a name where the file names its classes."""
    value = row[choice.label or ""]
    if table.class_names is not None and isinstance(value, int) and 0 <= value < len(table.class_names):
        return table.class_names[value]
    return labels.as_name(value, choice.label or "", where)


def _tagged(row: Row, choice: Choice, table: Table, where: str) -> Row:
    (text,), label = choice.texts, choice.label or ""
    for what, found in (("word", row[text]), ("label of a word", row[label])):
        if isinstance(found, list) and any(map(is_null, found)):
            raise InlayError(f"{where}: a {what} is missing (null or NaN in the list).")
    tokens = as_words(row[text], text, where)
    tags = [labels.as_name(tag, label, where) for tag in as_words(row[label], label, where)]
    if len(tokens) != len(tags):
        several = isinstance(row[text], str) and isinstance(row[label], list)
        raise InlayError(
            f"{where}: {len(tokens)} words and {len(tags)} labels; each word needs one."
            + (" Several labels for one text are not offered: give one label a row." if several else "")
        )
    return {"tokens": tokens, "label": tags}


def _span(row: Row, choice: Choice, table: Table, where: str) -> Row:
    text = row[choice.texts[0]]
    key = "tokens" if isinstance(text, list) else "text"
    try:
        (made,) = prepare.spans({key: text, "start": row["start"], "end": row["end"]})
    except InlayError as error:
        raise InlayError(f"{where}: {error}") from None
    return made | {"label": _class(row, choice, table, where)}


_FORMS: Mapping[str, Callable[[Row, Choice, Table, str], Row]] = {
    kinds.CLASSIFICATION: _classified,
    kinds.PAIR: _classified,
    kinds.REGRESSION: _valued,
    kinds.TOKENS: _tagged,
    kinds.SPANS: _span,
    kinds.CAUSAL_LM: _continued,
    kinds.DATA_TO_TEXT: _written,
    kinds.IMAGES: _pictured,
}


def locate(value: Any, table: Path, column: str, where: str) -> Any:
    """A picture of a table: bytes as they are, a path relative to the table."""
    if isinstance(value, Mapping) and {"bytes", "path"} & set(value):
        return value if value.get("bytes") else locate(value.get("path"), table, column, where)
    if isinstance(value, bytes):
        return value
    if is_missing(value):
        raise InlayError(f"{where}: there is no picture in the column {column!r}.")
    path = Path(as_text(value, column, where)).expanduser()
    folder = table if table.is_dir() else table.parent
    return str(path if path.is_absolute() else folder / path)


def _draft(
    name: str, choice: Choice, splits: dict[str, list[Row]], notes: list[str], class_names: list[str] | None
) -> Draft:
    """The draft, with the metrics and fields that the kind implies."""
    training = splits.get("train") or splits.get("all") or next(iter(splits.values()))
    answers = choice.kind in kinds.LANGUAGE_MODELS and choice.label is not None
    fields: tuple[str, ...] = tuple(field_of(name) for name in choice.texts)
    metrics: tuple[str, ...] = ("accuracy", "macro-f1")
    names: tuple[str, ...] | None = None
    if choice.kind in kinds.ONE_LABEL:
        found = {row["label"] for row in training}
        names = tuple(class_names) if class_names and found <= set(class_names) else tuple(labels.in_order(found))
        fields = {kinds.IMAGES: ("image",), kinds.SPANS: ("text", "span")}.get(choice.kind, fields)
    elif choice.kind == kinds.TOKENS:
        fields, names = ("tokens",), tuple(labels.in_order(tag for row in training for tag in row["label"]))
        entity = all(_BIO.fullmatch(name) for name in names)
        metrics = ("entity-f1", "entity-precision", "entity-recall") if entity else ("token-accuracy",)
    elif choice.kind == kinds.REGRESSION:
        metrics = ("pearson", "spearman", "mse")
    elif choice.kind == kinds.DATA_TO_TEXT:
        fields, metrics = ("source",), ("bleu", "perplexity")
    else:
        metrics = ("perplexity", "exact-match") if answers else ("perplexity",)
    return Draft(
        name=re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or "data",
        kind=choice.kind,
        fields=fields,
        splits=splits,
        source="",
        metrics=metrics,
        label_names=names,
        target="target" if answers else None,
        prepare="spans" if choice.kind == kinds.SPANS else None,
        group="source" if choice.kind == kinds.DATA_TO_TEXT else None,
        lm="documents" if choice.kind == kinds.CAUSAL_LM and not answers else None,
        standardise=choice.kind == kinds.REGRESSION,
        columns=_input_columns(choice),
        notes=[*notes, *choice.doubts],
        doubts=list(choice.doubts),
    )


def _input_columns(choice: Choice) -> dict[str, str]:
    """Which column of the user's files each normalised field was read from, where the two differ."""
    if choice.image:
        return {"image": choice.image}
    first = {kinds.DATA_TO_TEXT: "source", kinds.TOKENS: "tokens", kinds.SPANS: "text"}.get(choice.kind)
    if first:
        return {first: choice.texts[0]}
    return {field_of(name): name for name in choice.texts if field_of(name) != name}
