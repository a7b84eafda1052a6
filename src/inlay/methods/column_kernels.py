"""The Triton kernels of column_sums.py, where the formulas stand.

Strides come in units of `UNIT` elements, so that the compiler knows by which number they divide; no other number is
compiled in, or every new length would be a new kernel.
"""

from __future__ import annotations

import triton
import triton.language as tl

NUMBERS = ["rows", "columns", "g_row", "y_row", "share", "shares"]
"""Integers of which nothing is compiled in."""


@triton.jit(do_not_specialize=NUMBERS)
def parts_kernel(  # type: ignore[no-untyped-def]
    g,
    y,
    shift,
    parts,
    rows,
    columns,
    g_row,
    y_row,
    share,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    UNIT: tl.constexpr,
    SHIFTED: tl.constexpr,
):
    """The sums over `share` rows, a multiple of ROWS: of g, and of `g (y - shift)`."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    own = tl.program_id(1)
    inside = column < columns
    sums = tl.zeros((ROWS, COLUMNS), tl.float32)
    products = tl.zeros((ROWS, COLUMNS), tl.float32)
    if SHIFTED:
        by = tl.load(shift + column, mask=inside, other=0.0).to(tl.float32)[None, :]
    for first in range(0, share, ROWS):
        row = own * share + first + tl.arange(0, ROWS)
        there = (row < rows)[:, None] & inside[None, :]
        place = row[:, None].to(tl.int64)
        gradient = tl.load(g + place * g_row * UNIT + column[None, :], mask=there, other=0.0).to(tl.float32)
        sums += gradient
        made = tl.load(y + place * y_row * UNIT + column[None, :], mask=there, other=0.0).to(tl.float32)
        if SHIFTED:
            made -= by
        products += gradient * made
    place = parts + own.to(tl.int64) * 2 * columns + column
    tl.store(place, tl.sum(sums, 0), mask=inside)
    tl.store(place + columns, tl.sum(products, 0), mask=inside)


@triton.jit(do_not_specialize=NUMBERS)
def whole_kernel(  # type: ignore[no-untyped-def]
    parts,
    gamma,
    bias,
    g_gamma,
    g_beta,
    columns,
    shares,
    PARTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BIASED: tl.constexpr,
    LEAST: tl.constexpr,
):
    """The sums over the parts, always in the same order, and from them the gradients of gamma and of beta."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < columns
    sums = tl.zeros((PARTS, COLUMNS), tl.float32)
    products = tl.zeros((PARTS, COLUMNS), tl.float32)
    for first in range(0, shares, PARTS):
        part = first + tl.arange(0, PARTS)
        there = (part < shares)[:, None] & inside[None, :]
        place = parts + part[:, None].to(tl.int64) * 2 * columns + column[None, :]
        sums += tl.load(place, mask=there, other=0.0)
        products += tl.load(place + columns, mask=there, other=0.0)
    found = tl.sum(sums, 0)
    tl.store(g_beta + column, found.to(g_beta.dtype.element_ty), mask=inside)
    scale = tl.load(gamma + column, mask=inside, other=1.0).to(tl.float32)
    divisor = tl.where(tl.abs(scale) < LEAST, tl.where(scale < 0, -LEAST, LEAST), scale)
    of_gamma = tl.sum(products, 0) / divisor
    if BIASED:
        of_gamma += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32) * found
    tl.store(g_gamma + column, of_gamma.to(g_gamma.dtype.element_ty), mask=inside)
