"""Carry out a recipe at a scale, judge its claims on the paper's numbers and on ours, and keep all in one folder."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inlay.errors import InlayError, unknown
from inlay.papers.reproduce import catalogue, kept
from inlay.papers.reproduce.bench import Bench
from inlay.papers.reproduce.recipe import SCALES, Claim, Recipe, Verdict
from inlay.papers.reproduce.results import AVERAGES, MEAN_OF, Key, Results
from inlay.records.atomic import write_folder, write_json, write_text, writing
from inlay.records.tables import csv_text
from inlay.records.versions import versions


@dataclass(frozen=True)
class Reproduction:
    """A recipe carried out: the paper's table (None where it prints none), ours, and what both say of each claim."""

    recipe: Recipe
    scale: str
    printed: Results | None
    ours: Results
    seconds: float
    folder: Path
    command: tuple[str, ...] = ()
    models: tuple[str, ...] = ()  # behind our numbers

    @property
    def verdicts(self) -> list[tuple[Claim, Verdict, Verdict]]:
        """Each claim, on the printed numbers and on ours."""
        pairs = zip(self.recipe.judged_as_printed(), self._ours, strict=True)
        return [(claim, *pair) for claim, pair in zip(self.recipe.claims, pairs, strict=True)]

    @property
    def _ours(self) -> list[Verdict]:
        return self.recipe.judged(self.ours, self.scale, read=bool(self.read))

    @property
    def read(self) -> list[str]:
        """What was read of kept results, in place of being run."""
        return read_of(self.ours)

    @property
    def notes(self) -> list[str]:
        """What a reader must know: of the recipe, then of these results, but for what was read."""
        return list(dict.fromkeys([*self.recipe.notes, *(note for note in self.ours.notes if note not in self.read)]))

    @property
    def heading(self) -> str:
        """What the table is, with the paper's models and ours."""
        theirs = self.recipe.scales["paper"].models_of(True)
        ours = "stand-ins with random weights" if self.scale == "smoke" else ", ".join(self.models)
        named = f" (paper: {', '.join(theirs)}; here: {ours})" if theirs and ours else ""
        return f"{self.recipe.name}, {self.scale}{named}"

    def beside(self) -> tuple[list[str], list[list[str]]]:
        """Our table with the paper's numbers beside ours, wherever both have a column."""
        return beside(self.printed, self.ours)

    def to_json(self) -> dict[str, Any]:
        """All of it as JSON-ready data."""
        scale = self.recipe.scales[self.scale]
        return {
            "recipe": self.recipe.name,
            "title": self.recipe.title,
            "scale": self.scale,
            "settings": {"summary": scale.summary, "stated_time": scale.time, **dict(scale.settings)},
            "models": list(self.models),
            "data": list(scale.data),
            "notes": list(self.recipe.notes),
            "seconds": round(self.seconds, 1),
            "command": list(self.command),
            "claims": [
                {"claim": claim.text, "where": claim.where, "printed": printed.to_json(), "ours": ours.to_json()}
                for claim, printed, ours in self.verdicts
            ],
            "ours": self.ours.to_json(),
            "versions": versions(),
        }

    def to_markdown(self) -> str:
        """The outcome as a page."""
        scale = self.recipe.scales[self.scale]
        parts = [
            f"# {self.recipe.name}: {self.recipe.title}",
            f"Scale `{self.scale}`: {scale.summary} Stated time: {scale.time}; taken: {self.seconds:.0f} s.",
            *(f"Read, not run: {note.removeprefix(kept.READ).lstrip()}" for note in self.read),
            *self.notes,
            self.heading,
            grid(*self.beside()),
            grid(
                ["claim", "the paper's numbers", "measured", "ours", "measured"],
                [
                    [claim.text, str(printed), printed.measured, str(ours), ours.measured]
                    for claim, printed, ours in self.verdicts
                ],
            ),
            *(f"- failed: {which}: {why}" for which, why in self.ours.failures.items()),
        ]
        if self.printed is not None:
            parts += ["The paper's table:", grid(*self.printed.table())]
        return "\n\n".join(parts) + "\n"


def read_of(ours: Results) -> list[str]:
    """What was read of kept results, in place of being run."""
    return [note for note in ours.notes if note.startswith(kept.READ)]


def grid(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(
        "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in line) + " |" for line in lines
    )


def with_own_means(printed: Results | None, ours: Results) -> Results:
    """Ours, with a mean called the paper's average only where it is one of the same columns; else "mean of k".

    A mean of one column is left out. Costs, whose columns have their units in brackets, are in no mean.
    """
    names: dict[Key, str | None] = {}
    for panel, row, column in ours.cells:
        theirs = [] if printed is None else _averaged(printed, column, panel)
        if column in AVERAGES and theirs != (own := _averaged(ours, column, panel, row)):
            names[panel, row, column] = f"{MEAN_OF}{len(own)}" if len(own) > 1 else None
    return ours.with_columns_named(names)


def _averaged(results: Results, average: str, panel: str, row: str | None = None) -> list[str]:
    """The columns that an average is of, in a panel's row or in all."""
    found = {column for where, who, column in results.cells if where == panel and row in (None, who)}
    return sorted(column for column in found - {average} if "(" not in column)


def beside(printed: Results | None, ours: Results) -> tuple[list[str], list[list[str]]]:
    """Our rows, and in every column that the paper has too its number before ours; then the paper's further rows."""
    paper = Results() if printed is None else printed
    shared = [column for column in ours.columns if column in paper.columns]
    with_panel = ours.panels not in ([], [""]) or paper.panels not in ([], [""])
    head = [*(["panel"] if with_panel else []), "row"]
    for column in ours.columns:
        head += [f"{column}, paper", f"{column}, ours"] if column in shared else [column]
    places = [(panel, row) for panel in ours.panels for row in ours.rows(panel)]
    if shared:
        more = [(panel, row) for panel in paper.panels for row in paper.rows(panel)]
        places = list(dict.fromkeys([*places, *more]))
    lines = []
    for panel, row in places:
        cells = []
        for column in ours.columns:
            both = [paper.get(row, column, panel)] if column in shared else []
            cells += ["-" if cell is None else str(cell) for cell in [*both, ours.get(row, column, panel)]]
        if any(cell != "-" for cell in cells):
            lines.append([*([panel] if with_panel else []), row, *cells])
    return head, lines


def reproduce(
    name: str | Recipe,
    scale: str = "here",
    bench: Bench | None = None,
    *,
    fresh: bool = False,
    command: Sequence[str] = (),
) -> Reproduction:
    """Make one recipe's table or figure, judge its claims, and keep the result in <paper>/<item>/<scale> of the bench.

    Some recipes at `here` read kept results of larger measurements (kept.py); `fresh` makes all anew.
    """
    scale = known_scale(scale)
    recipe = name if isinstance(name, Recipe) else _one(name)
    bench = bench or Bench()
    bench.check_options()
    folder = bench.out / recipe.paper / recipe.item / scale
    with writing(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
    chosen = recipe.scales[scale]
    bench = bench.with_standins(chosen) if scale == "smoke" else bench
    begin = time.perf_counter()
    with kept.ignored(fresh or scale != "here"):
        if not (recipe.kept and recipe.kept()):
            bench.check(recipe.name, chosen)
        ours = recipe.run(bench, chosen.settings)
    seconds = time.perf_counter() - begin
    printed = recipe.printed_results()
    models = chosen.models_of(bool(read_of(ours)), bench.has)
    outcome = Reproduction(
        recipe, scale, printed, with_own_means(printed, ours), seconds, folder, tuple(command), models
    )
    keep(outcome)
    return outcome


def known_scale(name: str) -> str:
    """The scale of this name."""
    if name not in SCALES:
        raise unknown("scale", name, SCALES)
    return name


def _one(name: str) -> Recipe:
    found = catalogue.choose(name)
    if len(found) > 1:
        raise InlayError(f"{name!r} names {len(found)} recipes: give one, such as {found[0].name!r}.")
    return found[0]


def keep(outcome: Reproduction) -> None:
    """Write table (CSV, Markdown), picture (PNG, SVG) and all of it as JSON, whole or not at all."""
    from inlay.report.charts import drawing as charts

    item = outcome.recipe.item
    figure = None if outcome.recipe.draw is None else outcome.recipe.draw(outcome.printed, outcome.ours)

    def fill(place: Path) -> None:
        head, rows = outcome.ours.table()
        write_text(place / f"{item}.csv", csv_text([head, *rows], "\r\n"))
        (place / f"{item}.md").write_text(outcome.to_markdown(), encoding="utf-8")
        if figure is not None:
            charts.save(figure, place / f"{item}.png")
            charts.save(figure, place / f"{item}.svg")
        write_json(place / f"{item}.json", outcome.to_json())

    write_folder(outcome.folder, fill)
