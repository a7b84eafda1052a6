"""Adapters that stand for prompts, of tiny decoders: their keys and values are drawn, not compressed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

import zoo
from checkpoints import write_tokenizer
from inlay import backbones
from inlay.methods import attach, registry
from inlay.workflow.compress import REPORT

KEYS = "compact-prefix"


def decoder(folder: Path, family: str = "llama", seed: int = 0, **tokenizer: Any) -> Path:
    """A tiny causal language model and a tokenizer of words."""
    zoo.tiny(family, "causal-lm", seed=seed)[0].save_pretrained(folder)
    write_tokenizer(folder, **tokenizer)
    return folder


def adapter(
    model: Path, folder: Path, size: int = 3, *, method: str = KEYS, stands_for: int | None = 12, **settings: Any
) -> Path:
    """The folder of one adapter, as `inlay compress` leaves it."""
    backbone = backbones.load(str(model), kind="causal-lm")
    if method == KEYS:
        settings |= {"size": size}
    adapted = attach.attach(backbone.model, method, settings={"seed": size} | settings if method == KEYS else settings)
    drawn = torch.Generator().manual_seed(size)
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            parameter.data.normal_(std=1.0, generator=drawn)
    attach.save(
        adapted, registry.get(method), folder, base_model_name=backbone.address, fingerprint=backbone.fingerprint
    )
    if stands_for is not None:
        (folder / REPORT).write_text(json.dumps({"prompt_tokens": stands_for}))
    return folder
