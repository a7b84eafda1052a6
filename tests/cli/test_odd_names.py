"""Names and numbers that no file system, spreadsheet or page can do with: one clear error, or shown as they are."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path

import pytest

import recorded
from inlay import Spec
from inlay.errors import InlayError
from inlay.records.tables import csv_text
from inlay.report.html import write_report
from inlay.workflow.planning import seed_numbers

Typed = Callable[..., tuple[int, str, str]]
LONG = "n" * 300
HALF = "half-\udcff"  # how Python writes a byte that is not UTF-8


@pytest.mark.parametrize(
    "command",
    [
        ("runs", "show", LONG),
        ("runs", "rm", "--yes", LONG),
        ("runs", "list", "--out", LONG),
        ("report", LONG),
        ("report", "runs", "--out", f"{LONG}.html"),
        ("report", "runs", "--csv", f"{LONG}.csv"),
        ("tune", "--model", LONG, "--method", "lora", "--data", "a.csv"),
        ("tune", "--model", "embedded:vit", "--method", "lora", "--data", LONG),
        ("tune", "--model", "embedded:vit", "--method", "lora", "--task", LONG),
        ("tune", "--model", "embedded:vit", "--method", LONG, "--task", "digits"),
        ("sweep", f"{LONG}.yaml"),
        ("predict", "--run", LONG, "--input", "a.csv"),
        ("predict", "--adapter", LONG, "a.jsonl"),
        ("export", "--adapter", LONG, "--task", "t"),
        ("serve", "--adapter", LONG),
    ],
)
@pytest.mark.parametrize("name", [LONG, HALF])
def test_names_that_no_file_can_have(command: tuple[str, ...], name: str, typed: Typed) -> None:
    recorded.finished(Path("runs"), recorded.spec_of())
    status, _, error = typed(*(word.replace(LONG, name) for word in command))
    assert status in (0, 2)
    assert "Traceback" not in error
    assert status == 0 or any(line.startswith("Error: ") for line in error.splitlines())


def test_a_spec_says_which_of_its_names_is_too_long() -> None:
    for field in ("model", "data"):
        with pytest.raises(InlayError, match=f"{field}='nnn.* is longer than a file's name can be"):
            Spec(**{"model": "m", "method": "lora", "data": "d", field: f"/a/{LONG}/b"[3:]})


@pytest.mark.parametrize("seeds", [99_999_999_999, range(20_000)])
def test_more_seeds_than_anybody_runs(seeds: int | range) -> None:
    with pytest.raises(InlayError, match="give 10,000 at most"):
        seed_numbers(seeds)


def test_more_seeds_than_anybody_runs_as_they_are_typed(typed: Typed) -> None:
    Path("sweep.yaml").write_text("model: embedded:vit\ntask: digits\nmethods: [bias]\nseeds: 99999999999\n")
    status, _, error = typed("sweep", "sweep.yaml", "--dry-run")
    assert status == 2
    assert "seeds=99999999999: give 10,000 at most" in error
    common = ("--model", "embedded:vit", "--task", "digits", "--methods", "bias")
    for command in (("compare", *common), ("lab", "prefix", "--figure", "theorem-b2")):
        status, _, error = typed(*command, "--seeds", "99999999999")
        assert status == 2
        assert "10000" in error


@pytest.mark.parametrize("keys", ["[a, b]: 1", "{a: b}: 1", "? [a]\n: 1"])
def test_keys_of_yaml_that_are_no_names(keys: str, typed: Typed) -> None:
    Path("sweep.yaml").write_text(f"model: embedded:vit\ntask: digits\nmethods: [bias]\n{keys}\n")
    status, _, error = typed("sweep", "sweep.yaml", "--dry-run")
    assert status == 2
    assert "key is a list or a mapping" in error


def test_a_note_that_looks_like_a_mark_of_the_page(tmp_path: Path) -> None:
    """Every mark in a note, and in the folder's name: the script is there once, and the data hold the note."""
    marks = "{{script}} {{data}} {{style}} {{policy}} {{title}} {{other}}"
    out = tmp_path / marks
    recorded.finished(out, recorded.spec_of(), task__notes=[marks], task__source=marks)
    recorded.failed(out, recorded.spec_of("norm"), marks)
    page = write_report(out, tmp_path / "page.html").read_text()
    plain = write_report(recorded.finished(tmp_path / "plain", recorded.spec_of()).folder.parent, tmp_path / "p.html")
    assert page.count("'use strict'") == plain.read_text().count("'use strict'") == 1
    assert page.count("<script") == plain.read_text().count("<script")
    assert marks in page.partition('id="data">')[2].partition("</script>")[0]


def test_headers_of_tables_cannot_be_formulas(tmp_path: Path) -> None:
    rows = list(csv.reader(csv_text([["=1+1", "@x", "-y", "plain"], ["+z", -1.5, None, "＝2"]]).splitlines()))  # noqa: RUF001
    assert rows == [["'=1+1", "'@x", "'-y", "plain"], ["'+z", "-1.5", "", "'＝2"]]  # noqa: RUF001


def test_a_metric_called_like_a_formula(typed: Typed) -> None:
    odd = {"test": {"accuracy": 0.5}, '=cmd|"/c calc"!A1': {"@x": 0.1}}
    recorded.finished(Path("runs"), recorded.spec_of(), metrics=odd)
    status, _, error = typed("report", "runs", "--csv", "runs.csv")
    assert status == 0, error
    (head, *_) = csv.reader(Path("runs.csv").read_text().splitlines())
    assert not [name for name in head if name.startswith(("=", "+", "-", "@"))]


def test_tables_are_written_by_one_function() -> None:
    source = Path(recorded.__file__).parents[1] / "src"
    texts = {path: path.read_text(encoding="utf-8") for path in source.rglob("*.py")}
    (one,) = (path for path, text in texts.items() if "csv.writer(" in text or "DictWriter" in text)
    assert one == source / "inlay" / "records" / "tables.py"
