"""Theorem 3.1: NTK-Attention against exact prefix attention, and the Taylor order that an error needs."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from inlay.attention import Elu, Favor, Paper, Taylor
from inlay.errors import InlayError
from inlay.papers.ntk_attention.theory import Instance, instance, taylor_features


def by_loops(found: Instance, order: int | None) -> list[list[float]]:
    """Attention over text and prefix; the prefix's weights by exp, or by its Taylor polynomial."""
    rows = []
    for q in found.query.tolist():

        def score(k: list[float], q: list[float] = q) -> float:
            return found.scale * sum(a * b for a, b in zip(q, k, strict=True))

        weights = [math.exp(score(k)) for k in found.key.tolist()]
        for k in found.prefix_key.tolist():
            x = score(k)
            series = [x**n / math.factorial(n) for n in range((order or 0) + 1)]
            weights.append(math.exp(x) if order is None else sum(series))
        values = found.value.tolist() + found.prefix_value.tolist()
        rows.append(
            [
                sum(w * v[c] for w, v in zip(weights, values, strict=True)) / sum(weights)
                for c in range(found.value.shape[1])
            ]
        )
    return rows


@settings(max_examples=12, deadline=None)
@given(
    st.integers(1, 4), st.integers(1, 6), st.integers(1, 4), st.floats(0.1, 1.5), st.integers(0, 4), st.integers(0, 99)
)
def test_both_algorithms_against_loops(length: int, m: int, d: int, bound: float, order: int, seed: int) -> None:
    found = instance(length, m, d, bound, seed)
    exact = torch.tensor(by_loops(found, None), dtype=torch.float64)
    torch.testing.assert_close(found.exact(), exact, rtol=1e-9, atol=1e-11)
    if order % 2 == 0:
        near = torch.tensor(by_loops(found, order), dtype=torch.float64)
        torch.testing.assert_close(found.approximate(Taylor(order=order)), near, rtol=1e-9, atol=1e-11)
        assert found.error(Taylor(order=order)) == pytest.approx(float((near - exact).abs().max()), abs=1e-10)


@pytest.mark.parametrize("accuracy", [1e-1, 1e-3, 1e-7])
def test_the_order_found_is_the_least_that_will_do(accuracy: float) -> None:
    found = instance(5, 40, 3, 1.5, seed=3)
    order = found.order_for(accuracy)
    assert found.error(Taylor(order=order)) <= accuracy
    assert all(found.error(Taylor(order=less)) > accuracy for less in range(order))


def test_features_are_counted() -> None:
    assert taylor_features(4, 8) == Taylor(order=8).dimension(4) == 495


def test_no_map_of_fixed_size_improves_with_a_longer_prefix() -> None:
    """Eq. (5) with the phi of section 3.2, with random features and at a fixed order: the errors level off."""
    for phi, features in ((Paper(), 4), (Elu(), 4), (Elu(), 8), (Favor(), 32), (Taylor(order=2), None)):
        short, long = (instance(8, m, 4, 1.0).error(phi, features) for m in (1024, 16384))
        assert 0.6 < long / short < 1.6, phi.name


def test_every_further_order_helps() -> None:
    found = instance(8, 2048, 4, 1.0)
    errors = [found.error(Taylor(order=order)) for order in (0, 2, 4, 6)]
    assert all(after < before / 5 for before, after in pairwise(errors))
    assert all(found.error(phi, 4) > 0.5 * errors[0] for phi in (Elu(), Paper()))


def test_what_cannot_be_asked_is_told() -> None:
    with pytest.raises(InlayError, match="above 0"):
        instance(4, 0, 4, 1.0)
    found = instance(4, 4, 4, 1.0)
    with pytest.raises(InlayError, match="above 0"):
        found.order_for(0.0)
    with pytest.raises(InlayError, match="rounding"):
        instance(4, 50, 4, 8.0).order_for(1e-30)
