"""`inlay reproduce` as a person types it."""

from __future__ import annotations

import json
from pathlib import Path

from inlay.reproduce import catalogue


def test_the_list_has_one_recipe_a_line(typed) -> None:
    status, output, _ = typed("reproduce", "--list")
    lines = output.strip().splitlines()
    assert status == 0
    assert [line.split("\t")[0] for line in lines[1:]] == list(catalogue.recipes())
    assert all(len(line.split("\t")) == 4 for line in lines)


def test_a_recipe_tells_claims_on_both_and_where_it_is_kept(typed, tmp_path: Path) -> None:
    status, output, errors = typed(
        "reproduce", "activation-prompts/lemma-1", "--scale", "smoke", "--out", str(tmp_path)
    )
    assert status == 0
    claims = [line.split("\t") for line in output.splitlines() if line.startswith("Layer 1 has the distance")]
    assert [cells[1:3] for cells in claims] == [["not tested", "holds"]]
    assert "says nothing about the claims" in errors
    kept = json.loads((tmp_path / "activation-prompts" / "lemma-1" / "smoke" / "lemma-1.json").read_text())
    assert kept["scale"] == "smoke"
    assert len(kept["claims"]) == 4


def test_mistakes_are_told_in_a_line(typed) -> None:
    status, _, errors = typed("reproduce")
    assert status == 2
    assert "--list" in errors
    status, _, errors = typed("reproduce", "activation-prompts/tabel-2")
    assert status == 2
    assert "Did you mean 'activation-prompts/table-2'" in errors
