"""The commands, put together."""

from __future__ import annotations

import importlib
from typing import Annotated

import typer

from inlay.cli import (
    compare,
    compress,
    evaluate,
    export,
    methods,
    models,
    predict,
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


app.command("tune")(tune.command)
app.command("compare")(compare.command)
app.command("sweep")(sweep.command)
app.command("predict")(predict.command)
app.command("evaluate")(evaluate.command)
app.command("compress")(compress.command)
# Nothing of the core imports the papers: their commands are found by name.
app.command("reproduce")(importlib.import_module("inlay.papers.commands.reproduce").command)
app.command("export")(export.command)
app.command("report")(report.command)
app.command("serve")(serve.command)
app.command("methods")(methods.command)
app.command("tasks")(tasks.command)
app.command("models")(models.command)
for name, command in importlib.import_module("inlay.papers.commands.explain").COMMANDS.items():
    explain.app.command(name)(command)
app.add_typer(explain.app, name="explain")
app.add_typer(importlib.import_module("inlay.papers.commands.lab").app, name="lab")
app.add_typer(runs.app, name="runs")
