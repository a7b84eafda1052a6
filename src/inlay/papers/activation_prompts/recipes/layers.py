"""Figures 2, 4, 7, A1 and A2: accuracy of a prompt at each layer, by the function behind `inlay explain layers`.

The figures have no numbers in print but those of the text: AP at layer 31 of ResNet-101 is about 5 points above VP and
trains 100k parameters, VP 150k (section 3).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from inlay.papers.activation_prompts.recipes import protocol as p
from inlay.papers.reproduce.certainty import Evidence, every
from inlay.papers.reproduce.drawing import ANY, curves
from inlay.papers.reproduce.predicates import Test, difference, near, numbered, prefers, together
from inlay.papers.reproduce.recipe import PRINTED, READING, Claim, Recipe, RecipeScale, Verdict
from inlay.papers.reproduce.results import Key, ResultCell, Results

if TYPE_CHECKING:
    from inlay.papers.reproduce.bench import Bench
    from inlay.workflow.explain.runs import Point

LAYERS_COMMAND = "python -m inlay.papers.activation_prompts.table layers, then inlay explain layers"
ROWS = {
    "activation-prompt": "AP",
    "vpt-deep": "VPT",
    "visual-prompt": "VP",
    "norm": "NORM-TUNE",
    "linear-probe": "LINEAR-PROBE",
}
COUNTS = "parameters (M) of ResNet-101"


def by_layer(bench: Bench, settings: Mapping[str, Any]) -> Results:
    """Test accuracy at each layer of each backbone; methods without layers have one value, in the column `any`.

    Panels are backbones, and sets where there are several. `if_found` are further backbones of --models-dir.
    """
    from inlay.workflow.explain import runs as explain_runs

    if settings.get("kept") and (known := kept_curves(settings["kept"])) is not None:
        return known
    models = p.models(bench, settings)
    cells: dict[Key, ResultCell] = {}
    failures: dict[str, str] = {}
    sets = settings["sets"]
    for panel, model in models.items():
        for column, task in sets.items():
            place = panel if len(sets) == 1 else f"{panel}, {column}"
            for method in settings.get("methods", ("activation-prompt",)):
                found = explain_runs.layers(
                    bench.spec(model, method, task=task, **p.trained(model, method, settings["training"])),
                    settings.get("layers", {}).get(panel),
                    settings["seeds"],
                    bench.out / "runs",
                    baselines=settings.get("baselines", ()),
                    progress=bench.progress,
                    say=bench.say,
                )
                for point in (*found.points, *found.baselines):
                    name = ANY if point.layer is None else str(point.layer)
                    cells[place, ROWS[point.method], name] = percent(point)
                failures |= {f"{place}, {which}": why for which, why in found.failures.items()}
    return Results(cells, failures=failures)


def kept_curves(models: Mapping[str, str]) -> Results | None:
    """The curves of docs/visual-methods.md: a ViT-tiny and a ResNet-50 on 1,000 images of OxfordPets."""
    from inlay.papers.reproduce import kept

    cells: dict[Key, ResultCell] = {}
    notes = []
    for panel, model in models.items():
        found = kept.rows("activation_prompts", f"layers-{model}", LAYERS_COMMAND)
        if found is None:
            return None
        for line in found[0]:
            cell = ResultCell((100 * float(line["test_mean"]),), 100 * float(line["test_interval"]))
            cells[panel, ROWS[line["method"]], line["layer"] or ANY] = cell
        layers = [line for line in found[0] if line["layer"]]
        rates, seeds = {float(line["learning_rate"]) for line in layers}, {int(line["seeds"]) for line in layers}
        notes.append(found[1])
        notes.append(
            f"{panel}: {kept.span(seeds)} seeds a layer, all layers at the learning rate "
            f"{', '.join(f'{rate:g}' for rate in sorted(rates))}; VP and NORM-TUNE have their own learning rates, so "
            "that VP is not layer 0."
        )
    others = p.kept_accuracies(models, ("VP", "NORM-TUNE"))
    if others is None:
        return None
    for (panel, row, column), cell in others.cells.items():
        if column == "OxfordPets":
            cells[panel, row, ANY] = cell
    return Results(cells, notes=(*notes, *others.notes))


def percent(point: Point) -> ResultCell:
    return ResultCell.of_seeds(100 * value for value in point.test)


def with_counts(bench: Bench, settings: Mapping[str, Any]) -> Results:
    """The same, and what AP and VP train of ResNet-101 besides the head."""
    shape = settings["shape"]

    def count() -> Results:
        found = p.counted({"": shape}, ("LINEAR-PROBE", "VP", "AP"))
        head = found.get("LINEAR-PROBE", "parameters (M)")
        assert head is not None
        return Results.of(
            {
                (COUNTS, row, ANY): cell.mean - head.mean
                for (_, row, _), cell in found.cells.items()
                if row != "LINEAR-PROBE"
            }
        )

    counted = bench.once("activation-prompts/figure-2", {"shape": shape}, count)
    return by_layer(bench, settings).with_([counted])


def best_above(row: str, other: str, *, panel: str = "", by: float = 0.0, from_layer: int = 1) -> Test:
    """The best layer of `row` (from this layer on) is above `other`, which has one value or is at layer 0."""

    def test(results: Results) -> Verdict:
        curve = [(layer, cell) for layer, cell in numbered(results, row, panel) if layer >= from_layer]
        against = results.get(other, ANY, panel)
        if not curve or against is None:
            return Verdict.untested(f"the table does not have a curve of {row} beside {other}")
        layer, best = max(curve, key=lambda entry: entry[1].mean)
        gap = difference(best, against)
        told = f"{gap.mean:+.3g} at layer {layer:.0f}, the best by test"
        return every(told, [Evidence(gap, gap.mean > by, low=by)], gap.interval)

    return test


def best_above_layer_0(panel: str) -> Test:
    """The best layer from 1 on is above layer 0 of the same curve: the same method on the pixels, at the same rate."""

    def test(results: Results) -> Verdict:
        curve = dict(numbered(results, "AP", panel))
        if 0 not in curve or len(curve) < 2:
            return Verdict.untested("the table has no curve of AP from layer 0 on")
        layer = max((each for each in curve if each > 0), key=lambda each: curve[each].mean)
        gap = difference(curve[layer], curve[0])
        told = f"{gap.mean:+.3g} at layer {layer:.0f}, the best by test"
        return every(told, [Evidence(gap, gap.mean > 0, low=0)], gap.interval)

    return test


def every_panel(make: Callable[[str], Test], word: str = "") -> Test:
    """A predicate that must hold in each panel whose name has the word; the first that fails is told."""

    def test(results: Results) -> Verdict:
        found = [(panel, make(panel)(results)) for panel in results.panels if word in panel and panel != COUNTS]
        tested = [(panel, verdict) for panel, verdict in found if verdict.judgement != "not tested"]
        if not tested:
            return found[0][1] if found else Verdict.untested(f"the table has no {word}".rstrip())
        failing = [pair for pair in tested if pair[1].judgement != "holds"]
        panel, verdict = (failing or tested)[0]
        more = f"{len(tested) - len(failing)} of {len(tested)}; {panel}: " if len(tested) > 1 else ""
        return replace(verdict, measured=more + verdict.measured)

    return test


def layerwise(one: str, other: str, panel: str = "") -> Test:
    """`one` is above `other` on average over the layers that both have."""

    def test(results: Results) -> Verdict:
        curves_ = [dict(numbered(results, row, panel)) for row in (one, other)]
        shared = sorted(curves_[0].keys() & curves_[1].keys())
        if not shared:
            return Verdict.untested(f"the table does not have curves of {one} and {other}")
        gaps = [difference(curves_[0][layer], curves_[1][layer]) for layer in shared]
        whole = together(gaps)
        told = f"{whole.mean:+.3g} on average; above at {sum(gap.mean > 0 for gap in gaps)} of {len(shared)}"
        return every(told, [Evidence(whole, whole.mean > 0, low=0)], whole.interval)

    return test


PETS = {"OxfordPets": "oxford-pets"}
DIGITS = {"digits": "digits"}
RESNET = {"ResNet": p.RESNET_101}
SMOKE_LAYERS = {"ResNet": [1], "ViT": [1], "CLIP": [1], "Swin": [1]}


def smoke(models: Mapping[str, str], **more: Any) -> RecipeScale:
    settings = {"models": models, "sets": PETS, "layers": SMOKE_LAYERS, "training": p.ONE_STEP, "seeds": 1, **more}
    return RecipeScale("One step at one layer.", "1 s", tuple(models.values()), ("oxford-pets",), settings)


FIGURE_2 = Recipe(
    name="activation-prompts/figure-2",
    title="AP at each layer of a ResNet, beside VP and NORM-TUNE",
    scales={
        "paper": RecipeScale(
            f"ResNet-101 on OxfordPets (the caption; the text has CIFAR-10), 100 epochs, 5 trials. {p.OURS}.",
            "2 days on one GPU",
            (p.RESNET_101,),
            ("oxford-pets",),
            {
                "models": RESNET,
                "sets": PETS,
                "baselines": ("visual-prompt", "norm"),
                "training": p.PAPER,
                "seeds": p.TRIALS,
                "shape": "ResNet-101",
            },
        ),
        "here": RecipeScale(
            "The kept curve of docs/visual-methods.md is read: a ResNet-50, 1,000 images of OxfordPets, 20 epochs. "
            "With --fresh the small embedded ResNet on 200 digits, 5 epochs, 3 seeds. One learning rate for all "
            "layers. Parameters of ResNet-101, exactly.",
            "seconds; with --fresh 9 min on two cores",
            ("embedded:resnet",),
            ("digits",),
            {
                "kept": {"ResNet": "resnet50_v1"},
                "models": {"ResNet": "embedded:resnet"},
                "sets": DIGITS,
                "baselines": ("visual-prompt", "norm"),
                "training": p.DIGITS,
                "seeds": p.SEEDS,
                "shape": "ResNet-101",
            },
            behind=("resnet50_v1",),
            short=p.DEMONSTRATION,
        ),
        "smoke": smoke(RESNET, baselines=("visual-prompt",), shape="ResNet-18"),
    },
    run=with_counts,
    claims=(
        Claim(
            "A ResNet prefers deep layers: the late half is above the early one",
            prefers("AP", "late", panel="ResNet"),
            READING,
        ),
        Claim("At its best layer AP is above VP", best_above("AP", "VP", panel="ResNet"), "section 3"),
        Claim("and by about 5 points", best_above("AP", "VP", panel="ResNet", by=4.5), READING),
        Claim(
            "It is above layer 0 of its own curve, which is VP at the curve's learning rate",
            best_above_layer_0("ResNet"),
            READING,
        ),
        Claim("At its best layer AP is above NORM-TUNE", best_above("AP", "NORM-TUNE", panel="ResNet"), "section 4"),
        Claim("AP trains 100k parameters of ResNet-101", near("AP", ANY, 0.100, panel=COUNTS), PRINTED),
        Claim("VP trains 150k", near("VP", ANY, 0.150, panel=COUNTS), PRINTED),
    ),
    draw=curves("AP by layer", "layer (0: the pixels)", "test accuracy, %"),
)
BOTH = (
    Claim(
        "CNNs prefer deep layers: the late half is above the early one",
        every_panel(lambda panel: prefers("AP", "late", panel=panel), "ResNet"),
        READING,
    ),
    Claim(
        "ViTs prefer shallow layers: the early half is above the late one",
        every_panel(lambda panel: prefers("AP", "early", panel=panel), "ViT"),
        READING,
    ),
)
FIGURE_4 = Recipe(
    name="activation-prompts/figure-4",
    title="Layer preference of AP: ResNets and ViTs",
    scales={
        "paper": RecipeScale(
            f"ResNet-50, ResNet-101, ViT-B and ViT-L/16 of ImageNet-1K on OxfordPets, 100 epochs, 5 trials. {p.OURS}.",
            "a week on one GPU",
            ("microsoft/resnet-50", p.RESNET_101, p.VIT_BASE_1K, p.VIT_LARGE),
            ("oxford-pets",),
            {
                "models": {
                    "ResNet-50": "microsoft/resnet-50",
                    "ResNet-101": p.RESNET_101,
                    "ViT-B": p.VIT_BASE_1K,
                    "ViT-L": p.VIT_LARGE,
                },
                "sets": PETS,
                "baselines": ("norm",),
                "training": p.PAPER,
                "seeds": p.TRIALS,
            },
        ),
        "here": RecipeScale(
            "The kept curves of docs/visual-methods.md are read: a ResNet-50 and a ViT-tiny, 1,000 images of "
            "OxfordPets, 20 epochs. With --fresh the small embedded ResNet and ViT on 200 digits, 5 epochs, 3 "
            "seeds. One learning rate for all layers.",
            "seconds; with --fresh 15 min on two cores",
            tuple(p.HOUSE.values()),
            ("digits",),
            {
                "kept": {"ResNet-50": "resnet50_v1", "ViT-tiny": "vit_tiny_patch16_224"},
                "models": p.HOUSE,
                "sets": DIGITS,
                "baselines": ("norm",),
                "training": p.DIGITS,
                "seeds": p.SEEDS,
            },
            behind=("resnet50_v1", "vit_tiny_patch16_224"),
            short=p.DEMONSTRATION,
        ),
        "smoke": smoke({"ResNet": p.RESNET_101, "ViT": p.VIT_LARGE}),
    },
    run=by_layer,
    claims=(
        *BOTH,
        Claim(
            "At its best layer AP is above NORM-TUNE",
            every_panel(lambda panel: best_above("AP", "NORM-TUNE", panel=panel)),
            "section 4",
        ),
    ),
    draw=curves("AP by layer", "layer (0: the pixels)", "test accuracy, %"),
)
MORE_SETS = {"CIFAR-10": "cifar10", "Fashion-MNIST": "fashion-mnist"}
FIGURE_A1 = Recipe(
    name="activation-prompts/figure-a1",
    title="Layer preference on more data sets",
    scales={
        "paper": RecipeScale(
            "ResNet-101 and ViT-L/16 on CIFAR-10, Flowers102 and DTD, 100 epochs, 5 trials. "
            f"{p.OURS}, the sets (the text names none).",
            "weeks on one GPU",
            (p.RESNET_101, p.VIT_LARGE),
            ("cifar10", "flowers102", "dtd"),
            {
                "models": {"ResNet": p.RESNET_101, "ViT": p.VIT_LARGE},
                "sets": {"CIFAR-10": "cifar10", "Flowers102": "flowers102", "DTD": "dtd"},
                "training": p.PAPER,
                "seeds": p.TRIALS,
            },
        ),
        "here": RecipeScale(
            "The small embedded ResNet and ViT on 200 images of CIFAR-10 and of Fashion-MNIST, 5 epochs, two early "
            "and two late layers, 2 seeds.",
            "15 min on two cores with 1,000 and 2,000 test images in --data-dir; more with the hub's 10,000",
            tuple(p.HOUSE.values()),
            tuple(MORE_SETS.values()),
            {
                "models": p.HOUSE,
                "sets": MORE_SETS,
                "layers": {"ResNet": [1, 2, 7, 8], "ViT": [1, 2, 5, 6]},
                "training": p.DIGITS,
                "seeds": 2,
            },
            short=p.DEMONSTRATION,
        ),
        "smoke": smoke({"ResNet": p.RESNET_101, "ViT": p.VIT_LARGE}),
    },
    run=by_layer,
    claims=BOTH,
    draw=curves("AP by layer", "layer", "test accuracy, %"),
)
FIGURE_7 = Recipe(
    name="activation-prompts/figure-7",
    title="Layer preference of AP on CLIP and Swin",
    scales={
        "paper": RecipeScale(
            f"CLIP ViT-B/32 and Swin-B on OxfordPets, 100 epochs, 5 trials. {p.OURS}.",
            "3 days on one GPU",
            (p.CLIP, p.SWIN),
            ("oxford-pets",),
            {"models": {"CLIP": p.CLIP, "Swin": p.SWIN}, "sets": PETS, "training": p.PAPER, "seeds": p.TRIALS},
        ),
        "here": RecipeScale(
            "The small embedded ViT on 200 digits, 5 epochs, 3 seeds; CLIP and Swin as well where --models-dir has "
            f"{p.CLIP} and {p.SWIN}.",
            "7 min on two cores, none where figure 4 has made the runs",
            ("embedded:vit",),
            ("digits",),
            {
                "models": {"ViT": "embedded:vit"},
                "if_found": {"CLIP": p.CLIP, "Swin": p.SWIN},
                "sets": DIGITS,
                "training": p.DIGITS,
                "seeds": p.SEEDS,
            },
            short=p.DEMONSTRATION,
        ),
        "smoke": smoke({"CLIP": p.CLIP, "Swin": p.SWIN}),
    },
    run=by_layer,
    claims=(
        Claim("CLIP prefers shallow layers, by halves", prefers("AP", "early", panel="CLIP"), READING),
        Claim("Swin prefers shallow layers, by halves", prefers("AP", "early", panel="Swin"), READING),
        Claim("as a ViT does", prefers("AP", "early", panel="ViT"), READING),
    ),
    draw=curves("AP by layer", "layer (0: the pixels)", "test accuracy, %"),
)
FIGURE_A2 = Recipe(
    name="activation-prompts/figure-a2",
    title="AP and VPT at one layer at a time",
    scales={
        "paper": RecipeScale(
            f"ViT-L/16 on OxfordPets, 100 epochs, 5 trials. {p.OURS}.",
            "3 days on one GPU",
            (p.VIT_LARGE,),
            ("oxford-pets",),
            {
                "models": {"ViT": p.VIT_LARGE},
                "sets": PETS,
                "methods": ("activation-prompt", "vpt-deep"),
                "training": p.PAPER,
                "seeds": p.TRIALS,
            },
        ),
        "here": RecipeScale(
            "The small embedded ViT on 200 digits, 5 epochs, each method's own learning rate, 3 seeds.",
            "12 min on two cores, half where figure 4 has made the runs",
            ("embedded:vit",),
            ("digits",),
            {
                "models": {"ViT": "embedded:vit"},
                "sets": DIGITS,
                "methods": ("activation-prompt", "vpt-deep"),
                "training": p.DIGITS,
                "seeds": p.SEEDS,
            },
            short=p.DEMONSTRATION,
        ),
        "smoke": smoke({"ViT": p.VIT_LARGE}, methods=("activation-prompt", "vpt-deep")),
    },
    run=by_layer,
    claims=(
        Claim("At one layer a sum is above concatenation", layerwise("AP", "VPT", "ViT"), "appendix B"),
        Claim("VPT prefers shallow layers, as AP does, by halves", prefers("VPT", "early", panel="ViT"), READING),
        Claim("AP prefers shallow layers, by halves", prefers("AP", "early", panel="ViT"), READING),
    ),
    draw=curves("AP and VPT by layer", "layer (0: the pixels)", "test accuracy, %"),
)
RECIPES = (FIGURE_2, FIGURE_4, FIGURE_7, FIGURE_A1, FIGURE_A2)
