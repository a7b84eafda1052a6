"""What is printed for a person: text that cannot steer the terminal, whether there is colour, and how far work is."""

from __future__ import annotations

import os
import re
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

# Of lines that say how far work has come: the seconds between two of them, at least; more, the longer it takes.
APART, GROWTH = 10.0, 0.05

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


def tell(line: str) -> None:
    """A line of news on stderr: a result on stdout can be piped."""
    print(visible(line), file=sys.stderr, flush=True)


def can_redraw(stream: TextIO) -> bool:
    """Whether a line that was written to this stream can be written over: a terminal, and not a dumb one."""
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def has_colour(stream: TextIO) -> bool:
    """Whether text on this stream may be coloured or bold. NO_COLOR (https://no-color.org) forbids both."""
    return can_redraw(stream) and not os.environ.get("NO_COLOR")


class WrittenProgress:
    """How far work has come, in words: for where no bar can be drawn (a pipe, a log, a dumb terminal).

    `done` is what was done before it began, and costs no time now.
    """

    def __init__(
        self, total: float, units: str, *, done: float = 0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.total, self.units, self.before, self._clock = total, units, done, clock
        self._began = self._told = clock()

    def line(self, done: float) -> str | None:
        """The share, the count and the time left, if it is time to say them again."""
        now = self._clock()
        if not self.before < done < self.total or now - self._told < max(APART, GROWTH * (now - self._began)):
            return None
        self._told = now
        count = f"{done:,.0f}" if done == int(done) else f"{done:,.1f}"
        return f"{done / self.total:.0%}: {count} of {self.total:,.0f} {self.units}{self.left(done)}"

    def left(self, done: float) -> str:
        """The time that the rest takes at this pace, after a comma; empty before anything can be told."""
        if not self.before < done < self.total:
            return ""
        each = (self._clock() - self._began) / (done - self.before)
        return f", about {duration(each * (self.total - done))} left"


def duration(seconds: float) -> str:
    """A time as people say it."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"


@contextmanager
def quiet() -> Iterator[None]:
    """Let Transformers print nothing; its settings are as before when the block ends. Downloads keep their bars."""
    from huggingface_hub.utils import are_progress_bars_disabled, enable_progress_bars
    from transformers.utils import logging

    level, bars, downloads = (
        logging.get_verbosity(),
        logging.is_progress_bar_enabled(),
        not are_progress_bars_disabled(),
    )
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    if downloads:  # the line above silences the hub's as well
        enable_progress_bars()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
