"""Questions about texts as people have them: which columns they are in, and where in its context an answer stands.

A normalised row has `question`, `context` and, as its label, the texts of all answers that are right and the character
at which each begins: -1 where that is not known. A question without an answer has an empty label.
"""

from __future__ import annotations

import ast
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from inlay.errors import InlayError
from inlay.tasks.cells import as_text, as_whole_number, is_missing, is_null

Row = dict[str, Any]
QUESTIONS, CONTEXTS = ("question", "query"), ("context", "passage", "paragraph")
ANSWERS = ("answers", "answer", "answer_text")
STARTS = ("answer_start", "answer_starts")
IMPOSSIBLE = "is_impossible"  # where SQuAD 2 says that a question has no answer
UNKNOWN = -1
LONGEST_CELL = 100_000  # characters of a cell that is read as a list or an object
FORM = 'an answer is a text, a list of texts, or {"text": [...], "answer_start": [...]} as SQuAD has it'


def find_columns(names: Iterable[str]) -> tuple[str, str, str] | None:
    """The columns of question, context and answers, where they have the usual names."""
    lower = {name.lower(): name for name in names}
    found = [next((lower[name] for name in usual if name in lower), None) for usual in (QUESTIONS, CONTEXTS, ANSWERS)]
    question, context, answers = found
    return None if question is None or context is None or answers is None else (question, context, answers)


def columns_beside(names: Iterable[str]) -> dict[str, str]:
    """The columns beside the answers that say where they begin and that there is none, by what they say."""
    lower = {name.lower(): name for name in names}
    start = next((lower[name] for name in STARTS if name in lower), None)
    found = {"start": start, "impossible": lower.get(IMPOSSIBLE)}
    return {what: name for what, name in found.items() if name is not None}


@dataclass
class Located:
    """What became of the answers of a table: how many rows have none, or one that cannot be learnt, and why.

    Rows that are only scored (`learnt` is false) are all kept: what is right is a text, wherever it stands."""

    learnt: bool = True
    without: int = 0
    moved: int = 0
    left_out: Counter[str] = field(default_factory=Counter)
    example: str = ""

    def read(self, row: Mapping[str, Any], label: str, context: str, where: str) -> Row | None:
        """The label of a row; None where its answer is to be learnt and stands nowhere in the context, or nobody knows
        where."""
        texts, starts = read_answers(row, label, where, context)
        if not texts:
            self.without += 1
            return {"text": [], "start": []}
        places = [locate(context, *each) for each in zip(texts, starts, strict=True)]
        if all(place == UNKNOWN for place in places):
            several = any(text in context for text in texts)
            if self.learnt or not several:
                self.left_out["several" if several else "nowhere"] += 1
                self.example = self.example or f"{where}: {texts[0][:60]!r}"
            return None if self.learnt else {"text": texts, "start": places}
        self.moved += any(UNKNOWN < a != b > UNKNOWN for a, b in zip(starts, places, strict=True))
        return {"text": texts, "start": places}

    def notes(self, name: str, count: int) -> list[str]:
        """What a person should know of `count` rows."""
        found = []
        if why := self.why():
            rows = f"{self.left_out.total():,} of {count:,} rows"
            what = f"{rows} left out" if self.learnt else f"{rows} have an answer that cannot be found"
            found.append(f"{name}: {what}: {why} (first {self.example})")
        if self.moved:
            found.append(
                f"{name}: the answer of {self.moved:,} rows stands elsewhere than their start says; it was found"
            )
        if self.without:
            also = ", which is learnt too" if self.learnt else ""
            found.append(f"{name}: {self.without:,} of {count:,} questions have no answer{also}")
        return found

    def why(self) -> str:
        """Why rows were left out."""
        said = {"nowhere": "is not in the context", "several": "is there several times, without a start"}
        return "; ".join(f"the answer of {n:,} {said[what]}" for what, n in sorted(self.left_out.items()))


def locate(context: str, text: str, start: int) -> int:
    """Where an answer begins: where it is said to, or where its text stands once; otherwise `UNKNOWN`."""
    if start >= 0 and context[start : start + len(text)] == text:
        return start
    first = context.find(text)
    once = first >= 0 and context.find(text, first + 1) < 0
    return first if once else UNKNOWN


def read_answers(row: Mapping[str, Any], label: str, where: str, context: str) -> tuple[list[str], list[int]]:
    """The texts of a row's answers and where each is said to begin; none where there is no answer.

    A cell of text that is written as a list or an object is read as one, unless it stands in the context as it is.
    """
    beside = columns_beside(row)
    if "impossible" in beside and _says_yes(row[beside["impossible"]]):
        return [], []
    value = _plain(row[label])
    if isinstance(value, str) and value.lstrip()[:1] in ("{", "[") and value not in context:
        value = _written_out(value)
    start = row.get(beside["start"]) if "start" in beside else None
    if isinstance(value, Mapping):
        if "text" not in value:
            raise InlayError(f"{where}: {label!r} holds an object without 'text'; {FORM}.")
        start = next((value[name] for name in ("answer_start", "start") if name in value), start)
        value = value["text"]
    values = _listed(value)
    if values and all(isinstance(each, Mapping) for each in values):
        lacking = next((each for each in values if "text" not in each), None)
        if lacking is not None:
            raise InlayError(f"{where}: {label!r} holds an object without 'text'; {FORM}.")
        texts, starts = [each["text"] for each in values], [each.get("answer_start") for each in values]
    else:
        texts, starts = values, _listed(start)
    if starts and len(starts) != len(texts):
        if texts:
            raise InlayError(f"{where}: {len(texts)} answers and {len(starts)} starts; each answer needs one.")
        starts = []
    made = [
        (as_text(text, label, where), UNKNOWN if is_missing(at) else as_whole_number(at, "answer_start", where))
        for text, at in zip(texts, starts or [None] * len(texts), strict=True)
        if not is_missing(text)
    ]
    return [text for text, _ in made], [at for _, at in made]


def _written_out(cell: str) -> Any:
    """The object, or the list of texts or objects, that a cell of text is: of JSON, or of Python, as pandas writes them
    into a CSV file. Any other text is itself."""
    if len(cell) > LONGEST_CELL:
        return cell
    for reader in (json.loads, ast.literal_eval):
        with suppress(ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            found = reader(cell)
            texts = isinstance(found, list) and all(isinstance(each, str | Mapping) for each in found)
            if texts or isinstance(found, Mapping):
                return found
    return cell


def _plain(value: Any) -> Any:
    """Lists for NumPy's arrays, as pandas gives them."""
    return value.tolist() if hasattr(value, "tolist") else value


def _listed(value: Any) -> list[Any]:
    value = _plain(value)
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return list(value)
    return [] if is_null(value) else [value]


def _says_yes(value: Any) -> bool:
    if isinstance(value, str):
        return value.strip().lower() in ("true", "1", "1.0", "yes")
    return not is_null(value) and bool(value)


def flatten(records: Mapping[str, Any]) -> list[Row] | None:
    """The rows of SQuAD's own file, articles with paragraphs with questions; None for any other file."""
    articles = records.get("data")
    if not isinstance(articles, list) or not all(isinstance(a, Mapping) and "paragraphs" in a for a in articles):
        return None
    rows = []
    try:
        for article in articles:
            for paragraph in article["paragraphs"]:
                for asked in paragraph["qas"]:
                    row = {"id": asked.get("id"), "title": article.get("title"), "question": asked["question"]}
                    row |= {"context": paragraph["context"], "answers": asked.get("answers") or []}
                    rows.append(row | ({IMPOSSIBLE: asked[IMPOSSIBLE]} if IMPOSSIBLE in asked else {}))
    except (KeyError, TypeError, AttributeError) as error:
        raise InlayError(
            "It has articles with paragraphs, as SQuAD's own file does, and one of them lacks a context, its questions "
            f"(qas) or a question ({error})."
        ) from None
    return rows
