"""Figures 1 to 3: information of prompts, loss surfaces, learning curves.

By the functions behind `inlay explain information` and `inlay explain landscape`, and from the runs' own histories. The
paper prints no numbers for them.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from inlay.papers.infoprompt import table
from inlay.papers.infoprompt.recipes import protocol as p
from inlay.papers.reproduce import kept
from inlay.papers.reproduce.certainty import Evidence, every
from inlay.papers.reproduce.drawing import curves
from inlay.papers.reproduce.predicates import Test, above, above_on_average, difference, numbered
from inlay.papers.reproduce.recipe import READING, Claim, Recipe, RecipeScale, Verdict
from inlay.papers.reproduce.results import Key, ResultCell, Results

if TYPE_CHECKING:
    from inlay.papers.reproduce.bench import Bench

NATS = "information (nats)"
PHRASES = {
    "MRPC": ("it is equivalent to", "has the same meaning"),
    "SST2": ("this is positive", "this is negative"),
}
BY_HAND = ("handcraft 1", "handcraft 2")
END = "the end of the bound, log K"
ONE_TRAINING = "one training with each"


def figure_1(bench: Bench, settings: Mapping[str, Any]) -> Results:
    """The bound on I(P; Z | X) of each text, by where its prompts are from; a value a text."""
    from inlay.papers.infoprompt.explain.information import RANDOM, information

    cells: dict[Key, ResultCell] = {}
    notes = []
    for panel, task in settings["tasks"].items():
        columns = {NATS: (task, {"num_prompt_tokens": 4})}
        specs = p.specs(bench, settings, ("WARP", "InfoPrompt"), columns)
        runs = [bench.tune(spec) for spec in specs.values()]
        found = information(
            [run.id for run in runs],
            words=PHRASES[panel],
            examples=settings["examples"],
            steps=settings["steps"],
            store=bench.out / "runs",
            progress=bench.progress,
        )
        named = {"warp": "WARP", "infoprompt": "InfoPrompt", RANDOM: "random"}
        named |= {f"'{phrase}'": row for phrase, row in zip(PHRASES[panel], BY_HAND, strict=True)}
        for source in found.sources:
            cells[panel, named[source.name], NATS] = ResultCell(tuple(source.values))
        cells[panel, END, NATS] = ResultCell((found.most,))
        notes.append(f"{panel}. {found.sentence}")
    return Results(cells, notes=tuple(notes))


def carries_more(one: str, other: str, panel: str) -> Test:
    """A source's bound is above another's; nothing is told where both are at its end, log K."""

    def test(results: Results) -> Verdict:
        from inlay.papers.infoprompt.explain.information import FULL

        end, cells = results.get(END, NATS, panel), [results.get(row, NATS, panel) for row in (one, other)]
        if end is not None and all(cell is not None and cell.mean >= FULL * end.mean for cell in cells):
            means = " and ".join(f"{cell.mean:.3f}" for cell in cells if cell is not None)
            return Verdict.untested(f"both are at the end of the bound, log K = {end.mean:.3f}: {means}")
        return above(one, other, panels=[panel])(results)

    return test


def figure_2(bench: Bench, settings: Mapping[str, Any]) -> Results:
    """How rough the two surfaces are; the task's loss along the paths with and without the head loss."""
    from inlay.papers.infoprompt.explain.landscape import landscape, roughness

    (spec,) = p.specs(bench, settings, ("InfoPrompt",), {"": (settings["task"], {})}).values()

    def work() -> Results:
        found = landscape(spec, **settings["look"], progress=bench.progress)
        cells = {
            (SURFACE, f"{name} loss", ROUGH): ResultCell.of_seeds([roughness(grid)])
            for name, grid in found.values.items()
        }
        for path in found.paths:
            shown = range(0, len(path.steps), max(1, len(path.steps) // 10))
            for place in sorted({*shown, len(path.steps) - 1}):
                for panel, losses in ((PATH, path.task), (PATH_OF_STATE, path.representation)):
                    cells[panel, path.name, str(path.steps[place])] = ResultCell.of_seeds([losses[place]])
        return Results(cells, notes=(found.sentence,))

    return bench.once("infoprompt/figure-2", {**settings, "spec": spec.to_json()}, work)


SURFACE, PATH, ROUGH = "surfaces", "task loss along the path, by step", "roughness"
PATH_OF_STATE = "representation loss along the path, by step"


def of_panel(results: Results, panel: str) -> Results:
    return Results({key: cell for key, cell in results.cells.items() if key[0] == panel})


def descends_more(one: str, other: str, panel: str) -> Test:
    """A path ends farther below its start than another."""

    def test(results: Results) -> Verdict:
        falls = []
        for row in (one, other):
            curve = numbered(results, row, panel)
            if len(curve) < 2:
                return Verdict.untested(f"no path of {row}")
            falls.append(difference(curve[0][1], curve[-1][1]))
        gap = difference(falls[0], falls[1])
        return every(f"{falls[0].mean:.3g} against {falls[1].mean:.3g}", [Evidence(gap, gap.mean > 0, low=0)])

    return test


def figure_3(bench: Bench, settings: Mapping[str, Any]) -> Results:
    """The score on held-out examples as training goes on, by update."""
    known = kept_curves()
    if known.cells:
        return known
    cells: dict[Key, list[float]] = {}
    failures: dict[str, str] = {}
    for panel, task in settings["tasks"].items():
        specs = p.specs(bench, settings, settings["rows"], {panel: (task, {})})
        found, failed = bench.runs(specs, settings["seeds"])
        failures |= failed
        for (_, row, _), runs in found.items():
            for run in runs:
                for entry in run.history():
                    if "validation" in entry:
                        value = entry["validation"][run.record["metric"]]
                        cells.setdefault((panel, row, str(entry["step"])), []).append(value)
    return known.with_([Results.of(cells, failures=failures)])


CURVES = ("Finetuning", "WARP", "InfoPrompt")


def kept_curves() -> Results:
    """Those of the kept runs with 64 examples; no cells where there are none."""
    found = kept.table("infoprompt")
    if found is None:
        return Results()
    cells: dict[Key, dict[int, kept.KeptValue]] = {}
    for panel, task in {"NER": "wnut17-spans", "SST2": "sst2"}.items():
        for row in CURVES:
            line = table.GROUPS["mlm-64"].line(p.LINES[row])
            made = table.cell(found.runs, "mlm-64", line, task)
            for seed, entry in made.items():
                for step, value in entry["curve"]:
                    own = cells.setdefault((panel, row, str(step)), {})
                    own[seed] = kept.KeptValue(value, entry.get("steps"))
            if not made:
                cells[panel, row, "0"] = {}
    return kept.whole(found, cells, "InfoPrompt")


def ends_above(one: str, other: str, panel: str) -> Test:
    """At the last point that both have."""

    def test(results: Results) -> Verdict:
        sides = [dict(numbered(results, row, panel)) for row in (one, other)]
        shared = sides[0].keys() & sides[1].keys()
        if not shared:
            return Verdict.untested(f"no curves of {one} and {other} on {panel}")
        gap = difference(sides[0][max(shared)], sides[1][max(shared)])
        told = f"{gap.mean:+.3g} after {max(shared):g} updates"
        return every(told, [Evidence(gap, gap.mean > 0, low=0)], gap.interval)

    return test


def steadier(one: str, other: str, panel: str) -> Test:
    """The largest fall of a curve from one point to the next is smaller than another's, on average over seeds."""

    def test(results: Results) -> Verdict:
        falls = []
        for row in (one, other):
            curve = numbered(results, row, panel)
            if len(curve) < 3:
                return Verdict.untested(f"no curve of {row} on {panel}")
            falls.append(
                ResultCell.of_seeds(
                    max(max(0.0, a - b) for a, b in pairwise(values))
                    for values in zip(*(cell.values for _, cell in curve), strict=True)
                )
            )
        gap = difference(falls[1], falls[0])
        told = f"largest falls {falls[0].mean:.3g} and {falls[1].mean:.3g}"
        return every(told, [Evidence(gap, gap.mean > 0, low=0)], gap.interval)

    return test


SHORT = {"batch_size": 8, "evaluations": 1, "max_length": 64}
FIGURE_1 = Recipe(
    name="infoprompt/figure-1",
    title="Information that prompts carry, by where they are from",
    scales={
        "paper": RecipeScale(
            "RoBERTa-large on MRPC and SST-2 (all training data), 30 epochs; 256 texts, 300 updates of the critic. "
            f"{p.OURS} The number of texts and the critic's training are ours too.",
            "a day on one GPU",
            (p.ROBERTA,),
            ("mrpc", "sst2"),
            {
                "model": p.ROBERTA,
                "tasks": {"MRPC": "mrpc", "SST2": "sst2"},
                "training": p.PAPER,
                "examples": 256,
                "steps": 300,
            },
            short=ONE_TRAINING,
        ),
        "here": RecipeScale(
            "MiniLM (minilm_l6_mlm where --models-dir has it) trained on 64 examples of MRPC and of SST-2 for 8 "
            "epochs; 128 texts, 300 updates of the critic.",
            "5 min on two cores",
            (p.HOUSE,),
            ("mrpc", "sst2-sentences"),
            {
                "model": p.HOUSE,
                "if_found": p.BETTER,
                "tasks": {"MRPC": "mrpc", "SST2": "sst2-sentences"},
                "training": {**SHORT, "shots": 64, "epochs": 8},
                "examples": 128,
                "steps": 300,
            },
            short=ONE_TRAINING,
        ),
        "smoke": RecipeScale(
            "One step of each; 8 texts, 2 updates of the critic.",
            "2 s",
            (p.ROBERTA,),
            ("sst2",),
            {"model": p.ROBERTA, "tasks": {"SST2": "sst2"}, "training": p.ONE_STEP, "examples": 8, "steps": 2},
        ),
    },
    run=figure_1,
    claims=tuple(
        claim
        for panel in ("MRPC", "SST2")
        for claim in (
            Claim(
                f"InfoPrompt's prompts carry more than WARP's: {panel}",
                carries_more("InfoPrompt", "WARP", panel),
                "section 1",
            ),
            *(
                Claim(f"WARP's carry more than {row}: {panel}", carries_more("WARP", row, panel), "section 1")
                for row in BY_HAND
            ),
            *(
                Claim(f"Random ones carry less than {row}: {panel}", carries_more(row, "random", panel), "section 1")
                for row in BY_HAND
            ),
        )
    ),
    notes=(
        "`inlay explain information` draws the distributions. The critic is fitted anew for each source.",
        "A value a text: the intervals are over texts, of one training.",
    ),
)
FIGURE_2 = Recipe(
    name="infoprompt/figure-2",
    title="Surfaces of the task loss and of the representation loss, and the first steps on them",
    scales={
        "paper": RecipeScale(
            "RoBERTa-large on MRPC, one prompt token, 500 steps, 20 texts, a grid of 21. "
            f"{p.OURS} The grid is ours too.",
            "10 min on one GPU",
            (p.ROBERTA,),
            ("mrpc",),
            {
                "model": p.ROBERTA,
                "task": "mrpc",
                "training": p.PAPER,
                "look": {"examples": 20, "steps": 500, "grid": 21},
            },
        ),
        "here": RecipeScale(
            "MiniLM (minilm_l6_mlm where --models-dir has it) on 64 examples of MRPC, 120 steps, 20 texts, a grid "
            "of 13.",
            "4 min on two cores",
            (p.HOUSE,),
            ("mrpc",),
            {
                "model": p.HOUSE,
                "if_found": p.BETTER,
                "task": "mrpc",
                "training": {**SHORT, "shots": 64, "epochs": 15},
                "look": {"examples": 20, "steps": 120, "grid": 13},
            },
            short=f"{ONE_TRAINING}, 120 of 500 steps",
        ),
        "smoke": RecipeScale(
            "Two steps, 4 texts, a grid of 3.",
            "1 s",
            (p.ROBERTA,),
            ("mrpc",),
            {
                "model": p.ROBERTA,
                "task": "mrpc",
                "training": {**p.ONE_STEP, "max_steps": 2},
                "look": {"examples": 4, "steps": 2, "grid": 3},
            },
        ),
    },
    run=figure_2,
    claims=(
        Claim(
            "The surface of the representation loss is smoother than that of the task loss",
            above("task loss", "representation loss", columns=[ROUGH], panels=[SURFACE]),
            READING,
        ),
        Claim(
            "With the head loss the task loss descends farther",
            descends_more("gamma = 0.05", "gamma = 0", PATH),
            "section 6.1",
        ),
        Claim(
            "and so does the representation loss",
            descends_more("gamma = 0.05", "gamma = 0", PATH_OF_STATE),
            "section 6.1",
        ),
    ),
    draw=lambda printed, ours: curves("MRPC", "step", "task loss")(printed, of_panel(ours, PATH)),
    notes=(
        "`inlay explain landscape` draws the surfaces. Roughness: mean absolute second difference over the range.",
        "One training with each: what seeds do to it is not shown, nor is it in the paper.",
        "The representation loss along a path is by the critic of that step, which is trained as well.",
    ),
)
FIGURE_3 = Recipe(
    name="infoprompt/figure-3",
    title="Learning curves",
    scales={
        "paper": RecipeScale(
            f"RoBERTa-large on ACE 2005 and SST-2, all training data, 30 epochs, 50 evaluations. {p.OURS} "
            "So are the 3 seeds.",
            "3 days on one GPU",
            (p.ROBERTA,),
            ("ace2005", "sst2"),
            {
                "model": p.ROBERTA,
                "tasks": {"NER": "ace2005", "SST2": "sst2"},
                "rows": CURVES,
                "training": {**p.PAPER, "evaluations": 50},
                "seeds": 3,
            },
        ),
        "here": RecipeScale(
            "The kept runs are read where they are whole: a masked MiniLM, 64 "
            "examples, 30 epochs. Else MiniLM, 64 examples, 8 epochs, 4 evaluations, 2 seeds.",
            "seconds; with --fresh 10 min on two cores",
            (p.HOUSE,),
            ("wnut17-spans", "sst2-sentences"),
            {
                "model": p.HOUSE,
                "if_found": p.BETTER,
                "tasks": {"NER": "wnut17-spans", "SST2": "sst2-sentences"},
                "rows": CURVES,
                "training": {**SHORT, "shots": 64, "epochs": 8, "evaluations": 4},
                "seeds": 2,
            },
            behind=(p.BETTER,),
            short="8 of 30 epochs",
        ),
        "smoke": RecipeScale(
            "Three steps of WARP and InfoPrompt.",
            "1 s",
            (p.ROBERTA,),
            ("sst2",),
            {
                "model": p.ROBERTA,
                "tasks": {"SST2": "sst2"},
                "rows": ("WARP", "InfoPrompt"),
                "training": {**p.ONE_STEP, "max_steps": 3, "evaluations": 3},
                "seeds": 1,
            },
        ),
    },
    run=figure_3,
    claims=tuple(
        claim
        for panel in ("NER", "SST2")
        for claim in (
            Claim(
                f"InfoPrompt converges faster than WARP: above it on average on the way; {panel}",
                above_on_average("InfoPrompt", "WARP", panels=[panel]),
                READING,
            ),
            Claim(f"and more steadily; {panel}", steadier("InfoPrompt", "WARP", panel), READING),
            Claim(
                f"Finetuning converges faster than InfoPrompt; {panel}",
                above_on_average("Finetuning", "InfoPrompt", panels=[panel]),
                READING,
            ),
            Claim(f"and ends higher; {panel}", ends_above("Finetuning", "InfoPrompt", panel), "section 6.2"),
        )
    ),
    draw=curves("Learning curves", "updates", "score on held-out examples"),
    notes=(p.NER_NOTE, p.SST_NOTE),
    kept=lambda: bool(kept_curves().cells),
)
RECIPES = (FIGURE_1, FIGURE_2, FIGURE_3)
