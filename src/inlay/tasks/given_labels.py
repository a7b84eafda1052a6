"""Labels that are more than one name or number: sets of names, probabilities of classes, several values.

Each is read from a cell: a list, an object with an entry for each name, or a text. Several columns named together,
as in `--label a,b,c`, are read as one such object (`inlay.tasks.column_values.add_columns`).
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from inlay.errors import InlayError
from inlay.tasks.cells import is_null
from inlay.tasks.labels import as_name, as_numbers, in_order
from inlay.tasks.schema import TaskSchema

_YES, _NO = frozenset({"1", "true", "yes"}), frozenset({"0", "false", "no", ""})
SUM_SLACK = 0.01  # by which probabilities that were rounded may miss 1


def read_set(value: Any, separator: str | None, column: str, where: str) -> list[str]:
    """The names in a cell, each once: a list, texts joined by `separator`, or an object that says yes or no to each."""
    if isinstance(value, Mapping):
        return [as_name(name, column, where) for name, said in value.items() if _is_yes(said, name, where)]
    if isinstance(value, str):
        value = _parts(value, separator, column, where)
    if not isinstance(value, list | tuple):
        value = [value]
    if any(map(is_null, value)):
        raise InlayError(f"{where}: a label is missing in {column!r} (null or NaN in the list).")
    return list(dict.fromkeys(name for name in (as_name(each, column, where) for each in value) if name))


def _parts(text: str, separator: str | None, column: str, where: str) -> list[Any]:
    if text.lstrip().startswith("["):
        try:
            found = json.loads(text)
        except ValueError:
            found = None
        if isinstance(found, list):
            return found
    if separator is None:
        raise InlayError(
            f"{where}: {column!r} holds the text {text[:40]!r}. Say what stands between the labels of a row, as in "
            '--label-separator \'|\' (label_separator=), or give lists: ["a", "b"].'
        )
    return text.split(separator)


def _is_yes(said: Any, name: str, where: str) -> bool:
    text = "" if is_null(said) else str(said).strip().casefold().removesuffix(".0")
    if text not in _YES | _NO:
        raise InlayError(f"{where}: {name!r} says {str(said)[:40]!r}; whether a row has a label is said by 1 or 0.")
    return text in _YES


def check_known(names: Sequence[str], known: Sequence[str], where: str) -> None:
    """An error for a name that training does not know, with the row."""
    strange = [name for name in names if name not in known]
    if strange:
        shown = ", ".join(known[:10]) + (", ..." if len(known) > 10 else "")
        raise InlayError(
            f"{where}: the label {strange[0]!r} does not occur in training. Known: {shown}. Remove it, or add such "
            "examples to the training data."
        )


def read_numbers(value: Any, names: Sequence[str] | None, column: str, where: str) -> dict[str, float]:
    """The numbers in a cell by name: of an object, or of a list as long as `names`, called so or counted from 0."""
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
        try:
            value = json.loads(value)
        except ValueError:
            raise InlayError(f"{where}: {column!r} holds {value[:40]!r}, which is no JSON.") from None
    if isinstance(value, Mapping):
        entries = {as_name(name, column, where): each for name, each in value.items()}
    elif isinstance(value, list | tuple):
        if names is not None and len(names) != len(value):
            raise InlayError(
                f"{where}: {column!r} holds {len(value)} numbers, and there are {len(names)} names: {', '.join(names)}."
            )
        entries = dict(zip(names or map(str, range(len(value))), value, strict=True))
    else:
        entries = {column: value}
    found = {}
    for name, each in entries.items():
        numbers = None if is_null(each) else as_numbers([each])
        if numbers is None:
            raise InlayError(
                f"{where}: the value {str(each)[:40]!r} of {name!r} is not a number. Write numbers with a point and "
                "nothing else, as in 1120 or 10.42, or remove the row."
            )
        found[name] = numbers[0]
    return found


def read_shares(value: Any, names: Sequence[str] | None, column: str, where: str) -> dict[str, float]:
    """Probabilities of classes by name, divided by their sum, which must be 1 but for rounding."""
    found = read_numbers(value, names, column, where)
    total = sum(found.values())
    if any(share < 0 for share in found.values()) or abs(total - 1) > SUM_SLACK:
        shown = ", ".join(f"{name} {share:g}" for name, share in list(found.items())[:5])
        raise InlayError(
            f"{where}: the probabilities of the classes must not be negative and must add up to 1; they are {shown}"
            f"{', ...' if len(found) > 5 else ''}, {total:g} together. Divide counts of votes by their sum."
        )
    return {name: share / total for name, share in found.items()}


def read_all(value: Any, schema: TaskSchema, column: str, where: str) -> list[float]:
    """The probabilities or values in a cell, one for each of the schema's names. A class that is not named has none."""
    names = schema.label_names or ()
    found = (read_shares if schema.predicts == "shares" else read_numbers)(value, names, column, where)
    strange = [name for name in found if name not in names]
    lacking = [name for name in names if name not in found] if schema.predicts == "values" else []
    if strange or lacking:
        what = f"says {strange[0]!r}, which is none of them" if strange else f"lacks {lacking[0]!r}"
        raise InlayError(f"{where}: {column!r} {what}. Every row has {', '.join(names)}.")
    return [found.get(name, 0.0) for name in names]


def names_in(values: Iterable[Any], column: str, shares: bool) -> tuple[str, ...]:
    """What the probabilities or values in the cells of a column are called; of a list they are counted from 0."""
    names: dict[str, None] = {}
    for value in values:
        if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
            with contextlib.suppress(ValueError):
                value = json.loads(value)
        if isinstance(value, Mapping):
            names |= dict.fromkeys(as_name(name, column) for name in value)
        elif isinstance(value, list | tuple):
            names |= dict.fromkeys(map(str, range(len(value))))
        else:
            names[column] = None
        if not shares:
            break  # the first row says it: the others must have the same
    return tuple(in_order(names)) if shares else tuple(names)


def guess(values: Sequence[Any]) -> Literal["labels", "shares", "values"] | None:
    """What objects or lists of numbers in a column seem to be; None where they hold something else, or nothing."""
    rows = [list(value.values()) if isinstance(value, Mapping) else value for value in values]
    if not rows or not all(isinstance(row, list | tuple) and row for row in rows):
        return None
    numbers = [as_numbers(row) for row in rows]
    if any(row is None for row in numbers):
        return None
    known = [row for row in numbers if row is not None]
    if isinstance(values[0], Mapping) and all(number in (0, 1) for row in known for number in row):
        return "labels"
    if all(number.is_integer() for row in known for number in row):
        return "values" if isinstance(values[0], Mapping) else None
    sums = all(min(row) >= 0 and abs(sum(row) - 1) <= SUM_SLACK for row in known)
    return "shares" if sums else "values"
