"""A comparison on a narrow terminal: two tables with whole numbers in place of one with broken ones."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from inlay.cli import show
from inlay.workflow.comparison import Comparison, rows_of
from recorded import finished, spec_of


@pytest.mark.parametrize(("columns", "tables"), [(200, 1), (80, 2)])
def test_a_table_that_does_not_fit_is_cut_in_two(
    columns: int, tables: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    rate = {"mean": 123.4, "spread": 5.6, "repetitions": 7}
    runs = [
        finished(
            tmp_path,
            spec_of("activation-prompt", seed),
            value,
            portrait__parameters__trained=14_410,
            portrait__seconds_per_epoch=rate,
            portrait__trunk={"cached": True, "first_epoch_seconds": 0.797},
            portrait__peak_memory={"bytes": 10**9},
            portrait__train_examples_per_second=rate,
            portrait__inference_examples_per_second=rate,
            portrait__saved_bytes=60_000,
        )
        for seed, value in enumerate((0.31, 0.32, 0.35))
    ]
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", str(columns))
    show.comparison(Comparison(rows_of(runs), runs))
    printed = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out)
    assert printed.count("activation-prompt") == tables
    assert "0.3267 ± 0.0517" in printed
    assert "(first 0.797)" in printed
    assert max(map(len, printed.splitlines())) <= columns
