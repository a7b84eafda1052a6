"""What becomes of a cell: text as it is, plain values in one spelling, an error for everything else."""

from __future__ import annotations

import datetime
import json
import math
import re
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from inlay import tasks
from inlay.errors import InlayError
from inlay.records.spec import Spec
from inlay.serve.reading import Limits, read
from inlay.serve.refusals import Refusal
from inlay.tasks import TaskSchema, folders, kinds, labels, prepare, prompts, templates
from inlay.tasks.cells import LONGEST, as_text, as_whole_number, as_words, is_chat, is_null, reach

Write = Callable[[str, str], Path]
MakeSpec = Callable[..., Spec]

CHAT = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "hi"}]
plain = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"))
nested = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), plain),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(plain, inner, max_size=3)),
    max_leaves=8,
)


# ------------------------------------------------------------------------------------------------------- properties


@given(plain)
def test_text_is_taken_as_it_is(text: str) -> None:
    assert as_text(text, "body") == text


@given(st.one_of(nested, st.binary(), st.dates(), st.datetimes(), st.decimals(), st.complex_numbers(), st.text()))
def test_a_cell_is_a_text_that_can_be_written_or_one_clear_error(value: Any) -> None:
    refused = isinstance(value, list | dict | bytes | complex) or is_null(value) or value in (math.inf, -math.inf)
    if refused or (isinstance(value, str) and re.search(r"[\0\ud800-\udfff]", value)):
        with pytest.raises(InlayError, match=r"^a\.csv, row 3: 'body' (holds|is missing|is infinite)"):
            as_text(value, "body", "a.csv, row 3")
    else:
        text = as_text(value, "body", "a.csv, row 3")
        assert text.encode().decode() == text
        assert isinstance(value, str) or text.lower() not in ("nan", "none", "inf", "-inf", "infinity")


@given(
    st.one_of(
        st.integers(),
        st.floats(allow_nan=False, allow_infinity=False),
        st.decimals(allow_nan=False, allow_infinity=False),
    )
)
def test_numbers_keep_their_value_and_whole_ones_have_no_fraction(number: Any) -> None:
    text = as_text(number, "body")
    assert type(number)(text) == number
    if number == int(number) and abs(number) < 1e16 and not isinstance(number, Decimal):
        assert re.fullmatch(r"-?\d+", text)


@given(nested)
def test_json_says_the_same_of_a_value_that_python_does(value: Any) -> None:
    """What is read from a file is what a client sends."""

    def said(each: Any) -> str | None:
        try:
            return as_text(each, "body")
        except InlayError:
            return None

    assert said(json.loads(json.dumps(value))) == said(value)


@given(
    st.dictionaries(st.text("ab.", min_size=1, max_size=3), nested, max_size=4), st.text("ab.", min_size=1, max_size=7)
)
def test_a_path_never_fails_and_a_column_of_that_name_goes_first(row: dict[str, Any], name: str) -> None:
    found = reach(row, name)
    if name in row:
        assert found is row[name]


# ---------------------------------------------------------------------------------------------------------- values


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (3, "3"),
        (3.0, "3"),
        (-0.5, "-0.5"),
        (0.1, "0.1"),
        (1e22, "1e+22"),
        (np.int64(7), "7"),
        (np.float32(0.1), "0.1"),
        (np.float64(4.0), "4"),
        (np.bool_(True), "True"),
        (False, "False"),
        (Decimal("1.50"), "1.50"),
        (datetime.date(2024, 2, 29), "2024-02-29"),
        (datetime.datetime(2024, 2, 29, 13, 5), "2024-02-29T13:05:00"),
        (pd.Timestamp("2024-02-29"), "2024-02-29T00:00:00"),
    ],
)
def test_plain_values_have_one_spelling(value: Any, text: str) -> None:
    assert as_text(value, "body") == text


@pytest.mark.parametrize(
    "value", [None, float("nan"), np.float32("nan"), np.float64("nan"), pd.NA, pd.NaT, Decimal("NaN")]
)
def test_nothing_is_never_a_word(value: Any) -> None:
    assert is_null(value)
    with pytest.raises(InlayError, match=r"^a, row 1: 'body' is missing \(null or NaN\)\. Give a text"):
        as_text(value, "body", "a, row 1")


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (
            {"title": "a", "body": {"de": "b"}},
            r"'body' holds an object, not a text\. Name the text inside .* path: 'body\.title', 'body\.body\.de'",
        ),
        ({}, "'body' holds an object, not a text"),
        (["a", "b"], "'body' holds a list of 2, not a text. Join it"),
        (
            CHAT,
            r"'body' holds a chat, not a text\. .*learns conversations whole.*--text prompt --label answer",
        ),
        ([{"from": "human", "value": "x"}], "'body' holds a chat"),
        (b"abc", "'body' holds 3 bytes, not a text. Decode them"),
        (float("inf"), "'body' is infinite"),
        (np.array(["a"]), "'body' holds a value of the type ndarray"),
        ("a\0b", r"'body' holds a NUL character \(after 'a'\)"),
        ("cut \ud83d", r"'body' holds half a character \(the lone surrogate '\\ud83d', after 'cut '\)"),
        ("x" * (LONGEST + 1), r"'body' holds 10,000,001 characters, and at most 10,000,000 are read"),
    ],
)
def test_what_is_no_text_is_named(value: Any, message: str) -> None:
    with pytest.raises(InlayError, match=message) as raised:
        as_text(value, "body")
    assert len(str(raised.value)) < 500


def test_words_and_places() -> None:
    assert as_words(["a", 3.0, True], "words") == as_words("a 3  True", "words") == ["a", "3", "True"]
    for wrong in ({"a": 1}, [["a"]], [None], None):
        with pytest.raises(InlayError, match="'words'"):
            as_words(wrong, "words")
    assert [as_whole_number(value, "start") for value in (3, 3.0, "3", " 3.0 ", -1)] == [3, 3, 3, 3, -1]
    for wrong in (3.7, "x", True, None, [3], "9" * 5000):
        with pytest.raises(InlayError, match="'start'"):
            as_whole_number(wrong, "start")


def test_chats_are_lists_of_messages() -> None:
    assert is_chat(CHAT)
    assert not any(map(is_chat, ([], "user", ["user"], [{"word": "x"}], [*CHAT, "x"], None, {"role": "x"})))


# -------------------------------------------------------------------------------------------- every way into training


def jsonl(write: Write, rows: list[dict[str, Any]], name: str = "a.jsonl") -> Path:
    return write(name, "\n".join(map(json.dumps, rows)))


def reviews(**odd: Any) -> list[dict[str, Any]]:
    """Thirty rows of which the seventh has something else."""
    rows = [
        {"text": f"w {i}", "other": f"o {i}", "label": "ab"[i % 2], "tokens": ["w", str(i)], "start": 0, "end": 1}
        for i in range(30)
    ]
    rows[6] |= odd
    return rows


@pytest.mark.parametrize(
    "odd", [{"a": "b"}, ["a", "b"], CHAT, "half \ud800", "a\0b"], ids=["dict", "list", "chat", "half", "nul"]
)
@pytest.mark.parametrize(
    ("column", "options"),
    [
        ("text", {"text": ("text",), "label": "label", "kind": "classification"}),
        ("other", {"text": ("text", "other"), "label": "label", "kind": "pair-classification"}),
        ("label", {"text": ("text",), "label": "label", "kind": "classification"}),
        ("label", {"text": ("text",), "label": "label", "kind": "regression"}),
        ("text", {"text": ("text",), "kind": "causal-lm"}),
        ("other", {"text": ("text",), "label": "other", "kind": "causal-lm"}),
        ("text", {"text": ("text",), "label": "other", "kind": "data-to-text"}),
        ("text", {"text": ("text",), "label": "label", "kind": "span-classification"}),
        ("start", {"text": ("text",), "label": "label", "kind": "span-classification"}),
        ("tokens", {"text": ("tokens",), "label": "tokens2", "kind": "token-classification"}),
    ],
)
def test_no_kind_trains_on_what_is_no_text(
    write: Write, spec: MakeSpec, odd: Any, column: str, options: dict[str, Any]
) -> None:
    rows = reviews(**{column: odd})
    if options["kind"] == "regression":
        rows = [row | ({} if i == 6 else {"label": i / 7}) for i, row in enumerate(rows)]
    for row in rows:
        row["tokens2"] = ["O", "O"]
    if column == "text" and options["kind"] == "span-classification" and odd == ["a", "b"]:
        return  # words are a text there
    if column == "tokens" and odd == ["a", "b"]:
        return
    with pytest.raises(InlayError, match=r"a\.jsonl, row 7: "):
        tasks.load(spec(data=jsonl(write, rows), **options))


def test_nested_json_by_its_path(write: Write, spec: MakeSpec) -> None:
    rows = [
        {"review": {"body": f"w {i}", "meta": {"stars": i % 3}}, "x.y": f"flat {i}"}
        | ({"review": None} if i == 5 else {})
        for i in range(40)
    ]
    data = jsonl(write, rows)
    with pytest.raises(
        InlayError, match=r"a\.jsonl, row 1: 'review' holds an object.*'review\.body', 'review\.meta\.stars'"
    ):
        tasks.load(spec(data=data, text=("review",), label="review.meta.stars"))
    with pytest.raises(InlayError, match=r"Unknown column of 'a\.jsonl' 'review\.bodi'\. Did you mean 'review\.body'"):
        tasks.load(spec(data=data, text=("review.bodi",), label="review.meta.stars"))
    task = tasks.load(spec(data=data, text=("review.body",), label="review.meta.stars", template="{review.body} !"))
    assert (task.fields, task.label_names) == (("review.body",), ("0", "1", "2"))
    assert {row["review.body"] for row in task.test} <= {f"w {i}" for i in range(40)}
    assert any("1 of 40 rows dropped for missing values in 'review.body'" in note for note in task.notes)
    schema = TaskSchema.from_json(task.to_json())
    assert schema.read_inputs(jsonl(write, [{"review": {"body": "new"}}], "new.jsonl")) == [{"review.body": "new"}]
    assert schema.read_inputs(write("new.csv", "review.body\nflat\n")) == [{"review.body": "flat"}]
    assert schema.row({"review": {"body": "sent"}}, "the request", 1) == {"review.body": "sent"}
    with pytest.raises(InlayError, match=r"lacks the column 'review\.body'"):
        schema.read_inputs(jsonl(write, [{"review": {"text": "new"}}], "new.jsonl"))
    flat = tasks.load(spec(data=data, text=("x.y",), label="review.meta.stars", kind="classification", test_data=data))
    assert set(flat.test["x.y"]) == {f"flat {i}" for i in range(40) if i != 5}


def test_pictures_by_their_path(tmp_path: Path, write: Write, spec: MakeSpec) -> None:
    from PIL import Image

    for i in range(20):
        Image.new("RGB", (4, 4), (i, 0, 0)).save(tmp_path / f"{i}.png")
    rows = [{"media": {"file": f"{i}.png"}, "about": {"class": "ab"[i % 2]}} for i in range(20)]
    data = jsonl(write, rows)
    task = tasks.load(spec(data=data, image="media.file", label="about.class"))
    assert (task.kind, task.label_names) == (kinds.IMAGES, ("a", "b"))
    assert len(task.schema.read_inputs(data)) == 20
    with pytest.raises(InlayError, match=r"a\.jsonl, row 1: 'media' holds an object.*'media\.file'"):
        tasks.load(spec(data=data, image="media", label="about.class"))


@pytest.mark.parametrize(
    "options",
    [
        {"kind": "classification"},
        {"label": "conversation_id"},
        {"kind": "causal-lm", "text": ("messages",), "label": "conversation_id"},
    ],
)
def test_a_chat_is_no_text_of_another_task(write: Write, spec: MakeSpec, options: dict[str, Any]) -> None:
    data = jsonl(write, [{"conversation_id": f"c {i}", "messages": CHAT} for i in range(30)])
    with pytest.raises(
        InlayError, match=r"'messages' holds (a chat|chats).*--text prompt --label answer.*#conversations"
    ):
        tasks.load(spec(data=data, **options))


def test_numbers_may_be_texts(tmp_path: Path, spec: MakeSpec) -> None:
    """A column of whole numbers with a hole comes back from pandas as floats, and is read as whole numbers."""
    frame = pd.DataFrame({"code": [*range(39), None], "label": ["a", "b"] * 20})
    pq.write_table(pa.Table.from_pandas(frame), tmp_path / "a.parquet")
    task = tasks.load(spec(data=tmp_path / "a.parquet", text=("code",), label="label"))
    texts = {*task.train["code"], *task.validation["code"], *task.test["code"]}
    assert texts == {str(i) for i in range(39)}


def test_no_named_task_reads_nothing_as_a_word(tmp_path: Path, write: Write, spec: MakeSpec) -> None:
    rows = [{"sentence": f"w {i}", "label": i % 2} for i in range(30)]
    rows[4]["sentence"] = None
    for split in ("train", "validation"):
        jsonl(write, rows, f"d/text/sst2/{split}.jsonl")
    task = tasks.load(spec(task="sst2", data_dir=tmp_path / "d"))
    assert "train: 1 of 30 rows dropped for want of a text" in task.notes
    assert not {"None", "nan"} & {*task.train["sentence"], *task.validation["sentence"], *task.test["sentence"]}
    rows[4]["sentence"] = {"a": 1}
    jsonl(write, rows, "d/text/sst2/train.jsonl")
    with pytest.raises(InlayError, match=r"sst2 \(train\), row 5: 'sentence' holds an object"):
        tasks.load(spec(task="sst2", data_dir=tmp_path / "d"))


def test_no_name_of_a_folder_is_half_a_character(tmp_path: Path) -> None:
    for name in ("cats", "caf\udce9"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "1.txt").write_text("x")
    with pytest.raises(InlayError, match="half a character"):
        folders.read_folder(tmp_path)


def test_a_label_is_a_name() -> None:
    assert [labels.as_name(value) for value in (3, 3.0, "3", "3.0", " 3 ")] == ["3"] * 5
    for wrong in (None, ["a"], {"a": 1}, "x" * 1001):
        with pytest.raises(InlayError, match="'label'"):
            labels.as_name(wrong)


# ------------------------------------------------------------------------------------------- predictions and service


def one_text() -> TaskSchema:
    return TaskSchema("moods", kinds.CLASSIFICATION, ("text",), ("accuracy",), ("a", "b"))


def tagger() -> TaskSchema:
    return TaskSchema("names", kinds.TOKENS, ("tokens",), ("entity-f1",), ("O", "B-X"))


def spans() -> TaskSchema:
    return TaskSchema("spans", kinds.SPANS, ("text", "span"), ("accuracy",), ("a", "b"), prepare="spans")


WRONG = [{"a": "b"}, ["a"], None, float("nan"), CHAT, "a\0b"]


@pytest.mark.parametrize("value", WRONG, ids=["dict", "list", "null", "nan", "chat", "nul"])
def test_what_is_no_text_is_not_predicted(write: Write, value: Any) -> None:
    rows = [{"text": "good"}, {"text": value}]
    with pytest.raises(InlayError, match=r"'new\.jsonl', row 2: 'text' "):
        one_text().read_inputs(jsonl(write, rows, "new.jsonl"))
    with pytest.raises(InlayError, match=r"'rows', row 2: 'text' "):
        one_text().row(rows[1], "rows", 2)


@pytest.mark.parametrize("value", [{"a": "b"}, ["a"], None, CHAT, "a\0b"], ids=["dict", "list", "null", "chat", "nul"])
def test_a_client_that_sends_no_text_is_told(value: Any) -> None:
    with pytest.raises(Refusal, match=r"'the request', row 1: 'text' ") as refused:
        read({"text": value}, {"moods": one_text()}, Limits())
    assert refused.value.status == 400


@pytest.mark.parametrize(
    ("schema", "sent"),
    [
        (tagger(), {"tokens": {"a": 1}}),
        (tagger(), {"tokens": [["a"]]}),
        (tagger(), {"tokens": None}),
        (spans(), {"text": {"a": 1}, "start": 0, "end": 1}),
        (spans(), {"tokens": [{"a": 1}], "start": 0, "end": 1}),
        (spans(), {"text": "abc", "start": [0], "end": 1}),
        (spans(), {"text": "abc", "start": 0.5, "end": 1}),
    ],
)
def test_words_and_spans_are_checked_too(schema: TaskSchema, sent: dict[str, Any]) -> None:
    with pytest.raises(Refusal) as refused:
        read(sent, {"one": schema}, Limits())
    assert refused.value.status == 400


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("marked-entities", {"sentence": ["a"]}),
        ("wsc", {"text": "a b", "span1_text": "a", "span2_text": "b", "span2_index": "x"}),
        ("wsc", {"text": "a b", "span1_text": None, "span2_text": "b", "span2_index": 1}),
        ("e2e", {"meaning_representation": {"name": "x"}}),
        ("triples", {"triples": "abc"}),
        ("triples", {"triples": [["a", {"b": 1}, "c"]]}),
    ],
)
def test_what_named_tasks_prepare_is_checked_too(name: str, row: dict[str, Any]) -> None:
    with pytest.raises(InlayError):
        list(prepare.PREPARE[name](row))


def test_templates_are_the_last_to_look(wordpiece: Any) -> None:
    with pytest.raises(InlayError, match="'text' holds a list of 1"):
        templates.render("{text}", {"text": ["a"]})
    with pytest.raises(InlayError, match="'text' is missing"):
        templates.render("{text}", {"text": None})
    assert templates.render("{text}", {"text": 3.0}) == ("3", None)

    class Config:
        template, placeholders, num_prompt_tokens = "{soft_prompt} {text}", True, 1

    with pytest.raises(InlayError, match="Row 1: 'text' holds an object"):
        prompts.encode([{"text": "a"}, {"text": {"b": 1}}], wordpiece, Config)
