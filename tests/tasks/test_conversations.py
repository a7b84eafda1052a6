"""Conversations in users' tables: which columns hold them, what is left out and said, and how long ones are cut."""

from __future__ import annotations

import csv
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from chat_templates import FAMILIES
from inlay import InlayError, tasks
from inlay.records.spec import Spec
from inlay.tasks import Task, chat_encode, kinds, new_rows, scored_rows, tables
from inlay.tasks.chat_template import ChatTemplate
from inlay.tasks.conversations import pack, unpack
from inlay.tasks.encode import IGNORED, Ragged
from inlay.tasks.lazy_rows import LazyRows
from inlay.tasks.schema import TaskSchema

MakeSpec = Callable[..., Spec]


def turn(role: str, content: Any) -> dict[str, Any]:
    return {"role": role, "content": content}


def talk(number: int) -> list[dict[str, Any]]:
    return [turn("user", f"question {number}"), turn("assistant", f"answer {number}")]


def lines(path: Path, given: list[dict[str, Any]]) -> Path:
    path.write_text("\n".join(map(json.dumps, given)), encoding="utf-8")
    return path


def all_rows(task: Task) -> list[list[dict[str, str]]]:
    """The conversations of all splits, in the order of the file."""
    found = [row for part in (task.train, task.validation, task.test) for row in part]
    return [unpack(row["messages"]) for row in sorted(found, key=lambda row: row["row"])]


# ---------------------------------------------------------------------------------------------------------- columns


SHARED = {"human": "user", "gpt": "assistant", "system": "system"}


@pytest.mark.parametrize("ending", ["jsonl", "json", "parquet", "jsonl.gz"])
@pytest.mark.parametrize("column", ["messages", "conversations", "dialog"])
def test_messages_in_every_format_under_both_pairs_of_keys(
    tmp_path: Path, spec: MakeSpec, ending: str, column: str
) -> None:
    import gzip

    wanted = [[turn("system", "Be brief."), *talk(i), *talk(i + 100)] for i in range(20)]
    given: list[dict[str, Any]] = [{"id": i, column: messages} for i, messages in enumerate(wanted)]
    if column == "conversations":
        names = {ours: theirs for theirs, ours in SHARED.items()}
        given = [
            {"id": i, column: [{"from": names[m["role"]], "value": m["content"]} for m in messages]}
            for i, messages in enumerate(wanted)
        ]
    data = tmp_path / f"chats.{ending}"
    if ending == "parquet":
        pq.write_table(pa.Table.from_pylist(given), data)
    elif ending == "json":
        data.write_text(json.dumps(given))
    elif ending == "jsonl":
        lines(data, given)
    else:
        data.write_bytes(gzip.compress("\n".join(map(json.dumps, given)).encode()))
    task = tasks.load(spec(data=data))
    assert (task.kind, task.metrics, task.schema.chat) == (kinds.CAUSAL_LM, ("perplexity",), "turns")
    assert f"chats.{ending}: conversations in `{column}`: 20 of 20 rows" in task.notes
    assert all_rows(task) == wanted
    assert TaskSchema.from_json(task.to_json()) == task.schema


def test_one_question_and_its_answer(tmp_path: Path, spec: MakeSpec) -> None:
    given = [{"instruction": f"add {i}", "input": "" if i % 2 else "1, 2", "output": i} for i in range(20)]
    task = tasks.load(spec(data=lines(tmp_path / "alpaca.jsonl", given)))
    assert all_rows(task)[:2] == [
        [turn("user", "add 0\n\n1, 2"), turn("assistant", "0")],
        [turn("user", "add 1"), turn("assistant", "1")],
    ]
    csv = tmp_path / "alpaca.csv"
    csv.write_text("instruction,input,output\n" + "\n".join(f"add {i},,is {i}" for i in range(20)))
    assert all_rows(tasks.load(spec(data=csv)))[3] == [turn("user", "add 3"), turn("assistant", "is 3")]
    given = [{"prompt": f"ask {i}", "completion": f"say {i}"} for i in range(20)]
    task = tasks.load(spec(data=lines(tmp_path / "prompts.jsonl", given)))
    assert all_rows(task)[7] == [turn("user", "ask 7"), turn("assistant", "say 7")]
    given = [{"prompt": talk(i)[:1], "completion": talk(i)[1:]} for i in range(20)]
    task = tasks.load(spec(data=lines(tmp_path / "lists.jsonl", given)))
    assert all_rows(task)[7] == talk(7)


def test_named_columns_mean_what_they_did(tmp_path: Path, spec: MakeSpec) -> None:
    given = [{"instruction": f"add {i}", "output": f"is {i}", "text": f"all {i}"} for i in range(20)]
    data = lines(tmp_path / "a.jsonl", given)
    named = tasks.load(spec(data=data, kind="causal-lm", text=("instruction",), label="output"))
    assert (named.schema.chat, named.schema.answers, named.fields) == (None, True, ("instruction",))
    running = tasks.load(spec(data=data, kind="causal-lm"))
    assert (running.schema.chat, running.schema.lm, running.fields) == (None, "documents", ("text",))
    labelled = [{"prompt": f"p {i}", "completion": f"c {i}", "text": f"t {i}", "label": "ab"[i % 2]} for i in range(20)]
    assert tasks.load(spec(data=lines(tmp_path / "b.jsonl", labelled))).kind == kinds.CLASSIFICATION


def test_several_columns_of_conversations_need_a_name(tmp_path: Path, spec: MakeSpec) -> None:
    data = lines(tmp_path / "pairs.jsonl", [{"chosen": talk(i), "rejected": talk(-i)} for i in range(20)])
    with pytest.raises(InlayError, match=r"chosen, rejected all hold conversations.*--text"):
        tasks.load(spec(data=data))
    assert all_rows(tasks.load(spec(data=data, text=("chosen",))))[4] == talk(4)


def test_where_a_row_stood_is_no_part_of_it(tmp_path: Path, spec: MakeSpec) -> None:
    given = [{"messages": talk(i)} for i in range(30)]
    one = tasks.load(spec(data=lines(tmp_path / "a.jsonl", given)))
    other = tasks.load(spec(data=lines(tmp_path / "b.jsonl", given[::-1])))
    assert {*one.test["messages"]} == {*other.test["messages"]}
    source = FAMILIES["zephyr"]().chat_template
    (tmp_path / "chat.jinja").write_text(source)
    given_text = tasks.load(spec(data=tmp_path / "a.jsonl", template=source))
    of_file = tasks.load(spec(data=tmp_path / "a.jsonl", template=tmp_path / "chat.jinja"))
    assert given_text.schema.chat_template == of_file.schema.chat_template == source
    assert given_text.digest == of_file.digest != one.digest
    with pytest.raises(InlayError, match="neither a chat template in Jinja"):
        tasks.load(spec(data=tmp_path / "a.jsonl", template="nowhere.jinja"))


# ------------------------------------------------------------------------------------------------------- odd rows


ODD = {
    "no answer": [turn("user", "only asked")],
    "an empty turn": [turn("user", "asked"), turn("assistant", " \n")],
    "no conversation": "a text",
    "an unknown role": [turn("narrator", "once"), *talk(1)],
    "parts that are no text": [turn("user", [{"type": "image", "image": "x.png"}]), turn("assistant", "a cat")],
}


@pytest.mark.parametrize("why", ODD)
def test_what_is_no_conversation_is_left_out_unless_it_is_the_first(tmp_path: Path, spec: MakeSpec, why: str) -> None:
    given: list[dict[str, Any]] = [{"messages": talk(i)} for i in range(20)]
    given[6] = given[11] = {"messages": ODD[why]}
    task = tasks.load(spec(data=lines(tmp_path / "a.jsonl", given)))
    assert f"a.jsonl: conversations in `messages`: 18 of 20 rows; left out: 2 with {why} (rows 7, 12)" in task.notes
    assert len(task.train) + len(task.validation) + len(task.test) == 18
    given[0] = given[6]
    with pytest.raises(InlayError, match=rf"a\.jsonl, row 1 has {why}"):
        tasks.load(spec(data=lines(tmp_path / "a.jsonl", given)))


def test_tools_and_what_else_is_ignored_is_counted(tmp_path: Path, spec: MakeSpec) -> None:
    given: list[dict[str, Any]] = [{"messages": talk(i)} for i in range(20)]
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "add"}}]}
    given[3]["messages"] = [talk(3)[0], call, turn("tool", "3"), talk(3)[1], turn("user", "thanks")]
    given[4]["messages"] = [turn("system", ""), talk(4)[0], talk(4)[1] | {"weight": 0}]
    given[5]["messages"] = [turn("user", [{"type": "text", "text": "question "}, {"type": "text", "text": "5"}])]
    given[5]["messages"].append(talk(5)[1])
    task = tasks.load(spec(data=lines(tmp_path / "a.jsonl", given)))
    assert all_rows(task) == [talk(i) for i in range(20)]
    assert "a.jsonl: 2 tool messages and tool calls in 1 of the conversations are ignored" in task.notes
    assert "a.jsonl: 1 of the system messages are empty and ignored" in task.notes
    assert "a.jsonl: other keys of messages are not read: weight" in task.notes


def test_rows_that_the_template_refuses_are_left_out(tmp_path: Path, spec: MakeSpec) -> None:
    tokenizer = FAMILIES["gemma"]()
    given: list[dict[str, Any]] = [{"messages": talk(i)} for i in range(40)]
    given[7]["messages"] = [turn("system", "x"), *talk(7)]
    given[8]["messages"] = [*talk(8)[:1], *talk(8)]
    task = tasks.load(spec(data=lines(tmp_path / "a.jsonl", given)))
    made = {split: task.encode(split, tokenizer, 200) for split in ("train", "validation", "test")}
    assert sum(map(len, made.values())) == 38
    notes = " ".join(note for each in made.values() for note in each.notes)
    assert "with turns that the chat template refuses (row" in notes
    given = [{"messages": [turn("system", "x"), *talk(i)]} for i in range(40)]
    task = tasks.load(spec(data=lines(tmp_path / "a.jsonl", given)))
    with pytest.raises(InlayError, match=r"row \d+ has turns that the chat template refuses \(System role not supp"):
        task.encode("train", tokenizer, 200)
    tokenizer.chat_template = None
    with pytest.raises(InlayError, match="no chat template"):
        task.encode("train", tokenizer, 200)


# --------------------------------------------------------------------------------------------------- what is too long


def encoded(name: str, messages: list[dict[str, Any]], length: int) -> tuple[str, str, Any]:
    """What is read and what is learnt of a conversation, as text; and all of the encoding."""
    template = ChatTemplate(FAMILIES[name]())
    made = chat_encode.encode_conversations([{"messages": pack(messages), "row": 2}], template, length, "train")
    item = made[0]
    assert len(item["input_ids"]) == len(item["labels"]) <= length
    learnt = [label for label in item["labels"] if label != IGNORED]
    return template.tokenizer.decode(item["input_ids"]), template.tokenizer.decode(learnt), made


@pytest.mark.parametrize("name", ["qwen", "llama", "mistral", "gemma"])
def test_long_conversations_lose_their_beginning(name: str) -> None:
    system = [] if name == "gemma" else [turn("system", "Be brief.")]
    messages = system + [each for i in range(10) for each in talk(i)]
    whole = len(encoded(name, messages, 10_000)[2][0]["input_ids"])
    short = len(encoded(name, system + talk(9), 10_000)[2][0]["input_ids"])
    read, learnt, made = encoded(name, messages, (whole + short) // 2)
    assert made.cut == 1
    assert "cut from the left; the last question and its answer are kept" in made.notes[0]
    assert "question 9" in read
    assert "answer 9" in learnt
    assert "question 0" not in read
    assert ("Be brief." in read) == bool(system)
    kept = [i for i in range(10) if f"question {i}" in read]
    assert kept == list(range(kept[0], 10))
    assert [i for i in range(10) if f"answer {i}" in learnt] == kept, "an answer is never without its question"
    more = system + [each for i in range(kept[0] - 1, 10) for each in talk(i)]
    assert len(encoded(name, more, 10_000)[2][0]["input_ids"]) > (whole + short) // 2, "as much as fits is kept"


@pytest.mark.parametrize("name", ["qwen", "llama", "mistral", "zephyr"])
def test_many_are_cut_as_each_is_by_itself(name: str) -> None:
    """What is cut together, with a guess at how much fits, is what searching finds for each."""
    drawn, template, length = random.Random(3), ChatTemplate(FAMILIES[name]()), 300
    talks = []
    for _ in range(60):
        said = [" ".join(["word"] * drawn.randrange(1, 25)) for _ in range(2 * drawn.randrange(1, 7))]
        turns = [turn(("user", "assistant")[i % 2], text) for i, text in enumerate(said)]
        talks.append([turn("system", "Be brief. " * drawn.randrange(1, 5))] * drawn.randrange(2) + turns)
    rows_ = [{"messages": pack(messages), "row": 2 + i} for i, messages in enumerate(talks)]
    made = chat_encode.encode_conversations(rows_, template, length, "train")
    quick = chat_encode._cut_quickly(template, talks, chat_encode._examples(template, talks), length)
    assert 5 < len(quick) <= made.cut < len(talks) == len(made)
    for number, messages in enumerate(talks):
        ids, spans = chat_encode._cut(messages, template, length)
        learnt = {place for first, last in spans for place in range(first, last)}
        assert made[number]["input_ids"] == ids
        assert {place for place, label in enumerate(made[number]["labels"]) if label != IGNORED} == learnt


def test_what_goes_last() -> None:
    system = turn("system", "Be very brief, and never say more than you have to.")
    answer = turn("assistant", "answer at the end")
    alone = len(encoded("llama", [turn("user", "question"), answer], 999)[2][0]["input_ids"])
    read, learnt, _ = encoded("llama", [system, turn("user", "question"), answer], alone)
    assert "brief" not in read, "the system message goes before the question"
    assert "question" in read
    read, learnt, _ = encoded("llama", [turn("user", "one two three " * 40 + "question"), answer], alone + 4)
    assert "question" in read, "of the question its beginning"
    assert read.count("one two three") < 3
    assert learnt == "answer at the end<|eot_id|>"
    _, learnt, _ = encoded("llama", [turn("user", "q"), turn("assistant", "first " + "more words " * 60)], alone)
    assert learnt.startswith("first more")
    assert not learnt.endswith("<|eot_id|>"), "of an answer that is too long by itself its end"


def test_questions_are_cut_alike() -> None:
    template = ChatTemplate(FAMILIES["qwen"]())
    messages = [each for i in range(10) for each in talk(i)] + [turn("user", "the last question")]
    made = chat_encode.encode_questions([messages, messages[-1:]], template, 80)
    assert made.cut == 1
    texts = [template.tokenizer.decode(made[i]["input_ids"]) for i in (0, 1)]
    for text in texts:
        assert "the last question" in text
        assert text.endswith("<|im_start|>assistant\n")
    assert "answer 9" in texts[0]
    assert "answer 0" not in texts[0]
    assert "labels" not in made[0]


# ------------------------------------------------------------------------------------------------------ rows to answer


def test_rows_to_answer(tmp_path: Path, spec: MakeSpec) -> None:
    given = [{"id": i, "messages": talk(i)} for i in range(20)]
    schema = tasks.load(spec(data=lines(tmp_path / "a.jsonl", given))).schema
    asked = [*talk(1), turn("user", "and now?")]
    for source in ([{"messages": asked}], [asked]):
        assert new_rows.read(schema, source).rows == [{"messages": asked}]
    plain = [{"messages": [turn("user", "hello")]}]
    assert new_rows.read(schema, ["hello"]).rows == new_rows.read(schema, [{"messages": "hello"}]).rows == plain
    (tmp_path / "q.txt").write_text("hello\n")
    assert new_rows.read(schema, tmp_path / "q.txt").rows == plain
    with pytest.raises(InlayError, match=r"row 1 has no question at its end"):
        new_rows.read(schema, [{"messages": talk(1)}])
    for column in ("prompt", "text"):
        assert new_rows.read(schema, [{column: "hello"}]).rows == plain
    with pytest.raises(InlayError, match=r"row 1 has no 'messages'.*it has 'body'"):
        new_rows.read(schema, [{"body": "x"}])
    alpaca = [{"instruction": f"add {i}", "input": "", "output": f"is {i}"} for i in range(20)]
    schema = tasks.load(spec(data=lines(tmp_path / "b.jsonl", alpaca))).schema
    asked = [{"instruction": "add", "input": "1, 2", "output": "ignored"}]
    assert new_rows.read(schema, asked).rows == [{"messages": [turn("user", "add\n\n1, 2")]}]
    assert new_rows.read(schema, ["add"]).rows == [{"messages": [turn("user", "add")]}]


def test_rows_to_score(tmp_path: Path, spec: MakeSpec) -> None:
    given: list[dict[str, Any]] = [{"messages": talk(i)} for i in range(20)]
    schema = tasks.load(spec(data=lines(tmp_path / "a.jsonl", given))).schema
    given[4]["messages"] = talk(4)[:1]
    scored = scored_rows.read_labelled(schema, given)
    assert len(scored.test) == 19
    assert "rows: conversations in `messages`: 19 of 20 rows; left out: 1 with no answer (row 5)" in scored.notes
    assert given[0]["messages"] == talk(0), "rows of Python are not emptied"


# ------------------------------------------------------------------------------------------------------- compact forms


@pytest.mark.parametrize("family", FAMILIES)
def test_learnt_are_the_tokens_with_a_character_of_an_answer(family: str) -> None:
    """Against the places of all tokens: within words and characters of several tokens, and to the end of the text."""
    tokenizer, drawn = FAMILIES[family](), random.Random(1)
    texts = ["".join(drawn.choices("ab cd\n\u00e9\u65e5\U0001f600 hello  ", k=30)) for _ in range(40)]
    for text in texts:
        encoding = tokenizer(text, add_special_tokens=False).encodings[0]
        start, end = sorted((drawn.randrange(30), drawn.randrange(1, 31)))
        if start == end:
            continue
        ((first, last),) = chat_encode._spans(encoding, [(start, end)])
        inside = [place for place, (a, b) in enumerate(encoding.offsets) if a < end and b > start]
        if inside:
            assert first <= inside[0]
            assert last == inside[-1] + 1
            assert all(a == b for a, b in encoding.offsets[first : inside[0]]), "more only where it has no character"


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_rows_stay_compact_until_they_are_read_and_come_again_unchanged(tmp_path: Path, ending: str) -> None:
    given = [{"messages": talk(i), "id": i, **({"\u2028": "\u00e9"} if i == 700 else {})} for i in range(1203)]
    path = tmp_path / f"chats.{ending}"
    if ending == "parquet":
        given = [{"\u2028": None, **row} for row in given]
        pq.write_table(pa.Table.from_pylist(given), path)
    else:
        lines(path, given)
    table = tables.read_table(path)
    assert isinstance(table.rows, LazyRows)
    columns = sorted({key for row in given for key in row})
    wanted = [{name: row.get(name) for name in columns} for row in given]
    for row in table.rows:
        row.clear()
    assert sorted(table.columns) == columns
    assert list(table.rows) == wanted
    assert [table.rows[place] for place in (0, 499, 500, -1)] == [wanted[place] for place in (0, 499, 500, -1)]
    assert table.rows[498:502] == wanted[498:502]
    with pytest.raises(IndexError):
        table.rows[1203]
    table.settle()
    assert table.rows == wanted


def test_a_mask_of_ones_takes_no_memory() -> None:
    made = Ragged.ones(np.array([0, 2, 2, 5]))
    assert [made[place] for place in range(3)] == [[1, 1], [], [1, 1, 1]]
    assert Ragged.ones(np.array([0, 1 << 40])).values.nbytes == 1 << 40, "as numpy counts, which is not what it takes"
    assert Ragged.ones(np.array([0, 1 << 40])).values.strides == (0,)


# ------------------------------------------------------------------------------------------------- as found in the wild


def said(sender: str, text: Any) -> dict[str, Any]:
    return {"from": sender, "value": text}


ASKED, ANSWERED = turn("user", "q"), turn("assistant", "a")
KEPT: dict[str, tuple[list[Any], list[dict[str, str]]]] = {
    "calls": (
        [said("human", "q"), said("function-call", "{}"), said("function-response", "42"), said("gpt", "a")],
        [ASKED, ANSWERED],
    ),
    "observation": (
        [said("human", "q"), said("function_call", "{}"), said("observation", "4"), said("gpt", "a")],
        [ASKED, ANSWERED],
    ),
    "null content": (
        [{**said("human", "q"), "content": None}, {**said("gpt", "a"), "content": None}],
        [ASKED, ANSWERED],
    ),
    "empty content": ([{**said("human", "q"), "content": ""}, said("gpt", "a")], [ASKED, ANSWERED]),
    "two questions": ([said("human", "q"), said("human", "q"), said("gpt", "a")], [ASKED, ASKED, ANSWERED]),
    "answer first": ([said("gpt", "a"), said("human", "q"), said("gpt", "a")], [ANSWERED, ASKED, ANSWERED]),
    "separators": ([said("human", "a\u2028b\u0085c"), said("gpt", "a")], [turn("user", "a\u2028b\u0085c"), ANSWERED]),
    "a number": ([said("human", "q"), said("gpt", 42)], [ASKED, turn("assistant", "42")]),
    "thanks": ([said("human", "q"), said("gpt", "a"), said("human", "thanks")], [ASKED, ANSWERED]),
}
LEFT_OUT: dict[str, tuple[Any, str]] = {
    "empty": ([said("human", "q"), said("gpt", "")], "an empty turn"),
    "null": ([said("human", None), said("gpt", "a")], "an empty turn"),
    "no answer": ([said("human", "q")], "no answer"),
    "unknown": ([said("narrator", "x"), said("gpt", "a")], "an unknown role"),
    "nobody": ([said("human", "q"), {"from": None, "value": "a"}], "an unknown role"),
    "nothing": (None, "no conversation"),
    "no turn": ([said("human", "q"), None], "no conversation"),
    "words": ("human: q", "no conversation"),
    "object": ([said("human", "q"), said("gpt", {"text": "a"})], "parts that are no text"),
    "half a character": ([said("human", "\ud800"), said("gpt", "a")], "a text that is damaged"),
    "NUL": ([said("human", "a\x00"), said("gpt", "a")], "a text that is damaged"),
    "too long": ([said("human", "a" * 10_000_001), said("gpt", "a")], "a text that is damaged"),
}


@pytest.mark.parametrize("case", [*KEPT, *LEFT_OUT])
def test_a_row_is_right_or_left_out_and_counted(tmp_path: Path, spec: MakeSpec, case: str) -> None:
    given = [{"conversations": [said("human", f"q{i}"), said("gpt", f"a{i}")]} for i in range(12)]
    given.insert(4, {"conversations": KEPT[case][0] if case in KEPT else LEFT_OUT[case][0]})
    task = tasks.load(spec(data=lines(tmp_path / "chats.jsonl", given)))
    found = {row["row"]: unpack(row["messages"]) for part in (task.train, task.validation, task.test) for row in part}
    if case in KEPT:
        assert found[5] == KEPT[case][1]
        assert "chats.jsonl: conversations in `conversations`: 13 of 13 rows" in task.notes
    else:
        assert sorted(found) == [1, 2, 3, 4, *range(6, 14)]
        why = f"12 of 13 rows; left out: 1 with {LEFT_OUT[case][1]} (row 5)"
        assert f"chats.jsonl: conversations in `conversations`: {why}" in task.notes


def test_parquet_gives_every_message_the_keys_of_all(tmp_path: Path, spec: MakeSpec) -> None:
    """A file of both forms, and lists as JSON in CSV."""
    both = [talk(i) if i % 2 else [said("human", f"question {i}"), said("gpt", f"answer {i}")] for i in range(14)]
    pq.write_table(pa.Table.from_pylist([{"conversation": each} for each in both]), tmp_path / "chats.parquet")
    with (tmp_path / "chats.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["conversations"], *([json.dumps(each)] for each in both)])
    for name in ("chats.parquet", "chats.csv"):
        assert all_rows(tasks.load(spec(data=tmp_path / name))) == [talk(i) for i in range(14)]


def test_what_is_beside_conversations_or_stands_for_them_is_said(tmp_path: Path, spec: MakeSpec) -> None:
    rows = [{"conversations": talk(i), "system": "Be brief.", "id": i} for i in range(14)]
    task = tasks.load(spec(data=lines(tmp_path / "chats.jsonl", rows)))
    assert "chats.jsonl: not read: 'system' beside the conversations" in task.notes
    images = lines(tmp_path / "llava.jsonl", [{"conversations": talk(i), "image": f"{i}.jpg"} for i in range(14)])
    with pytest.raises(InlayError, match="--text conversations learns them without the images"):
        tasks.load(spec(data=images))
    assert len(all_rows(tasks.load(spec(data=images, text=("conversations",))))) == 14
    texts = lines(tmp_path / "texts.jsonl", [{"conversations": f"human: q{i}"} for i in range(14)])
    with pytest.raises(InlayError, match="'conversations' holds no conversations: a conversation is a list"):
        tasks.load(spec(data=texts))
    listed = tmp_path / "listed.jsonl"
    listed.write_text(json.dumps(rows, indent=1))
    with pytest.raises(InlayError, match=r"begins with '\['.* Give it the ending \.json"):
        tasks.load(spec(data=listed))
