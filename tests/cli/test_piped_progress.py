"""Long work whose output goes into a pipe or a log: plain lines say how far it is and how long it still takes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import zoo
from checkpoints import write_tokenizer
from inlay import console
from pseudo_terminal import PIPE, SETTINGS, Printed, type_in

DUMB = next(setting for setting in SETTINGS if setting.environment.get("TERM") == "dumb")
LINE = r"\d+%: [\d,.]+ of {total} {units}, about \d+ s left"


@pytest.fixture
def printed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Type a command, with every line said for which it is not too early by a wide margin: none is."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(console, "APART", 0.0)
    monkeypatch.setattr(console, "GROWTH", 0.0)

    def run(*words: str, setting=PIPE) -> Printed:
        found = type_in(setting, *words)
        assert found.status == 0, found.err
        assert "\r" not in found.err
        assert "\x1b" not in found.err
        return found

    return run


def test_tune_and_compare(printed, text_model: Path, reviews: Path) -> None:
    given = ("--model", "my-model", "--data", "reviews.csv", "--text", "body", "--label", "stars", "--max-steps", "6")
    found = printed("tune", *given, "--method", "bias", "--evaluations", "1")
    steps = re.findall(rf"reviews bias: {LINE.format(total=6, units='steps')}(.*)", found.err)
    assert len(steps) == 5
    assert "training loss" in steps[-1]
    assert "%" not in found.out.replace("0.", "").partition("trained parameters")[0]
    found = printed("compare", *given, "--methods", "norm,linear-probe", "--seeds", "1", setting=DUMB)
    shares = [float(share) for share in re.findall(r"([\d.]+) of 2 runs, about \d+ s left", found.err)]
    assert shares == sorted(shares)
    assert any(0 < share < 1 for share in shares)  # before the first run has ended
    assert "[2/2] linear-probe, seed 0: finished" in found.err
    assert not re.search(r"\d+%:", printed("tune", *given, "--method", "norm", "--seed", "2", "--quiet").err)


def test_compress(printed, tmp_path: Path) -> None:
    zoo.tiny("llama", "causal-lm")[0].save_pretrained(tmp_path / "decoder")
    write_tokenizer(tmp_path / "decoder")
    (tmp_path / "prompt.txt").write_text(" ".join(f"w{number}" for number in range(12)))
    given = ("--model", "decoder", "--prompt", "prompt.txt", "--out", "x", "--count", "10", "--length", "6")
    found = printed("compress", *given, "--steps", "3", "--batch-size", "4")
    for stage, total, units in (("sampling", 60, "tokens"), ("fitting", 6, "steps"), ("distilling", 3, "steps")):
        assert re.search(rf"{stage}: {LINE.format(total=total, units=units)}", found.err), stage


def test_lab(printed) -> None:
    found = printed("lab", "prefix", "--figure", "lemma-m6", "--seeds", "2", "--widths", "4,8")
    begun = re.findall(r"^\[(\d+)/(\d+)\] (.*)$", found.err, re.MULTILINE)
    assert [int(number) for number, _, _ in begun] == list(range(1, len(begun) + 1))
    assert all(re.search(r", about \d+ s left$", what) for _, _, what in begun[1:])
