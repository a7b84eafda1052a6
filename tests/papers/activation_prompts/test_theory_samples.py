"""Theorem 1's experiment: that it trains what it says, counts as it says, and tells a claim that fails."""

from __future__ import annotations

import math

import pytest
import torch

from inlay.errors import InlayError
from inlay.papers.activation_prompts.theory import (
    SampleSetting,
    TwoLayerViT,
    expected_push,
    hinge,
    with_expected_gradient,
    with_sgd,
)
from inlay.papers.activation_prompts.theory.lab import Needed, _orders, lemma_1, proposition_1, theorem_1
from inlay.papers.activation_prompts.theory.samples import Since
from inlay.papers.findings import exponent


def all_images(model: TwoLayerViT) -> tuple[torch.Tensor, torch.Tensor]:
    """Every noise-free image: two labels, two backgrounds, P places."""
    tokens = model.data.tokens
    telling, background, place = torch.cartesian_prod(torch.arange(2), torch.arange(2, 4), torch.arange(tokens)).unbind(
        -1
    )
    return model.data.images(telling, background[:, None], place, torch.Generator()), 1.0 - 2.0 * telling.double()


@pytest.mark.parametrize("layer", [1, 2])
def test_expected_gradient_is_descent_on_all_images(layer: int) -> None:
    """A prompt a position, trained plainly on every image at once: the same step counts as the shortcut's."""
    tokens, setting = 6, SampleSetting(beta=1.8, step=2.0, batch=1)
    model = setting.model(tokens, noise=False)
    x, labels = all_images(model)
    delta = torch.zeros(tokens, 4, dtype=torch.float64, requires_grad=True)
    error = risk = None
    for step in range(2000):
        margins = labels * model(x, delta, layer)
        error = (step if error is None else error) if margins.min() > 0 else None
        if margins.min() >= (1 - 1e-9) / tokens:
            risk = step
            break
        hinge(model(x, delta, layer), labels, tokens).mean().backward()
        with torch.no_grad():
            delta -= setting.step * delta.grad
            delta.grad = None
    assert error is not None
    assert risk is not None
    torch.testing.assert_close(delta, delta[:1].expand_as(delta), msg="all positions alike")
    (found,) = with_expected_gradient(setting, [tokens], layer)
    assert (found.error, found.risk, found.spent) == (error, risk, risk)
    assert found.norm == pytest.approx(float(delta[0].detach().norm()))


def test_expected_gradient_does_not_depend_on_its_neighbours_and_gives_up() -> None:
    setting = SampleSetting(batch=1)
    together = with_expected_gradient(setting, [8, 12], 2)
    assert together == [with_expected_gradient(setting, [tokens], 2)[0] for tokens in (8, 12)]
    (given_up,) = with_expected_gradient(setting, [12], 2, most_steps=20)
    assert (given_up.error, given_up.risk, given_up.spent) == (None, None, 20)


@pytest.mark.parametrize("layer", [1, 2])
def test_sgd_reaches_zero_error(layer: int) -> None:
    setting = SampleSetting(held_out=256)
    found = with_sgd(setting, 8, layer, seeds=2)
    assert [needed.seed for needed in found] == [0, 1]
    for needed in found:
        assert needed.error is not None
        assert 0 < needed.error < needed.spent / 2 + setting.batch, "kept for as long again"
        assert needed.error % setting.batch == 0
    (alone,) = with_sgd(setting, 8, layer, seeds=1)
    assert (alone.error, alone.spent) == (found[0].error, found[0].spent), "a seed's result is its own"
    assert alone.norm == pytest.approx(found[0].norm)
    assert found[0].error != found[1].error or found[0].spent != found[1].spent


def test_sgd_to_zero_risk_and_what_it_cannot_reach() -> None:
    (found,) = with_sgd(SampleSetting(goal="risk", held_out=64, noise=0.02), 16, 1, seeds=1)
    assert found.risk is not None
    assert found.error is not None
    assert found.error <= found.risk
    # beta = 1: no prompt at layer 2 reaches the margin, exp(1) < 4.
    setting = SampleSetting(beta=1.0, goal="risk", held_out=64, budget=2)
    (lost,) = with_sgd(setting, 8, 2, seeds=1)
    assert lost.risk is None
    assert lost.spent == setting.batch * setting.most_steps(8)


@pytest.mark.parametrize(("beta_squared", "reached"), [(1.3, False), (2.4, True)])
def test_margin_at_layer_2_needs_a_sharp_first_layer(beta_squared: float, reached: bool) -> None:
    """Attention all on the telling token gives f = lambda_1 / 4: 1/P only if exp(beta^2) >= 4 (P - 1)/(P - 4)."""
    tokens = 12
    setting = SampleSetting(beta=math.sqrt(beta_squared))
    assert (math.exp(beta_squared) >= 4 * (tokens - 1) / (tokens - 4)) == reached
    model = setting.model(tokens, noise=False)
    x, labels = all_images(model)
    strong = torch.tensor([1e3, 1e3, -1e4, -1e4], dtype=torch.float64)
    margins = labels * model(x, strong, 2)
    lambda_1 = math.exp(beta_squared) / (math.exp(beta_squared) + tokens - 1)
    assert margins.min().item() == pytest.approx(lambda_1 / 4)
    assert bool(margins.min() >= 1 / tokens) == reached


@pytest.mark.parametrize(
    ("layer", "later", "power"), [(1, (0.1, 0.1, -1.1, -1.905), 2), (2, (0.2, 0.2, -1.2, -1.2), 4)]
)
def test_the_push_weakens_once_both_classes_are_active(layer: int, later: tuple[float, ...], power: int) -> None:
    """At the start it is the proofs' 1/(16 P) (1/(4 P), and a quarter of the images); with background silenced and
    both e_1 and e_2 positive it is of order 1/P^2 at layer 1 and 1/P^4 at layer 2."""
    setting = SampleSetting()
    start = {tokens: float(expected_push(setting, tokens, layer, (0, 0, 0, 0))[0]) for tokens in (256, 512)}
    assert start[512] * 16 * 512 == pytest.approx(1, rel=0.02)
    assert math.log2(start[256] / start[512]) == pytest.approx(1, abs=0.05)
    push = [float(expected_push(setting, tokens, layer, later)[0]) for tokens in (512, 1024)]
    assert math.log2(push[0] / push[1]) == pytest.approx(power, abs=0.25)


def test_since_when() -> None:
    since = Since()
    for step, holds in ((0, True), (60, False), (70, True), (139, True)):
        since.see(step, holds)
    assert since.step == 70
    assert not since.kept(139)
    assert since.kept(140)


def test_exponent() -> None:
    sizes = [8, 16, 32, 64]
    exact = exponent(sizes, [3.0 * p**2.5 for p in sizes])
    assert (exact.slope, exact.low, exact.high) == pytest.approx((2.5, 2.5, 2.5))
    noisy = exponent(sizes * 2, [p * 1.2 for p in sizes] + [p / 1.2 for p in sizes])
    assert noisy.low < 1 < noisy.high
    assert noisy.slope == pytest.approx(1)
    with pytest.raises(InlayError, match="two different"):
        exponent([8, 8], [1, 2])


def made(
    order: dict[int, float], missing: bool = False, spreads: tuple[float, ...] = (0.97, 1.0, 1.03)
) -> list[Needed]:
    """Trainings that needed P^power samples, times a little that differs by seed."""
    return [
        Needed(
            layer, tokens, seed, None if missing and layer == 2 else round(1000 * tokens**power * spread), None, 0, 1.0
        )
        for layer, power in order.items()
        for tokens in (8, 16, 32)
        for seed, spread in enumerate(spreads)
    ]


def test_claims_can_hold_and_can_fail() -> None:
    near = 2 + math.log(math.log(32) / math.log(8)) / math.log(4)
    assert [claim.holds for claim in _orders("SGD", "error", made({1: 1.0, 2: near}), {})] == ["yes", "yes", "yes"]
    same = _orders("SGD", "error", made({1: 2.0, 2: 2.0}), {})
    assert [claim.holds for claim in same] == ["no", "no", "cannot tell"]
    turned = _orders("SGD", "error", made({1: 2.0, 2: 1.0}), {})
    assert [claim.holds for claim in turned] == ["no", "no", "no"]
    scattered = _orders("SGD", "error", made({1: 1.0, 2: near}, spreads=(0.1, 1.0, 10.0)), {})
    assert [claim.holds for claim in scattered] == ["cannot tell"] * 3
    lost = _orders("SGD", "error", made({1: 1.0, 2: 2.0}, missing=True), {})
    assert [claim.holds for claim in lost] == ["yes", "cannot tell", "cannot tell"]
    assert "9 of 9 not reached" in lost[1].measured


def test_experiments() -> None:
    first = proposition_1()
    assert {claim.holds for claim in first.claims} == {"yes"}
    assert all(len(row) == len(first.columns) for row in first.rows)
    second = lemma_1((3, 8, 16), images=50)
    assert [claim.holds for claim in second.claims] == ["yes", "yes", "no", "no"]
    begun: list[str] = []
    third = theorem_1(SampleSetting(held_out=64, background="mixed", budget=1), (4, 6), seeds=1, tick=begun.append)
    assert begun == [f"SGD, layer {layer}, P = {tokens}" for layer in (1, 2) for tokens in (4, 6)]
    assert len(third.rows) == 4


def test_bad_input_is_told() -> None:
    with pytest.raises(InlayError, match=r"'eror'.*error"):
        SampleSetting(goal="eror")
    with pytest.raises(InlayError, match="step = 0"):
        SampleSetting(step=0)
    with pytest.raises(InlayError, match="one background"):
        with_expected_gradient(SampleSetting(background="mixed"), [8], 1)
