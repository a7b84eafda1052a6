"""Frozen weights rounded once compute what autocast computes by rounding them in every step."""

from __future__ import annotations

import copy
import pickle
import warnings
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

import inlay
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


@pytest.mark.parametrize(
    ("family", "method"),
    [(f, m) for f in ("vit", "clip", "resnet") for m in METHODS if f in capabilities()["methods"][m]],
)
def test_every_method_starts_from_the_same_features(family: str, method: str) -> None:
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


def lora(**settings: Any) -> LoraConfig:
    return LoraConfig(r=4, target_modules=["query", "value"], init_lora_weights="gaussian", **settings)


def stirred(model: nn.Module) -> nn.Module:
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in trained_parameters(model).values():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def frozen_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters() if not p.requires_grad}


@pytest.mark.parametrize("heads", [None, ["classifier"]])
def test_an_adapter_that_becomes_active_inside_trains_in_its_own_precision(heads: list[str] | None) -> None:
    base, batch = tiny("bert")
    model = get_peft_model(base, lora(modules_to_save=heads), adapter_name="a")
    model.add_adapter("b", lora(modules_to_save=heads))
    step(model, batch)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    with rounded_once(model, torch.bfloat16):
        model.set_adapter("b")
        mine = trained_parameters(model)
        assert any("lora_B.b" in name for name in mine)
        assert {parameter.dtype for parameter in mine.values()} == {torch.float32}
        optimizer = torch.optim.SGD(mine.values(), lr=1e-3)
        for _ in range(2):
            step(model, batch)
            optimizer.step()
        trained = {name: parameter.detach().clone() for name, parameter in mine.items()}
    after = dict(model.named_parameters())
    assert any(not torch.equal(after[name], before[name]) for name in trained)
    for name, parameter in after.items():
        assert torch.equal(parameter, trained.get(name, before[name])), name


@pytest.mark.parametrize("merge", ["merge_adapter", "merge_and_unload"])
@pytest.mark.parametrize("method", ["lora", "ssf"])
def test_merging_inside_is_refused_and_goes_on_afterwards(method: str, merge: str) -> None:
    base, batch = tiny("bert")
    model = stirred(get_peft_model(base, lora() if method == "lora" else inlay.SSFConfig())).eval()
    wanted = model(**batch).logits
    before = frozen_of(model)
    with rounded_once(model, torch.bfloat16):
        logits, _ = step(model, batch)
        with pytest.raises(InlayError, match="merge: frozen weights are rounded inside rounded_once"):
            getattr(model, merge)()
        again, _ = step(model, batch)
        torch.testing.assert_close(again, logits, rtol=0, atol=1e-2)  # what is not rounded is merged, and that is all
    torch.testing.assert_close(model(**batch).logits, wanted)
    if merge == "merge_and_unload":
        torch.testing.assert_close(model.merge_and_unload()(**batch).logits, wanted, rtol=1e-4, atol=1e-5)
        return
    model.merge_adapter()
    torch.testing.assert_close(model(**batch).logits, wanted, rtol=1e-4, atol=1e-5)
    model.unmerge_adapter()
    if method != "lora":  # PEFT's subtracts what it has added
        assert all(torch.equal(dict(model.named_parameters())[name], weight) for name, weight in before.items())


def test_what_is_merged_into_biases_alone_is_merged_inside_too() -> None:
    base, batch = tiny("bert")
    model = stirred(get_peft_model(base, inlay.BiasTuningConfig())).eval()
    wanted = model(**batch).logits
    with rounded_once(model, torch.bfloat16):
        model.merge_adapter()
    torch.testing.assert_close(model(**batch).logits, wanted, rtol=1e-4, atol=1e-5)


def test_a_merged_adapter_is_not_taken_out_of_rounded_weights() -> None:
    base, batch = tiny("bert")
    model = stirred(get_peft_model(base, inlay.SSFConfig())).eval()
    before = frozen_of(model)
    model.merge_adapter()
    with rounded_once(model, torch.bfloat16):
        with pytest.raises(InlayError, match="unmerge: frozen weights are rounded"):
            model.unmerge_adapter()
        step(model, batch)
    model.unmerge_adapter()
    assert all(torch.equal(dict(model.named_parameters())[name], weight) for name, weight in before.items())


def test_peft_s_attention_layer_that_merges_in_every_pass_goes_on_doing_so() -> None:
    class Attending(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.attention = nn.Linear(8, 8), nn.MultiheadAttention(8, 2, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            return self.attention(x, x, x)[0]

    torch.manual_seed(0)
    config = LoraConfig(target_modules=["attention", "first"], init_lora_weights=False)
    model, x = get_peft_model(Attending(), config), torch.randn(2, 3, 8)
    with autocast():
        wanted = model(x)
        with rounded_once(model, torch.bfloat16):
            assert torch.equal(model(x), wanted)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_what_is_written_into_a_weight_inside_is_kept_and_told(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 4), nn.Linear(4, 3), nn.Linear(3, 2)).requires_grad_(False)
    model[3].weight.mul_(1e6)  # of float16 an infinity
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    told = pytest.warns(UserWarning, match=r"inside rounded_once: 0.weight, 1.weight. What was changed is kept")
    with told, rounded_once(model, dtype):
        model[0].weight.data += 1  # past autograd, in place, as PEFT merges
        model[1].weight.requires_grad_()
        with torch.autocast("cpu", dtype):
            model[:2](torch.randn(7, 6)).float().square().sum().backward()
        with torch.no_grad():
            model[1].weight[0].sub_(model[1].weight.grad[0])
        inside = [model[place].weight.detach().float() for place in range(2)]
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert model[1].weight.grad.dtype == torch.float32
    assert torch.equal(model[0].weight, inside[0])
    assert torch.equal(model[1].weight[0], inside[1][0])
    assert torch.equal(model[1].weight[1:], before["1.weight"][1:]), "what was not changed, to the bit"
    for name in ("2.weight", "3.weight"):
        assert torch.equal(model.get_parameter(name), before[name])


def test_a_weight_that_is_thawed_and_not_changed_is_as_it_was() -> None:
    model = nn.Sequential(nn.Linear(6, 5)).requires_grad_(False)
    before = model[0].weight.clone()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with rounded_once(model, torch.bfloat16):
            model.requires_grad_(True)
    assert torch.equal(model[0].weight, before)


def test_a_pass_without_autocast_says_what_is_missing() -> None:
    base, batch = tiny("bert")
    model = get_peft_model(base, lora()).eval()
    wanted = model(**batch).logits
    with rounded_once(model, torch.bfloat16):
        with pytest.raises(InlayError, match=r"run the model under torch.autocast\('cpu', torch.bfloat16\)"):
            model(**batch)
        with autocast(), torch.no_grad():
            model(**batch)
    assert torch.equal(model(**batch).logits, wanted)


def test_blocks_inside_of_each_other_and_copies_made_inside() -> None:
    base, _ = tiny("bert")
    model = stirred(get_peft_model(base, lora())).eval()
    before = frozen_of(model)
    with rounded_once(model, torch.bfloat16):
        with rounded_once(model, torch.bfloat16):
            pass
        copied = pickle.loads(pickle.dumps(copy.deepcopy(model)))
        for one in (model, copied):
            with pytest.raises(InlayError, match="merge: frozen weights are rounded"):
                one.merge_adapter()
    assert all(torch.equal(dict(model.named_parameters())[name], weight) for name, weight in before.items())
    model.merge_adapter()
    with pytest.raises(InlayError, match="copy it afterwards"):
        copied.merge_adapter()
