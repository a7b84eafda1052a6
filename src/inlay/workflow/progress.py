"""Progress for a person: a bar on a terminal, elsewhere lines, for a loop, a stage of work, or many runs."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Self

from tqdm import tqdm

from inlay.console import WrittenProgress, can_redraw, tell, visible
from inlay.engines.job import JobOutcome, Listener
from inlay.workflow.notes import Say

RUNS_FORMAT = "{desc}: {percentage:3.0f}%|{bar}| {n:.1f}/{total:.0f} runs [{elapsed}<{remaining}]{postfix}"


def bars_aside() -> AbstractContextManager[None]:
    """While this is open, lines can be printed without overwriting a progress bar."""
    return tqdm.external_write_mode(file=sys.stderr)


class Bar(AbstractContextManager["Bar"]):
    """A progress bar on a terminal. Elsewhere one line a step, where steps are long (`lines`), and otherwise a line now
    and then."""

    def __init__(self, total: int, what: str, units: str, *, show: bool, lines: bool = False) -> None:
        self.total, self.what, self.units, self.lines, self.done = total, what, units, lines, 0
        drawn = show and can_redraw(sys.stderr)
        self._bar = tqdm(total=total, desc=what, unit=f" {units}", leave=False) if drawn else None
        self._pace = WrittenProgress(total, units) if show and not drawn else None

    def begin(self, step: str) -> None:
        """Say which step comes next."""
        if self._bar is not None:
            self._bar.set_postfix_str(visible(step))
        elif self.lines and self._pace is not None:
            tell(f"[{self.done + 1}/{self.total}] {step}{self._pace.left(self.done)}")

    def advance(self, count: int = 1, note: str = "") -> None:
        """So many steps are done; `note` is added to the line or the bar."""
        self.done += count
        if self._bar is not None:
            if note:
                self._bar.set_postfix_str(note.lstrip(", "), refresh=False)
            self._bar.update(count)
        elif self._pace is not None and not self.lines and (line := self._pace.line(self.done)):
            tell(f"{self.what}: {line}{note}")

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.close()


class Stage(Bar):
    """A bar over one stage of the work, which prints a line at its start and at its end where no bar can be drawn."""

    def __enter__(self) -> Self:
        self._began, self._note = time.monotonic(), ""
        self._print(f"{self.total:,} {self.units}")
        return self

    def advance(self, count: int = 1, note: str = "") -> None:
        self._note = note
        super().advance(count, note)

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        if error[0] is None:
            self._print(f"done in {time.monotonic() - self._began:.1f} s{self._note}")

    def _print(self, line: str) -> None:
        if self._pace is not None:
            tell(f"{self.what}: {line}")


class RunsProgress(Listener, AbstractContextManager["RunsProgress"]):
    """Follows the runs called `names`: one bar over all of them on a terminal, elsewhere a line a run and some between.

    The bar grows with the updates of each run, so that it moves while a run is long.
    """

    def __init__(self, names: Sequence[str], *, show: bool, say: Say | None = None) -> None:
        bar = show and can_redraw(sys.stderr)
        self.names, self.lines, self._say = [visible(name) for name in names], show and not bar, say
        self.ended = 0
        self._part: dict[int, float] = {}
        self._told: set[str] = set()
        self._pace = WrittenProgress(len(names), "runs")
        self._bar = tqdm(total=len(names), desc="runs", leave=False, bar_format=RUNS_FORMAT) if bar else None

    def begin(self, number: int) -> None:
        """A run begins."""
        self._part[number] = 0.0
        self._draw()

    def step(self, number: int, done: int, total: int) -> None:
        """A run has made `done` of its updates."""
        self._part[number] = done / max(1, total)
        self._draw()

    def say(self, number: int, line: str) -> None:
        """Pass on a note, once for all runs that have it."""
        if self._say is not None and line not in self._told and not line.startswith("already done"):
            self._told.add(line)
            with bars_aside():
                self._say(line)

    def end(self, number: int, outcome: JobOutcome) -> None:
        """A run is over, unless another process is working on it."""
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
