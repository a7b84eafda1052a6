"""Bias tuning against a plain float64 version, and what a user does with it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

import inlay
from inlay.errors import InlayError
from inlay.methods.bias.layer import BiasLayer
from inlay.methods.plain import plain_modules
from probing import logits
from zoo import FAMILIES, tiny

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


class Wrapped(nn.Module):
    """A model of one module."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


def last_axis(x: Tensor, delta: Tensor) -> Tensor:
    return x + delta


def channels(x: Tensor, delta: Tensor) -> Tensor:
    return x + delta.reshape(1, -1, *[1] * (x.ndim - 2))


# A module, an input for it, and the plain way to add a vector to its output.
MODULES: dict[
    str, tuple[Callable[[int], nn.Module], Callable[[int, int], Tensor], Callable[[Tensor, Tensor], Tensor]]
] = {
    "linear": (lambda c: nn.Linear(5, c), lambda n, c: torch.randn(n, 3, 5), last_axis),
    "conv1d-of-gpt2": (lambda c: Conv1D(c, 5), lambda n, c: torch.randn(n, 3, 5), last_axis),
    "conv1d": (lambda c: nn.Conv1d(2, c, 2), lambda n, c: torch.randn(n, 2, 6), channels),
    "conv2d": (lambda c: nn.Conv2d(2, c, 2), lambda n, c: torch.randn(n, 2, 4, 5), channels),
    "layer-norm": (lambda c: nn.LayerNorm(c), lambda n, c: torch.randn(n, 3, c), last_axis),
    "batch-norm": (lambda c: nn.BatchNorm2d(c), lambda n, c: torch.randn(n, c, 2, 3), channels),
    "group-norm": (lambda c: nn.GroupNorm(1, c), lambda n, c: torch.randn(n, c, 2, 3), channels),
}


@settings(deadline=None, max_examples=20)
@given(st.sampled_from(sorted(MODULES)), st.integers(1, 4), st.integers(2, 6), st.integers(0, 2**31))
def test_output_and_gradient_against_a_plain_version(kind: str, rows: int, size: int, seed: int) -> None:
    torch.manual_seed(seed)
    make, example, add = MODULES[kind]
    inner = make(size).double().eval()
    x = example(rows, size).double()
    plain = inner(x)
    model = get_peft_model(Wrapped(inner), inlay.BiasTuningConfig(newly_initialised=[])).eval()
    assert torch.equal(model(x), plain)
    delta = torch.randn(size, dtype=torch.float64)
    (weight,) = [parameter for parameter in model.parameters() if parameter.requires_grad]
    with torch.no_grad():
        weight.copy_(delta)
    output = model(x)
    torch.testing.assert_close(output, add(plain, delta), rtol=1e-12, atol=1e-12)
    upstream = torch.randn_like(output)
    output.backward(upstream)
    axis = -1 if add is last_axis else 1
    wanted = upstream.movedim(axis, 0).reshape(size, -1).sum(dim=1)
    torch.testing.assert_close(weight.grad, wanted, rtol=1e-12, atol=1e-12)
    merged = model.merge_and_unload()
    torch.testing.assert_close(merged(x), add(plain, delta), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("family", ["bert", "gpt2", "vit", "swin", "clip", "resnet", "convnext"])
def test_gradients_are_those_of_the_base_model_s_biases(family: str) -> None:
    base, batch = tiny(family)
    base.double()
    batch = {k: v.double() if v.is_floating_point() else v for k, v in batch.items()}
    base(**batch).loss.backward()
    wanted = {f"{name}.bias": m.bias.grad for name, m in plain_modules(base) if getattr(m, "bias", None) is not None}
    model, _ = tiny(family)
    model = get_peft_model(model.double(), inlay.BiasTuningConfig())
    model(**batch).loss.backward()
    layers = {name.rpartition(".inlay_bias")[0]: m for name, m in model.named_modules() if isinstance(m, BiasLayer)}
    assert layers
    for name, layer in layers.items():
        found = layer.inlay_bias_delta["default"].weight.grad
        expected = wanted[f"{name.removeprefix('base_model.model.')}.bias"]
        if expected is None:  # CLIP's last norm is not on the way to the loss
            assert found is None
        else:
            torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


def test_every_bias_outside_the_head_is_trained() -> None:
    model, _ = tiny("bert")
    biases = {n for n, _ in model.named_parameters() if n.endswith("bias") and not n.startswith("classifier")}
    adapted = get_peft_model(model, inlay.BiasTuningConfig())
    assert {f"{name}.bias" for name in adapted.peft_config["default"].target_modules} == biases


def test_modules_are_chosen_by_name_exclusion_and_layer() -> None:
    def targets(**settings) -> set[str]:
        model = get_peft_model(tiny("bert")[0], inlay.BiasTuningConfig(**settings))
        return {name.removeprefix("bert.encoder.") for name in model.peft_config["default"].target_modules}

    assert targets(target_modules=["query"]) == {f"layer.{i}.attention.self.query" for i in range(3)}
    assert targets(target_modules=["query"], layers=[2]) == {"layer.1.attention.self.query"}
    assert targets(target_modules=r".*\.layer\.2\..*query") == {"layer.2.attention.self.query"}
    assert targets(target_modules=["query", "value"], exclude_modules=["value"], layers=[1, 3]) == {
        "layer.0.attention.self.query",
        "layer.2.attention.self.query",
    }
    assert all(name.startswith("layer.2.") for name in targets(layers=[3]))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"target_modules": ["qery"]}, "leave no module"),
        ({"layers": [4]}, "there is no layer 4"),
        ({"layers": [0]}, "there is no layer 0"),
        ({"target_modules": ["word_embeddings"]}, "leave no module"),
    ],
)
def test_a_choice_that_leaves_nothing_is_refused(settings: dict, message: str) -> None:
    with pytest.raises(InlayError, match=message):
        get_peft_model(tiny("bert")[0], inlay.BiasTuningConfig(**settings))


@pytest.mark.parametrize("family", [f for f in FAMILIES if f in {"llama", "t5", "modernbert", "gemma"}])
def test_a_model_without_biases_is_refused_with_what_works(family: str) -> None:
    with pytest.raises(InlayError, match=r"has none\. These work on it: .*norm.*lora"):
        get_peft_model(tiny(family)[0], inlay.BiasTuningConfig())


def test_a_projection_that_is_never_called_is_left_alone() -> None:
    attention = nn.MultiheadAttention(4, 2)
    model = nn.ModuleDict({"attention": attention, "out": nn.Linear(4, 4)})
    adapted = get_peft_model(model, inlay.BiasTuningConfig(newly_initialised=[]))
    assert list(adapted.peft_config["default"].target_modules) == ["out"]


def stir(model: nn.Module, only: str = "") -> None:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and only in name:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)


def test_merging_and_unmerging_to_the_bit() -> None:
    model, batch = tiny("bert")
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    adapted = get_peft_model(model, inlay.BiasTuningConfig())
    stir(adapted)
    wanted = logits(adapted, batch)
    adapted.merge_adapter()
    torch.testing.assert_close(logits(adapted, batch), wanted, atol=1e-6, rtol=1e-5)
    adapted.unmerge_adapter()
    assert torch.equal(logits(adapted, batch), wanted)
    plain = adapted.unload()
    for name, parameter in plain.named_parameters():
        if not name.startswith("classifier"):
            assert torch.equal(parameter, before[name]), name
    assert not [name for name, _ in plain.named_modules() if "inlay" in name]
    assert not hasattr(plain, "peft_config")


@pytest.mark.parametrize("config_class", ["BiasTuningConfig", "NormTuningConfig"])
def test_disabling_a_merged_adapter_gives_the_base(config_class: str) -> None:
    model, batch = tiny("bert")
    base = logits(model, batch)
    adapted = get_peft_model(model, getattr(inlay, config_class)())
    stir(adapted)
    wanted = logits(adapted, batch)
    adapted.merge_adapter()
    with adapted.disable_adapter():
        assert torch.equal(logits(adapted, batch), base)
    assert torch.equal(logits(adapted, batch), wanted)


@pytest.mark.parametrize("config_class", ["BiasTuningConfig", "NormTuningConfig"])
def test_unmerging_a_model_that_was_cast_meanwhile(config_class: str) -> None:
    model, batch = tiny("bert")
    adapted = get_peft_model(model, getattr(inlay, config_class)())
    adapted.merge_adapter()
    adapted.to(torch.bfloat16)
    adapted.unmerge_adapter()
    assert logits(adapted, batch).dtype == torch.bfloat16


@pytest.mark.parametrize("task_type", [None, "SEQ_CLS"])
@pytest.mark.parametrize("config_class", ["BiasTuningConfig", "NormTuningConfig"])
def test_one_config_serves_several_models(config_class: str, task_type: str | None, tmp_path: Path) -> None:
    config = getattr(inlay, config_class)(task_type=task_type)
    wanted = {}
    for family in ("bert", "gpt2", "bert"):
        model, batch = tiny(family)
        adapted = get_peft_model(model, config)
        assert adapted.peft_config["default"] is config
        adapted.add_adapter("other", config)
        stir(adapted)
        adapted.save_pretrained(tmp_path / family)
        wanted[family] = logits(adapted, batch)
        assert set(adapted.peft_config["default"].target_modules) == set(adapted.peft_config["other"].target_modules)
    for family, outputs in wanted.items():
        model, batch = tiny(family)
        again = PeftModel.from_pretrained(model, str(tmp_path / family))
        assert torch.equal(logits(again, batch), outputs)


def test_merging_is_refused_where_values_are_not_finite() -> None:
    adapted = get_peft_model(tiny("bert")[0], inlay.BiasTuningConfig())
    next(m for m in adapted.modules() if isinstance(m, BiasLayer)).inlay_bias_delta["default"].weight.data.fill_(
        float("nan")
    )
    with pytest.raises(InlayError, match="not finite"):
        adapted.merge_adapter(safe_merge=True)


def test_two_active_adapters_add_up() -> None:
    model, batch = tiny("gpt2", "causal-lm")
    adapted = get_peft_model(model, inlay.BiasTuningConfig(), adapter_name="one")
    adapted.add_adapter("two", inlay.BiasTuningConfig(target_modules=["c_attn"]))
    for name in ("one", "two"):
        adapted.set_adapter(name)
        stir(adapted, only=f".{name}.")
    adapted.base_model.set_adapter(["one", "two"])
    both = logits(adapted, batch)
    adapted.merge_adapter(adapter_names=["one", "two"])
    torch.testing.assert_close(logits(adapted, batch), both, atol=1e-5, rtol=1e-4)


def test_adapters_are_mixed_within_a_batch_of_text() -> None:
    model, batch = tiny("bert")
    plain = logits(model, batch)
    adapted = get_peft_model(model, inlay.BiasTuningConfig()).eval()
    stir(adapted)
    mixed = adapted(**batch, adapter_names=["default", "__base__", "default"]).logits
    alone = logits(adapted, batch)
    torch.testing.assert_close(mixed, torch.stack([alone[0], plain[1], alone[2]]))
    assert not torch.allclose(alone, plain)


def test_an_adapter_name_that_is_taken_is_refused() -> None:
    adapted = get_peft_model(tiny("bert")[0], LoraConfig(target_modules=["query"]))
    with pytest.raises(InlayError, match=r"already has an adapter called 'default' \(LORA\)"):
        get_peft_model(adapted.get_base_model(), inlay.BiasTuningConfig())


def test_standing_around_another_peft_model_is_refused() -> None:
    adapted = get_peft_model(tiny("bert")[0], LoraConfig(target_modules=["query"]))
    with pytest.raises(InlayError, match="get_base_model"):
        get_peft_model(adapted, inlay.BiasTuningConfig(), adapter_name="other")


@pytest.mark.parametrize("made_first", ["lora", "ours"])
@pytest.mark.parametrize("loaded_first", ["lora", "ours"])
@pytest.mark.parametrize("config_class", [inlay.BiasTuningConfig, inlay.NormTuningConfig])
def test_made_in_one_order_and_loaded_in_the_other(
    config_class: type, made_first: str, loaded_first: str, tmp_path: Path
) -> None:
    configs = {"lora": LoraConfig(target_modules=["query", "value"]), "ours": config_class(newly_initialised=[])}
    order = sorted(configs, key=lambda name: name != made_first)
    model, batch = tiny("bert")
    for name in order:
        adapted = get_peft_model(model, configs[name], adapter_name=name)
        stir(adapted, only=f".{name}")
    wanted = logits(adapted, batch)
    adapted.save_pretrained(tmp_path)
    again, _ = tiny("bert")
    for name in sorted(configs, key=lambda name: name != loaded_first):
        loaded = PeftModel.from_pretrained(again, str(tmp_path / name), adapter_name=name)
    assert torch.equal(logits(loaded, batch), wanted)


def test_small_steps_survive_a_bfloat16_base() -> None:
    model, batch = tiny("bert")
    adapted = get_peft_model(model.bfloat16(), inlay.BiasTuningConfig())
    delta = next(m for m in adapted.modules() if isinstance(m, BiasLayer)).inlay_bias_delta["default"].weight
    assert delta.dtype == torch.float32
    with torch.no_grad():
        for _ in range(100):
            delta.add_(1e-4)
    torch.testing.assert_close(delta, torch.full_like(delta, 1e-2))
    assert F.cross_entropy(logits(adapted, batch).float(), batch["labels"]).isfinite()


def test_unloading_one_of_two_methods_leaves_the_other() -> None:
    model, batch = tiny("bert")
    low_rank = get_peft_model(model, LoraConfig(target_modules=["query"]), adapter_name="low_rank")
    stir(low_rank)
    without = logits(low_rank, batch)
    ours = get_peft_model(model, inlay.BiasTuningConfig(newly_initialised=[]), adapter_name="ours")
    stir(ours, only=".ours.")
    both = logits(ours, batch)
    assert ours.merge_and_unload() is model
    torch.testing.assert_close(logits(low_rank, batch), both, atol=1e-5, rtol=1e-4)
    assert not torch.equal(both, without)
    assert list(low_rank.peft_config) == ["low_rank"]
    again = get_peft_model(model, inlay.BiasTuningConfig(newly_initialised=[]), adapter_name="ours")
    stir(again, only=".ours.")
    both = logits(again, batch)
    low_rank.merge_and_unload()
    torch.testing.assert_close(logits(model, batch), both, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("config_class", [inlay.BiasTuningConfig, inlay.NormTuningConfig])
def test_generating_with_a_cache_is_generating_with_the_merged_model(config_class: type) -> None:
    torch.manual_seed(0)
    model, batch = tiny("gpt2", "causal-lm")
    adapted = get_peft_model(model, config_class(task_type="CAUSAL_LM"))
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter))
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 1, "eos_token_id": None}
    ids = batch["input_ids"][:1]
    cached = adapted.generate(input_ids=ids, **options)
    assert torch.equal(adapted.generate(input_ids=ids, use_cache=False, **options), cached)
    with adapted.disable_adapter():
        plain = adapted.generate(input_ids=ids, **options)
    assert torch.equal(adapted.merge_and_unload().generate(input_ids=ids, **options), cached)
    assert not torch.equal(plain, cached)


def test_peft_s_own_status_knows_the_layers() -> None:
    adapted = get_peft_model(tiny("bert")[0], inlay.BiasTuningConfig())
    status = adapted.get_model_status()
    assert status.enabled is True
    assert status.active_adapters == ["default"]
    assert status.peft_types == {"default": "INLAY_BIAS"}
    layers = [layer for layer in adapted.get_layer_status() if layer.module_type == "bias.BiasLayer" or layer.enabled]
    assert len(layers) == 27


def test_leaves_a_head_alone_that_another_adapter_trains(tmp_path: Path) -> None:
    """PEFT runs the other adapter's copy of it, and would save nothing that hangs on the original."""
    whole, _ = tiny("vit")
    whole.save_pretrained(tmp_path / "base")
    model = type(whole).from_pretrained(tmp_path / "base")
    lora = LoraConfig(target_modules=["q_proj"], modules_to_save=["classifier"])
    stacked = get_peft_model(
        get_peft_model(model, lora, adapter_name="one").get_base_model(), inlay.BiasTuningConfig(), adapter_name="two"
    )
    names = [name for name, parameter in stacked.named_parameters() if "inlay_bias" in name]
    assert names
    assert not any("classifier" in name for name in names)
