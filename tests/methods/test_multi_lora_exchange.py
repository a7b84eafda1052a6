"""A task of Multi-LoRA as a plain LoRA of PEFT's and back: exact, with its head, or not at all."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from inlay.errors import InlayError
from inlay.methods import folder as names
from inlay.methods.attach import save
from inlay.methods.multi_lora.exchange import from_lora, to_lora
from inlay.methods.saving import read
from manytasks import TASKS, inputs, several
from zoo import tiny

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::RuntimeWarning")

WEIGHTS, CONFIG = names.WEIGHTS["peft"], names.CONFIG["peft"]


@torch.no_grad()
def logits(model: Any, batch: dict[str, Tensor], task: str) -> Tensor:
    return model(**batch, adapter_names=[task] * 3).logits


def exported(model: Any, task: str, folder: Path) -> Path:
    """The folder of a task as a LoRA."""
    save(model, "multi-lora", folder / "ours", adapter_name=task)
    made = folder / f"{task}-lora"
    made.mkdir()
    to_lora(*read("multi-lora", folder / "ours", task), made)
    return made


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("bert", {"target_modules": ["query", "word_embeddings"], "rank_pattern": {"query": 3}}),
        ("gpt2", {"target_modules": ["c_attn", "c_fc"], "alpha_pattern": {"c_fc": 5}}),
        ("resnet", {}),
    ],
)
def test_exported_as_lora_and_taken_back(family: str, settings: dict[str, Any], tmp_path: Path) -> None:
    model, batch = several(family, **settings)
    save(model, "multi-lora", tmp_path / "ours", adapter_name="sst2")
    (tmp_path / "lora").mkdir()
    to_lora(*read("multi-lora", tmp_path / "ours", "sst2"), tmp_path / "lora")
    base, _ = tiny(family)
    base.num_labels = base.config.num_labels = 5
    head = base.classifier if family != "gpt2" else base.score
    last = head[-1] if isinstance(head, nn.Sequential) else head
    new = nn.Linear(last.in_features, 5, bias=last.bias is not None)
    if isinstance(head, nn.Sequential):
        head[-1] = new
    else:
        setattr(base, "classifier" if family != "gpt2" else "score", new)
    lora = PeftModel.from_pretrained(base.double(), str(tmp_path / "lora")).eval()
    wanted = logits(model, inputs(batch), "sst2")
    torch.testing.assert_close(lora(**inputs(batch)).logits.detach(), wanted, atol=1e-10, rtol=1e-10)
    from_lora(model, tmp_path / "lora", "again")
    torch.testing.assert_close(logits(model, inputs(batch), "again"), wanted, atol=1e-12, rtol=1e-12)


def test_a_lora_with_its_own_a_is_no_task(tmp_path: Path) -> None:
    model, _ = several("bert")
    lora = get_peft_model(tiny("bert")[0], LoraConfig(r=8, target_modules=["query", "value"]))
    lora.save_pretrained(tmp_path)
    with pytest.raises(InlayError, match="not the one that the tasks of this model share"):
        from_lora(model, tmp_path, "other")
    assert model.base_model.tasks == [*TASKS]


@pytest.mark.parametrize("task", [*TASKS])
@pytest.mark.parametrize(
    "family", ["bert", "distilbert", "roberta", "deberta-v2", "electra", "modernbert", "t5", "vit"]
)
def test_a_head_of_any_shape_comes_back(family: str, task: str, tmp_path: Path) -> None:
    """Whatever the layers of the head are called, and however many outputs the last of them has."""
    model, batch = several(family)
    from_lora(model, exported(model, task, tmp_path), "again")
    wanted, found = (logits(model, inputs(batch), name) for name in (task, "again"))
    assert torch.equal(found, wanted)
    assert model.peft_config["again"].num_labels == (TASKS[task] or 3)


def _without_a(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {key: value for key, value in tensors.items() if "lora_A" not in key}


def _without_one_b(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    last = [key for key in tensors if "lora_B" in key][-1]
    return {key: value for key, value in tensors.items() if key != last}


def _a_narrower_b(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {key: value[:-1] if "lora_B" in key else value for key, value in tensors.items()}


def _a_bias(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    key = next(key for key in tensors if "lora_B" in key)
    return tensors | {key.replace(".weight", ".bias"): torch.zeros(16)}


def _a_wider_head(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {
        key: torch.cat([value, value], 1) if key.endswith(".classifier.weight") else value
        for key, value in tensors.items()
    }


def _a_head_without_its_bias(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {key: value for key, value in tensors.items() if not key.endswith(".classifier.bias")}


def _another_head(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return tensors | {"base_model.model.summary.weight": torch.zeros(2, 2)}


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (_without_a, "no A"),
        (_without_one_b, "no B"),
        (_a_narrower_b, r"B of .* is \(15, 3\)"),
        (_a_bias, r"lora_B.bias"),
        (_a_wider_head, r"classifier.weight .*\(5, 32\).*\(5, 16\)"),
        (_a_head_without_its_bias, "no classifier.bias"),
        (_another_head, "summary.weight"),
    ],
)
def test_a_lora_that_is_not_whole_leaves_nothing_behind(damage: Callable[..., Any], said: str, tmp_path: Path) -> None:
    model, batch = several("distilbert")
    folder = exported(model, "sst2", tmp_path)
    save_file({key: value.contiguous() for key, value in damage(load_file(folder / WEIGHTS)).items()}, folder / WEIGHTS)
    before, wanted = set(model.state_dict()), logits(model, inputs(batch), "sst2")
    with pytest.raises(InlayError, match=said):
        from_lora(model, folder, "again")
    assert model.base_model.tasks == [*TASKS]
    assert set(model.state_dict()) == before
    assert torch.equal(logits(model, inputs(batch), "sst2"), wanted)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"rank_pattern": {r"(\w+\.?)+!": 4}}, "takes too long"),
        ({"alpha_pattern": {"(": 4}}, "is no pattern"),
        ({"rank_pattern": {"q_lin": "x"}}, "rank_pattern has 'x' for 'q_lin'"),
        ({"rank_pattern": [3]}, "rank_pattern="),
        ({"r": 0}, "r=0"),
        ({"r": 10**9}, "r=1000000000: no tensor"),
        ({"lora_alpha": "much"}, "lora_alpha='much'"),
        ({"megatron_config": {"a": 1}}, "megatron_config, which is not loaded"),
        ({"peft_type": "IA3"}, "peft_type='IA3': a task is made of a LoRA alone"),
        ({"loftq_config": 3, "init_lora_weights": "loftq"}, "no LoRA adapter of PEFT's that can be read"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_strangers_lora_is_looked_at_before_it_is_obeyed(settings: dict[str, Any], said: str, tmp_path: Path) -> None:
    model, _ = several("distilbert")
    folder = exported(model, "sst2", tmp_path)
    path = folder / CONFIG
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))
    before = set(model.state_dict())
    with pytest.raises(InlayError, match=said):
        from_lora(model, folder, "again")
    assert model.base_model.tasks == [*TASKS]
    assert set(model.state_dict()) == before


def test_files_of_a_strangers_lora_are_plain_and_their_numbers_finite(tmp_path: Path) -> None:
    model, _ = several("distilbert")
    folder = exported(model, "sst2", tmp_path)
    tensors = load_file(folder / WEIGHTS)
    name = next(name for name in tensors if "lora_B" in name)
    save_file(tensors | {name: torch.full_like(tensors[name], torch.nan)}, folder / WEIGHTS)
    with pytest.raises(InlayError, match="values that are not finite"):
        from_lora(model, folder, "again")
    for file in (WEIGHTS, CONFIG):
        (folder / file).unlink()
        os.mkfifo(folder / file)
        with pytest.raises(InlayError, match=f"{file} is not a plain file"):
            from_lora(model, folder, "again")
    assert model.base_model.tasks == [*TASKS]
