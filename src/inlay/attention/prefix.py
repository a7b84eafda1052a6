"""A prefix of any length as features of fixed size (NTK-Attention, Eq. (4))."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import zip_longest

import torch
from torch import Tensor

from inlay.attention.features import FeatureMap
from inlay.attention.features import feature_map as find_map
from inlay.attention.term import working_type
from inlay.errors import InlayError

CHUNK = 4096
"""Keys whose features are held at once."""


def prefix_to_features(
    prefix_key: Tensor | Iterable[Tensor],
    prefix_value: Tensor | Iterable[Tensor],
    feature_map: str | FeatureMap = "elu",
    *,
    features: int | None = None,
    scale: float | None = None,
    heads: int | None = None,
    chunk: int = CHUNK,
) -> tuple[Tensor, Tensor]:
    """Eq. (4): `Z = sum_j phi(k_j) v_j^T` and `kappa = sum_j phi(k_j)`, `[heads, r, d]` and `[heads, r]`.

    prefix_key and prefix_value are `[kv_heads, m, d]`, or iterables of such pieces that are read one at a time, so that
    the prefix never has to exist whole. `features` is r where the map leaves it open (by default as many as d);
    `heads` repeats the result for query heads that share keys. Sums are held in float64, the result in float32 or
    more; it is differentiable.
    """
    phi = find_map(feature_map)
    if chunk < 1:
        raise InlayError(f"chunk={chunk}: at least one key must be read at a time. Leave it out for {CHUNK}.")
    total: Tensor | None = None
    kept: torch.dtype | None = None
    for key, value in _pieces(prefix_key, prefix_value, chunk):
        size = key.shape[-1]
        rows = phi.dimension(size) if features is None else features
        phi.check(rows, size)
        kept = working_type(key.dtype)
        # A column of ones sums phi itself.
        extended = torch.cat([value.to(kept), torch.ones_like(value[..., :1], dtype=kept)], -1)
        here = phi.of_key(key.to(kept), rows, size**-0.5 if scale is None else scale)
        piece = (here.mT @ extended).double()
        total = piece if total is None else total + piece
    if total is None or kept is None:
        raise InlayError(
            "The prefix is empty: there is nothing to sum. Give prefix_key and prefix_value of one key or more."
        )
    if not total.isfinite().all():
        raise InlayError(
            f"The features of the prefix by {phi.name!r} are not finite. Check prefix_key and prefix_value for NaN; if "
            "they have none, the keys are too large: give the map a centre or a lower order."
        )
    if phi.positive and (total[..., -1].sum(-1) == 0).any():
        raise InlayError(
            f"The features of the prefix by {phi.name!r} are all 0 for some head: its keys are too far from the "
            "origin. Give the map a centre, such as the mean of the keys."
        )
    if heads is not None:
        if heads < 1 or heads % total.shape[0]:
            raise InlayError(
                f"{heads} query heads cannot share the prefix's {total.shape[0]}; give a multiple of them."
            )
        total = total.repeat_interleave(heads // total.shape[0], 0)
    total = total.to(kept)
    return total[..., :-1].contiguous(), total[..., -1].contiguous()


def _pieces(
    keys: Tensor | Iterable[Tensor], values: Tensor | Iterable[Tensor], chunk: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Matching pieces of at most `chunk` keys."""
    for key, value in zip_longest(
        (keys,) if isinstance(keys, Tensor) else keys, (values,) if isinstance(values, Tensor) else values
    ):
        if key is None or value is None:
            raise InlayError(
                "prefix_key and prefix_value have different numbers of pieces; give one value piece a key piece."
            )
        if key.dim() != 3 or value.dim() != 3 or key.shape[:2] != value.shape[:2]:
            raise InlayError(
                f"A piece of the prefix has keys {list(key.shape)} and values {list(value.shape)}; both must be "
                "[kv_heads, m, head_dim], with the same heads and m."
            )
        if key.shape[1]:
            yield from zip(key.split(chunk, 1), value.split(chunk, 1), strict=True)
