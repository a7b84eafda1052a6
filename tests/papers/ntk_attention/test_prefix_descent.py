"""Gradient descent on the stylised network, the theorem's constants, and the drift of the kernel."""

from __future__ import annotations

import math

import pytest
import torch

from inlay.errors import InlayError
from inlay.papers.ntk_attention.theory import (
    PrefixConstants,
    descend,
    draw,
    drift,
    predict,
    printed_kernel,
    random_drift,
    spectrum,
    true_kernel,
    usable_step,
    worst_drift,
)


def test_descent_is_equation_8() -> None:
    """Against autograd, step by step."""
    start = draw(6, 2, 3, seed=1)
    found = descend(start, 1e-3, 3)
    W = start.W.clone()
    for t in range(4):
        weights = W.clone().requires_grad_()
        loss = (predict(weights, start.x, start.a) - start.y).square().sum()
        assert float(found.losses[t]) == pytest.approx(float(loss.detach()), rel=1e-12)
        (pull,) = torch.autograd.grad(loss / 2, weights)
        if t < 3:
            W = W - 1e-3 * pull
    torch.testing.assert_close(found.W, W)
    torch.testing.assert_close(found.moved, (W - start.W).norm(dim=0))


def test_step_decay_and_line_against_loops() -> None:
    start = draw(16, 2, 2, seed=0)
    kernel = true_kernel(start.W, start.x, start.a)
    step = usable_step(kernel, 16, 0.5)
    assert step * 16 * float(torch.linalg.norm(kernel, 2)) == pytest.approx(0.5)
    found = descend(start, step, 5)
    least = float(spectrum(kernel)[0])
    r = start.residual
    for t in range(6):
        bound = (1 - 16 * step * least / 2) ** t * float(found.losses[0])
        assert float(found.decay(least)[t]) == pytest.approx(bound)
        assert float(found.linearised(kernel)[t]) == pytest.approx(float(r.square().sum()), rel=1e-9)
        r = r - 16 * step * kernel @ r


def test_a_tiny_step_follows_the_true_kernel_and_not_the_printed_one() -> None:
    start = draw(64, 3, 2, seed=2)
    where = (start.W, start.x, start.a)
    step = usable_step(true_kernel(*where), 64, 1e-5)
    found = descend(start, step, 1)
    fall = float(found.losses[0] - found.losses[1])

    def line(kernel: torch.Tensor) -> float:
        losses = found.linearised(kernel)
        return float(losses[0] - losses[1])

    assert fall == pytest.approx(line(true_kernel(*where)), rel=1e-4)
    assert fall != pytest.approx(line(printed_kernel(*where)), rel=0.1)


def test_the_decay_holds_with_the_true_least_eigenvalue_and_fails_with_the_printed_one() -> None:
    """Lemma M.4 on short inputs along the axes; half the step is of no help."""
    start = draw(256, 3, 3, seed=1, inputs="axes", length=0.25)
    where = (start.W, start.x, start.a)
    printed, true = (float(spectrum(kernel(*where))[0]) for kernel in (printed_kernel, true_kernel))
    assert 4 * true < printed
    for c, steps in ((1.0, 2500), (0.5, 5000)):
        found = descend(start, usable_step(true_kernel(*where), 256, c), steps)
        assert len(found.above(printed)) > 0
        assert len(found.above(true)) == 0


def test_on_unit_inputs_the_decay_holds_at_every_step() -> None:
    start = draw(256, 4, 3, seed=0)
    where = (start.W, start.x, start.a)
    found = descend(start, usable_step(true_kernel(*where), 256), 1000)
    assert len(found.above(float(spectrum(printed_kernel(*where))[0]))) == 0
    assert float(found.losses[-1]) < 1e-3 * float(found.losses[0])


def test_the_theorems_constants() -> None:
    asked = PrefixConstants(4, 3, 1024, 0.4)
    B = 10 * math.sqrt(math.log(12 / 0.05))
    assert pytest.approx(B) == asked.B
    assert asked.step == pytest.approx(math.log10(0.4 / (1024 * 144)) - 16 * B / math.log(10))
    width = math.log10(144 / 0.16 * math.sqrt(math.log(12 / 0.05)))
    assert asked.needed_width == pytest.approx(width + 30 * B / math.log(10))
    assert asked.drift(0.01) == pytest.approx(math.log10(0.08 * math.sqrt(12)) + 22 * B / math.log(10))
    assert asked.step < -100


@pytest.mark.parametrize("kernel", ["printed", "true"])
def test_drift_is_of_order_r_and_ascent_finds_more_than_chance(kernel: str) -> None:
    problem = draw(32, 2, 2, seed=4)
    found = {radius: worst_drift(problem, radius, steps=5, kernel=kernel) for radius in (1e-4, 1e-3)}
    assert found[1e-3] / found[1e-4] == pytest.approx(10, rel=0.05)
    assert found[1e-3] > 1.2 * random_drift(problem, 1e-3, draws=5, kernel=kernel)


def test_drift_moves_every_column_by_r() -> None:
    problem = draw(8, 2, 2, seed=4)
    direction = torch.full_like(problem.W, 3.0)
    moved = problem.W + 0.1 * math.sqrt(0.5)
    change = printed_kernel(moved, problem.x, problem.a) - printed_kernel(problem.W, problem.x, problem.a)
    assert drift(problem, direction, 0.1) == pytest.approx(float(change.norm()))


def test_bad_numbers_are_told() -> None:
    problem = draw(8, 2, 2)
    kernel = true_kernel(problem.W, problem.x, problem.a)
    with pytest.raises(InlayError, match="above 0"):
        usable_step(kernel, 8, 0.0)
    with pytest.raises(InlayError, match="from 1 on"):
        descend(problem, 0.1, 0)
    with pytest.raises(InlayError, match="radius above 0"):
        worst_drift(problem, 0.0)
