"""Places for prompts in a text: which template puts them where, what cutting leaves alone, what goes wrong."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from inlay.errors import InlayError
from inlay.methods.infoprompt.task import for_task
from inlay.tasks import encode, kinds, templates
from inlay.tasks.prompts import PromptTokenizer, expand, left_to_right, with_places, without_mask
from inlay.tasks.schema import TaskSchema
from zoo import tiny

WORDS = ["[PAD]", "[CLS]", "[SEP]", "[MASK]", "[UNK]", "[", "]", *"abcdefghijklmnopqrstuvwxyz"]
PAD, CLS, SEP, MASK = range(4)
PAIR = "{soft_prompt} {a} {soft_prompt} {mask} {soft_prompt}{sep}{b} {soft_prompt}"


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """Letters, between [CLS] and [SEP]."""
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    made.normalizer = normalizers.Lowercase()
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.post_processor = processors.BertProcessing(("[SEP]", SEP), ("[CLS]", CLS))
    special = {name: f"[{name[:-6].upper()}]" for name in ("pad_token", "cls_token", "sep_token", "mask_token")}
    names = ["input_ids", "token_type_ids", "attention_mask"]
    return PreTrainedTokenizerFast(
        tokenizer_object=made, unk_token="[UNK]", model_max_length=64, model_input_names=names, **special
    )


def ids(
    tokenizer: Any, template: str, count: int, max_length: int = 64, how: Any = encode.encode_texts, **row: Any
) -> list:
    columns, _ = how([row], expand(template, count), PromptTokenizer(tokenizer), max_length)
    assert {len(values[0]) for values in columns.values()} == {len(columns["input_ids"][0])}
    assert columns["attention_mask"][0] == [1] * len(columns["input_ids"][0])
    return columns["input_ids"][0]


def letters(text: str) -> list[int]:
    return [WORDS.index(letter) for letter in text]


def test_four_stand_one_in_each_place_and_one_before_the_mask(tokenizer: Any) -> None:
    a, b = letters("a")[0], letters("b")[0]
    assert ids(tokenizer, PAIR, 4, a="a", b="b") == [CLS, -1, a, -2, MASK, -3, SEP, b, -4, SEP]
    assert ids(tokenizer, PAIR, 1, a="a", b="b") == [CLS, a, -1, MASK, SEP, b, SEP]
    assert ids(tokenizer, PAIR, 6, a="a", b="b") == [CLS, -1, -2, a, -3, -4, MASK, -5, SEP, b, -6, SEP]
    assert ids(tokenizer, without_mask(PAIR), 1, a="a", b="b") == [CLS, a, SEP, b, -1, SEP]


def test_no_space_is_left_where_something_was_left_out() -> None:
    assert expand("{soft_prompt} {a} {soft_prompt} {mask} {soft_prompt}", 1) == "{a} " + templates.MARK + " {mask}"
    assert without_mask("{a} {mask} {{x}}{sep}{b}") == "{a} {{x}}{sep}{b}"
    assert without_mask("{a} {mask}") == "{a}"


def test_a_template_without_places_gets_the_usual_ones() -> None:
    assert (
        with_places("{a} It was {mask}") == "{soft_prompt} {a} It was {soft_prompt} {mask} {soft_prompt} {soft_prompt}"
    )
    assert with_places(PAIR) == PAIR
    with pytest.raises(InlayError, match=r"no \{soft_prompt\}"):
        expand("{a}", 2)


def test_token_types_follow(tokenizer: Any) -> None:
    row = {"a": "a b", "b": "c"}
    columns, _ = encode.encode_texts([row], expand(PAIR, 4), PromptTokenizer(tokenizer), 64)
    assert columns["token_type_ids"][0] == [0] * 8 + [1] * 3


@settings(max_examples=40, deadline=None)
@given(first=st.integers(0, 60), second=st.integers(0, 60), count=st.integers(1, 6), room=st.integers(12, 40))
def test_cutting_never_takes_the_mask_or_a_prompt(
    tokenizer: Any, first: int, second: int, count: int, room: int
) -> None:
    found = ids(tokenizer, PAIR, count, room, a=" ".join("abcdefghij"[i % 10] for i in range(first)), b="z " * second)
    assert len(found) <= room
    assert [each for each in found if each < 0] == list(range(-1, -count - 1, -1))
    assert found.count(MASK) == 1
    whole = first + second + count + 4
    assert len(found) == min(whole, len(found)) if whole <= room else len(found) >= room - 2, (
        "no more is cut than needs be"
    )


def test_a_word_longer_than_the_model_is_cut_too(shared: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(shared / "models" / "minilm_l6_mlm")
    found = ids(tokenizer, "{soft_prompt} {a} {mask}", 2, 16, a="x" * 4000)
    assert len(found) <= 16
    assert found.count(tokenizer.mask_token_id) == 1
    assert sorted(each for each in found if each < 0) == [-2, -1]


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ("{soft_prompt} {a} {soft_prompt} {mask} {soft_prompt}", "{soft_prompt} {a} So:"),
        ("{soft_prompt} {a} {soft_prompt} {mask}{sep}{b} {soft_prompt}", "{soft_prompt} {a}{sep}{b} So:"),
        ("{a} It was {soft_prompt} {mask}. {soft_prompt}", "{soft_prompt} {a} It was"),
        ("{a} It was {mask}.", "{soft_prompt} {a} It was"),
        ("{a} or {mask}? {b}", "{soft_prompt} {a} or ? {b} So:"),
        ("{a}\nIt {{was}}", "{soft_prompt} {a}\nIt {{was}}"),
        ("{a} It was", "{soft_prompt} {a} It was"),
        ("{a}", "{soft_prompt} {a} So:"),
        ("{a} It was {soft_prompt} ", "{a} It was {soft_prompt} So:"),
        ("{a} {soft_prompt}{sep}{b} {soft_prompt}", "{a} {soft_prompt}{sep}{b} {soft_prompt} So:"),
        ("{a}{soft_prompt}{{x}}", "{a}{soft_prompt}{{x}}"),
        ("{soft_prompt} {a}", "{soft_prompt} {a}"),
        ("{soft_prompt} {a} {soft_prompt} It was", "{soft_prompt} {a} {soft_prompt} It was"),
    ],
)
def test_from_left_to_right_a_text_ends_in_words(given: str, wanted: str) -> None:
    assert left_to_right(given, "So:") == wanted
    assert left_to_right(wanted, "So:") == wanted
    assert left_to_right(given, "") == wanted.removesuffix(" So:").rstrip(" ")


@pytest.mark.parametrize(
    ("family", "told", "cue", "wanted"),
    [
        ("llama", {}, None, "{soft_prompt} {a}{sep}{b} Answer:"),
        ("llama", {"state": "last"}, "So", "{soft_prompt} {a}{sep}{b} So"),
        ("llama", {"cue": "{a} is"}, "So", "{soft_prompt} {a}{sep}{b} {a} is"),
        ("llama", {"cue": ""}, "So", "{soft_prompt} {a}{sep}{b}"),
        ("llama", {"template": "{a} {soft_prompt}"}, "So", "{a} {soft_prompt} So"),
        ("llama", {"template": "{a} {soft_prompt}", "cue": ""}, "So", "{a} {soft_prompt}"),
        ("llama", {"state": "mean"}, "So", "{soft_prompt} {a} {soft_prompt} {soft_prompt}{sep}{b} {soft_prompt}"),
        ("bert", {"state": "last"}, "So", "{soft_prompt} {a} {soft_prompt} {soft_prompt}{sep}{b} {soft_prompt}"),
    ],
)
def test_in_a_decoder_no_prompt_stands_where_the_class_is_read(
    family: str, told: dict[str, Any], cue: str | None, wanted: str, tokenizer: Any
) -> None:
    schema = TaskSchema("t", kinds.PAIR, ("a", "b"), ("accuracy",), ("no", "yes"), prompt_template=PAIR, cue=cue)
    given, placed, notes = for_task(told, schema, tokenizer, tiny(family)[0])
    assert given["state"] == told.get("state", "last")
    assert placed.prompt_template == given["template"] == wanted
    assert any(("the mean" if given["state"] == "mean" else "the last token") in note for note in notes)


def test_two_texts_are_divided_where_the_tokenizer_does_not(tokenizer: Any) -> None:
    schema = TaskSchema("t", kinds.PAIR, ("a", "b"), ("accuracy",), ("no", "yes"), prompt_template=PAIR)
    bare = copy.deepcopy(tokenizer)
    bare.backend_tokenizer.post_processor = processors.Sequence([])
    placed = for_task({}, schema, bare, tiny("llama")[0])[1]
    assert placed.prompt_template == "{soft_prompt} {a}\n{b} Answer:"
    assert for_task({}, schema, tokenizer, tiny("llama")[0])[1].prompt_template == "{soft_prompt} {a}{sep}{b} Answer:"


def test_a_decoder_has_no_mask_and_no_cue_of_unknown_fields(tokenizer: Any) -> None:
    schema = TaskSchema("t", kinds.PAIR, ("a", "b"), ("accuracy",), ("no", "yes"), prompt_template=PAIR)
    model = tiny("llama")[0]
    with pytest.raises(InlayError, match=r"left to right and has no mask. Read the last state"):
        for_task({"state": "mask"}, schema, tokenizer, model)
    with pytest.raises(InlayError, match=r"'c'"):
        for_task({"cue": "{c} is"}, schema, tokenizer, model)


def test_an_empty_text_has_its_places(tokenizer: Any) -> None:
    assert ids(tokenizer, "{soft_prompt} {a} {soft_prompt} {mask}", 2, a="") == [CLS, -1, -2, MASK, SEP]


def test_a_mask_in_the_text_is_not_taken_for_the_template_s(tokenizer: Any) -> None:
    assert ids(tokenizer, "{a} {soft_prompt} {mask}", 1, a="x [MASK] y") == [CLS, *letters("xy"), -1, MASK, SEP]


def test_a_mark_in_the_text_is_no_place(tokenizer: Any) -> None:
    text = f"x {templates.MARK} y"
    assert ids(tokenizer, "{a} {soft_prompt} {mask}", 1, a=text) == [CLS, *letters("xy"), -1, MASK, SEP]


def test_a_template_with_two_masks_is_refused() -> None:
    with pytest.raises(InlayError, match=r"more than one \{mask\}"):
        templates.check("{a} {mask} or {mask}", ["a"])


def test_a_template_that_cannot_fit_is_refused(tokenizer: Any) -> None:
    with pytest.raises(InlayError, match=r"'\{soft_prompt\} \{a\} \{mask\}' with 10 .* alone is longer than the 6"):
        ids(tokenizer, "{soft_prompt} {a} {mask}", 10, 6, a="a b c")


def test_the_mask_before_the_span_and_a_window_around_it(tokenizer: Any) -> None:
    template = "{soft_prompt} {left} {soft_prompt} {mask} {soft_prompt} {span} {right} {soft_prompt}"
    text = f"{'a ' * 50}[ x y ]{' b' * 50}"
    row = {"text": text, "span": "x y", "start": text.index("["), "end": text.index("]") + 1}
    short = {"text": "a [ x y ] b", "span": "x y", "start": 2, "end": 9}
    a, b, x, y = letters("abxy")
    assert ids(tokenizer, template, 4, how=encode.encode_spans, **short) == [CLS, -1, a, -2, MASK, -3, x, y, b, -4, SEP]
    cut = ids(tokenizer, template, 4, 20, encode.encode_spans, **row)
    assert cut == [CLS, -1, *[a] * 5, -2, MASK, -3, x, y, *[b] * 6, -4, SEP]
    marked = ids(tokenizer, "{soft_prompt} {text} {mask}", 1, 14, encode.encode_spans, **row)
    left, right = WORDS.index("["), WORDS.index("]")
    assert marked == [CLS, -1, *[a] * 3, left, x, y, right, *[b] * 3, MASK, SEP]


def test_the_tokenizer_itself_stays_as_it_is(tokenizer: Any) -> None:
    before = len(tokenizer)
    wrapped = PromptTokenizer(tokenizer)
    assert len(tokenizer) == before
    assert wrapped.pad_token_id == PAD
    assert tokenizer("a b")["input_ids"] == wrapped(["a b"])["input_ids"][0]


def test_a_schema_reads_with_prompts_only_where_it_has_some(tokenizer: Any) -> None:
    schema = TaskSchema("t", kinds.PAIR, ("a", "b"), ("accuracy",), ("no", "yes"), prompt_template=PAIR)
    rows = [{"a": "a", "b": "b"}]
    assert schema.encode_inputs(rows, tokenizer)[0]["input_ids"] == [CLS, *letters("a"), SEP, *letters("b"), SEP]
    with_prompts = TaskSchema.from_json(schema.to_json() | {"prompt_tokens": 4})
    assert min(with_prompts.encode_inputs(rows, tokenizer)[0]["input_ids"]) == -4


@pytest.mark.parametrize("name", ["cola", "sst2", "rte", "mrpc", "semeval2010", "wnut17-spans"])
def test_every_task_of_the_paper_has_a_template_with_a_mask_four_places_and_a_cue(name: str) -> None:
    from inlay.tasks import catalogue

    card = catalogue.describe(name)
    assert card.schema.prompt_template is not None
    templates.check(card.schema.prompt_template, kinds.fields_of(card.kind, card.fields))
    assert templates.uses_mask(card.schema.prompt_template)
    assert card.schema.prompt_template.count("{soft_prompt}") == 4
    assert card.schema.cue
    for_decoders = left_to_right(card.schema.prompt_template, card.schema.cue)
    assert for_decoders.endswith(card.schema.cue)
    templates.check(for_decoders, kinds.fields_of(card.kind, card.fields))
    assert card.schema.words is None or len(card.schema.words) == card.num_labels


def test_a_column_called_prompt_is_a_column() -> None:
    assert templates.render("{prompt} -> {answer} {soft_prompt}", {"prompt": "one", "answer": "two"}) == (
        "one -> two",
        None,
    )
