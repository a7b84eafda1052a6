"""A conversation in lines: with a tuned language model, with a model alone, or behind a compressed prompt, and then
beside it with the prompt itself.

What is typed goes in as the tokenizer's chat template writes messages, or as it is. A compressed prompt stands before
the whole conversation, as an adapter or as its text; it is then what the template would have written before the first
message.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from inlay.errors import InlayError, misspelt
from inlay.methods.prompts import check
from inlay.training.batches import count_virtual_tokens
from inlay.workflow.compress import split
from inlay.workflow.generate import as_prompts
from inlay.workflow.generation import Continuation, Sampling, TooLong
from inlay.workflow.speakers import Message, Speaker, open_speaker, write_messages

COMPRESSED, FULL, ALONE = "compressed prompt", "full prompt", "answer"
CHUNK = 8  # tokens that a side writes before it is the other's turn
Tell = Callable[[int, str], None]


@dataclass(frozen=True)
class ChatAnswer:
    """What one side said, and how long it took."""

    side: str
    text: str
    tokens: int
    seconds: float


@dataclass
class _Side:
    """One of the two that answer: `before` are the tokens that stand before the conversation."""

    name: str
    adapter: str | None
    before: list[int]
    cache: Any = None
    history: list[tuple[str, str]] = field(default_factory=list)


class Chat:
    """A conversation with what answers; with `full`, the text of the prompt that its adapter stands for, one beside it
    too.

    `template`: whether each line is a user's message in the chat template. None: where there is one, except behind a
    compressed prompt, which need not end as a system message does.
    """

    def __init__(self, speaker: Speaker, *, full: str | None = None, template: bool | None = None) -> None:
        self.speaker, self.writer = speaker, speaker.writer
        if self.writer.two_parts:
            raise InlayError(
                f"{self.writer.name} has an encoder and a decoder and answers one text at a time: `inlay generate` "
                "writes with it. A conversation needs a model that is a decoder alone."
            )
        if template:
            speaker.check_template("leave --chat-template out")
        if full is not None and speaker.stands_for is None:
            raise InlayError("--prompt is the prompt that an adapter stands for: give it with --adapter.")
        self.behind_prompt = full is not None or speaker.is_prompt
        fits = speaker.has_template and not self.behind_prompt
        self.template = fits if template is None else template
        # A prompt stands in place of the template's own beginning.
        self._whole = self.template and not self.behind_prompt
        name = COMPRESSED if self.behind_prompt else ALONE
        self.sides = [_Side(name, speaker.adapter, [] if self._whole else list(self.writer.lead))]
        if not self.template:
            as_prompts(speaker, ["a"])  # an error now where a run reads more than one text
        if full is not None:
            ids = split(self.writer.tokenizer, full)[1]
            check(self.writer.base, ids, more=1)
            self.sides.append(_Side(FULL, None, ids))

    def ask(self, line: str, sampling: Sampling, tell: Tell, *, together: bool = False) -> list[ChatAnswer]:
        """The answers of all sides. `tell` receives their pieces, with the side's number: one side after the other, or
        of all sides by turns where they are to be seen `together`."""
        try:
            rows = [
                self.writer.begin(
                    self._text(side, line),
                    sampling,
                    prompt=side.adapter,
                    before=side.before,
                    tell=partial(tell, number),
                )
                for number, side in enumerate(self.sides)
            ]
        except TooLong as error:
            if not self.sides[0].history:
                raise
            raise TooLong(f"{error} What was said before is part of it: /new begins a new conversation.") from None
        seconds = [0.0] * len(rows)
        states: list[Any] = [None] * len(rows)
        while not all(row.done for row in rows):
            for number, row in enumerate(rows):
                while not row.done:
                    began = time.perf_counter()
                    states[number] = self._step(self.sides[number], row, states[number], together)
                    seconds[number] += time.perf_counter() - began
                    if together:
                        break
        for side, row in zip(self.sides, rows, strict=True):
            side.history.append((line, row.text))
        return [
            ChatAnswer(side.name, row.text, len(row.written), spent)
            for side, row, spent in zip(self.sides, rows, seconds, strict=True)
        ]

    def forget(self) -> None:
        """Begin a new conversation."""
        for side in self.sides:
            side.history.clear()

    def _step(self, side: _Side, row: Continuation, state: Any, together: bool) -> Any:
        """Some more tokens of one side, from the cache of what it has so far; the cache then."""
        if side.adapter is not None and count_virtual_tokens(self.writer.model):
            self.writer.write([row])  # PEFT does not go on from a cache behind its virtual tokens
            return None
        if state is None and side.name == FULL:
            # The prompt is read once, not before every answer.
            side.cache = side.cache or self.writer.remember(side.before)
            state = copy.deepcopy(side.cache)
        return self.writer.go_on(row, CHUNK if together else row.left, state)

    def _text(self, side: _Side, line: str) -> str:
        if not self.template:
            return "".join(f"{self._said(said)}{answer}\n" for said, answer in side.history) + self._said(line)
        messages: list[Message] = []
        for said, answer in side.history:
            messages += [{"role": "user", "content": said}, {"role": "assistant", "content": answer}]
        messages.append({"role": "user", "content": line})
        return self.speaker.write_chat(messages) if self._whole else behind_system(self.writer.tokenizer, messages)

    def _said(self, line: str) -> str:
        """A line by itself; a run has it in the template that it was trained with."""
        (prompt,) = as_prompts(self.speaker, [line])
        return prompt.text


def behind_system(tokenizer: Any, messages: Sequence[dict[str, str]]) -> str:
    """What a chat template writes for messages behind a system message, that one itself and the tokens of beginning
    left out; at its end the assistant's turn begins."""

    system = {"role": "system", "content": "x"}
    try:
        head, whole = write_messages(tokenizer, [system], False), write_messages(tokenizer, [system, *messages], True)
        if whole.startswith(head):
            return whole[len(head) :]
    except InlayError:  # a template that has no place for a system message
        pass
    return write_messages(tokenizer, messages, True).removeprefix(tokenizer.bos_token or "")


def open_chat(
    adapter: Path | str | None = None,
    *,
    prompt: Path | None = None,
    template: bool | None = None,
    **how: Any,
) -> Chat:
    """Load what answers, as `open_speaker` does; `prompt` is the file of the prompt that an adapter stands for."""
    full = None if prompt is None else _read(prompt)
    return Chat(open_speaker(adapter=adapter, **how), full=full, template=template)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InlayError(f"The prompt file {str(path)!r} is not text in UTF-8. Convert it first.") from error
    except OSError as error:
        raise InlayError(
            f"The prompt file {str(path)!r} cannot be read: {error.strerror or error}.{misspelt(path)}"
        ) from error
