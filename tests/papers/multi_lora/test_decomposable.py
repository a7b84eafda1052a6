"""The loss of k tasks against loops and autograd; its lemmas, the counterexample and table 3 against definitions."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from inlay.errors import InlayError
from inlay.papers.infoprompt.theory import SoftmaxProblem, l_exp
from inlay.papers.multi_lora.theory import (
    Decomposable,
    LossConstants,
    Quadratic,
    corrected_hessian,
    counterexample,
    estimate,
    lemma_bounds,
    points,
    printed_hessian,
    quadratics,
    sample,
    softmax_bounds,
    softmax_tasks,
)

sizes = st.tuples(st.integers(1, 5), st.integers(1, 3), st.integers(1, 3), st.integers(0, 99))


def flat(loss: Decomposable, v: Tensor) -> Tensor:
    """The loss as a function of one vector, (x, y_1, .., y_k)."""
    x, y = v[: loss.shared], v[loss.shared :].reshape(loss.tasks, loss.own)
    return sum((part.loss(torch.cat([x, own])) for part, own in zip(loss.parts, y, strict=True)), torch.zeros(()))


@pytest.mark.parametrize("kind", ["quadratic", "softmax"])
@settings(max_examples=12, deadline=None)
@given(size=sizes)
def test_gradient_and_hessian_of_the_whole(kind: str, size: tuple[int, int, int, int]) -> None:
    k, d, m, seed = size
    loss = quadratics(k, d, m, seed) if kind == "quadratic" else softmax_tasks(k, d, m, 9, seed)
    ((x, y),) = points(loss, 1, 1.0, seed)
    v = torch.cat([x, y.reshape(-1)])
    assert float(loss.loss(x, y)) == pytest.approx(float(flat(loss, v)), rel=1e-12)
    slope = torch.func.grad(lambda v: flat(loss, v))(v)
    assert torch.allclose(loss.gradient(x, y), slope, atol=1e-10 * float(slope.norm()))
    curve = torch.autograd.functional.hessian(lambda v: flat(loss, v), v)
    assert torch.allclose(loss.hessian(x, y), curve, atol=1e-10 * float(curve.norm()))
    # The printed one differs from it in the corner alone, where it has one task's share.
    apart = loss.hessian(x, y) - loss.printed_hessian(x, y)
    assert torch.allclose(apart[:d, :d], (1 - 1 / k) * curve[:d, :d], atol=1e-10 * float(curve.norm()))
    assert float(apart[d:].abs().max()) == 0 == float(apart[:, d:].abs().max())


def test_gradcheck() -> None:
    loss = softmax_tasks(3, 2, 2, 8, 0)
    ((x, y),) = points(loss, 1, 1.0, 0)
    assert torch.autograd.gradcheck(loss.loss, (x.requires_grad_(), y.requires_grad_()))
    assert torch.autograd.gradcheck(loss.gradient, (x, y))


@settings(max_examples=20, deadline=None)
@given(size=sizes)
def test_the_lemmas_and_the_correction(size: tuple[int, int, int, int]) -> None:
    """4.4, 4.6 and alpha without a condition, for any quadratic tasks."""
    k, d, m, seed = size
    loss = quadratics(k, d, m, seed)
    seen = estimate(loss, points(loss, 3, 1.0, seed))
    bound = lemma_bounds(seen.part, k)
    assert seen.part.alpha == pytest.approx(1)
    assert seen.part.beta == pytest.approx(10)
    assert seen.whole.gamma <= bound.gamma * (1 + 1e-9)
    assert seen.whole.beta <= bound.beta * (1 + 1e-9)
    assert seen.whole.alpha >= bound.alpha * (1 - 1e-9)
    assert seen.frozen.beta <= seen.part.beta * (1 + 1e-9)
    assert seen.frozen.alpha >= seen.part.alpha * (1 - 1e-9)
    assert seen.frozen.gamma <= math.sqrt(k) * seen.part.gamma * (1 + 1e-9)


def test_lemma_4_8_on_the_matrix_it_is_about() -> None:
    """With H_00 of one task the condition is needed, and enough: alpha / 2."""
    for seed in range(5):
        loss = quadratics(8, 3, 2, seed, condition=1.05)
        seen = estimate(loss, points(loss, 1, 1.0, seed))
        assert seen.condition
        assert seen.printed_alpha >= seen.part.alpha / 2
    steep = quadratics(32, 3, 2, 0)
    seen = estimate(steep, points(steep, 1, 1.0, 0))
    assert not seen.condition
    assert seen.printed_alpha < 0 < 1 - 1e-9 < seen.whole.alpha


def test_the_bounds_of_4_4_and_4_6_are_reached() -> None:
    part = Quadratic(torch.diag(torch.tensor([2.0, 0.0], dtype=torch.float64)), torch.zeros(2, dtype=torch.float64))
    loss = Decomposable((part,) * 6, shared=1)
    seen = estimate(loss, [(torch.ones(1, dtype=torch.float64), torch.zeros(6, 1, dtype=torch.float64))])
    assert seen.whole.gamma == pytest.approx(6 * seen.part.gamma)
    assert seen.whole.beta == pytest.approx(6 * seen.part.beta)


def test_gradients_of_tasks_do_not_add_up_to_the_whole_as_the_proof_of_4_6_writes() -> None:
    loss = quadratics(3, 2, 2, 0)
    (here, there) = points(loss, 2, 1.0, 0)
    whole = (loss.gradient(*here) - loss.gradient(*there)).norm()
    added = (loss.gradients(*here) - loss.gradients(*there)).sum(0).norm()
    assert abs(float(whole / added) - 1) > 0.01


@pytest.mark.parametrize("k", [1, 2, 3, 10, 50])
def test_the_counterexample(k: int) -> None:
    loss = counterexample(k)
    zero = torch.zeros(1, dtype=torch.float64), torch.zeros(k, 1, dtype=torch.float64)
    printed, true = loss.printed_hessian(*zero), loss.hessian(*zero)
    by_hand = 4 * torch.eye(k + 1, dtype=torch.float64)
    by_hand[0, 1:] = by_hand[1:, 0] = -3
    assert torch.equal(printed, by_hand)
    assert float(printed.sum()) == -2 * k + 4
    assert float(torch.linalg.eigvalsh(printed)[0]) == pytest.approx(4 - 3 * math.sqrt(k))
    by_hand[0, 0] = 4 * k
    assert torch.equal(true, by_hand)
    assert float(torch.linalg.eigvalsh(true)[0]) == pytest.approx(2 * k + 2 - math.sqrt((2 * k - 2) ** 2 + 9 * k))
    assert float(torch.linalg.eigvalsh(true)[0]) >= 1 - 1e-12


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 99), radius=st.floats(0.1, 5))
def test_softmax_constants_are_within_their_bounds(seed: int, radius: float) -> None:
    loss = softmax_tasks(2, 2, 2, 12, seed)
    seen = estimate(loss, points(loss, 4, radius, seed))
    bounds = [softmax_bounds(part, math.sqrt(2) * radius) for part in loss.parts if isinstance(part, SoftmaxProblem)]
    assert len(bounds) == 2
    assert seen.part.gamma <= max(bound.gamma for bound in bounds)
    assert seen.part.beta <= max(bound.beta for bound in bounds)
    assert seen.part.alpha >= min(bound.alpha for bound in bounds) >= 1 - 1e-9


@settings(max_examples=15, deadline=None)
@given(n=st.integers(2, 7), d=st.integers(1, 9), seed=st.integers(0, 99))
def test_the_corrected_hessian_is_the_hessian_and_the_printed_one_is_not(n: int, d: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    A, b, x = (torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in ((n, d), (n,), (d,)))
    true = torch.autograd.functional.hessian(lambda x: l_exp(A, b, x), x)
    assert torch.allclose(corrected_hessian(A, b, x), true, atol=1e-12)
    assert not torch.allclose(printed_hessian(A, b, x), true, rtol=1e-3, atol=1e-6)


def test_the_printed_hessian_is_the_one_that_is_printed() -> None:
    generator = torch.Generator().manual_seed(0)
    A, b, x = (torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in ((4, 3), (4,), (3,)))
    f = (A @ x).softmax(0)
    B = torch.zeros(4, 4, dtype=torch.float64)
    for i in range(4):
        for j in range(4):
            B[i, j] = ((3 * f - 2 * b) @ f) * f[i] * f[j] + b[i] * f[i] * f[j] + f[i] * b[j] * f[j]
        B[i, i] += ((f - b) @ f) * f[i] + (2 * f[i] - b[i]) * f[i]
    assert torch.allclose(printed_hessian(A, b, x), A.T @ B @ A)


def test_table_3_is_what_it_says_of_its_draws() -> None:
    """The same draws, one by one; and a typical point has a negative eigenvalue."""
    found = sample(6, 3, 4, seed=5)
    generator = torch.Generator().manual_seed(5)
    A, b, x, y = (
        torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in ((4, 6, 3), (4, 6), (4, 3), (4, 3))
    )
    for i in range(4):

        def loss(v: Tensor, i: int = i) -> Tensor:
            return l_exp(A[i], b[i], v)

        here, there = (torch.autograd.functional.hessian(loss, v[i]) for v in (x, y))
        values = torch.linalg.eigvalsh(here)
        assert float(found.alpha[i]) == pytest.approx(float(values[0]))
        assert float(found.beta[i]) == pytest.approx(float(torch.linalg.matrix_norm(here, 2)))
        change = torch.linalg.matrix_norm(here - there, 2) / (x[i] - y[i]).norm()
        assert float(found.far[i]) == pytest.approx(float(change))
        assert float(found.gamma[i]) == pytest.approx(float(torch.func.grad(loss)(x[i]).norm()))
    many = sample(10, 5, 300)
    assert float(many.alpha.mean()) < -0.2
    assert 0.5 < float(many.gamma.mean()) < 0.75  # table 3 has 0.60
    assert float(sample(10, 5, 300, kind="printed").beta.mean()) > 5 * float(many.beta.mean())
    # M nearby is at least about what it is over a distance, on average.
    assert float(many.near.mean()) > 0.8 * float(many.far.mean())


def test_bad_input_is_told() -> None:
    loss = quadratics(2, 2, 1, 0)
    ((x, y),) = points(loss, 1, 1.0, 0)
    eye, zero = torch.eye(2, dtype=torch.float64), torch.zeros(2, dtype=torch.float64)
    cases = [
        (lambda: Decomposable((), 1), "one part or more"),
        (lambda: Decomposable(loss.parts, 3), "one of its own"),
        (lambda: Decomposable((*loss.parts, Quadratic(eye, zero)), 1), "the same d"),
        (lambda: Quadratic(eye + torch.tensor([[0, 1.0], [0, 0]]), zero), "symmetric"),
        (lambda: Quadratic(eye, zero[:1]), "symmetric"),
        (lambda: Quadratic(eye, zero / 0), "NaN"),
        (lambda: loss.loss(x, y[:1]), "2 x 1"),
        (lambda: loss.gradient(y[0], y), "give 2 numbers"),
        (lambda: loss.hessian(x / 0, y), "NaN"),
        (lambda: counterexample(0), "1 or more"),
        (lambda: lemma_bounds(LossConstants(1, 1, 1), 0), "1 or more"),
        (lambda: quadratics(2, 2, 1, 0, condition=0.5), "1 or more"),
        (lambda: points(loss, 0, 1.0, 0), "1 point"),
        (lambda: estimate(loss, []), "No points"),
        (lambda: sample(0, 2, 10), "from 1 on"),
        (lambda: sample(2, 2, 1), "2 samples"),
        (lambda: sample(2, 2, 10, sampling="uniform"), "gaussian"),
        (lambda: sample(2, 2, 10, kind="true"), "corrected"),
        (lambda: softmax_tasks(2, 5, 5, 9, 0), "n >= d"),
    ]
    for call, words in cases:
        with pytest.raises(InlayError, match=words):
            call()
