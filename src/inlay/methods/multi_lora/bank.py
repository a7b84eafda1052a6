"""Where the `B`s of many tasks lie while tasks are mixed: side by side, so that a pass fetches its rows' own at once.

Fetched layer by layer, the `B`s of a batch take more kernels than what is computed with them. So the parameters of all
tasks at several layers are pieces of one tensor, a bank. A parameter is still a parameter: whatever writes to it, an
optimiser, loading, or someone who goes by `.data`, writes to the bank, and there is no copy that could be out of date.
What gives a parameter other memory (`.to()`, say) takes it out; the next pass sees that and puts it back.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from inlay.methods.multi_lora.layer import MultiLoraLayer
    from inlay.methods.multi_lora.products import Factors
    from inlay.methods.multi_lora.rows import Rows

LAYERS = 16  # of a bank: what is fetched at once takes memory for each row
NOBODY = 0  # the slot of rows without a task: always zero


class Place(NamedTuple):
    """Where a task is in a bank: what was seen when it was looked for, by which `stands` knows that it still is there.

    A parameter's memory may be changed by anybody, and is looked at in every pass. A task comes and goes at all its
    layers at once, and so do parameters that stand in for it: of these one is looked at, another for every task.
    """

    slot: int
    layer: MultiLoraLayer
    piece: nn.Module
    weight: Tensor
    weights: list[Tensor]
    pointers: list[int]
    scales: tuple[float, ...]

    def stands(self, task: str) -> bool:
        """Whether all of it is as it was."""
        return (
            self.layer.pieces.get(task) is self.piece
            and self.piece._parameters.get("weight") is self.weight
            and [*map(Tensor.data_ptr, self.weights)] == self.pointers
        )


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

    def fetch(self, rows: Rows, dtype: torch.dtype) -> list[Factors] | None:
        """For each layer each row's `B`, (rows, r, width) of every part, and what the product is multiplied by.

        None: they cannot be kept here, since they are not ordinary parameters or belong to someone else's memory.
        """
        places = self._find(rows.tasks) or self._take_in(rows.tasks)
        if places is None or self.whole is None:
            return None
        slots, device = tuple(NOBODY if place is None else place.slot for place in places), self.whole.device
        different = {scale for place in places if place is not None for scale in place.scales}
        alpha = different.pop() if len(different) == 1 else 1.0
        with torch.no_grad():
            if not different and self.whole.dtype == dtype:
                return self._by_layer(self.whole.index_select(1, rows.spread(slots, device)), alpha)
            # Rounded and scaled once for each task.
            own = rows.kept(("slots", slots), device, lambda: torch.tensor(slots))
            each = self.whole.index_select(1, own).to(dtype)
            if different:
                nobody = (1.0,) * len(self.layers)
                scales = tuple(nobody if place is None else place.scales for place in places)
                factors = rows.kept(("scales", scales), device, lambda: torch.tensor(scales, dtype=torch.float64).T)
                each *= factors.to(dtype)[:, :, None, None, None]
            return self._by_layer(each.index_select(1, rows.slots(device)), alpha)

    @staticmethod
    def _by_layer(found: Tensor, alpha: float) -> list[Factors]:
        if found.shape[2] == 1:
            return [((own,), alpha) for own in found.squeeze(2).unbind()]
        return [(own.unbind(1), alpha) for own in found.unbind()]

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
        pieces = [layer.pieces.get(task) for layer in self.layers]
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
        return Place(slot, self.layers[number], pieces[number], weights[shown], weights, pointers, scales)

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
