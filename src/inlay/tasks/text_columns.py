"""The columns of texts without classes: for language models, embeddings and extractive question answering."""

from __future__ import annotations

import re

from inlay.errors import InlayError
from inlay.records.spec import Spec
from inlay.tasks import kinds, questions
from inlay.tasks.column_values import Choice, listed
from inlay.tasks.label_columns import PAIRS, text_columns, usual_labels
from inlay.tasks.tables import Table

# An anchor and what belongs to it; texts that do not; how alike two texts are.
_BELONG = (("anchor", "positive"), ("query", "positive"), ("question", "answer"), *PAIRS)
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


def for_language_model(table: Table, spec: Spec, notes: list[str]) -> Choice:
    """A text to continue, or a prompt and what should follow: --text PROMPT --label ANSWER, or --text twice."""
    assert spec.kind is not None
    answer = spec.label
    if spec.kind == kinds.SEQUENCE_TO_SEQUENCE and not (spec.text and answer) and len(spec.text) < 2:
        texts, answer = _read_and_written(table, spec)
    else:
        texts = list(spec.text or text_columns(table, spec.label or ""))
    if answer is None and len(texts) == 2:
        (*texts, answer) = texts
    if spec.kind == kinds.MASKED_LM and answer is not None:
        raise kinds.refuse(spec.kind, f"it learns from a text alone, and has no label: leave --label {answer} out.")
    if len(texts) > 1:
        raise kinds.refuse(spec.kind, f"it needs one text and at most one answer, not {', '.join(texts)}.")
    if spec.kind == kinds.DATA_TO_TEXT and answer is None:
        raise kinds.refuse(spec.kind, f"it needs the text to write: name it with --label ({listed(table)}).")
    if not spec.text or spec.label != answer:
        notes.append(f"text from {texts[0]!r}" + (f", answer from {answer!r}" if answer else ""))
    return Choice(spec.kind, tuple(texts), answer)


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
    raise kinds.refuse(spec.kind or "", f"it needs {lacks} ({listed(table)}).")


def holds_positives(table: Table, spec: Spec) -> bool:
    """Whether the columns say by their names that they are to embed: an anchor or a query, and its positive."""
    named = {name.lower() for name in table.columns}
    free = spec.kind is None and not spec.text and spec.label is None and not usual_labels(table.columns)
    return free and "positive" in named and bool({"anchor", "query"} & named)


def for_embedding(table: Table, spec: Spec, notes: list[str]) -> Choice:
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
        f"POSITIVE ({listed(table)})."
    )


def holds_answers(table: Table, spec: Spec) -> bool:
    """Whether the columns say by their names that answers are to be found: a question, its context, the answers."""
    free = spec.kind is None and not spec.text and spec.label is None and not usual_labels(table.columns)
    named = {name.lower() for name in table.columns}
    return free and questions.find_columns(table.columns) is not None and {"question", "context"} <= named


def for_answers(table: Table, spec: Spec, notes: list[str]) -> Choice:
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
        raise kinds.refuse(kinds.QUESTION_ANSWERING, f"it needs {lacks} ({listed(table)}).")
    if len({*texts, label}) < 3:
        named = ", ".join(map(repr, (*texts, label)))
        raise InlayError(f"A question, its context and the answers are columns of their own: {named} names one twice.")
    if not (spec.kind and spec.text and spec.label):
        said = f"question from {texts[0]!r}, context from {texts[1]!r}, answers from {label!r}"
        notes.append(f"kind: {kinds.QUESTION_ANSWERING}; {said}" + (" (--kind says otherwise)" * (spec.kind is None)))
    return Choice(
        kinds.QUESTION_ANSWERING, texts, label, beside=tuple(questions.columns_beside(table.columns).values())
    )
