"""Saved work comes back to the bit, and anything wrong with it is one clear error."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from inlay.backbones.new_parts import fingerprint
from inlay.errors import InlayError
from inlay.methods.attach import attach, restore, save, trained_parameters
from inlay.methods.folder import CONFIG, NOTE, WEIGHTS
from inlay.methods.registry import get
from inlay.records.sealed import sealed
from probing import logits
from zoo import tiny

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
FORMS = ["bias", "lora", "linear-probe", "full"]


def trained(method: str, family: str = "bert"):
    model, batch = tiny(family)
    adapted = attach(model, method)
    with torch.no_grad():
        for parameter in trained_parameters(adapted).values():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return adapted, batch


@pytest.fixture(params=FORMS)
def saved(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, Path]:
    adapted, _ = trained(request.param)
    base, _ = tiny("bert")
    mark = fingerprint(base, ["classifier"])
    save(adapted, request.param, tmp_path / "run", base_model_name="some/base", fingerprint=mark)
    return request.param, tmp_path / "run"


def weights(method: str, folder: Path) -> Path:
    return folder / WEIGHTS[get(method).form]


def rewrite(path: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    """Change the tensors of a file, so that its hash does not tell."""
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})
    edit_note(path.parent, sha256={})


def edit_note(folder: Path, **changes: object) -> None:
    path = next(folder / name for name in NOTE.values() if (folder / name).is_file())
    note = json.loads(path.read_text()) | changes
    path.write_text(json.dumps(sealed(note, "digest")))


def test_what_lies_in_the_folder(saved: tuple[str, Path]) -> None:
    method, folder = saved
    note = json.loads((folder / NOTE[get(method).form]).read_text())
    assert note["method"] == method
    assert note["base_model"] == "some/base"
    assert note["newly_initialised"] == ([] if method == "full" else ["classifier"])
    config = [CONFIG[get(method).form]] if get(method).form in CONFIG else []
    assert sorted(note["sha256"]) == sorted([weights(method, folder).name, *config])
    if get(method).form == "peft":
        assert json.loads((folder / "adapter_config.json").read_text())["base_model_name_or_path"] == "some/base"
        assert "some/base" in (folder / "README.md").read_text()


def test_restored_models_are_in_eval_mode_and_the_same(saved: tuple[str, Path]) -> None:
    method, folder = saved
    restored = restore(tiny("bert")[0].train(), method, folder)
    assert not any(module.training for module in restored.modules())
    again = restore(tiny("bert")[0], get(method), str(folder))
    batch = tiny("bert")[1]
    assert torch.equal(logits(restored, batch), logits(again, batch))
    save(again, method, folder.parent / "again")
    for name, tensor in load_file(weights(method, folder)).items():
        assert torch.equal(load_file(weights(method, folder.parent / "again"))[name], tensor)


def test_a_truncated_file(saved: tuple[str, Path]) -> None:
    method, folder = saved
    path = weights(method, folder)
    whole = path.read_bytes()
    for size in (0, 7, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(InlayError, match="truncated or damaged"):
            restore(tiny("bert")[0], method, folder)


def test_a_file_that_is_another_one(saved: tuple[str, Path]) -> None:
    method, folder = saved
    path = weights(method, folder)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(InlayError, match="SHA-256"):
        restore(tiny("bert")[0], method, folder)


def test_missing_and_extra_tensors(saved: tuple[str, Path]) -> None:
    method, folder = saved
    path = weights(method, folder)
    rewrite(path, lambda tensors: tensors.update(stray=torch.zeros(1)))
    if method != "full":  # Transformers itself leaves out what it does not know
        with pytest.raises(InlayError, match="stray"):
            restore(tiny("bert")[0], method, folder)
    name = sorted(load_file(path))[0]
    rewrite(path, lambda tensors: [tensors.pop("stray"), tensors.pop(name)])
    with pytest.raises(InlayError, match="lacks"):
        restore(tiny("bert")[0], method, folder)


def test_another_number_of_labels(saved: tuple[str, Path]) -> None:
    method, folder = saved
    model, _ = tiny("bert")
    model.classifier = nn.Linear(16, 5)
    with pytest.raises(InlayError, match=r"has shape \(3(, 16)?,?\), the model needs \(5"):
        restore(model, method, folder)


def test_values_that_are_not_finite(saved: tuple[str, Path]) -> None:
    method, folder = saved

    def poison(tensors: dict[str, Tensor]) -> None:
        tensors[sorted(tensors)[0]].view(-1)[0] = float("nan")

    rewrite(weights(method, folder), poison)
    with pytest.raises(InlayError, match="not finite"):
        restore(tiny("bert")[0], method, folder)


# A whole checkpoint replaces the base.
@pytest.mark.parametrize("saved", [method for method in FORMS if method != "full"], indirect=True)
def test_another_base_model(saved: tuple[str, Path]) -> None:
    method, folder = saved
    other, _ = tiny("bert", seed=1)
    with pytest.raises(InlayError, match="another base model: it was trained on some/base"):
        restore(other, method, folder)
    with pytest.raises(InlayError, match="another base model"):
        restore(tiny("bert")[0], method, folder, fingerprint="0" * 64)
    model, _ = tiny("bert")
    model.classifier.weight.data.zero_()  # a head drawn anew is no other base
    restore(model, method, folder)


def test_another_architecture(saved: tuple[str, Path]) -> None:
    method, folder = saved
    with pytest.raises(InlayError):
        restore(tiny("roberta")[0], method, folder)
    edit_note(folder, fingerprint=None)
    with pytest.raises(InlayError):
        restore(tiny("roberta")[0], method, folder)


def test_a_head_without_its_note(tmp_path: Path) -> None:
    save(trained("linear-probe")[0], "linear-probe", tmp_path)
    (tmp_path / "head.json").unlink()
    with pytest.raises(InlayError, match=r"head\.json cannot be read"):
        restore(tiny("bert")[0], "linear-probe", tmp_path)


def test_another_method(saved: tuple[str, Path]) -> None:
    method, folder = saved
    other = "lora" if method == "bias" else "bias"
    with pytest.raises(InlayError, match=r"was saved by|another method wrote|not of method"):
        restore(tiny("bert")[0], other, folder)


def test_another_method_without_a_note(tmp_path: Path) -> None:
    trained("lora")[0].save_pretrained(tmp_path)
    with pytest.raises(InlayError, match="an adapter of type LORA, not of method 'bias'"):
        restore(tiny("bert")[0], "bias", tmp_path)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps(config | {"peft_type": "OF_TOMORROW"}))
    with pytest.raises(InlayError, match="OF_TOMORROW"):
        restore(tiny("bert")[0], "lora", tmp_path)


def test_a_note_of_another_version(saved: tuple[str, Path]) -> None:
    method, folder = saved
    path = folder / NOTE[get(method).form]
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format": 99}))
    with pytest.raises(InlayError, match="format 99"):
        restore(tiny("bert")[0], method, folder)
    path.write_text("[]")
    with pytest.raises(InlayError, match="JSON object"):
        restore(tiny("bert")[0], method, folder)
    path.write_text("{")
    with pytest.raises(InlayError, match="cannot be read"):
        restore(tiny("bert")[0], method, folder)


def test_a_note_that_was_edited(saved: tuple[str, Path]) -> None:
    method, folder = saved
    path = folder / NOTE[get(method).form]
    note = json.loads(path.read_text())
    for key in note.keys() - {"format", "method"}:
        path.write_text(json.dumps({name: value for name, value in note.items() if name != key}))
        with pytest.raises(InlayError, match=f"lacks '{key}'"):
            restore(tiny("bert")[0], method, folder)
        for wrong in (5, [5], {"a": 5}, "word"):
            if wrong != note[key]:
                path.write_text(json.dumps(note | {key: wrong}))
                with pytest.raises(InlayError, match=r"was edited|not what was saved"):
                    restore(tiny("bert")[0], method, folder)
    path.write_text(json.dumps(note | {"method": ["bias"]}))
    with pytest.raises(InlayError, match="was saved by method"):
        restore(tiny("bert")[0], method, folder)


# A head has no settings beside its note.
@pytest.mark.parametrize("saved", [method for method in FORMS if get(method).form in CONFIG], indirect=True)
def test_settings_that_were_edited(saved: tuple[str, Path]) -> None:
    method, folder = saved
    path = folder / CONFIG[get(method).form]
    path.write_text(json.dumps(json.loads(path.read_text()) | {"lora_alpha": 64, "layer_norm_eps": 0.5}))
    with pytest.raises(InlayError, match="SHA-256"):
        restore(tiny("bert")[0], method, folder)
    path.unlink()
    with pytest.raises(InlayError):
        restore(tiny("bert")[0], method, folder)


@pytest.mark.parametrize("change", [{"peft_type": ["LORA"]}, {"target_modules": "("}, {"r": -1}, {"r": "eight"}])
def test_settings_that_make_no_sense(tmp_path: Path, change: dict[str, object]) -> None:
    trained("lora")[0].save_pretrained(tmp_path)
    path = tmp_path / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(InlayError, match=r"no method known|does not fit"):
        restore(tiny("bert")[0], "lora", tmp_path)


def test_nothing_is_unpickled(tmp_path: Path) -> None:
    adapted, _ = trained("lora")
    adapted.save_pretrained(tmp_path, safe_serialization=False)
    assert (tmp_path / "adapter_model.bin").is_file()
    with pytest.raises(InlayError, match=r"has no adapter_model\.safetensors"):
        restore(tiny("bert")[0], "lora", tmp_path)


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    for method in FORMS:
        with pytest.raises(InlayError, match="has no"):
            restore(tiny("bert")[0], method, tmp_path / "nowhere")


def test_an_adapter_with_a_name_of_its_own(tmp_path: Path) -> None:
    model, batch = tiny("bert")
    adapted = attach(model, "bias", adapter_name="mine")
    with torch.no_grad():
        for parameter in trained_parameters(adapted).values():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    save(adapted, "bias", tmp_path, adapter_name="mine")
    assert torch.equal(logits(restore(tiny("bert")[0], "bias", tmp_path), batch), logits(adapted, batch))


def test_one_of_several_adapters_is_taken_by_its_name(tmp_path: Path) -> None:
    wanted = {}
    batch = tiny("bert")[1]
    for name in ("default", "a", "b"):
        adapted = attach(tiny("bert")[0], "bias", adapter_name=name)
        with torch.no_grad():
            for parameter in trained_parameters(adapted).values():
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
        save(adapted, "bias", tmp_path, adapter_name=name)
        wanted[name] = logits(adapted, batch)
    for name, outputs in wanted.items():
        assert torch.equal(logits(restore(tiny("bert")[0], "bias", tmp_path, adapter_name=name), batch), outputs)
    with pytest.raises(InlayError, match="none called 'c': give adapter_name, of default, a, b"):
        restore(tiny("bert")[0], "bias", tmp_path, adapter_name="c")
    assert torch.equal(logits(restore(tiny("bert")[0], "bias", tmp_path / "b", adapter_name="c"), batch), wanted["b"])
    weights("bias", tmp_path).unlink()
    with pytest.raises(InlayError, match="none called 'default': give adapter_name, of a, b"):
        restore(tiny("bert")[0], "bias", tmp_path)
