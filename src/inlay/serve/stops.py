"""Where a text that is written ends before its time: at one of a few texts, which is not told any more."""

from __future__ import annotations

from collections.abc import Callable, Sequence


class Cut:
    """Hears a text piece by piece, and tells it up to the first of `stops`; what may become one is held back."""

    def __init__(self, stops: Sequence[str], stop: Callable[[], None] | None = None) -> None:
        self.stops, self.stop, self.found = stops, stop, False
        self._held, self._told = "", ""

    def add(self, piece: str) -> str:
        """One more piece; what can be told now."""
        if self.found:
            return ""
        self._held += piece
        ends = [place for stop in self.stops if (place := self._held.find(stop)) >= 0]
        if ends:
            self.found = True
            return self._tell(min(ends), keep=False)
        return self._tell(len(self._held) - self._may_begin())

    def rest(self) -> str:
        """What was held back, at the end."""
        return "" if self.found else self._tell(len(self._held))

    def hear(self, piece: str) -> None:
        """The same, where nothing is told before the end."""
        self.add(piece)
        if self.found and self.stop is not None:
            self.stop()

    def whole(self) -> str:
        """All that was told, at the end."""
        self.rest()
        return self._told

    def _tell(self, count: int, keep: bool = True) -> str:
        said, self._held = self._held[:count], self._held[count:] if keep else ""
        self._told += said
        return said

    def _may_begin(self) -> int:
        """How many of the last characters may be the beginning of a stop."""
        most = min(len(self._held), max((len(stop) for stop in self.stops), default=1) - 1)
        return next((n for n in range(most, 0, -1) if any(stop.startswith(self._held[-n:]) for stop in self.stops)), 0)
