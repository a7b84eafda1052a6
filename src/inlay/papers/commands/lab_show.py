"""What the commands of `inlay lab` share: how claims are told, lists of whole numbers, and a bar over the work."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from inlay.cli import options as o
from inlay.cli import show
from inlay.errors import InlayError, unknown

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from inlay.papers.findings import Finding, Tick

Out = Annotated[Path, typer.Option(help="Where the pictures go, a folder each.", rich_help_panel=o.OUTPUT)]
LAB = Path("lab")


def chosen(figure: str, figures: Sequence[str]) -> tuple[str, ...]:
    """The experiments that `--figure` asks for."""
    if figure != "all" and figure not in figures:
        raise unknown("figure", figure, (*figures, "all"))
    return tuple(figures) if figure == "all" else (figure,)


def tell(found: Finding, folder: Path, quiet: bool) -> None:
    """The claims of an experiment as a table."""
    rows = [(claim.claim, claim.measured, claim.holds) for claim in found.claims]
    show.table(("claim", "measured", "holds?"), rows, title=found.name, broken=(0,), whole=(2,))
    if not quiet:
        show.say(f"drawn in {folder}")


def sizes(text: str, option: str, example: str, least: int = 2) -> tuple[int, ...]:
    """Whole numbers from '8,12,16', each once and in order."""
    try:
        found = tuple(sorted({int(part) for part in text.split(",") if part.strip()}))
    except ValueError:
        found = ()
    if not found or found[0] < least:
        raise InlayError(f"{option} {text!r}: give whole numbers from {least} on, parted by commas, such as {example}.")
    return found


def perform(
    names: Sequence[str],
    experiment: Callable[[str, Tick], Finding],
    drawn: Mapping[str, Callable[[Finding], Figure]],
    beginnings: Callable[[str], int],
    out: Path,
    quiet: bool,
) -> None:
    """Run the experiments one after the other; draw, keep and tell each. `beginnings`: the ticks of each."""
    from inlay.papers.activation_prompts import charts as charts_theory
    from inlay.report.charts import drawing as charts
    from inlay.workflow.progress import Bar

    for name in names:
        charts.check_folder(out / name, name)
    with Bar(sum(map(beginnings, names)), "lab", "steps", show=not quiet, lines=True) as bar:

        def tick(what: str) -> None:
            bar.begin(what)
            bar.advance()

        for name in names:
            found = experiment(name, tick)
            charts_theory.write(found, out / name, ["inlay", *sys.argv[1:]], drawn)
            tell(found, out / name, quiet)
