"""Where the `B`s of many tasks lie while tasks are mixed: side by side, so that a pass fetches its rows' own at once.

Fetched layer by layer, the `B`s of a batch take more kernels than what is computed with them. So the parameters of all
tasks at several layers are pieces of one tensor, a bank. A parameter is still a parameter: whatever writes to it, an
optimiser, loading, or someone who goes by `.data`, writes to the bank, and there is no copy that could be out of date.
What gives a parameter other memory (`.to()`, say) takes it out; the next pass sees that and puts it back.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from inlay.methods.multi_lora.layer import MultiLoraLayer
    from inlay.methods.multi_lora.rows import Rows

LAYERS = 16  # of a bank: what is fetched at once takes memory for each row
NOBODY = 0  # the slot of rows without a task: always zero


class Bank:
    """The `B`s of these layers, all of one shape (s, r, width): `whole` is (layers, slots, s, r, width).

    A task has the same slot at every layer, and where it does not adapt a layer there are zeros. A slot is never given
    to a second task: someone may still hold the parameters of a task that was deleted, and write to them.
    """

    def __init__(self, layers: Sequence[MultiLoraLayer], shape: torch.Size) -> None:
        self.layers, self.shape = tuple(layers), shape
        self.whole: Tensor | None = None
        self.used = 0

    def __getstate__(self) -> dict[str, Any]:
        """A copy of a model has parameters of its own, and puts them into a bank of its own."""
        return {**self.__dict__, "whole": None, "used": 0}

    def fetch(self, rows: Rows, dtype: torch.dtype) -> tuple[tuple[Tensor, ...], float] | None:
        """Each layer's `B`s, (rows, s, r, width), and what the products are still to be multiplied by.

        None: they cannot be kept here, since they are not ordinary parameters or belong to someone else's memory.
        """
        found = self._find(rows.tasks) or self._take_in(rows.tasks)
        if found is None or self.whole is None:
            return None
        slots, scales = found
        alpha = scales[0] if scales.count(scales[0]) == len(scales) else 1.0
        alike, device = alpha == scales[0], self.whole.device
        with torch.no_grad():
            if alike and self.whole.dtype == dtype:
                return self.whole.index_select(1, rows.spread(slots, device)).unbind(), alpha
            # Rounded and scaled for each task once.
            own = rows.kept(("slots", slots), device, lambda: torch.tensor(slots))
            each = self.whole.index_select(1, own).to(dtype)
            if not alike:
                factors = rows.kept(("scales", scales), device, lambda: torch.tensor(scales, dtype=torch.float64))
                each *= factors.to(dtype).view(len(self.layers), len(slots), 1, 1, 1)
            return each.index_select(1, rows.spread(tuple(range(len(slots))), device)).unbind(), alpha

    def _find(self, tasks: Sequence[str]) -> tuple[tuple[int, ...], tuple[float, ...]] | None:
        """The slots of the tasks, and the scale of each at each layer; None: not all of them are here.

        Where a parameter's memory lies is all that says so, and is looked at in every pass: nothing else tells that
        someone has given it other memory.
        """
        if self.whole is None:
            return None
        size = math.prod(self.shape) * self.whole.element_size()
        start, a_layer = self.whole.data_ptr(), self.whole.shape[1] * size
        places: list[int | None] = [None] * len(tasks)
        scales: list[float] = []
        try:
            for layer in self.layers:
                own = [*map(layer.pieces.get, tasks)]
                if None in own:
                    here = [None if piece is None else piece._parameters["weight"].data_ptr() - start for piece in own]
                    scales += [1.0 if piece is None else piece.scale for piece in own]
                else:
                    here = [piece._parameters["weight"].data_ptr() - start for piece in own]
                    scales += [piece.scale for piece in own]
                if here != places:
                    if any(was not in (None, now) for was, now in zip(places, here, strict=True) if now is not None):
                        return None
                    places = [was if now is None else now for was, now in zip(places, here, strict=True)]
                start += a_layer
        except (KeyError, RuntimeError):  # something stands in a parameter's place that has no memory
            return None
        slots = tuple(NOBODY if place is None else place // size for place in places)
        here = all(place is None or (place % size == 0 and size <= place < a_layer) for place in places)
        return (slots, tuple(scales)) if here else None

    # ---- taking in

    @torch.inference_mode(False)
    @torch.no_grad()
    def _take_in(self, tasks: Sequence[str]) -> tuple[tuple[int, ...], tuple[float, ...]] | None:
        """Give the tasks slots; where there are none left, all tasks, in another tensor."""
        missing = [task for task in tasks if self._find([task]) is None]
        if self.whole is None or not self._fits(missing) or self.used + len(missing) > self.whole.shape[1]:
            everybody = list(dict.fromkeys(name for layer in self.layers for name in layer.pieces))
            weights = list(self._weights(everybody))
            if not weights or not all(map(self._is_free, weights)) or len({(w.device, w.dtype) for w in weights}) > 1:
                return None
            count = 1 + len(everybody) + max(4, len(everybody) // 2)
            self.whole = weights[0].new_zeros(len(self.layers), count, *self.shape)
            self.used, missing = 1, everybody
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
