"""Models with a tower for images and one for texts: their losses, their vectors, and what is not installed for good."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import image_text
from inlay import backbones
from inlay.anatomy import anatomy, tower_modules
from inlay.backbones import towers
from inlay.errors import InlayError
from inlay.tasks import kinds

FAMILIES = ("clip", "siglip")


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return image_text.write_model(tmp_path_factory.mktemp("models") / request.param, request.param)


def load(folder: Path) -> Any:
    return backbones.load(str(folder), kind=kinds.IMAGE_TEXT)


def softmax_by_hand(z: Tensor, relations: Tensor) -> float:
    """L_clip, a term at a time."""
    count, total = len(z), 0.0
    for i in range(count):
        texts = [j for j in range(count) if j == i or relations[i, j] == 0]
        images = [j for j in range(count) if j == i or relations[j, i] == 0]
        total += math.log(math.exp(z[i, i]) / sum(math.exp(z[i, j]) for j in texts))
        total += math.log(math.exp(z[i, i]) / sum(math.exp(z[j, i]) for j in images))
    return -total / (2 * count)


def pairwise_by_hand(z: Tensor, relations: Tensor) -> float:
    """L_siglip, a term at a time."""
    count, total = len(z), 0.0
    for i in range(count):
        for j in range(count):
            if relations[i, j] == towers.NO_PAIR:
                continue
            sign = 1 if i == j else -1
            total += math.log(1 / (1 + math.exp(-sign * z[i, j])))
    return -total / count


@pytest.mark.parametrize(
    ("loss", "by_hand"),
    [(towers.softmax_loss, softmax_by_hand), (towers.pairwise_loss, pairwise_by_hand)],
    ids=FAMILIES,
)
@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize("masked", [0.0, 0.3, 1.0])
def test_loss_is_the_equation_in_float64(loss: Any, by_hand: Any, count: int, masked: float) -> None:
    torch.manual_seed(count)
    z = torch.randn(count, count, dtype=torch.float64) * 3
    away = torch.rand(count, count) < masked
    relations = torch.eye(count, dtype=torch.long).masked_fill(away & ~torch.eye(count, dtype=torch.bool), -100)
    assert float(loss(z, relations)) == pytest.approx(by_hand(z, relations), abs=1e-12)
    z.requires_grad_(True)
    assert torch.autograd.gradcheck(lambda given: loss(given, relations), (z,))
    (gradient,) = torch.autograd.grad(loss(z, relations), z)
    assert torch.equal(gradient[relations == -100], torch.zeros(int((relations == -100).sum()), dtype=torch.float64))


def test_loss_without_duplicates_is_that_of_transformers(folder: Path) -> None:
    backbone = load(folder)
    columns, _ = backbone.processor.read_texts(["a red square", "the green", "a photo of blue"])
    batch = dict(backbone.processor.tokenizer.pad(columns, return_tensors="pt"))
    batch["pixel_values"] = torch.randn(3, 3, 32, 32)
    plain = type(backbone.model).__mro__[2].from_pretrained(folder).eval()  # past ours, and what stands before it
    backbone.model.eval()
    with torch.no_grad():
        wanted = plain(**batch, return_loss=True)
        found = backbone.model(**batch, labels=torch.eye(3, dtype=torch.long))
    assert float(found.loss) == pytest.approx(float(wanted.loss), rel=1e-5)
    torch.testing.assert_close(found.logits, torch.cat([wanted.image_embeds, wanted.text_embeds]))


def test_every_parameter_of_both_towers_learns(folder: Path) -> None:
    backbone = load(folder)
    columns, _ = backbone.processor.read_texts(["a red square", "the green", "a photo of blue"])
    batch = dict(backbone.processor.tokenizer.pad(columns, return_tensors="pt"))
    model = backbone.model.requires_grad_(True)
    loss = model(**batch, pixel_values=torch.randn(3, 3, 32, 32), labels=torch.eye(3, dtype=torch.long)).loss
    loss.backward()
    still = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0]
    assert not [name for name in still if "key" not in name and "k_proj" not in name], still


def test_padding_of_texts_changes_no_vector(folder: Path) -> None:
    backbone = load(folder)
    texts = ["red", "a photo of the deep grey square", "the blue square"]

    def vectors(some: list[str]) -> Tensor:
        columns, cut = backbone.processor.read_texts(some)
        assert not cut
        batch = dict(backbone.processor.tokenizer.pad(columns, return_tensors="pt"))
        with torch.no_grad():
            return backbone.model.eval()(**batch).logits

    torch.testing.assert_close(vectors(texts), torch.cat([vectors([text]) for text in texts]))


def test_captions_make_a_classifier_and_are_no_part_of_the_weights(folder: Path) -> None:
    backbone = load(folder)
    before = backbone.model.state_dict().keys()
    towers.set_captions(backbone.model, backbone.processor, ["a red square", "a blue square"])
    assert backbone.model.state_dict().keys() == before
    assert backbones.loading.fingerprint(backbone.model) == backbone.fingerprint
    pixels, model = torch.randn(4, 3, 32, 32), backbone.model.eval()
    with torch.no_grad():
        logits = model(pixel_values=pixels).logits
        with towers.without_captions(model):
            images = model(pixel_values=pixels).logits
        again = copy.deepcopy(model)
        again.logit_scale.mul_(2.0)
        other = again(pixel_values=pixels).logits
    assert logits.shape == (4, 2)
    torch.testing.assert_close(images.norm(dim=-1), torch.ones(4))
    assert not torch.equal(logits, other)  # a copy runs its own parts
    assert torch.equal(model(pixel_values=pixels).logits, logits)


def test_anatomy_has_both_towers(folder: Path) -> None:
    model = load(folder).model
    parts = anatomy(model)
    assert [block.index for block in parts.all_blocks] == [1, 2, 3, 4, 5]
    assert len(parts.blocks) == 3
    assert len(parts.text_tower) == 2
    assert parts.head is None
    inside = {name for own in tower_modules(model).values() for name in own}
    assert inside == {name for name, _ in model.named_children()}


def test_caption_that_is_too_long_is_refused(folder: Path) -> None:
    backbone = load(folder)
    with pytest.raises(InlayError, match=r"1 of 2 captions.*12 tokens"):
        towers.set_captions(backbone.model, backbone.processor, ["red", "red " * 20])


@pytest.mark.parametrize("kind", [kinds.IMAGE_TEXT, kinds.IMAGE_TEXT_CLASSES])
def test_towers_are_not_quantised(folder: Path, kind: str) -> None:
    with pytest.raises(InlayError, match=rf"quantize='4bit': a model of kind '{kind}' has two towers"):
        backbones.load(str(folder), kind=kind, quantize="4bit")


def test_model_with_one_tower_is_refused(write: Any) -> None:
    with pytest.raises(InlayError, match=r"cannot do image-text\. It can do: image-classification"):
        load(write("vit"))
    with pytest.raises(InlayError, match=r"cannot do image-text\. It can do: .*classification"):
        load(write("bert"))
