"""Tasks of Multi-LoRA one by one: what trains, added, saved, loaded, renamed, deleted, merged, exported; bad input."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel, get_peft_model
from safetensors.torch import load_file
from torch import Tensor, nn

import inlay
from inlay.errors import InlayError
from inlay.methods.attach import restore, save
from inlay.methods.multi_lora.exchange import to_lora
from inlay.methods.multi_lora.model import rename_task
from inlay.methods.saving import read
from manytasks import stir
from zoo import tiny

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::RuntimeWarning")


def tasks(family: str = "bert", dtype: torch.dtype = torch.float64, **settings: Any) -> tuple[Any, dict[str, Tensor]]:
    model, batch = tiny(family)
    model = get_peft_model(model.to(dtype), inlay.MultiLoraConfig(**settings), adapter_name="rte")
    model.add_adapter("sst2", inlay.MultiLoraConfig(num_labels=2, **settings))
    stir(model)
    batch = {key: value.to(dtype) if value.is_floating_point() else value for key, value in batch.items()}
    return model.eval(), {key: value for key, value in batch.items() if key != "labels"}


@torch.no_grad()
def logits(model: Any, batch: dict[str, Tensor], task: str | None = None) -> Tensor:
    return model(**batch, adapter_names=None if task is None else [task] * 3).logits


def training(model: nn.Module) -> set[str]:
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


def of(names: set[str], task: str) -> set[str]:
    return {name for name in names if f".{task}." in name}


# ------------------------------------------------------------------------------------------------------ what trains


def test_every_task_trains_whatever_is_active() -> None:
    model, _ = tasks()
    before = training(model)
    assert of(before, "rte")
    assert len(of(before, "rte")) == len(of(before, "sst2"))
    assert all(".rte." in name or ".sst2." in name for name in before)
    model.set_adapter("sst2")
    assert training(model) == before
    with model.disable_adapter():
        pass
    assert training(model) == before
    model.add_adapter("cola", inlay.MultiLoraConfig())
    assert training(model) == before | of(training(model), "cola")
    assert len(of(training(model), "cola")) == len(of(before, "rte"))


def test_inference_mode_freezes() -> None:
    model, _ = tasks()
    model.set_adapter("sst2", inference_mode=True)
    assert not of(training(model), "sst2")
    assert of(training(model), "rte")
    model.add_adapter("cola", inlay.MultiLoraConfig(inference_mode=True))
    assert not of(training(model), "cola")
    model.set_adapter("sst2")
    assert of(training(model), "sst2")


def test_an_absent_task_does_not_move() -> None:
    model, batch = tasks(dtype=torch.float32)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1, weight_decay=0.1)
    for names in (["rte", "sst2", "rte"], ["rte"] * 3):
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        optimizer.zero_grad()
        model(**batch, labels=torch.tensor([0, 1, 1]), adapter_names=names).loss.backward()
        optimizer.step()
        moved = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
        assert of(moved, "rte") == of(training(model), "rte")
        assert bool(of(moved, "sst2")) == ("sst2" in names)


# -------------------------------------------------------------------------------------------------------- one by one


def test_tasks_are_saved_and_loaded_one_by_one(tmp_path: Path) -> None:
    model, batch = tasks(dtype=torch.float32)
    wanted = {task: logits(model, batch, task) for task in ("rte", "sst2")}
    for task in wanted:
        save(model, "multi-lora", tmp_path, adapter_name=task)
    kept = load_file(tmp_path / "rte" / "adapter_model.safetensors")
    assert {key.rsplit(".", 2)[-2] for key in kept} == {"inlay_multi_lora_b", "classifier"}
    numbers = sum(value.numel() for key, value in kept.items() if "inlay" in key)
    assert numbers == model.base_model.counted_parameters()["trained"] // 2
    config = json.loads((tmp_path / "sst2" / "adapter_config.json").read_text())
    assert config["seed"] == 0
    assert len(config["checksum"]) == 64
    assert config["num_labels"] == 2
    again: Any = tiny("bert")[0]
    for task in ("sst2", "rte"):
        again = restore(again, "multi-lora", tmp_path, adapter_name=task)
    mixed = again(**batch, adapter_names=["sst2", "rte", "sst2"]).logits
    torch.testing.assert_close(mixed[[0, 2], :2], wanted["sst2"][[0, 2]])
    torch.testing.assert_close(mixed[1], wanted["rte"][1])
    for task, each in wanted.items():
        assert torch.equal(logits(again, batch, task), each)
    plain = PeftModel.from_pretrained(tiny("bert")[0], str(tmp_path / "sst2"), adapter_name="sst2")
    plain.load_adapter(str(tmp_path / "rte"), adapter_name="rte")
    for task, each in wanted.items():
        assert torch.equal(logits(plain, batch, task), each)


def test_renamed_and_deleted() -> None:
    model, batch = tasks()
    wanted = logits(model, batch, "rte"), logits(model, batch, "sst2")
    rename_task(model, "rte", "entailment")
    assert model.base_model.tasks == ["entailment", "sst2"]
    assert model.active_adapter == "entailment"
    assert torch.equal(logits(model, batch), wanted[0])
    assert torch.equal(logits(model, batch, "entailment"), wanted[0])
    with pytest.raises(InlayError, match="rte"):
        logits(model, batch, "rte")
    with pytest.raises(InlayError, match="already"):
        rename_task(model, "sst2", "entailment")
    model.delete_adapter("entailment")
    assert torch.equal(logits(model, batch, "sst2"), wanted[1])
    with pytest.raises(InlayError, match="entailment"):
        logits(model, batch, "entailment")
    model.add_adapter("entailment", inlay.MultiLoraConfig())
    assert not torch.equal(logits(model, batch, "entailment"), wanted[0])
    assert torch.equal(logits(model, batch, "sst2"), wanted[1])


def test_when_the_last_task_is_gone_another_a_can_be_drawn() -> None:
    model, batch = tasks()
    logits(model, batch, "rte")
    for task in ("rte", "sst2"):
        model.delete_adapter(task)
    assert not model.base_model.tasks
    assert model.base_model.counted_parameters() == {"shared": 0, "trained": 0}
    model.add_adapter("cola", inlay.MultiLoraConfig(seed=3, r=2))
    model.add_adapter("mrpc", inlay.MultiLoraConfig(seed=3, r=2, num_labels=2))
    stir(model)
    model.set_adapter("cola")
    fresh, _ = tiny("bert")
    fresh = get_peft_model(fresh.double(), inlay.MultiLoraConfig(seed=3, r=2), adapter_name="cola").eval()
    fresh.load_state_dict({key: value for key, value in model.state_dict().items() if ".mrpc." not in key})
    wanted = logits(fresh, batch)
    torch.testing.assert_close(logits(model, batch), wanted)
    mixed = model(**batch, adapter_names=["mrpc", "cola", "mrpc"]).logits
    torch.testing.assert_close(mixed[1], wanted[1])


@pytest.mark.parametrize("name", ["a.b", "", "keys", "training", "query", "weight", "__base__", "modules_to_save"])
def test_a_name_that_no_task_can_have(name: str) -> None:
    model, batch = tasks()
    before, wanted = set(model.state_dict()), logits(model, batch, "rte")
    for refused in (lambda: rename_task(model, "rte", name), lambda: model.add_adapter(name, inlay.MultiLoraConfig())):
        with pytest.raises(InlayError, match=f"{name!r} will not do"):
            refused()
        assert model.base_model.tasks == ["rte", "sst2"]
        assert set(model.state_dict()) == before
        assert torch.equal(logits(model, batch, "rte"), wanted)
        assert torch.equal(logits(model, batch), wanted)
    with pytest.raises(InlayError, match=f"{name!r} will not do"):
        get_peft_model(tiny("bert")[0], inlay.MultiLoraConfig(), adapter_name=name)


@pytest.mark.parametrize("family", ["bert", "gpt2", "resnet"])
def test_one_task_is_merged_and_taken_out(family: str) -> None:
    model, batch = tasks(family)
    wanted, other = logits(model, batch), logits(model, batch, "sst2")
    model.merge_adapter(adapter_names=["rte"])
    torch.testing.assert_close(logits(model, batch), wanted, atol=1e-10, rtol=1e-10)
    with pytest.raises(InlayError, match="unmerge"):
        logits(model, batch, "sst2")
    model.unmerge_adapter()
    assert torch.equal(logits(model, batch), wanted)
    assert torch.equal(logits(model, batch, "sst2"), other)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("task", ["rte", "sst2"])
def test_a_merged_task_is_run_whichever_way_it_is_named(task: str, checkpointing: bool) -> None:
    """With as many labels as it has, and with layers that are recomputed."""
    model, batch = tasks()
    labels, other = torch.tensor([0, 1, 1]), "sst2" if task == "rte" else "rte"
    model.set_adapter(task)
    if checkpointing:
        model.gradient_checkpointing_enable()
    wanted = model(**batch, labels=labels)
    model.merge_adapter(adapter_names=[task])
    for names in (None, [task] * 3):
        found = model(**batch, labels=labels, adapter_names=names)
        torch.testing.assert_close(found.logits, wanted.logits, atol=1e-10, rtol=1e-10)
        torch.testing.assert_close(found.loss, wanted.loss)
    for names in ([task, other, task], [other] * 3, ["__base__"] * 3):
        with pytest.raises(InlayError, match=f"{task} is merged.*unmerge"):
            model(**batch, adapter_names=names)


@pytest.mark.parametrize(
    ("family", "names"),
    [
        ("gpt2", ("transformer.wte", "lm_head")),
        ("opt", ("model.decoder.embed_tokens", "lm_head")),
        ("llama", None),  # the zoo's is not tied
    ],
)
def test_a_weight_that_two_modules_hold_is_not_merged(family: str, names: tuple[str, str] | None) -> None:
    model, batch = tiny(family, "causal-lm")
    place = "wte" if family == "gpt2" else "embed_tokens"
    config = inlay.MultiLoraConfig(target_modules=[place], task_type="CAUSAL_LM")
    model = get_peft_model(model.double(), config, adapter_name="e2e").eval()
    stir(model)
    batch.pop("labels")
    wanted = logits(model, batch)
    if names is None:
        model.merge_adapter()
    else:
        for merge in (model.merge_adapter, model.merge_and_unload):
            with pytest.raises(InlayError, match=f"{names[0]}.*{names[1]}.*export"):
                merge()
    torch.testing.assert_close(logits(model, batch), wanted, atol=1e-10, rtol=1e-10)


def test_a_task_with_its_own_labels_becomes_a_plain_model() -> None:
    model, batch = tasks()
    model.set_adapter("sst2")
    labels = torch.tensor([0, 1, 1])
    wanted = model(**batch, labels=labels)
    plain = model.merge_and_unload()
    found = plain(**batch, labels=labels)
    torch.testing.assert_close(found.logits, wanted.logits, atol=1e-10, rtol=1e-10)
    torch.testing.assert_close(found.loss, wanted.loss)
    assert plain.config.num_labels == 2
    assert not hasattr(plain, "_inlay_multi_lora_routing")


# --------------------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["rte", "rtr", "rte"], r"rtr.*rte"),
        (["rte", "sst2"], "2 names, and the batch has 3 rows"),
        (["rte"] * 6, "6 names, and the batch has 3 rows"),
        ("rte", "a list"),
        ([], "a list"),
        ([["rte"], "rte", "rte"], "a list with the name"),
        ([None] * 3, "a list with the name"),
    ],
)
def test_names_that_do_not_fit_the_batch(names: Any, said: str) -> None:
    model, batch = tasks()
    wanted = logits(model, batch)
    with pytest.raises(InlayError, match=said):
        model(**batch, adapter_names=names)
    assert torch.equal(logits(model, batch), wanted)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"seed": 7}, "seed 7"),
        ({"r": 4}, "rank 4"),
        ({"rank_pattern": {"query": 2}}, "rank 2"),
        ({"init": "gaussian"}, "init 'gaussian'"),
    ],
)
def test_a_task_that_asks_for_another_a(settings: dict[str, Any], said: str) -> None:
    model, batch = tasks()
    wanted = logits(model, batch, "rte")
    with pytest.raises(InlayError, match=said):
        model.add_adapter("cola", inlay.MultiLoraConfig(**settings))
    assert model.base_model.tasks == ["rte", "sst2"]
    assert not of({name for name, _ in model.named_parameters()}, "cola")
    assert torch.equal(logits(model, batch, "rte"), wanted)


@pytest.mark.parametrize("edit", [{"seed": 1}, {"checksum": "0" * 64}])
def test_another_a_on_loading_is_an_error(edit: dict[str, Any], tmp_path: Path) -> None:
    model, batch = tasks(dtype=torch.float32)
    save(model, "multi-lora", tmp_path, adapter_name="rte")
    path = tmp_path / "rte" / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | edit))
    with pytest.raises(InlayError, match="SHA-256"):
        restore(tiny("bert")[0], "multi-lora", tmp_path, adapter_name="rte")
    with pytest.raises(InlayError, match="trained with other A's"):
        PeftModel.from_pretrained(tiny("bert")[0], str(tmp_path / "rte"))
    with pytest.raises(InlayError, match=r"A.s|seed"):  # and the model that was there goes on
        model.load_adapter(str(tmp_path / "rte"), adapter_name="second")
    assert model.base_model.tasks == ["rte", "sst2"]
    logits(model, batch, "sst2")


@pytest.mark.parametrize("edit", [{"seed": 0}, {"seed": 5}, {"seed": 5, "resolved": False}])
def test_a_saved_task_without_a_checksum_is_not_loaded(edit: dict[str, Any], tmp_path: Path) -> None:
    """As PEFT alone has saved it, with no hashes beside it: nothing would say that the `A`s are the same."""
    model, batch = tasks(dtype=torch.float32)
    model.save_pretrained(tmp_path)
    path = tmp_path / "rte" / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"checksum": None} | edit))
    for load in (
        lambda: PeftModel.from_pretrained(tiny("bert")[0], str(tmp_path / "rte"), adapter_name="rte"),
        lambda: restore(tiny("bert")[0], "multi-lora", tmp_path, adapter_name="rte"),
        lambda: model.load_adapter(str(tmp_path / "rte"), adapter_name="second"),
        lambda: to_lora(*read("multi-lora", tmp_path, "rte"), tmp_path),
    ):
        with pytest.raises(InlayError, match=r"checksum|seed 5"):
            load()
    assert model.base_model.tasks == ["rte", "sst2"]
    logits(model, batch, "sst2")


def test_a_task_with_no_head() -> None:
    model, batch = tasks()
    for head in model.base_model.routing.heads.values():
        del head.modules_to_save["sst2"]
    with pytest.raises(InlayError, match="'sst2' has no head"):
        logits(model, batch, "sst2")


def test_a_head_that_cannot_be_made() -> None:
    model, _ = tiny("bert")
    config = inlay.MultiLoraConfig(num_labels=9, newly_initialised=[], modules_to_save=[])
    with pytest.raises(InlayError, match="no new head"):
        get_peft_model(model, config, adapter_name="rte")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"r": 0}, "r=0"),
        ({"rank_pattern": {"query": 0}}, "query=0"),
        ({"lora_dropout": 1.0}, "lora_dropout"),
        ({"init": "zeros"}, "init"),
        ({"fused": ["queries"]}, "queries"),
        ({"fused": []}, "fused"),
        ({"num_labels": 0}, "num_labels"),
        ({"seed": -1}, "seed"),
        ({"head_seed": -1}, "head_seed=-1"),
    ],
)
def test_settings_that_will_not_do(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(InlayError, match=said):
        inlay.MultiLoraConfig(**settings)
