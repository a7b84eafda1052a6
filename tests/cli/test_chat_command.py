"""`inlay chat` as it is typed: a process at a terminal of its own, a pipe, and one text."""

from __future__ import annotations

import fcntl
import json
import os
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from typer.testing import CliRunner

from inlay.cli.app import app
from inlay.errors import InlayError
from prompted import adapter, decoder

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
PATIENCE = 120
ROOMY = 4000  # words of context, so that an answer can be interrupted


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    model = decoder(tmp_path / "decoder")
    adapter(model, tmp_path / "compressed", 4)
    (tmp_path / "prompt.txt").write_text(" ".join(f"w{number}" for number in range(12)))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("INLAY_CACHE", str(tmp_path / "cache"))
    return tmp_path


class Terminal:
    """A process that believes somebody sits before it."""

    def __init__(self, process: subprocess.Popen[bytes], end: int) -> None:
        self.process, self.end, self.seen = process, end, ""

    def until(self, text: str) -> str:
        """What was printed up to this text, since the last time."""
        limit = time.monotonic() + PATIENCE
        while text not in self.seen:
            assert time.monotonic() < limit, self.seen
            assert self._read(), self.seen
        found, _, self.seen = self.seen.partition(text)
        return found

    def type(self, text: str) -> None:
        os.write(self.end, text.encode())

    def interrupt(self) -> None:
        """Ctrl-C; again where nothing comes of it: Python misses one between the prompt and its wait for a line."""
        limit = time.monotonic() + PATIENCE
        while time.monotonic() < limit and self._read():
            os.write(self.end, b"\x03")
            again = time.monotonic() + 15
            while time.monotonic() < again:
                if not self._read():
                    return

    def status(self) -> int:
        """How it ended."""
        limit = time.monotonic() + PATIENCE
        while self._read():
            assert time.monotonic() < limit, self.seen
        return self.process.wait(PATIENCE)

    def _read(self) -> bool:
        """Some more of what is printed; whether there may be more."""
        if not select.select([self.end], [], [], 0.2)[0]:
            return True
        try:
            part = os.read(self.end, 1 << 16)
        except OSError:  # so a terminal says that its other end is closed
            return False
        self.seen += part.decode().replace("\r\n", "\n")
        return bool(part)


@contextmanager
def terminal(columns: int, *words: str) -> Iterator[Terminal]:
    # The process makes the terminal its own, so that Ctrl-C is a signal to it.
    begin = (
        "import fcntl, runpy, signal, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0);"
        "signal.signal(signal.SIGINT, signal.default_int_handler); runpy.run_module('inlay', run_name='__main__')"
    )
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "TERM": "dumb"}
    for name in ("COLUMNS", "LINES"):
        environment.pop(name, None)
    ours, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    command = [sys.executable, "-c", begin, "chat", *words]
    streams = {"stdin": theirs, "stdout": theirs, "stderr": theirs}
    process = subprocess.Popen(command, env=environment, start_new_session=True, **streams)  # type: ignore[call-overload]
    os.close(theirs)
    try:
        yield Terminal(process, ours)
    finally:
        process.kill()
        process.wait(PATIENCE)
        os.close(ours)


def test_lines_are_typed_and_answered(place: Path) -> None:
    with terminal(100, "--adapter", "compressed", "--prompt", "prompt.txt", "--max-tokens", "6") as typed:
        told = typed.until("> ")
        assert "stands for a prompt of 12 tokens" in told
        assert "/quit: end" in told
        typed.type("w3 w5\n")
        first = typed.until("\n> ")
        assert "compressed prompt" in first
        assert "full prompt" in first
        assert "Traceback" not in first
        typed.type("/nothing\n")
        assert "Unknown command '/nothing'" in typed.until("\n> ")
        typed.type("w3 " * 50 + "\n")
        assert "reads 40 in all" in typed.until("\n> ")
        typed.type("/new\n")
        assert "A new conversation begins." in typed.until("\n> ")
        typed.type("w3 w5\n")
        again = typed.until("\n> ")
        assert again.partition(" tokens in ")[0] == first.partition(" tokens in ")[0], "what was said is forgotten"
        typed.type("/quit\n")
        assert typed.status() == 0


@pytest.mark.parametrize("when", ["waiting", "answering"])
def test_ctrl_c_ends_it_cleanly(when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("INLAY_CACHE", str(tmp_path / "cache"))
    model = decoder(tmp_path / "decoder")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"max_position_embeddings": ROOMY}))
    adapter(model, tmp_path / "compressed")
    how = ("--max-tokens", str(ROOMY - 10), "--temperature", "1.5", "--seed", "1")
    with terminal(80, "--adapter", "compressed", *how) as typed:
        typed.until("> ")
        if when == "answering":
            typed.type("w3\n")
            typed.until(" w")
        typed.interrupt()
        assert typed.status() == 130
        assert "Traceback" not in typed.seen


def test_one_text_and_lines_from_a_pipe(place: Path) -> None:
    one = CliRunner().invoke(app, ["chat", "--adapter", "compressed", "--once", "w3 w5", "--max-tokens", "6"])
    assert one.exit_code == 0, one.output
    assert len(one.stdout.split()) <= 6
    assert "compressed prompt: " in one.stderr
    piped = CliRunner().invoke(
        app, ["chat", "--adapter", "compressed", "--max-tokens", "6", "--quiet"], input="w3 w5\n\n/new\nw3 w5\n"
    )
    assert piped.exit_code == 0, piped.output
    assert piped.stdout.splitlines() == one.stdout.splitlines() * 2
    assert piped.stderr == ""


def test_mistakes(place: Path) -> None:
    for given, says in (
        (["--adapter", "compresed", "--once", "w3"], "Did you mean 'compressed'"),
        (["--adapter", "compressed", "--once", "w3", "--temperature", "-1"], "temperature=-1"),
        (["--adapter", "compressed", "--once", "w3", "--chat-template"], "has no chat template"),
        (["--adapter", "compressed", "--once", ""], "needs a first token"),
    ):
        found = CliRunner().invoke(app, ["chat", *given])
        assert isinstance(found.exception, InlayError), found.output
        assert says in str(found.exception)
    wrong = CliRunner().invoke(app, ["chat", "--adapter", "compressed"], input="w3\n/nothing\n")
    assert isinstance(wrong.exception, InlayError)
