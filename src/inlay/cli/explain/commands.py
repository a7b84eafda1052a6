"""`inlay explain`: see why, as a figure, a table and data."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from inlay.cli import options as o
from inlay.cli import show
from inlay.errors import InlayError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from inlay.records.spec import Spec
    from inlay.workflow.explain.explanation import Explanation
    from inlay.workflow.explain.runs import Curves, Point

app = typer.Typer(
    help="Show why a model or a method behaves as it does. Each command draws a figure (PNG and SVG) and keeps its "
    "data (CSV) and metadata (JSON) beside it.",
    no_args_is_help=True,
)

Folder = Annotated[
    Path,
    typer.Option(help="Where the figures go, a folder each: OUT/<what>-<task>-<model>.", rich_help_panel=o.OUTPUT),
]
Runs = Annotated[Path, typer.Option(help="Folder of runs: made there, or found there.", rich_help_panel=o.OUTPUT)]
Split = Annotated[str, typer.Option(help="Which rows to look at: train, validation or test.", rich_help_panel=o.DATA)]
Adapter = Annotated[str | None, typer.Option(help="A finished run: look at the model as that run left it.")]
Seed = Annotated[int, typer.Option(help="Decides which examples are drawn.")]

# A command that only looks at a model does not offer what only training needs.
TRAINING_ONLY = [
    *("shots", "epochs", "max_steps", "gradient_accumulation", "learning_rate", "weight_decay", "warmup", "schedule"),
    *("clip", "class_weights", "early_stopping", "evaluations", "gradient_checkpointing", "layers", "set_"),
    *("max_eval", "pack", "group_by_length", "trunk_cache", "augment", "calibrate"),
]
looks = partial(o.takes_spec, without=TRAINING_ONLY)


@app.command("layers")
@o.takes_spec
def layers(
    model: o.Model,
    method: Annotated[str, typer.Option(help="A method that can be put at one layer, such as activation-prompt.")],
    fields: dict[str, Any],
    baselines: Annotated[
        str | None,
        typer.Option(help="Methods drawn as lines across, separated by commas; '' for none. Default: linear-probe."),
    ] = None,
    rates: Annotated[
        str | None,
        typer.Option(
            help="Learning rates, separated by commas; each layer gets its best on validation (tried with seed 0). "
            "Default: one for all layers."
        ),
    ] = None,
    seeds: o.Seeds = 3,
    runs: Runs = Path("runs"),
    out: Folder = Path("explain"),
    quiet: o.Quiet = False,
) -> None:
    """Accuracy at every layer: put a method at one layer at a time and draw the curve.

    Each point is an ordinary run: found again if it was made before, resumed if it was interrupted. Without --layers
    all layers are tried. The star is the best layer on the validation set: its test value was not selected on. Without
    --rates all layers have the same learning rate, which may suit some better than others. Baselines run with their
    own learning rate and settings.

    \b
    inlay explain layers --model embedded:vit --task digits --method activation-prompt --seeds 3

    \b
    inlay explain layers --model embedded:vit --task digits --method activation-prompt --rates 0.001,0.003,0.01

    \b
    inlay explain layers --model embedded:resnet --task digits --method norm --layers 1,4,8 --baselines full
    """
    from inlay.methods import registry
    from inlay.workflow.explain import runs as explain_runs

    if rates is not None and fields["learning_rate"] is not None:
        raise InlayError(f"--learning-rate {fields['learning_rate']:g} and --rates {rates}: give one of the two.")
    work = partial(
        explain_runs.layers,
        layers=fields["settings"].pop("layers", None),
        baselines=registry.of_form("head") if baselines is None else o.names_in(baselines),
        rates=None if rates is None else o.numbers_in(rates, "--rates"),
        seeds=seeds,
        out=runs,
    )
    carry_out("layers", work, spec_of(model, method, fields), out, quiet, method)


@app.command("samples")
@o.takes_spec
def samples(
    model: o.Model,
    methods: Annotated[str, typer.Option(help="Methods, separated by commas: a curve each.")],
    sizes: Annotated[str, typer.Option(help="Numbers of training examples, separated by commas, as in 50,100,200.")],
    fields: dict[str, Any],
    seeds: o.Seeds = 3,
    runs: Runs = Path("runs"),
    out: Folder = Path("explain"),
    quiet: o.Quiet = False,
) -> None:
    """Accuracy against the number of training examples: of several methods, or of one method at several layers.

    With --layers a method that can be put at one layer has a curve for each of them. Below, for methods that train a
    prompt, the size of the trained prompt.

    \b
    inlay explain samples --model embedded:vit --task digits --methods full,activation-prompt --sizes 50,100,200

    \b
    inlay explain samples --model embedded:vit --task digits --methods activation-prompt --layers 1,6 --sizes 50,200
    """
    from inlay.workflow.explain import runs as explain_runs

    if fields["shots"] is not None:
        raise InlayError(f"--shots {fields['shots']} and --sizes {sizes} both say how many examples: give --sizes.")
    wanted = o.names_in(methods)
    work = partial(
        explain_runs.samples,
        methods=wanted,
        sizes=[int(number) for number in o.numbers_in(sizes, "--sizes", whole=True)],
        layers=fields["settings"].pop("layers", None),
        seeds=seeds,
        out=runs,
    )
    carry_out("samples", work, spec_of(model, wanted[0] if wanted else "", fields), out, quiet, "+".join(wanted))


@app.command("prompt-norm")
@o.takes_spec
def prompt_norm(
    model: o.Model,
    method: Annotated[str, typer.Option(help="A method that trains a prompt, such as activation-prompt.")],
    fields: dict[str, Any],
    rates: Annotated[
        str | None, typer.Option(help="Learning rates, separated by commas. Default: those the method suggests.")
    ] = None,
    seeds: o.Seeds = 3,
    runs: Runs = Path("runs"),
    out: Folder = Path("explain"),
    quiet: o.Quiet = False,
) -> None:
    """Accuracy against the norm of the trained prompt, over learning rates and layers.

    The theory of activation prompts says that deeper layers need larger prompts; here is how large they became.

    \b
    inlay explain prompt-norm --model embedded:vit --task digits --method activation-prompt --layers 1,3,6
    """
    from inlay.workflow.explain import runs as explain_runs

    if fields["learning_rate"] is not None:
        raise InlayError(f"--learning-rate {fields['learning_rate']:g}: give --rates, one or several.")
    work = partial(
        explain_runs.prompt_norm,
        layers=fields["settings"].pop("layers", None),
        rates=None if rates is None else o.numbers_in(rates, "--rates"),
        seeds=seeds,
        out=runs,
    )
    carry_out("prompt-norm", work, spec_of(model, method, fields), out, quiet, method)


@app.command("cka")
@looks
def cka(
    model: o.Model,
    fields: dict[str, Any],
    other: Annotated[str | None, typer.Option(help="The model to compare with. Default: --model with itself.")] = None,
    adapter: Adapter = None,
    other_adapter: Annotated[str | None, typer.Option(help="A finished run for the other model.")] = None,
    examples: Annotated[int, typer.Option(help="How many examples to look at, drawn by the seed.")] = 500,
    split: Split = "test",
    features: Annotated[
        str | None,
        typer.Option(
            help="What of a layer is compared: flat (all positions; default for images), mean (over positions; default "
            "for texts) or cls (the class token)."
        ),
    ] = None,
    seed: Seed = 0,
    runs: Runs = Path("runs"),
    out: Folder = Path("explain"),
    quiet: o.Quiet = False,
) -> None:
    """How alike the layers of two models are: linear CKA, unbiased, over minibatches, as a heat map.

    1 is the same up to rotation and scale, about 0 unrelated. Each model sees the same examples through its own
    processor. --batch-size is the minibatch: larger ones are less noisy and take more memory.

    \b
    inlay explain cka --model embedded:vit --other embedded:resnet --task digits

    \b
    inlay explain cka --model embedded:vit --other-adapter runs/<id> --task digits     # what adapting changed
    """
    from inlay.workflow.explain import models as explain_models
    from inlay.workflow.explain.explanation import model_name

    spec = spec_of(model, explain_models.NO_METHOD, fields, seed)
    work = partial(
        explain_models.cka,
        other=other,
        examples=examples,
        split=split,
        features=features,
        adapter=adapter,
        other_adapter=other_adapter,
        runs=runs,
    )
    with_other = f"vs-{model_name(other)}" if other else ""
    carry_out("cka", work, spec, out, quiet, with_other, run_name(adapter), run_name(other_adapter))


@app.command("attention-distance")
@looks
def attention_distance(
    model: o.Model,
    fields: dict[str, Any],
    adapter: Adapter = None,
    examples: Annotated[int, typer.Option(help="How many examples to look at, drawn by the seed.")] = 64,
    split: Split = "test",
    seed: Seed = 0,
    runs: Runs = Path("runs"),
    out: Folder = Path("explain"),
    quiet: o.Quiet = False,
) -> None:
    """How far attention reaches, per head and layer: near is local, far is global.

    Weighted by the attention, and to the key attended most; in pixels for images (the class token left out), in tokens
    for texts. In Swin models attention stays within windows, and so does the distance.

    \b
    inlay explain attention-distance --model embedded:vit --task digits

    \b
    inlay explain attention-distance --model embedded:minilm --task rotten-tomatoes --examples 200
    """
    from inlay.workflow.explain import models as explain_models

    spec = spec_of(model, explain_models.NO_METHOD, fields, seed)
    work = partial(explain_models.attention_distance, examples=examples, split=split, adapter=adapter, runs=runs)
    carry_out("attention-distance", work, spec, out, quiet, run_name(adapter))


# ------------------------------------------------------------------------------------------------------ what they share


def spec_of(model: str, method: str, fields: dict[str, Any], seed: int = 0) -> Spec:
    """The spec that the options make."""
    from inlay.records.spec import Spec

    return Spec(model=model, method=method, seed=seed, **fields)


def carry_out(
    what: str,
    work: Callable[..., Explanation],
    spec: Spec,
    out: Path,
    quiet: bool,
    *names: str,
    picture: Callable[[Any], Figure] | None = None,
    table: Callable[[Any], None] | None = None,
) -> None:
    """Do the work, if its result can be kept; then keep it, print it and say where it is.

    `names` are further parts of its folder's name. `picture` and `table` show it; by default those of `what`.
    """
    from inlay.report.charts import drawing as charts
    from inlay.report.charts import explanations as charts_explain
    from inlay.workflow.explain.explanation import folder_of

    folder = folder_of(what, spec, out, *names)
    charts.check_folder(folder, what)
    found = work(spec, progress=not quiet, say=None if quiet else show.say)
    charts_explain.write(found, folder, ["inlay", *sys.argv[1:]], picture)
    (table or SHOWN[what])(found)
    show.answer(found.sentence)
    show.say(f"figure, data and metadata in {folder}/ ({what}.png, .svg, .csv, .json)")
    failures = getattr(found, "failures", {})
    for which, why in failures.items():
        show.say(f"failed: {which}: {why}")
    if failures:
        raise typer.Exit(o.SOME_FAILED)


def run_name(adapter: str | None) -> str:
    """A run's name as part of a folder's."""
    return "" if adapter is None else Path(adapter).name


def sweep_table(found: Curves) -> None:
    """The points of a sweep, then its baselines: what the command varies and what it measures; the CSV has all."""
    from inlay.workflow.explain.words import score

    def scored(point: Point, split: str) -> str:
        mean = point.mean(split)
        return "-" if mean is None else score(mean, point.interval(split))

    points = (*found.points, *found.baselines)
    what, prompted = found.what, any(point.norms for point in points)
    columns: dict[str, list[str]] = {"method": [point.method for point in points]}
    if any(point.layer is not None for point in points):
        columns["layer"] = ["-" if point.layer is None else str(point.layer) for point in points]
    if what == "samples":
        columns["examples"] = [f"{point.examples:,}" for point in points]
    if what == "prompt-norm" or found.tried:
        columns["learning rate"] = ["-" if point.rate is None else f"{point.rate:g}" for point in points]
    columns[f"test {found.metric}"] = [scored(point, "test") for point in points]
    columns["validation"] = [scored(point, "validation") for point in points]
    if what == "layers":
        columns["trained"] = [show.count(point.trained) for point in points]
    if prompted:
        columns["norm per position"] = [show.figure(point.norm_per_position) for point in points]
    show.table(tuple(columns), list(zip(*columns.values(), strict=True)), right=range(1, len(columns)))


def cka_table(found: Any) -> None:
    """For every layer the one of the other model that is most like it; of the same model, another one."""
    import numpy as np

    table = np.array(found.values)
    others = table - np.diag(np.full(len(table), np.inf)) if found.alone else table
    rows = [
        (str(i), str(int(np.nanargmax(line))), f"{np.nanmax(line):.4f}", f"{table[i, 0]:.4f}", f"{table[i, -1]:.4f}")
        for i, line in enumerate(others)
        if np.isfinite(line).any()
    ]
    columns = ("layer", "most like", "CKA", "with the stem", f"with layer {table.shape[1] - 1}")
    show.table(columns, rows, title=f"{found.first} by {found.second}", right=range(1, 5))


def attention_table(found: Any) -> None:
    """Every block: the mean over its heads, the nearest and the farthest head, and the arg-max form."""
    from statistics import fmean

    rows = [
        (
            str(layer),
            f"{fmean(near):.2f}",
            f"{min(near):.2f}",
            f"{max(near):.2f}",
            f"{fmean(far):.2f}",
            f"{fmean(step):.2f}",
        )
        for layer, (near, far, step) in enumerate(zip(found.weighted, found.largest, found.steps, strict=True), start=1)
    ]
    unit = found.unit
    columns = ("block", f"weighted, {unit}", "least head", "farthest head", f"arg-max, {unit}", "arg-max, tokens")
    show.table(columns, rows, title=found.model, right=range(1, 6))


SHOWN: dict[str, Any] = {
    "layers": sweep_table,
    "samples": sweep_table,
    "prompt-norm": sweep_table,
    "cka": cka_table,
    "attention-distance": attention_table,
}
