"""Bases with quantised linear layers: what they are loaded as, what belongs to them, and what is refused."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn

import inlay
import quantised_zoo as zoo
from inlay.backbones import load, quantised
from inlay.backbones.new_parts import fingerprint
from inlay.errors import InlayError
from inlay.methods import registry
from inlay.methods.attach import attach, restore, save, trained_parameters
from inlay.methods.capabilities import capabilities
from inlay.records.spec import Spec
from probing import logits


def available(*kinds: str) -> list[Any]:
    """The quantisations as parameters of a test; skipped, with the reason, where the package is missing."""
    why = {kind: zoo.missing(kind) for kind in kinds}
    return [
        pytest.param(kind, marks=pytest.mark.skipif(why[kind] is not None, reason=str(why[kind]))) for kind in kinds
    ]


def stirred(model: nn.Module, method: str, seed: int = 0) -> nn.Module:
    """The model with a method in it whose parameters are not those of the start."""
    adapted = attach(model, method)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in trained_parameters(adapted).values():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)
    return adapted


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint on disk, with the house's tokenizer left out: only the model is read."""
    folder = tmp_path_factory.mktemp("llama")
    zoo.full("llama", "causal-lm")[0].save_pretrained(folder)
    return folder


@pytest.mark.parametrize("kind", available("4bit", "int8"))
@pytest.mark.parametrize("method", list(registry.all_methods()))
def test_the_capability_table_holds(method: str, kind: str) -> None:
    """On one family for each method and quantisation, the last that the table has; or a clear refusal."""
    works = capabilities()["quantised"][method].get(kind)
    if not works:
        with pytest.raises(InlayError, match=rf"{method} does not work .* quantised \({kind}\). These do: .*lora"):
            attach(zoo.tiny("bert", "classification", kind)[0], method)
        return
    assert zoo.fault(registry.get(method), works[0], kind) is None


@pytest.mark.parametrize("kind", available("4bit", "8bit", "int8", "int4"))
def test_it_multiplies_with_its_dequantised_weights(kind: str) -> None:
    model, batch = zoo.tiny("llama", "causal-lm", kind)
    held = {name for name, module in model.named_modules() if quantised.kind_of(module) == kind}
    assert len(held) == 3 * 7  # of each block, and not the head
    tolerance = 0.05 if kind == "8bit" else 1e-5  # LLM.int8 rounds what it multiplies as well
    full = logits(zoo.dequantised("llama", "causal-lm", kind), batch)
    torch.testing.assert_close(logits(model, batch), full, atol=tolerance, rtol=0)
    assert not torch.equal(full, logits(zoo.full("llama", "causal-lm")[0], batch))


@pytest.mark.parametrize("kind", available("4bit", "int8"))
@pytest.mark.parametrize("method", ["lora", "ntk-attention", "ssf"])
def test_adapters_move_between_a_quantised_base_and_a_full_one(method: str, kind: str, tmp_path: Path) -> None:
    adapted = stirred(zoo.tiny("llama", "causal-lm", kind)[0], method)
    batch = zoo.full("llama", "causal-lm")[1]
    here = logits(adapted, batch)
    save(adapted, method, tmp_path / "from-quantised")
    there = restore(zoo.dequantised("llama", "causal-lm", kind), method, tmp_path / "from-quantised")
    torch.testing.assert_close(logits(there, batch), here, atol=1e-5, rtol=0)
    save(there, method, tmp_path / "from-full")
    back = restore(zoo.tiny("llama", "causal-lm", kind)[0], method, tmp_path / "from-full")
    assert torch.equal(logits(back, batch), here)


@pytest.mark.parametrize("kind", available("4bit", "8bit", "int8"))
def test_a_base_is_the_checkpoint_it_came_from(kind: str) -> None:
    full = load("embedded:minilm", kind="classification", num_labels=2)
    low = load("embedded:minilm", kind="classification", num_labels=2, quantize=kind, compute_dtype=torch.bfloat16)
    assert low.quantize == kind
    assert low.fingerprint == full.fingerprint == fingerprint(low.model, low.newly_initialised)
    assert low.newly_initialised == ["classifier"]
    assert torch.equal(low.model.classifier.weight, full.model.classifier.weight)  # drawn alike, and not rounded
    assert low.model.get_input_embeddings().weight.dtype is torch.bfloat16
    other = load("embedded:minilm", kind="classification", num_labels=2, quantize=kind)
    weight = next(module for module in other.model.modules() if isinstance(module, nn.LayerNorm)).weight
    weight.data += 1
    assert fingerprint(other.model, other.newly_initialised) != full.fingerprint


@pytest.mark.parametrize("kind", available("4bit"))
def test_frozen_layers_in_eval_mode_keep_their_gradient(kind: str) -> None:
    """bitsandbytes repacks weights in eval mode on some CPUs, after which nothing flows back through them."""
    model, batch = zoo.tiny("llama", "causal-lm", kind)
    adapted = attach(model, "lora").eval()
    with torch.no_grad():
        adapted(**batch)
    packed = [module.weight.clone() for module in adapted.modules() if quantised.kind_of(module)]
    adapted(**batch).loss.backward()
    gradients = [p.grad for name, p in trained_parameters(adapted).items() if "lora_B" in name and ".0." in name]
    assert gradients
    assert all(gradient is not None and gradient.abs().sum() > 0 for gradient in gradients)
    after = [module.weight for module in adapted.modules() if quantised.kind_of(module)]
    assert all(map(torch.equal, packed, after))


@pytest.mark.parametrize("kind", available("4bit", "int8"))
@pytest.mark.parametrize("method", ["ssf", "multi-lora"])
def test_nothing_merges_into_packed_weights(method: str, kind: str) -> None:
    adapted: Any = stirred(zoo.tiny("llama", "causal-lm", kind)[0], method)
    before = logits(adapted, zoo.full("llama", "causal-lm")[1])
    with pytest.raises(InlayError, match=rf"quantised \({kind}\).*load it on the full base"):
        adapted.merge_adapter()
    assert torch.equal(logits(adapted, zoo.full("llama", "causal-lm")[1]), before)


@pytest.mark.parametrize("kind", available("4bit", "int8"))
def test_weights_are_rounded_once_only_where_they_are_whole(kind: str) -> None:
    model = attach(zoo.tiny("llama", "causal-lm", kind)[0], "lora")
    batch = zoo.full("llama", "causal-lm")[1]
    with torch.autocast("cpu", torch.bfloat16):
        expected = logits(model, batch)
        with inlay.rounded_once(model, torch.bfloat16):
            held = [module.weight for module in model.modules() if quantised.kind_of(module)]
            assert {quantised.kind_of_weight(weight) for weight in held} == {kind}
            torch.testing.assert_close(logits(model, batch), expected, atol=0.02, rtol=0)


@pytest.mark.parametrize("kind", available("4bit", "int8"))
def test_checkpointing_gives_the_same_gradients(kind: str) -> None:
    found = []
    for checkpointed in (False, True):
        model, batch = zoo.tiny("llama", "causal-lm", kind)
        if checkpointed:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        torch.manual_seed(0)
        adapted = attach(model, "ntk-attention").train()
        adapted(**batch).loss.backward()
        found.append([parameter.grad for parameter in trained_parameters(adapted).values()])
    for plain, again in zip(*found, strict=True):
        torch.testing.assert_close(again, plain)


@pytest.mark.parametrize("kind", available("4bit", "int8"))
def test_rows_of_a_batch_have_adapters_of_their_own(kind: str, tmp_path: Path) -> None:
    model, batch = zoo.tiny("llama", "causal-lm", kind)
    batch = {name: value for name, value in batch.items() if name != "labels"}
    mixed: Any = None
    for name, rank in (("one", 2), ("two", 4)):
        torch.manual_seed(rank)
        config = LoraConfig(r=rank, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM")
        if mixed is None:
            mixed = get_peft_model(model, config, adapter_name=name)
        else:
            mixed.add_adapter(name, config)
    mixed.eval().save_pretrained(tmp_path)
    alone = {}
    for name in ("one", "two"):
        mixed.set_adapter(name)
        alone[name] = logits(mixed, batch)
    base = logits(zoo.tiny("llama", "causal-lm", kind)[0], batch)
    expected = torch.stack([alone["one"][0], alone["two"][1], base[2]])
    names = ["one", "two", "__base__"]
    inlay.mix(mixed)
    with torch.no_grad():
        torch.testing.assert_close(mixed(**batch, adapter_names=names).logits, expected, atol=1e-5, rtol=0)
    pool = inlay.AdapterPool(zoo.tiny("llama", "causal-lm", kind)[0], slots=4)
    for name in ("one", "two"):
        pool.add(name, tmp_path / name)
    with torch.no_grad():
        found = pool(**batch, adapter_names=names).logits
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("kind", available("4bit"))
def test_a_model_that_transformers_quantised_takes_adapters(kind: str, llama: Path, tmp_path: Path) -> None:
    """Its full weights are not known, so that the adapter is not compared with them."""
    from transformers import AutoModelForCausalLM

    adapted = stirred(zoo.tiny("llama", "causal-lm", kind)[0], "lora")
    save(adapted, "lora", tmp_path, fingerprint="0" * 64)
    how = quantised.settings(kind, torch.float32, ["lm_head"])
    base = AutoModelForCausalLM.from_pretrained(llama, quantization_config=how, dtype=torch.float32)
    batch = zoo.full("llama", "causal-lm")[1]
    expected = logits(adapted, batch)
    torch.testing.assert_close(logits(restore(base, "lora", tmp_path), batch), expected, atol=1e-5, rtol=0)
    with pytest.raises(InlayError, match="another base model"):
        restore(zoo.tiny("llama", "causal-lm", kind)[0], "lora", tmp_path)
    assert isinstance(PeftModel.from_pretrained(copy.deepcopy(zoo.full("llama", "causal-lm")[0]), tmp_path), PeftModel)


def test_what_cannot_be_quantised_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InlayError, match="no quantisation runs on mps"):
        quantised.check("4bit", torch.device("mps"))
    with pytest.raises(InlayError, match=r"5bit.*4bit"):
        quantised.check("5bit")
    with pytest.raises(InlayError, match=r"5bit.*4bit"):
        Spec(model="m", method="lora", task="sst2", quantize="5bit")
    monkeypatch.setattr(quantised, "find_spec", lambda name: None)
    with pytest.raises(InlayError, match=r"pip install 'inlay\[quantize\]'"):
        quantised.check("8bit", torch.device("cpu"))


@pytest.mark.parametrize("kind", available("4bit"))
def test_a_model_without_linear_layers_is_refused(kind: str) -> None:
    with pytest.raises(InlayError, match="no linear layers to quantise"):
        load("embedded:resnet", kind="image-classification", num_labels=3, quantize=kind)


def test_a_run_counts_its_quantisation() -> None:
    plain = Spec(model="m", method="lora", task="sst2")
    assert plain.digest() != plain.with_(quantize="4bit").digest()
    before = {name: value for name, value in plain.to_json().items() if name != "quantize"}
    assert Spec.from_json(before).digest() == plain.digest()
