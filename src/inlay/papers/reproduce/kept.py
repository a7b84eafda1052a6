"""What was measured before and ships with a paper, in its folder `kept`: runs behind tables, what its lab found.

A recipe at `here` reads it and does not make it again: it is larger than what a recipe would run on two cores. What was
read, the command that made it, the machine, and how many seeds and steps were found there are told in the results'
notes: no constant says so. Only whole lines of a table are read (`whole`).
"""

from __future__ import annotations

import csv
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inlay.errors import InlayError
from inlay.papers.reproduce.results import Key, ResultCell, Results

if TYPE_CHECKING:
    from inlay.papers.findings import Finding

ROOT = Path(__file__).parents[1]  # the papers
READ = "Read from"  # how a note about kept results begins
NOT_WHOLE = "Kept runs are not whole and are not read"
LEAST = 3  # seeds without which a line of a kept table is not read
DIGITS = 6  # significant ones of kept measurements: no table, chart or claim reads more
VERDICT_DIGITS = 10  # of results that are judged: six could decide a tie when a verdict is rounded to be shown
# Of an experiment's settings: the seed, and what is computed from it or measured.
OF_A_START = {"seed", "infimum", "largest safe eta_w of gradient descent", "training seconds"}
_IGNORED = ContextVar("ignored", default=False)


@contextmanager
def ignored(wanted: bool = True) -> Iterator[None]:
    """Within this, nothing that is kept is found: a recipe makes all of it anew."""
    token = _IGNORED.set(wanted)
    try:
        yield
    finally:
        _IGNORED.reset(token)


def path(paper: str, name: str) -> Path:
    """Where a paper, by its folder's name, keeps something."""
    return ROOT / paper / "kept" / name


def rounded(found: Any, digits: int = DIGITS) -> Any:
    """The same with so many significant digits in every fraction: digits of no use would be most of a file's size."""
    if isinstance(found, float) and math.isfinite(found) and not found.is_integer():
        return float(f"{found:.{digits}g}")
    if isinstance(found, Mapping):
        return {name: rounded(value, digits) for name, value in found.items()}
    return [rounded(value, digits) for value in found] if isinstance(found, list | tuple) else found


def as_text(found: Any, depth: int = 2) -> str:
    """JSON without spaces for a kept file, an entry a line down to `depth`: versions can be compared."""
    if depth == 0 or not found or not isinstance(found, dict | list):
        return json.dumps(found, separators=(",", ":"), ensure_ascii=False)
    if isinstance(found, list):
        return "[\n" + ",\n".join(as_text(value, depth - 1) for value in found) + "\n]"
    entries = (f"{as_text(name)}:{as_text(value, depth - 1)}" for name, value in found.items())
    return "{\n" + ",\n".join(entries) + "\n}"


def _there(file: Path) -> bool:
    return not _IGNORED.get() and file.is_file()


@dataclass(frozen=True)
class KeptTable:
    """The runs behind a paper's tables. The paper's `table` module made them and knows which learning rate counts."""

    runs: list[dict[str, Any]]
    note: str
    where: str


def has_table(paper: str) -> bool:
    """Whether the runs of a paper's `table` module are there."""
    return _there(path(paper, "table.json"))


def table(paper: str, more: str = "") -> KeptTable | None:
    """The runs of a paper's `table` module; None where there are none. `more`: options of the command that made them.

    Those that failed too: a learning rate that failed has been tried.
    """
    if not has_table(paper):
        return None
    file, command = path(paper, "table.json"), f"python -m inlay.papers.{paper}.table run"
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        runs = list(found["runs"])
        return KeptTable(runs, _note(file, command + more, found["versions"], _commits(runs)), _named(file))
    except (ValueError, KeyError, TypeError) as error:
        raise InlayError(f"{file} cannot be read: {error!r}. Make it again: {command}.") from error


@dataclass(frozen=True)
class KeptValue:
    """What one kept run gave to a cell, and after how many steps (0: it was not trained)."""

    value: float
    steps: int | None = None


def whole(
    found: KeptTable, cells: Mapping[Key, Mapping[int, KeptValue]], about: str, due: Mapping[str, int] | None = None
) -> Results:
    """The lines of a kept table that are whole, with a note that says from the data how many seeds and steps they have.

    `cells` has by seed what was kept of every cell that the table should have, nothing where there is none. A line is
    whole where each of its cells has the seeds 0, 1, ... up to `LEAST` (or to its number in `due`, of what is not
    trained); the seeds that all its cells have are read. Without the line that the table is `about`, or without another
    trained one beside it, nothing is read, and the note says so: its recipe is then to make the table.
    """
    lines: dict[tuple[str, str], list[Key]] = {}
    for key in cells:
        lines.setdefault((key[0], key[1]), []).append(key)
    counts = {line: min(_leading(cells[key]) for key in keys) for line, keys in lines.items()}
    enough = {line: count for line, count in counts.items() if count >= (due or {}).get(line[1], LEAST)}
    lacking = "; ".join(dict.fromkeys(row for _, row in counts if not any(row == name for _, name in enough)))
    trained = {row for _, row in enough} - set(due or ())
    if about not in trained or len(trained) < 2:
        return Results(notes=(f"{NOT_WHOLE}: {lacking} ({found.where}).",))
    read = {key: [cells[key][seed] for seed in range(enough[line])] for line in enough for key in lines[line]}
    steps = {one.steps for runs in read.values() for one in runs if one.steps}
    told = f"Kept runs: {span(enough[line] for line in enough if line[1] not in (due or {}))} seeds a cell"
    notes = [found.note, told + (f", {span(steps)} steps." if steps else ".")]
    if lacking:
        notes.append(f"Incomplete: {lacking} lack seeds or sets in {found.where} and are left out; --fresh makes all.")
    return Results(
        {key: ResultCell(tuple(one.value for one in runs)) for key, runs in read.items()}, notes=tuple(notes)
    )


def _leading(runs: Mapping[int, KeptValue]) -> int:
    """How many of the seeds 0, 1, ... there are before the first that is missing."""
    return next(seed for seed in range(len(runs) + 1) if seed not in runs)


def span(numbers: Iterable[int]) -> str:
    """From the smallest to the largest of some numbers."""
    known = sorted(set(numbers))
    return f"{known[0]:,}" if len(known) == 1 else f"{known[0]:,} to {known[-1]:,}"


def benchmark(paper: str, name: str, command: str) -> tuple[dict[str, Any], str] | None:
    """What a benchmark measured for a paper, and the note about it; None where there is nothing."""
    file = path(paper, f"{name}.json")
    if not _there(file):
        return None
    found = json.loads(file.read_text(encoding="utf-8"))
    own = {"cpu": found.get("processor"), "threads": found.get("threads")}
    return found, _note(file, command, found.get("versions", own))


def rows(paper: str, name: str, command: str) -> tuple[list[dict[str, str]], str] | None:
    """The rows of a CSV that a paper keeps, and the note about it; None where there is none."""
    file = path(paper, f"{name}.csv")
    if not _there(file):
        return None
    with open(file, encoding="utf-8", newline="") as lines:
        return list(csv.DictReader(lines)), f"{READ} {_named(file)}: `{command}`."


def experiments(paper: str, name: str) -> list[tuple[Finding, str]]:
    """An experiment of a paper's lab that the documentation shows, and the note about it; after it the same from other
    seeds, where `lab/seed-1/`, `lab/seed-2/` have it. Their settings must be those of the first."""
    from inlay.papers.experiment_files import read

    made: list[tuple[Finding, str]] = []
    others = path(paper, "lab").glob("seed-*")
    for folder in (path(paper, "lab"), *sorted(others, key=lambda one: (len(one.name), one.name))):  # 10 after 2
        if _there(folder / name / f"{name}.json"):
            found, facts = read(folder / name)
            if made:
                _check_start(folder / name, found, [one for one, _ in made])
            made.append((found, _note(folder / name, " ".join(facts["command"]), facts["versions"])))
    return made


def _check_start(folder: Path, found: Finding, before: list[Finding]) -> None:
    """An error for an experiment that is not the same from another seed."""
    own, first = found.facts, before[0].facts
    for name in sorted({*own, *first} - OF_A_START):
        if own.get(name) != first.get(name):
            raise InlayError(
                f"{folder} was made with {name}={own.get(name)!r}, and the start before it with {first.get(name)!r}: "
                "only the seed may differ. Make it again with the same settings."
            )
    if "seed" in own and own["seed"] in (one.facts.get("seed") for one in before):
        raise InlayError(f"{folder} has seed {own['seed']}, as a start before it. Make it again with another --seed.")


def seeds(starts: Iterable[Finding]) -> list[int]:
    """The seed of each start, by its settings; where they have none, its place."""
    return [int(found.facts.get("seed", place)) for place, found in enumerate(starts)]


def _commits(runs: Iterable[Mapping[str, Any]]) -> str:
    """The commits that runs say they are of; of several, with the groups that have runs of each."""
    groups: dict[str, dict[str, None]] = {}
    for run in runs:
        if run.get("commit"):
            groups.setdefault(run["commit"], {})[run.get("group") or run.get("row") or run["method"]] = None
    if len(groups) < 2:
        return "".join(groups)
    return "; ".join(f"{commit} ({', '.join(of)})" for commit, of in groups.items())


def _note(file: Path, command: str, versions: Mapping[str, Any], commits: str = "") -> str:
    machine = versions.get("gpu") or f"{versions.get('cpu') or 'a CPU'}, {versions.get('threads')} threads"
    hashes = re.sub(r"\b([0-9a-f]{7})[0-9a-f]+", r"\1", commits or versions.get("commit") or "")
    commit = f", commit {hashes}" if hashes else ""
    return f"{READ} {_named(file)}: `{command}` on {machine}{commit}."


def _named(file: Path) -> str:
    """A file of a paper by its place in the package, wherever that is installed."""
    return f"inlay/papers/{file.relative_to(ROOT).as_posix()}"
