"""Lemma 1 of the activation-prompt paper (appendix C.3): attention reaches less far after the first layer."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from inlay.errors import InlayError
from inlay.papers.activation_prompts.theory.network import Data, TwoLayerViT

# Scores this close, relative to the largest, are a tie: rounding must not decide between tokens that are the same.
TIE = 1e-9


def average_attention_distance(queries: Tensor, keys: Tensor) -> Tensor:
    """`1/P sum_i |i - argmax_j <k_j, q_i>|`, (A17) and (A22), for queries and keys (..., P, d); one number an image.

    Of keys that tie the nearest counts: the lemma holds under no other rule.
    """
    scores = queries @ keys.transpose(-1, -2)
    best = scores.amax(-1, keepdim=True)
    places = torch.arange(scores.shape[-1], dtype=scores.dtype)
    apart = (places[:, None] - places).abs()
    return torch.where(scores >= best - TIE * best.abs(), apart, torch.inf).amin(-1).mean(-1)


@dataclass(frozen=True)
class Distances:
    """Average attention distances of the two layers, a number an image, with what Lemma 1 says they are."""

    tokens: int
    d_a: int
    beta: float
    first: Tensor
    second: Tensor

    @property
    def claimed(self) -> tuple[float, float]:
        """`(1 + d_A)/P` and `1/P`."""
        return (1 + self.d_a) / self.tokens, 1 / self.tokens

    @property
    def applies(self) -> bool:
        """Whether `lambda_1 < 1/2`, which the proof takes for granted after (A19): `exp(beta_1^2) < P - 1`."""
        return math.exp(self.beta**2) < self.tokens - 1


def distances(data: Data, d_a: int, beta: float = 1.0, images: int = 1, seed: int = 0) -> Distances:
    """Measure both layers on images of `v_1` before a background of `v_4`; in both, the key of `v_1` is moved by `d_a`.

    `v_1` is at the middle, or as near to it as leaves room for `d_a`.
    """
    if not 1 <= d_a < data.tokens:
        raise InlayError(f"d_A = {d_a}: a key can be moved by 1 to {data.tokens - 1} among {data.tokens} tokens.")
    place = min(data.tokens // 2, data.tokens - 1 - d_a)
    order = torch.arange(data.tokens)
    order[[place, place + d_a]] = order[[place + d_a, place]]
    model = TwoLayerViT(data, (beta, beta), (order, order))
    telling = torch.zeros(images, dtype=torch.long)
    background = torch.full((images, 1), 3)
    x = data.images(telling, background, torch.full((images,), place), torch.Generator().manual_seed(seed))
    first = average_attention_distance(*model.queries_keys(x, 1))
    second = average_attention_distance(*model.queries_keys(model.hidden(x), 2))
    return Distances(data.tokens, d_a, beta, first, second)
