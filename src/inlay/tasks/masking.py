"""Texts with masks to be filled: what is hidden, and behind what, follows from the seed, the epoch and the row.

Of the tokens of a row that are not special, 15 % are to be told, and at least one: of these 80 % become the mask token,
10 % a random token, 10 % stay (Devlin et al., BERT, 2019). In training they are drawn anew in every epoch; for
evaluation they are the same for every seed and every method, so that these are compared on the same masks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from inlay.errors import InlayError
from inlay.tasks.encode import IGNORED, Encoded, Ragged

SHARE = 0.15
MASKED, RANDOM = 0.8, 0.1
_BATCH = 1000


class MaskedTexts(Encoded):
    """Rows of tokens, each masked when it is asked for. `special` marks the tokens that are never hidden, `others` are
    the ids that may stand in a hidden token's place; a data set to train on has the run's `seed` and its `epoch`."""

    def __init__(
        self, columns: Mapping[str, Sequence[Sequence[int]]], special: Ragged, mask: int, others: np.ndarray
    ) -> None:
        super().__init__(columns)
        self.special, self.mask, self.others = special, mask, others
        self.seed = self.epoch = 0

    def __getitem__(self, index: int) -> dict[str, Any]:
        item = super().__getitem__(index)
        ids = np.asarray(item["input_ids"], dtype=np.int64)
        free = np.flatnonzero(np.asarray(self.special[index]) == 0)
        drawn = np.random.default_rng([self.seed, self.epoch, index])
        hidden = drawn.choice(free, size=max(1, round(SHARE * len(free))), replace=False)
        labels = np.full(len(ids), IGNORED)
        labels[hidden] = ids[hidden]
        how = drawn.random(len(hidden))
        random = drawn.choice(self.others, size=len(hidden))
        ids[hidden] = np.where(how < MASKED, self.mask, np.where(how < MASKED + RANDOM, random, ids[hidden]))
        return {**item, "input_ids": ids.tolist(), "labels": labels.tolist()}


def encode_masked(texts: Sequence[str], tokenizer: Any, length: int, split: str) -> MaskedTexts:
    """Texts as rows of at most `length` tokens: a longer text becomes several rows, one without a token none."""
    if tokenizer.mask_token_id is None:
        raise InlayError(
            f"masked-lm hides tokens behind a mask token, and {type(tokenizer).__name__} has none. Take a model that "
            "was trained to fill masks, such as BERT or RoBERTa."
        )
    columns: dict[str, list[list[int]]] = {}
    special: list[list[int]] = []
    for batch in _batches(texts):
        fast = {"return_overflowing_tokens": True} if getattr(tokenizer, "is_fast", False) else {}
        found = dict(
            tokenizer(batch, truncation=True, max_length=length, return_special_tokens_mask=True, verbose=False, **fast)
        )
        marks = found.pop("special_tokens_mask")
        found.pop("overflow_to_sample_mapping", None)
        kept = [i for i, row in enumerate(marks) if 0 in row]
        special += [marks[i] for i in kept]
        for name, values in found.items():
            columns.setdefault(name, []).extend(values[i] for i in kept)
    if not special:
        raise InlayError(f"There is no text to learn from in the {split} split: no row has a token.")
    usual = np.setdiff1d(np.arange(len(tokenizer)), tokenizer.all_special_ids)
    made = MaskedTexts(columns, Ragged.of(special), int(tokenizer.mask_token_id), usual)
    if len(made) != len(texts):
        made.notes = (f"{len(texts):,} {split} texts make {len(made):,} rows of at most {length} tokens",)
    return made


def _batches(texts: Sequence[str]) -> Iterable[list[str]]:
    return (list(texts[start : start + _BATCH]) for start in range(0, len(texts), _BATCH))
