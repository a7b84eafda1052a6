"""Batches that mix the rows of several tasks: the rows, their order, and a batch in parts of about the same length.

Tasks that are trained together bring texts of very different lengths, ten tokens beside hundreds. The loss of an update
is a sum over its rows, so that it may be computed for some of them at a time: the gradient is the same, and short texts
are not filled up to the length of the longest.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, Sampler

NAMES = "adapter_names"
MASK = "attention_mask"
ALONG = ("input_ids", MASK, "token_type_ids")
# What one more pass costs, in tokens that could be run instead: on an accelerator passes are short of work.
PASS = {"cpu": 128, "cuda": 16384}


class JointRows(Dataset[dict[str, Any]]):
    """The training rows of several tasks, one after another; each says whose it is."""

    def __init__(self, parts: Mapping[str, Any]) -> None:
        self.parts = dict(parts)
        self.sizes = [len(part) for part in self.parts.values()]
        self.in_memory = all(getattr(part, "in_memory", True) for part in self.parts.values())
        self._epoch = 0
        self._places = [(task, i) for task, part in self.parts.items() for i in range(len(part))]

    @property
    def epoch(self) -> int:
        """The number of the epoch: images that are augmented are so in each one anew."""
        return self._epoch

    @epoch.setter
    def epoch(self, number: int) -> None:
        self._epoch = number
        for part in self.parts.values():
            if hasattr(part, "epoch"):
                part.epoch = number

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, index: int) -> dict[str, Any]:
        task, place = self._places[index]
        return {NAMES: task, **self.parts[task][place]}


class JointCollator:
    """A batch of rows of several tasks, with the task of each."""

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self.collate = collate

    def __call__(self, items: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        rows = [{key: value for key, value in item.items() if key != NAMES} for item in items]
        if any(isinstance(row.get("labels"), float) for row in rows):  # values among classes
            rows = [row | {"labels": float(row["labels"])} for row in rows]
        common = set.intersection(*(set(row) for row in rows))
        batch = self.collate([{key: row[key] for key in rows[0] if key in common} for row in rows])
        return batch | {NAMES: [item[NAMES] for item in items]}


class JointSampler(Sampler[int]):
    """The order of an epoch, as many rows as there are in all; it follows from the seed and the epoch alone.

    Each task gets its share of them, p_i ~ n_i^(1 / temperature): 1 is proportional, where every row comes once, and
    infinity uniform. A task that gets more than it has begins anew, in another order.
    """

    def __init__(self, sizes: Sequence[int], seed: int, temperature: float = 1.0) -> None:
        self.sizes, self.seed, self.epoch = list(sizes), seed, 0
        self.counts = share_rows(sizes, temperature)

    def __len__(self) -> int:
        return sum(self.counts)

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + self.epoch)
        rows: list[int] = []
        for start, size, count in zip(
            itertools.accumulate([0, *self.sizes[:-1]]), self.sizes, self.counts, strict=True
        ):
            turns = [torch.randperm(size, generator=generator) for _ in range(math.ceil(count / size))]
            rows += (torch.cat(turns)[:count] + start).tolist() if turns else []
        return (rows[i] for i in torch.randperm(len(rows), generator=generator).tolist())


def share_rows(sizes: Sequence[int], temperature: float) -> list[int]:
    """How many rows of an epoch each task gets; together as many as there are rows, and at least one each."""
    power = [(size / max(sizes)) ** (1 / temperature) for size in sizes]  # of a low temperature, too large otherwise
    exact = [sum(sizes) * each / sum(power) for each in power]
    counts = [max(1, math.floor(each)) for each in exact]
    left = sum(sizes) - sum(counts)
    for i in sorted(range(len(sizes)), key=lambda i: counts[i] - exact[i])[: max(0, left)]:
        counts[i] += 1
    return counts


def divide_rows(lengths: Sequence[int], cost: int) -> list[list[int]]:
    """The rows in groups of about the same length: no group would save more than `cost` tokens by being cut in two."""
    order = sorted(range(len(lengths)), key=lambda row: (-lengths[row], row))
    sizes = torch.tensor([lengths[row] for row in order])

    def cut(begin: int, end: int) -> Iterator[list[int]]:
        # Cut before i, the rows from i on lose what lies between the longest of all and the longest of themselves.
        saved = (sizes[begin] - sizes[begin:end]) * torch.arange(end - begin, 0, -1)
        at = int(saved.argmax())
        if saved[at] > cost:
            yield from cut(begin, begin + at)
            yield from cut(begin + at, end)
        else:
            yield sorted(order[begin:end])

    return list(cut(0, len(order)))


def split_batch(
    batch: Mapping[str, Tensor], device: torch.device, along: Sequence[str] = ALONG
) -> Iterator[tuple[list[int], dict[str, Tensor]]]:
    """A padded batch in parts, each as it would have been padded by itself: the rows' numbers, and their tensors.

    `along` are the tensors that have an entry for each token.
    """
    mask = batch.get(MASK)
    count = len(next(iter(batch.values())))
    if mask is None:
        yield list(range(count)), dict(batch)
        return
    mask = mask.cpu()
    for rows in divide_rows(mask.sum(dim=1).tolist(), PASS.get(device.type, PASS["cuda"])):
        own = {name: tensor[rows] if len(rows) < count else tensor for name, tensor in batch.items()}
        used = mask[rows].any(dim=0).nonzero()
        begin, end = (int(used[0]), int(used[-1]) + 1) if len(used) else (0, mask.shape[1])
        yield rows, {name: tensor[:, begin:end] if name in along else tensor for name, tensor in own.items()}
