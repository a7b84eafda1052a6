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
from inlay.errors import unknown

if TYPE_CHECKING:
    from inlay.engines import Engine
    from inlay.workflow.comparison import Comparison
    from inlay.workflow.planning import Planned

REPORT = "report.html"
FULL = "full"


@partial(o.takes_spec, without=("shots",), joint=True, engine=o.ENGINE, pace=o.PACE)
def command(
    model: o.Model,
    methods: Annotated[
        str, typer.Option(help="Methods, separated by commas (see `inlay methods`); or all that fit: all.")
    ],
    fields: dict[str, Any],
    engine: dict[str, Any],
    pace: dict[str, Any],
    seeds: o.Seeds = 3,
    shots_: Annotated[
        str | None,
        typer.Option(
            "--shots",
            help="Train on this many examples, drawn evenly over classes; several numbers, separated by commas, make a "
            "table each, and full is all of them, as in 64,256,full.",
            rich_help_panel=o.DATA,
        ),
    ] = None,
    learning_rates: Annotated[
        str,
        typer.Option(
            help="default: each method's own learning rate. grid: each method's own grid; or numbers for all, as in "
            "1e-3,3e-3. Of several, each method's best on the validation set counts.",
            rich_help_panel=o.TRAINING,
        ),
    ] = "default",
    baseline: Annotated[
        str | None, typer.Option(help="A method to test the others against, paired by seed.", rich_help_panel=o.OUTPUT)
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Also draw the result here (.png, .svg or .pdf).")] = None,
    out: o.Out = Path("runs"),
    quiet: o.Quiet = False,
) -> None:
    """Compare several methods over several seeds.

    Prints each method's mean with its 95 % interval, its cost, and which methods differ significantly. Every run is
    kept under --out: finished ones are never repeated, interrupted ones are resumed. Beside them: report.html to look
    at, comparison.json and comparison.csv for programs. The exit status is 1 when a run failed; the table has the
    others.

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
    from inlay.workflow.planning import plan

    if plot is not None:
        charts.check_format(plot)
    names = o.names_in(methods)
    spec = Spec(model=model, method=names[0] if names else "", **fields)
    sizes = [None] if shots_ is None else sizes_in(shots_)
    rates = learning_rates if learning_rates.isalpha() else o.numbers_in(learning_rates, "--learning-rates")
    asked = engines.make(engine.pop("engine") or "local", **engine)
    plans = [plan(spec, names, seeds, shots=sizes, rates=rates, say=show.nothing if quiet else show.say)]
    perform(plans, asked, out, baseline, pace=pace, quiet=quiet, plot=plot)


def perform(
    plans: Sequence[Planned],
    engine: Engine,
    out: Path,
    baseline: str | None,
    *,
    pace: dict[str, Any],
    quiet: bool,
    plot: Path | None = None,
) -> None:
    """Make the planned runs, or only list them; then say what came out."""
    from inlay.workflow.compare import carry_out
    from inlay.workflow.planning import check_baseline

    check_baseline(baseline, plans)
    if pace.pop("dry_run"):
        from inlay.workflow.forecast import forecast

        found = forecast([spec for planned in plans for spec in planned.specs], out)
        show.plan(plans, found, getattr(engine, "workers", 1) or 1)
        return
    if not quiet:
        for planned in plans:
            show.left_out(planned.left_out)
    say = show.nothing if quiet else show.say
    with o.resumable(), engine as ready:
        compared = carry_out(plans, out, engine=ready, progress=not quiet, say=say, **pace)
    conclude(compared, out, baseline=baseline, plot=plot, quiet=quiet)


def sizes_in(text: str) -> list[int | None]:
    """Sizes of the training set, separated by commas; `full` (None) is all of it."""
    parts = o.names_in(text)
    numbers = [part for part in parts if part != FULL]
    for word in (part for part in numbers if part.isalpha()):
        hint = f"Or give whole numbers, as in --shots 64,256,full; given was {text!r}."
        raise unknown("size", word, (FULL,), hint)
    if numbers or not parts:
        o.numbers_in(",".join(numbers), "--shots", whole=True)
    return [None if part == FULL else int(part) for part in parts]


def conclude(
    found: Sequence[Comparison], out: Path, *, baseline: str | None, plot: Path | None = None, quiet: bool = False
) -> None:
    """Print the tables, write the page and the files; the exit status says whether something failed."""
    from inlay.report.charts import drawing as charts
    from inlay.report.collect import collect_comparisons
    from inlay.report.comparison_files import differences, keep
    from inlay.report.html import write_report
    from inlay.report.over_tasks import in_words, rankings

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
    gathered = collect_comparisons(found, baseline) if any(each.rows for each in found) else None
    ranked = [] if gathered is None else rankings(gathered, 2)
    for line in in_words(ranked):
        show.say(line)
    written = keep(found, out, baseline=baseline, ranked=ranked, command=["inlay", *sys.argv[1:]])
    if gathered is not None:
        written.append(write_report(out, out / REPORT, found=gathered))
    if not quiet:
        show.say(f"written: {', '.join(map(str, written))}")
    if any(each.failures or each.unfinished or not each.complete for each in found):
        raise typer.Exit(o.SOME_FAILED)
