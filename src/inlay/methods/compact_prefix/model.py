"""The tuner of compact prefixes: every attention module that looks its function up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from inlay.anatomy import Block, anatomy
from inlay.methods.compact_prefix.config import CompactPrefixConfig
from inlay.methods.compact_prefix.layer import CompactPrefix, CompactPrefixLayer, PrefixStart
from inlay.methods.compact_prefix.matching import fit
from inlay.methods.compact_prefix.start import start_at
from inlay.methods.prompts import KeysValuesBiases, Prompt
from inlay.methods.protocol import Passes
from inlay.methods.softmax_tuner import SoftmaxTuner


class CompactPrefixModel(SoftmaxTuner):
    """`get_peft_model(model, CompactPrefixConfig())` makes one of these."""

    prefix = "inlay_compact_"
    child = "inlay_compact"
    tuner_layer_cls = CompactPrefixLayer
    method = "compact-prefix"
    fit_batch = 96
    fit_leads = True

    def settings_at(self, config: CompactPrefixConfig, name: str) -> PrefixStart:
        return start_at(config, self.places()[name], self.prompt)

    def _prepare_adapter_config(self, peft_config: Any, model_config: dict[str, Any]) -> Any:
        found = super()._prepare_adapter_config(peft_config, model_config)
        if self.prompt is not None:
            self._note_sizes(found, self.prompt)
        return found

    def _note_sizes(self, config: Any, prompt: Prompt) -> None:
        """A prompt may be shorter than the size that was asked for; of a sliding window, what lies in it."""
        starts = {name: self.places()[name] for name in config.target_modules}
        sizes = {name: list(start_at(config, block, prompt).sizes) for name, block in starts.items()}
        if any(size != config.size for each in sizes.values() for size in each):
            config.sizes = sizes

    @torch.no_grad()
    def start_from(self, prompt: Prompt, adapter_name: str = "default") -> None:
        """Begin at the segments of a prompt, or of a trained prefix."""
        config = self.peft_config[adapter_name]
        for name, (block, prefix) in self._prefixes(adapter_name).items():
            start = start_at(config, block, prompt)
            prefix.begin(start)
            config.sizes = (config.sizes or {}) | {name: list(start.sizes)}

    @torch.no_grad()
    def kept(self, adapter_name: str = "default") -> list[KeysValuesBiases] | None:
        """None where some block has no compact prefix."""
        prefixes = {block.index: prefix for block, prefix in self._prefixes(adapter_name).values()}
        if len(prefixes) < len(anatomy(self.model).blocks):
            return None
        found = [prefixes[number]() for number in sorted(prefixes)]
        return [(key, value, key.new_zeros(key.shape[:2]) if bias is None else bias) for key, value, bias in found]

    def can_fit(self) -> bool:
        return True

    def fit_work(self, batches: int) -> int:
        config = self.peft_config["default"]
        return len(self._prefixes("default")) * (2 if config.budgets == "unequal" else 1)

    @torch.no_grad()
    def fit_passes(
        self, passes: Passes, prompt: Prompt, tick: Callable[[], None], adapter_name: str = "default"
    ) -> None:
        """Match the attention that the prompt gets (`matching.py`)."""
        config = self.peft_config[adapter_name]
        config.sizes = fit(config, self._prefixes(adapter_name), prompt, passes, tick)

    def _prefixes(self, adapter_name: str) -> dict[str, tuple[Block, CompactPrefix]]:
        """The adapter's places: the block and what hangs there."""
        wanted = self.peft_config[adapter_name].target_modules
        found = {}
        for name, block in self.places().items():
            layer = getattr(block.attention.module, self.child, None) if block.attention is not None else None
            if name in wanted and layer is not None:
                found[name] = block, layer.pieces[adapter_name]
        return found
