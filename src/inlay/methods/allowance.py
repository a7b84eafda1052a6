"""How much memory may be asked for while a config is obeyed that somebody else wrote.

Whatever setting says it (a rank, a number of prompts, a width, a multiple of one), it comes to a tensor that is made by
its size. These are counted before they are made; what follows from other tensors, such as a copy, is not.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

SMALL = 64 << 20
OF_FILE = 8  # a file's half precision becomes single, and a part of it is drawn before it is loaded
_SIZES = ("size", "n", "m", "end", "steps", "row", "col")
_VIEWS = ("expand", "view", "_unsafe_view", "as_strided", "reshape", "unflatten", "sum_to_size")


class TooLarge(ValueError):
    """More memory than is allowed was asked for."""


class Allowance(TorchDispatchMode):
    """Lets tensors be made by their size as long as there are bytes left."""

    def __init__(self, bytes_allowed: int) -> None:
        super().__init__()
        self.allowed = self.left = bytes_allowed

    @classmethod
    def of(cls, model: nn.Module, file_bytes: int) -> Allowance:
        """What an adapter of a model can need by its file: some times the file, and once the model."""
        return cls(SMALL + OF_FILE * file_bytes + size_of(model))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        self.left -= _asked(func, args, kwargs)
        if self.left < 0:
            raise TooLarge(f"they ask for more than {self.allowed / 2**20:,.0f} MiB")
        return func(*args, **kwargs)


def size_of(model: nn.Module) -> int:
    """The bytes of a model's parameters."""
    return sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())


def _asked(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    """The bytes of a tensor that is about to be made by its size; 0 for any other operation."""
    if func.overloadpacket.__name__ in _VIEWS or str(kwargs.get("device")) == "meta":
        return 0
    named = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | dict(kwargs)
    sizes = [named[name] for name in _SIZES if isinstance(named.get(name), int | float | list | tuple)]
    if not sizes:
        return 0
    count = math.prod(math.prod(each) if isinstance(each, list | tuple) else max(0, math.ceil(each)) for each in sizes)
    dtype = kwargs.get("dtype") or torch.get_default_dtype()
    return int(count) * dtype.itemsize
