"""What it may cost to match a regular expression that somebody else wrote, found out without matching it.

Python's matcher goes back and tries another way whenever one fails, so that a short pattern can keep it busy for years.
The ways that there are can be counted from the pattern alone: at most

    ways(a b) = ways(a) ways(b)        ways(a|b) = ways(a) + ways(b)        ways(a{l,h}) = sum of ways(a)^k, k = l .. h

where a repetition is as long as the name at most. Patterns that people write for modules have few stars and few ways.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from re import _parser  # type: ignore[attr-defined]
from typing import Any

from inlay.errors import InlayError

# The settings that hold patterns and what PEFT puts around each. A list of target modules holds names, not patterns.
ONE = {"target_modules": "%s", "exclude_modules": "%s", "feedforward_modules": "%s"}
MANY = {
    "modules_to_save": r"(^|.*\.)%s($|\..*)",
    "layers_pattern": r"(?:^|.*?\.)%s\.(?P<idx>\d+)\.",
    "rank_pattern": r"(.*\.)?(%s)$",
    "alpha_pattern": r"(.*\.)?(%s)$",
}
LONGEST = 100_000  # characters of a pattern
MOST = 1e9  # ways, over all patterns and all modules of a model: some seconds at worst
REMEMBERED = 500  # so many compiled patterns Python keeps; with more of them each match costs as much as compiling
MATCH, COMPILE = 100, 10_000  # what one match costs at least, in ways
_GROWS_NOT = {"LITERAL", "NOT_LITERAL", "ANY", "IN", "AT", "CATEGORY", "RANGE", "GROUPREF", "FAILURE", "NEGATE"}


def check_patterns(settings: Mapping[str, Any], names: Sequence[str], where: str) -> None:
    """An error for a pattern among an adapter's settings that is none, or that would take too long on these names."""
    found = list(patterns(settings))
    longest = max(map(len, names), default=0)
    least = MATCH if len(found) <= REMEMBERED else COMPILE
    cost = 0.0
    for key, pattern, around in found:
        try:
            if len(pattern) > LONGEST:
                raise ValueError(f"it has {len(pattern):,} characters, and {LONGEST:,} are read")
            count = ways(_parser.parse(around % pattern), longest)
        except (re.error, ValueError, OverflowError, RecursionError) as error:
            raise InlayError(f"{where} does not fit: {key}={pattern[:80]!r} is no pattern ({error}).") from None
        cost += len(names) * max(count, least)
        if cost > MOST:
            raise InlayError(
                f"{where} has {key}={pattern[:80]!r}: matching it against the {len(names):,} modules of the model may "
                "take for ever. Name the modules in a list, or use fewer stars, and none inside of another."
            )


def patterns(settings: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """The setting, the pattern, and what stands around it when it is matched."""
    for key, around in ONE.items():
        if isinstance(settings.get(key), str):
            yield key, settings[key], around
    for key, around in MANY.items():
        value = settings.get(key)
        for pattern in [value] if isinstance(value, str) else value if isinstance(value, list | dict) else ():
            if isinstance(pattern, str):
                yield key, pattern, around


def ways(parsed: Iterable[tuple[Any, Any]], length: int) -> float:
    """At most so many ways there are to match a parsed pattern against a name of this length."""
    product = 1.0
    for kind, value in parsed:
        product *= _ways_of(str(kind), value, length)
    return product


def _ways_of(kind: str, value: Any, length: int) -> float:
    if kind in _GROWS_NOT:
        return 1.0
    if kind == "BRANCH":
        return sum(ways(option, length) for option in value[1])
    if kind in ("SUBPATTERN", "ASSERT", "ASSERT_NOT", "ATOMIC_GROUP"):
        return ways(value if kind == "ATOMIC_GROUP" else value[-1], length)
    if kind == "GROUPREF_EXISTS":
        return sum(ways(option, length) for option in value[1:] if option is not None)
    if kind in ("MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT"):
        least, most, repeated = value
        most = min(int(most), length // max(1, repeated.getwidth()[0]) + 1)
        inner, lengths = ways(repeated, length), max(0, most - int(least)) + 1
        if inner <= 1.0:
            return float(lengths)
        return lengths * inner**most if most < 64 else float("inf")
    raise ValueError(f"{kind} is not known here")
