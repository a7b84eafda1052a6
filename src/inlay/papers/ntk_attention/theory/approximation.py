"""Theorem 3.1 (N.2): how far NTK-Attention (Algorithm 2) is from exact prefix attention (Algorithm 1)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from inlay.attention import FeatureMap, ntk_attention, prefix_attention, prefix_to_features
from inlay.errors import InlayError

MOST_TERMS = 200


@dataclass(frozen=True)
class Instance:
    """One head: queries, keys and values of a text (L, d), and those of a prefix (m, d)."""

    query: Tensor
    key: Tensor
    value: Tensor
    prefix_key: Tensor
    prefix_value: Tensor
    scale: float

    def exact(self) -> Tensor:
        """Algorithm 1, (L, d)."""
        text = (self.query[None, None], self.key[None, None], self.value[None, None])
        return prefix_attention(*text, self.prefix_key[None], self.prefix_value[None], scale=self.scale)[0, 0]

    def approximate(self, phi: FeatureMap, features: int | None = None) -> Tensor:
        """Algorithm 2 with Z and kappa from Eq. (4), (L, d)."""
        prefix = (self.prefix_key[None], self.prefix_value[None])
        Z, kappa = prefix_to_features(*prefix, phi, features=features, scale=self.scale)
        text = (self.query[None, None], self.key[None, None], self.value[None, None])
        return ntk_attention(*text, Z, kappa, feature_map=phi, scale=self.scale)[0, 0]

    def error(self, phi: FeatureMap, features: int | None = None) -> float:
        """Eq. (5): the largest entry of the difference."""
        return float((self.approximate(phi, features) - self.exact()).abs().max())

    def order_for(self, accuracy: float) -> int:
        """The least Taylor order whose error is at most `accuracy`.

        The features would be `binomial(d + p, p)` many; their products are the Taylor polynomial of the scores, which
        is summed here term by term.
        """
        if accuracy <= 0:
            raise InlayError(f"An error of {accuracy}: give a number above 0.")
        text = (self.query @ self.key.T * self.scale).exp()
        scores = self.query @ self.prefix_key.T * self.scale
        wanted = self.exact()
        term = torch.ones_like(scores)
        kernel = torch.ones_like(scores)
        for order in range(MOST_TERMS):
            above = text @ self.value + kernel @ self.prefix_value
            found = above / (text.sum(1) + kernel.sum(1))[:, None]
            if float((found - wanted).abs().max()) <= accuracy:
                return order
            term = term * scores / (order + 1)
            kernel = kernel + term
        raise InlayError(f"No Taylor order up to {MOST_TERMS} has an error of {accuracy}: rounding is larger.")


def instance(length: int, prefix: int, size: int, bound: float, seed: int = 0, scale: float | None = None) -> Instance:
    """A text and a prefix with entries uniform in [-bound, bound]; the theorem asks for a bound of o(sqrt(log m)).

    The projections of Algorithm 1 are the identity, so keys and values are the same tokens. (Drawn apart they would be
    independent, the prefix's part would tend to the values' mean of 0 whatever the map, and every error would vanish
    as 1/sqrt(m).)
    """
    if min(length, prefix, size) < 1 or bound <= 0:
        raise InlayError(f"L = {length}, m = {prefix}, d = {size}, bound {bound}: all must be above 0.")
    generator = torch.Generator().manual_seed(seed)
    X, P = (
        bound * (torch.rand(rows, size, generator=generator, dtype=torch.float64) * 2 - 1) for rows in (length, prefix)
    )
    return Instance(X, X, X, P, P, size**-0.5 if scale is None else scale)


def taylor_features(size: int, order: int) -> int:
    """r of the Taylor features: `binomial(d + p, p)`."""
    return math.comb(size + order, order)
