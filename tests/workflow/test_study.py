"""Texts that stand behind a prompt: of each kind, the same for the same seed, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PrefixTuningConfig, get_peft_model

import inlay
import zoo
from checkpoints import WORDS, write_tokenizer
from inlay.errors import InlayError
from inlay.methods.prompts import Prompt, trained_prefix
from inlay.training.batches import Placement
from inlay.training.distil import Pair
from inlay.workflow.study import ANSWER, INSTRUCTIONS, KINDS, settle, texts_for

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
HERE = Placement(torch.device("cpu"), None, 4)
PROMPT = [5, 17, 9, 30, 41, 8, 23, 12, 6, 19, 33, 7, 14, 26, 39, 10, 45, 28]
LENGTH = 14
CHAT = (
    "{{ bos_token }}{% if messages[0].role != 'system' %}w1 w1 w1 {% endif %}"
    "{% for m in messages %}w2 {{ m.role }} {{ m.content }} </s> {% endfor %}"
    "{% if add_generation_prompt %}w2 assistant {% endif %}"
)


def make_pair(prompt: list[int] | Prompt = PROMPT, lead: tuple[int, ...] = (), model: Any = None) -> Pair:
    model = model or zoo.tiny("llama", "causal-lm")[0]
    settings: Any = {} if isinstance(prompt, Prompt) else {"prompt_ids": [*lead, *prompt]}
    settings = settings or {"prompt_length": 3}
    config = inlay.NTKAttentionConfig(start="text", seed=0, rank=2, task_type="CAUSAL_LM", **settings)
    source = prompt if isinstance(prompt, Prompt) else [*lead, *prompt]
    return Pair(get_peft_model(model, config).eval(), source, HERE, lead)


@pytest.fixture
def tokenizer(tmp_path: Path) -> Any:
    """Every word of the instructions is one that it does not know, and `w12` is token 17."""
    return write_tokenizer(tmp_path)


@pytest.fixture
def brief(monkeypatch: pytest.MonkeyPatch) -> tuple[str, ...]:
    """Instructions of few words, for models of 40 positions."""
    short = ("w30 w31", "w32 {passage}", "w33")
    monkeypatch.setattr("inlay.workflow.study.INSTRUCTIONS", short)
    monkeypatch.setattr("inlay.workflow.study.PASSAGE", 2)
    monkeypatch.setattr("inlay.workflow.study.ANSWER", 4)
    return short


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_seed_gives_the_same_texts(kind: str, tokenizer: Any, brief: Any) -> None:
    told: list[int] = []
    one, same, other = (texts_for(make_pair(), tokenizer, kind, 11, LENGTH, seed, told.append) for seed in (0, 0, 1))
    assert one == same != other
    assert len(one) == 11
    assert all(2 <= len(text) <= LENGTH for text in one)
    assert sum(told) == 3 * 11 * LENGTH


def test_own_ones_are_the_continuations_of_the_prompt(tokenizer: Any) -> None:
    pair = make_pair()
    assert texts_for(pair, tokenizer, "own", 6, 5, 3) == pair.sample(6, 5, 3)


@pytest.mark.parametrize("lead", [(), (0,)])
def test_pieces_are_windows_of_the_prompt_that_cover_it(lead: tuple[int, ...], tokenizer: Any) -> None:
    pair = make_pair(lead=lead)
    found = texts_for(pair, tokenizer, "prompt", 30, 5, 0)
    windows = [PROMPT[at : at + 5] for at in range(len(PROMPT) - 4)]
    assert all(text in windows for text in found)
    assert {tuple(text) for text in found} == {tuple(window) for window in windows}
    assert found != sorted(found, key=windows.index), "in no order"
    assert texts_for(pair, tokenizer, "prompt", 3, 100, 0) == [PROMPT] * 3


@pytest.mark.parametrize("chat", [False, True])
def test_questions_are_turns_about_the_prompt_with_an_answer(chat: bool, tokenizer: Any, brief: Any) -> None:
    tokenizer.chat_template = CHAT if chat else None
    pair = make_pair(lead=(0,))
    found = texts_for(pair, tokenizer, "questions", 9, LENGTH, 0)
    unknown, ask = WORDS.index("<unk>"), {n: WORDS.index(f"w{n}") for n in (2, 30, 31, 32, 33)}
    turn = [ask[2], unknown] if chat else []  # neither the token of beginning nor w1, the system's prompt
    answer = [WORDS.index("</s>"), ask[2], unknown] if chat else []
    pieces = [PROMPT[at : at + 2] for at in range(len(PROMPT) - 1)]
    for number, text in enumerate(found):
        about = text[len(turn) + 1 : len(turn) + 3]
        asked = ([ask[30], ask[31]], [ask[32], *about], [ask[33]])[number % 3]
        assert number % 3 != 1 or about in pieces
        assert text[: len(turn) + len(asked) + len(answer)] == turn + asked + answer
    assert len({tuple(text[len(turn) + 1 :][:2]) for text in found[1::3]}) > 1, "about several passages"


def test_an_answer_ends_where_the_model_ends_it(tokenizer: Any, brief: Any) -> None:
    def texts(ends: list[int] | None) -> list[list[int]]:
        model: Any = zoo.tiny("llama", "causal-lm")[0]
        with torch.no_grad():  # two words that are drawn often
            model.lm_head.weight[[zoo.EOS, 20]] = 0
        if ends is not None:
            model.generation_config.eos_token_id = ends
        return texts_for(make_pair(model=model), tokenizer, "questions", 60, LENGTH, 0)

    for ends in (None, [zoo.EOS, 20]):
        found = texts(ends)
        assert max(map(len, found)) == LENGTH
        assert {text[-1] for text in found if len(text) < LENGTH} == set(ends or [zoo.EOS])
        assert not any(end in text[:-1] for text in found for end in ends or [zoo.EOS])


def test_a_mixture_has_equal_parts_in_turn(tokenizer: Any, brief: Any) -> None:
    pair = make_pair()
    found = texts_for(pair, tokenizer, "mixed", 11, LENGTH, 0)
    for number, (kind, share) in enumerate((("own", 4), ("prompt", 4), ("questions", 3))):
        assert found[number::3] == texts_for(pair, tokenizer, kind, share, LENGTH, 0)
    assert len(texts_for(pair, tokenizer, "mixed", 1, LENGTH, 0)) == 1


def test_auto_is_a_mixture_where_there_is_room(tokenizer: Any, brief: Any) -> None:
    pair = make_pair()
    for kind, length in (("mixed", LENGTH), ("own", 5)):
        assert settle("auto", pair, tokenizer, 11, length, 0) == kind
        assert texts_for(pair, tokenizer, "auto", 11, length, 0) == texts_for(pair, tokenizer, kind, 11, length, 0)
    assert settle("own", pair, tokenizer, 11, LENGTH, 0) == "own"


def test_auto_looks_at_the_questions_that_a_mixture_asks(
    tokenizer: Any, brief: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fewer questions are about other passages, which may be longer."""
    monkeypatch.setattr(
        "inlay.workflow.study._questions", lambda pair, tokenizer, count, seed: [[9] * (8 if count == 3 else 4)] * count
    )
    assert settle("auto", make_pair(), tokenizer, 11, 10, 0) == "own"
    assert settle("auto", make_pair(), tokenizer, 11, 12, 0) == "mixed"


def test_the_instructions_are_whole() -> None:
    assert len(set(INSTRUCTIONS)) == len(INSTRUCTIONS)
    for instruction in INSTRUCTIONS:
        assert instruction.count("{") == instruction.count("{passage}") <= 1
        assert "text above" in instruction


def test_what_cannot_be_is_refused(tokenizer: Any) -> None:
    def make(kind: str, pair: Callable[[], Pair] = make_pair, length: int = LENGTH) -> None:
        texts_for(pair(), tokenizer, kind, 6, length, 0)

    with pytest.raises(InlayError, match=r"kind of texts 'answers'.*mixed, own, prompt, questions"):
        make("answers")
    with pytest.raises(InlayError, match=rf"length=14 .*no room for questions.*and {ANSWER} of"):
        make("questions")
    for kind in ("prompt", "questions", "mixed"):
        with pytest.raises(InlayError, match=rf"texts='{kind}' are made of the prompt's own words.* 1 tokens"):
            make(kind, lambda: make_pair([7], (0,)))

    def of_a_prefix() -> Pair:
        model = zoo.tiny("llama", "causal-lm")[0]
        tuned = get_peft_model(model, PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3))
        return make_pair(trained_prefix(tuned), model=tuned.get_base_model())

    with pytest.raises(InlayError, match="there are 0 tokens of them: a trained prefix has none"):
        make("prompt", of_a_prefix)
