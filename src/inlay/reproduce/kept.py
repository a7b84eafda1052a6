"""What was measured before and is kept in a checkout: runs that a table's script made, experiments of the lab.

Where a checkout has them, a recipe at `here` reads them and does not make them again: they are larger than what a
recipe would run on two cores. What was read, the command that made it and the machine are told in the results' notes.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Mapping
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


@dataclass(frozen=True)
class Table:
    """The runs behind a table. `script` is the module that made them: it knows which learning rate counts."""

    script: Any
    runs: list[dict[str, Any]]
    note: str


def has_table(name: str) -> bool:
    """Whether the runs of scripts/<name>.py are there."""
    return (RESULTS / f"{name}.json").is_file() and (SCRIPTS / f"{name}.py").is_file()


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
    if not path.is_file():
        return None
    found = json.loads(path.read_text(encoding="utf-8"))
    return found, _note(path, command, {"cpu": found.get("processor"), "threads": found.get("threads")})


def experiment(name: str) -> tuple[Finding, str] | None:
    """An experiment of the lab that the documentation shows, and the note about it; None where there is none."""
    from inlay.report import redraw

    if not (LAB / name / f"{name}.json").is_file():
        return None
    found, facts = redraw.read(LAB / name)
    return found, _note(LAB / name, " ".join(facts["command"]), facts["versions"])


def _note(path: Path, command: str, versions: Mapping[str, Any]) -> str:
    machine = versions.get("gpu") or f"{versions.get('cpu') or 'a CPU'}, {versions.get('threads')} threads"
    commit = f", commit {str(versions['commit'])[:7]}" if versions.get("commit") else ""
    return f"{READ} {path.relative_to(ROOT)}: `{command}` on {machine}{commit}."
