"""Images changed a little in every epoch: a mirrored or a cropped one is a new example of the same class.

The crop is the random resized crop of Szegedy et al., "Going deeper with convolutions" (2015), section 6: a part of
random area and shape, enlarged to the size that the model reads. What happens to an image follows from the run's seed,
the epoch and the image's place in the split, and from nothing else: it is the same for any number of processes that
read ahead, and after a run was cut short and resumed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from PIL import Image

from inlay.errors import unknown
from inlay.records.spec import AUGMENTS

AREAS = (0.08, 1.0)  # of the image
SHAPES = (3 / 4, 4 / 3)  # width / height
TRIES = 10
BICUBIC = Image.Resampling.BICUBIC


@dataclass(frozen=True)
class Augmentation:
    """What is done to the images of a training split: half of them mirrored, all of them cropped, or both."""

    kind: str
    seed: int

    def __post_init__(self) -> None:
        if self.kind not in AUGMENTS:
            raise unknown("augment", self.kind, AUGMENTS)

    @property
    def crops(self) -> bool:
        return "crop" in self.kind

    def __call__(
        self,
        image: Image.Image,
        size: tuple[int, int],
        epoch: int,
        index: int,
        resample: int = Image.Resampling.BICUBIC,
    ) -> Image.Image:
        """The image as epoch `epoch` sees it; a cropped one has `size`, width and height."""
        draws = np.random.default_rng([self.seed, epoch, index])
        if self.crops:
            image = image.resize(size, resample, box=crop_box(image.size, draws))
        if "flip" in self.kind and draws.random() < 0.5:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        return image


def crop_box(size: tuple[int, int], draws: np.random.Generator) -> tuple[int, int, int, int]:
    """A part of an image: left, top, right and bottom.

    Its share of the area is drawn evenly from `AREAS`, the logarithm of its width over its height evenly from that of
    `SHAPES`. Where none of ten draws fits into the image, which is then very long or very small, it is the largest
    part in the middle whose shape is allowed.
    """
    width, height = size
    for _ in range(TRIES):
        area = width * height * draws.uniform(*AREAS)
        shape = math.exp(draws.uniform(math.log(SHAPES[0]), math.log(SHAPES[1])))
        wide, high = round(math.sqrt(area * shape)), round(math.sqrt(area / shape))
        if 0 < wide <= width and 0 < high <= height:
            left, top = int(draws.integers(width - wide + 1)), int(draws.integers(height - high + 1))
            return left, top, left + wide, top + high
    wide = max(1, min(width, round(height * SHAPES[1])))
    high = max(1, min(height, round(width / SHAPES[0])))
    left, top = (width - wide) // 2, (height - high) // 2
    return left, top, left + wide, top + high
