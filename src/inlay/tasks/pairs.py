"""Texts to embed: pairs and triplets to learn from, and a corpus with its queries to be scored on.

Every different text is tokenised once. To learn from, a row is an anchor, what belongs to it (its positive) and
perhaps texts that do not (negatives); in a batch the texts of the other rows are negatives too, but those that are
known to belong to the anchor. To be scored on, the anchors are queries, and all other texts the corpus.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch

from inlay.tasks.encode import IGNORED, Encoded, TextCollator, encode_texts

TEXTS, NUMBERS, KNOWN = "texts", "numbers", "known"  # of an item that is a pair


@dataclass(frozen=True)
class Judged:
    """What is known of encoded texts, by their numbers. `relevant` are the texts of the `corpus` that belong to each
    of the `queries`; `pairs` are two texts each, and `scores` say how alike they are, where that is in the data."""

    queries: tuple[int, ...]
    corpus: tuple[int, ...]
    relevant: tuple[frozenset[int], ...]
    pairs: tuple[tuple[int, ...], ...]
    scores: tuple[float, ...] | None = None

    @cached_property
    def place(self) -> dict[int, int]:
        """Where in the corpus each of its texts stands."""
        return {number: at for at, number in enumerate(self.corpus)}

    def in_order(self, texts: Iterable[int]) -> list[int]:
        """Texts of the corpus as they stand there."""
        return sorted(texts, key=self.place.__getitem__)


class JudgedTexts(Encoded):
    """Texts to embed, and what is known of them."""

    judged: Judged


class EncodedPairs(torch.utils.data.Dataset[dict[str, Any]]):
    """Rows to learn from, for `PairCollator`; `notes` and `cut` are as of `Encoded`."""

    def __init__(self, texts: Encoded, judged: Judged) -> None:
        self.texts, self.judged, self.cut = texts, judged, texts.cut
        self.targets_cut = texts.targets_cut
        self.notes: tuple[str, ...] = ()
        self._known = dict(zip(judged.queries, judged.relevant, strict=True))

    def __len__(self) -> int:
        return len(self.judged.pairs)

    @property
    def lengths(self) -> np.ndarray:
        """How many tokens the longest text of each row has."""
        return self.texts.lengths[np.asarray(self.judged.pairs)].max(axis=1)

    def __getitem__(self, index: int) -> dict[str, Any]:
        numbers = self.judged.pairs[index]
        item: dict[str, Any] = {TEXTS: [self.texts[number] for number in numbers], NUMBERS: numbers}
        if self.judged.scores is not None:
            return item | {"labels": self.judged.scores[index]}
        return item | {KNOWN: self._known[numbers[0]]}


def encode_pairs(
    rows: Sequence[Mapping[str, Any]], fields: Sequence[str], tokenizer: Any, max_length: int, *, judged: bool
) -> EncodedPairs | JudgedTexts:
    """Rows of an anchor, a positive and any negatives, in the order of `fields`, or of two texts and a `label`.

    `judged`: as a corpus with its queries.
    """
    number: dict[str, int] = {}
    pairs = tuple(tuple(number.setdefault(row[name], len(number)) for name in fields) for row in rows)
    relevant: dict[int, set[int]] = {}
    for anchor, positive, *_ in pairs:
        relevant.setdefault(anchor, set()).add(positive)
    known = Judged(
        queries=tuple(relevant),
        corpus=tuple(dict.fromkeys(each for _, *others in pairs for each in others)),
        relevant=tuple(map(frozenset, relevant.values())),
        pairs=pairs,
        scores=tuple(float(row["label"]) for row in rows) if rows and "label" in rows[0] else None,
    )
    columns, cut = encode_texts([{"text": text} for text in number], "{text}", tokenizer, max_length)
    if not judged:
        return EncodedPairs(Encoded(columns, cut=cut), known)
    made = JudgedTexts(columns, cut=cut)
    made.judged = known
    return made


class PairCollator(TextCollator):
    """A batch of pairs as one of texts: all anchors, then all positives, then the negatives of each column.

    The `labels` of B pairs are B x C: for each anchor 1 at its own positive, 0 at what is a negative of it, and
    `IGNORED` at what belongs to it too or is the anchor itself. Of scored pairs they are the B scores. What is no pair
    is padded as `TextCollator` does.
    """

    def __call__(self, items: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
        if TEXTS not in items[0]:
            return super().__call__(items)
        places = range(len(items[0][TEXTS]))
        batch = super().__call__([item[TEXTS][place] for place in places for item in items])
        if "labels" in items[0]:
            batch["labels"] = torch.tensor([item["labels"] for item in items], dtype=torch.float32)
            return batch
        candidates = [item[NUMBERS][place] for place in places[1:] for item in items]
        batch["labels"] = torch.tensor([_relations(i, item, candidates) for i, item in enumerate(items)])
        return batch


def _relations(own: int, item: Mapping[str, Any], candidates: Sequence[int]) -> list[int]:
    mine = {item[NUMBERS][0], *item[KNOWN]}
    return [1 if place == own else IGNORED if each in mine else 0 for place, each in enumerate(candidates)]
