"""Kept runs behind the tables say of which commit they are, and read the feature that their group says."""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest

from inlay import InlayError, backbones
from inlay.papers import tables
from inlay.papers.infoprompt.table import FewShotRun
from inlay.papers.multi_lora import table as multi_lora
from inlay.papers.ntk_attention import table as ntk_attention
from inlay.papers.reproduce import kept
from inlay.records import versions

NAMED = {"group": "mlm-64", "line": "warp", "task": "sst2", "rate": 0.1}


def test_each_run_names_its_commit_and_known_ones_keep_theirs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "_commit", lambda: "new")
    known = [NAMED | {"seed": 0}, NAMED | {"seed": 1, "commit": "older"}]
    (tmp_path / "known.json").write_text(json.dumps({"versions": {"commit": "old"}, "runs": known}))
    args = argparse.Namespace(
        seconds=300.0, known=str(tmp_path / "known.json"), results=str(tmp_path / "results.json"), workers=1
    )
    works = [FewShotRun(**NAMED, seed=seed, models_dir="", data_dir="") for seed in range(3)]
    tables.run_all(dataclasses.asdict, lambda entries: works, tables.NAMES, args)
    found = json.loads((tmp_path / "results.json").read_text())
    assert {run["seed"]: run["commit"] for run in found["runs"]} == {0: "old", 1: "older", 2: "new"}
    assert found["versions"]["commit"] == "new"
    assert found["versions"]["threads"], "torch was asked, which knows a GPU"


def test_a_note_names_the_commits_of_runs_with_their_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "ROOT", tmp_path)
    kept.path("ntk_attention", "").mkdir(parents=True)

    def note(*commits: tuple[str, str | None]) -> str:
        runs = [{"group": group} | ({"commit": commit} if commit else {}) for group, commit in commits]
        made = {"versions": {"gpu": "a card", "commit": "f" * 40}, "runs": runs}
        kept.path("ntk_attention", "table.json").write_text(json.dumps(made))
        table = kept.table("ntk_attention")
        assert table is not None
        return table.note

    assert note(("vision", None)).endswith("on a card, commit fffffff.")
    assert note(("vision", "0123456789")).endswith("on a card, commit 0123456.")
    told = note(("encoder", "abcdef0123"), ("vision", "0123456"), ("sentences", "abcdef0123"))
    assert told.endswith("on a card, commit abcdef0 (encoder, sentences); 0123456 (vision).")


def test_starts_are_in_the_order_of_their_seeds_and_of_one_setting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept, "ROOT", tmp_path)

    def keep(where: str, **settings: Any) -> None:
        folder = kept.path("icl", "lab") / where / "curve"
        folder.mkdir(parents=True, exist_ok=True)
        facts = {"claims": [], "settings": settings, "command": ["inlay"], "versions": {"threads": 1}}
        (folder / "curve.json").write_text(json.dumps(facts))
        (folder / "curve.csv").write_text("x\n1\n")

    for where, seed in {".": 0, "seed-10": 10, "seed-2": 2}.items():
        keep(where, seed=seed, steps=5, infimum=seed / 3)
    assert kept.seeds(one for one, _ in kept.experiments("icl", "curve")) == [0, 2, 10]
    keep("seed-2", seed=2, steps=6)
    with pytest.raises(InlayError, match=r"seed-2.* was made with steps=6, and the start before it with 5"):
        kept.experiments("icl", "curve")
    keep("seed-2", seed=0, steps=5)
    with pytest.raises(InlayError, match="has seed 0, as a start before it"):
        kept.experiments("icl", "curve")


def pooled(run: type[Any], group: str, line: str) -> str:
    """What the heads of a group's runs on the embedded MiniLM read."""
    work = run(group, line, "sst2", 0.1, 0, models_dir="", data_dir="")
    return backbones.settle_pooling("embedded:minilm", "classification", work.spec().pooling)


def test_heads_of_minilm_read_the_mean_in_kept_runs_and_in_new_ones() -> None:
    assert {pooled(multi_lora.TaskRun, group, "lora") for group in ("encoder", "larger")} == {"own"}, (
        "as their kept runs"
    )
    backbone = backbones.load("embedded:minilm", kind="classification", num_labels=2)
    assert backbone.pooling == "mean"
    whole = sum(p.numel() for p in backbone.model.parameters())
    for paper, run, groups in (
        ("infoprompt", FewShotRun, ("minilm-64", "minilm-256")),
        ("ntk_attention", ntk_attention.ModelRun, ("encoder", "sentences")),
    ):
        table = kept.table(paper)
        assert table is not None
        for group in groups:
            assert pooled(run, group, "full") == "mean"
            runs = [run for run in table.runs if (run["group"], run["line"]) == (group, "full") and run["task"] != "cb"]
            two = [run for run in runs if run["task"] not in ("semeval2010", "wnut17-spans")]
            assert {run["trained"] for run in two} == {whole}, (
                "a head that reads the mean leaves BERT's pooler out of full training"
            )
            assert {re.fullmatch(r"[0-9a-f]{40}", run["commit"]) is not None for run in runs} == {True}


def test_what_is_kept_is_short_and_the_same_when_it_is_read() -> None:
    found = {"runs": [{"rate": 3e-5, "loss": 0.12345678901, "bytes": 123456789.0, "seed": 12345678}, {}], "a": None}
    assert kept.rounded(found)["runs"][0] == {"rate": 3e-5, "loss": 0.123457, "bytes": 123456789.0, "seed": 12345678}
    assert kept.rounded([0.12345678901, True], kept.VERDICT_DIGITS) == [0.123456789, True]
    text = kept.as_text(found)
    assert json.loads(text) == found
    assert len(text.splitlines()) == 7, "a line for each run, and for each entry beside them"


def test_tables_of_the_lab_are_rounded_when_they_are_taken(script: Any, tmp_path: Path) -> None:
    table = tmp_path / "made.csv"
    table.write_text('where,gap\r\n"a, b",-0.12345678901\r\n,1e-17\r\n7,9.0\r\n-3,nan\r\n', newline="")
    shorter = script("take_lab").shorter(table)
    assert shorter == 'where,gap\r\n"a, b",-0.123457\r\n,1e-17\r\n7,9.0\r\n-3,nan\r\n'
