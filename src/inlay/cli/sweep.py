"""`inlay sweep`: the comparisons that a file describes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from inlay.cli import compare as c
from inlay.cli import options as o
from inlay.cli import show


def command(
    file: Annotated[Path, typer.Argument(help="The sweep, as YAML.", show_default=False)],
    engine: Annotated[
        str | None, typer.Option(help="local: this machine; ray: a Ray cluster.", rich_help_panel=c.WHERE)
    ] = None,
    workers: c.Workers = None,
    cpus: c.Cpus = None,
    gpus: c.Gpus = None,
    address: c.Address = None,
    minutes: c.Minutes = None,
    retry_failed: c.Retry = False,
    dry_run: c.DryRun = False,
    out: Annotated[Path | None, typer.Option(help="Folder of runs. Default: the file's, or runs.")] = None,
    quiet: o.Quiet = False,
) -> None:
    """Make all runs of a file: models x tasks x methods x seeds x sizes x learning rates.

    The file is checked whole before anything starts; a key that does not exist is an error with the nearest one that
    does. What is given here goes before what the file says. As with compare, finished runs are never repeated.

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
    """
    from inlay import engines
    from inlay.workflow.compare import carry_out
    from inlay.workflow.planning import check_baseline
    from inlay.workflow.sweep import read

    made = read(file)
    say = show.nothing if quiet else show.say
    place = out or Path(made.out)
    given = {"name": engine, "workers": workers, "cpus": cpus, "gpus": gpus, "address": address}
    # What the file says of an engine is for that one: workers mean nothing to a cluster, an address nothing here.
    same = engine in (None, made.engine.get("name", "local"))
    asked = {**(made.engine if same else {}), **{key: value for key, value in given.items() if value is not None}}
    chosen = engines.make(asked.pop("name", "local"), **asked)
    plans = made.plan(say)
    check_baseline(made.baseline, plans)
    if dry_run:
        show.plan(plans)
        return
    if not quiet:
        for planned in plans:
            show.left_out(planned.left_out)
    with o.resumable(), chosen as ready:
        found = carry_out(
            plans,
            place,
            ready,
            minutes=made.minutes if minutes is None else minutes,
            retry_failed=retry_failed,
            progress=not quiet,
            say=say,
        )
    c.conclude(found, place, baseline=made.baseline, quiet=quiet)
