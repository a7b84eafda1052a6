"""What the explanations have in common: a subject to look at, a name, numbers, one sentence, and a folder to go to.

The verbs are in runs.py (layers, samples, prompt norm: they train) and models.py (CKA, attention
distance: they only look).
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

from tqdm import tqdm

from inlay.console import Pace, can_redraw, tell, visible
from inlay.records.spec import Spec
from inlay.records.versions import versions

DEFAULT_FOLDER = "explain"
Value = str | int | float | None


class Explanation(Protocol):
    """A measured answer. `what` is the command's name, `sentence` what the numbers show, in words."""

    @property
    def what(self) -> str: ...

    @property
    def spec(self) -> Spec: ...

    @property
    def sentence(self) -> str: ...

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of the CSV's columns."""
        ...

    def rows(self) -> list[tuple[Value, ...]]:
        """The CSV's rows."""
        ...

    def details(self) -> dict[str, Any]:
        """What else belongs on record, as JSON-ready data."""
        ...


def facts(found: Explanation, command: Sequence[str] = ()) -> dict[str, Any]:
    """What goes beside the numbers: how they came about. `command` is the command line, where there was one."""
    return {
        "what": found.what,
        "sentence": found.sentence,
        "command": list(command),
        "spec": found.spec.to_json(),
        **found.details(),
        "versions": versions(),
    }


def place_of(what: str, spec: Spec, out: Path | str, *others: str) -> Path:
    """The folder of an explanation: `<out>/<what>-<task>-<model>`; `others` are further names that tell it apart."""
    names = (what, subject_name(spec), model_name(spec.model), *others)
    return Path(out) / "-".join(name for name in names if name)


def subject_name(spec: Spec) -> str:
    """The task by its name, or the data by the file's."""
    return slug(spec.task or Path(str(spec.data)).stem)


def model_name(model: str) -> str:
    """A model's own name: without the hub's owner, the folder's path, or `embedded:`."""
    return slug(Path(model.rpartition(":")[2]).name)


def slug(text: str) -> str:
    """A name as part of a folder's name."""
    return re.sub(r"[^A-Za-z0-9._]+", "-", text).strip("-")


def bars_aside() -> AbstractContextManager[None]:
    """While this is open, lines can be printed without writing over a progress bar."""
    return tqdm.external_write_mode(file=sys.stderr)


class Bar(AbstractContextManager["Bar"]):
    """A progress bar on a terminal; elsewhere one line a step, where steps are long enough to deserve it (`lines`), and
    otherwise one now and then."""

    def __init__(self, total: int, what: str, unit: str, *, show: bool, lines: bool = False) -> None:
        self.total, self.lines, self.done = total, lines and show, 0
        drawn = show and can_redraw(sys.stderr)
        self._bar = tqdm(total=total, desc=what, unit=unit, leave=False) if drawn else None
        self._what, self._pace = what, Pace(total, f"{unit}s") if show and not drawn else None

    def begin(self, what: str) -> None:
        """Say what is coming."""
        if self._bar is not None:
            self._bar.set_postfix_str(visible(what))
        elif self.lines and self._pace is not None:
            tell(f"[{self.done + 1}/{self.total}] {what}{self._pace.left(self.done)}")

    def advance(self) -> None:
        """One step is done."""
        self.done += 1
        if self._bar is not None:
            self._bar.update()
        elif self._pace is not None and not self.lines and (line := self._pace.line(self.done)):
            tell(f"{self._what}: {line}")

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.close()
