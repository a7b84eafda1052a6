"""Augmentation: what is drawn, that it follows from seed, epoch and place alone, and that only training sees it."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from torch.utils.data import DataLoader

from inlay import backbones, tasks
from inlay.errors import InlayError
from inlay.methods import registry
from inlay.records.spec import AUGMENTS, Spec
from inlay.tasks.images import AREAS, SHAPES, Augmentation, EncodedImages, crop_box, pixels
from inlay.tasks.task import Task
from inlay.training import FitOptions, FitResult, Interrupted, fit

MakeSpec = Callable[..., Spec]


def noise(width: int = 20, height: int = 30, seed: int = 0) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


def changed(image: Image.Image, kind: str, seed: int = 0, epoch: int = 0, index: int = 0) -> bytes:
    return Augmentation(kind, seed)(image, (16, 16), epoch, index).tobytes()


@pytest.fixture
def photos(photos: Path) -> Path:
    """The dark and bright photos with something to see on them."""
    for number, path in enumerate(sorted(photos.rglob("*.png"))):
        with Image.open(path) as flat:
            level, size = np.asarray(flat.convert("L"))[0, 0] // 2, flat.size
        Image.fromarray(np.asarray(noise(*size, seed=number)) // 2 + level).save(path)
    return photos


# ------------------------------------------------------------------------------------------------- what is drawn


@given(st.integers(1, 400), st.integers(1, 400), st.integers(0, 2**32 - 1))
def test_a_crop_is_a_part_of_the_picture_and_of_an_allowed_shape(width: int, height: int, seed: int) -> None:
    left, top, right, bottom = crop_box((width, height), np.random.default_rng(seed))
    assert 0 <= left < right <= width
    assert 0 <= top < bottom <= height
    wide, high = right - left, bottom - top
    # Half a pixel of rounding on either side.
    assert (wide - 0.5) / (high + 0.5) <= SHAPES[1] + 1e-9
    assert (wide + 0.5) / (high - 0.5) >= SHAPES[0] - 1e-9


def test_crops_have_all_areas_shapes_and_places() -> None:
    draws = np.random.default_rng(0)
    boxes = np.array([crop_box((200, 200), draws) for _ in range(2000)])
    sides = boxes[:, 2:] - boxes[:, :2]
    areas = sides.prod(axis=1) / 200**2
    assert AREAS[0] - 0.01 < areas.min() < 0.1
    assert 0.9 < areas.max() <= AREAS[1]
    # Evenly drawn, but for the large ones, more of which do not fit.
    assert 0.4 < areas.mean() < 0.54
    shapes = np.log(sides[:, 0] / sides[:, 1])
    assert abs(shapes.mean()) < 0.02
    centres = (boxes[:, 2:] + boxes[:, :2]).mean(axis=0) / 2
    assert np.abs(centres - 100).max() < 4


def test_half_of_the_pictures_are_mirrored() -> None:
    image = noise()
    as_it_is, mirrored = image.tobytes(), image.transpose(Image.Transpose.FLIP_LEFT_RIGHT).tobytes()
    found = [changed(image, "flip", index=index) for index in range(200)]
    assert set(found) == {as_it_is, mirrored}
    assert 75 < found.count(mirrored) < 125


@pytest.mark.parametrize("kind", ["crop", "crop-flip"])
def test_what_happens_follows_from_seed_epoch_and_place(kind: str) -> None:
    image = noise()
    first = changed(image, kind, 3, 1, 4)
    assert changed(image, kind, 3, 1, 4) == first
    others = {changed(image, kind, 4, 1, 4), changed(image, kind, 3, 2, 4), changed(image, kind, 3, 1, 5)}
    assert len(others | {first}) == 4


def test_cropping_and_mirroring_together_do_both() -> None:
    image = noise()
    cropped = {changed(image, "crop", index=index) for index in range(8)}
    both = {changed(image, "crop-flip", index=index) for index in range(8)}
    assert 0 < len(both & cropped) < 8  # those that were not mirrored are the same


def test_an_unknown_augmentation_is_refused() -> None:
    with pytest.raises(InlayError, match=r"'rotate'.*crop, crop-flip, flip"):
        Augmentation("rotate", 0)
    with pytest.raises(InlayError, match=r"'rotate'.*crop, crop-flip, flip"):
        Spec(model="m", method="bias", task="t", augment="rotate")


# ------------------------------------------------------------------------------------------------ encoded images


def test_flipping_is_the_processors_result_for_the_flipped_picture(processor: Any) -> None:
    pictures = [noise(seed=seed) for seed in range(12)]
    made = EncodedImages(pictures, None, processor, augmentation=Augmentation("flip", 0))
    assert not made.deterministic
    assert not made.in_memory
    mirrored = 0
    for picture, item in zip(pictures, [made[i] for i in range(12)], strict=True):
        sides = [picture, picture.transpose(Image.Transpose.FLIP_LEFT_RIGHT)]
        found = [torch.equal(item["pixel_values"], pixels(processor, side)) for side in sides]
        assert sum(found) == 1
        mirrored += found[1]
    assert 0 < mirrored < 12


def test_a_crop_is_not_cut_again_by_a_processor_that_crops() -> None:
    from transformers import ConvNextImageProcessorPil, ViTImageProcessorPil

    picture = noise(64, 64)
    cutting = ConvNextImageProcessorPil(size={"shortest_edge": 16}, crop_pct=0.5)
    whole = ViTImageProcessorPil(size={"height": 16, "width": 16}, resample=cutting.resample)
    whole.image_mean, whole.image_std = cutting.image_mean, cutting.image_std
    augmentation = Augmentation("crop", 0)
    found = EncodedImages([picture], None, cutting, augmentation=augmentation)[0]["pixel_values"]
    wanted = EncodedImages([picture], None, whole, augmentation=augmentation)[0]["pixel_values"]
    assert torch.equal(found, wanted)
    assert found.shape == (3, 16, 16)


def test_a_processor_that_is_not_value_by_value_is_asked_for_the_whole(processor: Any) -> None:
    class Darkened(type(processor)):  # type: ignore[misc]
        def __call__(self, image: Image.Image, **options: Any) -> Any:
            made = super().__call__(image, **options)
            made["pixel_values"] = made["pixel_values"] - made["pixel_values"].mean()
            return made

    made = EncodedImages([noise()], None, Darkened(**processor.to_dict()), augmentation=Augmentation("crop-flip", 0))
    assert abs(made[0]["pixel_values"].mean()) < 1e-4
    assert made[0]["pixel_values"].shape == (3, 16, 16)


def test_readers_ahead_give_the_same_pictures(processor: Any) -> None:
    made = EncodedImages(
        [noise(seed=seed) for seed in range(6)], None, processor, augmentation=Augmentation("crop-flip", 1)
    )
    seen = []
    for epoch in (0, 1, 0):
        made.epoch = epoch
        alone = torch.stack([made[index]["pixel_values"] for index in range(6)])
        ahead = torch.cat([batch["pixel_values"] for batch in DataLoader(made, batch_size=2, num_workers=2)])
        assert torch.equal(alone, ahead)
        seen.append(alone)
    assert torch.equal(seen[0], seen[2])
    assert not torch.equal(seen[0], seen[1])


# ------------------------------------------------------------------------------------------------------- whole runs


def test_only_training_is_augmented(photos: Path, spec: MakeSpec, processor: Any) -> None:
    task = tasks.load(spec(data=photos))
    plain = task.encode("train", processor)
    made = task.encode("train", processor, augmentation=Augmentation("crop", 0))
    assert isinstance(made, EncodedImages)
    assert isinstance(plain, EncodedImages)
    assert plain.deterministic
    assert made.labels == plain.labels
    assert not any(torch.equal(made[i]["pixel_values"], plain[i]["pixel_values"]) for i in range(3, 6))


def test_texts_cannot_be_augmented(reviews: Path, spec: MakeSpec, wordpiece: Any) -> None:
    with pytest.raises(InlayError, match=r"augment='flip' is for images, and 'reviews' is of kind 'classification'"):
        tasks.load(spec(data=reviews, text=("body",), label="stars", augment="flip"))
    task = tasks.load(spec(data=reviews, text=("body",), label="stars"))
    with pytest.raises(InlayError, match="Only images can be augmented"):
        task.encode("train", wordpiece, augmentation=Augmentation("flip", 0))


def test_runs_without_it_keep_their_identity() -> None:
    run = Spec(model="m", method="bias", task="t", epochs=3.0, batch_size=32)  # an id is made once they are known
    digests = {run.with_(augment=kind).digest() for kind in (None, *AUGMENTS)}
    assert len(digests) == 4
    # As it was before there was any augmentation.
    assert run.digest() == "c66273a5f39889100a0d66551e838653ce25edbb18aab1f466ad8ecd048d7dcd"


@dataclass(frozen=True)
class Stopped(Task):
    """A task in the midst of which the user presses Control-C: before the batch number `at`."""

    at: int = 0

    def collator(self, *args: Any, **options: Any) -> Any:
        collate = super().collator(*args, **options)
        made = 0

        def counted(items: Any) -> Any:
            nonlocal made
            made += 1
            if made == self.at:
                os.kill(os.getpid(), signal.SIGINT)
            return collate(items)

        return counted


def run(model: Path, photos: Path, folder: Path, at: int = 0, **options: Any) -> FitResult:
    spec = Spec(model=str(model), data=str(photos), method="bias", batch_size=6, **options)
    task = Stopped(**vars(tasks.load(spec)), at=at)
    backbone = backbones.load(spec.model, kind=task.kind, num_labels=task.num_labels, label_names=task.label_names)
    return fit(backbone, task, registry.get(spec.method), spec, folder, FitOptions(progress=False))


def test_a_run_that_is_cut_short_ends_the_same(image_model: Path, photos: Path, tmp_path: Path) -> None:
    options = {"augment": "crop-flip", "epochs": 3, "learning_rate": 0.01}
    whole = run(image_model, photos, tmp_path / "whole", **options)
    assert whole.portrait["trunk"] == {
        "cached": False,
        "reason": "the images are augmented, so that they differ from epoch to epoch",
    }
    # The validation set is read after each epoch: this is in the second one.
    with pytest.raises(Interrupted):
        run(image_model, photos, tmp_path / "cut", at=8, **options)
    again = run(image_model, photos, tmp_path / "cut", **options)
    assert again.resumed_from is not None
    assert 0 < again.resumed_from < whole.steps
    assert again.history == whole.history
    assert again.metrics == whole.metrics
    for (name, one), other in zip(whole.model.state_dict().items(), again.model.state_dict().values(), strict=True):
        assert torch.equal(one, other), name
    plain = run(image_model, photos, tmp_path / "plain", **options | {"augment": None})
    assert plain.history != whole.history
