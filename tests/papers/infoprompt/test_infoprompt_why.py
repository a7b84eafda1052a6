"""Of `why`: what its encoders of prompts see of a text, and that it can wait without a limit."""

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
from inlay.papers.infoprompt import why


def prompts_of(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    layer = next(module for module in model.modules() if isinstance(module, InfoPromptLayer))
    with layer.observing() as observed, torch.no_grad():
        model(**batch)
    return torch.cat(observed.prompts)


def test_all_texts_are_seen_as_the_first_of_all() -> None:
    """In the first batch and in a later one; and as they are where that is not asked for."""
    model, batch = zoo.tiny("bert", "classification")
    model = attach(model, "infoprompt", settings={"beta": 0.0, "gamma": 0.0})
    model.eval()
    later = {name: value.flip(0) for name, value in batch.items()}
    plain = prompts_of(model, batch)
    assert (plain[0] - plain[1]).abs().max() > 1e-4, "texts that look alike would tell nothing"
    with why.states_seen(alike=True) as seen:
        for each in (batch, later):
            assert_close(prompts_of(model, each), plain[:1].expand_as(plain))
    with why.states_seen(alike=False) as as_they_are:
        assert_close(prompts_of(model, later), plain.flip(0))
    assert_close(seen[0], as_they_are[0].flip(0))
    assert_close(prompts_of(model, later), plain.flip(0))


def test_how_much_texts_differ() -> None:
    """Each text counts once: of (3, 4) and (3, -4) 9 parts of 25 are shared."""
    states = [torch.tensor([[3.0, 4.0], [3.0, -4.0]]), torch.tensor([[3.0, 4.0]])]
    assert why.spread(states) == pytest.approx(16 / 25)
    assert why.spread([torch.ones(4, 3)]) == pytest.approx(0)


def test_it_can_wait_without_a_limit_of_time() -> None:
    parser = argparse.ArgumentParser()
    why.run_options(parser, Path("results.json"))
    args = parser.parse_args(["--models-dir", "", "--data-dir", ""])
    ours, theirs = multiprocessing.Pipe()
    theirs.send("a run")
    assert ours.poll(args.seconds), "a limit that is too large for the system call is an OverflowError"


def test_what_was_fitted_is_told_by_the_last_stretch(script: Any) -> None:
    group, task = why.COLUMNS[0]
    runs = [
        {"group": group, "task": task, "prompts": why.OF_THE_TEXT, "seed": seed}
        | {"losses": [{"task_loss": 9.0}, {"task_loss": last}], "test": {"loss": test}}
        for seed, (last, test) in enumerate([(0.1, 2.0), (0.3, 3.0)])
    ]
    *_, told = script("document_infoprompt").fit_table(runs)
    assert told == "| made of the text | 0.2000 | 2.50 | - | - | - | - |"
