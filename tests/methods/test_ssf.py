"""SSF against plain float64 arithmetic, its merge on every family, and what a user does with it."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers.models.convnext.modeling_convnext import ConvNextLayerNorm
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.t5.modeling_t5 import T5LayerNorm
from transformers.pytorch_utils import Conv1D

import inlay
from inlay.errors import InlayError
from inlay.methods.ssf.layer import SSFLayer
from inlay.methods.ssf.model import SSFModel
from probing import logits
from zoo import FAMILIES, tiny

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

# Each with `c` channels, and whether they run along axis 1 of an image.
HOSTS: dict[str, tuple[Callable[[int], nn.Module], bool]] = {
    "linear": (lambda c: nn.Linear(c, c), False),
    "linear without bias": (lambda c: nn.Linear(c, c, bias=False), False),
    "gpt2": (lambda c: Conv1D(c, c), False),
    "convolution": (lambda c: nn.Conv2d(c, c, 2, groups=c), True),
    "layer norm": (nn.LayerNorm, False),
    "layer norm without bias": (lambda c: nn.LayerNorm(c, bias=False), False),
    "rms norm": (nn.RMSNorm, False),
    "llama": (LlamaRMSNorm, False),
    "t5": (T5LayerNorm, False),
    "gemma": (Gemma3RMSNorm, False),
    "batch norm": (nn.BatchNorm2d, True),
    "group norm": (lambda c: nn.GroupNorm(1, c), True),
    "convnext": (lambda c: ConvNextLayerNorm(c, data_format="channels_first"), True),
}
IN_FLOAT32 = {"llama", "t5", "gemma"}  # they compute so inside, whatever they are given


def layer_on(host: nn.Module) -> SSFLayer:
    layer = SSFLayer(host)
    layer.attach()
    layer.update_layer("default", inlay.SSFConfig())
    layer.set_adapter("default")
    return layer


@torch.no_grad()
def stir(module: nn.Module, scale: float = 0.1) -> None:
    for parameter in module.parameters():
        if parameter.requires_grad:
            parameter.add_(torch.randn_like(parameter), alpha=scale)


@settings(deadline=None, max_examples=40)
@given(st.sampled_from(sorted(HOSTS)), st.integers(1, 3), st.integers(2, 6), st.integers(0, 2**31))
def test_output_gradients_and_merge_against_plain_arithmetic(kind: str, rows: int, size: int, seed: int) -> None:
    torch.manual_seed(seed)
    make, image = HOSTS[kind]
    host = make(size).double().eval()
    stir(host, 0.5)
    frozen = copy.deepcopy(host)
    before = {name: value.clone() for name, value in host.state_dict().items()}
    x = torch.randn((rows, size, 3, 4) if image else (rows, 3, size), dtype=torch.float64, requires_grad=True)
    layer = layer_on(host.requires_grad_(False))
    assert torch.equal(host(x), frozen(x))
    stir(layer, 0.5)

    piece = layer.pieces["default"]
    axis = 1 if image else -1
    shape = [1] * x.ndim
    shape[axis] = -1
    gamma = (1 + piece.weight).detach().requires_grad_()
    beta = (torch.zeros_like(gamma) if piece.bias is None else piece.bias).detach().requires_grad_()
    assert (piece.bias is None) == (getattr(frozen, "bias", None) is None)
    found, wanted = host(x), gamma.view(shape) * frozen(x) + beta.view(shape)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)

    upstream = torch.randn_like(wanted)
    ours = torch.autograd.grad(found, [x, *piece.parameters()], upstream.to(found.dtype))
    plain = torch.autograd.grad(wanted, [x, gamma, beta], upstream.to(wanted.dtype))
    for mine, theirs in zip(ours, plain, strict=False):
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-9)

    layer.merge()
    tolerance = 1e-5 if kind in IN_FLOAT32 else 1e-10
    torch.testing.assert_close(host(x), wanted, rtol=tolerance, atol=tolerance)
    layer.unmerge()
    assert all(torch.equal(value, before[name]) for name, value in host.state_dict().items())


def test_gradcheck() -> None:
    host = nn.Conv2d(2, 3, 2).double().requires_grad_(False)
    layer = layer_on(host)
    stir(layer)
    x = torch.randn(1, 2, 3, 3, dtype=torch.float64, requires_grad=True)
    # The parameters are moved in place, where the host's hook reads them.
    assert torch.autograd.gradcheck(lambda x, *_: host(x), (x, *layer.parameters()))


@pytest.mark.parametrize("family", FAMILIES)
def test_merged_models_compute_the_same(family: str) -> None:
    model, batch = tiny(family)
    batch = {name: value.double() if value.is_floating_point() else value for name, value in batch.items()}
    torch.manual_seed(0)
    adapted = get_peft_model(model.double(), inlay.SSFConfig())
    stir(adapted)
    wanted = logits(adapted, batch)
    before = {name: value.clone() for name, value in adapted.state_dict().items()}
    adapted.merge_adapter(safe_merge=True)
    tolerance = 1e-5 if family in {"llama", "gemma", "t5"} else 1e-10  # those norm in float32
    torch.testing.assert_close(logits(adapted, batch), wanted, rtol=tolerance, atol=tolerance)
    adapted.unmerge_adapter()
    assert all(torch.equal(value, before[name]) for name, value in adapted.state_dict().items())


def trained(model: nn.Module) -> int:
    return sum(p.numel() for name, p in model.named_parameters() if p.requires_grad and "inlay_ssf" in name)


def test_counts() -> None:
    d, f, blocks = 16, 24, 3
    vit = get_peft_model(tiny("vit")[0], inlay.SSFConfig())
    # Patches; two norms, queries, keys, values, their output, up and down in each block; the final norm.
    assert trained(vit) == 2 * (d + blocks * (2 * d + 4 * d + f + d) + d)
    llama = get_peft_model(tiny("llama")[0], inlay.SSFConfig())
    keys = 8
    # Nothing has a bias, so nothing is shifted.
    assert trained(llama) == blocks * (2 * d + d + 2 * keys + d + 2 * f + d) + d


def test_stays_in_the_backbone() -> None:
    for family, task in (("gpt2", "causal-lm"), ("llama", "causal-lm"), ("vit", "classification")):
        adapted = get_peft_model(tiny(family, task)[0], inlay.SSFConfig(newly_initialised=[]))
        targets = adapted.peft_config["default"].target_modules
        assert not {"lm_head", "classifier"} & {name.rpartition(".")[2] for name in targets}
        assert any("layernorm" in name.lower() or "ln_" in name for name in targets)


def test_beside_a_lora_it_scales_the_base_alone() -> None:
    model, _ = tiny("bert", "base")
    query = model.encoder.layer[0].attention.self.query
    plain = copy.deepcopy(query)
    x = torch.randn(2, 16)
    config = LoraConfig(target_modules=["query"], init_lora_weights=False, r=2)
    get_peft_model(model, config, adapter_name="low_rank")
    adapted = get_peft_model(model, inlay.SSFConfig(target_modules=["query"]), adapter_name="scaled")
    stir(adapted)
    lora = model.encoder.layer[0].attention.self.query
    piece = lora.base_layer.inlay_ssf.pieces["scaled"]
    low_rank = lora.scaling["low_rank"] * lora.lora_B["low_rank"](lora.lora_A["low_rank"](x))
    torch.testing.assert_close(lora(x), (1 + piece.weight) * plain(x) + piece.bias + low_rank)


def test_two_adapters_merge_one_after_the_other() -> None:
    model, batch = tiny("resnet")
    adapted = get_peft_model(model, inlay.SSFConfig(newly_initialised=[]), adapter_name="one")
    adapted.add_adapter("two", inlay.SSFConfig(newly_initialised=[]))
    adapted.base_model.set_adapter(["one", "two"])
    stir(adapted)
    wanted = logits(adapted, batch)
    adapted.merge_adapter(adapter_names=["one", "two"])
    torch.testing.assert_close(logits(adapted, batch), wanted, rtol=1e-5, atol=1e-5)


def test_a_spread_start_is_not_the_base() -> None:
    model, batch = tiny("vit")
    wanted = logits(model, batch)
    torch.manual_seed(0)
    adapted = get_peft_model(model, inlay.SSFConfig(init_std=0.02))
    assert not torch.equal(logits(adapted, batch), wanted)
    values = torch.cat([m.pieces["default"].weight for m in adapted.modules() if isinstance(m, SSFLayer)])
    assert 0.015 < values.std() < 0.025


def test_what_cannot_be_merged_is_refused_and_left_as_it_was() -> None:
    class SquareNorm(LlamaRMSNorm):
        def forward(self, x: Tensor) -> Tensor:
            return x * (2 + self.weight**2)

    norm = SquareNorm(3)
    layer = layer_on(norm)
    with pytest.raises(InlayError, match="SquareNorm does not multiply"):
        layer.merge()
    assert torch.equal(norm.weight, torch.ones(3))
    assert not layer.merged
    quantised = nn.Linear(2, 2)
    layer = layer_on(quantised)
    quantised.weight = nn.Parameter(torch.zeros(2, 2, dtype=torch.int8), requires_grad=False)
    with pytest.raises(InlayError, match="quantised"):
        layer.merge()
    broken = layer_on(nn.Linear(2, 2))
    with torch.no_grad():
        broken.pieces["default"].weight[0] = torch.nan
    with pytest.raises(InlayError, match="not finite"):
        broken.merge(safe_merge=True)


def test_bad_settings_and_models() -> None:
    with pytest.raises(InlayError, match=r"init_std=-1.*0 starts"):
        inlay.SSFConfig(init_std=-1)
    assert not SSFModel.fits(nn.ConvTranspose2d(2, 2, 2))
    assert not SSFModel.fits(nn.MultiheadAttention(2, 1).out_proj)
    assert not SSFModel.fits(nn.LayerNorm(3, elementwise_affine=False))
    assert "has none" in SSFModel.refusal(nn.Identity())
