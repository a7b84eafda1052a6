"""The losses of vectors against plain sums in float64, and their gradients."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from inlay.tasks.encode import IGNORED
from inlay.training.contrastive import in_batch_loss, ranking_loss


def unit(count: int, seed: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    vectors = torch.randn(count, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return torch.nn.functional.normalize(vectors, dim=-1).to(dtype)


def relations(rows: int, columns: int, seed: int) -> torch.Tensor:
    """Each anchor's own positive, and what is a negative of it or is left out at random."""
    drawn = torch.rand(rows, rows * columns, generator=torch.Generator().manual_seed(seed))
    found = torch.where(drawn < 0.3, IGNORED, 0)
    found[torch.arange(rows), torch.arange(rows)] = 1
    return found


@settings(deadline=None, max_examples=30)
@given(
    rows=st.integers(1, 7),
    columns=st.integers(1, 3),
    seed=st.integers(0, 99),
    temperature=st.sampled_from([0.01, 0.05, 1.0]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_in_batch_loss(rows: int, columns: int, seed: int, temperature: float, dtype: torch.dtype) -> None:
    vectors, labels = unit(rows * (1 + columns), seed), relations(rows, columns, seed)
    wanted = []
    for i in range(rows):
        cosines = [
            math.fsum(a * b for a, b in zip(vectors[i].tolist(), c.tolist(), strict=True)) for c in vectors[rows:]
        ]
        left = [s / temperature for s, label in zip(cosines, labels[i].tolist(), strict=True) if label != IGNORED]
        top = max(left)
        wanted.append(top + math.log(math.fsum(math.exp(s - top) for s in left)) - cosines[i] / temperature)
    found = in_batch_loss(vectors.to(dtype), labels, temperature)
    assert float(found) == pytest.approx(
        math.fsum(wanted) / rows, rel=1e-3 if dtype == torch.float32 else 1e-9, abs=1e-4
    )


@settings(deadline=None, max_examples=30)
@given(rows=st.integers(1, 7), seed=st.integers(0, 99), temperature=st.sampled_from([0.05, 1.0]))
def test_ranking_loss(rows: int, seed: int, temperature: float) -> None:
    vectors = unit(2 * rows, seed)
    scores = torch.randint(0, 4, (rows,), generator=torch.Generator().manual_seed(seed)).double()
    cosines = [float(vectors[i] @ vectors[rows + i]) for i in range(rows)]
    wanted = 0.0
    for i in range(rows):
        for j in range(rows):
            if scores[i] < scores[j]:
                wanted += math.exp((cosines[i] - cosines[j]) / temperature)
    assert float(ranking_loss(vectors, scores, temperature)) == pytest.approx(math.log1p(wanted))


def test_gradients_are_checked_and_finite_where_everything_else_is_left_out() -> None:
    vectors = unit(9, 1).requires_grad_()
    labels = relations(3, 2, 1)
    assert torch.autograd.gradcheck(lambda v: in_batch_loss(v, labels, 0.5), vectors)
    assert torch.autograd.gradcheck(lambda v: ranking_loss(v[:8], torch.tensor([1.0, 3, 2, 2]), 0.5), vectors)
    alone = torch.full((1, 1), 1)
    (gradient,) = torch.autograd.grad(in_batch_loss(vectors[:2], alone, 0.05), vectors)
    assert torch.equal(gradient, torch.zeros_like(gradient))
    (gradient,) = torch.autograd.grad(ranking_loss(vectors[:4], torch.ones(2), 0.05), vectors)
    assert torch.equal(gradient, torch.zeros_like(gradient))
