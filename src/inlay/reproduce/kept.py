"""What was measured before and is kept in a checkout: runs that a table's script made, experiments of the lab.

Where a checkout has them, a recipe at `here` reads them and does not make them again: they are larger than what a
recipe would run on two cores. What was read, the command that made it and the machine are told in the results' notes.
"""

from __future__ import annotations

import csv
import importlib
import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inlay.errors import InlayError

if TYPE_CHECKING:
    from inlay.theory.findings import Finding

ROOT = Path(__file__).parents[3]
RESULTS = ROOT / "benchmarks" / "results"
SCRIPTS = ROOT / "scripts"
LAB = ROOT / "docs" / "images" / "lab"
READ = "Read from"  # how a note about kept results begins
_IGNORED = ContextVar("ignored", default=False)


@contextmanager
def ignored(wanted: bool = True) -> Iterator[None]:
    """Within this, nothing that is kept is found: a recipe makes all of it anew."""
    token = _IGNORED.set(wanted)
    try:
        yield
    finally:
        _IGNORED.reset(token)


def _there(path: Path) -> bool:
    return not _IGNORED.get() and path.is_file()


@dataclass(frozen=True)
class Table:
    """The runs behind a table. `script` is the module that made them: it knows which learning rate counts."""

    script: Any
    runs: list[dict[str, Any]]
    note: str


def has_table(name: str) -> bool:
    """Whether the runs of scripts/<name>.py are there."""
    return _there(RESULTS / f"{name}.json") and (SCRIPTS / f"{name}.py").is_file()


def table(name: str, more: str = "") -> Table | None:
    """The runs of scripts/<name>.py that came to an end; None where there is no checkout, or it has none."""
    if not has_table(name):
        return None
    path = RESULTS / f"{name}.json"
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        runs = [run for run in found["runs"] if "error" not in run]
        note = _note(path, f"python scripts/{name}.py run{more}", found["versions"])
    except (ValueError, KeyError, TypeError) as error:
        raise InlayError(f"{path} cannot be read: {error!r}. Make it again: python scripts/{name}.py run.") from error
    sys.path.insert(0, str(SCRIPTS))  # scripts import what they share by its plain name
    try:
        return Table(importlib.import_module(name), runs, note)
    finally:
        sys.path.remove(str(SCRIPTS))


def benchmark(name: str, command: str) -> tuple[dict[str, Any], str] | None:
    """What a benchmark kept, and the note about it; None where there is none."""
    path = RESULTS / f"{name}.json"
    if not _there(path):
        return None
    found = json.loads(path.read_text(encoding="utf-8"))
    own = {"cpu": found.get("processor"), "threads": found.get("threads")}
    return found, _note(path, command, found.get("versions", own))


def rows(name: str, command: str) -> tuple[list[dict[str, str]], str] | None:
    """The rows of a CSV among the results, and the note about it; None where there is none."""
    path = RESULTS / f"{name}.csv"
    if not _there(path):
        return None
    with open(path, encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file)), f"{READ} {path.relative_to(ROOT)}: `{command}`."


def experiment(name: str) -> tuple[Finding, str] | None:
    """An experiment of the lab that the documentation shows, and the note about it; None where there is none."""
    from inlay.report import redraw

    if not _there(LAB / name / f"{name}.json"):
        return None
    found, facts = redraw.read(LAB / name)
    return found, _note(LAB / name, " ".join(facts["command"]), facts["versions"])


def _note(path: Path, command: str, versions: Mapping[str, Any]) -> str:
    machine = versions.get("gpu") or f"{versions.get('cpu') or 'a CPU'}, {versions.get('threads')} threads"
    commit = f", commit {str(versions['commit'])[:7]}" if versions.get("commit") else ""
    return f"{READ} {path.relative_to(ROOT)}: `{command}` on {machine}{commit}."
