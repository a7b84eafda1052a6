"""Text files as people have them: encodings, delimiters, and what is odd in JSON and Parquet."""

from __future__ import annotations

import codecs
import csv
import gzip
import io
import json
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from inlay import tasks
from inlay.errors import InlayError
from inlay.records.spec import Spec
from inlay.tasks import folders, tables
from inlay.tasks.tables import DELIMITERS, delimiter_of, read_delimited

Write = Callable[[str, str], Path]
MakeSpec = Callable[..., Spec]

TEXT = "text,label\nun café à Zürich: 5 €,gut\nмышь,плохо\n"
ROWS = [{"text": "un café à Zürich: 5 €", "label": "gut"}, {"text": "мышь", "label": "плохо"}]


# -------------------------------------------------------------------------------------------------------- encodings


@pytest.mark.parametrize(
    ("raw", "note"),
    [
        (TEXT.encode(), []),
        (TEXT.encode("utf-8-sig"), []),
        (TEXT.encode("utf-16"), ["a.csv: read as UTF-16"]),
        (codecs.BOM_UTF16_BE + TEXT.encode("utf-16-be"), ["a.csv: read as UTF-16"]),
        (TEXT.encode("utf-32"), ["a.csv: read as UTF-32"]),
        (TEXT.encode("utf-16-le"), ["a.csv: read as UTF-16"]),
        (TEXT.encode("utf-16-be"), ["a.csv: read as UTF-16"]),
    ],
    ids=["utf-8", "utf-8-sig", "utf-16", "utf-16-be marked", "utf-32", "utf-16-le bare", "utf-16-be bare"],
)
def test_encodings(tmp_path: Path, raw: bytes, note: list[str]) -> None:
    (tmp_path / "a.csv").write_bytes(raw)
    table = tables.read_table(tmp_path / "a.csv")
    assert (table.rows, table.notes) == (ROWS, note)
    (tmp_path / "a.csv.gz").write_bytes(gzip.compress(raw))
    assert tables.read_table(tmp_path / "a.csv.gz").rows == ROWS


def test_every_text_file_may_be_utf_16(tmp_path: Path, spec: MakeSpec) -> None:
    (tmp_path / "a.jsonl").write_bytes("\n".join(json.dumps(r, ensure_ascii=False) for r in ROWS).encode("utf-16"))
    assert tables.read_table(tmp_path / "a.jsonl").rows == ROWS
    (tmp_path / "a.json").write_bytes(json.dumps(ROWS, ensure_ascii=False).encode("utf-16"))
    assert tables.read_table(tmp_path / "a.json").rows == ROWS
    (tmp_path / "a.txt").write_bytes("\n".join(f"línea {i}" for i in range(50)).encode("utf-16"))
    task = tasks.load(spec(data=tmp_path / "a.txt", kind="causal-lm"))
    assert task.train["text"][0] == "línea 0"
    assert "a.txt: read as UTF-16" in task.notes
    for name in ("one", "two"):
        (tmp_path / "d" / name).mkdir(parents=True)
        (tmp_path / "d" / name / "1.txt").write_bytes("größer".encode("utf-16"))
    assert {row["text"] for row in folders.read_folder(tmp_path / "d")["all"].rows} == {"größer"}


def test_a_file_that_is_cut_within_a_character(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(TEXT.encode("utf-16")[:-1])
    with pytest.raises(InlayError, match=r"begins as UTF-16 and is not: truncated data at byte \d+\. Save it as UTF-8"):
        tables.read_table(tmp_path / "a.csv")


@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1))
def test_utf8_is_never_taken_for_anything_else(text: str) -> None:
    from inlay.tasks.tables import _wide_encoding

    assert _wide_encoding(text.encode()) is None


# ------------------------------------------------------------------------------------------------------- delimiters


@pytest.mark.parametrize("delimiter", DELIMITERS)
@pytest.mark.parametrize("ending", ["csv", "tsv"])
def test_any_delimiter_in_any_file(write: Write, delimiter: str, ending: str) -> None:
    rows = [["text", "label"], ["hello; you, there | all", "x"], ["5 euros", "10"]]
    text = io.StringIO()
    csv.writer(text, delimiter=delimiter).writerows(rows)
    table = tables.read_table(write(f"a.{ending}", text.getvalue()))
    assert [list(row.values()) for row in table.rows] == rows[1:]
    usual = {"csv": ",", "tsv": "\t"}[ending]
    assert table.notes == ([] if delimiter == usual else [f"a.{ending}: columns are divided by {delimiter!r}"])


@pytest.mark.parametrize(
    ("text", "rows"),
    [
        ("text;price\ngood;10,42\nbad;7,5\n", [["good", "10,42"], ["bad", "7,5"]]),
        ("text|label|note, if any\na, b|x|\nc|y|z\n", [["a, b", "x", ""], ["c", "y", "z"]]),
        ('text|label\n"a|b"|x\n', [["a|b", "x"]]),
        ("text\nhello\nyou\n", [["hello"], ["you"]]),
        ("text\nhello; you\n", [["hello; you"]]),
        ("text,label\na|b,x\nc|d,y\n", [["a|b", "x"], ["c|d", "y"]]),
    ],
)
def test_what_divides_header_and_rows_alike(write: Write, text: str, rows: list[list[str]]) -> None:
    assert [list(row.values()) for row in tables.read_table(write("a.csv", text)).rows] == rows


@pytest.mark.parametrize("text", ["text|label\na|b|c\nd|e\n", "text;label\na;b;c\nd;e\n"])
def test_a_ragged_row_is_an_error_whatever_divides(write: Write, text: str) -> None:
    with pytest.raises(InlayError, match=r"line 2: 3 values where the header names 2 columns \(text, label\)"):
        tables.read_table(write("a.csv", text))


cells = st.text(st.characters(exclude_categories=["Cs", "Cc", "Zl", "Zp"]), max_size=12)


@given(
    st.sampled_from(DELIMITERS),
    st.integers(2, 4).flatmap(lambda n: st.lists(st.lists(cells, min_size=n, max_size=n), min_size=1, max_size=60)),
    st.sampled_from([",", "\t"]),
)
def test_what_was_written_is_read(delimiter: str, rows: list[list[str]], usual: str) -> None:
    header = [f"column{i}" for i in range(len(rows[0]))]
    text = io.StringIO()
    csv.writer(text, delimiter=delimiter, quoting=csv.QUOTE_ALL).writerows([header, *rows])
    assert delimiter_of(text.getvalue(), usual) == delimiter
    columns, found, _ = read_delimited(Path("a.csv"), text.getvalue(), usual)
    assert columns == header
    assert [list(row.values()) for row in found] == rows


def test_a_long_file_is_known_by_its_beginning(write: Write) -> None:
    rows = "".join(f'"a long, long text\nof lines {i}"|x{i}\n' for i in range(5000))
    table = tables.read_table(write("a.csv", "text|label\n" + rows))
    assert (len(table.rows), table.rows[-1]["label"]) == (5000, "x4999")


# ------------------------------------------------------------------------------------------------- odd JSON, Parquet


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.jsonl", '{"a": ' + "[" * 100_000 + "]" * 100_000 + "}", r"line 1: not JSON \(lists or objects within one"),
        ("a.json", "[" * 100_000 + "]" * 100_000, "not JSON"),
        ("a.jsonl", '{"a": ' + "9" * 5000 + "}", r"line 1: not JSON \(Exceeds the limit"),
        ("a.jsonl", '{"te\\ud800xt": 1}', r"a\.jsonl: 'the name of a column' holds half a character"),
        ("a.csv", "te\0xt,label\na,b\n", "'the name of a column' holds a NUL character"),
    ],
    ids=["deep", "deep list", "digits", "half a name", "NUL in a name"],
)
def test_odd_files_are_one_error(write: Write, name: str, text: str, message: str) -> None:
    with pytest.raises(InlayError, match=message) as raised:
        tables.read_table(write(name, text))
    assert len(str(raised.value)) < 500


def test_odd_parquet_is_one_error(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    broken = pa.StringArray.from_buffers(1, pa.array([0, 2], pa.int32()).buffers()[1], pa.py_buffer(b"\xff\xfe"))
    pq.write_table(pa.table({"text": broken}), path)
    with pytest.raises(InlayError, match="not a Parquet file that can be read"):
        tables.read_table(path)
    good = pa.table({"label": [0, 1]})
    for metadata in ({"class_names": "{"}, {"class_names": "[1, 2]"}, {"huggingface": '{"info": {"features": [1]}}'}):
        pq.write_table(good.replace_schema_metadata(metadata), path)
        if "huggingface" in metadata:
            assert tables.read_table(path).class_names is None
        else:
            with pytest.raises(InlayError, match="not a Parquet file that can be read"):
                tables.read_table(path)
    pq.write_table(pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], names=["text", "text"]), path)
    with pytest.raises(InlayError, match=r"that can be read \(Multiple matches"):
        tables.read_table(path)
