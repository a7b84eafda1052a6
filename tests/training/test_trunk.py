"""Training from the trunk's kept output: the same to the bit, in memory and in a file, after a kill, and off where it
would be wrong."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import toys

import zoo

from inlay.methods.registry import get
from inlay.records import Spec
from inlay.training import Interrupted, Outcome, fit

FAMILIES = ("vit", "resnet", "swin", "convnext", "dinov2", "clip")
# Full batches and a smaller last one.
SPEC = Spec(model="toy", method="linear-probe", task="toy", epochs=3, batch_size=16, learning_rate=1e-2)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """With several threads a row's rounding depends on its place in these tiny models, and nothing is kept."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def train(folder: Path, family: str, spec: Spec, task: Any = None, **options: Any) -> Outcome:
    task = task or toys.image_task(train=40)
    return fit(toys.backbone(family), task, get(spec.method), spec, folder, progress=False, **options)


def result(outcome: Outcome, folder: Path) -> dict[str, Any]:
    """Everything that must not depend on whether the trunk was kept."""
    adapter = {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted((folder / "adapter").rglob("*"))
    }
    return {"metrics": outcome.metrics, "history": outcome.history, "adapter": adapter, "steps": outcome.steps}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("method", "settings"),
    [
        ("linear-probe", {}),
        ("activation-prompt", {"layers": [3], "image_size": zoo.IMAGE_SIZE}),
        ("norm", {"layers": [3]}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_same_to_the_bit(tmp_path: Path, family: str, method: str, settings: dict[str, Any]) -> None:
    spec = SPEC.with_(method=method, settings=settings)
    off, on = spec.with_(trunk_cache="off"), spec
    without, with_it = train(tmp_path / "off", family, off), train(tmp_path / "on", family, on)
    assert with_it.portrait["trunk"]["cached"], with_it.portrait["trunk"]
    assert result(with_it, tmp_path / "on") == result(without, tmp_path / "off")
