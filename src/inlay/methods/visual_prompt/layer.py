"""The templates of visual prompting that frame an image, and the prompt on the pixels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from inlay.methods.feature_prompts import Add, FeaturePlace, FeaturePromptLayer, Template


class Frame(Template):
    """A frame of `width` pixels around an image: nothing but the frame is stored and trained."""

    def __init__(self, place: FeaturePlace, **where: Any) -> None:
        self.width = place.width
        super().__init__(place, **where)

    def trained_shape(self, place: FeaturePlace) -> Sequence[int]:
        channels, height, width = place.shape
        inner = (height - 2 * place.width) * (width - 2 * place.width)
        return channels, height * width - inner

    def around(self, inner: Tensor) -> Tensor:
        """The frame, with `inner` (channels x height x width, or a batch of them) in the middle."""
        channels, height, width = self.place_shape
        edge, rows = self.width, height - 2 * self.width
        sizes = [edge * width, edge * width, rows * edge, rows * edge]
        shapes = [(edge, width), (edge, width), (rows, edge), (rows, edge)]
        batch = inner.shape[:-3]
        parts = self.weight.to(inner.dtype).split(sizes, dim=1)
        top, bottom, left, right = (
            part.reshape(channels, *shape).expand(*batch, channels, *shape)
            for part, shape in zip(parts, shapes, strict=True)
        )
        return torch.cat([top, torch.cat([left, inner, right], dim=-1), bottom], dim=-2)


class Pad(Frame):
    """`g(x, delta) = x + delta`, with `delta` zero but for a frame of `width` pixels, and zero there at the start."""

    def forward(self, z: Tensor) -> Tensor:
        """The images, changed at their borders."""
        self.check(z)
        channels, height, width = self.place_shape
        inner = z.new_zeros(channels, height - 2 * self.width, width - 2 * self.width)
        return z + self.around(inner)


class ResizeConcat(Frame):
    """`g(x, delta) = [delta, M(x)]`: `M` shrinks the image (bilinearly), and the trained frame stands around it.

    The frame is zero at the start: the mean colour, where the processor normalises.
    """

    def forward(self, z: Tensor) -> Tensor:
        """Shrunk images in the frame; of the frame's outer size, whatever size they came in."""
        _, height, width = self.place_shape
        inner = (height - 2 * self.width, width - 2 * self.width)
        return self.around(functional.interpolate(z, size=inner, mode="bilinear", align_corners=False))


class VisualPromptLayer(FeaturePromptLayer):
    """`x <- g(x, delta)` at the stem's input."""

    adapter_layer_names = ("inlay_visual_delta",)
    templates: ClassVar = {"add": Add, "pad": Pad, "resize-concat": ResizeConcat}
