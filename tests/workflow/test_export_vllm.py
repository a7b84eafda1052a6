"""LoRAs in the form that vLLM reads: the product of each layer is that of the adapter, by vLLM's own arithmetic."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, PeftModel, VeraConfig, get_peft_model
from safetensors.torch import load_file
from torch import Tensor

import zoo
from inlay import InlayError
from inlay.workflow.export import export


def base(folder: Path) -> Any:
    zoo.tiny("llama", "causal-lm")[0].save_pretrained(folder)
    return transformers.AutoModelForCausalLM.from_pretrained(folder)


def adapted(folder: Path, config: Any) -> Any:
    """A model with this adapter, moved away from its start, and saved."""
    model = get_peft_model(base(folder / "base"), config)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in filter(lambda each: each.requires_grad, model.parameters()):
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.3)
    model.eval().save_pretrained(folder / "adapter")
    return model


def as_vllm_adds(folder: Path) -> dict[str, Tensor]:
    """What vLLM adds to each weight: B A times lora_alpha / r, in float64; of the settings it reads no more."""
    settings = json.loads((folder / "adapter_config.json").read_text())
    assert not settings["modules_to_save"]
    assert not settings["use_dora"]
    assert not settings["use_rslora"]
    assert settings["bias"] == "none"
    tensors = load_file(folder / "adapter_model.safetensors")
    stems = {name.rpartition(".lora_")[0] for name in tensors}
    assert {f"{stem}.lora_{part}.weight" for stem in stems for part in "AB"} == tensors.keys()
    assert all(stem.startswith("base_model.model.model.layers.") for stem in stems)
    assert {len(tensors[f"{stem}.lora_A.weight"]) for stem in stems} == {settings["r"]}
    scale = settings["lora_alpha"] / settings["r"]
    parts = {stem: [tensors[f"{stem}.lora_{part}.weight"].double() for part in "BA"] for stem in stems}
    return {stem.removeprefix("base_model.model."): scale * b @ a for stem, (b, a) in parts.items()}


LORAS = {
    "plain": LoraConfig(r=8, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM"),
    "patterns": LoraConfig(
        r=3,
        lora_alpha=5,
        use_rslora=True,
        rank_pattern={"layers.1.self_attn.q_proj": 9},
        alpha_pattern={"v_proj": 2},
        target_modules=["q_proj", "v_proj"],
        task_type="CAUSAL_LM",
    ),
    "some layers": LoraConfig(r=4, target_modules=["k_proj"], layers_to_transform=[1], task_type="CAUSAL_LM"),
    "vera": VeraConfig(r=4, target_modules=["q_proj", "o_proj"], task_type="CAUSAL_LM"),
}
RANKS = {"plain": 8, "patterns": 16, "some layers": 8, "vera": 8}


@pytest.mark.parametrize("name", LORAS)
def test_vllm_adds_what_the_adapter_does(name: str, tmp_path: Path) -> None:
    model = adapted(tmp_path, LORAS[name])
    made = export(tmp_path / "adapter", None, tmp_path / "made", to="vllm", model=str(tmp_path / "base"))
    assert json.loads((made / "adapter_config.json").read_text())["r"] == RANKS[name]
    before = {key: value.double() for key, value in base(tmp_path / "base").state_dict().items()}
    batch = {key: value for key, value in zoo.tiny("llama", "causal-lm")[1].items() if key != "labels"}
    with torch.no_grad():
        wanted = model(**batch).logits
        again = PeftModel.from_pretrained(base(tmp_path / "base"), made).eval()(**batch).logits
    torch.testing.assert_close(again, wanted, atol=1e-5, rtol=1e-5)
    after = model.merge_and_unload().state_dict()
    added = as_vllm_adds(made)
    for key, value in after.items():
        stem = key.removesuffix(".weight")
        own = added.pop(stem, torch.zeros((), dtype=torch.float64))
        torch.testing.assert_close(before[key] + own, value.double(), atol=1e-6, rtol=1e-5)
    assert not added


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({"task_type": None}, "puts LoRAs into language models alone"),
        ({"modules_to_save": ["lm_head"]}, "vLLM has no place for"),
        ({"r": 513}, "vLLM takes at most 512"),
        ({"use_dora": True}, "is no plain LoRA"),
    ],
)
def test_what_vllm_has_no_place_for_is_refused(changes: dict[str, Any], wanted: str, tmp_path: Path) -> None:
    given = {"r": 4, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM", **changes}
    adapted(tmp_path, LoraConfig(**given))
    with pytest.raises(InlayError, match=wanted):
        export(tmp_path / "adapter", None, tmp_path / "made", to="vllm", model=str(tmp_path / "base"))
    assert not (tmp_path / "made").exists()
