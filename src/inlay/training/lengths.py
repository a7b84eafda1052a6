"""How long texts are: what a model reads, less the positions that a method's virtual tokens take; and what a long text
does to the batch that it is in."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from inlay.errors import InlayError
from inlay.methods.protocol import hooks_of
from inlay.tasks import kinds
from inlay.tasks.encode import DEFAULT_LENGTH, length_limit

TOGETHER = 50  # batches whose rows are sorted by length together: the more, the less is padded and the less is random
OUTLIER = 4  # times as wide as the median batch is worth a word


def virtual_tokens(model: nn.Module) -> int:
    """How many positions the active prompt, prefix or P-tuning takes."""
    config = next(iter(getattr(model, "peft_config", {}).values()), None)
    return hooks_of(config).num_virtual_tokens


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


def grouped(order: Sequence[int], lengths: np.ndarray, batch: int, generator: torch.Generator) -> list[int]:
    """An epoch's order in which the rows of a batch are about equally long.

    Of a random order, rows are sorted by length within stretches of 50 batches, and the batches then come in a random
    order. Rows that fill no batch stay at the end.
    """
    whole = len(order) - len(order) % batch
    found: list[Sequence[int]] = []
    for stretch in _batched(order[:whole], TOGETHER * batch):
        by_length = sorted(stretch, key=lambda row: -int(lengths[row]))
        found += _batched(by_length, batch)
    shuffled = torch.randperm(len(found), generator=generator).tolist()
    return [row for number in shuffled for row in found[number]] + list(order[whole:])


def outlier(lengths: np.ndarray, order: Sequence[int], batch: int) -> str | None:
    """What to say where one text makes its batch many times as large as the others; `batch` rows are run together."""
    widths = [max(lengths[row] for row in part) for part in _batched(order, batch)]
    usual, widest = float(np.median(widths)), int(max(widths))
    if widest < OUTLIER * usual:
        return None
    cut = min(widest - 1, 8 * math.ceil(max(usual, float(np.quantile(lengths, 0.99))) / 8))
    return (
        f"the longest training text has {widest} tokens, and half of the batches are at most {usual:.0f} wide: its "
        f"batch takes about {widest / usual:.0f} times the memory of those. --max-length {cut} would cut "
        f"{int((lengths > cut).sum()):,} of {len(lengths):,} texts; --gradient-accumulation computes a batch in parts"
    )


def _batched(rows: Sequence[int], size: int) -> Iterator[Sequence[int]]:
    return (rows[start : start + size] for start in range(0, len(rows), size))
