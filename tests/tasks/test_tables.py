"""Tables and folders from disk, and what is said of broken ones."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from inlay.errors import InlayError
from inlay.tasks import folders, tables

Write = Callable[[str, str], Path]
ROWS = [{"text": 'a "quoted", text', "label": "x"}, {"text": "two\nlines", "label": "y"}]


def test_csv_with_quotes_line_breaks_and_a_byte_order_mark(write: Write) -> None:
    path = write("a.csv", '\ufefftext,label\r\n"a ""quoted"", text",x\r\n"two\nlines",y\r\n\r\n')
    table = tables.read_table(path)
    assert (table.columns, table.rows) == (["text", "label"], ROWS)


def test_semicolons_are_noticed(write: Write) -> None:
    table = tables.read_table(write("a.csv", "text;label\nhello, you;x\n"))
    assert table.rows == [{"text": "hello, you", "label": "x"}]
    assert "';'" in table.notes[0]


def test_a_nameless_first_column_is_row_numbers(write: Write) -> None:
    table = tables.read_table(write("a.csv", ",text,label\n0,hello,x\n"))
    assert table.rows == [{"text": "hello", "label": "x"}]
    assert "row numbers" in table.notes[0]


def test_tsv_with_bare_quotes_and_with_real_ones(write: Write) -> None:
    bare = tables.read_table(write("a.tsv", 'text\tlabel\n"hello he said\tx\n5" disk\ty\n'))
    assert [row["text"] for row in bare.rows] == ['"hello he said', '5" disk']
    real = tables.read_table(write("b.tsv", 'text\tlabel\n"a ""b"""\tx\n"two\nlines"\ty\n'))
    assert [row["text"] for row in real.rows] == ['a "b"', "two\nlines"]
    spreadsheet = tables.read_table(write("c.tsv", 'text\tlabel\n"a ""b"""\tx\n'))
    assert spreadsheet.rows == [{"text": 'a "b"', "label": "x"}]


def test_json_lines_zipped_json_and_parquet(tmp_path: Path) -> None:
    lines = "\n".join(json.dumps(row) for row in ROWS)
    (tmp_path / "a.jsonl").write_text(lines + "\n\n")
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    (tmp_path / "a.json").write_text(json.dumps(ROWS))
    (tmp_path / "b.json").write_text(lines)
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "a.parquet")
    for name in ("a.jsonl", "a.jsonl.gz", "a.json", "b.json", "a.parquet"):
        assert tables.read_table(tmp_path / name).rows == ROWS, name


def test_what_an_object_lacks_is_missing(write: Write) -> None:
    assert tables.read_table(write("a.jsonl", '{"a": 1}\n{"b": 2}\n')).rows == [
        {"a": 1, "b": None},
        {"a": None, "b": 2},
    ]


def test_class_names_in_parquet(tmp_path: Path) -> None:
    table = pa.table({"label": [0, 1]})
    pq.write_table(table.replace_schema_metadata({"class_names": '["ants", "bees"]'}), tmp_path / "a.parquet")
    hub = {"info": {"features": {"label": {"names": ["cat", "dog"], "_type": "ClassLabel"}}}}
    pq.write_table(table.replace_schema_metadata({"huggingface": json.dumps(hub)}), tmp_path / "b.parquet")
    assert tables.read_table(tmp_path / "a.parquet").class_names == ["ants", "bees"]
    assert tables.read_table(tmp_path / "b.parquet").class_names == ["cat", "dog"]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.csv", "", r"a\.csv' is empty"),
        ("a.csv", "text,label\n", "has no rows"),
        ("a.csv", "text,label\nx,1\na,b,c\n", r"line 3: 3 values where the header names 2 columns \(text, label\)"),
        ("a.csv", "text,label\nx,1\nonly\n", "line 3: 1 values"),
        ("a.csv", 'text,label\nx,1\n"never closed,1\ny,2\n', "line 4.*quotes"),
        ("a.csv", "text,text\nx,1\n", "a column twice: text"),
        ("a.csv", "text,\nx,1\n", "a column without a name"),
        ("a.jsonl", '{"a": 1}\n{"a": \n', "line 2: not JSON"),
        ("a.jsonl", '{"a": 1}\n[1]\n', "line 2: an object"),
        ("a.json", "[1, 2]", "list of objects"),
        ("a.parquet", "no", "not a Parquet file"),
        ("a.xlsx", "x", "Save the sheet as CSV"),
        ("a.doc", "x", "is not a table"),
        ("a.jsonl.gz", "x", "not a complete gzip"),
    ],
)
def test_broken_tables(write: Write, name: str, text: str, message: str) -> None:
    with pytest.raises(InlayError, match=message):
        tables.read_table(write(name, text))


def test_text_that_is_not_utf8_is_named_by_its_line(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes("text,label\nx,1\ncaf\xe9,2\n".encode("latin1"))
    with pytest.raises(InlayError, match=r"not UTF-8: byte 0xe9 in line 3.*iconv"):
        tables.read_table(tmp_path / "a.csv")


def test_an_absent_file(tmp_path: Path) -> None:
    with pytest.raises(InlayError, match="There is no file"):
        tables.read_table(tmp_path / "none.csv")


# ------------------------------------------------------------------------------------------------------- folders


def picture(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (4, 4)).save(path)


def test_class_folders_at_any_depth_without_strangers(tmp_path: Path) -> None:
    for name in ("cats/1.png", "cats/deep/2.PNG", "dogs/1.jpg"):
        picture(tmp_path / name)
    (tmp_path / "cats" / "notes.md").write_text("")
    (tmp_path / "cats" / ".DS_Store").write_text("")
    (tmp_path / ".git").mkdir()
    (table,) = folders.read_folder(tmp_path).values()
    assert [(Path(row["image"]).name, row["label"]) for row in table.rows] == [
        ("1.png", "cats"),
        ("2.PNG", "cats"),
        ("1.jpg", "dogs"),
    ]
    assert table.notes[1:] == ["1 file that is no example was left out (cats/notes.md)"]


def test_folders_named_after_splits(tmp_path: Path) -> None:
    for split in ("train", "val", "test"):
        for name in ("cats", "dogs"):
            picture(tmp_path / split / name / "1.png")
    assert {split: len(table.rows) for split, table in folders.read_folder(tmp_path).items()} == {
        "train": 2,
        "validation": 2,
        "test": 2,
    }


def test_tables_named_after_splits(write: Write, tmp_path: Path) -> None:
    write("train.csv", "text,label\na,x\n")
    write("dev.jsonl", '{"text": "b", "label": "y"}\n')
    assert list(folders.read_folder(tmp_path)) == ["validation", "train"]


def test_folders_of_texts(write: Write, tmp_path: Path) -> None:
    write("sport/1.txt", "goal")
    write("news/1.txt", "vote")
    (table,) = folders.read_folder(tmp_path).values()
    assert table.rows == [{"text": "vote", "label": "news"}, {"text": "goal", "label": "sport"}]


@pytest.mark.parametrize(
    ("made", "message"),
    [
        ([], "there is nothing"),
        (["1.png"], "images but no class folders"),
        (["readme.md"], "there is readme.md"),
        (["cats/a.md"], "no image or text file"),
        (["cats/1.png", "dogs/a.md"], "the class folder 'dogs' holds no image"),
        (["cats/1.png", "dogs/1.txt"], "mixes 1 images and 1 text files"),
        (["train/1.png", "test/cats/1.png"], "one folder a class"),
    ],
)
def test_folders_that_are_not_understood(tmp_path: Path, made: list[str], message: str) -> None:
    for name in made:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    with pytest.raises(InlayError, match=message):
        folders.read_folder(tmp_path)


def test_a_column_named_split_divides_a_table(write: Write) -> None:
    parts = folders.by_split(tables.read_table(write("a.csv", "text,label,Split\na,x,train\nb,y,TEST\nc,x,train\n")))
    assert {split: [row["text"] for row in table.rows] for split, table in parts.items()} == {
        "train": ["a", "c"],
        "test": ["b"],
    }
    other = tables.read_table(write("b.csv", "text,split\na,left\nb,right\n"))
    with pytest.raises(InlayError, match=r"b\.csv, row 1: the column 'split' says 'left'.*or rename the column"):
        folders.by_split(other)
    assert list(folders.by_split(other, used=["split"])) == ["all"]
