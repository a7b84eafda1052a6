"""The feature term of `elu` joined to a flash kernel's output, in one pass each way (Triton).

Forward, with a kernel's output `o` and log-sum-exp `a`, `phi = (ELU(q sqrt(scale)) + 1) / sqrt(r)`,
`n = phi Z_A Z_B` and `D = phi kappa`, as join.py has it:

    t = exp(min(-a, 40)),    T = (o + t n) / (1 + t D),    total = a + log(1 + t D),    weight = t / (1 + t D);

for a query that sees no key t = 1, and o = 0 where the kernel gave no number.

Backward, with `g` the gradient of T and `delta = sum(g * T)`, `u = weight g Z_B^T`:

    g_phi = u Z_A^T - weight delta kappa,    g_Z_A = phi^T u,    g_Z_B = (phi Z_A)^T (weight g),
    g_kappa = -phi^T (weight delta).

`g_phi` goes on to the query, and is added to what the flash kernel found for it. The three sums over batch and length
are made in parts, each by one program in a fixed order, and the parts are added in a fixed order: the result does not
change from run to run. phi and Z never leave the chip. Products are of bfloat16 numbers where the query is; of tf32 for
at most 16 queries, and where it is float16, whose range is too small for a weight; of float32 otherwise. Sums are
float32 throughout.

The kernels stand in epilogue_kernels.py. Between calls the host does as little as it can, since a layer of a small
model takes it longer than the GPU: what a launch needs besides pointers is worked out once for all calls of one shape.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from functools import cache, lru_cache
from typing import Any, ClassVar, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from inlay.attention.epilogue_kernels import backward_kernel, forward_kernel, sum_kernel
from inlay.attention.join import LEAST_TOTAL, LIGHTEST, UNSEEN

WARPS, LEAST_TILES = 8, 2
"""Warps a multiprocessor, over the programs on it, and the least tiles of a program: more programs load Z more often
and make more parts to add; fewer leave the last ones alone, or have too little to do at once."""


class Share(NamedTuple):
    """Rows of a tile at most, and how many warps run a program: at least so many, and one for so many entries of Z."""

    tile: int
    warps: int
    entries: int


FORWARD, BACKWARD = Share(32, 1, 4096), Share(64, 2, 2048)
"""With these and `WARPS` the kernels were fastest on an H200, with 64 and with 128 features."""
SUMMED, SUM_TILE = 32, 128
"""Parts and numbers that the last kernel adds at once."""


class Launch:
    """One kernel for calls of one shape, layout and type: all arguments but the pointers are known.

    Triton's own way to a compiled kernel looks at every argument and is taken once. After that the kernel it found is
    launched directly, as long as pointers are multiples of 16, which Triton compiles in.
    """

    directly: ClassVar[bool] = True
    """False once a Triton was met whose compiled kernels take other arguments."""

    def __init__(self, kernel: Any, grid: tuple[int, int, int], rest: tuple[Any, ...], warps: int) -> None:
        self.kernel, self.grid, self.rest, self.warps = kernel, grid, rest, warps
        self.direct: Any = None

    def __call__(self, *tensors: Tensor) -> None:
        pointers = [x.data_ptr() for x in tensors]
        bits = 0
        for pointer in pointers:
            bits |= pointer
        if bits % 16 or self.direct is None or not Launch.directly:
            compiled = self.kernel[self.grid](*tensors, *self.rest, num_warps=self.warps, num_stages=1)
            if not bits % 16 and compiled is not None:  # Triton's interpreter gives None
                self.direct = compiled[self.grid]
            return
        try:
            self.direct(*pointers, *self.rest)
        except (TypeError, ValueError):  # raised before anything is launched
            Launch.directly = False
            self(*tensors)


class Kind(NamedTuple):
    """What calls have in common that differ only in batch, heads, length and layout."""

    dtype: torch.dtype
    of_state: tuple[torch.dtype, ...]  # of left, right or again left, and kappa
    device: torch.device
    size: int
    rows: int
    rank: int
    pair: bool
    signed: bool
    scale: float

    @property
    def numbers(self) -> tuple[float, float]:
        """What a query is multiplied by, to the base of exp2, and the features by."""
        return math.sqrt(self.scale) / math.log(2), self.rows**-0.5

    def constants(self, share: Share, length: int, unit: int) -> tuple[int, tuple[Any, ...], int]:
        """The rows of a tile, what the kernels take as constants, and how many warps run a program."""
        blocks = self.rows // self.size
        size_p, rows_p, rank_p = self.padded
        # The other types are multiplied as 4 bytes; so are a few rows, whose gradients no others average out.
        short = self.dtype == torch.bfloat16 and length > 16
        tile = 16 if length <= 16 else max(16, min(share.tile, (4096 if short else 2048) // rows_p))
        precision = "ieee" if self.dtype == torch.float32 else "tf32"
        made = (
            *(self.size, blocks, self.rank, self.pair, self.signed, size_p, rows_p, rank_p),
            *(tile, unit, tl.bfloat16 if short else tl.float32, precision),
        )
        return tile, made, max(share.warps, min(8, rows_p * max(rank_p, 32) // share.entries))

    @property
    def padded(self) -> tuple[int, int, int]:
        """Head size, features and rank as powers of two, as tiles have them."""
        size = _power(self.size)
        return size, size * (1 << (self.rows // self.size - 1).bit_length()), _power(self.rank) if self.pair else size


def _power(n: int) -> int:
    return max(16, 1 << (n - 1).bit_length())  # 16: the least that a matrix product takes


def _unit(*strides: int) -> int:
    return 8 if not any(stride % 8 for stride in strides) else 1


@cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2  # interpreted


def _programs(kind: Kind, warps: int, heads: int, tiles: int) -> int:
    """For each head."""
    return max(1, min(-(-tiles // LEAST_TILES), WARPS // warps * _multiprocessors(kind.device) // heads))


Strides = tuple[int, ...]


@lru_cache(maxsize=4096)
def _forward_launch(
    kind: Kind, batch: int, heads: int, length: int, query: Strides, out: Strides, lse_head: int
) -> Launch:
    unit = _unit(*query[:3], *out[:3])
    tile, constants, warps = kind.constants(FORWARD, length, unit)
    a_row = -(-length // tile)
    grid = (_programs(kind, warps, heads, batch * a_row), heads, 1)
    strides = [stride // unit for stride in (*query[:3], *out[:3])]
    rest = (*strides, lse_head, length, a_row, batch * a_row, *kind.numbers, *constants, -LIGHTEST, LEAST_TOTAL, UNSEEN)
    return Launch(forward_kernel, grid, rest, warps)


@lru_cache(maxsize=4096)
def _backward_launches(
    kind: Kind, batch: int, heads: int, length: int, query: Strides, out: Strides, g_query: Strides | None, state: bool
) -> tuple[int, int, Launch, Launch]:
    """How many parts there are, and of how many numbers; the kernel that makes them, and the one that adds them."""
    of_query = g_query is not None
    given = (*query[:3], *out[:3], *(g_query or query)[:3])
    unit = _unit(*given)
    tile, constants, warps = kind.constants(BACKWARD, length, unit)
    a_row = -(-length // tile)
    programs = _programs(kind, warps, heads, batch * a_row)
    strides = [stride // unit for stride in given]
    rest = (*strides, length, a_row, batch * a_row, *kind.numbers, *constants, of_query, state)
    first = heads * kind.rows * kind.rank
    second = heads * kind.rank * kind.size if kind.pair else 0
    total = first + second + heads * kind.rows
    adding = Launch(
        sum_kernel, (-(-total // SUM_TILE), 1, 1), (programs, first, first + second, total, SUMMED, SUM_TILE), 4
    )
    return programs if state else 1, total, Launch(backward_kernel, (programs, heads, 1), rest, warps), adding


def _kind(query: Tensor, left: Tensor, right: Tensor, kappa: Tensor, pair: bool, signed: bool, scale: float) -> Kind:
    _, rows, rank = left.shape
    types = (left.dtype, right.dtype, kappa.dtype)
    return Kind(query.dtype, types, query.device, query.shape[3], rows, rank, pair, signed, scale)


def forward(
    query: Tensor,
    out: Tensor,
    lse: Tensor,
    left: Tensor,
    right: Tensor | None,
    kappa: Tensor,
    scale: float,
    signed: bool = False,
) -> tuple[Tensor, Tensor]:
    """`T`, in place of `out` unless that is a view; `[total, weight]`, with total 0 where a query sees no key.

    With `signed`, kappa is the absolute value of what is given.
    """
    batch, heads, length, _ = query.shape
    out = out if out.stride(3) == 1 else out.contiguous()
    if lse.stride(2) != 1 or lse.stride(0) != heads * lse.stride(1):
        lse = lse.contiguous()
    left, kappa = left.contiguous(), kappa.contiguous()
    second = left if right is None else right.contiguous()
    # Autograd forbids to change a view that a function gave.
    found = torch.empty_strided(out.shape, out.stride(), dtype=out.dtype, device=out.device) if out._is_view() else out
    stats = torch.empty((2, batch, heads, length), dtype=torch.float32, device=query.device)
    kind = _kind(query, left, second, kappa, right is not None, signed, scale)
    launch = _forward_launch(kind, batch, heads, length, query.stride(), out.stride(), lse.stride(1))
    with _on(query.device):
        launch(query, out, lse, left, second, kappa, found, stats)
    return found, stats


def backward(
    g_out: Tensor,
    query: Tensor,
    found: Tensor,
    stats: Tensor,
    left: Tensor,
    right: Tensor | None,
    kappa: Tensor,
    scale: float,
    g_query: Tensor | None,
    of_state: bool,
    signed: bool = False,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of left, right and kappa, if asked for; the query's is added to `g_query`, if there is one.

    `g_out` has the strides of `found`.
    """
    if g_query is None and not of_state:
        return None, None, None
    batch, heads, length, _ = query.shape
    left, kappa = left.contiguous(), kappa.contiguous()
    second = left if right is None else right.contiguous()
    kind = _kind(query, left, second, kappa, right is not None, signed, scale)
    g_strides = None if g_query is None else g_query.stride()
    programs, total, launch, add = _backward_launches(
        kind, batch, heads, length, query.stride(), found.stride(), g_strides, of_state
    )
    parts = torch.empty((programs, total), dtype=torch.float32, device=query.device)
    g_left = g_right = g_kappa = None
    with _on(query.device):
        launch(g_out, query, found, stats, left, second, kappa, query if g_query is None else g_query, parts)
        if of_state:
            g_left, g_kappa = torch.empty_like(left), torch.empty_like(kappa)
            g_right = None if right is None else torch.empty_like(second)
            add(parts, g_left, g_left if g_right is None else g_right, g_kappa)
    return g_left, g_right, g_kappa


def _on(device: torch.device) -> AbstractContextManager[object]:
    """Triton launches on the current device, whichever the tensors are on."""
    here = device.type != "cuda" or device.index == torch.cuda.current_device()
    return nullcontext() if here else torch.cuda.device(device)
