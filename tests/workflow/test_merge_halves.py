"""Merging into a checkpoint of half precision: each weight is made whole, changed, and rounded once."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from test_chat_runs import chats
from test_chat_runs import checkpoint as llama_that_talks

import inlay
from checkpoints import write_tokenizer
from inlay import InlayError, Spec
from inlay.backbones import loading
from inlay.methods import merging, registry
from inlay.workflow.adapted import find_source, load_adapted
from zoo import FAMILIES

merging_workflow = importlib.import_module("inlay.workflow.merge")
HALVES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def checkpoint(folder: Path, dtype: torch.dtype, *, tied: bool = False) -> Path:
    """A small Llama in several files."""
    config: Any = FAMILIES["llama"].config()
    config.tie_word_embeddings = tied
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config)
    model.to(dtype).save_pretrained(folder, max_shard_size="8KB")
    write_tokenizer(folder)
    assert len([*folder.glob("*.safetensors")]) >= 2
    return folder


def adapter(base: Path, folder: Path, **settings: Any) -> Path:
    """A LoRA in float32, moved away from its start."""
    model = get_peft_model(
        transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32),
        LoraConfig(task_type="CAUSAL_LM", r=3, lora_alpha=7, init_lora_weights=False, **settings),
    )
    model.save_pretrained(folder, save_embedding_layers=False)
    return folder


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def products(folder: Path, scale: float) -> dict[str, torch.Tensor]:
    """What is to be added to each weight, in float64."""
    found = weights(folder)
    start, end = "base_model.model.", ".lora_A.weight"
    names = [name.removeprefix(start).removesuffix(end) for name in found if name.endswith(end)]
    return {
        f"{name}.weight": scale
        * (found[f"{start}{name}.lora_B.weight"].double() @ found[f"{start}{name}.lora_A.weight"].double())
        for name in names
    }


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("stored", [*HALVES, "float32"])
def test_every_weight_is_rounded_once(dtype: str, stored: str, tmp_path: Path) -> None:
    """Against float64: the nearest number of half precision, or (float32 is not float64) one beside it where the sum
    lies between two."""
    base = checkpoint(tmp_path / "base", getattr(torch, stored))
    lora = adapter(base, tmp_path / "lora", target_modules="all-linear")
    merged = weights(inlay.merge(lora, tmp_path / "merged", model=str(base), dtype=dtype))
    before, added = weights(base), products(lora, 7 / 3)
    assert added.keys() < before.keys() == merged.keys()
    rounded_differently = count = 0
    for name, found in merged.items():
        assert found.dtype == HALVES[dtype]
        exact = before[name].double() + added.get(name, 0.0)
        if name not in added:
            assert torch.equal(found, before[name].to(found.dtype))
            continue
        # Half of the distance between two numbers of this type, and what float32 rounds before.
        step = exact.abs().clamp(min=torch.finfo(found.dtype).tiny) * torch.finfo(found.dtype).eps
        assert ((found.double() - exact).abs() <= step / 2 * (1 + 1e-3) + 1e-9).all(), name
        rounded_differently += int((found != exact.to(torch.float32).to(found.dtype)).sum())
        count += found.numel()
        assert not torch.equal(found, before[name].to(found.dtype))
    assert rounded_differently <= 1e-3 * count


def test_the_bits_are_those_of_a_model_in_float32(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = checkpoint(tmp_path / "base", torch.bfloat16)
    lora = adapter(base, tmp_path / "lora", target_modules="all-linear", use_rslora=True)
    held = weights(inlay.merge(lora, tmp_path / "held", model=str(base), dtype="bfloat16"))
    monkeypatch.setattr(merging, "may_be_held", lambda method: False)
    whole = weights(inlay.merge(lora, tmp_path / "whole", model=str(base), dtype="bfloat16"))
    assert held.keys() == whole.keys()
    assert all(torch.equal(held[name], whole[name]) for name in held)


def test_a_model_that_is_put_on_its_device_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU with room for it, so far as that goes without one."""
    base = checkpoint(tmp_path / "base", torch.bfloat16)
    lora = adapter(base, tmp_path / "lora", target_modules="all-linear")
    plain = weights(inlay.merge(lora, tmp_path / "plain", model=str(base), dtype="bfloat16"))
    asked: list[object] = []
    straight = {"device_map": {"": torch.device("cpu")}}
    monkeypatch.setattr(loading, "_straight_to_gpu", lambda place: asked.append(place) or straight)
    found = weights(inlay.merge(lora, tmp_path / "straight", model=str(base), dtype="bfloat16"))
    assert len(asked) == 1
    assert all(torch.equal(found[name], plain[name]) for name in plain)


def test_what_is_held_has_the_fingerprint_of_full_weights(tmp_path: Path) -> None:
    base = checkpoint(tmp_path / "base", torch.bfloat16)
    how: dict[str, Any] = {"kind": "causal-lm"}
    whole, held = loading.load(str(base), **how), loading.load(str(base), held=torch.bfloat16, **how)
    assert held.fingerprint == whole.fingerprint
    assert {p.dtype for p in whole.model.parameters()} == {torch.float32}
    assert {p.dtype for p in held.model.parameters()} == {torch.bfloat16}
    other = loading.load(str(base), held=torch.float16, **how)
    assert {p.dtype for p in other.model.parameters()} == {torch.float32}, "it is not stored in that"


def test_a_checkpoint_without_an_output_layer(tmp_path: Path) -> None:
    """The run's own output layer is in float32: so is the base."""
    base = llama_that_talks(tmp_path / "base")
    model = transformers.AutoModel.from_pretrained(base)
    model.to(torch.bfloat16).save_pretrained(base)
    spec = Spec(str(base), "lora", data=str(chats(tmp_path / "chats.jsonl")), max_steps=1, learning_rate=0.05)
    run = inlay.tune(spec.with_(batch_size=8, max_length=64), tmp_path / "runs", progress=False)
    made = weights(inlay.merge(run, tmp_path / "merged", dtype="bfloat16"))
    whole = weights(inlay.merge(run, tmp_path / "whole"))
    assert made.keys() == whole.keys()
    assert all(torch.equal(made[name], tensor.to(torch.bfloat16)) for name, tensor in whole.items())
    how: dict[str, Any] = {"kind": "causal-lm", "seed": 3}
    plain, held = loading.load(str(base), **how), loading.load(str(base), held=torch.bfloat16, **how)
    assert held.newly_initialised == plain.newly_initialised != []
    assert held.fingerprint == plain.fingerprint
    assert all(torch.equal(held.model.state_dict()[name], each) for name, each in plain.model.state_dict().items())


def test_rows_of_tokens_in_tied_weights_are_merged_in_float32(tmp_path: Path) -> None:
    base = checkpoint(tmp_path / "base", torch.bfloat16, tied=True)
    lora = adapter(base, tmp_path / "lora", target_modules=["q_proj"], trainable_token_indices=[1, 2])
    tensors = load_file(lora / "adapter_model.safetensors")
    (name,) = (name for name in tensors if "trainable_tokens_delta" in name)
    tensors[name] += 1
    save_file(tensors, lora / "adapter_model.safetensors")
    said: list[str] = []
    made = inlay.merge(lora, tmp_path / "merged", model=str(base), dtype="bfloat16", say=said.append)
    assert any("merged in float32" in line and "another module shares" in line for line in said)
    whole = weights(inlay.merge(lora, tmp_path / "whole", model=str(base)))
    assert all(torch.equal(weights(made)[name], tensor.to(torch.bfloat16)) for name, tensor in whole.items())
    rows = weights(made)["model.embed_tokens.weight"] != weights(base)["model.embed_tokens.weight"]
    assert rows.any(-1).nonzero()[:, 0].tolist() == [1, 2]


@pytest.mark.parametrize("stored", ["bfloat16", "float32"])
def test_adapted_embeddings_are_compared(stored: str, tmp_path: Path) -> None:
    base = checkpoint(tmp_path / "base", getattr(torch, stored))
    for name, settings in {
        "rows": {"target_modules": ["q_proj"], "trainable_token_indices": [5, 17]},
        "all": {"target_modules": ["embed_tokens"]},
        "none": {"target_modules": ["q_proj"]},
    }.items():
        source = find_source(adapter(base, tmp_path / name, **settings))
        adapted = load_adapted(source, stored if stored != "float32" else None, model=str(base))
        batch = merging_workflow._example(adapted)
        ids = merging.adapted_ids(adapted.model)
        count = adapted.model.config.vocab_size
        if name == "rows":
            assert ids == [5, 17]
        elif name == "all":
            assert ids[0] == 0
            assert ids[-1] == count - 1
            assert len(ids) == min(count, 64)
        else:
            assert ids == []
            assert len(batch["input_ids"]) == (1 if stored == "bfloat16" else 2)
        assert {*ids} <= {*batch["input_ids"].flatten().tolist()}
        assert batch["input_ids"].shape == batch["attention_mask"].shape


def test_a_weight_that_is_shared_is_refused(tmp_path: Path) -> None:
    base = checkpoint(tmp_path / "base", torch.bfloat16, tied=True)
    lora = adapter(base, tmp_path / "lora", target_modules=["embed_tokens"])
    with pytest.raises(InlayError, match="gives other outputs"):
        inlay.merge(lora, tmp_path / "merged", model=str(base), dtype="bfloat16")
    assert not (tmp_path / "merged").exists()


@pytest.mark.parametrize("stored", ["float16", "float32"])
def test_what_half_precision_cannot_hold_is_refused(stored: str, tmp_path: Path) -> None:
    """Though float32 can."""
    base = checkpoint(tmp_path / "base", getattr(torch, stored))
    lora = adapter(base, tmp_path / "lora", target_modules=["q_proj"])
    tensors = load_file(lora / "adapter_model.safetensors")
    name = next(name for name in tensors if "lora_B" in name)
    tensors[name][0] = 1e6
    save_file(tensors, lora / "adapter_model.safetensors")
    with pytest.raises(InlayError, match=r"values that are not finite, in .*q_proj\.weight"):
        inlay.merge(lora, tmp_path / "merged", model=str(base), dtype="float16")
    assert not (tmp_path / "merged").exists()


def test_a_dora_is_merged_too(tmp_path: Path) -> None:
    base = checkpoint(tmp_path / "base", torch.bfloat16)
    lora = adapter(base, tmp_path / "lora", target_modules=["q_proj", "down_proj"], use_dora=True)
    made = inlay.merge(lora, tmp_path / "merged", model=str(base), dtype="bfloat16")
    assert json.loads((made / "config.json").read_text())["dtype"] == "bfloat16"
    whole = inlay.merge(lora, tmp_path / "whole", model=str(base))
    for name, tensor in weights(whole).items():
        assert torch.equal(weights(made)[name], tensor.to(torch.bfloat16)), name


@pytest.mark.parametrize("method", registry.names_where(merging.may_be_held))
def test_runs_of_every_method_of_pefts(method: str, tmp_path: Path) -> None:
    """Trained in float32 on a checkpoint of bfloat16: the same as merged in float32, and rounded then."""
    base = llama_that_talks(tmp_path / "base")
    model = transformers.AutoModelForCausalLM.from_pretrained(base)
    model.to(torch.bfloat16).save_pretrained(base)
    spec = Spec(str(base), method, data=str(chats(tmp_path / "chats.jsonl")), max_steps=2, learning_rate=0.05)
    run = inlay.tune(spec.with_(batch_size=8, max_length=64), tmp_path / "runs", progress=False)
    made = weights(inlay.merge(run, tmp_path / "merged", dtype="bfloat16"))
    whole = weights(inlay.merge(run, tmp_path / "whole"))
    before = weights(base)
    assert made.keys() == whole.keys()
    assert all(torch.equal(made[name], tensor.to(torch.bfloat16)) for name, tensor in whole.items())
    assert any(not torch.equal(made[name], before[name]) for name in made)
