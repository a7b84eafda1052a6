"""A column of a report is one entry of `COLUMNS`: every table of runs shows it."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from inlay.cli import show
from inlay.report import columns, exports
from inlay.report.collect import collect
from inlay.report.columns import COLUMNS, Column, everywhere, mean
from inlay.report.html import page_data
from inlay.workflow.comparison import Comparison, rows_of
from recorded import finished, spec_of

STEPS = Column(
    key="steps",
    titles=everywhere("updates") | {"list": "updates"},
    read=mean("steps"),
    kind="number",
    about="Updates of the weights.",
    better="less",
)


def test_one_entry_is_shown_everywhere(
    tmp_path: Path,
    typed: Callable[..., tuple[int, str, str]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(columns, "COLUMNS", (*COLUMNS, STEPS))
    runs = [finished(tmp_path / "runs", spec_of("bias", seed), steps=30 + 10 * seed) for seed in (0, 1)]
    found = collect(tmp_path / "runs")
    line = next(csv.DictReader(exports.write_csv(found, tmp_path / "t.csv").open(newline="")))
    assert line["updates"] == "30"
    assert "| updates |" in (marked := exports.write_markdown(found, tmp_path / "t.md").read_text())
    assert "| 35 |" in marked
    assert r"& updates \\" in exports.write_latex(found, tmp_path / "t.tex").read_text()
    data = page_data(found)
    assert data["rows"][0]["steps"] == 35
    assert [each["label"] for each in data["columns"]][-1] == "updates"
    assert json.dumps(data["columns"])
    show.comparison(Comparison(rows_of(runs), runs))
    head, body = capsys.readouterr().out.strip().splitlines()
    assert head.split("\t")[-1] == "updates"
    assert body.split("\t")[-1] == "35"
    assert typed("runs", "list")[1].splitlines()[1].endswith("\t30")
    assert "updates\t40" in typed("runs", "show", runs[1].id)[1]


def test_large_numbers_are_written_out() -> None:
    assert [STEPS.exact([{"steps": value}]) for value in (6, 0.4529, 1234)] == ["6", "0.453", "1,234"]


def test_keys_are_names_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = [column.key for column in COLUMNS]
    assert len(set(keys)) == len(keys)
    finished(tmp_path, spec_of())
    monkeypatch.setattr(columns, "COLUMNS", ())
    assert not {*page_data(collect(tmp_path))["rows"][0]} & {*keys}
    assert all(column.about.endswith(".") for column in COLUMNS)
