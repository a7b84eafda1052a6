"""The tuner of visual prompting: prompts on the pixels, and how wide a frame is."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn

from inlay.anatomy import Anatomy
from inlay.errors import InlayError
from inlay.methods.capabilities import alternatives
from inlay.methods.feature_prompts import FeaturePlace, FeaturePromptTuner, image_channels
from inlay.methods.visual_prompt.layer import VisualPromptLayer

# Of the image's side: Bahng et al. pad 30 of 224 pixels; the usual frame stands around 128 of 224.
WIDTHS = {"pad": 30 / 224, "resize-concat": 48 / 224}


class VisualPromptModel(FeaturePromptTuner):
    """`get_peft_model(model, VisualPromptConfig())` makes one of these."""

    name = "visual-prompt"
    prefix = "inlay_visual_"
    child = "inlay_visual"
    tuner_layer_cls = VisualPromptLayer

    def choose_layers(self, config: Any, parts: Anatomy) -> list[int]:
        """The pixels."""
        if parts.modality == "text":
            raise InlayError(self.refusal(self.model))
        return [0]

    def choose_shapes(self, config: Any, parts: Anatomy) -> dict[int, tuple[int, ...]]:
        """The shape of an image."""
        if config.kind in WIDTHS:
            smallest = min(config.image_size)
            if config.width is None:
                config.width = max(1, round(WIDTHS[config.kind] * smallest))
            if not 1 <= config.width <= (smallest - 1) // 2:
                raise InlayError(
                    f"width={config.width!r}: a frame in images of {config.image_size[0]} x {config.image_size[1]} "
                    f"pixels is 1 to {(smallest - 1) // 2} pixels wide."
                )
        return {0: (image_channels(parts), *config.image_size)}

    def settings_at(self, config: Any, name: str) -> FeaturePlace:
        """With the width of the frame."""
        return replace(super().settings_at(config, name), width=config.width or 0)

    @classmethod
    def refusal(cls, model: nn.Module) -> str:
        """Texts have no pixels."""
        name = type(model).__name__
        return f"visual-prompt changes the pixels of images, and {name} reads text. {alternatives(model, cls.name)}"
