"""What of an adapted model enters the autograd graph: which parts run before the first trained one, and what a loss
leads back to."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from peft.utils.other import AuxiliaryTrainingWrapper
from torch import Tensor

from inlay.anatomy import Part, anatomy
from inlay.methods.attach import trained_parameters


def untrained_from_the_input(model: Any) -> list[Part]:
    """The parts that run before the first one with something to train: the stem's, then blocks."""
    parts = anatomy(model)
    trained = list(trained_parameters(model))
    inside = [part.name for part in (*parts.stem_parts, *parts.blocks)]
    late = [part.name for part in (parts.final_norm, parts.head) if part is not None]
    late += [name for name, module in model.named_modules() if isinstance(module, AuxiliaryTrainingWrapper)]
    if any(not lies_in(name, [*inside, *late]) for name in trained):
        return []  # around the model, or at its input
    found: list[Part] = []
    for part in (*parts.stem_parts, *parts.blocks):
        if any(lies_in(name, [part.name]) for name in trained):
            break
        found.append(part)
    return found


def lies_in(name: str, modules: Iterable[str]) -> bool:
    return any(name.startswith(f"{module}.") for module in modules)


def tensors(output: Any) -> list[Tensor]:
    if isinstance(output, Tensor):
        return [output]
    values = output.values() if isinstance(output, Mapping) else output if isinstance(output, (tuple, list)) else ()
    return [tensor for value in values for tensor in tensors(value)]


def leaves(loss: Tensor) -> list[Tensor]:
    """The tensors at the ends of the graph behind a loss: those that its backward pass would give a gradient."""
    found, seen, waiting = [], set(), [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            found.append(node.variable)
        waiting += [following for following, _ in node.next_functions]
    return found
