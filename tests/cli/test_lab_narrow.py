"""The claims of an experiment on a narrow terminal: both columns of words are broken between words, no number is."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from inlay.papers.findings import Finding, MeasuredClaim
from inlay.papers.lab import print_claims


def test_claims_and_measurements_share_the_width(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    long = MeasuredClaim(
        "(18): the gap is below (1 - eta_w zeta_0 / (2K))^t of its start; N = 2, K = 4, H = 2",
        "above it, beyond rounding (1e-25), at 0 of 2001 steps; at the end 1.3e-30, the bound 5.4e-10",
        "cannot tell",
    )
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "80")
    print_claims(Finding("icl-theorem-1", ("step",), [], [long]), Path("lab"), quiet=True)
    lines = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out).splitlines()
    assert max(map(len, lines)) <= 80
    words = {word for line in lines for word in line.split()}
    assert {*long.claim.split(), *long.measured.split()} <= words
    assert any("cannot tell" in line for line in lines)
