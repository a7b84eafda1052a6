"""`inlay runs`: look at what was run, and clear away."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from inlay.cli import options as o
from inlay.cli import show
from inlay.console import visible

app = typer.Typer(help="List, show and remove runs.", no_args_is_help=True)
Id = Annotated[str, typer.Argument(help="A run's name, an unambiguous part of it, or its folder.")]


@app.command("list")
def list_(out: o.Out = Path("runs")) -> None:
    """List the runs in a folder, oldest first."""
    from inlay.records.store import Store

    store = Store(out)
    runs = store.list()
    failed = {run.id: run.failed_tasks for run in runs if run.failed_tasks}
    show.table(
        ("run", "status", "result", "trained"),
        [(run.id, run.status + ", in part" * bool(failed.get(run.id)), *show.result(run)) for run in runs],
        right=(3,),
    )
    for name, tasks in failed.items():
        show.say(f"{name}: {', '.join(tasks)} failed in training. `inlay runs show {name}` says why.")
    for problem in store.problems():
        show.say(f"Unreadable: {problem}")
    if not runs:
        show.say(f"No runs in {out}. `inlay tune` makes one.")


@app.command("show")
def show_(id: Id, out: o.Out = Path("runs")) -> None:
    """Show one run: its spec, results, cost and versions."""
    from inlay.records.store import Store

    run = Store(out).get(id)
    if run.status == "finished":
        run.verify()
    show.whole_run(run)


@app.command("rm")
def remove(
    ids: Annotated[list[str], typer.Argument(help="Names of runs, or unambiguous parts of them.")],
    out: o.Out = Path("runs"),
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Remove runs for good."""
    from inlay.records.store import Store

    store = Store(out)
    names = [store.match(id).name for id in ids]
    if not yes:
        typer.confirm(visible(f"Remove {', '.join(names)} from {out}?"), abort=True)
    for name in names:
        store.remove(name)
        show.say(f"removed {name}")
