"""Figure 2: trained on one set of problems and asked others, beside LoRA and the model as it comes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from inlay.papers.ntk_attention.recipes import protocol as p
from inlay.papers.reproduce.counting import NO_GPU, gpu
from inlay.papers.reproduce.predicates import above
from inlay.papers.reproduce.recipe import Claim, Recipe, RecipeScale
from inlay.papers.reproduce.results import Key, Results

if TYPE_CHECKING:
    from inlay.papers.reproduce.bench import Bench
    from inlay.records.spec import Spec

MATHS = {"GSM8K": "gsm8k", "MATH": "math"}
WAYS_F2 = {p.LORA: p.lora(16), p.NTK: ("ntk-attention", {**p.ntk(16)[1], **p.UNCHANGED})}
ZERO_SHOT = "Zero-Shot"
LINES_F2 = {p.LORA: "lora", p.NTK: "ntk-attention", ZERO_SHOT: "untrained"}


def figure_2(bench: Bench, settings: Mapping[str, Any]) -> Results:
    """Trained on one task, answered on others: the share of final answers that are right."""
    found = p.kept_cells("language", LINES_F2, {"GSM8K": "gsm8k"}, 100, p.SMOL, "answers")
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
    from inlay.workflow.predict import restore

    asked = spec.with_(task=name)
    task = tasks.load(asked)
    if trained:
        model, processor = restore(bench.tune(spec), task.schema)
    else:
        backbone = backbones.load_for(spec, task)
        model, processor = backbone.model, backbone.processor
    return evaluate(model, task, "test", processor, asked)[0]["answer-accuracy"]


LLAMAS = {"Llama-3.2-1B": "meta-llama/Llama-3.2-1B", "Llama-3.2-3B": "meta-llama/Llama-3.2-3B"}
FIGURE_2 = Recipe(
    name="ntk-attention/figure-2",
    title="Mathematics: trained on MetaMathQA, asked GSM8K and MATH",
    scales={
        "paper": RecipeScale(
            "Llama-3.2 of 1B and 3B on MetaMathQA, learning rate 0.001, LoRA of rank 16 and 32, phi as printed, a "
            f"start from Eq. (4). {p.OURS}, one epoch, 512 tokens, one seed.",
            "days on one GPU a seed, 3 seeds",
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
                "seeds": 3,
            },
        ),
        "here": RecipeScale(
            "The kept runs are read where they are whole: SmolLM2-135M trained on "
            "GSM8K and asked 200 of its questions. Else, where there is a GPU, the same with 100 steps and all.",
            "seconds; 15 min on one GPU without the kept runs",
            settings={
                "models": {p.SMOL: "embedded:smollm2"},
                "gpu": True,
                "rows": (ZERO_SHOT, p.LORA, p.NTK),
                "trained_on": "gsm8k",
                "tasks": {"GSM8K": "gsm8k"},
                "training": {"max_steps": 100, "batch_size": 8, "max_length": 512, "evaluations": 1},
                "seeds": 1,
            },
            short="100 steps",
        ),
        "smoke": RecipeScale(
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
RECIPES = (FIGURE_2,)
