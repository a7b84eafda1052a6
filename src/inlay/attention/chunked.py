"""Attention with dropout on a CPU, some queries at a time: memory linear in the length.

torch's fused CPU kernel has no dropout. Here the scores of a chunk of queries are made in full, and made again for the
gradients, with the formulas of fused.py. One number, drawn from torch's own generator, is the seed of what is dropped:
the backward pass draws the same again instead of keeping it, as it takes the same chunks in the same order. A chunk has
about `ENTRIES` scores, of several examples or heads where texts are short; of a long text it has some queries, so that
nothing is ever length x length. For torch.compile both passes are operators.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from inlay.attention.fused import Attended
from inlay.attention.join import finite
from inlay.attention.term import working_type

ENTRIES = 2**21
"""Scores of a chunk: 8 MiB in float32, about what a core's caches hold."""
CAUSAL_ROWS = 128
"""Queries of a chunk, at most, where each sees the keys up to its own: the fewer, the less is computed for nothing."""
SEEDS = 2**32
"""As many as a generator on a CPU tells apart."""


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    scale: float,
    dropout_p: float,
) -> Attended:
    """Output, log-sum-exp, and the seed of what is dropped, twice; as `Kernel.forward` says."""
    seed = torch.randint(SEEDS, (), dtype=torch.int64, device="cpu")
    dtype = working_type(query.dtype)
    out = query.new_empty((*query.shape[:3], value.shape[3]))
    lse = query.new_empty(query.shape[:3], dtype=dtype)
    key, value = key.to(dtype), value.to(dtype)
    draws = torch.Generator("cpu").manual_seed(int(seed))
    for chunk in _chunks(query, key, is_causal):
        rows, seen = chunk.rows, chunk.seen
        scores = _scores(query[rows].to(dtype), key[seen], mask, chunk, is_causal, scale)
        most = finite(scores.amax(-1, keepdim=True))
        weights = scores.sub_(most).exp_()
        whole = weights.sum(-1, keepdim=True)
        nothing = whole == 0
        whole.masked_fill_(nothing, 1)
        lse[rows] = (most + whole.log()).masked_fill(nothing, -torch.inf).squeeze(-1)
        weights.mul_(_kept(weights, dropout_p, draws))
        out[rows] = (weights @ value[seen]) / (whole * (1 - dropout_p))
    return out, lse, seed, seed


def attend_backward(
    g_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    scale: float,
    dropout_p: float,
    seed: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value; as `Kernel.backward` says."""
    dtype = working_type(query.dtype)
    g_query = torch.empty_like(query)
    in_full, values = key.to(dtype), value.to(dtype)
    g_key, g_value = torch.zeros_like(in_full), torch.zeros_like(values)
    draws = torch.Generator("cpu").manual_seed(int(seed))
    for chunk in _chunks(query, key, is_causal):
        rows, seen = chunk.rows, chunk.seen
        q, g = query[rows].to(dtype), g_out[rows].to(dtype)
        delta = (g * out[rows]).sum(-1, keepdim=True)
        weights = _scores(q, in_full[seen], mask, chunk, is_causal, scale)
        weights.sub_(lse[rows].unsqueeze(-1)).exp_()
        kept = _kept(weights, dropout_p, draws)
        # The factors 1 / (1 - p) and scale go to what is narrow.
        g = g / (1 - dropout_p)
        g_value[seen] += (weights * kept).mT @ g
        g_scores = (g @ values[seen].mT).mul_(kept).sub_(delta).mul_(weights)
        g_query[rows] = (g_scores @ in_full[seen]).mul_(scale)
        g_key[seen] += g_scores.mT @ (q * scale)
    return g_query, g_key.to(key.dtype), g_value.to(value.dtype)


Place = tuple[slice, slice, slice]
"""Examples, heads, and queries or keys."""


class Chunk(NamedTuple):
    """What is computed at once: queries, and the keys that they may see."""

    rows: Place
    seen: Place


def _chunks(query: Tensor, key: Tensor, is_causal: bool) -> Iterator[Chunk]:
    batch, heads, length, _ = query.shape
    keys = key.shape[2]
    # As many queries as there is room for, then heads, then examples: few queries at a time make slow products.
    queries = _as_many(keys, min(length, CAUSAL_ROWS) if is_causal else length)
    together = _as_many(keys * queries, heads)
    for examples in _parts(batch, _as_many(keys * queries * together, batch)):
        for several in _parts(heads, together):
            for rows in _parts(length, queries):
                seen = slice(0, min(rows.stop, keys) if is_causal else keys)
                yield Chunk((examples, several, rows), (examples, several, seen))


def _as_many(entries: int, most: int) -> int:
    """How many of something with so many scores go into a chunk: some, and not more than there are."""
    return min(most, max(1, ENTRIES // entries))


def _parts(length: int, step: int) -> Iterator[slice]:
    return (slice(begin, min(begin + step, length)) for begin in range(0, length, step))


def _scores(query: Tensor, key: Tensor, mask: Tensor | None, chunk: Chunk, is_causal: bool, scale: float) -> Tensor:
    """`scale q k^T + mask`, a new tensor."""
    scores = (query * scale) @ key.mT
    (*_, rows), (*_, seen) = chunk
    if is_causal:
        places = torch.arange(rows.start, rows.stop, device=key.device).unsqueeze(1)
        scores.masked_fill_(torch.arange(seen.stop, device=key.device) > places, -torch.inf)
    if mask is not None:
        where = zip((*chunk.rows, seen), mask.shape, strict=True)
        here = mask[tuple(slice(None) if size == 1 else part for part, size in where)]
        scores = scores.masked_fill_(~here, -torch.inf) if here.dtype == torch.bool else scores.add_(here)
    return scores


def _kept(weights: Tensor, dropout_p: float, draws: torch.Generator) -> Tensor:
    """Whether a weight is kept. Half of a random number of 64 bits decides: p is rounded to 2^-32, and drawing takes a
    third of `bernoulli_`'s time."""
    count = weights.numel()
    bits = torch.empty((count + 1) // 2, dtype=torch.int64, device=weights.device).random_(
        -(2**63), None, generator=draws
    )
    least = min(round(dropout_p * 2**32), 2**32 - 1) - 2**31
    return (bits.view(torch.int32)[:count] >= least).view(weights.shape)


@torch.library.custom_op(
    "inlay::dropped_attention",
    mutates_args=(),
    schema="(Tensor query, Tensor key, Tensor value, Tensor? mask, bool is_causal, float scale, float dropout_p) -> "
    "(Tensor, Tensor, Tensor)",
    tags=(torch.Tag.nondeterministic_seeded,),
)
def _attend_op(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    out, lse, seed, _ = attend(*args)
    assert seed is not None
    return out, lse, seed


@_attend_op.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> Any:
    lse = query.new_empty(query.shape[:3], dtype=working_type(query.dtype))
    return query.new_empty((*query.shape[:3], value.shape[3])), lse, query.new_empty((), dtype=torch.int64)


@torch.library.custom_op(
    "inlay::dropped_attention_backward",
    mutates_args=(),
    schema="(Tensor g_out, Tensor query, Tensor key, Tensor value, Tensor out, Tensor lse, Tensor? mask, "
    "bool is_causal, float scale, float dropout_p, Tensor seed) -> (Tensor, Tensor, Tensor)",
)
def _attend_backward_op(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    g_query, g_key, g_value = attend_backward(*args)
    return g_query.contiguous(), g_key.contiguous(), g_value.contiguous()


@_attend_backward_op.register_fake
def _(g_out: Tensor, query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> Any:
    return query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape)
