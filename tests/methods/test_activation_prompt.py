"""Activation prompts: the templates against plain oracles, the places, the graph, and what is refused."""

from __future__ import annotations

import copy
import math
import warnings
from typing import Any

import pytest
import torch
import transformers as hf
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import PeftModel, get_peft_model
from torch import Tensor, nn

import inlay
import zoo
from inlay.anatomy import anatomy, feature_shapes
from inlay.errors import InlayError
from inlay.methods.activation_prompt.layer import ActivationPromptLayer
from inlay.methods.attach import attach, trained_parameters
from inlay.methods.feature_prompts import FeaturePlace, Template
from inlay.methods.plain import plain_parameters
from inlay.methods.visual_prompt.layer import VisualPromptLayer
from probing import logits

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
TEMPLATES = {**ActivationPromptLayer.templates, **VisualPromptLayer.templates}
CONCATENATING = ("vit", "deit", "dinov2", "clip")


def prompted(family: str, task: str = "classification", **given: Any) -> tuple[Any, dict[str, Tensor]]:
    model, batch = zoo.tiny(family, task)  # type: ignore[arg-type]
    return get_peft_model(model, inlay.ActivationPromptConfig(**given)), batch


def deltas(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: value for name, value in trained_parameters(model).items() if "inlay_activation_delta" in name}


@torch.no_grad()
def stir(model: nn.Module, seed: int = 0, size: float = 0.3) -> None:
    generator = torch.Generator().manual_seed(seed)
    for value in deltas(model).values():
        value.add_(torch.randn(value.shape, generator=generator), alpha=size)


def template(kind: str, shape: tuple[int, ...], seed: int = 0, dtype: torch.dtype = torch.float64, **given: Any) -> Any:
    made = TEMPLATES[kind](FeaturePlace(kind, shape, **given), dtype=dtype)
    with torch.no_grad():
        made.weight.copy_(torch.randn(made.weight.shape, generator=torch.Generator().manual_seed(seed)))
    return made


# The templates.


@settings(max_examples=20, deadline=None)
@given(
    shape=st.lists(st.integers(1, 4), min_size=2, max_size=3).map(tuple),
    batch=st.integers(1, 3),
    kind=st.sampled_from(["add", "product"]),
    shared=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
)
def test_add_and_product_are_the_equations(shape, batch, kind, shared, dtype) -> None:
    own = shape[-1:] if shared else shape
    g = template(kind, own, dtype=torch.float32, exact=not shared)
    z = torch.randn(batch, *shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    found = g(z)
    assert found.dtype == dtype
    delta, plain = g.weight.double(), z.double()
    wanted = torch.stack([row + delta if kind == "add" else row + row * delta for row in plain])
    tolerance = {torch.float32: 1e-5, torch.float64: 1e-6, torch.bfloat16: 5e-2}[dtype]
    torch.testing.assert_close(found.double(), wanted, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(
    ("kind", "shape", "width"),
    [
        ("add", (3, 4), 0),
        ("product", (3, 4), 0),
        ("concat", (2, 4), 0),
        ("pad", (2, 5, 6), 1),
        ("resize-concat", (2, 5, 6), 1),
    ],
)
def test_gradients_of_the_templates(kind: str, shape: tuple[int, ...], width: int) -> None:
    g = template(kind, shape, width=width)
    z = torch.randn(2, *((3, 4) if kind == "concat" else shape), dtype=torch.float64, requires_grad=True)

    def call(z: Tensor, weight: Tensor) -> Tensor:
        return torch.func.functional_call(g, {"weight": weight}, (z,))

    assert torch.autograd.gradcheck(call, (z, g.weight))


@pytest.mark.parametrize("kind", ["add", "product", "pad"])
def test_starts_as_the_identity(kind: str) -> None:
    g: Template = TEMPLATES[kind](FeaturePlace(kind, (2, 5, 5), width=1))
    z = torch.randn(3, 2, 5, 5)
    assert torch.equal(g(z), z)


def test_tokens_are_drawn_in_vpts_range() -> None:
    torch.manual_seed(0)
    values = TEMPLATES["concat"](FeaturePlace("concat", (50, 64))).weight.detach()
    bound = math.sqrt(6 / (64 + 64))
    assert bound * 0.95 < values.abs().max() <= bound
    assert values.abs().mean().item() == pytest.approx(bound / 2, rel=0.1)


# Where it acts.


@pytest.mark.parametrize("family", zoo.FAMILIES)
@pytest.mark.parametrize("kind", ["add", "product"])
def test_it_acts_at_the_input_of_the_block(family: str, kind: str) -> None:
    """What enters block 2 is g(z, delta) of what enters it without the prompt; block 1 sees no change."""
    model, batch = prompted(family, layers=2, kind=kind)
    stir(model)
    seen: dict[int, list[Tensor]] = {1: [], 2: []}
    for index in seen:  # hooks of the test come after the prompt's
        anatomy(model).blocks[index - 1].module.register_forward_pre_hook(
            lambda _, args, index=index: seen[index].append(args[0])
        )
    logits(model, batch)
    with model.disable_adapter():
        logits(model, batch)
    ((delta,), z) = deltas(model).values(), seen[2][1]
    assert torch.equal(*seen[1])
    assert torch.equal(seen[2][0], z + delta if kind == "add" else z * (1 + delta))
    assert delta.shape == (z.shape[1:] if zoo.FAMILIES[family].modality == "image" else z.shape[-1:])


def test_the_default_layers() -> None:
    def chosen(model: nn.Module) -> list[int]:
        return get_peft_model(model, inlay.ActivationPromptConfig()).peft_config["default"].layers

    shallow = hf.ViTConfig(**zoo.VISION | {"num_hidden_layers": 2})
    deep = hf.ViTConfig(**zoo.VISION | {"num_hidden_layers": 5})
    assert chosen(hf.ViTForImageClassification(shallow)) == [2]
    assert chosen(hf.ViTForImageClassification(deep)) == [3]
    assert chosen(zoo.tiny("swin")[0]) == [3]
    assert chosen(zoo.tiny("gpt2")[0]) == [3]
    assert chosen(zoo.tiny("resnet")[0]) == [3]  # of four
    assert chosen(zoo.tiny("convnext")[0]) == [3]


def test_the_papers_place_and_count() -> None:
    """ResNet-101: the input of block 32 of 33, 2048 x 7 x 7, about 100k parameters; ViT-L/16: 197 x 1024 at block 3.

    On the meta device: nothing is computed, and the shapes are still right.
    """
    with torch.device("meta"):
        resnet = hf.ResNetModel(hf.ResNetConfig(depths=[3, 4, 23, 3]))
        vit = hf.ViTModel(hf.ViTConfig(hidden_size=1024, num_hidden_layers=4, num_attention_heads=16))
    with pytest.warns(UserWarning, match=r"ResNetModel does not say .* 224 x 224 pixels\. Give image_size="):
        resnet = get_peft_model(resnet, inlay.ActivationPromptConfig())
    vit = get_peft_model(vit, inlay.ActivationPromptConfig())
    assert resnet.peft_config["default"].layers == [32]
    assert [tuple(value.shape) for value in deltas(resnet).values()] == [(2048, 7, 7)]
    assert [tuple(value.shape) for value in deltas(vit).values()] == [(197, 1024)]
    assert all(value.is_meta for model in (resnet, vit) for value in deltas(model).values())


@pytest.mark.parametrize("given", [3, "3", [3], (3,), " 3 "])
def test_a_layer_may_be_written_in_several_ways(given: Any) -> None:
    assert inlay.ActivationPromptConfig(layers=given).layers == [3]


def test_several_layers() -> None:
    assert inlay.ActivationPromptConfig(layers="3,1").layers == [1, 3]
    model, batch = prompted("vit", layers=[0, 1, 3])
    assert [tuple(value.shape) for value in deltas(model).values()] == [(3, 32, 32), (17, 16), (17, 16)]
    together = 0
    for name, value in deltas(model).items():
        before = logits(model, batch)
        with torch.no_grad():
            value.add_(0.3 * torch.randn(value.shape, generator=torch.Generator().manual_seed(len(name))))
        together += not torch.equal(logits(model, batch), before)
    assert together == 3


def test_shared_across_positions() -> None:
    sizes = {"vit": [(3, 1, 1), (16,)], "swin": [(3, 1, 1), (8,)], "resnet": [(3, 1, 1), (16, 1, 1)]}
    for family, shapes in sizes.items():
        model, batch = prompted(family, layers=[0, 2], per_position=False)
        assert [tuple(value.shape) for value in deltas(model).values()] == shapes
        stir(model)
        wanted = logits(model, batch)
        # The same as a prompt with values of its own at every position, all alike.
        whole, _ = prompted(family, layers=[0, 2])
        with torch.no_grad():
            for one, many in zip(deltas(model).values(), deltas(whole).values(), strict=True):
                many.copy_(one.expand_as(many))
        assert torch.equal(logits(whole, batch), wanted)


# Tokens.


@pytest.mark.parametrize("family", CONCATENATING)
def test_added_tokens_stay_until_the_last_block(family: str) -> None:
    model, batch = prompted(family, kind="concat", layers=[1, 3], length=4)
    blocks = anatomy(model).blocks
    lengths = [shape[0] for shape in feature_shapes(model)]
    plain = feature_shapes(zoo.tiny(family)[0])[0][0]
    assert lengths == [plain + 4, plain + 4, plain + 8]
    left: list[int] = []
    blocks[-1].module.register_forward_hook(lambda _, args, output: left.append(output.shape[1]))
    assert torch.isfinite(logits(model, batch)).all()
    assert left == [plain]
    with model.disable_adapter():
        assert torch.equal(logits(model, batch), logits(zoo.tiny(family)[0], batch))
    assert torch.equal(logits(model.unload(), batch), logits(zoo.tiny(family)[0], batch))


def test_attention_to_added_tokens_by_hand() -> None:
    """One block of a ViT with [z, delta], from its own projections in float64."""
    config = hf.ViTConfig(**zoo.VISION | {"num_hidden_layers": 1})
    torch.manual_seed(0)
    model = get_peft_model(
        hf.ViTForImageClassification(config).eval().double(),
        inlay.ActivationPromptConfig(kind="concat", layers=1, length=3),
    )
    base = model.get_base_model()
    pixels = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    (delta,) = deltas(model).values()
    with torch.no_grad():
        z = base.vit.embeddings(pixels)
        block = anatomy(model).blocks[0].module
        every = torch.cat([z, delta.double().expand(2, -1, -1)], dim=1)
        normed = block.layernorm_before(every)
        q, k, v = (
            part(normed).view(2, -1, 2, 8).transpose(1, 2)
            for part in (block.attention.q_proj, block.attention.k_proj, block.attention.v_proj)
        )
        mixed = (q @ k.transpose(-1, -2) / math.sqrt(8)).softmax(-1) @ v
        hidden = block.attention.o_proj(mixed.transpose(1, 2).reshape(2, -1, 16)) + every
        hidden = hidden + block.mlp(block.layernorm_after(hidden))
        wanted = base.classifier(base.vit.layernorm(hidden)[:, 0])
        torch.testing.assert_close(model(pixel_values=pixels).logits, wanted)


def test_added_tokens_survive_checkpointing_compiling_and_a_reload(tmp_path) -> None:
    model, batch = prompted("vit", kind="concat", length=4)
    stir(model)

    def gradient(of: Any) -> list[Tensor]:
        of.zero_grad()
        of(**batch).loss.backward()
        return [value.grad.clone() for value in deltas(of).values()]

    wanted, out = gradient(model.train()), logits(model, batch)
    model.gradient_checkpointing_enable()
    model.disable_input_require_grads()
    torch.testing.assert_close(gradient(model.train()), wanted)
    model.gradient_checkpointing_disable()
    torch._dynamo.reset()
    assert torch.equal(logits(torch.compile(model.eval(), backend="eager"), batch), out)
    assert torch.equal(logits(copy.deepcopy(model), batch), out)
    model.save_pretrained(tmp_path)
    again = PeftModel.from_pretrained(zoo.tiny("vit")[0], str(tmp_path))
    assert torch.equal(logits(again, batch), out)


def test_a_second_adapter_is_measured_without_the_first() -> None:
    model, batch = prompted("vit", "base", kind="concat", layers=1, length=4)
    model.add_adapter("second", inlay.ActivationPromptConfig(layers=3))
    assert model.peft_config["second"].shapes == {"layers.2": [17, 16]}
    model.set_adapter("second")
    assert model(**batch).last_hidden_state.shape == (3, 17, 16)
    model.base_model.set_adapter(["default", "second"])  # 21 tokens reach block 3
    with pytest.raises(InlayError, match="features of 17 x 16, and these are 21 x 16"):
        model(**batch)


# The graph.


@pytest.mark.parametrize(("family", "layer"), [("vit", 2), ("resnet", 3), ("swin", 3), ("bert", 2), ("convnext", 4)])
def test_nothing_before_the_prompt_enters_the_graph(family: str, layer: int) -> None:
    model, batch = prompted(family, layers=layer)
    model.train()
    entered: dict[int, bool] = {}
    left: dict[int, bool] = {}

    def note_entering(index: int, args: tuple[Tensor, ...]) -> None:
        entered[index] = args[0].requires_grad

    def note_leaving(index: int, output: Any) -> None:
        left[index] = (output[0] if isinstance(output, tuple) else output).requires_grad

    for block in anatomy(model).blocks:
        block.module.register_forward_pre_hook(lambda _, args, index=block.index: note_entering(index, args))
        block.module.register_forward_hook(lambda _, args, out, index=block.index: note_leaving(index, out))
    loss = model(**batch).loss
    count = len(anatomy(model).blocks)
    assert [entered[index] for index in range(1, count + 1)] == [index >= layer for index in range(1, count + 1)]
    assert [left[index] for index in range(1, count + 1)] == [index >= layer for index in range(1, count + 1)]
    leaves = graph_leaves(loss)
    assert leaves == {id(value) for value in trained_parameters(model).values()}
    assert not leaves & {id(value) for value in plain_parameters(model).values()}


def graph_leaves(loss: Tensor) -> set[int]:
    """The parameters that the graph behind a loss would send gradients to."""
    found: set[int] = set()
    seen, waiting = set(), [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if type(node).__name__ == "AccumulateGrad":
            found.add(id(node.variable))
        waiting += [following for following, _ in node.next_functions]
    return found


# Texts.


@pytest.mark.parametrize("family", ["gpt2", "llama", "opt", "gemma"])
def test_generation_with_and_without_a_cache(family: str) -> None:
    model, batch = prompted(family, "causal-lm", task_type="CAUSAL_LM")
    stir(model, size=1.0)
    prompt = {"input_ids": batch["input_ids"][:1], "attention_mask": batch["attention_mask"][:1]}

    def write(**given: Any) -> list[int]:
        return model.generate(**prompt, max_new_tokens=6, do_sample=False, eos_token_id=None, **given)[0].tolist()

    written = write(use_cache=True)
    assert written == write(use_cache=False)
    with model.disable_adapter():
        assert written != write(use_cache=True)


# What is refused.


def test_images_of_another_size() -> None:
    model, _ = prompted("convnext", layers=2)
    with pytest.raises(InlayError, match=r"features of 8 x 8 x 8, and these are 8 x 16 x 16.*image_size="):
        model(pixel_values=torch.zeros(1, 3, 64, 64))
    larger, _ = prompted("convnext", layers=2, image_size=64)
    assert larger(pixel_values=torch.zeros(1, 3, 64, 64)).logits.shape == (1, 3)
    wide, _ = prompted("resnet", layers=1, image_size=(32, 64))
    assert wide(pixel_values=torch.zeros(1, 3, 32, 64)).logits.shape == (1, 3)
    with pytest.raises(InlayError, match=r"image_size=\[40, 40\]: ViTForImageClassification cannot read such images"):
        prompted("vit", image_size=40)
    shared, _ = prompted("convnext", layers=2, per_position=False)
    assert shared(pixel_values=torch.zeros(1, 3, 64, 64)).logits.shape == (1, 3)


def test_the_size_is_the_models_own_and_is_kept() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model, _ = prompted("vit")
    config = model.peft_config["default"].to_dict()
    assert config["image_size"] == [32, 32]
    assert config["layers"] == [3]
    assert config["per_position"] is True
    assert config["shapes"] == {"vit.layers.2": [17, 16]}


@pytest.mark.parametrize(
    ("family", "given", "message"),
    [
        ("vit", {"layers": 4}, r"ViTForImageClassification has no layer 4\. Give layers from 0 \(the pixels\) to 3"),
        ("bert", {"layers": 0}, r"BertForSequenceClassification has no layer 0\. Give layers from 1 to 3"),
        ("bert", {"per_position": True}, "per_position=True is for images"),
        ("bert", {"image_size": 32}, "reads text. Leave image_size out"),
        ("bert", {"kind": "concat"}, r"BertForSequenceClassification count the tokens.*work here: add, product"),
        ("swin", {"kind": "concat"}, "SwinForImageClassification make feature maps.*work here: add, product"),
        ("resnet", {"kind": "concat"}, "ResNetForImageClassification make feature maps.*work here: add, product"),
        ("vit", {"kind": "concat", "layers": 0}, "the method visual-prompt with kind='resize-concat'"),
        ("vit", {"target_modules": ["attention"]}, "chooses them by layers="),
    ],
)
def test_what_makes_no_sense_is_refused(family: str, given: dict[str, Any], message: str) -> None:
    with pytest.raises(InlayError, match=message):
        prompted(family, **given)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"layers": "first"}, "layers='first'"),
        ({"layers": [1.5]}, r"layers=\[1\.5\]"),
        ({"layers": []}, r"layers=\[\]"),
        ({"layers": [2, 2]}, "each once"),
        ({"layers": -1}, "layers=-1"),
        ({"layers": True}, "layers=True"),
        ({"kind": "multiply"}, "add, concat, product"),
        ({"length": 0}, "at least one token"),
        ({"image_size": "big"}, "image_size='big'"),
        ({"image_size": [224]}, r"image_size=\[224\]"),
        ({"image_size": 0}, "image_size=0"),
    ],
)
def test_bad_settings(given: dict[str, Any], message: str) -> None:
    with pytest.raises(InlayError, match=message):
        inlay.ActivationPromptConfig(**given)


def test_it_cannot_be_merged_but_taken_off() -> None:
    model, batch = prompted("vit")
    stir(model)
    with pytest.raises(InlayError, match="cannot be merged"):
        model.merge_adapter()
    with pytest.raises(InlayError, match="cannot be merged"):
        model.merge_and_unload()
    plain = model.unload()
    assert torch.equal(logits(plain, batch), logits(zoo.tiny("vit")[0], batch))
    assert not [module for module in plain.modules() if isinstance(module, ActivationPromptLayer)]


def test_an_ordinary_config_of_two_models() -> None:
    """What the first model fills in is not what the second is given."""
    config = inlay.ActivationPromptConfig()
    assert get_peft_model(zoo.tiny("vit")[0], config).peft_config["default"] is config
    assert config.layers == [3]
    assert config.image_size == [32, 32]
    assert attach(zoo.tiny("resnet")[0], "activation-prompt").peft_config["default"].layers == [3]
    assert get_peft_model(zoo.tiny("bert")[0], config).peft_config["default"].image_size is None
