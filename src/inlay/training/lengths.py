"""How long a text may be: what the model reads, less the positions that a method's virtual tokens take."""

from __future__ import annotations

from typing import Any

from torch import nn

from inlay.errors import InlayError
from inlay.tasks import kinds
from inlay.tasks.encode import DEFAULT_LENGTH, length_limit


def virtual_tokens(model: nn.Module) -> int:
    """How many positions the active prompt, prefix or P-tuning takes."""
    config = next(iter(getattr(model, "peft_config", {}).values()), None)
    return getattr(config, "num_virtual_tokens", None) or 0


def longest(model: nn.Module, task: Any, processor: Any, max_length: int | None) -> int | None:
    """The `max_length` to encode with: the one asked for (None: the task's choice) unless virtual tokens need room."""
    taken = virtual_tokens(model)
    if not taken or kinds.modality(task.kind) != "text":
        return max_length
    limit = length_limit(processor, model.config)
    if limit is None:
        return max_length
    if taken >= limit:
        raise InlayError(
            f"num_virtual_tokens={taken} takes every position of the model, which has {limit}: no text could be read. "
            "Give fewer."
        )
    return min(max_length or DEFAULT_LENGTH, limit - taken)
