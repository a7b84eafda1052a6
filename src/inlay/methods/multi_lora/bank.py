"""Where the `B`s of many tasks lie while tasks are mixed: side by side, so that a pass fetches its rows' own at once.

Fetched layer by layer, the `B`s of a batch take more kernels than what is computed with them. So the parameters of all
tasks at several layers are pieces of one tensor, a bank. A parameter is still a parameter: whatever writes to it, an
optimiser, loading, or someone who goes by `.data`, writes to the bank, and there is no copy that could be out of date.
What gives a parameter other memory (`.to()`, say) takes it out; the next pass sees that and puts it back.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from inlay.methods.multi_lora.products import no_leaves

if TYPE_CHECKING:
    from inlay.methods.multi_lora.layer import MultiLoraLayer
    from inlay.methods.multi_lora.products import Factors
    from inlay.methods.multi_lora.rows import Rows

LAYERS = 16  # of a bank: what is fetched at once takes memory for each row
WEIGHT = itemgetter("weight")
NOBODY = 0  # the slot of rows without a task: always zero


class Place(NamedTuple):
    """Where a task is in a bank: what was seen when it was looked for, by which `stands` knows that it still is there.

    A parameter, or its memory, may be changed by anybody at any layer, and each is looked at in every pass. The module
    that holds it comes and goes with its task, at all layers at once: of these one is looked at.
    """

    slot: int
    layer: Any
    piece: Any
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
                self.layer.pieces.get(task) is self.piece
                and [*map(Tensor.data_ptr, map(WEIGHT, self.holders))] == self.pointers
            )
        except (KeyError, RuntimeError, TypeError):  # a parameter is gone, or is one that has no memory
            return False


class Bank:
    """The `B`s of these layers, all of one shape (s, r, width): `whole` is (layers, slots, s, r, width).

    A task has the same slot at every layer, and where it does not adapt a layer there are zeros. A slot is never given
    to a second task: someone may still hold the parameters of a task that was deleted, and write to them.
    """

    def __init__(self, layers: Sequence[MultiLoraLayer], shape: torch.Size) -> None:
        self.layers, self.shape = tuple(layers), tuple(shape)
        self.whole: Tensor | None = None
        self.used = 0
        self.places: dict[str, Place] = {}

    def __getstate__(self) -> dict[str, Any]:
        """A copy of a model has parameters of its own, and puts them into a bank of its own."""
        return {**self.__dict__, "whole": None, "used": 0, "places": {}}

    def fetch(self, rows: Rows, dtype: torch.dtype, tracked: bool = False) -> list[Factors] | None:
        """For each layer each row's `B`, (rows, r, width) of every part, and what the product is multiplied by.

        `tracked`: so that autograd finds the way back to the parameters. None: the `B`s cannot be kept here, since they
        are not ordinary parameters or belong to someone else's memory. Only for a holder of `LOCK`.
        """
        places = self._find(rows.tasks) or self._take_in(rows.tasks)
        if places is None:
            return None
        if not tracked:
            found, alpha = self._by_row(places, rows, dtype)
            if self.shape[0] == 1:
                return [((own,), alpha) for own in found.squeeze(2).unbind()]
            return [(own.unbind(1), alpha) for own in found.unbind()]
        weights = [weight for place in places if place is not None for weight in place.weights]
        if self.layers[0].routing.shared:  # else nobody is there to wait for
            weights = no_leaves(weights)
        return [(own.unbind(1), 1.0) for own in _Fetch.apply(self, places, rows, dtype, *weights)]

    @torch.no_grad()
    def _by_row(self, places: Sequence[Place | None], rows: Rows, dtype: torch.dtype) -> tuple[Tensor, float]:
        """(layers, rows, s, r, width), and the scale of all, or 1 where it has been multiplied in."""
        assert self.whole is not None
        slots, device = tuple(NOBODY if place is None else place.slot for place in places), self.whole.device
        scale = self._scale(places, rows)
        alike = isinstance(scale, float)
        if alike and self.whole.dtype == dtype:
            return self.whole.index_select(1, rows.spread(slots, device)), scale
        # Rounded and scaled once for each task.
        each = self.whole.index_select(1, rows.kept(("slots", slots), device, lambda: torch.tensor(slots))).to(dtype)
        if not alike:
            each *= scale.to(dtype)
        return each.index_select(1, rows.slots(device)), scale if alike else 1.0

    def _scale(self, places: Sequence[Place | None], rows: Rows) -> Any:
        """That of all tasks at all layers; where they differ, (layers, tasks, 1, 1, 1)."""
        different = {place.scales for place in places if place is not None}
        first = next(iter(different), (1.0,))[0]
        if all(scale == first for scales in different for scale in scales):
            return first
        assert self.whole is not None
        nobody = (1.0,) * len(self.layers)
        scales = tuple(nobody if place is None else place.scales for place in places)
        kept = rows.kept(("scales", scales), self.whole.device, lambda: torch.tensor(scales, dtype=torch.float64).T)
        return kept[:, :, None, None, None]

    def _find(self, tasks: Sequence[str]) -> list[Place | None] | None:
        """Where each task is, None for one that adapts none of these layers; None: some are not here."""
        found = []
        for task in tasks:
            place = self.places.get(task)
            if place is None or not place.stands(task):
                self.places.pop(task, None)
                if any(task in layer.pieces for layer in self.layers):
                    place = self._look_for(task)
                    if place is None:
                        return None
                    self.places[task] = place
                else:
                    place = None
            found.append(place)
        return found

    def _look_for(self, task: str) -> Place | None:
        if self.whole is None:
            return None
        size = math.prod(self.shape) * self.whole.element_size()
        start, a_layer = self.whole.data_ptr(), self.whole.shape[1] * size
        pieces: list[Any] = [layer.pieces.get(task) for layer in self.layers]
        there = [number for number, piece in enumerate(pieces) if piece is not None]
        weights = [pieces[number]._parameters.get("weight") for number in there]
        if not all(type(weight) is nn.Parameter for weight in weights):
            return None
        pointers = [weight.data_ptr() for weight in weights]
        starts = {pointer - start - number * a_layer for pointer, number in zip(pointers, there, strict=True)}
        (begin,) = starts if len(starts) == 1 else (-1,)
        if not size <= begin < a_layer or begin % size:
            return None
        slot = begin // size
        shown = slot % len(there)
        number = there[shown]
        scales = tuple((pieces[number] if piece is None else piece).scale for piece in pieces)
        holders = [pieces[number]._parameters for number in there]
        return Place(slot, self.layers[number], pieces[number], there, holders, pointers, scales)

    # ---- taking in

    @torch.inference_mode(False)
    @torch.no_grad()
    def _take_in(self, tasks: Sequence[str]) -> list[Place | None] | None:
        """Give the tasks slots; where there are none left, all tasks, in another tensor."""
        missing = [task for task in tasks if self._find([task]) is None]
        if self.whole is None or not self._fits(missing) or self.used + len(missing) > self.whole.shape[1]:
            everybody = list(dict.fromkeys(name for layer in self.layers for name in layer.pieces))
            weights = list(self._weights(everybody))
            if not weights or not all(map(self._is_free, weights)) or len({(w.device, w.dtype) for w in weights}) > 1:
                return None
            count = 1 + len(everybody) + max(4, len(everybody) // 2)
            self.whole = weights[0].new_zeros(len(self.layers), count, *self.shape)
            self.used, self.places, missing = 1, {}, everybody
        for task in missing:
            for layer, own in zip(self.layers, self.whole[:, self.used].unbind(), strict=True):
                piece = layer.pieces.get(task)
                if piece is not None:
                    own.copy_(piece.weight)
                    piece.weight.data = own
            self.used += 1
        return self._find(tasks)

    def _fits(self, tasks: Sequence[str]) -> bool:
        like = self.whole
        assert like is not None
        return all(
            self._is_free(weight) and (weight.device, weight.dtype) == (like.device, like.dtype)
            for weight in self._weights(tasks)
        )

    def _weights(self, tasks: Sequence[str]) -> Iterable[Any]:
        return (layer.pieces[t]._parameters.get("weight") for layer in self.layers for t in tasks if t in layer.pieces)

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
        ctx: Any, bank: Bank, places: Sequence[Place | None], rows: Rows, dtype: torch.dtype, *weights: Tensor
    ) -> tuple[Tensor, ...]:
        found, alpha = bank._by_row(places, rows, dtype)
        # Not the rows, which keep the result.
        ctx.given = places, rows.slots(found.device), bank._scale(places, rows), weights[0].dtype
        ctx.set_materialize_grads(False)  # a layer that took no part has none
        return (found if alpha == 1 else found.mul_(alpha)).unbind()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        places, slots, scale, dtype = ctx.given
        there = [number for number, gradient in enumerate(gradients) if gradient is not None]
        by_task: dict[int, Sequence[Tensor]] = {}
        if there:
            by_row = torch.stack([gradients[number] for number in there]).to(dtype)
            sums = by_row.new_zeros(len(there), len(places), *by_row.shape[2:])
            sums.index_add_(1, slots, by_row)
            own = scale
            if isinstance(scale, Tensor):  # by numbers from the host only where it must be: a GPU would wait for them
                own = (scale if len(there) == len(gradients) else scale[there]).to(sums.dtype)
            by_task = dict(zip(there, (each.unbind() for each in (sums * own).unbind()), strict=True))
        found = [
            by_task[number][task] if number in by_task else None
            for task, place in enumerate(places)
            if place is not None
            for number in place.numbers
        ]
        wanted = ctx.needs_input_grad[4:]
        of_weights = (each if needed else None for each, needed in zip(found, wanted, strict=True))
        return None, None, None, None, *of_weights


def put_together(layers: Iterable[MultiLoraLayer]) -> None:
    """Give layers that have no bank one, neighbours of one shape together."""
    alike: dict[Any, list[tuple[MultiLoraLayer, torch.Size]]] = {}
    for layer in layers:
        weight = next((piece.weight for piece in layer.pieces.values()), None)
        if layer.bank is None and weight is not None:
            alike.setdefault((weight.shape, weight.device), []).append((layer, weight.shape))
    for group in alike.values():
        for begin in range(0, len(group), LAYERS):
            own = [layer for layer, _ in group[begin : begin + LAYERS]]
            bank = Bank(own, group[0][1])
            for number, layer in enumerate(own):
                layer.bank = (bank, number)
