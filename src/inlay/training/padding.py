"""A batch whose rows differ in length, run in parts: short texts are not filled up to the length of the longest.

Tasks that are trained together bring texts of very different lengths, ten tokens beside hundreds. The loss of an update
is a sum over its rows, so that it may be computed for some of them at a time: the gradient is the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

MASK = "attention_mask"
ALONG = ("input_ids", MASK, "token_type_ids")
# What one more pass costs, in tokens that could be run instead: on an accelerator passes are short of work.
PASS = {"cpu": 128, "cuda": 16384}


def divided(lengths: Sequence[int], cost: int) -> list[list[int]]:
    """The rows in groups of about the same length: no group would save more than `cost` tokens by being cut in two."""
    order = sorted(range(len(lengths)), key=lambda row: (-lengths[row], row))
    sizes = torch.tensor([lengths[row] for row in order])

    def cut(begin: int, end: int) -> Iterator[list[int]]:
        # Cut before i, the rows from i on lose what lies between the longest of all and the longest of themselves.
        saved = (sizes[begin] - sizes[begin:end]) * torch.arange(end - begin, 0, -1)
        at = int(saved.argmax())
        if saved[at] > cost:
            yield from cut(begin, begin + at)
            yield from cut(begin + at, end)
        else:
            yield sorted(order[begin:end])

    return list(cut(0, len(order)))


def parts(
    batch: Mapping[str, Tensor], device: torch.device, along: Sequence[str] = ALONG
) -> Iterator[tuple[list[int], dict[str, Tensor]]]:
    """A padded batch in parts, each as it would have been padded by itself: the rows' numbers, and their tensors.

    `along` are the tensors that have an entry for each token.
    """
    mask = batch.get(MASK)
    count = len(next(iter(batch.values())))
    if mask is None:
        yield list(range(count)), dict(batch)
        return
    mask = mask.cpu()
    for rows in divided(mask.sum(dim=1).tolist(), PASS.get(device.type, PASS["cuda"])):
        own = {name: tensor[rows] if len(rows) < count else tensor for name, tensor in batch.items()}
        used = mask[rows].any(dim=0).nonzero()
        begin, end = (int(used[0]), int(used[-1]) + 1) if len(used) else (0, mask.shape[1])
        yield rows, {name: tensor[:, begin:end] if name in along else tensor for name, tensor in own.items()}
