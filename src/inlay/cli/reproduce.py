"""`inlay reproduce`: a table, figure or theorem of a paper, made again, and what becomes of its claims."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from inlay.cli import options as o
from inlay.cli import show
from inlay.errors import InlayError

if TYPE_CHECKING:
    from inlay.reproduce.perform import Outcome
    from inlay.reproduce.recipe import Verdict

SOME_FAILED = 1


def command(
    name: Annotated[
        str | None,
        typer.Argument(help="A recipe, as in activation-prompts/table-2; a paper, for all of its; or all."),
    ] = None,
    names: Annotated[bool, typer.Option("--list", help="Name every recipe, one a line, and stop.")] = False,
    scale: Annotated[
        str,
        typer.Option(help="paper (exact settings), here (minutes on two cores, as stated) or smoke (seconds)."),
    ] = "here",
    models_dir: Annotated[
        str | None,
        typer.Option(help="Folder with models, a folder each, by their names on the hub.", rich_help_panel=o.DATA),
    ] = None,
    data_dir: o.DataDir = None,
    fresh: Annotated[
        bool,
        typer.Option("--fresh", help="Make everything anew at scale here, also what a checkout keeps of larger runs."),
    ] = False,
    out: Annotated[
        Path, typer.Option(help="Results go to OUT/<paper>/<item>/<scale>, runs to OUT/runs.", rich_help_panel=o.OUTPUT)
    ] = Path("reproduce"),
    quiet: o.Quiet = False,
) -> None:
    """Make a paper's table, figure or theorem again, and say of each claim whether it holds: there, and here.

    Each claim is a predicate, put to the paper's own printed numbers and to ours. Runs that were made before are found
    again. With several recipes, one that cannot run does not stop the rest. The exit status is 1 if something failed.

    \b
    inlay reproduce --list
    inlay reproduce activation-prompts/lemma-1
    inlay reproduce activation-prompts/table-2 --scale here
    inlay reproduce all --scale smoke
    """
    from inlay.reproduce import catalogue, document
    from inlay.reproduce.perform import reproduce

    if names:
        rows = [
            (each.name, each.title, each.scales["here"].time, document.last_verdict(each.name))
            for each in catalogue.recipes().values()
        ]
        show.table(("recipe", "what it is", "time here", "last verdict"), rows)
        return
    if name is None:
        raise InlayError(
            "Give the name of a recipe, as in `inlay reproduce activation-prompts/table-2`; --list has all."
        )
    chosen = catalogue.choose(name)
    failed = []
    for number, recipe in enumerate(chosen, start=1):
        stated = recipe.scales.get(scale)
        if stated is not None and not quiet:
            show.say(f"[{number}/{len(chosen)}] {recipe.name}, {scale}: {stated.summary} ({stated.time})")
        try:
            outcome = reproduce(
                recipe,
                scale,
                out,
                data_dir=data_dir,
                models_dir=models_dir,
                fresh=fresh,
                progress=not quiet,
                say=None if quiet else show.say,
                command=["inlay", *sys.argv[1:]],
            )
        except InlayError as error:
            if len(chosen) == 1:
                raise
            failed.append(recipe.name)
            show.say(f"{recipe.name} cannot run: {error}")
            continue
        tell(outcome)
        if outcome.ours.failures:
            failed.append(recipe.name)
    if failed:
        show.say(f"{len(failed)} of {len(chosen)} recipes could not run, or not all of them: {', '.join(failed)}")
        raise typer.Exit(SOME_FAILED)


def tell(outcome: Outcome) -> None:
    """The paper's numbers beside ours, then every claim on both."""
    head, rows = outcome.beside()
    if rows:
        show.table(head, rows, title=f"{outcome.recipe.name}, {outcome.scale}", right=range(1, len(head)))
    claims = [
        (claim.text, printed.judgement, str(ours), ours.measured, interval(ours))
        for claim, printed, ours in outcome.verdicts
    ]
    show.table(("claim", "printed numbers", "ours", "measured", "95 % interval"), claims)
    if outcome.scale == "smoke":
        show.say("smoke shows that the recipe runs; it says nothing about the claims.")
    for note in outcome.ours.notes:
        show.say(note)
    for which, why in outcome.ours.failures.items():
        show.say(f"failed: {which}: {why}")
    show.say(f"kept in {outcome.folder} ({outcome.seconds:.0f} s)")


def interval(verdict: Verdict) -> str:
    """The interval of the number that decided; a dash where there is none."""
    return "-" if verdict.interval is None else f"[{verdict.interval[0]:.3g}, {verdict.interval[1]:.3g}]"
