"""The commands, put together."""

from __future__ import annotations

import importlib
from typing import Annotated

import typer

from inlay.cli import (
    chat,
    compare,
    compress,
    doctor,
    embed,
    evaluate,
    export,
    gather,
    generate,
    merge,
    methods,
    models,
    predict,
    pull,
    push,
    report,
    runs,
    serve,
    sweep,
    tasks,
    tune,
)
from inlay.cli.explain import commands as explain

app = typer.Typer(
    name="inlay",
    help="Adapt large frozen models by setting small trained pieces into them.\n\n"
    "Start with `inlay tune --model embedded:vit --task digits --method lora`, then read what it printed.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def show_version(wanted: bool) -> None:
    """Print the version and stop."""
    if wanted:
        from inlay import __version__

        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=show_version, is_eager=True)
    ] = False,
) -> None:
    """Options of every command."""


# Nothing of the core imports the papers: their commands are found by name.
reproduce, figures, lab = (
    importlib.import_module(f"inlay.papers.commands.{name}") for name in ("reproduce", "explain", "lab")
)
listed = (
    tune,
    compare,
    sweep,
    predict,
    evaluate,
    embed,
    compress,
    chat,
    reproduce,
    export,
    merge,
    gather,
    push,
    pull,
    generate,
    report,
    serve,
    methods,
    tasks,
    models,
    doctor,
)
for module in listed:
    app.command(module.__name__.rpartition(".")[2])(module.command)
for name, command in figures.COMMANDS.items():
    explain.app.command(name)(command)
app.add_typer(explain.app, name="explain")
app.add_typer(lab.app, name="lab")
app.add_typer(runs.app, name="runs")
