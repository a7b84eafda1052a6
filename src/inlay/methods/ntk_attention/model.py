"""The tuner of NTK-Attention (Liang et al. 2024): every attention module that looks its function up."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from inlay.anatomy import Attention, Block, anatomy
from inlay.errors import InlayError
from inlay.methods.attention_interface import on_interface
from inlay.methods.capabilities import alternatives
from inlay.methods.ntk_attention.config import NTKAttentionConfig
from inlay.methods.ntk_attention.fit import Centring, Squares, watching
from inlay.methods.ntk_attention.layer import NTKAttentionLayer, TrainedPrefix
from inlay.methods.ntk_attention.start import Start, start_at
from inlay.methods.plain import plain_name
from inlay.methods.prompts import Prompt, read
from inlay.methods.protocol import Passes
from inlay.methods.tuner import InlayTuner

SEEDS = 2**31


class NTKAttentionModel(InlayTuner):
    """`get_peft_model(model, NTKAttentionConfig())` makes one of these."""

    prefix = "inlay_ntk_"
    child = "inlay_ntk"
    tuner_layer_cls = NTKAttentionLayer
    _prompt: Prompt | None = None  # while an adapter that starts from one is put in

    def hosts(self, config: NTKAttentionConfig) -> list[str]:
        return list(self._places())

    def settings_at(self, config: NTKAttentionConfig, name: str) -> Start:
        return start_at(config, self._places()[name], self._prompt)

    def _prepare_adapter_config(self, peft_config: Any, model_config: dict[str, Any]) -> Any:
        if peft_config.seed is None:
            peft_config.seed = int(torch.randint(SEEDS, (), device="cpu"))
        for block in self._places().values():  # before any layer is made
            assert block.attention is not None
            peft_config.rank_at(block.attention.head_size)
        if peft_config.resolved:  # loaded: PEFT would leave out what has no place
            elsewhere = [name for name in peft_config.target_modules if name not in self._places()]
            if elsewhere:
                raise InlayError(
                    f"The adapter was trained at {len(peft_config.target_modules)} attentions, and "
                    f"{type(self.model).__name__} has no {elsewhere[0]!r}: it belongs to another model. Load it into "
                    "the one it was trained on."
                )
        if peft_config.prompt_ids is not None and not next(self.model.parameters()).is_meta:
            self._prompt = read(self.model, peft_config.prompt_ids)
            peft_config.prompt_length = len(peft_config.prompt_ids)
        return super()._prepare_adapter_config(peft_config, model_config)

    def inject_adapter(self, *args: Any, **kwargs: Any) -> None:
        try:
            super().inject_adapter(*args, **kwargs)
        finally:
            self._prompt = None

    @torch.no_grad()
    def start_from(self, prompt: Prompt, adapter_name: str = "default") -> None:
        """Put Eq. (4) of a prompt, or of a trained prefix, into an adapter whose start is `text`."""
        config = self.peft_config[adapter_name]
        for name, block in self._places().items():
            layer = getattr(block.attention.module if block.attention else None, self.child, None)
            if name in config.target_modules and layer is not None:
                layer.inlay_ntk_prefix[adapter_name].begin(start_at(config, block, prompt))

    def can_fit(self) -> bool:
        """Not with features that may be negative, whose kappa is Eq. (4)'s."""
        prefixes = [module for module in self.model.modules() if isinstance(module, TrainedPrefix)]
        return all(prefix.features.positive for prefix in prefixes)

    @torch.no_grad()
    def fit_passes(self, passes: Passes) -> None:
        """Begin at the least squares of the queries that the passes bring (`fit.py`).

        Each layer is fitted to what it does in the prompted model, so that the errors of layers before it are not seen.
        """
        for kind in (Centring, Squares):
            with watching(self.model, kind) as watchers:
                for real, run in passes():
                    for watcher in watchers:
                        watcher.real = real
                    run()
                for watcher in watchers:
                    watcher.settle()

    def _places(self) -> dict[str, Block]:
        """The blocks whose attention can be adapted, by the plain name of the attention module."""
        attentions = [(block, block.attention) for block in anatomy(self.model).blocks]
        return {plain_name(at.name): block for block, at in attentions if at is not None and _why_not(at) is None}

    @classmethod
    def refusal(cls, model: nn.Module) -> str:
        """Convolutional networks; MPNet, DeBERTa and timm's models; Gemma 2."""
        attention = next((block.attention for block in anatomy(model).blocks if block.attention is not None), None)
        reason = "it has no attention" if attention is None else _why_not(attention)
        return f"ntk-attention cannot adapt {type(model).__name__}: {reason}. {alternatives(model, 'ntk-attention')}"


def _why_not(attention: Attention) -> str | None:
    """Why an attention module cannot be adapted; None if it can."""
    name = type(attention.module).__name__
    if not on_interface(attention.module):
        return f"{name} does not look its function up in Transformers' attention interface"
    if getattr(attention.module, "attn_logit_softcapping", None):
        return f"{name} caps its scores, which are then no plain softmax"
    return None
