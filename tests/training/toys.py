"""Small real models and small real data for the tests of training, in the shapes that `fit` expects.

The text task: which of the classes' own tokens occurs most often in a row of random tokens. The image task: which
quarter of a noisy image is brightest. Both can be learnt by a tiny random backbone within a few epochs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from transformers import PreTrainedTokenizerFast

import zoo
from inlay.anatomy import head_modules
from inlay.tasks.encode import Encoded

Rows = list[dict[str, Any]]


@dataclass
class ToyBackbone:
    name: str
    model: nn.Module
    newly_initialised: list[str]
    processor: Any = None
    fingerprint: str = "f" * 64
    address: str = "toy"


def backbone(
    family: str = "bert", task: Any = "classification", dropout: float = 0.1, num_labels: int = 3
) -> ToyBackbone:
    """A tiny backbone, its weights large enough for what it reads to reach the head."""
    model, _ = zoo.tiny(family, task, num_labels=num_labels)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(4)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = dropout
    return ToyBackbone(f"toy-{family}", model, head_modules(model))


@dataclass
class ToyTask:
    name: str = "toy"
    kind: str = "classification"
    metrics: tuple[str, ...] = ("accuracy",)
    train: Rows = field(default_factory=list)
    validation: Rows = field(default_factory=list)
    test: Rows = field(default_factory=list)

    def encode(self, split: str, processor: Any, max_length: int | None, *, model_config: Any) -> Rows | Encoded:
        rows = getattr(self, split)
        if not rows or "input_ids" not in rows[0]:
            return rows
        columns = {name: [row[name] for row in rows] for name in ("input_ids", "attention_mask")}
        return Encoded(columns, [row["labels"] for row in rows])

    def with_length(self, processor: Any, max_length: int | None, *, model_config: Any) -> ToyTask:
        return self

    def with_notes(self, notes: Any) -> ToyTask:
        return self

    def collator(self, processor: Any, model: nn.Module) -> Any:
        return collate

    generates = False

    @property
    def selection_metric(self) -> str:
        return self.metrics[0]

    def greater_is_better(self) -> bool:
        return self.selection_metric == "accuracy"

    def reduce_logits(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return logits[:, -labels.shape[1] :] if labels.ndim > 1 else logits  # virtual tokens come first

    def compute_metrics(self, predictions: np.ndarray, labels: np.ndarray, encoded: Any) -> dict[str, float]:
        if self.metrics == ("mse",):
            return {"mse": float(np.mean((predictions.squeeze(-1) - labels) ** 2))}
        kept = labels != -100
        return {"accuracy": float(np.mean(predictions.argmax(-1)[kept] == labels[kept]))}


def collate(rows: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
    batch = {}
    for name in rows[0]:
        values = [torch.as_tensor(row[name]) for row in rows]
        padding = {"input_ids": zoo.PAD, "attention_mask": 0, "labels": -100}.get(name, 0)
        batch[name] = (
            torch.nn.utils.rnn.pad_sequence(values, batch_first=True, padding_value=padding)
            if values[0].ndim == 1
            else torch.stack(values)
        )
    return batch


def text_rows(count: int, seed: int, classes: int = 3) -> Rows:
    random = np.random.default_rng(seed)
    rows = []
    for _ in range(count):
        label = int(random.integers(classes))
        ids = random.integers(zoo.EOS + 1 + classes, zoo.VOCABULARY, random.integers(4, 12))
        ids[random.permutation(len(ids))[: max(2, len(ids) // 2)]] = zoo.EOS + 1 + label
        ids = [zoo.BOS, *ids.tolist(), zoo.EOS]
        rows.append({"input_ids": ids, "attention_mask": [1] * len(ids), "labels": label})
    return rows


def text_task(train: int = 96, validation: int = 48, test: int = 48) -> ToyTask:
    return ToyTask(train=text_rows(train, 1), validation=text_rows(validation, 2), test=text_rows(test, 3))


def lm_task(train: int = 24) -> ToyTask:
    """Rows of tokens to be continued; the first half of every other row is masked out of the loss."""
    rows = text_rows(train, 4)
    for number, row in enumerate(rows):
        masked = number % 2 * (len(row["input_ids"]) // 2)
        row["labels"] = [-100] * masked + row["input_ids"][masked:]
    return ToyTask(kind="causal-lm", train=rows, validation=rows[:8], test=rows[:8])


def image_rows(count: int, seed: int, classes: int = 3) -> Rows:
    random = np.random.default_rng(seed)
    half = zoo.IMAGE_SIZE // 2
    rows = []
    for _ in range(count):
        label = int(random.integers(classes))
        image = random.normal(size=(3, zoo.IMAGE_SIZE, zoo.IMAGE_SIZE)).astype(np.float32)
        image[:, half * (label // 2) :][:, :half, half * (label % 2) :][..., :half] += 2
        rows.append({"pixel_values": torch.from_numpy(image), "labels": label})
    return rows


def image_task(train: int = 48) -> ToyTask:
    return ToyTask(
        kind="image-classification", train=image_rows(train, 1), validation=image_rows(24, 2), test=image_rows(24, 3)
    )


def language_model(folder: Path) -> Path:
    """A tiny GPT-2 and its tokenizer of words, as a checkpoint on disk."""
    words = ["<s>", "<pad>", "</s>", "<unk>", *(f"w{i}" for i in range(zoo.VOCABULARY - 4))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"bos_token": "<s>", "pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=30, **special).save_pretrained(folder)
    backbone("gpt2", "causal-lm").model.save_pretrained(folder)
    return folder
