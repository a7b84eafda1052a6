"""Copies of a model at a tenth of the price of building it again.

The matrix needs the same adapted model some thirty times a case. Building and attaching take ten to twenty
milliseconds, `copy.deepcopy` five; taking a pickled model out of memory takes one. The tensors do not go through the
pickle: they are copied from the mould, ties and shared storage included.
"""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

from torch import Tensor, nn


class Mould:
    """A model of which `cast` makes as many independent copies as are wanted. The model must not be used any more."""

    def __init__(self, model: nn.Module) -> None:
        self._tensors: list[Tensor] = []
        stream = io.BytesIO()
        try:
            _Pickler(stream, self._tensors).dump(model)
        except (pickle.PicklingError, AttributeError, TypeError):
            # A closure among its hooks: nothing says that a model must be fit for pickling.
            self._model: nn.Module | None = model
        else:
            self._model = None
        self._frame = stream.getvalue()

    def cast(self) -> Any:
        if self._model is not None:
            return copy.deepcopy(self._model)
        return _Unpickler(io.BytesIO(self._frame), self._tensors).load()


class _Pickler(pickle.Pickler):
    def __init__(self, stream: io.BytesIO, tensors: list[Tensor]) -> None:
        super().__init__(stream, protocol=pickle.HIGHEST_PROTOCOL)
        self._tensors = tensors
        self._places: dict[int, int] = {}

    def persistent_id(self, thing: Any) -> int | None:
        if not isinstance(thing, Tensor):
            return None
        if id(thing) not in self._places:
            self._places[id(thing)] = len(self._tensors)
            self._tensors.append(thing)
        return self._places[id(thing)]


class _Unpickler(pickle.Unpickler):
    def __init__(self, stream: io.BytesIO, tensors: list[Tensor]) -> None:
        super().__init__(stream)
        self._tensors = tensors
        self._memo: dict[int, Any] = {}

    def persistent_load(self, place: int) -> Tensor:
        return copy.deepcopy(self._tensors[place], self._memo)
