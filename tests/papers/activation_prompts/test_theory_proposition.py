"""Proposition 1 of the activation-prompt paper, against loops over the printed equations."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from inlay.errors import InlayError
from inlay.papers.activation_prompts.theory import proposition as p1

few = settings(max_examples=15, deadline=None)
SAME = {"rtol": 1e-9, "atol": 1e-9}


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def level(z: Tensor, sigma: float, mu: Tensor) -> Tensor:
    """Features whose mean over channels is mu_p and whose deviation is sigma, in every image."""
    z = z - z.mean(2, keepdim=True)
    return sigma * z / z.square().mean(2, keepdim=True).sqrt() + mu


def looped_batch_norm(z: Tensor, gamma: Tensor, beta: Tensor) -> Tensor:
    images, places, channels = z.shape
    out = torch.empty_like(z)
    for d in range(channels):
        values = [float(z[b, p, d]) for b in range(images) for p in range(places)]
        mu = math.fsum(values) / len(values)
        sigma = math.sqrt(math.fsum((value - mu) ** 2 for value in values) / len(values))
        for b in range(images):
            for p in range(places):
                out[b, p, d] = gamma[d] * (z[b, p, d] - mu) / sigma + beta[d]
    return out


def looped_layer_norm(z: Tensor, gamma: Tensor, beta: Tensor) -> Tensor:
    images, places, channels = z.shape
    out = torch.empty_like(z)
    for b in range(images):
        for p in range(places):
            values = z[b, p].tolist()
            mu = math.fsum(values) / channels
            sigma = math.sqrt(math.fsum((value - mu) ** 2 for value in values) / channels)
            for d in range(channels):
                out[b, p, d] = gamma[d] * (z[b, p, d] - mu) / sigma + beta[d]
    return out


def looped_prompt(x: Tensor, weight: Tensor, delta: Tensor) -> Tensor:
    """Equation (A6)."""
    images, places, _ = x.shape
    out = torch.empty(images, places, len(weight), dtype=x.dtype)
    for b in range(images):
        for p in range(places):
            for d, row in enumerate(weight):
                out[b, p, d] = sum(float(w) * float(v + e) for w, v, e in zip(row, x[b, p], delta, strict=True))
    return out


shapes = {"images": st.integers(2, 4), "places": st.integers(2, 5), "seed": st.integers(0, 10**6)}


@few
@given(inputs=st.integers(1, 4), outputs=st.integers(1, 5), **shapes)
def test_batch_norm_does_what_a_shared_prompt_does(
    images: int, places: int, inputs: int, outputs: int, seed: int
) -> None:
    x, weight, delta = normal(seed, images, places, inputs), normal(seed + 1, outputs, inputs), normal(seed + 2, inputs)
    pair = p1.batch_norm_from_prompt(x, weight, delta)
    torch.testing.assert_close(pair.normed, looped_batch_norm(x @ weight.T, pair.gamma, pair.beta), **SAME)
    torch.testing.assert_close(pair.prompted, looped_prompt(x, weight, delta), **SAME)
    torch.testing.assert_close(pair.normed, pair.prompted, **SAME)
    assert pair.gap < 1e-9
    assert max(pair.departures.values()) < 1e-12


@few
@given(inputs=st.integers(2, 5), **shapes)
def test_a_prompt_does_what_a_batch_norm_does(images: int, places: int, inputs: int, seed: int) -> None:
    """With fewer outputs than inputs W is onto, and every shift can be had."""
    x, weight, beta = (
        normal(seed, images, places, inputs),
        normal(seed + 1, inputs - 1, inputs),
        normal(seed + 2, inputs - 1),
    )
    pair = p1.prompt_from_batch_norm(x, weight, beta)
    torch.testing.assert_close(pair.normed, looped_batch_norm(x @ weight.T, pair.gamma, beta), **SAME)
    torch.testing.assert_close(pair.prompted, looped_prompt(x, weight, pair.delta), **SAME)
    assert pair.gap < 1e-7


@few
@given(channels=st.integers(2, 6), sigma=st.floats(0.1, 4), **shapes)
def test_layer_norm_and_prompt_are_the_same_both_ways(
    images: int, places: int, channels: int, sigma: float, seed: int
) -> None:
    mu, beta = normal(seed + 1, places, 1), normal(seed + 2, channels)
    z = level(normal(seed, images, places, channels), sigma, mu)
    there = p1.prompt_from_layer_norm(z, beta)
    torch.testing.assert_close(there.delta, beta[None, :] - mu, **SAME)
    torch.testing.assert_close(there.normed, looped_layer_norm(z, there.gamma, beta), **SAME)
    torch.testing.assert_close(there.prompted, z + there.delta, rtol=0, atol=0)
    assert there.gap < 1e-9
    back = p1.layer_norm_from_prompt(z, there.delta)
    torch.testing.assert_close(back.beta, beta, **SAME)
    torch.testing.assert_close(back.gamma, torch.full_like(beta, sigma), **SAME)
    assert back.gap < 1e-9
    assert max(back.departures.values()) < 1e-9


def test_without_its_conditions_the_identity_fails() -> None:
    x, weight, delta, beta = normal(0, 4, 5, 3), normal(1, 3, 3), normal(2, 3), normal(3, 3)
    assert p1.batch_norm_from_prompt(x, weight, delta + normal(4, 5, 3)).relative_gap > 0.1, "a prompt a position"
    gamma = 1.5 * p1.prompt_from_batch_norm(x, weight, beta).gamma
    assert p1.prompt_from_batch_norm(x, weight, beta, gamma).relative_gap > 0.1, "gamma is not sigma"
    tall = p1.prompt_from_batch_norm(x[..., :2], weight[:, :2], beta)
    assert tall.gap > 0.01, "three shifts from two channels"
    assert tall.departures["beta - mu in the range of W"] > 0.01

    mu = normal(5, 5, 1)
    z = level(normal(6, 4, 5, 3), 2.0, mu)
    for broken, condition in (
        (z * torch.linspace(0.5, 2, 4, dtype=z.dtype)[:, None, None], "gamma_d / sigma_bp = 1"),
        (z + normal(7, 4, 5, 1), "mu_bp = mu_p"),
    ):
        pair = p1.prompt_from_layer_norm(broken, beta)
        assert pair.relative_gap > 0.1, condition
        assert pair.departures[condition] > 0.1
    pair = p1.layer_norm_from_prompt(z, normal(8, 5, 3))
    assert pair.relative_gap > 0.1
    assert pair.departures["delta_pd + mu_p = beta_d"] > 0.1


def test_agrees_with_the_norms_that_models_use() -> None:
    """Torch's own norms, but for their epsilon."""
    z, gamma, beta = normal(0, 4, 5, 3), normal(1, 3), normal(2, 3)
    ours = p1.layer_norm(z, gamma, beta)
    torch.testing.assert_close(ours, torch.nn.functional.layer_norm(z, (3,), gamma, beta, eps=0.0))
    theirs = torch.nn.functional.batch_norm(z.transpose(1, 2), None, None, gamma, beta, training=True, eps=1e-15)
    torch.testing.assert_close(p1.batch_norm(z, gamma, beta), theirs.transpose(1, 2))


def test_gradients() -> None:
    x, gamma, beta = (normal(seed, *shape).requires_grad_() for seed, shape in ((0, (2, 3, 3)), (1, (3,)), (2, (3,))))
    assert torch.autograd.gradcheck(p1.batch_norm, (x, gamma, beta))
    assert torch.autograd.gradcheck(p1.layer_norm, (x, gamma, beta))


def test_bad_input_is_told() -> None:
    x, weight = normal(0, 4, 5, 3), normal(1, 2, 3)
    with pytest.raises(InlayError, match=r"\(4, 3\).*\(3,\) or \(5, 3\)"):
        p1.batch_norm_from_prompt(x, weight, normal(2, 4, 3))
    with pytest.raises(InlayError, match="images, positions, channels"):
        p1.layer_norm_from_prompt(x[0], normal(2, 3))
    with pytest.raises(InlayError, match="do not vary"):
        p1.prompt_from_layer_norm(torch.ones(2, 2, 3, dtype=torch.float64), torch.ones(3, dtype=torch.float64))
    with pytest.raises(InlayError, match="does not fit"):
        p1.prompt_from_batch_norm(x, weight, normal(2, 3))
