"""Conversations from the file to the answer: trained on, scored, predicted, with the template of training."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

import inlay
from chat_templates import FAMILIES
from inlay import InlayError, Spec
from inlay.records.store import Run
from inlay.workflow.notes import silent

Typed = Callable[..., tuple[int, str, str]]


def turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def checkpoint(folder: Path, family: str = "llama") -> Path:
    """A small Llama with a tokenizer of its own, whose turns end in another token than a text does."""
    tokenizer = FAMILIES[family]()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def chats(path: Path, count: int = 48) -> Path:
    rows = []
    for i in range(count):
        asked = [turn("user", f"what is {i}?"), turn("assistant", "gold")]
        rows.append({"id": i, "messages": [*asked, turn("user", "thank you again"), turn("assistant", "red")]})
    rows[5]["messages"] = rows[5]["messages"][:1]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("chats")
    checkpoint(folder / "model")
    chats(folder / "chats.jsonl")
    return folder


@pytest.fixture(scope="module")
def spec(folder: Path) -> Spec:
    how: dict[str, Any] = {"max_steps": 60, "batch_size": 8, "learning_rate": 0.005, "max_length": 256}
    return Spec(model=str(folder / "model"), data=str(folder / "chats.jsonl"), method="full", **how)


@pytest.fixture(scope="module")
def said() -> list[str]:
    return []


@pytest.fixture(scope="module")
def run(spec: Spec, folder: Path, said: list[str]) -> Run:
    return inlay.tune(spec, folder / "runs", progress=False, say=said.append)


def test_a_run_learns_the_answers_and_stops_where_a_turn_ends(run: Run, said: list[str]) -> None:
    assert "chats.jsonl: conversations in `messages`: 47 of 48 rows; left out: 1 with no answer (row 6)" in said
    assert run.metrics["test"]["perplexity"] < 1.5
    loaded = inlay.load(run)
    found = loaded.predict([[turn("user", "what is 7?")], [turn("user", "what is 81?")]])
    assert [answer["text"] for answer in found] == ["gold", "gold"], "and nothing behind it"
    talk = [turn("user", "what is 5?"), turn("assistant", "gold"), turn("user", "thank you again")]
    assert loaded.predict([{"id": "x", "messages": talk}]) == [{"id": "x", "messages": talk, "text": "red"}]
    assert loaded.predict(["what is 3?"])[0]["text"] == "gold"


@pytest.mark.parametrize("method", ["full", "lora"])
def test_the_code_in_the_card_asks_in_the_template_of_training(
    method: str, spec: Spec, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pasted as it is: it renders the question as in training, and stops where a turn ends."""
    bare = checkpoint(tmp_path / "bare", "zephyr")
    template = "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}{{ eos_token }}{% endfor %}"
    template += "{% if add_generation_prompt %}[assistant] {% endif %}"
    how: dict[str, Any] = {"model": str(bare), "template": template, "method": method}
    run = inlay.tune(spec.with_(**how), tmp_path / "runs", progress=False, say=silent)
    (code,) = re.findall(r"```python\n(.*?)```", (run.adapter / "README.md").read_text(), re.DOTALL)
    assert AutoTokenizer.from_pretrained(run.adapter).chat_template == template
    names: dict[str, Any] = {}
    monkeypatch.chdir(tmp_path)
    exec(code.replace("this/folder", str(run.adapter)), names)
    asked = [turn("user", "What can you tell me?")]
    (wanted,) = inlay.load(run).predict([asked])
    assert names["messages"] == asked
    assert names["answer"] == wanted["text"]
    assert names["inputs"]["input_ids"].shape[1] > len(inlay.load(run).processor("What can you tell me?")["input_ids"])


def test_a_finished_run_is_found(run: Run, spec: Spec, folder: Path) -> None:
    lines: list[str] = []
    assert inlay.tune(spec, folder / "runs", progress=False, say=lines.append).id == run.id
    assert lines == [f"already done: {run.id}"]


def test_perplexity_is_that_of_what_the_assistant_writes(run: Run, folder: Path) -> None:
    """Against a plain float64 computation, token by token, of what stands behind each prompt for a generation."""
    talk = [turn("user", "red 5?"), turn("assistant", "red"), turn("user", "and gold?"), turn("assistant", "gold one")]
    loaded = inlay.load(run)
    tokenizer = loaded.processor
    losses: list[float] = []
    for last in (1, 3):
        schema = run.record["task"]["schema"]
        source = schema["chat_template"].replace("strftime_now('%d %b %Y')", "'26 Jul 2024'")
        how: dict[str, Any] = {"chat_template": source, "tokenize": False}
        before = tokenizer.apply_chat_template(talk[:last], add_generation_prompt=True, **how)
        whole = tokenizer.apply_chat_template(talk[: last + 1], **how)
        ids = tokenizer(whole, add_special_tokens=False)["input_ids"]
        first = len(tokenizer(before, add_special_tokens=False)["input_ids"])
        with torch.no_grad():
            logits = loaded.model(torch.tensor([ids])).logits[0].double()
        chances = logits.log_softmax(-1)
        losses += [-float(chances[place - 1, ids[place]]) for place in range(first, len(ids))]
    found = loaded.evaluate([{"messages": talk}])
    assert found.examples == 1
    assert found.metrics["loss"] == pytest.approx(np.mean(losses), rel=1e-4)
    assert found.metrics["perplexity"] == pytest.approx(np.exp(np.mean(losses)), rel=1e-4)


def test_the_template_of_training_stays(run: Run, folder: Path, tmp_path: Path, spec: Spec) -> None:
    """Where the tokenizer of the base model gets another template, a run goes on with its own."""
    expected = inlay.load(run).predict(["blue 9?"])
    moved = tmp_path / "model"
    moved.mkdir()
    for file in (folder / "model").iterdir():
        (moved / file.name).write_bytes(file.read_bytes())
    tokenizer = AutoTokenizer.from_pretrained(moved)
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    tokenizer.save_pretrained(moved)
    assert inlay.load(run, model=str(moved)).predict(["blue 9?"]) == expected
    new = inlay.tune(spec.with_(model=str(moved), max_steps=1), tmp_path / "runs", progress=False, say=silent)
    assert new.record["task"]["schema"]["chat_template"] == tokenizer.chat_template


def test_a_template_can_be_given(folder: Path, tmp_path: Path, spec: Spec) -> None:
    bare = checkpoint(tmp_path / "bare", "zephyr")
    tokenizer = AutoTokenizer.from_pretrained(bare)
    source, tokenizer.chat_template = tokenizer.chat_template, None
    (bare / "chat_template.jinja").unlink()
    tokenizer.save_pretrained(bare)
    without = spec.with_(model=str(bare), max_steps=2, method="lora")
    with pytest.raises(InlayError, match=r"no chat template.*embedded:smollm2.*--template.*--text prompt"):
        inlay.tune(without, tmp_path / "runs", progress=False, say=silent)
    (tmp_path / "chat.jinja").write_text(source)
    run = inlay.tune(
        without.with_(template=str(tmp_path / "chat.jinja")), tmp_path / "runs", progress=False, say=silent
    )
    (tmp_path / "chat.jinja").unlink()
    assert "text" in inlay.load(run).predict(["hello"])[0]


def test_on_the_command_line(typed: Typed, run: Run, tmp_path: Path) -> None:
    rows = [{"id": "a", "messages": [turn("user", "what is 2?")]}, {"id": "b", "messages": "what is 1?"}]
    (tmp_path / "new.jsonl").write_text("\n".join(map(json.dumps, rows)))
    status, out, err = typed("predict", "--run", run.folder, "--input", tmp_path / "new.jsonl")
    assert status == 0, err
    assert [json.loads(line)["text"] for line in out.splitlines()] == ["gold", "gold"]
    status, out, err = typed("evaluate", "--run", run.folder, "--data", chats(tmp_path / "more.jsonl", 8))
    assert status == 0, err
    assert "7 of 8 rows" in err
    (tmp_path / "bad.jsonl").write_text(json.dumps({"messages": [turn("assistant", "red")]}))
    status, _, err = typed("predict", "--run", run.folder, "--input", tmp_path / "bad.jsonl")
    assert status == 2
    assert "row 1 has no question at its end" in " ".join(err.split())


def test_generate_and_chat_use_the_template_of_training(run: Run, typed: Typed, tmp_path: Path) -> None:
    """Also where the tokenizer has another by now, and the ends of its turns."""
    from inlay.workflow.chat import Chat
    from inlay.workflow.generate import as_prompts, begin, write
    from inlay.workflow.generation import Sampling
    from inlay.workflow.speakers import open_speaker

    asked = "what is 7?"
    wanted = inlay.load(run).predict([asked])[0]["text"]
    speaker = open_speaker(run.folder)
    prompts = as_prompts(speaker, [asked])
    found = list(write(speaker, prompts, begin(speaker, prompts, Sampling(8))))
    assert found[0]["text"].strip() == wanted.strip() == "gold"
    assert found[0]["finish"] == "end"
    chat = Chat(speaker)
    told: list[str] = []
    for line, answer in ((asked, "gold"), ("thank you again", "red")):
        assert chat.ask(line, Sampling(8), lambda _, piece: told.append(piece))[0].text.strip() == answer
    assert "".join(told).replace(" ", "") == "goldred"
    (tmp_path / "one.jsonl").write_text(json.dumps({"messages": [turn("user", asked)]}))
    status, out, err = typed("generate", "--run", run.folder, "--input", tmp_path / "one.jsonl", "--max-tokens", 8)
    assert status == 0, err
    assert json.loads(out.splitlines()[-1])["text"].strip() == "gold"
    (tmp_path / "plain.jsonl").write_text(json.dumps({"id": 3, "prompt": asked}))
    status, out, err = typed("generate", "--run", run.folder, "--input", tmp_path / "plain.jsonl", "--max-tokens", 8)
    assert status == 0, err
    assert {**json.loads(out), "text": json.loads(out)["text"].strip()}.items() >= {"id": 3, "text": "gold"}.items()
