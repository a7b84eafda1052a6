"""The tuner of NTK-Attention (Liang et al. 2024): every attention module that looks its function up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from inlay.errors import InlayError
from inlay.methods.ntk_attention.config import NTKAttentionConfig
from inlay.methods.ntk_attention.fit import Centring, Squares, watching_all
from inlay.methods.ntk_attention.layer import NTKAttentionLayer, TrainedPrefix
from inlay.methods.ntk_attention.start import Start, start_at
from inlay.methods.plain import base_of
from inlay.methods.prompts import Prompt, read
from inlay.methods.protocol import Passes
from inlay.methods.softmax_tuner import SoftmaxTuner


class NTKAttentionModel(SoftmaxTuner):
    """`get_peft_model(model, NTKAttentionConfig())` makes one of these."""

    prefix = "inlay_ntk_"
    child = "inlay_ntk"
    tuner_layer_cls = NTKAttentionLayer
    method = "ntk-attention"

    def settings_at(self, config: NTKAttentionConfig, name: str) -> Start:
        return start_at(config, self.places()[name], self.prompt)

    def _prepare_adapter_config(self, peft_config: Any, model_config: dict[str, Any]) -> Any:
        for block in self.places().values():  # before any layer is made
            assert block.attention is not None
            peft_config.rank_at(block.attention.head_size)
        if peft_config.centred and not peft_config.resolved:  # a loaded adapter has its centre
            peft_config.centre_id = self._first_token(peft_config.centre_id)
            if not next(self.model.parameters()).is_meta:
                self.prompt = read(self.model, [peft_config.centre_id])
        return super()._prepare_adapter_config(peft_config, model_config)

    def _first_token(self, given: int | None) -> int:
        """The token whose key is the centre."""
        found = getattr(base_of(self.model).config, "bos_token_id", None) if given is None else given
        if not isinstance(found, int):
            raise InlayError(
                f"{type(self.model).__name__} names no first token (bos_token_id is {found!r}): give the id of one, "
                "centre_id=... (--set centre_id=0), or leave centred out."
            )
        return found

    @torch.no_grad()
    def start_from(self, prompt: Prompt, adapter_name: str = "default") -> None:
        """Put Eq. (4) of a prompt, or of a trained prefix, into an adapter whose start is `text`."""
        config = self.peft_config[adapter_name]
        for name, block in self.places().items():
            layer = getattr(block.attention.module if block.attention else None, self.child, None)
            if name in config.target_modules and layer is not None:
                layer.inlay_ntk_prefix[adapter_name].begin(start_at(config, block, prompt))

    def can_fit(self) -> bool:
        """Not with features that may be negative, whose kappa is Eq. (4)'s."""
        prefixes = [module for module in self.model.modules() if isinstance(module, TrainedPrefix)]
        return all(prefix.features.positive for prefix in prefixes)

    def fit_work(self, batches: int) -> int:
        return 2 * batches

    @torch.no_grad()
    def fit_passes(self, passes: Passes, prompt: Prompt, tick: Callable[[], None]) -> None:
        """Begin at the least squares of the queries that the passes bring (`fit.py`).

        Each layer is fitted to what it does in the prompted model, so that the errors of layers before it are not seen.
        """
        for kind in (Centring, Squares):
            with watching_all(self.model, kind) as watchers:
                for real, run in passes():
                    for watcher in watchers:
                        watcher.real = real
                    run()
                    tick()
                for watcher in watchers:
                    watcher.settle()
