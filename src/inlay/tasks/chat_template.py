"""A chat template: the text that it makes of a conversation, and which parts of that text the assistant writes.

What the assistant writes in a turn, and so what is learnt of it, is

- the content of its message as the template has it: stripped, or without earlier thinking, where the template does so;
- what the template writes between its prompt for a generation and the content (blanks, an empty thinking block): when
  it answers, the model is prompted up to there and writes that itself;
- the token that ends the turn, where the template writes one.

The header of a turn, line breaks after its end, and everything of the other roles are read and not learnt.

A template is a program, so the places are not computed from its source but found in what it writes: once more the
conversation is rendered with a mark for every answer; what stands between the marks must stand around the answers.
Where it does not (the template looks into the answers), one answer at a time is marked.
"""

from __future__ import annotations

import datetime
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from inlay.errors import InlayError, first_line
from inlay.tasks.conversations import ASSISTANT, SYSTEM, USER, Message, Unusable

_LEFT, _RIGHT = "\ue0f1", "\ue0f2"  # private use: no text has them
_MARKS = re.compile(f"{_LEFT}(\\d+){_RIGHT}")
_THOUGHT = "</think>"
# Templates may write the day's date. A run must come to the same tomorrow.
_DATE = re.compile(r"strftime_now\(\s*(?P<quote>['\"])(?P<form>.*?)(?P=quote)\s*\)")
DAY = datetime.datetime(2024, 7, 26)

WITHOUT = (
    "Conversations need one. Models tuned to instructions have it: embedded:smollm2, and of the hub most whose names "
    "end in -Instruct, -chat or -it. For another model give one, as Jinja or as the path of a file of it: --template "
    "chat.jinja; or learn prompts and answers in two columns of plain text, which need none: --kind causal-lm --text "
    "prompt --label answer"
)


@dataclass(frozen=True)
class Rendered:
    """A conversation as text, and the places in it that the assistant writes, in order."""

    text: str
    answers: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class _Place:
    """Where the content of a message stands. `literal` is what the template writes before it, from `origin` on."""

    number: int
    start: int
    end: int
    origin: int
    literal: str


def own_template(tokenizer: Any) -> str:
    """The tokenizer's chat template, or a clear error."""
    own = getattr(tokenizer, "chat_template", None)
    own = own.get("default") if isinstance(own, Mapping) else own
    if not own:
        raise InlayError(f"The model's tokenizer has no chat template. {WITHOUT}.")
    return str(own)


def mark(number: int) -> str:
    """What stands for a message while places are found."""
    return f"{_LEFT}{number}{_RIGHT}"


class ChatTemplate:
    """A chat template and the tokenizer that its text is for. `source` is its Jinja, by default the tokenizer's own;
    `fixed` is the same on a day that does not change.

    `begins` is what it appends where the assistant is to write, `ends` are the texts that end its turns, with the
    blanks before them. Without any, a turn has no end that could be learnt: `closes` is then put after the last one.
    """

    def __init__(self, tokenizer: Any, source: str | None = None) -> None:
        if not getattr(tokenizer, "is_fast", False):
            raise InlayError(
                f"Conversations need a fast tokenizer, which says where in the text its tokens are; "
                f"{type(tokenizer).__name__} is not one."
            )
        self.tokenizer, self.source = tokenizer, own_template(tokenizer) if source is None else source
        self.fixed = _DATE.sub(lambda found: repr(DAY.strftime(found["form"])), self.source)
        added = {str(token) for token in tokenizer.get_added_vocab()} | set(tokenizer.all_special_tokens)
        names = sorted((re.escape(each) for each in added if each.strip()), key=len, reverse=True)
        self._token = re.compile(rf"\s*({'|'.join(names)})") if names else None
        self.begins = self._find_begin()
        self.ends = self._find_ends()

    # ------------------------------------------------------------------------------------------------- rendering

    def render(self, messages: Sequence[Message], *, more: bool = False) -> str:
        """The text of a conversation; `Unusable` where the template raises, as many do for roles out of order."""
        try:
            return str(self._apply(list(messages), more))
        except Exception as error:  # a template is somebody's program
            raise Unusable("turns that the chat template refuses", first_line(error)) from None

    def _render_all(self, conversations: Sequence[Sequence[Message]]) -> list[str | Unusable]:
        try:
            return list(self._apply(list(conversations), False))
        except Exception:  # one of them; which one is said when they are rendered one by one
            return [self._render_or_not(each) for each in conversations]

    def _render_or_not(self, messages: Sequence[Message]) -> str | Unusable:
        try:
            return self.render(messages)
        except Unusable as error:
            return error

    def _apply(self, conversation: Any, more: bool) -> Any:
        return self.tokenizer.apply_chat_template(
            conversation, chat_template=self.fixed, tokenize=False, add_generation_prompt=more
        )

    # ---------------------------------------------------------------------------------------- facts of a template

    def _probe(self, turns: int) -> list[list[Message]]:
        """Short conversations of so many turns, all of marks: with a system message for templates that want one."""
        plain = [{"role": (USER, ASSISTANT)[i % 2], "content": mark(i)} for i in range(turns)]
        return [plain, [{"role": SYSTEM, "content": "x"}, *plain]]

    def _find_begin(self) -> str:
        why: Unusable | None = None
        for question in self._probe(1):
            try:
                without, asked = self.render(question), self.render(question, more=True)
            except Unusable as error:
                why = why or error
                continue
            return asked[len(without) :] if asked.startswith(without) else ""
        raise InlayError(f"The chat template does not render a conversation of one question: {why}. Check it.")

    def _find_ends(self) -> tuple[str, ...]:
        """What ends the last turn, where a token does; and what ends a turn that another one follows."""
        for exchange, longer in zip(self._probe(2), self._probe(4), strict=True):
            try:
                tail = self.render(exchange).rpartition(mark(1))[2]
            except Unusable:
                continue
            last = self._token.match(tail) if self._token else None
            if last is None:
                return ()
            found = {last.group(): None}
            try:
                between = self.render(longer).partition(mark(1))[2].partition(mark(2))[0]
            except Unusable:
                return tuple(found)
            assert self._token is not None
            # Of one token alone it is not known that it ends this turn: it may begin the next.
            if len(self._token.findall(between)) > 1 and (middle := self._token.match(between)):
                found[middle.group()] = None
            return tuple(found)
        return ()

    @property
    def closes(self) -> int | None:
        """The token to put after the last answer, where the template ends no turn."""
        return None if self.ends else self.tokenizer.eos_token_id

    @property
    def stops(self) -> tuple[int, ...]:
        """The tokens at which an answer is at its end."""
        named = [self.tokenizer.convert_tokens_to_ids(end.strip()) for end in self.ends]
        return tuple(dict.fromkeys(int(i) for i in (*named, self.tokenizer.eos_token_id) if i is not None))

    @property
    def tells_the_day(self) -> bool:
        """Whether the template writes the day's date."""
        return self.fixed != self.source

    # ----------------------------------------------------------------------------------------------------- places

    def lay_out(self, conversations: Sequence[Sequence[Message]]) -> list[Rendered | Unusable]:
        """Every conversation as text with the places of its answers, or why it has none."""
        texts = self._render_all(conversations)
        found: list[Rendered | Unusable | None] = [
            text if isinstance(text, Unusable) else self._plain(messages, text)
            for messages, text in zip(conversations, texts, strict=True)
        ]
        left = [number for number, each in enumerate(found) if each is None]
        marked = self._render_all([_marked(conversations[number]) for number in left])
        for number, around in zip(left, marked, strict=True):
            try:
                found[number] = self._laid_out(conversations[number], str(texts[number]), around)
            except Unusable as error:
                found[number] = error
        return [each for each in found if each is not None]

    def _plain(self, messages: Sequence[Message], text: str) -> Rendered | None:
        """The places without marks, where nothing can be mistaken: the prompt for a generation stands in the text once
        for each answer, and behind it the answer and the end of a turn. None where it is not so, which tells nothing.
        """
        said = [message["content"] for message in messages if message["role"] == ASSISTANT]
        if not self.begins or not self.ends or text.count(self.begins) != len(said):
            return None
        answers, place = [], 0
        for content in said:
            start = text.index(self.begins, place) + len(self.begins)
            form = content if text.startswith(content, start) else content.strip()
            place = self._end(text, start + len(form))
            if not text.startswith(form, start) or place == start + len(form):
                return None
            answers.append((_before_blanks(text, start), place))
        return Rendered(text, tuple(answers))

    def prompt(self, messages: Sequence[Message]) -> str:
        """The text up to where the assistant writes its answer to a conversation: what stood there in training."""
        (found,) = self.lay_out([[*messages, {"role": ASSISTANT, "content": "x"}]])
        if isinstance(found, Unusable):
            raise found
        return found.text[: found.answers[-1][0]]

    def _laid_out(self, messages: Sequence[Message], text: str, around: str | Unusable) -> Rendered:
        if _LEFT in text:
            raise Unusable("the private character U+E0F1")
        places = None if isinstance(around, Unusable) else _fit(messages, text, around)
        if places is None:
            places = self._one_by_one(messages, text)
        answers, before = [], 0
        for place in places:
            if not text[place.start : place.end].strip():
                continue
            start = max(before, self._first_written(text, place, _asked_before(messages, place.number)))
            before = self._end(text, place.end)
            answers.append((start, before))
        if not answers:
            raise Unusable("no answer that the chat template writes")
        return Rendered(text, tuple(answers))

    def _first_written(self, text: str, place: _Place, asked: Sequence[str]) -> int:
        """Where the assistant begins to write: behind the prompt for a generation, if that stands before its content
        once more often than the messages in between quote it. Blanks belong to what follows them."""
        begins, start = self.begins, place.start
        if begins and place.literal.count(begins) > sum(said.count(begins) for said in asked):
            start = min(start, place.origin + place.literal.rfind(begins) + len(begins))
        return _before_blanks(text, start)

    def _end(self, text: str, end: int) -> int:
        found = self._token.match(text, end) if self._token and self.ends else None
        return found.end() if found and found.group() in self.ends else end

    def _one_by_one(self, messages: Sequence[Message], text: str) -> list[_Place]:
        """The places of the answers, each from a rendering in which it alone is replaced by a mark."""
        found, before = [], 0
        for number, message in enumerate(messages):
            if message["role"] != ASSISTANT:
                continue
            other = [*messages[:number], message | {"content": mark(0)}, *messages[number + 1 :]]
            ahead, there, behind = self.render(other).partition(mark(0))
            if not there:
                continue  # the template leaves this turn out
            # Where it writes something else around the answer than around the mark, that is the answer's too.
            start = _same_start(ahead, text)
            end = len(text) - _same_start(behind[::-1], text[start:][::-1])
            found.append(_Place(number, start, end, before, ahead[before:]))
            before = end
        return found


def _before_blanks(text: str, place: int) -> int:
    while place and text[place - 1] == " ":
        place -= 1
    return place


def _same_start(one: str, other: str) -> int:
    """How many characters two texts begin with alike."""
    alike = (a == b for a, b in zip(one, other, strict=False))
    return sum(1 for _ in itertools.takewhile(bool, alike))


def _marked(messages: Sequence[Message]) -> list[Message]:
    return [
        message | {"content": mark(number)} if message["role"] == ASSISTANT else message
        for number, message in enumerate(messages)
    ]


def _asked_before(messages: Sequence[Message], number: int) -> list[str]:
    """What stands between an answer and the one before it."""
    first = number
    while first and messages[first - 1]["role"] != ASSISTANT:
        first -= 1
    return [message["content"] for message in messages[first:number]]


def _fit(messages: Sequence[Message], text: str, around: str) -> list[_Place] | None:
    """The places of the answers, if everything around the marks stands around them, as they are or in a form that
    templates usually give them; otherwise None."""
    pieces = _MARKS.split(around)
    literals, numbers = pieces[::2], [int(number) for number in pieces[1::2]]
    if numbers != [number for number, message in enumerate(messages) if message["role"] == ASSISTANT]:
        return None
    if not text.startswith(literals[0]):
        return None
    found, place = [], len(literals[0])
    for which, number in enumerate(numbers):
        follows = literals[which + 1]
        for form in _forms(messages[number]["content"]):
            end = place + len(form)
            whole = which + 1 < len(numbers) or end + len(follows) == len(text)
            if whole and text.startswith(form, place) and text.startswith(follows, end):
                break
        else:
            return None
        found.append(_Place(number, place, end, place - len(literals[which]), literals[which]))
        place = end + len(follows)
    return found


def _forms(content: str) -> Iterator[str]:
    yield content
    yield content.strip()
    yield content.rstrip()
    yield content.lstrip()
    if _THOUGHT in content:
        rest = content.rpartition(_THOUGHT)[2]
        yield from (rest.strip(), rest.lstrip("\n"), rest)
