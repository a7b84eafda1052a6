"""AdaptFormer against plain float64 arithmetic, and that nothing waits between the ends of a feed-forward for long."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers as hf
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

import inlay
from inlay.anatomy import anatomy
from inlay.errors import InlayError
from inlay.methods.adaptformer.layer import AdaptFormerLayer, BranchPlace
from inlay.methods.bottleneck import feed_forward_ends
from probing import logits
from zoo import ENCODER, VISION, tiny

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@torch.no_grad()
def stir(module: nn.Module, scale: float = 0.1) -> None:
    for parameter in module.parameters():
        if parameter.requires_grad:
            parameter.add_(torch.randn_like(parameter), alpha=scale)


def layers(model: nn.Module) -> list[AdaptFormerLayer]:
    return [module for module in model.modules() if isinstance(module, AdaptFormerLayer)]


class FeedForward(nn.Module):
    def __init__(self, width: int, wide: int) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(width, wide), nn.Linear(wide, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)))


@settings(deadline=None, max_examples=20)
@given(st.integers(1, 3), st.integers(1, 5), st.integers(1, 4), st.booleans(), st.integers(0, 2**31))
def test_output_and_gradients_against_plain_arithmetic(
    rows: int, width: int, size: int, learnable: bool, seed: int
) -> None:
    torch.manual_seed(seed)
    mlp = FeedForward(width, 3).double().requires_grad_(False)
    plain = copy.deepcopy(mlp)
    config = inlay.AdaptFormerConfig(bottleneck=size, scale=0.3, learnable_scale=learnable, activation="tanh")
    layer = AdaptFormerLayer(mlp.first)
    layer.attach()
    layer.update_layer("default", BranchPlace(config, mlp.last))
    layer.set_adapter("default")
    x = torch.randn(rows, 2, width, dtype=torch.float64, requires_grad=True)
    assert torch.equal(mlp(x), plain(x))
    stir(layer, 0.5)
    branch = layer.inlay_adaptformer_branch["default"]
    down, b_down, up, b_up = (*branch.down.parameters(), *branch.up.parameters())
    s = branch.scale.weight if learnable else 0.3
    wanted = plain(x) + s * (torch.tanh(x @ down.T + b_down) @ up.T + b_up)
    found = mlp(x)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    upstream = torch.randn_like(wanted)
    trained = [x, *layer.parameters()]
    for mine, theirs in zip(
        torch.autograd.grad(found, trained, upstream), torch.autograd.grad(wanted, trained, upstream), strict=True
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-12)
    assert torch.autograd.gradcheck(lambda x, *_: mlp(x), (x, *layer.parameters()))
    assert layer._waiting == {}


def test_a_block_of_a_vit_computes_the_papers_equation() -> None:
    model, _ = tiny("vit", "base")
    model.double()
    torch.manual_seed(0)
    get_peft_model(model, inlay.AdaptFormerConfig(bottleneck=4))
    stir(model)
    block = model.layers[0]
    branch = layers(model)[0].inlay_adaptformer_branch["default"]
    x = torch.randn(2, 5, 16, dtype=torch.float64)
    with torch.no_grad():
        attended = x + block.attention(block.layernorm_before(x))[0]
        normed = block.layernorm_after(attended)
        mlp = block.mlp.fc1.weight, block.mlp.fc1.bias, block.mlp.fc2.weight, block.mlp.fc2.bias
        inner = nn.functional.gelu(normed @ mlp[0].T + mlp[1])
        bottleneck = torch.relu(normed @ branch.down.weight.T + branch.down.bias) @ branch.up.weight.T + branch.up.bias
        found = block(x)
        found = found[0] if isinstance(found, tuple) else found
        torch.testing.assert_close(found, inner @ mlp[2].T + mlp[3] + 0.1 * bottleneck + attended)


ENDS = {
    "bert": ("intermediate.dense", "output.dense"),
    "distilbert": ("ffn.lin1", "ffn.lin2"),
    "modernbert": ("mlp.Wi", "mlp.Wo"),
    "gpt2": ("mlp.c_fc", "mlp.c_proj"),
    "opt": ("fc1", "fc2"),
    "llama": ("mlp.gate_proj", "mlp.down_proj"),
    "t5": ("layer.1.DenseReluDense.wi", "layer.1.DenseReluDense.wo"),
    "swin": ("mlp.fc1", "mlp.fc2"),
    "convnext": ("pwconv1", "pwconv2"),
}


def ends_of_last_block(model: nn.Module) -> tuple[str, ...]:
    block = anatomy(model).blocks[-1]
    ends = feed_forward_ends(block)
    assert ends is not None
    return tuple(part.name.removeprefix(f"{block.name}.") for part in ends)


@pytest.mark.parametrize("family", ENDS)
def test_the_ends_of_the_feed_forward(family: str) -> None:
    model, _ = tiny(family)
    assert ends_of_last_block(model) == ENDS[family]
    names = ["pwconv1", "dwconv"] if family == "convnext" else "all-linear"
    get_peft_model(model, LoraConfig(target_modules=names, r=16))
    assert ends_of_last_block(model) == ENDS[family]


def test_the_ends_where_there_is_cross_attention_or_a_gate() -> None:
    bert = hf.BertModel(hf.BertConfig(**ENCODER, is_decoder=True, add_cross_attention=True))
    assert ends_of_last_block(bert) == ("intermediate.dense", "output.dense")
    gpt2 = hf.GPT2Model(hf.GPT2Config(vocab_size=8, n_embd=8, n_layer=1, n_head=2, add_cross_attention=True))
    assert ends_of_last_block(gpt2) == ("mlp.c_fc", "mlp.c_proj")
    vision = {k: v for k, v in VISION.items() if k != "intermediate_size"}
    dino = hf.Dinov2Model(hf.Dinov2Config(**vision, mlp_ratio=2, use_swiglu_ffn=True))
    assert ends_of_last_block(dino) == ("mlp.gate_proj", "mlp.down_proj")


@pytest.mark.parametrize("family", ["bert", "vit", "gpt2", "convnext"])
def test_nothing_is_left_waiting(family: str) -> None:
    model, batch = tiny(family)
    adapted = get_peft_model(model, inlay.AdaptFormerConfig(bottleneck=4))
    stir(adapted)
    wanted = logits(adapted, batch)
    if model.supports_gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.disable_input_require_grads()
    adapted.train()(**batch).loss.backward()
    assert all(layer._waiting == {} for layer in layers(adapted))
    assert torch.equal(logits(copy.deepcopy(adapted), batch), wanted)


def test_a_chunked_feed_forward_is_the_same() -> None:
    model, batch = tiny("bert")
    adapted = get_peft_model(model, inlay.AdaptFormerConfig(bottleneck=4))
    stir(adapted)
    wanted = logits(adapted, batch)
    for block in model.bert.encoder.layer:
        block.chunk_size_feed_forward = 3
    torch.testing.assert_close(logits(adapted, batch), wanted)


def test_beside_a_lora_on_both_ends() -> None:
    model, batch = tiny("vit")
    low_rank = LoraConfig(target_modules=["fc1", "fc2"], init_lora_weights=False)
    alone = logits(get_peft_model(model, low_rank, adapter_name="low_rank"), batch)
    adapted = get_peft_model(model, inlay.AdaptFormerConfig(newly_initialised=[]), adapter_name="parallel")
    assert torch.equal(logits(adapted, batch), alone)
    for layer in layers(adapted):
        stir(layer)
    assert not torch.equal(logits(adapted, batch), alone)
    plain = adapted.unload()
    assert torch.equal(logits(plain, batch), alone)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in plain.modules())


def test_two_adapters_at_once_add_up() -> None:
    model, batch = tiny("vit", "base")
    adapted = get_peft_model(model, inlay.AdaptFormerConfig(), adapter_name="one")
    adapted.add_adapter("two", inlay.AdaptFormerConfig(scale=-0.1))
    base: Any = adapted.base_model
    base.set_adapter(["one", "two"])
    stir(adapted)
    for layer in layers(adapted):
        branches = layer.inlay_adaptformer_branch
        branches["two"].load_state_dict(branches["one"].state_dict())
    plain, _ = tiny("vit", "base")
    with torch.no_grad():
        torch.testing.assert_close(adapted(**batch).last_hidden_state, plain(**batch).last_hidden_state)


def test_counts() -> None:
    d, blocks, m = 16, 3, 5
    for learnable in (False, True):
        config = inlay.AdaptFormerConfig(bottleneck=m, learnable_scale=learnable)
        adapted = get_peft_model(tiny("bert")[0], config)
        trained = [p.numel() for name, p in adapted.named_parameters() if p.requires_grad and "inlay_" in name]
        assert sum(trained) == blocks * (2 * d * m + m + d + learnable)


def test_bad_settings_and_models_are_named() -> None:
    for scale in (0, float("nan")):
        with pytest.raises(InlayError, match=r"scale=.*0\.1"):
            inlay.AdaptFormerConfig(scale=scale)
    with pytest.raises(InlayError, match="bottleneck=-1"):
        inlay.AdaptFormerConfig(bottleneck=-1)
    with pytest.raises(InlayError, match=r"ResNetForImageClassification have none\. These work on it: .*norm"):
        get_peft_model(tiny("resnet")[0], inlay.AdaptFormerConfig())
