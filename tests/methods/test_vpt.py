"""Visual prompt tuning against a plain float64 vision transformer, and what a user does with it."""

from __future__ import annotations

from typing import Any

import plain_vit
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import PeftModel, get_peft_model
from plain_vit import Prompting
from torch import Tensor, nn

import inlay
from inlay.anatomy import anatomy
from inlay.errors import InlayError
from inlay.methods.attach import attach, trained_parameters
from inlay.methods.token_prompts import TokenPromptLayer
from inlay.methods.vpt.layer import TemperatureLayer, VPTPromptLayer
from probing import logits
from zoo import tiny

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
BLOCKS, HIDDEN, PATCH = 3, 16, 3 * 8 * 8  # of the zoo's vision transformers
TOKENS = {"vit": ["vit", 1], "deit": ["deit", 2], "dinov2": ["dinov2", 1], "clip": ["clip", 1]}


def prompted(family: str = "vit", **options: Any) -> tuple[PeftModel, dict[str, Tensor]]:
    """A tiny model in float64 with prompts, gates and temperatures away from their start."""
    model, batch = tiny(family)
    model = get_peft_model(model, inlay.VPTConfig(**options)).double().eval()
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        for parameter in trained_parameters(model).values():
            parameter.add_(torch.randn_like(parameter), alpha=0.3)
    return model, {name: value.double() if value.is_floating_point() else value for name, value in batch.items()}


def layers_of(model: nn.Module, kind: type[nn.Module]) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, kind)]


def oracle_of(model: PeftModel) -> Prompting:
    """What the model should compute, in tensors of its own that gradients can be asked of."""
    found = Prompting()
    for layer in layers_of(model, VPTPromptLayer):
        prompts = layer.pieces["default"]
        if prompts.weight is not None:
            found.prompts[prompts.place.block] = prompts.weight.detach().clone().requires_grad_()
        if "default" in layer.inlay_vpt_gate:
            gate = layer.inlay_vpt_gate["default"].weight
            found.gates[prompts.place.block] = gate.detach().clone().requires_grad_()
    for number, layer in enumerate(layers_of(model, TemperatureLayer), start=BLOCKS - len(found.gates)):
        weight = layer.inlay_vpt_temperature["default"].weight
        found.temperatures[number] = weight.detach().clone().requires_grad_()
    return found


OPTIONS = st.one_of(
    st.builds(lambda first: {"deep": False, "layers": first}, st.sampled_from([None, [1], [2], [3]])),
    st.builds(
        lambda layers: {"deep": True, "layers": layers},
        st.one_of(st.none(), st.sets(st.integers(1, BLOCKS), min_size=1).map(sorted)),
    ),
    st.builds(
        lambda first, temperature: {"deep": False, "layers": first, "gated": True, "temperature": temperature},
        st.sampled_from([None, [2]]),
        st.booleans(),
    ),
)


@settings(deadline=None, max_examples=12)
@given(options=OPTIONS, count=st.integers(1, 4))
def test_logits_and_gradients_are_those_of_the_plain_model(options: dict[str, Any], count: int) -> None:
    model, batch = prompted(num_prompt_tokens=count, **options)
    oracle = oracle_of(model)
    base = model.get_base_model()
    plain = plain_vit.logits(_bare(base), batch["pixel_values"], oracle)
    found = model(**batch)
    torch.testing.assert_close(found.logits, plain, rtol=1e-9, atol=1e-10)
    found.loss.backward()
    torch.nn.functional.cross_entropy(plain, batch["labels"]).backward()
    for layer in layers_of(model, VPTPromptLayer):
        prompts = layer.pieces["default"]
        if prompts.weight is not None:
            assert prompts.weight.shape == (count, HIDDEN)
            torch.testing.assert_close(prompts.weight.grad, oracle.prompts[prompts.place.block].grad)
        if "default" in layer.inlay_vpt_gate:
            gate = layer.inlay_vpt_gate["default"].weight
            torch.testing.assert_close(gate.grad, oracle.gates[prompts.place.block].grad)
    for layer, wanted in zip(layers_of(model, TemperatureLayer), oracle.temperatures.values(), strict=True):
        assert wanted.grad is not None
        torch.testing.assert_close(layer.inlay_vpt_temperature["default"].weight.grad, wanted.grad)


def _bare(base: Any) -> Any:
    """The base with the head that is in use in the head's place, which is where the plain model looks for it."""

    class Bare:
        vit = base.vit
        classifier = base.classifier.modules_to_save["default"]

    return Bare


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("options", [{"deep": False}, {"deep": True}, {"deep": False, "gated": True}], ids=str)
def test_a_mask_over_patches_leaves_the_prompts_in_sight(options: dict[str, Any], implementation: str) -> None:
    model, batch = prompted(num_prompt_tokens=2, **options)
    model.get_base_model().set_attn_implementation(implementation)
    seen = torch.ones(len(batch["labels"]), 17, dtype=torch.long)
    seen[0, 4:9] = 0
    seen[2, 1] = 0
    found = model(pixel_values=batch["pixel_values"], attention_mask=seen).logits
    wanted = plain_vit.logits(_bare(model.get_base_model()), batch["pixel_values"], oracle_of(model), seen == 0)
    rounding = 1e-5 if implementation == "eager" else 1e-9  # Transformers' eager softmax is in float32
    torch.testing.assert_close(found, wanted, rtol=rounding, atol=rounding)
    assert not torch.allclose(found, logits(model, batch))


@pytest.mark.parametrize("name", ["vpt-shallow", "vpt-deep", "gate-vpt"])
@pytest.mark.parametrize("family", TOKENS)
def test_prompts_stand_behind_the_leading_tokens_and_are_gone_at_the_end(family: str, name: str) -> None:
    model, batch = tiny(family)
    parts = anatomy(model)
    plain = _tokens_into_each_block(model, batch)
    model = attach(model, name)
    found = _tokens_into_each_block(model, batch)
    leading = TOKENS[family][1]
    assert parts.leading_tokens == leading
    for before, after in zip(plain[:-1], found[:-1], strict=True):
        assert after.shape[1] == before.shape[1] + 10
    assert found[-1].shape == plain[-1].shape
    first, prompts = found[0], layers_of(model, TokenPromptLayer)[0].pieces["default"].weight
    assert torch.equal(first[:, :leading], plain[0][:, :leading])
    assert torch.equal(first[:, leading : leading + 10], prompts.expand(len(first), -1, -1))
    assert torch.equal(first[:, leading + 10 :], plain[0][:, leading:])


def _tokens_into_each_block(model: nn.Module, batch: dict[str, Tensor]) -> list[Tensor]:
    """What each block computes on, and last what the blocks hand over to the rest of the model."""
    seen: list[Tensor] = []
    blocks = [block.module for block in anatomy(model).blocks]
    handles = [block.register_forward_pre_hook(lambda _, args: seen.append(args[0].detach())) for block in blocks]
    handles.append(blocks[-1].register_forward_hook(lambda _, args, output: seen.append(output.detach())))
    logits(model, batch)
    for handle in handles:
        handle.remove()
    return seen


@pytest.mark.parametrize(
    ("options", "count"),
    [
        ({"deep": True}, BLOCKS * 10 * HIDDEN),
        ({"deep": True, "num_prompt_tokens": 50}, BLOCKS * 50 * HIDDEN),
        ({"deep": True, "layers": [2, 3]}, 2 * 10 * HIDDEN),
        ({"deep": False}, 10 * HIDDEN),
        ({"deep": False, "layers": [3]}, 10 * HIDDEN),
        ({"deep": False, "gated": True, "temperature": True}, 10 * HIDDEN + (BLOCKS - 1) + BLOCKS),
    ],
    ids=str,
)
def test_as_many_parameters_as_the_formula_says(options: dict[str, Any], count: int) -> None:
    model = get_peft_model(tiny("vit")[0], inlay.VPTConfig(**options))
    found = sum(p.numel() for name, p in trained_parameters(model).items() if "inlay_vpt_" in name)
    assert found == count


@pytest.mark.parametrize("name", ["vpt-shallow", "vpt-deep", "gate-vpt", "e2vpt"])
def test_nothing_before_the_first_prompts_is_in_the_graph(name: str) -> None:
    model, batch = tiny("vit")
    model = attach(model, name, settings={"layers": [3]}).train()
    in_graph: dict[int, bool] = {}
    for number, block in enumerate(model.get_base_model().vit.layers, start=1):
        block.register_forward_hook(lambda _, args, output, n=number: in_graph.update({n: output.requires_grad}))
    model(**batch).loss.backward()
    assert in_graph == {1: False, 2: False, 3: True}


def test_a_gate_that_is_shut_keeps_prompts_and_one_that_is_open_lets_them_through() -> None:
    model, batch = prompted(deep=False, gated=True)
    shallow, _ = prompted(deep=False)
    gates = [layer.inlay_vpt_gate["default"].weight for layer in layers_of(model, VPTPromptLayer)[:-1]]
    for name, parameter in trained_parameters(shallow).items():
        trained_parameters(model)[name].data = parameter.data
    with torch.no_grad():
        for gate in gates:
            gate.fill_(60.0)
    torch.testing.assert_close(logits(model, batch), logits(shallow, batch), rtol=1e-12, atol=1e-12)
    with torch.no_grad():
        for gate in gates:
            gate.fill_(-60.0)
    tokens = _tokens_into_each_block(model, batch)
    for entering in tokens[1:-1]:
        torch.testing.assert_close(entering[:, 1:11], tokens[0][:, 1:11])


@pytest.mark.parametrize("name", ["vpt-shallow", "vpt-deep", "gate-vpt", "e2vpt"])
@pytest.mark.parametrize("family", TOKENS)
def test_hidden_states_and_attentions_can_be_had(family: str, name: str) -> None:
    model, batch = tiny(family)
    model.set_attn_implementation("eager")
    model = attach(model, name).eval()
    found = model(pixel_values=batch["pixel_values"], output_hidden_states=True, output_attentions=True)
    assert len(found.hidden_states) == BLOCKS + 1
    assert len(found.attentions) == BLOCKS
    for weights in found.attentions:
        torch.testing.assert_close(weights.sum(-1), torch.ones_like(weights[..., 0]))


def test_first_values_follow_from_the_seed_and_are_those_of_vpt() -> None:
    def first(seed: int, **options: Any) -> Tensor:
        torch.manual_seed(seed)
        model = get_peft_model(tiny("vit")[0], inlay.VPTConfig(num_prompt_tokens=50, **options))
        return layers_of(model, VPTPromptLayer)[0].pieces["default"].weight.detach()

    assert torch.equal(first(0), first(0))
    assert not torch.equal(first(0), first(1))
    bound = (6 / (PATCH + HIDDEN)) ** 0.5
    assert 0.98 * bound < first(0).abs().max() < bound
    assert abs(first(0).mean()) < 0.1 * bound
    assert 0.015 < first(0, initial="normal").std() < 0.025
    assert not first(0, initial="zeros").any()


def test_dropout_drops_in_training_alone() -> None:
    model, batch = tiny("vit")
    model = get_peft_model(model, inlay.VPTConfig(dropout=0.5))
    assert torch.equal(logits(model, batch), logits(model, batch))
    model.train()
    assert not torch.equal(model(**batch).logits, model(**batch).logits)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"deep": True, "gated": True}, "deep=False"),
        ({"deep": False, "layers": [1, 2]}, "deep=True"),
        ({"layers": []}, "counted from 1"),
        ({"num_prompt_tokens": 0}, "at least 1"),
        ({"dropout": 1.0}, "below 1"),
        ({"initial": "xavir"}, "Did you mean 'xavier'"),
    ],
    ids=str,
)
def test_settings_that_make_no_sense_are_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(InlayError, match=text):
        inlay.VPTConfig(**options)


@pytest.mark.parametrize("layers", [[0], [4], [1, 9]])
def test_a_layer_that_is_not_there_is_refused(layers: list[int]) -> None:
    with pytest.raises(InlayError, match="the model has 1 to 3"):
        get_peft_model(tiny("vit")[0], inlay.VPTConfig(layers=layers))


@pytest.mark.parametrize(
    ("family", "reason"),
    [("resnet", "no tokens"), ("convnext", "no tokens"), ("swin", "windows"), ("bert", "prompt and prefix")],
)
def test_models_without_one_sequence_of_patches_are_refused(family: str, reason: str) -> None:
    model, _ = tiny(family)
    with pytest.raises(InlayError, match=reason):
        get_peft_model(model, inlay.VPTConfig())
    assert not layers_of(model, TokenPromptLayer)


def test_places_are_named_by_block_alone() -> None:
    with pytest.raises(InlayError, match="name them in layers"):
        get_peft_model(tiny("vit")[0], inlay.VPTConfig(target_modules=["attention"]))


@pytest.mark.parametrize(("first", "second"), [("vpt-shallow", "e2vpt"), ("e2vpt", "vpt-deep")])
def test_two_methods_with_tokens_do_not_go_together(first: str, second: str) -> None:
    model, batch = tiny("vit")
    model = attach(model, first)
    before = logits(model, batch)
    with pytest.raises(InlayError, match="prompts of another method"):
        attach(model, second, adapter_name="second")
    assert torch.equal(logits(model, batch), before)


def test_one_adapter_runs_at_a_time() -> None:
    model, batch = tiny("vit", "base")
    model = get_peft_model(model, inlay.VPTConfig(newly_initialised=[]))
    model.add_adapter("second", inlay.VPTConfig(deep=False, num_prompt_tokens=3, newly_initialised=[]))
    model.base_model.set_adapter(["default", "second"])
    with pytest.raises(InlayError, match="call set_adapter"):
        model(**batch)


def test_adapters_of_different_shapes_live_together() -> None:
    model, batch = tiny("vit")
    base = logits(model, batch)
    model = attach(model, "vpt-deep")
    deep = logits(model, batch)
    model.add_adapter("late", inlay.VPTConfig(deep=False, layers=[3], num_prompt_tokens=3))
    model.set_adapter("late")
    assert [len(tokens[0]) for tokens in _tokens_into_each_block(model, batch)] == [17, 17, 20, 17]
    model.set_adapter("default")
    assert torch.equal(logits(model, batch), deep)
    plain = model.unload()
    assert torch.equal(logits(plain, batch), base)
    assert not layers_of(plain, TokenPromptLayer)
