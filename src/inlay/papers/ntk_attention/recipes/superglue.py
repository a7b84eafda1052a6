"""Table 1: five tasks of SuperGLUE, beside P-Tuning V2 and LoRA."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from inlay.papers.ntk_attention.recipes import protocol as p
from inlay.papers.reproduce.certainty import Evidence, every
from inlay.papers.reproduce.counting import PARAMETERS
from inlay.papers.reproduce.predicates import Test, above, above_on_average, difference, near, together
from inlay.papers.reproduce.recipe import PRINTED, Claim, Recipe, RecipeScale, Verdict
from inlay.papers.reproduce.results import Results

if TYPE_CHECKING:
    from inlay.papers.reproduce.bench import Bench

GLUE = {"BoolQ": "boolq", "CB": "cb", "Copa": "copa", "MultiRC": "multirc", "RTE": "rte"}
WAYS_1 = {
    "P-Tuning V2, m = 1": p.prefix(1),
    "P-Tuning V2, m = 10": p.prefix(10),
    "P-Tuning V2, m = 100": p.prefix(100),
    p.LORA_8: p.lora(8),
    p.NTK: p.ntk(16),
}
LINES_1 = {
    "P-Tuning V2, m = 1": "prefix, m = 1",
    "P-Tuning V2, m = 16": "prefix, m = 16",
    "P-Tuning V2, m = 100": "prefix, m = 100",
    p.LORA_8: "lora",
    p.NTK: "ntk-attention",
    "full fine-tuning": "full",
}
# The commoner class of the test parts of the kept runs, in per cent.
CHANCE = {"BoolQ": 100 * 2033 / 3270, "CB": 50.0, "Copa": 55.0, "MultiRC": 100 * 2773 / 4848, "RTE": 100 * 146 / 277}
PREFIXES = ("P-Tuning V2, m = 1", "P-Tuning V2, m = 10", "P-Tuning V2, m = 16", "P-Tuning V2, m = 100")


def table_1(bench: Bench, settings: Mapping[str, Any]) -> Results:
    ways = {row: WAYS_1[row] for row in settings.get("rows", WAYS_1)}
    made = p.counts(bench, {"": settings["shape"]}, ways)
    found = p.kept_cells("encoder", LINES_1, GLUE, 100)
    if not found.cells:
        specs = p.specs(bench, settings, {"": settings["model"]}, ways, settings["tasks"])
        chance = p.commoner(bench, {"": settings["model"]}, settings["tasks"])
        found = found.with_([bench.values(specs, settings["seeds"], p.percent), chance])
    else:
        found = found.with_([Results.of({("", p.COMMONER, column): share for column, share in CHANCE.items()})])
    return made.with_([found.with_average(columns=list(GLUE))])


def ntk_above(row: str, columns: list[str]) -> Test:
    """NTK-Attention is above a row on every one of these tasks that one of them has learnt."""
    return p.where_learnt((p.NTK, row), columns, lambda left: above(p.NTK, row, columns=left))


def improves(results: Results) -> Verdict:
    """Each longer prefix is above the next shorter one, on average over the tasks that one of them has learnt."""
    rows = [row for row in PREFIXES if any(results.get(row, column) for column in GLUE)]
    if len(rows) < 2:
        return Verdict.untested("the table does not have two lengths")

    def steps(left: list[str]) -> Test:
        def test(found: Results) -> Verdict:
            cells = {row: [cell for column in left if (cell := found.get(row, column))] for row in rows}
            gaps = [
                together([difference(*pair) for pair in zip(cells[more], cells[fewer], strict=True)])
                for fewer, more in pairwise(rows)
            ]
            names = [row.rpartition(" ")[2] for row in rows]
            told = ", ".join(
                f"{gap.mean:+.3g} from {fewer} to {more}"
                for gap, (fewer, more) in zip(gaps, pairwise(names), strict=True)
            )
            return every(told, [Evidence(gap, gap.mean > 0, low=0) for gap in gaps])

        return test

    return p.where_learnt(tuple(rows), list(GLUE), steps)(results)


POOLING_NOTE = "At `here` MiniLM's heads read the mean of the tokens' states, for which it was made."
LLAMA_2 = "meta-llama/Llama-2-7b-hf"
TABLE_1 = Recipe(
    name="ntk-attention/table-1",
    title="Five tasks of SuperGLUE",
    printed=p.printed("table-1"),
    scales={
        "paper": RecipeScale(
            "30 epochs of batches of 32, learning rate 0.001, phi as printed, a start from Eq. (4). "
            f"{p.OURS}, a Llama of its size in place of ChatGLM3-6B, whose code is not Transformers', 256 tokens in "
            "all (there 128 of each field), 3 seeds.",
            "days on one GPU",
            (LLAMA_2,),
            tuple(GLUE.values()),
            {
                "shape": "ChatGLM3-6B",
                "model": LLAMA_2,
                "tasks": GLUE,
                "training": {**p.PAPER, "batch_size": 32, "max_length": 256},
                "ntk": p.LITERAL,
                "seeds": 3,
            },
            behind=("ChatGLM3-6B",),
        ),
        "here": RecipeScale(
            "Counts at ChatGLM3-6B's size, exactly. The kept runs are read where they "
            "are whole: MiniLM, learning rates selected on the validation set. Else MiniLM, 40 steps of 16, own "
            "learning rates, 2 seeds.",
            "seconds; with --fresh 10 min on two cores",
            ("embedded:minilm",),
            tuple(GLUE.values()),
            {
                "shape": "ChatGLM3-6B",
                "model": "embedded:minilm",
                "tasks": GLUE,
                "training": {"max_steps": 40, "batch_size": 16, "max_length": 128, "evaluations": 1},
                "seeds": 2,
            },
            short="40 steps",
        ),
        "smoke": RecipeScale(
            "One step of LoRA and NTK-Attention on CB.",
            "2 s",
            (LLAMA_2,),
            ("cb",),
            {
                "shape": "OPT-125M",
                "model": LLAMA_2,
                "rows": (p.LORA_8, p.NTK),
                "tasks": {"CB": "cb"},
                "training": p.ONE_STEP,
                "most_rank": 4,
                "ntk": p.LITERAL,
                "seeds": 1,
            },
        ),
    },
    run=table_1,
    claims=(
        *(
            Claim(f"NTK-Attention is above {row} on every task", ntk_above(row, list(GLUE)), "appendix C")
            for row in PREFIXES
            if row != "P-Tuning V2, m = 16"
        ),
        Claim("P-Tuning V2 improves with m at every step, on average", improves, "appendix C"),
        Claim(
            "NTK-Attention is above LoRA on CB, Copa and MultiRC",
            ntk_above(p.LORA_8, ["CB", "Copa", "MultiRC"]),
            "appendix C",
        ),
        Claim(
            "and on average",
            p.where_learnt((p.NTK, p.LORA_8), list(GLUE), lambda left: above_on_average(p.NTK, p.LORA_8, columns=left)),
            "appendix C",
        ),
        Claim("Average is the mean of the tasks", p.averages, "the table itself"),
        Claim("NTK-Attention trains 3.78M", near(p.NTK, PARAMETERS, 3.78, relative=0.01), PRINTED),
        Claim("LoRA trains 3.67M", near(p.LORA_8, PARAMETERS, 3.67, relative=0.01), PRINTED),
        Claim("A prefix of 100 trains 11.47M", near(PREFIXES[-1], PARAMETERS, 11.47, relative=0.01), PRINTED),
    ),
    notes=(p.PREFIX_NOTE, POOLING_NOTE),
    kept=lambda: bool(p.kept_cells("encoder", LINES_1, GLUE, 100).cells),
)

RECIPES = (TABLE_1,)
