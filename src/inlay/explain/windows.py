"""The windows of a Swin transformer: which of their tokens are patches of the image, and which see one another.

Liu et al., ICCV 2021 (https://arxiv.org/abs/2103.14030), section 3.2. A stage's map of patches is padded at its right
and lower edge to whole windows. Every other block then rolls it up and to the left by `shift`, so that its last windows
hold patches from opposite edges of the image; those do not see one another. Each stage has patches twice as wide as the
one before.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from inlay.anatomy import Anatomy
from inlay.errors import InlayError


@dataclass(frozen=True)
class Windows:
    """One block's windows of `side` x `side` tokens, the neighbours among them `stride` pixels apart.

    `real` (windows, side^2): no padding. `together` (windows, side^2, side^2): what sees one another.
    """

    side: int
    stride: int
    real: Tensor
    together: Tensor


def windows(parts: Anatomy, index: int, patch: int, height: int, width: int) -> Windows:
    """The positions of the tokens of block `index`, for images of this height and width, in pixels.

    To be asked during a forward pass: a block whose map is no larger than its window takes a smaller one, then.
    """
    config: Any = parts.backbone.module.config
    block: Any = parts.blocks[index - 1].module
    if not (hasattr(config, "depths") and hasattr(block, "window_size") and hasattr(block, "shift_size")):
        raise InlayError(
            f"{type(parts.backbone.module).__name__} does not describe its windows as Swin does (config.depths, "
            "window_size and shift_size of a block): attention distance cannot be measured in pixels here. "
            "`inlay explain cka` can compare its layers."
        )
    stage = sum(index > last for last in accumulate(config.depths))
    side, shift = int(block.window_size), int(block.shift_size)
    stride = patch * 2**stage
    down, across = (_line(-(-size // stride), side, shift) for size in (height, width))
    real = _cut(down[0], across[0], side).all(-1)
    wrapped = _cut(down[1], across[1], side)
    return Windows(side, stride, real, (wrapped[:, :, None] == wrapped[:, None]).all(-1))


def _line(count: int, side: int, shift: int) -> tuple[Tensor, Tensor]:
    """The rows (or columns) of a map of `count` patches, padded and rolled: which are real, which went round."""
    padded = -(-count // side) * side
    return (torch.arange(padded) < count).roll(-shift), torch.arange(padded) >= padded - shift


def _cut(down: Tensor, across: Tensor, side: int) -> Tensor:
    """What is said of rows and of columns, for every token of every window: (windows, side^2, 2)."""
    whole = torch.stack(torch.meshgrid(down, across, indexing="ij"), -1)
    return whole.unflatten(1, (-1, side)).unflatten(0, (-1, side)).transpose(1, 2).flatten(2, 3).flatten(0, 1)
