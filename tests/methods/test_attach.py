"""The one door: settings, names, task types, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn

import inlay
from inlay.errors import InlayError
from inlay.methods.attach import attach, task_type, trained_parameters
from inlay.methods.capabilities import alternatives, capabilities, methods_for
from inlay.methods.plain import base_of, plain_modules, plain_name, plain_parameters
from inlay.methods.registry import all_methods, get
from probing import logits, probe
from zoo import tiny

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def test_settings_reach_the_config_and_override_the_defaults() -> None:
    adapted = attach(tiny("bert")[0], "lora", settings={"r": 2, "target_modules": ["key"], "lora_dropout": 0.1})
    config = adapted.peft_config["default"]
    assert (config.r, config.target_modules, config.lora_dropout, config.lora_alpha) == (2, {"key"}, 0.1, 16)
    assert "classifier" in config.modules_to_save
    assert attach(tiny("bert")[0], "lora").peft_config["default"].r == 8


@pytest.mark.parametrize(
    ("method", "settings", "message"),
    [
        ("lora", {"rank": 4}, r"Unknown setting of method 'lora' 'rank'\..*Known: .*\br\b"),
        ("lora", {"lora_alhpa": 4}, "Did you mean 'lora_alpha'"),
        ("lora", {"r": 0}, "r"),
        ("bias", {"layer": [1]}, "Did you mean 'layers'"),
        ("bias", {"peft_type": "LORA"}, "Unknown setting"),
        ("bias", {"resolved": True}, "Unknown setting"),
        ("prompt", {"num_virtual_tokens": 0}, "nothing to train"),
        ("lora", {"layers": 2}, r"layers=2 will not do: give a list of numbers"),
        ("lora", {"layers": [4]}, r"there is no layer 4; the model has 1 to 3"),
        ("lora", {"layers": []}, r"leave lora nothing to adapt in BertForSequenceClassification"),
        ("lora", {"layers_to_transform": "2"}, r"layers_to_transform='2' will not do"),
        ("lora", {"layers_to_transform": [3]}, r"\[3\] leave lora nothing to adapt.* layers 1 to 3 .*counts from 0"),
        ("lora", {"layers": [1], "target_modules": ["key"]}, "Give one of them"),
        ("prefix", {"layers": [1]}, "Unknown setting"),
        (
            "lora",
            {"modules_to_save": ["nope"]},
            r"Unknown module of modules_to_save 'nope'.*Known: .*\bclassifier\b.*\bpooler\b",
        ),
        ("bias", {"modules_to_save": ["pool"]}, "Unknown module of modules_to_save 'pool'.* Did you mean 'pooler'"),
        ("linear-probe", {"r": 1}, "has no settings"),
        ("full", {"r": 1}, "has no settings"),
    ],
)
def test_settings_that_do_not_fit_are_refused(method: str, settings: dict, message: str) -> None:
    with pytest.raises(InlayError, match=message):
        attach(tiny("bert")[0], method, settings=settings)


@pytest.mark.parametrize(
    ("method", "settings", "layers"),
    [
        ("lora", {"layers": [3]}, {3}),
        ("lora", {"layers": [1, 3]}, {1, 3}),
        ("lora", {"layers_to_transform": [2]}, {3}),
        ("lora", {"layers_to_transform": 0}, {1}),
        ("lora", {"layers_to_transform": [0, 2], "layers_pattern": "layer"}, {1, 3}),
        ("lora", {"layers_to_transform": [2], "target_modules": ["key"]}, {3}),
        ("vera", {"layers_to_transform": [1]}, {2}),
        ("vera", {"layers": [3]}, {3}),
        ("ia3", {"layers": [2]}, {2}),
        ("ln", {"layers": [2]}, {2}),
        ("lora", {"layers_to_transform": []}, {1, 2, 3}),
    ],
)
def test_pefts_methods_go_into_the_layers_that_were_asked_for(
    method: str, settings: dict, layers: set[int], tmp_path: Path
) -> None:
    """`layers` counts from 1; PEFT's own setting from 0. The saved adapter goes where it was."""
    adapted = attach(tiny("bert")[0], method, settings=settings)
    adapted.save_pretrained(tmp_path)
    for model in (adapted, PeftModel.from_pretrained(tiny("bert")[0], tmp_path, is_trainable=True)):
        trained = [name for name in trained_parameters(model) if "encoder.layer." in name]
        assert {int(name.split("encoder.layer.")[1].partition(".")[0]) + 1 for name in trained} == layers
        assert not any("embeddings" in name for name in trained_parameters(model))


def test_layers_of_lora_in_a_model_of_stages() -> None:
    """Where names have two numbers, a stage and a block in it, `layers` counts blocks as everywhere."""
    base = tiny("swin")[0]
    block = plain_name(inlay.anatomy(base).blocks[-1].name)
    adapted = attach(base, "lora", settings={"layers": [len(inlay.anatomy(base).blocks)]})
    names = adapted.peft_config["default"].target_modules
    assert names
    assert all(name.startswith(f"{block}.") for name in names)


@pytest.mark.parametrize("name", ["encoder", "bias", "a.b", "", "classifier"])
def test_adapter_names_that_clash_with_the_model_are_refused(name: str) -> None:
    with pytest.raises(InlayError, match="adapter_name"):
        attach(tiny("bert")[0], "lora", adapter_name=name)


def test_a_second_adapter_of_the_same_name_is_refused() -> None:
    first = attach(tiny("bert")[0], "lora")
    with pytest.raises(InlayError, match="already has an adapter called 'default'"):
        attach(first, "bias")


@pytest.mark.parametrize(
    ("family", "task", "kind", "wanted"),
    [
        ("bert", "classification", None, "SEQ_CLS"),
        ("bert", "classification", "regression", "SEQ_CLS"),
        ("bert", "token-classification", None, "TOKEN_CLS"),
        ("gpt2", "causal-lm", None, "CAUSAL_LM"),
        ("llama", "causal-lm", "data-to-text", "CAUSAL_LM"),
        ("vit", "classification", "image-classification", None),
        ("bert", "base", None, None),
        ("bert", "base", "pair-classification", "SEQ_CLS"),
    ],
)
def test_task_types(family: str, task: str, kind: str | None, wanted: str | None) -> None:
    assert task_type(tiny(family, task)[0], kind) == wanted


def test_an_unknown_kind_of_task_is_refused() -> None:
    with pytest.raises(InlayError, match="Did you mean 'regression'"):
        task_type(nn.Linear(2, 2), "regresion")


def test_named_new_modules_are_trained_though_they_were_loaded() -> None:
    for name in ("lora", "bias", "norm", "linear-probe"):
        adapted = attach(tiny("vit")[0], name, newly_initialised=["classifier", "vit.layernorm"])
        assert any("vit.layernorm" in parameter for parameter in trained_parameters(adapted)), name
    adapted = attach(tiny("vit")[0], "bias", newly_initialised=[])
    assert not any("modules_to_save" in parameter for parameter in trained_parameters(adapted))


def test_the_forms_train_what_they_say() -> None:
    model, _ = tiny("bert")
    everything = {name for name, _ in model.named_parameters()}
    assert trained_parameters(attach(model, "linear-probe")).keys() == {"classifier.weight", "classifier.bias"}
    assert trained_parameters(attach(model, "full")).keys() == everything
    assert attach(model, "full") is model


def test_a_probe_needs_something_new() -> None:
    with pytest.raises(InlayError, match=r"came with all its weights\. These work on it: .*\bbias, .*\bnorm, "):
        attach(tiny("gpt2", "causal-lm")[0], "linear-probe")


@pytest.mark.parametrize("method", ["prefix", "prompt", "p-tuning"])
def test_prompts_are_refused_for_images_and_bare_models(method: str) -> None:
    with pytest.raises(InlayError, match=r"These work on it: linear-probe, .*\bbias, .*\bnorm,"):
        attach(tiny("vit")[0], method)
    with pytest.raises(InlayError, match="reads images"):
        attach(tiny("vit")[0], method, force=True)
    with pytest.raises(InlayError, match="needs a model for a task on text"):
        attach(tiny("bert", "base")[0], method)


def test_an_architecture_that_was_not_probed_goes_by_its_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = tiny("gpt2")
    others = {name: kind for name, kind in capabilities()["model_types"].items() if name != "gpt2"}
    monkeypatch.setitem(capabilities(), "model_types", others)  # type: ignore[arg-type]
    with pytest.raises(InlayError, match="prompt does not work on GPT2ForSequenceClassification"):
        attach(model, "prompt")
    attach(model, "bias")


def test_a_model_of_no_known_architecture() -> None:
    adapted = attach(nn.Sequential(nn.Linear(2, 2)), "bias", newly_initialised=[])
    assert len(trained_parameters(adapted)) == 1
    with pytest.raises(InlayError, match="register_anatomy"):
        attach(nn.Sequential(nn.Linear(2, 2)), "lora", newly_initialised=[])
    attach(nn.Sequential(nn.Linear(2, 2)), "lora", settings={"target_modules": ["0"]}, newly_initialised=[])


def test_forcing_goes_past_what_the_probes_found() -> None:
    with pytest.raises(InlayError, match="does not work on GPT2ForSequenceClassification"):
        attach(tiny("gpt2")[0], "prompt")
    assert isinstance(attach(tiny("gpt2")[0], "prompt", force=True), PeftModel)


def test_modules_that_end_alike_are_not_trained_in_passing() -> None:
    with pytest.raises(InlayError, match="mlp_head too"):
        attach(tiny("modernbert")[0], "p-tuning", force=True)


def test_peft_s_own_methods_do_not_wrap_one_module_twice() -> None:
    first = attach(tiny("bert")[0], "lora", adapter_name="one")
    with pytest.raises(InlayError, match=r"ia3 and Linear would both wrap bert\.encoder"):
        attach(first, "ia3", adapter_name="two")
    attach(first, "ia3", adapter_name="two", settings={"target_modules": ["key"], "feedforward_modules": []})


def test_nothing_goes_inside_a_prompt() -> None:
    first = attach(tiny("bert")[0], "prompt", adapter_name="one")
    with pytest.raises(InlayError, match="the prompt last"):
        attach(first, "lora", adapter_name="two")


def test_the_head_in_use_is_the_last_one_s() -> None:
    model, batch = tiny("bert")
    first = attach(model, "lora", adapter_name="one")
    second = attach(first, "bias", adapter_name="two")
    heads = {n: p.requires_grad for n, p in second.named_parameters() if "modules_to_save" in n and "weight" in n}
    assert [trained for name, trained in heads.items() if ".one." in name] == [False]
    assert [trained for name, trained in heads.items() if ".two." in name] == [True]
    before = logits(second, batch)
    with torch.no_grad():
        model.classifier.modules_to_save["two"].bias.add_(1.0)
    assert not torch.equal(logits(second, batch), before)


def test_the_base_model_is_seen_through_what_peft_adds() -> None:
    model, _ = tiny("bert")
    names, modules = list(plain_parameters(model)), [name for name, _ in plain_modules(model)]
    for order in (("lora", "bias", "norm"), ("norm", "ln", "prompt")):
        adapted: nn.Module = tiny("bert")[0]
        for number, method in enumerate(order):
            try:
                adapted = attach(adapted, method, adapter_name=f"number{number}")
            except InlayError as error:
                assert "wrap" in str(error)  # noqa: PT017
        assert sorted(plain_parameters(adapted)) == sorted(names)
        assert sorted(name for name, _ in plain_modules(adapted)) == sorted(modules)
        assert type(base_of(adapted)) is type(model)


def test_alternatives_come_from_the_probes() -> None:
    assert "bias" not in methods_for("llama")
    for_images = {name for name, found in capabilities()["methods"].items() if not found.keys() & {"bert", "gpt2"}}
    without = for_images | {"prompt", "p-tuning"}
    assert methods_for("gpt2", "classification") == [name for name in all_methods() if name not in without]
    assert methods_for("no-such-type") == []
    assert alternatives(tiny("llama")[0], "norm").startswith("These work on it: linear-probe")
    assert "`inlay methods`" in alternatives(nn.Linear(1, 1), "norm")
    assert capabilities()["model_types"]["gemma"] == "gemma3_text"


def test_a_probe_says_what_is_wrong() -> None:
    assert probe(get("bias"), lambda: tiny("bert")) is None
    assert probe(get("prompt"), lambda: tiny("gpt2")) == "a row's class depends on the padding after it"
    assert "Expected input batch_size" in (probe(get("prompt"), lambda: tiny("bert", "token-classification")) or "")

    def unlabelled() -> tuple[nn.Module, dict[str, torch.Tensor]]:
        model, batch = tiny("bert")
        return model, batch | {"labels": torch.full((3,), -100)}

    assert probe(get("lora"), unlabelled) == "the loss is nan"


def test_goes_on_with_the_head_that_another_adapter_trained(tmp_path: Path) -> None:
    """By PEFT's own get_peft_model, as docs/stacking.md has it: what was trained is not lost, the new adapter's copy of
    it trains, and both load again."""
    model, batch = tiny("vit")
    lora = LoraConfig(target_modules=["q_proj"], modules_to_save=["classifier"])
    first = get_peft_model(model, lora, adapter_name="one")
    with torch.no_grad():
        for parameter in trained_parameters(first).values():
            parameter.add_(0.1)
    wanted = logits(first, batch)
    second = get_peft_model(first.get_base_model(), inlay.ActivationPromptConfig(layers=[2]), adapter_name="two")
    assert torch.equal(logits(second, batch), wanted)
    second(**batch).loss.backward()
    heads = {name: p for name, p in second.named_parameters() if ".classifier." in name and p.grad is not None}
    assert heads
    assert all(".two." in name for name in heads)
    with torch.no_grad():
        for parameter in trained_parameters(second).values():
            parameter.add_(0.1)
    second.save_pretrained(tmp_path)
    again = PeftModel.from_pretrained(tiny("vit")[0], tmp_path / "one", adapter_name="one")
    again = PeftModel.from_pretrained(again.get_base_model(), tmp_path / "two", adapter_name="two")
    assert torch.equal(logits(again, batch), logits(second, batch))


def test_a_language_model_without_a_new_head() -> None:
    """PEFT's model for it says None where others list the modules that it saves."""
    adapted = attach(tiny("gpt2", "causal-lm")[0], "lora", newly_initialised=[])
    assert adapted.modules_to_save is None
