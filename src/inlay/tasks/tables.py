"""Tables from disk: CSV, TSV, JSON lines, JSON, Parquet, plain text.

Whatever is wrong with a file is said once, with its name and the line. Nothing is guessed at: a ragged row is an
error, not a row with holes.
"""

from __future__ import annotations

import codecs
import csv
import gzip
import io
import itertools
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from inlay.errors import InlayError, first_line
from inlay.tasks.cells import as_text, is_chat, reach
from inlay.tasks.lazy_rows import ArrowRows, JsonRows, LazyRows
from inlay.tasks.questions import flatten

Row = dict[str, Any]

TABLES = (".csv", ".tsv", ".jsonl", ".ndjson", ".json", ".parquet")
IMAGES = (
    *(".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm", ".jfif"),
    *(".jp2", ".j2k", ".jpx", ".avif", ".heic", ".heif"),
)
TEXTS = (".txt",)


@dataclass
class Table:
    """Rows with named columns, and where they came from. `class_names` when the file brings them.

    `numbers` are those of the rows in the file, where they are not simply counted from 1.
    """

    path: Path
    columns: list[str]
    rows: Sequence[Row]
    class_names: list[str] | None = None
    notes: list[str] = field(default_factory=list)
    numbers: Sequence[int] | None = None

    @property
    def numbered(self) -> Iterable[tuple[int, Row]]:
        """The rows, each with its number in the file."""
        return zip(self.numbers or range(1, len(self.rows) + 1), self.rows, strict=True)

    def add_paths(self, names: Iterable[str]) -> None:
        """Add a column for each dotted path among the names: `review.body` is `body` in the objects of `review`."""
        for name in names:
            if name not in self.columns and "." in name:
                found = [reach(row, name) for row in self.rows]
                if any(value is not None for value in found):
                    self.settle()
                    self.columns.append(name)
                    for row, value in zip(self.rows, found, strict=True):
                        row[name] = value

    def settle(self) -> None:
        """Read all rows, if they were still to be read: see `lazy_rows`."""
        if isinstance(self.rows, LazyRows):
            self.rows = list(self.rows)

    @property
    def untyped(self) -> bool:
        """Whether every value is text, so that nothing can be told from the word for it."""
        return suffix(self.path) in (".csv", ".tsv")


def suffix(path: Path) -> str:
    """The ending that says what a file is, `.gz` set aside."""
    name = path.name.lower()
    return Path(name.removesuffix(".gz")).suffix


def read_table(path: Path) -> Table:
    """The table in a file, by the file's ending."""
    if not path.exists():
        raise InlayError(f"There is no file {str(path)!r}. Check the path.")
    kind = suffix(path)
    if kind not in TABLES:
        hint = " Save the sheet as CSV." if kind in (".xls", ".xlsx", ".ods") else ""
        if is_image(path):
            hint = " Images to learn from come in a folder that has a folder for each class."
        raise InlayError(
            f"{str(path)!r} is not a table that can be read: the ending is none of {', '.join(TABLES)}.{hint}"
        )
    check_regular(path)
    try:
        table = _parquet(path) if kind == ".parquet" else _text_table(path, kind)
    except OSError as error:
        raise InlayError(f"Cannot read {str(path)!r}: {error.strerror or error}.") from error
    if not table.rows:
        raise InlayError(f"{str(path)!r} has no rows. Check that it is the right file.")
    for name in table.columns:
        as_text(name, "the name of a column", path.name)
    return table


def _text_table(path: Path, kind: str) -> Table:
    if kind in (".jsonl", ".ndjson") and not _may_be_wide(path):
        return _from_lines(path, _stream(path))
    text, notes = decode(path)
    if not text.strip():
        raise InlayError(f"{str(path)!r} is empty.")
    if kind == ".json":
        table = _json(path, text)
    elif kind in (".jsonl", ".ndjson"):
        table = _from_lines(path, text.split("\n"))
    else:
        columns, rows, found = read_delimited(path, text, "\t" if kind == ".tsv" else ",")
        table = Table(path, columns, rows, notes=found)
    table.notes[:0] = notes
    return table


# ---------------------------------------------------------------------------------------------------------- JSON


def _stream(path: Path) -> Iterator[str]:
    """The lines of a file in UTF-8, one at a time: large ones need not be in memory as text and as rows."""
    blank = True
    with gzip.open(path) if path.name.lower().endswith(".gz") else path.open("rb") as file:
        try:
            for number, line in enumerate(file):
                text = line.decode("utf-8-sig" if number == 0 else "utf-8")
                blank = blank and not text.strip()
                yield text
        except (UnicodeDecodeError, gzip.BadGzipFile, EOFError):
            decode(path)  # which says what is the matter, and where
            raise
    if blank:
        raise InlayError(f"{str(path)!r} is empty.")


def _json_lines(path: Path, lines: Iterable[str]) -> Iterator[tuple[str, Row]]:
    """The lines that are not blank, and the object that each holds."""
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            _refuse_list(path, number, line)
            raise InlayError(f"{str(path)!r}, line {number}: not JSON ({_reason(error)}).") from None
        if not isinstance(record, dict):
            _refuse_list(path, number, line)
            raise InlayError(f"{str(path)!r}, line {number}: an object {{...}} is expected, one a line.")
        yield line, record


def _refuse_list(path: Path, number: int, line: str) -> None:
    if number == 1 and line.lstrip().startswith("[") and suffix(path) in (".jsonl", ".ndjson"):
        raise InlayError(
            f"{str(path)!r} begins with '[': a file of one list is JSON, and one of JSON lines has an object {{...}} "
            "in every line. Give it the ending .json."
        )


def _reason(error: Exception) -> str:
    """Why a text is not JSON, or not JSON that can be read: too deep, or a number of thousands of digits."""
    if isinstance(error, RecursionError):
        return "lists or objects within one another too many times over"
    return error.msg if isinstance(error, json.JSONDecodeError) else first_line(error)


def _json(path: Path, text: str) -> Table:
    """A file of one JSON list of objects; one that holds an object a line is read as JSON lines."""
    try:
        records = json.loads(text)
    except (ValueError, RecursionError):
        return _from_lines(path, text.split("\n"))
    if isinstance(records, dict):
        try:
            records = flatten(records) or [records]
        except InlayError as error:
            raise InlayError(f"{str(path)!r}: {error}") from None
    if not isinstance(records, list) or not all(isinstance(record, dict) for record in records):
        raise InlayError(f"{str(path)!r} should hold a list of objects.")
    return _from_records(path, records)


def _from_lines(path: Path, lines: Iterable[str]) -> Table:
    """Lines of JSON as a table; where the first one has a conversation, the rows stay as text until they are read."""
    found = iter(_json_lines(path, lines))
    first = next(found, None)
    if first is None or not any(map(is_chat, first[1].values())):
        return _from_records(path, [record for _, record in itertools.chain([first] if first else [], found)])
    rows = JsonRows()
    for line, record in itertools.chain([first], found):
        rows.add(line, record)
    return Table(path, list(rows.columns), rows)


def _from_records(path: Path, rows: list[Row]) -> Table:
    """Objects as a table: the columns are all keys that occur, and what an object lacks is missing."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    for place, row in enumerate(rows):
        if list(row) != columns:
            rows[place] = {name: row.get(name) for name in columns}
    return Table(path, columns, rows)


# ------------------------------------------------------------------------------------------------------- Parquet


def _parquet(path: Path) -> Table:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(path)
        chats = any(map(_may_hold_chats, table.schema.types))
        rows = ArrowRows(path, table) if chats else table.to_pylist()
        class_names = parquet_class_names(table.schema)
    except (pa.ArrowException, ValueError, OverflowError, RecursionError) as error:
        raise InlayError(f"{str(path)!r} is not a Parquet file that can be read ({first_line(error)}).") from None
    return Table(path, table.column_names, rows, class_names=class_names)


def _may_hold_chats(kind: Any) -> bool:
    import pyarrow as pa

    return (pa.types.is_list(kind) or pa.types.is_large_list(kind)) and pa.types.is_struct(kind.value_type)


def parquet_class_names(schema: Any) -> list[str] | None:
    """The class names in the metadata of a Parquet file: the key `class_names`, or the hub's own features."""
    metadata = schema.metadata or {}
    names: Any = None
    if b"class_names" in metadata:
        names = json.loads(metadata[b"class_names"])
    elif b"huggingface" in metadata:
        found: Any = json.loads(metadata[b"huggingface"])
        for key in ("info", "features"):
            found = found.get(key, {}) if isinstance(found, dict) else {}
        features = found.values() if isinstance(found, dict) else ()
        names = next((entry["names"] for entry in features if isinstance(entry, dict) and "names" in entry), None)
    if names is not None and not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
        raise ValueError("its metadata should list the names of the classes, and does not")
    return names


def is_image(path: Path) -> bool:
    """Whether the file's ending is that of an image."""
    return path.suffix.lower() in IMAGES


def read_lines(path: Path, column: str = "text") -> Table:
    """A plain text file as a table of its lines, blank ones too but for those at the end, in one column."""
    if not path.exists():
        raise InlayError(f"There is no file {str(path)!r}. Check the path.")
    text, notes = decode(path)
    if not text.strip():
        raise InlayError(f"{str(path)!r} is empty.")
    lines = text.rstrip().split("\n")
    return Table(path, [column], [{column: line.rstrip("\r")} for line in lines], notes=notes)


# ------------------------------------------------------------------------------------------------------- delimited text


DELIMITERS = (",", ";", "\t", "|")
_SAMPLE, _ROWS = 1 << 16, 50  # characters and rows by which a delimiter is found


def read_delimited(path: Path, text: str, usual: str) -> tuple[list[str], list[dict[str, str]], list[str]]:
    """The columns, the rows and notes. `usual` is the delimiter that the file's ending implies."""
    notes: list[str] = []
    delimiter = delimiter_of(text, usual)
    if delimiter != usual:
        notes.append(f"{path.name}: columns are divided by {delimiter!r}")
    lines = _unquoted(text) if delimiter == "\t" else None
    numbered = iter(lines) if lines is not None else _quoted(path, text, delimiter)
    _, columns = next(numbered)
    columns = [name.strip() for name in columns]
    index = columns[0] == "" and len(columns) > 1
    if index:
        columns[0] = "(row number)"
        notes.append(f"{path.name}: the first column has no name and is taken for row numbers")
    doubled = sorted({name for name in columns if columns.count(name) > 1})
    if doubled or "" in columns:
        what = f"twice: {', '.join(doubled)}" if doubled else "without a name"
        raise InlayError(f"{str(path)!r} has a column {what}. The first line must name every column once.")
    rows = []
    for number, values in numbered:
        if len(values) != len(columns):
            raise InlayError(
                f"{str(path)!r}, line {number}: {len(values)} values where the header names {len(columns)} columns "
                f"({', '.join(columns)}). A value that holds the separator {delimiter!r} or a line break must stand in "
                "double quotes."
            )
        rows.append(dict(zip(columns[index:], values[index:], strict=True)))
    return columns[index:], rows, notes


def delimiter_of(text: str, usual: str) -> str:
    """What divides the columns: the usual, unless another divides header and rows alike and the usual does not.

    Where none does, it is one that the header has, so that the error is about the right columns.
    """
    start = text if len(text) <= _SAMPLE else text[: text.rfind("\n", 0, _SAMPLE) + 1] or text[:_SAMPLE]
    candidates = (usual, *(each for each in DELIMITERS if each != usual))
    for each in candidates:
        widths = _widths(start, each)
        # The last row of a part may be cut within quotes.
        if len(start) < len(text) and len(widths) > 1:
            widths.pop()
        if widths and widths[0] > 1 and len(set(widths)) == 1:
            return each
    header = start.partition("\n")[0]
    return next((each for each in candidates if each in header), usual)


def _widths(start: str, delimiter: str) -> list[int]:
    """How many values each of the first rows has."""
    if delimiter == "\t" and (lines := _unquoted(start)) is not None:
        return [len(values) for _, values in lines[:_ROWS]]
    reader = csv.reader(io.StringIO(start, newline=""), delimiter=delimiter)
    try:
        return [len(values) for values in itertools.islice(filter(None, reader), _ROWS)]
    except csv.Error:
        return []


def _quoted(path: Path, text: str, delimiter: str) -> Iterator[tuple[int, list[str]]]:
    """The rows of a file with quotes, each with the number of its last line; blank lines are no rows."""
    csv.field_size_limit(1 << 30)
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    try:
        for values in reader:
            if values:
                yield reader.line_num, values
    except csv.Error as error:
        raise InlayError(f"{str(path)!r}, line {reader.line_num}: {error}. Check the quotes around there.") from None


def _unquoted(text: str) -> list[tuple[int, list[str]]] | None:
    """The rows of a tab-separated file without multi-line quotes (where a quote is mostly just a quote), or None.

    Every line then has the same number of tabs. A value wholly in quotes, as spreadsheets write it, loses them.
    """
    found = enumerate(text.split("\n"), start=1)
    lines = [(number, line.rstrip("\r").split("\t")) for number, line in found if line.strip()]
    if len({len(values) for _, values in lines}) > 1:
        return None
    return [(number, [_bare(value) for value in values]) for number, values in lines]


def _bare(value: str) -> str:
    inner = value[1:-1]
    quoted = len(value) > 1 and value[0] == value[-1] == '"' and '"' not in inner.replace('""', "")
    return inner.replace('""', '"') if quoted else value


# ------------------------------------------------------------------------------------------------------------ encodings


# UTF-32 first: its mark begins with that of UTF-16.
_MARKS = (
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
_LOOKED_AT = 1 << 14  # bytes
# Of the bytes at even or at odd places, how many are 0 in UTF-16 without a mark: most in Latin script, a few elsewhere.
_MANY, _FEW = 0.2, 0.02


def check_regular(path: Path) -> None:
    """Refuse what is there and is not a file: reading a pipe or a device may never end."""
    if path.exists() and not path.is_file():
        what = "a folder" if path.is_dir() else "a pipe or a device"
        raise InlayError(f"{str(path)!r} is {what}, not a file. Give a file.")


def decode(path: Path, otherwise: str | None = None) -> tuple[str, list[str]]:
    """The file's text, and a note where it is not UTF-8. `otherwise` is the encoding of a file that is nothing else."""
    check_regular(path)
    raw = path.read_bytes()
    if path.name.lower().endswith(".gz"):
        try:
            raw = gzip.decompress(raw)
        except (gzip.BadGzipFile, EOFError) as error:
            raise InlayError(f"{str(path)!r} is not a complete gzip file ({error}).") from error
    wide = _wide_encoding(raw)
    try:
        if wide is not None:
            return raw.decode(wide).removeprefix("\ufeff"), [f"{path.name}: read as {wide[:6].upper()}"]
        return raw.decode("utf-8-sig"), []
    except UnicodeDecodeError as error:
        if otherwise is not None:
            return raw.decode(otherwise), []
        if wide is not None:
            raise InlayError(
                f"{str(path)!r} begins as {wide[:6].upper()} and is not: {error.reason} at byte {error.start:,}. Save "
                "it as UTF-8."
            ) from None
        line = raw.count(b"\n", 0, error.start) + 1
        raise InlayError(
            f"{str(path)!r} is not UTF-8: byte 0x{raw[error.start]:02x} in line {line}. Save it as UTF-8, or convert "
            f"it, e.g. `iconv -f latin1 -t utf-8`."
        ) from None


def _may_be_wide(path: Path) -> bool:
    """Whether a file may be in another encoding than UTF-8, by its beginning; `decode` knows by all of it."""
    try:
        with gzip.open(path) if path.name.lower().endswith(".gz") else path.open("rb") as file:
            start = file.read(_LOOKED_AT)
    except (gzip.BadGzipFile, EOFError):
        return True
    return _wide_encoding(start[: len(start) // 2 * 2]) is not None


def _wide_encoding(raw: bytes) -> str | None:
    """The encoding of a file of two or four bytes a character; None for UTF-8 and all else."""
    for mark, encoding in _MARKS:
        if raw.startswith(mark):
            return encoding
    start = raw[:_LOOKED_AT]
    places = len(start) // 2
    if len(raw) % 2 or not places:
        return None
    even, odd = start[0::2].count(0) / places, start[1::2].count(0) / places
    if odd >= _MANY and even <= _FEW:
        return "utf-16-le"
    if even >= _MANY and odd <= _FEW:
        return "utf-16-be"
    return None
