"""What users of PEFT rely on, with our configs in place of its own: found by running its tests (tests/peft_suite)."""

from __future__ import annotations

import pickle
import threading
from typing import Any

import pytest
import torch
import transformers as hf
from peft import PeftModel, get_peft_model, get_peft_model_state_dict, inject_adapter_in_model
from torch import Tensor, nn
from transformers import BertConfig, BertForMaskedLM, T5ForConditionalGeneration

import inlay
from inlay.errors import InlayError
from inlay.methods.registry import all_methods
from probing import logits
from zoo import ENCODER, t5_config, tiny

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

BY_TYPE = [inlay.BiasTuningConfig, inlay.NormTuningConfig, inlay.SSFConfig, inlay.MultiLoraConfig]


class Net(nn.Module):
    """A module of one's own: no config, and inputs by any name or by none."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(4, 6)
        self.norm = nn.LayerNorm(6)
        self.last = nn.Linear(6, 3)

    def forward(self, signal: Any, scale: float = 1.0) -> Tensor:
        x = signal["x"] if isinstance(signal, dict) else signal
        return self.last(self.norm(self.first(x * scale)).relu())


@torch.no_grad()
def stir(model: nn.Module, scale: float = 0.3) -> None:
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.add_(torch.randn_like(parameter), alpha=scale)


def test_inlays_error_is_a_value_error_as_pefts_are() -> None:
    with pytest.raises(ValueError, match="bottleneck=0"):
        inlay.BottleneckAdapterConfig(bottleneck=0)


# Tied weights.


def t5() -> T5ForConditionalGeneration:
    torch.manual_seed(0)
    model = T5ForConditionalGeneration(t5_config()).double().eval()
    assert model.lm_head.weight is model.shared.weight
    return model


def test_ssf_leaves_a_tied_language_model_head_alone_and_merges_exactly() -> None:
    inputs = {"input_ids": torch.tensor([[5, 6, 7, 2]]), "decoder_input_ids": torch.tensor([[1, 8, 9]])}
    adapted = get_peft_model(t5(), inlay.SSFConfig())
    assert not any("lm_head" in name for name in adapted.peft_config["default"].target_modules)
    stir(adapted)
    with torch.no_grad():
        unmerged = adapted(**inputs).logits
        merged = adapted.merge_and_unload()(**inputs).logits
        assert (unmerged - t5()(**inputs).logits).abs().max() > 1e-3
    torch.testing.assert_close(merged, unmerged, rtol=0, atol=1e-10)


class Tied(nn.Module):
    """Two layers of one weight and one bias."""

    def __init__(self, norms: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two = (nn.LayerNorm(4), nn.LayerNorm(4)) if norms else (nn.Linear(4, 4), nn.Linear(4, 4))
        self.two.weight, self.two.bias = self.one.weight, self.one.bias

    def forward(self, x: Tensor) -> Tensor:
        return self.two(torch.tanh(self.one(x)))


@pytest.mark.parametrize("config", BY_TYPE)
def test_nothing_is_merged_into_a_weight_that_another_module_has_too(config: type) -> None:
    adapted = get_peft_model(Tied(norms=config is inlay.NormTuningConfig).double(), config(target_modules=["one"]))
    stir(adapted)
    x = torch.randn(3, 4, dtype=torch.float64)
    before = adapted(x)
    for merge in (adapted.merge_adapter, adapted.merge_and_unload):
        with pytest.raises(InlayError, match=r"one and two are one (weight|bias) in this model"):
            merge()
        assert torch.equal(adapted(x), before)


def test_a_bias_that_two_modules_have_is_not_merged_into() -> None:
    model = BertForMaskedLM(BertConfig(**ENCODER))
    adapted = get_peft_model(model, inlay.BiasTuningConfig())
    with pytest.raises(InlayError, match=r"cls\.predictions and cls\.predictions\.decoder are one bias"):
        adapted.merge_and_unload()


# Multi-LoRA's rows.


@pytest.mark.parametrize(
    "call", [{"signal": None}, {"signal": "in a dictionary"}, {}], ids=["by keyword", "in a dictionary", "by position"]
)
def test_as_many_names_as_rows_whatever_the_input_is_called(call: dict[str, Any]) -> None:
    adapted = get_peft_model(Net(), inlay.MultiLoraConfig(target_modules=["first"]), adapter_name="a")
    adapted.add_adapter("b", inlay.MultiLoraConfig(target_modules=["first"]))
    stir(adapted)
    x = torch.randn(10, 4)
    given = {"signal": {"x": x} if call["signal"] else x} if call else {}
    positional = () if call else (x,)
    with pytest.raises(ValueError, match="5 names, and the batch has 10 rows"):
        adapted(*positional, **given, adapter_names=["a", "b", "a", "b", "a"])
    names = ["a", "b"] * 5
    mixed = adapted(*positional, **given, adapter_names=names)
    for row, name in enumerate(names):
        adapted.set_adapter(name)
        torch.testing.assert_close(mixed[row], adapted(x[row : row + 1])[0])


class Hidden(Net):
    """Its rows cannot be counted from outside."""

    def forward(self, batch: Any) -> Tensor:
        return super().forward(batch.x)


class Batch:
    def __init__(self, x: Tensor) -> None:
        self.x = x


def test_rows_that_cannot_be_counted_in_the_call_are_counted_in_the_layers() -> None:
    adapted = get_peft_model(Hidden(), inlay.MultiLoraConfig(target_modules=["first"]), adapter_name="a")
    adapted.add_adapter("b", inlay.MultiLoraConfig(target_modules=["first"]))
    with pytest.raises(ValueError, match="5 names, and a layer was given 10 rows"):
        adapted(Batch(torch.randn(10, 4)), adapter_names=["a", "b", "a", "b", "a"])
    assert adapted(Batch(torch.randn(5, 4)), adapter_names=["a", "b", "a", "b", "a"]).shape == (5, 3)


class WithGRU(Net):
    def __init__(self) -> None:
        super().__init__()
        self.last = nn.GRU(6, 3)

    def forward(self, signal: Tensor) -> Tensor:
        return self.last(self.first(signal))[0]


def test_a_head_that_cannot_run_for_several_tasks_at_once_is_an_error_of_ours() -> None:
    settings = {"target_modules": ["first"], "modules_to_save": ["last"]}
    adapted = get_peft_model(WithGRU(), inlay.MultiLoraConfig(**settings), adapter_name="a").eval()
    adapted.add_adapter("b", inlay.MultiLoraConfig(**settings))
    with pytest.raises(InlayError, match="GRU cannot be run for several tasks at once"):
        adapted(torch.randn(4, 4), adapter_names=["a", "b", "a", "b"])


# Rows of other methods.


@pytest.mark.parametrize("config", [inlay.BiasTuningConfig, inlay.NormTuningConfig, inlay.SSFConfig])
def test_rows_of_several_adapters_in_one_batch(config: type) -> None:
    targets = ["norm"] if config is inlay.NormTuningConfig else ["first"]
    settings = {"target_modules": targets, "modules_to_save": ["last"]}
    adapted = get_peft_model(Net().double().eval(), config(**settings), adapter_name="a").eval()
    adapted.add_adapter("b", config(**settings))
    for name, parameter in adapted.named_parameters():
        if ".a." in name or ".b." in name:
            parameter.data.add_(torch.randn_like(parameter), alpha=0.3)
    x = torch.randn(6, 4, dtype=torch.float64)
    names = ["a", "b", "__base__", "b", "a", "a"]
    mixed = adapted(x, adapter_names=names)
    for row, name in enumerate(names):
        if name == "__base__":
            with adapted.disable_adapter():
                wanted = adapted(x[row : row + 1])
        else:
            adapted.set_adapter(name)
            wanted = adapted(x[row : row + 1])
        torch.testing.assert_close(mixed[row], wanted[0], rtol=0, atol=1e-12)
    refused = {"3 names, and the batch has 6 rows": names[:3], "Unknown adapter": ["c"] * 6, "a list": "a"}
    for words, wrong in refused.items():
        with pytest.raises(InlayError, match=words):
            adapted(x, adapter_names=wrong)
    with pytest.raises(InlayError, match="while the model trains"):
        adapted.train()(x, adapter_names=names)
    adapted.eval().merge_adapter()
    with pytest.raises(InlayError, match="while an adapter is merged"):
        adapted(x, adapter_names=names)


def test_a_thread_does_not_take_the_rows_of_another_ones_pass() -> None:
    adapted = get_peft_model(Net(), inlay.BiasTuningConfig(target_modules=["first"]), adapter_name="a").eval()
    stir(adapted)
    x, found = torch.randn(4, 4), []
    wanted = adapted(x[:3])

    class Meanwhile(nn.Module):
        def forward(self, y: Tensor) -> Tensor:
            if not found:
                found.append(None)
                thread = threading.Thread(target=lambda: found.append(adapted(x[:3])))
                thread.start()
                thread.join()
            return y

    adapted.base_model.model.norm = nn.Sequential(Meanwhile(), adapted.base_model.model.norm)
    adapted(x, adapter_names=["__base__"] * 4)
    assert torch.equal(found[1], wanted)


def test_a_method_that_acts_on_more_than_rows_does_not_mix_them() -> None:
    adapted = get_peft_model(tiny("bert")[0], inlay.AdaptFormerConfig(), adapter_name="a").eval()
    with pytest.raises(InlayError, match="does not mix adapters within a batch"):
        adapted(**tiny("bert")[1], adapter_names=["a", "a", "__base__"])


# Gradients and precision.


def test_what_is_switched_off_does_not_train_and_trains_again_afterwards() -> None:
    model, _ = tiny("bert")
    adapted = get_peft_model(model, inlay.MultiLoraConfig(task_type="SEQ_CLS"), adapter_name="a")
    adapted.add_adapter("b", inlay.MultiLoraConfig(task_type="SEQ_CLS"))
    adapted.add_adapter("frozen", inlay.MultiLoraConfig(task_type="SEQ_CLS", inference_mode=True))

    def trained() -> set[str]:
        return {name for name, parameter in adapted.named_parameters() if parameter.requires_grad}

    before = trained()
    assert any(".a." in name for name in before)
    assert any(".b." in name for name in before)
    assert not any(".frozen." in name for name in before)
    for _ in range(2):
        adapted.base_model.disable_adapter_layers()
        assert not trained()
    adapted.base_model.enable_adapter_layers()
    assert trained() == before
    with adapted.disable_adapter():
        assert not trained()
    assert trained() == before


@pytest.mark.parametrize(
    ("config", "family"),
    [
        (lambda: inlay.VPTConfig(gated=True, temperature=True, deep=False), "vit"),
        (lambda: inlay.E2VPTConfig(), "vit"),
        (lambda: inlay.NTKAttentionConfig(), "bert"),
        (lambda: inlay.BiasTuningConfig(), "bert"),
        (lambda: inlay.NormTuningConfig(), "bert"),
        (lambda: inlay.SSFConfig(), "bert"),
        (lambda: inlay.BottleneckAdapterConfig(), "bert"),
        (lambda: inlay.AdaptFormerConfig(), "bert"),
        (lambda: inlay.AttentionScaleConfig(), "bert"),
        (lambda: inlay.ActivationPromptConfig(layers=[1]), "vit"),
        (lambda: inlay.InfoPromptConfig(), "bert"),
        (lambda: inlay.MultiLoraConfig(), "bert"),
    ],
)
def test_an_adapter_has_the_base_models_precision_where_autocast_adapter_dtype_is_off(config: Any, family: str) -> None:
    for autocast, wanted in ((False, torch.bfloat16), (True, torch.float32)):
        model, inputs = tiny(family)
        adapted = get_peft_model(model.bfloat16(), config(), autocast_adapter_dtype=autocast).eval()
        ours = {p.dtype for name, p in adapted.named_parameters() if p.requires_grad and "modules_to_save" not in name}
        assert ours == {wanted}
        with torch.no_grad():
            inputs = {key: x.bfloat16() if x.is_floating_point() else x for key, x in inputs.items() if key != "labels"}
            assert torch.isfinite(logits(adapted, inputs)).all()


@pytest.mark.parametrize("config", BY_TYPE)
def test_weights_that_are_to_be_left_empty_are(config: type) -> None:
    targets = ["norm"] if config is inlay.NormTuningConfig else ["first"]
    model = inject_adapter_in_model(config(target_modules=targets), Net(), low_cpu_mem_usage=True)
    assert {p.device.type for name, p in model.named_parameters() if "inlay_" in name} == {"meta"}


# The config.


def test_the_model_keeps_the_config_that_it_is_given_and_a_second_model_is_served_by_it_too() -> None:
    for make in (inlay.SSFConfig, inlay.MultiLoraConfig, inlay.NTKAttentionConfig):
        config = make()
        bert = get_peft_model(tiny("bert")[0], config)
        assert bert.peft_config["default"] is config
        saved = config.to_dict()
        config.revision = saved["revision"] = "main"  # an edit, which is kept
        opt = get_peft_model(tiny("opt", "base")[0], config)
        assert opt.peft_config["default"] is config
        assert config.revision == "main"
        assert bert.peft_config["default"].to_dict() == saved  # the first model's is what it was
        opt.add_adapter("other", config)
        assert opt.peft_config["other"] is config
        assert opt.peft_config["default"].target_modules == pickle.loads(pickle.dumps(config)).target_modules
        fresh = get_peft_model(tiny("opt", "base")[0], make())
        keys = ("target_modules", "modules_to_save", "newly_initialised")
        mine, wanted = (each.peft_config["default"] for each in (opt, fresh))
        assert all(getattr(mine, key) == getattr(wanted, key) for key in keys)


def test_a_config_that_a_model_refuses_is_left_as_it_was() -> None:
    config = inlay.BiasTuningConfig()
    before = config.to_dict()
    with pytest.raises(InlayError, match="has none"):
        get_peft_model(tiny("t5")[0], config)
    assert config.to_dict() == {**before, "base_model_name_or_path": config.base_model_name_or_path}
    assert get_peft_model(tiny("bert")[0], config).peft_config["default"] is config


def test_seeds_that_a_model_drew_are_drawn_anew_for_another_model() -> None:
    config = inlay.E2VPTConfig()
    one, other = (get_peft_model(tiny("vit")[0], config).peft_config["default"].seed for _ in range(2))
    assert one != other


# Modules that are trained whole.


@pytest.mark.parametrize("config", [inlay.BiasTuningConfig, inlay.MultiLoraConfig])
def test_what_one_adapter_adapts_another_does_not_train_whole(config: type) -> None:
    adapted = get_peft_model(Net(), config(target_modules=["last"]), adapter_name="a")
    with pytest.raises(InlayError, match="last is adapted by another adapter of the model"):
        adapted.add_adapter("b", config(target_modules=["first"], modules_to_save=["last"]))
    saved = get_peft_model_state_dict(adapted, adapter_name="a")
    assert len(saved) == 1  # PEFT would have saved nothing of it, without a word


@pytest.mark.parametrize("config", [inlay.BiasTuningConfig, inlay.SSFConfig])
def test_a_head_that_peft_trains_whole_is_not_adapted_too(config: type, tmp_path: Any) -> None:
    tiny("bert")[0].save_pretrained(tmp_path / "base")
    model = hf.BertForSequenceClassification.from_pretrained(tmp_path / "base")  # with its classifier
    adapted = get_peft_model(model, config(task_type="SEQ_CLS"))
    assert not [name for name in adapted.peft_config["default"].target_modules if name.startswith("classifier")]
    adapted.add_adapter("other", config(task_type="SEQ_CLS"))
    adapted.save_pretrained(tmp_path / "adapter")
    again = PeftModel.from_pretrained(
        hf.BertForSequenceClassification.from_pretrained(tmp_path / "base"), str(tmp_path / "adapter" / "other")
    )
    assert torch.equal(logits(again, tiny("bert")[1]), logits(adapted.eval(), tiny("bert")[1]))


# Models that nobody has described.


@pytest.mark.parametrize("config", BY_TYPE)
def test_a_plain_module_is_adapted_saved_and_loaded(config: type, tmp_path: Any) -> None:
    targets = ["norm"] if config is inlay.NormTuningConfig else ["first"]
    adapted = get_peft_model(Net(), config(target_modules=targets))
    assert list(adapted.peft_config["default"].target_modules) == targets
    assert adapted.peft_config["default"].modules_to_save is None
    x = torch.randn(2, 4)
    assert torch.equal(adapted(x), Net()(x))
    stir(adapted)
    adapted.save_pretrained(tmp_path)
    again = PeftModel.from_pretrained(Net(), str(tmp_path))
    assert torch.equal(again(x), adapted(x))
    assert not torch.equal(again(x), Net()(x))


@pytest.mark.parametrize("config", [inlay.BiasTuningConfig, inlay.SSFConfig, inlay.MultiLoraConfig])
def test_all_linear_is_every_linear_layer_but_those_of_heads(config: type) -> None:
    model = t5() if config is inlay.SSFConfig else tiny("gpt2", "causal-lm")[0]
    found = set(get_peft_model(model, config(target_modules="all-linear")).peft_config["default"].target_modules)
    kinds = (nn.Linear, type(tiny("gpt2", "causal-lm")[0].transformer.h[0].attn.c_attn))
    linear = {name for name, module in model.named_modules() if isinstance(module, kinds) and name != "lm_head"}
    assert found == linear


def undescribed(name: str) -> tuple[nn.Module, dict[str, Tensor]]:
    """Architectures beside the zoo's: of each the class that PEFT's tests use."""
    sizes = {key: value for key, value in ENCODER.items() if key in ("vocab_size", "pad_token_id")}
    torch.manual_seed(0)
    ids = {"input_ids": torch.randint(3, 40, (2, 5))}
    if name == "gptj":
        config = hf.GPTJConfig(**sizes, n_embd=16, n_layer=2, n_head=2, n_inner=24, n_positions=40, rotary_dim=4)
        return hf.GPTJForCausalLM(config).eval(), ids
    if name == "deberta":
        options = {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]}
        return hf.DebertaModel(hf.DebertaConfig(**ENCODER, **options)).eval(), ids
    sides = {f"{side}_{key}": 2 for side in ("encoder", "decoder") for key in ("layers", "attention_heads")}
    config = hf.BartConfig(**sizes, **sides, d_model=16, encoder_ffn_dim=24, decoder_ffn_dim=24)
    return hf.BartForConditionalGeneration(config).eval(), ids | {"decoder_input_ids": ids["input_ids"][:, :3]}


@pytest.mark.parametrize("architecture", ["gptj", "deberta", "bart"])
def test_methods_on_architectures_beside_the_zoos_work_or_say_why_not(architecture: str, tmp_path: Any) -> None:
    works = []
    for name, method in all_methods().items():
        if method.tuner is None:
            continue
        model, inputs = undescribed(architecture)
        before = model(**inputs)[0]
        try:
            adapted = get_peft_model(model, method.config_class()(**method.settings)).eval()
        except InlayError as error:
            assert "\n" in str(error) or str(error).endswith(".")  # noqa: PT017
            continue
        if method.identity_at_start:
            torch.testing.assert_close(adapted(**inputs)[0], before, rtol=0, atol=1e-6)
        stir(adapted)
        wanted = adapted(**inputs)[0]
        assert not torch.equal(wanted, before)
        adapted.save_pretrained(tmp_path / name)
        again = PeftModel.from_pretrained(undescribed(architecture)[0], str(tmp_path / name)).eval()
        assert torch.equal(again(**inputs)[0], wanted)
        works.append(name)
    assert {"adapter", "adaptformer", "bias", "multi-lora", "norm", "ssf"} <= set(works)


def test_multi_lora_on_a_plain_module_asks_for_what_to_adapt() -> None:
    with pytest.raises(
        InlayError, match=r"(?s)Unknown architecture.*Or name what multi-lora is to adapt: target_modules"
    ):
        get_peft_model(Net(), inlay.MultiLoraConfig())


def test_all_linear_of_a_method_for_other_layers_is_refused() -> None:
    with pytest.raises(InlayError, match="none of what this method adapts is a linear layer"):
        get_peft_model(tiny("bert")[0], inlay.NormTuningConfig(target_modules="all-linear"))
