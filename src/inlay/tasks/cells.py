"""The cells of a table: whether there is something in one, what a dotted path leads to, and the text it becomes.

Every value that a model reads or learns to say goes through `as_text`, in training, evaluation, prediction and service.
What is not text, or a plain value that has one spelling, is an error: nothing is ever read as the repr of a Python
object.
"""

from __future__ import annotations

import datetime
import math
import numbers
import re
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any

from inlay.errors import InlayError

LONGEST = 10_000_000  # characters: a longer cell is a file read wrongly, and would fill the memory when tokenised
_SHOWN = 40
_EXACT = 1e16  # from here on whole floats have an exponent
_CHAT_COLUMNS = ("messages", "conversations", "conversation", "chat", "dialog", "dialogue", "turns")
_TURN_KEYS = ({"role", "content"}, {"from", "value"})

CHATS = (
    "A language model learns conversations whole: leave --text, --label and --kind out, or name the column of the "
    "conversations with --text alone. A prompt and its answer in two columns of plain text are --kind causal-lm --text "
    "prompt --label answer. See docs/your-own-data.md#conversations"
)


def is_null(value: Any) -> bool:
    """Nothing, or not a number (also of Decimal, NumPy and pandas)."""
    if value is None or type(value).__name__ in ("NAType", "NaTType"):
        return True
    if isinstance(value, Decimal):
        return value.is_nan()
    return isinstance(value, numbers.Real) and not isinstance(value, numbers.Rational) and math.isnan(value)


def is_missing(value: Any) -> bool:
    """Nothing, not a number, or blank."""
    return is_null(value) or (isinstance(value, str) and not value.strip())


def reach(row: Mapping[str, Any], name: str) -> Any:
    """The value of a column, or of a dotted path: `review.body` is `body` in the object `review`. Nowhere: None."""
    if name in row:
        return row[name]
    for cut in [i for i, character in enumerate(name) if character == "."]:
        inner = row.get(name[:cut])
        if isinstance(inner, Mapping):
            found = reach(inner, name[cut + 1 :])
            if found is not None:
                return found
    return None


def paths_of(value: Mapping[str, Any], name: str, depth: int = 3) -> list[str]:
    """The dotted paths to what is not an object itself in the object of a column, down to a depth."""
    found = []
    for key, inner in value.items():
        below = f"{name}.{key}"
        found += paths_of(inner, below, depth - 1) if isinstance(inner, Mapping) and depth else [below]
    return found


def is_called_as_chats(name: str) -> bool:
    """Whether a column has a name that chats usually have."""
    return name.casefold() in _CHAT_COLUMNS


def is_chat(value: Any) -> bool:
    """Whether a value is a list of messages, as chats are kept."""
    return (
        isinstance(value, Sequence)
        and not isinstance(value, str | bytes)
        and bool(value)
        and all(isinstance(turn, Mapping) and any(keys <= set(turn) for keys in _TURN_KEYS) for turn in value)
    )


def as_text(value: Any, column: str, where: str = "") -> str:
    """The text of a cell; `where` says which row of what, for the error where the cell holds no text.

    Text is taken as it is. Numbers are written as plainly as they can be (3.0 is `3`), truth values as `True` and
    `False`, dates as ISO 8601 has them.
    """
    text = value if isinstance(value, str) else _plain(value)
    if text is None:
        wrong = _not_text(value, column)
    elif (odd := _odd_characters(text)) is None:
        return str(text)
    else:
        wrong = odd
    raise InlayError(f"{where}{': ' if where else ''}{column!r} {wrong}.")


def as_words(value: Any, column: str, where: str = "") -> list[str]:
    """The words of a sentence: those of a list, or those of a text that blanks divide."""
    if isinstance(value, list | tuple):
        return [as_text(word, column, where) for word in value]
    return as_text(value, column, where).split()


def as_whole_number(value: Any, column: str, where: str = "") -> int:
    """A place in a text: 3, 3.0 and "3" are one."""
    text = as_text(value, column, where).strip()
    if not re.fullmatch(r"-?[0-9]{1,18}(\.0*)?", text) or isinstance(value, bool):
        raise InlayError(f"{where}{': ' if where else ''}{column!r} is {text[:_SHOWN]!r}; places are whole numbers.")
    return int(text.partition(".")[0])


def _plain(value: Any) -> str | None:
    """A single value in its one spelling; None for what has none."""
    if is_null(value):
        return None
    if isinstance(value, bool) or type(value).__name__ in ("bool", "bool_"):  # NumPy's, under either name
        return str(bool(value))
    if isinstance(value, numbers.Integral):
        return str(int(value))
    if isinstance(value, Decimal):
        return f"{value:f}" if value.is_finite() else None
    if isinstance(value, numbers.Real):
        number = float(value)
        if not math.isfinite(number):
            return None
        # NumPy's narrow floats have a shorter spelling than the float they become.
        return str(int(number)) if number.is_integer() and abs(number) < _EXACT else str(value)
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    return None


def _not_text(value: Any, column: str) -> str:
    """What is the matter with a cell that holds no text, and what to do about it."""
    if is_null(value):
        return "is missing (null or NaN). Give a text, or leave the row out"
    if is_chat(value) or (column.casefold() in _CHAT_COLUMNS and isinstance(value, list | Mapping)):
        return f"holds a chat, not a text. {CHATS}"
    if isinstance(value, Mapping):
        paths = paths_of(value, column)
        shown = ", ".join(map(repr, paths[:5])) + (", ..." if len(paths) > 5 else "")
        return "holds an object, not a text" + (f". Name the text inside of it by its path: {shown}" if paths else "")
    if isinstance(value, bytes):
        return f"holds {len(value):,} bytes, not a text. Decode them"
    if isinstance(value, numbers.Real | Decimal):
        return "is infinite. Give a number, or null if it is missing"
    if isinstance(value, Sequence):
        return f"holds a list of {len(value):,}, not a text. Join it to one text, or put its parts into columns"
    return f"holds a value of the type {type(value).__name__}, not a text. Convert it to text"


def _odd_characters(text: str) -> str | None:
    """What is the matter with a text that is too long, or holds what no text holds."""
    if len(text) > LONGEST:
        return (
            f"holds {len(text):,} characters, and at most {LONGEST:,} are read (it begins {text[:_SHOWN]!r}). If a "
            "quote around there is never closed, close it; otherwise divide the text"
        )
    if "\0" in text:
        before = text[: text.index("\0")][-_SHOWN:]
        return f"holds a NUL character (after {before!r}). Remove it, and check that the file is what it should be"
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return (
            f"holds half a character (the lone surrogate {text[error.start]!r}, after "
            f"{text[: error.start][-_SHOWN:]!r}). The text was cut or decoded wrongly: write it again as UTF-8"
        )
    return None
