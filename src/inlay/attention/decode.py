"""NTK-Attention with `elu` for a few queries without gradients, as when a text is written token by token (Triton).

One query has too little work for the kernels that long ones need: torch's take no mask together with grouped heads, so
that the model's own attention copies keys and values for every query head and turns the mask into a bias, layer by
layer. Here one kernel attends and a second finishes. The first takes rows `r` that share a head of keys (the queries
of its group) and a part `p` of these keys, `s = scale q k^T + mask`, and leaves

    m_p = max_j s_j,    l_p = sum_j exp(s_j - m_p),    o_p = sum_j exp(s_j - m_p) v_j;

the second, for each row, with `m = max_p m_p`, `phi`, `n` and `D` as in epilogue.py,

    l = sum_p exp(m_p - m) l_p,    o = sum_p exp(m_p - m) o_p / l,    a = m + log l,    t = exp(min(-a, 40)),
    T = (o + t n) / (1 + t D),

and join.py's rule where no key is seen. The keys are parted among as many programs as the GPU runs at once. Keys and
values are read where they lie, by all heads that share them at once, and the mask as it is, boolean or to be added.
Everything between q, k, v and T is in float32; the weights are rounded for the product with v, as torch's kernels do.
"""

from __future__ import annotations

import math
from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from inlay.attention.decode_kernels import ADDED, BOOLEAN, NO_MASK, finish_kernel, keys_kernel
from inlay.attention.epilogue import CallKind, make_kind
from inlay.attention.join import LEAST_TOTAL, LIGHTEST, UNSEEN
from inlay.attention.launch import Launch, Prepared, multiprocessors, on, unit
from inlay.attention.term import SHORT

ROWS = 16
"""Of one program: the least that a matrix product takes."""
MOST_ROWS, MOST_SHARED = 4096, 128
"""Rows of a call, each of which reads Z, and rows that share a head of keys, which is read anew for every 16: of more
the kernels for long queries are faster."""
PROGRAMS, MOST_PARTS = 2, 64
"""Programs a multiprocessor, and parts of the keys of a row, at most."""
CHUNK, BYTES = 64, 2**15
"""Keys of a tile at most, and bytes of its keys and values."""
PARTS = 16
"""Parts that are put together at once."""


def takes(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether a call is for these kernels."""
    batch, heads, length, _ = query.shape
    return (
        length <= SHORT
        and batch * heads * length <= MOST_ROWS
        and heads // key.shape[1] * length <= MOST_SHARED
        and query.stride(3) == key.stride(3) == value.stride(3) == 1
    )


@cache
def _launches(kind: CallKind, step: int, mask: torch.dtype | None, is_causal: bool) -> tuple[int, Launch, Launch]:
    """The keys of a tile, and the two kernels."""
    size_p, rows_p, rank_p = kind.padded
    tile = max(16, min(CHUNK, BYTES // (2 * size_p * kind.dtype.itemsize)))
    masking = NO_MASK if mask is None else BOOLEAN if mask == torch.bool else ADDED
    products: tuple[Any, str] = tl.float32, "ieee"
    if kind.dtype.itemsize == 2:
        products = tl.bfloat16 if kind.dtype == torch.bfloat16 else tl.float16, "tf32"
    attending = (kind.size, size_p, ROWS, tile, step, masking.value, is_causal, *products)
    features = (kind.size, kind.rows // kind.size, kind.rank, kind.pair, kind.signed, size_p, rows_p, rank_p)
    finishing = (*features, step, PARTS, -LIGHTEST, LEAST_TOTAL, UNSEEN)
    warps = max(1, min(8, rows_p * rank_p // 1024))
    return tile, Launch(keys_kernel, attending, 4, stages=2), Launch(finish_kernel, finishing, warps)


class DecodePlan(NamedTuple):
    """What calls of one shape, layout and type do: numbers to hold in between, and the two kernels."""

    held: int
    attend: Prepared
    finish: Prepared


Ints = tuple[int, ...]


@lru_cache(maxsize=4096)
def _plan(
    kind: CallKind,
    query: Ints,
    key: Ints,
    mask: tuple[torch.dtype, Ints, Ints] | None,
    is_causal: bool,
    query_strides: Ints,
    key_strides: Ints,
    value_strides: Ints,
) -> DecodePlan:
    batch, heads, length, size = query
    _, kv_heads, keys, _ = key
    groups = heads // kv_heads
    given = (*query_strides[:3], *key_strides[:3], *value_strides[:3])
    step = unit(*given)
    strides = [stride // step for stride in given]
    over = [0] * 4
    if mask is not None:  # a size of 1 stands for all
        over = [0 if n == 1 else stride for n, stride in zip(*mask[1:], strict=True)]
    tile, attend, finish = _launches(kind, step, None if mask is None else mask[0], is_causal)

    shared = -(-groups * length // ROWS)
    tiles = -(-keys // tile)
    programs = PROGRAMS * multiprocessors(kind.device) // (batch * kv_heads * shared)
    of_part = -(-tiles // max(1, min(programs, MOST_PARTS)))
    parts = -(-tiles // of_part)
    rows = batch * heads * length
    numbers = (*strides, *over, kv_heads, groups, length, keys, of_part * tile, parts, kind.scale / math.log(2))
    return DecodePlan(
        rows * parts * (size + 2),
        Prepared(attend, (batch * kv_heads, shared, parts), numbers),
        Prepared(finish, (rows, 1, 1), (*strides[:3], heads, length, parts, *kind.numbers)),
    )


def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    scale: float,
    left: Tensor,
    right: Tensor | None,
    kappa: Tensor,
    signed: bool,
) -> Tensor:
    """`T`, with the length before the heads in memory."""
    batch, heads, length, size = query.shape
    left, kappa = left.contiguous(), kappa.contiguous()
    second = left if right is None else right.contiguous()
    kind = make_kind(query, left, second, kappa, right is not None, signed, scale)
    masking = None if mask is None else (mask.dtype, mask.shape, mask.stride())
    strides = query.stride(), key.stride(), value.stride()
    plan = _plan(kind, query.shape, key.shape, masking, is_causal, *strides)
    work = torch.empty(plan.held, dtype=torch.float32, device=kind.device)
    found = torch.empty((batch, length, heads, size), dtype=kind.dtype, device=kind.device)
    with on(kind.device):
        plan.attend(query, key, value, query if mask is None else mask, work)
        plan.finish(query, work, left, second, kappa, found)
    return found.transpose(1, 2)
