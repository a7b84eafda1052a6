"""The Triton kernels of epilogue.py, where the formulas stand.

A program takes many tiles of one head and loads Z once. `PAIR` says that Z came as the factors `left right`. With
`SIGNED` kappa is `|rho|`, of slope +1 at 0, and rho is what is given. Strides come in units of `UNIT` elements, so that
the compiler knows by which number they divide; no number but that is compiled in, or every new length would be a new
kernel. With `EXACT` stats also hold T in float32. `factor` has the base of exp2, which unlike exp costs no instructions
for numbers next to nothing.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl

NUMBERS = ["q_batch", "q_head", "q_row", "o_batch", "o_head", "o_row", "lse_head", "g_batch", "g_head", "g_row"]
NUMBERS += ["length", "tiles_a_row", "tiles", "programs", "right_at", "kappa_at", "total"]
"""Integers of which nothing is compiled in."""
LOG_2 = tl.constexpr(math.log(2))


@triton.jit
def _place(x, batch, head, row, b, h, i, column, UNIT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Where rows i of head h of example b lie."""
    return x + (b * batch + h * head) * UNIT + i[:, None].to(tl.int64) * row * UNIT + column[None, :]


@triton.jit
def elu(z, LOG_2: tl.constexpr):  # type: ignore[no-untyped-def]
    """ELU(z log 2) + 1."""
    return tl.maximum(z, 0.0) * LOG_2 + tl.math.exp2(tl.minimum(z, 0.0))


@triton.jit
def parameter(place, inside):  # type: ignore[no-untyped-def]
    return tl.load(place, mask=inside, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=NUMBERS)
def forward_kernel(  # type: ignore[no-untyped-def]
    query,
    out,
    lse,
    left,
    right,
    kappa,
    found,
    stats,
    q_batch,
    q_head,
    q_row,
    o_batch,
    o_head,
    o_row,
    lse_head,
    length,
    tiles_a_row,
    tiles,
    inner,
    norm,
    SIZE: tl.constexpr,
    BLOCKS: tl.constexpr,
    RANK: tl.constexpr,
    PAIR: tl.constexpr,
    SIGNED: tl.constexpr,
    SIZE_P: tl.constexpr,
    ROWS_P: tl.constexpr,
    RANK_P: tl.constexpr,
    TILE: tl.constexpr,
    UNIT: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
    EXACT: tl.constexpr,
    HEAVIEST: tl.constexpr,
    LEAST: tl.constexpr,
    UNSEEN: tl.constexpr,
):
    h = tl.program_id(1)
    heads = tl.num_programs(1)
    d = tl.arange(0, SIZE_P)
    s = tl.arange(0, RANK_P)
    # Feature f is coordinate f % SIZE_P in block f // SIZE_P; in memory the blocks are SIZE long.
    f = tl.arange(0, ROWS_P)
    block = f // SIZE_P
    coordinate = f % SIZE_P
    known = (coordinate < SIZE) & (block < BLOCKS)
    row = h * (BLOCKS * SIZE) + block * SIZE + coordinate
    factor = inner * tl.where(block % 2 == 0, 1.0, -1.0) * tl.exp2((block // 2).to(tl.float32))
    of_size = d < SIZE
    a = parameter(left + row[:, None] * RANK + s[None, :], known[:, None] & (s[None, :] < RANK)) * norm
    if PAIR:
        at_right = (h * RANK + s[:, None]) * SIZE + d[None, :]
        c = parameter(right + at_right, (s[:, None] < RANK) & of_size[None, :]).to(DOT)
    a = a.to(DOT)
    k = parameter(kappa + row, known) * norm
    if SIGNED:
        k = tl.abs(k)

    head = h.to(tl.int64)
    all_rows = (tiles // tiles_a_row).to(tl.int64) * heads * length
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        b = (tile // tiles_a_row).to(tl.int64)
        i = (tile % tiles_a_row) * TILE + tl.arange(0, TILE)
        alive = i < length
        at_query = _place(query, q_batch, q_head, q_row, b, head, i, coordinate, UNIT)
        q = tl.load(at_query, mask=alive[:, None] & known[None, :], other=0.0)
        inside = alive[:, None] & of_size[None, :]
        o = tl.load(_place(out, o_batch, o_head, o_row, b, head, i, d, UNIT), mask=inside, other=0.0).to(tl.float32)
        keys = tl.load(lse + (b * heads + h) * lse_head + i, mask=alive, other=0.0)
        phi = elu(q.to(tl.float32) * factor[None, :], LOG_2)
        n = tl.dot(phi.to(DOT), a, input_precision=PRECISION)
        if PAIR:
            n = tl.dot(n.to(DOT), c, input_precision=PRECISION)
        D = tl.sum(phi * k[None, :], 1)

        sees = (keys > -float("inf")) & (keys < float("inf"))  # false for NaN
        t = tl.exp(tl.minimum(tl.where(sees & (keys >= UNSEEN), -keys, 0.0), HEAVIEST))
        whole = tl.maximum(1.0 + t * D, LEAST)
        part = 1.0 / whole
        w = t * part
        T = tl.where(sees[:, None], o * part[:, None], 0.0) + w[:, None] * n
        if found.dtype.element_ty == tl.float16:
            T = tl.minimum(tl.maximum(T, -65504.0), 65504.0)
        at_found = _place(found, o_batch, o_head, o_row, b, head, i, d, UNIT)
        tl.store(at_found, T.to(found.dtype.element_ty), mask=inside)
        at_row = stats + (b * heads + h) * length + i
        tl.store(at_row, tl.where(sees, keys + tl.log(whole), 0.0), mask=alive)
        tl.store(at_row + all_rows, w, mask=alive)
        if EXACT:
            tl.store(at_row[:, None] + (2 + d)[None, :] * all_rows, T, mask=inside)


@triton.jit(do_not_specialize=NUMBERS)
def backward_kernel(  # type: ignore[no-untyped-def]
    g_out,
    query,
    found,
    stats,
    left,
    right,
    kappa,
    g_query,
    parts,
    q_batch,
    q_head,
    q_row,
    o_batch,
    o_head,
    o_row,
    g_batch,
    g_head,
    g_row,
    length,
    tiles_a_row,
    tiles,
    inner,
    norm,
    SIZE: tl.constexpr,
    BLOCKS: tl.constexpr,
    RANK: tl.constexpr,
    PAIR: tl.constexpr,
    SIGNED: tl.constexpr,
    SIZE_P: tl.constexpr,
    ROWS_P: tl.constexpr,
    RANK_P: tl.constexpr,
    TILE: tl.constexpr,
    UNIT: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
    EXACT: tl.constexpr,
    OF_QUERY: tl.constexpr,
    OF_STATE: tl.constexpr,
):
    h = tl.program_id(1)
    heads = tl.num_programs(1)
    d = tl.arange(0, SIZE_P)
    s = tl.arange(0, RANK_P)
    f = tl.arange(0, ROWS_P)
    block = f // SIZE_P
    coordinate = f % SIZE_P
    known = (coordinate < SIZE) & (block < BLOCKS)
    row = h * (BLOCKS * SIZE) + block * SIZE + coordinate
    factor = inner * tl.where(block % 2 == 0, 1.0, -1.0) * tl.exp2((block // 2).to(tl.float32))
    of_size = d < SIZE
    at_left = row[:, None] * RANK + s[None, :]
    in_left = known[:, None] & (s[None, :] < RANK)
    at_right = (h * RANK + s[:, None]) * SIZE + d[None, :]
    in_right = (s[:, None] < RANK) & of_size[None, :]
    a = parameter(left + at_left, in_left) * norm
    if PAIR:
        c = parameter(right + at_right, in_right).to(DOT)
        g_right_sum = tl.zeros((RANK_P, SIZE_P), tl.float32)
    a = a.to(DOT)
    k = parameter(kappa + row, known) * norm
    if SIGNED:
        k = tl.abs(k)
    # Transposed: phi then goes into both products as it lies.
    g_left_sum = tl.zeros((RANK_P, ROWS_P), tl.float32)
    g_kappa_sum = tl.zeros((16, ROWS_P), tl.float32)  # a matrix product takes no fewer rows
    part_of = tl.arange(0, 16)[:, None]

    head = h.to(tl.int64)
    all_rows = (tiles // tiles_a_row).to(tl.int64) * heads * length
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        b = (tile // tiles_a_row).to(tl.int64)
        i = (tile % tiles_a_row) * TILE + tl.arange(0, TILE)
        alive = i < length
        at_query = _place(query, q_batch, q_head, q_row, b, head, i, coordinate, UNIT)
        q = tl.load(at_query, mask=alive[:, None] & known[None, :], other=0.0)
        inside = alive[:, None] & of_size[None, :]
        g = tl.load(_place(g_out, o_batch, o_head, o_row, b, head, i, d, UNIT), mask=inside, other=0.0)
        at_row = stats + (b * heads + h) * length + i
        w = tl.load(at_row + all_rows, mask=alive, other=0.0)
        if EXACT:
            T = tl.load(at_row[:, None] + (2 + d)[None, :] * all_rows, mask=inside, other=0.0)
        else:
            at_found = _place(found, o_batch, o_head, o_row, b, head, i, d, UNIT)
            T = tl.load(at_found, mask=inside, other=0.0).to(tl.float32)
        curve = elu(q.to(tl.float32) * factor[None, :], LOG_2)
        phi = curve.to(DOT)
        w_delta = w * tl.sum(g.to(tl.float32) * T, 1)
        # Weights go to what is narrow, after the product: g itself then goes into it as it was loaded.
        if PAIR:
            u = (tl.dot(g.to(DOT), tl.trans(c), input_precision=PRECISION) * w[:, None]).to(DOT)
        else:
            u = (g.to(tl.float32) * w[:, None]).to(DOT)
        if OF_QUERY:
            g_phi = tl.dot(u, tl.trans(a), input_precision=PRECISION) - w_delta[:, None] * k[None, :]
            g_z = g_phi * tl.minimum(curve, 1.0) * (factor * LOG_2)[None, :]
            if ROWS_P != SIZE_P:
                g_z = tl.sum(tl.reshape(g_z, (TILE, ROWS_P // SIZE_P, SIZE_P)), 1)
            places = _place(g_query, g_batch, g_head, g_row, b, head, i, d, UNIT)
            g_z += tl.load(places, mask=inside, other=0.0).to(tl.float32)
            tl.store(places, g_z.to(g_query.dtype.element_ty), mask=inside)
        if OF_STATE:
            g_left_sum = tl.dot(tl.trans(u), phi, acc=g_left_sum, input_precision=PRECISION)
            # What rounding takes from the first row stands in the second: kappa's gradient is a sum that cancels.
            rounded = w_delta.to(DOT).to(tl.float32)
            two = tl.where(part_of == 0, rounded[None, :], tl.where(part_of == 1, (w_delta - rounded)[None, :], 0.0))
            g_kappa_sum = tl.dot(two.to(DOT), phi, acc=g_kappa_sum, input_precision=PRECISION)
            if PAIR:
                m = (tl.dot(phi, a, input_precision=PRECISION) * w[:, None]).to(DOT)
                g_right_sum = tl.dot(tl.trans(m), g.to(DOT), acc=g_right_sum, input_precision=PRECISION)

    if OF_STATE:
        # One part: left, right where there is one, kappa; of all heads each.
        rows = heads * (BLOCKS * SIZE)
        before_kappa = rows * RANK
        if PAIR:
            before_kappa += heads * (RANK * SIZE)
        mine = parts + tl.program_id(0).to(tl.int64) * (before_kappa + rows)
        if PAIR:
            tl.store(mine + rows * RANK + at_right, g_right_sum, mask=in_right)
        tl.store(mine + at_left, tl.trans(g_left_sum) * norm, mask=in_left)
        g_kappa = -norm * tl.sum(g_kappa_sum, 0)
        if SIGNED:
            g_kappa = tl.where(parameter(kappa + row, known) >= 0.0, g_kappa, -g_kappa)
        tl.store(mine + before_kappa + row, g_kappa, mask=known)


@triton.jit(do_not_specialize=NUMBERS)
def sum_kernel(  # type: ignore[no-untyped-def]
    parts, left, right, kappa, programs, right_at, kappa_at, total, PARTS: tl.constexpr, TILE: tl.constexpr
):
    """The sums over the parts, many at once, always in the same order; each to where it belongs."""
    i = tl.program_id(0) * TILE + tl.arange(0, TILE)
    found = tl.zeros((PARTS, TILE), tl.float32)
    for first in range(0, programs, PARTS):
        p = first + tl.arange(0, PARTS)
        inside = (p[:, None] < programs) & (i[None, :] < total)
        found += tl.load(parts + p[:, None].to(tl.int64) * total + i[None, :], mask=inside, other=0.0)
    whole = tl.sum(found, 0)
    tl.store(left + i, whole.to(left.dtype.element_ty), mask=i < right_at)
    tl.store(right + (i - right_at), whole.to(right.dtype.element_ty), mask=(i >= right_at) & (i < kappa_at))
    tl.store(kappa + (i - kappa_at), whole.to(kappa.dtype.element_ty), mask=(i >= kappa_at) & (i < total))
