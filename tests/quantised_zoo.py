"""Tiny models whose linear layers are quantised as `inlay.load_backbone` does it, for probes and tests."""

from __future__ import annotations

import copy
import tempfile
from dataclasses import replace
from functools import cache
from importlib.util import find_spec

import torch
import transformers as hf
from torch import nn

import zoo
from inlay.backbones import quantised
from inlay.methods.registry import Method
from inlay.records.spec import QUANTISATIONS
from probing import probe

# Wide enough for blocks of 64 numbers, which NF4 shares a scale among.
WIDE = {"hidden_size": 64, "intermediate_size": 96}
CONFIGS = {
    "bert": lambda: hf.BertConfig(**zoo.ENCODER | WIDE),
    "llama": lambda: hf.LlamaConfig(**zoo.GROUPED | WIDE | {"head_dim": 16}),
    "vit": lambda: hf.ViTConfig(**zoo.VISION | WIDE),
}
TASKS: dict[str, zoo.Task] = {"bert": "classification", "llama": "causal-lm", "vit": "classification"}
KINDS = QUANTISATIONS


def missing(kind: str) -> str | None:
    """Why a quantisation cannot be tried here; None: it can."""
    package = quantised.PACKAGES[kind]
    return None if find_spec(package) is not None else f"{package} is not installed: pip install 'inlay[quantize]'"


@cache
def _full(family: str, task: zoo.Task) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    wide = replace(zoo.FAMILIES[family], config=CONFIGS[family])
    kept, zoo.FAMILIES[family] = zoo.FAMILIES[family], wide
    try:
        return zoo.tiny(family, task)
    finally:
        zoo.FAMILIES[family] = kept


def full(family: str, task: zoo.Task) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """The model before it is quantised, and a batch for it."""
    return copy.deepcopy(_full(family, task))


@cache
def _quantised(family: str, task: zoo.Task, kind: str) -> nn.Module:
    model, _ = full(family, task)
    digests: dict[str, bytes] = {}
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        with quantised.loading(kind, torch.float32, model, digests) as how:
            made = type(model).from_pretrained(folder, dtype=torch.float32, **how)
    quantised.finish(made, digests, torch.float32, ())
    return made.eval()


def tiny(family: str, task: zoo.Task, kind: str) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """The model, quantised, and the same batch."""
    return copy.deepcopy(_quantised(family, task, kind)), _full(family, task)[1]


def dequantised(family: str, task: zoo.Task, kind: str) -> nn.Module:
    """The full model with the numbers that the quantised one multiplies with."""
    model, _ = full(family, task)
    for name, module in _quantised(family, task, kind).named_modules():
        if isinstance(module, nn.Linear):
            model.get_submodule(name).weight.data = quantised.full_weight(module).detach().float().clone()
    return model


def fault(method: Method, family: str, kind: str) -> str | None:
    """Why a method does not work on a quantised model of a family; None: it works."""
    return probe(method, lambda: tiny(family, TASKS[family], kind))
