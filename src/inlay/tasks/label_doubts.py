"""Labels that are taken for classes and may be something else: amounts, several labels in one, free text."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from inlay.tasks.labels import number_in

NEARLY_ALL = 0.9  # of the rows
MOST_CLASSES = 0.5  # of the rows: with more, hardly two rows share a class
_UNITS = re.compile(r"[\s$€£¥%]+")
_AMOUNT = re.compile(r"[-+]?(\d+([.,]\d+)?|\d{1,3}([.,']\d{3})+([.,]\d+)?)(e[-+]?\d+)?", re.IGNORECASE)
_PLAIN_SEPARATORS, _OTHER_SEPARATORS = "|;", ",/+&"


def doubts(column: str, named: Sequence[tuple[int, str]]) -> list[str]:
    """What to say of the labels of a column, given by the row's number and name, that are to be classes."""
    names = [name for _, name in named]
    classes = Counter(names)
    amounts = sum(count for name, count in classes.items() if _is_amount(name))
    counted = all((number := number_in(name)) is not None and number.is_integer() for name in classes)
    if amounts >= NEARLY_ALL * len(names) and not counted:
        return [_of_amounts(column, named, classes)]
    found = []
    if len(classes) > MOST_CLASSES * len(names):
        found.append(
            f"{column!r} has {len(classes):,} classes in {len(names):,} rows: hardly two rows share one. If they are "
            "amounts, give --kind regression; if they are texts to write, --kind causal-lm; otherwise name another "
            "column with --label"
        )
    if (example := _combined(classes)) is not None:
        found.append(
            f"{column!r} looks like several labels a row ({example!r}), and each combination is learnt as one class. "
            "Several labels a row are not offered: give one label a row, or train one run for each"
        )
    return found


def _is_amount(name: str) -> bool:
    return _AMOUNT.fullmatch(_UNITS.sub("", name)) is not None


def _of_amounts(column: str, named: Sequence[tuple[int, str]], classes: Counter[str]) -> str:
    """Numbers that are spelled so that they are none, or a few words among numbers."""
    others = [(number, name) for number, name in named if not _is_amount(name)]
    spelled = [(number, name) for number, name in named if _is_amount(name) and number_in(name) is None]
    what = f"{len(named) - len(others):,} of {len(named):,} labels in {column!r} are numbers, and they are taken for "
    what += f"{len(classes):,} classes"
    advice = []
    if others:
        number, name = others[0]
        more = f" and {len(others) - 1:,} more" if len(others) > 1 else ""
        advice.append(f"correct or remove row {number} ({name[:40]!r}){more}")
    if spelled:
        number, name = spelled[0]
        advice.append(
            f"write {name[:40]!r} (row {number}) and the like with a point and nothing else, as in 1120 or 10.42"
        )
    return f"{what}. If they are amounts: {'; '.join([*advice, 'give --kind regression'])}"


def _combined(classes: Counter[str]) -> str | None:
    """A label that is several in one, such as "positive|long"; the parts of it occur in other labels too."""
    for separator in _PLAIN_SEPARATORS + _OTHER_SEPARATORS:
        parts = {name: {part.strip() for part in name.split(separator)} for name in classes}
        several = [name for name, found in parts.items() if len(found) > 1 and all(found)]
        seen = Counter(part for found in parts.values() for part in found)
        again = [name for name in several if all(seen[part] > 1 for part in parts[name])]
        if len(several) > 1 and (separator in _PLAIN_SEPARATORS or 2 * len(again) >= len(several)):
            return (again or several)[0]
    return None
