"""What a person sees of many runs: one bar over all of them on a terminal, elsewhere a line a run and some between."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager

from tqdm import tqdm

from inlay.console import Pace, can_redraw, tell, visible
from inlay.engines.job import Listener, Outcome
from inlay.workflow.explain.subject import bars_aside
from inlay.workflow.tune import Say

FORMAT = "{desc}: {percentage:3.0f}%|{bar}| {n:.1f}/{total:.0f} runs [{elapsed}<{remaining}]{postfix}"


class Board(Listener, AbstractContextManager["Board"]):
    """Follows the runs called `names`. The bar grows with their updates, so that it moves while a run is long."""

    def __init__(self, names: Sequence[str], *, show: bool, say: Say | None = None) -> None:
        bar = show and can_redraw(sys.stderr)
        self.names, self.lines, self._say = [visible(name) for name in names], show and not bar, say
        self.ended = 0
        self._part: dict[int, float] = {}
        self._told: set[str] = set()
        self._pace = Pace(len(names), "runs")
        self._bar = tqdm(total=len(names), desc="runs", leave=False, bar_format=FORMAT) if bar else None

    def begin(self, number: int) -> None:
        """A run is taken up."""
        self._part[number] = 0.0
        self._draw()

    def step(self, number: int, done: int, total: int) -> None:
        """It has come so far."""
        self._part[number] = done / max(1, total)
        self._draw()

    def say(self, number: int, line: str) -> None:
        """Something that a person should know, once for all runs that say it."""
        if self._say is not None and line not in self._told and not line.startswith("already done"):
            self._told.add(line)
            with bars_aside():
                self._say(line)

    def end(self, number: int, outcome: Outcome) -> None:
        """It is over, unless another process is at it."""
        self._part.pop(number, None)
        if outcome.status == "busy":
            return
        self.ended += 1
        self._pace.before += not outcome.made  # found, not made: it took no time
        what = outcome.status if outcome.made or outcome.status != "finished" else "found finished"
        line = f"[{self.ended}/{len(self.names)}] {self.names[number]}: {what}"
        line += f" ({outcome.seconds:.1f} s)" if outcome.made else ""
        line += f": {outcome.error}" if outcome.error else ""
        if self.lines or (outcome.error and self._bar is not None):
            with bars_aside():
                tell(line)
        self._draw()

    def _draw(self) -> None:
        done = self.ended + sum(self._part.values())
        if self.lines and (line := self._pace.line(done)):
            tell(line)
        if self._bar is not None:
            self._bar.n = done
            self._bar.set_postfix_str(" | ".join(self.names[number] for number in self._part))

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.close()
