"""A prompt longer than the model's context, or than the memory: read in chunks, each behind what those before became.

The first chunk is read and compressed, as any prompt. Its kept keys are rotated back by the length of the second, which
is read behind them; both are compressed together, into more keys, and so on. The last chunk stays as it is: with what
stands for those before it, it is the prompt that is compressed for good. Memory is needed for one chunk, and no key is
farther from the text than the model's context: the oldest crowd together there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from inlay.anatomy import anatomy
from inlay.errors import InlayError
from inlay.methods.plain import base_of
from inlay.methods.prompts import Earlier, Prompt, check, context_of, read, rotary, rotated
from inlay.methods.shared_prompt import can_share, read_behind
from inlay.training.batches import Placement
from inlay.training.distil import Pair, fit

HELD = 2
"""How many times the final size is held between chunks: what is lost there nothing brings back."""
LEAST_HELD = 16
LEAST_CHUNK = 16


def chunks_of(ids: Sequence[int], most: int) -> list[list[int]]:
    """The ids in as few parts as there must be, none longer than `most`, of about equal lengths."""
    count = math.ceil(len(ids) / most)
    return [list(ids[number * len(ids) // count : (number + 1) * len(ids) // count]) for number in range(count)]


def usual_chunk(model: Any, tokens: int, length: int) -> int | None:
    """How long chunks are of a prompt that does not fit the context with texts of this length; None where it does, and
    where nothing sensible would."""
    context = context_of(base_of(model))
    if context is None or tokens + length <= context or context - length < 2 * LEAST_CHUNK:
        return None
    return (context - length) // 2


def read_in_chunks(
    model: Any,
    chunks: Sequence[Sequence[int]],
    place: Placement,
    lead: Sequence[int],
    length: int,
    texts: Callable[[Pair], list[list[int]]],
    tell: Callable[[str], None] = lambda line: None,
) -> Pair:
    """The adapted model behind the last chunk and what the others became. `texts` gives, for a pair, texts of at most
    `length` tokens to match at; the adapter's config says the size."""
    hooks, config, total = model.base_model, model.active_peft_config, sum(map(len, chunks))
    size, done = config.size, 0
    try:
        prompt = _first(model, chunks, length)
        for number, chunk in enumerate(chunks[1:], 2):
            done += prompt.length
            config.size = max(LEAST_HELD, round(HELD * size * done / total))
            tell(f"chunk {number - 1} of {len(chunks)}: {done:,} tokens become {config.size:,}")
            hooks.start_from(prompt)
            # What follows is the next chunk, which has no token of beginning; the texts' own would take its mass.
            fit(Pair(model, prompt, place), texts(Pair(model, prompt, place, lead)))
            earlier = _moved(model, hooks.kept(), prompt, len(chunk), length)
            with model.disable_adapter():
                prompt = read_behind(model, earlier, chunk, logits=True)
    finally:
        config.size = size
    hooks.start_from(prompt)
    return Pair(model, prompt, place, lead)


def _first(model: Any, chunks: Sequence[Sequence[int]], length: int) -> Prompt:
    """The first chunk, read; an error where the model or the adapter cannot go on from there."""
    for chunk in chunks:
        check(model, chunk, more=length)
    name = type(base_of(model)).__name__
    if not rotary(base_of(model)):
        raise InlayError(
            f"{name} has a place for every position and no more: a prompt of {sum(map(len, chunks)):,} tokens in "
            "chunks has keys that must be moved. Shorten the prompt, or take a model with rotary embeddings."
        )
    if model.base_model.kept() is None:
        raise InlayError(
            "A prompt is read in chunks where the adapter keeps keys and values in every layer: leave out `layers` "
            "(--layers) and the target (--to)."
        )
    with model.disable_adapter():
        prompt = read(model, chunks[0], logits=True)
    if not can_share(model, prompt):
        raise InlayError(
            f"{name} cannot read a prompt in chunks: its layers look through a sliding window, cap their scores, or do "
            "not look their attention function up. Shorten the prompt, or take a Llama, Mistral or Qwen without a "
            "window."
        )
    return prompt


def _moved(model: Any, kept: Any, prompt: Prompt, by: int, length: int) -> Earlier:
    """What stands for all that was read, with its keys so many positions further back, but none beyond the context of a
    text of this length."""
    base = base_of(model)
    context = context_of(base)
    blocks, places = [], []
    for block, (key, value, bias) in zip(anatomy(base).blocks, kept, strict=True):
        assert block.attention is not None
        own = prompt.keys_and_values(block.index)[0]
        before = prompt.positions(block.index).gather(1, _which(key, own))
        after = before - by if context is None else (before - by).clamp(min=length - context)
        moved = rotated(base, block.attention.module, key[:, None], after - before)[:, 0]
        blocks.append((moved, value.clone(), bias.clone()))
        places.append(after)
    return Earlier(blocks, prompt.ids, places)


def _which(kept: Tensor, own: Tensor) -> Tensor:
    """Which of its own keys each head has kept, `[kv_heads, t]`: matching changes none."""
    exact = torch.promote_types(kept.dtype, own.dtype)
    return torch.cdist(kept.to(exact), own.to(exact), compute_mode="donot_use_mm_for_euclid_dist").argmin(-1)
