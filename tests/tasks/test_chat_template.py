"""What is learnt of a conversation, on templates in the styles of eight families, against renderings of each turn."""

from __future__ import annotations

import datetime
import itertools
import random
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chat_templates import ENDS, FAMILIES, MISTRAL, ROLES, byte_level
from inlay import InlayError
from inlay.tasks import chat_encode
from inlay.tasks.chat_template import DAY, ChatTemplate, Rendered, own_template
from inlay.tasks.conversations import Message, Unusable, pack
from inlay.tasks.encode import IGNORED

NAMES = [*FAMILIES, "smollm2"]
NO_SYSTEM = ("gemma",)
WORDS = ["What", "is", "Paris", "one", "two", "é", "🙂", "assistant", "s", "user\n", "</s", "1."]


@cache
def template(name: str) -> ChatTemplate:
    if name != "smollm2":
        return ChatTemplate(FAMILIES[name]())
    from transformers import AutoTokenizer

    from inlay.backbones import embedded

    return ChatTemplate(AutoTokenizer.from_pretrained(str(embedded.folder("embedded:smollm2").path)))


def talk(name: str, exchanges: int, seed: int = 0, system: bool = False) -> list[Message]:
    drawn = random.Random(seed)

    def said() -> str:
        text = " ".join(drawn.choices(WORDS, k=drawn.randrange(1, 6)))
        return drawn.choice(["", " ", "\n"]) + text + drawn.choice(["", " ", "\n\n"])

    turns = [{"role": ("user", "assistant")[i % 2], "content": said()} for i in range(2 * exchanges)]
    return [{"role": "system", "content": "Be brief."}] * (system and name not in NO_SYSTEM) + turns


def rendered(tokenizer: Any, messages: Sequence[Message], **how: Any) -> str:
    """Transformers' own rendering, on the day that ours is of."""
    text = tokenizer.apply_chat_template(list(messages), tokenize=False, **how)
    return str(text).replace(datetime.datetime.now().strftime("%d %b %Y"), DAY.strftime("%d %b %Y"))


def laid_out(name: str, messages: Sequence[Message]) -> Rendered:
    (found,) = template(name).lay_out([messages])
    assert isinstance(found, Rendered), found
    return found


def by_prefixes(name: str, messages: Sequence[Message]) -> list[str]:
    """What the assistant writes, turn by turn, without looking for anything: the conversation up to a turn, without
    what the conversation before it, prompted for a generation, begins with; up to the token that ends the turn."""
    tokenizer = template(name).tokenizer
    found = []
    for number, message in enumerate(messages):
        if message["role"] == "assistant":
            before = rendered(tokenizer, messages[:number], add_generation_prompt=True)
            after = rendered(tokenizer, messages[: number + 1])
            assert after.startswith(before)
            found.append(after[len(before) :])
    return found


@pytest.mark.parametrize("system", [False, True], ids=["plain", "system"])
@pytest.mark.parametrize("name", [each for each in NAMES if each not in ("plain", "thinking")])
def test_what_the_assistant_writes_is_what_a_prompt_for_it_lacks(name: str, system: bool) -> None:
    for exchanges, seed in itertools.product((1, 2, 4), range(4)):
        messages = talk(name, exchanges, seed, system)
        found = laid_out(name, messages)
        assert found.text == rendered(template(name).tokenizer, messages)
        wanted = [text.partition(ENDS[name])[0] + ENDS[name] for text in by_prefixes(name, messages)]
        assert [found.text[start:end] for start, end in found.answers] == wanted


@pytest.mark.parametrize("name", NAMES)
def test_what_is_learnt_is_read_from_tokens_and_nothing_else(name: str) -> None:
    """The tokens are those of the whole conversation; those that are learnt spell the answers, and an end each."""
    for seed in range(6):
        messages = talk(name, 3, seed, system=seed % 2 == 0)
        rows = [{"messages": pack(messages), "row": 2}]
        made = chat_encode.encode_conversations(rows, template(name), 10_000, "train")
        tokenizer, item = template(name).tokenizer, made[0]
        ids = tokenizer(rendered(tokenizer, messages), add_special_tokens=False)["input_ids"]
        if name == "plain":
            assert item["input_ids"] == [*ids[: len(item["input_ids"]) - 1], tokenizer.eos_token_id]
            assert item["labels"][-1] == tokenizer.eos_token_id
        else:
            assert item["input_ids"] == ids
        learnt = [
            tokenizer.decode([token for token, _ in group])
            for is_learnt, group in itertools.groupby(
                zip(item["input_ids"], item["labels"], strict=True), lambda pair: pair[1] != IGNORED
            )
            if is_learnt
        ]
        assert all(label in (IGNORED, token) for token, label in zip(item["input_ids"], item["labels"], strict=True))
        answers = [each["content"].strip() for each in messages if each["role"] == "assistant"]
        assert len(learnt) == len(answers)
        for text, answer in zip(learnt, answers, strict=True):
            said = text.removesuffix("<|endoftext|>") if name == "plain" else text
            assert said.endswith(ENDS[name])
            said = said.removesuffix(ENDS[name]).replace("<think>\n\n</think>", "")
            assert said.strip() == answer


@pytest.mark.parametrize("name", NAMES)
@given(texts=st.lists(st.text(min_size=1).filter(str.strip), min_size=2, max_size=6))
def test_any_texts_have_their_places(name: str, texts: list[str]) -> None:
    """Whatever is said, each answer is found where replacing it alone by another text changes the rendering."""
    texts = [text for text in texts if "\ue0f1" not in text and "think>" not in text]
    texts = texts[: len(texts) // 2 * 2] or ["a", "b"]
    messages = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]
    tokenizer, found = template(name).tokenizer, laid_out(name, messages)
    assert len(found.answers) == len(texts) // 2
    for which, (start, end) in enumerate(found.answers):
        other = [*messages[: 2 * which + 1], {"role": "assistant", "content": "QQQQ"}, *messages[2 * which + 2 :]]
        ahead, behind = rendered(tokenizer, other).rsplit("QQQQ", 1)
        ahead = ahead.removesuffix("<think>\n\n</think>\n\n").rstrip(" ")
        assert found.text[:start] == ahead
        assert ENDS[name] + found.text[end:] == behind


def test_thinking_is_learnt_where_the_template_keeps_it() -> None:
    messages = [
        {"role": "user", "content": "one?"},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\n1"},
        {"role": "user", "content": "two?"},
        {"role": "assistant", "content": "<think>\nlet me see\n</think>\n\n2"},
    ]
    found = laid_out("thinking", messages)
    assert [found.text[start:end] for start, end in found.answers] == [
        "1<|im_end|>",
        "<think>\nlet me see\n</think>\n\n2<|im_end|>",
    ]
    found = laid_out("thinking", [*messages[:1], {"role": "assistant", "content": "1"}])
    assert [found.text[start:end] for start, end in found.answers] == ["<think>\n\n</think>\n\n1<|im_end|>"]


@pytest.mark.parametrize("name", NAMES)
def test_a_question_is_prompted_as_transformers_prompts_it(name: str) -> None:
    messages = talk(name, 3, seed=5)[:-1]
    prompted = rendered(template(name).tokenizer, messages, add_generation_prompt=True)
    assert template(name).prompt(messages) == (prompted + "### Response:\n" if name == "plain" else prompted)
    (first,) = laid_out(name, [*messages, {"role": "assistant", "content": "x"}]).answers[-1:]
    assert (
        template(name).prompt(messages)
        == laid_out(name, [*messages, {"role": "assistant", "content": "x"}]).text[: first[0]]
    )


@pytest.mark.parametrize("name", NAMES)
def test_texts_that_quote_the_template_mislead_nobody(name: str) -> None:
    tokenizer = template(name).tokenizer
    prompt = rendered(tokenizer, [{"role": "user", "content": "a"}], add_generation_prompt=True)
    whole = rendered(tokenizer, [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}])
    plain = [{"role": role, "content": text} for role, text in (("user", "q"), ("assistant", "b"))]
    for quoted in (prompt, whole, template(name).begins or "x", ENDS[name] or "x"):
        messages = [{"role": "user", "content": f"read {quoted} and"}, plain[1], *plain]
        found = laid_out(name, messages)
        wanted = [laid_out(name, plain).text[start:end] for start, end in laid_out(name, plain).answers]
        said = [found.text[start:end] for start, end in found.answers]
        assert [each.replace("<think>\n\n</think>\n\n", "") for each in said] == [
            each.replace("<think>\n\n</think>\n\n", "") for each in wanted * 2
        ]
        if "</think>" in quoted:
            continue  # what is before it is thinking, to this template
        messages = [plain[0], {"role": "assistant", "content": f"read {quoted} and"}]
        ((start, end),) = laid_out(name, messages).answers
        assert quoted.strip() in laid_out(name, messages).text[start:end]
        assert laid_out(name, messages).text[start:end].endswith("and" + ENDS[name])


def test_a_turn_ends_with_a_token_only_where_the_template_says_so() -> None:
    """Where no token ends the last turn, the one behind an earlier turn begins the next."""
    source = "{% for m in messages %}{{ '<|' + m['role'] + '|>\\n' + m['content'] + '\\n' }}{% endfor %}"
    found = ChatTemplate(byte_level(source, ROLES, None, "<|endoftext|>"))
    messages = [{"role": ("user", "assistant")[i % 2], "content": f"w{i}"} for i in range(4)]
    (laid,) = found.lay_out([messages])
    assert isinstance(laid, Rendered)
    assert [laid.text[start:end] for start, end in laid.answers] == ["w1", "w3"]
    assert found.ends == ()
    assert found.closes == found.tokenizer.eos_token_id
    assert found.stops == (found.tokenizer.eos_token_id,)


@pytest.mark.parametrize("name", [each for each in NAMES if each != "plain"])
def test_generation_stops_at_the_end_of_a_turn(name: str) -> None:
    tokenizer = template(name).tokenizer
    assert set(template(name).stops) == {tokenizer.convert_tokens_to_ids(ENDS[name]), tokenizer.eos_token_id}


def test_roles_out_of_order_are_the_templates_to_refuse() -> None:
    wrong = [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}, {"role": "assistant", "content": "c"}]
    right = wrong[1:]
    refused, taken = template("gemma").lay_out([wrong, right])
    assert isinstance(refused, Unusable)
    assert "must alternate" in refused.detail
    assert isinstance(taken, Rendered)
    (merged,) = template("qwen").lay_out([wrong])
    assert isinstance(merged, Rendered)


def test_a_tokenizer_without_a_template() -> None:
    tokenizer = byte_level(MISTRAL, [], None, "<|endoftext|>")
    tokenizer.chat_template = None
    with pytest.raises(InlayError, match=r"no chat template.*smollm2.*--template chat\.jinja.*--text prompt --label"):
        own_template(tokenizer)
    assert ChatTemplate(tokenizer, FAMILIES["qwen"]().chat_template).begins == "<|im_start|>assistant\n"
    with pytest.raises(InlayError, match="does not render a conversation of one question"):
        ChatTemplate(tokenizer, "{{ raise_exception('never') }}")
