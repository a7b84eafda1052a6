"""How Triton kernels are launched between calls of torch: with as little of the host's time as can be.

A layer of a small model, or one token of a large one, takes the host longer than the GPU. Triton's own way to a
compiled kernel looks at every argument; it is taken once for each set of constants and types.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor


class Launch:
    """One kernel for tensors of one set of types on one device, its constants known: `launch(grid, tensors, numbers)`.

    After the first call the kernel that Triton found is launched directly, as long as pointers are multiples of 16,
    which Triton compiles in. Nothing may be compiled in of the numbers (`do_not_specialize`).
    """

    directly: ClassVar[bool] = True
    """False once a Triton was met whose compiled kernels take other arguments."""

    def __init__(self, kernel: Any, constants: tuple[Any, ...], warps: int, stages: int = 1) -> None:
        self.kernel, self.constants, self.warps, self.stages = kernel, constants, warps, stages
        self.compiled: Any = None

    def __call__(self, grid: tuple[int, int, int], tensors: tuple[Tensor, ...], numbers: tuple[float, ...]) -> None:
        pointers = [x.data_ptr() for x in tensors]
        bits = 0
        for pointer in pointers:
            bits |= pointer
        compiled = self.compiled
        if compiled is None or bits % 16 or not Launch.directly:
            self._first(grid, tensors, numbers, aligned=not bits % 16)
            return
        try:
            stream = torch._C._cuda_getCurrentRawStream(tensors[0].get_device())
            # No metadata and no hooks, for which Triton's own way would ask.
            given = stream, compiled.function, compiled.packed_metadata, None, None, None
            compiled.run(*grid, *given, *pointers, *numbers, *self.constants)
        except (AttributeError, TypeError, ValueError):  # raised before anything is launched, as is the next
            Launch.directly = False
            self(grid, tensors, numbers)
        except OverflowError:  # a number of more than 32 bits: Triton has, or makes, a kernel for such
            self.compiled = None
            self(grid, tensors, numbers)

    def _first(
        self, grid: tuple[int, int, int], tensors: tuple[Tensor, ...], numbers: tuple[float, ...], aligned: bool
    ) -> None:
        options = {"num_warps": self.warps, "num_stages": self.stages}
        compiled = self.kernel[grid](*tensors, *numbers, *self.constants, **options)
        if aligned:
            self.compiled = compiled  # None from Triton's interpreter


class Prepared(NamedTuple):
    """A launch for calls of one shape, layout and type: all but the tensors is known."""

    launch: Launch
    grid: tuple[int, int, int]
    numbers: tuple[float, ...]

    def __call__(self, *tensors: Tensor) -> None:
        self.launch(self.grid, tensors, self.numbers)


@cache
def multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2  # interpreted


def on(device: torch.device) -> AbstractContextManager[object]:
    """Triton launches on the current device, whichever the tensors are on."""
    here = device.type != "cuda" or device.index == torch._C._cuda_getDevice()
    return _HERE if here else torch.cuda.device(device)


_HERE: AbstractContextManager[None] = nullcontext()


def unit(*strides: int) -> int:
    """A number that divides all of them: 8, or 1. Given to a kernel it says by how much its loads are aligned."""
    bits = 0
    for stride in strides:
        bits |= stride
    return 1 if bits % 8 else 8
