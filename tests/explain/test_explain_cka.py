"""Linear CKA against its definitions, written out in float64."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from inlay import InlayError
from inlay.explain.cka import MinibatchCKA, hsic1
from inlay.explain.features import find_outlying, gram, has_outliers, mean_of_others, rows_of, watching


def features(seed: int, rows: int, width: int) -> Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def hsic_by_definition(k: Tensor, l: Tensor) -> float:  # noqa: E741
    """The U-statistic itself: the mean over all ordered quadruples of distinct examples (Song et al., theorem 2)."""
    n, total = len(k), 0.0
    for i, j, q, r in itertools.permutations(range(n), 4):
        total += float(k[i, j] * (l[i, j] + l[q, r] - 2 * l[i, q]))
    return total / math.perm(n, 4)


def cka_by_definition(batches: list[tuple[Tensor, Tensor]]) -> float:
    sums = [0.0, 0.0, 0.0]
    for x, y in batches:
        k, l = x @ x.T, y @ y.T  # noqa: E741
        for place, pair in enumerate(((k, l), (k, k), (l, l))):
            sums[place] += len(x) * hsic_by_definition(*pair)
    return sums[0] / math.sqrt(sums[1] * sums[2])


def cka(batches: list[tuple[Tensor, Tensor]]) -> float:
    table = MinibatchCKA()
    for x, y in batches:
        table.update(gram(x)[None], gram(y)[None])
    return float(table.value())


def biased_cka(x: Tensor, y: Tensor) -> float:
    x, y = x - x.mean(0), y - y.mean(0)
    return float((x.T @ y).square().sum() / ((x.T @ x).norm() * (y.T @ y).norm()))


@given(st.integers(0, 1000), st.integers(4, 7), st.integers(1, 6), st.integers(1, 6))
@settings(max_examples=12, deadline=None)
def test_hsic_is_the_u_statistic(seed: int, n: int, first: int, second: int) -> None:
    x, y = features(seed, n, first) + 3, features(seed + 1, n, second) - 2
    k, l = x @ x.T, y @ y.T  # noqa: E741
    expected = hsic_by_definition(k, l)
    assert float(hsic1(k[None], l[None])) == pytest.approx(expected, rel=1e-9, abs=1e-9)
    # Features centred first, as we take them, give the same: the estimator does not see a common mean.
    assert float(hsic1(gram(x)[None], gram(y)[None])) == pytest.approx(expected, rel=1e-9, abs=1e-9)


@given(st.integers(0, 1000), st.lists(st.integers(4, 6), min_size=1, max_size=3))
@settings(max_examples=8, deadline=None)
def test_cka_over_minibatches_is_the_ratio_of_sums(seed: int, sizes: list[int]) -> None:
    batches = [(features(seed + i, n, 5), features(seed + 99 + i, n, 3)) for i, n in enumerate(sizes)]
    batches = [(x, y + x[:, :3]) for x, y in batches]
    assert cka(batches) == pytest.approx(cka_by_definition(batches), rel=1e-9, abs=1e-9)


@given(st.integers(0, 1000), st.integers(4, 20), st.integers(2, 30), st.floats(0.01, 100), st.floats(-50, 50))
@settings(max_examples=25, deadline=None)
def test_cka_of_features_with_themselves_turned_scaled_and_shifted_is_one(
    seed: int, n: int, width: int, scale: float, shift: float
) -> None:
    x, y = features(seed, n, width), features(seed + 1, n, 7)
    turn = torch.linalg.qr(features(seed + 2, width, width)).Q
    assert cka([(x, x)]) == pytest.approx(1.0)
    assert cka([(x, scale * x @ turn + shift)]) == pytest.approx(1.0, abs=1e-7)
    assert cka([(x @ turn * scale, y + shift)]) == pytest.approx(cka([(x, y)]), abs=1e-7)
    assert abs(cka([(x, y)])) <= 1 + 1e-9


def test_unrelated_wide_features_have_none_where_the_biased_estimate_says_alike() -> None:
    """64 examples of 512 features: what the unbiased estimator is for."""
    pairs = [(features(2 * i, 64, 512), features(2 * i + 1, 64, 512)) for i in range(40)]
    assert abs(sum(cka([pair]) for pair in pairs) / len(pairs)) < 0.01
    assert min(biased_cka(*pair) for pair in pairs) > 0.85


def test_minibatches_come_to_what_the_whole_comes_to() -> None:
    x = features(0, 4000, 6)
    y = x[:, :4] + features(1, 4000, 4)
    parts = list(zip(x.split(32), y.split(32), strict=True))
    assert cka(parts) == pytest.approx(cka([(x, y)]), abs=0.02)


def test_every_pair_of_layers_at_once() -> None:
    first = torch.stack([gram(features(i, 9, 4)) for i in range(3)])
    second = torch.stack([gram(features(10 + i, 9, 5)) for i in range(2)])
    table = MinibatchCKA()
    table.update(first, second)
    values = table.value()
    assert values.shape == (3, 2)
    for i, j in itertools.product(range(3), range(2)):
        assert float(values[i, j]) == pytest.approx(cka([(features(i, 9, 4), features(10 + j, 9, 5))]))


def test_gram_matrices_lose_nothing_to_a_large_mean_or_to_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    x = features(0, 8, 50)
    near = (x.float() * 1e-2 + 100).double()  # as a layer in float32 would give it
    exact = near - near.mean(0)
    monkeypatch.setattr("inlay.explain.features.CHUNK", 7)
    assert torch.allclose(gram(near.float()), exact @ exact.T, rtol=1e-9, atol=1e-12)


def test_too_few_examples_and_constant_features() -> None:
    few = gram(features(0, 3, 5))[None]
    with pytest.raises(InlayError, match="needs 4 examples in a minibatch, and there are 3"):
        hsic1(few, few)
    with pytest.raises(InlayError, match="nothing to compare"):
        MinibatchCKA().value()
    table = MinibatchCKA()
    table.update(gram(torch.ones(5, 3))[None], gram(features(0, 5, 3))[None])
    assert math.isnan(float(table.value()))


def test_rows_of_every_layout() -> None:
    tokens = torch.arange(24.0).reshape(2, 3, 4)
    assert torch.equal(rows_of(tokens, "encoder", "flat"), tokens.reshape(2, 12))
    assert torch.equal(rows_of(tokens, "encoder", "mean"), tokens.mean(1))
    assert torch.equal(rows_of(tokens, "encoder", "cls"), tokens[:, 0])
    maps = torch.arange(48.0).reshape(2, 3, 2, 4)
    assert torch.equal(rows_of(maps, "convolutional", "mean"), maps.mean((2, 3)))
    assert torch.equal(rows_of(maps, "hierarchical", "mean"), maps.mean((1, 2)))


def test_padding_is_left_out_and_prompts_stand_before_the_text() -> None:
    tokens = torch.arange(24.0).reshape(2, 3, 4)
    mask = torch.tensor([[1, 1], [1, 0]])  # one virtual token ahead of two
    assert torch.equal(rows_of(tokens, "encoder", "mean", mask)[1], tokens[1, :2].mean(0))
    assert torch.equal(rows_of(tokens, "encoder", "cls", mask), tokens[:, 1])
    flat = rows_of(tokens, "encoder", "flat", mask)
    assert torch.equal(flat[0], tokens[0].flatten())
    assert torch.equal(flat[1, 8:], torch.zeros(4))


def test_outlier_tokens_drown_the_others_and_are_left_out() -> None:
    """Two layers that say the same, one with a huge token in a place that an image chose at random."""
    usual = features(0, 24, 10 * 8).reshape(24, 10, 8) + features(1, 24, 8)[:, None]
    drowned = usual.clone()
    for row, place in enumerate(torch.randint(10, (24,), generator=torch.Generator().manual_seed(2)).tolist()):
        drowned[row, place] = 100 * features(3, 1, 8)[0]
    assert has_outliers(drowned)
    assert not has_outliers(usual)
    flat = cka([(usual.flatten(1), drowned.flatten(1))])
    others = cka([(usual.mean(1), mean_of_others(drowned))])
    assert abs(flat) < 0.2
    assert others > 0.8
    for row in range(24):
        kept = [token for token in drowned[row] if float(token.norm()) < 50]
        torch.testing.assert_close(mean_of_others(drowned)[row], torch.stack(kept).mean(0))
    torch.testing.assert_close(mean_of_others(usual), usual.mean(1))


def test_the_layers_with_outliers_are_found_in_a_real_model() -> None:
    """A ViT of which one block adds a huge value to one token: that layer and those after it, and no others."""
    from transformers import ViTConfig, ViTForImageClassification

    torch.manual_seed(0)
    shape = {"hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 32}
    model = ViTForImageClassification(ViTConfig(**shape, image_size=32, patch_size=8)).eval()
    batch = {"pixel_values": torch.randn(6, 3, 32, 32)}
    with torch.no_grad():
        assert find_outlying(model, batch) == set()

        def enlarge(module: torch.nn.Module, args: object, output: Tensor) -> Tensor:
            output = output.clone()
            output[:, 5] += 500
            return output

        blocks = [module for name, module in model.named_modules() if type(module).__name__ == "ViTLayer"]
        blocks[1].register_forward_hook(enlarge)
        assert find_outlying(model, batch) == {2, 3, 4}
        with watching(model, "flat", {2, 3, 4}) as seen:
            model(**batch)
            mixed = seen.take()
        with watching(model, "flat") as seen:
            model(**batch)
            flat = seen.take()
    assert torch.equal(mixed[:2], flat[:2])
    assert not any(torch.equal(mixed[layer], flat[layer]) for layer in (2, 3, 4))
