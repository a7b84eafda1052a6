"""What the recipes of this paper share: its methods by the names of its tables, its backbones, and one protocol.

All tables at `here` run under the same protocol, so that a run made for one of them is found again by the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inlay.papers.reproduce.results import MEAN_OF, Key, Results

if TYPE_CHECKING:
    from torch import nn

    from inlay.papers.reproduce.bench import Bench
    from inlay.papers.tables import Entry
    from inlay.records.spec import Spec
    from inlay.records.store import Run

FOLDER = Path(__file__).parent
RESNET_101, VIT_LARGE, VIT_BASE = (
    "microsoft/resnet-101",
    "google/vit-large-patch16-224",
    "google/vit-base-patch16-224-in21k",
)
VIT_BASE_1K = "google/vit-base-patch16-224"  # section 6.1: of ImageNet-1K; table A2 has the other
CLIP, SWIN = "openai/clip-vit-base-patch32", "microsoft/swin-base-patch4-window7-224"
HOUSE = {"ResNet": "embedded:resnet", "ViT": "embedded:vit"}


@dataclass(frozen=True)
class Way:
    """A row of the paper's tables: the method and its settings. `tokens`: needs a transformer."""

    method: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    tokens: bool = False


WAYS: Mapping[str, Way] = {
    "FULL-FINETUNE": Way("full"),
    "LINEAR-PROBE": Way("linear-probe"),
    "NORM-TUNE": Way("norm"),
    "VP": Way("visual-prompt"),
    "BIAS": Way("bias"),
    "LoRA": Way("lora", {"r": 10, "lora_alpha": 10}),
    "LoRA-1": Way("lora", {"r": 1, "lora_alpha": 1}),
    "LoRA-10": Way("lora", {"r": 10, "lora_alpha": 10}),
    "LoRA-20": Way("lora", {"r": 20, "lora_alpha": 20}),
    "LoRA-50": Way("lora", {"r": 50, "lora_alpha": 50}),
    "VPT": Way("vpt-deep", {"num_prompt_tokens": 10}, tokens=True),
    "VPT-10": Way("vpt-deep", {"num_prompt_tokens": 10}, tokens=True),
    "VPT-50": Way("vpt-deep", {"num_prompt_tokens": 50}, tokens=True),
    "VPT-SHALLOW": Way("vpt-shallow", {"num_prompt_tokens": 10}, tokens=True),
    "VPT-DEEP": Way("vpt-deep", {"num_prompt_tokens": 10}, tokens=True),
    "GATEVPT": Way("gate-vpt", {}, tokens=True),
    "E2VPT": Way("e2vpt", {}, tokens=True),
    "ADAPTER": Way("adapter-pfeiffer", {}, tokens=True),
    "ADAPTERFORMER": Way("adaptformer", {}, tokens=True),
    "SSF": Way("ssf"),
    "AP-PRODUCT": Way("activation-prompt", {"kind": "product"}),
    "AP-CONCATE": Way("activation-prompt", {"kind": "concat"}, tokens=True),
    "AP-3": Way("activation-prompt", {"layers": [1, 2, 3]}),
    "AP-5": Way("activation-prompt", {"layers": [1, 2, 3, 4, 5]}),
    "AP": Way("activation-prompt"),
}
# `here`: 50 steps on 200 digits at each method's own learning rate. Without the trunk cache, which the paper does not
# have, so that what a run costs can be compared as well.
DIGITS = {"shots": 200, "epochs": 5, "batch_size": 20, "evaluations": 1, "trunk_cache": "off"}
SEEDS = 3
DEMONSTRATION = "a demonstration, 50 steps on small images"  # judges nothing
# `smoke`.
ONE_STEP = {"max_steps": 1, "batch_size": 8, "evaluations": 1, "trunk_cache": "off"}
# `paper`: 100 epochs (section 6.1; appendix A has 1000), Adam without weight decay. AP at the printed rates, which no
# schedule, warm-up or clipping is printed with; how the baselines are trained is not printed ("suggested in the
# papers"), so that they have our defaults.
PAPER = {"epochs": 100, "batch_size": 128, "evaluations": 1, "trunk_cache": "off", "rates": "printed"}
TRIALS = 5
PRINTED_RATES = {"ResNet": 0.001, "ViT": 0.01}  # appendix A
PLAINLY = {"schedule": "constant", "warmup": 0.0, "clip": 1e9}
OURS = (
    "Not in the paper, ours: a constant learning rate without warm-up or clipping for AP, the baselines' learning "
    "rates and schedules, LoRA's alpha (its rank), up to 10 % of the training data held out where a "
    "set has no validation part"
)
ONLY_800 = "; of VTAB-1k's 1,000 images 200 are held out, drawn by the seed."
MAIN = ("FULL-FINETUNE", "LINEAR-PROBE", "NORM-TUNE", "VP", "AP")


# The sets by the names of the tables' columns.
FGVC = {
    "CUB200": "cub200",
    "StanfordDog": "stanford-dogs",
    "StanfordCars": "stanford-cars",
    "NA-Birds": "nabirds",
    "OxfordFlowers": "oxford-flowers",
}
VTAB = {
    "CIFAR-100": "cifar100",
    "Caltech-101": "caltech101",
    "DTD": "dtd",
    "Flowers102": "flowers102",
    "OxfordPets": "oxford-pets",
    "SVHN": "svhn",
    "SUN397": "sun397",
    "Camelyon": "camelyon",
    "EuroSAT": "eurosat",
}
OTHERS = {
    "CIFAR-10": "cifar10",
    "GTSRB": "gtsrb",
    "UCF101": "ucf101",
    "Food101": "food101",
    "Waterbirds": "waterbirds",
}
SMALL = {"ResNet": "resnet50_v1", "ViT": "vit_tiny_patch16_224"}
SMALL_SETS = {
    "OxfordPets": "oxford-pets",
    "Flowers102": "flowers102",
    "Caltech101": "caltech101",
    "CIFAR-10": "cifar10",
}
SMALL_MEAN = f"{MEAN_OF}{len(SMALL_SETS)}"  # the column of the mean over them
# The rows of methods that those runs and benchmarks/vision.py have at their default settings.
KEPT_ROWS = (
    "FULL-FINETUNE",
    "LINEAR-PROBE",
    "NORM-TUNE",
    "VP",
    "BIAS",
    "LoRA",
    "VPT",
    "VPT-10",
    "VPT-DEEP",
    "ADAPTERFORMER",
    "SSF",
    "AP",
)
RANK_8 = "LoRA's accuracy was read at the method's default rank, 8: its runs of rank 10 are not there or not whole."
NO_GROUP = (
    "The mean of four sets at `here` is none of the paper's groups of sets (FGVC, VTAB, Others; Natural, Specialized, "
    "Structured): claims about every group, or about points gained over them, are not tested by it."
)
INTERVALS = (
    "Intervals are over the seeds, for these four fixed sets: none covers the choice of the sets or of the "
    "learning rate. Comparisons are not corrected for their number."
)
FULL_DATA = {**FGVC, **VTAB, **OTHERS}
NATURAL = {
    "Caltech101": "caltech101",
    "CIFAR-100": "cifar100",
    "DTD": "dtd",
    "Flowers102": "flowers102",
    "OxfordPets": "oxford-pets",
    "Sun397": "sun397",
    "SVHN": "svhn",
}
SPECIALIZED = {
    "Camelyon": "camelyon",
    "EuroSAT": "eurosat",
    "Resisc45": "resisc45",
    "Retinopathy": "retinopathy",
}
STRUCTURED = {
    "Clevr-Count": "clevr-count",
    "Clevr-Dist": "clevr-distance",
    "DMLab": "dmlab",
    "dSpr-Loc": "dsprites-location",
    "dSpr-Obj": "dsprites-orientation",
    "KITTI-Dist": "kitti-distance",
    "sNOB-Azim": "smallnorb-azimuth",
    "sNOB-Elev": "smallnorb-elevation",
}
FEW_SHOT = {**NATURAL, **SPECIALIZED, **STRUCTURED}


def printed(item: str) -> Path:
    """The file of an item's printed numbers."""
    return FOLDER / f"{item}.csv"


def fits(row: str, panel: str) -> bool:
    """Whether a row can be had in a panel: tokens are a transformer's."""
    return not (WAYS[row].tokens and panel == "ResNet")


def models(bench: Bench, settings: Mapping[str, Any]) -> dict[str, str]:
    """The backbones of a scale; those of `if_found` where --models-dir has them."""
    more = {panel: name for panel, name in settings.get("if_found", {}).items() if bench.has(name)}
    return {**settings["models"], **more}


def trained(model: str, method: str, training: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a spec that say how to train; with `rates` "printed", AP plainly at the paper's rate for this
    backbone."""
    fields = {name: value for name, value in training.items() if name != "rates"}
    if training.get("rates") == "printed" and method == "activation-prompt":
        fields |= {"learning_rate": PRINTED_RATES["ResNet" if "resnet" in model else "ViT"], **PLAINLY}
    return fields


def specs(
    bench: Bench, models: Mapping[str, str], rows: Iterable[str], tasks: Mapping[str, str], training: Mapping[str, Any]
) -> dict[Key, Spec]:
    """A spec for each backbone (panel), method (row) and set (column): `tasks` are the columns' names."""
    return {
        (panel, row, column): bench.spec(
            model,
            WAYS[row].method,
            task=task,
            settings=WAYS[row].settings,
            **trained(model, WAYS[row].method, training),
        )
        for panel, model in models.items()
        for row in rows
        if fits(row, panel)
        for column, task in tasks.items()
    }


def kept_accuracies(models: Mapping[str, str], rows: Iterable[str]) -> Results | None:
    """The runs behind docs/visual-methods.md: ViT-tiny, ResNet-50, 1,000 images of four sets; None without them."""
    from inlay.papers.reproduce import kept

    table = kept.table("activation_prompts", " --models-dir <folder> --data-dir <folder>")
    if table is None:
        return None
    named, cells, lines = list(rows), {}, {}
    for panel, model in models.items():
        for row in (each for each in named if fits(each, panel)):
            found, lines[panel, row] = _kept_runs(table.runs, model, row)
            for column, runs in found.items():
                cells[panel, row, column] = {
                    run["seed"]: kept.KeptValue(100 * run["test"], run.get("steps")) for run in runs
                }
    read = kept.whole(table, cells, "AP" if "AP" in named else named[0])
    if not read.cells:
        return None
    whole = {place: line for place, line in lines.items() if place[1] in read.rows(place[0])}
    told = (
        f"Accuracy: {', '.join(models.values())}; 1,000 images each of {', '.join(SMALL_SETS)}; the learning rate was "
        f"selected on held-out images of {next(iter(SMALL_SETS))} with seed 0."
    )
    cells_read = {key: replace(cell, doubt=_doubt(key[1], whole[key[:2]])) for key, cell in read.cells.items()}
    read = replace(read, cells=cells_read, notes=(*read.notes, told, INTERVALS, *_doubts(whole)))
    return read.with_average(columns=list(SMALL_SETS))


def _kept_runs(runs: list[Entry], model: str, row: str) -> tuple[dict[str, list[Entry]], list[Entry]]:
    """The runs of a row by set, and its line of runs: with its settings or, if those are not whole, its method's."""
    from inlay.papers.activation_prompts.table import chosen, line_of
    from inlay.papers.reproduce.kept import LEAST

    way = WAYS[row]
    for settings in (way.settings, None):
        found = {column: chosen(runs, model, way.method, task, settings) for column, task in SMALL_SETS.items()}
        if row not in KEPT_ROWS or all(len(each) >= LEAST for each in found.values()):
            break
    return found, line_of(runs, model, way.method, settings)


def _doubt(row: str, line: list[Entry]) -> str:
    """Why a row is not judged: held-out images did not select its learning rate, and the grid may not have its best."""
    from inlay.papers.activation_prompts.table import doubts

    return f"the learning rate of {row} is one of a tie and at an end of those tried" if all(doubts(line)) else ""


def _doubts(lines: Mapping[tuple[str, str], list[Entry]]) -> Iterator[str]:
    """What to say of lines whose learning rate may not be their best, and of LoRA's where it has another rank."""
    from inlay.papers.activation_prompts.table import doubts

    if any(row == "LoRA" and not line[0].get("settings") for (_, row), line in lines.items()):
        yield RANK_8
    found = {f"{row} ({panel})" if panel else row: doubts(line) for (panel, row), line in lines.items()}
    if ends := [name for name, (end, _) in found.items() if end]:
        yield f"At the lowest or highest learning rate tried (a better one may lie beyond): {', '.join(ends)}."
    if ties := [name for name, (_, tie) in found.items() if tie]:
        yield f"At the lowest of several learning rates that did equally well when selected: {', '.join(ties)}."


def accuracy(run: Run) -> float:
    """A run's test metric, in per cent."""
    return 100 * float(run.metrics["test"][run.record["metric"]])


# --------------------------------------------------------------------------------------------- models without weights


def _vit(hidden: int, layers: int, heads: int) -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    shape = {"hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads}
    return ViTForImageClassification(ViTConfig(**shape, intermediate_size=4 * hidden, num_labels=10))


def _resnet(depths: list[int]) -> nn.Module:
    from transformers import ResNetConfig, ResNetForImageClassification

    return ResNetForImageClassification(ResNetConfig(depths=depths, num_labels=10))


PIXELS = 224
SHAPES: Mapping[str, Callable[[], nn.Module]] = {
    "ResNet-101": lambda: _resnet([3, 4, 23, 3]),
    "ResNet-18": lambda: _resnet([1, 1, 1, 1]),
    "ViT-L/16": lambda: _vit(1024, 24, 16),
    "ViT-B/16": lambda: _vit(768, 12, 12),
    "ViT-6": lambda: _vit(64, 6, 2),
}


def counted(models: Mapping[str, str], rows: Iterable[str], column: str = "parameters (M)") -> Results:
    """What each method trains in a model of this shape and ten classes, in millions; without weights, to the digit."""
    import torch

    from inlay.errors import InlayError
    from inlay.methods.attach import attach, trained_parameters

    cells: dict[Key, float] = {}
    failures = {}
    for panel, shape in models.items():
        for row in rows:
            if fits(row, panel):
                with torch.device("meta"):
                    model = SHAPES[shape]()
                way = WAYS[row]
                size = {"image_size": PIXELS} if way.method in ("activation-prompt", "visual-prompt") else {}
                try:
                    adapted = attach(
                        model, way.method, settings={**way.settings, **size}, newly_initialised=["classifier"]
                    )
                except InlayError as error:
                    failures[f"{panel}, {row}, count"] = str(error)
                    continue
                cells[panel, row, column] = sum(one.numel() for one in trained_parameters(adapted).values()) / 1e6
    return Results.of(cells, failures=failures)
