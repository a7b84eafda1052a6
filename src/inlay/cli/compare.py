"""`inlay compare`: several methods, several seeds, one table."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from inlay.cli import options as o
from inlay.cli import show
from inlay.cli.explain import numbers_in
from inlay.errors import InlayError

SOME_FAILED = 1


Shots = Annotated[
    str | None,
    typer.Option(
        "--shots",
        help="Train on this many examples, drawn evenly over classes; several numbers, parted by commas, make a table "
        "each.",
        rich_help_panel=o.DATA,
    ),
]


@partial(o.takes_spec, without=("shots",))
def command(
    model: o.Model,
    methods: Annotated[str, typer.Option(help="Methods, parted by commas (see `inlay methods`).")],
    fields: dict[str, Any],
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each method, with the seeds 0, 1, ...")] = 3,
    shots_: Shots = None,
    baseline: Annotated[
        str | None, typer.Option(help="A method to test the others against, paired by seed.", rich_help_panel=o.OUTPUT)
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Also draw the result here (.png, .svg or .pdf).")] = None,
    out: o.Out = Path("runs"),
    quiet: o.Quiet = False,
) -> None:
    """Run several methods over several seeds and print what came out: mean, 95 % interval, cost.

    The exit status is 1 when a run failed; the others are in the table all the same.

    \b
    inlay compare --model embedded:vit --task digits --methods linear-probe,bias,norm,lora,full --seeds 3

    \b
    inlay compare --model roberta-large --task rte --methods warp,idpg,infoprompt,adapter,lora,full --shots 64,256
        --seeds 5 --baseline warp
    """
    from inlay.records.spec import Spec
    from inlay.report import charts
    from inlay.workflow.compare import against, compare

    if plot is not None:
        charts.check_format(plot)
    names = [name.strip() for name in methods.split(",") if name.strip()]
    spec = Spec(model=model, method=names[0] if names else "", **fields)
    if baseline is not None and baseline not in names:
        raise InlayError(f"--baseline {baseline} is not among --methods {methods}.")
    sizes = [None] if shots_ is None else [int(size) for size in numbers_in(shots_, "--shots", whole=True)]
    failed = False
    for size in sizes:
        if len(sizes) > 1:
            show.say(f"{size} examples")
        found = compare(spec.with_(shots=size), names, seeds, out, progress=not quiet, say=None if quiet else show.say)
        show.comparison(found)
        if baseline is not None:
            show.differences(against(found, baseline), baseline)
        if plot is not None:
            place = plot if len(sizes) == 1 else plot.with_stem(f"{plot.stem}-{size}")
            title = f"{spec.task or Path(str(spec.data)).name} on {model}" + (f", {size} examples" if size else "")
            charts.comparison(found.rows, place, title)
            show.say(f"drawn in {place}")
        failed = failed or bool(found.failures)
    if failed:
        raise typer.Exit(SOME_FAILED)
