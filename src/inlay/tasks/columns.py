"""Which columns of a user's table are the texts, the label and the images, and what kind of task they make.

A choice is made only where there is one; otherwise the error lists the columns and the options that name them.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from inlay.errors import InlayError, unknown
from inlay.records.spec import Spec
from inlay.tasks import cells, conversations, given_labels, kinds, labels, questions, tables
from inlay.tasks.tables import Table
from inlay.tasks.texts_to_write import as_written, why_written

_LABELS = ("label", "labels", "class", "category", "target", "y", "ner_tags", "tags")
_TEXTS = ("text", "sentence", "body", "review", "content", "message", "document", "comment", "title", "tokens", "words")
_PAIRS = (
    ("sentence1", "sentence2"),
    ("premise", "hypothesis"),
    ("question1", "question2"),
    ("question", "passage"),
    ("question", "sentence"),
    ("text1", "text2"),
    ("text_a", "text_b"),
    ("query", "document"),
)
# An anchor and what belongs to it; texts that do not; how alike two texts are.
_BELONG = (("anchor", "positive"), ("query", "positive"), ("question", "answer"), *_PAIRS)
_NEGATIVE = re.compile(r"(hard[_ ]?)?negative([_ ]?\d+)?", re.IGNORECASE)
_SCORES = ("score", "similarity", "similarity_score")
# What is read and what is to be written of it, as data sets of translations, summaries and answers call them.
_READ_AND_WRITTEN = (
    ("source", "target"),
    ("prompt", "completion"),
    ("prompt", "response"),
    ("input", "output"),
    ("question", "answer"),
    ("document", "summary"),
    ("article", "summary"),
    ("article", "highlights"),
    ("dialogue", "summary"),
    ("text", "summary"),
)
_NOT_TEXTS = ("id", "idx", "index", "guid", "uid", "uuid", "split", "source", "url", "path", "filename", "start", "end")
_CAPTIONS = ("caption", "text", "description", "sentence", "title", "alt_text")
_IMAGES = ("image", "img", "picture", "photo", "path", "file", "filename", "image_path")


@dataclass(frozen=True)
class Choice:
    """The columns of a task, its kind, and what may be wrong with the labels.

    `chat` is the form of conversations, and `parts` the columns that each part of one is read from. `beside` are
    further columns that say something of the label. `decided` are the fields of a spec without which the same data make
    another task: the model decided it.
    """

    kind: str
    texts: tuple[str, ...] = ()
    label: str | None = None
    image: str | None = None
    doubts: tuple[str, ...] = ()
    chat: str | None = None
    parts: Mapping[str, str] = field(default_factory=dict)
    beside: tuple[str, ...] = ()
    decided: Mapping[str, Any] = field(default_factory=dict)


def add_columns(table: Table, names: Iterable[str]) -> None:
    """Add the columns that names stand for: dotted paths, and several columns in one, as in a,b,c.

    The last have an object of the columns' values; nothing where one of them is missing.
    """
    names = list(names)
    table.add_paths([part for name in names for part in (name, *_parts_of(name))])
    for name in names:
        parts = _parts_of(name)
        if name in table.columns or len(parts) < 2 or not set(parts) <= set(table.columns):
            continue
        table.settle()
        table.columns.append(name)
        for row in table.rows:
            found = {part: row.get(part) for part in parts}
            lacks = any(labels.is_absent(value, table.untyped) for value in found.values())
            row[name] = None if lacks else found


def _parts_of(name: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in name.split(",")) if "," in name else ()


def _is_joined(table: Table, name: str) -> bool:
    """Whether a column was made of several."""
    return bool(_parts_of(name)) and isinstance(next(iter(_values(table, name, 1)), None), Mapping)


def choose(table: Table, spec: Spec, notes: list[str], *, writes: bool = False) -> Choice:
    """The columns that the spec names, completed where only one choice is sensible; `writes`, if the model writes
    texts."""
    if spec.kind is not None:
        kinds.check_kind(spec.kind)
    for given in (*spec.text, *filter(None, (spec.label, spec.image))):
        _require(given, table)
    pairs = spec.kind in (kinds.IMAGE_TEXT, kinds.IMAGE_TEXT_CLASSES)
    if spec.image and spec.text and not pairs:
        raise InlayError(f"Give either --image or --text, not both ({spec.image!r} and {', '.join(spec.text)!r}).")
    image = spec.image or _image_column(table, spec)
    if pairs and image:
        return _with_captions(table, spec, image, notes)
    if image and not (spec.image or spec.label or spec.kind) and (talk := _conversations(table, spec)):
        raise InlayError(
            f"{table.path.name!r} has images ({image!r}) beside conversations ({talk[1][conversations.FIELD]!r}), and "
            f"conversations are learnt as texts alone: --text {talk[1][conversations.FIELD]} learns them without the "
            "images. Rows that are about an image are better removed."
        )
    if image:
        return _with_images(table, spec, image, notes)
    if spec.kind is not None and kinds.modality(spec.kind) == "image":
        raise InlayError(
            f"No column of {table.path.name!r} holds images or paths of images ({_listed(table)}). Name it with "
            "--image."
        )
    if talk := _conversations(table, spec):
        form, columns = talk
        return Choice(kinds.CAUSAL_LM, tuple(columns.values()), chat=form, parts=columns)
    if not spec.text:
        _refuse_chats(table)
    if spec.kind in (*kinds.LANGUAGE_MODELS, *kinds.OF_RUNNING_TEXT):
        return _for_language_model(table, spec, notes)
    if spec.kind == kinds.EMBEDDING or _holds_positives(table, spec):
        return _for_embedding(table, spec, notes)
    if spec.kind == kinds.QUESTION_ANSWERING or _holds_answers(table, spec):
        return _for_answers(table, spec, notes)
    label = spec.label or _label_column(table, spec)
    texts = spec.text or _text_columns(table, label)
    if label in texts:
        raise InlayError(f"Column {label!r} cannot be both the text and the label.")
    if not (spec.label and spec.text):
        notes.append(f"text from {', '.join(map(repr, texts))}, label from {label!r}")
    if writes and (why := why_written(table, spec, texts, label)) is not None:
        notes.append(f"kind: {kinds.CAUSAL_LM}, because {why} (--kind {kinds.CLASSIFICATION} says otherwise)")
        return Choice(kinds.CAUSAL_LM, texts, label, decided=as_written(texts, label))
    kind = _kind(table, spec, texts, label, notes)
    return Choice(kind, texts, label, doubts=_doubts(table, spec, kind, label))


def spelled_out(table: Table, spec: Spec, choice: Choice) -> tuple[str, ...]:
    """The fields of the spec that say what would have been chosen without them: to give them changes nothing."""
    found: list[str] = []
    chosen = replace(choice, doubts=(), decided={})
    for name, without in (("label", None), ("image", None), ("text", ()), ("kind", None)):
        if not getattr(spec, name):
            continue
        less = spec.with_(**{name: without})
        try:
            same = replace(choose(table, less, []), doubts=()) == chosen
        except InlayError:
            same = False
        if same:
            spec = less
            found.append(name)
    return tuple(found)


def _require(name: str, table: Table) -> str:
    for part in _parts_of(name) if name not in table.columns else ():
        _require(part, table)
    if name not in table.columns:
        inner = [path for column in table.columns for path in _paths(table, column)]
        raise unknown(f"column of {table.path.name!r}", name, [*table.columns, *inner])
    return name


def _listed(table: Table) -> str:
    """The columns for an error; of one that holds objects what is in them, too."""
    shown = [f"{name} ({', '.join(paths)})" if (paths := _paths(table, name)) else name for name in table.columns]
    return f"columns: {', '.join(shown)}"


def _conversations(table: Table, spec: Spec) -> tuple[str, dict[str, str]] | None:
    """The form and the columns of conversations: those found where no column is named, or the one that --text names."""
    if spec.kind not in (None, kinds.CAUSAL_LM) or spec.label or len(spec.text) > 1:
        return None
    if spec.text:
        (name,) = spec.text
        held = conversations.holds(name, _values(table, name, 1))
        return (conversations.TURNS, {conversations.FIELD: name}) if held else None
    text = [name for name in table.columns if name.lower() in _TEXTS]
    usual = text if spec.kind else usual_labels(table.columns)
    return conversations.find(table.columns, lambda name, most: _values(table, name, most), bool(usual))


def _refuse_chats(table: Table) -> None:
    """Where the text is to be found: a chat is what was meant, and not some other column beside it."""
    for name in table.columns:
        if any(map(cells.is_chat, _values(table, name, 1))):
            raise InlayError(
                f"{table.path.name!r}: {name!r} holds chats. {cells.CHATS}. To use another column, name it with --text."
            )


def _paths(table: Table, column: str) -> list[str]:
    """The dotted paths into a column's objects, as the first of them has them."""
    first = next(iter(_values(table, column, 1)), None)
    return cells.paths_of(first, column) if isinstance(first, Mapping) and not _looks_like_image(first) else []


def _values(table: Table, column: str, most: int = 1000) -> list[Any]:
    found = (row[column] for row in table.rows)
    there = (v for v in found if not cells.is_missing(v) and not (table.untyped and labels.says_missing(v)))
    return list(itertools.islice(there, most))


# ------------------------------------------------------------------------------------------------------- images


def _looks_like_image(value: Any) -> bool:
    if isinstance(value, Mapping):
        return isinstance(value.get("bytes"), bytes) or _looks_like_image(value.get("path"))
    return isinstance(value, bytes) or (isinstance(value, str) and value.lower().endswith(tables.IMAGES))


def _image_column(table: Table, spec: Spec) -> str | None:
    """The one column of images, unless texts were asked for."""
    captioned = spec.kind == kinds.IMAGE_TEXT
    if (spec.text and not captioned) or (spec.kind is not None and kinds.of_images(spec.kind) is None):
        return None
    found = [
        name
        for name in table.columns
        if name != spec.label and (values := _values(table, name, 20)) and all(map(_looks_like_image, values))
    ]
    if len(found) > 1:
        usual = [name for name in found if name.lower() in _IMAGES[:4]]
        if len(usual) != 1:
            raise InlayError(f"Columns {', '.join(found)} all hold images: choose one with --image.")
        found = usual
    return found[0] if found else None


def _with_captions(table: Table, spec: Spec, image: str, notes: list[str]) -> Choice:
    """Images with a text each; or with a class, of which a template makes a text."""
    if spec.text and spec.label:
        raise InlayError(
            f"Each image has a text (--text {spec.text[0]}) or a class (--label {spec.label}), not both: leave one out."
        )
    usual = [name for name in table.columns if name.lower() in _CAPTIONS and name != image]
    by_class = spec.kind == kinds.IMAGE_TEXT_CLASSES or spec.label or table.class_names is not None
    if spec.text or (usual and not by_class):
        if spec.kind == kinds.IMAGE_TEXT_CLASSES:
            raise kinds.refuse(
                spec.kind, f"it needs a class for each image, not texts: leave --text {spec.text[0]} out."
            )
        texts = spec.text or tuple(usual)
        if len(texts) > 1:
            raise kinds.refuse(
                kinds.IMAGE_TEXT,
                f"a row has one text, and several columns may hold it ({', '.join(texts)}). "
                "Name one with --text; another row for the same image gives it another text.",
            )
        if not (spec.image and spec.text):
            notes.append(f"images from {image!r}, texts from {texts[0]!r}")
        return Choice(kinds.IMAGE_TEXT, texts, image=image)
    label = spec.label or _label_column(table, spec, image)
    if not (spec.image and spec.label):
        notes.append(f"kind: {kinds.IMAGE_TEXT_CLASSES}; images from {image!r}, classes from {label!r}")
    return Choice(kinds.IMAGE_TEXT_CLASSES, label=label, image=image)


def _with_images(table: Table, spec: Spec, image: str, notes: list[str]) -> Choice:
    kind = None if spec.kind is None else kinds.of_images(spec.kind)
    if spec.kind is not None and kind is None:
        raise InlayError(f"kind={spec.kind!r} does not go with images; {', '.join(kinds.ALL_OF_IMAGES)} do.")
    label = spec.label or _label_column(table, spec, image)
    why = None
    if kind is None and (several := _several(table, spec, label)) is not None:
        kind, why = kinds.of_images(several[0]), several[1]
    if kind is None and table.class_names is None:
        looks = labels.looks_like_values(_values(table, label, len(table.rows)))
        kind, why = (kinds.IMAGE_REGRESSION, f"{label!r} holds {looks}") if looks else (None, None)
    if why is not None:
        notes.append(f"kind: {kind}, because {why} (--kind says otherwise)")
    kind = kind or kinds.IMAGES
    if not (spec.image and spec.label):
        notes.append(f"images from {image!r}, label from {label!r}")
    return Choice(kind, label=label, image=image, doubts=_doubts(table, spec, kind, label))


# ----------------------------------------------------------------------------------------------- texts and labels


def usual_labels(names: Iterable[str]) -> list[str]:
    """Those of the columns that are called as labels usually are."""
    return [name for name in names if name.lower() in _LABELS]


def _label_column(table: Table, spec: Spec, image: str | None = None) -> str:
    taken = {*spec.text, image}
    left = [name for name in table.columns if name not in taken]
    usual = usual_labels(left)
    if len(usual) == 1:
        return usual[0]
    if not usual and len(left) == 1 and taken - {None}:
        return left[0]
    if not usual and len(left) == 2 and not taken - {None}:
        texts = [name for name in left if name.lower() in _TEXTS]
        if len(texts) == 1:
            return next(name for name in left if name != texts[0])
    what = f"several columns may be the label ({', '.join(usual)})" if usual else "no column is plainly the label"
    talk = next((name for name in table.columns if cells.is_called_as_chats(name)), None)
    hint = "" if talk is None or usual else f" {talk!r} holds no conversations: {conversations.FORM}."
    raise InlayError(f"{table.path.name!r}: {what}. Name it with --label ({_listed(table)}).{hint}")


def _text_columns(table: Table, label: str) -> tuple[str, ...]:
    others = [name for name in table.columns if name != label]
    lower = {name.lower(): name for name in others}
    for pair in _PAIRS:
        if all(name in lower for name in pair):
            return tuple(lower[name] for name in pair)
    candidates = [name for name in others if name.lower() not in _NOT_TEXTS and _is_text(_values(table, name))]
    usual = [name for name in candidates if name.lower() in _TEXTS]
    chosen = usual if len(usual) == 1 else candidates
    if len(chosen) == 1:
        return (chosen[0],)
    what = f"several columns may be the text ({', '.join(candidates)})" if candidates else "no column holds text"
    raise InlayError(
        f"{table.path.name!r}: {what}. Name one with --text, or two for a pair of texts ({_listed(table)})."
    )


def _is_text(values: Sequence[Any]) -> bool:
    if not values or labels.as_numbers(values) is not None:
        return False
    return all(isinstance(v, str) or (isinstance(v, list) and all(isinstance(w, str) for w in v)) for v in values)


def _kind(table: Table, spec: Spec, texts: tuple[str, ...], label: str, notes: list[str]) -> str:
    """The kind that the columns make, said in a note; what the spec says goes before."""
    several = None if spec.kind else _several(table, spec, label, texts)
    lists = isinstance(next(iter(_values(table, label, 1)), None), list)
    spans = {"start", "end"} <= set(table.columns) and len(texts) == 1
    one_text = kinds.PAIR if len(texts) > 1 else kinds.CLASSIFICATION
    if spec.kind is not None:
        if spec.kind == kinds.PAIR and len(texts) < 2:
            raise kinds.refuse(spec.kind, f"it needs two texts, and there is one ({texts[0]!r}). Give --text twice.")
        if spec.kind == kinds.SPANS and not spans:
            raise kinds.refuse(spec.kind, f"it needs the columns 'start' and 'end' beside the text ({_listed(table)}).")
        if spec.kind in (kinds.TOKENS, kinds.SPANS) and len(texts) > 1:
            raise kinds.refuse(spec.kind, f"it needs one text, and there are several ({', '.join(texts)}).")
        if spec.kind == kinds.REGRESSION and _is_joined(table, label):
            return kinds.MULTI_REGRESSION
        return one_text if spec.kind == kinds.CLASSIFICATION else spec.kind
    if several is not None:
        guess, why = several
    elif lists:
        guess, why = kinds.TOKENS, f"{label!r} holds a list of labels a row"
    elif spans:
        guess, why = kinds.SPANS, "there are columns 'start' and 'end'"
    elif table.class_names is None and (looks := labels.looks_like_values(_values(table, label, len(table.rows)))):
        guess, why = kinds.REGRESSION, f"{label!r} holds {looks}"
    else:
        classes = len({name for _, name in _named(table, label)})
        why = f"{label!r} holds {classes:,} classes" + (" and there are two texts" if len(texts) > 1 else "")
        guess = one_text
    notes.append(f"kind: {guess}, because {why} (--kind says otherwise)")
    return guess


def _several(table: Table, spec: Spec, label: str, texts: tuple[str, ...] = ()) -> tuple[str, str] | None:
    """The kind of a task whose rows seem to have several labels or numbers, and why; None where they have not, or where
    there is one for each word of a text."""
    if spec.label_separator is not None:
        return kinds.MULTI_LABEL, f"--label-separator says what stands between the labels in {label!r}"
    rows = [row for row in table.rows if isinstance(row.get(label), list | Mapping)]
    together = _is_joined(table, label)
    if not rows or not (together or isinstance(rows[0][label], list)):
        return None
    what = {
        "labels": (kinds.MULTI_LABEL, "hold 1 or 0"),
        "shares": (kinds.SOFT_LABELS, "hold numbers that add up to 1 in every row"),
        "values": (kinds.MULTI_REGRESSION, "hold numbers"),
    }
    if (found := given_labels.guess([row[label] for row in rows])) is not None:
        kind, why = what[found]
        return kind, f"the {'columns' if together else 'lists'} {label!r} {why}"
    # Of tags, a few rows may be wrong; sets are as long as a text has words by chance.
    words = len(texts) == 1 and 2 * sum(_counts_words(row[texts[0]], row[label]) for row in rows) >= len(rows)
    if together or words:
        return None
    why = f"{label!r} holds a list of labels a row" + (", not one for each word" if len(texts) == 1 else "")
    return kinds.MULTI_LABEL, why


def _counts_words(text: Any, found: Sequence[Any]) -> bool:
    """Whether there is a label for each word; words in a list are tagged even where some are not."""
    return isinstance(text, list) or not isinstance(text, str) or len(text.split()) == len(found)


def _named(table: Table, label: str) -> list[tuple[int, str]]:
    """The labels by name, each with the number of its row; what is missing is left out."""
    return [
        (number, labels.as_name(row[label], label, f"{table.path.name}, row {number}"))
        for number, row in table.numbered
        if not cells.is_missing(row[label]) and not (table.untyped and labels.says_missing(row[label]))
    ]


def _doubts(table: Table, spec: Spec, kind: str, label: str) -> tuple[str, ...]:
    """What may be wrong with labels that are taken for classes, unless the user has said that they are."""
    if kind not in kinds.ONE_LABEL or spec.kind is not None or table.class_names is not None:
        return ()
    return tuple(labels.doubts(label, _named(table, label)))


def _for_language_model(table: Table, spec: Spec, notes: list[str]) -> Choice:
    """A text to continue, or a prompt and what should follow: --text PROMPT --label ANSWER, or --text twice."""
    assert spec.kind is not None
    answer = spec.label
    if spec.kind == kinds.SEQUENCE_TO_SEQUENCE and not (spec.text and answer) and len(spec.text) < 2:
        texts, answer = _read_and_written(table, spec)
    else:
        texts = list(spec.text or _text_columns(table, spec.label or ""))
    if answer is None and len(texts) == 2:
        (*texts, answer) = texts
    if spec.kind == kinds.MASKED_LM and answer is not None:
        raise kinds.refuse(spec.kind, f"it learns from a text alone, and has no label: leave --label {answer} out.")
    if len(texts) > 1:
        raise kinds.refuse(spec.kind, f"it needs one text and at most one answer, not {', '.join(texts)}.")
    if spec.kind == kinds.DATA_TO_TEXT and answer is None:
        raise kinds.refuse(spec.kind, f"it needs the text to write: name it with --label ({_listed(table)}).")
    if not spec.text or spec.label != answer:
        notes.append(f"text from {texts[0]!r}" + (f", answer from {answer!r}" if answer else ""))
    return Choice(spec.kind, tuple(texts), answer)


# ----------------------------------------------------------------------------------------------------- embeddings


def _holds_positives(table: Table, spec: Spec) -> bool:
    """Whether the columns say by their names that they are to embed: an anchor or a query, and its positive."""
    named = {name.lower() for name in table.columns}
    free = spec.kind is None and not spec.text and spec.label is None and not usual_labels(table.columns)
    return free and "positive" in named and bool({"anchor", "query"} & named)


def _for_embedding(table: Table, spec: Spec, notes: list[str]) -> Choice:
    """An anchor, what belongs to it, and perhaps texts that do not; or two texts and how alike they are."""
    texts = spec.text or _texts_that_belong(table)
    score = spec.label
    if score is None and len(texts) == 2:
        score = next((name for name in table.columns if name.lower() in _SCORES and name not in texts), None)
    if len(texts) < 2:
        raise kinds.refuse(
            kinds.EMBEDDING,
            f"it needs two texts that belong together, and there is one ({texts[0]!r}). Give --text ANCHOR --text "
            "POSITIVE, and --text NEGATIVE for each column of texts that do not belong to the anchor.",
        )
    if len({*texts, score}) < len(texts) + 1:
        named = ", ".join(map(repr, (*texts, *filter(None, [score]))))
        raise InlayError(
            f"An anchor, its positive, negatives and scores are columns of their own: {named} names a column twice."
        )
    if score is not None and len(texts) > 2:
        raise kinds.refuse(
            kinds.EMBEDDING,
            f"the scores in {score!r} are of two texts, and there are {len(texts)} ({', '.join(texts)}).",
        )
    if not spec.text or spec.kind is None or score != spec.label:
        rest = f", negatives from {', '.join(map(repr, texts[2:]))}" if texts[2:] else ""
        if score is not None:
            rest = f", scores from {score!r}"
        notes.append(f"kind: {kinds.EMBEDDING}; anchor from {texts[0]!r}, positive from {texts[1]!r}{rest}")
    return Choice(kinds.EMBEDDING, tuple(texts), score)


def _texts_that_belong(table: Table) -> tuple[str, ...]:
    lower = {name.lower(): name for name in table.columns}
    for pair in _BELONG:
        if all(name in lower for name in pair):
            return (*(lower[name] for name in pair), *filter(_NEGATIVE.fullmatch, table.columns))
    raise InlayError(
        f"{table.path.name!r}: no two columns are plainly an anchor and its positive. Name them: --text ANCHOR --text "
        f"POSITIVE ({_listed(table)})."
    )


# ------------------------------------------------------------------------------------------------- question answering


def _holds_answers(table: Table, spec: Spec) -> bool:
    """Whether the columns say by their names that answers are to be found: a question, its context, the answers."""
    free = spec.kind is None and not spec.text and spec.label is None and not usual_labels(table.columns)
    named = {name.lower() for name in table.columns}
    return free and questions.find_columns(table.columns) is not None and {"question", "context"} <= named


def _for_answers(table: Table, spec: Spec, notes: list[str]) -> Choice:
    """A question, a context, and the answers, which stand in it."""
    found = questions.find_columns(table.columns)
    if spec.text and len(spec.text) != 2:
        raise kinds.refuse(
            kinds.QUESTION_ANSWERING,
            f"it needs a question and a context, not {', '.join(map(repr, spec.text))}. Give --text QUESTION --text "
            "CONTEXT.",
        )
    if spec.text:
        texts = (spec.text[0], spec.text[1])
    elif found:
        texts = found[:2]
    else:
        texts = None
    label = spec.label or (found[2] if found else None)
    if label is None and spec.text:
        label = next((name for name in table.columns if name.lower() in questions.ANSWERS), None)
    if texts is None or label is None:
        lacks = "the answers: name them with --label ANSWERS" if texts else "a question, a context and the answers: "
        lacks += "" if texts else "name them with --text QUESTION --text CONTEXT --label ANSWERS"
        raise kinds.refuse(kinds.QUESTION_ANSWERING, f"it needs {lacks} ({_listed(table)}).")
    if len({*texts, label}) < 3:
        named = ", ".join(map(repr, (*texts, label)))
        raise InlayError(f"A question, its context and the answers are columns of their own: {named} names one twice.")
    if not (spec.kind and spec.text and spec.label):
        said = f"question from {texts[0]!r}, context from {texts[1]!r}, answers from {label!r}"
        notes.append(f"kind: {kinds.QUESTION_ANSWERING}; {said}" + (" (--kind says otherwise)" * (spec.kind is None)))
    return Choice(
        kinds.QUESTION_ANSWERING, texts, label, beside=tuple(questions.columns_beside(table.columns).values())
    )


def _read_and_written(table: Table, spec: Spec) -> tuple[list[str], str]:
    """The two columns of a task that writes one text for another, where the spec names one of them or none."""
    named = {name.lower(): name for name in table.columns}
    for read, written in _READ_AND_WRITTEN:
        text, answer = (spec.text or [named.get(read)])[0], spec.label or named.get(written)
        if text and answer and text != answer and (spec.text or read in named) and (spec.label or written in named):
            return [text], answer
    left = [name for name in table.columns if name not in (*spec.text, spec.label)]
    if len(left) == 1 and (spec.text or spec.label):
        return [*spec.text, *left][:1], spec.label or left[0]
    lacks = "the text to read: name it with --text" if spec.label else "the text to write: name it with --label"
    lacks = lacks if spec.text or spec.label else "a text to read and one to write: name them with --text and --label"
    raise kinds.refuse(spec.kind or "", f"it needs {lacks} ({_listed(table)}).")
