"""Conversations as tokens: the loss on what the assistant writes, what is too long cut from its left.

The rendered text is tokenised whole, once, and a token is learnt if it lies, with one character or more, in what the
assistant writes (`chat_template`). So tokens are those that the model sees when it is used.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from inlay.errors import InlayError
from inlay.tasks.chat_template import DAY, ChatTemplate, Rendered
from inlay.tasks.conversations import ASSISTANT, FIELD, NUMBER, SYSTEM, USER, Message, Sorted, Unusable, unpack
from inlay.tasks.encode import IGNORED, Encoded, Ragged

if TYPE_CHECKING:
    from tokenizers import Encoding

_Example = tuple[list[int], list[tuple[int, int]]]  # tokens, and the spans of them that are learnt
_BATCH = 256
_HEADER = 16  # tokens that a template may write before a system message


class _Learnt(Sequence[list[int]]):
    """The labels of rows: their tokens where they are learnt, nothing elsewhere. A byte a token is kept."""

    def __init__(self, ids: Ragged, learnt: Ragged) -> None:
        self.ids, self.learnt = ids, learnt

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: Any) -> Any:
        pairs = zip(self.ids[index], self.learnt[index], strict=True)
        return [token if learnt else IGNORED for token, learnt in pairs]


class _Rows:
    """Rows of tokens as they come, in flat arrays."""

    def __init__(self) -> None:
        self._ids, self._learnt, self._sizes = array("i"), bytearray(), array("q", [0])

    def add(self, ids: Sequence[int], spans: Iterable[tuple[int, int]]) -> None:
        learnt = bytearray(len(ids))
        for first, last in spans:
            learnt[first:last] = b"\1" * (last - first)
        self._ids.extend(ids)
        self._learnt.extend(learnt)
        self._sizes.append(len(self._ids))

    def __len__(self) -> int:
        return len(self._sizes) - 1

    def encoded(self, cut: int) -> Encoded:
        offsets = np.frombuffer(self._sizes, dtype=np.int64)
        ids, learnt = (
            np.frombuffer(each, dtype=kind) if each else np.zeros(0, kind)
            for each, kind in ((self._ids, np.int32), (self._learnt, np.int8))
        )
        tokens, mask = Ragged(ids, offsets), Ragged.ones(offsets)
        labels = _Learnt(tokens, Ragged(learnt, offsets))
        return Encoded({"input_ids": tokens, "attention_mask": mask}, labels=labels, cut=cut)


def encode_conversations(
    rows: Iterable[Mapping[str, Any]], template: ChatTemplate, max_length: int, name: str
) -> Encoded:
    """Conversations to learn from. Rows that the template refuses are left out; `name` is that of their split.

    What is too long loses its oldest exchanges; then its system message; then the beginning of its last question. An
    answer that is too long by itself loses its end.
    """
    made, told, cut = _Rows(), Sorted(f"{name} split"), 0
    taken = array("q")
    for batch in _batches(rows):
        talks = [unpack(row[FIELD]) for row in batch]
        whole = _examples(template, talks)
        quick = _cut_quickly(template, talks, whole, max_length)
        for number, (row, messages, example) in enumerate(zip(batch, talks, whole, strict=True)):
            told.total += 1
            try:
                if isinstance(example, Unusable):
                    raise example
                if long := len(example[0]) > max_length:
                    example = quick.get(number) or _cut(messages, template, max_length)
                if not any(last > max(first, 1) for first, last in example[1]):
                    raise Unusable("no token to learn")
            except Unusable as error:
                told.leave_out(row[NUMBER], error)
                continue
            cut += long
            taken.append(told.total - 1)
            made.add(*example)
    if told.total:
        told.check()
    encoded = made.encoded(cut)
    encoded.taken = taken if len(taken) < told.total else None
    encoded.notes = tuple(_notes(template, told, name, cut, len(made), max_length))
    return encoded


def _notes(template: ChatTemplate, told: Sorted, name: str, cut: int, count: int, max_length: int) -> Iterator[str]:
    if told.out:
        yield f"{told.left:,} of {told.total:,} {name} conversations left out: {told.reasons()}"
    if cut:
        yield (
            f"{cut:,} of {count:,} {name} conversations are longer than {max_length} tokens and were cut from the left;"
            " the last question and its answer are kept"
        )
    if name == "train" and template.closes is not None:
        yield "the chat template ends no turn with a token: the end-of-text token is learnt after the last answer"
    if name == "train" and template.tells_the_day:
        yield f"the chat template writes the day's date: here always {DAY:%d %b %Y}, so that a run is the same any day"


def encode_questions(conversations: Sequence[Sequence[Message]], template: ChatTemplate, max_length: int) -> Encoded:
    """Conversations to answer, up to where the assistant begins to write; cut as those to learn from are."""
    made, cut = _Rows(), 0
    for number, messages in enumerate(conversations, start=1):
        try:
            ids = _question(template, messages)
            if len(ids) > max_length:
                cut += 1
                shorter = _shortest_loss(messages, lambda rest: len(_question(template, rest)) <= max_length)
                ids = _question(template, shorter)[-max_length:]
        except Unusable as error:
            raise InlayError(f"Row {number} has {error}.") from None
        made.add(ids, ())
    encoded = made.encoded(cut)
    encoded.labels = None
    return encoded


def _question(template: ChatTemplate, messages: Sequence[Message]) -> list[int]:
    ((ids, _),) = _tokenised(template, [template.prompt(messages)])
    return ids


def _batches(rows: Iterable[Mapping[str, Any]]) -> Iterator[list[Mapping[str, Any]]]:
    batch: list[Mapping[str, Any]] = []
    for row in rows:
        batch.append(row)
        if len(batch) == _BATCH:
            yield batch
            batch = []
    if batch:
        yield batch


def _tokenised(template: ChatTemplate, texts: list[str]) -> Iterator[tuple[list[int], Encoding]]:
    """The tokens of texts, and what knows the characters of each. A template writes the first token itself."""
    if texts:
        found = template.tokenizer(
            texts, add_special_tokens=False, return_attention_mask=False, return_token_type_ids=False, verbose=False
        )
        yield from zip(found["input_ids"], found.encodings, strict=True)


def _spans(tokens: Encoding, answers: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """The tokens that have a character in what the assistant writes, as first and behind the last.

    The tokenizer itself says in which token a character lies. Where one lies in none, all places are looked through,
    which takes several times as long.
    """
    found, offsets = [], None
    for start, end in answers:
        first, last = tokens.char_to_token(start), tokens.char_to_token(end)
        if first is None or last is None:
            offsets = tokens.offsets if offsets is None else offsets
            found.append((_first_at(offsets, start), bisect_left(offsets, (end, 0))))
        else:
            place = tokens.token_to_chars(last)
            found.append((first, last + (place is not None and place[0] < end)))
    return found


def _first_at(offsets: Sequence[tuple[int, int]], start: int) -> int:
    first = bisect_left(offsets, (start, 0))
    while first and offsets[first - 1][1] > start:
        first -= 1
    return first


def _with_end(
    template: ChatTemplate, ids: Sequence[int], spans: list[tuple[int, int]]
) -> tuple[list[int], list[tuple[int, int]]]:
    """Where the template ends no turn, the end of text right after the last answer, learnt with it."""
    if (closes := template.closes) is None:
        return list(ids), spans
    first, last = spans[-1]
    return [*ids[:last], closes], [*spans[:-1], (first, last + 1)]


def _examples(template: ChatTemplate, conversations: Sequence[Sequence[Message]]) -> list[_Example | Unusable]:
    """The tokens of conversations and the spans of them that are learnt, or why there are none."""
    layouts = template.lay_out(conversations)
    tokens = _tokenised(template, [each.text for each in layouts if isinstance(each, Rendered)])
    found: list[_Example | Unusable] = []
    for layout in layouts:
        if isinstance(layout, Unusable):
            found.append(layout)
        else:
            ids, places = next(tokens)
            found.append(_with_end(template, ids, _spans(places, layout.answers)))
    return found


# --------------------------------------------------------------------------------------------------------- cutting


def _example(template: ChatTemplate, messages: Sequence[Message]) -> _Example:
    (found,) = _examples(template, [messages])
    if isinstance(found, Unusable):
        raise found
    return found


def _cut_quickly(
    template: ChatTemplate,
    talks: Sequence[Sequence[Message]],
    whole: Sequence[_Example | Unusable],
    max_length: int,
) -> dict[int, _Example]:
    """Those of the conversations that are too long, by their number, of which it is plain how many exchanges fit: that
    many are tokenised, all conversations at once, and one more would not fit."""
    guesses = {
        number: guess
        for number, (messages, example) in enumerate(zip(talks, whole, strict=True))
        if not isinstance(example, Unusable) and (guess := _guess(messages, example, max_length))
    }
    shorter = _examples(template, [kept for kept, _ in guesses.values()])
    return {
        number: example
        for (number, (_, more)), example in zip(guesses.items(), shorter, strict=True)
        if not isinstance(example, Unusable) and len(example[0]) <= max_length < len(example[0]) + more
    }


def _guess(messages: Sequence[Message], example: _Example, max_length: int) -> tuple[list[Message], int] | None:
    """What of a conversation that is too long will probably fit, and by how many tokens one exchange more is longer."""
    ids, spans = example
    ahead, rest = _parted(messages)
    begins = _exchanges(rest)
    before = [sum(message["role"] == ASSISTANT for message in rest[:begin]) for begin in begins]
    answers = sum(message["role"] == ASSISTANT for message in rest)
    if len(ids) <= max_length or begins[0] or len(spans) != answers:
        return None
    ends = [0, *(spans[count - 1][1] for count in before[1:])]
    characters = sum(len(message["content"]) for message in messages)
    head = _HEADER + sum(len(message["content"]) for message in ahead) * len(ids) // characters
    for which in range(1, len(begins)):
        if len(ids) - ends[which] + head <= max_length:
            more = ends[which] - ends[which - 1] if which > 1 else len(ids)  # all of it is known to be too long
            return [*ahead, *rest[begins[which] :]], more
    return None


def _cut(messages: Sequence[Message], template: ChatTemplate, max_length: int) -> _Example:
    """The tokens of a conversation that is too long, without as much of its beginning as need be."""
    kept = _shortest_loss(messages, lambda rest: len(_example(template, rest)[0]) <= max_length)
    ids, spans = _example(template, kept)
    return ids[:max_length], [(first, min(last, max_length)) for first, last in spans if first < max_length]


def _parted(messages: Sequence[Message]) -> tuple[list[Message], list[Message]]:
    """The system message at the beginning, if there is one, and the rest."""
    count = int(bool(messages) and messages[0]["role"] == SYSTEM)
    return list(messages[:count]), list(messages[count:])


def _shortest_loss(messages: Sequence[Message], fits: Callable[[Sequence[Message]], bool]) -> Sequence[Message]:
    """The messages with as much as fits: see `encode_conversations`. Where not even an empty question fits, that."""
    ahead, rest = _parted(messages)
    begins = _exchanges(rest)

    def fitting(candidate: Sequence[Message]) -> bool:
        try:
            return fits(candidate)
        except Unusable:  # a template that refuses what is left of a conversation
            return False

    whole = _first_that(lambda which: fitting([*ahead, *rest[begins[which] :]]), len(begins))
    if whole is not None:
        return [*ahead, *rest[begins[whole] :]]
    last = rest[begins[-1] :]
    if ahead and fitting(last):
        return last
    asked = next((i for i, message in enumerate(last) if message["role"] == USER), None)
    if asked is None:
        return last
    question = last[asked]["content"]

    def shorter(dropped: int) -> list[Message]:
        return [*last[:asked], last[asked] | {"content": question[dropped:].strip() or "."}, *last[asked + 1 :]]

    dropped = _first_that(lambda count: fitting(shorter(count)), len(question) + 1)
    return shorter(len(question) if dropped is None else dropped)


def _exchanges(messages: Sequence[Message]) -> list[int]:
    """Where exchanges begin: at a question that comes first or behind an answer. The last one has the last answer, or
    is the question to answer; without any question it is the last message."""
    found = [
        number
        for number, message in enumerate(messages)
        if message["role"] == USER and (number == 0 or messages[number - 1]["role"] == ASSISTANT)
    ]
    return found or [len(messages) - 1]


def _first_that(holds: Callable[[int], bool], count: int) -> int | None:
    """The first of `count` numbers for which something holds that holds from there on; None where it never does."""
    low, high = 0, count
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle + 1, high)
    return low if low < count else None
