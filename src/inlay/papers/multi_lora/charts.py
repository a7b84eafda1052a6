"""Pictures of what `inlay lab decomposable` measures, each from the numbers of its experiment alone."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from inlay.report.charts import drawing as charts

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from inlay.papers.findings import Finding

SMALL = 8


def lemmas(found: Finding) -> Figure:
    """The whole's constants over a part's, against the number of tasks."""
    figure = charts.blank(12.0, 4.8)
    left, middle, right = figure.subplots(1, 3)
    ks = sorted(set(found.column("k")))
    kinds = list(dict.fromkeys(found.column("kind")))

    def ratios(kind: str, name: str, of: str) -> list[float]:
        """The mean over seeds at every k."""
        means = []
        for k in ks:
            whole, part = found.column(name, kind=kind, k=k), found.column(of, kind=kind, k=k)
            means.append(sum(a / b for a, b in zip(whole, part, strict=True)) / len(whole))
        return means

    for index, kind in enumerate(kinds):
        look = {"color": charts.COLOURS[index], "marker": charts.MARKERS[index], "ms": 5}
        left.plot(ks, ratios(kind, "whole gamma", "gamma"), label=kind, **look)
        middle.plot(ks, ratios(kind, "whole beta", "beta"), label=kind, **look)
        if min(found.column("alpha", kind=kind)) > 0:
            right.plot(ks, ratios(kind, "whole alpha", "alpha"), label=f"{kind}, Hessian", **look)
            printed = ratios(kind, "printed alpha", "alpha")
            right.plot(ks, printed, linestyle=":", mfc="none", label=f"{kind}, as in the proof", **look)
    left.plot(ks, [math.sqrt(k) for k in ks], color=charts.GREY, linestyle=":", label="sqrt(k)")
    for axes in (left, middle):
        axes.plot(ks, ks, color=charts.GREY, linestyle="--", label="k, the lemma")
        axes.set_yscale("log", base=2)
    right.axhline(1, color=charts.GREY, linestyle="--", label="1, the correction")
    right.axhline(0, color=charts.GREY, linewidth=0.8)
    right.set_yscale("symlog", linthresh=2)
    charts.dress(left, "Lemma 4.4: Lipschitz", "tasks k", "gamma of the whole / of a part")
    charts.dress(middle, "Lemma 4.6: smoothness", "tasks k", "beta of the whole / of a part")
    charts.dress(right, "Lemma 4.8: strong convexity", "tasks k", "least eigenvalue / alpha of a part")
    for axes in (left, middle, right):
        axes.set_xscale("log", base=2)
        axes.set_xticks(ks, list(map(str, ks)))
        axes.minorticks_off()
        axes.legend(frameon=False, fontsize=SMALL, loc="upper center", bbox_to_anchor=(0.5, -0.13))
    facts = found.facts
    figure.suptitle(f"L(x, y) = sum of L_i(x, y_i), d = {facts['d']} shared, m = {facts['m']} a task", fontsize=11)
    return figure


def counterexample_a1(found: Finding) -> Figure:
    """Least eigenvalues of both matrices against k."""
    figure = charts.blank(7.0, 4.2)
    axes = figure.subplots()
    ks = found.column("k")
    for index, (name, law, label) in enumerate(
        (("printed", "4 - 3 sqrt(k)", "the matrix of A.1"), ("true", "closed form", "the Hessian of the sum"))
    ):
        axes.plot(ks, found.column(law), color=charts.COLOURS[index], linewidth=1, label=f"{label}: closed form")
        axes.plot(ks, found.column(name), charts.MARKERS[index], color=charts.COLOURS[index], ms=3, label=label)
    axes.axhline(0, color=charts.GREY, linewidth=0.8)
    axes.axhline(1, color=charts.GREY, linestyle="--", label="alpha of a part")
    charts.dress(axes, "Lemma A.1: parts [[4, -3], [-3, 4]]", "tasks k", "least eigenvalue")
    axes.legend(frameon=False, fontsize=SMALL)
    return figure


def table_3(found: Finding) -> Figure:
    """Every constant by (n, d): the paper's, and the means with either Hessian."""
    figure = charts.blank(12.0, 4.6)
    sizes = list(dict.fromkeys((row[0], row[1]) for row in found.rows))
    ticks = [f"{n}, {d}" for n, d in sizes]
    for axes, name, paper in zip(
        figure.subplots(1, 4), ("alpha", "beta", "M far", "gamma"), ("alpha", "beta", "M", "gamma"), strict=True
    ):
        index = 0
        for kind in ("corrected", "printed"):
            for b in ("gaussian", "probabilities"):
                if not (name == "gamma" and kind == "printed"):  # the gradient is printed right
                    values = [found.column(name, n=n, d=d, b=b, Hessian=kind)[0] for n, d in sizes]
                    look = {
                        "color": charts.COLOURS[index],
                        "marker": charts.MARKERS[index],
                        "ms": 5,
                        "linestyle": "none",
                    }
                    axes.plot(range(len(sizes)), values, label=f"{kind}, b {b}", **look)
                index += 1
        printed = [found.column(f"paper {paper}", n=n, d=d)[0] for n, d in sizes]
        axes.plot(range(len(sizes)), printed, "k_", ms=14, label="table 3")
        axes.set_xticks(range(len(sizes)), ticks, fontsize=SMALL)
        if name != "alpha":
            axes.set_yscale("log")
        title = {"M far": "M, between two draws of x"}.get(name, name)
        charts.dress(axes, title, "n, d", "")
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, frameon=False, fontsize=SMALL, loc="outside lower center", ncols=len(labels))
    title = f"Table 3: softmax regression, means of {found.facts['samples']} draws, A and x from N(0, 1)"
    figure.suptitle(title, fontsize=11)
    return figure


DRAWN: dict[str, Callable[[Finding], Figure]] = {
    "lemmas-4": lemmas,
    "counterexample-a1": counterexample_a1,
    "table-3": table_3,
}
