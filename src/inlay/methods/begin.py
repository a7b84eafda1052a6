"""Begin with what an adapter of another task has learnt: its pieces, and not its head."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from peft import get_peft_model_state_dict, set_peft_model_state_dict
from torch import Tensor

from inlay.errors import InlayError, listed
from inlay.methods.folder import DEFAULT
from inlay.methods.plain import WRAPPED
from inlay.methods.protocol import Method
from inlay.methods.saving import read


def begin_from(model: Any, method: Method, folder: str | Path, adapter_name: str = DEFAULT) -> int:
    """Give the one adapter of `model` the values of a saved one of the same method, heads aside; how many tensors.

    An error where the two do not have the same pieces: other settings, or another architecture.
    """
    config, tensors = read(method, folder, adapter_name)
    own = get_peft_model_state_dict(model, adapter_name=DEFAULT, save_embedding_layers=False)
    wanted = _without_heads(own, model.peft_config[DEFAULT].modules_to_save or ())
    held = _without_heads(tensors, config.modules_to_save or ())
    other = [name for name in wanted if name in held and wanted[name].shape != held[name].shape]
    if wanted.keys() != held.keys() or other:
        if other:
            name = other[0]
            why = f"{name} has shape {tuple(held[name].shape)} there and {tuple(wanted[name].shape)} here"
        else:
            lacking = sorted(wanted.keys() - held.keys())
            why = f"it lacks {listed(lacking, 2)}" if lacking else f"it has {listed(sorted(held.keys() - wanted), 2)}"
        raise InlayError(
            f"init_adapter={str(folder)!r} does not fit: {why}. Give the model and the settings that it was trained "
            "with (--set NAME=VALUE), or leave it out."
        )
    set_peft_model_state_dict(model, {**own, **held}, adapter_name=DEFAULT)
    return len(held)


def _without_heads(tensors: Mapping[str, Tensor], heads: Collection[str]) -> dict[str, Tensor]:
    """The tensors that are not of modules which are trained whole; PEFT names these by the ends of their names."""
    return {
        name: tensor
        for name, tensor in tensors.items()
        if not any(f".{head}." in f".{name.removeprefix(WRAPPED)}" for head in heads)
    }
