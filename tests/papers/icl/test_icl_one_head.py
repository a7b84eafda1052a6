"""Section 3.3: the bound on what one head can reach."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.optimize import lsq_linear

from inlay.papers.icl.theory.lab.one_head import drawn, least_gap, one_signed
from inlay.papers.icl.theory.model import OneLayer


@pytest.mark.parametrize("seed", [0, 7, 40])
def test_the_bound_is_the_loss_of_the_best_coefficients_of_one_sign(seed: int) -> None:
    problem = drawn(seed)
    moments = problem.moments()
    found = one_signed(problem)
    assert ((found >= 0).all(0) | (found <= 0).all(0)).all()
    assert least_gap(problem) == pytest.approx(float(moments.loss(found)) - moments.infimum(), rel=1e-9)
    # Another solver, with the square root of S by its eigenvectors.
    values, vectors = torch.linalg.eigh(moments.S)
    root, wanted = values.sqrt()[:, None] * vectors.mT, (vectors / values.sqrt()).mT @ moments.C
    total = 0.0
    for k in range(problem.K):
        ends = [lsq_linear(root.numpy(), sign * wanted[:, k].numpy(), bounds=(0, np.inf)).fun for sign in (1, -1)]
        total += min(float(end @ end) for end in ends)
    assert least_gap(problem) == pytest.approx(total / (2 * problem.K), rel=1e-5)


@pytest.mark.parametrize("seed", [0, 7, 40])
def test_no_head_comes_below_it(seed: int) -> None:
    """The best w of many Q: of one head a column's loss is a parabola in its weight."""
    problem = drawn(seed)
    least, gaps = least_gap(problem), []
    for start in range(200):
        model = OneLayer(problem, 1, beta=3.0, seed=start)
        shapes = model.attention()[0]
        with torch.no_grad():
            model.w[0] = (shapes * model.C).sum(0) / (shapes * (model.S @ shapes)).sum(0)
        gaps.append(model.gap())
    assert min(gaps) >= least
    assert min(gaps) < 20 * least  # it is no empty bound
