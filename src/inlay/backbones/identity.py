"""A fingerprint of the frozen weights, so that an adapter is never set into a base it was not made for."""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor, nn


def fingerprint(model: nn.Module, new: Collection[str] = ()) -> str:
    """SHA-256 over name, shape, dtype and bytes of every weight and saved buffer outside the modules called `new`.

    The same on every device and however the checkpoint was cut into files; a weight that is tied to another counts
    once. It is a property of the weights in memory: the same checkpoint in another dtype has another fingerprint.
    """
    outside = tuple(f"{name}." for name in new)
    weights: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, weight in sorted(model.state_dict(keep_vars=True).items()):
        if isinstance(weight, Tensor) and not name.startswith(outside) and id(weight) not in seen:
            seen.add(id(weight))
            weights[name] = weight
    total = hashlib.sha256()
    # hashlib lets go of the interpreter lock, so the tensors are hashed side by side.
    with ThreadPoolExecutor() as pool:
        for (name, weight), digest in zip(weights.items(), pool.map(_digest, weights.values()), strict=True):
            total.update(f"{name} {tuple(weight.shape)} {weight.dtype} ".encode() + digest)
    return total.hexdigest()


def _digest(weight: Tensor) -> bytes:
    """SHA-256 of a tensor's bytes, read in place where it lies in memory in order."""
    flat = weight.detach().cpu().contiguous().reshape(-1)
    return hashlib.sha256(flat.view(torch.uint8).numpy().data).digest()
