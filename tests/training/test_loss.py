"""An update's loss and gradients are the mean over all its labels, however it is split."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import toys
from safetensors.torch import load_file

from inlay.errors import InlayError
from inlay.methods.registry import get
from inlay.records import Spec
from inlay.training import FitOptions, FitResult, fit

SPEC = Spec(model="toy", method="lora", task="toy", epochs=2, batch_size=16, learning_rate=1e-2, clip=1e6)


def train(folder: Path, task: toys.ToyTask, backbone: toys.ToyBackbone, spec: Spec) -> tuple[FitResult, dict[str, Any]]:
    outcome = fit(backbone, task, get(spec.method), spec, folder, FitOptions(progress=False))
    return outcome, load_file(folder / "adapter" / "adapter_model.safetensors")


def regression() -> tuple[toys.ToyTask, toys.ToyBackbone]:
    task = toys.text_task(train=22)
    task.kind, task.metrics = "regression", ("mse",)
    for split in (task.train, task.validation, task.test):
        for row in split:
            row["labels"] = float(row["labels"]) - 100.0  # one of them is -100, which marks "no label" for classes only
    backbone = toys.backbone("bert", dropout=0.0, num_labels=1)
    return task, backbone


CASES = {
    "classification": lambda: (toys.text_task(train=22), toys.backbone("bert", dropout=0.0)),
    "regression": regression,
    "causal-lm": lambda: (toys.lm_task(train=22), toys.backbone("gpt2", "causal-lm", dropout=0.0)),
    "images": lambda: (toys.image_task(train=22), toys.backbone("vit", dropout=0.0)),
}


@pytest.mark.parametrize("case", CASES)
def test_accumulation_changes_neither_loss_nor_gradients(tmp_path: Path, case: str) -> None:
    """22 examples in updates of 16: the second update has 6, which is uneven for every way of splitting."""
    found = {}
    for steps in (1, 2, 4):
        task, backbone = CASES[case]()
        found[steps] = train(tmp_path / str(steps), task, backbone, SPEC.with_(gradient_accumulation=steps))
    whole, weights = found[1]
    losses = [entry["loss"] for entry in whole.history if "loss" in entry]
    assert len(losses) == 4
    for steps in (2, 4):
        split, split_weights = found[steps]
        for mine, its in zip(whole.history, split.history, strict=True):
            for name in ("loss", "grad_norm"):
                if name in mine:
                    assert its[name] == pytest.approx(mine[name], rel=2e-4), (steps, mine["step"], name)
        for name, tensor in weights.items():
            torch.testing.assert_close(split_weights[name], tensor, rtol=1e-3, atol=1e-4, msg=name)


def test_a_micro_batch_without_any_label_counts_for_nothing(tmp_path: Path) -> None:
    task = toys.lm_task(train=8)
    for row in task.train[:4]:
        row["labels"] = [-100] * len(row["labels"])
    spec = SPEC.with_(batch_size=8, gradient_accumulation=8, epochs=3)
    outcome, weights = train(tmp_path, task, toys.backbone("gpt2", "causal-lm"), spec)
    assert all(torch.isfinite(tensor).all() for tensor in weights.values())
    assert [entry["loss"] > 0 for entry in outcome.history if "loss" in entry] == [True] * 3


def test_the_first_logged_loss_is_the_models_own(tmp_path: Path) -> None:
    task, backbone = toys.text_task(train=16), toys.backbone("bert", dropout=0.0)
    with torch.no_grad():
        expected = float(backbone.model(**toys.collate(task.train))["loss"])
    for steps in (1, 4):
        spec = SPEC.with_(gradient_accumulation=steps, epochs=1)
        outcome, _ = train(tmp_path / str(steps), task, toys.backbone("bert", dropout=0.0), spec)
        assert outcome.history[0]["loss"] == pytest.approx(expected, rel=1e-5)


def test_a_batch_that_cannot_be_split_is_refused(tmp_path: Path) -> None:
    spec = SPEC.with_(batch_size=10, gradient_accumulation=4)
    with pytest.raises(InlayError, match="for example 12"):
        train(tmp_path, toys.text_task(), toys.backbone(), spec)
