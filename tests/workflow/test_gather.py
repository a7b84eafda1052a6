"""LoRAs from many places become one folder that a model runs in one pass; what cannot be among them is said."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants
from peft import IA3Config, LoraConfig, PeftModel, VeraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification

import inlay
from checkpoints import write_tokenizer
from inlay import InlayError, Spec, tune
from inlay.workflow.gather import gather
from probing import logits
from zoo import tiny

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::RuntimeWarning")
FILES = ("adapter_config.json", "adapter_model.safetensors")


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A base model in the working folder, as adapters name it."""
    monkeypatch.chdir(tmp_path)
    tiny("bert", "base")[0].save_pretrained(tmp_path / "base")
    write_tokenizer(tmp_path / "base")
    return tmp_path / "base"


def lora(place: Path, base: str = "./base", labels: int = 3, config: Any = None, **settings: Any) -> Path:
    """An adapter that PEFT alone made, moved away from its start."""
    given = {"target_modules": ["query", "value"], "task_type": "SEQ_CLS", "init_lora_weights": False} | settings
    torch.manual_seed(len(place.name))
    model = AutoModelForSequenceClassification.from_pretrained("./base", num_labels=labels)
    adapted = get_peft_model(model, config or LoraConfig(**given))
    adapted.peft_config["default"].base_model_name_or_path = base
    adapted.save_pretrained(place)
    return place


def change(place: Path, **settings: Any) -> None:
    path = place / FILES[0]
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))


def test_a_set_runs_in_one_pass(base: Path, tmp_path: Path) -> None:
    """Whatever their ranks, scales, targets and heads."""
    lora(tmp_path / "loras" / "one", r=2)
    lora(tmp_path / "loras" / "two-half", r=5, use_rslora=True, labels=2, target_modules=["query", "dense"])
    lora(tmp_path / "third", r=3, lora_alpha=1, labels=7)
    found = gather([tmp_path / "loras", f"mine={tmp_path / 'third'}"], tmp_path / "set")
    assert (found.taken, found.refused) == (("one", "two_half", "mine"), {})
    assert found.base_model == "./base"
    kept = {
        each.name: sorted(file.name for file in each.iterdir())
        for each in (tmp_path / "set").iterdir()
        if each.is_dir()
    }
    assert kept == dict.fromkeys(found.taken, sorted([*FILES, "README.md"]))
    told = json.loads((tmp_path / "set" / "set.json").read_text())
    assert {name: each["outputs"] for name, each in told["adapters"].items()} == {"one": 3, "two_half": 2, "mine": 7}
    # PEFT and `inlay.mix` read the folder as it is.
    _, batch = tiny("bert")
    del batch["labels"]
    alone = {}
    for name in found.taken:
        outputs = told["adapters"][name]["outputs"]
        plain = AutoModelForSequenceClassification.from_pretrained(base, num_labels=outputs)
        alone[name] = logits(PeftModel.from_pretrained(plain, str(tmp_path / "set" / name)).eval(), batch)
    model = AutoModelForSequenceClassification.from_pretrained(base, num_labels=3)
    mixed = inlay.mix(PeftModel.from_pretrained(model, str(tmp_path / "set" / "one"), adapter_name="one"))
    for name in found.taken[1:]:
        mixed.load_adapter(str(tmp_path / "set" / name), name)
    together = mixed.eval()(**batch, adapter_names=list(found.taken)).logits
    for row, name in enumerate(found.taken):
        own = alone[name][row]
        torch.testing.assert_close(together[row, : len(own)].detach(), own, atol=1e-5, rtol=1e-5)


def test_what_cannot_be_served_is_left_out_with_the_reason(base: Path, tmp_path: Path, typed: Any) -> None:
    loras = tmp_path / "loras"
    bad = {
        "dora": (lora(loras / "dora", use_dora=True), "it is a DoRA"),
        "biased": (lora(loras / "biased", bias="all"), "bias='all'"),
        "ia3": (
            lora(loras / "ia3", config=IA3Config(target_modules=["key"], feedforward_modules=[], task_type="SEQ_CLS")),
            "it is no LoRA but ia3",
        ),
        "vera": (
            lora(loras / "vera", config=VeraConfig(target_modules=["query"], task_type="SEQ_CLS")),
            "inlay export --adapter .*vera --to lora",
        ),
        "stranger": (lora(loras / "stranger", base="other/model"), "its base model is other/model"),
        "later": (lora(loras / "later"), "its revision is abc"),
        "cut": (lora(loras / "cut"), "truncated or damaged"),
        "infinite": (lora(loras / "infinite"), "not finite"),
        "pickled": (lora(loras / "pickled"), r"adapter_model\.bin"),
        "hollow": (lora(loras / "hollow"), "has no adapter_model.safetensors"),
        "wider": (lora(loras / "wider"), "has shape"),
        "query": (lora(loras / "query"), "names no part of the model"),
        "half": (lora(loras / "half"), "lacks .*lora_B"),
        "notes": (loras / "notes", "holds no adapter"),
    }
    (loras / "notes").mkdir()
    change(loras / "later", revision="abc")
    for name in ("pickled", "hollow"):
        (loras / name / FILES[1]).unlink()
    (loras / "pickled" / "adapter_model.bin").write_bytes(b"cos\nsystem\n")
    weights = loras / "cut" / FILES[1]
    weights.write_bytes(weights.read_bytes()[:-5])
    for name in ("infinite", "wider", "half"):
        tensors = load_file(loras / name / FILES[1])
        key = next(key for key in tensors if "lora_B" in key)
        if name == "half":
            del tensors[key]
        else:
            tensors[key] = tensors[key] / 0 if name == "infinite" else tensors[key].repeat(2, 1)
        save_file(tensors, loras / name / FILES[1])
    for name in ("good", "fine", "type"):
        lora(loras / name)
    status, _, err = typed("gather", "loras", "--out", "set")
    assert status == 1, err
    for name, (_, why) in bad.items():
        assert re.search(rf"left out {name}: .*{why}", err), f"{name}: {err}"
    assert "gathered 3 LoRAs of ./base" in err
    assert sorted(each.name for each in (tmp_path / "set").iterdir()) == ["adapter_type", "fine", "good", "set.json"]
    status, _, err = typed("gather", "loras", "--out", "set")
    assert (status, "there already" in err) == (2, True)


def test_nothing_to_gather_writes_nothing(base: Path, tmp_path: Path) -> None:
    lora(tmp_path / "loras" / "one", use_dora=True)
    with pytest.raises(InlayError, match=r"There is no LoRA to gather.*one: it is a DoRA"):
        gather([tmp_path / "loras"], tmp_path / "set")
    with pytest.raises(InlayError, match="is no folder"):
        gather([tmp_path / "lorras"], tmp_path / "set")
    assert not (tmp_path / "set").exists()


def test_two_of_one_name(base: Path, tmp_path: Path) -> None:
    for name in ("a-b", "a_b"):
        lora(tmp_path / "loras" / name)
    found = gather([tmp_path / "loras"], tmp_path / "set")
    assert found.taken == ("a_b",)
    assert "another adapter is called 'a_b'" in found.refused["a_b"]


def test_runs_with_their_labels_and_what_their_heads_read(review_spec: Spec, tmp_path: Path) -> None:
    out = tmp_path / "runs"
    for seed, pooling in ((0, "mean"), (1, "mean"), (2, "own")):
        tune(review_spec.with_(method="lora", seed=seed, pooling=pooling), out, progress=False)
    found = gather([out], tmp_path / "set")
    assert len(found.taken) == 2
    assert list(found.refused.values()) == ["its pooling is own, and that of the set is mean"]
    told = json.loads((tmp_path / "set" / "set.json").read_text())
    assert told["pooling"] == "mean"
    assert {tuple(each["labels"]) for each in told["adapters"].values()} == {("1", "2", "3")}
    assert str(tmp_path) not in "".join(each.read_text() for each in (tmp_path / "set").rglob("*.*[nd]"))


def test_a_base_model_that_is_not_here(base: Path, tmp_path: Path) -> None:
    """The files are checked all the same, and it is said that no more was."""
    lora(tmp_path / "loras" / "one", base="someone/absent-model")
    said: list[str] = []
    found = gather([tmp_path / "loras"], tmp_path / "set", say=said.append)
    assert found.taken == ("one",)
    assert any("whether the adapters fit it was not checked" in line for line in said)
    with pytest.raises(InlayError, match="does not exist"):
        gather([tmp_path / "loras"], tmp_path / "other", model="./nowhere")
    assert gather([tmp_path / "loras"], tmp_path / "other", model=str(base)).taken == ("one",)


def test_from_the_hub(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the hub's cache has it, at a commit; one that cannot be had is left out."""
    commit = "1" * 40
    cached = tmp_path / "hub" / "models--someone--mood-lora"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text(commit)
    shutil.copytree(lora(tmp_path / "made"), cached / "snapshots" / commit)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    found = gather(["someone/mood-lora", "odd=someone/absent", "late=someone/mood-lora@other"], tmp_path / "set")
    assert found.taken == ("mood_lora",)
    assert set(found.refused) == {"odd", "late"}
    assert "could not be fetched" in found.refused["odd"]
    told = json.loads((tmp_path / "set" / "set.json").read_text())["adapters"]["mood_lora"]
    assert (told["source"], told["revision"]) == ("someone/mood-lora", commit)


@pytest.mark.parametrize(
    "odd", [{"task_type": ["SEQ_CLS"]}, {"revision": ["x"]}, {"layers_pattern": 3}, {"eva_config": 3}]
)
def test_settings_of_odd_types_leave_one_out(base: Path, tmp_path: Path, odd: dict[str, Any]) -> None:
    for name in ("good", "odd", "other"):
        lora(tmp_path / "loras" / name, r=2)
    change(tmp_path / "loras" / "odd", **odd)
    found = gather([tmp_path / "loras"], tmp_path / "set")
    assert (found.taken, list(found.refused)) == (("good", "other"), ["odd"])


def test_a_folder_with_an_equals_sign(base: Path, tmp_path: Path) -> None:
    assert gather([lora(tmp_path / "r=8", r=8)], tmp_path / "set").taken == ("r_8",)


def test_the_first_being_for_something_else_checks_the_others_still(base: Path, tmp_path: Path) -> None:
    for name in ("first", "good", "wide"):
        lora(tmp_path / "loras" / name, r=2)
    change(tmp_path / "loras" / "first", task_type="QUESTION_ANS")
    file = tmp_path / "loras" / "wide" / FILES[1]
    tensors = load_file(file)
    tensors[next(key for key in tensors if "lora_A" in key)] = torch.zeros(2, 999)
    save_file(tensors, file)
    found = gather([tmp_path / "loras"], tmp_path / "set")
    assert (found.taken, sorted(found.refused)) == (("good",), ["first", "wide"])


def test_a_run_of_several_tasks_gives_its_tasks(tmp_path: Path) -> None:
    """As `inlay tune --tasks` leaves it: the adapters lie in `adapter/`, in folders of their names."""
    base = tiny("bert", "base")[0]
    base.save_pretrained(tmp_path / "base")
    for name in ("mood", "tone"):
        model = get_peft_model(tiny("bert", "base")[0], LoraConfig(r=2, target_modules=["query"]))
        model.peft_config["default"].base_model_name_or_path = str(tmp_path / "base")
        model.save_pretrained(str(tmp_path / "run" / "adapter" / name))
    found = gather([tmp_path / "run"], tmp_path / "set")
    assert sorted(found.taken) == ["mood", "tone"]
