"""Let a language model continue prompts, greedily, with a cache of keys and values, padded on the left; or write what
its decoder makes of texts that its encoder reads."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch

from inlay.tasks.encode import length_limit
from inlay.training.batches import Placement, Stop, batches, count_virtual_tokens, gather
from inlay.training.sharding import is_divided
from inlay.training.shares import Filler

MOST_TOKENS = 128  # where the task does not say


def generate(
    model: Any,
    task: Any,
    rows: Sequence[Any],
    processor: Any,
    max_length: int | None,
    place: Placement,
    stop: Stop | None = None,
) -> list[str]:
    """A text for each row. The task (or its schema) makes the prompts."""
    most, length = plan_generation(model, task, processor, max_length)
    encoded = task.encode_inputs(rows, processor, length)
    texts: list[str] = []
    ends = task.stops(processor)
    for batch in batches(model, encoded, task.collator(processor, model, generation=True), place, stop):
        written = write_texts(model, batch, processor, most, place, ends)
        texts += [] if isinstance(batch, Filler) else written
    parts = gather(texts)
    whole = [""] * len(encoded)
    for rank, part in enumerate(parts):
        whole[rank :: len(parts)] = part
    return whole


def write_texts(
    model: Any, batch: dict[str, Any], processor: Any, most: int, place: Placement, ends: Sequence[int]
) -> list[str]:
    """What the model writes after each prompt of a batch, at most so many tokens, up to one of `ends`; rows may name
    their tasks."""
    # Whatever sampling the checkpoint asks for: the same prompt is to get the same text.
    how = {
        "do_sample": False,
        "num_beams": 1,
        "use_cache": True,
        "max_new_tokens": most,
        "pad_token_id": processor.pad_token_id,
        "eos_token_id": list(ends) or None,
        "synced_gpus": is_divided(model),  # all processes write as long as the longest text
    }
    inputs = {name: value for name, value in batch.items() if name != "token_type_ids"}
    with torch.no_grad(), place.autocast():
        ids = model.generate(**inputs, **how)
    decoder_only = not getattr(model.config, "is_encoder_decoder", False)
    new = ids[:, batch["input_ids"].shape[1] :].tolist() if decoder_only else ids.tolist()
    if decoder_only:  # what ends a turn is not always a special token of the tokenizer's
        new = [list(itertools.takewhile(lambda token: token not in ends, row)) for row in new]
    return list(processor.batch_decode(new, skip_special_tokens=True))


def plan_generation(model: Any, task: Any, processor: Any, max_length: int | None) -> tuple[int, int | None]:
    """How many tokens to write, and the length to encode prompts for, so that both fit into what the model reads.

    A method's virtual tokens take positions too. Encoding leaves the task's own `max_new_tokens` free by itself.
    """
    limit = length_limit(processor, model.config)
    room = limit and limit - count_virtual_tokens(model)
    known = [each for each in (max_length, room) if each]
    wanted = task.max_new_tokens or MOST_TOKENS
    if not known:
        return wanted, None
    if getattr(model.config, "is_encoder_decoder", False):  # what is written has a decoder's positions to itself
        return min(wanted, room or wanted), min(known)
    most = min(wanted, max(1, min(known) // 2))
    return most, min(known) - most + (task.max_new_tokens or 0)
