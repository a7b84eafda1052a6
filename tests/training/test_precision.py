"""Frozen weights rounded once compute what autocast computes by rounding them in every step."""

from __future__ import annotations

from contextlib import AbstractContextManager

import pytest
import torch
from torch import Tensor, nn

from inlay.errors import InlayError
from inlay.methods.attach import attach, trained_parameters
from inlay.methods.capabilities import capabilities
from inlay.training.precision import rounded_once
from zoo import tiny

FAMILIES = ["vit", "dinov2", "swin", "clip", "resnet", "convnext", "bert", "deberta-v2", "gpt2", "llama", "t5"]
# One method of each kind of place: the pixels, a layer, tokens, attention, weights, outputs.
METHODS = [
    "visual-prompt",
    "activation-prompt",
    "vpt-deep",
    "e2vpt",
    "lora",
    "ia3",
    "ssf",
    "adaptformer",
    "attention-scale",
]


def autocast() -> AbstractContextManager[None]:
    return torch.autocast("cpu", torch.bfloat16)


def step(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    with autocast():
        output = model(**batch)
    output.loss.backward()
    return output.logits.detach(), {
        n: p.grad.clone() for n, p in trained_parameters(model).items() if p.grad is not None
    }


@pytest.mark.parametrize("family", FAMILIES)
def test_computes_what_autocast_does(family: str) -> None:
    model, batch = tiny(family)
    model = attach(model, "norm").eval()
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    logits, gradients = step(model, batch)
    with rounded_once(model, torch.bfloat16):
        assert any(parameter.dtype == torch.bfloat16 for parameter in model.parameters())
        assert not any(p.dtype == torch.bfloat16 for p in trained_parameters(model).values())
        again, others = step(model, batch)
    assert torch.equal(again, logits)
    for name, gradient in gradients.items():
        scale = gradient.abs().max()
        torch.testing.assert_close(others[name], gradient, rtol=0, atol=float(3e-2 * scale))
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name]), name
    last, exact = step(model, batch)
    assert torch.equal(last, logits)
    assert all(torch.equal(exact[name], gradient) for name, gradient in gradients.items())


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("family", ["vit", "clip", "resnet"])
def test_every_method_starts_from_the_same_features(family: str, method: str) -> None:
    if family not in capabilities()["methods"][method]:
        pytest.skip(f"{method} does not go into {family}")
    model, batch = tiny(family)
    model = attach(model, method).eval()
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for parameter in trained_parameters(model).values():
            parameter.add_(0.05 * torch.randn_like(parameter))
    logits, _ = step(model, batch)
    with rounded_once(model, torch.bfloat16):
        again, _ = step(model, batch)
    assert torch.equal(again, logits)


def test_leaves_the_weights_alone_whose_norm_is_trained() -> None:
    model, batch = tiny("vit")
    model = attach(model, "lora", settings={"use_dora": True}).eval()
    with torch.no_grad():
        for parameter in trained_parameters(model).values():
            parameter.add_(0.05)
    logits, _ = step(model, batch)
    with rounded_once(model, torch.bfloat16):
        again, _ = step(model, batch)
    assert torch.equal(again, logits)


def test_leaves_a_tied_weight_alone() -> None:
    model, _ = tiny("gpt2", "causal-lm")
    tied = model.get_input_embeddings().weight
    assert tied is model.get_output_embeddings().weight
    attach(model, "norm")
    with rounded_once(model, torch.bfloat16):
        assert tied.dtype == torch.float32


def test_leaves_what_trains_and_what_is_wrapped_alone() -> None:
    model, batch = tiny("vit")
    model = attach(model, "lora").eval()
    logits, _ = step(model, batch)
    trained = {name: parameter.dtype for name, parameter in trained_parameters(model).items()}
    with rounded_once(model, torch.bfloat16):
        again, _ = step(model, batch)
        assert {name: parameter.dtype for name, parameter in trained_parameters(model).items()} == trained
    assert torch.equal(again, logits)


def test_does_nothing_where_nothing_is_frozen() -> None:
    model, _ = tiny("resnet")
    with rounded_once(attach(model, "full"), torch.bfloat16):
        assert all(parameter.dtype == torch.float32 for parameter in model.parameters())


def test_gives_the_weights_back_when_training_fails() -> None:
    model, _ = tiny("vit")
    attach(model, "norm")
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    with pytest.raises(RuntimeError, match="out of memory"), rounded_once(model, torch.bfloat16):
        raise RuntimeError("out of memory")
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_another_type_is_refused() -> None:
    refused = pytest.raises(InlayError, match=r"torch.bfloat16 or torch.float16, not to torch.float32")
    with refused, rounded_once(nn.Linear(2, 2), torch.float32):
        pass
