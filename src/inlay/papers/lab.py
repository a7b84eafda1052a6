"""What the commands of `inlay lab` share: options, the work under a progress bar, and how claims are printed."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from inlay.cli import options as o
from inlay.cli import show
from inlay.errors import InlayError, unknown

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from inlay.papers.findings import Finding, Tick
    from inlay.workflow.progress import Bar

Out = Annotated[Path, typer.Option(help="Folder for the figures, one subfolder each.", rich_help_panel=o.OUTPUT)]
LAB = Path("lab")


def choose_figures(figure: str, figures: Sequence[str]) -> tuple[str, ...]:
    """The experiments that `--figure` asks for."""
    if figure != "all" and figure not in figures:
        raise unknown("figure", figure, (*figures, "all"))
    return tuple(figures) if figure == "all" else (figure,)


def parse_sizes(text: str, option: str, example: str, least: int = 2) -> tuple[int, ...]:
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
    ticks: Callable[[str], int],
    drawn: Mapping[str, Callable[[Finding], Figure]],
    out: Path,
    quiet: bool,
) -> None:
    """Run the experiments one after the other; draw, keep and print each. `ticks`: how many steps each announces."""
    from inlay.papers.experiment_files import write
    from inlay.report.charts import drawing as charts
    from inlay.workflow.progress import Bar

    for name in names:
        charts.check_folder(out / name, name)
    with Bar(sum(map(ticks, names)), "lab", "steps", show=not quiet, lines=True) as bar:
        for name in names:
            found = experiment(name, tick_of(bar))
            write(found, out / name, ["inlay", *sys.argv[1:]], drawn)
            print_claims(found, out / name, quiet)


def perform_lab(
    lab: Any,
    setting: Any,
    names: Sequence[str],
    drawn: Mapping[str, Callable[[Finding], Figure]],
    out: Path,
    quiet: bool,
) -> None:
    """The same for a module `lab` that has its experiments in `EXPERIMENTS` and counts their steps in `beginnings`."""

    def experiment(name: str, tick: Tick) -> Finding:
        return lab.EXPERIMENTS[name](setting, tick)

    perform(names, experiment, lambda name: lab.beginnings(name, setting), drawn, out, quiet)


def tick_of(bar: Bar) -> Tick:
    """Announces a step on a bar, which moves on."""

    def tick(what: str) -> None:
        bar.begin(what)
        bar.advance()

    return tick


def print_claims(found: Finding, folder: Path, quiet: bool) -> None:
    """The claims of an experiment as a table."""
    rows = [(claim.claim, claim.measured, str(claim)) for claim in found.claims]
    show.table(("claim", "measured", "holds?"), rows, title=found.name, broken=(0,), whole=(2,))
    if not quiet:
        show.say(f"drawn in {folder}")
