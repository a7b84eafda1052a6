"""Attention scaling against plain attention in float64, and on the attention weights of whole models."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import transformers as hf
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import get_peft_model
from torch import Tensor, nn
from transformers.models.vit.modeling_vit import ViTAttention

import inlay
from inlay.errors import InlayError
from inlay.methods.attention_scale.layer import AttentionScaleLayer, ScaledChannels
from probing import logits
from zoo import GROUPED, SPECIAL, tiny

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@torch.no_grad()
def stir(module: nn.Module, scale: float = 0.1) -> None:
    for parameter in module.parameters():
        if parameter.requires_grad:
            parameter.add_(torch.randn_like(parameter), alpha=scale)


def layers(model: nn.Module) -> list[AttentionScaleLayer]:
    return [module for module in model.modules() if isinstance(module, AttentionScaleLayer)]


def scale_on(host: nn.Module, place: ScaledChannels) -> AttentionScaleLayer:
    layer = AttentionScaleLayer(host)
    layer.attach()
    layer.update_layer("default", place)
    layer.set_adapter("default")
    return layer


@settings(deadline=None, max_examples=20)
@given(st.integers(1, 2), st.integers(1, 4), st.integers(1, 3), st.integers(1, 3), st.booleans(), st.integers(0, 2**31))
def test_attention_and_gradients_against_a_plain_version(
    rows: int, tokens: int, heads: int, size: int, per_head: bool, seed: int
) -> None:
    torch.manual_seed(seed)
    d = heads * size
    config = hf.ViTConfig(hidden_size=d, num_attention_heads=heads, attn_implementation="sdpa")
    module = ViTAttention(config).double().eval().requires_grad_(False)
    plain = copy.deepcopy(module)
    place = ScaledChannels(d, ((0, d),), size if per_head else 1)
    of_queries, of_values = scale_on(module.q_proj, place), scale_on(module.v_proj, place)
    x = torch.randn(rows, tokens, d, dtype=torch.float64, requires_grad=True)
    assert torch.equal(module(x)[0], plain(x)[0])
    for layer in (of_queries, of_values):
        stir(layer, 0.5)
    trained = [layer.pieces["default"].weight for layer in (of_queries, of_values)]

    def attend(x: Tensor, *offsets: Tensor) -> Tensor:
        scales = [(1 + w).view(heads, 1) if per_head else (1 + w).view(heads, size) for w in offsets]
        q, k, v = (
            linear(x).view(rows, tokens, heads, size).transpose(1, 2)
            for linear in (plain.q_proj, plain.k_proj, plain.v_proj)
        )
        weights = torch.softmax((q * scales[0].unsqueeze(1)) @ k.mT / math.sqrt(size), dim=-1)
        mixed = weights @ (v * scales[1].unsqueeze(1))
        return plain.o_proj(mixed.transpose(1, 2).reshape(rows, tokens, d))

    found, wanted = module(x)[0], attend(x, *trained)
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-10)
    upstream = torch.randn_like(wanted)
    for mine, theirs in zip(
        torch.autograd.grad(found, [x, *trained], upstream),
        torch.autograd.grad(wanted, [x, *trained], upstream),
        strict=True,
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-8, atol=1e-10)


def test_gradcheck_of_a_fused_projection() -> None:
    host = nn.Linear(2, 12).double().requires_grad_(False)
    layer = scale_on(host, ScaledChannels(12, ((0, 4), (8, 12)), 2))
    stir(layer)
    x = torch.randn(2, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, *_: host(x), (x, *layer.parameters()))


@pytest.mark.parametrize(
    "family", ["bert", "distilbert", "electra", "modernbert", "gpt2", "opt", "llama", "vit", "clip"]
)
def test_scales_are_powers_of_the_attention_weights(family: str) -> None:
    """softmax(s l) is softmax(l)^s, made to sum to one again: so it must be in every architecture, head by head."""
    model, batch = tiny(family, "base")
    model.double().set_attn_implementation("eager")
    batch = {name: value.double() if value.is_floating_point() else value for name, value in batch.items()}
    with torch.no_grad():
        before = model(**batch, output_attentions=True).attentions[0]
        adapted = get_peft_model(model, inlay.AttentionScaleConfig(per="head", layers=[1]))
        (layer,) = layers(adapted)
        piece = layer.pieces["default"]
        piece.weight.copy_(torch.linspace(-0.5, 0.5, piece.weight.numel()))
        after = adapted(**batch, output_attentions=True).attentions[0]
    wanted = before ** (1 + piece.weight.detach()).view(1, -1, 1, 1)
    wanted = wanted / wanted.sum(-1, keepdim=True)
    rows = torch.isfinite(wanted).all(-1) & (before.max(-1).values < 1)  # not those that see one token, or none
    assert rows.any()
    torch.testing.assert_close(after[rows], wanted[rows], rtol=1e-5, atol=1e-6)


def test_where_queries_are_normed_the_scale_comes_after_the_norm() -> None:
    qwen = hf.Qwen3Config(**GROUPED, attn_implementation="eager")
    torch.manual_seed(0)
    for model in (tiny("gemma", "base")[0], hf.AutoModel.from_config(qwen).eval()):
        adapted = get_peft_model(model, inlay.AttentionScaleConfig(per="head"))
        targets = adapted.peft_config["default"].target_modules
        assert {name.rpartition(".")[2] for name in targets} == {"q_norm"}
        # One norm serves all heads: so does one scale.
        assert {layer.pieces["default"].weight.numel() for layer in layers(adapted)} == {1}
        batch = {"input_ids": torch.randint(3, SPECIAL["vocab_size"], (2, 7))}
        with torch.no_grad():
            before = adapted(**batch).last_hidden_state
            for layer in layers(adapted):
                layer.pieces["default"].weight.fill_(1.0)
            assert not torch.allclose(adapted(**batch).last_hidden_state, before, atol=1e-4)


FAMILIES = ["bert", "modernbert", "mpnet", "deberta-v2", "gpt2", "llama", "gemma", "t5", "vit", "swin", "clip"]


@pytest.mark.parametrize("family", FAMILIES)
def test_merged_models_compute_the_same(family: str) -> None:
    for scale, per in (("logits", "head"), ("both", "channel")):
        model, batch = tiny(family)
        batch = {name: value.double() if value.is_floating_point() else value for name, value in batch.items()}
        adapted = get_peft_model(model.double(), inlay.AttentionScaleConfig(scale=scale, per=per))
        stir(adapted)
        wanted = logits(adapted, batch)
        before = {name: value.clone() for name, value in adapted.state_dict().items()}
        adapted.merge_adapter()
        tolerance = 1e-5 if family in {"llama", "gemma", "t5"} else 1e-10  # those norm in float32
        torch.testing.assert_close(logits(adapted, batch), wanted, rtol=tolerance, atol=tolerance)
        adapted.unmerge_adapter()
        assert all(torch.equal(value, before[name]) for name, value in adapted.state_dict().items())


def test_a_fused_projection_is_scaled_in_its_part_alone() -> None:
    for scale, touched in (("logits", [0]), ("values", [2]), ("both", [0, 2])):
        model, _ = tiny("gpt2", "base")
        plain = copy.deepcopy(model.h[0].attn.c_attn)
        adapted = get_peft_model(model, inlay.AttentionScaleConfig(scale=scale, layers=[1]))
        (layer,) = layers(adapted)
        with torch.no_grad():
            layer.pieces["default"].weight.fill_(1.0)
        x = torch.randn(2, 16)
        found, wanted = (projection(x).chunk(3, dim=-1) for projection in (model.h[0].attn.c_attn, plain))
        for part in range(3):
            assert torch.equal(found[part], wanted[part] * (2 if part in touched else 1))


@pytest.mark.parametrize(
    ("family", "scale", "per", "wanted"),
    [
        ("vit", "logits", "channel", 3 * 16),
        ("vit", "logits", "head", 3 * 2),
        ("vit", "both", "channel", 3 * 32),
        ("gpt2", "both", "head", 3 * 4),
        ("llama", "logits", "head", 3 * 4),
        ("llama", "values", "head", 3 * 2),  # two heads of values serve four of queries
        ("llama", "both", "channel", 3 * (16 + 8)),
        ("swin", "logits", "head", 2 * 2 + 2 * 4),
    ],
)
def test_counts(family: str, scale: str, per: str, wanted: int) -> None:
    adapted = get_peft_model(tiny(family)[0], inlay.AttentionScaleConfig(scale=scale, per=per))
    assert sum(layer.pieces["default"].weight.numel() for layer in layers(adapted)) == wanted


def test_bad_settings_and_models_are_named() -> None:
    with pytest.raises(InlayError, match=r"scale.*both, logits, values"):
        inlay.AttentionScaleConfig(scale="keys")
    with pytest.raises(InlayError, match=r"per.*channel, head"):
        inlay.AttentionScaleConfig(per="layer")
    for family in ("resnet", "convnext"):
        with pytest.raises(InlayError, match=r"ForImageClassification has none\. These work on it: .*norm"):
            get_peft_model(tiny(family)[0], inlay.AttentionScaleConfig())
