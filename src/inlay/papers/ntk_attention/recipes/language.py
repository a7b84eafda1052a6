"""Tables 3 and 4: language modelling, on OPT of five sizes and by how many features and which rank."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from inlay.papers.ntk_attention.recipes import protocol as p
from inlay.papers.reproduce.counting import NO_GPU, PARAMETERS, gpu
from inlay.papers.reproduce.predicates import above, above_on_average, near
from inlay.papers.reproduce.recipe import PRINTED, READING, Claim, Recipe, RecipeScale
from inlay.papers.reproduce.results import Results

if TYPE_CHECKING:
    from inlay.papers.reproduce.bench import Bench

# ------------------------------------------------------------------------------------------------------------ table 3

OPTS = {
    "OPT-125M": "facebook/opt-125m",
    "OPT-350M": "facebook/opt-350m",
    "OPT-1.3B": "facebook/opt-1.3b",
    "OPT-2.7B": "facebook/opt-2.7b",
    "OPT-6.7B": "facebook/opt-6.7b",
}
TEXTS = {"WikiText-103": "wikitext103", "Penn TreeBank": "ptb", "LAMBADA": "lambada"}
WAYS_3 = {p.LORA: p.lora(8), p.PREFIX: p.prefix(32), p.NTK: p.ntk(10, 2)}
LINES_3 = {p.LORA: "lora", p.PREFIX: "prefix, m = 40", p.NTK: "ntk-attention", "untrained": "untrained"}


def table_3(bench: Bench, settings: Mapping[str, Any]) -> Results:
    """Perplexity: lower is better."""
    made = p.counts(bench, {name: name for name in settings["shapes"]}, WAYS_3)
    found = p.kept_cells("language", LINES_3, {"WikiText-2": "wikitext2"}, 1.0, p.SMOL)
    if not found.cells:
        if settings.get("gpu"):
            if not gpu():
                return made.with_([found, Results(notes=(NO_GPU,))])
            p.looked_for(bench, settings, *settings["tasks"].values())
        ways = {row: WAYS_3[row] for row in settings.get("rows", WAYS_3)}
        specs = p.specs(bench, settings, settings["models"], ways, settings["tasks"])
        found = found.with_([bench.values(specs, settings["seeds"], p.plain)])
    return made.with_([found.with_average(columns=list(TEXTS))])


SETS = [*TEXTS, "WikiText-2"]
TABLE_3 = Recipe(
    name="ntk-attention/table-3",
    title="Language modelling on OPT of five sizes (perplexity)",
    printed=p.printed("table-3"),
    scales={
        "paper": RecipeScale(
            "OPT from 125M to 6.7B, 30 epochs of batches of 32, learning rate 0.001, 128 tokens, phi as printed, a "
            f"start from Eq. (4). {p.OURS}, one seed.",
            "weeks on eight GPUs a seed, 3 seeds",
            tuple(OPTS.values()),
            tuple(TEXTS.values()),
            {
                "shapes": tuple(OPTS),
                "models": OPTS,
                "tasks": TEXTS,
                "training": {**p.PAPER, "batch_size": 32, "max_length": 128},
                "ntk": p.LITERAL,
                "seeds": 3,
            },
        ),
        "here": RecipeScale(
            "Counts on OPT of five sizes, exactly. The kept runs are read where they "
            "are whole: SmolLM2-135M on WikiText-2, a prefix of 40. Else, where there is a GPU, SmolLM2, 100 steps.",
            "20 s on two cores; 10 min on one GPU without the kept runs",
            settings={
                "shapes": tuple(OPTS),
                "models": {p.SMOL: "embedded:smollm2"},
                "gpu": True,
                "tasks": {"WikiText-2": "wikitext2"},
                "training": {"max_steps": 100, "batch_size": 4, "max_length": 512, "evaluations": 1},
                "seeds": 1,
            },
            short="100 steps",
        ),
        "smoke": RecipeScale(
            "Counts on OPT-125M; one step of LoRA and NTK-Attention.",
            "2 s",
            (OPTS["OPT-125M"],),
            ("ptb",),
            {
                "shapes": ("OPT-125M",),
                "models": {"OPT-125M": OPTS["OPT-125M"]},
                "rows": (p.LORA, p.NTK),
                "tasks": {"Penn TreeBank": "ptb"},
                "training": {**p.ONE_STEP, "max_length": 32},
                "most_rank": 4,
                "ntk": p.LITERAL,
                "seeds": 1,
            },
        ),
    },
    run=table_3,
    claims=(
        Claim(
            "NTK-Attention has a lower perplexity than P-Tuning V2, everywhere",
            above(p.PREFIX, p.NTK, columns=SETS),
            "appendix C",
        ),
        Claim(
            "and than LoRA on average, for every model",
            p.every_panel(lambda panel: above_on_average(p.LORA, p.NTK, columns=SETS, panels=[panel])),
            "appendix C",
        ),
        Claim("and than LoRA on every set, for every model", above(p.LORA, p.NTK, columns=SETS), "appendix C"),
        Claim("Average is the mean of the sets", p.averages, "the table itself"),
        *(
            Claim(
                f"NTK-Attention trains {count}M of {panel}",
                near(p.NTK, PARAMETERS, count, panel=panel, relative=0.02),
                PRINTED,
            )
            for panel, count in (
                ("OPT-125M", 0.29),
                ("OPT-350M", 0.77),
                ("OPT-1.3B", 1.57),
                ("OPT-2.7B", 2.62),
                ("OPT-6.7B", 4.19),
            )
        ),
        Claim(
            "P-Tuning V2 trains as many: 0.29M of OPT-125M",
            near(p.PREFIX, PARAMETERS, 0.29, panel="OPT-125M", relative=0.02),
            PRINTED,
        ),
    ),
    notes=(p.PREFIX_NOTE,),
)

# ------------------------------------------------------------------------------------------------------------ table 4

SETTINGS_4 = (*((r, s) for r in (128, 256) for s in (4, 8, 16, 32, 64)), (512, 4))
WAYS_4 = {f"r = {r}, s = {s}": p.ntk(s, r // 128) for r, s in SETTINGS_4}
LLAMA_3 = "meta-llama/Llama-3.1-8B-Instruct"
EVALUATION = "evaluation loss"


def table_4(bench: Bench, settings: Mapping[str, Any]) -> Results:
    """The losses of settings of r and s; here the same multiples of a smaller head."""
    made = p.counts(bench, {"": settings["shape"]}, {row: WAYS_4[row] for row in settings.get("rows", WAYS_4)})
    if settings.get("gpu"):
        if not gpu():
            return made.with_([Results(notes=(NO_GPU,))])
        p.looked_for(bench, settings, settings["task"])
    ways = {row: WAYS_4[row] for row in settings["measured"]}
    specs = p.specs(bench, settings, settings["models"], ways, {EVALUATION: settings["task"]})
    found = bench.values(specs, settings["seeds"], lambda run: math.log(p.plain(run)))
    return made.with_([found])


TABLE_4 = Recipe(
    name="ntk-attention/table-4",
    title="How many features r and which rank s",
    printed=p.printed("table-4"),
    scales={
        "paper": RecipeScale(
            "Llama-3.1-8B-Instruct on WikiText-103, 2 epochs, learning rate 0.001, phi as printed, a start from Eq. "
            f"(4); r = 512 did not fit the paper's GPUs. {p.OURS}, batches of 32 of 128 tokens, one seed.",
            "days on four GPUs a seed, 3 seeds",
            (LLAMA_3,),
            ("wikitext103",),
            {
                "shape": "Llama-3.1-8B",
                "models": {"": LLAMA_3},
                "task": "wikitext103",
                "measured": tuple(WAYS_4),
                "training": {**p.PAPER, "epochs": 2, "batch_size": 32, "max_length": 128},
                "ntk": p.LITERAL,
                "seeds": 3,
            },
        ),
        "here": RecipeScale(
            "Counts on Llama-3.1-8B, exactly. Where there is a GPU, SmolLM2-135M (heads of 64: r = 128 stands for d, "
            "256 for 2d) on WikiText-2, 100 steps, s = 4, 32 and 64.",
            "20 s on two cores; 10 min on one GPU",
            settings={
                "shape": "Llama-3.1-8B",
                "models": {"": "embedded:smollm2"},
                "task": "wikitext2",
                "measured": tuple(f"r = {r}, s = {s}" for r in (128, 256) for s in (4, 32, 64)),
                "gpu": True,
                "training": {"max_steps": 100, "batch_size": 4, "max_length": 512, "evaluations": 1},
                "seeds": 1,
            },
            short="100 steps",
        ),
        "smoke": RecipeScale(
            "Counts on OPT-125M; one step of two settings.",
            "2 s",
            (LLAMA_3,),
            ("wikitext103",),
            {
                "shape": "OPT-125M",
                "models": {"": LLAMA_3},
                "rows": ("r = 128, s = 4", "r = 256, s = 4"),
                "task": "wikitext103",
                "measured": ("r = 128, s = 4", "r = 256, s = 4"),
                "training": {**p.ONE_STEP, "max_length": 32},
                "most_rank": 4,
                "ntk": p.LITERAL,
                "seeds": 1,
            },
        ),
    },
    run=table_4,
    claims=(
        Claim(
            "A larger r is better than a larger s: (256, 32) is below (128, 64)",
            above("r = 128, s = 64", "r = 256, s = 32", columns=[EVALUATION]),
            "appendix E.3",
        ),
        *(
            Claim(
                f"Doubling r lowers the loss, s = {s}",
                above(f"r = 128, s = {s}", f"r = 256, s = {s}", columns=[EVALUATION]),
                "appendix E.3",
            )
            for s in (4, 8, 16, 32, 64)
        ),
        Claim(
            "The weakest setting is competitive with (256, 64): within 0.1",
            above("r = 256, s = 64", "r = 128, s = 4", columns=[EVALUATION], by=-0.1),
            READING,
        ),
        *(
            Claim(
                f"(128, {s}) trains {count}M",
                near(f"r = 128, s = {s}", PARAMETERS, count, relative=0.01),
                PRINTED,
            )
            for s, count in ((4, 1.18), (64, 16.91))
        ),
        Claim("(512, 4) trains 3.15M", near("r = 512, s = 4", PARAMETERS, 3.15, relative=0.01), PRINTED),
    ),
)

RECIPES = (TABLE_3, TABLE_4)
