"""How batches are made and run: where (device, precision, this process's share), how long texts are, in which order.

How long a text may be is what the model reads, less the positions that a method's virtual tokens take. Texts of about
the same length are run together, so that little is padded.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as distributed
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from inlay.errors import InlayError
from inlay.methods.plain import base_of
from inlay.methods.protocol import hooks_of
from inlay.records.spec import Spec
from inlay.tasks import kinds
from inlay.tasks.encode import DEFAULT_LENGTH, length_limit
from inlay.tasks.splits import stream
from inlay.tasks.windows import EncodedWindows
from inlay.training.plan import pick_device, pick_dtype, pick_workers
from inlay.training.sharding import is_divided
from inlay.training.shares import Filler, keeps_step

Stop = Callable[[], None]
TOGETHER = 50  # batches whose rows are sorted by length together: the more, the less is padded and the less is random
OUTLIER = 4  # times as wide as the median batch is worth a word


@dataclass(frozen=True)
class Placement:
    """Where and how batches are run."""

    device: torch.device
    dtype: torch.dtype | None
    batch_size: int

    @classmethod
    def of(cls, spec: Spec) -> Placement:
        """The place a spec asks for. The batch is the one that fitted into memory in training.

        A run may be trained on one machine and used on another: a precision that this one lacks becomes float32.
        """
        device = pick_device()
        _, batch_size = spec.amount()
        rows = max(1, batch_size // spec.gradient_accumulation)
        return cls(device, pick_dtype(spec.precision, device, strict=False), rows)

    def autocast(self) -> AbstractContextManager[Any]:
        """Mixed precision, where the spec asks for it."""
        return nullcontext() if self.dtype is None else torch.autocast(self.device.type, self.dtype)


def order_by_length(encoded: Sized) -> list[int]:
    """A split's rows, the longest first: a batch of them is padded to little more than each row's own length. What has
    no length, as images, stays in its order.

    The longest come first because they need the most memory: where it does not suffice, that is known at once.
    """
    lengths = getattr(encoded, "lengths", None)
    return list(range(len(encoded))) if lengths is None else np.argsort(-lengths, kind="stable").tolist()


def batches(
    model: nn.Module,
    encoded: Sized,
    collate: Callable[[Any], Any],
    place: Placement,
    stop: Stop | None,
    order: Sequence[int] | None = None,
) -> Iterator[dict[str, Tensor]]:
    """This process's share of a split, batch by batch, on the device, with the model in eval mode.

    `order` has the numbers of all rows; without it they come as they are. Of either a process takes every n-th. Where
    the model lies in parts on several processes and another one has a batch more, the last is a `Filler`: run it, and
    leave out what comes of it.
    """
    rank, world = rank_and_world()
    mine = range(rank, len(encoded), world) if order is None else order[rank::world]
    model.eval()
    workers = pick_workers(place.device, encoded)
    data: Any = encoded
    for batch in DataLoader(data, place.batch_size, sampler=mine, collate_fn=collate, num_workers=workers):
        if stop is not None:
            stop()
        yield {name: value.to(place.device) for name, value in batch.items()}
    if world > 1 and keeps_step(encoded, place.batch_size, rank, world) and is_divided(model):
        first = collate([data[0 if order is None else order[0]]])
        yield Filler({name: value.to(place.device) for name, value in first.items()})


def is_main() -> bool:
    """Whether this process is the one that writes and speaks for all."""
    return int(os.environ.get("RANK", "0")) == 0


def rank_and_world() -> tuple[int, int]:
    """This process's number, and how many there are."""
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    return 0, 1


def gather(mine: Any) -> list[Any]:
    """What every process found, in the order of the processes."""
    _, world = rank_and_world()
    if world == 1:
        return [mine]
    found: list[Any] = [None] * world
    distributed.all_gather_object(found, mine)
    return found


def mean_of_all(mine: Mapping[str, Tensor | float]) -> dict[str, float]:
    """The mean over the processes of each value that they have under one name."""
    found = gather({name: float(value) for name, value in mine.items()})
    return {name: sum(each[name] for each in found) / len(found) for name in mine}


def count_virtual_tokens(model: nn.Module) -> int:
    """How many positions the active prompt, prefix or P-tuning takes."""
    config = next(iter(getattr(model, "peft_config", {}).values()), None)
    return hooks_of(config).num_virtual_tokens


def shift_labels(model: nn.Module, labels: Tensor) -> Tensor:
    """What the decoder of a model with two parts reads to write these labels, as the model itself shifts them."""
    base = base_of(model)
    shift = getattr(base, "prepare_decoder_input_ids_from_labels", None)
    if shift is None:
        raise InlayError(
            f"{type(base).__name__} does not say what its decoder reads: several tasks cannot be trained together on "
            "it. Train each in a run of its own."
        )
    return shift(labels=labels)


def settle_length(model: nn.Module, task: Any, processor: Any, max_length: int | None) -> int | None:
    """The `max_length` to encode with: the one asked for (None: the task's choice) unless virtual tokens need room."""
    taken = count_virtual_tokens(model)
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


def group_by_length(order: Sequence[int], lengths: np.ndarray, batch: int, generator: torch.Generator) -> list[int]:
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


class SplitPart(Dataset[dict[str, Any]]):
    """Some rows of an encoded split, with what their metrics need of it."""

    def __init__(self, whole: Any, rows: np.ndarray) -> None:
        self._whole, self._rows = whole, rows.tolist()
        self.in_memory = getattr(whole, "in_memory", True)
        if (lengths := getattr(whole, "lengths", None)) is not None:
            self.lengths = lengths[rows]
        self.words, self.sizes, self.tags = (self._some(name) for name in ("words", "sizes", "tags"))

    def _some(self, name: str) -> list[Any] | None:
        values = getattr(self._whole, name, None)
        return None if values is None else [values[row] for row in self._rows]

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self._whole[self._rows[index]]


def draw_part(whole: Any, most: int | None, seed: int) -> Any:
    """At most so many rows of an encoded split, drawn by the seed, in their order; all of them are the split itself."""
    count = count_rows(whole)
    if most is None or count <= most:
        return whole
    drawn = np.sort(stream(seed, "evaluations").permutation(count)[:most])
    return whole.take(drawn.tolist()) if isinstance(whole, EncodedWindows) else SplitPart(whole, drawn)


def count_rows(encoded: Any) -> int:
    """How many rows an encoded split has: not how many windows they are read in."""
    return encoded.rows if isinstance(encoded, EncodedWindows) else len(encoded)


def describe_bound(task: str, count: int, whole: int) -> str:
    """What to say of evaluations that score a part of a validation split."""
    return (
        f"{f'{task}: ' if task else ''}evaluations during training score {count:,} of {whole:,} validation rows, drawn "
        "once by the seed; at the end validation and test are scored whole"
    )


def describe_outlier(lengths: np.ndarray, order: Sequence[int], batch: int) -> str | None:
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
