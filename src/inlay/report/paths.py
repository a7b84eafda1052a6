"""Paths of somebody's disk, cut to their names: a page that is sent should not tell where its maker keeps things."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import PurePath
from typing import Any

from inlay.records.spec import Spec

# Two parts at least, so that `/` in prose is left alone; not the part of a URL, but of a file, or of a relative path.
ABSOLUTE = re.compile(r"(?:\bfile://|(?<![\w./~-]))/(?:[^\s'\"<>:;,()/]+/)+[^\s'\"<>:;,()/]*")
FIELDS = ("model", "data", "test_data", "data_dir")


def cutter(specs: Iterable[Spec]) -> Callable[[Any], Any]:
    """What cuts the absolute paths in a text: those of the specs to as many of their last parts as distinguish them,
    others to the last one. What is no text stays."""
    given = {str(value or "") for spec in specs for value in _paths(spec)}
    known = names_of(path for path in given if PurePath(path).is_absolute())
    # Where a path with blanks ends cannot be seen in a text: the folders of known ones are known.
    spaced = {str(folder) for path in known for folder in PurePath(path).parents if " " in str(folder)}
    known = {f"{folder}/": "" for folder in spaced} | known
    longest = sorted(known, key=len, reverse=True)
    ends = (re.escape(path) + ("" if path.endswith("/") else r"(?![\w-])") for path in longest)
    mine = re.compile(rf"(?:\bfile://)?({'|'.join(ends)})") if known else None

    def cut(text: Any) -> Any:
        if not isinstance(text, str) or "/" not in text or text.startswith("data:"):  # an image is no text
            return text
        if mine is not None:
            text = mine.sub(lambda found: known[found[1]], text)
        return ABSOLUTE.sub(lambda found: PurePath(found[0]).name, text)

    return cut


def _paths(spec: Spec) -> Iterator[Any]:
    """The fields of a run, and of each of its tasks, that can be paths."""
    for fields in (spec.to_json(), *(spec.task_fields or {}).values()):
        yield from (fields.get(name) for name in FIELDS)


def names_of(paths: Iterable[str]) -> dict[str, str]:
    """For each path the shortest end of it that no other one has."""
    parts = {path: PurePath(path).parts for path in paths}

    def end(path: str, count: int) -> tuple[str, ...]:
        return parts[path][-count:]

    def shortest(path: str) -> str:
        rivals = [other for other in parts if parts[other] != parts[path]]
        for count in range(1, len(parts[path])):
            if all(end(other, count) != end(path, count) for other in rivals):
                return "/".join(end(path, count))
        return "/".join(parts[path][1:])

    return {path: shortest(path) for path in parts}


def everywhere(data: Any, change: Callable[[Any], Any]) -> Any:
    """The same data with every text and number changed, keys of what a user named included."""
    if isinstance(data, dict):
        return {change(key): everywhere(value, change) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [everywhere(each, change) for each in data]
    return change(data)
