"""Proposition 1: with H >= N heads and tokens that differ in one entry, a Gaussian start has full row rank."""

from __future__ import annotations

import torch
from torch import Tensor

from inlay.errors import InlayError
from inlay.papers.icl.theory.model import attention


def attention_at_start(tokens: Tensor, N: int, heads: int, seed: int, beta: float = 1.0) -> Tensor:
    """`C_k` (13) for every k, (K, N, H), from raw tokens: they may repeat here, to see what that breaks."""
    if not 1 <= N <= len(tokens) or heads < 1:
        raise InlayError(f"N = {N}, {heads} heads, {len(tokens)} tokens: give N from 1 to K, and 1 head or more.")
    draws = torch.Generator().manual_seed(seed)
    d = tokens.shape[1]
    Q = beta * torch.randn(heads, d, d, generator=draws, dtype=torch.float64)
    tokens = tokens.to(torch.float64)
    return attention(tokens, Q, N).permute(2, 1, 0)


def ranks(C: Tensor) -> Tensor:
    """The rank of each `C_k`, in floating point, (K). `Zbar` has full rank where tau > 0, so `B_k` has the same."""
    return torch.linalg.matrix_rank(C)


def distinct_row(tokens: Tensor, N: int) -> int | None:
    """Assumption 3: the first entry (counted from 1) in which all of the prompt's tokens differ; None if none does."""
    for entry in range(tokens.shape[1]):
        if len(tokens[:N, entry].unique()) == N:
            return entry + 1
    return None
