"""Folders and divided tables: class folders, folders and files named after splits, a column of splits.

What people call the parts of their data: blanks around a name, capital letters, `-`, `_` and blanks within it, and a
final "set" do not matter.
"""

from __future__ import annotations

import difflib
import os
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from inlay.errors import InlayError
from inlay.tasks import labels
from inlay.tasks.cells import is_missing
from inlay.tasks.tables import IMAGES, TABLES, TEXTS, Row, Table, decode, is_image, read_table, suffix

SPLIT_NAMES: Mapping[str, str] = {
    "train": "train",
    "training": "train",
    "validation": "validation",
    "valid": "validation",
    "val": "validation",
    "dev": "validation",
    "development": "validation",
    "eval": "validation",
    "evaluation": "validation",
    "test": "test",
    "testing": "test",
    "holdout": "test",
    "heldout": "test",
}
SHOWN = 10  # class folders, by name
_NEAR = 0.78  # as alike as "tests" and "test"; "best" is not
_SHARD = re.compile(r"[_-]\d+")


def split_of(name: str) -> str | None:
    """The split that a name means, None if it is not the name of one."""
    return SPLIT_NAMES.get(_bare(name).removesuffix("set"))


def _bare(name: str) -> str:
    return re.sub(r"[\s_-]+", "", name.casefold())


def known() -> str:
    """All names, by split, for an error."""
    listed = {split: [name for name, of in SPLIT_NAMES.items() if of == split] for split in SPLIT_NAMES.values()}
    return "; ".join(f"{split}: {', '.join(names)}" for split, names in listed.items())


def resembles_split(name: str, present: Collection[str | None] = ()) -> bool:
    """Whether a name that is not one of a split may be meant for one: misspelt (`tset`), a part of one
    (`train-00000-of-00002`), or with a word that names a split which is not `present` otherwise (`test_old`)."""
    words, whole = re.split(r"[^a-z]+", name.casefold()), _bare(name)
    misspelt = any(sorted(whole) == sorted(known) for known in SPLIT_NAMES)
    misspelt = misspelt or bool(difflib.get_close_matches(whole, SPLIT_NAMES, 1, _NEAR))
    part = words[0] in SPLIT_NAMES and _SHARD.match(name.casefold(), len(words[0])) is not None
    return misspelt or part or any(SPLIT_NAMES[word] not in present for word in words if word in SPLIT_NAMES)


def one_of_each(names: Iterable[str], where: str) -> dict[str, str]:
    """The name of each split among the names of files or folders; two names of one split are an error."""
    found: dict[str, str] = {}
    for name in names:
        split = split_of(name.split(".")[0])
        if split in found:
            raise InlayError(
                f"{where} has both {found[split]!r} and {name!r}, which are one split ({split}). Keep one of them, or "
                "join them."
            )
        if split is not None:
            found[split] = name
    return found


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


def read_folder(folder: Path) -> dict[str, Table]:
    """The tables of a folder by split: class folders, split folders of class folders, or tables named after splits.

    A folder that is not divided gives the one entry "all".
    """
    found = visible(folder)
    if folders := _split_folders(folder, found):
        notes = [_taken_as(folders), *_passed_over(folder, [p for p in found if p.is_dir()], folders.values())]
        return _noted({split: class_folders(folder / name) for split, name in folders.items()}, notes)
    if "train" in (tables := split_tables(folder)):
        notes = [_taken_as(tables), *_passed_over(folder, [p for p in found if _is_table(p)], tables.values())]
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


def _taken_as(named: Mapping[str, str]) -> str:
    """A note of which folder or file was taken as which split."""
    words = {"train": "training"}
    return "taken as " + ", ".join(f"{words.get(split, split)}: {name!r}" for split, name in named.items())


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
    shown = ", ".join(each.name for each in classes[:SHOWN]) + (", ..." if len(classes) > SHOWN else "")
    notes = [f"{folder.name}: each folder is a class: {shown}"]
    notes += [f"the folders {', '.join(map(repr, folders))} are one class" for folders in same]
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
        split: Table(table.path, list(columns), list(rows.values()), table.class_names, numbers=list(rows))
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
