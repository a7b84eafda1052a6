"""Where and how batches are run without being trained on: device, precision, batch size, this process's share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sized
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as distributed
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset

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


def batches(
    model: nn.Module, encoded: Sized, collate: Callable[[Any], Any], place: Place, stop: Stop | None
) -> Iterator[dict[str, Tensor]]:
    """This process's share of a split, batch by batch, on the device, with the model in eval mode."""
    rank, world = rank_and_world()
    mine: Any = encoded if world == 1 else Subset(encoded, range(rank, len(encoded), world))
    model.eval()
    workers = pick_workers(place.device, encoded)
    for batch in DataLoader(mine, batch_size=place.batch_size, collate_fn=collate, num_workers=workers):
        if stop is not None:
            stop()
        yield {name: value.to(place.device) for name, value in batch.items()}


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
