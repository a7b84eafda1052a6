"""Softmax regression against loops and autograd; its bounds, its sampling and Algorithm 1 against their definitions."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from inlay.errors import InlayError
from inlay.papers.infoprompt.theory import (
    Printed,
    SoftmaxProblem,
    SparseDiagonal,
    Sparsified,
    curvature_bound,
    draw,
    enough_weight,
    gradient,
    hessian,
    hessian_change,
    iterations,
    least_eigenvalue,
    leverage_scores,
    lipschitz_bound,
    newton,
    rows_for,
    sketched_lengths,
    solve,
    sparsify,
    spectral_error,
    weight_ratio,
)
from inlay.papers.infoprompt.theory.bounds import ball
from inlay.papers.infoprompt.theory.losses import BLOCK, gram, products

PARTS = [("exp",), ("cent",), ("reg",), ("exp", "cent", "reg")]
sizes = st.tuples(st.integers(1, 4), st.integers(0, 5), st.integers(0, 99))


def instance(
    d: int, more: int, seed: int, parts: tuple[str, ...] = ("exp", "cent", "reg")
) -> tuple[SoftmaxProblem, Tensor]:
    """Any A, b of any sign, uneven weights, and a point."""
    generator = torch.Generator().manual_seed(seed)
    n = d + more

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    return SoftmaxProblem(normal(n, d), normal(n), normal(n).abs(), parts), normal(d)


def plain_loss(problem: SoftmaxProblem, x: Tensor) -> float:
    """The definitions, a number at a time."""
    n, d = problem.A.shape
    z = [sum(float(problem.A[i, j] * x[j]) for j in range(d)) for i in range(n)]
    u = [math.exp(value) for value in z]
    f = [value / sum(u) for value in u]
    parts = {
        "exp": 0.5 * sum((f[i] - float(problem.b[i])) ** 2 for i in range(n)),
        "cent": -sum(float(problem.b[i]) * math.log(f[i]) for i in range(n)),
        "reg": 0.5 * sum((float(problem.w[i]) * z[i]) ** 2 for i in range(n)),
    }
    return sum(parts[part] for part in problem.parts)


@pytest.mark.parametrize("parts", PARTS)
@settings(max_examples=12, deadline=None)
@given(size=sizes)
def test_losses_gradients_and_hessians(parts: tuple[str, ...], size: tuple[int, int, int]) -> None:
    problem, x = instance(*size, parts)
    assert float(problem.loss(x)) == pytest.approx(plain_loss(problem, x), rel=1e-12)
    assert torch.allclose(problem.gradient(x), torch.func.grad(problem.loss)(x), atol=1e-12)
    by_autograd = torch.autograd.functional.hessian(problem.loss, x)
    assert torch.allclose(problem.hessian(x), by_autograd, atol=1e-11)
    A, W2 = problem.A, torch.diag(problem.w.square()) if "reg" in parts else 0
    assert torch.allclose(A.T @ (problem.curvature(x) + W2) @ A, by_autograd, atol=1e-11)


def test_gradcheck() -> None:
    problem, x = instance(3, 2, 0)
    x.requires_grad_()
    A, b, w = problem.A, problem.b, problem.w
    assert torch.autograd.gradcheck(problem.loss, (x,))
    # The closed forms are differentiable themselves: the Hessian is the derivative of the gradient.
    assert torch.autograd.gradcheck(lambda x: gradient(A, b, w, x), (x,))
    assert torch.allclose(torch.autograd.functional.jacobian(lambda x: gradient(A, b, w, x), x), problem.hessian(x))


def test_the_curvature_of_the_cross_entropy_is_the_printed_one() -> None:
    """Definition C.13: `<1, b> (diag f - f f^T)`."""
    problem, x = instance(3, 4, 1, ("cent",))
    f = (problem.A @ x).softmax(0)
    assert torch.allclose(problem.curvature(x), problem.b.sum() * (torch.diag(f) - torch.outer(f, f)), atol=1e-14)


def test_a_batch_is_its_members() -> None:
    members = [instance(3, 5, seed) for seed in range(4)]
    A, b, w = (torch.stack([getattr(problem, name) for problem, _ in members]) for name in "Abw")
    x = torch.stack([point for _, point in members])
    assert torch.allclose(hessian(A, b, w, x), torch.stack([problem.hessian(point) for problem, point in members]))
    assert torch.allclose(gradient(A, b, w, x), torch.stack([problem.gradient(point) for problem, point in members]))


def test_blocks_of_rows_add_up() -> None:
    A = torch.randn(2 * BLOCK + 7, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    D, v = A[:, 0] + 1, A[:, 1]
    assert torch.allclose(gram(A, D), A.T @ torch.diag(D) @ A)
    assert torch.allclose(products(A, D, v), torch.stack([A.T @ D, A.T @ v]))


@settings(max_examples=25, deadline=None)
@given(size=sizes, far=st.floats(0.01, 30))
def test_our_bounds_hold_everywhere(size: tuple[int, int, int], far: float) -> None:
    problem, x = instance(*size)
    bare, point = replace(problem, parts=("exp", "cent")), far * x
    values = torch.linalg.eigvalsh(bare.curvature(point))
    assert float(values.abs().max()) <= curvature_bound(problem.b)
    other = point + torch.ones_like(point) * 1e-3
    assert hessian_change(bare, point, other) <= lipschitz_bound(problem.A, problem.b)
    assert hessian_change(bare, point, -x) <= lipschitz_bound(problem.A, problem.b)
    if torch.linalg.svdvals(problem.A)[-1] > 1e-3:
        weighted = problem.with_weights(torch.full_like(problem.b, enough_weight(problem.A, problem.b, 0.5) ** 0.5))
        assert least_eigenvalue(weighted, point) >= 0.5 * (1 - 1e-9)


def test_lemma_c15_as_printed_and_where_it_stops() -> None:
    problem = draw(40, 4, 0, norm=4.0, targets="gaussian")
    printed = Printed(40, 4.0)
    assert abs(printed.R_0 - math.log10(40 * math.exp(16))) < 1e-12
    assert printed.lipschitz == pytest.approx(math.log10(40**5 * math.exp(16)))
    x = ball(1, 4, 4.0, 0)[0]
    least = 1.0
    strong = problem.with_weights(torch.full_like(problem.b, printed.weight(problem.A, least, 1e4) ** 0.5))
    assert least_eigenvalue(strong, x) >= least
    low, high = weight_ratio(strong, x)
    assert 0.99 <= low <= high <= 1.01
    # The ratio is what it says: W^2 = ratio B~ along an eigenvector.
    weak = problem.with_weights(torch.linspace(1, 3, 40, dtype=torch.float64))
    W2 = torch.diag(weak.w.square())
    whole = weak.curvature(x) + W2
    low, high = weight_ratio(weak, x)
    both = torch.linalg.eigvals(torch.linalg.solve(whole, W2)).real
    assert (low, high) == pytest.approx((float(both.min()), float(both.max())))
    assert low < 0.99 or high > 1.01
    with pytest.raises(InlayError, match="larger weights"):
        weight_ratio(replace(problem, b=-problem.b.abs(), w=0 * problem.w), x)


def test_leverage_scores_exact_and_sketched() -> None:
    problem = draw(3000, 6, 0, heavy=20.0)
    A, D = problem.A, torch.rand(3000, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) + 0.1
    inverse = torch.linalg.inv(A.T @ (D[:, None] * A))
    scores = leverage_scores(A, D)
    assert torch.allclose(scores, D * torch.einsum("id,de,ie->i", A, inverse, A))
    assert float(scores.sum()) == pytest.approx(6)
    near = D * sketched_lengths(A, D, torch.Generator().manual_seed(0)) / scores
    assert 0.5 < float(near.median()) < 2
    # Rows that alone have the last column have almost all of its score, and the sketch sees it.
    assert float(near[::200].min()) > 0.1


def test_a_draw_is_right_on_average_and_near_as_promised() -> None:
    problem = draw(4000, 5, 0, heavy=5.0)
    A, D = problem.A, problem.local(torch.zeros(5, dtype=torch.float64)).D
    scores, generator = leverage_scores(A, D), torch.Generator().manual_seed(0)
    rows = rows_for(5, 0.3, 0.05)
    assert rows == math.ceil(2 * 1.1 * 5 * math.log(200) / 0.09)
    draws = [sparsify(A, D, rows, scores, generator) for _ in range(40)]
    mean = sum(found.gram(A) for found in draws) / len(draws)
    exact = A.T @ (D[:, None] * A)
    assert torch.allclose(mean, exact, atol=0.05 * float(exact.diagonal().max()))
    errors = [spectral_error(A, D, found) for found in draws]
    assert sum(error <= 0.3 for error in errors) >= 38
    by_hand = torch.linalg.eigvals(torch.linalg.solve(exact, draws[0].gram(A))).real
    assert errors[0] == pytest.approx(float((by_hand - 1).abs().max()))
    assert spectral_error(A, D, sparsify(A, D, 4000, scores, generator)) < 1e-12
    assert spectral_error(A, D, SparseDiagonal(torch.arange(4000), D * 1.5)) == pytest.approx(0.5)


def test_exact_newton_squares_its_error_and_the_gradient_vanishes() -> None:
    problem = draw(400, 5, 0)
    solution = solve(problem)
    assert float(problem.gradient(solution).norm()) < 1e-15
    away = problem.loss(solution + 1e-3 * torch.ones_like(solution))
    assert float(problem.loss(solution)) < float(away)
    errors = newton(problem, torch.zeros_like(solution), 4).errors(solution)
    assert float(errors[2]) < float(errors[1]) ** 1.5
    half = SoftmaxProblem(problem.A.float(), problem.b.float(), problem.w.float())
    assert torch.allclose(solve(half).double(), solution, atol=1e-4)
    stopped = newton(problem, torch.zeros_like(solution), 50, until=1e-10)
    assert 2 <= stopped.steps < 10


@pytest.mark.parametrize("anew", ["nothing", "rows", "scores"])
def test_algorithm_1_meets_the_theorems_count(anew: str) -> None:
    for seed in range(3):
        problem = draw(8192, 8, seed)
        solution, start = solve(problem), torch.zeros(8, dtype=torch.float64)
        T = iterations(float((start - solution).norm()), 1e-6)
        path = newton(problem, start, T, approximate=Sparsified(rows=64 * 8, anew=anew, seed=seed))
        assert path.drawn == 512
        assert path.errors(solution)[-1] <= 1e-6
        assert path.reached(solution, 1e-6) is not None
        assert len(path.seconds) == T + 1


def test_all_rows_is_exact_newton_and_a_seed_is_a_run() -> None:
    problem, start = draw(300, 4, 0), torch.zeros(4, dtype=torch.float64)
    exact = newton(problem, start, 3)
    assert torch.equal(newton(problem, start, 3, approximate=Sparsified(rows=300)).points, exact.points)
    one, same, other = (
        newton(problem, start, 3, approximate=Sparsified(rows=200, seed=seed)).points for seed in (0, 0, 1)
    )
    assert torch.equal(one, same)
    assert not torch.equal(one, other)


def test_the_printed_sign_climbs() -> None:
    problem, start = draw(300, 4, 0), torch.zeros(4, dtype=torch.float64)
    solution = solve(problem)
    up = newton(problem, start, 5, sign=1).errors(solution)
    assert all(after > before for before, after in zip(up[:-1].tolist(), up[1:].tolist(), strict=True))
    assert float(newton(problem, start, 1, sign=1).points[-1] @ newton(problem, start, 1).points[-1]) < 0


def test_weights_alone_do_where_they_are_large_and_even_draws_miss_a_rare_column() -> None:
    start = torch.zeros(8, dtype=torch.float64)
    only_weights = Sparsified(rows=512, diagonal="weights")
    for weight, converges in ((10 / 8192, True), (1 / 8192, False)):
        problem = draw(8192, 8, 0, spread=1.0, weight=weight)
        errors = newton(problem, start, 12, approximate=only_weights).errors(solve(problem))
        assert (float(errors[-1]) < 1e-4 * float(errors[0])) is converges
    uneven = draw(8192, 8, 1, spread=0.2, heavy=5.0)
    solution = solve(uneven)
    assert float(newton(uneven, start, 12, approximate=Sparsified(rows=512)).errors(solution)[-1]) < 1e-6
    with pytest.raises(InlayError, match="draw more rows"):
        newton(uneven, start, 12, approximate=Sparsified(rows=512, scores="even"))


def test_the_theorems_count() -> None:
    assert iterations(1.0, 1e-3) == math.ceil(math.log(1000))
    assert iterations(1e-5, 1e-3) == 0
    assert iterations(0.0, 1e-3) == 0


def test_bad_input_is_told() -> None:
    good = draw(6, 3, 0)
    A, b, w = good.A, good.b, good.w
    nan = b.clone()
    nan[2] = float("nan")
    cases = [
        (lambda: SoftmaxProblem(A[0], b, w), "n x d"),
        (lambda: SoftmaxProblem(A, b[:5], w), "vector of 6"),
        (lambda: SoftmaxProblem(A, b, w[:, None]), "vector of 6"),
        (lambda: SoftmaxProblem(A.T.contiguous(), b[:3], w[:3]), "n >= d"),
        (lambda: SoftmaxProblem(A, nan, w), "b has 1 entries that are NaN"),
        (lambda: SoftmaxProblem(A, b, -w), "negative entry"),
        (lambda: SoftmaxProblem(A.float(), b, w), "all in float64"),
        (lambda: SoftmaxProblem(A.half(), b.half(), w.half()), "all in float64"),
        (lambda: SoftmaxProblem(A.long(), b.long(), w.long()), "all in float64"),
        (lambda: replace(good, parts=("entropy",)), "cent"),
        (lambda: good.loss(b), "3 finite numbers"),
        (lambda: newton(good, nan[:3], 1), "x0 of shape"),
        (lambda: newton(good, A[0], -1), "0 or more"),
        (lambda: newton(good, A[0], 1, sign=2), "-1"),
        (lambda: newton(good.with_weights(0 * w), A[0], 9, approximate=Sparsified(rows=2)), "Draw 3 rows"),
        (lambda: newton(replace(good, parts=("exp",)), 5 * A[0], 9), "larger weights"),
        (lambda: enough_weight(torch.ones(4, 2, dtype=torch.float64), b[:4], 1.0), "rank below 2"),
        (lambda: Sparsified(diagonal="all"), "hessian"),
        (lambda: Sparsified(scores="norms"), "leverage"),
        (lambda: Sparsified(anew="all"), "rows"),
        (lambda: Sparsified(rows=0), "from 1 on"),
        (lambda: Sparsified(error=1.5), "between 0 and 1"),
        (lambda: Printed(10, 3.0), "R >= 4"),
        (lambda: draw(3, 4), "n >= d"),
        (lambda: draw(4, 4, targets="onehot"), "gaussian"),
        (lambda: iterations(1.0, 0.0), "above 0"),
        (lambda: hessian_change(good, A[0], A[0]), "two different points"),
    ]
    for call, words in cases:
        with pytest.raises(InlayError, match=words):
            call()
