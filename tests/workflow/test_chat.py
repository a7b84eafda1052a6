"""A conversation behind a compressed prompt, alone and beside the prompt itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from inlay.errors import InlayError
from inlay.methods import attach
from inlay.workflow.chat import COMPRESSED, FULL, Chat, behind_system, open_chat
from inlay.workflow.generation import Sampling
from prompted import adapter, decoder

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
PROMPT = "w1 w2 w3 w4 w5 w6 w7 w8"
TEMPLATE = (
    "{% if messages[0]['role'] != 'system' %}<s> w0 w0 {% endif %}"
    "{% for m in messages %}w2{{ m['role'][0] | replace('u', '0') | replace('a', '1') | replace('s', '2') }} "
    "{{ m['content'] }} w30 {% endfor %}{% if add_generation_prompt %}w21 {% endif %}"
)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return decoder(tmp_path / "model")


def opened(model: Path, tmp_path: Path, *, full: bool = True, method: str = "compact-prefix", **how: Any) -> Chat:
    (tmp_path / "prompt.txt").write_text(PROMPT)
    folder = adapter(model, tmp_path / "adapter", 4, method=method)
    return open_chat(folder, model=str(model), prompt=tmp_path / "prompt.txt" if full else None, **how)


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("method", ["compact-prefix", "ntk-attention", "lora", "prefix"])
def test_both_sides_say_what_transformers_generates(method: str, together: bool, model: Path, tmp_path: Path) -> None:
    chat = opened(model, tmp_path, method=method)
    told: dict[int, str] = {0: "", 1: ""}
    order: list[int] = []

    def tell(side: int, piece: str) -> None:
        told[side] += piece
        order.append(side)

    found = chat.ask("w9 w3", Sampling(12), tell, together=together)
    tokenizer, plain = AutoTokenizer.from_pretrained(model), AutoModelForCausalLM.from_pretrained(model).eval()
    adapted = attach.restore(AutoModelForCausalLM.from_pretrained(model), method, tmp_path / "adapter")

    def written(judge: Any, text: str) -> str:
        ids = tokenizer(text, return_tensors="pt").input_ids
        made = judge.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=12, pad_token_id=1
        )
        return str(tokenizer.decode(made[0, ids.shape[1] :], skip_special_tokens=True))

    assert [each.side for each in found] == [COMPRESSED, FULL]
    assert [each.text.strip() for each in found] == [
        written(adapted, "w9 w3"),
        written(plain, f"{PROMPT} w9 w3"),
    ]
    assert [told[0], told[1]] == [each.text for each in found]
    assert all(each.seconds > 0 for each in found)
    if not together:
        assert order == sorted(order)
    elif method != "prefix" and min(each.tokens for each in found) > 8:
        assert order != sorted(order), "by turns"


def test_a_conversation_goes_on_until_it_is_forgotten(model: Path, tmp_path: Path) -> None:
    chat = opened(model, tmp_path)

    def said(line: str) -> list[str]:
        return [each.text for each in chat.ask(line, Sampling(4), lambda side, piece: None)]

    first = said("w9")
    begun = [chat._text(side, "w7") for side in chat.sides]
    assert begun == [f"w9{answer}\nw7" for answer in first], "each side has its own answers before it"
    said("w7")
    chat.forget()
    assert said("w9") == first, "nor is the cache of the prompt changed"
    with pytest.raises(InlayError, match="reads 40 in all"):
        said(" ".join(["w3"] * 50))
    assert [len(side.history) for side in chat.sides] == [1, 1]


def test_one_side_alone(model: Path, tmp_path: Path) -> None:
    chat = opened(model, tmp_path, full=False)
    (found,) = chat.ask("w9 w3", Sampling(6, temperature=1.5, seed=4), lambda side, piece: None)
    (again,) = chat.ask("w9 w3", Sampling(6, temperature=1.5, seed=4), lambda side, piece: None)
    assert found.side == again.side == COMPRESSED
    assert chat.speaker.stands_for is not None
    assert chat.speaker.stands_for.prompt_tokens == 12


def test_a_chat_template(model: Path, tmp_path: Path) -> None:
    with pytest.raises(InlayError, match="has no chat template"):
        opened(model, tmp_path / "a", template=True) if (tmp_path / "a").mkdir() is None else None
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(model)
    (tmp_path / "b").mkdir()
    chat = opened(model, tmp_path / "b", template=True)
    chat.sides[0].history.append(("w5", "w6"))
    text = chat._text(chat.sides[0], "w7")
    assert text.split() == ["w20", "w5", "w30", "w21", "w6", "w30", "w20", "w7", "w30", "w21"]
    assert len(chat.ask("w7", Sampling(4), lambda side, piece: None)) == 2


def test_templates_without_a_place_for_a_system_message() -> None:
    class Refusing:
        """As Gemma's: messages of a system are refused; the text begins with its own token of beginning."""

        bos_token = "<s>"

        def apply_chat_template(self, messages: Any, tokenize: bool, add_generation_prompt: bool) -> str:
            if any(message["role"] == "system" for message in messages):
                raise ValueError("System role not supported")
            if any(message["role"] == "nobody" for message in messages):
                raise ValueError("Conversation roles must alternate")
            return "<s>" + "".join(f"[{m['role']}]{m['content']}" for m in messages) + "[model]" * add_generation_prompt

    assert behind_system(Refusing(), [{"role": "user", "content": "hi"}]) == "[user]hi[model]"
    with pytest.raises(InlayError, match="refuses this conversation: Conversation roles"):
        behind_system(Refusing(), [{"role": "nobody", "content": "hi"}])


def test_what_is_wrong_is_said_before_any_answer(model: Path, tmp_path: Path) -> None:
    folder = adapter(model, tmp_path / "adapter")
    other = decoder(tmp_path / "other", seed=1)
    (tmp_path / "empty.txt").write_text(" \n")
    (tmp_path / "long.txt").write_text(" ".join(["w3"] * 60))
    (tmp_path / "bytes.txt").write_bytes(b"\xff\xfe\x00")
    for given, says in (
        ({"model": str(other)}, "belongs to another base model"),
        ({"prompt": tmp_path / "empty.txt"}, "prompt is empty"),
        ({"prompt": tmp_path / "long.txt"}, "60 tokens and the texts behind it 1"),
        ({"prompt": tmp_path / "bytes.txt"}, "not text in UTF-8"),
        ({"prompt": tmp_path / "lonng.txt"}, "cannot be read: No such file or directory"),
    ):
        with pytest.raises(InlayError, match=says):
            open_chat(folder, **({"model": str(model)} | given))  # type: ignore[arg-type]
