"""Tokenizers and image processors with gaps, filled so that the model can be trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from PIL import Image

import zoo
from checkpoints import WORDS, Write, write_tokenizer
from inlay import backbones
from inlay.errors import InlayError


def load_text(folder: Path, kind: str = "classification") -> backbones.Backbone:
    return backbones.load(str(folder), kind=kind, num_labels=2)


def load_images(folder: Path, **arguments: Any) -> backbones.Backbone:
    return backbones.load(str(folder), kind="image-classification", num_labels=2, **arguments)


def photo(width: int = 50, height: int = 40) -> Image.Image:
    pixels = np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_without_a_pad_token_the_end_of_text_is_used(family: str, write: Write) -> None:
    folder = write(family, pad_token=None)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"pad_token_id": None}))
    backbone = load_text(folder)
    assert backbone.processor.pad_token == "</s>"
    assert backbone.model.config.pad_token_id == backbone.processor.pad_token_id == zoo.EOS
    assert any("no pad token" in note and "'</s>'" in note for note in backbone.notes)
    # The classifier reads the last real token: a padded text gives what it gives alone.
    alone = backbone.model(**backbone.processor(["w1 w2"], return_tensors="pt")).logits
    batch = backbone.processor(["w1 w2", "w3 w4 w5 w6"], padding=True, return_tensors="pt")
    torch.testing.assert_close(backbone.model(**batch).logits[:1], alone)


def test_pad_token_of_the_tokenizer_wins_over_the_config(write: Write) -> None:
    folder = write("gpt2", pad_token="<mask>")
    backbone = load_text(folder)
    assert backbone.model.config.pad_token_id == WORDS.index("<mask>")
    assert any("pad token id 1 in the config, 4 in the tokenizer" in note for note in backbone.notes)


def test_generation_pads_with_the_same_token(write: Write) -> None:
    backbone = load_text(write("gpt2", "causal-lm", pad_token=None), kind="causal-lm")
    assert backbone.model.generation_config.pad_token_id == backbone.processor.pad_token_id


def test_tokenizer_with_no_special_token_at_all_is_refused(write: Write) -> None:
    folder = write("gpt2", pad_token=None, eos_token=None, bos_token=None, unk_token=None, mask_token=None)
    with pytest.raises(InlayError, match="no pad token and no other special token"):
        load_text(folder)


@pytest.mark.parametrize(
    ("family", "length"), [("bert", 40), ("gpt2", 40), ("roberta", 38), ("mpnet", 38), ("opt", 40)]
)
def test_length_is_what_the_positions_allow(family: str, length: int, write: Write) -> None:
    backbone = load_text(write(family, model_max_length=None))
    assert backbone.processor.model_max_length == length
    assert any("no length" in note for note in backbone.notes)
    longest = backbone.processor("w1 " * 100, truncation=True, return_tensors="pt")
    assert longest["input_ids"].shape[1] == length
    assert backbone.model(**longest).logits.isfinite().all()


def test_length_that_the_tokenizer_states_is_kept_where_it_fits(write: Write) -> None:
    backbone = load_text(write("bert", model_max_length=12))
    assert backbone.processor.model_max_length == 12
    assert not any("length" in note for note in backbone.notes)


def test_length_beyond_the_positions_is_cut(write: Write) -> None:
    backbone = load_text(write("bert", model_max_length=512))
    assert backbone.processor.model_max_length == 40
    assert any("a length of 512" in note for note in backbone.notes)


def test_missing_mask_token_is_told_for_encoders_only(write: Write) -> None:
    assert any("no mask token" in note for note in load_text(write("bert", mask_token=None)).notes)
    assert not any("no mask token" in note for note in load_text(write("roberta")).notes)
    assert not any("no mask token" in note for note in load_text(write("gpt2", mask_token=None)).notes)


def test_missing_tokenizer_is_one_clear_error(write: Write) -> None:
    with pytest.raises(InlayError, match=r"has no tokenizer.*tokenizer\.save_pretrained"):
        load_text(write("bert", tokenizer=False))


def test_tokenizer_without_its_vocabulary_is_refused(tmp_path: Path) -> None:
    config = zoo.FAMILIES["bert"].config()
    config.vocab_size = 1000
    hf.BertModel(config).save_pretrained(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "BertTokenizer"}))
    with pytest.raises(InlayError, match=r"knows \d tokens, but the model has 1000"):
        load_text(tmp_path)


def test_damaged_tokenizer_is_one_clear_error(write: Write) -> None:
    folder = write("bert")
    (folder / "tokenizer.json").write_text('{"version": "1.0", "model"')
    with pytest.raises(InlayError, match="cannot be read"):
        load_text(folder)


def test_tokenizer_of_another_model_is_refused(write: Write) -> None:
    folder = write("bert", words=[*WORDS, "one", "two"])
    with pytest.raises(InlayError, match=f"ids up to {zoo.VOCABULARY + 1}.*{zoo.VOCABULARY} rows"):
        load_text(folder)


def test_added_pad_token_without_an_embedding_is_replaced(write: Write) -> None:
    folder = write("gpt2", tokenizer=False)
    write_tokenizer(folder, pad_token="<added>")
    backbone = load_text(folder)
    assert backbone.processor.pad_token == "</s>"
    assert any("added tokens ('<added>')" in note for note in backbone.notes)


def test_processor_of_the_checkpoint_is_used(write: Write) -> None:
    folder = write("vit")
    hf.ViTImageProcessorPil(size={"height": 32, "width": 32}, image_mean=[0.1, 0.2, 0.3]).save_pretrained(folder)
    backbone = load_images(folder)
    assert list(backbone.processor.image_mean) == [0.1, 0.2, 0.3]
    assert type(backbone.processor) is hf.ViTImageProcessorPil
    assert not any("preprocessor" in note for note in backbone.notes)
    assert backbone.model(**backbone.processor(photo(), return_tensors="pt")).logits.shape == (1, 2)


@pytest.mark.parametrize("family", ["vit", "deit", "dinov2", "swin", "clip", "resnet", "convnext"])
def test_processor_is_built_where_there_is_none(family: str, write: Write) -> None:
    folder = write(family, "classification")
    backbone = load_images(folder)
    assert any("no preprocessor_config.json" in note for note in backbone.notes)
    side = backbones.image_side(backbone.processor)
    assert side == (224 if family == "resnet" else zoo.IMAGE_SIZE)
    pixels = backbone.processor(photo(), return_tensors="pt")["pixel_values"]
    assert pixels.shape == (1, 3, side, side)
    assert backbone.model(pixels).logits.shape == (1, 2)


def test_processor_is_built_from_what_the_config_says(write: Write) -> None:
    folder = write("resnet", "classification")
    config = json.loads((folder / "config.json").read_text())
    said = {"input_size": [3, 28, 28], "image_mean": [0.1, 0.2, 0.3], "image_std": [0.5, 0.6, 0.7], "crop_pct": 0.875}
    (folder / "config.json").write_text(json.dumps(config | said | {"interpolation": "bicubic"}))
    backbone = load_images(folder)
    found = backbone.processor(photo(64, 64), return_tensors="pt")["pixel_values"][0]
    # Short side to 28 / 0.875 = 32 pixels, then the middle 28: by hand, with PIL alone.
    small = photo(64, 64).resize((32, 32), Image.Resampling.BICUBIC).crop((2, 2, 30, 30))
    by_hand = (np.asarray(small) / 255 - said["image_mean"]) / said["image_std"]
    np.testing.assert_allclose(found.permute(1, 2, 0).numpy(), by_hand, atol=1e-5)
    assert backbone.model.config.image_size == 28


def test_damaged_processor_file_is_refused(write: Write) -> None:
    folder = write("vit")
    (folder / "preprocessor_config.json").write_text("{")
    with pytest.raises(InlayError, match=r"preprocessor_config\.json of"):
        load_images(folder)


@pytest.mark.parametrize("family", ["resnet", "convnext", "swin", "dinov2"])
def test_another_image_size_where_the_model_can_read_it(family: str, write: Write) -> None:
    backbone = load_images(write(family, "classification"), image_size=64)
    pixels = backbone.processor(photo(), return_tensors="pt")["pixel_values"]
    assert pixels.shape == (1, 3, 64, 64)
    assert backbones.image_side(backbone.processor) == 64
    assert backbone.model(pixels).logits.shape == (1, 2)


@pytest.mark.parametrize("family", ["vit", "deit", "clip"])
@pytest.mark.parametrize("side", [16, 64])
def test_positions_are_interpolated_once_as_the_model_would_in_every_pass(family: str, side: int, write: Write) -> None:
    folder = write(family, "classification")
    own, other = load_images(folder), load_images(folder, image_size=side)
    pixels = other.processor(photo(), return_tensors="pt")["pixel_values"]
    assert pixels.shape == (1, 3, side, side)
    with torch.no_grad():
        trunks = [getattr(each.model, "vision_model", each.model.base_model) for each in (own, other)]
        wanted = trunks[0](pixels, interpolate_pos_encoding=True).last_hidden_state
        found = trunks[1](pixels).last_hidden_state
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    assert other.image_size == side
    assert other.fingerprint != own.fingerprint
    assert other.fingerprint == load_images(folder, image_size=side).fingerprint
    assert load_images(folder, image_size=32).fingerprint == own.fingerprint


def test_a_model_with_interpolated_positions_is_a_model_of_that_size(write: Write, tmp_path: Path) -> None:
    backbone = load_images(write("vit", "classification"), image_size=64)
    backbone.model.save_pretrained(tmp_path / "larger")
    again = hf.AutoModelForImageClassification.from_pretrained(tmp_path / "larger").eval()
    pixels = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        assert torch.equal(again(pixels).logits, backbone.model.eval()(pixels).logits)


def test_half_precision_positions_are_interpolated(write: Write) -> None:
    folder = write("vit", "classification")
    whole, half = (load_images(folder, image_size=64, dtype=each) for each in (torch.float32, torch.float16))
    table = half.model.base_model.embeddings.position_embeddings
    assert table.dtype == torch.float16
    torch.testing.assert_close(table.float(), whole.model.base_model.embeddings.position_embeddings, atol=1e-3, rtol=0)


def test_an_image_size_that_cannot_be(write: Write) -> None:
    with pytest.raises(InlayError, match=r"image_size=50: the model reads patches of 8 pixels.*Give 48 or 56"):
        load_images(write("vit", "classification"), image_size=50)
    with pytest.raises(InlayError, match=r"image_size=64: .* reads text\. Leave it out"):
        backbones.load(str(write("bert")), kind="classification", num_labels=2, image_size=64)


def test_a_processor_of_another_size_is_no_wish_for_it(write: Write) -> None:
    folder = write("vit", "classification")
    hf.ViTImageProcessorPil(size={"height": 64, "width": 64}).save_pretrained(folder)
    with pytest.raises(InlayError, match=r"reads images of 32 pixels, not 64 .*Give --image-size 32"):
        load_images(folder)
    assert load_images(folder, image_size=64).image_size == 64


def test_cropping_keeps_its_share_at_another_size(write: Write) -> None:
    folder = write("dinov2")
    hf.BitImageProcessorPil(size={"shortest_edge": 256}, crop_size={"height": 224, "width": 224}).save_pretrained(
        folder
    )
    processor = load_images(folder, image_size=112).processor
    assert (processor.size["shortest_edge"], processor.crop_size["height"]) == (128, 112)


def test_one_channel(tmp_path: Path) -> None:
    config = hf.ViTConfig(**zoo.FAMILIES["vit"].config().to_diff_dict() | {"num_channels": 1})
    hf.ViTForImageClassification(config).save_pretrained(tmp_path)
    hf.ViTImageProcessorPil(size={"height": 32, "width": 32}, image_mean=[0.4, 0.5, 0.6]).save_pretrained(tmp_path)
    backbone = load_images(tmp_path)
    assert tuple(backbone.processor.image_mean) == (pytest.approx(0.5),)
    plain = backbone.processor(photo().convert("L"), return_tensors="pt")["pixel_values"]
    assert plain.shape == (1, 1, 32, 32)
    coloured = backbone.processor([photo()], return_tensors="pt")["pixel_values"]
    torch.testing.assert_close(coloured, plain)
    array = backbone.processor(np.asarray(photo()), return_tensors="pt")["pixel_values"]
    torch.testing.assert_close(array, plain, atol=0.02, rtol=0)
    backbone.processor.save_pretrained(tmp_path / "again")
    assert backbone.model(plain).logits.shape == (1, 2)
    assert any("one channel" in note for note in backbone.notes)


@pytest.mark.parametrize(("model", "top"), [("vit_tiny_patch16_224", "Egyptian_cat"), ("resnet50_v1", "Egyptian_cat")])
def test_real_image_models_with_the_processor_built_for_them(shared: Path, model: str, top: str) -> None:
    import io

    import pandas as pd

    folder = shared / "models" / model
    pets = pd.read_parquet(shared / "data" / "images" / "oxford_pets.parquet")
    labels = list(json.loads((folder / "config.json").read_text())["id2label"].values())
    backbone = backbones.load(str(folder), kind="image-classification", label_names=labels)
    rows = pets[pets["source"].str.contains("Egyptian_Mau")].head(8)
    images = [Image.open(io.BytesIO(row if isinstance(row, bytes) else row["bytes"])) for row in rows["image"]]
    pixels = backbone.processor([image.convert("RGB") for image in images], return_tensors="pt")["pixel_values"]
    assert pixels.shape == (8, 3, 224, 224)
    with torch.inference_mode():
        named = [labels[index] for index in backbone.model(pixels).logits.argmax(1)]
    assert named.count(top) >= 5
    assert any("as config.json says" in note for note in backbone.notes)
