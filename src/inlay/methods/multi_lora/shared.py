"""The shared factor `A` of Multi-LoRA: drawn from a seed, frozen, never saved.

Algorithm 1 of the paper draws every entry from N(0, 1); its experiments use the default LoRA initialisation. Both are
here. Each matrix has an `A` of its own, which follows from the seed and the module's name alone: neither the order in
which modules are adapted nor the device or precision they are in changes it. A saved task keeps the seed and a
checksum.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

INITS = ("lora", "gaussian")


def seed_of(*parts: object) -> int:
    """A seed that follows from these parts alone."""
    text = "\n".join(map(str, parts))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def draw(shape: Sequence[int], seed: int, name: str, init: str, *, lookup: bool = False) -> Tensor:
    """`A` for the module of this name, in float32 on the CPU.

    `shape` is (r, d), for convolutions (r, channels, height, width). `lora`: uniform within 1 / sqrt(d), where d is
    all that enters one output; `gaussian`: N(0, 1). An embedding's `A` is a table (entries, r) in which one row is
    looked up and nothing is summed: it is drawn from N(0, 1), as LoRA draws the random one of its two there.
    """
    generator = torch.Generator().manual_seed(seed_of(seed, name))
    if init == "gaussian" or lookup:
        return torch.randn(tuple(shape), generator=generator)
    bound = 1 / math.sqrt(math.prod(shape[1:]))
    return (2 * torch.rand(tuple(shape), generator=generator) - 1) * bound


def digest_of(tensor: Tensor) -> str:
    """What the values of a float32 tensor on the CPU hash to."""
    return hashlib.sha256(tensor.contiguous().numpy().tobytes()).hexdigest()


def checksum_of(digests: Iterable[tuple[str, str]]) -> str:
    """What the `A`s of several modules hash to, given each one's name and digest."""
    return hashlib.sha256("\n".join(f"{name} {digest}" for name, digest in sorted(digests)).encode()).hexdigest()
