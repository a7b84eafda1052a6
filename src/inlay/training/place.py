"""Where and how batches are run without being trained on: device, precision, batch size, this process's share."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence, Sized
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as distributed
from torch import Tensor, nn
from torch.utils.data import DataLoader

from inlay.records.spec import Spec
from inlay.training.plan import pick_device, pick_dtype, pick_workers

Stop = Callable[[], None]


@dataclass(frozen=True)
class Place:
    """Where and how batches are run."""

    device: torch.device
    dtype: torch.dtype | None
    batch_size: int

    @classmethod
    def of(cls, spec: Spec) -> Place:
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


def by_length(encoded: Sized) -> list[int]:
    """A split's rows, the longest first: a batch of them is padded to little more than each row's own length. What has
    no length, as pictures, stays in its order.

    The longest come first because they need the most memory: where it does not suffice, that is known at once.
    """
    lengths = getattr(encoded, "lengths", None)
    return list(range(len(encoded))) if lengths is None else np.argsort(-lengths, kind="stable").tolist()


def batches(
    model: nn.Module,
    encoded: Sized,
    collate: Callable[[Any], Any],
    place: Place,
    stop: Stop | None,
    order: Sequence[int] | None = None,
) -> Iterator[dict[str, Tensor]]:
    """This process's share of a split, batch by batch, on the device, with the model in eval mode.

    `order` has the numbers of all rows; without it they come as they are. Of either a process takes every n-th.
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
