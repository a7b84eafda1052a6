"""The two-layer ViT of the activation-prompt paper and Lemma 1, against loops over equations (A13) to (A22)."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from inlay.errors import InlayError
from inlay.papers.activation_prompts.theory import Data, TwoLayerViT, average_attention_distance, distances, hinge

few = settings(max_examples=15, deadline=None)


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def dot(a: list[float], b: list[float]) -> float:
    return math.fsum(x * y for x, y in zip(a, b, strict=True))


def looped_layer(queries: list, keys: list, beta: float, neurons: list) -> list[list[float]]:
    """`relu(W_O sum_s k_s softmax_s(beta^2 k_s . q_k))` for every query, a number at a time."""
    out = []
    for query in queries:
        weights = [math.exp(beta * beta * dot(key, query)) for key in keys]
        total = math.fsum(weights)
        mixed = [math.fsum(w / total * key[d] for w, key in zip(weights, keys, strict=True)) for d in range(len(query))]
        out.append([max(0.0, dot(neuron, mixed)) for neuron in neurons])
    return out


def looped_f(model: TwoLayerViT, x: Tensor, delta: Tensor, layer: int) -> float:
    """(A13) and (A14) for one image; the permutation takes token order[s] to position s."""
    v = model.data.patterns.tolist()
    tokens = len(x)
    values, neurons = x.tolist(), [v, torch.eye(4, dtype=torch.float64).tolist()]
    for number in (1, 2):
        order = model.order[number - 1]
        order = list(range(tokens)) if order is None else order.tolist()
        shift = delta.tolist() if number == layer else [[0.0] * 4] * tokens
        prompted = [[a + b for a, b in zip(t, d, strict=True)] for t, d in zip(values, shift, strict=True)]
        if model.prompt_stays:
            keys = [[a + b for a, b in zip(values[order[s]], shift[s], strict=True)] for s in range(tokens)]
        else:
            keys = [prompted[order[s]] for s in range(tokens)]
        values = looped_layer(prompted, keys, model.beta[number - 1], neurons[number - 1])
    return math.fsum(sum(z * sign for z, sign in zip(out, (1, -1, 1, -1), strict=True)) for out in values) / (
        4 * tokens
    )


@few
@given(
    tokens=st.integers(2, 6),
    layer=st.sampled_from([1, 2]),
    stays=st.booleans(),
    beta=st.tuples(st.floats(0.2, 2), st.floats(0.2, 2)),
    background=st.sampled_from(["one", "mixed"]),
    seed=st.integers(0, 10**6),
)
def test_network_is_the_printed_one(
    tokens: int, layer: int, stays: bool, beta: tuple[float, float], background: str, seed: int
) -> None:
    generator = seeded(seed)
    data = Data(tokens, sigma=0.2, zeta=-0.4, background=background)
    order = (torch.randperm(tokens, generator=generator), torch.randperm(tokens, generator=generator))
    model = TwoLayerViT(data, beta, order, prompt_stays=stays)
    x, labels = data.draw((3,), generator)
    delta = torch.randn(tokens, 4, generator=generator, dtype=torch.float64)
    output = model(x, delta, layer)
    wanted = [looped_f(model, image, delta, layer) for image in x]
    torch.testing.assert_close(output, torch.tensor(wanted, dtype=torch.float64), rtol=1e-10, atol=1e-12)
    losses = [max(0.0, 1 / tokens - float(y) * f) for y, f in zip(labels, wanted, strict=True)]
    torch.testing.assert_close(hinge(output, labels, tokens), torch.tensor(losses, dtype=torch.float64))
    if not stays:
        unmoved = TwoLayerViT(data, beta)(x, delta, layer)
        torch.testing.assert_close(output, unmoved, rtol=1e-12, atol=1e-14)


def test_a_prompt_that_stays_behind_is_another_function() -> None:
    data = Data(6, sigma=0.1)
    order = torch.arange(6).roll(1)
    x, _ = data.draw((2,), seeded(0))
    delta = torch.randn(6, 4, generator=seeded(1), dtype=torch.float64)
    moves, stays = (TwoLayerViT(data, order=(order, order), prompt_stays=stays)(x, delta) for stays in (False, True))
    assert float((moves - stays).abs().max()) > 1e-3


@pytest.mark.parametrize("layer", [1, 2])
def test_gradient_of_the_prompt(layer: int) -> None:
    data = Data(4, sigma=0.2)
    model = TwoLayerViT(data, (1.2, 1.2), (torch.tensor([2, 0, 3, 1]), None), prompt_stays=True)
    x, _ = data.draw((2,), seeded(3))
    delta = torch.randn(4, 4, generator=seeded(4), dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(lambda d: model(x, d, layer), (delta,))


def test_equal_tokens_may_be_counted() -> None:
    data = Data(7)
    model = TwoLayerViT(data, (1.3, 0.7))
    x = data.images(torch.tensor([0]), torch.tensor([[3]]), torch.tensor([2]), seeded(0))
    once = data.patterns[torch.tensor([[0, 3]])]
    delta = torch.tensor([0.3, 0.1, -0.2, -0.4], dtype=torch.float64)
    count = torch.tensor([1.0, 6.0], dtype=torch.float64)
    for layer in (1, 2):
        torch.testing.assert_close(model(x, delta, layer), model(once, delta, layer, count), rtol=1e-12, atol=1e-15)


def test_data_is_as_described() -> None:
    data = Data(5, sigma=0.01, zeta=-0.3)
    v = data.patterns
    gram = torch.eye(4, dtype=torch.float64)
    gram[2, 3] = gram[3, 2] = -0.3
    torch.testing.assert_close(v @ v.T, gram)
    x, labels = data.draw((4000,), seeded(0))
    kinds = torch.cdist(x, v).argmin(-1)
    telling = kinds < 2
    assert telling.sum(-1).eq(1).all()
    torch.testing.assert_close(labels, 1.0 - 2.0 * kinds[telling].double())
    background = kinds.masked_fill(telling, -1)
    assert (background.amax(-1) == torch.where(telling, 9, kinds).amin(-1)).all(), "one background an image"
    shares = torch.stack([labels.gt(0).double().mean(), background.amax(-1).eq(2).double().mean()])
    assert (shares - 0.5).abs().max() < 0.03
    assert telling.double().mean(0).sub(0.2).abs().max() < 0.03, "any place"
    assert abs(float((x - v[kinds]).std()) - 0.01) < 5e-4
    mixed, _ = Data(5, background="mixed").draw((50,), seeded(0))
    kinds = torch.cdist(mixed, v).argmin(-1)
    assert ((kinds == 2).any(-1) & (kinds == 3).any(-1)).any()


def looped_distance(queries: list, keys: list) -> float:
    """The nearest of the keys with the largest inner product; ties within rounding."""
    total = 0
    for i, query in enumerate(queries):
        scores = [dot(key, query) for key in keys]
        best = max(scores)
        total += min(abs(i - j) for j, score in enumerate(scores) if math.isclose(score, best, rel_tol=1e-10))
    return total / len(queries)


@few
@given(tokens=st.integers(4, 20), beta=st.floats(0.1, 2), data=st.data())
def test_lemma_1_for_any_permutation(tokens: int, beta: float, data: st.DataObject) -> None:
    """(A17) and (A22): only where the key of v_1 went matters, not what else the permutation does."""
    place = data.draw(st.integers(0, tokens - 1), label="place")
    generator = seeded(data.draw(st.integers(0, 10**6), label="seed"))
    orders = tuple(torch.randperm(tokens, generator=generator) for _ in range(2))
    d_a = abs(place - orders[0].tolist().index(place))
    model = TwoLayerViT(Data(tokens), (beta, beta), orders)
    x = model.data.images(torch.tensor([0]), torch.tensor([[3]]), torch.tensor([place]), generator)
    z = model.hidden(x)
    first, second = (average_attention_distance(*model.queries_keys(t, n)) for t, n in ((x, 1), (z, 2)))
    for found, t, n in ((first, x, 1), (second, z, 2)):
        queries, keys = model.queries_keys(t[0], n)
        assert float(found) == pytest.approx(looped_distance(queries.tolist(), keys.tolist()), abs=1e-12)
    if d_a >= 1:
        assert float(first) == pytest.approx((1 + d_a) / tokens, abs=1e-12)
    lambda_1 = math.exp(beta**2) / (math.exp(beta**2) + tokens - 1)
    lambda_2 = 1 / ((tokens - 1) * math.exp(beta**2) + 1)
    wanted = torch.zeros(tokens, 4, dtype=torch.float64)
    wanted[:, 0], wanted[:, 3] = lambda_2, 1 - lambda_2
    wanted[place, 0], wanted[place, 3] = lambda_1, 1 - lambda_1
    torch.testing.assert_close(z[0], wanted, rtol=1e-10, atol=1e-12, msg="(A18) and (A19)")
    if lambda_1 < 0.5 - 1e-6:
        assert float(second) == pytest.approx(1 / tokens, abs=1e-12)


def test_lemma_1_needs_its_hidden_condition() -> None:
    """The text after (A19) has lambda_1 < 1/2; that is exp(beta^2) < P - 1, and else layer 2 reaches as far."""
    held, broken = (distances(Data(8), d_a=3, beta=beta) for beta in (1.3, 1.5))
    assert (held.applies, broken.applies) == (True, False)
    assert (float(held.first), float(held.second)) == pytest.approx(held.claimed)
    assert float(broken.second) == pytest.approx(broken.claimed[0])
    assert float(broken.second) != pytest.approx(broken.claimed[1])


def test_noise_breaks_the_ties_that_lemma_1_needs() -> None:
    """With any noise the key with the largest product is anywhere: about P/3 away, in both layers."""
    found = distances(Data(30, sigma=0.1 / 30), d_a=2, images=300)
    assert found.claimed == pytest.approx((0.1, 1 / 30))
    for measured in (found.first, found.second):
        assert float(measured.mean()) == pytest.approx(10, rel=0.15)


def test_bad_input_is_told() -> None:
    with pytest.raises(InlayError, match="between -1 and 0"):
        Data(4, zeta=0.5)
    with pytest.raises(InlayError, match="at least 2"):
        Data(1)
    with pytest.raises(InlayError, match="cannot be negative"):
        Data(4, sigma=-1)
    with pytest.raises(InlayError, match=r"'mixes'.*mixed"):
        Data(4, background="mixes")
    with pytest.raises(InlayError, match=r"d_A = 4: .* 1 to 3"):
        distances(Data(4), d_a=4)
    with pytest.raises(InlayError, match="layers 1 and 2"):
        TwoLayerViT(Data(4))(torch.zeros(1, 4, 4, dtype=torch.float64), layer=3)
