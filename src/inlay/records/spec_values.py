"""What the fields of a spec may hold: each value is checked against its field's type before anything reads it.

A spec comes from a command line, from Python, from a YAML file or from a run's folder that anyone may have edited.
Whatever stands in a field, the answer is a value of the field's type or one `InlayError`.
"""

from __future__ import annotations

import math
import os
import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field
from numbers import Integral, Real
from typing import Any

from inlay.errors import InlayError

LARGEST = 2**63 - 1  # of a whole number: what other programs can read, and more than anybody needs
DEEPEST = 16  # levels of lists and objects in a setting


class Unfit(ValueError):
    """A value is not what its field holds; the message says what to give."""


def fitting(entry: Field[Any], value: Any) -> Any:
    """The value as the field keeps it; an error that names the field, the value and what is allowed."""
    kind, _, optional = str(entry.type).partition(" | ")
    if value is None and optional:
        return None
    try:
        return _READERS[kind](value)
    except Unfit as error:
        allowed = f"{error}{' or None' if optional else ''}"
        raise InlayError(f"{entry.name}={shown(value)} will not do: give {allowed}.") from None


def shown(value: Any) -> str:
    """A value in an error: its beginning, however large or deep it is."""
    short = reprlib.Repr()
    short.maxstring = short.maxother = short.maxlong = 80
    return short.repr(value)


def _text(value: Any) -> str:
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if not isinstance(value, str):
        raise Unfit("a text")
    if "\0" in value or any("\ud800" <= character <= "\udfff" for character in value):
        raise Unfit("a text in Unicode without NUL characters (rename a file whose name is not UTF-8)")
    return value


def _texts(value: Any) -> tuple[str, ...]:
    """Several texts; one by itself is a list of one."""
    if isinstance(value, str):
        return (_text(value),)
    if not isinstance(value, Sequence) or isinstance(value, bytes):
        raise Unfit("a text or a list of texts")
    try:
        return tuple(_text(each) for each in value)
    except Unfit as error:
        raise Unfit(f"a list, and in it {error}") from None


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise Unfit("True or False")
    return value


def _whole(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise Unfit("a whole number")
    if abs(int(value)) > LARGEST:
        raise Unfit(f"a whole number of at most {LARGEST}")
    return int(value)


def _number(value: Any) -> int | float:
    if isinstance(value, Integral):
        return _whole(value)
    if not isinstance(value, Real) or not math.isfinite(value):
        raise Unfit("a finite number")
    return float(value)


def _settings(value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise Unfit("a mapping of names to values, such as {'r': 8}")
    _check_plain(value)
    return dict(value)


def _check_plain(value: Any, depth: int = 0) -> None:
    """An error for what JSON cannot say, or cannot say to everybody: the settings are recorded with the run."""
    if depth > DEEPEST:
        raise Unfit(f"lists and mappings of at most {DEEPEST} levels")
    if value is None or isinstance(value, bool):
        return
    if isinstance(value, str):
        _text(value)
    elif isinstance(value, (int, float)):
        _number(value)
    elif isinstance(value, (list, tuple)):
        for each in value:
            _check_plain(each, depth + 1)
    elif isinstance(value, Mapping) and all(isinstance(name, str) for name in value):
        for name, each in value.items():
            _text(name)
            _check_plain(each, depth + 1)
    else:
        raise Unfit("values that JSON has: texts, numbers, True, False, None, lists of these, mappings of texts")


_READERS: Mapping[str, Callable[[Any], Any]] = {
    "str": _text,
    "tuple[str, ...]": _texts,
    "bool": _flag,
    "int": _whole,
    "float": _number,
    "Mapping[str, Any]": _settings,
}
