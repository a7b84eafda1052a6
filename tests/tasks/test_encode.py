"""Encoding: lengths, cutting, alignment of words, answers and blocks, on tokenizers of three manners."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, normalizers, trainers
from transformers import PreTrainedTokenizerFast

from inlay.errors import InlayError
from inlay.tasks import encode, prepare
from inlay.tasks.encode import IGNORED, Encoded, Ragged, TextCollator


@pytest.fixture(params=["wordpiece", "byte_level", "with_start"])
def tokenizer(request: pytest.FixtureRequest) -> Any:
    return request.getfixturevalue(request.param)


# ---------------------------------------------------------------------------------------------------------- lengths


def test_the_limit_is_the_smaller_of_what_tokenizer_and_config_say(wordpiece: Any, with_start: Any) -> None:
    assert encode.length_limit(wordpiece) == 64
    assert encode.length_limit(wordpiece, SimpleNamespace(model_type="bert", max_position_embeddings=40)) == 40
    assert encode.length_limit(with_start) is None
    assert encode.length_limit(with_start, SimpleNamespace(model_type="gpt2", n_positions=32)) == 32
    roberta = SimpleNamespace(model_type="roberta", max_position_embeddings=514, pad_token_id=1)
    assert encode.length_limit(with_start, roberta) == 512
    assert encode.length_limit(with_start, SimpleNamespace(model_type="t5", n_positions=512)) is None


# ------------------------------------------------------------------------------------------------------------ texts


def test_a_pair_is_what_the_tokenizer_makes_of_a_pair(wordpiece: Any) -> None:
    columns, cut = encode.encode_texts([{"a": "the cat", "b": "the dog"}], "{a}{sep}{b}", wordpiece, 64)
    assert cut == 0
    assert columns == {key: [value] for key, value in wordpiece("the cat", "the dog").items()}
    assert set(columns["token_type_ids"][0]) == {0, 1}


def test_long_texts_are_cut_and_counted(tokenizer: Any) -> None:
    rows = [{"a": "the cat " * 50}, {"a": "the cat"}]
    columns, cut = encode.encode_texts(rows, "{a}", tokenizer, 20)
    assert cut == 1
    assert [len(ids) for ids in columns["input_ids"]] == [20, len(tokenizer("the cat")["input_ids"])]


def test_an_empty_text_has_a_token(tokenizer: Any) -> None:
    columns, _ = encode.encode_texts([{"a": ""}, {"a": "the"}], "{a}", tokenizer, 20)
    assert all(len(ids) >= 1 for ids in columns["input_ids"])
    assert all(sum(mask) >= 1 for mask in columns["attention_mask"])
    assert {len(values) for values in columns.values()} == {2}


def test_the_mask_survives_cutting(wordpiece: Any) -> None:
    columns, cut = encode.encode_texts([{"a": "the cat " * 50}], "{a} it was {mask} .", wordpiece, 20)
    (ids,) = columns["input_ids"]
    assert cut == 1
    assert len(ids) <= 20
    assert ids.count(wordpiece.mask_token_id) == 1


def test_more_rows_than_a_batch_keep_their_order(wordpiece: Any) -> None:
    rows = [{"a": "the " * (1 + i % 5)} for i in range(2500)]
    columns, _ = encode.encode_texts(rows, "{a}", wordpiece, 64)
    assert [len(ids) - 2 for ids in columns["input_ids"]] == [1 + i % 5 for i in range(2500)]


# ------------------------------------------------------------------------------------------------------------ spans


@pytest.mark.parametrize("at", [0, 20, 39])
@pytest.mark.parametrize("template", ["{text}", "{text}{sep}{span}"])
def test_the_span_survives_cutting_with_context_on_both_sides(wordpiece: Any, at: int, template: str) -> None:
    words = ["the"] * 40
    words[at] = "paris"
    row = prepare.mark_words(words, at, at + 1)
    columns, cut = encode.encode_spans([row], template, wordpiece, 24)
    assert cut == 1
    (ids,) = columns["input_ids"]
    assert 20 <= len(ids) <= 24
    first = wordpiece.decode(ids).split("[SEP]")[0].replace("[CLS]", "").split()
    marked = first.index("["), first.index("]")
    assert "".join(first[marked[0] + 1 : marked[1]]).replace("##", "") == "paris"
    before, after = marked[0], len(first) - marked[1] - 1
    assert abs(before - after) <= 2 or at in (0, 39)


def test_a_span_that_is_too_long_keeps_both_its_ends(wordpiece: Any) -> None:
    text = "the <e1>cat</e1> " + "sat " * 60 + "on <e2>mat</e2> today"
    (row,) = prepare.marked_entities({"sentence": text})
    columns, cut = encode.encode_spans([row], "{text}", wordpiece, 40)
    (ids,) = columns["input_ids"]
    assert cut == 1
    assert len(ids) <= 40
    kept = wordpiece.decode(ids).replace(" ", "").replace("##", "")
    assert ">cat</" in kept
    assert ">mat</" in kept


def said(tokenizer: Any, columns: dict[str, list[list[int]]]) -> str:
    """The first row without spaces; the test's vocabulary does not know e1 and e2."""
    return tokenizer.decode(columns["input_ids"][0]).replace(" ", "").replace("##", "").replace("[UNK]", "e")


@pytest.mark.parametrize("between", ["", " ", " sat on the ", " sat " * 30])
def test_both_entities_survive_whole_where_they_fit(wordpiece: Any, between: str) -> None:
    """Words between them go first, to the last one; words inside of the marks only where that is not enough."""
    (row,) = prepare.marked_entities({"sentence": f"the the <e1>cat</e1>{between}<e2>mat</e2> today"})
    least = len(wordpiece("<e1>cat</e1> <e2>mat</e2> [MASK]")["input_ids"])
    for length in range(least, 41):
        columns, _ = encode.encode_spans([row], "{text} {mask}", wordpiece, length)
        kept = said(wordpiece, columns)
        assert len(columns["input_ids"][0]) <= length
        assert kept.count("<e>cat</e>") == kept.count("<e>mat</e>") == 1
        assert kept.endswith("[MASK][SEP]")


def test_entities_that_are_too_long_lose_their_middle_and_not_their_marks(wordpiece: Any) -> None:
    one, other = f"cat {'the ' * 40}dog", f"sat {'the ' * 20}mat"
    (row,) = prepare.marked_entities({"sentence": f"a <e1>{one}</e1> on <e2>{other}</e2> b"})
    for length, wanted in ((30, "<e>cat(the)+dog</e><e>sat(the)+mat</e>"), (20, "<e>cat.*</e><e>sat.*</e>")):
        columns, cut = encode.encode_spans([row], "{text}", wordpiece, length)
        assert re.fullmatch(rf"\[CLS\]{wanted}\[SEP\]", said(wordpiece, columns))
        assert (cut, len(columns["input_ids"][0]) <= length) == (1, True)
    with pytest.raises(InlayError, match=r"The marks <e1> </e1> <e2> </e2> .* '\{text\}' alone .* the 12 tokens"):
        encode.encode_spans([row], "{text}", wordpiece, 12)


def test_entities_may_lie_in_each_other() -> None:
    found = prepare.pieces("<e1>the king of <e2>Spain</e2></e1>")
    assert [part for role, part in found if role == "mark"] == ["<e1>", "<e2>", "</e2>", "</e1>"]
    assert [part for role, part in found if role == "inside"] == ["the king of ", "Spain", ""]
    assert "".join(part for _, part in found) == "<e1>the king of <e2>Spain</e2></e1>"


@pytest.mark.parametrize("template", ["{text}", "{text}{sep}{span}", "{left} {mask} {span} {right}"])
def test_a_long_span_loses_its_middle_and_not_its_end(wordpiece: Any, template: str) -> None:
    row = prepare.mark_words(["the", "cat", *["sat"] * 60, "mat", "the"], 1, 63)
    columns, cut = encode.encode_spans([row], template, wordpiece, 24)
    (ids,) = columns["input_ids"]
    kept = said(wordpiece, columns)
    assert (cut, len(ids) <= 24) == (1, True)
    assert kept.count("cat") == kept.count("mat") == template.count("text") + template.count("span")
    assert template.count("{text}") == kept.count("[cat") == kept.count("mat]")


def test_of_a_word_that_is_too_long_there_is_the_beginning(byte_level: Any) -> None:
    row = prepare.mark_words(["the", "catmatsatdog" * 30, "the"], 1, 2)
    columns, _ = encode.encode_spans([row], "{text}", byte_level, 24)
    assert re.search(r"\[catm\w*\]", said(byte_level, columns))
    assert len(columns["input_ids"][0]) <= 24


def test_a_span_that_fits_is_left_alone(wordpiece: Any) -> None:
    row = prepare.mark_words(["the", "cat", "sat"], 1, 2)
    assert encode.encode_spans([row], "{text}", wordpiece, 64) == encode.encode_texts([row], "{text}", wordpiece, 64)


# ----------------------------------------------------------------------------------------------------------- tokens


def test_a_word_is_labelled_on_its_first_token_alone(tokenizer: Any) -> None:
    tokens = ["Paris", "is", "unbelievable", ",", "naïve", "\u200b", "town"]
    columns, words, cut = encode.encode_tokens([{"tokens": tokens}], tokenizer, 64)
    assert cut == 0
    ids, first = columns["input_ids"][0], words[0]
    assert len(ids) == len(first)
    begun = [word for word in first if word >= 0]
    assert begun == sorted(set(begun))
    # A word of characters that the tokenizer throws away may go without; the others may not.
    assert set(range(7)) - set(begun) <= {5}
    for position, word in enumerate(first):
        if word >= 0:
            piece = tokenizer.decode([ids[position]]).strip().removeprefix("##").lower()
            if piece.isascii() and "unk" not in piece:
                assert tokens[word].lower().startswith(piece)
    labels = encode.align_labels(first, [10, 11, 12, 13, 14, 15, 16])
    assert [label for label in labels if label != IGNORED] == [10 + word for word in begun]


def test_repeated_and_empty_words_keep_their_places(tokenizer: Any) -> None:
    tokens = ["the", "the", "", "the", "cat"]
    _, words, _ = encode.encode_tokens([{"tokens": tokens}], tokenizer, 64)
    assert [word for word in words[0] if word >= 0] == [0, 1, 3, 4]


def test_words_beyond_the_length_are_cut_and_counted(tokenizer: Any) -> None:
    rows = [{"tokens": ["the"] * 50}, {"tokens": ["the"]}, {"tokens": []}]
    columns, words, cut = encode.encode_tokens(rows, tokenizer, 16)
    assert cut == 1
    assert len(columns["input_ids"][0]) == 16 == len(words[0])
    assert [len(ids) for ids in columns["input_ids"]] == [len(each) for each in words]


def test_a_slow_tokenizer_is_refused() -> None:
    with pytest.raises(InlayError, match="fast tokenizer"):
        encode.encode_tokens([], SimpleNamespace(is_fast=False), 16)


# -------------------------------------------------------------------------------------------------- language models


def test_blocks_are_the_whole_text_once(byte_level: Any) -> None:
    texts = ["the cat sat", "", "on the mat"] * 10
    made = encode.encode_blocks(texts, "\n", byte_level, 16)
    ids = [token for i in range(len(made)) for token in made[i]["input_ids"]]
    assert byte_level.decode(ids) == "\n".join(texts)
    assert all(len(made[i]["input_ids"]) == 16 for i in range(len(made) - 1))
    assert made[0]["labels"] == made[0]["input_ids"]
    assert made[len(made) - 1]["attention_mask"] == [1] * len(made[len(made) - 1]["input_ids"])


def test_blocks_of_much_text_are_tokenised_in_pieces(byte_level: Any, with_start: Any) -> None:
    texts = ["the cat sat on the mat and the dog ran " * 2000] * 16
    made = encode.encode_blocks(texts, "<|end|>", byte_level, 128)
    ids = [token for i in range(len(made)) for token in made[i]["input_ids"]]
    assert ids.count(byte_level.eos_token_id) == 15
    started = encode.encode_blocks(texts, "\n", with_start, 128)
    assert [token for i in range(len(started)) for token in started[i]["input_ids"]].count(1) == 1


def test_no_text_is_an_error(byte_level: Any) -> None:
    with pytest.raises(InlayError, match="no text to learn from"):
        encode.encode_blocks(["", ""], "", byte_level, 16)


def test_only_the_answer_is_learnt(byte_level: Any, with_start: Any) -> None:
    for tokenizer, start in ((byte_level, []), (with_start, [1])):
        made = encode.encode_answers(["question: the cat?"], ["the mat"], tokenizer, 64)
        item = made[0]
        prompt = start + tokenizer("question: the cat?", add_special_tokens=False)["input_ids"]
        answer = tokenizer(" the mat", add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id]
        assert item["input_ids"] == prompt + answer
        assert item["labels"] == [IGNORED] * len(prompt) + answer
        prompts = encode.encode_prompts(["question: the cat?"], tokenizer, 64)
        assert prompts[0]["input_ids"] == prompt


@pytest.mark.parametrize(
    ("prompt", "answer", "whole"),
    [
        ("answer:", "the mat", "answer: the mat<|end|>"),
        ("answer: ", "the mat", "answer: the mat<|end|>"),
        ("answer:", " the mat", "answer: the mat<|end|>"),
        ("answer:", "\nthe mat", "answer:\nthe mat<|end|>"),
        ("answer:\n", "the mat", "answer:\nthe mat<|end|>"),
    ],
)
def test_one_blank_joins_prompt_and_answer(byte_level: Any, prompt: str, answer: str, whole: str) -> None:
    made = encode.encode_answers([prompt], [answer], byte_level, 64)
    assert byte_level.decode(made[0]["input_ids"]) == whole


@pytest.mark.parametrize("answer", ["the mat", " the mat"])
def test_a_tokenizer_that_adds_a_blank_of_its_own_adds_no_second(answer: str) -> None:
    sentencepiece = Tokenizer(models.BPE(unk_token="<unk>"))
    sentencepiece.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    special = ["<unk>", "<|end|>"]
    corpus = ["the cat sat on the mat", "the answer: is the mat"]
    sentencepiece.train_from_iterator(corpus, trainers.BpeTrainer(vocab_size=200, special_tokens=special))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=sentencepiece, eos_token="<|end|>", unk_token="<unk>")
    made = encode.encode_answers(["the answer:"], [answer], tokenizer, 64)
    tokens = "".join(tokenizer.convert_ids_to_tokens(made[0]["input_ids"]))
    assert tokens == "\u2581the\u2581answer:\u2581the\u2581mat<|end|>"


def test_a_long_prompt_loses_its_beginning_and_an_answer_its_end(byte_level: Any) -> None:
    made = encode.encode_answers(["the cat " * 40 + "answer:", "answer:"], ["56", "56 " * 60], byte_level, 24)
    assert made.cut == 2
    assert [len(made[i]["input_ids"]) for i in range(2)] == [24, 24]
    assert byte_level.decode(made[0]["input_ids"]).endswith("answer: 56<|end|>")
    assert made[1]["labels"][0] == IGNORED
    assert made[1]["labels"].count(IGNORED) == 1
    prompts = encode.encode_prompts(["the cat " * 40 + "answer:"], byte_level, 10)
    assert prompts.cut == 1
    assert byte_level.decode(prompts[0]["input_ids"]).endswith("answer:")


# ---------------------------------------------------------------------------------------------------------- batches


def test_a_batch_is_as_wide_as_its_longest_row(byte_level: Any) -> None:
    items = [
        {"input_ids": [5, 6, 7], "attention_mask": [1, 1, 1], "labels": [IGNORED, 6, 7]},
        {"input_ids": [8], "attention_mask": [1], "labels": [8]},
    ]
    pad = byte_level.pad_token_id
    batch = TextCollator(byte_level)(items)
    assert batch["input_ids"].tolist() == [[5, 6, 7], [8, pad, pad]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]
    assert batch["labels"].tolist() == [[IGNORED, 6, 7], [8, IGNORED, IGNORED]]
    left = TextCollator(byte_level, left=True)(items)
    assert left["input_ids"].tolist() == [[5, 6, 7], [pad, pad, 8]]
    assert left["attention_mask"].tolist() == [[1, 1, 1], [0, 0, 1]]


def test_classes_and_values_have_their_types(byte_level: Any) -> None:
    item = {"input_ids": [5], "attention_mask": [1]}
    assert TextCollator(byte_level)([item | {"labels": 1}])["labels"].dtype == torch.long
    assert TextCollator(byte_level)([item | {"labels": 1.5}])["labels"].dtype == torch.float32


def test_a_tokenizer_without_padding_is_refused() -> None:
    with pytest.raises(InlayError, match="no padding token"):
        TextCollator(SimpleNamespace(pad_token_id=None))


def test_an_encoded_set_is_a_sequence() -> None:
    made = Encoded({"input_ids": [[1, 2], [3]]}, labels=[0, 1])
    assert len(made) == 2
    assert made[-1] == {"input_ids": [3], "labels": 1}
    with pytest.raises(IndexError):
        made[2]
    assert list(Ragged(np.arange(3), np.array([0, 2, 3]))) == [[0, 1], [2]]
