"""`inlay lab decomposable`: section 4 and appendices A and B of Multi-LoRA, computed and drawn."""

from __future__ import annotations

from typing import Annotated

import typer

from inlay.cli import options as o
from inlay.papers.lab import LAB, Out, choose_figures, parse_sizes, perform_lab

FIGURES = ("lemmas-4", "counterexample-a1", "table-3")


def command(
    figure: Annotated[str, typer.Option(help=f"{', '.join(FIGURES)} or all.")] = "all",
    tasks: Annotated[str, typer.Option(help="lemmas-4: numbers k of tasks, separated by commas.")] = "1,2,4,8,16,32",
    seeds: Annotated[
        int, typer.Option(min=1, max=o.MOST_SEEDS, help="lemmas-4: losses of each kind, with the seeds 0, 1, ...")
    ] = 5,
    samples: Annotated[int, typer.Option(min=2, help="table-3: draws for each (n, d).")] = 10000,
    out: Out = LAB,
    quiet: o.Quiet = False,
) -> None:
    """Section 4 and appendices A and B of Multi-LoRA, measured: a loss that k tasks share in part.

    All of them take well under a minute.

    \b
    inlay lab decomposable
    inlay lab decomposable --figure table-3 --samples 1000
    """
    names = choose_figures(figure, FIGURES)
    counts = parse_sizes(tasks, "--tasks", "1,2,4,8", least=1)
    from inlay.papers.multi_lora import charts
    from inlay.papers.multi_lora.theory import lab

    setting = lab.DecomposableSetting(counts, seeds, samples)
    perform_lab(lab, setting, names, charts.DRAWN, out, quiet)
