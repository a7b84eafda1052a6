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
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from inlay import Spec, tune
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


TEMPLATE = (
    "<s> {% for m in messages %}w2{{ m['role'][0] | replace('u', '0') | replace('a', '1') }} {{ m['content'] }} w30 "
    "{% endfor %}w21 "
)


def tuned(folder: Path, **tokenizer: str) -> tuple[Path, Path]:
    """A tiny decoder and a run of it on prompts and answers."""
    model = decoder(folder / "base", **tokenizer)
    lines = [{"question": f"w{n} w{n + 1}", "reply": f"w{n + 2} w{n + 3}"} for n in range(3, 23)]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    spec = Spec(
        model=str(model), data=str(folder / "pairs.jsonl"), kind="causal-lm", text=("question",), label="reply",
        template="w1 {question} w2", method="lora", max_steps=20, learning_rate=0.05,
    )  # fmt: skip
    return model, tune(spec, folder / "runs", progress=False).folder


def expected(model: Path, run: Path, text: str, most: int = 6) -> str:
    """What Transformers and PEFT write after a text that has its own token of beginning."""
    tokenizer, base = AutoTokenizer.from_pretrained(model), AutoModelForCausalLM.from_pretrained(model).eval()
    adapted = PeftModel.from_pretrained(base, str(run / "adapter"))
    ids = tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids
    made = adapted.generate(input_ids=ids, do_sample=False, max_new_tokens=most, pad_token_id=1)
    return str(tokenizer.decode(made[0, ids.shape[1] :], skip_special_tokens=True)).strip()


def test_a_tuned_model_is_talked_to_in_several_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("INLAY_CACHE", str(tmp_path / "cache"))
    model, run = tuned(tmp_path, chat_template=TEMPLATE)
    first = expected(model, run, "<s> w20 w3 w5 w30 w21")
    second = expected(model, run, f"<s> w20 w3 w5 w30 w21 {first} w30 w20 w7 w30 w21")
    with terminal(100, "--run", str(run), "--max-tokens", "6") as typed:
        told = typed.until("> ")
        assert "each line is a user's message in the model's chat template" in told
        assert run.name in told
        typed.type("w3 w5\n")
        assert first in typed.until("\n> ")
        typed.type("w7\n")
        assert second in typed.until("\n> ")
        typed.type("w3 " * 30 + "\n")
        assert "/new begins a new conversation" in typed.until("\n> ")
        typed.type("/new\n")
        typed.until("\n> ")
        typed.type("w3 w5\n")
        assert first in typed.until("\n> ")
        typed.type("/quit\n")
        assert typed.status() == 0
    plain = CliRunner().invoke(app, ["chat", "--run", str(run), "--plain", "--once", "w3 w5", "--max-tokens", "6"])
    assert plain.stdout.strip() == expected(model, run, "w1 w3 w5 w2")


def test_without_a_template_it_goes_on_and_says_so(tmp_path: Path) -> None:
    model, run = tuned(tmp_path)
    found = CliRunner().invoke(app, ["chat", "--run", str(run), "--max-tokens", "6"], input="w3 w5\n")
    assert found.exit_code == 0, found.output
    assert "has each line in the run's template (there is no chat template)" in found.stderr
    assert found.stdout.strip() == expected(model, run, "w1 w3 w5 w2")
    for words, says in (
        (["--chat-template"], "has no chat template: leave --chat-template out"),
        (["--prompt", str(tmp_path / "pairs.jsonl")], "give it with --adapter"),
        (["--adapter", "x"], "Give --run or --adapter, not both"),
    ):
        wrong = CliRunner().invoke(app, ["chat", "--run", str(run), "--once", "w3", *words])
        assert isinstance(wrong.exception, InlayError), wrong.output
        assert says in str(wrong.exception)
    alone = CliRunner().invoke(app, ["chat", "--model", str(model), "--once", "w3 w5", "--max-tokens", "6", "--quiet"])
    assert alone.exit_code == 0, alone.output
    assert len(alone.stdout.split()) <= 6
