"""The LoRAs of one model, mixed in one pass: put in and taken out by name, run and let write.

The rest of the service knows nothing else of them. They are in a pool: those that batches name are on the device, those
that were used before in memory, the others on disk.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from inlay.errors import unknown
from inlay.methods.mixing import BASE
from inlay.methods.mixture.pool import AdapterPool
from inlay.tasks import kinds
from inlay.training.batches import Placement
from inlay.training.plan import pick_device, pick_dtype
from inlay.workflow.generation import Continuation, Writer

if TYPE_CHECKING:
    from inlay.backbones.loading import Backbone


class LoraWriter(Writer):
    """Lets the model write. Rows may always have different adapters; `encode_with` gives the tokenizer of a thread."""

    encode_with: Callable[[], Any] | None = None

    @property
    def base(self) -> Any:
        return self.model.model if isinstance(self.model, AdapterPool) else self.model

    @property
    def mixes(self) -> bool:
        return True

    def encode(self, text: str) -> list[int]:
        tokenizer = self.tokenizer if self.encode_with is None else self.encode_with()
        return list(tokenizer(text, add_special_tokens=False, verbose=False).input_ids)


class LoraSet:
    """LoRAs by name, in one base model that is loaded once. A pass names at most `slots` of them."""

    def __init__(self, backbone: Backbone, head: kinds.Head, slots: int = 64) -> None:
        self._within: dict[str, str] = {}
        self._numbers = count(1)
        self._states: Tensor | None = None
        self.base: Any = backbone.model
        self.writer = LoraWriter(backbone) if head is kinds.LANGUAGE else None
        if self.writer is not None:
            self.place = self.writer.place
        else:
            device = pick_device()
            self.place = Placement(device, pick_dtype("auto", device, strict=False), 1)
        self.base.to(self.place.device)
        # Some language models call what is inside their trunk.
        trunk = self.base.get_decoder() if self.writer else getattr(self.base, self.base.base_model_prefix)
        # First of its hooks: the states as they are, before a pooling is put in their place.
        trunk.register_forward_hook(self._remember, prepend=True)
        self.pool = AdapterPool(self.base, slots=slots)
        if self.writer is not None:
            self.writer.model = self.pool
        self._more = {"logits_to_keep": 1} if self.writer is not None and _keeps_few(self.base) else {}

    @property
    def names(self) -> list[str]:
        """The adapters that are there."""
        return list(self._within)

    def add(self, name: str, source: Path | str, revision: str | None = None) -> None:
        """Put an adapter in, from a folder or the hub; in place of an earlier one of the name, which goes only then."""
        within = f"served_{next(self._numbers)}"
        self.pool.add(within, str(source), **({} if revision is None else {"revision": revision}))
        try:
            self.pool.prefetch([within])  # its numbers are whole and finite
        except BaseException:
            self.pool.remove(within)
            raise
        earlier = self._within.get(name)
        self._within[name] = within
        if earlier is not None:
            self.pool.remove(earlier)

    def remove(self, name: str) -> None:
        """Take an adapter out."""
        if name not in self._within:
            raise unknown("adapter", name, self._within)
        self.pool.remove(self._within.pop(name))

    def run(self, batch: Mapping[str, Tensor], names: Sequence[str | None]) -> tuple[Tensor, Tensor]:
        """One pass of rows with these adapters (None: the model alone): the logits, and the trunk's last states."""
        rows = [BASE if name is None else self._within[name] for name in names]
        given = {key: value.to(self.place.device) for key, value in batch.items()}
        try:
            with self.place.autocast():
                logits = self.pool(**given, **self._more, adapter_names=rows)["logits"]
            assert self._states is not None
            return logits, self._states
        finally:
            self._states = None

    def generate(self, rows: Sequence[Continuation], names: Sequence[str | None]) -> None:
        """Continue texts to their ends in one pass, each with its adapter (None: the model alone)."""
        assert self.writer is not None
        for row, name in zip(rows, names, strict=True):
            row.prompt = None if name is None else self._within[name]
        try:
            self.writer.write(rows)
        finally:
            self._states = None

    def _remember(self, module: nn.Module, args: Any, output: Any) -> None:
        self._states = output[0]


def _keeps_few(base: Any) -> bool:
    """Whether the logits of the last token alone can be asked for: those of all would be many numbers for nothing."""
    return "logits_to_keep" in inspect.signature(base.forward).parameters
