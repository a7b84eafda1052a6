"""`Phi(X)` for torch.compile: one operator, since what is kept is looked up by text, which cannot be traced.

The operator is told the number of a layer, and asks the layer when it runs: its cache and its encoder are as they are
then. So a compiled model is one graph, and Phi(X) is computed once a text as in any other.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, Protocol
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from inlay.methods.infoprompt.phi import Batch


class Encodes(Protocol):
    """What computes `Phi(X)` and `Z'` of texts, B x 2 x H, with an adapter of its own."""

    def encode_now(self, adapter: str, batch: Batch, real: Tensor, given: Tensor | None) -> Tensor: ...


_LAYERS: WeakValueDictionary[int, Encodes] = WeakValueDictionary()
_NUMBERS = itertools.count()


def numbered(layer: Encodes) -> int:
    """A number by which the operator finds the layer, for as long as there is it."""
    number = next(_NUMBERS)
    _LAYERS[number] = layer
    return number


def context(
    number: int, adapter: str, batch: Batch, real: Tensor, given: Tensor | None, like: tuple[int, torch.dtype]
) -> Tensor:
    """What the layer encodes, in this size and precision, and under the autocast that holds here."""
    kind = real.device.type
    half = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    names = list(batch)
    return torch.ops.inlay.phi(
        number, adapter, " ".join(names), [batch[name] for name in names], real, given, *like, half
    )


# A CUDA graph would replay the kernels of one look into the cache.
@torch.library.custom_op(
    "inlay::phi",
    mutates_args=(),
    schema="(int number, str adapter, str names, Tensor[] values, Tensor real, Tensor? given, int size, "
    "ScalarType dtype, ScalarType? half) -> Tensor",
    tags=(torch.Tag.cudagraph_unsafe,),
)
def _phi(
    number: int, adapter: str, names: str, values: Sequence[Tensor], real: Tensor, given: Tensor | None, *like: Any
) -> Tensor:
    _, dtype, half = like
    batch = dict(zip(names.split(), values, strict=True))
    with torch.autocast(real.device.type, dtype=half, enabled=half is not None):
        return _LAYERS[number].encode_now(adapter, batch, real, given).to(dtype)


@_phi.register_fake
def _(
    number: int, adapter: str, names: str, values: Sequence[Tensor], real: Tensor, given: Tensor | None, *like: Any
) -> Tensor:
    size, dtype, _ = like
    return real.new_empty((real.shape[0], 2, size), dtype=dtype)
