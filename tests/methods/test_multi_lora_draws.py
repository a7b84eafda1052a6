"""The shared factor of Multi-LoRA: what is drawn from a seed, the same wherever it is drawn."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from inlay.methods.multi_lora.shared import digest_of, draw, logarithm, normals


@pytest.mark.parametrize(
    ("shape", "init", "lookup", "digest"),
    [
        ((8, 384), "lora", False, "bd920fa8aedae8f1"),
        ((8, 384), "gaussian", False, "d810d0e71d56c8cd"),
        ((500, 8), "lora", True, "0353cc5773c1d9bc"),
    ],
)
def test_what_a_seed_gives_is_the_same_on_every_machine(
    shape: tuple[int, int], init: str, lookup: bool, digest: str
) -> None:
    """As it was found on another one: a saved task must find its `A`s again."""
    found = draw(shape, 0, "a.module", init, lookup=lookup)
    assert found.dtype == torch.float32
    assert tuple(found.shape) == shape
    assert digest_of(found)[:16] == digest


def test_normals_are_normal() -> None:
    """Against the distribution function of N(0, 1): the largest distance of 200,000 is beyond this once in 10^7."""
    found = np.sort(normals(200_000, 3).astype(np.float64))
    wanted = torch.special.ndtr(torch.from_numpy(found)).numpy()
    steps = np.arange(1, len(found) + 1) / len(found)
    assert np.abs(wanted - steps).max() * math.sqrt(len(found)) < 2.9
    assert found.max() > 4
    pairs = normals(200_000, 3).reshape(-1, 2).astype(np.float64)  # that were drawn together
    assert abs((pairs[:, 0] * pairs[:, 1]).mean()) < 5 / math.sqrt(len(pairs))
    assert abs((pairs[:, 0] ** 2 * pairs[:, 1] ** 2).mean() - 1) < 15 / math.sqrt(len(pairs))


@settings(max_examples=30, deadline=None)
@given(count=st.integers(0, 300), seed=st.integers(0, 2**63 - 1))
def test_as_many_normals_as_asked_for(count: int, seed: int) -> None:
    found = normals(count, seed)
    assert found.shape == (count,)
    assert np.isfinite(found).all()
    assert np.array_equal(found, normals(count, seed))
    assert count < 4 or not np.array_equal(found, normals(count, seed ^ 1))


@given(st.floats(2**-104, 1.0, exclude_max=True))
def test_the_logarithm(x: float) -> None:
    assert logarithm(np.array([x]))[0] == pytest.approx(math.log(x), rel=1e-15, abs=1e-17)
