"""`inlay compare`: several methods, several seeds, one table."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from inlay.cli import options as o
from inlay.cli import show

SOME_FAILED = 1


@o.takes_spec
def command(
    model: o.Model,
    methods: Annotated[str, typer.Option(help="Methods, parted by commas (see `inlay methods`).")],
    fields: dict[str, Any],
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each method, with the seeds 0, 1, ...")] = 3,
    plot: Annotated[Path | None, typer.Option(help="Also draw the result here (.png, .svg or .pdf).")] = None,
    out: o.Out = Path("runs"),
    quiet: o.Quiet = False,
) -> None:
    """Run several methods over several seeds and print what came out: mean, 95 % interval, cost.

    The exit status is 1 when a run failed; the others are in the table all the same.

    \b
    inlay compare --model embedded:vit --task digits --methods linear-probe,bias,norm,lora,full --seeds 3
    """
    from inlay.records.spec import Spec
    from inlay.report import charts
    from inlay.workflow.compare import compare

    if plot is not None:
        charts.check_format(plot)
    names = [name.strip() for name in methods.split(",") if name.strip()]
    spec = Spec(model=model, method=names[0] if names else "", **fields)
    found = compare(spec, names, seeds, out, progress=not quiet, say=None if quiet else show.say)
    show.comparison(found)
    if plot is not None:
        charts.comparison(found.rows, plot, f"{spec.task or Path(str(spec.data)).name} on {model}")
        show.say(f"drawn in {plot}")
    if found.failures:
        raise typer.Exit(SOME_FAILED)
