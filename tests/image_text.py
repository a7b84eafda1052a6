"""Tiny random models with a tower for images and one for texts, as checkpoints on disk, and small data for them."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers as hf
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers, processors

import zoo

COLOURS = {"red": (220, 30, 30), "green": (30, 200, 40), "blue": (30, 40, 220), "deep_grey": (70, 70, 70)}
SHADES = ("plain", "pale", "dark", "bright", "wide", "small", "old", "new")
WORDS = ["<s>", "<pad>", "</s>", "<unk>", "a", "photo", "of", "the", "square", "deep", "grey", *COLOURS, *SHADES]
POSITIONS = 12
TEXT = {**zoo.ENCODER, "num_hidden_layers": 2, "max_position_embeddings": POSITIONS, "eos_token_id": 2}


def config(family: str) -> Any:
    """A config of `clip` or `siglip`."""
    if family == "siglip":
        text = TEXT | {"projection_size": zoo.VISION["hidden_size"]}
        return hf.SiglipConfig(text_config=text, vision_config=zoo.VISION)
    return hf.CLIPConfig(text_config=TEXT, vision_config=zoo.VISION, projection_dim=8)


def build(family: str = "clip", seed: int = 0) -> Any:
    """A tiny random model, in eval mode."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = hf.AutoModelForZeroShotImageClassification.from_config(config(family))
        zoo._stir(model)
    return model.eval()


def write_model(folder: Path, family: str = "clip", seed: int = 0) -> Path:
    """Such a model with a tokenizer of words and an image processor."""
    build(family, seed).save_pretrained(folder)
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    hf.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        unk_token="<unk>",
        model_max_length=POSITIONS,
    ).save_pretrained(folder)
    side = {"height": zoo.IMAGE_SIZE, "width": zoo.IMAGE_SIZE}
    hf.ViTImageProcessorPil(size=side).save_pretrained(folder)
    return folder


def draw(colour: str, number: int) -> Image.Image:
    """An image of a colour with noise that follows from its number."""
    draws = np.random.default_rng(number)
    noise = draws.integers(-25, 25, (24, 24, 3))
    return Image.fromarray(np.clip(np.asarray(COLOURS[colour]) + noise, 0, 255).astype(np.uint8))


def write_classes(folder: Path, each: int = 12, names: tuple[str, ...] = tuple(COLOURS)) -> Path:
    """A folder of images for each class."""
    for place, name in enumerate(names):
        (folder / name).mkdir(parents=True)
        for i in range(each):
            draw(name, 100 * place + i).save(folder / name / f"{i}.png")
    return folder


def write_pairs(folder: Path, each: int = 12) -> Path:
    """A table of images with two captions each; the first image of a colour has the caption of the second too."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for place, name in enumerate(COLOURS):
        for i in range(each):
            path = folder / f"{name}{i}.png"
            draw(name, 100 * place + i).save(path)
            said = name.replace("_", " ")
            rows.append((path.name, f"a {SHADES[max(i, 1) % len(SHADES)]} {said} square"))
            rows.append((path.name, f"the {SHADES[i % len(SHADES)]} photo of {said}"))
    with open(folder / "pairs.csv", "w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([("image", "caption"), *rows])
    return folder / "pairs.csv"
