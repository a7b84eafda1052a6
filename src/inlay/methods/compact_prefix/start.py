"""Where a compact prefix starts: at random, or at a prompt's keys and values, averaged by segments."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from inlay.anatomy import Attention, Block
from inlay.methods.attention_parts import key_heads
from inlay.methods.channels import like
from inlay.methods.compact_prefix.config import CompactPrefixConfig
from inlay.methods.compact_prefix.layer import PrefixStart
from inlay.methods.plain import plain_name
from inlay.methods.prompts import Prompt


def start_at(config: CompactPrefixConfig, block: Block, prompt: Prompt | None = None) -> PrefixStart:
    """The first values at a block's attention. A text start without a prompt makes room for what is loaded."""
    attention = block.attention
    assert attention is not None
    assert config.seed is not None  # filled in before any layer is made
    heads, size = key_heads(attention), attention.head_size
    if prompt is not None:
        key, value = prompt.keys_and_values(block.index)
        return segments(config, attention, key, value, prompt.biases(block.index))
    sizes = config.sizes_at(plain_name(attention.name), heads)
    generator = torch.Generator().manual_seed(config.seed + block.index)
    keys = torch.randn(sum(sizes), size, generator=generator, device="cpu")
    # All keys together count as one key with a score of 0: little beside a text's.
    biases = torch.cat([torch.full((count,), -math.log(count), device="cpu") for count in sizes])
    return made(config, attention, keys, torch.zeros_like(keys), biases, sizes)


def segments(
    config: CompactPrefixConfig, attention: Attention, key: Tensor, value: Tensor, bias: Tensor | None = None
) -> PrefixStart:
    """The prompt cut into pieces: the first token alone, to which heads attend that have nothing to say, and the others
    in segments of about equal length. A segment is one key, the mean of its keys, and counts as often as it has tokens.
    No text is needed for it, and it is a poor start: what heads look at lies in single keys."""
    tokens = key.shape[1]
    count = min(config.size, tokens)
    cuts = [0, *(1 + round(place * (tokens - 1) / max(1, count - 1)) for place in range(count))]
    if count == 1:
        cuts = [0, tokens]
    lengths = torch.tensor([end - begin for begin, end in pairwise(cuts)], device=key.device)
    owner = torch.repeat_interleave(torch.arange(count, device=key.device), lengths)

    exact = torch.promote_types(key.dtype, torch.float32)
    often = key.new_ones(key.shape[:2], dtype=exact) if bias is None else bias.to(exact).exp()

    def summed(x: Tensor) -> Tensor:
        return x.new_zeros(len(x), count, *x.shape[2:]).index_add_(1, owner, x)

    whole = summed(often).clamp(min=torch.finfo(exact).tiny)  # of hidden keys, 0

    def mean(x: Tensor) -> Tensor:
        return (summed(often[..., None] * x.to(exact)) / whole[..., None]).flatten(0, 1)

    biases = whole.log().flatten()
    return made(config, attention, mean(key), mean(value), biases, [count] * len(key))


def made(
    config: CompactPrefixConfig,
    attention: Attention,
    keys: Tensor,
    values: Tensor,
    biases: Tensor,
    sizes: Sequence[int],
) -> PrefixStart:
    """Values where the model is, and in its precision or a higher one."""
    keys, values, biases = (like(attention.module, part) for part in (keys, values, biases))
    return PrefixStart(keys, values, biases if config.biases else None, tuple(sizes))
