"""Where the `B`s of many tasks lie while tasks are mixed: side by side, so that a pass fetches its rows' own at once.

Fetched layer by layer, the `B`s of a batch take more kernels than what is computed with them. So the parameters of all
tasks at several layers are pieces of one tensor, a bank. A kernel that is told each row's slot reads them there
(`slots`); for torch's own products they are fetched (`fetch`). A parameter is still a parameter: whatever writes to it,
an optimiser, loading, or someone who goes by `.data`, writes to the bank, and there is no copy that could be out of
date.
What gives a parameter other memory (`.to()`, say) takes it out; the next pass sees that and puts it back.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

from inlay.errors import InlayError

if TYPE_CHECKING:
    from inlay.methods.multi_lora.layer import MultiLoraLayer
    from inlay.methods.multi_lora.products import Factors
    from inlay.methods.multi_lora.rows import TaskRows

LAYERS = 16  # of a bank: what is fetched at once takes memory for each row
WEIGHT, MEMORY = itemgetter("weight"), Tensor.data_ptr
TASKS_KNOWN = 64  # lists of tasks of which is kept what they are known by
NOBODY = 0  # the slot of rows without a task: always zero
LOCK = threading.Lock()  # for passes of several threads, which share where the `B`s lie


class TaskSlot(NamedTuple):
    """Where a task lies in a bank, and what it is known by.

    A parameter, or its memory, may be changed by anybody at any layer, and each is looked at in every pass. The module
    that holds it comes and goes with its task, at all layers at once: of these one is looked at.
    """

    slot: int
    pieces: dict[str, Any]  # of one layer, by task
    piece: nn.Module  # that of this task
    numbers: list[int]  # of the layers that it adapts
    holders: list[dict[str, Any]]  # of the parameters there
    pointers: list[int]
    scales: tuple[float, ...]

    @property
    def weights(self) -> list[Tensor]:
        """The parameters, or what stands in for one while a function is called."""
        return [*map(WEIGHT, self.holders)]


class KnownTasks:
    """Tasks that come together in a batch, and what they are known by, in one list for all."""

    def __init__(
        self, tasks: Sequence[str], found: Sequence[TaskSlot | None], layers: Sequence[MultiLoraLayer]
    ) -> None:
        self.found, self.layers = found, layers
        here = [(task, kept) for task, kept in zip(tasks, found, strict=True) if kept is not None]
        self.absent = [task for task, kept in zip(tasks, found, strict=True) if kept is None]
        self.pieces = [(kept.pieces, task, kept.piece) for task, kept in here]
        self.holders = [holder for _, kept in here for holder in kept.holders]
        self.pointers = [pointer for _, kept in here for pointer in kept.pointers]

    def stand(self) -> bool:
        """Whether all of them is as it was: asked in every pass, of every parameter."""
        for pieces, task, piece in self.pieces:
            if pieces.get(task) is not piece:
                return False
        if self.absent and any(task in layer.factors for task in self.absent for layer in self.layers):
            return False
        try:
            return [*map(MEMORY, map(WEIGHT, self.holders))] == self.pointers
        except (KeyError, RuntimeError, TypeError):  # a parameter is gone, or is one that has no memory
            return False


class Bank:
    """The `B`s of these layers, all of one shape (s, r, width): `whole` is (layers, slots, s, r, width).

    A task has the same slot at every layer, and where it does not adapt a layer there are zeros. Where a task does not
    lie here, all are put into another tensor: someone may still hold the parameters of one that was deleted, and write
    to them.
    """

    def __init__(self, layers: Sequence[MultiLoraLayer], shape: torch.Size) -> None:
        self.layers, self.shape = tuple(layers), tuple(shape)
        self.whole: Tensor | None = None
        self.by_layer: list[tuple[Tensor, Tensor]] = []  # each layer's part of it, and its slots' scales
        self.kept: dict[str, TaskSlot] = {}
        self.known: dict[tuple[str, ...], KnownTasks] = {}

    def __getstate__(self) -> dict[str, Any]:
        """A copy of a model has parameters of its own, and puts them into a bank of its own."""
        return {**self.__dict__, "whole": None, "by_layer": [], "kept": {}, "known": {}}

    def slots(self, rows: TaskRows) -> list[tuple[Tensor, Tensor, Tensor]] | None:
        """For each layer its `B`s (slots, s, r, width), the slots' scales, 0 where a task does not adapt the layer, and
        each row's slot. None: as of `fetch`."""
        with LOCK:
            tasks = self._places(rows.tasks)
            if tasks is None or self.whole is None:
                return None
            own = rows.spread(tuple(NOBODY if task is None else task.slot for task in tasks), self.whole.device)
            return [(*layer, own) for layer in self.by_layer]

    def fetch(self, rows: TaskRows, dtype: torch.dtype, tracked: bool = False) -> list[Factors] | None:
        """For each layer each row's `B`, (rows, r, width) of every part, and what the product is multiplied by.

        `tracked`: so that autograd finds the way back to the parameters. None: no task adapts any of these layers, or
        the `B`s cannot be kept here, since they are not ordinary parameters or belong to someone else's memory.
        """
        with LOCK:
            tasks = self._places(rows.tasks)
            if tasks is None or not any(tasks):
                return None
            if tracked:
                weights = [weight for task in tasks if task is not None for weight in task.weights]
                return [(own.unbind(1), 1.0) for own in _Fetch.apply(self, tasks, rows, dtype, *weights)]
            found, alpha = self._by_row(tasks, rows, dtype)
            if self.shape[0] == 1:
                return [((own,), alpha) for own in found.squeeze(2).unbind()]
            return [(own.unbind(1), alpha) for own in found.unbind()]

    @torch.no_grad()
    def _by_row(self, tasks: Sequence[TaskSlot | None], rows: TaskRows, dtype: torch.dtype) -> tuple[Tensor, float]:
        """(layers, rows, s, r, width), and the scale of all, or 1 where it has been multiplied in."""
        assert self.whole is not None
        slots, device = tuple(NOBODY if task is None else task.slot for task in tasks), self.whole.device
        scale = self._scale(tasks, rows)
        alike = isinstance(scale, float)
        if alike and self.whole.dtype == dtype:
            return self.whole.index_select(1, rows.spread(slots, device)), scale
        # Rounded and scaled once for each task.
        each = self.whole.index_select(1, rows.kept(("slots", slots), device, lambda: torch.tensor(slots))).to(dtype)
        if not alike:
            each *= scale.to(dtype)
        return each.index_select(1, rows.slots(device)), scale if alike else 1.0

    def _scale(self, tasks: Sequence[TaskSlot | None], rows: TaskRows) -> Any:
        """That of all tasks at all layers; where they differ, (layers, tasks, 1, 1, 1)."""
        different = {task.scales for task in tasks if task is not None}
        first = next(iter(different), (1.0,))[0]
        if all(scale == first for scales in different for scale in scales):
            return first
        assert self.whole is not None
        nobody = (1.0,) * len(self.layers)
        scales = tuple(nobody if task is None else task.scales for task in tasks)
        kept = rows.kept(("scales", scales), self.whole.device, lambda: torch.tensor(scales, dtype=torch.float64).T)
        return kept[:, :, None, None, None]

    # ---- taking in

    def _places(self, tasks: tuple[str, ...]) -> Sequence[TaskSlot | None] | None:
        """Where each task lies, None for one that adapts none of these layers; None: some cannot be kept here."""
        known = self.known.get(tasks) or self._note(tasks)
        if not known.stand():
            if not self._take_in():
                return None
            known = self._note(tasks)
        return known.found

    def _note(self, tasks: tuple[str, ...]) -> KnownTasks:
        if len(self.known) >= TASKS_KNOWN:
            self.known.clear()
        found = self.known[tasks] = KnownTasks(tasks, [*map(self.kept.get, tasks)], self.layers)
        return found

    @torch.inference_mode(False)
    @torch.no_grad()
    def _take_in(self) -> bool:
        """Put the `B`s of every task into a new tensor; False where some cannot be."""
        names = dict.fromkeys(name for layer in self.layers for name in layer.factors)
        pieces = {name: [layer.factors.get(name) for layer in self.layers] for name in names}
        weights = [piece._parameters.get("weight") for own in pieces.values() for piece in own if piece is not None]
        if not all(map(self._is_free, weights)) or len({(w.device, w.dtype) for w in weights}) > 1:
            return False
        refuse_capture(weights[0].device if weights else None)
        self.kept, self.known = {}, {}
        if weights:
            self.whole = weights[0].new_zeros(len(self.layers), 1 + len(names), *self.shape)
            for slot, (name, own) in enumerate(pieces.items(), start=1):
                self.kept[name] = self._settle(slot, own)
            by_task = [[0.0 if piece is None else piece.scale for piece in own] for own in pieces.values()]
            scales = torch.tensor([[0.0] * len(self.layers), *by_task], dtype=torch.float32).T
            # Each layer's at a multiple of 16 bytes, as kernels want them.
            padded = pad(scales, (0, -(1 + len(names)) % 4)).contiguous().to(self.whole.device)
            self.by_layer = [*zip(self.whole.unbind(), padded.unbind(), strict=True)]
        return True

    def _settle(self, slot: int, pieces: Sequence[Any]) -> TaskSlot:
        """Give a task's parameters the memory of a slot."""
        assert self.whole is not None
        numbers = [number for number, piece in enumerate(pieces) if piece is not None]
        memory = self.whole[:, slot].unbind()
        for number in numbers:
            memory[number].copy_(pieces[number].weight)
            pieces[number].weight.data = memory[number]
        shown = numbers[slot % len(numbers)]
        scales = tuple((pieces[shown] if piece is None else piece).scale for piece in pieces)
        holders = [pieces[number]._parameters for number in numbers]
        pointers = [memory[number].data_ptr() for number in numbers]
        return TaskSlot(slot, self.layers[shown].factors, pieces[shown], numbers, holders, pointers, scales)

    def _is_free(self, weight: Any) -> bool:
        """Whether a parameter may be given other memory: it has its own, or lies here. What distributes a model keeps
        parameters as pieces of its own."""
        if type(weight) is not nn.Parameter or weight.is_meta or weight.shape != self.shape:
            return False
        memory = weight.untyped_storage()
        here = self.whole is not None and memory.data_ptr() == self.whole.untyped_storage().data_ptr()
        return here or memory.nbytes() == weight.numel() * weight.element_size()


class _Fetch(torch.autograd.Function):
    """Each layer's and row's `B` with its scale, (rows, s, r, width); the gradient of a task's is the sum over its
    rows:

        F[l, i] = scale[l, t] B_t[l],    dL/dB_t[l] = scale[l, t] * sum over the rows i of task t of dL/dF[l, i].

    One for all layers of a bank, so that what a layer adds to it is torch's own product, forward and backward.
    """

    @staticmethod
    def forward(
        ctx: Any, bank: Bank, tasks: Sequence[TaskSlot | None], rows: TaskRows, dtype: torch.dtype, *weights: Tensor
    ) -> tuple[Tensor, ...]:
        found, alpha = bank._by_row(tasks, rows, dtype)
        # Not the rows, which keep the result.
        ctx.given = tasks, rows.slots(found.device), bank._scale(tasks, rows), weights[0].dtype
        ctx.set_materialize_grads(False)  # a layer that took no part has none
        return (found if alpha == 1 else found.mul_(alpha)).unbind()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        tasks, slots, scale, dtype = ctx.given
        there = [number for number, gradient in enumerate(gradients) if gradient is not None]
        by_task: dict[int, Sequence[Tensor]] = {}
        if there:
            by_row = torch.stack([gradients[number] for number in there]).to(dtype)
            sums = by_row.new_zeros(len(there), len(tasks), *by_row.shape[2:])
            sums.index_add_(1, slots, by_row)
            own = scale
            if isinstance(scale, Tensor):  # by numbers from the host only where it must be: a GPU would wait for them
                own = (scale if len(there) == len(gradients) else scale[there]).to(sums.dtype)
            by_task = dict(zip(there, (each.unbind() for each in (sums * own).unbind()), strict=True))
        found = [
            by_task[number][place] if number in by_task else None
            for place, task in enumerate(tasks)
            if task is not None
            for number in task.numbers
        ]
        wanted = ctx.needs_input_grad[4:]
        of_weights = (each if needed else None for each, needed in zip(found, wanted, strict=True))
        return None, None, None, None, *of_weights


def refuse_capture(device: torch.device | None) -> None:
    """An error where a CUDA graph is being captured: what is allocated or moved now would be done in its replays."""
    if device is not None and device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise InlayError(
            "A pass with adapter_names is captured in a CUDA graph before it was run: run it once with the same names, "
            "and then capture it."
        )


def put_together(layers: Iterable[MultiLoraLayer]) -> None:
    """Give layers that have no bank one, neighbours of one shape together."""
    alike: dict[Any, list[MultiLoraLayer]] = {}
    with LOCK:
        for layer in layers:
            weight = next((piece.weight for piece in layer.factors.values()), None)
            if layer.bank is None and weight is not None:
                alike.setdefault((weight.shape, weight.device), []).append(layer)
        for (shape, _), group in alike.items():
            for begin in range(0, len(group), LAYERS):
                bank = Bank(group[begin : begin + LAYERS], shape)
                for number, layer in enumerate(bank.layers):
                    layer.bank = (bank, number)
