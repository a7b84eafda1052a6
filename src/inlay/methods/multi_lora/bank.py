"""Where the `B`s of many tasks lie while tasks are mixed: side by side, so that a pass fetches its rows' own at once.

Fetched layer by layer, the `B`s of a batch take more kernels than what is computed with them. So the parameters of all
tasks at several layers are pieces of one tensor, a bank. A parameter is still a parameter: whatever writes to it, an
optimiser, loading, or someone who goes by `.data`, writes to the bank, and there is no copy that could be out of date.
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

if TYPE_CHECKING:
    from inlay.methods.multi_lora.layer import MultiLoraLayer
    from inlay.methods.multi_lora.products import Factors
    from inlay.methods.multi_lora.rows import TaskRows

LAYERS = 16  # of a bank: what is fetched at once takes memory for each row
WEIGHT = itemgetter("weight")
NOBODY = 0  # the slot of rows without a task: always zero
LOCK = threading.Lock()  # for passes of several threads, which share where the `B`s lie


class TaskSlot(NamedTuple):
    """Where a task lies in a bank, and what `stands` knows it by.

    A parameter, or its memory, may be changed by anybody at any layer, and each is looked at in every pass. The module
    that holds it comes and goes with its task, at all layers at once: of these one is looked at.
    """

    slot: int
    layer: MultiLoraLayer
    piece: nn.Module
    numbers: list[int]  # of the layers that it adapts
    holders: list[dict[str, Any]]  # of the parameters there
    pointers: list[int]
    scales: tuple[float, ...]

    @property
    def weights(self) -> list[Tensor]:
        """The parameters, or what stands in for one while a function is called."""
        return [*map(WEIGHT, self.holders)]

    def stands(self, task: str) -> bool:
        """Whether all of it is as it was."""
        try:
            return (
                self.layer.factors.get(task) is self.piece
                and [*map(Tensor.data_ptr, map(WEIGHT, self.holders))] == self.pointers
            )
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
        self.kept: dict[str, TaskSlot] = {}

    def __getstate__(self) -> dict[str, Any]:
        """A copy of a model has parameters of its own, and puts them into a bank of its own."""
        return {**self.__dict__, "whole": None, "kept": {}}

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

    def _places(self, tasks: Sequence[str]) -> list[TaskSlot | None] | None:
        """Where each task lies, None for one that adapts none of these layers; None: some cannot be kept here."""
        for task in tasks:
            kept = self.kept.get(task)
            stands = not any(task in layer.factors for layer in self.layers) if kept is None else kept.stands(task)
            if not stands and not self._take_in():
                return None
        return [self.kept.get(task) for task in tasks]

    @torch.inference_mode(False)
    @torch.no_grad()
    def _take_in(self) -> bool:
        """Put the `B`s of every task into a new tensor; False where some cannot be."""
        names = dict.fromkeys(name for layer in self.layers for name in layer.factors)
        pieces = {name: [layer.factors.get(name) for layer in self.layers] for name in names}
        weights = [piece._parameters.get("weight") for own in pieces.values() for piece in own if piece is not None]
        if not all(map(self._is_free, weights)) or len({(w.device, w.dtype) for w in weights}) > 1:
            return False
        self.kept = {}
        if weights:
            self.whole = weights[0].new_zeros(len(self.layers), 1 + len(names), *self.shape)
        for slot, (name, own) in enumerate(pieces.items(), start=1):
            self.kept[name] = self._settle(slot, own)
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
        return TaskSlot(slot, self.layers[shown], pieces[shown], numbers, holders, pointers, scales)

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
