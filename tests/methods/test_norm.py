"""Norm tuning against plain float64 versions of the norms, and what a user does with it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import get_peft_model
from torch import Tensor, nn
from transformers.models.convnext.modeling_convnext import ConvNextLayerNorm
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.t5.modeling_t5 import T5LayerNorm

import inlay
from inlay.errors import InlayError
from inlay.methods.norm.layer import NormLayer
from inlay.methods.norm.model import NormTuningModel
from probing import logits
from zoo import FAMILIES, tiny

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
EPS = 1e-6


class Wrapped(nn.Module):
    """A model of one norm."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x)


def rms(x: Tensor) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + EPS).sqrt()


def layer(x: Tensor) -> Tensor:
    return (x - x.mean(-1, keepdim=True)) / (x.var(-1, unbiased=False, keepdim=True) + EPS).sqrt()


def channels(values: Tensor) -> Tensor:
    return values.reshape(1, -1, 1, 1)


def batch(x: Tensor, norm: nn.Module) -> Tensor:
    return (x - channels(norm.running_mean)) / (channels(norm.running_var) + EPS).sqrt()


def image_layer(x: Tensor) -> Tensor:
    return layer(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


Plain = Callable[[Tensor, nn.Module, Tensor, Tensor | None], Tensor]
NORMS: dict[str, tuple[Callable[[int], nn.Module], bool, Plain]] = {
    "layer": (lambda c: nn.LayerNorm(c, eps=EPS), False, lambda x, n, g, b: layer(x) * g + b),
    "rms": (lambda c: nn.RMSNorm(c, eps=EPS), False, lambda x, n, g, b: rms(x) * g),
    "llama": (lambda c: LlamaRMSNorm(c, eps=EPS), False, lambda x, n, g, b: rms(x) * g),
    "gemma": (lambda c: Gemma3RMSNorm(c, eps=EPS), False, lambda x, n, g, b: rms(x) * (1 + g)),
    "t5": (lambda c: T5LayerNorm(c, eps=EPS), False, lambda x, n, g, b: rms(x) * g),
    "batch": (lambda c: nn.BatchNorm2d(c, eps=EPS), True, lambda x, n, g, b: batch(x, n) * channels(g) + channels(b)),
    "group": (
        lambda c: nn.GroupNorm(c, c, eps=EPS),
        True,
        lambda x, n, g, b: nn.functional.group_norm(x, x.shape[1], eps=EPS) * channels(g) + channels(b),
    ),
    "convnext": (
        lambda c: ConvNextLayerNorm(c, eps=EPS, data_format="channels_first"),
        True,
        lambda x, n, g, b: image_layer(x) * channels(g) + channels(b),
    ),
}


@settings(deadline=None, max_examples=30)
@given(st.sampled_from(sorted(NORMS)), st.integers(1, 3), st.integers(2, 6), st.booleans(), st.integers(0, 2**31))
def test_output_and_gradient_against_a_plain_version(
    kind: str, rows: int, size: int, training: bool, seed: int
) -> None:
    torch.manual_seed(seed)
    make, image, plain = NORMS[kind]
    norm = make(size).double()
    with torch.no_grad():
        for tensor in (*norm.parameters(), *(b for b in norm.buffers() if b.is_floating_point())):
            tensor.add_(torch.rand_like(tensor))
    x = torch.randn((rows, size, 2, 3) if image else (rows, 3, size), dtype=torch.float64)
    frozen = copy.deepcopy(norm)
    model = get_peft_model(Wrapped(norm), inlay.NormTuningConfig(newly_initialised=[])).train(training)
    # Mean squares in float32, as Llama's and T5's own code has it, are near and not equal.
    tolerance = {"rtol": 1e-5, "atol": 1e-6} if kind in {"llama", "t5", "gemma"} else {"rtol": 1e-9, "atol": 1e-11}
    start = plain(x, frozen, frozen.weight, getattr(frozen, "bias", None))
    torch.testing.assert_close(model(x).double(), start, **tolerance)
    trained = {name.rpartition(".")[2]: p for name, p in model.named_parameters() if p.requires_grad}
    assert trained.keys() == dict(frozen.named_parameters()).keys()
    values = {name: torch.randn(size, dtype=torch.float64, requires_grad=True) for name in trained}
    with torch.no_grad():
        for name, parameter in trained.items():
            parameter.copy_(values[name])
    output = model(x)
    wanted = plain(x, frozen, values["weight"], values.get("bias"))
    torch.testing.assert_close(output.double(), wanted, **tolerance)
    upstream = torch.randn_like(wanted)
    output.backward(upstream.to(output.dtype))
    wanted.backward(upstream)
    for name, parameter in trained.items():
        torch.testing.assert_close(parameter.grad, values[name].grad, rtol=1e-4, atol=1e-5)
    for name, buffer in norm.named_buffers():
        if "inlay_norm" not in name:
            assert torch.equal(buffer, frozen.get_buffer(name))


def test_every_norm_outside_the_head_is_trained() -> None:
    for family, count in (("bert", 7), ("llama", 7), ("gemma", 19), ("resnet", 15), ("convnext", 7)):
        adapted = get_peft_model(tiny(family)[0], inlay.NormTuningConfig())
        norms = [m for m in adapted.modules() if isinstance(m, NormLayer)]
        assert len(norms) == count, family


def test_a_model_without_norms_is_refused() -> None:
    with pytest.raises(InlayError, match="has none"):
        get_peft_model(nn.Sequential(nn.Linear(2, 2)), inlay.NormTuningConfig(newly_initialised=[]))
    assert not NormTuningModel.fits(nn.LayerNorm(3, elementwise_affine=False))


def stir(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)


@pytest.mark.parametrize("family", ["bert", "llama", "resnet"])
def test_merging_and_unmerging_to_the_bit(family: str) -> None:
    model, batch = tiny(family)
    forward = {name: module.forward.__func__ for name, module in model.named_modules()}
    before = {name: value.clone() for name, value in model.state_dict().items()}
    adapted = get_peft_model(model, inlay.NormTuningConfig())
    stir(adapted)
    wanted = logits(adapted, batch)
    adapted.merge_adapter()
    assert torch.equal(logits(adapted, batch), wanted)
    adapted.unmerge_adapter()
    assert torch.equal(logits(adapted, batch), wanted)
    heads = tuple(adapted.peft_config["default"].modules_to_save)
    plain = adapted.unload()
    for name, value in plain.state_dict().items():
        assert name.startswith(heads) or torch.equal(value, before[name]), name
    assert {name: module.forward.__func__ for name, module in plain.named_modules()} == forward


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_adapted_are_the_norms_of_the_anatomy(family: str) -> None:
    model, _ = tiny(family, "base")
    found = [part.name for part in inlay.anatomy(model).norms]
    adapted = get_peft_model(model, inlay.NormTuningConfig())
    assert sorted(adapted.peft_config["default"].target_modules) == sorted(found)


def test_one_adapter_runs_and_merges_at_a_time() -> None:
    model, batch = tiny("gpt2", "causal-lm")
    adapted = get_peft_model(model, inlay.NormTuningConfig(), adapter_name="one")
    adapted.add_adapter("two", inlay.NormTuningConfig())
    adapted.base_model.set_adapter(["one", "two"])
    with pytest.raises(InlayError, match="one adapter at a time"):
        adapted(**batch)
    with pytest.raises(InlayError, match="merges one adapter"):
        adapted.merge_adapter(adapter_names=["one", "two"])


def test_an_earlier_forward_of_the_host_is_kept() -> None:
    model, batch = tiny("bert")
    norm = model.bert.embeddings.LayerNorm
    calls = []
    original = norm.forward
    norm.forward = lambda x: calls.append(1) or original(x)
    adapted = get_peft_model(model, inlay.NormTuningConfig())
    with adapted.disable_adapter():
        logits(adapted, batch)
    assert calls
    adapted.unload()
    calls.clear()
    logits(model, batch)
    assert calls


def test_bias_and_norm_act_together_on_one_layer() -> None:
    model, batch = tiny("bert")
    first = get_peft_model(model, inlay.BiasTuningConfig(newly_initialised=[]), adapter_name="one")
    stir(first)
    with_bias = logits(first, batch)
    second = get_peft_model(model, inlay.NormTuningConfig(newly_initialised=[]), adapter_name="two")
    # On a host of two methods the delta is added to the output, and not to the bias: another rounding.
    torch.testing.assert_close(logits(second, batch), with_bias, rtol=1e-5, atol=1e-6)
    stir(second)
    assert not torch.allclose(logits(second, batch), with_bias, rtol=1e-3, atol=1e-4)
    with second.disable_adapter():
        assert torch.equal(logits(second, batch), logits(*tiny("bert")))


@pytest.mark.parametrize("method", [inlay.BiasTuningConfig, inlay.SSFConfig])
@pytest.mark.parametrize("norm_is", ["active", "not active", "disabled"])
def test_rows_without_a_norm_have_what_came_before_it_once(method: Callable[..., Any], norm_is: str) -> None:
    """Each row of a mixed batch is what its adapters make of it alone."""
    torch.manual_seed(0)
    host = nn.LayerNorm(4)
    model, x = Wrapped(host), torch.randn(3, 4)
    stir(get_peft_model(model, method(newly_initialised=[]), adapter_name="one"))
    second = get_peft_model(model, inlay.NormTuningConfig(newly_initialised=[]), adapter_name="two")
    stir(second.eval())
    with torch.no_grad():
        with_norm = second(x)
        host.inlay_norm.enable_adapters(False)
        without = second(x)
        assert not torch.allclose(without, with_norm, atol=0.1)
        host.inlay_norm.enable_adapters(norm_is != "disabled")
        if norm_is == "not active":
            host.inlay_norm._active_adapter = []
        found = second(x, adapter_names=["two", "__base__", "two"])
    wanted = without if norm_is == "disabled" else torch.stack([with_norm[0], without[1], with_norm[2]])
    torch.testing.assert_close(found, wanted)


def test_copies_train_in_float32_on_a_bfloat16_base() -> None:
    model, batch = tiny("llama")
    wanted = logits(model.bfloat16(), batch)
    adapted = get_peft_model(model, inlay.NormTuningConfig())
    norms = [m for m in adapted.modules() if isinstance(m, NormLayer)]
    assert {norm.inlay_norm_copy["default"].weight.dtype for norm in norms} == {torch.float32}
    assert torch.equal(logits(adapted, batch), wanted)
