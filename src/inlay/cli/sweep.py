"""`inlay sweep`: the comparisons that a file describes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from inlay.cli import options as o
from inlay.cli import show
from inlay.cli.compare import perform


@o.takes(engine=o.ENGINE, pace=o.PACE)
def command(
    file: Annotated[Path, typer.Argument(help="The sweep, as YAML.", show_default=False)],
    engine: dict[str, Any],
    pace: dict[str, Any],
    var: Annotated[
        list[str] | None,
        typer.Option(
            help="A value for a variable of the file, as in data=/mnt/data. May be repeated.", metavar="NAME=VALUE"
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder of runs. Default: the file's, or runs.")] = None,
    quiet: o.Quiet = False,
) -> None:
    """Make and compare all runs that a YAML file describes.

    The file lists models, tasks, methods, seeds, sizes and learning rates; all combinations are run. It is checked
    before anything starts: an unknown key is an error that names the nearest known one. Options given here override
    the file. As with compare, finished runs are never repeated.

    \b
    model: embedded:vit
    task: digits
    methods: [linear-probe, norm, lora]
    seeds: 5
    shots: [100, 400]
    learning_rates: grid
    baseline: linear-probe
    epochs: 5

    \b
    inlay sweep sweep.yaml --dry-run

    \b
    inlay sweep sweep.yaml --engine ray --address auto

    \b
    inlay sweep benchmarks/everything.yaml --var models=/mnt/models --var data=/mnt/data
    """
    from inlay import engines
    from inlay.workflow.sweep import read

    made = read(file, o.pairs_in(var or (), "--var"))
    # What the file says of an engine is for that one: workers mean nothing to a cluster, an address nothing here.
    name = engine.pop("engine")
    same = name in (None, made.engine.get("name", "local"))
    given = {"name": name, **engine}
    asked = {**(made.engine if same else {}), **{key: value for key, value in given.items() if value is not None}}
    chosen = engines.make(asked.pop("name", "local"), **asked)
    pace["minutes"] = made.minutes if pace["minutes"] is None else pace["minutes"]
    plans = made.plan(show.nothing if quiet else show.say)
    perform(plans, chosen, out or Path(made.out), made.baseline, pace=pace, quiet=quiet)
