"""NTK-Attention and the first token of a text: the term that is off there, and the centre that is its key."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel, get_peft_model
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

import inlay
from inlay.anatomy import anatomy
from inlay.errors import InlayError
from inlay.methods.attach import trained_parameters
from inlay.methods.ntk_attention.first import sees_one
from inlay.methods.ntk_attention.layer import NTKAttentionLayer
from inlay.methods.prompts import read
from zoo import PAD, tiny

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
SETTINGS: list[dict[str, Any]] = [
    {"skip_first": True},
    {"centred": True, "centre_id": 2},
    {"skip_first": True, "centred": True, "centre_id": 2, "feature_multiplier": 2},
]
IDS = torch.randint(3, 40, (2, 6), generator=torch.Generator().manual_seed(0))
POSITIONS = torch.tensor([[0, 1, 2, 3, 0, 1, 2]])


def adapted(family: str = "llama", moved: bool = True, **settings: Any) -> Any:
    model = get_peft_model(tiny(family, "causal-lm")[0], inlay.NTKAttentionConfig(seed=0, **settings)).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for _, parameter in sorted(trained_parameters(model).items()) if moved else ():
            parameter.add_(torch.randn(parameter.shape, generator=generator).to(parameter), alpha=0.5)
    return model


def layers(model: nn.Module) -> list[NTKAttentionLayer]:
    return [module for module in model.modules() if isinstance(module, NTKAttentionLayer)]


# The oracle: the equation with the scores in full, in float64.


def plain(query: Tensor, key: Tensor, value: Tensor, added: Tensor | None, scale: float, prefix: Any) -> Tensor:
    rows, groups = prefix.kappa.weight.shape[-1], query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = query @ key.mT * scale + (0 if added is None else added)
    signs = [1, -1][: rows // query.shape[-1]]
    phi = torch.cat([nn.functional.elu(query * sign * scale**0.5) + 1 for sign in signs], -1) / rows**0.5
    if prefix.centre is not None:
        phi = phi * (scale * (query * prefix.centre()[:, None]).sum(-1, keepdim=True)).exp()
    if prefix.skip_first:
        phi = phi * ((scores > -1e4).sum(-1, keepdim=True) != 1)
    above = scores.exp() @ value + phi @ prefix.z_a() @ prefix.z_b()
    return above / (scores.exp().sum(-1, keepdim=True) + phi @ prefix.kappa()[..., None])


@pytest.fixture
def oracle() -> Iterator[Any]:
    """`oracle(model)` computes every attention by `plain`, with the prefixes that the model has."""
    held: dict[nn.Module, Any] = {}

    def attention(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, None]:
        return plain(query, key, value, mask, kwargs["scaling"], held[module]).transpose(1, 2), None

    AttentionInterface.register("first_oracle", attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register("first_oracle", ALL_MASK_ATTENTION_FUNCTIONS["eager"])

    def use(model: Any) -> Any:
        base = tiny("llama", "causal-lm")[0].double().eval()
        for block, layer in zip(anatomy(base).blocks, layers(model), strict=True):
            assert block.attention is not None
            held[block.attention.module] = layer.inlay_ntk_prefix["default"].double()
        base.set_attn_implementation("first_oracle")
        return base

    yield use
    for registry in (AttentionInterface._global_mapping, ALL_MASK_ATTENTION_FUNCTIONS._global_mapping):
        registry.pop("first_oracle", None)


def calls() -> dict[str, dict[str, Tensor]]:
    """Whole texts; padding on the left and on the right; two texts in a row."""
    mask = torch.ones_like(IDS)
    left, right = mask.clone(), mask.clone()
    left[1, :3], right[1, 4:] = 0, 0
    return {
        "whole": {"input_ids": IDS},
        "left": {"input_ids": IDS, "attention_mask": left, "position_ids": (left.cumsum(1) - 1).clamp(min=0)},
        "right": {"input_ids": IDS, "attention_mask": right},
        "packed": {"input_ids": IDS.reshape(1, -1)[:, :7], "position_ids": POSITIONS},
    }


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("call", ["whole", "left", "right", "packed"])
def test_models_and_gradients_are_those_of_the_equation(
    call: str, settings: dict[str, Any], implementation: str, oracle: Any
) -> None:
    model = adapted(**settings).double()
    model.set_attn_implementation(implementation)
    inputs = calls()[call]
    real = inputs.get("attention_mask", torch.ones_like(inputs["input_ids"])).bool()
    weight = torch.randn(40, dtype=torch.float64, generator=torch.Generator().manual_seed(2))

    def run(network: Any) -> tuple[Tensor, list[Tensor]]:
        logits = network(**inputs, use_cache=False).logits[real]
        trained = [p for layer in layers(model) for p in layer.parameters() if p.requires_grad]
        return logits.detach(), list(torch.autograd.grad((logits[:, :40] @ weight).square().sum(), trained))

    found, gradients = run(model)
    wanted, exact = run(oracle(model))
    torch.testing.assert_close(found, wanted, atol=1e-9, rtol=1e-9)
    torch.testing.assert_close(gradients, exact, atol=1e-8, rtol=1e-8)
    plainly = adapted(**{name: value for name, value in settings.items() if name == "feature_multiplier"}).double()
    assert not torch.allclose(plainly(**inputs, use_cache=False).logits[real], wanted, atol=1e-4)


@pytest.mark.parametrize("family", ["llama", "gpt2", "opt", "gemma"])
@pytest.mark.parametrize("settings", SETTINGS)
def test_it_starts_as_the_base_model(family: str, settings: dict[str, Any]) -> None:
    base = tiny(family, "causal-lm")[0].eval()(input_ids=IDS).logits
    assert torch.equal(adapted(family, moved=False, **settings)(input_ids=IDS).logits, base)


def test_the_first_token_is_the_base_models() -> None:
    base = tiny("llama", "causal-lm")[0].eval()(input_ids=IDS).logits
    logits = adapted(skip_first=True)(input_ids=IDS).logits
    torch.testing.assert_close(logits[:, 0], base[:, 0])
    assert not torch.allclose(logits[:, 1], base[:, 1], atol=1e-3)


@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("length", [1, 5])
def test_generation_with_a_cache_is_generation_without(family: str, cache: str | None, length: int) -> None:
    model = adapted(family, skip_first=True, centred=True, centre_id=2)
    options: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": PAD, "eos_token_id": None}
    options |= {"output_logits": True, "return_dict_in_generate": True, "input_ids": IDS[:, :length]}
    whole = model.generate(use_cache=False, **options)
    kept = model.generate(use_cache=True, cache_implementation=cache, **options)
    assert torch.equal(whole.sequences, kept.sequences)
    torch.testing.assert_close(torch.stack(whole.logits), torch.stack(kept.logits), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("cut", [1, 2, 4])
def test_a_text_in_chunks_is_the_text_at_once(cut: int) -> None:
    model = adapted(skip_first=True)
    whole = model(input_ids=IDS).logits
    before = model(input_ids=IDS[:, :cut], use_cache=True)
    after = model(input_ids=IDS[:, cut:], past_key_values=before.past_key_values).logits
    torch.testing.assert_close(torch.cat([before.logits, after], 1), whole, atol=1e-5, rtol=1e-5)


def test_padded_generation_is_generation_of_each_text() -> None:
    model = adapted(skip_first=True)
    mask = calls()["left"]["attention_mask"]
    options: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": PAD, "eos_token_id": None}
    padded = model.generate(input_ids=IDS.masked_fill(mask == 0, PAD), attention_mask=mask, **options)
    alone = model.generate(input_ids=IDS[1:, 3:], **options)
    assert torch.equal(padded[1, 6:], alone[0, 3:])


def test_masks_of_each_head_and_causality_beside_a_mask() -> None:
    query, key = torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3, 4)
    value = torch.arange(24.0).reshape(1, 2, 3, 4)
    mask = torch.tensor([[[1, 0, 0], [0, 1, 0], [1, 1, 1]], [[0, 0, 1], [1, 1, 0], [1, 1, 1]]]).bool()[None]
    found = sees_one(query, key, mask, False)
    assert found is not None
    given = found.give(torch.full((1, 2, 3, 4), -1.0), value)
    wanted = torch.full((1, 2, 3, 4), -1.0)
    wanted[0, 0, 0], wanted[0, 0, 1], wanted[0, 1, 0] = value[0, 0, 0], value[0, 0, 1], value[0, 1, 2]
    assert torch.equal(given, wanted)
    padding = torch.tensor([False, True, True])[None, None, None]  # the second token is then the first
    found = sees_one(query, key, padding, True)
    assert found is not None
    assert found.which is not None
    assert found.which[0, 0].tolist() == [False, True, False]


def test_an_encoder_sees_more_than_one_key() -> None:
    assert sees_one(torch.zeros(1, 1, 3, 2), torch.zeros(1, 1, 3, 2), None, False) is None


def test_eager_weights_of_the_first_token_are_its_own() -> None:
    model = adapted(skip_first=True)
    model.set_attn_implementation("eager")
    weights = model(input_ids=IDS, output_attentions=True).attentions
    for layer in weights:
        torch.testing.assert_close(layer[:, :, 0, 0], torch.ones_like(layer[:, :, 0, 0]))
        assert (layer[:, :, 1:].sum(-1) < 1 - 1e-4).all()  # the rest is the prefix's


@pytest.mark.parametrize("settings", SETTINGS)
def test_it_reloads_to_the_bit(settings: dict[str, Any], tmp_path: Path) -> None:
    model = adapted(**settings)
    model.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "adapter_config.json").read_text())
    assert {name: saved[name] for name in settings} == settings
    again = PeftModel.from_pretrained(tiny("llama", "causal-lm")[0], str(tmp_path)).eval()
    with torch.no_grad():
        assert torch.equal(again(input_ids=IDS).logits, model(input_ids=IDS).logits)


def test_adapters_from_before_these_settings_compute_what_they_did(tmp_path: Path) -> None:
    model = adapted()
    model.save_pretrained(tmp_path)
    file = tmp_path / "adapter_config.json"
    saved = json.loads(file.read_text())
    for name in ("skip_first", "centred", "centre_id"):
        del saved[name]
    file.write_text(json.dumps(saved))
    again = PeftModel.from_pretrained(tiny("llama", "causal-lm")[0], str(tmp_path)).eval()
    assert not any(layer.inlay_ntk_prefix["default"].skip_first for layer in layers(again))
    with torch.no_grad():
        assert torch.equal(again(input_ids=IDS).logits, model(input_ids=IDS).logits)


def test_the_centre_is_the_key_of_that_token() -> None:
    model = adapted("gpt2", centred=True, centre_id=2)
    prompt = read(tiny("gpt2", "causal-lm")[0], [2])
    for number, layer in enumerate(layers(model), start=1):
        torch.testing.assert_close(layer.inlay_ntk_prefix["default"].centre(), prompt.keys_and_values(number)[0][:, 0])


def test_adapters_of_other_settings_run_one_at_a_time() -> None:
    model = adapted()
    model.add_adapter("other", inlay.NTKAttentionConfig(seed=0, skip_first=True))
    model.base_model.set_adapter(["default", "other"])
    with pytest.raises(InlayError, match="skip_first"):
        model(input_ids=IDS)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"skip_first": True, "start": "text", "prompt_ids": [3]}, "skip_first=True hides"),
        ({"centred": True, "start": "prefix"}, "centred=True takes"),
        ({"centre_id": 3}, "says nothing without centred"),
        ({"skip_first": "no"}, "skip_first='no'"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InlayError, match=message):
        inlay.NTKAttentionConfig(**settings)


def test_a_centre_is_a_decoders() -> None:
    model = tiny("llama", "causal-lm")[0]
    model.config.bos_token_id = None
    with pytest.raises(InlayError, match="names no first token"):
        get_peft_model(model, inlay.NTKAttentionConfig(centred=True))
    with pytest.raises(InlayError, match="is no decoder"):
        get_peft_model(tiny("bert", "base")[0], inlay.NTKAttentionConfig(centred=True, centre_id=3))
