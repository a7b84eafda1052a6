"""Conversations in a user's table: which columns hold them, and their turns under two keys and three roles.

A conversation comes as a list of messages (`role` and `content`, or `from` and `value`), as `prompt` and `completion`,
or as `instruction`, perhaps `input`, and `output`. What is no conversation is left out and counted, unless it is the
first row or all of them: then the file is not what it is taken for.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from inlay.errors import InlayError, first_line
from inlay.tasks.cells import as_text, is_chat, is_missing

FORM = (
    'a conversation is a list of messages, [{"role": "user", "content": "..."}, ...] or [{"from": "human", "value": '
    '"..."}, ...]; see docs/your-own-data.md#conversations'
)
Message = dict[str, str]
TURNS, PROMPT, INSTRUCTION = "turns", "prompt", "instruction"
FIELD = "messages"  # of a normalised row: one text, see `pack`
PLAIN = ("prompt", "text")  # where a question of its own usually stands
NUMBER = "row"  # of a normalised row: where it stood in its file. It is no part of the example
SYSTEM, USER, ASSISTANT = "system", "user", "assistant"
USUAL = ("messages", "conversations")
_ROLES: Mapping[str, str] = {
    **dict.fromkeys(("system", "developer"), SYSTEM),
    **dict.fromkeys(("user", "human", "prompter"), USER),
    **dict.fromkeys(("assistant", "gpt", "chatgpt", "bot", "model", "ai", "bing", "bard"), ASSISTANT),
}
_TOOLS = frozenset(("tool", "function", "ipython", "observation"))
_TOOL_WORDS = ("tool_", "function_")
_KEYS = frozenset(("role", "content", "from", "value"))
_CALLS = ("tool_calls", "function_call")
_BESIDE = ("system", "system_prompt", "tools", "functions", "history", "context", "image", "images")
_SAMPLE = 100  # rows by which a column of conversations is found
_NAMED = 5  # rows that a note names


class Unusable(Exception):
    """A row that cannot be an example. `why` is the same for all rows of one sort, `detail` this one's own."""

    def __init__(self, why: str, detail: str = "") -> None:
        super().__init__(why)
        self.why, self.detail = why, detail

    def __str__(self) -> str:
        return f"{self.why}{f' ({self.detail})' * bool(self.detail)}"


@dataclass
class Sorted:
    """What came of the rows of a file: those left out, by the reason, and the messages left out of those that stay;
    `unread` are columns that may say how to answer."""

    name: str
    total: int = 0
    out: dict[str, list[int]] = field(default_factory=dict)
    tools: int = 0
    with_tools: int = 0
    blank_systems: int = 0
    keys: set[str] = field(default_factory=set)
    unread: Sequence[str] = ()
    _first: str = ""

    def leave_out(self, number: int, error: Unusable) -> None:
        """Count a row that is no example; an error where it is the first of the file."""
        if number == 1:
            raise InlayError(
                f"{self.name}, row 1 has {error}. A later row would be left out and counted; the first one says what "
                "the file is. Correct or remove it, or name columns with --text and --label."
            )
        self._first = self._first or f"row {number} has {error}"
        self.out.setdefault(error.why, []).append(number)

    @property
    def left(self) -> int:
        """How many rows are left out."""
        return sum(map(len, self.out.values()))

    def check(self) -> None:
        """An error where no row is left."""
        if self.left == self.total:
            raise InlayError(
                f"{self.name}: none of the {self.total:,} rows is a conversation to learn from: {self._first}."
            )

    def reasons(self) -> str:
        """Why rows are left out, how many of each sort, and which."""
        return "; ".join(f"{len(rows):,} with {why} ({_listed(rows)})" for why, rows in self.out.items())

    def notes(self, what: str) -> list[str]:
        """What a user should know of it; `what` says where the conversations are."""
        left = f"; left out: {self.reasons()}" if self.out else ""
        found = [f"{self.name}: {what}: {self.total - self.left:,} of {self.total:,} rows{left}"]
        if self.tools:
            found.append(
                f"{self.name}: {self.tools:,} tool messages and tool calls in {self.with_tools:,} of the conversations "
                "are ignored"
            )
        if self.blank_systems:
            found.append(f"{self.name}: {self.blank_systems:,} of the system messages are empty and ignored")
        if self.unread:
            found.append(f"{self.name}: not read: {', '.join(map(repr, self.unread))} beside the conversations")
        if self.keys:
            found.append(f"{self.name}: other keys of messages are not read: {', '.join(sorted(self.keys))}")
        return found


def _listed(rows: Sequence[int]) -> str:
    shown = ", ".join(f"{number:,}" for number in rows[:_NAMED])
    return f"row{'s' * (len(rows) > 1)} {shown}{', ...' * (len(rows) > _NAMED)}"


# -------------------------------------------------------------------------------------------------- which columns


def find(
    columns: Sequence[str], values: Callable[[str, int], list[Any]], usual_text: bool
) -> tuple[str, dict[str, str]] | None:
    """The form of a table's conversations and the columns that have them, by their part; None where there are none.

    `values` gives the first values of a column, `usual_text` says that a column has a name that texts usually have:
    then a prompt or an instruction may be no more than where that text was made of.
    """
    lower = {name.casefold(): name for name in columns}
    holding = [name for name in columns if holds(name, values(name, _SAMPLE))]
    named = [lower[name] for name in USUAL if lower.get(name) in holding]
    if named or len(holding) == 1:
        return TURNS, {FIELD: (named or holding)[0]}
    if {"prompt", "completion"} <= set(lower) and not usual_text:
        return PROMPT, {FIELD: lower["prompt"], "completion": lower["completion"]}
    if holding:
        raise InlayError(
            f"Columns {', '.join(holding)} all hold conversations: name the one to learn from with --text."
        )
    if {"instruction", "output"} <= set(lower) and not usual_text:
        parts = {FIELD: lower["instruction"], "completion": lower["output"]}
        return INSTRUCTION, parts | ({"input": lower["input"]} if "input" in lower else {})
    return None


def holds(name: str, values: Iterable[Any]) -> bool:
    """Whether a column holds conversations, by some of its values."""
    found = [_parsed(value) for value in values]
    return any(map(is_chat, found)) or (name.casefold() in USUAL and any(isinstance(each, list) for each in found))


def unread(columns: Mapping[str, str], names: Iterable[str]) -> list[str]:
    """Columns beside those of the conversations that may say how to answer, and are not read."""
    return [name for name in names if name.casefold() in _BESIDE and name not in columns.values()]


def describe(form: str, columns: Mapping[str, str]) -> str:
    """Where the conversations are, for a note."""
    if form == TURNS:
        return f"conversations in `{columns[FIELD]}`"
    question = f"`{columns[FIELD]}`" + (f" and `{columns['input']}`" if "input" in columns else "")
    return f"conversations of one question ({question}) and its answer (`{columns['completion']}`)"


def read_source(given: str) -> str:
    """A chat template that a user gives: its text, or the path of a file that has it."""
    if "{%" in given or "{{" in given:
        return given
    path = Path(given).expanduser()
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise InlayError(
            f"template={given!r} is neither a chat template in Jinja, which conversations need, nor a file that can be "
            f"read ({first_line(error)})."
        ) from None


# -------------------------------------------------------------------------------------------------------- one row


def read_question(columns: Mapping[str, str], values: Mapping[str, Any], where: str) -> list[Message]:
    """The messages of a row to answer: a conversation that ends with the user's turn, or a plain text, which is one.

    A row without the column that was trained on may have its question in `prompt` or `text`. Answers that a prompt's or
    an instruction's row may have are not looked at.
    """
    if columns[FIELD] not in values:
        plain = next((name for name in PLAIN if isinstance(values.get(name), str)), columns[FIELD])
        columns = {**columns, FIELD: plain}
    asked = values.get(columns[FIELD])
    try:
        if isinstance(asked, str):
            return [{"role": USER, "content": _question(columns, values, where)}]
        if (column := columns[FIELD]) not in values:
            has = ", ".join(map(repr, values)) or "nothing"
            raise Unusable(f"no {column!r}, a list of messages or a text to answer (it has {has})")
        messages = _messages(asked, column, where, Sorted(where))
        if not messages or messages[-1]["role"] != USER:
            raise Unusable("no question at its end: leave its last answer out, so that it ends with the user's turn")
    except Unusable as error:
        raise InlayError(f"{where} has {error}.") from None
    return messages


def read_example(
    form: str, columns: Mapping[str, str], values: Mapping[str, Any], where: str, told: Sorted
) -> list[Message]:
    """The messages of a row to learn from, up to the last answer: what comes after it teaches nothing."""
    asked = values.get(columns[FIELD])
    if form == TURNS:
        messages = _messages(asked, columns[FIELD], where, told)
    else:
        column = columns["completion"]
        answer = values.get(column)
        if is_missing(answer):
            raise Unusable("no answer", f"nothing in {column!r}")
        if isinstance(asked, str):
            messages = [{"role": USER, "content": _question(columns, values, where)}]
        else:
            messages = _messages(asked, columns[FIELD], where, told)
        if is_chat(answer):
            messages = messages + _messages(answer, column, where, told)
        else:
            messages = [*messages, {"role": ASSISTANT, "content": as_text(answer, column, where)}]
    while messages and messages[-1]["role"] != ASSISTANT:
        messages.pop()
    if not messages:
        raise Unusable("no answer", "no turn of the assistant with a text")
    return messages


def pack(messages: Sequence[Message]) -> str:
    """Messages as one text, for the rows of a data set: as objects they take several times the memory."""
    return json.dumps(messages, ensure_ascii=False)


def unpack(text: str) -> list[Message]:
    """The messages of `pack`."""
    return list(json.loads(text))


def _question(columns: Mapping[str, str], values: Mapping[str, Any], where: str) -> str:
    """The text of a question, with the input that an instruction may have behind a blank line."""
    texts = [as_text(values[columns[FIELD]], columns[FIELD], where)]
    if "input" in columns and not is_missing(values.get(columns["input"])):
        texts.append(as_text(values[columns["input"]], columns["input"], where))
    if not any(text.strip() for text in texts):
        raise Unusable("an empty turn", f"nothing in {columns[FIELD]!r}")
    return "\n\n".join(texts)


def _messages(turns: Any, column: str, where: str, told: Sorted) -> list[Message]:
    """The messages of a list, without tool calls, what tools answered, and empty system messages, which are counted."""
    turns = turns.tolist() if callable(getattr(turns, "tolist", None)) else _parsed(turns)
    if not isinstance(turns, Sequence) or isinstance(turns, str | bytes) or not turns:
        what = "nothing" if is_missing(turns) else "an empty list" if turns in ([], ()) else repr(turns)[:40]
        raise Unusable("no conversation", f"{column!r} holds {what}")
    found, tools, blank, keys = [], 0, 0, set()
    for place, turn in enumerate(turns, start=1):
        if not isinstance(turn, Mapping) or not ({"role", "from"} & set(turn)):
            raise Unusable("no conversation", f"turn {place} of {column!r} has neither 'role' nor 'from'")
        said = turn.get("role") or turn.get("from")
        name = said.strip().casefold().replace("-", "_") if isinstance(said, str) else ""
        if name in _TOOLS or name.startswith(_TOOL_WORDS) or any(turn.get(key) for key in _CALLS):
            tools += 1
            continue
        if name not in _ROLES:
            raise Unusable("an unknown role", f"{said!r} in turn {place}; {', '.join(_ROLES)} are")
        keys |= {key for key in turn if key not in _KEYS and turn[key] is not None}
        # A Parquet file has both keys in every message where it has them in any.
        text = _text(turn.get("value") if turn.get("content") in (None, "") else turn["content"], column, where, place)
        if text.strip():
            found.append({"role": _ROLES[name], "content": text})
        elif _ROLES[name] == SYSTEM:
            blank += 1
        else:
            raise Unusable("an empty turn", f"turn {place}, of the {_ROLES[name]}")
    told.tools += tools
    told.with_tools += bool(tools)
    told.blank_systems += blank
    told.keys |= keys
    return found


def _text(content: Any, column: str, where: str, place: int) -> str:
    """The text of a message: its own, or that of its parts where all of them are text."""
    if content is None:
        return ""
    if isinstance(content, Mapping):
        raise Unusable("parts that are no text", f"turn {place}: an object")
    if isinstance(content, Sequence) and not isinstance(content, str | bytes):
        texts = [part.get("text") if isinstance(part, Mapping) else part for part in content]
        told = [text for text in texts if isinstance(text, str)]
        if len(told) < len(texts):
            raise Unusable("parts that are no text", f"turn {place}: images or the like")
        content = "".join(told)
    try:
        return as_text(content, column, f"{where}, turn {place}")
    except InlayError as error:
        raise Unusable("a text that is damaged", str(error).partition(": ")[2].rstrip(".")) from None


def _parsed(turns: Any) -> Any:
    """A list of messages that a cell has as JSON, as in CSV; anything else as it is."""
    if isinstance(turns, str) and turns.lstrip().startswith("["):
        try:
            return json.loads(turns)
        except (ValueError, RecursionError):
            return turns
    return turns
