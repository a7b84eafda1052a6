"""scripts/infoprompt_why.py: what its encoders of prompts see of a text, and that it can wait without a limit."""

from __future__ import annotations

import argparse
import multiprocessing
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.testing import assert_close

import zoo
from inlay.methods.attach import attach
from inlay.methods.infoprompt.layer import InfoPromptLayer

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    if not SCRIPTS.is_dir():
        pytest.skip("no checkout: the scripts of the tables are not installed")
    monkeypatch.syspath_prepend(SCRIPTS)
    import infoprompt_why

    return infoprompt_why


def prompts_of(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    layer = next(module for module in model.modules() if isinstance(module, InfoPromptLayer))
    with layer.observing() as observed, torch.no_grad():
        model(**batch)
    return torch.cat(observed.prompts)


def test_texts_are_seen_in_part(script: Any) -> None:
    """a = 0: one prompt for all; a = 1: as without; between them the mixture, as prompts are linear in Phi."""
    model, batch = zoo.tiny("bert", "classification")
    model = attach(model, "infoprompt", settings={"beta": 0.0, "gamma": 0.0})
    model.eval()
    found, apart = {}, []
    for share in (0.0, 0.3, 1.0):
        with script.seen_in_part(share, apart):
            found[share] = prompts_of(model, batch)
    plain = prompts_of(model, batch)
    assert_close(found[1.0], plain)
    assert_close(found[0.0], plain.mean(0, keepdim=True).expand_as(plain))
    assert_close(found[0.3], 0.7 * found[0.0] + 0.3 * plain)
    assert (plain[0] - plain[1]).abs().max() > 1e-4, "texts that look alike would tell nothing"
    assert len(apart) == 3
    assert apart[0] > 0


def test_it_can_wait_without_a_limit_of_time(script: Any) -> None:
    parser = argparse.ArgumentParser()
    script.run_options(parser, "results.json")
    args = parser.parse_args(["--models-dir", "", "--data-dir", ""])
    ready = multiprocessing.get_context("spawn").Queue()
    ready.put("a run")
    assert ready.get(timeout=args.seconds) == "a run"
