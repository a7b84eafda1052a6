"""The base model's own modules and parameters, by their own names, whatever PEFT has put around and between them.

PEFT wraps a model (`base_model.model.`), a module (`base_layer`, `original_module`) and adds modules of its own.
Methods that look for what to adapt, and the search for new heads, must see through all of it.
"""

from __future__ import annotations

from collections.abc import Iterator

from peft import PeftModel
from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import nn

WRAPPED = "base_model.model."
INNER = {"base_layer", "original_module"}


def base_of(model: nn.Module) -> nn.Module:
    """The model inside any PEFT models and tuners around it."""
    while isinstance(model, (PeftModel, BaseTuner)):
        model = model.get_base_model() if isinstance(model, PeftModel) else model.model
    return model


def adapters_in(model: nn.Module) -> set[str]:
    """The names of the adapters that a model has, whoever put them in."""
    found: set[str] = set()
    for module in model.modules():
        if isinstance(module, PeftModel):
            found |= set(module.peft_config)  # a prompt is nowhere else
        elif isinstance(module, (BaseTunerLayer, AuxiliaryTrainingWrapper)):
            found |= module._get_available_adapters()
    return found


def plain_name(name: str) -> str:
    """A module's name as the model without any PEFT model around it has it."""
    while name.startswith(WRAPPED):
        name = name.removeprefix(WRAPPED)
    return name


def plain_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Every module of the base model, the root included under an empty name; the inner one where PEFT wraps it."""
    yield from _walk(base_of(model), "")


def _walk(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
    while isinstance(module, (BaseTunerLayer, AuxiliaryTrainingWrapper)):
        inner = next((child for key, child in module.named_children() if key in INNER), None)
        if inner is None:  # an adapter's own piece
            return
        module = inner
    yield name, module
    for key, child in module.named_children():
        yield from _walk(child, f"{name}.{key}" if name else key)


def plain_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Every parameter of the base model by its own name; one that several modules share, by the first of its names."""
    found: dict[str, nn.Parameter] = {}
    seen: set[int] = set()
    for name, module in plain_modules(model):
        for key, parameter in module.named_parameters(recurse=False):
            if id(parameter) not in seen:
                seen.add(id(parameter))
                found[f"{name}.{key}" if name else key] = parameter
    return found
