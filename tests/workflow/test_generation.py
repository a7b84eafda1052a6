"""Texts continued in batches, each row behind a prompt of its own, and told piece by piece."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from inlay.errors import InlayError
from inlay.methods import attach
from inlay.workflow.generation import END, LENGTH, STOPPED, Continuation, Sampling, TextPieces, TooLong, Writer
from inlay.workflow.prompt_folders import look, mixes_rows, open_writer, put_in
from prompted import adapter, decoder

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
MANY = 64


def texts(count: int) -> list[str]:
    """Of unlike lengths."""
    return [" ".join(f"w{(7 * row + 3 * step) % 40}" for step in range(1 + row % 9)) for row in range(count)]


@pytest.fixture(scope="module", params=["llama", "gpt2"])
def many(request: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Writer, list[str | None]]:
    """A model with 64 prompts of unlike sizes; and a row without one."""
    place = tmp_path_factory.mktemp(request.param)
    model = decoder(place / "model", request.param)
    writer = open_writer(str(model))
    names: list[str | None] = [f"prompt_{number}" for number in range(MANY)]
    for number, name in enumerate(names):
        put_in(look(adapter(model, place / str(name), 1 + number % 11)), writer, str(name))
    return writer, [*names, None]


def test_64_prompts_in_one_batch_write_what_each_writes_alone(many: tuple[Writer, list[str | None]]) -> None:
    writer, names = many
    assert writer.mixes

    def begun(same: str | None = None, **how: Any) -> list[Continuation]:
        return [
            writer.begin(same or text, Sampling(9, seed=seed, **how), prompt=name)
            for seed, (text, name) in enumerate(zip(texts(len(names)), names, strict=True))
        ]

    for how in ({}, {"temperature": 1.2, "top_p": 0.9}):
        together, alone = begun(**how), begun(**how)
        writer.write(together)
        for row in alone:
            writer.write([row])
        assert [row.written for row in together] == [row.written for row in alone]
        assert {row.finish for row in together} <= {END, LENGTH}
    same = begun("w3 w5")
    writer.write(same)
    assert len({tuple(row.written) for row in same}) > 2, "prompts make a difference"


def test_alone_it_writes_what_transformers_generates(tmp_path: Path) -> None:
    model = decoder(tmp_path / "model")
    folder, ids = adapter(model, tmp_path / "a", 4), AutoTokenizer.from_pretrained(model)("w3 w5").input_ids
    writer = open_writer(str(model))
    put_in(look(folder), writer)
    plain = AutoModelForCausalLM.from_pretrained(model).eval()
    adapted = attach.restore(copy.deepcopy(plain), "compact-prefix", folder)
    for prompt, judge in ((None, plain), ("default", adapted)):
        row = writer.begin("w3 w5", Sampling(8), prompt=prompt)
        writer.write([row])
        expected = judge.generate(input_ids=torch.tensor([ids]), do_sample=False, max_new_tokens=8, pad_token_id=1)
        assert row.written == expected[0, len(ids) :].tolist()


@pytest.mark.parametrize("method", ["ntk-attention", "lora", "prompt", "prefix"])
def test_adapters_that_do_not_mix_run_one_at_a_time(method: str, tmp_path: Path) -> None:
    model = decoder(tmp_path / "model")
    writer = open_writer(str(model))
    found = look(adapter(model, tmp_path / "a", method=method, stands_for=None))
    assert found.method.name == method
    assert not mixes_rows(found.method)
    bare = writer.begin("w3 w5 w7", Sampling(8))
    writer.write([bare])
    put_in(found, writer)
    rows = [writer.begin(text, Sampling(8), prompt=name) for text in ("w3 w5 w7", "w9") for name in ("default", None)]
    writer.write(rows)
    assert rows[1].written == bare.written
    assert rows[0].written != bare.written
    alone = writer.begin("w3 w5 w7", Sampling(8), prompt="default")
    writer.write([alone])
    assert alone.written == rows[0].written


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma"])
def test_by_turns_from_a_cache_it_writes_the_same(family: str, tmp_path: Path) -> None:
    model = decoder(tmp_path / "model", family)
    writer = open_writer(str(model))
    put_in(look(adapter(model, tmp_path / "a")), writer)
    for prompt in ("default", None):
        whole, parts = (writer.begin("w3 w5 w8", Sampling(9), prompt=prompt) for _ in range(2))
        writer.write([whole])
        cache = None
        while not parts.done:
            cache = writer.go_on(parts, 2, cache)
        assert parts.written == whole.written
    before = writer.encode("w1 w2 w3 w4 w5 w6")
    kept = writer.remember(before)
    for _ in range(2):
        whole, parts = (writer.begin("w7 w9", Sampling(5), before=before) for _ in range(2))
        writer.write([whole])
        writer.go_on(parts, 5, copy.deepcopy(kept))
        assert parts.written == whole.written


def test_where_a_text_ends(tmp_path: Path) -> None:
    writer = open_writer(str(decoder(tmp_path / "model")))
    rows = [
        writer.begin(text, Sampling(3 + 27 * (seed % 2), temperature=2.0, seed=seed))
        for seed, text in enumerate(texts(40))
    ]
    writer.write(rows)
    for row in rows:
        ended = bool(writer.ends & set(row.written))
        assert (row.finish == END) == ended == (row.written[-1] in writer.ends)
        assert len(row.written) == row.sampling.max_new_tokens or ended
        assert "</s>" not in row.text
    assert {row.finish for row in rows} == {END, LENGTH}
    stopped = writer.begin("w3", Sampling(20))
    stopped.stop()
    writer.write([stopped])
    assert (stopped.finish, len(stopped.written)) == (STOPPED, 1)


def test_what_is_too_long_or_empty_is_said(tmp_path: Path) -> None:
    writer = open_writer(str(decoder(tmp_path / "model")))
    assert writer.context == 40
    assert writer.begin(" ".join(["w3"] * 36), Sampling(30)).sampling.max_new_tokens == 4
    with pytest.raises(TooLong, match=r"The text has 40 tokens, and .*model reads 40 in all"):
        writer.begin(" ".join(["w3"] * 40), Sampling(30))
    with pytest.raises(InlayError, match="needs a first token"):
        writer.begin("")
    for wrong in (
        {"max_new_tokens": 0},
        {"temperature": -1},
        {"temperature": float("nan")},
        {"top_p": 0},
        {"seed": -1},
    ):
        with pytest.raises(InlayError, match="give a"):
            Sampling(**wrong)


def test_seeds_and_shares(tmp_path: Path) -> None:
    writer = open_writer(str(decoder(tmp_path / "model")))

    def written(**how: Any) -> list[int]:
        row = writer.begin("w3 w5", Sampling(12, **how))
        writer.write([row])
        return row.written

    assert written(temperature=2.0, seed=1) == written(temperature=2.0, seed=1)
    assert len({tuple(written(temperature=2.0, seed=seed)) for seed in range(6)}) > 3
    assert written(temperature=2.0, top_p=1e-6, seed=1) == written(), "the likeliest alone is left"
    assert written(temperature=1e-3, seed=1) == written()


# ---- tokens as text


def bytes_tokenizer() -> PreTrainedTokenizerFast:
    """A token for every byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: number for number, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def words_tokenizer() -> PreTrainedTokenizerFast:
    """As SentencePiece has it: a blank is part of the word behind it, and the first one of a text is not shown."""
    words = ["▁The", "▁end", "▁of", "s", ".", "▁", "é", "<unk>"]
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")


@pytest.mark.parametrize("text", ["naïve café", "日本語 🙂🙃 ok", "plain", "a\n\n b"])
def test_pieces_are_whole_characters(text: str) -> None:
    tokenizer = bytes_tokenizer()
    pieces = TextPieces(tokenizer, tokenizer("Before: ").input_ids)
    told = [pieces.add(token) for token in tokenizer(text).input_ids]
    assert "".join(told) == text
    assert pieces.rest() == ""
    assert not any("\ufffd" in piece for piece in told)


def test_half_a_character_at_the_end_is_told_at_the_end() -> None:
    tokenizer = bytes_tokenizer()
    pieces = TextPieces(tokenizer, [])
    told = [pieces.add(token) for token in tokenizer("a🙂").input_ids[:-1]]
    assert "".join(told) == "a"
    assert set(pieces.rest()) == {"\ufffd"}


def test_a_first_word_keeps_its_blank_behind_another() -> None:
    tokenizer = words_tokenizer()
    the, end, of, plural = (tokenizer.convert_tokens_to_ids(word) for word in ("▁The", "▁end", "▁of", "s"))
    pieces = TextPieces(tokenizer, [the])
    assert [pieces.add(token) for token in (end, plural, of)] == [" end", "s", " of"]
    assert tokenizer.decode([end]) == "end", "by itself it has none"


def test_begun_again_nothing_is_told_twice() -> None:
    tokenizer = bytes_tokenizer()
    told: list[str] = []
    ids = tokenizer("hello you").input_ids
    row = Continuation([1], Sampling(9), lambda: TextPieces(tokenizer, []), frozenset(), tell=told.append)
    for token in ids[:5]:
        row.take(token)
    row.again()
    assert (row.text, row.written) == ("", [])
    for token in ids:
        row.take(token)
    assert "".join(told) == row.text == "hello you"
    row.again()
    with pytest.raises(RuntimeError, match="differently"):
        row.take(tokenizer("j").input_ids[0])
