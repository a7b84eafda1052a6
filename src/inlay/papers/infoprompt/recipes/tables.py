"""Tables 1 to 5: InfoPrompt beside full training, adapters, LoRA, WARP, IDPG and its own ablations."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from inlay.papers.infoprompt.recipes import protocol as p
from inlay.papers.reproduce.certainty import Evidence, every
from inlay.papers.reproduce.predicates import Test, above_on_average, difference, together
from inlay.papers.reproduce.recipe import READING, Claim, Recipe, RecipeScale, Verdict
from inlay.papers.reproduce.results import Results

if TYPE_CHECKING:
    from inlay.papers.reproduce.bench import Bench

LENGTHS = (1, 4)
SHOTS = (64, 256)
# On two cores: 62 updates on 500 examples, short texts.
HERE = {"shots": 500, "epochs": 2, "batch_size": 16, "evaluations": 1, "max_length": 64, "schedule": "constant"}
FEW_HERE = {"epochs": 8, "batch_size": 8, "evaluations": 1, "max_length": 64}


def by_length(tasks: Mapping[str, str], lengths: tuple[int, ...]) -> dict[str, tuple[str, Mapping[str, Any]]]:
    """Columns of tables 1 and 2."""
    return {
        f"{name}, n_p = {length}": (task, {"num_prompt_tokens": length})
        for name, task in tasks.items()
        for length in lengths
    }


def by_shots(tasks: Mapping[str, str], shots: tuple[int, ...]) -> dict[str, tuple[str, Mapping[str, Any]]]:
    """Columns of tables 3 and 4."""
    return {f"{name}, N = {count}": (task, {"shots": count}) for name, task in tasks.items() for count in shots}


def full_data(bench: Bench, settings: Mapping[str, Any]) -> Results:
    """Tables 1 and 2. Methods without prompts are run once for all n_p."""
    columns = by_length(settings["tasks"], settings["lengths"])
    specs = p.specs(bench, settings, settings.get("rows", p.ROWS), columns)
    return averaged(bench.values(specs, settings["seeds"], p.score), by_length(settings["printed"], LENGTHS))


def few_shot(bench: Bench, settings: Mapping[str, Any]) -> Results:
    """Tables 3 and 4."""
    rows, columns = settings.get("rows", p.ROWS), by_shots(settings["tasks"], settings["shots"])
    known = kept_few_shot(settings.get("kept", {}), rows)
    if not known.cells:
        known = known.with_([bench.values(p.specs(bench, settings, rows, columns), settings["seeds"], p.score)])
    return averaged(known, by_shots(settings["printed"], SHOTS))


def kept_few_shot(tasks: Mapping[str, str], rows: Iterable[str]) -> Results:
    """The kept runs of tables 3 and 4."""
    columns = {f"{name}, N = {count}": (f"mlm-{count}", task) for count in SHOTS for name, task in tasks.items()}
    return p.kept_cells("", columns, rows) if tasks else Results()


def averaged(results: Results, columns: Iterable[str]) -> Results:
    """With the mean over the printed table's columns, where they are all there: over others it is another number."""
    return results.with_average(columns=list(columns))


def table_5(bench: Bench, settings: Mapping[str, Any]) -> Results:
    """Panels are sizes of the training set; WARP is beside the paper's three rows."""
    tasks, rows = settings["tasks"], settings.get("rows", ("LoRA", "Adapter", "WARP", "InfoPrompt"))
    read = settings.get("kept", {})
    parts = [
        p.kept_cells(f"N = {count}", {name: (f"mlm-{count}", task) for name, task in read.items()}, rows)
        for count in SHOTS
        if read
    ]
    known = {panel for part in parts for panel in part.panels}
    for panel, count in settings["sizes"].items():
        if panel not in known:
            columns = {name: (task, {"shots": count} if count else {}) for name, task in tasks.items()}
            changed = {**settings, "training": {**settings["training"], **settings.get("full", {})}}
            specs = p.specs(bench, settings if count in SHOTS else changed, rows, columns)
            made = bench.values(specs, settings["seeds"], p.score)
            cells = {(panel, row, column): cell for (_, row, column), cell in made.cells.items()}
            parts.append(Results(cells, failures=made.failures))
    return averaged(Results().with_(parts), EVERY)


def wider(row: str, panel: str, than: str = "full") -> Test:
    """InfoPrompt is farther above a row in one panel than in another, on average over the columns that both have."""

    def test(results: Results) -> Verdict:
        sides = []
        for where in (panel, than):
            pairs = {
                column: (mine, theirs)
                for column in EVERY
                if (mine := results.get("InfoPrompt", column, where)) and (theirs := results.get(row, column, where))
            }
            sides.append({column: difference(*pair) for column, pair in pairs.items()})
        shared = sorted(sides[0].keys() & sides[1].keys())
        if not shared:
            return Verdict.untested(f"the table does not have {row} in {panel} and in {than}")
        one, other = (together([side[column] for column in shared]) for side in sides)
        gap = difference(one, other)
        told = f"{one.mean:+.4f} ({panel}) against {other.mean:+.4f} ({than}), {len(shared)} sets"
        return every(told, [Evidence(gap, gap.mean > 0, low=0)], gap.interval)

    return test


def scales(
    tasks: Mapping[str, str],
    here: Mapping[str, str],
    paper: Mapping[str, Any],
    own: Mapping[str, Any],
    smoke: Mapping[str, Any],
    words: tuple[str, str, str],
    minutes: tuple[str, str],
) -> dict[str, RecipeScale]:
    """The three scales of one table; `printed` are its own tasks."""
    first = dict(list(tasks.items())[-1:])
    return {
        "paper": RecipeScale(
            f"RoBERTa-large, 30 epochs of batches of 8, prompts at learning rate 0.001, {words[0]}, 5 seeds. {p.OURS}",
            minutes[0],
            (p.ROBERTA,),
            tuple(tasks.values()),
            {
                "model": p.ROBERTA,
                "tasks": tasks,
                "printed": tasks,
                "training": p.PAPER,
                "seeds": p.TRIALS,
                **paper,
            },
        ),
        "here": RecipeScale(
            words[1],
            minutes[1],
            (p.HOUSE,),
            tuple(here.values()),
            {"model": p.HOUSE, "if_found": p.BETTER, "tasks": here, "printed": tasks, **own},
            behind=(p.BETTER,),
        ),
        "smoke": RecipeScale(
            words[2],
            "2 s",
            (p.ROBERTA,),
            tuple(first.values()),
            {
                "model": p.ROBERTA,
                "tasks": first,
                "printed": tasks,
                "rows": ("WARP", "InfoPrompt"),
                "training": p.ONE_STEP,
                "seeds": 1,
                **smoke,
            },
        ),
    }


def too_short(why: str, *made: Any, made_panels: tuple[str, ...] = ()) -> dict[str, RecipeScale]:
    """The same, with why nothing is judged by what is trained at `here`."""
    found = scales(*made)
    return {**found, "here": replace(found["here"], short=why, made_panels=made_panels)}


MODEL_HERE = "MiniLM (minilm_l6_mlm of --models-dir, a masked language model, where it is there)"
FULL_SHORT = "2 epochs on 500 examples, in place of 30 on all"
FEW_SHORT = "8 of 30 epochs"
OWN_FULL = (
    f"{MODEL_HERE} on 500 examples of each, 2 epochs of batches of 16, each method's own learning rate, n_p = 4, "
    "2 seeds."
)
KEPT = (
    "The kept runs are read where they are whole: a masked MiniLM, 30 epochs, learning rates selected on the "
    f"validation set. Else {MODEL_HERE}, N = 64, 8 epochs, each method's own learning rate, 2 seeds."
)


def full_table(number: int, title: str, tasks: Mapping[str, str], here: Mapping[str, str]) -> Recipe:
    columns = list(by_length(tasks, LENGTHS))
    return Recipe(
        name=f"infoprompt/table-{number}",
        title=title,
        printed=p.printed(f"table-{number}"),
        scales=too_short(
            FULL_SHORT,
            tasks,
            here,
            {"lengths": LENGTHS},
            {"lengths": (4,), "training": HERE, "seeds": 2},
            {"lengths": (4,)},
            ("all training data, n_p = 1 and 4", OWN_FULL, "One step of WARP and InfoPrompt."),
            ("days on one GPU", "15 min on two cores"),
        ),
        run=full_data,
        claims=p.claims(columns, "section 5.1"),
        notes=(p.SPAN_NOTE, p.NER_NOTE) if number == 2 else (p.SPAN_NOTE, p.SST_NOTE),
    )


def few_table(number: int, title: str, tasks: Mapping[str, str], here: Mapping[str, str]) -> Recipe:
    read = here if number == 4 else p.SENTENCES
    return Recipe(
        name=f"infoprompt/table-{number}",
        title=title,
        printed=p.printed(f"table-{number}"),
        scales=too_short(
            FEW_SHORT,
            tasks,
            here,
            {"shots": SHOTS},
            {"shots": (64,), "training": FEW_HERE, "seeds": 2, "kept": read},
            {"shots": (6,)},
            ("64 and 256 examples, n_p = 4", KEPT, "One step of WARP and InfoPrompt on 6 examples."),
            ("a day on one GPU", "seconds; with --fresh 15 min on two cores"),
        ),
        run=few_shot,
        claims=p.claims(list(by_shots(tasks, SHOTS)), "section 5.2"),
        notes=(p.NER_NOTE,) if number == 4 else (p.SST_NOTE,),
        kept=lambda: bool(kept_few_shot(read, p.ROWS).cells),
    )


EVERY = {**p.SENTENCES, **p.SPANS}
TABLE_5 = Recipe(
    name="infoprompt/table-5",
    title="InfoPrompt beside LoRA and adapters",
    printed=p.printed("table-5"),
    scales=too_short(
        FULL_SHORT,
        EVERY,
        {"SST2": "sst2-sentences", **p.SPANS_HERE},
        {"sizes": {"full": None, "N = 64": 64, "N = 256": 256}},
        {
            "sizes": {"full": 500, "N = 64": 64},
            "training": FEW_HERE,
            "full": HERE,
            "seeds": 2,
            "kept": {"SST2": "sst2", **p.SPANS_HERE},
        },
        {"sizes": {"full": None, "N = 64": 6}, "rows": ("LoRA", "InfoPrompt")},
        (
            "all training data, 64 and 256 examples, n_p = 4",
            f"{KEPT} For `full` 500 examples and 2 epochs, at each method's own learning rate.",
            "One step of LoRA and InfoPrompt, on all and on 6 examples.",
        ),
        ("days on one GPU", "10 min on two cores; 20 without the kept runs"),
        made_panels=("full",),
    ),
    run=table_5,
    claims=(
        *(
            Claim(
                f"InfoPrompt is above {row} on average, {panel}",
                above_on_average("InfoPrompt", row, columns=list(EVERY), panels=[panel]),
                "appendix E",
            )
            for row in ("LoRA", "Adapter")
            for panel in ("full", "N = 64", "N = 256")
        ),
        Claim(
            "LoRA is a stronger baseline than Adapter, on average everywhere",
            above_on_average("LoRA", "Adapter", columns=list(EVERY)),
            "appendix E",
        ),
        Claim(
            "InfoPrompt is above LoRA on NER and RE",
            above_on_average("InfoPrompt", "LoRA", columns=["RE", "NER"]),
            "appendix E",
        ),
        *(
            Claim(
                f"The gain over {row} is larger with few examples: {panel}",
                wider(row, panel),
                READING,
            )
            for row in ("LoRA", "Adapter")
            for panel in ("N = 64", "N = 256")
        ),
    ),
    notes=(p.NER_NOTE, p.SST_NOTE),
)
RECIPES = (
    full_table(1, "Sequence classification, all training data", p.SENTENCES, p.SENTENCES_HERE),
    full_table(2, "Relation extraction and entity typing, all training data", p.SPANS, p.SPANS_HERE),
    few_table(3, "Sequence classification with 64 and 256 examples", p.SENTENCES, {**p.SENTENCES_HERE, "RTE": "rte"}),
    few_table(4, "Relation extraction and entity typing with 64 and 256 examples", p.SPANS, p.SPANS_HERE),
    TABLE_5,
)
