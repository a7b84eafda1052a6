"""The tuner of activation prompts: finds the blocks, and the size of what enters them by a dry run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from inlay.anatomy import Anatomy, anatomy, feature_shapes
from inlay.errors import InlayError
from inlay.methods.activation_prompt.config import AUTO
from inlay.methods.activation_prompt.layer import ActivationPromptLayer
from inlay.methods.feature_prompts import FeaturePlace, FeaturePromptTuner, image_channels


class ActivationPromptModel(FeaturePromptTuner):
    """`get_peft_model(model, ActivationPromptConfig())` makes one of these."""

    name = "activation-prompt"
    prefix = "inlay_activation_"
    child = "inlay_activation"
    tuner_layer_cls = ActivationPromptLayer

    def choose_layers(self, config: Any, parts: Anatomy) -> list[int]:
        """The layers asked for, if the model has them, or those that suit its kind."""
        count = len(parts.blocks)
        if config.layers == AUTO:
            return list(config.auto_layers(parts))
        first = 0 if parts.modality == "image" else 1
        wrong = [layer for layer in config.layers if not first <= layer <= count]
        if wrong:
            pixels = "0 (the pixels)" if first == 0 else "1"
            raise InlayError(
                f"layers={config.layers!r}: {type(self.model).__name__} has no layer {wrong[0]}. Give layers from "
                f"{pixels} to {count}, or 'auto'."
            )
        return config.layers

    def choose_shapes(self, config: Any, parts: Anatomy) -> dict[int, tuple[int, ...]]:
        """The shape of `delta` at every layer: of the whole feature map, of one position, or of the tokens to add."""
        if config.kind == "concat":
            self.refuse_concat(config, parts)
            return dict.fromkeys(config.layers, (config.length, parts.hidden_size))
        if config.per_position is None:
            config.per_position = parts.modality == "image"
        if parts.modality == "text":
            if config.per_position:
                raise InlayError(
                    "per_position=True is for images: texts differ in length. Leave per_position out; the prompt is "
                    "then the same at every position."
                )
            return dict.fromkeys(config.layers, (parts.hidden_size,))
        shapes = self.feature_maps(config, parts)
        if config.per_position:
            return shapes
        return {
            layer: (shape[0], 1, 1) if layer == 0 or parts.kind == "convolutional" else shape[-1:]
            for layer, shape in shapes.items()
        }

    def refuse_concat(self, config: Any, parts: Anatomy) -> None:
        """Tokens can be added where there is a sequence that nothing else has counted: in image transformers."""
        name = type(self.model).__name__
        if parts.modality == "text":
            reason = (
                f"the positions and masks of {name} count the tokens of the text (see the methods prompt and prefix)"
            )
        elif parts.kind != "encoder":
            reason = f"the layers of {name} make feature maps, not sequences of tokens"
        elif 0 in config.layers:
            reason = "layer 0 is the pixels; there it is the method visual-prompt with kind='resize-concat'"
        else:
            return
        raise InlayError(f"kind='concat' adds tokens, and {reason}. These kinds work here: add, product.")

    def feature_maps(self, config: Any, parts: Anatomy) -> dict[int, tuple[int, ...]]:
        """The shapes of what enters the layers, in the model's own layout."""
        found: dict[int, tuple[int, ...]] = {}
        if 0 in config.layers:
            found[0] = (image_channels(parts), *config.image_size)
        if any(config.layers):
            try:
                with self.without_own():
                    entering = feature_shapes(self.model, image_size=tuple(config.image_size))
            except InlayError:
                raise
            except (ValueError, RuntimeError) as error:
                raise InlayError(
                    f"image_size={config.image_size!r}: {type(self.model).__name__} cannot read such images ({error})."
                ) from error
            found |= {layer: entering[layer - 1] for layer in config.layers if layer}
        return found

    @contextmanager
    def without_own(self) -> Iterator[None]:
        """Without the adapters of this method that the model has already: they would add their tokens."""
        layers = [module for module in self.model.modules() if isinstance(module, self.tuner_layer_cls)]
        states = [layer._disable_adapters for layer in layers]
        try:
            for layer in layers:
                layer._disable_adapters = True
            yield
        finally:
            for layer, state in zip(layers, states, strict=True):
                layer._disable_adapters = state

    def settings_at(self, config: Any, name: str) -> FeaturePlace:
        """Features are of one size where each position has its own values; added tokens leave behind the last block."""
        concat = config.kind == "concat"
        last = anatomy(self.model).blocks[-1].module if concat else None
        return replace(super().settings_at(config, name), exact=bool(config.per_position) and not concat, last=last)
