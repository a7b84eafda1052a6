"""A prompt that all rows of a batch share: its keys and values are kept once, beside the attention, not in a cache.

A cache holds the prompt once per row: 6 GB for 64 rows behind 2,000 tokens of a model of 135M parameters. Attention to
prompt and text apart, joined by their log-sum-exps (`inlay.attention.prefix_attention`), is the same softmax and copies
nothing. The cache that generation needs is then one of the text alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicLayer

from inlay.anatomy import anatomy
from inlay.attention import prefix_attention
from inlay.errors import InlayError
from inlay.methods.attention_interface import behind_all, on_interface
from inlay.methods.plain import base_of
from inlay.methods.prompts import Earlier, Prompt, read
from inlay.methods.softmax_layer import IMPLEMENTATIONS, SoftmaxLayer

NOT_PLAIN = ("sliding_window", "attn_logit_softcapping", "sinks")
"""Attributes of attention modules whose scores or masks are not those of a softmax over all earlier keys."""


class SharedPrompt(SoftmaxLayer):
    """Attention to a prompt's keys and values K, V, `[kv_heads, m, d]`, and the text's, exactly, with q, k, v as the
    attention function receives them:

        T = (exp(scale q K^T) V + exp(scale q k^T) v) / (exp(scale q K^T) 1 + exp(scale q k^T) 1)

    With biases, `[kv_heads, m]`, key j of the prompt counts as `exp(bias_j)` keys: of what stands for parts of it that
    were compressed. Every query sees the whole prompt. It hangs on its host while a prompt is read behind, and belongs
    to no adapter.
    """

    child = "inlay_prompt"

    def __init__(self, host: nn.Module, key: Tensor, value: Tensor, bias: Tensor | None = None) -> None:
        super().__init__(host)
        self.key, self.value, self.key_bias = key, value, bias

    def running(self) -> list[str]:
        return [self.child]

    def attach(self) -> None:
        """Refused beside an adapter that computes the softmax and is not off: it would not ask this layer."""
        layers = (child for child in self.host.children() if isinstance(child, SoftmaxLayer) and child is not self)
        if (other := next((layer for layer in layers if layer.running()), None)) is not None:
            raise InlayError(
                f"{type(other).__name__} runs in {type(self.host).__name__} and would hide the prompt from it: run the "
                "model behind a prompt with its adapters off (model.disable_adapter())."
            )
        super().attach()

    def attend(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        if kwargs.get("position_bias") is not None:
            raise InlayError(
                f"{type(self.host).__name__} adds a bias of position to its scores, and that of a shared prompt is not "
                "known here."
            )
        return super().attend(*args, **kwargs)

    def softmax(
        self, query: Tensor, key: Tensor, value: Tensor, dropout_p: float, shares: bool, **how: Any
    ) -> tuple[Tensor, Tensor | None]:
        how |= {"prefix_bias": self.key_bias, "dropout_p": dropout_p}
        return prefix_attention(query, key, value, self.key, self.value, **how), None

    def joined(self, key: Tensor, value: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """Keys, values and mask as the host would have them with the prompt before every row of its cache."""
        if self.key_bias is not None:
            raise InlayError("A prompt of which parts are compressed already has no place in a cache.")
        rows = (len(key), -1, -1, -1)
        whole_key = torch.cat([self.key.to(key).expand(rows), key], 2)
        whole_value = torch.cat([self.value.to(value).expand(rows), value], 2)
        if mask is not None:  # None: every earlier key is seen, and all of the prompt is earlier
            seen = mask.new_full((*mask.shape[:-1], self.key.shape[1]), mask.dtype == torch.bool)
            mask = torch.cat([seen, mask], -1)
        return whole_key, whole_value, mask


def can_share(model: nn.Module, prompt: Prompt) -> bool:
    """Whether attention with the prompt's keys beside it is what the model computes with them in its cache.

    Not where a layer keeps only a part of the prompt (a sliding window) or no keys at all, where scores are capped or
    meet a sink, and where an attention module cannot be reached by `sdpa` or `eager` of Transformers' interface.
    """
    base = base_of(model)
    blocks, layers = anatomy(base).blocks, prompt.cache.layers
    return len(blocks) == len(layers) and all(
        type(layer) is DynamicLayer
        and layer.get_seq_length() == prompt.length
        and block.attention is not None
        and _plain(block.attention.module)
        for block, layer in zip(blocks, layers, strict=True)
    )


def _plain(attention: nn.Module) -> bool:
    config: Any = getattr(attention, "config", None)
    return (
        on_interface(attention)
        and behind_all(config._attn_implementation) in IMPLEMENTATIONS
        and all(getattr(attention, name, None) is None for name in NOT_PLAIN)
    )


def sharing(model: nn.Module, prompt: Prompt) -> AbstractContextManager[None]:
    """Whatever the model reads meanwhile stands behind the prompt, as if each row's cache began with it. Positions are
    the caller's: those of the text begin at `prompt.following`, and its mask and its cache have the text alone.

    Only where `can_share`, and with adapters that compute attention off; afterwards the model is as it was.
    """
    numbers = [block.index for block in anatomy(base_of(model)).blocks]
    return _beside(model, [(*prompt.keys_and_values(number), prompt.biases(number)) for number in numbers])


def read_behind(model: nn.Module, earlier: Earlier, ids: Sequence[int], *, logits: bool = False) -> Prompt:
    """Read the next tokens of a prompt behind what stands for those before them. Rotary positions."""
    with _beside(model, earlier.blocks):
        found = read(model, ids, logits=logits)
    return replace(found, earlier=earlier, ids=(*earlier.ids, *found.ids))


@contextmanager
def _beside(model: nn.Module, parts: Sequence[tuple[Tensor, Tensor, Tensor | None]]) -> Iterator[None]:
    """Keys, values and biases beside the attention of every block."""
    attached: list[SharedPrompt] = []
    try:
        for block, part in zip(anatomy(base_of(model)).blocks, parts, strict=True):
            assert block.attention is not None
            layer = SharedPrompt(block.attention.module, *part)
            layer.attach()
            setattr(layer.host, SharedPrompt.child, layer)
            attached.append(layer)
        yield
    finally:
        for layer in attached:
            delattr(layer.host, SharedPrompt.child)
            layer.detach()
