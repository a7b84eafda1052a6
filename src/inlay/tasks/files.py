"""Reading tables and folders from disk: CSV, TSV, JSON lines, JSON, Parquet, class folders.

Whatever is wrong with a file is said once, with its name and the line. Nothing is guessed at: a ragged row is an
error, not a row with holes.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from inlay.errors import InlayError, first_line
from inlay.tasks import labels
from inlay.tasks.cells import as_text, is_missing, reach
from inlay.tasks.delimited import read_delimited
from inlay.tasks.split_names import known, one_of_each, resembles_split, split_of
from inlay.tasks.text_files import check_regular, decode

Row = dict[str, Any]

TABLES = (".csv", ".tsv", ".jsonl", ".ndjson", ".json", ".parquet")
IMAGES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm", ".jfif")
TEXTS = (".txt",)


@dataclass
class Table:
    """Rows with named columns, and where they came from. `class_names` when the file brings them.

    `numbers` are those of the rows in the file, where they are not simply counted from 1.
    """

    path: Path
    columns: list[str]
    rows: list[Row]
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
                    self.columns.append(name)
                    for row, value in zip(self.rows, found, strict=True):
                        row[name] = value

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
    text, notes = decode(path)
    if not text.strip():
        raise InlayError(f"{str(path)!r} is empty.")
    if kind == ".json":
        table = _json(path, text)
    elif kind in (".jsonl", ".ndjson"):
        table = _from_records(path, _json_lines(path, text))
    else:
        columns, rows, found = read_delimited(path, text, "\t" if kind == ".tsv" else ",")
        table = Table(path, columns, rows, notes=found)
    table.notes[:0] = notes
    return table


# ---------------------------------------------------------------------------------------------------------- JSON


def _json_lines(path: Path, text: str) -> Iterator[Row]:
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise InlayError(f"{str(path)!r}, line {number}: not JSON ({_reason(error)}).") from None
        if not isinstance(record, dict):
            raise InlayError(f"{str(path)!r}, line {number}: an object {{...}} is expected, one a line.")
        yield record


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
        return _from_records(path, _json_lines(path, text))
    if isinstance(records, dict):
        records = [records]
    if not isinstance(records, list) or not all(isinstance(record, dict) for record in records):
        raise InlayError(f"{str(path)!r} should hold a list of objects.")
    return _from_records(path, records)


def _from_records(path: Path, records: Iterator[Row] | Sequence[Row]) -> Table:
    """Objects as a table: the columns are all keys that occur, and what an object lacks is missing."""
    rows = list(records)
    columns = list(dict.fromkeys(key for row in rows for key in row))
    return Table(path, columns, [{name: row.get(name) for name in columns} for row in rows])


# ------------------------------------------------------------------------------------------------------- Parquet


def _parquet(path: Path) -> Table:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(path)
        rows = table.to_pylist()
        class_names = parquet_class_names(table.schema)
    except (pa.ArrowException, ValueError, OverflowError, RecursionError) as error:
        raise InlayError(f"{str(path)!r} is not a Parquet file that can be read ({first_line(error)}).") from None
    return Table(path, table.column_names, rows, class_names=class_names)


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


# ------------------------------------------------------------------------------------------------------- folders


def is_hidden(name: str) -> bool:
    """Whether a file or folder is one that systems leave behind (.DS_Store, Thumbs.db, ...)."""
    return name.startswith(".") or name.lower() in ("thumbs.db", "desktop.ini", "__macosx")


def visible(folder: Path) -> list[Path]:
    """What is in a folder, sorted by name, without what is hidden."""
    try:
        return sorted(p for p in folder.iterdir() if not is_hidden(p.name))
    except OSError as error:
        raise _unreadable(folder, error) from error


def files_below(folder: Path) -> list[Path]:
    """All files below a folder, sorted, behind links to folders too, without what is hidden.

    A link that leads nowhere is among them: whoever reads it will say so.
    """

    def give_up(error: OSError) -> None:
        raise _unreadable(Path(error.filename), error) from error

    found: list[Path] = []
    seen: set[str] = set()
    for place, folders, names in os.walk(folder, followlinks=True, onerror=give_up):
        seen.add(os.path.realpath(place))
        # A link back to where we are would never end.
        folders[:] = [f for f in folders if not is_hidden(f) and os.path.realpath(os.path.join(place, f)) not in seen]
        found += [Path(place, name) for name in names if not is_hidden(name)]
    return sorted(found)


def _unreadable(folder: Path, error: OSError) -> InlayError:
    return InlayError(f"Cannot read the folder {str(folder)!r}: {error.strerror or error}.")


def is_image(path: Path) -> bool:
    """Whether the file's ending is that of an image."""
    return path.suffix.lower() in IMAGES


def read_folder(folder: Path) -> dict[str, Table]:
    """The tables of a folder by split: class folders, split folders of class folders, or tables named after splits.

    A folder that is not divided gives the one entry "all".
    """
    found = visible(folder)
    if folders := _split_folders(folder, found):
        notes = _passed_over(folder, [p for p in found if p.is_dir()], folders.values())
        return _noted({split: class_folders(folder / name) for split, name in folders.items()}, notes)
    if "train" in (tables := split_tables(folder)):
        notes = _passed_over(folder, [p for p in found if _is_table(p)], tables.values())
        return _noted({split: _whole_split(folder / name) for split, name in tables.items()}, notes)
    if any(p.is_dir() for p in found):
        _check_level(folder, found)
        return {"all": class_folders(folder)}
    if any(is_image(p) for p in found):
        raise InlayError(
            f"{str(folder)!r} holds images but no class folders. Put the images of each class into a folder named "
            "after it, or give a table with a column of paths and a column of labels."
        )
    names = ", ".join(p.name for p in found[:5]) or "nothing"
    raise InlayError(
        f"{str(folder)!r} holds no data that is understood (there is {names}). It should hold class folders, the "
        "folders train, validation and test of class folders, or tables named train and test."
    )


def _whole_split(path: Path) -> Table:
    """The table of one split, which must not be divided once more by a column of its own."""
    table = read_table(path)
    column = _split_column(table)
    if column is not None and _divides(row[column] for row in table.rows):
        raise InlayError(
            f"{str(path)!r} is one split by its name, and its column {column!r} divides it again. Rename or remove the "
            "column, or give the file alone."
        )
    return table


def _is_table(path: Path) -> bool:
    return path.is_file() and suffix(path) in TABLES


def split_tables(folder: Path) -> dict[str, str]:
    """The names of the tables in a folder that are named after splits, by split."""
    return one_of_each((p.name for p in visible(folder) if _is_table(p)), repr(str(folder)))


def _split_folders(folder: Path, found: Sequence[Path]) -> dict[str, str]:
    """The names of the folders that are named after splits, by split; none where such a name is that of a class.

    A split holds class folders. What holds files is a class, but for `train`, which always is a split.
    """
    folders = [p for p in found if p.is_dir()]
    named = [p for p in folders if split_of(p.name)]
    if not any(split_of(p.name) == "train" or any(q.is_dir() for q in visible(p)) for p in named):
        return {}
    splits = one_of_each((p.name for p in named), repr(str(folder)))
    if "train" not in splits:
        others = ", ".join(repr(p.name) for p in folders if p not in named) or "no other folder"
        raise InlayError(
            f"{str(folder)!r} is divided into {', '.join(map(repr, splits.values()))}, and nothing in it is called "
            f"train (there is {others}). Rename the folder to train on."
        )
    return splits


def _passed_over(folder: Path, found: Sequence[Path], taken: Collection[str]) -> list[str]:
    """A note of what lies beside the splits and is no split; an error where its name may be a misspelt one."""
    others = [p.name for p in found if p.name not in taken]
    present = {split_of(name.split(".")[0]) for name in taken}
    for name in others:
        if resembles_split(name.split(".")[0], present):
            raise InlayError(
                f"{str(folder)!r} holds {name!r} beside {', '.join(map(repr, taken))}, and that is not the name of a "
                f"split ({known()}). Rename it, or move it elsewhere."
            )
    shown = ", ".join(others[:3]) + (", ..." if len(others) > 3 else "")
    return [f"left out, since no split is called so: {shown}"] if others else []


def _noted(tables: dict[str, Table], notes: list[str]) -> dict[str, Table]:
    next(iter(tables.values())).notes.extend(notes)
    return tables


def _check_level(folder: Path, found: Sequence[Path]) -> None:
    """A folder around the folder of class folders is not taken for a single class."""
    folders = [p for p in found if p.is_dir()]
    inside = visible(folders[0])
    if len(folders) == 1 and len(inside) > 1 and all(p.is_dir() for p in inside):
        raise InlayError(
            f"{str(folder)!r} has only the folder {folders[0].name!r}, which would be the only class. If its folders "
            f"({', '.join(p.name for p in inside[:5])}) are the classes, give {str(folders[0])!r}."
        )


def class_folders(folder: Path, otherwise: str | None = None) -> Table:
    """A folder whose folders are classes, of images or of text files, at any depth below the class.

    Text files are UTF-8; `otherwise` is the encoding of those that are not.
    """
    found = visible(folder)
    classes = [p for p in found if p.is_dir()]
    if not classes:
        raise InlayError(f"{str(folder)!r} should hold one folder a class, and holds no folders.")
    rows: list[Row] = []
    strangers = [p for p in found if not p.is_dir()]
    empty = []
    spelled: dict[str, list[str]] = {}
    for each in classes:
        spelled.setdefault(labels.as_name(each.name), []).append(each.name)
        files = files_below(each)
        known = [p for p in files if p.suffix.lower() in IMAGES + TEXTS]
        strangers += [p for p in files if p not in set(known)]
        if not known:
            empty.append(each.name)
        rows += [{"path": path, "label": each.name} for path in known]
    if not rows:
        raise InlayError(f"{str(folder)!r}: no image or text file in any of its folders ({', '.join(empty[:5])}).")
    if empty:
        raise InlayError(
            f"{str(folder)!r}: the class folder{'s' if len(empty) > 1 else ''} {', '.join(map(repr, empty))} hold"
            f"{'' if len(empty) > 1 else 's'} no image or text. Remove or fill what is empty."
        )
    written = [row for row in rows if row["path"].suffix.lower() in TEXTS]
    if written and 10 * len(written) <= len(rows):
        # A readme among the images is no example.
        strangers += [row["path"] for row in written]
        rows = [row for row in rows if row["path"].suffix.lower() not in TEXTS]
        written = []
    if written and len(written) < len(rows):
        names = ", ".join(str(row["path"].relative_to(folder)) for row in written[:3])
        raise InlayError(
            f"{str(folder)!r} mixes {len(rows) - len(written)} images and {len(written)} text files ({names}). Keep "
            "one kind."
        )
    same = [folders for folders in spelled.values() if len(folders) > 1]
    notes = [f"the folders {', '.join(map(repr, folders))} are one class" for folders in same]
    if strangers:
        shown = ", ".join(str(p.relative_to(folder)) for p in strangers[:3])
        more = ", ..." if len(strangers) > 3 else ""
        what = (
            "1 file that is no example was"
            if len(strangers) == 1
            else f"{len(strangers)} files that are no examples were"
        )
        notes.append(f"{what} left out ({shown}{more})")
    if written:
        rows = [{"text": decode(row["path"], otherwise)[0], "label": row["label"]} for row in rows]
        return Table(folder, ["text", "label"], rows, notes=notes)
    rows = [{"image": str(row["path"].absolute()), "label": row["label"]} for row in rows]
    return Table(folder, ["image", "label"], rows, notes=notes)


def by_split(table: Table, used: Collection[str] = ()) -> dict[str, Table]:
    """A table divided by its column `split`, where it has one that is not `used` for something else."""
    column = _split_column(table, used)
    if column is None:
        table.notes += _unused_divisions(table, used)
        return {"all": table}
    columns = [c for c in table.columns if c != column]
    parts: dict[str, dict[int, Row]] = {}
    said: dict[str, Counter[str]] = {}
    for number, row in table.numbered:
        split, word = _split_in(row[column], f"{table.path.name}, row {number}", column)
        parts.setdefault(split, {})[number] = {c: row[c] for c in columns}
        said.setdefault(split, Counter())[word] += 1
    made = {
        split: Table(table.path, columns, list(rows.values()), table.class_names, numbers=list(rows))
        for split, rows in parts.items()
    }
    notes = list(table.notes)
    if any(set(words) != {split} for split, words in said.items()):
        counts = (f"{split}: {_counted(words)}" for split, words in said.items())
        notes.append(f"{table.path.name}: splits by the column {column!r}: {'; '.join(counts)}")
    return _noted(made, notes)


def _split_column(table: Table, used: Collection[str] = ()) -> str | None:
    return next((c for c in table.columns if c.strip().casefold() == "split" and c not in used), None)


def _split_in(value: Any, where: str, column: str) -> tuple[str, str]:
    """The split that a cell names, and the word it uses."""
    word = value.strip() if isinstance(value, str) else value
    split = split_of(word) if isinstance(word, str) else None
    if split is None:
        what = "is empty" if is_missing(value) else f"says {repr(word)[:60]}, which is not the name of a split"
        raise InlayError(
            f"{where}: the column {column!r} {what}. Known: {known()}. Correct that row, or rename the column if it "
            "does not divide the data."
        )
    return split, word


def _counted(words: Mapping[str, int]) -> str:
    return ", ".join(f"{word!r} ({count:,} rows)" for word, count in words.items())


def _unused_divisions(table: Table, used: Collection[str]) -> list[str]:
    """What to say of columns that look like a division but are not called `split`."""
    return [
        f"{table.path.name}: the column {column!r} names splits and is not used; rename it to 'split' to divide the "
        "rows by it"
        for column in table.columns
        if column not in used and _divides(row[column] for row in table.rows)
    ]


def _divides(values: Iterable[Any]) -> bool:
    """Whether all values name splits, and not all the same."""
    found = set()
    for value in values:
        split = split_of(value) if isinstance(value, str) else None
        if split is None:
            return False
        found.add(split)
    return len(found) > 1


def read_lines(path: Path, column: str = "text") -> Table:
    """A plain text file as a table of its lines, blank ones too but for those at the end, in one column."""
    if not path.exists():
        raise InlayError(f"There is no file {str(path)!r}. Check the path.")
    text, notes = decode(path)
    if not text.strip():
        raise InlayError(f"{str(path)!r} is empty.")
    lines = text.rstrip().split("\n")
    return Table(path, [column], [{column: line.rstrip("\r")} for line in lines], notes=notes)
