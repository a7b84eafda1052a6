"""What a checkpoint lacks is found, trained and saved, on every architecture, whatever it is called there."""

from __future__ import annotations

import copy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers as hf
from peft import get_peft_model
from torch import nn

import inlay
from inlay.errors import InlayError
from inlay.methods.attach import attach, trained_parameters
from inlay.methods.heads import newly_initialised
from probing import logits
from zoo import FAMILIES, tiny

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

# What each family adds to a bare checkpoint for classification.
HEADS = {
    "bert": ["classifier"],
    "roberta": ["classifier"],
    "distilbert": ["pre_classifier", "classifier"],
    "electra": ["classifier"],
    "modernbert": ["head", "classifier"],
    "mpnet": ["classifier"],
    "deberta-v2": ["pooler", "classifier"],
    "gpt2": ["score"],
    "opt": ["score"],
    "llama": ["score"],
    "gemma": ["score"],
    "t5": ["classification_head"],
    "vit": ["classifier"],
    "deit": ["classifier"],
    "dinov2": ["classifier"],
    "swin": ["classifier"],
    "clip": ["classifier"],
    "resnet": ["classifier"],
    "convnext": ["classifier"],
}


def auto(family: str) -> type:
    image = FAMILIES[family].modality == "image"
    return hf.AutoModelForImageClassification if image else hf.AutoModelForSequenceClassification


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of each family without a head; T5's with its decoder, which its classifier needs."""
    folder = tmp_path_factory.mktemp("bases")
    for family in FAMILIES:
        model = hf.T5Model(FAMILIES["t5"].config()) if family == "t5" else tiny(family, "base")[0]
        if family == "clip":
            model = hf.CLIPModel(FAMILIES["clip"].config())
        model.save_pretrained(folder / family)
    return folder


def load(bases: Path, family: str, **options):
    return auto(family).from_pretrained(bases / family, num_labels=3, **options)


@pytest.mark.parametrize("family", FAMILIES)
def test_new_modules_are_found(bases: Path, family: str) -> None:
    model, report = load(bases, family, output_loading_info=True)
    assert newly_initialised(model) == HEADS[family]
    assert newly_initialised(model, report) == HEADS[family]
    adapted = attach(model, "lora")
    assert newly_initialised(adapted) == HEADS[family], "seen through a PEFT model"
    saved = adapted.peft_config["default"].modules_to_save
    assert set(HEADS[family]) <= set(saved)


def test_a_fresh_pooler_is_one_of_them(tmp_path: Path) -> None:
    hf.BertForMaskedLM(FAMILIES["bert"].config()).save_pretrained(tmp_path)
    model = hf.AutoModelForSequenceClassification.from_pretrained(tmp_path, num_labels=3)
    assert newly_initialised(model) == ["bert.pooler", "classifier"]
    for adapted in (attach(model, "lora"), get_peft_model(model, inlay.NormTuningConfig(), adapter_name="plain")):
        assert any("pooler" in name for name in trained_parameters(adapted))
    probe = attach(hf.AutoModelForSequenceClassification.from_pretrained(tmp_path, num_labels=3), "linear-probe")
    assert {name.split(".")[0] for name in trained_parameters(probe)} == {"bert", "classifier"}


def test_a_language_head_that_was_loaded_or_tied_is_not_new(tmp_path: Path) -> None:
    for family in ("gpt2", "llama", "opt"):
        tiny(family, "causal-lm")[0].save_pretrained(tmp_path / family)
        assert newly_initialised(hf.AutoModelForCausalLM.from_pretrained(tmp_path / family)) == []


def test_a_head_of_another_size_is_new(tmp_path: Path) -> None:
    tiny("vit")[0].save_pretrained(tmp_path)
    options = {"num_labels": 7, "ignore_mismatched_sizes": True, "output_loading_info": True}
    model, report = hf.AutoModelForImageClassification.from_pretrained(tmp_path, **options)
    assert newly_initialised(model) == newly_initialised(model, report) == ["classifier"]


def test_a_model_made_from_a_config_has_the_head_of_its_anatomy() -> None:
    assert newly_initialised(tiny("roberta")[0]) == ["classifier"]
    assert newly_initialised(tiny("gpt2", "causal-lm")[0]) == []
    assert newly_initialised(tiny("vit", "base")[0]) == []


def test_a_copy_whose_marks_are_gone_is_said_so(bases: Path) -> None:
    model = load(bases, "roberta")
    with pytest.warns(UserWarning, match="marks of what was loaded are gone"):
        assert newly_initialised(copy.deepcopy(model)) == ["classifier"]


def mark(module: nn.Module) -> nn.Module:
    for parameter in module.parameters():
        parameter._is_hf_initialized = True  # type: ignore[attr-defined]
    return module


def test_a_bare_parameter_beside_loaded_parts_is_refused() -> None:
    model = nn.Module()
    model.body = mark(nn.Linear(2, 2))
    model.gate = nn.Parameter(torch.zeros(2))
    with pytest.raises(InlayError, match="lacks gate"):
        newly_initialised(model)


def test_a_leaf_that_is_new_in_part_is_kept_whole() -> None:
    model = nn.Sequential(mark(nn.Linear(2, 2)), mark(nn.Linear(2, 2)))
    del model[1].bias._is_hf_initialized
    assert newly_initialised(model) == ["1"]


def test_a_body_that_was_not_loaded_at_all_is_refused() -> None:
    model, _ = tiny("bert")
    mark(model.classifier)
    with pytest.raises(InlayError, match="Nothing of the body"):
        newly_initialised(model)


def test_a_mask_token_that_nothing_reads_is_no_head() -> None:
    model, _ = tiny("dinov2")
    mark(model)
    del model.dinov2.embeddings.mask_token._is_hf_initialized
    assert newly_initialised(model) == []


def test_reloaded_in_a_fresh_process_to_the_bit(bases: Path, tmp_path: Path) -> None:
    """Plain PEFT calls, a head that loading drew at random, and another process: the same logits."""
    families = list(FAMILIES)
    for family in families:
        model = load(bases, family)
        config = inlay.NormTuningConfig()
        adapted = get_peft_model(model, config)
        with torch.no_grad():
            for parameter in trained_parameters(adapted).values():
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
        adapted.save_pretrained(tmp_path / family)
        torch.save(logits(adapted, tiny(family)[1]), tmp_path / f"{family}.pt")
    code = f"""
import inlay
import sys
from pathlib import Path
sys.path[:0] = [{str(Path(__file__).parents[1])!r}, {str(Path(__file__).parent)!r}]
import torch
from peft import PeftModel
from probing import logits
from test_heads import load
from zoo import tiny
torch.manual_seed(1)
for family in {families!r}:
    adapted = PeftModel.from_pretrained(load(Path({str(bases)!r}), family), Path({str(tmp_path)!r}) / family)
    wanted = torch.load(Path({str(tmp_path)!r}) / f"{{family}}.pt")
    print(family, torch.equal(logits(adapted, tiny(family)[1]), wanted))
"""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.splitlines() == [f"{family} True" for family in families], done.stderr
