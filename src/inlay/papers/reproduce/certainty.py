"""Whether numbers say what their means say: a verdict is clear only where every interval that it rests on leaves its
limit out. What rests on one seed is not judged; what is exact (a count, a printed number) needs no interval."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from inlay.papers.reproduce.recipe import FAILS, HOLDS, ONE_SEED, Verdict
from inlay.papers.reproduce.results import ResultCell, rough


@dataclass(frozen=True)
class Gap:
    """How far one cell is above another, and half of the interval of that."""

    panel: str
    column: str
    mean: float
    half: float | None
    lone: bool = False

    @property
    def interval(self) -> tuple[float, float] | None:
        return None if self.half is None else (self.mean - self.half, self.mean + self.half)

    def __str__(self) -> str:
        place = ", ".join(part for part in (self.panel, self.column) if part)
        half = "" if self.half is None else f" ± {rough(self.half)}"
        return f"{self.mean:+.3g}{half}" + (f" ({place})" if place else "") + (", one seed" if self.lone else "")


@dataclass(frozen=True)
class Evidence:
    """One number that a claim rests on: it passes, by the mean, where it lies between the limits."""

    number: ResultCell | Gap
    passes: bool
    low: float = -math.inf
    high: float = math.inf

    @property
    def settled(self) -> bool:
        """Whether the whole interval says what the mean says. A number without one is exact, unless of one seed."""
        if self.number.lone or self.number.interval is None:
            return not self.number.lone
        first, last = self.number.interval
        return self.low < first and last < self.high if self.passes else last < self.low or first > self.high


def clear(parts: Sequence[Evidence]) -> bool | None:
    """Of "all pass": whether it is settled that all do, or that one does not. None where all numbers are exact."""
    if all(part.number.interval is None and not part.number.lone for part in parts):
        return None
    if all(part.passes for part in parts):
        return all(part.settled for part in parts)
    return any(part.settled and not part.passes for part in parts)


def every(told: str, parts: Sequence[Evidence], interval: tuple[float, float] | None = None) -> Verdict:
    """The verdict on "all pass"; `interval` is that of the number which decides by the means. Where that one is open
    and another settles that not all pass, the other is told as well, and its interval is the verdict's."""
    sure = [part.number for part in parts if part.settled and not part.passes and part.number.interval is not None]
    if sure and interval not in [number.interval for number in sure]:
        told, interval = f"{told}; decided by {sure[0]}", sure[0].interval
    loose = sum(not part.settled for part in parts)
    more = f"; {loose} of {len(parts)} not significant" if len(parts) > 1 and loose else ""
    known = clear(parts)
    return Verdict(
        HOLDS if all(part.passes for part in parts) else FAILS, told + more, interval, known, lone(parts, known)
    )


def lone(parts: Sequence[Evidence], known: bool | None) -> str:
    """Why nothing is judged where what is open rests on one seed."""
    return ONE_SEED if known is False and any(part.number.lone for part in parts) else ""
