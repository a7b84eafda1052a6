"""Training from a kept trunk: which rows to keep, whether that is right, and batches made of them.

The result is to be the same to the bit on a CPU as without. Two things were measured there (docs/trunk-cache.md):

- What a row comes to depends on the size of its batch, since kernels are chosen by it. So rows are computed in batches
  of the very size they are used in; the last, smaller batch of an epoch is computed anew.
- In some models it depends on the row's place in the batch too. Then nothing can be kept exactly: some batches of the
  first epoch are computed both ways, and if a bit differs nothing is kept.

On an accelerator no two runs agree to the bit, and the kept rows serve every batch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from inlay.records.spec import Spec
from inlay.tasks import kinds
from inlay.training.plan import Plan, pick_workers
from inlay.training.seeds import undisturbed
from inlay.training.trunk import TrunkCache, outcome, same, unmoved
from inlay.training.trunk_rows import NoRoom, Rows, size

KEY = "trunk"
CHECKED = 4  # batches that are computed both ways
ROUNDING = "in this model a row's rounding depends on its place in the batch, so nothing can be kept to the bit"

Collate = Callable[[Any], dict[str, Tensor]]


class NotKept(Exception):
    """The trunk's output is not kept; the message says why."""


class _Numbers(list[int]):
    """The numbers of a batch's rows, in place of the rows."""


class KeptSplit(Dataset[Any]):
    """A data set whose full batches are made of the trunk's kept output: no picture is read or unpacked for them.

    `collate` and `replay` belong to it: a batch has the rows (on an accelerator, their numbers) under `KEY`, and
    `replay` turns it into what the model is called with. `shuffled` says that the batches differ from epoch to epoch;
    otherwise every pass is in the same order, and the last, smaller batch can be kept as well.
    """

    in_memory = True

    def __init__(
        self, encoded: Any, collate: Collate, trunk: TrunkCache, batch: int, device: torch.device, *, shuffled: bool
    ) -> None:
        self.encoded = encoded
        self.trunk = trunk
        self.batch = min(batch, len(encoded))
        self.device = device
        self.exact = device.type == "cpu"
        self.shuffled = shuffled
        self.seconds = 0.0
        self.rows: Rows | None = None
        self._collate = collate
        self._others: dict[str, Tensor] = {}

    # ---- computing the rows

    def fill(self, folder: Path | None, stop: Callable[[], None]) -> None:
        """Compute all rows once, in batches as they will be used. Raises `NotKept` where there is no room."""
        begin = time.perf_counter()
        share = 1.0 if self.trunk.blocks is None else (self.trunk.blocks_skipped or 0) / self.trunk.blocks
        others: dict[str, list[Tensor]] = {}
        for start, batch in zip(range(0, len(self), self.batch), self._loaded(self._in_order()), strict=True):
            stop()
            rows = self.trunk.compute(batch)
            if self.rows is None:
                try:
                    self.rows = Rows(rows, len(self), self.device, folder, share)
                except NoRoom as error:
                    raise NotKept(str(error)) from None
            self.rows.put(start, rows)
            for name, value in batch.items():
                if name not in self.trunk.inputs:
                    others.setdefault(name, []).append(value.cpu())
        self._others = {name: torch.cat(parts)[: len(self)] for name, parts in others.items()}
        self.seconds = time.perf_counter() - begin

    def _in_order(self) -> list[list[int]]:
        """The split in its order; if it will be shuffled, the last batch is filled up from the beginning."""
        end = -(-len(self) // self.batch) * self.batch if self.shuffled else len(self)
        numbers = [number % len(self) for number in range(end)]
        return [numbers[start : start + self.batch] for start in range(0, end, self.batch)]

    def _loaded(self, numbers: Sequence[Sequence[int]]) -> Iterator[dict[str, Tensor]]:
        workers = pick_workers(self.device, self.encoded)
        loader = DataLoader(self.encoded, batch_sampler=numbers, collate_fn=self._collate, num_workers=workers)
        for batch in loader:
            yield {name: value.to(self.device) for name, value in batch.items()}

    def agrees(self, order: Sequence[int], stop: Callable[[], None]) -> bool:
        """Whether batches in this order come to the same bits from the kept rows as without them."""
        assert self.rows is not None
        numbers = [list(order[i : i + self.batch]) for i in range(0, len(order) - self.batch + 1, self.batch)]
        model = self.trunk.model
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        for position, (chosen, batch) in enumerate(
            zip(numbers[:CHECKED], self._loaded(numbers[:CHECKED]), strict=True)
        ):
            stop()
            if not torch.equal(self.rows.pick(torch.tensor(chosen)), self.trunk.compute(batch)):
                return False
            if position == 0:
                expected = outcome(model, batch, trained)
                with self.replay(self.collate(_Numbers(chosen))) as inputs:
                    found = outcome(model, inputs, trained)
                if not all(map(same, found, expected)):
                    return False
        return True

    # ---- using them

    def __len__(self) -> int:
        return len(self.encoded)

    def __getitem__(self, index: int) -> Any:
        return self.encoded[index]

    def __getitems__(self, indices: list[int]) -> list[Any]:
        if self.exact and self.shuffled and len(indices) != self.batch:
            return [self.encoded[index] for index in indices]
        return _Numbers(indices)

    def collate(self, items: Any) -> dict[str, Tensor]:
        """A batch of kept rows, or of items as they are."""
        if not isinstance(items, _Numbers):
            return self._collate(items)
        assert self.rows is not None
        numbers = torch.tensor(items)
        batch = {name: values[numbers] for name, values in self._others.items()}
        return {KEY: numbers if self.rows.where == "device" else self.rows.pick(numbers), **batch}

    @contextmanager
    def replay(self, batch: dict[str, Tensor]) -> Iterator[dict[str, Tensor]]:
        """What the model is called with for this batch, and the model without its trunk where rows were kept."""
        if KEY not in batch:
            yield batch
            return
        assert self.rows is not None
        others = {name: value for name, value in batch.items() if name != KEY}
        rows = self.rows.pick(batch[KEY]) if self.rows.where == "device" else batch[KEY]
        with self.trunk.replay(rows):
            yield {**self.trunk.placeholders(len(rows)), **others}

    def close(self) -> None:
        """Give the room back."""
        if self.rows is not None:
            self.rows.close()

    def portrait(self, seconds_per_epoch: float | None) -> dict[str, Any]:
        """For the record. The first epoch pays for the rows as well."""
        assert self.rows is not None
        first = None if seconds_per_epoch is None else self.seconds + seconds_per_epoch
        return {
            "cached": True,
            "blocks_skipped": self.trunk.blocks_skipped,
            "blocks": self.trunk.blocks,
            "bytes": self.rows.bytes,
            "where": self.rows.where,
            "seconds": self.seconds,
            "first_epoch_seconds": first,
        }

    def says(self) -> str:
        """One line for people."""
        assert self.rows is not None
        place = {"device": "on the accelerator", "memory": "in memory", "file": "in a file"}[self.rows.where]
        blocks = "" if self.trunk.blocks is None else f"{self.trunk.blocks_skipped} of {self.trunk.blocks} blocks, "
        return f"trunk cached: {blocks}{size(self.rows.bytes)} {place}, computed in {self.seconds:.1f} s"


def obstacle(spec: Spec, kind: str, encoded: Any, plan: Plan, done: int) -> str | None:
    """Why the trunk's output is not kept, where that can be said without looking at the model."""
    if spec.trunk_cache == "off":
        return "it was switched off"
    if kinds.modality(kind) != "image":
        return "texts are padded to the longest of their batch, which changes from epoch to epoch"
    if not getattr(encoded, "deterministic", True):
        return "the pictures are augmented, so that they differ from epoch to epoch"
    if plan.world > 1:
        return "several processes share the data"
    if plan.total_steps - done <= plan.steps_per_epoch:
        return "no example would be read a second time"
    return None


def keep(
    model: nn.Module,
    encoded: Any,
    collate: Collate,
    *,
    batch: int,
    order: Sequence[int],
    device: torch.device,
    folder: Path,
    stop: Callable[[], None],
    inexact: bool = False,
) -> KeptSplit:
    """Find the trunk and keep its output for a split, or raise `NotKept` with the reason.

    The model is in the modes, and under the autocast, of its training. `order` is that of the first epoch. `inexact`
    takes rows whose rounding depends on their place in the batch, too.
    """
    example = collate([encoded[index] for index in range(min(2, len(encoded)))])
    trunk = TrunkCache.find(model, {name: value.to(device) for name, value in example.items()})
    if trunk.reason is not None:
        raise NotKept(trunk.reason)
    kept = KeptSplit(encoded, collate, trunk, batch, device, shuffled=True)
    try:
        with unmoved(model), undisturbed():
            kept.fill(folder, stop)
            if kept.exact and not inexact and not kept.agrees(order, stop):
                raise NotKept(ROUNDING)
    except BaseException:
        kept.close()
        raise
    return kept
