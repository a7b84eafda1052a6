"""`inlay compare`: several methods, several seeds, one table, one page."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from inlay.cli import options as o
from inlay.cli import show
from inlay.cli.explain.commands import names_in, numbers_in
from inlay.errors import unknown

if TYPE_CHECKING:
    from inlay.workflow.comparison import Comparison

SOME_FAILED = 1
WHERE = "Where it runs"
REPORT = "report.html"
FULL = "full"

Shots = Annotated[
    str | None,
    typer.Option(
        "--shots",
        help="Train on this many examples, drawn evenly over classes; several numbers, parted by commas, make a table "
        "each, and full is all of them, as in 64,256,full.",
        rich_help_panel=o.DATA,
    ),
]
Rates = Annotated[
    str,
    typer.Option(
        help="default: each method's own rate. grid: each method's own grid; or numbers for all, as in 1e-3,3e-3. Of "
        "several, each method's best on held-out training data counts.",
        rich_help_panel=o.TRAINING,
    ),
]
Baseline = Annotated[
    str | None, typer.Option(help="A method to test the others against, paired by seed.", rich_help_panel=o.OUTPUT)
]
Minutes = Annotated[
    float | None,
    typer.Option(help="Begin nothing after this long, and stop what runs; the same command goes on.", min=0),
]
Retry = Annotated[bool, typer.Option("--retry-failed", help="Try runs again that are on record as failed.")]
EngineName = Annotated[
    str, typer.Option("--engine", help="local: this machine; ray: a Ray cluster.", rich_help_panel=WHERE)
]
Workers = Annotated[
    int | None, typer.Option(help="Runs at a time on this machine; they share its cores.", min=1, rich_help_panel=WHERE)
]
Cpus = Annotated[float | None, typer.Option(help="Cores of each run.", rich_help_panel=WHERE)]
Gpus = Annotated[
    float | None,
    typer.Option(help="GPUs of each run: 1, a part of one to share it, or 0 for none.", rich_help_panel=WHERE),
]
Address = Annotated[
    str | None,
    typer.Option(help="A Ray cluster: host:port, or auto for this machine's. Default: one of its own.",
                 rich_help_panel=WHERE),
]  # fmt: skip
DryRun = Annotated[bool, typer.Option("--dry-run", help="Check what was asked, print the runs, and stop.")]
Plot = Annotated[Path | None, typer.Option(help="Also draw the result here (.png, .svg or .pdf).")]


@partial(o.takes_spec, without=("shots",))
def command(
    model: o.Model,
    methods: Annotated[
        str, typer.Option(help="Methods, parted by commas (see `inlay methods`); or all that fit: all.")
    ],
    fields: dict[str, Any],
    seeds: Annotated[
        int, typer.Option(min=1, max=o.MOST_SEEDS, help="Runs of each method, with the seeds 0, 1, ...")
    ] = 3,
    shots_: Shots = None,
    learning_rates: Rates = "default",
    baseline: Baseline = None,
    minutes: Minutes = None,
    retry_failed: Retry = False,
    engine_: EngineName = "local",
    workers: Workers = None,
    cpus: Cpus = None,
    gpus: Gpus = None,
    address: Address = None,
    dry_run: DryRun = False,
    plot: Plot = None,
    out: o.Out = Path("runs"),
    quiet: o.Quiet = False,
) -> None:
    """Run several methods over several seeds and print what came out: mean, 95 % interval, cost, and what differs.

    Every run is kept under --out; finished ones are never repeated and interrupted ones go on. Beside them:
    report.html to look at, comparison.json and comparison.csv for machines. The exit status is 1 when a run failed;
    the others are in the table all the same.

    \b
    inlay compare --model embedded:vit --task digits --methods linear-probe,bias,norm,lora,full --seeds 3

    \b
    inlay compare --model embedded:vit --task digits --methods all --seeds 5 --learning-rates grid --workers 2
        --minutes 60 --baseline lora

    \b
    inlay compare --model roberta-large --task rte --methods warp,idpg,infoprompt,adapter,lora,full --shots 64,256
        --seeds 5 --baseline warp
    """
    from inlay import engines
    from inlay.records.spec import Spec
    from inlay.report.charts import drawing as charts
    from inlay.workflow.compare import carry_out
    from inlay.workflow.planning import check_baseline, plan

    if plot is not None:
        charts.check_format(plot)
    names = [name.strip() for name in methods.split(",") if name.strip()]
    spec = Spec(model=model, method=names[0] if names else "", **fields)
    sizes = [None] if shots_ is None else sizes_in(shots_)
    rates = learning_rates if learning_rates.isalpha() else numbers_in(learning_rates, "--learning-rates")
    say = show.nothing if quiet else show.say
    asked = engines.make(engine_, workers=workers, cpus=cpus, gpus=gpus, address=address)
    plans = [plan(spec, names, seeds, shots=sizes, rates=rates, say=say)]
    check_baseline(baseline, plans)
    if dry_run:
        show.plan(plans)
        return
    if not quiet:
        show.left_out(plans[0].left_out)
    with asked as engine:
        found = carry_out(plans, out, engine, minutes=minutes, retry_failed=retry_failed, progress=not quiet, say=say)
    conclude(found, out, baseline=baseline, plot=plot, quiet=quiet)


def sizes_in(text: str) -> list[int | None]:
    """Sizes of the training set, parted by commas; `full` (None) is all of it."""
    parts = names_in(text)
    numbers = [part for part in parts if part != FULL]
    for word in (part for part in numbers if part.isalpha()):
        hint = f"Or give whole numbers, as in --shots 64,256,full; given was {text!r}."
        raise unknown("size", word, (FULL,), hint)
    if numbers or not parts:
        numbers_in(",".join(numbers), "--shots", whole=True)
    return [None if part == FULL else int(part) for part in parts]


def conclude(
    found: Sequence[Comparison], out: Path, *, baseline: str | None, plot: Path | None = None, quiet: bool = False
) -> None:
    """Print the tables, write the page and the files; the exit status says whether something failed."""
    from inlay.report.charts import drawing as charts
    from inlay.report.collect import of_comparisons
    from inlay.report.html import write_report
    from inlay.workflow.comparison_files import differences, keep

    for number, each in enumerate(found):
        if len(found) > 1:
            show.say(each.title)
        if each.rows:
            show.comparison(each)
        if told := differences(each, baseline):
            show.differences(told, str(baseline))
        show.conclusions(each, baseline)
        if plot is not None and each.rows:
            place = plot if len(found) == 1 else plot.with_stem(f"{plot.stem}-{each.spec.shots or number}")  # type: ignore[union-attr]
            charts.comparison(each.rows, place, each.title)
            show.say(f"drawn in {place}")
    written = keep(found, out, baseline=baseline, command=["inlay", *sys.argv[1:]])
    if any(each.rows for each in found):
        written.append(write_report(out, out / REPORT, found=of_comparisons(found, baseline)))
    if not quiet:
        show.say(f"written: {', '.join(map(str, written))}")
    if any(each.failures or each.unfinished or not each.complete for each in found):
        raise typer.Exit(SOME_FAILED)
