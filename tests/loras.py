"""PEFT's LoRAs in folders, on tiny base models: their parameters are drawn, not trained. And each of them alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers as hf
from peft import LoraConfig, PeftModel, get_peft_model

import zoo
from checkpoints import write_tokenizer

CLASSES = {
    "SEQ_CLS": hf.AutoModelForSequenceClassification,
    "TOKEN_CLS": hf.AutoModelForTokenClassification,
    "FEATURE_EXTRACTION": hf.AutoModel,
    "CAUSAL_LM": hf.AutoModelForCausalLM,
}
TEMPLATE = "{% for message in messages %}{{ message['role'] }} {{ message['content'] }} {% endfor %}w7"


def base_model(folder: Path, family: str = "bert", task: zoo.Task = "base", seed: int = 0, **tokenizer: Any) -> Path:
    """A tiny base model and a tokenizer of words."""
    zoo.tiny(family, task, seed=seed)[0].save_pretrained(folder)
    write_tokenizer(folder, **tokenizer)
    return folder


def lora(base: Path, folder: Path, kind: str = "SEQ_CLS", labels: int = 2, seed: int = 0, **settings: Any) -> Path:
    """The folder of one adapter, as PEFT's `save_pretrained` leaves it: nothing of inlay's beside it."""
    targets = ["query", "value"] if "bert" in base.name else ["q_proj", "v_proj"]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = plain(base, kind, labels)
        adapted = get_peft_model(
            model, LoraConfig(**{"task_type": kind, "r": 2 + seed % 3, "target_modules": targets} | settings)
        )
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.data.normal_(std=0.4)
        adapted.save_pretrained(str(folder))
    (folder / "README.md").unlink()
    return folder


def plain(base: Path, kind: str, labels: int) -> Any:
    """The base model as Transformers loads it for this type of task."""
    how = {"num_labels": labels} if kind.endswith("_CLS") else {}
    return CLASSES[kind].from_pretrained(base, **how).eval()


def alone(base: Path, folder: Path | None, kind: str, labels: int = 2) -> Any:
    """One adapter by itself, as PEFT runs it; None: the base model."""
    model = plain(base, kind, labels)
    return model if folder is None else PeftModel.from_pretrained(model, str(folder)).eval()


def tokens(base: Path, text: str) -> Any:
    """A text as the base model reads it."""
    return hf.AutoTokenizer.from_pretrained(base)(text, return_tensors="pt")
