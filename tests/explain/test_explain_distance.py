"""Attention distance: against plain loops, on attention made by hand, and as read from real modules."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import SwinConfig, SwinForImageClassification
from transformers.models.swin.modeling_swin import SwinLayer, window_partition

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
    for index, weights in found.items():
        # Weights they are: what a token gives sums to one (padded rows may be anything).
        assert torch.allclose(weights.sum(-1)[0], torch.ones_like(weights.sum(-1)[0]), atol=1e-5)
        reach = attention.reach(weights, parts, batch, index)
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
    reach = attention.reach(weights, parts, {"pixel_values": torch.zeros(1, 3, zoo.IMAGE_SIZE, zoo.IMAGE_SIZE)}, 1)
    assert reach.weighted.tolist() == [[8.0, 8.0]]
    assert reach.largest.tolist() == [[8.0, 8.0]]
    assert reach.steps.tolist() == [[1.0, 1.0]]
    assert float(reach.uniform) == pytest.approx(float(distance.pairwise(distance.grid(side, side, 8)).mean()))


def test_padding_of_a_text_does_not_count() -> None:
    parts = anatomy(zoo.tiny("bert")[0])
    weights = torch.full((1, 1, 4, 4), 0.25)
    batch = {"input_ids": torch.zeros(1, 4, dtype=torch.long), "attention_mask": torch.tensor([[1, 1, 0, 0]])}
    assert float(attention.reach(weights, parts, batch, 1).weighted) == 0.5


def swin(window: int) -> SwinForImageClassification:
    """Stages of two blocks, the second of each with its windows shifted; patches of 4 pixels.

    One stage for windows of 7: Transformers cannot run a map that is smaller than the window.
    """
    torch.manual_seed(0)
    depths, heads = ([2], [2]) if window == 7 else ([2, 2], [2, 4])
    config = SwinConfig(patch_size=4, embed_dim=8, depths=depths, num_heads=heads, window_size=window)
    return SwinForImageClassification(config).eval()


def swin_by_loops(
    layer: SwinLayer, rows: int, columns: int, stride: int, weights: Tensor
) -> tuple[float, float, float]:
    """Weighted, arg-max and uniform distance of one head in one image, patch by patch, at places in the image.

    Which patch a token is comes from the layer itself: a map of numbers is padded, rolled and cut as it cuts its input.
    """
    number = torch.arange(1.0, rows * columns + 1).view(1, rows, columns, 1)
    padded, _ = layer.maybe_pad(number, rows, columns)
    cut = window_partition(layer.cyclic_shift(padded), layer.window_size).flatten(1)
    mask = layer.get_attn_mask(*padded.shape[1:3], torch.float32, torch.device("cpu"))
    sums, patches = [0.0, 0.0, 0.0], 0
    for w, window in enumerate(cut.int().tolist()):
        for i, one in enumerate(window):
            if one == 0:
                continue
            keys = [j for j, other in enumerate(window) if other and (mask is None or mask[w, i, j] == 0)]
            apart = {j: stride * math.dist(divmod(one - 1, columns), divmod(window[j] - 1, columns)) for j in keys}
            mass = {j: float(weights[w, i, j]) for j in keys}
            sums[0] += sum(mass[j] * apart[j] for j in keys) / sum(mass.values())
            sums[1] += min(apart[j] for j in keys if mass[j] == max(mass.values()))
            sums[2] += sum(apart.values()) / len(keys)
            patches += 1
    assert patches == rows * columns
    return sums[0] / patches, sums[1] / patches, sums[2] / patches


@pytest.mark.parametrize("window", [3, 4, 7])
@pytest.mark.parametrize("size", [(32, 32), (38, 44)])
def test_windows_that_are_padded_and_shifted(window: int, size: tuple[int, int]) -> None:
    """Padding is no part of the image: not as a query, not as a key, and not in the distance between patches."""
    model = swin(window)
    parts, pictures = anatomy(model), torch.randn(2, 3, *size, generator=torch.Generator().manual_seed(1))
    found: dict[int, tuple[Tensor, attention.Reach]] = {}

    def take(index: int, weights: Tensor) -> None:
        found[index] = (weights, attention.reach(weights, parts, {"pixel_values": pictures}, index))

    with torch.no_grad(), attention.reading(model, take):
        model(pictures)
    for index, (weights, reach) in found.items():
        stride = 4 if index <= 2 else 8
        rows, columns = (-(-length // stride) for length in size)
        for n, of_image in enumerate(weights.double().chunk(2)):
            for head in range(weights.shape[1]):
                expected = swin_by_loops(parts.blocks[index - 1].module, rows, columns, stride, of_image[:, head])
                measured = (reach.weighted[n, head], reach.largest[n, head], reach.uniform[n])
                assert [float(value) for value in measured] == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(("window", "sides"), [(4, [4, 4]), (3, [3, 3, 2]), (7, [7, 1])])
def test_attention_to_all_alike_in_padded_windows(window: int, sides: list[int]) -> None:
    """8 x 8 patches of 4 pixels: windows of 3 hold 3, 3 and 2 patches a side, windows of 7 hold 7 and 1."""
    total = 0.0
    for down in sides:
        for across in sides:
            places = [(4 * i, 4 * j) for i in range(down) for j in range(across)]
            total += sum(math.dist(a, b) for a in places for b in places) / len(places)
    windows, tokens = len(sides) ** 2, window**2
    weights = torch.full((windows, 1, tokens, tokens), 1 / tokens)
    reach = attention.reach(weights, anatomy(swin(window)), {"pixel_values": torch.zeros(1, 3, 32, 32)}, 1)
    assert float(reach.weighted) == pytest.approx(total / 64)
    assert float(reach.uniform) == pytest.approx(total / 64)


def test_windows_cut_in_another_way_are_refused() -> None:
    with pytest.raises(InlayError, match="5 windows where 1 images of 4 were expected"):
        attention.reach(torch.ones(5, 1, 16, 16), anatomy(swin(4)), {"pixel_values": torch.zeros(1, 3, 32, 32)}, 1)


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
