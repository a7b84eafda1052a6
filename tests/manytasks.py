"""A tiny model with several tasks of Multi-LoRA, and what its tests do with one."""

from __future__ import annotations

from typing import Any

import torch
from peft import get_peft_model
from torch import Tensor, nn

import inlay
from zoo import tiny

TASKS = {"rte": None, "sst2": 5, "stsb": 1}  # labels of each; None: as the base has


def several(family: str, task: str = "classification", dtype: torch.dtype = torch.float64, **config: Any) -> Any:
    """A tiny model with three tasks, moved away from their start, and a batch with a row for each."""
    model, batch = tiny(family, task)
    heads = TASKS if task == "classification" else dict.fromkeys(TASKS)
    adapted: Any = None
    for name, labels in heads.items():
        own = inlay.MultiLoraConfig(r=3, num_labels=labels, **config)
        if adapted is None:
            adapted = get_peft_model(model.to(dtype), own, adapter_name=name)
        else:
            adapted.add_adapter(name, own)
    stir(adapted)
    batch = {key: value.to(dtype) if value.is_floating_point() else value for key, value in batch.items()}
    return adapted.eval(), batch


@torch.no_grad()
def stir(model: nn.Module, seed: int = 1) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _, parameter in sorted(model.named_parameters()):
        if parameter.requires_grad:
            parameter.add_(torch.randn(parameter.shape, generator=generator).to(parameter.dtype), alpha=0.3)


def inputs(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return {key: value for key, value in batch.items() if key != "labels"}


def row(batch: dict[str, Tensor], *indices: int) -> dict[str, Tensor]:
    return {key: value[list(indices)] for key, value in batch.items()}


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
