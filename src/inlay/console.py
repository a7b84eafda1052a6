"""What is printed for a person: text that cannot steer the terminal, and whether the terminal is to be coloured."""

from __future__ import annotations

import os
import re
from typing import TextIO

# What a terminal obeys instead of showing (but for the line's end and the tab), what changes the order in which text
# is read, and halves of characters, which cannot be written at all. Zero-width joiners belong to some scripts and stay.
STEERING = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]",
)


def visible(text: str) -> str:
    """Text from anywhere (a record, a file's name, a label) with control characters written out, as in `\\x1b`.

    Beyond ASCII they are written as JSON writes them, so that a line of JSON stays the same JSON.
    """
    return STEERING.sub(lambda found: written_out(ord(found[0])), text)


def written_out(code: int) -> str:
    """A character as an escape that can be read."""
    return f"\\x{code:02x}" if code < 0x7F else f"\\u{code:04x}"


def can_redraw(stream: TextIO) -> bool:
    """Whether a line that was written to this stream can be written over: a terminal, and not a dumb one."""
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def has_colour(stream: TextIO) -> bool:
    """Whether text on this stream may be coloured or bold. NO_COLOR (https://no-color.org) forbids both."""
    return can_redraw(stream) and not os.environ.get("NO_COLOR")
