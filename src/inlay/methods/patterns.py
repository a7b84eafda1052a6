"""What it costs to match a regular expression that somebody else wrote, found out without matching it.

Python's matcher goes back and tries another way whenever one fails, so that a short pattern can keep it busy for years.
All the ways can be counted in a short time, as many of them lead to the same place: for every element of the pattern,
and for every position in a module's name, the number of ways to get there. Their sum is what the matcher does at most.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from re import _compiler, _parser  # type: ignore[attr-defined]
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
MOST = 1e9  # steps of the matcher, over all patterns and all modules of a model: some seconds
MOST_COUNTED = 1e8  # steps of the count itself: some seconds too
REMEMBERED = 500  # so many compiled patterns Python keeps; with more of them each match costs as much as compiling
MATCH, COMPILE = 100, 1000  # what one match costs at least, in steps
RUN = 40  # a pattern must also end on this many of one of its own characters, whatever the model's names
_ONE_CHARACTER = {"LITERAL", "NOT_LITERAL", "ANY", "IN"}
_NO_CHARACTER = {"AT", "FAILURE"}
_ASCII = [chr(code) for code in range(128)]


class TooMany(Exception):
    """There are more ways than anybody would wait for."""


def check_patterns(settings: Mapping[str, Any], names: Sequence[str], where: str, trained: bool = False) -> None:
    """An error for a pattern among an adapter's settings that is none, or that would take too long.

    On these names of modules, that is; and, unless the adapter was `trained` with it already, on a run of any one of
    the pattern's own characters.
    """
    found = list(patterns(settings))
    least = MATCH if len(found) <= REMEMBERED else COMPILE
    count = Count()
    for key, pattern, around in found:
        try:
            if len(pattern) > LONGEST:
                raise ValueError(f"it has {len(pattern):,} characters, and {LONGEST:,} are read")
            parsed = _parser.parse(around % pattern)
            plain = is_plain(_parser.parse(pattern))
        except (re.error, ValueError, OverflowError, RecursionError) as error:
            raise InlayError(f"{where} does not fit: {key}={pattern[:80]!r} is no pattern ({error}).") from None
        try:
            count.add(len(names) * least)
            if not plain:
                for name in (*names, *(() if trained else runs(pattern))):
                    count.ways(parsed, name)
        except (TooMany, RecursionError):
            raise InlayError(
                f"{where} has {key}={pattern[:80]!r}: matching it against the modules of a model takes too long. "
                "Name the modules in a list, or use fewer stars, and none inside of another."
            ) from None


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


def is_plain(parsed: Iterable[tuple[Any, Any]]) -> bool:
    """Whether a pattern is one character after the other, as a name is: there is one way to match it."""
    return all(str(kind) in _ONE_CHARACTER | _NO_CHARACTER for kind, _ in parsed)


def runs(pattern: str) -> list[str]:
    """A run of each character of a pattern: what a repetition within another one finds hardest."""
    characters = {character for character in pattern if character.isascii() and character.isalnum()}
    return [character * RUN for character in sorted(characters | {"a", "0", "."})]


class Count:
    """The steps of the matcher so far. What is counted is never less than what it does: where an assertion or a
    reference to a group would rule ways out, they are counted."""

    def __init__(self) -> None:
        self.steps = 0.0
        self.counted = 0

    def add(self, steps: float, counted: int = 1) -> None:
        self.steps += steps
        self.counted += counted
        if self.steps > MOST or self.counted > MOST_COUNTED:
            raise TooMany

    def ways(self, parsed: Iterable[tuple[Any, Any]], name: str) -> dict[int, float]:
        """Where in a name a match of a parsed pattern may end, and in how many ways."""
        return self._sequence(parsed, name, {0: 1.0})

    def _sequence(self, parsed: Iterable[tuple[Any, Any]], name: str, begun: dict[int, float]) -> dict[int, float]:
        for kind, value in parsed:
            if not begun:
                break
            begun = self._element(kind, value, name, begun)
            self.add(sum(begun.values()), 1 + len(begun))
        return begun

    def _element(self, operation: Any, value: Any, name: str, begun: dict[int, float]) -> dict[int, float]:
        kind = str(operation)
        if kind in _ONE_CHARACTER:
            takes = _matcher(operation, value)
            return {at + 1: ways for at, ways in begun.items() if at < len(name) and takes(name[at])}
        if kind in _NO_CHARACTER:
            return begun
        if kind in ("BRANCH", "GROUPREF_EXISTS"):
            options = value[1] if kind == "BRANCH" else [option for option in value[1:] if option is not None]
            ends = [self._sequence(option, name, begun) for option in options]
            return _sum(ends if kind == "BRANCH" else [*ends, begun])
        if kind in ("SUBPATTERN", "ATOMIC_GROUP"):
            return self._sequence(value[-1] if kind == "SUBPATTERN" else value, name, begun)
        if kind in ("ASSERT", "ASSERT_NOT"):
            direction, looked_at = value
            back = looked_at.getwidth()[0] if direction < 0 else 0
            self._sequence(looked_at, name, {at - back: ways for at, ways in begun.items() if at >= back})
            return begun
        if kind == "GROUPREF":
            return _onwards(begun, len(name), lambda _: True)
        if kind in ("MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT"):
            least, most, inner = value
            return self._repetition(least, most, inner, name, begun)
        raise ValueError(f"{kind} is not known here")

    def _repetition(self, least: int, most: int, inner: Any, name: str, begun: dict[int, float]) -> dict[int, float]:
        # Python repeats what took no character only as often as it must.
        most = min(int(most), max(int(least), len(name) + 1))
        if len(inner) == 1 and str(inner[0][0]) in _ONE_CHARACTER and least <= 1 and most > len(name):
            takes = _matcher(*inner[0])
            ends = _onwards(begun, len(name), lambda at: takes(name[at]))
            if not least:
                return ends
            return {at + 1: ways for at, ways in ends.items() if at < len(name) and takes(name[at])}
        reached = [begun] if not least else []
        for repeated in range(1, most + 1):
            begun = self._sequence(inner, name, begun)
            self.add(0)
            if not begun:
                break
            if repeated >= least:
                reached.append(begun)
        return _sum(reached)


def _sum(ends: list[dict[int, float]]) -> dict[int, float]:
    total: dict[int, float] = {}
    for each in ends:
        for at, ways in each.items():
            total[at] = total.get(at, 0.0) + ways
    return total


def _onwards(begun: dict[int, float], end: int, takes: Any) -> dict[int, float]:
    """From each place on, as far as the characters are taken."""
    reached, ways = {}, 0.0
    for at in range(min(begun), end + 1):
        if ways and not takes(at - 1):
            ways = 0.0
        ways += begun.get(at, 0.0)
        if ways:
            reached[at] = ways
    return reached


@lru_cache(maxsize=10_000)
def _taken(kind: Any, value: Any) -> frozenset[str]:
    """The ASCII characters that an element of one character may take, with regard to case or without: flags may say
    either."""
    element = (kind, list(value) if isinstance(value, tuple) else value)
    parsed = _parser.SubPattern(_parser.State(), [element])
    takes = [_compiler.compile(parsed, re.DOTALL | re.UNICODE | flag) for flag in (0, re.IGNORECASE)]
    return frozenset(character for character in _ASCII if any(each.match(character) for each in takes))


def _matcher(kind: Any, value: Any) -> Callable[[str], bool]:
    taken = _taken(kind, tuple(value) if isinstance(value, list) else value)
    return lambda character: character in taken or not character.isascii()
