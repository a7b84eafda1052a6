"""Attention distance: against plain loops, on attention made by hand, and as read from real modules."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import zoo
from inlay import InlayError
from inlay.anatomy import anatomy
from inlay.explain import attention, distance

ATTENDING = ("bert", "modernbert", "mpnet", "deberta-v2", "llama", "t5", "vit", "deit", "dinov2", "swin", "clip")


def weighted_by_loops(weights: Tensor, places: Tensor, real: list[int]) -> float:
    """One head of one example."""
    means = []
    for i in real:
        mass = sum(float(weights[i, j]) for j in real)
        if mass:
            means.append(sum(float(weights[i, j]) / mass * math.dist(places[i], places[j]) for j in real))
    return sum(means) / len(means)


def largest_by_loops(weights: Tensor, places: Tensor, real: list[int]) -> float:
    total = 0.0
    for i in real:
        best = max(float(weights[i, j]) for j in real)
        total += min(math.dist(places[i], places[j]) for j in real if float(weights[i, j]) == best)
    return total / len(real)


@given(st.integers(0, 1000), st.integers(1, 3), st.integers(1, 4), st.sampled_from([1.0, 14.0, 16.0]), st.booleans())
@settings(max_examples=15, deadline=None)
def test_both_definitions_against_loops(seed: int, rows: int, columns: int, stride: float, padded: bool) -> None:
    generator = torch.Generator().manual_seed(seed)
    places = distance.grid(rows, columns, stride)
    count = len(places)
    weights = torch.randn(2, 3, count, count, generator=generator, dtype=torch.float64).mul(3).softmax(-1)
    mask = torch.ones(2, count)
    if padded and count > 1:
        mask[1, count // 2 :] = 0
    apart = distance.pairwise(places)
    for function, loops in (
        (distance.weighted_distance, weighted_by_loops),
        (distance.largest_distance, largest_by_loops),
    ):
        found = function(weights, apart, mask)
        for n in range(2):
            real = [i for i in range(count) if mask[n, i]]
            for head in range(3):
                expected = loops(weights[n, head], places, real)
                assert float(found[n, head]) == pytest.approx(expected, rel=1e-10, abs=1e-10)


def test_attention_to_oneself_is_nowhere_and_to_all_alike_is_the_mean_distance() -> None:
    places = distance.grid(3, 3, 16)
    apart = distance.pairwise(places)
    own = torch.eye(9)[None, None]
    assert float(distance.weighted_distance(own, apart)) == 0
    assert float(distance.largest_distance(own, apart)) == 0
    alike = torch.full((1, 1, 9, 9), 1 / 9)
    assert float(distance.weighted_distance(alike, apart)) == pytest.approx(float(apart.mean()))
    # All are largest, and the nearest of them is the query itself.
    assert float(distance.largest_distance(alike, apart)) == 0


def test_what_the_class_token_took_is_made_up_for() -> None:
    """Halving every weight to a patch, the rest going elsewhere, changes nothing."""
    weights = torch.rand(2, 2, 6, 6, dtype=torch.float64)
    apart = distance.pairwise(distance.line(6))
    assert torch.allclose(distance.weighted_distance(weights / 2, apart), distance.weighted_distance(weights, apart))


def test_a_query_with_nothing_left_is_not_counted() -> None:
    weights = torch.tensor([[[[0.0, 0.0], [1.0, 0.0]]]])
    apart = distance.pairwise(distance.line(2))
    assert float(distance.weighted_distance(weights, apart)) == 1
    assert float(distance.largest_distance(weights, apart)) == 1


@pytest.mark.parametrize("family", ATTENDING)
def test_every_attending_family_is_read_and_left_as_it_was(family: str) -> None:
    model, batch = zoo.tiny(family)
    parts = anatomy(model)
    before = {
        name: module.config._attn_implementation for name, module in model.named_modules() if hasattr(module, "config")
    }
    found: dict[int, Tensor] = {}
    with torch.no_grad():
        logits = model(**batch).logits
        with attention.reading(model, found.__setitem__):
            eager = model(**batch, **attention.arguments(parts)).logits
        assert torch.equal(model(**batch).logits, logits)
    assert torch.allclose(eager, logits, atol=1e-5)
    after = {
        name: module.config._attn_implementation for name, module in model.named_modules() if hasattr(module, "config")
    }
    assert after == before
    assert sorted(found) == [block.index for block in parts.blocks]
    for weights in found.values():
        # Weights they are: what a token gives sums to one (padded rows may be anything).
        assert torch.allclose(weights.sum(-1)[0], torch.ones_like(weights.sum(-1)[0]), atol=1e-5)
        reach = attention.reach(weights, parts, batch)
        assert reach.weighted.shape == (3, weights.shape[1])
        assert bool(torch.isfinite(torch.stack([*vars(reach).values()][:3])).all())


def test_of_an_image_only_the_patches_count() -> None:
    """Two leading tokens and a prompt after them: all attention to the right-hand neighbour is one patch's width."""
    parts = anatomy(zoo.tiny("deit")[0])
    side = zoo.IMAGE_SIZE // 8
    ahead, patches = 5, side * side
    weights = torch.zeros(1, 2, ahead + patches, ahead + patches)
    weights[..., 0] = 0.5
    for i in range(patches):
        row, column = divmod(i, side)
        weights[0, :, ahead + i, ahead + row * side + (column + 1 if column + 1 < side else column - 1)] = 0.5
    reach = attention.reach(weights, parts, {"pixel_values": torch.zeros(1, 3, zoo.IMAGE_SIZE, zoo.IMAGE_SIZE)})
    assert reach.weighted.tolist() == [[8.0, 8.0]]
    assert reach.largest.tolist() == [[8.0, 8.0]]
    assert reach.steps.tolist() == [[1.0, 1.0]]
    assert float(reach.uniform) == pytest.approx(float(distance.pairwise(distance.grid(side, side, 8)).mean()))


def test_padding_of_a_text_does_not_count() -> None:
    parts = anatomy(zoo.tiny("bert")[0])
    weights = torch.full((1, 1, 4, 4), 0.25)
    batch = {"input_ids": torch.zeros(1, 4, dtype=torch.long), "attention_mask": torch.tensor([[1, 1, 0, 0]])}
    assert float(attention.reach(weights, parts, batch).weighted) == 0.5


def test_no_attention_is_refused_with_what_to_do() -> None:
    with pytest.raises(InlayError, match=r"ResNetForImageClassification .* has no attention.*inlay explain cka"):
        attention.check_attention(zoo.tiny("resnet")[0])


def test_adapters_in_the_attention_take_part() -> None:
    """An implementation of ours around the fused one is asked around the plain one too: outputs stay the same."""
    from inlay.methods.attach import attach

    model = attach(zoo.tiny("vit")[0], "gate-vpt").eval()
    batch = zoo.tiny("vit")[1]
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "temperature" in name:
                parameter.fill_(0.2)
        logits = model(**batch).logits
        found: dict[int, Tensor] = {}
        with attention.reading(model, found.__setitem__):
            assert torch.allclose(model(**batch).logits, logits, atol=1e-5)
        assert torch.equal(model(**batch).logits, logits)
    assert len(found) == 3
    assert found[1].shape[-1] > 17


def test_tokens_behind_the_patches_are_refused() -> None:
    from inlay.methods.attach import attach

    model = attach(zoo.tiny("vit")[0], "activation-prompt", settings={"kind": "concat", "layers": [2]})
    with pytest.raises(InlayError, match="concat"):
        attention.check_order(model)
