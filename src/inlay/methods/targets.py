"""Which modules an adapter targets, by the layers that a user asks for."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from peft.tuners.tuners_utils import check_target_module_exists
from torch import nn
from transformers.pytorch_utils import Conv1D

from inlay.anatomy import anatomy, tower_modules
from inlay.errors import InlayError
from inlay.methods.plain import base_of, plain_name
from inlay.methods.protocol import Method, load

ALL_LINEAR = "all-linear"  # as PEFT calls them


def all_linear(model: nn.Module) -> list[str]:
    """The names of all linear layers of the blocks: what PEFT's `all-linear` means, as far as layers can be chosen."""
    inside = [inner for block in anatomy(model).blocks for inner in block.module.modules()]
    linear = {inner for inner in inside if isinstance(inner, (nn.Linear, Conv1D))}
    return [plain_name(name) for name, module in base_of(model).named_modules() if module in linear]


def chooses(settings: Mapping[str, Any]) -> bool:
    """Whether settings choose layers."""
    return settings.get("layers") is not None or settings.get("layers_to_transform") not in (None, [])


def in_layers(model: nn.Module, layers: list[int], name: str) -> bool:
    """Whether the module of this name is one of these blocks, counted from 1, or in one of them."""
    blocks = {block.index: plain_name(block.name) for block in anatomy(model).all_blocks}
    for layer in layers:
        if layer not in blocks:
            raise InlayError(f"layers={layers!r}: there is no layer {layer}; the model has 1 to {len(blocks)}.")
    return any(name == blocks[layer] or name.startswith(f"{blocks[layer]}.") for layer in layers)


def in_tower(model: nn.Module, method: Method, settings: Mapping[str, Any], tower: str) -> dict[str, Any]:
    """The settings with everything but one tower (`image` or `text`) of a model that has two left as it is."""
    if tower == "both":
        return dict(settings)
    towers = tower_modules(base_of(model))
    if tower not in towers:
        raise InlayError(
            f"towers={tower!r}: {type(base_of(model)).__name__} has no two towers, one for images and one for texts. "
            "Leave it out."
        )
    if method.form == "peft" and method.hooks.goes_by_blocks:
        if tower == "text":
            raise InlayError(
                f"towers='text': the method {method.name!r} acts in the tower of images. Leave it out, or take one "
                "that acts in the tower of texts, such as lora, bias or ssf."
            )
        return dict(settings)
    beside = [name for other, own in towers.items() if other != tower for name in own]
    if method.takes("exclude_modules"):
        if settings.get("exclude_modules"):
            raise InlayError(
                f"towers={tower!r} leaves out the other tower, and exclude_modules={settings['exclude_modules']!r} "
                "says what is left out. Give one of them."
            )
        return {**settings, "exclude_modules": rf"({'|'.join(map(re.escape, beside))})(\..*)?"}
    if method.defaults is None or "target_modules" in settings:
        raise InlayError(
            f"towers={tower!r}: the method {method.name!r} does not choose the modules that it adapts here. Leave it "
            "out, or take one that does, such as lora, bias or ssf."
        )
    chosen = load(method.defaults)(model)["target_modules"]
    return {**settings, "target_modules": [name for name in chosen if name.split(".")[0] not in beside]}


def narrow_targets(
    model: nn.Module, method: Method, chosen: Mapping[str, Any], settings: Mapping[str, Any]
) -> dict[str, Any]:
    """What a method's `defaults` chose for one of PEFT's configs, less the modules outside the layers asked for.

    `layers` counts blocks from 1, as all of inlay does; `layers_to_transform` and `layers_pattern` are PEFT's, which
    read the first number in a module's name, and count from 0.
    """
    layers, wanted = settings.get("layers"), settings.get("layers_to_transform")
    if "target_modules" not in chosen or (layers is None and wanted in (None, [])):
        return dict(chosen)
    for name, value in (("layers", layers), ("layers_to_transform", [wanted] if type(wanted) is int else wanted)):
        if value is not None and not (isinstance(value, list) and all(type(layer) is int for layer in value)):
            raise InlayError(f"{name}={value!r} will not do: give a list of numbers, as in [4, 5].")
    indices = {} if wanted in (None, []) else {"layers_to_transform": wanted}
    if indices and settings.get("layers_pattern"):
        indices["layers_pattern"] = settings["layers_pattern"]

    def stays(name: str) -> bool:
        if layers is not None and not in_layers(model, layers, name):
            return False
        # Told of the end of the name alone, PEFT does look at the layer.
        ending = method.config_class()(target_modules=[name.rpartition(".")[2]], **indices)
        return bool(check_target_module_exists(ending, name))

    kept = {key: [name for name in names if stays(name)] for key, names in chosen.items()}
    if not kept["target_modules"]:
        asked = ", ".join(f"{name}={value!r}" for name, value in {"layers": layers, **indices}.items() if value)
        raise InlayError(
            f"{asked} leave {method.name} nothing to adapt in {type(base_of(model)).__name__}, which has layers 1 to "
            f"{len(anatomy(model).all_blocks)} (PEFT's layers_to_transform counts from 0)."
        )
    return kept
