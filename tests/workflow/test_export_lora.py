"""Whatever is a low-rank product becomes a plain LoRA of PEFT's, which computes the same to the last digits of float64.

The methods are the registry's: every one that can be written as a LoRA, on architectures with layers of several kinds.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, VeraConfig, get_peft_model
from safetensors.torch import load_file
from torch import nn

import inlay
from checkpoints import write_tokenizer
from inlay import InlayError, Spec, tune
from inlay.methods import registry
from inlay.methods.attach import attach, save, trained_parameters
from inlay.methods.capabilities import capabilities
from inlay.workflow.export import export
from probing import logits
from zoo import FAMILIES, tiny

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::RuntimeWarning")
ABLE = [method for method in registry.all_methods().values() if "lora" in method.exports]
FAMILY = ("bert", "gpt2", "llama", "vit", "swin")  # Conv1D, grouped queries, widths that differ between layers
CASES = [
    (method, family)
    for method in ABLE
    for family in FAMILY
    if "classification" in capabilities()["methods"][method.name].get(family, ())
]
PLAIN = [method for method in registry.all_methods().values() if method.form == "peft" and method not in ABLE]


def whole(family: str) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    model, batch = tiny(family)
    batch = {name: value.double() if value.is_floating_point() else value for name, value in batch.items()}
    return model.double(), {name: value for name, value in batch.items() if name != "labels"}


def stir(model: nn.Module) -> Any:
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for _, parameter in sorted(trained_parameters(model).items()):
            parameter.add_(torch.randn(parameter.shape, generator=generator).to(parameter.dtype), alpha=0.2)
    return model.eval()


def base(family: str, folder: Path) -> str:
    whole(family)[0].save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize(("method", "family"), CASES, ids=lambda value: getattr(value, "name", value))
def test_the_same_outputs_in_float64(method: Any, family: str, tmp_path: Path) -> None:
    model, batch = whole(family)
    adapted = stir(attach(model, method).double())
    wanted = logits(adapted, batch)
    save(adapted, method, tmp_path / "ours", base_model_name=base(family, tmp_path / "base"))
    made = export(tmp_path / "ours", None, tmp_path / "lora")
    assert json.loads((made / "adapter_config.json").read_text())["peft_type"] == "LORA"
    plain, _ = whole(family)
    assert (logits(plain, batch) - wanted).abs().max() > 1e-3
    lora = PeftModel.from_pretrained(plain, str(made), autocast_adapter_dtype=False).eval()
    torch.testing.assert_close(logits(lora, batch), wanted, atol=1e-11, rtol=1e-11)


@pytest.mark.parametrize("targets", [["query", "intermediate.dense"], ["query", "output.dense"]])
def test_layers_of_other_widths_use_parts_of_the_shared_matrices(targets: list[str], tmp_path: Path) -> None:
    """From 16 to 24 channels and back: the base model's config says which are whose."""
    model, batch = whole("bert")
    config = VeraConfig(
        r=5, target_modules=targets, init_weights=False, vera_dropout=0.1, modules_to_save=["classifier"]
    )
    adapted = stir(get_peft_model(model, config).double())
    adapted.save_pretrained(tmp_path / "vera")
    made = export(tmp_path / "vera", None, tmp_path / "lora", model=base("bert", tmp_path / "base"))
    lora = PeftModel.from_pretrained(whole("bert")[0], str(made), autocast_adapter_dtype=False).eval()
    torch.testing.assert_close(logits(lora, batch), logits(adapted, batch), atol=1e-11, rtol=1e-11)
    assert lora.peft_config["default"].lora_dropout == 0.1
    tiny("bert", "base")[0].save_pretrained(tmp_path / "wide")
    wide = FAMILIES["bert"].config()
    wide.hidden_size = 32
    wide.save_pretrained(tmp_path / "wide")
    with pytest.raises(InlayError, match="belongs to another model"):
        export(tmp_path / "vera", None, tmp_path / "other", model=str(tmp_path / "wide"))
    assert not (tmp_path / "other").exists()


def test_a_copy_keeps_ranks_and_scales(tmp_path: Path) -> None:
    model, batch = whole("bert")
    given = LoraConfig(
        r=6,
        lora_alpha=5,
        use_rslora=True,
        rank_pattern={"query": 2},
        alpha_pattern={"value": 9},
        target_modules=["query", "value", "word_embeddings"],
        init_lora_weights=False,
    )
    adapted = get_peft_model(model, given).double().eval()
    adapted.save_pretrained(tmp_path / "ours", save_embedding_layers=False)
    made = export(tmp_path / "ours", None, tmp_path / "copy")
    lora = PeftModel.from_pretrained(whole("bert")[0], str(made), autocast_adapter_dtype=False).eval()
    assert torch.equal(logits(lora, batch), logits(adapted, batch))
    assert lora.peft_config["default"].use_rslora
    one, other = (load_file(folder / "adapter_model.safetensors") for folder in (tmp_path / "ours", made))
    assert one.keys() == other.keys()


@pytest.mark.parametrize(
    ("config", "why"),
    [
        (LoraConfig(use_dora=True, target_modules=["query"]), "it is a DoRA"),
        (VeraConfig(save_projection=False, target_modules=["query"]), "save_projection=False"),
        (VeraConfig(bias="all", target_modules=["query"]), "biases of the base model"),
    ],
)
def test_what_is_no_plain_product_is_refused(config: Any, why: str, tmp_path: Path) -> None:
    get_peft_model(whole("bert")[0], config).save_pretrained(tmp_path / "ours")
    with pytest.raises(InlayError, match=why):
        export(tmp_path / "ours", None, tmp_path / "lora", model=base("bert", tmp_path / "base"))
    assert not (tmp_path / "lora").exists()


@pytest.mark.parametrize(
    ("method", "family"),
    [
        pytest.param(method, families[0], id=method.name)
        for method in PLAIN
        if method.takes("layers")
        and (families := [each for each in ("bert", "vit") if capabilities()["methods"][method.name].get(each)])
    ],
)
def test_other_methods_say_which_can(method: Any, family: str, tmp_path: Path) -> None:
    save(attach(tiny(family)[0], method), method, tmp_path / "ours")
    with pytest.raises(InlayError, match=f"adapter of {method.name}, which cannot be written as lora") as refused:
        export(tmp_path / "ours", None, tmp_path / "lora")
    assert all(each.name in str(refused.value) for each in ABLE)


@pytest.mark.parametrize(
    "method", [method for method in ABLE if not method.mixes_tasks], ids=lambda method: method.name
)
def test_a_run_by_the_command(method: Any, typed: Any, review_spec: Spec, reviews: Path, tmp_path: Path) -> None:
    """With its card, its labels and what its head reads; the base model is checked when it is loaded."""
    run = tune(review_spec.with_(method=method.name, pooling="mean"), tmp_path / "runs", progress=False)
    status, _, err = typed("export", "--adapter", run.folder, "--to", "lora", "--output", "mine")
    assert status == 0, err
    note = json.loads((tmp_path / "mine" / "inlay.json").read_text())
    assert (note["method"], note["pooling"]) == ("lora", "mean")
    assert note["fingerprint"] == run.record["backbone"]["fingerprint"]
    assert "1, 2, 3" in (tmp_path / "mine" / "README.md").read_text()
    assert str(tmp_path) not in "".join(each.read_text() for each in (tmp_path / "mine").glob("*.*[nd]"))
    ours = inlay.load(run)
    backbone = inlay.load_backbone(run.spec.model, num_labels=3, pooling="mean")
    lora = PeftModel.from_pretrained(backbone.model, str(tmp_path / "mine")).eval()
    batch = {name: value for name, value in tiny("bert")[1].items() if name != "labels"}
    torch.testing.assert_close(logits(lora, batch), logits(ours.model, batch), atol=1e-5, rtol=1e-5)
    write_tokenizer(tmp_path / "mine")  # what else lies there is no matter
    assert typed("export", "--adapter", run.folder, "--to", "lora", "--output", "mine")[0] == 2
