"""The tuner of activation prompts: finds the blocks, the size of what enters them, and where the prompts go.

Shapes are found by a dry run when the adapter is made, and kept in its config: a reload needs none.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

from torch import nn

from inlay.anatomy import Anatomy, anatomy, feature_shapes, stated_image_size
from inlay.errors import InlayError
from inlay.methods.activation_prompt.config import AUTO
from inlay.methods.activation_prompt.layer import ActivationPromptLayer
from inlay.methods.activation_prompt.templates import Place
from inlay.methods.capabilities import alternatives
from inlay.methods.tuner import InlayTuner, plain_name

USUAL_SIZE = 224
DEFAULT_BLOCK = 3


class ActivationPromptModel(InlayTuner):
    """`get_peft_model(model, ActivationPromptConfig())` makes one of these."""

    name: ClassVar[str] = "activation-prompt"
    prefix = "inlay_activation_"
    child = "inlay_activation"
    tuner_layer_cls = ActivationPromptLayer

    def _targets(self, config: Any) -> list[str]:
        if config.target_modules is not None or config.exclude_modules is not None:
            raise InlayError(
                f"{self.name} acts at the input of blocks and chooses them by layers=, not by target_modules= or "
                "exclude_modules=. Leave these out."
            )
        parts = anatomy(self.model)
        self.settle_size(config, parts)
        config.layers = self.choose_layers(config, parts)
        shapes = self.choose_shapes(config, parts)
        config.shapes = {plain_name(_host(parts, layer).name): list(shape) for layer, shape in shapes.items()}
        return list(config.shapes)

    def settle_size(self, config: Any, parts: Anatomy) -> None:
        """The size of the images: the one given, the model's own, or the usual one, and then say so."""
        if parts.modality == "text":
            if config.image_size is not None:
                raise InlayError(
                    f"image_size={config.image_size!r}: {type(self.model).__name__} reads text. Leave image_size out."
                )
            return
        stated = config.image_size or stated_image_size(parts.backbone.module)
        if stated is None:
            stated = (USUAL_SIZE, USUAL_SIZE)
            warnings.warn(
                f"{type(self.model).__name__} does not say what size of image it takes: {self.name} is made for "
                f"{USUAL_SIZE} x {USUAL_SIZE} pixels. Give image_size= for another.",
                stacklevel=2,
            )
        config.image_size = list(stated)

    def choose_layers(self, config: Any, parts: Anatomy) -> list[int]:
        """The layers asked for, if the model has them, or those that suit its kind."""
        count = len(parts.blocks)
        if config.layers == AUTO:
            return [max(1, count - 1) if parts.kind == "convolutional" else min(DEFAULT_BLOCK, count)]
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
            found[0] = (_channels(parts), *config.image_size)
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

    def settings_at(self, config: Any, name: str) -> Place:
        """The prompt at one host, from what the config has on record."""
        concat = config.kind == "concat"
        last = anatomy(self.model).blocks[-1].module if concat else None
        exact = bool(getattr(config, "per_position", True)) and not concat
        return Place(config.kind, tuple(config.shapes[name]), exact, getattr(config, "width", None) or 0, last)

    @classmethod
    def refusal(cls, model: nn.Module) -> str:
        """Where there is nothing for the method to act on."""
        return f"{cls.name} finds no place in {type(model).__name__}. {alternatives(model, cls.name)}"


def _host(parts: Anatomy, layer: int) -> Any:
    """The part whose input is the feature map of a layer: block l, or the stem, whose input is the pixels."""
    return parts.blocks[layer - 1] if layer else parts.stem


def _channels(parts: Anatomy) -> int:
    """Of the images: what the stem's first convolution reads."""
    return next(module.in_channels for module in parts.stem.module.modules() if isinstance(module, nn.Conv2d))
