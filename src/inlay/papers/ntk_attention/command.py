"""`inlay lab prefix`: the theory of NTK-Attention, computed and drawn."""

from __future__ import annotations

from typing import Annotated

import typer

from inlay.cli import options as o
from inlay.papers.lab import LAB, Out, choose_figures, parse_sizes, perform_lab

FIGURES = ("kernel", "lemma-m6", "lemma-b1", "theorem-b2", "proposition-b3", "theorem-3-1")


def command(
    figure: Annotated[str, typer.Option(help=f"{', '.join(FIGURES)} or all.")] = "all",
    widths: Annotated[
        str, typer.Option(help="Lengths m of the prefix in the stylised network, separated by commas.")
    ] = "16,64,256,1024,4096",
    seeds: Annotated[
        int, typer.Option(min=1, max=o.MOST_SEEDS, help="Draws of each setting, with the seeds 0, 1, ...")
    ] = 3,
    steps: Annotated[int, typer.Option(min=10, help="Steps of gradient descent.")] = 3000,
    c: Annotated[float, typer.Option(help="Its step size is c / (m lambda_max) of the true kernel.")] = 1.0,
    out: Out = LAB,
    quiet: o.Quiet = False,
) -> None:
    """Appendix B and Theorem 3.1 of NTK-Attention, measured.

    All of them take about two minutes; --figure lemma-m6 takes seconds.

    \b
    inlay lab prefix --figure all
    inlay lab prefix --figure theorem-b2 --widths 64,1024 --seeds 1 --steps 5000
    """
    names = choose_figures(figure, FIGURES)
    sizes = parse_sizes(widths, "--widths", "16,64,256,1024,4096")
    from inlay.papers.ntk_attention.charts import theory as charts
    from inlay.papers.ntk_attention.theory import lab

    setting = lab.PrefixSetting(sizes, seeds, steps, c)
    perform_lab(lab, setting, names, charts.DRAWN, out, quiet)
