"""The columns of texts and labels, and the kind of task that they make."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from inlay.errors import InlayError
from inlay.records.spec import Spec
from inlay.tasks import cells, conversations, given_labels, kinds, labels
from inlay.tasks.column_values import is_joined, listed, values_of
from inlay.tasks.tables import Table

_LABELS = ("label", "labels", "class", "category", "target", "y", "ner_tags", "tags")
TEXTS = ("text", "sentence", "body", "review", "content", "message", "document", "comment", "title", "tokens", "words")
PAIRS = (
    ("sentence1", "sentence2"),
    ("premise", "hypothesis"),
    ("question1", "question2"),
    ("question", "passage"),
    ("question", "sentence"),
    ("text1", "text2"),
    ("text_a", "text_b"),
    ("query", "document"),
)
_NOT_TEXTS = ("id", "idx", "index", "guid", "uid", "uuid", "split", "source", "url", "path", "filename", "start", "end")


def usual_labels(names: Iterable[str]) -> list[str]:
    """Those of the columns that are called as labels usually are."""
    return [name for name in names if name.lower() in _LABELS]


def label_column(table: Table, spec: Spec, image: str | None = None) -> str:
    taken = {*spec.text, image}
    left = [name for name in table.columns if name not in taken]
    usual = usual_labels(left)
    if len(usual) == 1:
        return usual[0]
    if not usual and len(left) == 1 and taken - {None}:
        return left[0]
    if not usual and len(left) == 2 and not taken - {None}:
        texts = [name for name in left if name.lower() in TEXTS]
        if len(texts) == 1:
            return next(name for name in left if name != texts[0])
    what = f"several columns may be the label ({', '.join(usual)})" if usual else "no column is plainly the label"
    talk = next((name for name in table.columns if cells.is_called_as_chats(name)), None)
    hint = "" if talk is None or usual else f" {talk!r} holds no conversations: {conversations.FORM}."
    raise InlayError(f"{table.path.name!r}: {what}. Name it with --label ({listed(table)}).{hint}")


def text_columns(table: Table, label: str) -> tuple[str, ...]:
    others = [name for name in table.columns if name != label]
    lower = {name.lower(): name for name in others}
    for pair in PAIRS:
        if all(name in lower for name in pair):
            return tuple(lower[name] for name in pair)
    candidates = [name for name in others if name.lower() not in _NOT_TEXTS and _is_text(values_of(table, name))]
    usual = [name for name in candidates if name.lower() in TEXTS]
    chosen = usual if len(usual) == 1 else candidates
    if len(chosen) == 1:
        return (chosen[0],)
    what = f"several columns may be the text ({', '.join(candidates)})" if candidates else "no column holds text"
    raise InlayError(
        f"{table.path.name!r}: {what}. Name one with --text, or two for a pair of texts ({listed(table)})."
    )


def _is_text(values: Sequence[Any]) -> bool:
    if not values or labels.as_numbers(values) is not None:
        return False
    return all(isinstance(v, str) or (isinstance(v, list) and all(isinstance(w, str) for w in v)) for v in values)


def kind_of(table: Table, spec: Spec, texts: tuple[str, ...], label: str, notes: list[str]) -> str:
    """The kind that the columns make, said in a note; what the spec says goes before."""
    several = None if spec.kind else several_labels(table, spec, label, texts)
    lists = isinstance(next(iter(values_of(table, label, 1)), None), list)
    spans = {"start", "end"} <= set(table.columns) and len(texts) == 1
    one_text = kinds.PAIR if len(texts) > 1 else kinds.CLASSIFICATION
    if spec.kind is not None:
        if spec.kind == kinds.PAIR and len(texts) < 2:
            raise kinds.refuse(spec.kind, f"it needs two texts, and there is one ({texts[0]!r}). Give --text twice.")
        if spec.kind == kinds.SPANS and not spans:
            raise kinds.refuse(spec.kind, f"it needs the columns 'start' and 'end' beside the text ({listed(table)}).")
        if spec.kind in (kinds.TOKENS, kinds.SPANS) and len(texts) > 1:
            raise kinds.refuse(spec.kind, f"it needs one text, and there are several ({', '.join(texts)}).")
        if spec.kind == kinds.REGRESSION and is_joined(table, label):
            return kinds.MULTI_REGRESSION
        return one_text if spec.kind == kinds.CLASSIFICATION else spec.kind
    if several is not None:
        guess, why = several
    elif lists:
        guess, why = kinds.TOKENS, f"{label!r} holds a list of labels a row"
    elif spans:
        guess, why = kinds.SPANS, "there are columns 'start' and 'end'"
    elif table.class_names is None and (looks := labels.looks_like_values(values_of(table, label, len(table.rows)))):
        guess, why = kinds.REGRESSION, f"{label!r} holds {looks}"
    else:
        classes = len({name for _, name in _named(table, label)})
        why = f"{label!r} holds {classes:,} classes" + (" and there are two texts" if len(texts) > 1 else "")
        guess = one_text
    notes.append(f"kind: {guess}, because {why} (--kind says otherwise)")
    return guess


def several_labels(table: Table, spec: Spec, label: str, texts: tuple[str, ...] = ()) -> tuple[str, str] | None:
    """The kind of a task whose rows seem to have several labels or numbers, and why; None where they have not, or where
    there is one for each word of a text."""
    if spec.label_separator is not None:
        return kinds.MULTI_LABEL, f"--label-separator says what stands between the labels in {label!r}"
    rows = [row for row in table.rows if isinstance(row.get(label), list | Mapping)]
    together = is_joined(table, label)
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


def doubts_about(table: Table, spec: Spec, kind: str, label: str) -> tuple[str, ...]:
    """What may be wrong with labels that are taken for classes, unless the user has said that they are."""
    if kind not in kinds.ONE_LABEL or spec.kind is not None or table.class_names is not None:
        return ()
    return tuple(labels.doubts(label, _named(table, label)))
