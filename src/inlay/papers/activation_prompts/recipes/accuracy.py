"""Tables 1, 3, 5 and A2: accuracy of AP beside the baselines, over data sets and backbones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from inlay.papers.activation_prompts.recipes import protocol as p
from inlay.papers.reproduce import kept
from inlay.papers.reproduce.certainty import Evidence, every
from inlay.papers.reproduce.predicates import (
    Test,
    above,
    above_on_average,
    best_in,
    gaps,
    mean_of_columns,
    near,
    together,
)
from inlay.papers.reproduce.recipe import PRINTED, READING, Claim, Recipe, RecipeScale, Verdict
from inlay.papers.reproduce.results import ResultCell, Results

if TYPE_CHECKING:
    from inlay.papers.reproduce.bench import Bench

TUNED = ("LINEAR-PROBE", "NORM-TUNE", "VP", "AP")
HUB = {"ResNet": p.RESNET_101, "ViT": p.VIT_LARGE}


def accuracies(bench: Bench, settings: Mapping[str, Any]) -> Results:
    """Test accuracy of every backbone, method and set, and each method's mean over the sets.

    `if_found` are further backbones, which count where --models-dir has them.
    """
    models = p.models(bench, settings)
    if settings.get("kept") and (known := p.kept_accuracies(models, settings["rows"])) is not None:
        return known
    specs = p.specs(bench, models, settings["rows"], settings["sets"], settings["training"])
    return bench.values(specs, settings["seeds"], p.accuracy).with_average()


def smoke(rows: tuple[str, ...], models: Mapping[str, str]) -> RecipeScale:
    """One step of some rows on one set."""
    settings = {
        "models": models,
        "rows": rows,
        "sets": {"OxfordPets": "oxford-pets"},
        "training": p.ONE_STEP,
        "seeds": 1,
    }
    return RecipeScale("One step of a few methods.", "2 s", tuple(models.values()), ("oxford-pets",), settings)


def between(
    better: str,
    worse: str,
    low: float,
    high: float,
    *,
    columns: Sequence[str] | None = None,
    panels: Sequence[str] | None = None,
) -> Test:
    """`better` is above `worse` by at least `low` and at most `high` wherever the table has both."""

    def test(results: Results) -> Verdict:
        found = gaps(results, better, worse, columns, panels)
        if not found:
            return Verdict.untested(f"the table does not have {better} beside {worse}")
        passing = [low <= gap.mean <= high for gap in found]
        least, most = min(found, key=lambda gap: gap.mean), max(found, key=lambda gap: gap.mean)
        told = f"in {sum(passing)} of {len(found)}; from {least} to {most}"
        return every(told, [Evidence(gap, ok, low, high) for gap, ok in zip(found, passing, strict=True)])

    return test


def mean_gap(better: str, worse: str, value: float, slack: float, *, columns: Sequence[str]) -> Test:
    """The mean over columns of `better` less `worse` is this, give or take."""

    def test(results: Results) -> Verdict:
        found = gaps(results, better, worse, columns)
        if not found:
            return Verdict.untested(f"the table does not have {better} beside {worse}")
        cells = [ResultCell((gap.mean,), gap.half, gap.lone) for gap in found]
        whole = together(cells)
        told = f"{whole.mean:+.3g} on average over {len(found)} against {value:g}"
        return every(
            told, [Evidence(whole, abs(whole.mean - value) <= slack, value - slack, value + slack)], whole.interval
        )

    return test


TABLE_1 = Recipe(
    name="activation-prompts/table-1",
    title="Accuracy on 19 data sets with all their data",
    printed=p.printed("table-1"),
    scales={
        "paper": RecipeScale(
            f"ResNet-101 and ViT-L/16, 19 sets, 100 epochs, 5 trials. {p.OURS}.",
            "weeks on one GPU",
            tuple(HUB.values()),
            tuple(p.FULL_DATA.values()),
            {"models": HUB, "rows": p.MAIN, "sets": p.FULL_DATA, "training": p.PAPER, "seeds": p.TRIALS},
        ),
        "here": RecipeScale(
            "The small embedded ResNet and ViT on 200 digits, 5 epochs, each method's own learning rate, 3 seeds.",
            "8 min on two cores",
            tuple(p.HOUSE.values()),
            ("digits",),
            {"models": p.HOUSE, "rows": p.MAIN, "sets": {"digits": "digits"}, "training": p.DIGITS, "seeds": p.SEEDS},
            short=p.DEMONSTRATION,
        ),
        "smoke": smoke(("VP", "AP"), HUB),
    },
    run=accuracies,
    claims=(
        Claim(
            "AP is above VP on every set, with both backbones",
            above("AP", "VP", columns=[*p.FULL_DATA, "digits"]),
            "section 6.2",
        ),
        Claim(
            "With ResNet-101 AP is above VP by over 4 points on average",
            above_on_average("AP", "VP", columns=["Average"], panels=["ResNet"], by=4),
            "section 6.2",
        ),
        Claim(
            "With ViT-L/16 AP is above VP by over 1.5 points on average",
            above_on_average("AP", "VP", columns=["Average"], panels=["ViT"], by=1.5),
            "section 6.2",
        ),
        Claim(
            "On StanfordCars, SVHN and GTSRB with ResNet-101 AP is above VP by 7 to 9 points",
            between("AP", "VP", 7, 9, columns=["StanfordCars", "SVHN", "GTSRB"], panels=["ResNet"]),
            "section 6.2",
        ),
        Claim(
            "AP is above NORM-TUNE on average, with both backbones",
            above("AP", "NORM-TUNE", columns=["Average"]),
            "section 6.2",
        ),
        Claim(
            "With ResNet-101 AP is the best of four in 13 of 19 sets",
            best_in("AP", TUNED, 13 / 19, columns=list(p.FULL_DATA), panels=["ResNet"]),
            "section 6.2",
        ),
        Claim(
            "With ViT-L/16 AP is the best of four in 15 of 19 sets",
            best_in("AP", TUNED, 15 / 19, columns=list(p.FULL_DATA), panels=["ViT"]),
            "section 6.2",
        ),
        Claim(
            "AP is above full fine-tuning on OxfordPets with ResNet-101",
            above("AP", "FULL-FINETUNE", columns=["OxfordPets"], panels=["ResNet"]),
            "section 6.2",
        ),
        Claim(
            "AP is above full fine-tuning on DTD with ViT-L/16",
            above("AP", "FULL-FINETUNE", columns=["DTD"], panels=["ViT"]),
            "section 6.2",
        ),
        Claim("The printed averages are the means of their rows", mean_of_columns(), "table 1"),
    ),
)

TABLE_3 = Recipe(
    name="activation-prompts/table-3",
    title="Accuracy on VTAB-1k: 1,000 training images per data set",
    printed=p.printed("table-3"),
    scales={
        "paper": RecipeScale(
            f"ResNet-101 and ViT-L/16, the 19 sets of VTAB-1k, 100 epochs, 5 trials. {p.OURS}{p.ONLY_800}",
            "3 days on one GPU",
            tuple(HUB.values()),
            tuple(p.FEW_SHOT.values()),
            {
                "models": HUB,
                "rows": p.MAIN,
                "sets": p.FEW_SHOT,
                "training": {**p.PAPER, "protocol": "vtab-1k"},
                "seeds": p.TRIALS,
            },
        ),
        "here": RecipeScale(
            "A ViT-tiny/16 and a ResNet-50 of ImageNet from --models-dir, 1,000 images of four sets, 20 epochs. The "
            "kept runs behind docs/visual-methods.md are read, whose learning rates were selected too; with --fresh 3 "
            "seeds, each method's own learning rate.",
            "20 min on one GPU, half a day on two cores; a second where they are read",
            tuple(p.SMALL.values()),
            tuple(p.SMALL_SETS.values()),
            {
                "kept": True,
                "models": p.SMALL,
                "rows": p.MAIN,
                "sets": p.SMALL_SETS,
                "training": {"protocol": "vtab-1k", "epochs": 20, "batch_size": 64, "evaluations": 1},
                "seeds": p.SEEDS,
            },
        ),
        "smoke": smoke(("NORM-TUNE", "AP"), {"ViT": p.VIT_LARGE}),
    },
    run=accuracies,
    kept=lambda: kept.has_table("activation_prompts"),
    claims=(
        Claim(
            "With ViT-L/16 AP is above VP by over 1 point on average",
            above("AP", "VP", columns=["Average"], panels=["ViT"], by=1),
            "section 6.2",
        ),
        Claim(
            "With ResNet-101 AP is above VP by 4.3 points on average",
            above("AP", "VP", columns=["Average"], panels=["ResNet"], by=4.3),
            "section 6.2",
        ),
        Claim(
            "AP is above VP on every set",
            above("AP", "VP", columns=[*p.FEW_SHOT, "CIFAR-10"]),
            READING,
        ),
        Claim(
            "AP is above NORM-TUNE on average, with both backbones",
            above("AP", "NORM-TUNE", columns=["Average"]),
            "section 6.2",
        ),
        Claim(
            "Small models favour NORM-TUNE over AP",
            above("NORM-TUNE", "AP", columns=["Average"]),
            "section 6.2, of ResNet-18 and ViT-tiny",
            printed=False,
        ),
        Claim("The printed averages are the means of their rows", mean_of_columns(), "table 3"),
    ),
)

PICTURES = {
    "OxfordPets": "oxford-pets",
    "DTD": "dtd",
    "EuroSAT": "eurosat",
    "Flowers102": "flowers102",
    "UCF101": "ucf101",
    "Food101": "food101",
    "Waterbirds": "waterbirds",
}
TABLE_5 = Recipe(
    name="activation-prompts/table-5",
    title="AP and VP on CLIP and Swin",
    printed=p.printed("table-5"),
    scales={
        "paper": RecipeScale(
            f"CLIP ViT-B/32 and Swin-B, seven sets, 100 epochs, 5 trials. {p.OURS}.",
            "a week on one GPU",
            (p.CLIP, p.SWIN),
            tuple(PICTURES.values()),
            {
                "models": {"CLIP": p.CLIP, "Swin": p.SWIN},
                "rows": ("VP", "AP"),
                "sets": PICTURES,
                "training": p.PAPER,
                "seeds": p.TRIALS,
            },
        ),
        "here": RecipeScale(
            "The small embedded ViT on 200 digits, 5 epochs, 3 seeds; CLIP and Swin as well where --models-dir has "
            f"{p.CLIP} and {p.SWIN}.",
            "3 min on two cores without them",
            ("embedded:vit",),
            ("digits",),
            {
                "models": {"ViT": "embedded:vit"},
                "if_found": {"CLIP": p.CLIP, "Swin": p.SWIN},
                "rows": ("VP", "AP"),
                "sets": {"digits": "digits"},
                "training": p.DIGITS,
                "seeds": p.SEEDS,
            },
            short=p.DEMONSTRATION,
        ),
        "smoke": smoke(("AP",), {"CLIP": p.CLIP, "Swin": p.SWIN}),
    },
    run=accuracies,
    claims=(
        *(
            Claim(
                f"On {panel} AP is above VP by 1 to 6 points on every set (the paper: in various sets)",
                between("AP", "VP", 1, 6, panels=[panel]),
                READING,
            )
            for panel in ("CLIP", "Swin")
        ),
        Claim("On CLIP AP is above VP on every set", above("AP", "VP", panels=["CLIP"]), "section 6.2"),
        Claim("On Swin AP is above VP on every set", above("AP", "VP", panels=["Swin"]), "section 6.2"),
        Claim("On other transformers as well", above("AP", "VP", columns=["digits"], panels=["ViT"]), "6.2"),
    ),
)

GROUPS = {"FGVC": p.FGVC, "Natural": p.NATURAL, "Specialized": p.SPECIALIZED, "Structured": p.STRUCTURED}
VPT_ROWS = ("FULL-FINETUNE", "LINEAR-PROBE", "VPT-SHALLOW", "VPT-DEEP", "AP")
TOTAL = "total parameters (x)"
A2_COLUMNS = (*GROUPS, "digits")  # no mean of other sets: the claims are about these groups


def in_vpts_setting(bench: Bench, settings: Mapping[str, Any]) -> Results:
    """The total of all tasks' parameters in units of ViT-B/16, counted; accuracy by group of sets, or on the set."""
    found = bench.once("activation-prompts/table-a2", {"shape": settings["shape"]}, lambda: totals(settings["shape"]))
    if settings.get("kept") and (known := p.kept_accuracies({"": p.SMALL["ViT"]}, settings["rows"])) is not None:
        return found.with_([known])
    for training, groups in settings["work"]:
        for name, sets in groups.items():
            specs = p.specs(bench, settings["models"], settings["rows"], sets, training)
            results = bench.values(specs, settings["seeds"], p.accuracy).with_average(name)
            whole = {key: cell for key, cell in results.cells.items() if key[2] == name}
            found = found.with_([Results(whole, failures=results.failures)])
    return found


def totals(shape: str) -> Results:
    """The backbone once, and for each of the 24 tasks what the method trains and a head."""
    from inlay.tasks import catalogue

    counted = {row: cell.mean for (_, row, _), cell in p.counted({"": shape}, VPT_ROWS).cells.items()}
    head = counted["LINEAR-PROBE"]
    whole = counted["FULL-FINETUNE"] - head
    # 24 tasks: the five of FGVC and the nineteen of VTAB-1k, each with a head of its own classes; `head` has ten.
    classes = [catalogue.describe(task).num_labels or 0 for task in (*p.FGVC.values(), *p.FEW_SHOT.values())]
    heads = head / 10 * sum(classes)
    cells = {}
    for row, millions in counted.items():
        own = len(classes) * whole if row == "FULL-FINETUNE" else whole + len(classes) * (millions - head)
        cells["", row, TOTAL] = (own + heads) / whole
    return Results.of(cells)


TABLE_A2 = Recipe(
    name="activation-prompts/table-a2",
    title="AP in the setting of VPT",
    printed=p.printed("table-a2"),
    scales={
        "paper": RecipeScale(
            "ViT-B/16 of ImageNet-21k; FGVC with all its data, VTAB-1k with 1,000 images; 100 epochs, 5 trials. "
            f"{p.OURS}{p.ONLY_800}",
            "a week on one GPU",
            (p.VIT_BASE,),
            (*p.FGVC.values(), *p.FEW_SHOT.values()),
            {
                "shape": "ViT-B/16",
                "models": {"": p.VIT_BASE},
                "rows": VPT_ROWS,
                "work": (
                    (p.PAPER, {"FGVC": p.FGVC}),
                    ({**p.PAPER, "protocol": "vtab-1k"}, {name: GROUPS[name] for name in list(GROUPS)[1:]}),
                ),
                "seeds": p.TRIALS,
            },
        ),
        "here": RecipeScale(
            "The total parameters of ViT-B/16, exactly; accuracy is that of the ViT-tiny of docs/visual-methods.md, "
            "with --fresh of the small embedded ViT on 200 digits, 3 seeds.",
            "seconds; with --fresh 6 min on two cores",
            ("embedded:vit",),
            ("digits",),
            {
                "kept": True,
                "shape": "ViT-B/16",
                "models": {"": "embedded:vit"},
                "rows": VPT_ROWS,
                "work": ((p.DIGITS, {"digits": {"digits": "digits"}}),),
                "seeds": p.SEEDS,
            },
            behind=(p.SMALL["ViT"],),
            short=p.DEMONSTRATION,
        ),
        "smoke": RecipeScale(
            "Totals of a shallow model; one step of AP.",
            "2 s",
            (p.VIT_BASE,),
            ("oxford-pets",),
            {
                "shape": "ViT-6",
                "models": {"": p.VIT_BASE},
                "rows": ("VPT-SHALLOW", "AP"),
                "work": ((p.ONE_STEP, {"Natural": {"OxfordPets": "oxford-pets"}}),),
                "seeds": 1,
            },
        ),
    },
    run=in_vpts_setting,
    claims=(
        Claim(
            "AP is between VPT-shallow and VPT-deep: above the first in every group",
            above("AP", "VPT-SHALLOW", columns=A2_COLUMNS),
            "appendix B",
        ),
        Claim("and below the second", above("VPT-DEEP", "AP", columns=A2_COLUMNS), "appendix B"),
        Claim(
            "AP gains 3 points over VPT-shallow on average",
            above_on_average("AP", "VPT-SHALLOW", columns=A2_COLUMNS, by=3),
            "appendix B",
        ),
        Claim(
            "AP loses 3.5 points to VPT-deep on average, to 0.25",
            mean_gap("VPT-DEEP", "AP", 3.5, 0.25, columns=A2_COLUMNS),
            READING,
        ),
        Claim("AP needs 1.11 times the backbone for 24 tasks", near("AP", TOTAL, 1.11, relative=0.005), PRINTED),
        Claim("VPT-shallow needs 1.04 times", near("VPT-SHALLOW", TOTAL, 1.04, relative=0.005), PRINTED),
    ),
    notes=(p.NO_GROUP,),
)

RECIPES = (TABLE_1, TABLE_3, TABLE_5, TABLE_A2)
