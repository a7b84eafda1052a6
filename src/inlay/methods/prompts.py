"""A prompt as a model's attention sees it (NTK-Attention, Eq. (4) of real text): the keys and values of its tokens.

A decoder's own cache holds them as the attention function receives them: rotated, normed, one a key head. The text that
follows starts at position 0 without the prompt. A rotary embedding depends on distances alone, so there the prompt is
read at positions -m..-1, and text at 0, 1, ... meets it as if it came right behind. Learned positions (GPT-2, OPT) have
nothing below 0: the prompt is read at 0..m-1, and text behind it stands at m, m+1, ...
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor, nn
from transformers import Cache, DynamicCache

from inlay.anatomy import anatomy
from inlay.errors import InlayError
from inlay.methods.plain import base_of

CHUNK = 1024
"""Tokens read at once: what a layer computes for them is held, of the others only keys and values."""
CHANGING = ("dynamic", "longrope")
"""Rotary embeddings whose angles depend on the length of the text: they have no positions below 0."""

KeysValuesBiases = tuple[Tensor, Tensor, Tensor]
"""`[kv_heads, t, d]` twice and `[kv_heads, t]`: key j counts as `exp(bias_j)` keys."""


@dataclass(frozen=True)
class Earlier:
    """What stands for the first tokens of a long prompt, `ids`, when the others are read: of every block in order.
    `positions` has the place of every key of a block, `[kv_heads, t]`; the text behind begins at 0."""

    blocks: Sequence[KeysValuesBiases]
    ids: tuple[int, ...]
    positions: Sequence[Tensor]


@dataclass(frozen=True)
class Prompt:
    """A prompt that was read: `cache` holds its keys and values, `following` is the position of the next token, and
    `logits` (1, vocabulary) what the model expects there, where that was asked for. `ids` are its tokens, with those
    read before; a trained prefix has none. `lead` of these are tokens that every text begins with where no prompt is
    before it."""

    cache: Cache
    length: int
    following: int
    logits: Tensor | None = None
    ids: tuple[int, ...] = ()
    lead: int = 0
    earlier: Earlier | None = None
    """What stands for tokens that were read before, and compressed; `length` does not count them."""

    @property
    def tokens(self) -> int:
        """How many it has, with those read before."""
        return self.length + (0 if self.earlier is None else len(self.earlier.ids))

    def keys_and_values(self, block: int) -> tuple[Tensor, Tensor]:
        """Of one block, counted from 1: `[kv_heads, m, d]` each; of a sliding window what lies in it."""
        layer = self.cache.layers[block - 1]
        assert layer.keys is not None
        assert layer.values is not None
        if self.earlier is None:
            return layer.keys[0], layer.values[0]
        key, value, _ = self.earlier.blocks[block - 1]
        return torch.cat([key.to(layer.keys), layer.keys[0]], 1), torch.cat([value.to(layer.keys), layer.values[0]], 1)

    def biases(self, block: int) -> Tensor | None:
        """Of one block, `[kv_heads, m]`: None where every key counts once."""
        if self.earlier is None:
            return None
        bias = self.earlier.blocks[block - 1][2]
        return torch.nn.functional.pad(bias, (0, self.cache.layers[block - 1].get_seq_length()))

    def positions(self, block: int) -> Tensor:
        """Where the keys of one block stand, `[kv_heads, m]`; of a rotary embedding, where the text begins at 0."""
        keys = self.keys_and_values(block)[0]
        own = torch.arange(-self.length, 0, device=keys.device).expand(len(keys), -1)
        return own if self.earlier is None else torch.cat([self.earlier.positions[block - 1], own], 1)


@torch.no_grad()
def read(model: nn.Module, ids: Sequence[int], *, logits: bool = False) -> Prompt:
    """Let the model read a prompt, with whatever adapters run, in eval mode."""
    base = base_of(model)
    check(base, ids)
    found = anatomy(base)
    trunk: Any = found.backbone.module
    first = -len(ids) if rotary(base) else 0
    device = found.stem.module.weight.device if hasattr(found.stem.module, "weight") else next(base.parameters()).device
    tokens = torch.tensor([list(ids)], device=device)
    positions = torch.arange(first, first + len(ids), device=device)[None]
    cache = DynamicCache(config=base.config)
    last = None
    with evaluating(base):
        # The last token by itself: a head's outputs for the others would be thrown away.
        ends = [*range(CHUNK, len(ids) - 1, CHUNK), len(ids) - 1, len(ids)]
        for begin, end in zip([0, *ends], ends, strict=False):
            if begin == end:
                continue
            run: Any = base if logits and end == len(ids) else trunk
            last = run(
                input_ids=tokens[:, begin:end],
                attention_mask=torch.ones_like(tokens[:, :end]),
                position_ids=positions[:, begin:end],
                past_key_values=cache,
                use_cache=True,
            )
    assert last is not None
    return Prompt(cache, len(ids), first + len(ids), last.logits[:, -1] if logits else None, tuple(ids))


@torch.no_grad()
def trained_prefix(model: PeftModel) -> Prompt:
    """The keys and values of a prefix-tuning adapter of PEFT, as a prompt (section G of the paper).

    PEFT puts them before the keys as they are and lets the text begin at position m. Text that begins at 0 meets the
    same scores with a rotary embedding when the keys are rotated back by m.
    """
    base: Any = model.get_base_model()
    cache: Any = model.get_prompt(batch_size=1)
    length = cache.get_seq_length()
    if not rotary(base):
        return Prompt(cache, length, length)
    for block, layer in zip(anatomy(base).blocks, cache.layers, strict=True):
        assert block.attention is not None
        layer.keys = rotated(base, block.attention.module, layer.keys, -length)
    return Prompt(cache, length, 0)


def rotated(base: Any, attention: nn.Module, keys: Tensor, by: int | Tensor) -> Tensor:
    """Keys, `[rows, heads, t, d]`, turned by the model's own rotary embedding as if they stood `by` positions further
    on: all of them as many, or each of a row its own, `[rows, t]`."""
    embedding = getattr(anatomy(base).backbone.module, "rotary_emb", None)
    apply = vars(sys.modules[type(attention).__module__]).get("apply_rotary_pos_emb")
    try:
        assert embedding is not None
        assert apply is not None
        places = by if isinstance(by, Tensor) else torch.tensor([[by]], device=keys.device)
        cos, sin = embedding(keys, places)
        turned: Tensor = apply(keys, keys, cos, sin)[1] / getattr(embedding, "attention_scaling", 1.0)
    except (TypeError, AssertionError, AttributeError) as error:
        raise InlayError(
            f"{type(base).__name__} rotates its keys in a way that is not known here: they cannot be moved to other "
            "positions, as trained prefixes and prompts in chunks need it. Compress a prompt that fits the context, or "
            "take a Llama, Mistral or Qwen."
        ) from error
    return turned


def check(model: nn.Module, ids: Sequence[int], more: int = 0) -> None:
    """Whether a model can read a prompt and `more` tokens behind it; raises an `InlayError` that says why not."""
    base: Any = base_of(model)
    name = type(base).__name__
    if anatomy(base).kind != "decoder" or anatomy(base).modality != "text":
        raise InlayError(
            f"{name} is no decoder, and a prompt is read by one: token after token, each seeing those before it. "
            "Take a causal language model, such as embedded:smollm2."
        )
    if not len(ids):
        raise InlayError("The prompt is empty: there is nothing to compress. Give a text of one token or more.")
    rows = base.get_input_embeddings().weight.shape[0]
    if not all(0 <= number < rows for number in ids):
        wrong = next(number for number in ids if not 0 <= number < rows)
        raise InlayError(f"The prompt has the token id {wrong}, and {name} has 0 to {rows - 1}: another tokenizer's?")
    context = context_of(base)
    if context is not None and len(ids) + more > context:
        have = f"The prompt has {len(ids):,} tokens" + (f" and the texts behind it {more:,}" if more else "")
        shorten = f"the prompt to {context - more:,} tokens"
        if more >= context:
            shorten = f"the texts (`length`, --length) to {context - len(ids):,} tokens"
            if len(ids) >= context:
                shorten = "both"
        raise InlayError(
            f"{have}; {name} reads {context:,} in all. Shorten {shorten}, or take a model with a longer context."
        )
    changing = _rope_types(base) & set(CHANGING)
    if changing:
        raise InlayError(
            f"The rotary embedding of {name} ({', '.join(sorted(changing))}) changes with the length of the text: keys "
            "of a prompt cannot be kept for texts of other lengths."
        )


def context_of(model: Any) -> int | None:
    """How many tokens a model reads at most; None where it does not say."""
    found = getattr(model.config, "max_position_embeddings", None)
    return found if isinstance(found, int) and found > 0 else None


def rotary(model: nn.Module) -> bool:
    """Whether positions enter by rotating queries and keys."""
    return any("RotaryEmbedding" in type(module).__name__ for module in model.modules())


def _rope_types(model: Any) -> set[str]:
    found = getattr(model.config, "rope_parameters", None) or {}
    nested = [found, *(value for value in found.values() if isinstance(value, dict))]
    return {str(entry["rope_type"]) for entry in nested if "rope_type" in entry}


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Every module in eval mode, and afterwards as it was."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode
