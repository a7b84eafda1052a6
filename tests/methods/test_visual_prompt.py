"""Visual prompting: the same function as the activation prompt at layer 0, and its frames against plain oracles."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import PeftModel, get_peft_model
from torch import Tensor, nn

import inlay
import zoo
from inlay.anatomy import anatomy
from inlay.errors import InlayError
from inlay.methods.attach import attach, trained_parameters
from inlay.methods.feature_prompts import FeaturePlace
from inlay.methods.visual_prompt.layer import Pad, ResizeConcat
from probing import logits

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
IMAGES = [family for family, description in zoo.FAMILIES.items() if description.modality == "image"]


def prompted(family: str, **given: Any) -> tuple[Any, dict[str, Tensor]]:
    model, batch = zoo.tiny(family)
    return get_peft_model(model, inlay.VisualPromptConfig(**given)), batch


def delta(model: nn.Module) -> nn.Parameter:
    (found,) = (p for name, p in trained_parameters(model).items() if "_delta." in name)
    return found


def fill(parameter: nn.Parameter, seed: int = 0) -> None:
    with torch.no_grad():
        parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed)))


@pytest.mark.parametrize("family", IMAGES)
def test_it_is_the_activation_prompt_at_layer_0(family: str) -> None:
    """Same output, same gradients, same number of parameters; and the sum with the pixels, done by hand."""
    found = []
    for config in (inlay.VisualPromptConfig(), inlay.ActivationPromptConfig(layers=0)):
        base, batch = zoo.tiny(family)
        model = get_peft_model(base, config)
        fill(delta(model))
        loss = model(**batch).loss
        loss.backward()
        count = sum(value.numel() for value in trained_parameters(model).values())
        found.append((logits(model, batch), delta(model).grad, count, tuple(delta(model).shape)))
    one, other = found
    assert torch.equal(one[0], other[0])
    assert torch.equal(one[1], other[1])
    assert one[2:] == other[2:]
    assert one[3] == (3, 32, 32)
    plain, batch = zoo.tiny(family)
    by_hand = logits(plain, {"pixel_values": batch["pixel_values"] + delta(model).detach()})
    assert torch.equal(one[0], by_hand)


@pytest.mark.parametrize("family", IMAGES)
def test_the_stem_reads_the_pixels(family: str) -> None:
    model, batch = zoo.tiny(family)
    seen: list[Tensor] = []
    anatomy(model).stem.module.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    logits(model, batch)
    assert torch.equal(seen[0], batch["pixel_values"])


@pytest.mark.parametrize("family", IMAGES)
@pytest.mark.parametrize("kind", ["pad", "resize-concat"])
def test_frames_on_every_architecture(family: str, kind: str, tmp_path) -> None:
    model, batch = prompted(family, kind=kind)
    fill(delta(model))
    model(**batch).loss.backward()
    assert delta(model).grad.abs().sum() > 0
    wanted = logits(model, batch)
    model.save_pretrained(tmp_path)
    assert torch.equal(logits(PeftModel.from_pretrained(zoo.tiny(family)[0], str(tmp_path)), batch), wanted)
    with model.disable_adapter():
        assert torch.equal(logits(model, batch), logits(zoo.tiny(family)[0], batch))


@settings(max_examples=20, deadline=None)
@given(
    size=st.tuples(st.integers(1, 3), st.integers(3, 9), st.integers(3, 9)),
    share=st.floats(0, 1),
    batch=st.integers(1, 3),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
)
def test_frames_pixel_by_pixel(size, share, batch, dtype) -> None:
    channels, height, width = size
    edge = 1 + int(share * ((min(height, width) - 1) // 2 - 1))
    place = FeaturePlace("pad", size, width=edge)
    pad, concat = Pad(place), ResizeConcat(place)
    fill(pad.weight)
    fill(concat.weight)
    assert pad.weight.numel() == channels * (height * width - (height - 2 * edge) * (width - 2 * edge))
    x = torch.randn(batch, *size, generator=torch.Generator().manual_seed(1)).to(dtype)
    padded, framed = pad(x), concat(x)
    assert padded.shape == framed.shape == x.shape
    assert padded.dtype == framed.dtype == dtype
    inside = [(r, c) for r in range(edge, height - edge) for c in range(edge, width - edge)]
    border = [(r, c) for r in range(height) for c in range(width) if (r, c) not in inside]
    assert all(torch.equal(padded[..., r, c], x[..., r, c]) for r, c in inside)
    # Every number of the frame acts on one pixel of the border, in the order in which they are stored.
    order = [cell for cell in border if cell[0] < edge] + [cell for cell in border if cell[0] >= height - edge]
    order += [cell for cell in border if cell not in order and cell[1] < edge]
    order += [cell for cell in border if cell not in order]
    for number, (r, c) in enumerate(order):
        assert torch.equal(padded[..., r, c], x[..., r, c] + pad.weight[:, number].to(dtype))
        assert torch.equal(framed[..., r, c], concat.weight[:, number].to(dtype).expand(batch, -1))
    small = shrink(x.double(), height - 2 * edge, width - 2 * edge)
    tolerance = 0.05 if dtype is torch.bfloat16 else 1e-5
    torch.testing.assert_close(
        framed[..., edge : height - edge, edge : width - edge].double(), small, atol=tolerance, rtol=tolerance
    )


def shrink(x: Tensor, height: int, width: int) -> Tensor:
    """Bilinear resizing, one pixel at a time: each looks at the four around the place it comes from."""
    out = x.new_zeros(*x.shape[:2], height, width)
    for r in range(height):
        for c in range(width):
            row = max(0.0, (r + 0.5) * x.shape[2] / height - 0.5)
            column = max(0.0, (c + 0.5) * x.shape[3] / width - 0.5)
            top, left = int(row), int(column)
            bottom, right = min(top + 1, x.shape[2] - 1), min(left + 1, x.shape[3] - 1)
            down, across = row - top, column - left
            out[..., r, c] = (1 - down) * ((1 - across) * x[..., top, left] + across * x[..., top, right]) + down * (
                (1 - across) * x[..., bottom, left] + across * x[..., bottom, right]
            )
    return out


def test_the_papers_frame() -> None:
    """224 pixels around 128: 101,376 numbers, the paper's 0.11M with the head of a small task."""
    place = FeaturePlace("resize-concat", (3, 224, 224), width=48)
    assert ResizeConcat(place).weight.numel() == 3 * (224**2 - 128**2) == 101_376


def test_default_widths_follow_the_image() -> None:
    assert prompted("vit", kind="pad")[0].peft_config["default"].width == round(30 * 32 / 224)
    assert prompted("vit", kind="resize-concat")[0].peft_config["default"].width == round(48 * 32 / 224)
    assert prompted("vit", kind="pad", width=2)[0].peft_config["default"].width == 2


def test_resize_concat_takes_images_of_any_size() -> None:
    model, _ = prompted("vit", kind="resize-concat")
    assert model(pixel_values=torch.randn(2, 3, 50, 20)).logits.shape == (2, 3)
    added, _ = prompted("convnext")
    with pytest.raises(InlayError, match="features of 3 x 32 x 32, and these are 3 x 64 x 64"):
        added(pixel_values=torch.randn(2, 3, 64, 64))


def test_beside_an_activation_prompt() -> None:
    """Two methods, one stem: each is taken off without the other."""
    base, batch = zoo.tiny("vit")
    model = attach(base, "visual-prompt", adapter_name="pixels")
    fill(delta(model))
    alone = logits(model, batch)
    both = attach(model, "activation-prompt", adapter_name="features", settings={"layers": 0})
    own = next(p for name, p in trained_parameters(both).items() if "inlay_activation_delta" in name)
    fill(own, seed=1)
    assert not torch.equal(logits(both, batch), alone)
    both.base_model.unload()
    assert [name for name, _ in base.named_modules() if name.endswith("inlay_visual")]
    assert not [name for name, _ in base.named_modules() if name.endswith("inlay_activation")]


@pytest.mark.parametrize("family", ["bert", "gpt2", "t5"])
def test_texts_are_refused(family: str) -> None:
    model, _ = zoo.tiny(family)
    with pytest.raises(InlayError, match=rf"{type(model).__name__} reads text\. These work on it: .*bias|norm"):
        get_peft_model(model, inlay.VisualPromptConfig())


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"kind": "concat"}, "add, pad, resize-concat"),
        ({"layers": [3]}, r"layers=\[3\].*activation-prompt"),
        ({"kind": "pad", "width": 0}, "1 to 15 pixels wide"),
        ({"kind": "pad", "width": 16}, "32 x 32 pixels is 1 to 15 pixels wide"),
    ],
)
def test_bad_settings(given: dict[str, Any], message: str) -> None:
    with pytest.raises(InlayError, match=message):
        prompted("vit", **given)
