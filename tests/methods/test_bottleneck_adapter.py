"""Bottleneck adapters against plain float64 arithmetic: what they compute, where they stand, what they cost."""

from __future__ import annotations

import copy
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import get_peft_model
from scipy.special import erf
from torch import Tensor, nn

import inlay
from inlay.errors import InlayError
from inlay.methods.attach import attach
from inlay.methods.bottleneck import ACTIVATIONS, Bottleneck
from inlay.methods.bottleneck_adapter.layer import AdapterLayer
from probing import logits
from zoo import tiny

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

PLAIN: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "relu": lambda h: np.maximum(h, 0),
    "gelu": lambda h: h * (1 + erf(h / np.sqrt(2))) / 2,
    "silu": lambda h: h / (1 + np.exp(-h)),
    "tanh": np.tanh,
    "identity": lambda h: h,
}


@torch.no_grad()
def stir(module: nn.Module, scale: float = 0.1) -> None:
    for parameter in module.parameters():
        if parameter.requires_grad:
            parameter.add_(torch.randn_like(parameter), alpha=scale)


def adapter_on(host: nn.Module, config: inlay.BottleneckAdapterConfig) -> AdapterLayer:
    layer = AdapterLayer(host)
    layer.attach()
    layer.update_layer("default", config)
    layer.set_adapter("default")
    return layer


@settings(deadline=None, max_examples=30)
@given(st.sampled_from(sorted(PLAIN)), st.integers(1, 3), st.integers(1, 6), st.integers(1, 5), st.integers(0, 2**31))
def test_output_and_gradients_against_plain_arithmetic(kind: str, rows: int, width: int, size: int, seed: int) -> None:
    torch.manual_seed(seed)
    host = nn.Linear(3, width).double().requires_grad_(False)
    plain = copy.deepcopy(host)
    layer = adapter_on(host, inlay.BottleneckAdapterConfig(bottleneck=size, activation=kind))
    x = torch.randn(rows, 2, 3, dtype=torch.float64, requires_grad=True)
    assert torch.equal(host(x), plain(x))
    stir(layer, 0.5)
    piece = layer.inlay_adapter_bottleneck["default"]
    down, b_down, up, b_up = (p.detach().numpy() for p in (*piece.down.parameters(), *piece.up.parameters()))
    y = plain(x).detach().numpy()
    wanted = y + PLAIN[kind](y @ down.T + b_down) @ up.T + b_up
    np.testing.assert_allclose(host(x).detach().numpy(), wanted, rtol=1e-11, atol=1e-12)
    if kind != "relu":  # which has a corner
        assert torch.autograd.gradcheck(lambda x, *_: host(x), (x, *layer.parameters()))
    # d/d b_up of a sum is the number of rows; d/d W_up of a sum is the sum of what was squeezed.
    host(x).sum().backward()
    np.testing.assert_allclose(piece.up.bias.grad.numpy(), np.full(width, rows * 2.0))
    squeezed = PLAIN[kind](y @ down.T + b_down).sum((0, 1))
    np.testing.assert_allclose(piece.up.weight.grad.numpy(), np.tile(squeezed, (width, 1)), rtol=1e-10, atol=1e-12)


def test_every_activation_has_a_plain_version() -> None:
    assert PLAIN.keys() == ACTIVATIONS.keys()


AFTER_ATTENTION_AND_FEED_FORWARD = {
    "bert": ("bert.encoder.layer.{}.attention.output.dense", "bert.encoder.layer.{}.output.dense"),
    "distilbert": ("distilbert.transformer.layer.{}.attention.out_lin", "distilbert.transformer.layer.{}.ffn.lin2"),
    "modernbert": ("model.layers.{}.attn.Wo", "model.layers.{}.mlp.Wo"),
    "gpt2": ("transformer.h.{}.attn.c_proj", "transformer.h.{}.mlp.c_proj"),
    "opt": ("model.decoder.layers.{}.self_attn.out_proj", "model.decoder.layers.{}.fc2"),
    "llama": ("model.layers.{}.self_attn.o_proj", "model.layers.{}.mlp.down_proj"),
    "t5": (
        "transformer.encoder.block.{}.layer.0.SelfAttention.o",
        "transformer.encoder.block.{}.layer.1.DenseReluDense.wo",
    ),
    "vit": ("vit.layers.{}.attention.o_proj", "vit.layers.{}.mlp.fc2"),
    "clip": ("vision_model.encoder.layers.{}.self_attn.out_proj", "vision_model.encoder.layers.{}.mlp.fc2"),
}


@pytest.mark.parametrize("family", AFTER_ATTENTION_AND_FEED_FORWARD)
def test_where_they_stand(family: str) -> None:
    places = AFTER_ATTENTION_AND_FEED_FORWARD[family]
    for placement, chosen in (("houlsby", places), ("pfeiffer", places[1:])):
        adapted = get_peft_model(tiny(family)[0], inlay.BottleneckAdapterConfig(placement=placement))
        wanted = {place.format(block) for block in range(3) for place in chosen}
        assert set(adapted.peft_config["default"].target_modules) == wanted


def test_convnext_has_them_after_its_pointwise_layers() -> None:
    adapted = get_peft_model(tiny("convnext")[0], inlay.BottleneckAdapterConfig())
    targets = adapted.peft_config["default"].target_modules
    assert {name.rpartition(".")[2] for name in targets} == {"pwconv2"}
    assert len(targets) == 4


def test_they_stand_before_the_residual_sum() -> None:
    model, _ = tiny("bert", "base")
    model.double()
    torch.manual_seed(0)
    get_peft_model(model, inlay.BottleneckAdapterConfig(bottleneck=4))
    stir(model)
    output = model.encoder.layer[0].output
    x, residual = (torch.randn(2, 3, size, dtype=torch.float64) for size in (24, 16))
    y = x @ output.dense.weight.T + output.dense.bias
    piece = output.dense.inlay_adapter.inlay_adapter_bottleneck["default"]
    torch.testing.assert_close(output(x, residual), output.LayerNorm(y + piece(y) + residual))


def trained(model: nn.Module) -> int:
    return sum(p.numel() for name, p in model.named_parameters() if p.requires_grad and "inlay_adapter" in name)


def test_counts() -> None:
    d, blocks = 16, 3
    for placement, each in (("houlsby", 2), ("pfeiffer", 1)):
        for m, setting in ((5, {"bottleneck": 5}), (4, {"reduction_factor": 4}), (1, {"reduction_factor": 100})):
            adapted = get_peft_model(tiny("vit")[0], inlay.BottleneckAdapterConfig(placement=placement, **setting))
            assert trained(adapted) == each * blocks * (2 * d * m + m + d)


def test_the_two_methods_are_the_two_placements() -> None:
    for name, each in (("adapter", 2), ("adapter-pfeiffer", 1)):
        adapted = attach(tiny("vit")[0], name)
        assert sum(isinstance(module, AdapterLayer) for module in adapted.modules()) == 3 * each


def test_layers_narrow_them_and_a_near_zero_start_is_near_the_base() -> None:
    model, batch = tiny("vit")
    base = logits(model, batch)
    torch.manual_seed(0)
    adapted = get_peft_model(model, inlay.BottleneckAdapterConfig(layers=[2], init_std=1e-2))
    assert sum(isinstance(module, AdapterLayer) for module in adapted.modules()) == 2
    found = logits(adapted, batch)
    assert not torch.equal(found, base)
    torch.testing.assert_close(found, base, rtol=0.1, atol=0.1)


def test_dropout_acts_in_training_alone() -> None:
    piece = Bottleneck(nn.Linear(4, 4), 4, 64, dropout=0.5)
    stir(piece)
    x = torch.ones(1, 4)
    torch.manual_seed(0)
    assert not torch.equal(piece.train()(x), piece(x))
    assert torch.equal(piece.eval()(x), piece(x))


def test_it_computes_in_the_precision_of_the_features() -> None:
    piece = Bottleneck(nn.Linear(4, 4), 4, 2)
    x: Tensor = torch.ones(1, 4, dtype=torch.bfloat16)
    assert piece(x).dtype == torch.bfloat16
    assert piece.down.weight.dtype == torch.float32


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"placement": "prefix"}, r"houlsby, pfeiffer"),
        ({"bottleneck": 0}, r"bottleneck=0 .*such as 64"),
        ({"bottleneck": 1.5}, r"bottleneck=1.5"),
        ({"reduction_factor": 0}, r"reduction_factor=0 .*such as 16"),
        ({"activation": "softmax"}, r"gelu.*relu"),
        ({"dropout": 1.0}, r"dropout=1.0"),
        ({"init_std": -0.1}, r"init_std=-0.1"),
    ],
)
def test_bad_settings_are_named(settings: dict[str, object], message: str) -> None:
    with pytest.raises(InlayError, match=message):
        inlay.BottleneckAdapterConfig(**settings)


def test_a_resnet_is_refused() -> None:
    with pytest.raises(InlayError, match=r"ResNetForImageClassification have neither\. These work on it: .*norm"):
        get_peft_model(tiny("resnet")[0], inlay.BottleneckAdapterConfig())


def test_merging_is_refused() -> None:
    adapted = get_peft_model(tiny("vit")[0], inlay.BottleneckAdapterConfig())
    with pytest.raises(InlayError, match="cannot be merged"):
        adapted.merge_adapter()
