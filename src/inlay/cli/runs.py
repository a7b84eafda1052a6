"""`inlay runs`: look at what was run, and clear away."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from inlay.cli import options as o
from inlay.cli import show
from inlay.console import visible
from inlay.report.columns import columns_in

app = typer.Typer(help="List, show, export and remove runs.", no_args_is_help=True)
HEAD = ("run", "status", "made", "learning rate", "examples")
Id = Annotated[str, typer.Argument(help="A run's name, an unambiguous part of it, or its folder.")]


@app.command("list")
def list_(
    out: o.Out = Path("runs"),
    filter_: Annotated[
        list[str] | None,
        typer.Option(
            "--filter",
            help="Only runs with this in their name, or with this field, as in method=lora, status=failed or shots=64. "
            "May be repeated: all must hold.",
        ),
    ] = None,
    sort: Annotated[str, typer.Option(help="date, name, result (the best first), rate or examples.")] = "date",
) -> None:
    """List the runs in a folder, oldest first.

    \b
    inlay runs list --filter method=lora --filter status=finished --sort result
    """
    from inlay.errors import InlayError
    from inlay.records.store import Store
    from inlay.workflow.run_listing import choose

    runs, problems = Store(out).read()
    runs, known = choose(runs, filter_ or (), sort), len(runs)
    if filter_:
        problems = {}
    rows: list[tuple[str, ...]] = []
    failed: dict[str, dict[str, str]] = {}
    for run in runs:
        try:
            with run.reading():
                found, status = show.result(run), run.status
        except InlayError as error:
            problems[run.id] = str(error)
            continue
        failed |= {run.id: run.failed_tasks} if run.failed_tasks else {}
        rows.append((run.id, status + ", in part" * (run.id in failed), *show.how_made(run), *found))
    titles = (*HEAD, "result", *(column.titles["list"] for column in columns_in("list")))
    rows += [(name, "unreadable", *("-" for _ in titles[2:])) for name in problems]
    show.table(titles, rows, right=(*range(3, len(HEAD)), *range(len(HEAD) + 1, len(titles))))
    for name, tasks in failed.items():
        show.say(f"{name}: {', '.join(tasks)} failed in training. `inlay runs show {name}` says why.")
    for name, problem in problems.items():
        show.say(f"{name} is unreadable: {problem}")
    if filter_:
        show.say(f"{len(rows)} of {known} runs")
    elif not rows:
        show.say(f"No runs in {out}. `inlay tune` makes one.")


@app.command("show")
def show_(id: Id, out: o.Out = Path("runs")) -> None:
    """Show one run: its spec, results, cost and versions."""
    from inlay.records.store import Store

    run = Store(out).get(id)
    if run.status == "finished":
        run.verify()
    with run.reading():
        show.whole_run(run)
    if run.unvouched:
        show.say(
            f"Nothing vouches for {' and '.join(run.unvouched)}: an earlier inlay wrote this run without their digests."
        )


@app.command("export")
def export(
    runs: Annotated[Path, typer.Argument(help="Folder of runs; or of such folders.")] = Path("runs"),
    output: Annotated[Path, typer.Option(help="The file.", rich_help_panel=o.OUTPUT)] = Path("runs.parquet"),
) -> None:
    """Write all runs into one Parquet file, a row a run.

    It has spec, metrics, cost, versions, commit and command of each, and which learning rate was chosen. Absolute paths
    are cut to their names. docs/runs.md describes the columns.

    \b
    inlay runs export runs/ --output runs.parquet
    """
    from inlay.report.collect import collect
    from inlay.report.raw_runs import check_parquet, write_parquet

    check_parquet(output)
    found = collect(runs)
    columns = write_parquet(found, output)
    many = len(found.results) + len(found.unfinished)
    show.say(f"{many} run{'s' * (many != 1)} in {output}: {columns} columns")
    for problem in found.damaged:
        show.say(f"left out: {problem}")


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
