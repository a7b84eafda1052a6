"""Labels: what their names are, what is missing, and what is odd about them and should be said."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from inlay.errors import InlayError, listed, unknown
from inlay.tasks.cells import as_text, is_missing

IMBALANCE = 10
# Whole numbers with more distinct values than this, not counted up from 0 or 1, are amounts and not classes.
MOST_NUMBERED_CLASSES = 50
LONGEST_NAME = 1000  # characters
NAMED = 3  # classes that a note lists
# How pandas, R, spreadsheets and databases write a missing value into a table that has only text, in any case.
SPELLINGS_OF_NOTHING = frozenset({"na", "n/a", "#n/a", "<na>", "nan", "null", "none"})


def says_missing(value: Any) -> bool:
    """Whether a cell of a table without types is a usual spelling of nothing."""
    return isinstance(value, str) and value.strip().casefold() in SPELLINGS_OF_NOTHING


def is_absent(value: Any, spelled: bool) -> bool:
    """Whether there is no label in a cell; where the table has no types (`spelled`), a word may say so."""
    return is_missing(value) or (spelled and says_missing(value))


def as_name(value: Any, column: str = "label", where: str = "") -> str:
    """A label's name: 3, 3.0, "3" and "3.0" are one label."""
    text = as_text(value, column, where).strip()
    if len(text) > LONGEST_NAME:
        raise InlayError(
            f"{where}{': ' if where else ''}{column!r} holds a label of {len(text):,} characters ({text[:40]!r}...), "
            f"and at most {LONGEST_NAME:,} are a name. If {column!r} is the text, name another column with --label."
        )
    return text.partition(".")[0] if re.fullmatch(r"-?\d+\.0*", text) else text


def number_in(text: str) -> float | None:
    """The finite number that a text spells, None if it spells none."""
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def as_numbers(values: Iterable[Any]) -> list[float] | None:
    """The labels as numbers, if all of them are; truth values are not."""
    found = []
    for value in values:
        number = None if isinstance(value, bool) else number_in(str(value).strip())
        if number is None:
            return None
        found.append(number)
    return found


def looks_like_values(values: Sequence[Any]) -> str | None:
    """Why the labels seem to be amounts to predict rather than classes, in words; None when they seem classes."""
    numbers = as_numbers(values)
    if numbers is None:
        return None
    distinct = sorted(set(numbers))
    if any(not number.is_integer() for number in distinct):
        return f"numbers with fractions, {len(distinct)} different ones"
    counted = distinct in ([float(i + first) for i in range(len(distinct))] for first in (0, 1))
    if len(distinct) > MOST_NUMBERED_CLASSES and not counted:
        return f"{len(distinct)} different numbers"
    return None


def in_order(names: Iterable[str]) -> list[str]:
    """Label names sorted: by value if they are all numbers, else by spelling."""
    distinct = set(names)
    if all(number_in(name) is not None for name in distinct):
        return sorted(distinct, key=lambda name: (float(name), name))
    return sorted(distinct)


def number(names: Sequence[str], label_names: Sequence[str], where: str) -> list[int]:
    """The numbers of labels given by name; one that training does not know is an error that counts them."""
    index = {name: i for i, name in enumerate(label_names)}
    strange = Counter(name for name in names if name not in index)
    if strange:
        shown = ", ".join(f"{name!r} ({count} rows)" for name, count in strange.most_common(5))
        known = ", ".join(label_names[:10]) + (", ..." if len(label_names) > 10 else "")
        raise InlayError(
            f"{where} has labels that do not occur in training: {shown}. Known: {known}. Remove those rows, or add "
            "such examples to the training data."
        )
    return [index[name] for name in names]


def check_sets(sets: Sequence[Sequence[int]], label_names: Sequence[str], where: str) -> list[str]:
    """Refuse training rows without any label; say how many labels they have, and which no row or every row has."""
    counts = Counter(label for found in sets for label in found)
    if not counts:
        raise InlayError(f"{where}: no training row has a label; there is nothing to learn.")
    mean, bare = sum(counts.values()) / len(sets), sum(not found for found in sets)
    notes = [f"{len(label_names)} labels, {mean:.2f} a training row; {bare:,} of {len(sets):,} training rows have none"]
    for what, odd in (
        ("no training row", [name for i, name in enumerate(label_names) if not counts[i]]),
        ("every training row", [name for i, name in enumerate(label_names) if counts[i] == len(sets)]),
    ):
        if odd:
            shown = ", ".join(odd[:5]) + (", ..." if len(odd) > 5 else "")
            notes.append(f"labels that {what} has cannot be learnt: {shown}")
    return notes + _twins([label_names[i] for i in counts])


def _twins(names: Sequence[str]) -> list[str]:
    """What to say of classes that may be one: "cat" and "Cat"."""
    alike: dict[str, list[str]] = {}
    for name in sorted(names):
        alike.setdefault(name.casefold(), []).append(name)
    pairs = [" and ".join(map(repr, found)) for found in alike.values() if len(found) > 1]
    if not pairs:
        return []
    shown = "; ".join(pairs[:3]) + ("; ..." if len(pairs) > 3 else "")
    return [f"classes that differ in capital letters only are different ones: {shown}; rename them if they are not"]


def check_classes(labels: Sequence[int], label_names: Sequence[str], where: str) -> list[str]:
    """Refuse a single class; say when classes are very uneven, or perhaps the same."""
    counts = Counter(labels)
    if len(counts) < 2:
        only = f"only {label_names[next(iter(counts))]!r}" if counts else "none"
        raise InlayError(f"{where} has {only}: a classifier needs at least two classes to tell apart.")
    notes = _twins([label_names[i] for i in counts])
    most, least = max(counts.values()), min(counts.values())
    if most >= IMBALANCE * least:
        largest, smallest = max(counts, key=lambda c: counts[c]), min(counts, key=lambda c: counts[c])
        notes.append(
            f"classes are uneven: {label_names[largest]!r} has {most:,} rows and {label_names[smallest]!r} {least:,}; "
            f"always saying {label_names[largest]!r} would be right {most / len(labels):.1%} of the time"
        )
    return notes


def find_untested(classes: Iterable[int], label_names: Sequence[str], where: str) -> list[str]:
    """What to say of classes that no test row has, where others have some."""
    tested = set(classes)
    absent = [repr(name[:40]) for i, name in enumerate(label_names) if i not in tested]
    if not tested or not absent:
        return []
    one = len(absent) == 1
    what = f"the class {absent[0]} has" if one else f"{len(absent):,} classes have"
    which = "" if one else f" ({listed(absent, NAMED)})"
    return [f"{where}: {what} no row{which}; the scores say nothing about {'it' if one else 'them'}"]


BALANCED = "balanced"


def weigh(said: str, label_names: Sequence[str], classes: Sequence[int]) -> tuple[float, ...]:
    """What each class counts in the loss, of mean 1 over rows of these classes: only the ratios matter.

    balanced is `N / (K N_k)`: all classes together count alike, whatever their rows. A class without rows counts 1.
    """
    counts = [Counter(classes)[i] for i in range(len(label_names))]
    if said.strip() == BALANCED:
        present = sum(count > 0 for count in counts)
        return tuple(len(classes) / (present * count) if count else 1.0 for count in counts)
    given = _named_weights(said, label_names)
    raw = [given.get(name, 1.0) for name in label_names]
    mean = sum(weight * count for weight, count in zip(raw, counts, strict=True)) / max(1, len(classes))
    return tuple(weight / mean for weight in raw) if mean else tuple(raw)


def _named_weights(said: str, label_names: Sequence[str]) -> dict[str, float]:
    """Weights by name, as in `rare=3,common=1`; a class's name may hold commas and equal signs itself."""
    found: dict[str, float] = {}
    pending = ""
    for part in said.split(","):
        pending = f"{pending},{part}" if pending else part
        name, sign, number = pending.rpartition("=")
        weight = number_in(number) if sign else None
        if weight is None:
            continue
        name, pending = as_name(name), ""
        if name not in label_names:
            raise unknown("class in --class-weights", name, label_names)
        if weight <= 0:
            raise InlayError(f"--class-weights {name}={number.strip()}: a weight must be greater than 0.")
        if name in found:
            raise InlayError(f"--class-weights names the class {name!r} twice.")
        found[name] = weight
    if pending or not found:
        raise InlayError(
            f"--class-weights takes {BALANCED}, or weights by name as in rare=3,common=1; got {(pending or said)!r}."
        )
    return found


# -------------------------------------------------------------------------------- classes that may be something else

NEARLY_ALL = 0.9  # of the rows
MOST_CLASSES = 0.5  # of the rows: with more, hardly two rows share a class
FEW_ROWS = 20  # with fewer rows, only labels of which no two are the same are taken for texts
MANY_ROWS = 1000  # with fewer rows, nearly all labels of texts are different: a few hundred classes fill half of them
MOST_TEXTS = 0.8  # of the different labels: with so many texts among them, they are texts
LEAST_WORDS = 3  # of a text
LEAST_WORDS_OF_PART = 6  # of the longest part of a text that is divided as a path of categories is: A > B > C
_WORD = re.compile(r"\W*[^\W\d_]+(['\u2019.-][^\W\d_]+)*\W*")
_PATH = re.compile(r"\s(?:[>»\u203a→|/\\]|->|::)\s|(?<=\w)(?:>|::)(?=\w)")
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
    if _hardly_shared(classes, names):
        found.append(
            f"{column!r} has {len(classes):,} classes in {len(names):,} rows: hardly two rows share one. If they are "
            "amounts, give --kind regression; if they are texts to write, --kind causal-lm; otherwise name another "
            "column with --label"
        )
    if (example := _combined(classes)) is not None:
        found.append(
            f"{column!r} looks like several labels a row ({example!r}), and each combination is learnt as one class. "
            f"For several labels a row: --kind multi-label --label-separator {separator_in(example)!r}"
        )
    return found


def are_texts(names: Sequence[str]) -> bool:
    """Whether the cells of a column are texts rather than classes, names, amounts or several labels in one."""
    classes = Counter(names)
    if not _hardly_shared(classes, names) or (len(names) < FEW_ROWS and len(classes) < len(names)):
        return False
    if len(names) < MANY_ROWS and len(classes) < NEARLY_ALL * len(names):
        return False
    return sum(map(_is_text, classes)) >= MOST_TEXTS * len(classes) and not _mostly_combined(classes)


def _is_text(name: str) -> bool:
    """Whether a label has the words of a text: dates, codes, amounts and paths of categories have not."""
    parts = [sum(_WORD.fullmatch(word) is not None for word in part.split()) for part in _PATH.split(name)]
    return max(parts) >= (LEAST_WORDS if len(parts) == 1 else LEAST_WORDS_OF_PART)


def _hardly_shared(classes: Counter[str], names: Sequence[str]) -> bool:
    return len(classes) > MOST_CLASSES * len(names)


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


def separator_in(name: str) -> str:
    """What stands between the labels in this one."""
    return next(sign for sign in _PLAIN_SEPARATORS + _OTHER_SEPARATORS if sign in name)


def _combined(classes: Counter[str]) -> str | None:
    """A label that is several in one, such as "positive|long"; the parts of it occur in other labels too."""
    for separator in _PLAIN_SEPARATORS + _OTHER_SEPARATORS:
        several, again = _divided(classes, separator)
        if len(several) > 1 and (separator in _PLAIN_SEPARATORS or 2 * len(again) >= len(several)):
            return (again or several)[0]
    return None


def _mostly_combined(classes: Counter[str]) -> bool:
    """Whether most of the names are made of parts that other names have too."""
    return any(2 * len(_divided(classes, sign)[1]) > len(classes) for sign in _PLAIN_SEPARATORS + _OTHER_SEPARATORS)


def _divided(classes: Counter[str], separator: str) -> tuple[list[str], list[str]]:
    """The names that a separator divides, and those of them all of whose parts occur in other names too."""
    parts = {name: {part.strip() for part in name.split(separator)} for name in classes}
    several = [name for name, found in parts.items() if len(found) > 1 and all(found)]
    seen = Counter(part for found in parts.values() for part in found)
    return several, [name for name in several if all(seen[part] > 1 for part in parts[name])]
