"""What every experiment of the lab gives: numbers, and beside each claim what was measured; and the fit of an order."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from inlay.errors import InlayError

Holds = Literal["yes", "no", "cannot tell"]
Tick = Callable[[str], None]
Row = tuple[str | int | float | None, ...]


@dataclass(frozen=True)
class MeasuredClaim:
    """A sentence of the paper, and what was seen of it.

    `seeds`: how many random starts it was seen from, where another start would give other numbers; None of what is
    exact, or checked at every draw. `short`: why the training is not as long as the paper's; it is then not judged.
    """

    claim: str
    measured: str
    holds: Holds
    seeds: int | None = None
    short: str = ""

    def __str__(self) -> str:
        """Whether it holds, as far as that can be said."""
        if self.short:
            return f"not judged: {self.short}"
        return f"{self.holds}, in one run" if self.seeds == 1 and self.holds != "cannot tell" else self.holds


@dataclass(frozen=True)
class Finding:
    """What one experiment gave. `facts` are its settings and what the picture needs besides the rows."""

    name: str
    columns: tuple[str, ...]
    rows: list[Row]
    claims: list[MeasuredClaim]
    facts: dict[str, Any] = field(default_factory=dict)

    def column(self, name: str, **where: Any) -> list[Any]:
        """One column, of the rows whose other columns have the given values."""
        places = {self.columns.index(key.replace("_", " ")): value for key, value in where.items()}
        wanted = self.columns.index(name)
        return [row[wanted] for row in self.rows if all(row[place] == value for place, value in places.items())]


def number(cell: str | int | float | None) -> float:
    """A cell of a row that is known to hold a number."""
    assert isinstance(cell, int | float)
    return float(cell)


def verdict(true: bool) -> Holds:
    return "yes" if true else "no"


@dataclass(frozen=True)
class Exponent:
    """The slope of log N against log P by least squares, with its 95 % interval (no width with fewer than 3 points)."""

    slope: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.slope:.2f} [{self.low:.2f}, {self.high:.2f}]"


def exponent(sizes: Sequence[float], numbers: Sequence[float]) -> Exponent:
    """Fit `N ~ P^slope`."""
    from scipy import stats

    if len(set(sizes)) < 2:
        raise InlayError(f"Sizes {sorted(set(sizes))}: a slope needs at least two different ones.")
    fit = stats.linregress([math.log(size) for size in sizes], [math.log(number) for number in numbers])
    freedom = len(sizes) - 2
    width = float(stats.t.ppf(0.975, freedom)) * fit.stderr if freedom > 0 else 0.0
    return Exponent(float(fit.slope), float(fit.slope - width), float(fit.slope + width))
