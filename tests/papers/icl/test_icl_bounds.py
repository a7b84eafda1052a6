"""Theorems 1 and 2 where they say something: the bound at every step, the iteration bound over many prompts."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from inlay.errors import InlayError
from inlay.papers.icl import theory as icl
from inlay.papers.icl.theory.proposition import attention_at_start, distinct_row, ranks

SMALL = [(2, 4, 2, 1.0), (2, 4, 4, 3.0), (2, 6, 8, 1.0), (3, 5, 8, 3.0)]


def small(N: int, K: int, heads: int, beta: float, seed: int = 0) -> icl.OneLayer:
    problem = icl.InContextProblem.sample(N, K, d=5, m=N, tau=1.0, seed=seed, unit=True)
    return icl.OneLayer(problem, heads, beta=beta, seed=seed)


@pytest.mark.parametrize(("N", "K", "heads", "beta"), SMALL)
@pytest.mark.parametrize("times", [1, 20])
def test_theorem_1_at_every_step(N: int, K: int, heads: int, beta: float, times: float) -> None:
    """(18), at the least gamma of (15) and at twenty times it; and the proof's (43a) and (43b)."""
    model = small(N, K, heads, beta)
    found = icl.constants(model)
    found = icl.constants(model, gamma=found.least_gamma * times)
    steps = 300
    trace = icl.descend(model, steps, eta_Q=found.eta_Q, eta_w=found.eta_w)
    bound = found.bound(torch.arange(steps + 1, dtype=torch.float64))
    assert (torch.tensor(trace.gap, dtype=torch.float64) <= bound * (1 + 1e-9)).all()
    assert trace.gap[-1] < trace.gap[0]
    assert float(model.w.detach().norm(dim=1).max()) / found.gamma <= found.alpha
    assert icl.zeta_0(model) >= found.zeta_0 / 2
    if times == 20:  # the bound says something: it is not 1
        assert float(bound[-1]) < 0.98 * float(bound[0])


def test_the_constants_are_their_formulas() -> None:
    """Each from its definition, with loops over k and h."""
    model = small(2, 4, 4, 1.0)
    problem, H = model.problem, 4
    S = problem.Z.T @ problem.Z + problem.m * problem.tau * torch.eye(2, dtype=torch.float64)
    values, vectors = torch.linalg.eigh(S)
    root = vectors @ values.sqrt().diag() @ vectors.T
    least = []
    for k in range(4):
        C = torch.stack([(problem.V.T @ model.Q[h] @ problem.tokens[k]).softmax(0) for h in range(H)], 1)
        B = (root @ C).detach()
        least.append(float(torch.linalg.eigvalsh(B @ B.T)[0]))
    found = icl.constants(model)
    assert found.zeta_0 == pytest.approx(min(least))
    assert found.norm == pytest.approx(float(torch.linalg.matrix_norm(root, 2)))
    assert found.f_max == pytest.approx(float(root.norm(dim=0).max()))
    assert found.delta_0 == pytest.approx(model.population_loss() - problem.infimum())
    # (15) is (48) with equality, for sigma and alpha of (44).
    at = icl.constants(model, gamma=found.least_gamma)
    sigma = at.zeta_0 * at.gamma**2 / at.K
    left = at.norm * math.sqrt(H) * 16 * math.sqrt(2) * at.gamma * at.alpha * at.f_max * math.sqrt(at.delta_0) / sigma
    assert left == pytest.approx((1 - 1 / math.sqrt(2)) * math.sqrt(at.zeta_0))
    # L by (54) and (58): Young's inequality on two terms for w, on four for Q_h, summed over k and h.
    norm, f, g, a, K = float(torch.linalg.matrix_norm(root, 2)), float(root.norm(dim=0).max()), at.gamma, at.alpha, 4
    A = float(torch.linalg.matrix_norm(icl.ridge.star(problem), 2))
    w_by_Q, w_by_w = g / K * 2 * norm**2 * (2 * g * H * a + A), g**2 * H / K * norm**2
    each = 2 * g * f * norm / K  # in front of (58)
    first = [each * a * g * math.sqrt(H) * 2 * K * a, each * a * g * math.sqrt(H * K)]  # of all heads: times H
    last = [each * (g * H * a + A) * 2 * a * math.sqrt(problem.N) * 2 * K, each * (g * H * a + A) * math.sqrt(K)]
    by_Q, by_alpha = (4 * (H * x**2 + y**2) for x, y in zip(first, last, strict=True))
    least = max(2 * K * w_by_Q**2 + by_Q, 2 * w_by_w**2 + by_alpha)
    # (55) and (59) bound both parts by one number each, and add these.
    most = 2 * (K * w_by_Q**2 + w_by_w**2) + 4 * max(1, 1 / (4 * K * a**2)) * (H * first[0] ** 2 + last[0] ** 2)
    assert math.sqrt(least) <= at.L
    assert pytest.approx(math.sqrt(most)) == at.L
    assert at.eta_w == pytest.approx(at.gamma**2 * at.eta_Q)
    limit = at.zeta_0 / (2 * math.sqrt(2) * H * at.norm**2)
    assert icl.constants(model, gamma=1e9).rate == pytest.approx(limit, rel=1e-3)


def test_L_is_above_every_measured_slope() -> None:
    """Lemma 10 for pairs of points with `|alpha_hk| <= alpha`; xi = (Q, w / gamma)."""
    model = small(2, 4, 2, 1.0)
    found = icl.constants(model, gamma=icl.constants(model).least_gamma)
    draws = torch.Generator().manual_seed(0)
    start = model.Q.detach().clone()

    def at(Q: torch.Tensor, alpha: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            model.Q.copy_(Q)
            model.w.copy_(found.gamma * alpha)
        model.step()
        assert model.Q.grad is not None
        assert model.w.grad is not None
        return torch.cat([model.Q.grad.flatten(), found.gamma * model.w.grad.flatten()])

    steepest = 0.0
    for near in (1e-4, 1.0):
        for _ in range(30):
            Q = start + torch.randn(start.shape, generator=draws, dtype=torch.float64)
            alpha = (2 * torch.rand(2, 4, generator=draws, dtype=torch.float64) - 1) * found.alpha
            dQ = near * torch.randn(start.shape, generator=draws, dtype=torch.float64)
            other = alpha * (1 - near * torch.rand(2, 4, generator=draws, dtype=torch.float64))
            apart = torch.cat([dQ.flatten(), (other - alpha).flatten()]).norm()
            steepest = max(steepest, float((at(Q + dQ, other) - at(Q, alpha)).norm() / apart))
    assert 0 < steepest <= found.L


@pytest.mark.parametrize(("N", "K", "heads", "beta"), SMALL[:3])
def test_theorem_2_over_many_prompts(N: int, K: int, heads: int, beta: float) -> None:
    """After T steps (21) the outputs are within epsilon of y* (22), for lambda of norm B, in 1 - delta of the draws."""
    epsilon, delta, B = 0.05, 0.1, 2.0
    model = small(N, K, heads, beta)
    found, problem = icl.constants(model), model.problem
    T = icl.needed_steps(problem, found, epsilon, delta, B)
    assert 50 < T < 5000

    def left(steps: int) -> float:
        """The proof's bound on (22) after so many steps: (70) times (69) squared."""
        e = math.log(1 / delta)
        label = B * float(torch.linalg.matrix_norm(problem.Z, 2))
        label += B * math.sqrt(problem.tau) * math.sqrt(N + 2 * math.sqrt(N * e) + 2 * e)
        spectral = 2 * K / (problem.m * problem.tau) * found.delta_0 * (1 - found.rate) ** steps
        return spectral * label**2 / (2 * K)

    assert left(T) <= epsilon < left(T - 1)
    icl.descend(model, T, eta_Q=found.eta_Q, eta_w=found.eta_w)
    lam = torch.randn(4000, problem.m, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    prompts = problem.prompts(4000, 1, lam=B * lam / lam.norm(dim=1, keepdim=True))
    with torch.no_grad():
        errors = (model(prompts.shown) - prompts.shown @ icl.ridge.star(problem)).square().sum(1) / (2 * K)
    assert float((errors <= epsilon).double().mean()) >= 1 - delta
    strict = icl.needed_steps(problem, found, epsilon / 10, delta, B)
    assert strict > T
    assert icl.needed_steps(problem, found, epsilon, delta / 10, B) > T


def test_assumptions_are_told_on_the_instance() -> None:
    holds = [claim.holds for claim in icl.assumptions(small(2, 4, 4, 1.0), B=2.0)]
    assert holds == ["yes"] * 5
    raw = icl.OneLayer(replace(icl.InContextProblem.sample(30, 60, 100, 20), tasks=icl.OUT_OF_DOMAIN), 8)
    assert [claim.holds for claim in icl.assumptions(raw)] == ["no", "no", "yes", "cannot tell", "no"]


def test_where_the_theorems_say_nothing() -> None:
    with pytest.raises(InlayError, match="H >= N = 3"):
        icl.constants(small(3, 5, 2, 1.0))
    model = small(2, 4, 4, 1.0)
    found = icl.constants(model)
    with pytest.raises(InlayError, match=r"\(15\) asks for"):
        icl.constants(model, gamma=found.least_gamma / 2)
    with pytest.raises(InlayError, match="epsilon = 0"):
        icl.needed_steps(model.problem, found, 0.0, 0.1, 1.0)
    icl.descend(model, 3)
    with pytest.raises(InlayError, match="has been trained"):
        icl.constants(model)


def test_without_noise() -> None:
    """tau = 0: Theorem 1 stands while Z^T Z is invertible (N <= m) and not beyond; Theorem 2 divides by it."""
    within = icl.OneLayer(icl.InContextProblem.sample(2, 4, 5, 3, 0.0, unit=True), 4)
    found = icl.constants(within)
    trace = icl.descend(within, 100, eta_Q=found.eta_Q, eta_w=found.eta_w)
    assert (torch.tensor(trace.gap) <= found.bound(torch.arange(101)) * (1 + 1e-9)).all()
    with pytest.raises(InlayError, match="tau > 0"):
        icl.constants(icl.OneLayer(icl.InContextProblem.sample(4, 6, 5, 3, 0.0, unit=True), 8))
    # In single precision too, where rounding alone would make the singular matrix seem regular.
    beyond = icl.OneLayer(icl.InContextProblem.sample(4, 12, 6, 3, 0.0), 64, dtype=torch.float32)
    (rank,) = (claim for claim in icl.assumptions(beyond) if claim.claim.startswith("Assumption 2"))
    assert rank.holds == "no"
    assert "singular: tau = 0, m = 3" in rank.measured
    with pytest.raises(InlayError, match="divides by m tau"):
        icl.needed_steps(within.problem, found, 0.1, 0.1, 1.0)


def test_proposition_1_and_what_breaks_it() -> None:
    draws = torch.Generator().manual_seed(0)
    tokens = torch.randn(6, 3, generator=draws, dtype=torch.float64)
    for seed in range(20):
        assert (ranks(attention_at_start(tokens, 4, 4, seed)) == 4).all()
        assert (ranks(attention_at_start(tokens, 4, 3, seed)) == 3).all()  # H < N
    again = tokens.clone()
    again[2] = again[0]
    assert (ranks(attention_at_start(again, 4, 9, 0)) == 3).all()  # a token twice
    assert distinct_row(tokens, 4) == 1
    assert distinct_row(again, 4) is None
    # Distinct tokens that no single entry tells apart: Assumption 3 fails, though tokens differ.
    square = torch.tensor([[0.0, 0.0], [0.0, 1.0], [1.0, 0.0], [1.0, 1.0]], dtype=torch.float64)
    assert distinct_row(square, 4) is None
    assert (ranks(attention_at_start(square, 4, 4, 0)[1:]) == 4).all()


def test_one_head_cannot() -> None:
    """Section 3.3: one head gives a column of one sign, A has both; more heads come nearer."""
    problem = icl.InContextProblem.sample(4, 12, 4, 3, 0.01, 0, unit=True)
    A = problem.moments().minimiser()
    assert ((A.max(0).values > 0.01) & (A.min(0).values < -0.01)).any()
    gaps = {}
    for heads in (1, 8):
        model = icl.OneLayer(problem, heads)
        gaps[heads] = icl.descend(model, 400).gap[-1]
        if heads == 1:
            a = model.coefficients()
            assert ((a >= 0).all(0) | (a <= 0).all(0)).all()
    assert gaps[8] < gaps[1] / 2


@pytest.mark.parametrize("wanted", [{"steps": 0}, {"eta_Q": 0.1}, {"eta_Q": -1.0, "eta_w": 1.0}])
def test_bad_descents_are_told(wanted: dict) -> None:
    with pytest.raises(InlayError, match=r"steps|step size"):
        icl.descend(small(2, 4, 2, 1.0), **{"steps": 3, **wanted})


@pytest.mark.parametrize("heads", [1, 5])
def test_safe_steps_at_printed_size(heads: int) -> None:
    """Attention that is one-hot up to rounding, in single precision: the largest eigenvalue all the same."""
    model = icl.OneLayer(icl.InContextProblem.sample(), heads, dtype=torch.float32)
    eta = icl.usable_steps(model)[1]
    largest = max(float(torch.linalg.matrix_norm(C, 2)) ** 2 for C in model.attention().detach().double().unbind(-1))
    norm = float(torch.linalg.matrix_norm(model.problem.moments().S, 2))
    assert eta == pytest.approx(200 / (largest * norm), rel=1e-6)


def test_descent_without_step_sizes_never_rises() -> None:
    trace = icl.descend(icl.OneLayer(icl.InContextProblem.sample(5, 20, 8, 4), 8), 60)
    assert all(after <= before for before, after in zip(trace.gap, trace.gap[1:], strict=False))
    assert trace.gap[-1] < 0.5 * trace.gap[0]


def test_training_is_adam() -> None:
    """Against Adam written out, at a size where the gradients' layouts in memory could differ from the weights'."""
    problem = icl.InContextProblem.sample(30, 200, 100, 20, 0.01, 0)
    model, plain = icl.OneLayer(problem, 5), icl.OneLayer(problem, 5)
    icl.train(model, 20, rate=0.01)
    weights = [plain.Q, plain.w]
    first, second = [torch.zeros_like(part) for part in weights], [torch.zeros_like(part) for part in weights]
    for t in range(1, 21):
        gradients = torch.autograd.grad(problem.moments().loss(plain.coefficients()), weights)
        for part, g, one, two in zip(weights, gradients, first, second, strict=True):
            one.mul_(0.9).add_(0.1 * g)
            two.mul_(0.999).add_(0.001 * g * g)
            with torch.no_grad():
                part.sub_(0.01 * (one / (1 - 0.9**t)) / ((two / (1 - 0.999**t)).sqrt() + 1e-8))
    assert model.gap() == pytest.approx(plain.gap(), rel=1e-6)
    assert model.gap() < 0.99 * icl.OneLayer(problem, 5).gap()


def test_sampled_training_tends_to_the_closed_form() -> None:
    """The same Adam on the population and on samples: nearer with larger batches from more samples."""
    problem = icl.InContextProblem.sample(5, 20, 8, 4, 0.01, 0)

    def ends(batches: icl.Batches | None = None) -> torch.Tensor:
        model = icl.OneLayer(problem, 8)
        icl.train(model, 40, rate=0.02, batches=batches)
        return model.coefficients().detach()

    exact = ends()
    away = [float((ends(icl.Batches(batch, 20 * batch)) - exact).norm()) for batch in (4, 2000)]
    assert away[1] < away[0] / 4
    with pytest.raises(InlayError, match="samples"):
        icl.Batches(9, 8)
    for broken in ({"rate": 0.0}, {"every": 0}):
        with pytest.raises(InlayError, match=r"rate|every"):
            icl.train(icl.OneLayer(problem, 2), 3, **broken)
