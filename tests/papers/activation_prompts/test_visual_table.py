"""Which runs the visual methods' table asks for, in which order, and which of those that are known count."""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from inlay.papers.activation_prompts import table
from inlay.papers.activation_prompts.recipes import protocol as p
from inlay.papers.activation_prompts.recipes.cost import STEP, kept_costs
from inlay.papers.ntk_attention.table import beside
from inlay.papers.reproduce import kept
from inlay.papers.reproduce.bench import Bench
from inlay.papers.reproduce.perform import reproduce
from inlay.papers.tables import Entry
from inlay.workflow.statistics import holm, paired


def asked(**changes: Any) -> argparse.Namespace:
    common = {"models": ["vit_tiny_patch16_224"], "methods": ["lora"], "rows": None, "sets": ["a", "b"], "seeds": 2}
    return argparse.Namespace(**common | {"epochs": 1.0, "models_dir": "", "data_dir": "", "out": ""} | changes)


def made(work: table.VisionRun, validation: float = 0.5) -> Entry:
    return work.named | {"validation": validation, "test": 0.25}


def every(args: argparse.Namespace, known: list[Entry]) -> list[table.VisionRun]:
    """What is wanted and not known, once."""
    found = {str(work.named): work for work in table.wanted(known, args)}
    return [work for name, work in found.items() if name not in {str(work) for work in _names(known)}]


def _names(known: list[Entry]) -> list[Entry]:
    return [{name: value for name, value in run.items() if name not in ("validation", "test")} for run in known]


def test_grids_come_first_and_then_whole_rows_in_the_order_given() -> None:
    args = asked(rows=["VPT-50", "LoRA-1"])
    grids = every(args, [])
    assert [work.line.name for work in grids] == 4 * ["VPT-50"] + 4 * ["LoRA-1"]
    assert {(work.task, work.seed) for work in grids} == {("a", 0)}
    known = [made(work, validation=work.rate or 0) for work in grids if work.line.name == "LoRA-1"]
    assert [work.line.name for work in every(args, known)] == 4 * ["VPT-50"] + 3 * ["LoRA-1"]
    known = [made(work, validation=work.rate or 0) for work in grids]
    rest = every(args, known)
    assert [work.line.name for work in rest] == 3 * ["VPT-50"] + 3 * ["LoRA-1"]  # the best rate has a first run
    assert [(work.rate, work.task, work.seed) for work in rest[:3]] == [(0.03, "a", 1), (0.03, "b", 0), (0.03, "b", 1)]
    assert every(args, [*known, *map(made, rest)]) == []


def test_a_rate_that_failed_has_been_tried() -> None:
    args = asked(rows=["LoRA-1"])
    first, *others = every(args, [])
    known = [first.named | {"error": "too high"}, *map(made, others)]
    assert {work.rate for work in table.wanted(known, args) if work.task == "b"} == {others[0].rate}
    assert {work.task for work in table.wanted([work.named | {"error": ""} for work in [first, *others]], args)} == {
        "a"
    }


def test_a_rate_at_an_end_or_one_of_several_is_doubtful() -> None:
    def doubtful(*values: float) -> tuple[bool, bool]:
        rates = zip((0.1, 0.2, 0.3), values, strict=True)
        return table.doubts([{"task": "a", "seed": 0, "rate": rate, "validation": v} for rate, v in rates], first="a")

    assert doubtful(0.5, 0.6, 0.4) == (False, False)
    assert doubtful(0.6, 0.6, 0.4) == (True, True)
    assert doubtful(0.5, 0.6, 0.6) == (False, True)
    assert doubtful(0.5, 0.6, 0.7) == (True, False)
    assert table.doubts([]) == (False, False)


def test_kept_rows_differ_from_the_prompt_only_without_correction() -> None:
    """What docs/visual-methods.md and the recipes say of the thirteen comparisons."""
    found = kept.table("activation_prompts")
    assert found is not None
    model, tests = "vit_tiny_patch16_224", {}
    for name in table.ROWS:
        ways = (("activation-prompt", None), (p.WAYS[name].method, p.WAYS[name].settings))
        cells = [
            [[run["test"] for run in table.chosen(found.runs, model, method, task, own)] for task in table.SETS]
            for method, own in ways
        ]
        tests[name] = paired(*([fmean(seed) for seed in zip(*cell, strict=True)] for cell in cells)).p
    assert len(tests) == 13
    below = {name for name, value in tests.items() if value is not None and value < 0.05}
    assert below == {"AP-CONCATE", "VPT-50", "LoRA-50", "E2VPT", "LoRA-1"}
    assert all(value is not None and value > 0.05 for value in holm(list(tests.values())))


def test_tokens_are_for_transformers() -> None:
    args = asked(models=["resnet50_v1"], rows=["VPT-50", "AP-CONCATE", "LoRA-1"])
    assert {work.line.name for work in table.wanted([], args)} == {"LoRA-1"}
    assert ("resnet50_v1", "vpt-deep") not in table.pairs_of(["resnet50_v1"])


def test_runs_with_settings_are_not_those_of_the_method() -> None:
    rows, methods = asked(rows=["LoRA-1"]), asked()
    grids = [*every(methods, []), *every(rows, [])]
    # Each line has a best rate of its own, and neither sees the other's.
    known = [made(work, validation=(-1 if work.line.name else 1) * (work.rate or 0)) for work in grids]
    known = [run | {"task": table.SETS[0]} for run in known]
    settings = {"r": 1, "lora_alpha": 1}
    (plain,) = table.chosen(known, "vit_tiny_patch16_224", "lora", table.SETS[0])
    (ranked,) = table.chosen(known, "vit_tiny_patch16_224", "lora", table.SETS[0], settings)
    assert (plain["rate"], ranked["rate"]) == (0.003, 0.0001)
    assert "settings" not in plain
    assert ranked["settings"] == settings
    assert all("row" not in run for run in beside(known))


def test_kept_runs_at_default_settings_are_asked_for_no_more() -> None:
    found = kept.table("activation_prompts")
    assert found is not None
    args = asked(methods=["lora", "ssf"], sets=list(table.SETS), seeds=3)
    known = {tuple(run.get(name) for name in table.NAMES) for run in found.runs}
    wanted = [tuple(work.named.get(name) for name in table.NAMES) for work in table.wanted(found.runs, args)]
    assert set(wanted) <= known
    assert len(set(wanted)) > 2 * 12


def _with_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cut: bool = False) -> None:
    """What is kept of methods, and LoRA's runs once more as of ranks 1 and 10; `cut`: rank 10 lacks a seed of a set."""
    file = kept.path("activation_prompts", "table.json")
    found = json.loads(file.read_text(encoding="utf-8"))
    found["runs"] = [run for run in found["runs"] if "row" not in run]
    lora = [run for run in found["runs"] if run["method"] == "lora"]
    for rank in (1, 10):
        more = [run | {"row": f"LoRA-{rank}", "settings": {"r": rank, "lora_alpha": rank}} for run in lora]
        more = [run | {"test": run["test"] - 0.01 * (rank == 1)} for run in more]
        found["runs"] += [r for r in more if not (cut and rank == 10 and (r["task"], r["seed"]) == ("cifar10", 2))]
    place = tmp_path / "activation_prompts" / "kept"
    shutil.copytree(file.parent, place)
    (place / "table.json").write_text(json.dumps(found), encoding="utf-8")
    monkeypatch.setattr(kept, "ROOT", tmp_path)


def test_rows_with_settings_are_read_where_they_are_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _with_ranks(tmp_path / "whole", monkeypatch)
    found = p.kept_accuracies({"": "vit_tiny_patch16_224"}, ("LoRA-1", "LoRA-10", "LoRA", "AP"))
    assert found is not None
    tens, ones = (found.get(row, "Average") for row in ("LoRA-10", "LoRA-1"))
    assert tens is not None
    assert ones is not None
    assert ones.mean == pytest.approx(tens.mean - 1)
    assert p.RANK_8 not in found.notes
    assert any("vit_tiny_patch16_224; 1,000 images each of OxfordPets" in note for note in found.notes)
    _with_ranks(tmp_path / "cut", monkeypatch, cut=True)
    cut = p.kept_accuracies({"": "vit_tiny_patch16_224"}, ("LoRA-1", "LoRA-10", "LoRA", "AP"))
    assert cut is not None
    assert cut.rows() == ["LoRA-1", "LoRA", "AP"]
    assert p.RANK_8 in cut.notes
    assert any(note.startswith("Incomplete: LoRA-10") for note in cut.notes)
    eight = cut.get("LoRA", "Average")
    assert eight is not None
    assert eight.mean == pytest.approx(tens.mean)  # these runs of rank 10 are copies of those of rank 8


def test_a_table_of_whole_rows_is_judged_by_its_mean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _with_ranks(tmp_path / "kept", monkeypatch)
    outcome = reproduce("activation-prompts/table-a8", "here", Bench(tmp_path / "out", progress=False))
    grows, gains = (ours for _, _, ours in outcome.verdicts[:2])
    assert grows.measured.startswith(p.SMALL_MEAN)
    assert grows.judgement == "holds"
    assert grows.clear
    assert not grows.unjudged
    assert gains.judgement == "not tested"  # rank 50 was not run
    assert outcome.models[0].startswith("vit_tiny")


def test_costs_are_those_of_a_row_with_its_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _with_ranks(tmp_path, monkeypatch)
    file = kept.path("activation_prompts", "vision-rows-cuda.json")
    found = json.loads(kept.path("activation_prompts", "vision-cuda.json").read_text(encoding="utf-8"))
    found["steps"] = {"vit-large": found["steps"]["vit-large"]}
    found["steps"]["vit-large"]["LoRA-10"] = {"peak_bytes": 2**30, "rounds_ms": [7.0, 8.0], "rounds_inference": [5, 6]}
    file.write_text(json.dumps(found), encoding="utf-8")
    read = kept_costs({"": "vit-large"}, ("LoRA", "LoRA-10", "LoRA-50", "BIAS", "VPT-50", "VPT-10"))
    assert read is not None
    assert read.rows() == ["LoRA", "LoRA-10", "BIAS", "VPT-10"]
    assert [cell.values for row in ("LoRA", "LoRA-10") if (cell := read.get(row, STEP))] == [(7.0, 8.0)] * 2
    assert "vision-rows-cuda.json" in read.notes[0]
    both = kept_costs({"ResNet": "resnet-101", "ViT": "vit-large"}, ("LoRA",))  # the one with rows has no ResNet
    assert both is not None
    assert "vision-cuda.json" in both.notes[0]
