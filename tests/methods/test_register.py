"""Our methods are PEFT's own: its enum, its mappings, its files, its automatic classes, in a process of their own."""

from __future__ import annotations

import copy
import json
import pickle
import subprocess
import sys
from pathlib import Path

import peft
import pytest
import torch
from peft import PeftConfig, PeftModel, get_peft_model, inject_adapter_in_model
from peft.utils.peft_types import PeftType
from transformers import AutoModelForSequenceClassification

import inlay
from inlay.methods.probe import logits
from inlay.methods.register import _register, register
from inlay.methods.registry import Method, all_methods
from zoo import tiny

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
CONFIGS = [method.config_class() for method in all_methods().values() if method.tuner]


@pytest.mark.parametrize("config_class", CONFIGS)
def test_the_type_is_a_member_like_any_other(config_class: type) -> None:
    config = config_class()
    kind = config.peft_type
    assert kind is PeftType(kind.value)
    assert kind is PeftType[kind.name]
    assert kind is getattr(PeftType, kind.name)
    assert kind in list(PeftType)
    assert kind == kind.value
    assert repr(kind) == f"<PeftType.{kind.name}: '{kind.value}'>"
    assert json.loads(json.dumps(kind)) == kind.value
    assert pickle.loads(pickle.dumps(kind)) is kind
    assert copy.deepcopy(kind) is kind
    assert pickle.loads(pickle.dumps(config)) == config
    assert copy.deepcopy(config) == config
    assert len(set(PeftType)) == len(PeftType.__members__)


def test_registering_again_changes_nothing() -> None:
    before = list(PeftType)
    register()
    assert list(PeftType) == before
    assert peft.PeftModel.create_or_update_model_card.__wrapped__.__name__ == "create_or_update_model_card"
    assert not hasattr(peft.PeftModel.create_or_update_model_card.__wrapped__, "_inlay")


def test_a_type_without_our_prefix_is_refused() -> None:
    with pytest.raises(ValueError, match="INLAY_"):
        _register(Method(name="x", summary="", paper="", peft_type="LORA"))


@pytest.mark.parametrize("config_class", CONFIGS)
def test_injecting_without_a_peft_model(config_class: type) -> None:
    model, batch = tiny("bert")
    wanted = logits(model, batch)
    injected = inject_adapter_in_model(config_class(), model, adapter_name="one")
    assert injected is model
    assert torch.equal(logits(model, batch), wanted)
    trained = {name: torch.randn_like(p) for name, p in model.named_parameters() if p.requires_grad}
    assert all("inlay_" in name or "modules_to_save" in name for name in trained)
    model.load_state_dict(trained, strict=False)
    state = peft.get_peft_model_state_dict(model, adapter_name="one")
    again, _ = tiny("bert")
    inject_adapter_in_model(config_class(), again, adapter_name="two")
    peft.set_peft_model_state_dict(again, state, adapter_name="two")
    assert torch.equal(logits(again, batch), logits(model, batch))
    assert not torch.equal(logits(model, batch), wanted)


@pytest.mark.parametrize("config_class", CONFIGS)
def test_mixed_models_are_refused(config_class: type) -> None:
    with pytest.raises(ValueError, match="not compatible with the `PeftMixedModel`"):
        get_peft_model(tiny("bert")[0], config_class(), mixed=True)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base without a head, and adapters trained on the models that were loaded from it."""
    folder = tmp_path_factory.mktemp("saved")
    tiny("bert", "base")[0].save_pretrained(folder / "base")
    batch = tiny("bert")[1]
    for config_class in CONFIGS:
        base = AutoModelForSequenceClassification.from_pretrained(folder / "base", num_labels=3)
        model = get_peft_model(base, config_class(task_type="SEQ_CLS"))
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.add_(torch.randn_like(parameter), alpha=0.1)
        model.save_pretrained(folder / config_class.__name__)
        torch.save(logits(model, batch), folder / f"{config_class.__name__}.pt")
    return folder


def test_a_fresh_process_that_only_imports_inlay(saved: Path) -> None:
    code = f"""
import inlay
import sys, torch
sys.path.insert(0, {str(Path(__file__).parents[1])!r})
from pathlib import Path
from peft import AutoPeftModel, AutoPeftModelForSequenceClassification, PeftConfig, PeftModel
from transformers import AutoModelForSequenceClassification
from inlay.methods.probe import logits
from zoo import tiny
folder, batch = Path({str(saved)!r}), tiny("bert")[1]
for name in {[c.__name__ for c in CONFIGS]!r}:
    wanted = torch.load(folder / f"{{name}}.pt")
    config = PeftConfig.from_pretrained(str(folder / name))
    assert type(config).__name__ == name and config.modules_to_save
    base = AutoModelForSequenceClassification.from_pretrained(folder / "base", num_labels=3)
    assert torch.equal(logits(PeftModel.from_pretrained(base, str(folder / name)), batch), wanted)
    auto = AutoPeftModelForSequenceClassification.from_pretrained(str(folder / name), num_labels=3)
    assert torch.equal(logits(auto, batch), wanted)
    auto.load_adapter(str(folder / name), "again")
    auto.set_adapter("again")
    assert torch.equal(logits(auto, batch), wanted)
    base = AutoModelForSequenceClassification.from_pretrained(folder / "base", num_labels=3)
    lean = PeftModel.from_pretrained(base, str(folder / name), low_cpu_mem_usage=True)
    assert torch.equal(logits(lean, batch), wanted)
print("all the same")
"""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "all the same", done.stderr


@pytest.mark.parametrize("config_class", CONFIGS)
def test_the_card_says_what_to_import(saved: Path, config_class: type) -> None:
    folder = saved / config_class.__name__
    text = (folder / "README.md").read_text()
    assert text.count("import inlay") == 1
    assert text.startswith("---\n")
    base = AutoModelForSequenceClassification.from_pretrained(saved / "base", num_labels=3)
    model = PeftModel.from_pretrained(base, str(folder))
    model.save_pretrained(folder)
    assert (folder / "README.md").read_text().count("import inlay") == 1


def test_other_cards_are_left_alone(tmp_path: Path) -> None:
    get_peft_model(tiny("bert")[0], peft.LoraConfig(target_modules=["query"])).save_pretrained(tmp_path)
    assert "import inlay" not in (tmp_path / "README.md").read_text()


def test_the_saved_config_is_complete(saved: Path) -> None:
    config = PeftConfig.from_pretrained(str(saved / "BiasTuningConfig"))
    assert isinstance(config, inlay.BiasTuningConfig)
    assert config.resolved
    assert config.newly_initialised == ["classifier"]
    assert "bert.encoder.layer.0.attention.self.query" in config.target_modules
