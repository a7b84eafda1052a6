"""What all explanations have in common: a name, a table, one sentence, and a folder.

The verbs are in runs.py (layers, samples, prompt norm: they train) and models.py (CKA, attention distance: they only
measure).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from inlay.records.spec import Spec
from inlay.records.versions import versions

Value = str | int | float | None


class Explanation(Protocol):
    """A measured answer. `what` is the command's name, `sentence` what the table shows, in words."""

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
        """What else is recorded, as JSON-ready data."""
        ...


def facts(found: Explanation, command: Sequence[str] = ()) -> dict[str, Any]:
    """What is recorded with the table: how it was made. `command` is the command line, where there was one."""
    return {
        "what": found.what,
        "sentence": found.sentence,
        "command": list(command),
        "spec": found.spec.to_json(),
        **found.details(),
        "versions": versions(),
    }


def folder_of(what: str, spec: Spec, out: Path | str, *others: str) -> Path:
    """The folder of an explanation: `<out>/<what>-<task>-<model>`; `others` are further parts of the name."""
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
