"""The tuner of visual prompt tuning (Jia et al. 2022)."""

from __future__ import annotations

from inlay.anatomy import Anatomy, Block
from inlay.methods.token_prompts import TokenPromptTuner
from inlay.methods.vpt.config import VPTConfig
from inlay.methods.vpt.layer import TemperatureLayer, VPTPromptLayer


class VPTModel(TokenPromptTuner):
    """`get_peft_model(model, VPTConfig())` makes one of these."""

    prefix = "inlay_vpt_"
    child = "inlay_vpt"
    method = "vpt"
    prompt_layer = VPTPromptLayer
    attention_layer = TemperatureLayer
    tuner_layer_cls = (VPTPromptLayer, TemperatureLayer)

    def attended(self, config: VPTConfig, parts: Anatomy) -> list[Block]:
        """Every block that prompts go through, where each has a temperature."""
        return list(parts.blocks[self.entries(config)[0] - 1 :]) if config.temperature else []
