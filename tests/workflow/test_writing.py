"""Where a language model learns to write, some methods have defaults of their own; earlier runs are what they were."""

from __future__ import annotations

import dataclasses
import json
import shutil
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
from inlay.methods.ntk_attention.writing import suitable
from inlay.methods.targets import all_linear
from inlay.records.store import Run
from inlay.workflow import settle as settling
from inlay.workflow.settle import settle
from inlay.workflow.tune import tune
from zoo import FAMILIES, tiny

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


def made_before(spec: Spec, out: Path, monkeypatch: pytest.MonkeyPatch) -> inlay.Run:
    """A run made by the code of before: its method has no such defaults."""
    methods = dict(registry.all_methods())
    old = methods | {spec.method: dataclasses.replace(methods[spec.method], writing=None)}
    with monkeypatch.context() as patch:
        patch.setattr(registry, "all_methods", lambda: MappingProxyType(old))
        return tune(spec, out, progress=False, say=[].append)


def test_a_run_from_before_is_found_and_means_what_it_meant(
    spec: Spec, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    short = spec.with_(max_steps=2)
    earlier = made_before(short, folder / "old", monkeypatch)
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


# ---- NTK-Attention: the first token of a decoder

BOTH, OFF = {"skip_first": True, "centred": True}, {"skip_first": False, "centred": False}


@pytest.fixture(scope="module")
def ntk(spec: Spec) -> Spec:
    return spec.with_(method="ntk-attention")


def edited(folder: Path, to: Path, **changes: object) -> str:
    """The model with other words in its config."""
    shutil.copytree(folder / "model", to)
    config = json.loads((to / "config.json").read_text())
    (to / "config.json").write_text(json.dumps({**config, **changes}))
    return str(to)


def test_ntk_attention_takes_both_settings_of_the_first_token(ntk: Spec) -> None:
    settled = settle(ntk)
    assert settled.spec.settings == BOTH
    assert settled.notes[0] == (
        "skip_first=true, centred=true: the defaults of ntk-attention where a language model writes "
        "(docs/methods/ntk-attention.md; --set skip_first=false --set centred=false: as before)"
    )
    plain = settle(ntk.with_(settings=OFF))
    for name in ("learning_rate", "epochs", "batch_size", "max_steps"):
        assert getattr(settled.spec, name) == getattr(plain.spec, name)
    assert list(settled.notes[1:]) == list(plain.notes)
    assert settle(settled.spec).digest == settled.digest  # written in once
    assert settle(ntk.with_(settings={"rank": 4, "start": "zero"})).spec.settings == {"rank": 4, "start": "zero"} | BOTH
    config = inlay.NTKAttentionConfig()
    assert (config.skip_first, config.centred) == (False, False)


@pytest.mark.parametrize(
    "given",
    [{"skip_first": True}, {"centred": False}, {"centred": True, "centre_id": 3}, {"start": "prefix"}, OFF],
    ids=lambda given: ",".join(given),
)
def test_ntk_attention_keeps_what_is_given(ntk: Spec, given: dict[str, object]) -> None:
    settled = settle(ntk.with_(settings=given))
    assert settled.spec.settings == given
    assert not any("defaults of" in note for note in settled.notes)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"bos_token_id": None}, "not centred, as its config names no first token (bos_token_id)"),
        ({"bos_token_id": 9999}, "not centred, as its first token (bos_token_id 9999) is none of its tokens"),
        (
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}},
            "not centred, as its rotary embedding changes with the length of the text",
        ),
    ],
    ids=["no first token", "another vocabulary's", "a changing rotation"],
)
def test_without_a_first_token_to_read_the_term_is_only_off(
    ntk: Spec, folder: Path, tmp_path: Path, changes: dict[str, object], why: str
) -> None:
    asked = ntk.with_(model=edited(folder, tmp_path / "model", **changes), max_steps=1)
    settled = settle(asked)
    assert settled.spec.settings == {"skip_first": True}
    assert settled.notes[0].startswith("skip_first=true: the defaults of ntk-attention where ")
    assert f"; {why} (docs/" in settled.notes[0]
    assert tune(asked, tmp_path / "runs", progress=False, say=[].append).status == "finished"


WRITERS = [(family, "causal-lm") for family in FAMILIES if "causal-lm" in FAMILIES[family].tasks]
TWO_PARTS = [
    (family, "sequence-to-sequence") for family in FAMILIES if "sequence-to-sequence" in FAMILIES[family].tasks
]


@pytest.mark.parametrize(("family", "task"), [*WRITERS, *TWO_PARTS])
def test_what_suits_a_model_can_be_attached_to_it(family: str, task: str) -> None:
    model = tiny(family, task)[0]
    names, _ = suitable({}, model)
    assert not names or task == "causal-lm"
    assert names or family not in ("llama", "gpt2", "opt")
    attach(model, "ntk-attention", settings=dict.fromkeys(names, True))


def test_a_run_of_ntk_attention_says_what_it_did(ntk: Spec, folder: Path) -> None:
    said: list[str] = []
    run = tune(ntk.with_(max_steps=3), folder / "runs", progress=False, say=said.append)
    assert run.spec.settings == BOTH
    assert any(line.startswith("skip_first=true, centred=true: the defaults of") for line in said)
    saved = json.loads((run.adapter / "adapter_config.json").read_text())
    assert (saved["skip_first"], saved["centred"]) == (True, True)
    named = json.loads((folder / "model" / "config.json").read_text())["bos_token_id"]
    assert saved["centre_id"] == named
    assert tune(run.spec, folder / "runs", progress=False, say=[].append).id == run.id
    assert len(inlay.load(run).predict(["what is 3?"])) == 1


def test_a_run_of_ntk_attention_from_before_is_found_and_begun_from(
    ntk: Spec, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    short = ntk.with_(max_steps=2)
    earlier = made_before(short, folder / "old", monkeypatch)
    plain = short.with_(settings=OFF)
    assert settle(plain).digest == earlier.digest != settle(short).digest
    said: list[str] = []
    assert tune(short, folder / "old", progress=False, say=said.append).id != earlier.id
    option = "--set skip_first=false --set centred=false"
    assert f"an earlier run had the earlier defaults: {option} finds it ({earlier.id})" in said
    assert tune(plain, folder / "old", progress=False, say=[].append).id == earlier.id
    fresh = tune(plain, tmp_path / "fresh", progress=False, say=[].append)
    weights = [(run.adapter / "adapter_model.safetensors").read_bytes() for run in (fresh, earlier)]
    assert weights[0] == weights[1]
    on = settle(short.with_(init_adapter=str(earlier.folder)))
    assert on.spec.settings == {}
    assert tune(on.spec, tmp_path / "on", progress=False, say=[].append).status == "finished"
