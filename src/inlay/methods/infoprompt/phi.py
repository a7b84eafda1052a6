"""`Phi(X)` of InfoPrompt (Wu et al. 2023, section 4.2), computed once a text for as long as it cannot change.

`Phi(X)` needs no gradient and comes from the frozen encoder alone. It is kept by the text's unpadded tokens, and only
while the encoder is in eval mode, has nothing of its own to train and no other adapter in it: a pass where it has not
throws everything away. So does a change of a weight, of its device or precision, or of autocast. Nothing is kept of an
encoder that lies in parts on several processes (FSDP): each must run it as often as the others.

A weight's change is known by its version and its place in memory. To look at all of them in every step takes time, and
is done once where it is promised that nothing changes, as under `inlay tune`.
Not seen are writes through `.data`, which move neither (an adapter that is put in, merged and taken out again between
two passes writes so), changed buffers and hooks of others: after these call `clear_cache()` of the layer.

It lies in one table where the model is. A GPU is waited for once a batch, for the tokens by which rows are found.

On a CPU texts are encoded one by one: in a batch a row's last bits depend on its company, and with the cache the result
is to be the same to the bit as without. Elsewhere they are encoded together, padded on the right whatever side the
batch is padded on (`moved_left`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn

from inlay.frozen import promise_of, stands_still

MOST_BYTES = 512 * 2**20
FEWEST_ROWS = 256  # of a table

Batch = dict[str, Tensor]
Look = tuple[int, int, torch.dtype, torch.device]  # the weights' versions and places, precision and device


class PhiCache:
    """Vectors by text. A copy of a model begins with an empty one."""

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self.most_bytes = most_bytes
        self.computed = self.recalled = 0  # rows, since it was made
        self._row_of: dict[bytes, int] = {}
        self._table: Tensor | None = None
        self._circumstances: Hashable = None
        self._look: Look | None = None
        self._promise: object | None = None  # under which it was taken

    def __deepcopy__(self, memo: dict[int, Any]) -> PhiCache:
        return PhiCache(self.most_bytes)

    def __reduce__(self) -> tuple[type[PhiCache], tuple[int]]:
        return PhiCache, (self.most_bytes,)

    def __len__(self) -> int:
        return len(self._row_of)

    def clear(self) -> None:
        """Forget everything."""
        self._row_of, self._table, self._circumstances = {}, None, None

    def circumstances(self, encoder: nn.Module, own: nn.Module) -> Hashable:
        """What the encoder's outputs depend on besides the text; None where they are not the same every time.

        `own` hangs on the encoder and takes no part.
        """
        promise = promise_of(encoder)
        if self._look is None or promise is None or promise is not self._promise:
            self._look, self._promise = _look_at(encoder, own), promise
        if self._look is None:
            return None
        kind = self._look[-1].type
        return self._look, torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None

    def get(self, batch: Batch, real: Tensor, compute: Callable[[Batch], Tensor], circumstances: Hashable) -> Tensor:
        """A vector or several a row, those that are known from memory, the others by `compute`."""
        if circumstances != self._circumstances:
            self.clear()
            self._circumstances = circumstances
        names = keys(batch, real)
        missing: dict[bytes, int] = {}
        for row, name in enumerate(names):
            if name not in self._row_of:
                missing.setdefault(name, row)
        self.recalled += len(names) - len(missing)
        if not missing:
            return self._known(names, real.device)
        made = encoded(batch, real, list(missing.values()), compute)
        self.computed += len(missing)
        self._keep(list(missing), made)
        if len(missing) == len(names):
            return made
        if all(name in self._row_of for name in names):
            return self._known(names, real.device)
        new = dict(zip(missing, made, strict=True))  # there was no room for all of them
        return torch.stack([new[name] if name in new else self._row(name) for name in names])

    def _known(self, names: list[bytes], device: torch.device) -> Tensor:
        assert self._table is not None
        return self._table.index_select(0, index([self._row_of[name] for name in names], device))

    def _row(self, name: bytes) -> Tensor:
        assert self._table is not None
        return self._table[self._row_of[name]]

    def _keep(self, names: list[bytes], made: Tensor) -> None:
        """Put rows at the end of the table, as many as there is room for."""
        begin, most = len(self), self.most_bytes // (made[0].numel() * made.element_size())
        names = names[: max(0, most - begin)]
        end = begin + len(names)
        if self._table is None or end > len(self._table):
            old = self._table
            size = min(most, max(end, FEWEST_ROWS, 0 if old is None else 2 * len(old)))
            with torch.inference_mode(False):  # a table of that mode could not be written to outside of it
                self._table = torch.empty((size, *made.shape[1:]), dtype=made.dtype, device=made.device)
            if old is not None:
                self._table[:begin] = old[:begin]
        self._table[begin:end] = made[: len(names)]
        self._row_of.update(zip(names, range(begin, end), strict=True))


def keys(batch: Batch, real: Tensor) -> list[bytes]:
    """A hash of each row's real tokens, and of what else is given about them.

    All of it comes from the device at once.
    """
    names = sorted(name for name in batch if name != "attention_mask")
    *given, kept = torch.stack([*(batch[name].long() for name in names), real.long()]).cpu().numpy()
    begin = hashlib.blake2b(" ".join(names).encode(), digest_size=16)
    found = []
    for row, mask in enumerate(kept.astype(bool)):
        made = begin.copy()
        for values in given:
            made.update(values[row][mask].tobytes())
        found.append(made.digest())
    return found


def index(rows: Sequence[int], device: torch.device) -> Tensor:
    """Numbers of rows on a device, which is not waited for."""
    return torch.tensor(rows, pin_memory=device.type == "cuda").to(device, non_blocking=True)


def encoded(batch: Batch, real: Tensor, rows: Sequence[int], compute: Callable[[Batch], Tensor]) -> Tensor:
    """What `compute` gives for these rows: of each alone and without padding on a CPU, of all together elsewhere."""
    if real.device.type == "cpu":
        return torch.cat([compute({name: value[i : i + 1, real[i]] for name, value in batch.items()}) for i in rows])
    if len(rows) < len(real):
        chosen = index(rows, real.device)
        batch = {name: value.index_select(0, chosen) for name, value in batch.items()}
        real = real.index_select(0, chosen)
    return compute(moved_left(batch, real))


def moved_left(batch: Batch, real: Tensor) -> Batch:
    """The same rows with all padding on the right, and a mask that says so.

    A model with absolute positions counts padding on the left as text. Here a text then stands where it stands without
    padding, as on a CPU: what is computed of it does not depend on the device or the batch.
    """
    kept, order = real.byte().sort(dim=1, descending=True, stable=True)
    moved = {name: value.gather(1, order) for name, value in batch.items()}
    return moved | {
        "attention_mask": kept.to(batch["attention_mask"].dtype if "attention_mask" in batch else torch.long)
    }


def _look_at(encoder: nn.Module, own: nn.Module) -> Look | None:
    """The encoder as it is now; None where it does not stand still."""
    versions, pointers, weight = 0, 0, None
    kinds: set[type] = set()
    left: list[nn.Module] = [encoder]
    while left:  # `modules()` takes three times as long
        module = left.pop()
        if not stands_still(module):
            return None
        kinds.add(type(module))
        if module._modules:
            left += [child for child in module._modules.values() if child is not None and child is not own]
        for parameter in module._parameters.values():
            if parameter is None:
                continue
            if parameter.requires_grad or hasattr(parameter, "full_tensor"):
                return None
            versions += 0 if parameter.is_inference() else parameter._version
            pointers += parameter.data_ptr()
            weight = parameter if weight is None else weight
    if any(issubclass(kind, BaseTunerLayer) for kind in kinds):
        return None
    assert weight is not None
    return versions, pointers, weight.dtype, weight.device
