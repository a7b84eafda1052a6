"""Fill the masks of texts: the likeliest token for each, all masks of a text in one pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from inlay.training.batches import Placement, batches, gather, order_by_length

Answer = dict[str, Any]


def fill(model: nn.Module, task: Any, encoded: Any, rows: Sequence[Any], tokenizer: Any, place: Placement) -> list[Any]:
    """For each row its text with the masks filled in, and of each mask the token and its probability.

    A mask beyond the longest text that is read stays as it is, and a text without one is returned as it came.
    """
    order = order_by_length(encoded)
    found: list[list[tuple[int, float]]] = []
    for batch in batches(model, encoded, task.collator(tokenizer, model), place, None, order):
        with torch.no_grad(), place.autocast():
            logits = model(**batch)["logits"]
        for ids, row in zip(batch["input_ids"], logits, strict=True):
            at = torch.nonzero(ids == tokenizer.mask_token_id).flatten()
            shares, best = row[at].float().softmax(-1).max(-1)
            found.append(list(zip(best.tolist(), shares.tolist(), strict=True)))
    parts, whole = gather(found), np.empty(len(order), dtype=object)
    for rank, part in enumerate(parts):
        for number, answers in zip(order[rank :: len(parts)], part, strict=True):
            whole[number] = answers
    return [_filled(task, row, each, tokenizer) for row, each in zip(rows, whole, strict=True)]


def _filled(task: Any, row: Any, answers: Sequence[tuple[int, float]], tokenizer: Any) -> Answer:
    first, *pieces = getattr(task, "schema", task).text_of(row, tokenizer).split(tokenizer.mask_token)
    masks = [{"token": tokenizer.decode([token]).strip(), "score": share} for token, share in answers]
    for number, piece in enumerate(pieces):
        first += (masks[number]["token"] if number < len(masks) else tokenizer.mask_token) + piece
    return {"filled": first, "masks": masks}
