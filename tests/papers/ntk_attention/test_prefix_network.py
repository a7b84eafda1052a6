"""The stylised network and its kernels against loops, autograd and quadrature."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from inlay.errors import InlayError
from inlay.papers.ntk_attention.theory import (
    decomposition,
    draw,
    expected_start,
    gradient,
    predict,
    printed_kernel,
    printed_limit,
    spectrum,
    true_kernel,
    true_limit,
)


def shares(W: Tensor, x: Tensor) -> list[float]:
    """S(W^T x), a number a column."""
    parts = [math.exp(sum(float(W[k, r] * x[k]) for k in range(len(x)))) for r in range(W.shape[1])]
    return [part / sum(parts) for part in parts]


def v_s(W: Tensor, a: Tensor, S: list[float], k: int, r: int) -> float:
    """<v_kr, S>, with `v_kr = W_kr a_r 1 - W_k * a`."""
    own = float(W[k, r] * a[r])
    return sum((own - float(W[k, q] * a[q])) * S[q] for q in range(len(S)))


sizes = st.tuples(st.integers(1, 7), st.integers(1, 3), st.integers(1, 3), st.integers(0, 99))


@settings(max_examples=15, deadline=None)
@given(sizes)
def test_the_network_is_the_printed_one(size: tuple[int, int, int, int]) -> None:
    m, n, d, seed = size
    problem = draw(m, n, d, seed)
    found = predict(problem.W, problem.x, problem.a)
    for i, k in product(range(n), range(d)):
        S = shares(problem.W, problem.x[i])
        assert float(found[i, k]) == pytest.approx(
            m * sum(S[r] * float(problem.W[k, r] * problem.a[r]) for r in range(m)), abs=1e-12 * m
        )
    assert problem.residual.shape == (n * d,)
    assert float(problem.residual[(d - 1) * n]) == float(found[0, d - 1] - problem.y[0, d - 1])


@settings(max_examples=15, deadline=None)
@given(sizes)
def test_both_kernels_are_the_sums_of_their_definitions(size: tuple[int, int, int, int]) -> None:
    m, n, d, seed = size
    problem = draw(m, n, d, seed)
    W, x, a = problem.W, problem.x, problem.a
    printed, true = printed_kernel(W, x, a), true_kernel(W, x, a)
    S = [shares(W, x[i]) for i in range(n)]
    inner = {(k, i, r): v_s(W, a, S[i], k, r) for k, i, r in product(range(d), range(n), range(m))}

    def row(k: int, i: int, r: int) -> list[float]:
        """dF_k / dw_r at x_i: Eq. (9)."""
        return [m * S[i][r] * (inner[k, i, r] * float(x[i, c]) + float(a[r]) * (c == k)) for c in range(d)]

    for (k1, i), (k2, j) in product(product(range(d), range(n)), repeat=2):
        angle = sum(float(x[i, c] * x[j, c]) for c in range(d))
        ours = angle / m * sum(m * S[i][r] * inner[k1, i, r] * m * S[j][r] * inner[k2, j, r] for r in range(m))
        assert float(printed[k1 * n + i, k2 * n + j]) == pytest.approx(ours, rel=1e-10, abs=1e-10)
        rows = sum(p * q for r in range(m) for p, q in zip(row(k1, i, r), row(k2, j, r), strict=True)) / m
        assert float(true[k1 * n + i, k2 * n + j]) == pytest.approx(rows, rel=1e-10, abs=1e-10)
    assert float(spectrum(true)[0]) > -1e-10


def test_gradients() -> None:
    problem = draw(5, 3, 2, seed=1)
    weights = problem.W.clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda W: predict(W, problem.x, problem.a), weights)
    assert torch.autograd.gradcheck(lambda W: printed_kernel(W, problem.x, problem.a), weights)
    loss = (predict(weights, problem.x, problem.a) - problem.y).square().sum() / 2
    (expected,) = torch.autograd.grad(loss, weights)
    torch.testing.assert_close(gradient(problem), expected, rtol=1e-12, atol=1e-12)


def test_the_limits_are_the_integrals_over_a_column() -> None:
    """Gauss-Hermite quadrature over w in the plane; the mean <beta_k, S> is 0 by symmetry of the sign."""
    x = draw(1, 3, 2, seed=2).x * torch.tensor([[1.0], [0.7], [0.4]], dtype=torch.float64)
    points, weights = np.polynomial.hermite_e.hermegauss(40)
    weights = weights / weights.sum()
    printed, true = printed_limit(x), true_limit(x)
    for (k1, i), (k2, j) in product(product(range(2), range(3)), repeat=2):
        first = second = 0.0
        for p, q in product(range(40), repeat=2):
            w = (points[p], points[q])
            xi, xj = x[i].tolist(), x[j].tolist()
            lean = [w[0] * z[0] + w[1] * z[1] - (z[0] ** 2 + z[1] ** 2) / 2 for z in (xi, xj)]
            weight = weights[p] * weights[q] * math.exp(sum(lean))
            angle = xi[0] * xj[0] + xi[1] * xj[1]
            first += weight * angle * w[k1] * w[k2]
            # (w_k1 x_i + e_k1) . (w_k2 x_j + e_k2); both signs give the same.
            second += weight * (angle * w[k1] * w[k2] + w[k1] * xi[k2] + w[k2] * xj[k1] + (k1 == k2))
        assert float(printed[k1 * 3 + i, k2 * 3 + j]) == pytest.approx(first, abs=1e-9)
        assert float(true[k1 * 3 + i, k2 * 3 + j]) == pytest.approx(second, abs=1e-9)


def test_a_long_prefix_is_near_the_limits_and_the_kernels_stay_apart() -> None:
    problem = draw(65536, 2, 2, seed=0)
    where = (problem.W, problem.x, problem.a)
    printed, true = printed_kernel(*where), true_kernel(*where)
    assert float((printed - printed_limit(problem.x)).norm() / printed.norm()) < 0.15
    assert float((true - true_limit(problem.x)).norm() / true.norm()) < 0.15
    assert float((true - printed).norm() / true.norm()) > 0.4


def test_short_inputs_along_the_axes_have_a_slower_mode_than_the_printed_kernel_says() -> None:
    """What breaks Lemma M.4: the true least eigenvalue is below a quarter of the printed one, in the limit."""
    x = 0.25 * torch.eye(3, dtype=torch.float64)
    printed, true = float(spectrum(printed_limit(x))[0]), float(spectrum(true_limit(x))[0])
    assert 0 < 4 * true < printed


def test_the_error_at_the_start_grows_with_the_root_of_m() -> None:
    for m in (256, 4096):
        norms = [predict(p.W, p.x, p.a).square().sum() for p in (draw(m, 2, 3, s, length=0.5) for s in range(200))]
        expected = expected_start(draw(1, 2, 3, 0, length=0.5).x, m)
        assert float(torch.stack(norms).mean()) == pytest.approx(expected, rel=0.2)
        assert expected > 100 * 2 * 3


def test_the_terms_of_lemma_l1_add_up() -> None:
    problem = draw(32, 3, 2, seed=3)
    step = 1e-4
    terms = decomposition(problem, step)
    after = problem.at(problem.W - step * gradient(problem))
    assert terms.before == pytest.approx(float(problem.residual.square().sum()))
    assert terms.after == pytest.approx(float(after.residual.square().sum()))
    parts = terms.c_0 + terms.c_11 + terms.c_12 + terms.c_2 + terms.c_3
    assert terms.after - terms.before == pytest.approx(parts, rel=1e-9)
    # To first order the loss falls by 2 m eta r H r with the true kernel: C_0 and C_12 are not noise.
    tiny = decomposition(problem, 1e-9)
    r = problem.residual
    fall = -2 * 32 * 1e-9 * float(r @ true_kernel(problem.W, problem.x, problem.a) @ r)
    assert tiny.c_0 + tiny.c_11 + tiny.c_12 == pytest.approx(fall, rel=1e-5)


def test_data_is_as_described() -> None:
    problem = draw(50, 4, 3, seed=5, length=0.5)
    torch.testing.assert_close(problem.x.norm(dim=1), torch.full((4,), 0.5, dtype=torch.float64))
    torch.testing.assert_close(problem.y.norm(dim=1), torch.ones(4, dtype=torch.float64))
    assert set(problem.a.tolist()) == {-1.0, 1.0}
    longer = draw(60, 4, 3, seed=5, length=0.5)
    assert torch.equal(problem.x, longer.x)
    assert torch.equal(problem.y, longer.y)
    assert torch.equal(draw(4, 2, 3, inputs="axes", length=0.25).x, 0.25 * torch.eye(3, dtype=torch.float64)[:2])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"width": 0}, "m = 0"),
        ({"length": 2.0}, "up to 1"),
        ({"inputs": "cube"}, "unit"),
        ({"inputs": "axes", "examples": 4}, "axes"),
    ],
)
def test_what_cannot_be_drawn_is_told(options: dict, words: str) -> None:
    with pytest.raises(InlayError, match=words):
        draw(**{"width": 8, "examples": 3, "size": 3, **options})
