"""`inlay lab decomposable`: section 4 and appendices A and B of Multi-LoRA, computed and drawn."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from inlay.cli import options as o
from inlay.papers.commands import lab_show

if TYPE_CHECKING:
    from inlay.papers.findings import Finding, Tick

FIGURES = ("lemmas-4", "counterexample-a1", "table-3")


def command(
    figure: Annotated[str, typer.Option(help=f"{', '.join(FIGURES)} or all.")] = "all",
    tasks: Annotated[str, typer.Option(help="lemmas-4: numbers k of tasks, parted by commas.")] = "1,2,4,8,16,32",
    seeds: Annotated[
        int, typer.Option(min=1, max=o.MOST_SEEDS, help="lemmas-4: losses of each kind, with the seeds 0, 1, ...")
    ] = 5,
    samples: Annotated[int, typer.Option(min=2, help="table-3: draws for each (n, d).")] = 10000,
    out: lab_show.Out = lab_show.LAB,
    quiet: o.Quiet = False,
) -> None:
    """Section 4 and appendices A and B of Multi-LoRA, measured: a loss that k tasks share in part.

    All of them take well under a minute.

    \b
    inlay lab decomposable
    inlay lab decomposable --figure table-3 --samples 1000
    """
    names = lab_show.chosen(figure, FIGURES)
    counts = lab_show.sizes(tasks, "--tasks", "1,2,4,8", least=1)
    from inlay.papers.multi_lora import charts as charts_decomposable
    from inlay.papers.multi_lora.theory import lab

    setting = lab.Setting(counts, seeds, samples)

    def experiment(name: str, tick: Tick) -> Finding:
        return lab.EXPERIMENTS[name](setting, tick)

    lab_show.perform(names, experiment, charts_decomposable.DRAWN, lab.beginnings, out, quiet)
