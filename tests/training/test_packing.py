"""Texts that share a row: arranged without loss, each as if it stood alone, and runs that learn the same."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import inlay
import zoo
from chat_templates import FAMILIES
from inlay import InlayError, Spec
from inlay.methods import registry
from inlay.methods.attach import attach, trained_parameters
from inlay.methods.capabilities import methods_for
from inlay.methods.protocol import hooks_of
from inlay.tasks.encode import IGNORED
from inlay.training import packing
from inlay.training.packing import PackedCollator, arrange, count_examples, measure

LENGTHS = (9, 3, 1, 6, 4, 2)
DECODERS = ("llama", "gemma", "gpt2")
TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-4}


# -------------------------------------------------------------------------------------------------------------- rows


@given(st.lists(st.integers(1, 300), min_size=1, max_size=40), st.integers(1, 600))
def test_every_example_once_in_rows_that_are_never_more_to_compute(lengths: list[int], limit: int) -> None:
    rows = arrange(lengths, limit)
    assert sorted(number for row in rows for number in row) == list(range(len(lengths)))
    widest = max(sum(lengths[number] for number in row) for row in rows)
    assert all(rows), "no row is empty"
    assert widest <= max(limit, *lengths)
    assert len(rows) * widest <= len(lengths) * max(lengths)
    assert rows == arrange(lengths, limit)


def test_one_long_text_and_many_short_ones_fill_two_rows() -> None:
    assert arrange([100, *[10] * 10], 100) == [[0], list(range(1, 11))]
    assert measure(np.array([100, *[10] * 10] * 2), range(22), 11, 100).rows == 4
    assert "nothing is saved" in str(measure(np.array([9, 10, 10]), range(3), 3, 20))


@given(st.lists(st.integers(1, 20), min_size=1, max_size=12), st.integers(20, 60))
def test_rows_hold_the_examples_and_nothing_is_predicted_from_another(sizes: list[int], limit: int) -> None:
    drawn = random.Random(0)
    items = [
        {
            "input_ids": (ids := [drawn.randrange(5, 90) for _ in range(size)]),
            "labels": ids[:],
            "attention_mask": [1] * size,
        }
        for size in sizes
    ]
    batch = PackedCollator(0, limit)(items)
    rows, begun = arrange(sizes, limit), 0
    for place, row in enumerate(rows):
        begin = 0
        for number in row:
            here = place, slice(begin, begin + sizes[number])
            assert batch["input_ids"][here].tolist() == items[number]["input_ids"]
            assert batch["labels"][here].tolist() == [IGNORED, *items[number]["labels"][1:]]
            assert batch["position_ids"][here].tolist() == list(range(sizes[number]))
            begin += sizes[number]
            begun += 1
        assert batch["input_ids"][place, begin:].eq(0).all()
        assert batch["labels"][place, begin:].eq(IGNORED).all()
        assert not batch["position_ids"][place, begin:].eq(0).any(), "padding begins no example"
    assert count_examples(batch) == begun == len(items)


# ------------------------------------------------------------------------------------------------- each as if alone


def examples(seed: int = 3) -> list[dict[str, list[int]]]:
    drawn = random.Random(seed)
    found = []
    for size in LENGTHS:
        ids = [drawn.randrange(zoo.EOS + 1, zoo.VOCABULARY) for _ in range(size)]
        labels = [each if drawn.random() < 0.6 else IGNORED for each in ids]
        labels[-1] = ids[-1]
        found.append({"input_ids": ids, "attention_mask": [1] * size, "labels": labels})
    return found


def adapted(family: str, method: str, dtype: torch.dtype, implementation: str = "sdpa") -> nn.Module:
    """A method on a tiny decoder, moved from where it starts."""
    model, _ = zoo.tiny(family, "causal-lm")
    model.set_attn_implementation(implementation)  # type: ignore[operator]
    torch.manual_seed(1)
    made = attach(model, registry.get(method), task_kind="causal-lm")
    with torch.no_grad():
        for parameter in trained_parameters(made).values():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return made.to(dtype).eval()


def gradients(model: nn.Module, loss: torch.Tensor) -> torch.Tensor:
    found = torch.autograd.grad(loss, list(trained_parameters(model).values()), allow_unused=True)
    return torch.cat([part.flatten() for part in found if part is not None])


def losses(model: nn.Module, batch: dict[str, Any], labels: torch.Tensor) -> torch.Tensor:
    """The sum of the losses of these labels."""
    scores = model(**{name: value for name, value in batch.items() if name != "labels"})["logits"]
    return nn.functional.cross_entropy(scores[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")


WRITERS = methods_for("llama", "causal-lm")


@pytest.mark.parametrize("method", WRITERS)
def test_each_text_in_a_packed_row_has_the_loss_and_the_gradient_that_it_has_alone(method: str) -> None:
    model = adapted("llama", method, torch.float64)
    check_apart(model, method)


@pytest.mark.parametrize("method", ["lora", "ntk-attention", "compact-prefix"])
@pytest.mark.parametrize("family", DECODERS)
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
def test_in_every_attention(method: str, family: str, implementation: str, dtype: torch.dtype) -> None:
    check_apart(adapted(family, method, dtype, implementation), method)


def check_apart(model: nn.Module, method: str) -> None:
    config = next(iter(getattr(model, "peft_config", {}).values()), None)
    if not hooks_of(config).packable:
        assert method in ("prompt", "prefix", "p-tuning")
        return
    assert packing.refusal(model) is None
    items, near = examples(), TOLERANCE[next(model.parameters()).dtype]
    rows = arrange(LENGTHS, 14)
    assert max(map(len, rows)) > 1
    batch = PackedCollator(zoo.PAD, 14)(items)
    for place, row in enumerate(rows):
        begin = 0
        for number in row:
            end = begin + LENGTHS[number]
            mine = torch.full_like(batch["labels"], IGNORED)
            mine[place, begin:end] = batch["labels"][place, begin:end]
            ids = torch.tensor([items[number]["input_ids"]])
            alone = losses(model, {"input_ids": ids}, torch.tensor([items[number]["labels"]]))
            packed = losses(model, batch, mine)
            torch.testing.assert_close(packed, alone, rtol=near, atol=near)
            if len(items[number]["input_ids"]) > 1:
                torch.testing.assert_close(gradients(model, packed), gradients(model, alone), rtol=near, atol=near)
            begin = end


def test_models_that_would_mix_texts_are_refused() -> None:
    assert packing.refusal(zoo.tiny("opt", "causal-lm")[0]) == (
        "OPT does not keep texts apart that share a row: tried, the second of two came out otherwise than alone"
    )
    torch.manual_seed(0)
    small = {"vocab_size": 48, "hidden_size": 16, "pad_token_id": 0}
    bloom = hf.AutoModelForCausalLM.from_config(hf.BloomConfig(**small, n_layer=2, n_head=2))
    assert "does not keep texts apart" in str(packing.refusal(bloom))
    t5 = hf.T5ForConditionalGeneration(zoo.t5_config())
    assert "encoder" in str(packing.refusal(t5))
    with pytest.raises(InlayError, match="a run of one task"):
        Spec(model="m", method="multi-lora", tasks=("rte", "sst2"), pack=True)


# -------------------------------------------------------------------------------------------------------- whole runs


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Thirty conversations, a few of them long, and a tiny decoder with a chat template."""
    folder = tmp_path_factory.mktemp("chats")
    tokenizer = FAMILIES["qwen"]()
    config = hf.LlamaConfig(**{**zoo.GROUPED, "vocab_size": len(tokenizer), "max_position_embeddings": 256})
    torch.manual_seed(0)
    hf.AutoModelForCausalLM.from_config(config).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    drawn, answers = random.Random(0), [["prompt", "answer"]]
    with (folder / "chats.jsonl").open("w", encoding="utf-8") as file:
        for number in range(30):
            words = "".join(
                drawn.choices(["hello ", "there ", "one ", "two "], k=30 if number % 5 == 4 else number % 3)
            )
            turns = [("user", f"{words}{number}?"), ("assistant", f"{words}thank you")]
            answers.append([f"{words}{number}?", f"{words}thank you"])
            file.write(json.dumps({"messages": [{"role": role, "content": text} for role, text in turns]}) + "\n")
    (folder / "answers.csv").write_text("".join(",".join(row) + "\n" for row in answers))
    return folder


def spec(chats: Path, **changes: Any) -> Spec:
    fields: dict[str, Any] = {"method": "lora", "max_steps": 6, "batch_size": 8, "learning_rate": 0.01}
    fields |= {"model": str(chats / "model"), "data": str(chats / "chats.jsonl"), "max_length": 160}
    return Spec(**{**fields, **changes})


@pytest.mark.parametrize(
    "changes",
    [
        {"method": "lora"},
        {"method": "ntk-attention", "gradient_accumulation": 2},
        {"method": "lora", "gradient_checkpointing": True},
    ],
    ids=["lora", "accumulated", "checkpointed"],
)
def test_a_run_learns_the_same_in_fewer_tokens(chats: Path, tmp_path: Path, changes: dict[str, Any]) -> None:
    said: list[str] = []
    if "text" in changes:
        changes = {**changes, "data": str(chats / "answers.csv")}
    plain = inlay.tune(spec(chats, **changes), tmp_path, progress=False)
    packed = inlay.tune(spec(chats, **changes, pack=True), tmp_path, progress=False, say=said.append)
    assert plain.id != packed.id
    (told,) = [line for line in said if "packed:" in line]
    assert told.startswith("packed: in the first epoch ")
    now, before = (int(found) for found in re.findall(r"(\d+)% .*without packing (\d+)%", told)[0])
    assert now < 10 < before, told
    one, other = plain.history(), packed.history()
    assert [entry["step"] for entry in one] == [entry["step"] for entry in other]
    for before, after in zip(one, other, strict=True):
        for name in ("loss", "grad_norm"):
            if name in before:
                assert after[name] == pytest.approx(before[name], rel=2e-4)
    assert packed.metrics["test"]["loss"] == pytest.approx(plain.metrics["test"]["loss"], rel=1e-4)


def test_interrupted_it_goes_on_to_the_same_bits(chats: Path, tmp_path: Path) -> None:
    whole = inlay.tune(spec(chats, pack=True), tmp_path / "whole", progress=False)
    asked = 0

    def stop() -> bool:
        nonlocal asked
        asked += 1
        return asked > 3

    with pytest.raises(KeyboardInterrupt):
        inlay.tune(spec(chats, pack=True), tmp_path / "parts", progress=False, stop=stop)
    rest = inlay.tune(spec(chats, pack=True), tmp_path / "parts", progress=False)
    assert rest.record["resumed_from"]
    assert rest.history() == whole.history()


def test_what_has_nothing_to_pack_says_so(chats: Path, tmp_path: Path, review_spec: Spec) -> None:
    with pytest.raises(InlayError, match=r"is of kind 'classification'\. Leave pack"):
        inlay.tune(review_spec.with_(pack=True), tmp_path / "runs", progress=False)
    (tmp_path / "running.csv").write_text("text\n" + "".join(f"hello there {n}\n" for n in range(60)))
    running = spec(chats, pack=True, data=str(tmp_path / "running.csv"), kind="causal-lm")
    with pytest.raises(InlayError, match="running text, which fills its rows already"):
        inlay.tune(running, tmp_path / "runs", progress=False)
    for method in ("prompt", "prefix", "p-tuning"):
        with pytest.raises(InlayError, match=r"it cannot pack\. Leave pack.* as most do"):
            inlay.tune(spec(chats, method=method, pack=True), tmp_path / "runs", progress=False)
