"""The feature term of `elu` joined to a flash kernel's output, in one pass each way (Triton).

Forward, with a kernel's output `o` and log-sum-exp `a`, `phi = (ELU(q sqrt(scale)) + 1) / sqrt(r)`,
`n = phi Z_A Z_B` and `D = phi kappa`, as join.py has it:

    t = exp(min(-a, 40)),    T = (o + t n) / (1 + t D),    total = a + log(1 + t D),    weight = t / (1 + t D).

Backward, with `g` the gradient of T and `delta = sum(g * T)`, `u = weight g Z_B^T`:

    g_phi = u Z_A^T - weight delta kappa,    g_Z_A = phi^T u,    g_Z_B = (phi Z_A)^T (weight g),
    g_kappa = -phi^T (weight delta).

`g_phi` goes on to the query, and is added to what the flash kernel found for it. The three sums over batch and length
are made in parts, each by one program in a fixed order, and the parts are added by torch: the result does not change
from run to run. phi and Z never leave the chip. Products are of bfloat16 numbers where the query is; of tf32 where it
is float16, whose range is too small for a weight; of float32 otherwise. Sums are float32 throughout.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from inlay.attention.join import LEAST_TOTAL, LIGHTEST

PROGRAMS = 4
"""Programs a multiprocessor in the backward pass: more parts to add, or too little to do at once."""


@triton.jit
def _forward(  # type: ignore[no-untyped-def]
    query,
    out,
    lse,
    left,
    right,
    kappa,
    found,
    total,
    weight,
    q_batch,
    q_head,
    q_row,
    o_batch,
    o_head,
    o_row,
    f_batch,
    f_head,
    f_row,
    lse_head,
    heads,
    length,
    inner,
    norm,
    SIZE: tl.constexpr,
    BLOCKS: tl.constexpr,
    RANK: tl.constexpr,
    PAIR: tl.constexpr,
    SIZE_P: tl.constexpr,
    ROWS_P: tl.constexpr,
    RANK_P: tl.constexpr,
    TILE: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
    HEAVIEST: tl.constexpr,
    LEAST: tl.constexpr,
):
    head_of_all = tl.program_id(1)
    b = (head_of_all // heads).to(tl.int64)
    h = head_of_all % heads
    i = tl.program_id(0) * TILE + tl.arange(0, TILE)
    alive = i < length
    d = tl.arange(0, SIZE_P)
    s = tl.arange(0, RANK_P)
    # Feature f is coordinate f % SIZE_P in block f // SIZE_P; in memory the blocks are SIZE long.
    f = tl.arange(0, ROWS_P)
    block = f // SIZE_P
    coordinate = f % SIZE_P
    known = (coordinate < SIZE) & (block < BLOCKS)
    row = h * BLOCKS * SIZE + block * SIZE + coordinate
    factor = inner * tl.where(block % 2 == 0, 1.0, -1.0) * tl.exp2((block // 2).to(tl.float32))

    at = i[:, None].to(tl.int64)
    places = query + b * q_batch + h * q_head + at * q_row + coordinate[None, :]
    z = tl.load(places, mask=alive[:, None] & known[None, :], other=0.0).to(tl.float32) * factor[None, :]
    phi = (tl.maximum(z, 0.0) + tl.exp(tl.minimum(z, 0.0))) * norm
    a = tl.load(left + row[:, None] * RANK + s[None, :], mask=known[:, None] & (s[None, :] < RANK), other=0.0).to(
        tl.float32
    )
    n = tl.dot(phi.to(DOT), a.to(DOT), input_precision=PRECISION)
    if PAIR:
        c = tl.load(
            right + (h * RANK + s[:, None]) * SIZE + d[None, :],
            mask=(s[:, None] < RANK) & (d[None, :] < SIZE),
            other=0.0,
        ).to(tl.float32)
        n = tl.dot(n.to(DOT), c.to(DOT), input_precision=PRECISION)
    k = tl.load(kappa + row, mask=known, other=0.0).to(tl.float32)
    D = tl.sum(phi * k[None, :], 1)

    keys = tl.load(lse + head_of_all.to(tl.int64) * lse_head + i, mask=alive, other=0.0)
    sees = (keys > -float("inf")) & (keys < float("inf"))  # false for NaN
    t = tl.exp(tl.minimum(tl.where(sees, -keys, HEAVIEST), HEAVIEST))
    whole = tl.maximum(1.0 + t * D, LEAST)
    w = t / whole
    inside = alive[:, None] & (d[None, :] < SIZE)
    o = tl.load(out + b * o_batch + h * o_head + at * o_row + d[None, :], mask=inside, other=0.0).to(tl.float32)
    o = tl.where(sees[:, None], o, 0.0)
    T = o / whole[:, None] + w[:, None] * n
    tl.store(found + b * f_batch + h * f_head + at * f_row + d[None, :], T.to(found.dtype.element_ty), mask=inside)
    at_row = head_of_all.to(tl.int64) * length + i
    tl.store(total + at_row, tl.where(sees, keys + tl.log(whole), 0.0), mask=alive)
    tl.store(weight + at_row, w, mask=alive)


@triton.jit
def _backward(  # type: ignore[no-untyped-def]
    g_out,
    query,
    found,
    weight,
    left,
    right,
    kappa,
    g_query,
    parts,
    q_batch,
    q_head,
    q_row,
    f_batch,
    f_head,
    f_row,
    g_batch,
    g_head,
    g_row,
    heads,
    length,
    tiles_a_row,
    tiles,
    part_size,
    right_at,
    kappa_at,
    inner,
    norm,
    SIZE: tl.constexpr,
    BLOCKS: tl.constexpr,
    RANK: tl.constexpr,
    PAIR: tl.constexpr,
    SIZE_P: tl.constexpr,
    ROWS_P: tl.constexpr,
    RANK_P: tl.constexpr,
    TILE: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
    OF_QUERY: tl.constexpr,
    OF_STATE: tl.constexpr,
):
    part = tl.program_id(0)
    h = tl.program_id(1)
    d = tl.arange(0, SIZE_P)
    s = tl.arange(0, RANK_P)
    f = tl.arange(0, ROWS_P)
    block = f // SIZE_P
    coordinate = f % SIZE_P
    known = (coordinate < SIZE) & (block < BLOCKS)
    row = h * BLOCKS * SIZE + block * SIZE + coordinate
    factor = inner * tl.where(block % 2 == 0, 1.0, -1.0) * tl.exp2((block // 2).to(tl.float32))
    in_left = known[:, None] & (s[None, :] < RANK)
    a = tl.load(left + row[:, None] * RANK + s[None, :], mask=in_left, other=0.0).to(tl.float32).to(DOT)
    k = tl.load(kappa + row, mask=known, other=0.0).to(tl.float32)
    at_right = (h * RANK + s[:, None]) * SIZE + d[None, :]
    in_right = (s[:, None] < RANK) & (d[None, :] < SIZE)
    g_left_sum = tl.zeros((ROWS_P, RANK_P), tl.float32)
    g_kappa_sum = tl.zeros((ROWS_P,), tl.float32)
    if PAIR:
        c = tl.load(right + at_right, mask=in_right, other=0.0).to(tl.float32).to(DOT)
        g_right_sum = tl.zeros((RANK_P, SIZE_P), tl.float32)

    for tile in range(part, tiles, tl.num_programs(0)):
        b = (tile // tiles_a_row).to(tl.int64)
        i = (tile % tiles_a_row) * TILE + tl.arange(0, TILE)
        alive = i < length
        at = i[:, None].to(tl.int64)
        z = (
            tl.load(
                query + b * q_batch + h * q_head + at * q_row + coordinate[None, :],
                mask=alive[:, None] & known[None, :],
                other=0.0,
            ).to(tl.float32)
            * factor[None, :]
        )
        curve = tl.maximum(z, 0.0) + tl.exp(tl.minimum(z, 0.0))
        inside = alive[:, None] & (d[None, :] < SIZE)
        at_found = b * f_batch + h * f_head + at * f_row + d[None, :]
        g = tl.load(g_out + at_found, mask=inside, other=0.0).to(tl.float32)
        T = tl.load(found + at_found, mask=inside, other=0.0).to(tl.float32)
        w = tl.load(weight + (b * heads + h) * length + i, mask=alive, other=0.0)
        w_delta = w * tl.sum(g * T, 1)
        wg = g * w[:, None]
        if PAIR:  # noqa: SIM108
            u = tl.dot(wg.to(DOT), tl.trans(c), input_precision=PRECISION)
        else:
            u = wg
        if OF_QUERY:
            g_phi = tl.dot(u.to(DOT), tl.trans(a), input_precision=PRECISION) - w_delta[:, None] * k[None, :]
            g_z = g_phi * tl.minimum(curve, 1.0) * (factor * norm)[None, :]
            if ROWS_P != SIZE_P:
                g_z = tl.sum(tl.reshape(g_z, (TILE, ROWS_P // SIZE_P, SIZE_P)), 1)
            places = g_query + b * g_batch + h * g_head + at * g_row + d[None, :]
            g_z += tl.load(places, mask=inside, other=0.0).to(tl.float32)
            tl.store(places, g_z.to(g_query.dtype.element_ty), mask=inside)
        if OF_STATE:
            phi = curve * norm
            g_left_sum += tl.dot(tl.trans(phi.to(DOT)), u.to(DOT), input_precision=PRECISION)
            g_kappa_sum -= tl.sum(phi * w_delta[:, None], 0)
            if PAIR:
                m = tl.dot(phi.to(DOT), a, input_precision=PRECISION)
                g_right_sum += tl.dot(tl.trans(m.to(DOT)), wg.to(DOT), input_precision=PRECISION)

    if OF_STATE:
        mine = parts + part.to(tl.int64) * part_size
        tl.store(mine + row[:, None] * RANK + s[None, :], g_left_sum, mask=in_left)
        tl.store(mine + kappa_at + row, g_kappa_sum, mask=known)
        if PAIR:
            tl.store(mine + right_at + at_right, g_right_sum, mask=in_right)


_MULTIPROCESSORS: dict[torch.device, int] = {}


def _multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return 2  # Triton's interpreter
    if device not in _MULTIPROCESSORS:
        _MULTIPROCESSORS[device] = torch.cuda.get_device_properties(device).multi_processor_count
    return _MULTIPROCESSORS[device]


def _power(n: int) -> int:
    return max(16, 1 << (n - 1).bit_length())  # 16: the least that a matrix product takes


def _constants(query: Tensor, left: Tensor, right: Tensor | None) -> dict[str, Any]:
    _, rows, rank = left.shape
    return _tiles(query.dtype, query.shape[-1], rows, rank, right is not None, query.shape[2] <= 16)


@cache
def _tiles(dtype: torch.dtype, size: int, rows: int, rank: int, pair: bool, few: bool) -> dict[str, Any]:
    blocks = rows // size
    size_p = _power(size)
    rows_p = size_p * (1 << (blocks - 1).bit_length())
    rank_p = _power(rank) if pair else size_p
    short = dtype == torch.bfloat16  # the other types are multiplied as 4 bytes
    tile = 16 if few else max(16, min(64, (8192 if short else 4096) // rows_p))
    return {
        "SIZE": size,
        "BLOCKS": blocks,
        "RANK": rank,
        "PAIR": pair,
        "SIZE_P": size_p,
        "ROWS_P": rows_p,
        "RANK_P": rank_p,
        "TILE": tile,
        "DOT": tl.bfloat16 if short else tl.float32,
        "PRECISION": "ieee" if dtype == torch.float32 else "tf32",
        "num_warps": 8 if max(tile, rank_p) * rows_p > 4096 else 4,
        "num_stages": 2 if short else 1,
    }


def forward(
    query: Tensor, out: Tensor, lse: Tensor, left: Tensor, right: Tensor | None, kappa: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """`T`, laid out as `out`; `total`, 0 for a query that sees no key; and `weight`. See the formulas above."""
    batch, heads, length, _ = query.shape
    out = out if out.stride(-1) == 1 else out.contiguous()
    if lse.stride(2) != 1 or lse.stride(0) != heads * lse.stride(1):
        lse = lse.contiguous()
    left, right, kappa = left.contiguous(), right if right is None else right.contiguous(), kappa.contiguous()
    found = torch.empty_like(out)
    total = torch.empty((batch, heads, length), dtype=torch.float32, device=query.device)
    weight = torch.empty_like(total)
    constants = _constants(query, left, right)
    with _on(query.device):
        _forward[(-(-length // constants["TILE"]), batch * heads)](
            query,
            out,
            lse,
            left,
            left if right is None else right,
            kappa,
            found,
            total,
            weight,
            *query.stride()[:3],
            *out.stride()[:3],
            *found.stride()[:3],
            lse.stride(1),
            heads,
            length,
            math.sqrt(scale),
            left.shape[1] ** -0.5,
            HEAVIEST=-LIGHTEST,
            LEAST=LEAST_TOTAL,
            **constants,
        )
    return found, total, weight


def backward(
    g_out: Tensor,
    query: Tensor,
    found: Tensor,
    weight: Tensor,
    left: Tensor,
    right: Tensor | None,
    kappa: Tensor,
    scale: float,
    g_query: Tensor | None,
    of_state: bool,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of left, right and kappa, if asked for; the query's is added to `g_query`, if there is one.

    `g_out` has the strides of `found`.
    """
    batch, heads, length, _ = query.shape
    left, right, kappa = left.contiguous(), right if right is None else right.contiguous(), kappa.contiguous()
    constants = _constants(query, left, right)
    tiles_a_row = -(-length // constants["TILE"])
    tiles = batch * tiles_a_row
    programs = max(1, min(tiles, -(-PROGRAMS * _multiprocessors(query.device) // heads)))
    sizes = [left.numel(), 0 if right is None else right.numel(), kappa.numel()]
    parts = torch.empty((programs if of_state else 1, sum(sizes)), dtype=torch.float32, device=query.device)
    of_query = g_query is not None
    g_strides = g_query.stride()[:3] if g_query is not None else (0, 0, 0)
    if not of_query and not of_state:
        return None, None, None
    with _on(query.device):
        _backward[(programs, heads)](
            g_out,
            query,
            found,
            weight,
            left,
            left if right is None else right,
            kappa,
            g_query if g_query is not None else query,
            parts,
            *query.stride()[:3],
            *found.stride()[:3],
            *g_strides,
            heads,
            length,
            tiles_a_row,
            tiles,
            parts.shape[1],
            sizes[0],
            sizes[0] + sizes[1],
            math.sqrt(scale),
            left.shape[1] ** -0.5,
            OF_QUERY=of_query,
            OF_STATE=of_state,
            **constants,
        )
    if not of_state:
        return None, None, None
    g_left, g_right, g_kappa = parts.sum(0).split(sizes)
    return (
        g_left.view(left.shape).to(left.dtype),
        None if right is None else g_right.view(right.shape).to(right.dtype),
        g_kappa.view(kappa.shape).to(kappa.dtype),
    )


def _on(device: torch.device) -> AbstractContextManager[object]:
    """Triton launches on the current device, whichever the tensors are on."""
    here = device.type != "cuda" or device.index == torch.cuda.current_device()
    return nullcontext() if here else torch.cuda.device(device)
