"""Tables 1 to 4 and figure 2: NTK-Attention beside P-Tuning V2, LoRA and full fine-tuning."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from inlay.reproduce.certainty import Part, every
from inlay.reproduce.counting import NO_GPU, PARAMETERS, gpu
from inlay.reproduce.ntk_attention import protocol as p
from inlay.reproduce.predicates import (
    Test,
    above,
    above_on_average,
    difference,
    near,
    together,
    within_on_average,
)
from inlay.reproduce.recipe import PRINTED, READING, Claim, Recipe, Scale, Verdict
from inlay.reproduce.results import Key, Results

if TYPE_CHECKING:
    from inlay.records.spec import Spec
    from inlay.reproduce.bench import Bench


def specified(
    bench: Bench,
    settings: Mapping[str, Any],
    models: Mapping[str, str],
    ways: Mapping[str, p.Way],
    tasks: Mapping[str, str],
) -> dict[Key, Spec]:
    """The specs of a scale."""
    return p.specs(bench, models, ways, tasks, settings["training"], settings.get("most_rank"), settings.get("ntk"))


# ------------------------------------------------------------------------------------------------------------ table 1

GLUE = {"BoolQ": "boolq", "CB": "cb", "Copa": "copa", "MultiRC": "multirc", "RTE": "rte"}
LORA_8 = "LoRA, r' = 8"
WAYS_1 = {
    "P-Tuning V2, m = 1": p.prefix(1),
    "P-Tuning V2, m = 10": p.prefix(10),
    "P-Tuning V2, m = 100": p.prefix(100),
    LORA_8: p.lora(8),
    p.NTK: p.ntk(16),
}
LINES_1 = {
    "P-Tuning V2, m = 1": "prefix, m = 1",
    "P-Tuning V2, m = 16": "prefix, m = 16",
    "P-Tuning V2, m = 100": "prefix, m = 100",
    LORA_8: "lora",
    p.NTK: "ntk-attention",
    "full fine-tuning": "full",
}
# The commoner class of the test parts that the script has, in per cent.
CHANCE = {"BoolQ": 100 * 2033 / 3270, "CB": 50.0, "Copa": 55.0, "MultiRC": 100 * 2773 / 4848, "RTE": 100 * 146 / 277}
PREFIXES = ("P-Tuning V2, m = 1", "P-Tuning V2, m = 10", "P-Tuning V2, m = 16", "P-Tuning V2, m = 100")


def table_1(bench: Bench, settings: Mapping[str, Any]) -> Results:
    ways = {row: WAYS_1[row] for row in settings.get("rows", WAYS_1)}
    made = p.counts(bench, {"": settings["shape"]}, ways)
    found = p.kept_cells("encoder", LINES_1, GLUE, 100)
    if not found.cells:
        specs = specified(bench, settings, {"": settings["model"]}, ways, settings["tasks"])
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
            return every(told, [Part(gap, gap.mean > 0, low=0) for gap in gaps])

        return test

    return p.where_learnt(tuple(rows), list(GLUE), steps)(results)


LLAMA_2 = "meta-llama/Llama-2-7b-hf"
TABLE_1 = Recipe(
    name="ntk-attention/table-1",
    title="Five tasks of SuperGLUE",
    printed=p.printed("table-1"),
    scales={
        "paper": Scale(
            "30 epochs of batches of 32, rate 0.001, phi as printed, a start from Eq. (4). "
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
        "here": Scale(
            "Counts at ChatGLM3-6B's size, exactly. In a checkout the runs of scripts/ntk_table.py are read where they "
            "are whole: MiniLM, rates chosen on held-out data. Else MiniLM, 40 steps of 16, own rates, 2 seeds.",
            "seconds in a checkout that has them; else 10 min on two cores",
            ("embedded:minilm",),
            tuple(GLUE.values()),
            {
                "shape": "ChatGLM3-6B",
                "model": "embedded:minilm",
                "tasks": GLUE,
                "training": {"max_steps": 40, "batch_size": 16, "max_length": 128, "evaluations": 1},
                "seeds": 2,
            },
        ),
        "smoke": Scale(
            "One step of LoRA and NTK-Attention on CB.",
            "2 s",
            (LLAMA_2,),
            ("cb",),
            {
                "shape": "OPT-125M",
                "model": LLAMA_2,
                "rows": (LORA_8, p.NTK),
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
            ntk_above(LORA_8, ["CB", "Copa", "MultiRC"]),
            "appendix C",
        ),
        Claim(
            "and on average",
            p.where_learnt((p.NTK, LORA_8), list(GLUE), lambda left: above_on_average(p.NTK, LORA_8, columns=left)),
            "appendix C",
        ),
        Claim("Average is the mean of the tasks", p.averages, "the table itself"),
        Claim("NTK-Attention trains 3.78M", near(p.NTK, PARAMETERS, 3.78, relative=0.01), PRINTED),
        Claim("LoRA trains 3.67M", near(LORA_8, PARAMETERS, 3.67, relative=0.01), PRINTED),
        Claim("A prefix of 100 trains 11.47M", near(PREFIXES[-1], PARAMETERS, 11.47, relative=0.01), PRINTED),
    ),
    notes=(p.PREFIX_NOTE,),
    kept=lambda: bool(p.kept_cells("encoder", LINES_1, GLUE, 100).cells),
)

# ------------------------------------------------------------------------------------------------------------ table 2

PICTURES = {"CIFAR-100": "cifar100", "Food-101": "food101", "Tiny-Imagenet": "tiny-imagenet"}
AT_HAND = {"Oxford Pets": "oxford-pets", "Flowers102": "flowers102", "CIFAR-10": "cifar10"}
LORA_16, LORA_32 = "LoRA, r' = 16", "LoRA, r' = 32"
WAYS_2 = {"FFT": ("full", {}), LORA_16: p.lora(16), LORA_32: p.lora(32), p.NTK: p.ntk(32)}
LINES_2 = {"FFT": "full", LORA_8: "lora", p.NTK: "ntk-attention", "VPT": "vpt-deep", "linear probe": "linear-probe"}
VIT_BASE = "google/vit-base-patch16-224-in21k"


def table_2(bench: Bench, settings: Mapping[str, Any]) -> Results:
    made = p.counts(bench, {"": settings["shape"]}, WAYS_2)
    found = p.kept_cells("vision", LINES_2, AT_HAND, 100)
    if not found.cells:
        ways = {row: WAYS_2[row] for row in settings.get("rows", WAYS_2)}
        specs = specified(bench, settings, {"": settings["model"]}, ways, settings["tasks"])
        found = found.with_([bench.values(specs, settings["seeds"], p.percent)])
    return made.with_([found.with_average(columns=list(PICTURES))])


TABLE_2 = Recipe(
    name="ntk-attention/table-2",
    title="Three sets of pictures on ViT-B",
    printed=p.printed("table-2"),
    scales={
        "paper": Scale(
            "ViT-B/16 (ImageNet-21k), 30 epochs of batches of 256, rate 0.001, phi as printed, a start from Eq. (4). "
            f"{p.OURS}, 3 seeds.",
            "days on one GPU",
            (VIT_BASE,),
            tuple(PICTURES.values()),
            {
                "shape": "ViT-B/16",
                "model": VIT_BASE,
                "tasks": PICTURES,
                "training": {**p.PAPER, "batch_size": 256},
                "ntk": p.LITERAL,
                "seeds": 3,
            },
        ),
        "here": Scale(
            "Counts on ViT-B/16, exactly. In a checkout the runs of scripts/ntk_table.py and vision_table.py are read "
            "where they are whole: a ViT-tiny on 1,000 pictures of three other sets, LoRA of rank 8. Else the small "
            "embedded ViT on 200 digits, 5 epochs, 3 seeds.",
            "seconds in a checkout that has them; else 4 min on two cores",
            ("embedded:vit",),
            ("digits",),
            {
                "shape": "ViT-B/16",
                "model": "embedded:vit",
                "tasks": {"digits": "digits"},
                "training": {"shots": 200, "epochs": 5, "batch_size": 20, "evaluations": 1, "trunk_cache": "off"},
                "seeds": 3,
            },
            behind=("vit_tiny_patch16_224",),
        ),
        "smoke": Scale(
            "One step of full fine-tuning and NTK-Attention.",
            "2 s",
            (VIT_BASE,),
            ("cifar100",),
            {
                "shape": "ViT-B/16",
                "model": VIT_BASE,
                "rows": ("FFT", p.NTK),
                "tasks": {"CIFAR-100": "cifar100"},
                "training": p.ONE_STEP,
                "most_rank": 4,
                "ntk": p.LITERAL,
                "seeds": 1,
            },
        ),
    },
    run=table_2,
    claims=(
        Claim(
            "NTK-Attention is above full fine-tuning on every set",
            above(p.NTK, "FFT", columns=[*PICTURES, *AT_HAND, "digits"]),
            "appendix C",
        ),
        Claim(
            "and by 5.8 points at least",
            above(p.NTK, "FFT", columns=[*PICTURES, *AT_HAND, "digits"], by=5.8),
            "appendix C",
        ),
        Claim(
            "It is about as good as LoRA (r' = 32 in the paper): within 1 point on average",
            p.first_of(
                (LORA_32, LORA_8),
                lambda row: within_on_average(p.NTK, row, 1.0, columns=[*PICTURES, *AT_HAND, "digits"]),
            ),
            READING,
        ),
        Claim(
            "and slightly better on average",
            p.first_of(
                (LORA_32, LORA_8), lambda row: above_on_average(p.NTK, row, columns=[*PICTURES, *AT_HAND, "digits"])
            ),
            "appendix C",
        ),
        Claim("Average is the mean of the sets", p.averages, "the table itself"),
        Claim("Full fine-tuning trains 86.39M", near("FFT", PARAMETERS, 86.39, relative=0.01), PRINTED),
        Claim("LoRA of rank 16 trains 7.08M", near(LORA_16, PARAMETERS, 7.08, relative=0.01), PRINTED),
        Claim("NTK-Attention trains 7.09M", near(p.NTK, PARAMETERS, 7.09, relative=0.01), PRINTED),
    ),
    kept=lambda: bool(p.kept_cells("vision", LINES_2, AT_HAND, 100).cells),
)

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
SMOL = "SmolLM2-135M"


def table_3(bench: Bench, settings: Mapping[str, Any]) -> Results:
    """Perplexity: lower is better."""
    made = p.counts(bench, {name: name for name in settings["shapes"]}, WAYS_3)
    found = p.kept_cells("language", LINES_3, {"WikiText-2": "wikitext2"}, 1.0, SMOL)
    if not found.cells:
        if settings.get("gpu"):
            if not gpu():
                return made.with_([found, Results(notes=(NO_GPU,))])
            p.looked_for(bench, settings, *settings["tasks"].values())
        ways = {row: WAYS_3[row] for row in settings.get("rows", WAYS_3)}
        specs = specified(bench, settings, settings["models"], ways, settings["tasks"])
        found = found.with_([bench.values(specs, settings["seeds"], p.plain)])
    return made.with_([found.with_average(columns=list(TEXTS))])


SETS = [*TEXTS, "WikiText-2"]
TABLE_3 = Recipe(
    name="ntk-attention/table-3",
    title="Language modelling on OPT of five sizes (perplexity)",
    printed=p.printed("table-3"),
    scales={
        "paper": Scale(
            "OPT from 125M to 6.7B, 30 epochs of batches of 32, rate 0.001, 128 tokens, phi as printed, a start from "
            f"Eq. (4). {p.OURS}, one seed.",
            "weeks on eight GPUs",
            tuple(OPTS.values()),
            tuple(TEXTS.values()),
            {
                "shapes": tuple(OPTS),
                "models": OPTS,
                "tasks": TEXTS,
                "training": {**p.PAPER, "batch_size": 32, "max_length": 128},
                "ntk": p.LITERAL,
                "seeds": 1,
            },
        ),
        "here": Scale(
            "Counts on OPT of five sizes, exactly. In a checkout the runs of scripts/ntk_table.py are read where they "
            "are whole: SmolLM2-135M on WikiText-2, a prefix of 40. Else, where there is a GPU, SmolLM2, 100 steps.",
            "20 s on two cores; 10 min on one GPU without the kept runs",
            settings={
                "shapes": tuple(OPTS),
                "models": {SMOL: "embedded:smollm2"},
                "gpu": True,
                "tasks": {"WikiText-2": "wikitext2"},
                "training": {"max_steps": 100, "batch_size": 4, "max_length": 512, "evaluations": 1},
                "seeds": 1,
            },
        ),
        "smoke": Scale(
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
    specs = specified(bench, settings, settings["models"], ways, {EVALUATION: settings["task"]})
    found = bench.values(specs, settings["seeds"], lambda run: math.log(p.plain(run)))
    return made.with_([found])


TABLE_4 = Recipe(
    name="ntk-attention/table-4",
    title="How many features r and which rank s",
    printed=p.printed("table-4"),
    scales={
        "paper": Scale(
            "Llama-3.1-8B-Instruct on WikiText-103, 2 epochs, rate 0.001, phi as printed, a start from Eq. (4); r = "
            f"512 did not fit the paper's GPUs. {p.OURS}, batches of 32 of 128 tokens, one seed.",
            "days on four GPUs",
            (LLAMA_3,),
            ("wikitext103",),
            {
                "shape": "Llama-3.1-8B",
                "models": {"": LLAMA_3},
                "task": "wikitext103",
                "measured": tuple(WAYS_4),
                "training": {**p.PAPER, "epochs": 2, "batch_size": 32, "max_length": 128},
                "ntk": p.LITERAL,
                "seeds": 1,
            },
        ),
        "here": Scale(
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
        ),
        "smoke": Scale(
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

# ----------------------------------------------------------------------------------------------------------- figure 2

MATHS = {"GSM8K": "gsm8k", "MATH": "math"}
WAYS_F2 = {p.LORA: p.lora(16), p.NTK: p.ntk(16)}
ZERO_SHOT = "Zero-Shot"
LINES_F2 = {p.LORA: "lora", p.NTK: "ntk-attention", ZERO_SHOT: "untrained"}


def figure_2(bench: Bench, settings: Mapping[str, Any]) -> Results:
    """Trained on one task, answered on others: the share of final answers that are right."""
    found = p.kept_cells("language", LINES_F2, {"GSM8K": "gsm8k"}, 100, SMOL, "answers")
    if found.cells:
        return found
    if settings.get("gpu"):
        if not gpu():
            return found.with_([Results(notes=(NO_GPU,))])
        p.looked_for(bench, settings, *settings["tasks"].values())
    cells: dict[Key, list[float]] = {}
    for panel, model in settings["models"].items():
        for row in settings["rows"]:
            for seed in range(settings["seeds"]):
                spec = bench.spec(model, "full", task=settings["trained_on"], seed=seed, **settings["training"])
                if row != ZERO_SHOT:
                    method, given = WAYS_F2[row]
                    more = {
                        **settings.get("more", {}).get(row, {}),
                        **settings.get("of_panel", {}).get(panel, {}).get(row, {}),
                    }
                    spec = spec.with_(method=method, settings={**given, **more})
                for column, task in settings["tasks"].items():
                    value = 100 * answered(bench, spec, task, trained=row != ZERO_SHOT)
                    cells.setdefault((panel, row, column), []).append(value)
    return found.with_([Results.of(cells)])


def answered(bench: Bench, spec: Spec, name: str, *, trained: bool) -> float:
    """The share of a task's test questions whose answer is right: of the run of a spec, or of the model as it comes."""
    from inlay import backbones, tasks
    from inlay.training.evaluation import evaluate
    from inlay.workflow.predict import restored

    asked = spec.with_(task=name)
    task = tasks.load(asked)
    if trained:
        model, processor = restored(bench.tune(spec), task.schema)
    else:
        backbone = backbones.load_for(spec, task)
        model, processor = backbone.model, backbone.processor
    return evaluate(model, task, "test", processor, asked)[0]["answer-accuracy"]


LLAMAS = {"Llama-3.2-1B": "meta-llama/Llama-3.2-1B", "Llama-3.2-3B": "meta-llama/Llama-3.2-3B"}
FIGURE_2 = Recipe(
    name="ntk-attention/figure-2",
    title="Mathematics: trained on MetaMathQA, asked GSM8K and MATH",
    scales={
        "paper": Scale(
            "Llama-3.2 of 1B and 3B on MetaMathQA, rate 0.001, LoRA of rank 16 and 32, phi as printed, a start from "
            f"Eq. (4). {p.OURS}, one epoch, 512 tokens, one seed.",
            "days on one GPU",
            tuple(LLAMAS.values()),
            ("metamathqa", *MATHS.values()),
            {
                "models": LLAMAS,
                "rows": (ZERO_SHOT, p.LORA, p.NTK),
                "trained_on": "metamathqa",
                "tasks": MATHS,
                "training": {**p.PAPER, "epochs": 1, "batch_size": 32, "max_length": 512},
                "more": {p.NTK: p.LITERAL},
                "of_panel": {"Llama-3.2-3B": {p.LORA: {"r": 32, "lora_alpha": 64}}},
                "seeds": 1,
            },
        ),
        "here": Scale(
            "In a checkout the runs of scripts/ntk_table.py are read where they are whole: SmolLM2-135M trained on "
            "GSM8K and asked 200 of its questions. Else, where there is a GPU, the same with 100 steps and all.",
            "seconds; 15 min on one GPU without the kept runs",
            settings={
                "models": {SMOL: "embedded:smollm2"},
                "gpu": True,
                "rows": (ZERO_SHOT, p.LORA, p.NTK),
                "trained_on": "gsm8k",
                "tasks": {"GSM8K": "gsm8k"},
                "training": {"max_steps": 100, "batch_size": 8, "max_length": 512, "evaluations": 1},
                "seeds": 1,
            },
        ),
        "smoke": Scale(
            "One step of NTK-Attention, 12 questions.",
            "3 s",
            (LLAMAS["Llama-3.2-1B"],),
            ("metamathqa", "gsm8k"),
            {
                "models": {"Llama-3.2-1B": LLAMAS["Llama-3.2-1B"]},
                "rows": (ZERO_SHOT, p.NTK),
                "trained_on": "metamathqa",
                "tasks": {"GSM8K": "gsm8k"},
                "training": {**p.ONE_STEP, "max_length": 32},
                "more": {p.NTK: {**p.LITERAL, "rank": 4}},
                "seeds": 1,
            },
        ),
    },
    run=figure_2,
    claims=(
        Claim("NTK-Attention is above LoRA, everywhere", above(p.NTK, p.LORA), "appendix C"),
        Claim("NTK-Attention is above the model as it comes, everywhere", above(p.NTK, ZERO_SHOT), "appendix C"),
    ),
    notes=("The paper draws bars and prints no numbers.",),
)
RECIPES = (TABLE_1, TABLE_2, TABLE_3, TABLE_4, FIGURE_2)
