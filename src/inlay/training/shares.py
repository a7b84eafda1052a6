"""How several processes share the batches of an epoch, so that an update sees the same rows as in one process."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence, Sized
from typing import Any

from torch.utils.data import Dataset, Sampler


class Filler(dict[str, Any]):
    """A batch that counts for nothing. A process without a row of its own runs it to keep in step with the others."""


class ProcessShare(Sampler[list[int]]):
    """One process's share of the batches of an epoch.

    A round is one micro-batch of every process, the rows taken in the sampler's order. The rows of the last one are
    divided as evenly as can be. None comes twice: a process that gets none is given the round's first as a filler,
    which is written as the number `~row`.
    """

    def __init__(self, sampler: Any, micro_batch: int, rank: int, world: int) -> None:
        self.sampler, self.micro_batch, self.rank, self.world = sampler, micro_batch, rank, world
        self.drop_last, self.batch_size = False, micro_batch

    def __len__(self) -> int:
        return math.ceil(len(self.sampler) / (self.micro_batch * self.world))

    def __iter__(self) -> Iterator[list[int]]:
        order, round_ = list(self.sampler), self.micro_batch * self.world
        for start in range(0, len(order), round_):
            rows = order[start : start + round_]
            yield divide(rows, self.world)[self.rank] or [~rows[0]]


def divide(rows: Sequence[int], parts: int) -> list[list[int]]:
    """Rows in so many runs of about equal length, the longer ones first."""
    size, longer = divmod(len(rows), parts)
    starts = [part * size + min(part, longer) for part in range(parts + 1)]
    return [list(rows[begin:end]) for begin, end in itertools.pairwise(starts)]


class WithFillers(Dataset[Any]):
    """Rows, of which `~number` is asked for as a filler."""

    def __init__(self, rows: Any) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        return Filler(self.rows[~index]) if index < 0 else self.rows[index]


class FillerCollator:
    """Makes a filler of fillers."""

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self.collate = collate

    def __call__(self, items: Sequence[Any]) -> Any:
        if isinstance(items[0], Filler):
            return Filler(self.collate([dict(item) for item in items]))
        return self.collate(items)


def keeps_step(rows: Sized, batch_size: int, rank: int, world: int) -> bool:
    """Whether this process has one batch fewer than another, of rows that are dealt out one by one."""
    most = math.ceil(math.ceil(len(rows) / world) / batch_size)
    return math.ceil(len(range(rank, len(rows), world)) / batch_size) < most
