"""Keys of the files that say what to run, and what checks their values.

`sweep.py` and `run_file.py` have the keys themselves. All mistakes of a file are told at once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from inlay.errors import InlayError, unknown
from inlay.records.spec import Spec
from inlay.records.spec_values import Unfit, fitting
from inlay.workflow.yaml_files import read_yaml

Check = Callable[[Any], Any]


def read_keys(path: Path, what: str, needs: str) -> dict[Any, Any]:
    """What a file holds. `what` is the file for people, `needs` the keys that it must have at least."""
    data = read_yaml(path)
    if not isinstance(data, dict):
        raise InlayError(f"{path} is not a {what}: it has no keys. It needs {needs} at least.")
    return data


def text(value: Any) -> str:
    """A text that is not empty."""
    if not isinstance(value, str) or not value:
        raise Unfit("a text")
    return value


def number(value: Any) -> float:
    """A finite number; one in quotes is a number too."""
    try:
        found = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        found = math.nan
    if not math.isfinite(found):
        raise Unfit("a number")
    return found


def positive(value: Any) -> float:
    """A number greater than 0."""
    if (found := number(value)) <= 0:
        raise Unfit("a number greater than 0")
    return found


def whole(value: Any) -> int:
    """A whole number."""
    if not number(value).is_integer():
        raise Unfit("a whole number")
    return int(number(value))


def count(value: Any) -> int:
    """A whole number from 1."""
    if (found := whole(value)) < 1:
        raise Unfit("1 or more")
    return found


def several(each: Check, what: str) -> Check:
    """A list, or a single one."""

    def check(value: Any) -> tuple[Any, ...]:
        try:
            found = tuple(each(one) for one in (value if isinstance(value, list) else [value]))
        except Unfit:
            found = ()
        if not found or len(set(found)) < len(found):
            raise Unfit(f"{what}, each once")
        return found

    return check


def spec_field(entry: dataclasses.Field[Any], value: Any) -> Any:
    """A field of the spec as a run keeps it; its numbers may be written as in YAML: 1e3, or in quotes."""
    kind = str(entry.type).partition(" | ")[0]
    if kind in ("int", "float") and isinstance(value, str | float):
        with contextlib.suppress(Unfit):
            value = whole(value) if kind == "int" else number(value)
    return fitting(entry, value)


# Given in other ways, or (code from a hub) not to be switched on by a file that somebody sent.
_NOT_HERE = {"model", "method", "task", "tasks", "seed", "shots", "settings", "trust_remote_code"}
OF_SPEC: Mapping[str, Check] = {
    each.name: partial(spec_field, each) for each in dataclasses.fields(Spec) if each.name not in _NOT_HERE
}
"""The fields of a run's spec that every file names alike, and what checks their values."""


def checked(data: Mapping[Any, Any], known: Mapping[str, Check]) -> tuple[dict[str, Any], list[InlayError]]:
    """The values that will do, and what is wrong with the others."""
    found: dict[str, Any] = {}
    mistakes: list[InlayError] = []
    for key, value in data.items():
        if key not in known:
            mistakes.append(unknown("key", str(key), known))
            continue
        try:
            found[key] = known[key](value)
        except Unfit as wanted:
            mistakes.append(InlayError(f"{key}: {value!r} will not do: give {wanted}."))
        except InlayError as error:
            mistakes.append(error)
    return found, [*mistakes, *_out_of_range(found)]


def _out_of_range(found: Mapping[str, Any]) -> list[InlayError]:
    """What a spec has against single values that are of the right type: each is tried by itself."""
    mistakes: list[InlayError] = []
    # With a sampling that a temperature says something to.
    alone: dict[str, Any] = {"model": "-", "method": "-", "task": "-", "sampling": "temperature"}
    for name in OF_SPEC.keys() & found.keys() - {"data", "task_fields"}:
        try:
            Spec(**alone | {name: found[name]})
        except InlayError as error:
            mistakes.append(error)
    return sorted(mistakes, key=str)


def refuse(mistakes: Sequence[InlayError]) -> None:
    """One error with all mistakes, if there are any."""
    if len(mistakes) == 1:
        raise mistakes[0]
    if mistakes:
        raise InlayError("\n  ".join([f"{len(mistakes)} mistakes:", *map(str, mistakes)]))
