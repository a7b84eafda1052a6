"""The Triton kernels of decode.py, where the formulas stand.

As in epilogue_kernels.py, strides come in units of `UNIT` elements (the mask's in elements) and nothing else of a
number is compiled in: a cache that grows by a token, or a mask of another shape, is no new kernel. `work` has for each
row and part of the keys SIZE sums, and after those of all rows the exponent and the sum of weights of each.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl

from inlay.attention.epilogue_kernels import LOG_2, elu, parameter

NUMBERS = ["q_batch", "q_head", "q_row", "k_batch", "k_head", "k_row", "v_batch", "v_head", "v_row"]
NUMBERS += ["m_batch", "m_head", "m_row", "m_key", "kv_heads", "groups", "heads", "length", "keys", "chunk", "parts"]
"""Integers of which nothing is compiled in."""
LOG2_E = tl.constexpr(1 / math.log(2))
LOWEST = tl.constexpr(-3e38)
NO_MASK, BOOLEAN, ADDED = (tl.constexpr(kind) for kind in range(3))


@triton.jit(do_not_specialize=NUMBERS)
def keys_kernel(  # type: ignore[no-untyped-def]
    query,
    key,
    value,
    mask,
    work,
    q_batch,
    q_head,
    q_row,
    k_batch,
    k_head,
    k_row,
    v_batch,
    v_head,
    v_row,
    m_batch,
    m_head,
    m_row,
    m_key,
    kv_heads,
    groups,
    length,
    keys,
    chunk,
    parts,
    scale,
    SIZE: tl.constexpr,
    SIZE_P: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    UNIT: tl.constexpr,
    MASK: tl.constexpr,
    CAUSAL: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Some rows that share a head of keys, and a part of these keys."""
    b = (tl.program_id(0) // kv_heads).to(tl.int64)
    shared = (tl.program_id(0) % kv_heads).to(tl.int64)
    part = tl.program_id(2)
    r = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    alive = r < groups * length
    h = shared * groups + r // length
    i = (r % length).to(tl.int64)
    d = tl.arange(0, SIZE_P)
    of_size = d < SIZE
    inside = alive[:, None] & of_size[None, :]
    at_query = query + b * q_batch * UNIT + (h * q_head + i * q_row)[:, None] * UNIT + d[None, :]
    q = tl.load(at_query, mask=inside, other=0.0).to(DOT)
    from_key = key + (b * k_batch + shared * k_head) * UNIT + d[None, :]
    from_value = value + (b * v_batch + shared * v_head) * UNIT + d[None, :]
    from_mask = mask + b * m_batch + (h * m_head + i * m_row)[:, None]

    most = tl.full((ROWS,), -float("inf"), tl.float32)
    whole = tl.zeros((ROWS,), tl.float32)
    sums = tl.zeros((ROWS, SIZE_P), tl.float32)
    begin = part * chunk
    end = tl.minimum(begin + chunk, keys)
    for first in range(begin, end, TILE):
        j = (first + tl.arange(0, TILE)).to(tl.int64)
        there = j < end
        known = there[:, None] & of_size[None, :]
        k = tl.load(from_key + j[:, None] * k_row * UNIT, mask=known, other=0.0).to(DOT)
        v = tl.load(from_value + j[:, None] * v_row * UNIT, mask=known, other=0.0).to(DOT)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
        seen = there[None, :] & alive[:, None]
        if MASK != NO_MASK:
            given = tl.load(from_mask + (j * m_key)[None, :], mask=seen, other=0)
            if MASK == BOOLEAN:
                seen = seen & (given != 0)
            else:  # rounded to the query's type, as torch's own kernels take it; the most negative number stays one
                bias = given.to(query.dtype.element_ty).to(tl.float32)
                scores += tl.where(bias == -float("inf"), bias, tl.maximum(bias * LOG2_E, LOWEST))
        if CAUSAL:
            seen = seen & (j[None, :] <= i[:, None])
        scores = tl.where(seen, scores, -float("inf"))
        higher = tl.maximum(most, tl.max(scores, 1))
        shift = tl.where(higher == -float("inf"), 0.0, higher)
        shrunk = tl.math.exp2(most - shift)
        weights = tl.math.exp2(scores - shift[:, None])
        whole = whole * shrunk + tl.sum(weights, 1)
        sums = tl.dot(weights.to(DOT), v, acc=sums * shrunk[:, None], input_precision=PRECISION)
        most = higher

    row = ((b * kv_heads * groups + h) * length + i) * parts + part
    tl.store(work + row[:, None] * SIZE + d[None, :], sums, mask=inside)
    after = work + tl.num_programs(0).to(tl.int64) * groups * length * parts * SIZE
    tl.store(after + row * 2, most, mask=alive)
    tl.store(after + row * 2 + 1, whole, mask=alive)


@triton.jit(do_not_specialize=NUMBERS)
def finish_kernel(  # type: ignore[no-untyped-def]
    query,
    work,
    left,
    right,
    kappa,
    found,
    q_batch,
    q_head,
    q_row,
    heads,
    length,
    parts,
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
    UNIT: tl.constexpr,
    PARTS: tl.constexpr,
    HEAVIEST: tl.constexpr,
    LEAST: tl.constexpr,
    UNSEEN: tl.constexpr,
):
    """One row: its parts put together, and the feature term."""
    at = tl.program_id(0)
    i = at % length
    h = at // length % heads
    b = (at // length // heads).to(tl.int64)
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
    q = tl.load(query + (b * q_batch + h.to(tl.int64) * q_head + i * q_row) * UNIT + coordinate, mask=known, other=0.0)
    a = parameter(left + row[:, None] * RANK + s[None, :], known[:, None] & (s[None, :] < RANK))
    k = parameter(kappa + row, known)
    if SIGNED:
        k = tl.abs(k)
    phi = elu(q.to(tl.float32) * factor, LOG_2) * norm
    n = tl.sum(phi[:, None] * a, 0)
    if PAIR:
        at_right = (h * RANK + s[:, None]) * SIZE + d[None, :]
        c = parameter(right + at_right, (s[:, None] < RANK) & of_size[None, :])
        n = tl.sum(n[:, None] * c, 0)
    D = tl.sum(phi * k, 0)

    most = -float("inf")
    whole = 0.0
    sums = tl.zeros((SIZE_P,), tl.float32)
    from_part = at.to(tl.int64) * parts
    after = work + tl.num_programs(0).to(tl.int64) * parts * SIZE
    for first in range(0, parts, PARTS):
        p = first + tl.arange(0, PARTS)
        there = p < parts
        place = from_part + p
        exponent = tl.load(after + place * 2, mask=there, other=-float("inf"))
        weight = tl.load(after + place * 2 + 1, mask=there, other=0.0)
        of_part = tl.load(work + place[:, None] * SIZE + d[None, :], mask=there[:, None] & of_size[None, :], other=0.0)
        higher = tl.maximum(most, tl.max(exponent, 0))
        shift = tl.where(higher == -float("inf"), 0.0, higher)
        shrunk = tl.math.exp2(most - shift)
        share = tl.math.exp2(exponent - shift)
        whole = whole * shrunk + tl.sum(share * weight, 0)
        sums = sums * shrunk + tl.sum(share[:, None] * of_part, 0)
        most = higher

    nothing = whole == 0.0  # no key was seen
    divisor = tl.where(nothing, 1.0, whole)
    lse = tl.where(nothing, 0.0, (most + tl.math.log2(divisor)) * LOG_2)
    t = tl.exp(tl.minimum(tl.where(lse < UNSEEN, 0.0, -lse), HEAVIEST))
    part = 1.0 / tl.maximum(1.0 + t * D, LEAST)
    T = sums / divisor * part + t * part * n
    if found.dtype.element_ty == tl.float16:
        T = tl.minimum(tl.maximum(T, -65504.0), 65504.0)
    place_found = found + ((b * length + i) * heads + h) * SIZE + d
    tl.store(place_found, T.to(found.dtype.element_ty), mask=of_size)
