"""Experiments of `inlay lab` as parts of a recipe: the same functions, their numbers as a table, their own verdicts."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from inlay.papers.reproduce import kept
from inlay.papers.reproduce.results import DIFFERS, ResultCell, Results, Stated, from_finding

if TYPE_CHECKING:
    from inlay.papers.findings import Finding, Row
    from inlay.papers.reproduce.bench import Bench

# The paper of each theory. Results kept in a folder are named by the theory.
THEORIES = {"decomposable": "multi_lora", "icl": "icl", "prefix": "ntk_attention", "softmax_regression": "infoprompt"}


@dataclass(frozen=True)
class Shape:
    """What of an experiment's rows a table shows, by `from_finding`; one experiment may be shown in several ways.

    `named` gives rows other names, and rows without one are left out; `within` is the panel that all go to. Of a curve
    `points` are shown, spread evenly over its rows; with `last`, of rows of the same name only the last.
    """

    row: tuple[str, ...] = ()
    panel: str | None = None
    columns: tuple[str, ...] = ()
    curve: tuple[str, str] | None = None
    named: Mapping[str, str] = field(default_factory=dict)
    within: str | None = None
    points: int = 11
    last: bool = False

    def of(self, found: Finding) -> Results:
        """The table, without the experiment's claims."""
        made = from_finding(replace(found, rows=self._chosen(found)), self.row, self.panel, self.columns, self.curve)
        cells = {
            (panel if self.within is None else self.within, self.named.get(row, row), column): cell
            for (panel, row, column), cell in made.cells.items()
            if not self.named or row in self.named
        }
        return Results(cells)

    def _chosen(self, found: Finding) -> list[Row]:
        places = {name: place for place, name in enumerate(found.columns)}
        by = [*self.row, *([self.panel] if self.panel else [])]
        groups: dict[tuple[Any, ...], list[Row]] = {}
        for line in found.rows:
            names = [*by, self.curve[0]] if self.curve and self.last else by
            groups.setdefault(tuple(line[places[name]] for name in names), []).append(line)
        if self.last:
            return [lines[-1] for lines in groups.values()]
        if self.curve is None:
            return found.rows
        return [line for lines in groups.values() for line in self._thin(lines, places[self.curve[0]])]

    def _thin(self, lines: Sequence[Row], place: int) -> list[Row]:
        known = list(dict.fromkeys(line[place] for line in lines))
        ends = range(self.points)
        wanted = {known[round(end * (len(known) - 1) / (self.points - 1))] for end in ends}
        return [line for line in lines if line[place] in wanted]


def shown(found: Finding, shapes: Sequence[Shape], notes: tuple[str, ...] = ()) -> Results:
    """An experiment with its claims as the lab judged them, and the tables that are asked for."""
    claims = from_finding(replace(found, rows=[]))
    return replace(claims, notes=notes).with_([shape.of(found) for shape in shapes])


def performed(
    bench: Bench,
    room: str,
    name: str,
    setting: Mapping[str, Any],
    shapes: Sequence[Shape],
    *more: Any,
    options: Mapping[str, Any] | None = None,
) -> Results:
    """One experiment of a theory's lab (`THEORIES`); `setting` has the fields of its `SETTING`, and `more` and
    `options` go to it after that. With `starts` in the setting, once from each of so many seeds."""
    chosen = {field: value for field, value in setting.items() if field != "starts"}

    def made(own: Mapping[str, Any]) -> Results:
        def work() -> Results:
            lab = importlib.import_module(f"inlay.papers.{THEORIES[room]}.theory.lab")
            return shown(lab.EXPERIMENTS[name](lab.SETTING(**own), bench.say, *more, **dict(options or {})), shapes)

        key = {"setting": dict(own), "options": options, "shapes": [asdict(shape) for shape in shapes]}
        return bench.once(f"{room}/{name}", key, work)

    if "starts" not in setting:
        return made(chosen)
    seeds = range(setting["starts"])
    return over_starts([made({**chosen, "seed": seed}) for seed in seeds], seeds)


def over_starts(found: Sequence[Results], seeds: Sequence[int]) -> Results:
    """One experiment made from these seeds, as one table: a value a seed, and each claim as all starts judge it."""
    first = found[0]
    cells = {
        key: ResultCell.of_seeds(value for one in found if key in one.cells for value in one.cells[key].values)
        for key in first.cells
    }
    claims = []
    for several in zip(*(one.stated for one in found), strict=True):
        said = {claim.holds for claim in several}
        holds = said.pop() if len(said) == 1 else "cannot tell" if "cannot tell" in said else DIFFERS
        measured = "; ".join(f"seed {seed}: {claim.measured}" for seed, claim in zip(seeds, several, strict=True))
        short = next((claim.short for claim in several if claim.short), "")
        claims.append(Stated(several[0].claim, measured, holds, len(found), short))
    return replace(first, cells=cells, stated=tuple(claims))


def from_lab(paper: str, name: str, shapes: Sequence[Shape]) -> Results | None:
    """The same from what a paper keeps of an experiment, over all the starts it is kept from; None where there are
    none."""
    starts = kept.experiments(paper, name)
    found = [shown(one, shapes, (note,)) for one, note in starts]
    if len(found) < 2:
        return found[0] if found else None
    notes = tuple(note for one in found for note in one.notes)
    return replace(over_starts(found, kept.seeds(one for one, _ in starts)), notes=notes)
