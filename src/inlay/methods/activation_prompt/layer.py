"""The templates `g(z, delta)` of activation prompts (section 3 and table A3), and the prompts at one layer."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from inlay.methods.feature_prompts import Add, FeaturePlace, FeaturePromptLayer, Template


class Product(Template):
    """`g(z, delta) = z * (1 + delta)`, `delta = 0` at the start."""

    def forward(self, z: Tensor) -> Tensor:
        """The prompted features."""
        self.check(z)
        return z * (1 + self.weight).to(z.dtype)


class Concat(Template):
    """`g(z, delta) = [z, delta]`: `delta` is tokens, which stay until the last block has run.

    They stand behind the model's own tokens, which keep their places; attention over tokens that bear their positions
    already does not see the order. `delta` is drawn as VPT draws its prompts, from `U(-v, v)` with
    `v^2 = 6 / (d + d)`, where a patch has as many values as the hidden size `d`.
    """

    def __init__(self, place: FeaturePlace, **where: Any) -> None:
        super().__init__(place, **where)
        self.tokens, width = place.shape
        nn.init.uniform_(self.weight, -math.sqrt(3 / width), math.sqrt(3 / width))

    def forward(self, z: Tensor) -> Tensor:
        """The features and the prompt's tokens."""
        return torch.cat([z, self.weight.to(z.dtype).expand(len(z), -1, -1)], dim=1)


class ActivationPromptLayer(FeaturePromptLayer):
    """The prompts of `activation-prompt` at one layer."""

    adapter_layer_names = ("inlay_activation_delta",)
    templates: ClassVar = {"add": Add, "product": Product, "concat": Concat}

    def update_layer(self, adapter_name: str, place: FeaturePlace) -> None:
        super().update_layer(adapter_name, place)
        if place.last is not None and len(self._handles) == 1:
            self._handles.append(place.last.register_forward_hook(self.drop))

    def drop(self, last: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """The last block's forward hook: what comes after must not pool the prompt's tokens."""
        added = sum(self.pieces[name].tokens for name in self.running())
        if not added:
            return None
        if isinstance(output, tuple):
            return (output[0][:, :-added], *output[1:])
        return output[:, :-added]
