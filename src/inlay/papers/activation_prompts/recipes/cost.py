"""Table 2: what the methods cost. Parameters are counted on models of the paper's own shapes, without weights; memory,
time and throughput are measured: of the same models on a GPU, as kept; with --fresh of small ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from inlay.papers.activation_prompts.recipes import protocol as p
from inlay.papers.reproduce.predicates import above, near
from inlay.papers.reproduce.recipe import PRINTED, Claim, Recipe, RecipeScale
from inlay.papers.reproduce.results import Key, Results

if TYPE_CHECKING:
    from inlay.papers.reproduce.bench import Bench

PARAMETERS, MEMORY, TIME, THROUGHPUT = "parameters (M)", "memory (G)", "time (s/epoch)", "throughput (image/s)"
STEP = "time (ms/step)"
TIMES = [TIME, STEP]
PORTRAIT: Mapping[str, Callable[[Mapping[str, Any]], float]] = {
    MEMORY: lambda portrait: portrait["peak_memory"]["bytes"] / 2**30,
    TIME: lambda portrait: portrait["seconds_per_epoch"]["mean"],
    THROUGHPUT: lambda portrait: portrait["inference_examples_per_second"]["mean"],
}


def kept_costs(models: Mapping[str, str], rows: Iterable[str]) -> Results | None:
    """What benchmarks/vision.py measured on a GPU at the paper's own sizes, three rounds each; None without it.

    All of one process: where the paper's rows were measured too, of that with them.
    """
    from inlay.papers.reproduce import kept

    for name, option in (("vision-rows-cuda", " --rows"), ("vision-cuda", "")):
        command = f"python benchmarks/vision.py{option} --rounds 3 --repeats 10"
        found = kept.benchmark("activation_prompts", name, command)
        if found is None or not set(models.values()) <= set(found[0]["steps"]):
            continue
        cells: dict[Key, float | list[float]] = {}
        for panel, model in models.items():
            for row in rows:
                if one := _measured(found[0]["steps"][model], row):
                    cells[panel, row, MEMORY] = one["peak_bytes"] / 2**30
                    cells[panel, row, STEP] = one["rounds_ms"]
                    cells[panel, row, THROUGHPUT] = one["rounds_inference"]
        return Results.of(cells, notes=(found[1],))
    return None


def _measured(steps: Mapping[str, Any], row: str) -> Mapping[str, Any] | None:
    """What was measured of a row with its settings, or of its method at the defaults where that is the row."""
    same = next((name for name in steps if p.WAYS.get(name) == p.WAYS[row]), None)
    return steps.get(same or (p.WAYS[row].method if row in p.KEPT_ROWS else ""))


def costs(bench: Bench, settings: Mapping[str, Any], rows: tuple[str, ...]) -> Results:
    """The counts, and the portraits of runs without the trunk cache, which the paper does not have."""
    part = {"shapes": settings["shapes"], "rows": rows}
    found = bench.once("activation-prompts/counts", part, lambda: p.counted(settings["shapes"], rows, PARAMETERS))
    if settings.get("kept") and (known := kept_costs(settings["kept"], rows)) is not None:
        return found.with_([known])
    specs = p.specs(bench, settings["models"], rows, {"": settings["task"]}, settings["training"])
    runs, failures = bench.runs(specs, settings["seeds"])
    cells = {
        (panel, row, column): [read(run.portrait) for run in made]
        for (panel, row, _), made in runs.items()
        for column, read in PORTRAIT.items()
    }
    return found.with_([Results.of(cells, failures=failures)])


TABLE_2 = Recipe(
    name="activation-prompts/table-2",
    title="What the methods cost: parameters, memory, time, throughput",
    printed=p.printed("table-2"),
    scales={
        "paper": RecipeScale(
            "ResNet-101 and ViT-L/16 on CIFAR-10, batches of 128, on one GPU; 2 epochs are enough. Not in the paper, "
            "ours: the GPU.",
            "15 min on one GPU of 48 GB",
            (p.RESNET_101, p.VIT_LARGE),
            ("cifar10",),
            {
                "shapes": {"ResNet": "ResNet-101", "ViT": "ViT-L/16"},
                "models": {"ResNet": p.RESNET_101, "ViT": p.VIT_LARGE},
                "task": "cifar10",
                "training": {**p.PAPER, "epochs": 2},
                "seeds": 1,
            },
        ),
        "here": RecipeScale(
            "Parameters of ResNet-101 and ViT-L/16, exactly. The rest is what benchmarks/vision.py measured of the "
            "same models on an H200; with --fresh runs of the small embedded ResNet and ViT on 200 digits, 3 seeds.",
            "seconds; with --fresh 8 min on two cores",
            tuple(p.HOUSE.values()),
            ("digits",),
            {
                "shapes": {"ResNet": "ResNet-101", "ViT": "ViT-L/16"},
                "kept": {"ResNet": "resnet-101", "ViT": "vit-large"},
                "models": p.HOUSE,
                "task": "digits",
                "training": p.DIGITS,
                "seeds": p.SEEDS,
            },
            behind=("resnet-101", "vit-large, both with random weights"),
            short=p.DEMONSTRATION,
        ),
        "smoke": RecipeScale(
            "The counts of shallow models; one step of AP and of VP.",
            "2 s",
            (p.VIT_LARGE,),
            ("cifar10",),
            {
                "shapes": {"ResNet": "ResNet-18", "ViT": "ViT-6"},
                "models": {"ViT": p.VIT_LARGE},
                "rows": ("VP", "AP"),
                "task": "cifar10",
                "training": p.ONE_STEP,
                "seeds": 1,
            },
        ),
    },
    run=lambda bench, settings: costs(bench, settings, settings.get("rows", p.MAIN)),
    claims=(
        Claim("AP needs less memory than VP, on both", above("VP", "AP", columns=[MEMORY]), "section 6.2"),
        Claim("AP trains faster than VP, on both", above("VP", "AP", columns=TIMES), "section 6.2"),
        Claim("AP has a higher throughput than VP, on both", above("AP", "VP", columns=[THROUGHPUT]), "section 6.2"),
        Claim("AP trains faster than NORM-TUNE, on both", above("NORM-TUNE", "AP", columns=TIMES), "section 6.2"),
        Claim(
            "On a ViT AP needs more memory than NORM-TUNE",
            above("AP", "NORM-TUNE", columns=[MEMORY], panels=["ViT"]),
            "section 6.2",
        ),
        Claim("AP trains 0.16M parameters in ViT-L/16", near("AP", PARAMETERS, 0.16, panel="ViT"), PRINTED),
        Claim("AP trains 0.12M parameters in ResNet-101", near("AP", PARAMETERS, 0.12, panel="ResNet"), PRINTED),
        Claim("VP trains 0.11M parameters in ViT-L/16", near("VP", PARAMETERS, 0.11, panel="ViT"), PRINTED),
        Claim(
            "In a ResNet AP trains less than VP",
            above("VP", "AP", columns=[PARAMETERS], panels=["ResNet"]),
            "section 3",
        ),
    ),
)
RECIPES = (TABLE_2,)
