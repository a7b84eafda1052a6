"""What a recipe is: a table, figure or theorem of a paper, how to make it again, and the claims that it must show.

How to add a recipe
-------------------
1. Put the paper's printed numbers, if it prints any, into `papers/<paper>/recipes/<item>.csv`: the columns
   `panel` (a backbone, a data set; leave it out where there is one part), `row` (a method) and one for each column of
   the table. A cell is `81.3`, `81.3±0.4` or empty.
2. In a module of that folder (one file for a group of items) write a `Recipe` and put it into the module's `RECIPES`.
   Modules are found by themselves; nothing is registered. At the top of a module import nothing heavy: the list of
   recipes must be quick. Import torch, tasks and workflows inside `run`.
3. `run(bench, settings)` makes the results at a scale, with the same panels, rows and columns as the printed table
   wherever the two are the same thing. It composes what there is and computes nothing of its own: `bench.spec(...)`
   fills in where models and data lie; `bench.runs(specs, seeds)` and `bench.values(specs, seeds, measure)` make runs,
   or find them again; `bench.once(name, settings, work)` keeps what is not a run (theory, counts) from being repeated;
   `results.from_finding(finding)` takes what a function of `inlay lab` gave. Of what varies from seed to seed give
   lists, also of one (`Results.of`, `ResultCell.of_seeds`): a plain number is exact, and decides without an interval.
4. Three scales. `paper`: the paper's settings as far as it prints them, and in the summary what is ours; models and
   data by their names on the hub and in the catalogue. `here`: what runs on two cores (or says that it wants a GPU) in
   a stated time, 5 to 10 minutes at most. `smoke`: a second or so, without a network: models and data are named as at
   `paper`, and stand-ins are made for them (standins.py). The settings of a scale are plain data handed to `run`; its
   `models` and `data` are looked for before anything starts.
   A scale that trains less than the paper, or a toy, says so in `short`: nothing is judged by it.
5. Claims are sentences with a predicate over `Results` (predicates.py has the usual ones; a function of your own is as
   good). The same predicate is put to the printed numbers and to ours. Where what it needs is not in a table it says
   "not tested", and why. A predicate must be one that can fail. A claim about what the paper does not print has
   `printed=False`. What a reader must know beside the numbers (stand-ins for data, what ± means) goes into `notes`.
6. `inlay reproduce <paper>/<item> --scale smoke` runs it; tests/papers/reproduce runs every recipe at `smoke`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from inlay.papers.reproduce.results import Results

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from inlay.papers.reproduce.bench import Bench

Judgement = Literal["holds", "does not hold", "not tested"]
HOLDS: Judgement = "holds"
FAILS: Judgement = "does not hold"
UNTESTED: Judgement = "not tested"
Kind = Literal["holds", "does not hold", "not significant", "not judged", "not tested"]
OPEN: Kind = "not significant"
UNJUDGED: Kind = "not judged"
KINDS: tuple[Kind, ...] = (HOLDS, FAILS, OPEN, UNJUDGED, UNTESTED)
ONE_SEED = "one seed"
SMOKE = "smoke"
SCALES = ("paper", "here", "smoke")
# `where` of a sentence of the paper that had to be made exact: the limit, or the measure, is ours.
READING = "our reading of the text"
PRINTED = "a number as printed"  # `where` of a claim that is itself a printed number: the printed table cannot judge it


@dataclass(frozen=True)
class Verdict:
    """What a table says of a claim. By the means; `interval` is that of the number that decides.

    `clear`: whether every interval that matters leaves out the limit that the number must pass; False also where there
    is one seed. None where there is no interval to look at: counts, printed numbers. `unjudged`: why nothing is judged
    by these numbers (one seed, a run that was cut short), which are told all the same.
    """

    judgement: Judgement
    measured: str
    interval: tuple[float, float] | None = None
    clear: bool | None = None
    unjudged: str = ""

    @classmethod
    def of(
        cls,
        holds: bool,
        measured: str,
        interval: tuple[float, float] | None = None,
        limit: float = 0.0,
    ) -> Verdict:
        """Holds or not; with an interval also whether it leaves the limit out."""
        clear = None if interval is None else not interval[0] <= limit <= interval[1]
        return cls(HOLDS if holds else FAILS, measured, interval, clear)

    @classmethod
    def untested(cls, why: str) -> Verdict:
        """Nothing can be said, and why."""
        return cls(UNTESTED, why)

    @property
    def kind(self) -> Kind:
        """What it is counted as: "not significant" where the interval leaves it open."""
        if self.unjudged:
            return UNJUDGED
        return OPEN if self.clear is False and self.judgement != UNTESTED else self.judgement

    def __str__(self) -> str:
        if self.kind == UNJUDGED:
            return f"{self.unjudged}: {UNJUDGED}"
        if self.kind != OPEN:
            return self.kind
        return f"{OPEN} (by the means it {'holds' if self.judgement == HOLDS else 'does not'})"

    def to_json(self) -> dict[str, Any]:
        """As JSON-ready data; what is not judged has no judgement in it."""
        return vars(self) | ({"judgement": UNJUDGED} if self.unjudged else {})


@dataclass(frozen=True)
class Claim:
    """A sentence of the paper and the predicate that decides it on any table of results. `where`: its section.

    `printed` False: the sentence is about something that the paper's table does not show (other models, say), so that
    the printed numbers do not judge it.
    """

    text: str
    test: Callable[[Results], Verdict]
    where: str = ""
    printed: bool = True


@dataclass(frozen=True)
class RecipeScale:
    """How large a recipe is run, with what, and how long it takes. `settings` go to the recipe's `run` as they are.

    `models` and `data` are looked for before anything starts: hub ids, `embedded:NAME`, or names of folders in
    --models-dir; and names of tasks. `behind` are the models behind numbers that are not made but read, where they
    are others: behind the printed ones, at `paper`; behind kept ones, at `here`.

    `short`: why what is trained at this scale judges nothing (a demonstration, fewer epochs than the paper's), unless
    kept results were read in its place; `made_panels` are never read. Exact numbers, such as counts, are not trained.
    """

    summary: str
    time: str
    models: tuple[str, ...] = ()
    data: tuple[str, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    behind: tuple[str, ...] = ()
    short: str = ""
    made_panels: tuple[str, ...] = ()

    def models_of(self, read: bool, has: Callable[[str], bool] = lambda name: False) -> tuple[str, ...]:
        """The models behind its numbers, by plain names; `read`: behind those that were not made.

        `has` says which are there of those that the setting `if_found` takes in place of its model, or beside its own.
        """
        single, several, wanted = (self.settings.get(name) for name in ("model", "models", "if_found"))
        if isinstance(wanted, str) and has(wanted) and not read:
            return (wanted,)
        named = (*([single] if single else []), *(several or {}).values())
        chosen = (self.behind if read else ()) or self.models or named
        if isinstance(wanted, Mapping):
            chosen = (*chosen, *(name for name in wanted.values() if has(name)))
        return tuple(dict.fromkeys(name.rpartition("/")[2] for name in chosen))


@dataclass(frozen=True)
class Recipe:
    """One item of a paper. `name` is `<paper>/<item>`, as in `activation-prompts/table-2`.

    `printed` is the CSV of the paper's numbers, None where it prints none; `printed_intervals` says that its ± are
    halves of 95 % intervals, which is not assumed of a paper that does not say so. `draw` makes the picture of a figure
    from the printed results (None where there are none) and ours. `kept` says whether all that `here` needs is among
    what is kept, so that no model or data need be looked for.
    """

    name: str
    title: str
    scales: Mapping[str, RecipeScale]
    run: Callable[[Bench, Mapping[str, Any]], Results]
    claims: tuple[Claim, ...]
    printed: Path | None = None
    printed_intervals: bool = False
    draw: Callable[[Results | None, Results], Figure] | None = None
    notes: tuple[str, ...] = ()
    kept: Callable[[], bool] | None = None

    def __post_init__(self) -> None:
        assert set(self.scales) == set(SCALES), f"{self.name}: scales {sorted(self.scales)}"
        assert self.claims, f"{self.name} claims nothing"

    @property
    def paper(self) -> str:
        return self.name.partition("/")[0]

    @property
    def item(self) -> str:
        return self.name.partition("/")[2]

    def printed_results(self) -> Results | None:
        """The paper's numbers."""
        return None if self.printed is None else Results.read(self.printed, intervals=self.printed_intervals)

    def judged(self, results: Results, scale: str = "", *, read: bool = False) -> list[Verdict]:
        """What a table says of each claim. Of one made at a `scale`: nothing by what is too short there to judge, which
        is all that was trained, or with `read` (of kept results) what is always made."""
        verdicts = [_without_doubt(claim, results) for claim in self.claims]
        if scale == SMOKE:
            return [replace(verdict, unjudged=SMOKE) for verdict in verdicts]
        chosen = self.scales.get(scale)
        if chosen is None or not chosen.short or (read and not chosen.made_panels):
            return verdicts
        enough = results.without_trained(chosen.made_panels if read else None)
        return [
            verdict if verdict.judgement == UNTESTED else _by_enough(verdict, claim.test(enough), chosen.short)
            for verdict, claim in zip(verdicts, self.claims, strict=True)
        ]

    def judged_as_printed(self) -> list[Verdict]:
        """What the paper's own numbers say of each claim; nothing of one that is itself such a number."""
        printed = self.printed_results()
        if printed is None:
            return [Verdict.untested("the paper prints no numbers") for _ in self.claims]
        return [self._as_printed(claim, printed) for claim in self.claims]

    def _as_printed(self, claim: Claim, printed: Results) -> Verdict:
        if claim.where == PRINTED:
            return Verdict.untested("it is the printed number")
        return claim.test(printed) if claim.printed else Verdict.untested("the paper prints no numbers of it")


def _without_doubt(claim: Claim, results: Results) -> Verdict:
    """A verdict by what is left without doubtful values; where it needs them, it is not judged."""
    verdict = claim.test(results)
    if verdict.judgement == UNTESTED or not results.doubts:
        return verdict
    return _by_enough(verdict, claim.test(results.without_doubtful()), "; ".join(results.doubts))


def _by_enough(verdict: Verdict, without: Verdict, short: str) -> Verdict:
    """A verdict by what is left without what judges nothing; where it needs that, it is not judged, and told why."""
    return replace(verdict, unjudged=short) if without.judgement == UNTESTED else without
