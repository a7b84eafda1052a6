"""What the prompted model says of texts that come again and again: computed once, kept as hidden states.

Distillation goes through the same texts for several epochs, and the prompted model is frozen. Its logits are too large
to keep (a vocabulary each token); the hidden states before the output embeddings are not, and the output embeddings
alone give the logits back. Models that do more to their logits than that (Gemma 2 caps them) are asked anew each time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from inlay.methods.plain import base_of

if TYPE_CHECKING:
    from inlay.training.distil import Batch, Pair

ROOM = 1 << 30
"""Bytes of hidden states that are kept, 1 GiB; texts beyond are asked about anew."""


class Teacher:
    """The prompted model of a pair, before texts that are numbered."""

    def __init__(self, pair: Pair) -> None:
        self.pair = pair
        self.head: Any = base_of(pair.model).get_output_embeddings()
        self.kept: dict[int, Tensor] = {}
        self.room = ROOM if self.head is not None else 0

    @torch.no_grad()
    def __call__(self, numbers: Sequence[int], batch: Batch) -> Tensor:
        """Logits at the batch's texts, as of `Pair.prompted`; where a text is padded they mean nothing."""
        if all(number in self.kept for number in numbers):
            return self._again([self.kept[number] for number in numbers], batch)
        if self.room <= 0:
            return self.pair.prompted(batch.ids)
        seen: list[Tensor] = []
        hook = self.head.register_forward_pre_hook(lambda module, given: seen.append(given[0]))
        try:
            logits = self.pair.prompted(batch.ids)
        finally:
            hook.remove()
        self._keep(numbers, batch, seen, logits)
        return logits

    def _keep(self, numbers: Sequence[int], batch: Batch, seen: list[Tensor], logits: Tensor) -> None:
        if len(seen) != 1 or seen[0].shape[:2] != batch.ids.shape or not self._same(seen[0], batch, logits):
            self.room = 0
            return
        for number, states, real in zip(numbers, seen[0], batch.real, strict=True):
            size = int(real.sum()) * states.shape[-1] * states.element_size()
            if number not in self.kept and size <= self.room:
                self.kept[number] = states[real].clone()
                self.room -= size

    def _same(self, states: Tensor, batch: Batch, logits: Tensor) -> bool:
        """Whether the output embeddings are all that stands between these states and the logits."""
        found = self._logits(states[:1])
        return torch.allclose(found, logits[:1, -found.shape[1] :].to(found), atol=1e-2, rtol=1e-2)

    def _again(self, states: list[Tensor], batch: Batch) -> Tensor:
        found = self._logits(nn.utils.rnn.pad_sequence(states, batch_first=True))
        if self.pair.lead:
            assert self.pair.prompt.logits is not None
            found = torch.cat([self.pair.prompt.logits.expand(len(found), 1, -1).to(found), found], 1)
        return found

    def _logits(self, states: Tensor) -> Tensor:
        with self.pair.place.autocast():
            found: Tensor = self.head(states)
        return found
