"""Thousands of LoRAs beside one frozen model: on disk, in memory and on its device, any of them mixed in one pass.

    pool = inlay.AdapterPool(model, slots=64)
    pool.add("reviews", "loras/reviews")                      # its headers are read: the 2,000th costs as the 2nd
    pool(**batch, adapter_names=["reviews", "__base__", ...])  # and pool.generate(...)

Of each place in the model that some adapter adapts there is one tensor of factors, with a slot for each adapter that is
on the device. A pass brings the adapters that its rows name into slots, the least recently used out, and each layer
that they adapt adds to its output, for row i with the adapter in slot t,

    y[i] = f(x[i]; W_0) + x[i] A_t^T (s_t B_t^T),      s_t = alpha_t / r_t, or alpha_t / sqrt(r_t) (rsLoRA).

Slots have the largest rank that came, with zeros beyond an adapter's own, and a pass computes with the largest among
its rows'. A pool answers; to train many LoRAs at once there is `inlay.mix`.
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from inlay.backbones.new_parts import fingerprint
from inlay.backbones.pooled import agree
from inlay.errors import InlayError, unknown
from inlay.methods import low_rank
from inlay.methods.mixing import BASE
from inlay.methods.mixture.heads import apart, run_heads
from inlay.methods.mixture.hooks import check_rows, copies_of
from inlay.methods.mixture.lora_files import LoraFile, LoraTensors, look
from inlay.methods.mixture.rows import ROUTING, Routing, TaskRows
from inlay.methods.mixture.unmixable import check_model

NOBODY = 0  # the slot of rows without an adapter: always zero
GIB = 1 << 30


class PooledPlace:
    """A layer that adapters adapt: their factors by slot, A (slots, r, d) and s B^T (slots, r, m)."""

    def __init__(self, slots: int, width: tuple[int, int], like: Tensor) -> None:
        self.ranks: dict[int, int] = {}  # of the slots with factors here
        self.factors = like.new_zeros(slots, 0, width[0]), like.new_zeros(slots, 0, width[1])
        self.scales = torch.zeros(slots, device=like.device)  # 1 where a slot has factors, as the kernel asks

    def put(self, slot: int, a: Tensor, b: Tensor) -> None:
        """Copy an adapter's factors into a slot."""
        rank = a.shape[0]
        if rank > self.factors[0].shape[1]:  # both at once: another thread may be in a pass
            self.factors = tuple(_deeper(whole, 1 << (rank - 1).bit_length()) for whole in self.factors)
        for whole, own in zip(self.factors, (a, b), strict=True):
            whole[slot, rank:] = 0
            whole[slot, :rank].copy_(own, non_blocking=True)
        self.scales[slot] = 1
        self.ranks[slot] = rank

    def clear(self, slot: int) -> None:
        """Nothing is added for this slot any more."""
        if self.ranks.pop(slot, None) is not None:
            for whole in (*self.factors, self.scales):
                whole[slot] = 0

    def add(self, rows: PooledRows, x: Tensor, output: Tensor) -> Tensor | None:
        """`output` with the rows' own products; None where no row has one here."""
        here = [slot for slot in rows.at if slot in self.ranks]
        if not here:
            return None
        (every_a, every_b), rank = self.factors, max(self.ranks[slot] for slot in here)
        if not rows.mixed:
            a, b = every_a[here[0], :rank], every_b[here[0], :rank]
            flat = output.reshape(-1, output.shape[-1])
            return torch.addmm(flat, x.reshape(-1, x.shape[-1]).to(a.dtype) @ a.T, b).view(output.shape)
        slots, wide, narrow = rows.spread(rows.at, output.device), rows.by_row(output), rows.by_row(x)
        if rank == every_a.shape[1] and rows.unwatched(output) and low_rank.fits(wide, narrow, every_a, every_b):
            low_rank.add_by_slot(wide, narrow, every_a, every_b, self.scales, slots, (0, 0))
            return wide.view(output.shape)
        a, b = (every[:, :rank].index_select(0, slots) for every in (every_a, every_b))
        return torch.baddbmm(wide, torch.bmm(narrow.to(a.dtype), a.mT), b).view(output.shape)


class PooledRows(TaskRows):
    """The rows of a pass, and the slot of each of their adapters."""

    at: tuple[int, ...] = ()


class AdapterPool:
    """Many LoRAs beside one frozen model, any of them mixed in one pass.

    `slots` adapters at most are on the model's device, as many as a batch may name. Those that were read before stay in
    memory, up to `memory` GiB; the rest is on disk, or on the hub. Of both tiers the least recently used go out.
    Several threads may run passes; `prefetch` reads what will be needed beside them.
    """

    def __init__(self, model: nn.Module, *, slots: int = 64, memory: float = 4.0) -> None:
        from transformers import PreTrainedModel

        if not isinstance(model, PreTrainedModel):
            raise InlayError(
                f"A pool goes around a plain model of Transformers, not a {type(model).__name__}: give the base model, "
                "and add its adapters by their folders."
            )
        check_model(model)
        if ROUTING in model.__dict__:
            raise InlayError("The model mixes tasks of a PEFT model, or has a pool, already: load it a second time.")
        if slots < 1 or memory <= 0:
            raise InlayError(f"slots={slots!r} and memory={memory!r}: give one slot at least, and some memory (GiB).")
        self.model, self.slots, self.memory = model.requires_grad_(False).eval(), slots, memory * GIB
        self.files: dict[str, LoraFile] = {}
        self._bytes = 0
        self._fingerprints: dict[tuple[str, ...], str] = {}
        self._read: OrderedDict[str, LoraTensors] = OrderedDict()  # in memory, the last used last
        self._resident: OrderedDict[str, int] = OrderedDict()  # the slots of those on the device, the last used last
        self._free = list(range(slots, NOBODY, -1))
        self._pinned: Counter[str] = Counter()  # by passes that run
        self._places: dict[str, PooledPlace] = {}
        self._heads: dict[str, dict[int, dict[str, Tensor]]] = {}  # by module and slot
        self._lock = threading.Lock()
        self._modules = dict(model.named_modules())
        self.routing = Routing.of(model)

    # ---- what is there

    @property
    def names(self) -> list[str]:
        """Those that may be named, wherever they are."""
        return list(self.files)

    def __contains__(self, name: str) -> bool:
        return name in self.files

    def __len__(self) -> int:
        return len(self.files)

    def where(self, name: str) -> str:
        """`device`, `memory` or `disk`."""
        self._known(name)
        return "device" if name in self._resident else "memory" if name in self._read else "disk"

    def outputs_of(self, name: str) -> int | None:
        """How many outputs an adapter's own head has; None where it has none."""
        return self._known(name).outputs

    def add(self, name: str, source: str, **hub: Any) -> None:
        """Let rows name the LoRA in a folder, or of this name on the hub. Its files are looked at, and read when they
        are first needed; `hub` is `revision`, `token`, ..., as of `PeftModel.from_pretrained`."""
        if name == BASE or not name:
            raise InlayError(f"An adapter cannot be called {name!r}: that is the model without one.")
        if name in self.files:
            raise InlayError(f"There is an adapter called {name!r} already. Remove it first, or take another name.")
        file = look(str(source), self.model, **hub)
        with self._lock:
            self._check_base(file)
            if file.note:  # without one nobody knows what its head read
                agree(self.model, file.note.get("pooling"), file.source, self.files)
            self.files[name] = file

    def _check_base(self, file: LoraFile) -> None:
        """An error where its note says that it was trained on other weights. Those of half precision are others than
        in float32, and say nothing."""
        wanted, new = file.note.get("fingerprint"), tuple(file.note.get("newly_initialised") or ())
        if wanted is None or self.model.dtype != torch.float32:
            return
        if new not in self._fingerprints:
            self._fingerprints[new] = fingerprint(self.model, new)
        if self._fingerprints[new] != wanted:
            raise InlayError(
                f"{file.source} was trained on another base model, {file.note.get('base_model')!r} with the "
                f"fingerprint {wanted[:12]}; this one has {self._fingerprints[new][:12]}. Load the same weights."
            )

    def remove(self, name: str) -> None:
        """Forget an adapter; its files stay."""
        self._known(name)
        with self._lock:
            if self._pinned[name]:
                raise InlayError(f"{name!r} is in use by a pass that runs: remove it when that has ended.")
            del self.files[name]
            self._forget(name)
            if name in self._resident:
                self._evict(name)

    def prefetch(self, names: Sequence[str]) -> None:
        """Read adapters into memory that passes will name; from any thread, beside passes."""
        for name in dict.fromkeys(names):
            if name != BASE:
                self._tensors(name)

    # ---- passes

    def __call__(self, *args: Any, adapter_names: Sequence[str], **kwargs: Any) -> Any:
        """The model's output, each row with its own adapter (`__base__`: none)."""
        if kwargs.get("labels") is not None:
            raise InlayError("A pool answers and has no loss: leave out labels, or train with inlay.mix.")
        with self.passing(adapter_names) as rows, torch.no_grad():
            check_rows(self.model, args, kwargs, rows)
            return self.model(*args, **kwargs)

    def generate(self, *args: Any, adapter_names: Sequence[str], **kwargs: Any) -> Any:
        """What the model writes, each row with its own adapter: `generate` of Transformers."""
        with self.passing(adapter_names) as rows, torch.no_grad():
            if check_rows(self.model, args, kwargs, rows):
                rows.copies = copies_of(self.model, kwargs)
            return self.model.generate(*args, **kwargs)

    @contextmanager
    def passing(self, names: Sequence[str]) -> Iterator[TaskRows]:
        """Inside, the model's own calls have the rows of these adapters, which stay on the device as long."""
        rows = self.routing.with_places(PooledRows.of(names, self.names), names)
        wanted = [name for name in rows.tasks if name != BASE]
        if len(wanted) > self.slots:
            raise InlayError(
                f"A batch names {len(wanted)} adapters, and the pool has {self.slots} slots: give it more (slots=), or "
                "smaller batches."
            )
        try:
            rows.at = self._bring(wanted, rows.tasks)
            with self.routing.forward(rows):
                yield rows
        finally:
            with self._lock:
                self._pinned.subtract(name for name in wanted if self._pinned[name])

    # ---- tiers

    def _known(self, name: str) -> LoraFile:
        file = self.files.get(name)
        if file is None:
            raise unknown("adapter", name, self.names)
        return file

    def _tensors(self, name: str) -> LoraTensors:
        """An adapter's numbers, read where they are not in memory."""
        with self._lock:
            found = self._read.get(name)
            if found is not None:
                self._read.move_to_end(name)
                return found
        file = self._known(name)
        read = file.read(self.model.dtype)  # beside passes, and beside other reading
        read = read.pinned() if self.model.device.type == "cuda" else read
        with self._lock:
            if self.files.get(name) is file:  # not another of its name that came meanwhile
                self._forget(name)
                self._read[name] = read
                self._bytes += read.size
                while len(self._read) > 1 and self._bytes > self.memory:
                    self._forget(next(iter(self._read)))
        return read

    def _forget(self, name: str) -> None:
        if name in self._read:
            self._bytes -= self._read.pop(name).size

    def _bring(self, names: Sequence[str], of_rows: Sequence[str]) -> tuple[int, ...]:
        """The slots of the rows' adapters; those that are not on the device are brought there."""
        with self._lock:
            self._pinned.update(names)  # from here on none of them goes out
            absent = [name for name in names if name not in self._resident]
        read = {name: self._tensors(name) for name in absent}
        with self._lock:
            for name, tensors in read.items():
                if name not in self._resident:  # another thread may have been faster
                    self._put(name, tensors)
            for name in names:
                self._resident.move_to_end(name)
            return tuple(NOBODY if name == BASE else self._resident[name] for name in of_rows)

    def _put(self, name: str, tensors: LoraTensors) -> None:
        if not self._free:
            oldest = next((each for each in self._resident if not self._pinned[each]), None)
            if oldest is None:
                raise InlayError(f"Passes that run beside one another use all {self.slots} slots: give the pool more.")
            self._evict(oldest)
        slot = self._free[-1]
        for place, (a, b) in tensors.pairs.items():
            self._place(place, (a.shape[1], b.shape[1])).put(slot, a, b)
        for place in self._places.keys() - tensors.pairs.keys():
            self._places[place].clear(slot)
        for module, parameters in tensors.heads.items():
            own = {key: tensor.to(self.model.device, non_blocking=True) for key, tensor in parameters.items()}
            self._head(module)[slot] = own
        self._resident[name] = self._free.pop()  # taken when all of it is there

    def _evict(self, name: str) -> None:
        slot = self._resident.pop(name)
        for head in self._heads.values():
            head.pop(slot, None)
        self._free.append(slot)  # what is left there is never named, and goes with the next that takes the slot

    # ---- the model

    def _place(self, name: str, width: tuple[int, int]) -> PooledPlace:
        place = self._places.get(name)
        if place is None:
            module = self._modules[name]
            weight = next(module.parameters())
            # Some models keep a few layers in float32; a quantised weight is of no type to compute with.
            dtype = weight.dtype if weight.is_floating_point() and weight.itemsize > 1 else self.model.dtype
            like = torch.empty(0, dtype=dtype, device=weight.device)
            place = self._places[name] = PooledPlace(1 + self.slots, width, like)
            module.register_forward_hook(partial(self._at_place, place))
        return place

    def _head(self, name: str) -> dict[int, dict[str, Tensor]]:
        if name not in self._heads:
            self._heads[name] = {}
            self._modules[name].register_forward_hook(partial(self._at_head, self._heads[name]), with_kwargs=True)
        return self._heads[name]

    def _at_place(self, place: PooledPlace, module: nn.Module, args: Any, output: Tensor) -> Tensor | None:
        rows = self.routing.rows
        return place.add(rows, args[0], output) if isinstance(rows, PooledRows) else None

    def _at_head(
        self, own: Mapping[int, Mapping[str, Tensor]], module: nn.Module, args: Any, kwargs: Any, output: Tensor
    ) -> Tensor | None:
        rows = self.routing.rows
        if not isinstance(rows, PooledRows) or not any(slot in own for slot in rows.at):
            return None
        base = dict(module.named_parameters())
        each = [own.get(slot, base) for slot in rows.at]
        if not rows.mixed:
            return torch.func.functional_call(apart(module), dict(each[0]), args, kwargs)
        found = run_heads(module, lambda name: [parameters[name] for parameters in each], rows, args, kwargs)
        # Rows without a head of their own have the model's, with what their adapters add inside of it.
        usual = rows.without([task for task, slot in zip(rows.tasks, rows.at, strict=True) if slot in own])
        if usual:
            found[usual, ..., : output.shape[-1]] = output[usual].to(found.dtype)
        return found


def _deeper(whole: Tensor, rank: int) -> Tensor:
    """With room for a larger rank."""
    found = whole.new_zeros(whole.shape[0], rank, whole.shape[2])
    found[:, : whole.shape[1]] = whole
    return found
