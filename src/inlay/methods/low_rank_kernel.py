"""The Triton kernel of low_rank.py, where the formula stands.

A program takes some tokens of one row, one part of the output and some of its channels. Sizes of the layer are compiled
in, since a model has few; numbers of rows and tokens are not, or every new length would be a new kernel. Distances in
memory come in units of `UNIT` elements, so that the compiler knows by which number they divide.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

PRODUCTS = {
    torch.float32: (tl.float32, "ieee"),
    torch.bfloat16: (tl.bfloat16, "tf32"),
    torch.float16: (tl.float16, "tf32"),
}
"""For an output's type, the one that products take and their precision."""
NUMBERS = ["tokens", "tiles", "a_slot", "b_slot", "first", "step", "share"]
"""Integers of which nothing is compiled in."""


@triton.jit(do_not_specialize=NUMBERS)
def add_kernel(  # type: ignore[no-untyped-def]
    out,
    x,
    a,
    b,
    scales,
    slots,
    tokens,
    tiles,
    a_slot,
    b_slot,
    first,
    step,
    share,
    INPUT: tl.constexpr,
    OUTPUT: tl.constexpr,
    WIDTH: tl.constexpr,
    RANK: tl.constexpr,
    RANK_P: tl.constexpr,
    TOKENS: tl.constexpr,
    CHUNK: tl.constexpr,
    UNIT: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Tokens of one row; `share` chunks of one part of the output."""
    row = tl.program_id(0) // tiles
    part = tl.program_id(1)
    slot = tl.load(slots + row)
    scale = tl.load(scales + slot)
    if scale == 0.0:  # the row has no task here
        return
    t = (tl.program_id(0) % tiles) * TOKENS + tl.arange(0, TOKENS)
    alive = t < tokens
    place = (row * tokens + t).to(tl.int64)
    r = tl.arange(0, RANK_P)
    of_rank = r < RANK
    kind = out.dtype.element_ty
    chunk = tl.arange(0, CHUNK)

    from_x = x + place[:, None] * INPUT
    from_a = a + slot * a_slot * UNIT + (part * RANK + r)[None, :] * INPUT
    z = tl.zeros((TOKENS, RANK_P), tl.float32)
    for begin in range(0, INPUT, CHUNK):
        k = begin + chunk
        of_input = k < INPUT
        xs = tl.load(from_x + k[None, :], mask=alive[:, None] & of_input[None, :], other=0.0)
        factor = tl.load(from_a + k[:, None], mask=of_rank[None, :] & of_input[:, None], other=0.0)
        z = tl.dot(xs.to(kind).to(DOT), factor.to(kind).to(DOT), acc=z, input_precision=PRECISION)
    # Columns that A does not have: 0, where something in x is not a number as well.
    small = tl.where(of_rank[None, :], z, 0.0).to(kind).to(DOT)

    from_b = b + slot * b_slot * UNIT + (part * RANK + r)[:, None] * WIDTH
    to_out = out + place[:, None] * OUTPUT + (first + part * step) * UNIT
    begins = tl.program_id(2) * share
    ends = tl.minimum(begins + share, tl.cdiv(WIDTH, CHUNK))
    for number in range(begins, ends):
        n = number * CHUNK + chunk
        of_part = n < WIDTH
        inside = alive[:, None] & of_part[None, :]
        before = tl.load(to_out + n[None, :], mask=inside, other=0.0)
        own = tl.load(from_b + n[None, :], mask=of_rank[:, None] & of_part[None, :], other=0.0)
        added = tl.dot(small, own.to(kind).to(DOT), input_precision=PRECISION)
        tl.store(to_out + n[None, :], (before.to(tl.float32) + scale * added).to(kind), mask=inside)
