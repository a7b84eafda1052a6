"""The information losses against the same numbers written out one by one, in float64; their bound, their gradients."""

from __future__ import annotations

import inspect
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from inlay.methods.infoprompt import losses as info
from inlay.papers.infoprompt.explain.information import information_bound

SIZES = st.integers(1, 5)


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def info_nce(positive: torch.Tensor, negatives: torch.Tensor, valid: torch.Tensor | None = None) -> torch.Tensor:
    return info.nce(info.all_scores(positive, negatives, valid))


def head_nce(prompts: torch.Tensor, *others: Any) -> torch.Tensor:
    return info.nce(info.head_scores(prompts.mean(1), *others))


def representation_nce(prompts: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
    return info.nce(info.representation_scores(prompts.mean(1), *others))


def plain_nce(positive: float, negatives: list[float]) -> float:
    """log(exp(l_1) / sum exp(l_k)), the positive in the sum."""
    return math.log(math.exp(positive) / sum(math.exp(score) for score in (positive, *negatives)))


@settings(max_examples=20, deadline=None)
@given(rows=SIZES, tokens=SIZES, context=SIZES, d=SIZES, h=SIZES, classes=SIZES, seed=st.integers(0, 99))
def test_the_head_loss_is_as_written_out(
    rows: int, tokens: int, context: int, d: int, h: int, classes: int, seed: int
) -> None:
    prompts, theta, w1 = numbers(rows, tokens, d, seed=seed), numbers(classes, h, seed=seed + 1), numbers(d, h, seed=3)
    negatives = numbers(rows, context, d, seed=seed + 2)
    valid = numbers(rows, context, seed=seed + 4) > 0
    found = head_nce(prompts, theta, negatives, valid, w1)
    mean_theta = [sum(float(theta[c, j]) for c in range(classes)) / classes for j in range(h)]

    def score(p: torch.Tensor) -> float:
        return sum(float(p[i]) * float(w1[i, j]) * mean_theta[j] for i in range(d) for j in range(h))

    for row in range(rows):
        mean = sum(prompts[row, i] for i in range(tokens)) / tokens
        wanted = plain_nce(score(mean), [score(negatives[row, k]) for k in range(context) if valid[row, k]])
        assert float(found[row]) == pytest.approx(wanted, abs=1e-10)


@settings(max_examples=20, deadline=None)
@given(rows=SIZES, tokens=SIZES, count=SIZES, d=SIZES, h=SIZES, seed=st.integers(0, 99))
def test_the_representation_loss_is_as_written_out(
    rows: int, tokens: int, count: int, d: int, h: int, seed: int
) -> None:
    prompts, w2 = numbers(rows, tokens, d, seed=seed), numbers(d, h, seed=1)
    positive, negatives = numbers(rows, h, seed=seed + 2), numbers(rows, count, h, seed=seed + 3)
    found = representation_nce(prompts, positive, negatives, w2)

    def score(row: int, z: torch.Tensor) -> float:
        mean = prompts[row].sum(0) / tokens
        return sum(float(mean[i] * w2[i, j] * z[j]) for i in range(d) for j in range(h)) / math.sqrt(d)

    for row in range(rows):
        wanted = plain_nce(score(row, positive[row]), [score(row, negatives[row, k]) for k in range(count)])
        assert float(found[row]) == pytest.approx(wanted, abs=1e-10)


@settings(max_examples=30, deadline=None)
@given(rows=SIZES, count=st.integers(1, 40), size=st.floats(0, 1e4), seed=st.integers(0, 99))
def test_no_bound_is_above_log_k(rows: int, count: int, size: float, seed: int) -> None:
    positive, negatives = size * numbers(rows, seed=seed), size * numbers(rows, count, seed=seed + 1)
    nce = info_nce(positive, negatives)
    assert torch.isfinite(nce).all()
    assert (nce <= 0).all()
    assert (information_bound(nce, negatives=count) <= math.log(count + 1) + 1e-12).all()
    best = info_nce(positive + 1e6, negatives)  # nothing tells them apart better
    assert torch.allclose(information_bound(best, negatives=count), torch.full_like(best, math.log(count + 1)))


@settings(max_examples=20, deadline=None)
@given(rows=SIZES, count=st.integers(1, 40), size=st.floats(0, 1e3), seed=st.integers(0, 99))
def test_the_loss_is_the_mean_of_what_texts_come_to(rows: int, count: int, size: float, seed: int) -> None:
    positive, negatives = size * numbers(rows, seed=seed), size * numbers(rows, count, seed=seed + 1)
    valid = numbers(rows, count, seed=seed + 2) > 0
    scores = info.all_scores(positive, negatives, valid).requires_grad_()
    assert scores.shape == (rows, count + 1)
    found, wanted = info.nce_loss(scores), -info_nce(positive, negatives, valid).mean()
    torch.testing.assert_close(found, wanted)
    found.backward()
    assert scores.grad is not None
    assert scores.grad.isfinite().all(), "also where a negative does not count"
    assert (scores.grad[:, 1:][~valid] == 0).all()


def test_a_text_with_fewer_tokens_has_the_smaller_bound_and_one_without_any_no_information() -> None:
    valid = torch.tensor([[True, True, True], [True, False, False], [False, False, False]])
    nce = info_nce(torch.full((3,), 50.0).double(), torch.zeros(3, 3).double(), valid)
    bounds = information_bound(nce, valid)
    assert bounds.tolist() == pytest.approx([math.log(4), math.log(2), 0.0])


def test_what_cannot_be_told_apart_carries_no_information() -> None:
    nce = info_nce(torch.zeros(5).double(), torch.zeros(5, 31).double())
    assert nce.tolist() == pytest.approx([-math.log(32)] * 5)
    assert information_bound(nce, negatives=31).abs().max() < 1e-12


def test_negatives_are_different_usable_tokens_and_as_many_as_there_are() -> None:
    embedded = torch.arange(24, dtype=torch.float64).reshape(2, 12, 1)
    usable = torch.zeros(2, 12, dtype=torch.bool)
    usable[0, 2:9] = True
    usable[1, 5:7] = True
    drawn = set()
    for seed in range(20):
        tokens, valid = info.sample_context(embedded, usable, 4, torch.Generator().manual_seed(seed))
        first, second = (tokens[row][valid[row]].flatten().tolist() for row in range(2))
        assert len(first) == len(set(first)) == 4
        assert set(first) <= set(range(2, 9))
        assert sorted(second) == [17.0, 18.0]
        drawn |= set(first)
    assert drawn == set(range(2, 9)), "every token has its turn"
    tokens, valid = info.sample_context(embedded, usable, 1000)
    assert tokens.shape == (2, 12, 1)
    assert valid.sum(1).tolist() == [7, 2]


def test_gradients_reach_what_they_should_and_nothing_else() -> None:
    def leaf(*shape: int) -> torch.Tensor:
        return numbers(*shape, seed=sum(shape)).requires_grad_()

    prompts, theta, tokens, w1 = leaf(3, 2, 4), leaf(5, 6), leaf(3, 7, 4), leaf(4, 6)
    head_nce(prompts, theta, tokens, None, w1).sum().backward()
    assert all(each.grad is not None and each.grad.abs().sum() > 0 for each in (prompts, theta, w1))
    assert tokens.grad is None, "the embeddings are frozen"
    prompts, z, others, w2 = leaf(3, 2, 4), leaf(3, 6), leaf(3, 7, 6), leaf(4, 6)
    representation_nce(prompts, z, others, w2).sum().backward()
    assert all(each.grad is not None and each.grad.abs().sum() > 0 for each in (prompts, z, others, w2))


def test_gradients_are_those_of_differences() -> None:
    prompts, theta, w1 = (numbers(*s, seed=len(s)).requires_grad_() for s in ((2, 2, 3), (3, 2), (3, 2)))
    tokens = numbers(2, 4, 3)
    valid = torch.tensor([[True, True, False, True], [True, False, False, False]])
    assert torch.autograd.gradcheck(lambda p, t, w: head_nce(p, t, tokens, valid, w), (prompts, theta, w1))
    z, others, w2 = (numbers(*s, seed=7 + len(s)).requires_grad_() for s in ((2, 2), (2, 4, 2), (3, 2)))
    assert torch.autograd.gradcheck(representation_nce, (prompts, z, others, w2))
    mean, log_deviation = numbers(2, 3, seed=1).requires_grad_(), numbers(2, 3, seed=2).requires_grad_()
    assert torch.autograd.gradcheck(lambda m, s: info.standard_kl(*info.gaussian(m, s)), (mean, log_deviation))


def test_samples_have_the_mean_and_the_deviation_they_are_asked_for() -> None:
    mean, deviation = info.gaussian(torch.tensor([[1.0, -2.0]]).double(), torch.tensor([[0.0, 50.0]]).double())
    assert deviation.tolist() == [[1.0, pytest.approx(math.exp(10))]]
    assert info.gaussian(mean, torch.full((1, 2), -9.0).double())[1].tolist() == [[pytest.approx(math.exp(-2))] * 2]
    drawn = info.sample(mean, torch.tensor([[1.0, 3.0]]).double(), 40_000, torch.Generator().manual_seed(0))
    assert drawn.shape == (1, 40_000, 2)
    torch.testing.assert_close(drawn.mean(1), mean, atol=0.05, rtol=0)
    torch.testing.assert_close(drawn.std(1), torch.tensor([[1.0, 3.0]]).double(), atol=0.05, rtol=0)
    assert info.sample(mean, deviation).shape == (1, 2)


def test_the_kl_is_that_of_torch() -> None:
    mean, deviation = numbers(4, 3), numbers(4, 3, seed=1).exp()
    normal = torch.distributions.Normal
    wanted = torch.distributions.kl_divergence(normal(mean, deviation), normal(0.0, 1.0)).mean(-1)
    torch.testing.assert_close(info.standard_kl(mean, deviation), wanted)


def test_no_function_takes_a_label() -> None:
    for _, function in inspect.getmembers(info, inspect.isfunction):
        assert not {"label", "labels", "target", "y"} & set(inspect.signature(function).parameters)


def test_the_head_loss_pulls_at_all_class_vectors_alike() -> None:
    """It changes no prediction by itself: all scores of a text move by the same."""
    theta = numbers(5, 4, seed=1).requires_grad_()
    head_nce(numbers(3, 2, 4), theta, numbers(3, 7, 4, seed=2), None, numbers(4, 4, seed=3)).mean().backward()
    assert theta.grad is not None
    assert theta.grad.abs().sum() > 0
    torch.testing.assert_close(theta.grad, theta.grad[:1].expand_as(theta))
