"""Try a compressed prompt: lines of a conversation, answered by the model with the adapter, and beside it by the model
with the prompt itself.

The prompt stands before the whole conversation, as an adapter or as its text. What is typed follows as it is, or as the
tokenizer's chat template writes messages; then the prompt is what the template would have written before the first.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from inlay.errors import InlayError, first_line, misspelt
from inlay.methods.folder import DEFAULT
from inlay.methods.prompts import check
from inlay.workflow.compress import split
from inlay.workflow.generation import Continuation, Sampling, Writer
from inlay.workflow.prompt_folders import PromptAdapter, find_base, look, open_writer, put_in

COMPRESSED, FULL = "compressed prompt", "full prompt"
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
    """A conversation with a model behind a compressed prompt; with `full`, the prompt's text, one beside it too."""

    def __init__(
        self, writer: Writer, adapter: PromptAdapter, *, full: str | None = None, template: bool = False
    ) -> None:
        self.writer, self.adapter, self.template = writer, adapter, template
        if template and not writer.tokenizer.chat_template:
            raise InlayError(f"{writer.name} has no chat template: leave --chat-template out.")
        self.sides = [_Side(COMPRESSED, DEFAULT, list(writer.lead))]
        if full is not None:
            ids = split(writer.tokenizer, full)[1]
            check(writer.base, ids, more=1)
            self.sides.append(_Side(FULL, None, ids))

    def ask(self, line: str, sampling: Sampling, tell: Tell, *, together: bool = False) -> list[ChatAnswer]:
        """The answers of all sides. `tell` receives their pieces, with the side's number: one side after the other, or
        of all sides by turns where they are to be seen `together`."""
        rows = [
            self.writer.begin(
                self._text(side, line), sampling, prompt=side.adapter, before=side.before, tell=partial(tell, number)
            )
            for number, side in enumerate(self.sides)
        ]
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
        if side.adapter is not None and self.writer.model.active_peft_config.is_prompt_learning:
            self.writer.write([row])  # PEFT does not go on from a cache behind its virtual tokens
            return None
        if state is None and side.adapter is None:
            # The prompt is read once, not before every answer.
            side.cache = side.cache or self.writer.remember(side.before)
            state = copy.deepcopy(side.cache)
        return self.writer.go_on(row, CHUNK if together else row.left, state)

    def _text(self, side: _Side, line: str) -> str:
        if not self.template:
            return "".join(f"{said}{answer}\n" for said, answer in side.history) + line
        messages = []
        for said, answer in side.history:
            messages += [{"role": "user", "content": said}, {"role": "assistant", "content": answer}]
        return behind_system(self.writer.tokenizer, [*messages, {"role": "user", "content": line}])


def behind_system(tokenizer: Any, messages: Sequence[dict[str, str]]) -> str:
    """What a chat template writes for messages behind a system message, that one itself and the tokens of beginning
    left out; at its end the assistant's turn begins."""

    def written(all_of_them: Sequence[dict[str, str]], more: bool) -> str:
        return str(tokenizer.apply_chat_template(list(all_of_them), tokenize=False, add_generation_prompt=more))

    system = {"role": "system", "content": "x"}
    try:
        head, whole = written([system], False), written([system, *messages], True)
        if whole.startswith(head):
            return whole[len(head) :]
    except Exception:  # whatever a template raises that has no place for a system message
        pass
    try:
        whole = written(messages, True)
    except Exception as error:  # a template is somebody's program
        raise InlayError(f"The chat template refuses this conversation: {first_line(error)}") from error
    return whole.removeprefix(tokenizer.bos_token or "")


def open_chat(
    adapter: Path | str,
    *,
    model: str | None = None,
    prompt: Path | None = None,
    template: bool = False,
    precision: str = "auto",
    trust_remote_code: bool = False,
) -> Chat:
    """Load an adapter that stands for a prompt, and its base model; `prompt` is the file of the prompt itself."""
    found = look(adapter)
    full = None if prompt is None else _read(prompt)
    writer = open_writer(model or find_base(found), precision=precision, trust_remote_code=trust_remote_code)
    put_in(found, writer)
    return Chat(writer, found, full=full, template=template)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InlayError(f"The prompt file {str(path)!r} is not text in UTF-8. Convert it first.") from error
    except OSError as error:
        raise InlayError(
            f"The prompt file {str(path)!r} cannot be read: {error.strerror or error}.{misspelt(path)}"
        ) from error
