"""The templates `g(z, delta)` by which a prompt acts on a feature map (activation prompts, section 3 and table A3).

Each is a module that holds one adapter's `delta` at one place as its `weight`, and gives the prompted `g(z, delta)`. At
layer 0, where `z` is the image `x`, these are the templates of visual prompting. All but the concatenations start as
the identity.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from inlay.errors import InlayError


@dataclass(frozen=True)
class Place:
    """A prompt at one place: its template, the shape of what is trained or of the image that it frames.

    `exact` says that `z` must have this very shape, and is not a longer one that shares the values across positions.
    `last` is the last block, behind which added tokens are taken out again.
    """

    kind: str
    shape: tuple[int, ...]
    exact: bool = True
    width: int = 0
    last: nn.Module | None = None


class Template(nn.Module):
    """One adapter's `delta` at one place. `tokens` is how many it adds to the sequence."""

    tokens: int = 0

    def __init__(self, place: Place, **where: Any) -> None:
        super().__init__()
        self.place_shape, self.exact = place.shape, place.exact
        self.weight = nn.Parameter(torch.zeros(self.trained_shape(place), **where))

    def trained_shape(self, place: Place) -> Sequence[int]:
        """The shape of `delta` as it is stored."""
        return place.shape

    def check(self, z: Tensor) -> None:
        """An error where `z` is of another size than the prompt: broadcasting would otherwise do something else."""
        found = tuple(z.shape[1:])
        if self.exact and found != self.place_shape:
            raise InlayError(
                f"The prompt was made for features of {_by(self.place_shape)}, and these are {_by(found)}. Images must "
                "have the size that it was made for: give image_size= when the adapter is made, or resize the images. "
                "Where another adapter adds tokens, take that one off."
            )


class Add(Template):
    """`g(z, delta) = z + delta`, `delta = 0` at the start."""

    def forward(self, z: Tensor) -> Tensor:
        """The prompted features."""
        self.check(z)
        return z + self.weight.to(z.dtype)


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

    def __init__(self, place: Place, **where: Any) -> None:
        super().__init__(place, **where)
        self.tokens, width = place.shape
        nn.init.uniform_(self.weight, -math.sqrt(3 / width), math.sqrt(3 / width))

    def forward(self, z: Tensor) -> Tensor:
        """The features and the prompt's tokens."""
        return torch.cat([z, self.weight.to(z.dtype).expand(len(z), -1, -1)], dim=1)


class Frame(Template):
    """A frame of `width` pixels around an image: nothing but the frame is stored and trained."""

    def __init__(self, place: Place, **where: Any) -> None:
        self.width = place.width
        super().__init__(place, **where)

    def trained_shape(self, place: Place) -> Sequence[int]:
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


TEMPLATES: dict[str, type[Template]] = {
    "add": Add,
    "product": Product,
    "concat": Concat,
    "pad": Pad,
    "resize-concat": ResizeConcat,
}


def _by(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape))
