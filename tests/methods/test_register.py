"""Our methods are PEFT's own: its enum, its mappings, its files, its automatic classes, in a process of their own."""

from __future__ import annotations

import copy
import json
import pickle
import subprocess
import sys
from functools import cache
from pathlib import Path

import peft
import pytest
import torch
from peft import PeftConfig, PeftModel, get_peft_model, inject_adapter_in_model
from peft.utils.peft_types import PeftType
from transformers import AutoModelForImageClassification, AutoModelForSequenceClassification

import inlay
from inlay.errors import InlayError
from inlay.methods.register import _register, register
from inlay.methods.registry import Method, all_methods
from probing import logits
from zoo import tiny

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
METHODS = {method.config_class(): method for method in all_methods().values() if method.tuner}
CONFIGS = list(METHODS)
AUTO = {"bert": AutoModelForSequenceClassification, "vit": AutoModelForImageClassification}
TASK_TYPE = {"bert": "SEQ_CLS", "vit": None}


@cache
def family(config_class: type) -> str:
    """A family that the method works on: some are for images alone."""
    try:
        get_peft_model(tiny("bert")[0], config_class())
    except InlayError:
        return "vit"
    return "bert"


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
    model, batch = tiny(family(config_class))
    wanted = logits(model, batch)
    injected = inject_adapter_in_model(config_class(), model, adapter_name="one")
    assert injected is model
    assert torch.equal(logits(model, batch), wanted) == METHODS[config_class].identity_at_start
    trained = {name: torch.randn_like(p) for name, p in model.named_parameters() if p.requires_grad}
    assert all("inlay_" in name or "modules_to_save" in name for name in trained)
    model.load_state_dict(trained, strict=False)
    state = peft.get_peft_model_state_dict(model, adapter_name="one")
    again, _ = tiny(family(config_class))
    inject_adapter_in_model(config_class(), again, adapter_name="two")
    peft.set_peft_model_state_dict(again, state, adapter_name="two")
    assert torch.equal(logits(again, batch), logits(model, batch))
    assert not torch.equal(logits(model, batch), wanted)


@pytest.mark.parametrize("config_class", CONFIGS)
def test_mixed_models_are_refused(config_class: type) -> None:
    with pytest.raises(ValueError, match="not compatible with the `PeftMixedModel`"):
        get_peft_model(tiny(family(config_class))[0], config_class(), mixed=True)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Bases without a head, and adapters trained on the models that were loaded from them."""
    folder = tmp_path_factory.mktemp("saved")
    for name in AUTO:
        tiny(name, "base")[0].save_pretrained(folder / name)  # type: ignore[arg-type]
    for config_class in CONFIGS:
        name = family(config_class)
        batch = tiny(name)[1]
        base = AUTO[name].from_pretrained(folder / name, num_labels=3)
        model = get_peft_model(base, config_class(task_type=TASK_TYPE[name]))
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
from transformers import AutoModelForSequenceClassification
first = Path({str(saved / "BiasTuningConfig")!r})
assert "peft" not in sys.modules  # Transformers brings it in while it loads the adapter
model = AutoModelForSequenceClassification.from_pretrained(first, num_labels=3)
from probing import logits
from zoo import tiny
assert torch.equal(logits(model, tiny("bert")[1]), torch.load(first.with_suffix(".pt")))
from peft import AutoPeftModel, AutoPeftModelForSequenceClassification, PeftConfig, PeftModel
from transformers import AutoModelForImageClassification, AutoModelForSequenceClassification
from probing import logits
from zoo import tiny
folder = Path({str(saved)!r})
for name, family in {[(c.__name__, family(c)) for c in CONFIGS]!r}:
    batch = tiny(family)[1]
    kind = AutoModelForSequenceClassification if family == "bert" else AutoModelForImageClassification
    wanted = torch.load(folder / f"{{name}}.pt")
    config = PeftConfig.from_pretrained(str(folder / name))
    assert type(config).__name__ == name and config.modules_to_save
    base = kind.from_pretrained(folder / family, num_labels=3)
    model = PeftModel.from_pretrained(base, str(folder / name))
    assert torch.equal(logits(model, batch), wanted)
    if family == "bert":  # PEFT has no automatic class for images
        model = AutoPeftModelForSequenceClassification.from_pretrained(str(folder / name), num_labels=3)
        assert torch.equal(logits(model, batch), wanted)
    model.load_adapter(str(folder / name), "again")
    model.set_adapter("again")
    assert torch.equal(logits(model, batch), wanted)
    base = kind.from_pretrained(folder / family, num_labels=3)
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
    name = family(config_class)
    base = AUTO[name].from_pretrained(saved / name, num_labels=3)
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
