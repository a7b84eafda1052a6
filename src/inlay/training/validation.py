"""The validation split, scored again and again while a model is trained.

Its order never changes, so the output of the frozen trunk is the same every time, batch by batch, to the bit wherever
the same computation twice gives the same bits. The first time it is scored without: that is how fast the model infers.
The second time the trunk's output is kept, where training has a trunk to keep and memory has room, and used from then
on; such a pass tells nothing of the model's speed. The cut was found in the modes of training: in eval mode a model may
read more than passes through it, so the first batch is scored both ways, and nothing kept if it comes out differently.

A method may keep something of each text by itself (InfoPrompt: Phi(X)): `timed` tells nothing of the speed of a pass
that lived on it either.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from inlay.methods.protocol import layers_of
from inlay.training.evaluation import Scored, score
from inlay.training.place import Place, Stop
from inlay.training.trunk.cut import NotReached, TrunkCache
from inlay.training.trunk.data import KeptSplit, NotKept


class Validation:
    """Scores the split when called. `trunk` is set once it is known that training has one worth keeping here."""

    def __init__(self, model: nn.Module, task: Any, encoded: Any, collate: Callable[[Any], Any], place: Place) -> None:
        self.model, self.task, self.encoded, self.collate, self.place = model, task, encoded, collate, place
        self.trunk: TrunkCache | None = None
        self.times = 0
        self._kept: KeptSplit | None = None

    def __call__(self, stop: Stop) -> Scored:
        self.times += 1
        if self.trunk is not None and self.times == 2:
            self._keep(self.trunk, stop)
        if self._kept is None:
            return timed(self.model, lambda: self._scored(stop))
        kept = self._kept
        scored = score(self.model, self.task, kept, kept.collate, self.place, stop, kept.replay)
        return dataclasses.replace(scored, seconds=None)

    def _scored(self, stop: Stop) -> Scored:
        return score(self.model, self.task, self.encoded, self.collate, self.place, stop)

    def _keep(self, trunk: TrunkCache, stop: Stop) -> None:
        kept = KeptSplit(self.encoded, self.collate, trunk, self.place.batch_size, self.place.device, shuffled=False)
        self.model.eval()
        try:
            with torch.no_grad(), self.place.autocast():
                kept.fill(None, stop)
                kept.check_first(stop)
        except (NotKept, NotReached):
            kept.close()
            return
        self._kept = kept


def timed(model: nn.Module, run: Callable[[], Scored]) -> Scored:
    """Score a split; the seconds are left out where the method remembered more texts than it computed.

    The layers that remember anything say how many texts they remembered and computed so far.
    """
    before = {layer: layer.recalled for layer in layers_of(model)}
    scored = run()
    for layer, counts in before.items():
        if counts and layer.recalled and layer.recalled[0] - counts[0] > layer.recalled[1] - counts[1]:
            return dataclasses.replace(scored, seconds=None)
    return scored
