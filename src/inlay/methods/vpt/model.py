"""The tuner of visual prompt tuning (Jia et al. 2022), and what it shares with E2VPT: where prompts enter and leave."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import nn

from inlay.anatomy import Anatomy, Block, anatomy
from inlay.errors import InlayError
from inlay.methods.attention_interface import on_interface
from inlay.methods.capabilities import alternatives
from inlay.methods.plain import base_of, plain_name
from inlay.methods.tuner import ChildLayer, InlayTuner
from inlay.methods.vpt.config import TokenPromptConfig, VPTConfig
from inlay.methods.vpt.layer import Place, PromptLayer, TemperatureLayer, VPTPromptLayer


class PromptTuner(InlayTuner):
    """Puts a layer on every block that prompts go through, and on the attention modules that the method asks for."""

    prompt_layer: ClassVar[type[PromptLayer]]
    attention_layer: ClassVar[type[ChildLayer]]
    method: ClassVar[str]

    def attended(self, config: Any, parts: Anatomy) -> list[Block]:
        """The blocks whose attention the method takes part in."""
        raise NotImplementedError

    def _targets(self, config: TokenPromptConfig) -> list[str]:
        if config.target_modules is not None or config.exclude_modules is not None:
            raise InlayError(f"{self.method} goes by blocks: name them in layers, not in target_modules.")
        parts = self.parts()
        self._refuse_another()
        blocks = [plain_name(block.name) for block in parts.blocks[self.entries(config)[0] - 1 :]]
        attended = self.attended(config, parts)
        for block in attended:
            if block.attention is None or not on_interface(block.attention.module):
                raise InlayError(
                    f"{self.method} takes part in attention by way of Transformers' attention interface, and "
                    f"{type(base_of(self.model)).__name__} is not on it. {alternatives(self.model, self.method)}"
                )
        return blocks + [plain_name(block.attention.name) for block in attended if block.attention is not None]

    def _refuse_another(self) -> None:
        """Each takes out what stands where it put its own, and would take out the other's."""
        for module in self.model.modules():
            if isinstance(module, PromptLayer) and not isinstance(module, self.prompt_layer):
                raise InlayError(
                    f"The model has prompts of another method already ({type(module).__name__}): unload them, or use "
                    "one method with more prompts."
                )

    def parts(self) -> Anatomy:
        """The model's anatomy, if it is a vision transformer with one sequence of tokens."""
        parts = anatomy(self.model)
        if parts.modality != "image" or parts.kind != "encoder":
            raise InlayError(self.refusal(self.model))
        return parts

    def entries(self, config: TokenPromptConfig) -> list[int]:
        """The blocks at which prompts enter, in order."""
        last = len(self.parts().blocks)
        entries = sorted(set(config.layers or (range(1, last + 1) if config.deep else (1,))))
        for block in entries:
            if not 1 <= block <= last:
                raise InlayError(f"layers={config.layers!r}: there is no layer {block}; the model has 1 to {last}.")
        return entries

    def layer_class(self, name: str) -> type[ChildLayer]:
        """Blocks have prompts; the other hosts are attention modules."""
        return self.prompt_layer if self._block(name) is not None else self.attention_layer

    def settings_at(self, config: TokenPromptConfig, name: str) -> Any:
        """A block's layer is told what the prompts do there."""
        block = self._block(name)
        if block is None:
            return config
        parts, entries = self.parts(), self.entries(config)
        projection = next(module for module in parts.stem.module.modules() if isinstance(module, nn.Conv2d))
        return Place(
            config=config,
            block=block,
            entry=max(entry for entry in entries if entry <= block),
            leaves=block == len(parts.blocks) or block + 1 in entries,
            leading=parts.leading_tokens,
            hidden_size=parts.hidden_size,
            fan=projection.weight[0].numel(),
        )

    def _block(self, name: str) -> int | None:
        return next((block.index for block in self.parts().blocks if plain_name(block.name) == name), None)

    @classmethod
    def refusal(cls, model: nn.Module) -> str:
        """Text models, convolutional networks, and transformers with windows."""
        parts, name = anatomy(model), type(base_of(model)).__name__
        if parts.modality == "text":
            reason = f"{name} reads text, for which there are prompt and prefix"
        elif parts.kind == "hierarchical":
            reason = f"{name} attends within windows, in which tokens beside the patches have no place"
        else:
            reason = f"{name} has a feature map and no tokens"
        return f"{cls.method} puts tokens beside an image's patches; {reason}. {alternatives(model, cls.method)}"


class VPTModel(PromptTuner):
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
