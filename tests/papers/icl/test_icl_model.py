"""The one-layer transformer against loops, Monte Carlo and autograd, and what a problem refuses."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from inlay.errors import InlayError
from inlay.papers.icl import theory as icl
from inlay.papers.icl.theory import ridge


def started(problem: icl.InContextProblem, heads: int, seed: int = 0) -> icl.OneLayer:
    """A model with weights that are not zero, so that every term of the gradient shows."""
    model = icl.OneLayer(problem, heads, seed=seed)
    draws = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        model.w.copy_(torch.randn(model.w.shape, generator=draws, dtype=torch.float64))
    return model


def plain(model: icl.OneLayer, y: Tensor) -> Tensor:
    """(8), one head and one token at a time."""
    problem, found = model.problem, []
    for k in range(problem.K):
        a = torch.zeros(problem.N, dtype=torch.float64)
        for h in range(model.heads):
            scores = torch.stack([problem.tokens[j] @ model.Q[h] @ problem.tokens[k] for j in range(problem.N)])
            weights = scores.exp() / scores.exp().sum()
            a = a + model.w[h, k] * weights
        found.append(y[: problem.N] @ a)
    return torch.stack(found)


shapes = st.tuples(st.integers(1, 4), st.integers(0, 4), st.integers(2, 4), st.integers(1, 4), st.integers(1, 5))


@given(shapes, st.sampled_from([0.0, 0.3]), st.integers(0, 99))
@settings(max_examples=12, deadline=None)
def test_forward_and_gradient(shape: tuple[int, ...], tau: float, seed: int) -> None:
    """The forward is (8); the closed-form gradient is autograd's, of the population's and of a batch's loss."""
    N, more, d, m, heads = shape
    problem = icl.InContextProblem.sample(N, N + more, d, m, tau, seed)
    model = started(problem, heads, seed)
    prompts = problem.prompts(7, seed)
    predicted = model(prompts.shown)
    torch.testing.assert_close(predicted[0], plain(model, prompts.y[0]))
    by_hand = ((predicted - prompts.y) ** 2).mean() / 2
    torch.testing.assert_close(prompts.moments().loss(model.coefficients()), by_hand)
    for moments in (problem.moments(), prompts.moments()):
        model.zero_grad()
        expected = torch.autograd.grad(moments.loss(model.coefficients()), [model.Q, model.w])
        a = model.step(moments)
        torch.testing.assert_close([model.Q.grad, model.w.grad], list(expected))
        torch.testing.assert_close(a, model.coefficients().detach())


def test_gradcheck() -> None:
    problem = icl.InContextProblem.sample(2, 3, 2, 2, 0.1, 0)
    model = started(problem, 2)

    def loss(Q: Tensor, w: Tensor) -> Tensor:
        a = torch.func.functional_call(model, {"Q": Q, "w": w}, torch.eye(2, dtype=torch.float64))
        return problem.moments().loss(a)

    assert torch.autograd.gradcheck(loss, (model.Q, model.w))


@pytest.mark.parametrize("tasks", [icl.IN_DOMAIN, icl.OUT_OF_DOMAIN])
def test_the_population_loss_is_the_mean_over_prompts(tasks: icl.TaskDistribution) -> None:
    """Monte Carlo with `eps_k` drawn whole: within five standard errors."""
    problem = replace(icl.InContextProblem.sample(3, 6, 3, 4, 0.5, 0), tasks=tasks)
    model = started(problem, 3)
    draws = torch.Generator().manual_seed(0)
    count = 40_000
    lam = tasks.mean + tasks.variance**0.5 * torch.randn(count, 4, generator=draws, dtype=torch.float64)
    noise = 0.5**0.5 * torch.randn(count, 6, 4, generator=draws, dtype=torch.float64)
    y = torch.einsum("bm,bkm->bk", lam, problem.features + noise)
    losses = ((model(y[:, :3]) - y) ** 2).mean(1).detach() / 2
    error = float(losses.std()) / math.sqrt(count)
    assert abs(float(losses.mean()) - model.population_loss()) < 5 * error
    drawn = problem.prompts(count, 1).moments()
    assert abs(float(drawn.loss(model.coefficients().detach())) - model.population_loss()) < 5 * error


@given(shapes, st.sampled_from([0.0, 0.01, 1.0]), st.integers(0, 99))
@settings(max_examples=15, deadline=None)
def test_the_infimum_is_reached_at_the_ridge_solution(shape: tuple[int, ...], tau: float, seed: int) -> None:
    """Lemma 5: L = 1/(2K) sum |Zbar delta|^2 + L*; (34) = (66); A^T y is y* of (20), solved here as least squares."""
    N, more, d, m, heads = shape
    problem = icl.InContextProblem.sample(N, N + more, d, m, tau, seed)
    model, moments = started(problem, heads, seed), problem.moments()
    A = moments.minimiser()
    torch.testing.assert_close(float(moments.loss(A)), problem.infimum(), atol=1e-9, rtol=1e-7)
    torch.testing.assert_close(model.gap() + problem.infimum(), model.population_loss(), atol=1e-9, rtol=1e-7)
    if tau > 0:
        torch.testing.assert_close(A, ridge.star(problem), atol=1e-8, rtol=1e-7)
        y = problem.prompts(1, seed).shown[0]
        rows = torch.cat([problem.Z.T, math.sqrt(m * tau) * torch.eye(m, dtype=torch.float64)])
        lam = torch.linalg.lstsq(rows, torch.cat([y, y.new_zeros(m)])[:, None], driver="gelsd").solution[:, 0]
        torch.testing.assert_close(ridge.solution(problem, y[None], m * tau)[0], lam, atol=1e-8, rtol=1e-7)
        torch.testing.assert_close(y @ A, torch.cat([y, problem.ZQ.T @ lam]), atol=1e-8, rtol=1e-7)


def test_without_noise_labels_are_recovered() -> None:
    """(26): tau = 0 and N >= m, by the pseudo-inverse."""
    problem = icl.InContextProblem.sample(6, 12, 3, 4, 0.0, 0)
    prompts = problem.prompts(5, 0)
    torch.testing.assert_close(prompts.shown @ problem.moments().minimiser(), prompts.y)
    assert abs(problem.infimum()) < 1e-12


def test_lemma_4() -> None:
    """E_eps of (24) is (25): fresh noise on the inputs is a ridge of strength N tau / N."""
    problem = icl.InContextProblem.sample(4, 6, 3, 3, 0.7, 0)
    y = problem.prompts(1, 0).shown[0]
    lam = torch.tensor([0.3, -1.0, 0.5], dtype=torch.float64)
    noise = 0.7**0.5 * torch.randn(200_000, 4, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    sampled = ((y - (problem.Z.T + noise) @ lam) ** 2).mean() / 2
    expected = ((y - problem.Z.T @ lam) ** 2).mean() / 2 + 0.7 / 2 * lam.square().sum()
    assert abs(float(sampled - expected)) < 0.02
    best = ridge.solution(problem, y[None], problem.N * problem.tau)[0]

    def objective(lam: Tensor) -> Tensor:
        return ((y - problem.Z.T @ lam) ** 2).mean() / 2 + 0.7 / 2 * lam.square().sum()

    assert float(torch.autograd.functional.jacobian(objective, best).abs().max()) < 1e-12


def test_memory_and_time_of_a_step() -> None:
    """No tensor above `H max(d^2, K N)` numbers, and `4 H N d (d + K)` operations but for the small `S Ahat`."""
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils.flop_counter import FlopCounterMode

    class Largest(TorchDispatchMode):
        seen = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            found = func(*args, **(kwargs or {}))
            if isinstance(found, Tensor):
                self.seen = max(self.seen, found.numel())
            return found

    N, K, d, H = 6, 40, 12, 30
    model = started(icl.InContextProblem.sample(N, K, d, 5), H)
    with Largest() as largest, FlopCounterMode(display=False) as counted:
        model.step()
    assert largest.seen == H * max(d * d, K * N)
    assert counted.get_total_flops() == 4 * H * N * d * (d + K) + 2 * N * N * K


def test_one_dtype_lower_is_the_same() -> None:
    problem = icl.InContextProblem.sample(5, 20, 8, 4, 0.01, 0)
    pair = [icl.OneLayer(problem, 6, dtype=dtype) for dtype in (torch.float64, torch.float32)]
    gaps = [icl.train(model, 30, rate=0.01).gap[-1] for model in pair]
    assert gaps[0] == pytest.approx(gaps[1], rel=1e-3)


def test_a_user_function_and_a_table_of_values() -> None:
    tokens = torch.randn(9, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    by_function = icl.InContextProblem.of(tokens, lambda v: torch.cat([v, v.square()], 1), N=4)
    assert (by_function.m, by_function.K, by_function.d) == (6, 9, 3)
    by_table = icl.InContextProblem.of(tokens, torch.cat([tokens, tokens.square()], 1), N=4, m=6)
    assert by_function.infimum() == by_table.infimum()
    sampled = icl.InContextProblem.sample(4, 9, 3, None, f=torch.sin)
    assert sampled.m == 3


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"N": 9, "K": 8}, "N = 9, K = 8"),
        ({"N": 0}, "N = 0"),
        ({"m": 0}, "m = 0"),
        ({"d": 0}, "d = 0"),
        ({"K": 0}, "K = 0"),
        ({"tau": -0.1}, "tau = -0.1"),
        ({"tau": math.nan}, "tau = nan"),
        ({"d": 1, "unit": True}, "only two"),
        ({"f": lambda v: v[:, 0], "m": None}, "(8, m)"),
        ({"f": lambda v: v[:3], "m": None}, "(8, m)"),
        ({"f": torch.sin, "m": 5}, "(8, 5)"),
        ({"f": lambda v: v * math.nan, "m": 3}, "representation of token 1"),
        ({"f": lambda v: v.tolist(), "m": 3}, "list"),
    ],
)
def test_bad_problems_are_told(settings: dict, words: str) -> None:
    with pytest.raises(InlayError) as told:
        icl.InContextProblem.sample(**{"N": 4, "K": 8, "d": 3, "m": 2, **settings})
    assert words in str(told.value)


def test_repeated_tokens_and_no_heads_are_told() -> None:
    tokens = torch.eye(3)[[0, 1, 1]]
    with pytest.raises(InlayError, match="1 of the 3 tokens repeat"):
        icl.InContextProblem.of(tokens, torch.ones(3, 2), N=2)
    problem = icl.InContextProblem.sample(4, 8, 3, 2)
    for broken in ({"heads": 0}, {"heads": 2, "beta": 0.0}):
        with pytest.raises(InlayError, match=r"heads|beta"):
            icl.OneLayer(problem, **broken)
    with pytest.raises(InlayError, match="variance"):
        icl.TaskDistribution(variance=-1)
    with pytest.raises(InlayError, match="0 prompts"):
        problem.prompts(0, 0)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_same_on_cuda() -> None:
    problem = icl.InContextProblem.sample(5, 20, 8, 4, 0.01, 0)
    gaps = [icl.train(icl.OneLayer(problem.to(device), 6), 30, rate=0.01).gap[-1] for device in ("cpu", "cuda")]
    assert gaps[0] == pytest.approx(gaps[1], rel=1e-9)
