"""The parameter counts of tables 1 to 4 of the NTK-Attention paper, of models of their shapes without weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, OPTConfig, OPTForCausalLM, ViTConfig, ViTForImageClassification

from inlay.methods.attach import attach, trained_parameters

# Width, layers and heads.
OPT = {
    "125M": (768, 12, 12),
    "350M": (1024, 24, 16),
    "1.3B": (2048, 24, 32),
    "2.7B": (2560, 32, 32),
    "6.7B": (4096, 32, 32),
}


def one_layer(kind: str, width: int, heads: int, shared: int | None = None) -> nn.Module:
    """One layer of this shape, on no device: the others are like it."""
    shape = {"hidden_size": width, "num_hidden_layers": 1, "num_attention_heads": heads, "vocab_size": 32}
    with torch.device("meta"):
        if kind == "opt":
            return OPTForCausalLM(OPTConfig(**shape, ffn_dim=4 * width, word_embed_proj_dim=width))
        if kind == "llama":
            return LlamaForCausalLM(LlamaConfig(**shape, num_key_value_heads=shared or heads))
        return ViTForImageClassification(ViTConfig(num_hidden_layers=1))


def count(model: nn.Module, method: str, size: int, **settings: Any) -> int:
    """What a method trains with this rank, or with a prefix of this length."""
    name = {"ntk-attention": "rank", "lora": "r", "prefix": "num_virtual_tokens"}[method]
    adapted = attach(model, method, settings={name: size, **settings}, newly_initialised=[])
    return sum(parameter.numel() for parameter in trained_parameters(adapted).values())


def printed(millions: float) -> Any:
    return pytest.approx(1e6 * millions, abs=5e3)


def test_table_1_has_the_shape_of_chatglm3() -> None:
    """28 layers, 32 heads of 128; its two heads of keys do not count, as Z and kappa belong to queries."""
    assert 28 * count(one_layer("llama", 4096, 32, 2), "ntk-attention", 16) == printed(3.78)


def test_table_2_prints_twelve_times_what_is_trained() -> None:
    ours, lora = (12 * count(one_layer("vit", 768, 12), *how) for how in (("ntk-attention", 32), ("lora", 16)))
    assert (ours, lora) == (599_040, 589_824)
    assert (7.09e6 / ours, 7.08e6 / lora) == pytest.approx((12, 12), rel=0.02)


@pytest.mark.parametrize(
    ("size", "millions"), [("125M", 0.29), ("350M", 0.786), ("1.3B", 1.57), ("2.7B", 2.62), ("6.7B", 4.19)]
)
def test_table_3(size: str, millions: float) -> None:
    """Three methods with 32 numbers a channel; for OPT-350M 0.77M is printed."""
    width, layers, heads = OPT[size]
    ours = count(one_layer("opt", width, heads), "ntk-attention", 10, feature_multiplier=2)
    assert ours == 32 * width
    assert layers * ours == printed(millions)
    assert count(one_layer("opt", width, heads), "lora", 8) == ours
    # The paper counts one vector for each of 32 places; a key and a value are trained, in half as many here.
    assert count(one_layer("opt", width, heads), "prefix", 16) == ours


TABLE_4 = {(1, 4): 1.18, (1, 8): 2.23, (1, 16): 4.33, (1, 32): 8.52, (1, 64): 16.91, (2, 4): 1.84, (2, 8): 3.41}
TABLE_4 |= {(2, 16): 6.55, (2, 32): 12.85, (2, 64): 25.43, (4, 4): 3.15}


@pytest.mark.parametrize(("beta", "rank"), TABLE_4)
def test_table_4_has_the_shape_of_llama_3_1_8b(beta: int, rank: int) -> None:
    found = count(one_layer("llama", 4096, 32, 8), "ntk-attention", rank, feature_multiplier=beta)
    assert 32 * found == printed(TABLE_4[beta, rank])
