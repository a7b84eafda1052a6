"""A comparison on a narrow terminal: two tables with whole numbers in place of one with broken ones."""

from __future__ import annotations

import re
import sys

import pytest

from inlay.cli import show
from inlay.workflow.comparison import Comparison, Measured, Row


@pytest.mark.parametrize(("columns", "tables"), [(200, 1), (80, 2)])
def test_a_table_that_does_not_fit_is_cut_in_two(
    columns: int, tables: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rate = Measured(123.4, 5.6, 7)
    row = Row(
        method="activation-prompt",
        metric="accuracy",
        greater_is_better=True,
        values=(0.31, 0.32, 0.35),
        trained=14_410,
        seconds_per_epoch=rate,
        first_epoch=0.797,
        peak_memory=1e9,
        train_rate=rate,
        inference_rate=rate,
        saved_bytes=60_000,
    )
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", str(columns))
    show.comparison(Comparison([row], []))
    printed = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out)
    assert printed.count("activation-prompt") == tables
    assert "0.3267 ± 0.0517" in printed
    assert max(map(len, printed.splitlines())) <= columns
