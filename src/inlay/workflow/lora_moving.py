"""A LoRA written anew for a model of another class on the same trunk: a tagger's or an embedding's for a classifier.

The names of the trunk's layers differ by the trunk's own name, and what stands around the trunk stays behind.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from inlay.errors import InlayError
from inlay.methods.folder import CONFIG, WEIGHTS
from inlay.methods.plain import WRAPPED, plain_modules, plain_name
from inlay.workflow.lora_folders import LoraAdapter

MARK = ".lora_"  # what follows the name of a layer in those of its low-rank factors
# Which layers there are is said by their names instead.
NARROWING = ("layers_to_transform", "layers_pattern", "exclude_modules", "modules_to_save", "auto_mapping")


def move(adapter: LoraAdapter, base: Any, folder: Path) -> None:
    """Write the low-rank part of an adapter into `folder`, for this base model."""
    there = {name for name, _ in plain_modules(base)}
    tensors, targets = {}, set()
    for key, tensor in load_file(adapter.place / WEIGHTS["peft"]).items():
        layer, mark, rest = plain_name(key).partition(MARK)
        if not mark:
            continue
        home = next((name for name in (layer, f"{base.base_model_prefix}.{layer}") if name in there), None)
        if home is None:
            raise InlayError(
                f"{adapter.place} adapts {layer}, which {type(base).__name__} does not have: is it of this base model?"
            )
        targets.add(home)
        tensors[f"{WRAPPED}{home}{mark}{rest}"] = tensor
    settings = {key: value for key, value in adapter.settings.items() if key not in NARROWING}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG["peft"]).write_text(json.dumps(settings | {"target_modules": sorted(targets), "task_type": None}))
    save_file(tensors, folder / WEIGHTS["peft"], metadata={"format": "pt"})


def head_tensors(adapter: LoraAdapter) -> Mapping[str, Any]:
    """What an adapter brings beside its low-rank products, by the names that the model has."""
    found = load_file(adapter.place / WEIGHTS["peft"])
    return {plain_name(key): tensor for key, tensor in found.items() if MARK not in key}
