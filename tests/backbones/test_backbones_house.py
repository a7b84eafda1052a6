"""The backbones that ship with inlay: small, real, and worth more than random weights."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow.parquet
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from inlay import backbones
from inlay.backbones import embedded

NAMES = ("vit", "resnet")
SIDES = {"vit": 32, "resnet": 64}


def read_images(file: Path) -> tuple[pd.DataFrame, list[str]]:
    table = pyarrow.parquet.read_table(file)
    return table.to_pandas(), json.loads(table.schema.metadata[b"class_names"])


def prepare(processor: object, rows: pd.DataFrame) -> torch.Tensor:
    images = [Image.open(io.BytesIO(image)).convert("RGB") for image in rows["image"]]
    return processor(images, return_tensors="pt")["pixel_values"]  # type: ignore[operator]


@torch.inference_mode()
def features(model: torch.nn.Module, pixels: torch.Tensor) -> np.ndarray:
    """What the classifier reads."""
    seen: list[torch.Tensor] = []
    handle = model.classifier.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].flatten(1)))
    for chunk in pixels.split(100):
        model(chunk)
    handle.remove()
    return torch.cat(seen).numpy()


def test_they_are_small_and_stored_in_half_precision() -> None:
    total = 0
    for name in NAMES:
        folder = embedded.HOUSE / name
        total += sum(file.stat().st_size for file in folder.iterdir())
        weights = load_file(folder / "model.safetensors")
        assert {value.dtype for value in weights.values() if value.is_floating_point()} == {torch.float16}
        assert sum(value.numel() for value in weights.values()) <= 3_000_000
        assert (folder / "README.md").is_file(), "a model card"
    assert total <= 12e6


@pytest.mark.parametrize("name", NAMES)
def test_they_load_with_a_new_head(name: str) -> None:
    backbone = backbones.load(f"embedded:{name}", kind="image-classification", label_names=["a", "b", "c"])
    assert backbone.newly_initialised == ["classifier"]
    assert backbone.source == f"shipped with inlay ({name})"
    assert backbones.image_side(backbone.processor) == SIDES[name]
    pixels = backbone.processor(Image.new("RGB", (50, 40)), return_tensors="pt")["pixel_values"]
    assert backbone.model(pixels).logits.shape == (1, 3)


@pytest.mark.parametrize("name", NAMES)
def test_they_name_what_they_were_trained_to_name(name: str, shared: Path) -> None:
    rows, labels = read_images(shared / "data" / "images" / "cifar10.parquet")
    test = rows[rows["split"] == "test"].head(200)
    backbone = backbones.load(f"embedded:{name}", kind="image-classification", label_names=labels)
    assert any("goes on from it" in note for note in backbone.notes)
    with torch.inference_mode():
        named = backbone.model(prepare(backbone.processor, test)).logits.argmax(1)
    assert (named.numpy() == test["label"].to_numpy()).mean() > 0.8


@pytest.mark.slow
@pytest.mark.parametrize("data", ["flowers102", "caltech101"])
@pytest.mark.parametrize("name", NAMES)
def test_a_linear_probe_beats_the_same_on_random_weights_by_15_points(name: str, data: str, shared: Path) -> None:
    rows, _ = read_images(shared / "data" / "images" / f"{data}.parquet")
    train, test = (rows[rows["split"] == split] for split in ("train", "test"))
    backbone = backbones.load(f"embedded:{name}", kind="image-classification", num_labels=2)
    torch.manual_seed(0)
    random = type(backbone.model)(backbone.model.config).eval()
    inputs = [prepare(backbone.processor, part) for part in (train, test)]

    def accuracy(model: torch.nn.Module) -> float:
        probe = make_pipeline(StandardScaler(), LogisticRegression(C=0.01, max_iter=100))
        probe.fit(features(model, inputs[0]), train["label"])
        return float(probe.score(features(model, inputs[1]), test["label"]))

    assert accuracy(backbone.model) - accuracy(random) >= 0.15
