"""The shared factor `A` of Multi-LoRA: drawn from a seed, frozen, never saved.

Algorithm 1 of the paper draws every entry from N(0, 1); its experiments use the default LoRA initialisation. Both are
here. Each matrix has an `A` of its own, which follows from the seed and the module's name alone: neither the order in
which modules are adapted nor the device, precision or processor they are in changes it. A saved task keeps the seed
and a checksum.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from inlay.methods.mixture.heads import seed_of

LN_2 = 0.6931471805599453
INITS = ("lora", "gaussian")


def draw(shape: Sequence[int], seed: int, name: str, init: str, *, lookup: bool = False) -> Tensor:
    """`A` for the module of this name, in float32 on the CPU.

    `shape` is (r, d), for convolutions (r, channels, height, width). `lora`: uniform within 1 / sqrt(d), where d is
    all that enters one output; `gaussian`: N(0, 1). An embedding's `A` is a table (entries, r) in which one row is
    looked up and nothing is summed: it is drawn from N(0, 1), as LoRA draws the random one of its two there.
    """
    if init == "gaussian" or lookup:
        return torch.from_numpy(normals(math.prod(shape), seed_of(seed, name))).view(tuple(shape))
    generator = torch.Generator().manual_seed(seed_of(seed, name))
    bound = 1 / math.sqrt(math.prod(shape[1:]))
    return (2 * torch.rand(tuple(shape), generator=generator) - 1) * bound


def normals(count: int, seed: int) -> NDArray[np.float32]:
    """Numbers of N(0, 1), the same to the bit on every processor, by Marsaglia's polar method:

        (u, v) uniform within the unit disc, s = u^2 + v^2,      z = u sqrt(-2 ln(s) / s), and the same with v.

    Libraries draw normals, and take logarithms, by instructions that differ from processor to processor. Here numbers
    are only added, multiplied, divided and rooted, in float64, which IEEE 754 rounds in one way.
    """
    source = np.random.PCG64(seed)
    found: list[NDArray[np.float32]] = []
    left = count
    while left > 0:
        # pi / 4 of a square is its disc: nearly always enough at once.
        raw = source.random_raw(2 * (left // 2 + left // 6 + 16)) >> np.uint64(11)
        u, v = (raw.astype(np.float64) * 2.0**-52 - 1.0).reshape(-1, 2).T
        s = u * u + v * v
        inside = (s > 0.0) & (s < 1.0)
        u, v, s = u[inside], v[inside], s[inside]
        wide = np.sqrt(-2.0 * logarithm(s) / s)
        found.append(np.stack([u * wide, v * wide], axis=1).reshape(-1).astype(np.float32)[:left])
        left -= len(found[-1])
    return np.concatenate(found) if found else np.zeros(0, np.float32)


def logarithm(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """`ln x` by x = m 2^e and ln m = 2 (t + t^3 / 3 + t^5 / 5 + ...), t = (m - 1) / (m + 1)."""
    m, e = np.frexp(x)
    low = m < 0.7071067811865476
    m, e = np.where(low, 2.0 * m, m), np.where(low, e - 1, e)
    t = (m - 1.0) / (m + 1.0)
    square, total = t * t, np.zeros_like(t)
    for power in range(21, 0, -2):  # |t| < 0.18: the next term is below the last bit
        total = total * square + 1.0 / power
    return e * LN_2 + 2.0 * t * total


def digest_of(tensor: Tensor) -> str:
    """What the values of a float32 tensor on the CPU hash to."""
    return hashlib.sha256(tensor.contiguous().numpy().tobytes()).hexdigest()


def checksum_of(digests: Iterable[tuple[str, str]]) -> str:
    """What the `A`s of several modules hash to, given each one's name and digest."""
    return hashlib.sha256("\n".join(f"{name} {digest}" for name, digest in sorted(digests)).encode()).hexdigest()
