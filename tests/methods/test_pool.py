"""`inlay.AdapterPool`: LoRAs on disk, in memory and in slots, beside PEFT's own answers for each."""

from __future__ import annotations

import json
import shutil
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import inlay
from inlay.backbones import fingerprint
from inlay.errors import InlayError
from inlay.methods import attach, registry
from zoo import tiny

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::RuntimeWarning")
BASE = "__base__"
TARGETS = {
    "bert": ["query", "value", "dense"],
    "roberta": ["query", "value"],
    "gpt2": ["c_attn", "c_fc"],
    "llama": ["q_proj", "down_proj"],
    "vit": ["q_proj", "v_proj"],
}
TASKS = {
    "bert": ("classification", "SEQ_CLS"),
    "roberta": ("classification", "SEQ_CLS"),
    "gpt2": ("causal-lm", "CAUSAL_LM"),
    "llama": ("causal-lm", "CAUSAL_LM"),
}
# Of unlike ranks, scales, targets and heads.
OWN: dict[str, dict[str, Any]] = {
    "a": {"r": 2, "lora_alpha": 3},
    "b": {"r": 5, "lora_alpha": 7, "use_rslora": True},
    "c": {"r": 3, "lora_alpha": 8, "rank_pattern": {r".*\.1\..*": 7}, "alpha_pattern": {r".*\.0\..*": 1}},
    "d": {"r": 4, "lora_alpha": 4, "layers_to_transform": [1]},
}


def base_of(family: str, labels: int = 3) -> nn.Module:
    """One body, whatever the head."""
    task = TASKS.get(family, ("classification", None))[0]
    more = {"num_labels": labels} if task == "classification" else {}
    model = tiny(family, task, **more)[0]
    body = {k: v for k, v in tiny(family, task)[0].state_dict().items() if "classifier" not in k}
    model.load_state_dict(body, strict=False)
    return model.eval()


def write(folder: Path, family: str, labels: int = 3, seed: int = 0, **config: Any) -> Path:
    """A LoRA as PEFT saves it."""
    kind = {"task_type": TASKS[family][1]} if family in TASKS else {"modules_to_save": ["classifier"]}
    given: dict[str, Any] = {"target_modules": TARGETS[family], "fan_in_fan_out": family == "gpt2", **kind, **config}
    model = get_peft_model(base_of(family, labels), LoraConfig(**given))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name or "modules_to_save" in name:
                parameter.copy_(0.15 * torch.randn(parameter.shape, generator=generator))
    model.save_pretrained(str(folder))
    return folder


def batch_of(family: str, rows: int) -> dict[str, Tensor]:
    batch = tiny(family, TASKS.get(family, ("classification", None))[0])[1]
    batch = {key: value for key, value in batch.items() if key != "labels"}
    count = len(next(iter(batch.values())))
    return {key: value[torch.arange(rows) % count] for key, value in batch.items()}


def alone(family: str, folder: Path | None, batch: dict[str, Tensor], labels: int = 3) -> Tensor:
    """What PEFT answers with one adapter."""
    model: Any = base_of(family, labels)
    if folder is not None:
        model = PeftModel.from_pretrained(model, str(folder)).eval()
    with torch.no_grad():
        found: Tensor = model(**batch).logits
    return found


def pool_of(tmp_path: Path, family: str, slots: int = 8, **more: Any) -> tuple[Any, dict[str, Path]]:
    pool: Any = inlay.AdapterPool(base_of(family), slots=slots, **more)
    folders = {}
    for seed, (name, config) in enumerate(OWN.items()):
        if family == "vit" and name == "d":
            config = {"r": 4, "lora_alpha": 4}
        folders[name] = write(tmp_path / name, family, seed=seed, **config)
        pool.add(name, str(folders[name]))
    return pool, folders


@pytest.mark.parametrize("family", TARGETS)
@pytest.mark.parametrize("names", [["a", BASE, "b", "c", "d", "a"], ["b"] * 3, [BASE] * 2, ["d", "d", BASE]])
def test_each_row_has_what_peft_answers_with_its_adapter_alone(tmp_path: Path, family: str, names: list[str]) -> None:
    pool, folders = pool_of(tmp_path, family)
    batch = batch_of(family, len(names))
    for _ in range(2):
        found = pool(**batch, adapter_names=names).logits
        for row, name in enumerate(names):
            one = {key: value[row : row + 1] for key, value in batch.items()}
            wanted = alone(family, folders.get(name), one)[0]
            torch.testing.assert_close(found[row], wanted, atol=1e-6 * max(1, wanted.abs().max().item()), rtol=0)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(passes=st.lists(st.lists(st.sampled_from([BASE, *OWN]), min_size=1, max_size=6), min_size=1, max_size=8))
def test_adapters_come_and_go_through_few_slots(
    few: Callable[[], tuple[Any, dict[str, Tensor]]], passes: list[list[str]]
) -> None:
    """Whatever went out and came back, in whatever order: a row's answer is its own adapter's."""
    pool, wanted = few()
    for names in passes:
        batch = batch_of("bert", len(names))
        if len(set(names) - {BASE}) > 2:
            with pytest.raises(InlayError, match="2 slots"):
                pool(**batch, adapter_names=names)
            continue
        found = pool(**batch, adapter_names=names).logits
        for row, name in enumerate(names):
            torch.testing.assert_close(found[row], wanted[name][row % 3], atol=1e-6, rtol=1e-6)
        assert sum(pool.where(name) == "device" for name in OWN) <= 2


@pytest.fixture
def few(tmp_path: Path) -> Callable[[], tuple[Any, dict[str, Tensor]]]:
    kept: list[Any] = []

    def make() -> tuple[Any, dict[str, Tensor]]:
        if not kept:
            pool, folders = pool_of(tmp_path, "bert", slots=2, memory=1e-6)  # one in memory at a time
            batch = batch_of("bert", 3)
            kept.append((pool, {name: alone("bert", folders.get(name), batch) for name in [BASE, *OWN]}))
        found: tuple[Any, dict[str, Tensor]] = kept[0]
        return found

    return make


def test_the_least_recently_used_go_out(tmp_path: Path) -> None:
    pool, folders = pool_of(tmp_path, "bert", slots=2)
    batch = batch_of("bert", 2)
    assert {pool.where(name) for name in OWN} == {"disk"}
    pool.prefetch(["a", "b", BASE])
    assert [pool.where(name) for name in "abcd"] == ["memory", "memory", "disk", "disk"]
    pool(**batch, adapter_names=["a", "b"])
    pool(**batch, adapter_names=["a", "a"])
    pool(**batch, adapter_names=["c", BASE])
    assert [pool.where(name) for name in "abcd"] == ["device", "memory", "device", "disk"]
    # What is in memory needs no files any more, and what is on disk does.
    shutil.rmtree(folders["b"])
    pool(**batch, adapter_names=["b", "b"])
    shutil.rmtree(folders["d"])
    with pytest.raises(InlayError, match=r"d/adapter_model\.safetensors"):
        pool(**batch, adapter_names=["d", "b"])
    torch.testing.assert_close(
        pool(**batch, adapter_names=["c", "a"]).logits[1], alone("bert", folders["a"], batch)[1], atol=1e-6, rtol=1e-6
    )
    pool.remove("a")
    assert len(pool) == 3
    assert "a" not in pool
    with pytest.raises(InlayError, match=r"'a'.*b, c, d"):
        pool(**batch, adapter_names=["a", "b"])


@pytest.mark.parametrize("family", ["bert", "roberta"])  # a layer, and a head of several
def test_heads_of_unlike_sizes(tmp_path: Path, family: str) -> None:
    labels = {"two": 2, "five": 5, "value": 1}
    pool: Any = inlay.AdapterPool(base_of(family, 3))
    for seed, (name, count) in enumerate(labels.items()):
        pool.add(name, str(write(tmp_path / name, family, count, seed, r=count)))
        assert pool.outputs_of(name) == count
    names = ["five", "two", BASE, "value", "five"]
    batch = batch_of(family, len(names))
    found = pool(**batch, adapter_names=names).logits
    assert found.shape == (5, 5)
    for row, name in enumerate(names):
        count = labels.get(name, 3)
        one = {key: value[row : row + 1] for key, value in batch.items()}
        wanted = alone(family, None if name == BASE else tmp_path / name, one, count)[0]
        torch.testing.assert_close(found[row, :count], wanted, atol=1e-6, rtol=1e-6)
        assert (found[row, count:] == -torch.inf).all()
    only = pool(**batch, adapter_names=["two"] * 5).logits
    assert only.shape == (5, 2)


@pytest.mark.parametrize("how", [{}, {"num_beams": 2}])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_generation(tmp_path: Path, family: str, how: dict[str, Any]) -> None:
    pool, folders = pool_of(tmp_path, family)
    names = ["a", BASE, "b"]
    ids = batch_of(family, 3)["input_ids"][:, :5]
    more = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, **how}
    found = pool.generate(input_ids=ids, attention_mask=torch.ones_like(ids), adapter_names=names, **more)
    for row, name in enumerate(names):
        model: Any = base_of(family)
        if name != BASE:
            model = PeftModel.from_pretrained(model, str(folders[name])).eval()
        one = ids[row : row + 1]
        assert torch.equal(
            found[row : row + 1], model.generate(input_ids=one, attention_mask=torch.ones_like(one), **more)
        )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(tmp_path: Path, dtype: torch.dtype) -> None:
    """No farther from float32 than PEFT's own answers in this precision, but for chance."""
    _, folders = pool_of(tmp_path, "llama")
    pool: Any = inlay.AdapterPool(base_of("llama").to(dtype))
    names = [*OWN, BASE] * 6
    batch = batch_of("llama", len(names))
    for name, folder in folders.items():
        pool.add(name, str(folder))
    found = pool(**batch, adapter_names=names).logits
    assert found.dtype == dtype
    errors, theirs = [], []
    for row, name in enumerate(names):
        one = {key: value[row : row + 1] for key, value in batch.items()}
        wanted = alone("llama", folders.get(name), one)[0]
        model: Any = base_of("llama").to(dtype)
        if name in folders:
            model = PeftModel.from_pretrained(model, str(folders[name])).eval()
        with torch.no_grad():
            theirs.append((model(**one).logits[0].float() - wanted).pow(2).mean())
        errors.append((found[row].float() - wanted).pow(2).mean())
    assert torch.stack(errors).mean().sqrt() <= 2 * torch.stack(theirs).mean().sqrt()


def test_threads_that_run_beside_one_another(tmp_path: Path) -> None:
    pool, folders = pool_of(tmp_path, "bert", slots=4, memory=1e-6)
    batch = batch_of("bert", 2)
    wanted = {name: alone("bert", folder, batch) for name, folder in folders.items()}
    wrong: list[str] = []

    def run(number: int) -> None:
        for turn in range(12):
            names = [list(OWN)[(number + turn) % 4], list(OWN)[(number * 2 + turn) % 4]]
            found = pool(**batch, adapter_names=names).logits
            wrong.extend(
                name
                for row, name in enumerate(names)
                if not torch.allclose(found[row], wanted[name][row], atol=1e-6, rtol=1e-6)
            )

    threads = [threading.Thread(target=run, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert not +pool._pinned


def damaged(folder: Path, how: str) -> None:
    weights, config = folder / "adapter_model.safetensors", folder / "adapter_config.json"
    if how == "truncated":
        weights.write_bytes(weights.read_bytes()[:-40])
    elif how == "no weights":
        weights.unlink()
    elif how in ("nan", "no B", "half a head"):
        tensors = load_file(weights)
        first = next(key for key in tensors if ("lora_B" in key) == (how != "half a head"))
        if how == "half a head":
            first = next(key for key in tensors if "classifier.bias" in key)
        if how == "nan":
            tensors[first][0] = torch.nan
        else:
            del tensors[first]
        save_file(tensors, weights)
    else:
        settings = json.loads(config.read_text())
        config.write_text(json.dumps(settings | json.loads(how)))


@pytest.mark.parametrize(
    ("how", "what"),
    [
        ("truncated", "truncated or damaged"),
        ("no weights", "has no adapter_model.safetensors"),
        ("no B", "not whole"),
        ("half a head", r"classifier\.bias: its head is not whole"),
        ('{"use_dora": true}', "DoRA"),
        ('{"bias": "all"}', "biases of the base model"),
        ('{"init_lora_weights": "pissa"}', "pissa"),
        ('{"peft_type": "IA3"}', "'IA3', not a LoRA"),
        ('{"modules_to_save": null}', "neither a factor"),
    ],
)
def test_what_cannot_be_added_is_refused_and_the_others_go_on(tmp_path: Path, how: str, what: str) -> None:
    pool, folders = pool_of(tmp_path, "bert")
    batch = batch_of("bert", 2)
    before = pool(**batch, adapter_names=["a", "b"]).logits
    bad = write(tmp_path / "bad", "bert", r=2)
    damaged(bad, how)
    with pytest.raises(InlayError, match=what):
        pool.add("bad", str(bad))
    assert pool.names == list(folders)
    assert torch.equal(pool(**batch, adapter_names=["a", "b"]).logits, before)


def test_a_value_that_is_not_finite_is_found_when_it_is_read(tmp_path: Path) -> None:
    pool, _ = pool_of(tmp_path, "bert")
    bad = write(tmp_path / "bad", "bert", r=2)
    damaged(bad, "nan")
    pool.add("bad", str(bad))
    batch = batch_of("bert", 2)
    with pytest.raises(InlayError, match="not finite"):
        pool(**batch, adapter_names=["a", "bad"])
    assert pool(**batch, adapter_names=["a", "b"]).logits.isfinite().all()
    assert not +pool._pinned


def test_bad_input(tmp_path: Path) -> None:
    pool, folders = pool_of(tmp_path, "bert")
    batch = batch_of("bert", 3)
    wide = write(tmp_path / "wide", "llama", r=2)
    for name, source, what in (
        ("a", folders["a"], "already"),
        (BASE, folders["a"], "cannot be called"),
        ("new", tmp_path / "nowhere", "has no adapter_config.json"),
        ("new", wide, "which this model lacks"),
    ):
        with pytest.raises(InlayError, match=what):
            pool.add(name, str(source))
    for names, what in ((["a", "b"], "2 names.*3 rows"), (["a", "x", "b"], "'x'"), ("a", "list"), ([], "list")):
        with pytest.raises(InlayError, match=what):
            pool(**batch, adapter_names=names)
    with pytest.raises(InlayError, match="labels"):
        pool(**batch, adapter_names=["a"] * 3, labels=torch.zeros(3, dtype=torch.long))
    with pytest.raises(InlayError, match="already"):
        inlay.AdapterPool(pool.model)
    with pytest.raises(InlayError, match="plain model"):
        inlay.AdapterPool(get_peft_model(base_of("bert"), LoraConfig(target_modules=["query"])))
    with pytest.raises(InlayError, match="slots=0"):
        inlay.AdapterPool(base_of("bert"), slots=0)


def test_an_adapter_of_other_weights_is_refused_by_its_note(tmp_path: Path) -> None:
    """Of the same shapes: only the fingerprint in inlay's note tells."""
    base = base_of("bert")
    print_of_base = fingerprint(base, ["classifier"])
    model: Any = attach.attach(base, "lora", newly_initialised=["classifier"], task_kind="classification")
    attach.save(model, registry.get("lora"), tmp_path / "own", base_model_name="one", fingerprint=print_of_base)
    pool: Any = inlay.AdapterPool(base_of("bert"))
    pool.add("own", str(tmp_path / "own"))
    other = base_of("bert")
    with torch.no_grad():
        next(other.parameters()).add_(0.1)
    with pytest.raises(InlayError, match="another base model"):
        inlay.AdapterPool(other).add("own", str(tmp_path / "own"))


def test_threads_that_run_unlike_heads(tmp_path: Path) -> None:
    pool, batch = inlay.AdapterPool(base_of("roberta"), slots=4), batch_of("roberta", 4)
    for seed, name in enumerate("ab"):
        pool.add(name, str(write(tmp_path / name, "roberta", seed=seed)))
    cases = [["a"] * 4, ["b"] * 4, [BASE] * 4, ["a", "b", BASE, "a"]]
    wanted = [pool(**batch, adapter_names=names).logits for names in cases]
    wrong: list[Any] = []

    def run(names: list[str], answer: Tensor) -> None:
        for _ in range(60):
            try:
                if not torch.allclose(pool(**batch, adapter_names=names).logits, answer, atol=1e-5):
                    wrong.append(names)
            except Exception as error:
                wrong.append(error)

    threads = [threading.Thread(target=run, args=each) for each in zip(cases, wanted, strict=True)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert not wrong
    assert torch.equal(pool(**batch, adapter_names=cases[2]).logits, wanted[2])  # the model is as it was


def test_a_lora_within_what_is_anothers_head(tmp_path: Path) -> None:
    write(tmp_path / "whole", "roberta")
    inside = {"target_modules": ["query", "classifier.dense"], "task_type": None, "modules_to_save": None}
    write(tmp_path / "inside", "roberta", seed=1, **inside)
    pool, batch = inlay.AdapterPool(base_of("roberta")), batch_of("roberta", 4)
    for name in ("whole", "inside"):
        pool.add(name, str(tmp_path / name))
    found = pool(**batch, adapter_names=["whole", "inside", BASE, "inside"]).logits
    by_itself = alone("roberta", tmp_path / "inside", batch)
    assert torch.allclose(found[1::2], by_itself[1::2], atol=1e-6)
    assert torch.allclose(found[0], alone("roberta", tmp_path / "whole", batch)[0], atol=1e-6)


def test_a_folder_that_changes_while_it_is_in_the_pool(tmp_path: Path) -> None:
    pool, batch = inlay.AdapterPool(base_of("bert"), slots=1), batch_of("bert", 2)
    for name in "ab":
        pool.add(name, str(write(tmp_path / name, "bert")))
    write(tmp_path / "a", "bert", r=16, lora_alpha=64)
    for _ in range(2):
        with pytest.raises(InlayError, match="not what it was"):
            pool(**batch, adapter_names=["a"] * 2)
    assert torch.isfinite(pool(**batch, adapter_names=["b"] * 2).logits).all()  # the slot was not lost
    pool.remove("a")
    pool.add("a", str(tmp_path / "a"))
    found = pool(**batch, adapter_names=["a"] * 2).logits
    assert torch.allclose(found, alone("bert", tmp_path / "a", batch), atol=1e-5)


def test_another_of_its_name_that_comes_while_one_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from inlay.methods.mixture.lora_files import LoraFile

    pool, batch = inlay.AdapterPool(base_of("bert")), batch_of("bert", 2)
    pool.add("a", str(write(tmp_path / "1", "bert")))
    write(tmp_path / "2", "bert", seed=5)
    read = LoraFile.read

    def slow(file: LoraFile, dtype: torch.dtype) -> Any:
        found = read(file, dtype)
        monkeypatch.setattr(LoraFile, "read", read)
        pool.remove("a")
        pool.add("a", str(tmp_path / "2"))
        return found

    monkeypatch.setattr(LoraFile, "read", slow)
    pool.prefetch(["a"])
    found = pool(**batch, adapter_names=["a"] * 2).logits
    assert torch.allclose(found, alone("bert", tmp_path / "2", batch), atol=1e-5)


def test_a_head_that_the_file_lacks(tmp_path: Path) -> None:
    file = write(tmp_path / "a", "bert") / "adapter_model.safetensors"
    save_file({key: value for key, value in load_file(file).items() if "classifier" not in key}, file)
    with pytest.raises(InlayError, match="lacks classifier"):
        inlay.AdapterPool(base_of("bert")).add("a", str(tmp_path / "a"))


@pytest.mark.parametrize(
    "odd", [{"lora_alpha": "8"}, {"alpha_pattern": ["a"]}, {"target_modules": 5}, {"modules_to_save": [1]}]
)
def test_settings_of_odd_types(tmp_path: Path, odd: dict[str, Any]) -> None:
    place = write(tmp_path / "a", "bert") / "adapter_config.json"
    place.write_text(json.dumps(json.loads(place.read_text()) | odd))
    with pytest.raises(InlayError):
        inlay.AdapterPool(base_of("bert")).add("a", str(tmp_path / "a"))
