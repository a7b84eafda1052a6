"""Queries that see one key only: the first token of a text in a decoder (setting `skip_first`).

With one key the softmax is that key's value, whatever the score: the model learnt a large score there (the attention
sink) or a small one without any effect on this query. The term of NTK-Attention has an effect: in SmolLM2 the mean
logarithm of the denominator is 2.1 at position 0 and 5.4 elsewhere (papers/ntk_attention/sink.py), so that a term of
one size can be little for most queries and much for the first, whose state all later tokens attend to.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

SEEN = -1e4
"""Masks that are added hide a key by less than this: float16's most negative number is -65504."""


class SeesOne(NamedTuple):
    """Which queries see one key only, and which key: `[batch or 1, heads or 1, length]` each. Without tensors it is
    the first query, `first`, or every one."""

    which: Tensor | None = None
    place: Tensor | None = None
    first: bool = False

    def give(self, output: Tensor, value: Tensor) -> Tensor:
        """`output` `[batch, heads, length, c]`, with the value that is seen where one key is."""
        groups = output.shape[1] // value.shape[1]
        if self.which is None or self.place is None:
            value = value[:, :, :1].to(output.dtype).repeat_interleave(groups, 1)
            return torch.cat([value, output[:, :, 1:]], 2) if self.first else value.expand_as(output)
        value = value.to(output.dtype)
        if self.place.shape[1] > 1:  # a mask of each head
            value, groups = value.repeat_interleave(groups, 1), 1
        place = self.place[..., None].expand(*value.shape[:2], output.shape[2], value.shape[-1])
        own = value.gather(2, place).repeat_interleave(groups, 1)
        return torch.where(self.which[..., None], own, output)


def sees_one(query: Tensor, key: Tensor, mask: Tensor | None, is_causal: bool) -> SeesOne | None:
    """Of this call; None where it is no query. Padding and earlier texts of a packed row are hidden by the mask, and
    keys of a cache are seen: it is the first real token of a text, wherever that stands."""
    length, keys = query.shape[2], key.shape[2]
    if mask is None:
        if is_causal:
            return SeesOne(first=True)
        return SeesOne() if keys == 1 else None
    seen = mask if mask.dtype == torch.bool else mask > SEEN
    if is_causal:
        seen = seen & torch.ones(length, keys, dtype=torch.bool, device=query.device).tril()
    return SeesOne(seen.sum(-1) == 1, seen.to(torch.uint8).argmax(-1))
