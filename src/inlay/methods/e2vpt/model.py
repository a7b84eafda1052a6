"""The tuner of E2VPT (Han et al. 2023)."""

from __future__ import annotations

from typing import Any

import torch

from inlay.anatomy import Anatomy, Block
from inlay.methods.e2vpt.config import E2VPTConfig
from inlay.methods.e2vpt.layer import AttentionPlace, E2VPTPromptLayer, KeyValueLayer
from inlay.methods.plain import plain_name
from inlay.methods.token_prompts import TokenPromptConfig, TokenPromptTuner

SEEDS = 2**31


class E2VPTModel(TokenPromptTuner):
    """`get_peft_model(model, E2VPTConfig())` makes one of these."""

    prefix = "inlay_e2vpt_"
    child = "inlay_e2vpt"
    method = "e2vpt"
    prompt_layer = E2VPTPromptLayer
    attention_layer = KeyValueLayer
    tuner_layer_cls = (E2VPTPromptLayer, KeyValueLayer)

    def attended(self, config: E2VPTConfig, parts: Anatomy) -> list[Block]:
        """All blocks, or those that `layers` names."""
        if not config.num_kv_tokens:
            return []
        return [block for block in parts.blocks if config.layers is None or block.index in config.layers]

    def _prepare_adapter_config(self, peft_config: Any, model_config: dict[str, Any]) -> Any:
        if peft_config.seed is None:
            peft_config.seed = int(torch.randint(SEEDS, (), device="cpu"))
        return super()._prepare_adapter_config(peft_config, model_config)

    def settings_at(self, config: TokenPromptConfig, name: str) -> Any:
        """An attention's layer is told the shape of its keys."""
        assert isinstance(config, E2VPTConfig)
        for block in self.parts().blocks:
            if block.attention is not None and plain_name(block.attention.name) == name:
                size = block.attention.head_size
                width = int(block.attention.key.module.out_features)
                return AttentionPlace(config=config, block=block.index, heads=width // size, head_size=size)
        return super().settings_at(config, name)
