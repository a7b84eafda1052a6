"""`inlay lab activation-prompts` as a person types it."""

from __future__ import annotations

import csv
import json
from functools import partial
from pathlib import Path

import pytest


@pytest.fixture
def lab(typed):
    """Run the command in the test's folder; its exit status, output and errors."""
    return partial(typed, "lab", "activation-prompts")


def kept(folder: Path) -> tuple[list[dict[str, str]], dict]:
    """The numbers and circumstances of an experiment, after a look at its pictures."""
    name = folder.name
    assert {path.name for path in folder.iterdir()} == {f"{name}.{ending}" for ending in ("png", "svg", "csv", "json")}
    assert (folder / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    assert "</svg>" in (folder / f"{name}.svg").read_text()
    with (folder / f"{name}.csv").open() as file:
        return list(csv.DictReader(file)), json.loads((folder / f"{name}.json").read_text())


@pytest.mark.parametrize("figure", ["proposition-1", "lemma-1"])
def test_quick_experiments_draw_and_tell(lab, tmp_path: Path, figure: str) -> None:
    status, out, err = lab("--figure", figure, "--out", "here")
    assert status == 0, err
    rows, facts = kept(tmp_path / "here" / figure)
    assert len(rows) > 10
    assert facts["command"][:2] == ["inlay", "lab"]
    header, *lines = [line.split("\t") for line in out.splitlines()]
    assert header == ["claim", "measured", "holds?"]
    assert lines == [[claim["claim"], claim["measured"], claim["holds"]] for claim in facts["claims"]]


def test_theorem_1_with_mixed_backgrounds(lab, tmp_path: Path) -> None:
    """The reading without an expected gradient is the quick one: SGD only."""
    options = ("--figure", "theorem-1", "--tokens", "4, 5", "--seeds", "2", "--background", "mixed", "--quiet")
    status, out, err = lab(*options)
    assert status == 0, err
    assert err == ""
    rows, facts = kept(tmp_path / "lab" / "theorem-1")
    assert [(row["layer"], row["P"], row["seed"]) for row in rows] == [
        (layer, tokens, seed) for layer in "12" for tokens in "45" for seed in "01"
    ]
    assert facts["settings"]["background"] == "mixed"
    assert "order P^2 log P" in out


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--figure", "lemma-2"), "lemma-1"),
        (("--tokens", "8,many"), "8,12,16,24"),
        (("--tokens", "1,2"), "from 2 on"),
        (("--goal", "loss"), "risk"),
        (("--background", "none"), "mixed"),
        (("--beta-squared", "-1"), "above 0"),
        (("--step", "0"), "step = 0"),
    ],
)
def test_bad_options_are_told(lab, tmp_path: Path, options: tuple[str, ...], words: str) -> None:
    status, _, err = lab(*options)
    assert status == 2
    assert words in err
    assert "Traceback" not in err
    assert not list(tmp_path.iterdir())


def test_a_file_in_the_way_is_told_before_the_work(lab, tmp_path: Path) -> None:
    (tmp_path / "lab").mkdir()
    (tmp_path / "lab" / "lemma-1").write_text("mine")
    status, _, err = lab("--figure", "lemma-1")
    assert status == 2
    assert "--out" in err
    assert (tmp_path / "lab" / "lemma-1").read_text() == "mine"
