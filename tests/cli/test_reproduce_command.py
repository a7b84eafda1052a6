"""`inlay reproduce` as a person types it."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from inlay.papers.commands import reproduce as reproduce_command
from inlay.papers.commands.blocks import in_blocks
from inlay.papers.reproduce import catalogue


def test_the_list_has_one_recipe_a_line(typed) -> None:
    status, output, _ = typed("reproduce", "--list")
    lines = output.strip().splitlines()
    assert status == 0
    assert [line.split("\t")[0] for line in lines[1:]] == list(catalogue.recipes())
    assert all(len(line.split("\t")) == 8 for line in lines)
    for recipe, line in zip(catalogue.recipes().values(), lines[1:], strict=True):
        counts = line.split("\t")[1:6]
        assert counts == ["-"] * 5 or sum(map(int, counts)) == len(recipe.claims)


def on_terminal(monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", str(columns))


def test_the_list_has_one_recipe_a_line_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    on_terminal(monkeypatch, 100)
    reproduce_command.print_list()
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line).strip() for line in capsys.readouterr().out.splitlines()]
    assert [line.split()[0] for line in lines if "/" in line.split(" ")[0]] == list(catalogue.recipes())
    assert max(map(len, lines)) <= 100


def test_a_wide_table_comes_in_blocks_of_whole_numbers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    head = ["panel", "row", *(f"set {number}, {whose}" for number in range(9) for whose in ("paper", "ours")), "more"]
    cells = [f"{number}1.75 ± 0.79" for number in range(9) for _ in range(2)]
    rows = [["ViT", "AP", *cells, "-"], ["ViT", "VP", *["-"] * 18, "7.5"]]
    on_terminal(monkeypatch, 80)
    in_blocks(head, rows, names=2, pairs=True)
    printed = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out)
    assert max(map(len, printed.splitlines())) <= 80
    for number in range(9):
        (line,) = [line for line in printed.splitlines() if f"{number}1.75 ± 0.79" in line]
        assert line.count(f"{number}1.75 ± 0.79") == 2  # a pair is not parted
    assert "7.5" in printed


def test_a_scale_that_there_is_not_is_told_once(typed) -> None:
    status, _, errors = typed("reproduce", "all", "--scale", "huge")
    assert status == 2
    assert errors.count("Unknown scale 'huge'") == 1


def test_notes_are_shown(typed, tmp_path: Path) -> None:
    """What a recipe discloses, and the models behind both columns."""
    name = "multi-lora/table-1"
    status, _, errors = typed("reproduce", name, "--scale", "smoke", "--out", str(tmp_path))
    assert status == 0
    for note in catalogue.recipes()[name].notes:
        assert f"note: {note}" in errors
    assert "paper: roberta-base; here: stand-ins with random weights" in errors


def test_a_defect_in_one_recipe_does_not_stop_the_others(
    typed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A recipe whose own code breaks, and one that runs."""
    known = catalogue.recipes()
    good = known["activation-prompts/lemma-1"]
    bad = replace(good, name="activation-prompts/lemma-2", run=lambda bench, settings: {}[0])  # type: ignore[arg-type,return-value]
    monkeypatch.setattr(catalogue, "choose", lambda name: [bad, good])
    status, output, errors = typed("reproduce", "activation-prompts", "--scale", "smoke", "--out", str(tmp_path))
    assert status == 1
    assert "activation-prompts/lemma-2 cannot run: KeyError: 0" in errors
    assert "Layer 1 has the distance" in output


def test_a_recipe_tells_claims_on_both_and_where_it_is_kept(typed, tmp_path: Path) -> None:
    status, output, errors = typed(
        "reproduce", "activation-prompts/lemma-1", "--scale", "smoke", "--out", str(tmp_path)
    )
    assert status == 0
    claims = [line.split("\t") for line in output.splitlines() if line.startswith("Layer 1 has the distance")]
    assert [cells[1:3] for cells in claims] == [["not tested", "smoke: not judged"]]
    assert "says nothing about the claims" in errors
    kept = json.loads((tmp_path / "activation-prompts" / "lemma-1" / "smoke" / "lemma-1.json").read_text())
    assert kept["scale"] == "smoke"
    assert [claim["ours"]["judgement"] for claim in kept["claims"]] == ["not judged"] * 4
    folder = tmp_path / "activation-prompts" / "lemma-1" / "smoke"
    assert (folder / "lemma-1.md").read_text().count("smoke: not judged") == 4


def test_mistakes_are_told_in_a_line(typed) -> None:
    status, _, errors = typed("reproduce")
    assert status == 2
    assert "--list" in errors
    status, _, errors = typed("reproduce", "activation-prompts/tabel-2")
    assert status == 2
    assert "Did you mean 'activation-prompts/table-2'" in errors


def test_what_was_read_and_not_run_is_told(typed, tmp_path: Path) -> None:
    status, _, errors = typed("reproduce", "activation-prompts/table-3", "--out", str(tmp_path))
    assert status == 0
    assert "Read, not run (--fresh runs it): inlay/papers/activation_prompts/kept/table.json" in errors
    assert "here: resnet50_v1, vit_tiny_patch16_224)" in errors
