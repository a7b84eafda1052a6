"""Stand-ins for `smoke`: tiny random models and a handful of made-up examples, under the names a recipe asks for.

A recipe at `smoke` goes the same way as at `paper`: the same names of models and tasks, found in a --models-dir and a
--data-dir. What lies there is made here, in a moment and without a network: a model of the same family with random
weights, and a data set of the same kind with random contents. Results mean nothing; that the recipe runs does.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from inlay.errors import InlayError

if TYPE_CHECKING:
    from inlay.tasks.catalogue import TaskCard

SIDE, CLASSES, LENGTH = 32, 3, 64
TRAIN, TEST = 8, 4  # examples of each class
MARKS = ("<s>", "<pad>", "</s>", "<unk>", "<mask>", "####")
PLAIN: tuple[str, ...] = (
    "the",
    "a",
    "of",
    "was",
    "is",
    "in",
    "great",
    "terrible",
    "yes",
    "no",
    "film",
    "story",
    "green",
    "small",
)
# Words of classes, and of the prompts by hand of InfoPrompt's figure 1.
PLAIN += ("different", "same", "correct", "incorrect", "company", "movie", "team", "place", "person", "product")
PLAIN += ("it", "equivalent", "to", "has", "meaning", "this", "positive", "negative")
WORDS = (*MARKS, *map(str, range(10)), *PLAIN)
SPECIAL = {"vocab_size": len(WORDS), "bos_token_id": 0, "pad_token_id": 1, "eos_token_id": 2}
ENCODER = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 2 * LENGTH,
}
VISION = {"hidden_size": 16, "num_hidden_layers": 6, "num_attention_heads": 2, "intermediate_size": 32}


def _vit() -> Any:
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(ViTConfig(**VISION, image_size=SIDE, patch_size=16))


def _resnet() -> Any:
    from transformers import ResNetConfig, ResNetForImageClassification

    shape = {"embedding_size": 8, "hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 1, 1]}
    return ResNetForImageClassification(ResNetConfig(**shape, layer_type="basic"))


def _swin() -> Any:
    from transformers import SwinConfig, SwinForImageClassification

    shape = {"embed_dim": 8, "depths": [2, 2], "num_heads": [2, 2], "window_size": 4, "patch_size": 4}
    return SwinForImageClassification(SwinConfig(**shape, image_size=SIDE))


def _clip() -> Any:
    from transformers import CLIPConfig, CLIPForImageClassification

    text = {**ENCODER, **SPECIAL}
    vision = {**VISION, "image_size": SIDE, "patch_size": 16}
    return CLIPForImageClassification(CLIPConfig(text_config=text, vision_config=vision, projection_dim=16))


def _bert() -> Any:
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(BertConfig(**ENCODER, **SPECIAL))


def _roberta() -> Any:
    from transformers import RobertaConfig, RobertaForMaskedLM

    return RobertaForMaskedLM(RobertaConfig(**ENCODER, **SPECIAL))


def _opt() -> Any:
    from transformers import OPTConfig, OPTForCausalLM

    shape = {key: value for key, value in ENCODER.items() if key != "intermediate_size"}
    return OPTForCausalLM(OPTConfig(**shape, **SPECIAL, ffn_dim=32, word_embed_proj_dim=16))


def _gpt2() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(**SPECIAL, n_embd=16, n_layer=2, n_head=2, n_positions=2 * LENGTH))


def _llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**ENCODER, **SPECIAL, num_key_value_heads=1))


# The first that is found in a model's name.
FAMILIES: dict[str, Callable[[], Any]] = {
    "resnet": _resnet,
    "swin": _swin,
    "clip": _clip,
    "vit": _vit,
    "roberta": _roberta,
    "bert": _bert,
    "minilm": _bert,
    "opt": _opt,
    "gpt2": _gpt2,
    "llama": _llama,
    "smollm": _llama,
}
IMAGES = ("resnet", "swin", "clip", "vit")


def model(name: str, folder: Path) -> None:
    """A tiny random model of the family that the name tells, as a checkpoint in `folder`."""
    import torch

    from inlay.console import quiet

    family = next((word for word in FAMILIES if word in name.lower()), None)
    if family is None:
        raise InlayError(f"No stand-in for the model {name!r}: its name has none of {', '.join(FAMILIES)}.")
    with torch.random.fork_rng(devices=[]), quiet():
        torch.manual_seed(0)
        FAMILIES[family]().save_pretrained(folder)
    if family in IMAGES:
        size = {"height": SIDE, "width": SIDE}
        processor = {
            "image_processor_type": "ViTImageProcessor",
            "size": size,
            "image_mean": [0.5] * 3,
            "image_std": [0.5] * 3,
        }
        (folder / "preprocessor_config.json").write_text(json.dumps(processor), encoding="utf-8")
    else:
        _tokenizer(folder)


def _tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = dict(zip(("bos_token", "pad_token", "eos_token", "unk_token", "mask_token"), MARKS[:5], strict=True))
    PreTrainedTokenizerFast(tokenizer_object=words, model_max_length=LENGTH, **special).save_pretrained(folder)


def data(name: str, root: Path) -> None:
    """A handful of made-up examples of a named task, in the layout of a --data-dir."""
    from inlay.tasks import catalogue

    card = catalogue.describe(name)
    generator = np.random.default_rng(0)
    if card.modality == "image":
        _pictures(root / "images" / card.folder, generator)
        return
    folder = root / "text" / card.folder
    folder.mkdir(parents=True, exist_ok=True)
    for split, each in (("train", TRAIN), ("test", TEST)):
        rows = [_row(card, number, generator) for number in range(each * CLASSES)]
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{split}.jsonl").write_text(lines, encoding="utf-8")


def _pictures(folder: Path, generator: np.random.Generator) -> None:
    from PIL import Image

    for split, each in (("train", TRAIN), ("test", TEST)):
        for label in range(CLASSES):
            place = folder / split / f"class-{label}"
            place.mkdir(parents=True, exist_ok=True)
            for number in range(each):
                pixels = generator.integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(place / f"{number}.png")


def _row(card: TaskCard, number: int, generator: np.random.Generator) -> dict[str, Any]:
    """A row with random words in every field, and the next label; with an answer where the task asks for one.

    A task that prepares its rows gets one to prepare: a span, marked entities, triples, attributes.
    """
    row: dict[str, Any] = {name: _words(generator) for name in card.fields}
    if card.schema.prepare == "spans":
        row = {"tokens": _words(generator).split(), "start": 1, "end": 2}
    elif card.schema.prepare == "marked-entities":
        row = {"sentence": f"<e1>film</e1> {_words(generator)} <e2>story</e2>"}
    elif card.schema.prepare == "triples":
        return {"triples": [["film", "is", str(number)]], "texts": [_words(generator)]}
    elif card.schema.prepare == "e2e":
        return {"meaning_representation": f"name[film], area[{number}]", "human_reference": _words(generator)}
    if card.target:
        row[card.target] = f"{_words(generator)} #### {number}" if card.name in ("gsm8k", "math") else _words(generator)
    if card.kind == "regression":  # first: its one output is no class
        row[card.label[0]] = number % 6
    elif card.schema.label_names:
        row[card.label[0]] = number % len(card.schema.label_names)
    elif card.num_labels:
        row[card.label[0]] = number % card.num_labels
    elif card.kind == "span-classification":
        row[card.label[0]] = f"kind {number % CLASSES}"
    return row


def _words(generator: np.random.Generator) -> str:
    return " ".join(generator.choice(WORDS[len(MARKS) :], size=int(generator.integers(4, 9))))


def folder_of(name: str) -> str:
    """A model's folder: its name on the hub without the owner."""
    return re.sub(r"[^A-Za-z0-9._-]", "-", name.rpartition("/")[2])
