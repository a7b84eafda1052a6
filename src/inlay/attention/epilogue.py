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
change from run to run. phi and Z never leave the chip. Products are of bfloat16 numbers where the query is; of tf32
where it is float16, whose range is too small for a weight; of float32 otherwise, and for at most 16 queries. Sums are
float32 throughout.

`delta` may be a tenth of its terms, and for one query nothing else enters the gradient of kappa: T rounded to 8 bits
there, or n to 11, is 1 % of it. So for short queries T is kept in float32 beside what is given out.

The kernels stand in epilogue_kernels.py. What a launch needs besides pointers is worked out once for all calls of one
shape.
"""

from __future__ import annotations

import math
from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from inlay.attention.epilogue_kernels import backward_kernel, forward_kernel, sum_kernel
from inlay.attention.join import LEAST_TOTAL, LIGHTEST, UNSEEN
from inlay.attention.launch import Launch, Prepared, multiprocessors, on, unit
from inlay.attention.term import SHORT, kept

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


class CallKind(NamedTuple):
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

    def constants(self, share: Share, length: int, step: int) -> tuple[int, tuple[Any, ...], int]:
        """The rows of a tile, what the kernels take as constants, and how many warps run a program."""
        blocks = self.rows // self.size
        size_p, rows_p, rank_p = self.padded
        # The other types are multiplied as 4 bytes; so are a few rows, whose gradients no others average out.
        halves = self.dtype == torch.bfloat16 and length > SHORT
        tile = SHORT if length <= SHORT else max(16, min(share.tile, (4096 if halves else 2048) // rows_p))
        precision = "ieee" if self.dtype == torch.float32 or length <= SHORT else "tf32"
        made = (
            *(self.size, blocks, self.rank, self.pair, self.signed, size_p, rows_p, rank_p),
            *(tile, step, tl.bfloat16 if halves else tl.float32, precision),
        )
        return tile, made, max(share.warps, min(8, rows_p * max(rank_p, 32) // share.entries))

    @property
    def padded(self) -> tuple[int, int, int]:
        """Head size, features and rank as powers of two, as tiles have them."""
        size = _power(self.size)
        return size, size * (1 << (self.rows // self.size - 1).bit_length()), _power(self.rank) if self.pair else size


def _power(n: int) -> int:
    return max(16, 1 << (n - 1).bit_length())  # 16: the least that a matrix product takes


def _programs(kind: CallKind, warps: int, heads: int, tiles: int) -> int:
    """For each head."""
    return max(1, min(-(-tiles // LEAST_TILES), WARPS // warps * multiprocessors(kind.device) // heads))


Strides = tuple[int, ...]
KERNELS = {"forward": forward_kernel, "backward": backward_kernel, "sum": sum_kernel}


@cache
def _launch(name: str, kind: CallKind, constants: tuple[Any, ...], warps: int) -> Launch:
    return Launch(KERNELS[name], constants, warps)


@lru_cache(maxsize=4096)
def _forward_launch(
    kind: CallKind, batch: int, heads: int, length: int, query: Strides, out: Strides, lse_head: int, exact: bool
) -> Prepared:
    step = unit(*query[:3], *out[:3])
    tile, constants, warps = kind.constants(FORWARD, length, step)
    constants = *constants, exact, -LIGHTEST, LEAST_TOTAL, UNSEEN
    a_row = -(-length // tile)
    grid = (_programs(kind, warps, heads, batch * a_row), heads, 1)
    strides = [stride // step for stride in (*query[:3], *out[:3])]
    numbers = (*strides, lse_head, length, a_row, batch * a_row, *kind.numbers)
    return Prepared(_launch("forward", kind, constants, warps), grid, numbers)


@lru_cache(maxsize=4096)
def _backward_launches(
    kind: CallKind,
    batch: int,
    heads: int,
    length: int,
    query: Strides,
    out: Strides,
    g_query: Strides | None,
    exact: bool,
    state: bool,
) -> tuple[int, int, Prepared, Prepared]:
    """How many parts there are, and of how many numbers; the kernel that makes them, and the one that adds them."""
    of_query = g_query is not None
    given = (*query[:3], *out[:3], *(g_query or query)[:3])
    step = unit(*given)
    tile, constants, warps = kind.constants(BACKWARD, length, step)
    constants = *constants, exact, of_query, state
    a_row = -(-length // tile)
    programs = _programs(kind, warps, heads, batch * a_row)
    numbers = (*(stride // step for stride in given), length, a_row, batch * a_row, *kind.numbers)
    first = heads * kind.rows * kind.rank
    second = heads * kind.rank * kind.size if kind.pair else 0
    total = first + second + heads * kind.rows
    adding = Prepared(
        _launch("sum", kind, (SUMMED, SUM_TILE), 4),
        (-(-total // SUM_TILE), 1, 1),
        (programs, first, first + second, total),
    )
    making = Prepared(_launch("backward", kind, constants, warps), (programs, heads, 1), numbers)
    return programs if state else 1, total, making, adding


def make_kind(
    query: Tensor, left: Tensor, right: Tensor, kappa: Tensor, pair: bool, signed: bool, scale: float
) -> CallKind:
    _, rows, rank = left.shape
    types = (left.dtype, right.dtype, kappa.dtype)
    return CallKind(query.dtype, types, query.device, query.shape[3], rows, rank, pair, signed, scale)


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
    """`T`, in place of `out` unless that is a view; and of each row what `kept` (term.py) says: total, with 0 where a
    query sees no key, weight, and for short queries T before it was rounded.

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
    keeps = kept(query)
    stats = torch.empty((keeps, batch, heads, length), dtype=torch.float32, device=query.device)
    kind = make_kind(query, left, second, kappa, right is not None, signed, scale)
    launch = _forward_launch(kind, batch, heads, length, query.stride(), out.stride(), lse.stride(1), keeps > 2)
    with on(query.device):
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
    kind = make_kind(query, left, second, kappa, right is not None, signed, scale)
    g_strides = None if g_query is None else g_query.stride()
    programs, total, launch, add = _backward_launches(
        kind, batch, heads, length, query.stride(), found.stride(), g_strides, len(stats) > 2, of_state
    )
    parts = torch.empty((programs, total), dtype=torch.float32, device=query.device)
    g_left = g_right = g_kappa = None
    with on(query.device):
        launch(g_out, query, found, stats, left, second, kappa, query if g_query is None else g_query, parts)
        if of_state:
            g_left, g_kappa = torch.empty_like(left), torch.empty_like(kappa)
            g_right = None if right is None else torch.empty_like(second)
            add(parts, g_left, g_left if g_right is None else g_right, g_kappa)
    return g_left, g_right, g_kappa
