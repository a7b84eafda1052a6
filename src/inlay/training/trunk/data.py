"""Training from a kept trunk: which rows to keep, whether that is right, and batches made of them.

The result is to be the same to the bit on a CPU as without. Two things were measured there (docs/trunk-cache.md):

- What a row comes to depends on the size of its batch, since kernels are chosen by it. So rows are computed in batches
  of the very size they are used in; kept rows serve the last, smaller batch of an epoch only where that of the first
  epoch came to the same bits, and otherwise it is computed anew.
- In some models it depends on the row's place in the batch too. Then nothing can be kept exactly.

And in some models, such as those with batch norms that have no running statistics, a row depends on the rest of its
batch: not in its rounding, but in what it is. Then nothing can be kept at all. So before training some batches are
computed both ways (`KeptSplit.check`), always, and made to be unlike those in which the rows were computed. If a bit
differs nothing is kept; on an accelerator, where no two runs agree to the bit and the kept rows serve every batch, and
where the user asks for it, rounding is let pass, and nothing more.

The checks take time as well. What the kept rows would save is estimated first, from one batch: where the checks would
take more than a tenth of it, nothing is kept.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, Dataset

from inlay.training.batches import Placement
from inlay.training.plan import pick_workers
from inlay.training.seeds import undisturbed
from inlay.training.trunk.cut import BOUND, TrunkCache, same, unmoved
from inlay.training.trunk.rows import NoRoom, Rows, size

KEY = "trunk"
CHECKED, FEWEST_CHECKED = 4, 2  # batches that are computed both ways; where there is little to save, the fewest
CHECK_SHARE = 0.1  # of what the kept rows save may go into the search for the trunk and the checks
FEWEST_READ = 256  # rows read again: fewer save less than the search for the trunk takes
ROUNDING = "in this model a row's rounding depends on its place in the batch, so nothing can be kept to the bit"
COMPANY = "in this model a row depends on the rest of its batch, so that it is another one in every epoch"
# What passes for rounding, as a part of the size of a row. Computed in bfloat16, the last features of ViT, ResNet and
# ConvNeXt, 16 to 33 blocks deep, were off by 0.005 to 0.011. Accelerators may multiply float32 with 10 bits, an eighth
# of that error.
ROUNDED, ROUNDED_ON_ACCELERATORS, ROUNDED_IN_16_BITS = 1e-3, 5e-3, 3e-2

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
        self.serves_last = not (self.exact and shuffled)  # whether kept rows make the last, smaller batch
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

    def estimate(self, passes: float) -> tuple[float, Callable[[int], float]]:
        """The seconds that kept rows save in so many passes over the split, and those that a check of so many batches
        takes: from one batch, and from what the trunk's share of a small one is."""
        chosen = self._unusual_company()
        loading, batch = self._timed(lambda: next(iter(self._loaded([chosen]))))
        example = {name: value[:2] for name, value in batch.items()}
        each = min(self._timed(lambda: self.trunk.compute(batch))[0] for _ in range(2))
        with torch.no_grad():
            whole = self._timed(lambda: self.trunk.model(**example))[0]
        share = self._timed(lambda: self.trunk.compute(example))[0] / whole
        saved = (each + loading) * (len(self) / self.batch) * passes
        return saved, lambda batches: batches * (each + loading) + 2 * each / min(1.0, share)

    def _timed(self, run: Callable[[], Any]) -> tuple[float, Any]:
        def wait() -> None:
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)

        wait()
        began = time.perf_counter()
        result = run()
        wait()
        return time.perf_counter() - began, result

    def check(
        self, order: Sequence[int], stop: Callable[[], None], *, to_the_bit: bool, batches: int = CHECKED
    ) -> None:
        """Raise `NotKept` where a row comes to something else in another batch than the one it was computed in.

        Compared are a batch of unusual company, `batches` - 1 of this order, which is that of an epoch, and its last,
        smaller batch, which kept rows serve only where they are the same. In the first of them the whole model is
        compared as well. What is not asked for `to_the_bit` may differ by rounding.
        """
        tolerance = self._tolerance()
        last = len(order) - len(order) % self.batch
        numbers = [list(order[start : start + self.batch]) for start in range(0, last, self.batch)]
        numbers = [self._unusual_company(), *numbers[: batches - 1]]
        if last < len(order):
            numbers.append(list(order[last:]))
        for position, (chosen, batch) in enumerate(zip(numbers, self._loaded(numbers), strict=True)):
            stop()
            kept, expected = self._picked(chosen), self.trunk.compute(batch)
            if self.exact and len(chosen) < self.batch:
                self.serves_last = kept.stride() == expected.stride() and torch.equal(kept, expected)
                continue
            if not close(kept, expected, tolerance):
                raise NotKept(COMPANY)
            if to_the_bit and not torch.equal(kept, expected):
                raise NotKept(ROUNDING)
            if position == 0 and not self._replays(chosen, batch, to_the_bit):
                raise NotKept(BOUND)

    def check_first(self, stop: Callable[[], None]) -> None:
        """Raise `NotKept` unless the first batch, in the modes the model is in, comes to the same from its rows."""
        numbers = self._in_order()[:1]
        for chosen, batch in zip(numbers, self._loaded(numbers), strict=True):
            stop()
            if not self._replays(chosen, batch, self.exact):
                raise NotKept(BOUND)

    def _unusual_company(self) -> list[int]:
        """A batch of rows from all over the split, the last first, whose second half is one row again and again: what
        the rows of a batch have in common, a mean for example, is far from what it was when they were computed."""
        different = (self.batch + 1) // 2
        numbers = [len(self) - 1 - position * len(self) // different for position in range(different)]
        return numbers + numbers[-1:] * (self.batch - different)

    def _picked(self, chosen: Sequence[int]) -> Tensor:
        assert self.rows is not None
        return self.rows.pick(torch.tensor(chosen, device=self.rows.kept.device)).to(self.device)

    def _tolerance(self) -> float:
        short = any(parameter.dtype.itemsize < 4 for parameter in self.trunk.model.parameters())
        if short or torch.is_autocast_enabled(self.device.type):
            return ROUNDED_IN_16_BITS
        return ROUNDED if self.exact else ROUNDED_ON_ACCELERATORS

    def _replays(self, chosen: Sequence[int], batch: dict[str, Tensor], to_the_bit: bool) -> bool:
        """Whether the model says the same of this batch from the kept rows; to the bit, with the loss.

        Gradients were compared when the cut was found: from the same values at the cut, they are the same.
        """
        run = partial(_said, self.trunk.model, of_rows=not to_the_bit)
        alike = same if to_the_bit else partial(close, tolerance=self._tolerance())
        expected = run(batch)
        # What a module remembers of its last pass must not be what the replay needs.
        self.trunk.compute({name: torch.cat([value, value[:1]]) for name, value in batch.items()})
        kept = {name: value.to(self.device) for name, value in self.collate(_Numbers(chosen)).items()}
        with self.replay(kept) as inputs:
            try:
                found = run(inputs)
            except Exception:  # placeholders do not suit what the model does in this mode
                return False
        return len(found) == len(expected) and all(map(alike, found, expected))

    # ---- using them

    def __len__(self) -> int:
        return len(self.encoded)

    def __getitem__(self, index: int) -> Any:
        return self.encoded[index]

    def __getitems__(self, indices: list[int]) -> list[Any]:
        if len(indices) != self.batch and not self.serves_last:
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


def close(found: Tensor, expected: Tensor, tolerance: float) -> bool:
    """Whether no row differs by more than this part of the size of a usual row (their root mean square)."""
    if found.shape != expected.shape:
        return False
    found, expected = (tensor.float().reshape(len(tensor), -1) for tensor in (found, expected))
    usual = expected.norm(dim=1).square().mean().sqrt()
    return bool(((found - expected).norm(dim=1) <= tolerance * usual).all())


def _said(model: nn.Module, batch: dict[str, Tensor], of_rows: bool) -> list[Tensor]:
    """What the model says, or only what it says `of_rows`, always with the same random numbers."""
    with undisturbed(), torch.no_grad():
        leaves = tree_leaves(model(**batch))
    found = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    return [leaf for leaf in found if leaf.is_floating_point() and leaf.ndim > 0] if of_rows else found


def keep(
    model: nn.Module,
    encoded: Any,
    collate: Collate,
    *,
    place: Placement,
    order: Sequence[int],
    folder: Path,
    stop: Callable[[], None],
    passes: float | None,
) -> KeptSplit:
    """Find the trunk and keep its output for a split, or raise `NotKept` with the reason.

    The model is in the modes, and under the autocast, of its training. `order` is that of the first epoch, `passes` how
    often the split is read after its rows were computed. None: the rows are wanted, whatever they save, and also where
    their rounding depends on the place in the batch, but not where they depend on the rest of it.
    """
    if passes is not None and len(encoded) * passes < FEWEST_READ:
        raise NotKept(f"{len(encoded) * passes:.0f} examples would be read again: too few to pay for the checks")
    began = time.perf_counter()
    example = collate([encoded[index] for index in range(min(2, len(encoded)))])
    trunk = TrunkCache.find(model, {name: value.to(place.device) for name, value in example.items()})
    if trunk.reason is not None:
        raise NotKept(trunk.reason)
    kept = KeptSplit(encoded, collate, trunk, place.batch_size, place.device, shuffled=True)
    try:
        with unmoved(model), undisturbed():
            batches = CHECKED if passes is None else _affordable(kept, passes, began)
            kept.fill(folder, stop)
            kept.check(order, stop, to_the_bit=kept.exact and passes is not None, batches=batches)
    except BaseException:
        kept.close()
        raise
    return kept


def _affordable(kept: KeptSplit, passes: float, began: float) -> int:
    """How many batches to check, by what the rows save; raises `NotKept` where even the fewest cost too much of it."""
    saved, checking = kept.estimate(passes)
    spent = time.perf_counter() - began
    for batches in (CHECKED, FEWEST_CHECKED):
        if spent + checking(batches) <= CHECK_SHARE * saved:
            return batches
    raise NotKept(
        f"it would save about {saved:.2g} s, and the checks that it changes nothing would take "
        f"{spent + checking(FEWEST_CHECKED):.2g} s"
    )
