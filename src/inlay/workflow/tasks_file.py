"""`tasks.yaml`: the tasks of one run, written down; checked whole before anything is read of their data.

    - sst2                                   # a named task
    - {name: mood, task: sst2, shots: 64}    # one by another name
    - name: reviews                          # data of your own; paths are relative to this file
      data: reviews.csv
      test_data: held-out.csv
      text: body                             # or [question, answer]
      label: stars
      kind: regression
      template: "{body} It was"

Or as a mapping, {reviews: {data: reviews.csv}, rte: {}}. Every mistake in the file is said at once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from inlay.errors import InlayError, did_you_mean, misspelt
from inlay.records.spec import Spec
from inlay.records.spec_values import fitting, shown
from inlay.records.task_fields import COLUMNS, FIELDS, PATHS
from inlay.tasks import catalogue
from inlay.workflow.settle import cannot_be_a_name
from inlay.workflow.yaml_files import read_yaml

SUFFIXES = (".yaml", ".yml")
KEYS = ("name", *FIELDS)
OWN = ("test_data", *COLUMNS, "kind")  # what a named task says by itself
FORM = f"It is a list of tasks, each a name or a mapping with the keys {', '.join(KEYS)}."
Entries = dict[str, dict[str, Any]]


def read(path: Path | str) -> dict[str, Any]:
    """The tasks in a file, as fields of a `Spec`: their names, and what each has of its own."""
    path = Path(path)
    data = read_yaml(path)
    if isinstance(data, Mapping):
        listed: list[Any] = [_named(name, own) for name, own in data.items()]
    elif isinstance(data, list):
        listed = data
    else:
        raise InlayError(f"{path} holds no tasks. {FORM}")
    found: Entries = {}
    wrong: list[str] = []
    for number, entry in enumerate(listed, start=1):
        name, own, mistakes = _entry(entry, path.parent)
        about = f"entry {number}" if name is None else f"{name} (entry {number})"
        if name in found:
            mistakes.append("the name is taken by an entry before it: give each task a name of its own")
        wrong += [f"- {about}: {each}." for each in mistakes]
        if name is not None:
            found.setdefault(name, own)
    if wrong:
        raise InlayError("\n".join([f"{path} has {len(wrong)} mistake{'s' * (len(wrong) > 1)}:", *wrong, FORM]))
    return as_fields(found)


def as_fields(entries: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Entries by the tasks' names as fields of a `Spec`; a named task by its own name has nothing of its own."""
    own = {name: dict(entry) for name, entry in entries.items() if entry.keys() - {"task"} or entry.get("task") != name}
    return {"tasks": tuple(entries), "task_fields": own}


def gather(names: Sequence[str], data: Iterable[str] = (), more: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The tasks that a command line says: names of tasks and files of tasks; NAME=PATH of the user's own data; and
    `task_fields` as they are."""
    found: list[tuple[str, dict[str, Any]]] = []
    for name in names:
        if Path(name).suffix.lower() in SUFFIXES:
            inside = read(name)
            found += [(each, inside["task_fields"].get(each, {"task": each})) for each in inside["tasks"]]
        else:
            found.append((name, dict((more or {}).get(name, {"task": name}))))
    for pair in data:
        name, sign, path = pair.partition("=")
        if not sign or not name or not path:
            raise InlayError(f"--task-data takes a name and a path, as in reviews=reviews.csv; got {pair!r}.")
        found.append((name, {"data": path}))
    strangers = {} if more is None else {name: own for name, own in more.items() if name not in names}
    for number, (name, own) in enumerate(found):
        if any(other == name and each != own for other, each in found[:number]):
            raise InlayError(f"Two tasks are called {name!r}: give each a name of its own.")
    fields = as_fields(dict(found))
    return fields | {"task_fields": fields["task_fields"] | strangers}


def _named(name: Any, own: Any) -> Any:
    """An entry of the mapping form as one of the list."""
    if own is None:
        own = {}
    if not isinstance(own, Mapping):
        return {"name": name, "": own}
    known = "task" in own or "data" in own
    return {"name": name, **({} if known else {"task": name}), **own}


def _entry(entry: Any, folder: Path) -> tuple[str | None, dict[str, Any], list[str]]:
    """An entry's name, its fields and what is wrong with it."""
    if isinstance(entry, str):
        entry = {"task": entry}
    if not isinstance(entry, Mapping):
        return None, {}, [f"{shown(entry)} is no task"]
    given = {str(key): value for key, value in entry.items() if value is not None}
    name = given.pop("name", given.get("task"))
    mistakes, own = list(_unknown_keys(given)), {}
    for key in (key for key in FIELDS if key in given):
        try:
            own[key] = fitting(SPEC[key], given[key])
        except InlayError as error:
            mistakes.append(str(error).removesuffix("."))
    if not isinstance(name, str):
        mistakes.append(_no_name(name, own))
        name = None
    elif own.get("task") != name and (why := cannot_be_a_name(name)) is not None:
        mistakes.append(why)
    mistakes += _contradictions(given, own)
    for key in (key for key in PATHS if isinstance(own.get(key), str)):
        place = folder / Path(own[key]).expanduser()
        if not place.exists():
            mistakes.append(f"{key}: there is no file or folder {str(place)!r}.{misspelt(place)}".removesuffix("."))
        own[key] = str(place)
    return name, {key: list(value) if isinstance(value, tuple) else value for key, value in own.items()}, mistakes


SPEC = {entry.name: entry for entry in dataclasses.fields(Spec)}


def _no_name(name: Any, own: Mapping[str, Any]) -> str:
    if name is not None:
        return f"name={shown(name)} is no text: put it in quotes"
    stem = Path(own["data"]).name.split(".")[0] if own.get("data") else "reviews"
    return f"it has no name: add one, as in name: {stem}"


def _unknown_keys(given: Mapping[str, Any]) -> Iterator[str]:
    for key, value in given.items():
        if not key:
            yield f"{shown(value)} is no mapping of keys"
        elif key not in FIELDS:
            yield f"{key!r} is no key.{did_you_mean(key, KEYS)} Known: {', '.join(KEYS)}"


def _contradictions(given: Mapping[str, Any], own: Mapping[str, Any]) -> Iterator[str]:
    if "task" in given and "data" in given:
        yield "task and data contradict each other: give one of them"
    elif "task" not in given and "data" not in given and "" not in given:
        yield "it has neither task (a name, see `inlay tasks`) nor data (a path)"
    if "task" in given and "data" not in given:
        for key in (key for key in OWN if key in given):
            yield f"{key} is for data of your own; {shown(given['task'])} says it by itself"
        if isinstance(own.get("task"), str) and not catalogue.is_named(own["task"]) and "/" not in own["task"]:
            meant = did_you_mean(own["task"], catalogue.names())
            yield f"there is no task {own['task']!r}.{meant} `inlay tasks` lists them"
    if isinstance(own.get("shots"), int) and own["shots"] < 1:
        yield f"shots={own['shots']} must be greater than 0"
