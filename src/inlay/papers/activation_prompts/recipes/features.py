"""Figures 5, 6 and A3: what layers are like, how far attention reaches, and how many examples a prompt needs.

By the functions behind `inlay explain cka`, `attention-distance` and `samples`. The figures print no numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from statistics import fmean
from typing import TYPE_CHECKING, Any

from inlay.papers.activation_prompts.recipes import protocol as p
from inlay.papers.reproduce.certainty import Evidence, every
from inlay.papers.reproduce.drawing import curves
from inlay.papers.reproduce.predicates import Test, above, difference, numbered, prefers, together
from inlay.papers.reproduce.recipe import READING, Claim, Recipe, RecipeScale, Verdict
from inlay.papers.reproduce.results import Key, ResultCell, Results

if TYPE_CHECKING:
    from inlay.papers.reproduce.bench import Bench

CKA, REACH = "CKA with the last layer of the ResNet", "attention distance in pixels"


def dissect(bench: Bench, settings: Mapping[str, Any]) -> Results:
    """How alike the ResNet's last layer is to each of the ViT's; how far heads of the ViT reach, on average."""
    from inlay.workflow.explain import models as explain_models

    def work() -> Results:
        cells: dict[Key, ResultCell] = {}
        spec = bench.spec(
            settings["resnet"], explain_models.NO_METHOD, task=settings["task"], batch_size=settings["batch"]
        )
        look: dict[str, Any] = {"progress": bench.progress, "say": bench.say}
        similar = explain_models.cka(spec, bench.model(settings["vit"]), examples=settings["examples"], **look)
        for layer, value in enumerate(similar.values[-1]):
            cells[CKA, "ViT", str(layer)] = ResultCell((value,))
        reach = explain_models.attention_distance(
            spec.with_(model=bench.model(settings["vit"])), examples=settings["examples"], **look
        )
        for layer, heads in enumerate(reach.weighted, start=1):
            cells[REACH, "ViT", str(layer)] = ResultCell((fmean(heads),))
        return Results(cells, notes=(similar.sentence, reach.sentence))

    where = [bench.models_dir, bench.data_dir]  # the same names elsewhere may be other models and other pictures
    return bench.once("activation-prompts/figure-5", {**settings, "dirs": where}, work)


def middle(results: Results) -> Verdict:
    """The layer of the ViT that is most like the ResNet's last lies in the middle third."""
    curve = numbered(results, "ViT", CKA)
    if len(curve) < 3:
        return Verdict.untested("no CKA")
    best, cell = max(curve, key=lambda entry: entry[1].mean)
    depth = curve[-1][0]
    return Verdict.of(depth / 3 <= best <= 2 * depth / 3, f"layer {best:.0f} of {depth:.0f} (CKA {cell.mean:.2f})")


def falls_in_the_first_half(results: Results) -> Verdict:
    """The distance at the middle block is below that at the first."""
    curve = numbered(results, "ViT", REACH)
    if len(curve) < 2:
        return Verdict.untested("no attention distances")
    half = curve[: (len(curve) + 1) // 2]
    first, last = half[0][1], half[-1][1]
    told = f"from {first.mean:.1f} at block 1 to {last.mean:.1f} at block {half[-1][0]:.0f}"
    return Verdict.of(last.mean < first.mean, told)


FIGURE_5 = Recipe(
    name="activation-prompts/figure-5",
    title="CKA between a ResNet and a ViT; attention distance of the ViT",
    scales={
        "paper": RecipeScale(
            "ResNet-101 and ViT-L/16 on OxfordPets. Not in the paper, ours: 500 images.",
            "5 min on one GPU",
            (p.RESNET_101, p.VIT_LARGE),
            ("oxford-pets",),
            {"resnet": p.RESNET_101, "vit": p.VIT_LARGE, "task": "oxford-pets", "examples": 500, "batch": 100},
        ),
        "here": RecipeScale(
            "A ResNet-50 and a ViT-tiny/16 of ImageNet from --models-dir, 64 images of OxfordPets.",
            "1 min on two cores",
            ("resnet50_v1", "vit_tiny_patch16_224"),
            ("oxford-pets",),
            {
                "resnet": "resnet50_v1",
                "vit": "vit_tiny_patch16_224",
                "task": "oxford-pets",
                "examples": 64,
                "batch": 32,
            },
        ),
        "smoke": RecipeScale(
            "Eight images.",
            "1 s",
            (p.RESNET_101, p.VIT_LARGE),
            ("oxford-pets",),
            {"resnet": p.RESNET_101, "vit": p.VIT_LARGE, "task": "oxford-pets", "examples": 8, "batch": 8},
        ),
    },
    run=dissect,
    claims=(
        Claim("Deep features of the ResNet are most like the middle third of the ViT's layers", middle, READING),
        Claim(
            "Attention distance falls in the first half of the blocks: below block 1's at its end",
            falls_in_the_first_half,
            READING,
        ),
        Claim("Early blocks reach farther than late ones", prefers("ViT", "early", panel=REACH), READING),
    ),
    draw=curves("Layers of a ViT", "layer", ""),
)


def by_size(bench: Bench, settings: Mapping[str, Any]) -> Results:
    """Test accuracy against the number of training examples, of several methods or of one at several layers."""
    from inlay.workflow.explain import runs as explain_runs

    cells: dict[Key, ResultCell] = {}
    failures: dict[str, str] = {}
    for panel, (model, task) in settings["panels"].items():
        for method, layers in settings["curves"]:
            found = explain_runs.samples(
                bench.spec(model, method, task=task, **p.trained(model, method, settings["training"])),
                [method],
                settings["sizes"],
                layers,
                settings["seeds"],
                bench.out / "runs",
                progress=bench.progress,
                say=bench.say,
            )
            for point in found.points:
                row = NAMES.get(point.method, point.method) if point.layer is None else f"AP, layer {point.layer}"
                cells[panel, row, str(point.examples)] = ResultCell.of_seeds(100 * value for value in point.test)
            failures |= found.failures
    return Results(cells, failures=failures)


NAMES = {"full": "FULL-FINETUNE", "visual-prompt": "VP", "activation-prompt": "AP"}


def shallow_above_deep(results: Results) -> Verdict:
    """The earliest layer's curve is above the latest's, on average over the sizes."""
    rows = [row for row in results.rows() if row.startswith("AP, layer ")]
    if len(rows) < 2:
        return Verdict.untested("the table has no two layers")
    rows.sort(key=lambda row: int(row.rpartition(" ")[2]))
    early, late = (dict(numbered(results, row, results.panels[0])) for row in (rows[0], rows[-1]))
    gaps = [difference(early[size], late[size]) for size in sorted(early.keys() & late.keys())]
    whole = together(gaps)
    count = sum(gap.mean > 0 for gap in gaps)
    told = f"{rows[0]} less {rows[-1]}: {whole.mean:+.3g} on average; above at {count} of {len(gaps)} sizes"
    return every(told, [Evidence(whole, whole.mean > 0, low=0)], whole.interval)


def gains_most(row: str) -> Test:
    """From the smallest to the largest training set this row gains most, in every panel."""

    def test(results: Results) -> Verdict:
        told, parts = [], list[Evidence]()
        for panel in results.panels:
            gains = {}
            for name in results.rows(panel):
                curve = numbered(results, name, panel)
                if len(curve) > 1:
                    gains[name] = difference(curve[-1][1], curve[0][1])
            if row in gains and len(gains) > 1:
                more = [difference(gains[row], gain) for name, gain in gains.items() if name != row]
                parts += [Evidence(gap, gap.mean >= 0, low=0) for gap in more]
                told.append(", ".join(f"{name} {gain.mean:+.3g}" for name, gain in gains.items()))
        return every("; ".join(told), parts) if told else Verdict.untested(f"the table has no curves with {row}")

    return test


FIGURE_6 = Recipe(
    name="activation-prompts/figure-6",
    title="Sample complexity of AP at shallow and deep layers of a ViT",
    scales={
        "paper": RecipeScale(
            f"ViT-L/16 on OxfordPets, 100 epochs, 5 trials. {p.OURS}, layers and sizes (the text has none).",
            "3 days on one GPU",
            (p.VIT_LARGE,),
            ("oxford-pets",),
            {
                "panels": {"ViT": (p.VIT_LARGE, "oxford-pets")},
                "curves": (("activation-prompt", [3, 12, 24]),),
                "sizes": [100, 200, 500, 1000, 2000, 2900],
                "training": p.PAPER,
                "seeds": p.TRIALS,
            },
        ),
        "here": RecipeScale(
            "The small embedded ViT on 50, 100 and 200 digits, AP at layers 1 and 6, 5 epochs, 3 seeds.",
            "4 min on two cores",
            ("embedded:vit",),
            ("digits",),
            {
                "panels": {"ViT": ("embedded:vit", "digits")},
                "curves": (("activation-prompt", [1, 6]),),
                "sizes": [50, 100, 200],
                "training": {key: value for key, value in p.DIGITS.items() if key != "shots"},
                "seeds": p.SEEDS,
            },
            short=p.DEMONSTRATION,
        ),
        "smoke": RecipeScale(
            "One step at one layer.",
            "1 s",
            (p.VIT_LARGE,),
            ("oxford-pets",),
            {
                "panels": {"ViT": (p.VIT_LARGE, "oxford-pets")},
                "curves": (("activation-prompt", [1]),),
                "sizes": [9],
                "training": p.ONE_STEP,
                "seeds": 1,
            },
        ),
    },
    run=by_size,
    claims=(Claim("With as many examples a shallow layer is above a deep one", shallow_above_deep, "section 5"),),
    draw=curves("AP by training set", "training examples", "test accuracy, %", log_x=True),
)
LARGE_SETS = {
    "CIFAR-10": (p.RESNET_101, "cifar10"),
    "Food101": (p.RESNET_101, "food101"),
    "Camelyon": (p.RESNET_101, "camelyon"),
}
THREE = (("full", None), ("visual-prompt", None), ("activation-prompt", None))
FIGURE_A3 = Recipe(
    name="activation-prompts/figure-a3",
    title="Accuracy against the size of the training set",
    scales={
        "paper": RecipeScale(
            "ResNet-101 on CIFAR-10, Food101 and Camelyon, 100 epochs, 5 trials; 5,000 to 50,000 images, 10 % to "
            f"100 % of CIFAR-10 alone. {p.OURS}.",
            "weeks on one GPU",
            (p.RESNET_101,),
            ("cifar10", "food101", "camelyon"),
            {
                "panels": LARGE_SETS,
                "curves": THREE,
                "sizes": [5_000, 10_000, 20_000, 30_000, 40_000, 50_000],
                "training": p.PAPER,
                "seeds": p.TRIALS,
            },
        ),
        "here": RecipeScale(
            "The small embedded ResNet on 50, 200 and 400 digits, 5 epochs, each method's own learning rate, 3 seeds.",
            "8 min on two cores",
            ("embedded:resnet",),
            ("digits",),
            {
                "panels": {"ResNet": ("embedded:resnet", "digits")},
                "curves": THREE,
                "sizes": [50, 200, 400],
                "training": {key: value for key, value in p.DIGITS.items() if key != "shots"},
                "seeds": p.SEEDS,
            },
            short=p.DEMONSTRATION,
        ),
        "smoke": RecipeScale(
            "One step of AP.",
            "1 s",
            (p.RESNET_101,),
            ("oxford-pets",),
            {
                "panels": {"ResNet": (p.RESNET_101, "oxford-pets")},
                "curves": (("activation-prompt", None),),
                "sizes": [9],
                "training": p.ONE_STEP,
                "seeds": 1,
            },
        ),
    },
    run=by_size,
    claims=(
        Claim("AP is above VP at every size", above("AP", "VP"), "appendix B"),
        Claim("Full fine-tuning gains most from more data", gains_most("FULL-FINETUNE"), "appendix B"),
    ),
    draw=curves("Accuracy by training set", "training examples", "test accuracy, %", log_x=True),
)
RECIPES = (FIGURE_5, FIGURE_6, FIGURE_A3)
