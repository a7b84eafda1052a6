"""`Phi(X)` of InfoPrompt (Wu et al. 2023, section 4.2), computed once a text for as long as it cannot change.

`Phi(X)` needs no gradient and comes from the frozen encoder alone. It is kept by the text's unpadded tokens, and only
while the encoder is in eval mode, has nothing of its own to train and no other adapter in it. What is kept is thrown
away as soon as a weight, its device, its precision or autocast changes.

On a CPU texts are encoded one by one: in a batch a row's last bits depend on its company, and with the cache the result
is to be the same to the bit as without.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn

MOST_BYTES = 512 * 2**20

Batch = dict[str, Tensor]


class PhiCache:
    """Vectors by text. A copy of a model begins with an empty one."""

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self.most_bytes = most_bytes
        self.computed = 0
        self._kept: dict[bytes, Tensor] = {}
        self._circumstances: Hashable = None

    def __deepcopy__(self, memo: dict[int, Any]) -> PhiCache:
        return PhiCache(self.most_bytes)

    def __reduce__(self) -> tuple[type[PhiCache], tuple[int]]:
        return PhiCache, (self.most_bytes,)

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, batch: Batch, real: Tensor, compute: Callable[[Batch], Tensor], circumstances: Hashable) -> Tensor:
        """A vector or several a row, those that are known from memory, the others by `compute`."""
        if circumstances != self._circumstances:
            self._kept.clear()
            self._circumstances = circumstances
        names = keys(batch, real)
        missing = list(dict.fromkeys(i for i, name in enumerate(names) if name not in self._kept))
        found = dict(zip((names[i] for i in missing), one_by_one(batch, real, missing, compute), strict=True))
        self.computed += len(missing)
        rows = [found[name] if name in found else self._kept[name] for name in names]
        for name, row in found.items():
            if (len(self._kept) + 1) * row.numel() * row.element_size() <= self.most_bytes:
                self._kept[name] = row
        return torch.stack(rows)


def keys(batch: Batch, real: Tensor) -> list[bytes]:
    """A hash of each row's real tokens, and of what else is given about them."""
    given = torch.stack([batch[name] for name in sorted(batch) if name != "attention_mask"], dim=-1).cpu()
    kept = real.cpu()
    return [
        hashlib.blake2b(row[mask].numpy().tobytes(), digest_size=16).digest()
        for row, mask in zip(given, kept, strict=True)
    ]


def one_by_one(batch: Batch, real: Tensor, rows: list[int], compute: Callable[[Batch], Tensor]) -> list[Tensor]:
    """What `compute` gives for these rows: of each alone and without padding on a CPU, of all together elsewhere."""
    if not rows:
        return []
    if real.device.type != "cpu":
        return list(compute({name: value[rows] for name, value in batch.items()}).unbind())
    return [compute({name: value[i : i + 1, real[i]] for name, value in batch.items()})[0] for i in rows]


def circumstances(encoder: nn.Module, own: nn.Module) -> Hashable:
    """What the encoder's outputs depend on besides the text; None where they are not the same every time.

    `own` hangs on the encoder and takes no part.
    """
    versions, pointers, weight = 0, 0, None
    left: list[nn.Module] = [encoder]
    while left:  # this is done in every step, and `modules()` takes three times as long
        module = left.pop()
        left += [child for child in module._modules.values() if child is not None and child is not own]
        if module.training or isinstance(module, BaseTunerLayer):
            return None
        for parameter in module._parameters.values():
            if parameter is None:
                continue
            if parameter.requires_grad:
                return None
            versions += 0 if parameter.is_inference() else parameter._version
            pointers += parameter.data_ptr()
            weight = parameter if weight is None else weight
    assert weight is not None
    kind = weight.device.type
    autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    return versions, pointers, weight.dtype, weight.device, autocast
