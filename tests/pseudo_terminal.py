"""`inlay ...` typed in a terminal of some width, or into a pipe, without a process of its own."""

from __future__ import annotations

import fcntl
import logging
import os
import struct
import sys
import termios
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field

STEERS = ("NO_COLOR", "COLUMNS", "LINES", "FORCE_COLOR", "TERM", "COLORTERM", "TERMINAL_WIDTH")


@dataclass(frozen=True)
class Setting:
    """A terminal of so many columns (None: a pipe), and what the environment says of it."""

    name: str
    columns: int | None
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def coloured(self) -> bool:
        return self.columns is not None and not self.environment


SETTINGS = (
    *(Setting(f"{columns} columns", columns) for columns in (60, 80, 200)),
    Setting("80 columns, no colour", 80, {"NO_COLOR": "1"}),
    Setting("60 columns, dumb", 60, {"TERM": "dumb"}),
    Setting("pipe", None),
)
NARROW, PIPE = SETTINGS[0], SETTINGS[-1]


class Seen:
    """What came out of one end of a terminal or a pipe, read while it is written."""

    def __init__(self, columns: int | None) -> None:
        self._ours, self.theirs = os.pipe() if columns is None else os.openpty()
        if columns is not None:
            fcntl.ioctl(self.theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
        self._parts: list[bytes] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def text(self) -> str:
        return b"".join(self._parts).decode().replace("\r\n", "\n")

    def _read(self) -> None:
        while True:
            try:
                part = os.read(self._ours, 1 << 16)
            except OSError:  # so a terminal says that its other end is closed
                part = b""
            if not part:
                return
            self._parts.append(part)

    def close(self) -> None:
        """To be called when every descriptor of the other end is closed."""
        self._reader.join()
        os.close(self._ours)


@contextmanager
def attached(setting: Setting) -> Iterator[tuple[Seen, Seen]]:
    """Standard output and standard error, of Python and of the process, are what `setting` says; what came out."""
    environment = {name: value for name, value in os.environ.items() if name not in STEERS}
    before = dict(os.environ)
    out, err = Seen(setting.columns), Seen(setting.columns)
    sys.stdout.flush()
    sys.stderr.flush()
    kept = [os.dup(number) for number in (1, 2)]
    for number, seen in ((1, out), (2, err)):
        os.dup2(seen.theirs, number)
        os.close(seen.theirs)
    os.environ.clear()
    os.environ.update(environment | {"TERM": "xterm-256color"} | setting.environment)
    logger = logging.getLogger("inlay")
    handlers = list(logger.handlers)
    try:
        with (
            open(1, "w", closefd=False, encoding="utf-8") as stdout,
            open(2, "w", closefd=False, encoding="utf-8", buffering=1) as stderr,
            redirect_stdout(stdout),
            redirect_stderr(stderr),
        ):
            yield out, err
    finally:
        logger.handlers[:] = handlers
        os.environ.clear()
        os.environ.update(before)
        for number, old in zip((1, 2), kept, strict=True):
            os.dup2(old, number)
            os.close(old)
        out.close()
        err.close()


@dataclass(frozen=True)
class Printed:
    status: int
    out: str
    err: str


def type_in(setting: Setting, *words: str, meanwhile: Callable[[Seen], None] | None = None) -> Printed:
    """Give the command; `meanwhile` is called in a thread with what is on standard error by and by."""
    from inlay import cli

    status, argv = 0, sys.argv
    with attached(setting) as (out, err):
        if meanwhile is not None:
            threading.Thread(target=meanwhile, args=(err,), daemon=True).start()
        sys.argv = ["inlay", *words]
        try:
            cli.main()
        except SystemExit as end:
            status = int(end.code or 0)
        finally:
            sys.argv = argv
    return Printed(status, out.text, err.text)
