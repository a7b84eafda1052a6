"""The feature term of `elu` joined to a flash kernel's output, in one pass each way (Triton).

Forward, with a kernel's output `o` and log-sum-exp `a`, `phi = (ELU(q sqrt(scale)) + 1) / sqrt(r)`,
`n = phi Z_A Z_B` and `D = phi kappa`, as join.py has it:

    t = exp(min(-a, 40)),    T = (o + t n) / (1 + t D),    total = a + log(1 + t D),    weight = t / (1 + t D).

Backward, with `g` the gradient of T and `delta = sum(g * T)`, `u = weight g Z_B^T`:

    g_phi = u Z_A^T - weight delta kappa,    g_Z_A = phi^T u,    g_Z_B = (phi Z_A)^T (weight g),
    g_kappa = -phi^T (weight delta).

`g_phi` goes on to the query, and is added to what the flash kernel found for it. The three sums over batch and length
are made in parts, each by one program in a fixed order, and the parts are added in a fixed order: the result does not
change from run to run. phi and Z never leave the chip. Products are of bfloat16 numbers where the query is; of tf32
where it is float16, whose range is too small for a weight; of float32 otherwise. Sums are float32 throughout.

The kernels stand in epilogue_kernels.py. Triton's own way to a compiled kernel takes longer than a small kernel runs:
here it is taken once, and what it found is kept for as long as everything that it looks at is the same.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from inlay.attention.cuda_kernels import capability
from inlay.attention.epilogue_kernels import backward_kernel, forward_kernel, sum_kernel
from inlay.attention.join import LEAST_TOTAL, LIGHTEST

FORWARD_PROGRAMS, BACKWARD_PROGRAMS = 8, 6
"""Programs a multiprocessor: more load Z again, or make more parts to add; fewer have too little to do at once."""
FOLD_AT_MOST, FOLD_AT_MOST_IF_ROOMY = 64 * 64, 128 * 128
"""Entries of Z up to which it is multiplied out; the second where a program may have 160 KB of fast memory."""
ROOMY = ((8, 0), (9, 0), (10, 0), (10, 3))
SUMMED, SUM_TILE = 32, 128


@dataclass(frozen=True, eq=False)
class Plan:
    """How one kind of call is computed; `constants` as the kernels take them."""

    tile: int
    unit: int
    constants: tuple[Any, ...]
    warps: int


@cache
def plan(
    dtype: torch.dtype, size: int, rows: int, rank: int, pair: bool, few: bool, unit: int, signed: bool, roomy: bool
) -> Plan:
    blocks = rows // size
    size_p = _power(size)
    rows_p = size_p * (1 << (blocks - 1).bit_length())
    rank_p = _power(rank) if pair else size_p
    short = dtype == torch.bfloat16  # the other types are multiplied as 4 bytes
    fold = pair and short and not few and rows_p * size_p <= (FOLD_AT_MOST_IF_ROOMY if roomy else FOLD_AT_MOST)
    width = size_p if fold else rank_p
    tile = 16 if few else max(16, min(64, (8192 if short else 4096) // rows_p))
    precision = "ieee" if dtype == torch.float32 else "tf32"
    shape = (size, blocks, rank, pair, fold, pair and not fold, signed, size_p, rows_p, rank_p, width, tile, unit)
    constants = (*shape, 1, tl.bfloat16 if short else tl.float32, precision)
    return Plan(tile, unit, constants, 8 if max(tile, width) * rows_p > 4096 else 4)


def _power(n: int) -> int:
    return max(16, 1 << (n - 1).bit_length())  # 16: the least that a matrix product takes


def _plan(query: Tensor, left: Tensor, right: Tensor | None, signed: bool, *strides: int) -> Plan:
    unit = 8 if not any(stride % 8 for stride in strides) else 1
    size, (_, rows, rank) = query.shape[3], left.shape
    roomy = query.device.type == "cuda" and capability(query.device) in ROOMY
    return plan(query.dtype, size, rows, rank, right is not None, query.shape[2] <= 16, unit, signed, roomy)


_COMPILED: dict[tuple[Any, ...], Any] = {}


def _launch(
    kernel: Any,
    kind: tuple[Any, ...],
    grid: tuple[int, int, int],
    tensors: tuple[Tensor, ...],
    numbers: tuple[float, ...],
    constants: tuple[Any, ...],
    warps: int = 4,
) -> None:
    """Run a kernel; `kind` tells constants and warps apart.

    Triton compiles anew for other types, other devices, integers beyond 32 bits and pointers that are not multiples of
    16: the first two are part of the key, and the others go Triton's way every time.
    """
    pointers = [x.data_ptr() for x in tensors]
    bits = 0
    for pointer in pointers:
        bits |= pointer
    usual = not bits % 16 and max(numbers) < 2**31
    key = (kernel, kind, tensors[0].device, *[x.dtype for x in tensors])
    compiled = _COMPILED.get(key) if usual else None
    if compiled is not None:
        compiled[grid](*pointers, *numbers, *constants)
        return
    compiled = kernel[grid](*tensors, *numbers, *constants, num_warps=warps, num_stages=1)
    if usual and compiled is not None:  # Triton's interpreter gives None
        _COMPILED[key] = compiled


_MULTIPROCESSORS: dict[torch.device, int] = {}


def _programs(device: torch.device, share: int, heads: int, tiles: int) -> int:
    """For each head, of all programs that run for all of them."""
    if device not in _MULTIPROCESSORS:
        of_gpu = device.type == "cuda"  # else Triton's interpreter
        _MULTIPROCESSORS[device] = torch.cuda.get_device_properties(device).multi_processor_count if of_gpu else 2
    return max(1, min(tiles, share * _MULTIPROCESSORS[device] // heads))


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
    left, right, kappa = left.contiguous(), right if right is None else right.contiguous(), kappa.contiguous()
    # Autograd forbids to change a view that a function gave.
    found = torch.empty_strided(out.shape, out.stride(), dtype=out.dtype, device=out.device) if out._is_view() else out
    stats = torch.empty((2, batch, heads, length), dtype=torch.float32, device=query.device)
    q, o = query.stride()[:3], out.stride()[:3]
    chosen = _plan(query, left, right, signed, *q, *o)
    unit = chosen.unit
    a_row = -(-length // chosen.tile)
    programs = _programs(query.device, FORWARD_PROGRAMS, heads, batch * a_row)
    with _on(query.device):
        _launch(
            forward_kernel,
            (chosen,),
            (programs, heads, 1),
            (query, out, lse, left, left if right is None else right, kappa, found, stats),
            (
                *(q[0] // unit, q[1] // unit, q[2] // unit, o[0] // unit, o[1] // unit, o[2] // unit),
                *(lse.stride(1), length, a_row, batch * a_row, math.sqrt(scale), left.shape[1] ** -0.5),
            ),
            (*chosen.constants, -LIGHTEST, LEAST_TOTAL),
            chosen.warps,
        )
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
    left, right, kappa = left.contiguous(), right if right is None else right.contiguous(), kappa.contiguous()
    q, o = query.stride()[:3], found.stride()[:3]
    g = q if g_query is None else g_query.stride()[:3]
    chosen = _plan(query, left, right, signed, *q, *o, *g)
    unit = chosen.unit
    a_row = -(-length // chosen.tile)
    programs = _programs(query.device, BACKWARD_PROGRAMS, heads, batch * a_row)
    state = (left, kappa) if right is None else (left, right, kappa)
    total = sum([x.numel() for x in state])
    parts = torch.empty((programs if of_state else 1, total), dtype=torch.float32, device=query.device)
    with _on(query.device):
        _launch(
            backward_kernel,
            (chosen, g_query is not None, of_state),
            (programs, heads, 1),
            (
                *(g_out, query, found, stats, left, left if right is None else right, kappa),
                *(query if g_query is None else g_query, parts),
            ),
            (
                *(q[0] // unit, q[1] // unit, q[2] // unit, o[0] // unit, o[1] // unit, o[2] // unit),
                *(g[0] // unit, g[1] // unit, g[2] // unit, length, a_row, batch * a_row),
                *(math.sqrt(scale), left.shape[1] ** -0.5),
            ),
            (*chosen.constants, g_query is not None, of_state),
            chosen.warps,
        )
        if not of_state:
            return None, None, None
        sums = torch.empty(total, dtype=torch.float32, device=query.device)
        grid = (-(-total // SUM_TILE), 1, 1)
        _launch(sum_kernel, (), grid, (parts, sums), (programs, total), (SUMMED, SUM_TILE))
    grads = torch._C._nn.unflatten_dense_tensors(sums, state)
    typed = [grad if grad.dtype == x.dtype else grad.to(x.dtype) for grad, x in zip(grads, state, strict=True)]
    return typed[0], None if right is None else typed[1], typed[-1]


def _on(device: torch.device) -> AbstractContextManager[object]:
    """Triton launches on the current device, whichever the tensors are on."""
    here = device.type != "cuda" or device.index == torch.cuda.current_device()
    return nullcontext() if here else torch.cuda.device(device)
