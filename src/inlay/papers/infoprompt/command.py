"""`inlay lab softmax-regression`: appendix C and D of InfoPrompt, computed and drawn."""

from __future__ import annotations

from typing import Annotated

import typer

from inlay.cli import options as o
from inlay.papers.lab import LAB, Out, choose_figures, parse_sizes, perform_lab

FIGURES = ("lemmas-c15-c16", "theorem-d1", "newton-time")


def command(
    figure: Annotated[str, typer.Option(help=f"{', '.join(FIGURES)} or all.")] = "all",
    rows: Annotated[
        str, typer.Option(help="newton-time: numbers n of rows, separated by commas.")
    ] = "16384,32768,65536,131072,262144",
    size: Annotated[int, typer.Option(min=2, help="newton-time: number d of columns.")] = 256,
    epsilon: Annotated[float, typer.Option(help="newton-time: the error to reach, below 0.1.")] = 1e-3,
    seeds: Annotated[
        int, typer.Option(min=1, max=o.MOST_SEEDS, help="The others: instances of each kind, with the seeds 0, 1, ...")
    ] = 5,
    out: Out = LAB,
    quiet: o.Quiet = False,
) -> None:
    """Appendix C and D of InfoPrompt, measured: softmax regression and its approximate Newton method.

    All of them take about a minute; most of it is newton-time, which holds n x d numbers of 8 bytes (0.5 GB).

    \b
    inlay lab softmax-regression
    inlay lab softmax-regression --figure newton-time --rows 16384,65536 --size 128 --epsilon 1e-6
    """
    names = choose_figures(figure, FIGURES)
    sizes = parse_sizes(rows, "--rows", "16384,65536")
    from inlay.papers.infoprompt import charts
    from inlay.papers.infoprompt.theory import lab

    setting = lab.SoftmaxSetting(sizes, size, seeds, epsilon)
    perform_lab(lab, setting, names, charts.DRAWN, out, quiet)
