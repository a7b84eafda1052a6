"""Questions and their contexts as tokens: a context that is too long is read in windows that overlap.

Every window has the whole question. A token of a context knows the characters that it stands for there, without white
space at its ends, so that what is found can be cut out of the text as it came. A token of white space alone is part of
no answer's beginning or end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from inlay.errors import InlayError
from inlay.tasks.encode import IGNORED, Encoded, Ragged, end_of_text
from inlay.tasks.questions import UNKNOWN

OVERLAP = 128  # tokens that two windows share at most
LEGAL, FIRST, LAST = 0, 1, 2  # what is marked of a token; the first and last one of an answer has both marks
NO_PLACE = -1
_BATCH = 200


class EncodedWindows(Encoded):
    """The windows of rows, for `TextCollator`: `row_of` has the row of each, `rows` is how many rows there are.

    `contexts` are the texts as they came, `answers` the right answers of each row, once they are marked. `labels` mark
    tokens: see `inlay.backbones.answer_outputs`.
    """

    def __init__(
        self,
        columns: Mapping[str, Sequence[Sequence[int]] | Ragged],
        row_of: Sequence[int],
        places: tuple[Sequence[Sequence[int]], Sequence[Sequence[int]]],
        contexts: Sequence[str],
    ) -> None:
        super().__init__(columns)
        self.row_of = list(row_of)
        self.contexts = list(contexts)
        self.answers: list[list[str]] = []
        self._starts, self._ends = (Ragged.of(each) for each in places)

    @property
    def rows(self) -> int:
        """How many rows the windows are of."""
        return len(self.contexts)

    def places(self, window: int) -> tuple[np.ndarray, np.ndarray]:
        """For each token of a window where its characters begin and end in the context; `NO_PLACE` for the others."""
        return np.asarray(self._starts[window]), np.asarray(self._ends[window])

    def mark(self, labels: Sequence[Mapping[str, Any]]) -> None:
        """Mark the answers of the rows; of several right ones the first whose place is known."""
        self.answers = [list(label["text"]) for label in labels]
        marked = []
        for window, row in enumerate(self.row_of):
            edges = [i for i in (window - 1, window + 1) if 0 <= i < len(self) and self.row_of[i] == row]
            known = _first_known(labels[row], self.contexts[row])
            marked.append(
                _marks(*self.places(window), known, first=window - 1 not in edges, last=window + 1 not in edges)
            )
        self.labels = Ragged.of(marked)

    def take(self, rows: Sequence[int]) -> EncodedWindows:
        """Some of the rows, with all their windows."""
        number = {row: place for place, row in enumerate(rows)}
        kept = [window for window, row in enumerate(self.row_of) if row in number]
        columns = {name: [values[window] for window in kept] for name, values in self._columns.items()}
        made = EncodedWindows(
            columns,
            [number[self.row_of[window]] for window in kept],
            ([self._starts[window] for window in kept], [self._ends[window] for window in kept]),
            [self.contexts[row] for row in rows],
        )
        if self.labels is not None:
            made.answers = [self.answers[row] for row in rows]
            made.labels = Ragged.of([self.labels[window] for window in kept])
        return made


Place = tuple[int, int]  # the characters of an answer; both `UNKNOWN` where there is one and nobody knows where


def _first_known(label: Mapping[str, Any], context: str) -> Place | None:
    """Where a row's answer stands, white space at its ends left out; None where there is none."""
    if not label["text"]:
        return None
    for text, start in zip(label["text"], label["start"], strict=True):
        if start != UNKNOWN and text.strip():
            begin = start + len(text) - len(text.lstrip())
            return begin, begin + len(text.strip())
    return UNKNOWN, UNKNOWN


def _marks(starts: np.ndarray, ends: np.ndarray, answer: Place | None, *, first: bool, last: bool) -> list[int]:
    """The marks of a window's tokens. `first` and `last` say that it is its row's first or last window: characters that
    the tokenizer dropped there belong to it."""
    marks = np.where(starts >= 0, LEGAL, IGNORED)
    marks[0] = LEGAL  # which says that there is no answer here
    if answer is not None and answer[0] == UNKNOWN:
        return marks.tolist()
    if answer is not None:
        begin, end = answer
        at = np.flatnonzero(starts >= 0)
        inside = len(at) and (first or starts[at[0]] <= begin) and (last or ends[at[-1]] >= end)
        touched = at[(ends[at] > begin) & (starts[at] < end)]
        if inside and len(touched):
            marks[touched[0]] += FIRST
            marks[touched[-1]] += LAST
            return marks.tolist()
    marks[0] += FIRST + LAST
    return marks.tolist()


def encode_windows(
    rows: Sequence[Mapping[str, Any]], tokenizer: Any, max_length: int, split: str | None = None
) -> EncodedWindows:
    """The windows of questions and contexts; `split` is what its rows are called in the notes, None for new ones.

    A question takes at most half of a window, and is cut where it is longer. Two windows share `OVERLAP` tokens, or a
    quarter of a short window.
    """
    if not getattr(tokenizer, "is_fast", False):
        raise InlayError(f"Question answering needs a fast tokenizer; {type(tokenizer).__name__} is not one.")
    room = max_length - tokenizer.num_special_tokens_to_add(pair=True)
    overlap = min(OVERLAP, room // 4)
    questions, cut = _questions([row["question"] for row in rows], tokenizer, max(0, room // 2))
    contexts = [row["context"] for row in rows]
    columns: dict[str, list[list[int]]] = {}
    row_of: list[int] = []
    starts: list[list[int]] = []
    ends: list[list[int]] = []
    for begin in range(0, len(rows), _BATCH):
        part = slice(begin, begin + _BATCH)
        found = tokenizer(
            questions[part],
            contexts[part],
            truncation="only_second",
            max_length=max_length,
            stride=overlap,
            return_overflowing_tokens=True,
            return_offsets_mapping=True,
            padding=False,
            verbose=False,
        )
        offsets, own = found.pop("offset_mapping"), found.pop("overflow_to_sample_mapping")
        row_of += [begin + row for row in own]
        for window, row in enumerate(own):
            places = _places(contexts[begin + row], offsets[window], found.sequence_ids(window))
            starts.append([a for a, _ in places])
            ends.append([b for _, b in places])
        for name, values in found.items():
            columns.setdefault(name, []).extend(values)
    for window, ids in enumerate(columns.get("input_ids", ())):
        if not ids:  # nothing is asked of nothing, by a tokenizer that adds no tokens
            starts[window], ends[window] = [NO_PLACE], [NO_PLACE]
            for name, values in columns.items():
                values[window] = [end_of_text(tokenizer) if name == "input_ids" else int(name == "attention_mask")]
    made = EncodedWindows(columns, row_of, (starts, ends), contexts)
    made.notes = tuple(_notes(made, cut, max_length, overlap, split)) if split is not None else ()
    return made


def _notes(made: EncodedWindows, cut: int, length: int, overlap: int, split: str) -> list[str]:
    found = []
    if len(made) > made.rows:
        long = len({a for a, b in zip(made.row_of, made.row_of[1:], strict=False) if a == b})
        found.append(
            f"{long:,} of {made.rows:,} {split} contexts are longer than {length} tokens with their question: they are "
            f"read in windows that share {overlap} tokens, {len(made):,} windows in all"
        )
    if cut:
        found.append(f"{cut:,} of {made.rows:,} {split} questions take more than half of {length} tokens and were cut")
    return found


def _questions(texts: Sequence[str], tokenizer: Any, most: int) -> tuple[list[str], int]:
    """The questions, each of at most so many tokens, and how many were cut.

    A line break follows them where the tokenizer puts nothing between two texts.
    """
    bare = tokenizer.num_special_tokens_to_add(pair=True) == tokenizer.num_special_tokens_to_add(pair=False)
    made, cut = [], 0
    for begin in range(0, len(texts), _BATCH):
        part = list(texts[begin : begin + _BATCH])
        offsets = tokenizer(part, add_special_tokens=False, return_offsets_mapping=True, verbose=False)[
            "offset_mapping"
        ]
        for text, places in zip(part, offsets, strict=True):
            long = len(places) > most
            cut += long
            made.append((text[: places[most - 1][1] if most else 0] if long else text) + "\n" * bare)
    return made, cut


def _places(context: str, offsets: Sequence[tuple[int, int]], sides: Sequence[int | None]) -> list[tuple[int, int]]:
    """Where the characters of each token stand in the context, white space at their ends left out."""
    found = []
    for (start, end), side in zip(offsets, sides, strict=True):
        text = context[start:end]
        if side != 1 or not text.strip():
            found.append((NO_PLACE, NO_PLACE))
            continue
        found.append((start + len(text) - len(text.lstrip()), end - len(text) + len(text.rstrip())))
    return found
