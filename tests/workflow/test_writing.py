"""Where a language model learns to write, LoRA has defaults of its own; runs from before are what they were."""

from __future__ import annotations

import json
from pathlib import Path
from types import MappingProxyType

import pytest
import torch
from peft import LoraConfig, get_peft_model
from test_chat_runs import chats, checkpoint
from transformers import AutoModelForCausalLM

import inlay
from inlay import Spec
from inlay.methods import registry
from inlay.methods.attach import attach
from inlay.methods.targets import all_linear
from inlay.records.store import Run
from inlay.workflow import settle as settling
from inlay.workflow.settle import settle
from inlay.workflow.tune import tune

SMALL, MIDDLE, LARGE = registry.get("lora").writing.sizes
KINDS = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("writing")
    checkpoint(folder / "model")
    chats(folder / "chats.jsonl")
    return folder


@pytest.fixture(scope="module")
def spec(folder: Path) -> Spec:
    return Spec(model=str(folder / "model"), data=str(folder / "chats.jsonl"), method="lora", max_length=128)


def targets(run: Run) -> set[str]:
    return {
        name.rpartition(".")[2]
        for name in json.loads((run.adapter / "adapter_config.json").read_text())["target_modules"]
    }


def test_the_defaults_are_written_in_and_said(spec: Spec) -> None:
    settled = settle(spec)
    found = settled.spec
    assert found.settings == {"target_modules": "all-linear"}
    assert (found.learning_rate, found.epochs, found.batch_size) == (SMALL.learning_rate, SMALL.few_epochs, 8)
    assert settled.notes[0].startswith(
        "target_modules=all-linear, learning rate 0.001, 30 epochs of batches of 8: the defaults of lora where a "
        "language model of 0M parameters writes (docs/methods/lora.md; "
    )
    assert settle(found).digest == settled.digest  # written in once


def test_what_is_given_stays(spec: Spec) -> None:
    found = settle(spec.with_(learning_rate=0.02, max_steps=3)).spec
    assert (found.learning_rate, found.epochs, found.max_steps) == (0.02, 3.0, 3)
    own = settle(spec.with_(settings={"target_modules": ["q_proj"]})).spec
    assert own.settings == {"target_modules": ["q_proj"]}
    assert own.learning_rate == registry.get("lora").learning_rate
    assert settle(spec.with_(method="bias")).notes == settle(spec.with_(method="bias", settings={})).notes
    assert settle(spec.with_(method="bias")).spec.settings == {}


@pytest.mark.parametrize(
    ("parameters", "size"),
    [(0, SMALL), (999_999_999, SMALL), (10**9, MIDDLE), (13 * 10**9, MIDDLE), (2 * 10**10, LARGE)],
)
def test_rate_and_epochs_go_by_the_size(
    spec: Spec, monkeypatch: pytest.MonkeyPatch, parameters: int, size: registry.Size
) -> None:
    from inlay.backbones import skeleton

    monkeypatch.setattr(skeleton, "count_parameters", lambda *_: parameters)
    found = settle(spec).spec
    assert (found.learning_rate, found.epochs) == (size.learning_rate, size.few_epochs)
    monkeypatch.setattr(Spec, "amount", lambda self, examples=None: (self.epochs or 3.0, self.batch_size or 32))
    assert settle(spec).spec.epochs == size.epochs


def test_the_size_is_counted_from_the_config_alone(folder: Path) -> None:
    from inlay.backbones.skeleton import count_parameters

    whole = AutoModelForCausalLM.from_pretrained(folder / "model")
    assert count_parameters(str(folder / "model")) == sum(p.numel() for p in whole.model.parameters())
    assert count_parameters("timm/none") == 0


def test_a_run_adapts_all_linear_layers_and_reloads(spec: Spec, folder: Path) -> None:
    run = tune(spec.with_(max_steps=3), folder / "runs", progress=False, say=[].append)
    assert targets(run) == KINDS
    assert not any(isinstance(value, type(None)) for value in run.spec.settings.values())
    again = tune(run.spec, folder / "runs", progress=False, say=[].append)
    assert again.id == run.id
    assert len(inlay.load(run).predict(["what is 3?"])) == 1


def test_a_run_from_before_is_found_and_means_what_it_meant(
    spec: Spec, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Made by the code of before: a method without such defaults."""
    short = spec.with_(max_steps=2)
    methods = dict(registry.all_methods())
    import dataclasses

    old = methods | {"lora": dataclasses.replace(methods["lora"], writing=None)}
    with monkeypatch.context() as patch:
        patch.setattr(registry, "all_methods", lambda: MappingProxyType(old))
        earlier = tune(short, folder / "old", progress=False, say=[].append)
    assert targets(earlier) == {"q_proj", "v_proj"}
    said: list[str] = []
    new = tune(short, folder / "old", progress=False, say=said.append)
    assert new.id != earlier.id
    told = f"an earlier run had the earlier defaults: --set target_modules=null finds it ({earlier.id})"
    assert told in said
    plain = short.with_(settings={"target_modules": None})
    said.clear()
    assert tune(plain, folder / "old", progress=False, say=said.append).id == earlier.id
    assert settle(settle(plain).spec).digest == settle(plain).digest
    assert settling.settle(plain).notes == settling.settle(plain).notes


def test_spelled_out_the_old_targets_are_taken_afresh(spec: Spec, folder: Path) -> None:
    run = tune(
        spec.with_(max_steps=2, settings={"target_modules": None}), folder / "plain", progress=False, say=[].append
    )
    assert targets(run) == {"q_proj", "v_proj"}


@pytest.mark.parametrize("chosen", [{"layers": [2]}, {"layers_to_transform": [1]}])
def test_layers_narrow_all_linear_layers(folder: Path, chosen: dict[str, list[int]]) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    whole = {name for name, _ in _adapted(attach(model, "lora", settings={"target_modules": "all-linear"}))}
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    own = get_peft_model(
        AutoModelForCausalLM.from_pretrained(folder / "model"), LoraConfig(target_modules="all-linear")
    )
    assert whole == {name for name, _ in _adapted(own)} == set(all_linear(model))
    narrowed = attach(model, "lora", settings={"target_modules": "all-linear", **chosen})
    assert {name for name, _ in _adapted(narrowed)} == {name for name in whole if name.startswith("model.layers.1.")}


def _adapted(model: torch.nn.Module) -> list[tuple[str, torch.nn.Module]]:
    return [
        (name.removeprefix("base_model.model."), module)
        for name, module in model.named_modules()
        if hasattr(module, "lora_A")
    ]
