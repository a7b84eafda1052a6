"""A stranger's own data: columns, kinds, labels, faults, from the file to the task."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from inlay import tasks
from inlay.errors import InlayError
from inlay.records.spec import Spec
from inlay.tasks import kinds

Write = Callable[[str, str], Path]
MakeSpec = Callable[..., Spec]


def reviews(count: int = 40, classes: int = 5) -> str:
    """A CSV of reviews with stars from 1."""
    rows = [f'{i},"review, number {i}",{1 + i % classes},author{i % 3}' for i in range(count)]
    return "id,body,stars,author\n" + "\n".join(rows) + "\n"


def test_the_command_of_the_readme(write: Write, spec: MakeSpec) -> None:
    task = tasks.load(spec(data=write("reviews.csv", reviews()), text=("body",), label="stars"))
    assert (task.name, task.kind, task.fields) == ("reviews", kinds.CLASSIFICATION, ("body",))
    assert task.label_names == ("1", "2", "3", "4", "5")
    assert task.metrics == ("accuracy", "macro-f1")
    assert (len(task.train), len(task.validation), len(task.test)) == (29, 3, 8)
    everything = {row["body"]: row["label"] for part in (task.train, task.validation, task.test) for row in part}
    assert len(everything) == 40
    assert all(label == (int(body.split()[-1]) % 5) for body, label in everything.items())
    assert str(task.source).endswith("reviews.csv")
    assert any("kind: classification" in note for note in task.notes)


def test_order_of_rows_does_not_change_the_split_and_content_does(write: Write, spec: MakeSpec) -> None:
    text = reviews()
    header, *lines = text.splitlines()
    options = {"text": ("body",), "label": "stars"}
    one = tasks.load(spec(data=write("a.csv", text), **options))
    two = tasks.load(spec(data=write("b.csv", "\n".join([header, *lines[::-1]])), **options))
    other = tasks.load(spec(data=write("c.csv", text.replace("number 7", "number 70")), **options))
    for part in ("train", "validation", "test"):
        assert set(one.split(part)["body"]) == set(two.split(part)["body"])
    again = tasks.load(spec(data=write("d.csv", text), **options))
    assert again.digest == one.digest != other.digest


def test_the_seed_changes_selection_but_not_the_test(write: Write, spec: MakeSpec) -> None:
    path = write("a.csv", reviews(200))
    made = [tasks.load(spec(data=path, text=("body",), label="stars", seed=seed)) for seed in (0, 1)]
    assert made[0].test["body"] == made[1].test["body"]
    assert made[0].validation["body"] != made[1].validation["body"]


# ---------------------------------------------------------------------------------------------- choosing columns


@pytest.mark.parametrize(
    ("header", "row", "texts", "label"),
    [
        ("text,label", "some words {i},{c}", ("text",), "label"),
        ("Sentence,Class", "some words {i},{c}", ("Sentence",), "Class"),
        ("id,comment,category", "{i},some words {i},{c}", ("comment",), "category"),
        ("premise,hypothesis,label", "one {i},two {i},{c}", ("premise", "hypothesis"), "label"),
        ("text,mood", "some words {i},{c}", ("text",), "mood"),
    ],
)
def test_columns_are_found_where_there_is_one_choice(
    write: Write, spec: MakeSpec, header: str, row: str, texts: tuple[str, ...], label: str
) -> None:
    lines = [row.format(i=i, c="ab"[i % 2]) for i in range(20)]
    task = tasks.load(spec(data=write("a.csv", "\n".join([header, *lines]))))
    assert task.fields == texts
    assert any(f"label from {label!r}" in note for note in task.notes)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, r"no column is plainly the label. Name it with --label \(columns: id, body, stars, author\)"),
        ({"label": "star"}, r"Unknown column of 'a.csv' 'star'. Did you mean 'stars'"),
        ({"label": "stars", "text": ("bodi",)}, "Did you mean 'body'"),
        ({"label": "author", "text": ("author",)}, "cannot be both"),
        ({"label": "stars", "image": "body", "text": ("body",)}, "either --image or --text"),
        ({"label": "stars", "kind": "image-classification"}, "Name it with --image"),
        ({"label": "stars", "kind": "nonsense"}, "Unknown kind of task 'nonsense'"),
        ({"label": "stars", "text": ("body",), "kind": "pair-classification"}, "Give --text twice"),
        ({"label": "stars", "text": ("body",), "kind": "span-classification"}, "'start' and 'end'"),
        ({"label": "author", "text": ("body",), "kind": "regression"}, "is not a number"),
    ],
)
def test_what_cannot_be_chosen_is_asked_for(
    write: Write, spec: MakeSpec, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(InlayError, match=message):
        tasks.load(spec(data=write("a.csv", reviews()), **options))


def test_any_name_of_a_column_will_do(write: Write, spec: MakeSpec) -> None:
    """Names that mean something else inside, or that a template could not hold."""
    for name in ("label", "mask", "My text: {raw}!", "ein Text"):
        rows = "".join(f"word {i},{'ab'[i % 2]}\n" for i in range(20))
        task = tasks.load(spec(data=write("a.csv", f"{name},mood\n{rows}"), text=(name,), label="mood"))
        assert all(row[task.fields[0]].startswith("word") for row in task.train)
        assert task.label_names == ("a", "b")
        assert task.read_inputs(write("new.csv", f"{name}\nhello\n")) == [{task.fields[0]: "hello"}]


def test_several_texts_are_asked_about(write: Write, spec: MakeSpec) -> None:
    text = "front,back,label\n" + "".join(f"word {i},thing {i},{'ab'[i % 2]}\n" for i in range(20))
    with pytest.raises(InlayError, match=r"several columns may be the text \(front, back\)"):
        tasks.load(spec(data=write("a.csv", text)))
    both = tasks.load(spec(data=write("a.csv", text), text=("front", "back")))
    assert (both.kind, both.template) == (kinds.PAIR, "{front}{sep}{back}")


# ------------------------------------------------------------------------------------------------- kinds and labels


def test_fractions_are_values(write: Write, spec: MakeSpec) -> None:
    text = "text,label\n" + "".join(f"word {i},{100 + i / 3:.3f}\n" for i in range(40))
    task = tasks.load(spec(data=write("a.csv", text)))
    assert (task.kind, task.num_labels, task.label_names) == (kinds.REGRESSION, 1, None)
    assert any("kind: regression" in note for note in task.notes)
    values = np.array(task.train["label"])
    assert task.schema.mean == pytest.approx(values.mean())
    assert task.schema.deviation == pytest.approx(values.std())


def test_what_is_inferred_can_be_overruled(write: Write, spec: MakeSpec) -> None:
    path = write("a.csv", reviews())
    task = tasks.load(spec(data=path, text=("body",), label="stars", kind="regression"))
    assert task.kind == kinds.REGRESSION
    halves = "text,label\n" + "".join(f"word {i},{i % 3 + 0.5}\n" for i in range(40))
    task = tasks.load(spec(data=write("b.csv", halves), kind="classification"))
    assert task.label_names == ("0.5", "1.5", "2.5")


@pytest.mark.parametrize(
    ("values", "names"),
    [
        (["1", "2.0", "10"], ("1", "2", "10")),
        ([3, 1, 2], ("1", "2", "3")),
        ([True, False], ("False", "True")),
        (["b", "a", "B"], ("B", "a", "b")),
        ([-1, 1], ("-1", "1")),
        (["007", "7"], ("007", "7")),
    ],
)
def test_labels_are_named_by_their_value(write: Write, spec: MakeSpec, values: list[Any], names: tuple) -> None:
    lines = [json.dumps({"text": f"word {i}", "label": values[i % len(values)]}) for i in range(40)]
    task = tasks.load(spec(data=write("a.jsonl", "\n".join(lines))))
    assert task.label_names == names
    for row in task.test:
        i = int(row["text"].split()[1])
        assert names[row["label"]] in (str(values[i % len(values)]), str(values[i % len(values)]).removesuffix(".0"))


def test_rows_with_something_missing_are_dropped_and_counted(write: Write, spec: MakeSpec) -> None:
    text = reviews() + "40,,3,x\n41,words,,x\n42,  ,2,x\n"
    task = tasks.load(spec(data=write("a.csv", text), text=("body",), label="stars"))
    assert len(task.train) + len(task.validation) + len(task.test) == 40
    assert "a.csv: 3 of 43 rows dropped for missing values in 'body' or 'stars'" in task.notes


def test_missing_numbers_are_missing(write: Write, spec: MakeSpec) -> None:
    lines = [json.dumps({"text": f"w {i}", "label": None if i == 3 else i % 2}) for i in range(30)]
    lines.append('{"text": "w", "label": NaN}')
    task = tasks.load(spec(data=write("a.jsonl", "\n".join(lines))))
    assert task.label_names == ("0", "1")
    assert any("2 of 31 rows dropped" in note for note in task.notes)


@pytest.mark.parametrize("word", ["NA", "n/a", "NaN", "null", "None", "#N/A", "<NA>"])
@pytest.mark.parametrize("ending", ["csv", "tsv"])
def test_a_label_spelled_as_nothing_is_missing_and_said(write: Write, spec: MakeSpec, word: str, ending: str) -> None:
    rows = [["text", "label"], *([f"w {i}", "ab"[i % 2]] for i in range(30)), ["w", word], [word, "a"]]
    mark = {"csv": ",", "tsv": "\t"}[ending]
    task = tasks.load(spec(data=write(f"a.{ending}", "\n".join(map(mark.join, rows)))))
    assert task.label_names == ("a", "b")
    assert f"a.{ending}: 1 of 32 rows dropped for missing values in 'text' or 'label'" in task.notes
    assert any(f"{word!r} (1 rows) in 'label' is taken for a missing value" in note for note in task.notes)
    # A text may say so.
    assert word in [*task.train["text"], *task.validation["text"], *task.test["text"]]


def test_a_split_without_labels_is_refused(tmp_path: Path, write: Write, spec: MakeSpec) -> None:
    write("d/train.csv", "text,label\n" + "".join(f"w {i},{'ab'[i % 2]}\n" for i in range(30)))
    write("d/test.csv", "text\nw\n")
    with pytest.raises(InlayError, match=r"test.csv \(test\): all 1 rows are unusable, with nothing in 'label'"):
        tasks.load(spec(data=tmp_path / "d"))


def test_a_class_called_none_that_is_needed_is_asked_about(write: Write, spec: MakeSpec) -> None:
    text = "text,label\n" + "".join(f"w {i},{('none', 'rude')[i % 2]}\n" for i in range(30))
    with pytest.raises(
        InlayError, match=r"'none' \(15 rows\) in 'label' is taken for a missing value; if it is a class"
    ):
        tasks.load(spec(data=write("a.csv", text)))


def test_missing_values_do_not_make_amounts_classes(write: Write, spec: MakeSpec) -> None:
    text = "text,label\n" + "".join(f"w {i},{'NA' if i == 4 else i / 3}\n" for i in range(40))
    task = tasks.load(spec(data=write("a.csv", text)))
    assert task.kind == kinds.REGRESSION
    assert len(task.train) + len(task.validation) + len(task.test) == 39


def test_a_class_may_be_called_none_where_nothing_has_its_own_sign(write: Write, spec: MakeSpec) -> None:
    lines = [json.dumps({"text": f"w {i}", "label": ("None", "some", None)[i % 3]}) for i in range(60)]
    task = tasks.load(spec(data=write("a.jsonl", "\n".join(lines))))
    assert task.label_names == ("None", "some")
    answers = "ask,reply\n" + "".join(f"q {i},{'None' if i % 2 else 'some'}\n" for i in range(30))
    task = tasks.load(spec(data=write("b.csv", answers), kind="causal-lm", text=("ask",), label="reply"))
    assert len(task.train) + len(task.validation) + len(task.test) == 30


@pytest.mark.parametrize("word", ["Infinity", "-Infinity", "1e999"])
@pytest.mark.parametrize("kind", [None, "regression", "classification"])
def test_infinite_labels_are_refused(write: Write, spec: MakeSpec, word: str, kind: str | None) -> None:
    lines = [json.dumps({"text": f"w {i}", "label": i / 3}) for i in range(30)]
    lines.append(f'{{"text": "w", "label": {word}}}')
    with pytest.raises(InlayError, match=r"a.jsonl, row 31: 'label' is infinite"):
        tasks.load(spec(data=write("a.jsonl", "\n".join(lines)), kind=kind))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ('{"tokens": ["a", null], "tags": ["O", "O"]}', "row 31: a word is missing"),
        ('{"tokens": ["a", "b"], "tags": ["O", NaN]}', "row 31: a label of a word is missing"),
    ],
)
def test_holes_in_lists_are_refused(write: Write, spec: MakeSpec, row: str, message: str) -> None:
    lines = [json.dumps({"tokens": ["a", str(i)], "tags": ["B-X", "O"]}) for i in range(30)]
    with pytest.raises(InlayError, match=message):
        tasks.load(spec(data=write("a.jsonl", "\n".join([*lines, row])), text=("tokens",)))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("text,label\n" + "a,x\nb,x\nc,x\n" * 5, "has only 'x': a classifier needs at least two classes"),
        ("text,label\n" + "a,\nb,\n" * 5, "all 10 rows are unusable, with nothing in 'label'"),
        ("text,label\na,\n,b\n", "all 2 rows are unusable, with something missing in every row"),
        ("text,label\na,x\nb,y\n", "2 rows are too few"),
        ("text,label\n" + "".join(f"w {i},2.5\n" for i in range(30)), "every training row has the value 2.5"),
    ],
)
def test_data_that_cannot_be_learnt_from(write: Write, spec: MakeSpec, text: str, message: str) -> None:
    with pytest.raises(InlayError, match=message):
        tasks.load(spec(data=write("a.csv", text)))


def test_uneven_classes_are_said(write: Write, spec: MakeSpec) -> None:
    text = "text,label\n" + "".join(f"w {i},{'rare' if i % 20 == 0 else 'common'}\n" for i in range(100))
    task = tasks.load(spec(data=write("a.csv", text)))
    assert any("classes are uneven" in note and "95.0%" in note for note in task.notes)


@pytest.mark.parametrize(
    ("tested", "said"),
    [
        ("abcdef", []),
        ("abcde", ["the class 'f' has no row; the scores say nothing about it"]),
        ("ba", ["4 classes have no row ('c', 'd', 'e' and 1 more); the scores say nothing about them"]),
    ],
)
def test_classes_without_a_test_row_are_said(write: Write, spec: MakeSpec, tested: str, said: list[str]) -> None:
    train = write("train.csv", "text,label\n" + "".join(f"w {i},{'abcdef'[i % 6]}\n" for i in range(60)))
    test = write("test.csv", "text,label\n" + "".join(f"v {label},{label}\n" for label in tested))
    notes = tasks.load(spec(data=train, test_data=test)).notes
    assert [note for note in notes if "no row" in note] == [f"test split: {each}" for each in said]


def test_labels_that_training_does_not_know(write: Write, spec: MakeSpec) -> None:
    train = write("train.csv", "text,label\n" + "".join(f"w {i},{'ab'[i % 2]}\n" for i in range(30)))
    test = write("test.csv", "text,label\nx,a\ny,c\nz,c\n")
    with pytest.raises(
        InlayError, match=r"\(test\) has labels that do not occur in training: 'c' \(2 rows\). Known: a, b"
    ):
        tasks.load(spec(data=train, test_data=test))
    good = tasks.load(spec(data=train, test_data=write("ok.csv", "text,label\nx,a\n")))
    assert list(good.test["text"]) == ["x"]
    assert len(good.train) + len(good.validation) == 30
    with pytest.raises(InlayError, match="lacks the column 'label'"):
        tasks.load(spec(data=train, test_data=write("bad.csv", "text,mood\nx,a\n")))


def test_copies_of_a_row_do_not_leak_into_the_test(write: Write, spec: MakeSpec) -> None:
    text = "text,label\n" + "".join(f"w {i % 20},{'ab'[i % 2]}\n" for i in range(60))
    task = tasks.load(spec(data=write("a.csv", text)))
    assert not set(task.train["text"]) & set(task.test["text"])
    assert not any("also occur in training" in note for note in task.notes)


def test_texts_with_several_labels_do_not_leak_between_splits(write: Write, spec: MakeSpec) -> None:
    text = "text,label\n" + "".join(f"w {i % 40},{'ab'[i // 40]}\n" for i in range(80))
    task = tasks.load(spec(data=write("a.csv", text)))
    parts = [set(part["text"]) for part in (task.train, task.validation, task.test)]
    assert sum(map(len, parts)) == len(set.union(*parts)) == 40
    assert not any("also occur in" in note for note in task.notes)


def test_every_leak_of_given_splits_is_said(tmp_path: Path, write: Write, spec: MakeSpec) -> None:
    def rows(numbers: range, label: int) -> str:
        return "text,label\n" + "".join(f"w {i},{'ab'[(i + label) % 2]}\n" for i in numbers)

    write("d/train.csv", rows(range(30), 0))
    write("d/validation.csv", rows(range(28, 40), 1))
    write("d/test.csv", rows(range(25, 45), 0))
    task = tasks.load(spec(data=tmp_path / "d"))
    assert [note for note in task.notes if "also occur in" in note] == [
        "2 validation rows also occur in training, 2 of them only with another label",
        "5 test rows also occur in training, label and all",
        "12 test rows also occur in validation, 12 of them only with another label",
    ]


def test_test_rows_that_are_trained_on_are_counted(write: Write, spec: MakeSpec) -> None:
    train = write("train.csv", "text,label\n" + "".join(f"w {i},{'ab'[i % 2]}\n" for i in range(60)))
    test = write("test.csv", "text,label\nnew,a\n" + "".join(f"w {i},{'ab'[i % 2]}\n" for i in range(60)))
    task = tasks.load(spec(data=train, test_data=test))
    assert f"{len(task.train)} test rows also occur in training, label and all" in task.notes


# ------------------------------------------------------------------------------------------------ splits and draws


def test_a_split_of_the_users_own_is_kept(write: Write, spec: MakeSpec) -> None:
    lines = [f"w {i},{'ab'[i % 2]},{'test' if i < 6 else 'dev' if i < 10 else 'train'}" for i in range(40)]
    task = tasks.load(spec(data=write("a.csv", "\n".join(["text,label,split", *lines]))))
    assert (len(task.train), len(task.validation), len(task.test)) == (30, 4, 6)
    assert "split" not in task.train.column_names


def test_shots_are_balanced_and_selection_is_not_among_them(write: Write, spec: MakeSpec) -> None:
    path = write("a.csv", reviews(100))
    task = tasks.load(spec(data=path, text=("body",), label="stars", shots=15))
    assert np.bincount(task.train["label"]).tolist() == [3] * 5
    assert not set(task.train["body"]) & set(task.validation["body"])
    few = tasks.load(spec(data=path, text=("body",), label="stars", shots=3))
    assert "2 of 5 classes have no example among 3" in few.notes
    with pytest.raises(InlayError, match="shots=500 asks for more examples than the 72"):
        tasks.load(spec(data=path, text=("body",), label="stars", shots=500))
    with pytest.raises(InlayError, match="at least two classes"):
        tasks.load(spec(data=path, text=("body",), label="stars", shots=1))


def test_the_vtab_protocol(write: Write, spec: MakeSpec) -> None:
    task = tasks.load(spec(data=write("a.csv", reviews(1500)), text=("body",), label="stars", protocol="vtab-1k"))
    assert (len(task.train), len(task.validation), len(task.test)) == (800, 200, 300)
    with pytest.raises(InlayError, match=r"Unknown protocol 'vtab'\. Did you mean 'vtab-1k'"):
        tasks.load(spec(data=write("a.csv", reviews()), text=("body",), label="stars", protocol="vtab"))


def test_templates_are_checked_before_anything_is_trained(write: Write, spec: MakeSpec) -> None:
    path = write("a.csv", reviews())
    task = tasks.load(spec(data=path, text=("body",), label="stars", template="{body} It was {mask}."))
    assert task.template == "{body} It was {mask}."
    with pytest.raises(InlayError, match="Unknown placeholder"):
        tasks.load(spec(data=path, text=("body",), label="stars", template="{text}"))


# ---------------------------------------------------------------------------------------------- words, spans, texts


def test_words_with_tags(write: Write, spec: MakeSpec) -> None:
    rows = [
        {"tokens": ["Ann", "lives", "in", "Rome"], "ner_tags": ["B-PER", "O", "O", "B-LOC"], "id": i} for i in range(20)
    ]
    task = tasks.load(
        spec(
            data=write(
                "a.jsonl",
                "\n".join(
                    json.dumps(row | {"tokens": [*row["tokens"], str(i)], "ner_tags": [*row["ner_tags"], "O"]})
                    for i, row in enumerate(rows)
                ),
            )
        )
    )
    assert (task.kind, task.label_names) == (kinds.TOKENS, ("B-LOC", "B-PER", "O"))
    assert task.metrics[0] == "entity-f1"
    assert list(task.train[0]["label"]) == [1, 2, 2, 0, 2]
    pos = "text\tlabel\n" + "".join(f"a dog {i}\tDET NOUN NUM\n" for i in range(20))
    other = tasks.load(spec(data=write("b.tsv", pos), kind="token-classification"))
    assert (other.metrics, other.label_names) == (("token-accuracy",), ("DET", "NOUN", "NUM"))
    with pytest.raises(InlayError, match=r"row 1: 3 words and 2 labels"):
        tasks.load(spec(data=write("c.tsv", pos.replace("DET NOUN NUM", "DET NOUN")), kind="token-classification"))


def test_lists_of_tags_are_for_one_text(write: Write, spec: MakeSpec) -> None:
    rows = [{"one": f"a {i}", "two": f"b {i}", "tags": ["O", "O"]} for i in range(20)]
    data = write("a.jsonl", "\n".join(map(json.dumps, rows)))
    with pytest.raises(InlayError, match="needs one text, and there are several"):
        tasks.load(spec(data=data, text=("one", "two"), label="tags", kind="token-classification"))
    several = [{"text": f"three words {i}", "label": ["sad", "long"]} for i in range(20)]
    with pytest.raises(InlayError, match="Several labels for one text are --kind multi-label"):
        tasks.load(spec(data=write("b.jsonl", "\n".join(map(json.dumps, several))), kind="token-classification"))


def test_spans_of_words_and_of_characters(write: Write, spec: MakeSpec) -> None:
    words = [{"tokens": ["in", "Rome", str(i)], "start": 1, "end": 2, "label": "ab"[i % 2]} for i in range(20)]
    task = tasks.load(spec(data=write("a.jsonl", "\n".join(map(json.dumps, words)))))
    assert (task.kind, task.fields) == (kinds.SPANS, ("text", "span"))
    assert task.train[0]["text"].startswith("in [ Rome ] ")
    characters = [{"text": f"in Rome {i}", "start": 3, "end": 7, "label": "ab"[i % 2]} for i in range(20)]
    task = tasks.load(spec(data=write("b.jsonl", "\n".join(map(json.dumps, characters)))))
    assert task.train[0]["span"] == "Rome"
    for bad, message in (({"end": 99}, "does not lie in a text"), ({"start": "x"}, "whole numbers")):
        with pytest.raises(InlayError, match=message):
            tasks.load(spec(data=write("c.jsonl", "\n".join(json.dumps(row | bad) for row in characters))))


def test_running_text(write: Write, spec: MakeSpec) -> None:
    task = tasks.load(spec(data=write("book.txt", "\n".join(f"line {i}\n" for i in range(50))), kind="causal-lm"))
    assert (task.kind, task.metrics, task.num_labels) == (kinds.CAUSAL_LM, ("perplexity",), None)
    lines = [*task.train["text"], *task.validation["text"], *task.test["text"]]
    assert "\n".join(lines).strip() == "\n".join(f"line {i}\n" for i in range(50)).strip()
    assert not task.generates


def test_prompts_with_answers(write: Write, spec: MakeSpec) -> None:
    text = "ask,reply\n" + "".join(f"what is {i}?,it is {i}\n" for i in range(30))
    task = tasks.load(spec(data=write("a.csv", text), kind="causal-lm", text=("ask",), label="reply"))
    assert task.fields == ("ask",)
    assert task.train[0]["target"].startswith("it is")
    assert task.generates
    assert task.selection_metric == "perplexity"
    assert task.score_texts([row["target"] for row in task.test], task.test) == {"exact-match": 1.0}
    assert "prompt and answer are joined by one blank, unless white space stands there already" in task.notes
    twice = tasks.load(spec(data=write("a.csv", text), kind="causal-lm", text=("ask", "reply")))
    assert twice.digest == task.digest


def test_data_to_text_groups_the_references(write: Write, spec: MakeSpec) -> None:
    text = "mr,ref\n" + "".join(f"name {i // 3},text {i}\n" for i in range(60))
    task = tasks.load(spec(data=write("a.csv", text), kind="data-to-text", text=("mr",), label="ref"))
    assert all(len(row["references"]) == 3 for row in task.test)
    assert not set(task.train["source"]) & set(task.test["source"])
    assert len(task.train) + 3 * len(task.validation) + 3 * len(task.test) == 60
    assert task.metrics[0] == "bleu"
    with pytest.raises(InlayError, match="needs the text to write"):
        tasks.load(spec(data=write("a.csv", text), kind="data-to-text", text=("mr",)))


# --------------------------------------------------------------------------------------------------------- images


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Two class folders of ten images in different modes."""
    modes = ["RGB", "L", "RGBA", "P", "CMYK", "LA", "1", "I;16"]
    for c, name in enumerate(("ants", "bees")):
        for i in range(10):
            mode = modes[i % len(modes)]
            grey = np.full((12, 10), 20 * i + c, dtype=np.uint8)
            picture = (
                Image.fromarray(grey.astype(np.uint16) * 257) if mode == "I;16" else Image.fromarray(grey).convert(mode)
            )
            path = tmp_path / "photos" / name / f"{i}.{'jpg' if mode == 'CMYK' else 'png'}"
            path.parent.mkdir(parents=True, exist_ok=True)
            picture.save(path)
    return tmp_path / "photos"


def test_a_folder_of_photos(photos: Path, spec: MakeSpec, processor: Any) -> None:
    task = tasks.load(spec(data=photos))
    assert (task.kind, task.label_names, task.name) == (kinds.IMAGES, ("ants", "bees"), "photos")
    assert (len(task.train), len(task.validation), len(task.test)) == (14, 2, 4)
    assert np.bincount(task.test["label"]).tolist() == [2, 2]
    assert task.test[0]["image"].size == (10, 12)
    made = task.encode("train", processor)
    batch = task.collator(processor)([made[i] for i in range(len(made))])
    assert batch["pixel_values"].shape == (14, 3, 16, 16)


def test_the_digest_of_photos_is_of_their_content(photos: Path, spec: MakeSpec) -> None:
    first = tasks.load(spec(data=photos)).digest
    moved = photos.rename(photos.parent / "elsewhere")
    assert tasks.load(spec(data=moved)).digest == first
    Image.new("RGB", (5, 5), "red").save(moved / "ants" / "0.png")
    assert tasks.load(spec(data=moved)).digest != first


def test_a_table_of_pictures(photos: Path, spec: MakeSpec) -> None:
    rows = [f"{p.relative_to(photos)},{p.parent.name}" for p in sorted(photos.rglob("*.*g"))]
    (photos / "list.csv").write_text("file,species\n" + "\n".join(rows))
    task = tasks.load(spec(data=photos / "list.csv"))
    assert (task.kind, task.label_names) == (kinds.IMAGES, ("ants", "bees"))
    assert task.digest == tasks.load(spec(data=photos / "list.csv", image="file", label="species")).digest
    (photos / "list.csv").write_text("file,species\nants/nowhere.png,ants\n" + "\n".join(rows))
    with pytest.raises(InlayError, match=r"1 image of 21 cannot be read.*nowhere\.png"):
        tasks.load(spec(data=photos / "list.csv"))


def test_photos_that_are_none_are_counted_and_named(photos: Path, spec: MakeSpec) -> None:
    (photos / "ants" / "x.jpg").write_text("hello")
    (photos / "bees" / "0.png").write_bytes((photos / "bees" / "0.png").read_bytes()[:48])
    with pytest.raises(InlayError, match=r"2 images of 21 cannot be read.*x\.jpg' is not an image.*bees.*0\.png"):
        tasks.load(spec(data=photos))


def test_amounts_from_pictures_are_a_regression(photos: Path, spec: MakeSpec) -> None:
    rows = [f"{p.relative_to(photos)},{i / 7}" for i, p in enumerate(sorted(photos.rglob("*.*g")))]
    (photos / "list.csv").write_text("image,weight\n" + "\n".join(rows))
    task = tasks.load(spec(data=photos / "list.csv"))
    assert (task.kind, task.label_names) == (kinds.IMAGE_REGRESSION, ("weight",))
    assert any(note.startswith("kind: image-regression, because 'weight' holds numbers with") for note in task.notes)
    assert tasks.load(spec(data=photos / "list.csv", kind="regression")).digest == task.digest


def test_a_path_that_is_not_there(spec: MakeSpec) -> None:
    with pytest.raises(InlayError, match="There is no file or folder 'nowhere'"):
        tasks.load(spec(data="nowhere"))


def test_paths_into_objects_lead_there_in_every_split(write: Write, spec: MakeSpec) -> None:
    rows = [
        {"in": {"text": f"text {i}"}, "mood": "ab"[i // 2 % 2], "split": ["train", "test"][i % 2]} for i in range(20)
    ]
    task = tasks.load(spec(data=write("a.jsonl", "\n".join(map(json.dumps, rows))), text=("in.text",), label="mood"))
    assert (len(task.train) + len(task.validation), len(task.test)) == (10, 10)
