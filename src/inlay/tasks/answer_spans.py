"""Which stretch of a text answers a question: the best legal one of a model's logits, in words, and scored.

A row is read in windows (`windows.py`). With the logits s of first and e of last tokens, the answer is

    argmax over windows w and tokens i <= j of its context:  s_wi + e_wj

among the stretches that are not longer than `longest_answer` characters. Where questions may have no answer, that is
worth `min_w (s_w0 + e_w0)`, the first token's, and it is given where it exceeds the best answer's by `no_answer`. The
metrics are those of SQuAD's official evaluation.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from inlay.tasks.schema import TaskSchema
    from inlay.tasks.windows import EncodedWindows

SHORTEST_LIMIT = 150  # characters that an answer may always have
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


@dataclass(frozen=True)
class Span:
    """A stretch of a row's context with its worth, and its probability in its window: how likely its first token is the
    first, times how likely its last is the last."""

    worth: float
    start: int
    end: int
    score: float


@dataclass(frozen=True)
class AnswersOfRow:
    """Of a row: the best stretch, None where no window has any; and no answer, with how much it is worth."""

    best: Span | None
    nothing: Span

    @property
    def lead(self) -> float:
        """By how much no answer is worth more than the best one."""
        return np.inf if self.best is None else self.nothing.worth - self.best.worth


def best_span(
    first: np.ndarray, last: np.ndarray, starts: np.ndarray, ends: np.ndarray, longest: int | None
) -> tuple[float, int, int] | None:
    """The largest `first[i] + last[j]` with `i <= j` and `ends[j] - starts[i] <= longest`, and its tokens.

    Of equal ones it is the shortest, then the first. None where no stretch is legal.
    """
    found: tuple[float, int, int] | None = None
    for apart in range(len(first)):
        count = len(first) - apart
        lengths = ends[apart:] - starts[:count]
        legal = (lengths > 0) & (lengths <= (longest or lengths.max(initial=1)))
        if longest and lengths.min() > longest:
            break  # further tokens only make it longer
        if not legal.any():
            continue
        worth = np.where(legal, first[:count] + last[apart:], -np.inf)
        i = int(worth.argmax())
        if found is None or worth[i] > found[0]:
            found = float(worth[i]), i, i + apart
    return found


def candidates(outputs: np.ndarray, encoded: EncodedWindows, longest: int | None) -> list[AnswersOfRow]:
    """What each row may be answered, from the logits of its windows: N x L x 2, and any prompt's tokens before them."""
    ahead = max(0, outputs.shape[1] - int(encoded.lengths.max(initial=0)))
    found: list[AnswersOfRow | None] = [None] * encoded.rows
    for number, row in enumerate(encoded.row_of):
        starts, ends = encoded.places(number)
        logits = outputs[number, ahead : ahead + len(starts)].astype(np.float64)
        context = np.flatnonzero(starts >= 0)
        # As the loss has it: the first token, which says that there is no answer, and those of the context.
        legal = np.concatenate([[0], context])
        log_total = np.logaddexp.reduce(logits[legal], axis=0).sum()
        worth = float(logits[0].sum())
        nothing = Span(worth, -1, -1, float(np.exp(worth - log_total)))
        best = best_span(logits[context, 0], logits[context, 1], starts[context], ends[context], longest)
        own = None
        if best is not None:
            value, i, j = best
            own = Span(value, int(starts[context[i]]), int(ends[context[j]]), float(np.exp(value - log_total)))
        known = found[row]
        if known is not None:
            nothing = min(known.nothing, nothing, key=lambda each: each.worth)
            own = max((each for each in (known.best, own) if each), key=lambda each: each.worth, default=None)
        found[row] = AnswersOfRow(own, nothing)
    return [each for each in found if each is not None]


def decode(schema: TaskSchema, outputs: np.ndarray, encoded: EncodedWindows) -> list[dict[str, Any]]:
    """For each row `answer`, `score`, and `start` and `end` in the characters of its context; an empty answer without a
    place where there is none."""
    made = []
    for context, each in zip(encoded.contexts, candidates(outputs, encoded, schema.longest_answer), strict=True):
        span = each.best
        if span is None or (schema.no_answer is not None and each.lead > schema.no_answer):
            made.append({"answer": "", "score": each.nothing.score, "start": None, "end": None})
        else:
            answer = context[span.start : span.end]
            made.append({"answer": answer, "score": span.score, "start": span.start, "end": span.end})
    return made


# --------------------------------------------------------------------------------------------------------- metrics


def normalise(text: str) -> str:
    """As SQuAD compares answers: in lower case, without punctuation, articles and superfluous white space."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def exact(said: str, answers: Sequence[str]) -> float:
    """1 where what is said is one of the answers; of a question without an answer, where nothing is said."""
    return max(float(normalise(said) == normalise(answer)) for answer in _wanted(answers))


def f1(said: str, answers: Sequence[str]) -> float:
    """The F1 of the words of what is said, against the answer that it fits best."""
    return max(_f1(normalise(said).split(), normalise(answer).split()) for answer in _wanted(answers))


def _wanted(answers: Sequence[str]) -> Sequence[str]:
    return [answer for answer in answers if normalise(answer)] or [""]


def _f1(said: Sequence[str], wanted: Sequence[str]) -> float:
    if not said or not wanted:
        return float(list(said) == list(wanted))
    common = (Counter(said) & Counter(wanted)).total()
    return 2 * common / (len(said) + len(wanted))


METRICS = {"squad-f1": f1, "squad-exact": exact}


def score(schema: TaskSchema, outputs: np.ndarray, encoded: EncodedWindows) -> dict[str, float]:
    """The task's metrics: means over rows."""
    said = [each["answer"] for each in decode(schema, outputs, encoded)]
    pairs = list(zip(said, encoded.answers, strict=True))
    return {name: float(np.mean([METRICS[name](*pair) for pair in pairs])) for name in schema.metrics}


def choose_no_answer(schema: TaskSchema, outputs: np.ndarray, encoded: EncodedWindows) -> float:
    """The threshold with the highest mean F1 on these rows: halfway between two neighbouring leads; of several that are
    equally good the one nearest to 0."""
    found = candidates(outputs, encoded, schema.longest_answer)
    leads = np.array([each.lead for each in found])
    given = [
        0.0 if each.best is None else f1(context[each.best.start : each.best.end], answers)
        for context, each, answers in zip(encoded.contexts, found, encoded.answers, strict=True)
    ]
    nothing = np.array([f1("", answers) for answers in encoded.answers])
    order = np.argsort(leads, kind="stable")
    ranked = leads[order]
    # With a threshold after the first k, those are answered and the others are not.
    gains = np.concatenate([[0.0], np.cumsum((np.array(given) - nothing)[order])])
    finite = ranked[np.isfinite(ranked)]
    if not len(finite):
        return 0.0
    edges = np.concatenate([[finite[0] - 1], finite, [finite[-1] + 1]])
    below, above = edges[:-1], edges[1:]
    possible = np.where((below <= 0) & (above > 0), 0.0, (below + above) / 2)
    there = below < above  # not between equal ones
    gains = gains[: len(possible)]
    good = there & (gains >= gains[there].max() - 1e-12)
    return float(min(possible[good], key=abs))
