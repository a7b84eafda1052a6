"""The trunk is kept where that saves ten times what its checks take; so is the last batch, where it may be."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
import toys
from torch import nn

from inlay.methods.registry import get
from inlay.records import Spec
from inlay.training import FitOptions, FitResult, fit
from inlay.training.trunk import data
from inlay.training.trunk.cut import TrunkCache
from inlay.training.trunk.data import KEY, KeptSplit

SPEC = Spec(model="toy", method="linear-probe", task="toy", epochs=2, batch_size=16, learning_rate=1e-2)


def slowed(seconds: float) -> toys.ToyBackbone:
    """A ViT whose frozen part takes so much longer."""
    backbone = toys.backbone("vit")
    backbone.model.vit.embeddings.register_forward_hook(lambda *_: time.sleep(seconds))
    return backbone


def run(folder: Path, backbone: toys.ToyBackbone, **changes: Any) -> FitResult:
    spec = SPEC.with_(**changes)
    return fit(backbone, toys.image_task(train=40), get(spec.method), spec, folder, FitOptions(progress=False))


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_few_examples_read_again_are_not_even_looked_at(tmp_path: Path) -> None:
    trunk = run(tmp_path, toys.backbone("vit")).portrait["trunk"]
    assert not trunk["cached"]
    assert trunk["reason"] == "40 examples would be read again: too few to pay for the checks"
    assert trunk["check_seconds"] < 0.05


def test_what_saves_less_than_its_checks_is_not_kept_unless_it_is_asked_for(tmp_path: Path) -> None:
    """With 40 rows in 8 epochs there are 280 to save, and some 100 go into the search and the checks."""
    trunk = run(tmp_path / "auto", toys.backbone("vit"), epochs=8).portrait["trunk"]
    assert not trunk["cached"]
    assert trunk["reason"].startswith("it would save about 0.")
    assert run(tmp_path / "on", toys.backbone("vit"), epochs=8, trunk_cache="on").portrait["trunk"]["cached"]


def test_what_saves_ten_times_its_checks_is_kept(tmp_path: Path) -> None:
    trunk = run(tmp_path, slowed(0.01), epochs=120).portrait["trunk"]
    assert trunk["cached"], trunk
    assert 10 * trunk["check_seconds"] < 119 * trunk["seconds"] * 1.5  # what it was estimated from, give or take a half


def test_the_estimate_is_of_what_a_pass_takes() -> None:
    torch.manual_seed(0)
    backbone, rows = slowed(0.02), toys.image_task(train=40).train
    trunk = TrunkCache.find(backbone.model.requires_grad_(False), toys.collate(rows[:2]))
    kept = KeptSplit(rows, toys.collate, trunk, 8, torch.device("cpu"), shuffled=True)
    saved, checking = kept.estimate(passes=7)
    assert 0.02 * 5 * 7 <= saved <= 3 * 0.02 * 5 * 7
    assert 0.02 * 4 <= checking(2) <= checking(4) <= 3 * 0.02 * 6


@pytest.mark.parametrize("of_size", [False, True])
def test_the_last_batch_is_of_kept_rows_where_its_size_changes_no_bit(of_size: bool) -> None:
    class Sized(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * (1 + 1e-6 * (len(x) == 2)) if of_size else x

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4).requires_grad_(False), Sized(), nn.Linear(4, 2))
    rows = [{"input": row} for row in torch.randn(10, 4)]
    kept = KeptSplit(
        rows, toys.collate, TrunkCache.find(model, toys.collate(rows[:2])), 4, torch.device("cpu"), shuffled=True
    )
    kept.fill(None, lambda: None)
    kept.check(range(10), lambda: None, to_the_bit=True)
    assert kept.serves_last is not of_size
    last = kept.collate(kept.__getitems__([8, 9]))
    assert (KEY in last) is not of_size
    with torch.no_grad(), kept.replay(last) as inputs:
        assert torch.equal(model(**inputs), model(toys.collate(rows[8:])["input"]))


def test_the_fewest_checks_see_what_depends_on_the_batch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """However little is spent on them."""
    monkeypatch.setattr(data, "CHECKED", data.FEWEST_CHECKED)
    backbone = slowed(0.02)
    vit = backbone.model.vit
    vit.layernorm = nn.Sequential(vit.layernorm, nn.BatchNorm1d(17, track_running_stats=False))
    trunk = run(tmp_path, backbone, epochs=120, max_steps=330).portrait["trunk"]
    assert not trunk["cached"]
    assert "depends on the rest of its batch" in trunk["reason"]
