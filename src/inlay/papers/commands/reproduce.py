"""`inlay reproduce`: a table, figure or theorem of a paper, made again, and what becomes of its claims."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from inlay.cli import options as o
from inlay.cli import show
from inlay.errors import InlayError, first_line
from inlay.papers.commands.blocks import in_blocks

if TYPE_CHECKING:
    from inlay.papers.reproduce.bench import Bench
    from inlay.papers.reproduce.perform import Reproduction
    from inlay.papers.reproduce.recipe import Recipe, Verdict

SOME_FAILED = 1


def command(
    name: Annotated[
        str | None,
        typer.Argument(help="A recipe, as in activation-prompts/table-2; a paper, for all of its; or all."),
    ] = None,
    names: Annotated[bool, typer.Option("--list", help="Name every recipe and stop.")] = False,
    scale: Annotated[
        str,
        typer.Option(
            help="paper (the paper's settings, as far as it prints them), here (minutes on two cores, as stated; some "
            "read kept results of larger runs) or smoke (seconds)."
        ),
    ] = "here",
    models_dir: Annotated[
        str | None,
        typer.Option(help="Folder with models, a folder each, by their names on the hub.", rich_help_panel=o.DATA),
    ] = None,
    data_dir: o.DataDir = None,
    fresh: Annotated[
        bool,
        typer.Option("--fresh", help="At scale here run everything; read no kept results of larger runs."),
    ] = False,
    workers: Annotated[
        int, typer.Option(help="Runs at a time on this machine; each has its part of the cores and of the GPUs.")
    ] = 1,
    out: Annotated[
        Path, typer.Option(help="Results go to OUT/<paper>/<item>/<scale>, runs to OUT/runs.", rich_help_panel=o.OUTPUT)
    ] = Path("reproduce"),
    quiet: o.Quiet = False,
) -> None:
    """Make a paper's table, figure or theorem again, and say of each claim whether it holds: there, and here.

    Each claim is a predicate, put to the paper's own printed numbers and to ours. Runs that were made before are found
    again, and at scale here some recipes read kept results of larger ones: that is said, and --fresh runs
    them. A run that fails leaves its cell empty; a recipe that cannot run does not stop the others. The exit status is
    1 if something failed.

    \b
    inlay reproduce --list
    inlay reproduce activation-prompts/lemma-1
    inlay reproduce activation-prompts/table-2 --scale here
    inlay reproduce all --scale smoke
    """
    from inlay.papers.reproduce import catalogue
    from inlay.papers.reproduce.bench import Bench

    if names:
        print_list()
        return
    if name is None:
        raise InlayError(
            "Give the name of a recipe, as in `inlay reproduce activation-prompts/table-2`; --list has all."
        )
    chosen = catalogue.choose(name)
    say = silent if quiet else show.say
    failed = reproduce_all(chosen, scale, Bench(out, data_dir, models_dir, not quiet, say, workers), fresh)
    if failed:
        show.say(f"{len(failed)} of {len(chosen)} recipes could not run, or not all of them: {', '.join(failed)}")
        raise typer.Exit(SOME_FAILED)


def silent(line: str) -> None:
    """Says nothing."""


def reproduce_all(chosen: Sequence[Recipe], scale: str, bench: Bench, fresh: bool) -> list[str]:
    """Make the recipes one after the other and print each; the names of those that could not run, or not wholly."""
    from inlay.papers.reproduce.perform import known_scale, reproduce

    stated_scale = known_scale(scale)
    failed = []
    for number, recipe in enumerate(chosen, start=1):
        stated = recipe.scales[stated_scale]
        bench.say(f"[{number}/{len(chosen)}] {recipe.name}, {scale}: {stated.summary} ({stated.time})")
        try:
            outcome = reproduce(recipe, scale, bench, fresh=fresh, command=["inlay", *sys.argv[1:]])
        except Exception as error:  # whatever it is: the other recipes go on
            if len(chosen) == 1:
                raise
            failed.append(recipe.name)
            why = str(error) if isinstance(error, InlayError) else f"{type(error).__name__}: {first_line(error)}"
            show.say(f"{recipe.name} cannot run: {why}")
            continue
        print_reproduction(outcome)
        if outcome.ours.failures:
            failed.append(recipe.name)
    return failed


def print_list() -> None:
    """Every recipe on a line, with the latest verdicts at scale here."""
    from inlay.papers.reproduce import catalogue, latest
    from inlay.papers.reproduce.recipe import KINDS

    rows = []
    for each in catalogue.recipes().values():
        verdicts = latest.last_verdicts(each)
        counts = (
            ["-"] * len(KINDS)
            if verdicts is None
            else [str(number) for number in latest.count_verdicts(verdicts).values()]
        )
        rows.append((each.name, *counts, each.title, each.scales["here"].time))
    head = ("recipe", "holds", "fails", *KINDS[2:], "what it is", "time here")
    last = 1 + len(KINDS)
    show.table(head, rows, right=range(1, last), whole=range(last), cut=(last, last + 1))


def print_reproduction(outcome: Reproduction) -> None:
    """The paper's numbers beside ours, what one must know of them, then every claim on both."""
    from inlay.papers.reproduce import kept

    for note in outcome.read:
        show.say(f"Read, not run (--fresh runs it): {note.removeprefix(kept.READ).lstrip()}")
    head, rows = outcome.beside()
    if rows:
        show.say(outcome.heading)
        in_blocks(head, rows, names=1 + (head[0] == "panel"), pairs=True)
    for note in outcome.notes:
        show.say(f"note: {note}")
    claims = [
        (claim.text, printed.kind, str(ours), ours.measured, interval(ours))
        for claim, printed, ours in outcome.verdicts
    ]
    show.table(("claim", "printed numbers", "ours", "measured", "95\u00a0% interval"), claims, whole=(4,), broken=(0,))
    if outcome.scale == "smoke":
        show.say("smoke shows that the recipe runs; it says nothing about the claims.")
    for which, why in outcome.ours.failures.items():
        show.say(f"failed: {which}: {why}")
    show.say(f"kept in {outcome.folder} ({outcome.seconds:.0f} s)")


def interval(verdict: Verdict) -> str:
    """The interval of the number that decided; a dash where there is none."""
    return "-" if verdict.interval is None else f"[{verdict.interval[0]:.3g}, {verdict.interval[1]:.3g}]"
