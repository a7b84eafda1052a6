"""Low-rank products whose factors differ from row to row, added to a layer's output without gradients (Triton).

    out[i] += scale[s_i] * (x[i] A[s_i]^T) B[s_i],      s_i the slot of row i.

One kernel a layer. Every row's factors are read where they lie, by its slot: nothing is gathered, cast or copied
before, so that nothing can be out of date, and the cost does not depend on how many slots there are. `x`, `A`, `B` and
`x A` are rounded to the output's type, as autocast would; sums are in float32. A row whose scale is 0 is not touched.
"""

from __future__ import annotations

from functools import cache, lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from inlay.attention.cuda import HAS_TRITON, OLDEST
from inlay.attention.cuda_kernels import capability
from inlay.attention.launch import Launch, Prepared, multiprocessors, on, unit

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
MOST_RANK = 64
"""Of a larger one the tiles would not fit."""
BYTES = 24 * 2**10
"""Of a tile of x and one of A, of which a program has some under way."""
KNOWN = "inlay_plan"
PROGRAMS = 2
"""A multiprocessor, at least: so many that each has another to wait for."""


def unwatched(out: Tensor) -> bool:
    """Whether a tensor on a GPU may be written to by a kernel of our own: neither autograd nor a compiler, a tracer, a
    mode or a transformation of functions would need to see it."""
    return (
        HAS_TRITON
        and out.is_cuda
        and not torch.is_grad_enabled()
        and not torch.compiler.is_compiling()
        and torch._C._get_tracing_state() is None
        and torch._C._len_torch_dispatch_stack() == 0
        and torch._C._functorch.peek_interpreter_stack() is None
        and capability(out.device) >= OLDEST
    )


def fits(out: Tensor, x: Tensor, a: Tensor, b: Tensor) -> bool:
    """Whether types and layouts are the kernel's."""
    return (
        type(out) is Tensor
        and type(x) is Tensor
        and out.dtype in FLOATS
        and x.dtype in FLOATS
        and a.dtype in FLOATS
        and b.dtype in FLOATS
        and b.shape[2] <= MOST_RANK
        and out.device == x.device == a.device == b.device
        and out.is_contiguous()
        and x.is_contiguous()
        and a.is_contiguous()
    )


class _Kind(NamedTuple):
    """What one compiled kernel is for."""

    device: torch.device
    types: tuple[torch.dtype, ...]  # of out, x, a, b
    input: int
    output: int
    width: int
    rank: int
    tokens: int  # of a tile
    unit: int  # by which distances in memory divide


@cache
def _launch(kind: _Kind) -> tuple[int, Launch]:
    """The channels of a tile, and the kernel."""
    from inlay.methods.low_rank_kernel import PRODUCTS, add_kernel

    rank = max(16, 1 << (kind.rank - 1).bit_length())
    of_chunk = kind.tokens * kind.types[1].itemsize + rank * kind.types[2].itemsize
    chunk = 128 if 128 * of_chunk <= BYTES else 64
    stages = 3 if chunk * of_chunk <= BYTES else 2
    constants = (kind.input, kind.output, kind.width, kind.rank, rank, kind.tokens, chunk, kind.unit)
    return chunk, Launch(add_kernel, (*constants, *PRODUCTS[kind.types[0]]), 4, stages)


@lru_cache(maxsize=4096)
def _plan(
    device: torch.device,
    types: tuple[torch.dtype, ...],
    sizes: tuple[int, int],
    shape: torch.Size,
    strides: tuple[int, int],
    rows: tuple[int, int],
    offsets: tuple[int, int],
) -> Prepared:
    """`sizes` are those of input and output, `shape` that of a slot's `B`, `strides` the slots' in `A` and `B`, `rows`
    their count and the tokens of each, `offsets` the first part's and from one to the next."""
    (parts, rank, width), (count, tokens) = shape, rows
    wanted = PROGRAMS * multiprocessors(device)
    tile = next((n for n in (64, 32) if n <= tokens and count * -(-tokens // n) * parts >= wanted), 16)
    tile = max(tile, 32) if tokens > 16 else 16
    distances = (*strides, *offsets)
    step = unit(*distances)
    chunk, launch = _launch(_Kind(device, types, *sizes, width, rank, tile, step))
    tiles = -(-tokens // tile)
    # Where there are few programs the output is divided, and `x A` computed by each.
    chunks = -(-width // chunk)
    of_program = -(-chunks // max(1, min(chunks, wanted // (count * tiles * parts))))
    grid = (count * tiles, parts, -(-chunks // of_program))
    return Prepared(launch, grid, (tokens, tiles, *(each // step for each in distances), of_program))


def add_by_slot(
    out: Tensor, x: Tensor, a: Tensor, b: Tensor, scales: Tensor, slots: Tensor, offsets: tuple[int, int]
) -> None:
    """Add to `out` (..., m) in place, given `x` (..., d).

    `a` is (s r, d), the same for every slot, or (slots, s r, d); `b` is (slots, s, r, width) for s parts of the output,
    which lie at `offsets`: the first part's, and from each to the next. `scales` (slots) is float32. `slots` has one
    for each row, and the tokens of a row follow one another.
    """
    if not out.numel():
        return
    given = out.shape, x.shape, out.dtype, x.dtype, slots.shape[0], offsets
    # What is the same in every pass is looked up on the tensor that it is for: a layer waits for the host.
    known = b.__dict__.get(KNOWN)
    if known is None or known[0] != given or known[1] is not a:
        sizes, strides = (x.shape[-1], out.shape[-1]), (a.stride(0) if a.ndim == 3 else 0, b.stride(0))
        rows = slots.shape[0], x.numel() // (slots.shape[0] * sizes[0])
        types = out.dtype, x.dtype, a.dtype, b.dtype
        known = b.__dict__[KNOWN] = given, a, _plan(out.device, types, sizes, b.shape[1:], strides, rows, offsets)
    with on(out.device):
        known[2](out, x, a, b, scales, slots)
