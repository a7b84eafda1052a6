"""Every way by which PEFT and Transformers load an adapter gives the logits of the model that was saved, to the bit.

The cases come from the registry: every method of ours, on a model of text and on one of images. `PeftModel` and our own
`restore` are in the matrix already; here are `load_adapter`, `from_pretrained` and `pipeline` of an adapter's folder,
injecting, and what Transformers saves itself.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
import transformers as hf
from peft import PeftConfig, PeftModel
from PIL import Image
from properties import Case, stir
from safetensors.torch import load_file, save_file
from torch import Tensor

import inlay
from checkpoints import write_tokenizer
from inlay.errors import InlayError
from inlay.methods.attach import attach, restore, save
from inlay.methods.registry import all_methods
from probing import logits
from zoo import IMAGE_SIZE, tiny

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
FIXTURES = Path(__file__).parents[1] / "fixtures" / "adapters"
WEIGHTS = "adapter_model.safetensors"
AUTO: dict[str, Any] = {
    "bert": hf.AutoModelForSequenceClassification,
    "vit": hf.AutoModelForImageClassification,
}
METHODS = {method.name: method for method in all_methods().values() if method.tuner is not None}
CASES = [case for method in METHODS.values() for family in AUTO if (case := Case(method, family)).works()]
# What the other doors add is where weights lie and who injects: one method of each sort.
SORTS = [case for case in CASES if str(case).startswith(("bias-bert", "multi-lora-bert", "idpg-bert", "vpt-deep-vit"))]


@dataclass(frozen=True)
class Saved:
    """An adapter on disk, its base, and what the model computed when it was saved."""

    family: str
    base: Path
    adapter: Path
    batch: dict[str, Tensor]
    wanted: Tensor

    def model(self) -> Any:
        """A base model, with a new head of its own."""
        return AUTO[self.family].from_pretrained(self.base)

    def config(self) -> PeftConfig:
        return PeftConfig.from_pretrained(str(self.adapter))

    def weights(self) -> dict[str, Tensor]:
        return load_file(self.adapter / WEIGHTS)


@pytest.fixture(scope="module", autouse=True)
def _quiet() -> Iterator[None]:
    """Transformers reports, for every model here, that its head is new."""
    before = hf.logging.get_verbosity()
    hf.logging.set_verbosity_error()
    yield
    hf.logging.set_verbosity(before)


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Checkpoints of a body alone: a head, and BERT's pooler, are new in every model that is loaded from them."""
    folder = tmp_path_factory.mktemp("bases")

    @cache
    def base(family: str) -> Path:
        model, _ = tiny(family, "base")  # type: ignore[arg-type]
        model.config.num_labels = 3
        model.pooler = None
        model.save_pretrained(folder / family)
        if family == "vit":
            hf.ViTImageProcessor(size={"height": IMAGE_SIZE, "width": IMAGE_SIZE}).save_pretrained(folder / family)
        else:
            write_tokenizer(folder / family)
        return folder / family

    return base


@pytest.fixture(scope="module")
def saved(bases: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[Case], Saved]:
    @cache
    def make(case: Case) -> Saved:
        folder = tmp_path_factory.mktemp("adapter")
        base, batch = bases(case.family), tiny(case.family)[1]  # type: ignore[arg-type]
        model: Any = attach(AUTO[case.family].from_pretrained(base), case.method)
        stir(model, seed=1)
        wanted = logits(model, batch)
        save(model, case.method, folder, base_model_name=str(base))
        return Saved(case.family, base, folder, batch, wanted)

    return make


def load_adapter(saved: Saved) -> Any:
    model = saved.model()
    found = model.load_adapter(str(saved.adapter))
    assert not found.missing_keys
    assert not any(parameter.requires_grad for parameter in model.parameters())
    return model


def load_named_adapter(saved: Saved) -> Any:
    model = saved.model()
    model.load_adapter(saved.adapter, adapter_name="mine")
    assert model.active_adapters() == ["mine"]
    return model


def saved_again(saved: Saved) -> Any:
    """By Transformers, which saves the active adapter."""
    folder = saved.adapter / "again"
    load_named_adapter(saved).save_pretrained(folder)
    model = saved.model()
    model.load_adapter(str(folder), "other", is_trainable=True)
    assert any(parameter.requires_grad for parameter in model.parameters())
    return model


def load_state_dict(saved: Saved) -> Any:
    model = saved.model()
    model.load_adapter(peft_config=saved.config(), adapter_state_dict=saved.weights())
    return model


def from_pretrained(saved: Saved) -> Any:
    return AUTO[saved.family].from_pretrained(saved.adapter)


def from_pretrained_of_a_class(saved: Saved) -> Any:
    kind = hf.ViTForImageClassification if saved.family == "vit" else hf.BertForSequenceClassification
    return kind.from_pretrained(str(saved.adapter), adapter_name="mine")


def inject(saved: Saved) -> Any:
    model = peft.inject_adapter_in_model(saved.config(), saved.model(), adapter_name="mine")
    weights = {key.removeprefix("base_model.model."): value for key, value in saved.weights().items()}
    peft.set_peft_model_state_dict(model, weights, adapter_name="mine")
    return model


def auto_peft_model(saved: Saved) -> Any:
    if saved.family == "vit":  # PEFT has no automatic class for images
        return PeftModel.from_pretrained(saved.model(), str(saved.adapter), adapter_name="mine")
    return peft.AutoPeftModelForSequenceClassification.from_pretrained(str(saved.adapter))


def pipeline(saved: Saved) -> Any:
    task = "image-classification" if saved.family == "vit" else "text-classification"
    made = hf.pipeline(task, model=str(saved.adapter))
    thing = Image.fromarray(np.arange(40 * 30 * 3, dtype=np.uint8).reshape(40, 30, 3)) if "image" in task else "w1 w7"
    found = {answer["label"]: answer["score"] for answer in made(thing, top_k=3)}
    again = hf.pipeline(task, model=load_adapter(saved), **made_of(made))
    assert found == {answer["label"]: answer["score"] for answer in again(thing, top_k=3)}
    return made.model


def made_of(pipeline: Any) -> dict[str, Any]:
    """What prepares a pipeline's inputs."""
    parts = {"tokenizer": pipeline.tokenizer, "image_processor": pipeline.image_processor}
    return {name: part for name, part in parts.items() if part is not None}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_method_by_the_doors_of_transformers(case: Case, saved: Callable[[Case], Saved]) -> None:
    adapter = saved(case)
    assert not torch.equal(logits(adapter.model(), adapter.batch), adapter.wanted)
    for door in (load_named_adapter, from_pretrained, saved_again):
        assert torch.equal(logits(door(adapter), adapter.batch), adapter.wanted), door.__name__


@pytest.mark.parametrize(
    "door",
    [load_adapter, load_state_dict, from_pretrained_of_a_class, inject, auto_peft_model, pipeline],
    ids=lambda door: door.__name__,
)
@pytest.mark.parametrize("case", SORTS, ids=str)
def test_one_method_of_each_sort_by_the_other_doors(
    case: Case, door: Callable[[Saved], Any], saved: Callable[[Case], Saved]
) -> None:
    adapter = saved(case)
    assert torch.equal(logits(door(adapter), adapter.batch), adapter.wanted)


@pytest.mark.parametrize("case", SORTS, ids=str)
def test_beside_a_lora_that_transformers_has_put_in(case: Case, saved: Callable[[Case], Saved]) -> None:
    """The hosts lie one level deeper then. A new LoRA does nothing."""
    adapter = saved(case)
    model = adapter.model()
    targets = ["query", "value"] if case.family == "bert" else ["q_proj", "v_proj"]
    model.add_adapter(peft.LoraConfig(target_modules=targets), adapter_name="lora")
    assert any("lora_A" in name for name, _ in model.named_parameters())
    model.load_adapter(str(adapter.adapter), adapter_name="mine")
    torch.testing.assert_close(logits(model, adapter.batch), adapter.wanted, atol=1e-6, rtol=0)


def test_several_adapters_side_by_side(saved: Callable[[Case], Saved]) -> None:
    """Each by its name, of one method and of two; taken out again, nothing of it is left."""
    bias, norm = saved(Case(METHODS["bias"], "bert")), saved(Case(METHODS["norm"], "bert"))
    model = bias.model()
    model.load_adapter(str(bias.adapter), adapter_name="first")
    model.load_adapter(str(norm.adapter), adapter_name="second")
    for name, one in (("first", bias), ("second", norm), ("first", bias)):
        model.set_adapter(name)
        assert torch.equal(logits(model, one.batch), one.wanted)
    with pytest.raises(InlayError, match="already"):
        model.load_adapter(str(norm.adapter), adapter_name="second")
    model.delete_adapter("second")
    assert torch.equal(logits(model, bias.batch), bias.wanted)
    model.load_adapter(str(norm.adapter), adapter_name="second")
    model.set_adapter("second")  # another method's adapter acts beside it until one is chosen
    assert torch.equal(logits(model, norm.batch), norm.wanted)


def test_tasks_of_multi_lora_one_after_another(bases: Callable[[str], Path], tmp_path: Path) -> None:
    """Two tasks with different labels: each lies in a folder of its own, and shares every A with the other."""
    batch, wanted = tiny("bert")[1], {}
    first = AUTO["bert"].from_pretrained(bases("bert"))
    trained: Any = peft.get_peft_model(first, inlay.MultiLoraConfig(), adapter_name="rte")
    trained.add_adapter("sst2", inlay.MultiLoraConfig(num_labels=2))
    stir(trained, seed=1)
    for name in ("rte", "sst2"):
        trained.set_adapter(name)
        wanted[name] = logits(trained, batch)
    trained.save_pretrained(tmp_path)
    assert wanted["sst2"].shape == (3, 2)
    model = AUTO["bert"].from_pretrained(bases("bert"))
    for name in ("rte", "sst2"):
        model.load_adapter(str(tmp_path / name), adapter_name=name)
    for name in ("rte", "sst2", "rte"):
        model.set_adapter(name)
        assert torch.equal(logits(model, batch), wanted[name])
        alone = AUTO["bert"].from_pretrained(tmp_path / name)
        assert torch.equal(logits(alone, batch), wanted[name])
    with pytest.raises(ValueError, match="not found"):  # which of the two is not said
        AUTO["bert"].from_pretrained(bases("bert")).load_adapter(str(tmp_path))


def test_a_language_model_that_writes(tmp_path: Path) -> None:
    base, batch = tiny("llama", "causal-lm")
    base.save_pretrained(tmp_path / "base")
    write_tokenizer(tmp_path / "base")
    model: Any = attach(hf.AutoModelForCausalLM.from_pretrained(tmp_path / "base"), "norm")
    stir(model, seed=1)
    wanted = logits(model, batch)
    save(model, "norm", tmp_path / "adapter", base_model_name=str(tmp_path / "base"))
    writer = hf.pipeline("text-generation", model=str(tmp_path / "adapter"))
    assert torch.equal(logits(writer.model, batch), wanted)
    written = writer("w1 w2 w3", max_new_tokens=5, do_sample=False, return_full_text=False)[0]["generated_text"]
    ids = writer.tokenizer("w1 w2 w3", return_tensors="pt")
    found = model.generate(**ids, max_new_tokens=5, do_sample=False)[0, ids["input_ids"].shape[1] :]
    assert written.split() == writer.tokenizer.decode(found, skip_special_tokens=True).split()


def test_trained_and_saved_by_transformers_alone(bases: Callable[[str], Path], tmp_path: Path) -> None:
    batch = tiny("bert")[1]
    model = AUTO["bert"].from_pretrained(bases("bert"))
    model.add_adapter(inlay.BiasTuningConfig(), adapter_name="mine")
    stir(model, seed=1)
    model.save_pretrained(tmp_path)
    wanted = logits(model, batch)
    assert torch.equal(logits(AUTO["bert"].from_pretrained(tmp_path), batch), wanted)
    assert torch.equal(logits(restore(AUTO["bert"].from_pretrained(bases("bert")), "bias", tmp_path), batch), wanted)


def test_a_base_in_bfloat16_keeps_the_adapter_in_float32(saved: Callable[[Case], Saved], tmp_path: Path) -> None:
    adapter = saved(Case(METHODS["bias"], "bert"))
    model = adapter.model().to(torch.bfloat16)
    wanted = logits(PeftModel.from_pretrained(adapter.model().to(torch.bfloat16), str(adapter.adapter)), adapter.batch)
    model.load_adapter(str(adapter.adapter))
    assert torch.equal(logits(model, adapter.batch), wanted)
    assert {p.dtype for name, p in model.named_parameters() if "inlay_" in name} == {torch.float32}


# --------------------------------------------------------------------------------------------------- what does not fit


def test_a_head_of_another_size_is_an_error_that_says_what_to_give(saved: Callable[[Case], Saved]) -> None:
    adapter = saved(Case(METHODS["bias"], "bert"))
    with pytest.raises(InlayError, match=r"classifier.*\(3.*\(2.*num_labels"):
        AUTO["bert"].from_pretrained(adapter.adapter, num_labels=2)


@pytest.mark.parametrize("fault", ["lacks", "holds"])
def test_an_adapter_that_does_not_fit_leaves_the_model_as_it_was(
    fault: str, saved: Callable[[Case], Saved], tmp_path: Path
) -> None:
    adapter = saved(Case(METHODS["bias"], "bert"))
    weights = adapter.weights()
    key = next(key for key in weights if "inlay_bias_delta" in key)
    if fault == "lacks":
        del weights[key]
    else:
        weights[key.replace("inlay_bias_delta", "inlay_norm_delta")] = weights[key].clone()
    adapter.config().save_pretrained(tmp_path)
    save_file(weights, tmp_path / WEIGHTS, metadata={"format": "pt"})
    model = adapter.model()
    before = logits(model, adapter.batch)
    with pytest.raises(InlayError, match=rf"{fault} .*inlay_"):
        model.load_adapter(str(tmp_path))
    assert torch.equal(logits(model, adapter.batch), before)
    model.load_adapter(str(adapter.adapter))
    assert torch.equal(logits(model, adapter.batch), adapter.wanted)


def test_a_model_without_the_modules_is_refused(saved: Callable[[Case], Saved]) -> None:
    adapter = saved(Case(METHODS["bias"], "bert"))
    model: Any = tiny("llama")[0]
    before = logits(model, adapter.batch)
    with pytest.raises(ValueError, match=r"bert\.encoder"):
        model.load_adapter(str(adapter.adapter))
    assert torch.equal(logits(model, adapter.batch), before)


def test_settings_that_ask_for_more_than_the_weights_hold_are_refused(
    saved: Callable[[Case], Saved], tmp_path: Path
) -> None:
    """A stranger's folder, by Transformers' door as by our own: nothing is matched or made that its tensors do not
    account for."""
    adapter = saved(Case(METHODS["multi-lora"], "bert"))
    settings = json.loads((adapter.adapter / "adapter_config.json").read_text())
    save_file(adapter.weights(), tmp_path / WEIGHTS, metadata={"format": "pt"})
    for changes, fault in (({"r": 10**9}, "r=1000000000"), ({"exclude_modules": "(a+)+$" * 40}, "exclude_modules")):
        (tmp_path / "adapter_config.json").write_text(json.dumps(settings | changes))
        with pytest.raises(InlayError, match=fault):
            adapter.model().load_adapter(str(tmp_path))
    weights = {key: torch.full_like(value, torch.nan) for key, value in adapter.weights().items()}
    save_file(weights, tmp_path / WEIGHTS, metadata={"format": "pt"})
    (tmp_path / "adapter_config.json").write_text(json.dumps(settings))
    with pytest.raises(InlayError, match="not finite"):
        adapter.model().load_adapter(str(tmp_path))


def test_a_config_that_cannot_be_read_is_one_error(saved: Callable[[Case], Saved], tmp_path: Path) -> None:
    """A pipe would be waited for, whatever type of adapter the folder says that it holds."""
    adapter = saved(Case(METHODS["bias"], "bert"))
    path = tmp_path / "adapter_config.json"
    path.write_text('{"a":' * 100_000)
    with pytest.raises(InlayError, match=r"adapter_config\.json cannot be read"):
        adapter.model().load_adapter(str(tmp_path))
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(InlayError, match=r"adapter_config\.json is not a plain file"):
        adapter.model().load_adapter(str(tmp_path))


def test_a_note_that_cannot_be_read_is_one_error(tmp_path: Path) -> None:
    """Beside an adapter of PEFT's own, by both doors."""
    lora = peft.get_peft_model(tiny("bert")[0], peft.LoraConfig(target_modules=["query"], task_type="SEQ_CLS"))
    lora.save_pretrained(str(tmp_path))
    (tmp_path / "inlay.json").write_text('{"a":' * 100_000)
    with pytest.raises(InlayError, match=r"inlay\.json cannot be read"):
        tiny("bert")[0].load_adapter(str(tmp_path))  # type: ignore[operator]
    with pytest.raises(InlayError, match=r"inlay\.json cannot be read"):
        PeftModel.from_pretrained(tiny("bert")[0], str(tmp_path))


def test_a_task_that_was_trained_alone_brings_its_head(saved: Callable[[Case], Saved]) -> None:
    """Into a base with another number of labels: a task of multi-lora has a head of its own size."""
    adapter = saved(Case(METHODS["multi-lora"], "bert"))
    model = AUTO["bert"].from_pretrained(adapter.adapter, num_labels=2)
    assert torch.equal(logits(model, adapter.batch), adapter.wanted)


def test_hotswapping_and_a_missing_file_are_refused(saved: Callable[[Case], Saved], tmp_path: Path) -> None:
    adapter = saved(Case(METHODS["bias"], "bert"))
    with pytest.raises(InlayError, match="hotswap"):
        adapter.model().load_adapter(str(adapter.adapter), hotswap=True)
    adapter.config().save_pretrained(tmp_path)
    with pytest.raises(OSError, match=WEIGHTS):
        adapter.model().load_adapter(str(tmp_path))


# ------------------------------------------------------------------------------------------------ what was saved before


OLD = json.loads((FIXTURES / "expected.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", OLD)
def test_adapters_that_were_saved_before(name: str) -> None:
    """Folders that were written when Transformers could not load them."""
    family, folder = OLD[name]["family"], FIXTURES / name
    batch, wanted = tiny(family)[1], torch.tensor(OLD[name]["logits"])
    by_transformers = tiny(family)[0]
    by_transformers.load_adapter(str(folder))  # type: ignore[operator]
    by_peft = PeftModel.from_pretrained(tiny(family)[0], str(folder))
    for model in (by_transformers, by_peft, restore(tiny(family)[0], name, folder)):
        torch.testing.assert_close(logits(model, batch), wanted, atol=1e-5, rtol=0)
