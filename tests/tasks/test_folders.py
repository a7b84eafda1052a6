"""The division that a user's data brings is used whole, or there is an error: no value of it is passed over."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from inlay import tasks
from inlay.errors import InlayError
from inlay.records.spec import Spec
from inlay.tasks import TaskSchema, folders, kinds
from inlay.tasks.folders import SPLIT_NAMES, resembles_split, split_of
from inlay.tasks.scored_rows import read_labelled
from inlay.tasks.tables import Table

Write = Callable[[str, str], Path]
MakeSpec = Callable[..., Spec]


@pytest.mark.parametrize(
    ("said", "split"),
    [
        ("train ", "train"),
        ("Training", "train"),
        ("\ttrain-set", "train"),
        ("eval", "validation"),
        ("Evaluation", "validation"),
        ("DEV", "validation"),
        ("val", "validation"),
        ("holdout", "test"),
        ("held-out", "test"),
        ("Hold_Out", "test"),
        ("held out set", "test"),
        ("testing", "test"),
        ("set", None),
        ("", None),
        ("fold 1", None),
        ("left", None),
    ],
)
def test_the_usual_names(said: str, split: str | None) -> None:
    assert split_of(said) == split


def spelled(name: str) -> st.SearchStrategy[str]:
    """A name as people write it: with blanks around it, in any case, with "set" after it."""
    cases = st.sampled_from([str.lower, str.upper, str.title])
    blanks = st.text(" \t", max_size=2)
    return st.builds(
        lambda case, left, right, end: f"{left}{case(name)}{end}{right}",
        cases,
        blanks,
        blanks,
        st.sampled_from(["", "set", " set", "_Set"]),
    )


names = st.sampled_from(sorted(SPLIT_NAMES))
words = names.flatmap(lambda name: st.tuples(spelled(name), st.just(SPLIT_NAMES[name])))


@given(st.lists(words, min_size=1, max_size=20))
def test_every_row_goes_where_its_word_says(values: list[tuple[str, str]]) -> None:
    rows = [{"text": str(i), "split": word} for i, (word, _) in enumerate(values)]
    parts = folders.by_split(Table(Path("a.csv"), ["text", "split"], rows))
    found = {int(row["text"]): split for split, part in parts.items() for row in part.rows}
    assert found == {i: split for i, (_, split) in enumerate(values)}
    numbers = {int(row["text"]): number for part in parts.values() for number, row in part.numbered}
    assert numbers == {i: i + 1 for i in range(len(values))}


@given(
    st.lists(words, max_size=10),
    st.one_of(st.text(max_size=6), st.none(), st.integers(), st.floats(), st.lists(st.just("train"), max_size=2)),
    st.integers(0, 10),
)
def test_one_value_that_is_no_split_is_never_passed_over(
    values: list[tuple[str, str]], odd: object, place: int
) -> None:
    said: list[object] = [word for word, _ in values]
    said.insert(place, odd)
    if isinstance(odd, str) and split_of(odd):
        return
    rows = [{"text": str(i), "split": word} for i, word in enumerate(said)]
    with pytest.raises(
        InlayError, match=rf"^a\.csv, row {min(place, len(values)) + 1}: the column 'split' (is empty|says)"
    ):
        folders.by_split(Table(Path("a.csv"), ["text", "split"], rows))


def lines(odd: str = "train") -> str:
    """Forty rows, the first ten to test on; the last says something else."""
    said = ["test"] * 10 + ["train"] * 29 + [odd]
    return "text,label,split\n" + "".join(f"w {i},{'ab'[i % 2]},{word}\n" for i, word in enumerate(said))


@pytest.mark.parametrize("odd", ["train ", "Training", "eval", "holdout"])
def test_an_odd_name_does_not_discard_the_users_split(write: Write, spec: MakeSpec, odd: str) -> None:
    task = tasks.load(spec(data=write("a.csv", lines(odd))))
    own = {f"w {i}" for i in range(10)}
    assert not own & {*task.train["text"], *task.validation["text"]}
    assert own <= set(task.test["text"])
    assert len(task.train) + len(task.validation) + len(task.test) == 40
    if odd != "train ":
        assert any(f"{odd!r} (1 rows)" in note for note in task.notes), task.notes


@pytest.mark.parametrize(
    ("odd", "message"),
    [
        (
            "tets",
            r"a\.csv, row 40: the column 'split' says 'tets', which is not the name of a split\. Known: train: train",
        ),
        ("", r"a\.csv, row 40: the column 'split' is empty"),
        ("  ", r"a\.csv, row 40: the column 'split' is empty"),
    ],
)
def test_an_unknown_name_is_an_error_with_its_row(write: Write, spec: MakeSpec, odd: str, message: str) -> None:
    with pytest.raises(InlayError, match=message):
        tasks.load(spec(data=write("a.csv", lines(odd))))


def test_a_column_that_is_the_label_does_not_divide(write: Write, spec: MakeSpec) -> None:
    text = "text,split\n" + "".join(f"w {i},{('left', 'right')[i % 2]}\n" for i in range(30))
    task = tasks.load(spec(data=write("a.csv", text), text=("text",), label="split"))
    assert task.label_names == ("left", "right")


def test_it_does_not_divide_what_is_evaluated_either(write: Write) -> None:
    schema = TaskSchema("sides", kinds.CLASSIFICATION, ("text",), ("accuracy",), ("left", "right"))
    path = write("a.csv", "text,split\na,left\nb,right\n")
    assert list(read_labelled(schema, path, "split").test["label"]) == [0, 1]


def test_rows_keep_their_numbers_in_the_file(write: Write, spec: MakeSpec) -> None:
    rows = [f"w {i},{'many' if i == 20 else i / 3},{'test' if i < 10 else 'train'}" for i in range(40)]
    with pytest.raises(InlayError, match=r"a\.csv \(train\), row 21: the value 'many' of 'label' is not a number"):
        tasks.load(spec(data=write("a.csv", "\n".join(["text,label,split", *rows])), kind="regression"))


def test_a_division_by_another_name_is_said(write: Write, spec: MakeSpec) -> None:
    text = lines().replace("split", "partition", 1)
    task = tasks.load(spec(data=write("a.csv", text), text=("text",), label="label"))
    assert any("the column 'partition' names splits and is not used" in note for note in task.notes)


# ------------------------------------------------------------------------------------------------ files and folders


def test_tables_by_any_usual_name(write: Write, tmp_path: Path) -> None:
    for name in ("Training.csv", "eval.csv", "held-out.csv"):
        write(f"d/{name}", "text,label\na,x\n")
    assert sorted(folders.read_folder(tmp_path / "d")) == ["test", "train", "validation"]


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["train.csv", "training.csv"], r"has both 'train\.csv' and 'training\.csv', which are one split \(train\)"),
        (["train.csv", "train.jsonl"], r"has both 'train\.csv' and 'train\.jsonl'"),
        (["train.csv", "tset.csv"], r"'tset\.csv' beside 'train\.csv', and that is not the name of a split"),
        (["train.csv", "my_test.csv"], r"'my_test\.csv' beside 'train\.csv'"),
    ],
)
def test_tables_that_would_be_passed_over(write: Write, tmp_path: Path, names: list[str], message: str) -> None:
    for name in names:
        write(f"d/{name}", '{"text": "a", "label": "x"}\n' if name.endswith("jsonl") else "text,label\na,x\n")
    with pytest.raises(InlayError, match=message):
        folders.read_folder(tmp_path / "d")


def test_other_tables_beside_the_splits_are_said_to_be_left_out(write: Write, tmp_path: Path) -> None:
    for name in ("train.csv", "sample_submission.csv"):
        write(f"d/{name}", "text,label\na,x\n")
    assert folders.read_folder(tmp_path / "d")["train"].notes == [
        "taken as training: 'train.csv'",
        "left out, since no split is called so: sample_submission.csv",
    ]


def test_a_split_that_is_divided_again(write: Write, tmp_path: Path) -> None:
    write("d/train.csv", "text,label,split\na,x,train\nb,y,test\n")
    with pytest.raises(InlayError, match="its column 'split' divides it again"):
        folders.read_folder(tmp_path / "d")


@pytest.mark.parametrize(
    ("names", "splits"),
    [
        (["Train ", "Held-Out"], {"train": 2, "test": 2}),
        (["training", "eval", "testing"], {"train": 2, "validation": 2, "test": 2}),
    ],
)
def test_folders_by_any_usual_name(tmp_path: Path, names: list[str], splits: dict[str, int]) -> None:
    photos(tmp_path, names)
    assert {split: len(table.rows) for split, table in folders.read_folder(tmp_path).items()} == splits


def photos(root: Path, names: list[str]) -> None:
    for folder in names:
        for name in ("cats", "dogs"):
            (root / folder / name).mkdir(parents=True)
            Image.new("RGB", (4, 4)).save(root / folder / name / "1.png")


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["train", "training"], "has both 'train' and 'training'"),
        (["train", "tset"], "'tset' beside 'train', and that is not the name of a split"),
        (["trian", "test"], "is divided into 'test', and nothing in it is called train .there is 'trian'"),
    ],
)
def test_folders_that_would_be_classes_or_lost(tmp_path: Path, names: list[str], message: str) -> None:
    photos(tmp_path, names)
    with pytest.raises(InlayError, match=message):
        folders.read_folder(tmp_path)


def test_classes_may_be_called_as_splits_are(write: Write, tmp_path: Path) -> None:
    for name in ("dev", "ops", "test"):
        write(f"tickets/{name}/1.txt", "text")
    (table,) = folders.read_folder(tmp_path / "tickets").values()
    assert [row["label"] for row in table.rows] == ["dev", "ops", "test"]


@pytest.mark.parametrize("name", ["tset", "trian", "test_old", "train-00000-of-00002", "vaildation", "tests"])
def test_what_resembles_a_split(name: str) -> None:
    assert resembles_split(name)


@pytest.mark.parametrize("name", ["test_labels", "train_lowres", "best", "rest", "sample_submission", "test_old"])
def test_what_lies_beside_whole_splits_is_only_passed_over(name: str) -> None:
    assert not resembles_split(name, {"train", "test"})
    assert resembles_split("test_old", {"train"}), "a test set that would be left out"


@pytest.mark.parametrize("name", ["labels", "sample_submission", "dataset_infos", "metadata", "unlabeled", "README"])
def test_what_does_not(name: str) -> None:
    assert not resembles_split(name)
