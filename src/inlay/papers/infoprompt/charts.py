"""Pictures of what `inlay lab softmax-regression` measures, each from the numbers of its experiment alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from inlay.report.charts import drawing as charts

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from inlay.papers.findings import Finding

SMALL = 8


def lemmas(found: Finding) -> Figure:
    """What B and the Hessian do, beside the bounds, against n."""
    figure = charts.blank(11.0, 4.8)
    left, right = figure.subplots(1, 2)
    ns = sorted(set(found.column("n")))
    kinds = [(b, rows) for b in ("probabilities", "gaussian") for rows in ("even", "uneven")]
    for index, (b, rows) in enumerate(kinds):
        colour, marker = charts.COLOURS[index], charts.MARKERS[index]
        for axes, names in ((left, ("|B|",)), (right, ("Lipschitz, near", "Lipschitz, far"))):
            values = [
                max(max(found.column(name, b=b, n=n, rows_of_A=rows)) for name in names) for n in ns
            ]  # the worst over points, pairs and seeds
            axes.plot(ns, values, color=colour, marker=marker, ms=5, label=f"measured, b {b}, {rows} rows")
    for axes, name in ((left, "|B|, bound"), (right, "Lipschitz, bound")):
        bound = [max(found.column(name, n=n)) for n in ns]
        axes.plot(ns, bound, color=charts.COLOURS[6], linestyle="--", label="bound without exponentials (ours)")
    for axes, name in ((left, "log10 R_0"), (right, "log10 Lipschitz, printed")):
        printed = [10 ** max(found.column(name, n=n)) for n in ns]
        axes.plot(ns, printed, color=charts.GREY, linestyle=":", label="printed, with 1 for O")
        axes.set_xscale("log", base=2)
        axes.set_xticks(ns, list(map(str, ns)))
        axes.minorticks_off()
        axes.set_yscale("log")
    charts.dress(left, "Lemma C.15: the curvature that weights must outdo", "n", "|B(x)|")
    charts.dress(right, "Lemma C.16: how fast the Hessian changes", "n", "|H(x) - H(y)| / |x - y|")
    for axes in (left, right):
        axes.legend(frameon=False, fontsize=SMALL, loc="upper center", bbox_to_anchor=(0.5, -0.13), ncols=2)
    figure.suptitle(f"Softmax regression: |A| = R = {found.facts['R']:g}, d = {found.facts['d']}", fontsize=11)
    return figure


def theorem_d1(found: Finding) -> Figure:
    """The error against steps for every way to run Algorithm 1, in three groups."""
    figure = charts.blank(12.0, 4.8)
    names = list(dict.fromkeys(found.column("case")))
    groups = (
        ("w_i^2 = 1/n", [name for name in names if "sampled" in name or name in ("exact", "plus in line 8")]),
        ("D = W^2", [name for name in names if name.startswith("D = W^2")]),
        ("A column that few rows have", [name for name in names if name.startswith("uneven")]),
    )
    for axes, (title, members) in zip(figure.subplots(1, 3, sharey=True), groups, strict=True):
        for index, name in enumerate(members):
            for seed in sorted(set(found.column("seed", case=name))):
                errors = found.column("error", case=name, seed=seed)
                axes.plot(
                    found.column("t", case=name, seed=seed),
                    errors,
                    color=charts.COLOURS[index],
                    marker=charts.MARKERS[index],
                    ms=3,
                    linewidth=1,
                    alpha=0.7,
                    label=name if seed == 0 else None,
                )
        bound = found.column("exp(-t)", case=members[0], seed=0)
        axes.plot(range(len(bound)), bound, color=charts.GREY, linestyle="--", label="exp(-t), what T amounts to")
        axes.axhline(found.facts["epsilon"], color=charts.GREY, linestyle=":", linewidth=1)
        axes.set_yscale("log")
        axes.set_ylim(1e-12, 1e4)
        axes.set_xticks(range(0, len(bound), 3))
        charts.dress(axes, title, "step t", "|x_t - x*|" if axes.get_subplotspec().is_first_col() else "")
        axes.legend(frameon=False, fontsize=SMALL, loc="upper center", bbox_to_anchor=(0.5, -0.13))
    figure.suptitle(f"Theorem D.1: Algorithm 1, n = {found.facts['n']}, d = {found.facts['d']}", fontsize=11)
    return figure


def newton_time(found: Finding) -> Figure:
    """Seconds and errors against n, and the error against seconds at the largest n."""
    figure = charts.blank(12.0, 4.6)
    left, middle, right = figure.subplots(1, 3)
    ns, ways = sorted(set(found.column("n"))), list(dict.fromkeys(found.column("way")))
    epsilon = found.facts["epsilon"]
    for index, way in enumerate(ways):
        look = {"color": charts.COLOURS[index], "marker": charts.MARKERS[index], "ms": 5}
        times, errors = [], []
        for n in ns:
            steps = list(zip(found.column("seconds", n=n, way=way), found.column("error", n=n, way=way), strict=True))
            times.append(next((seconds for seconds, error in steps if error <= epsilon), None))
            errors.append(max(steps[-1][1], 1e-16))
        left.plot([n for n, t in zip(ns, times, strict=True) if t], [t for t in times if t], label=way, **look)
        if way != "exact":
            middle.plot(ns, errors, label=f"{way}, after T steps", **look)
        right.plot(
            found.column("seconds", n=ns[-1], way=way), found.column("error", n=ns[-1], way=way), label=way, **look
        )
    middle.axhline(epsilon, color=charts.GREY, linestyle="--", label="epsilon")
    for axes in (left, middle):
        axes.set_xscale("log", base=2)
        axes.set_xticks(ns, [f"{n // 1024}k" if n >= 1024 else str(n) for n in ns])
        axes.minorticks_off()
        axes.set_yscale("log")
    right.set_yscale("log")
    right.set_ylim(1e-10, None)
    charts.dress(left, f"Time to |x - x*| <= {epsilon:g}", "n", "processor seconds")
    charts.dress(middle, "Error after the theorem's T steps", "n", "|x_T - x*|")
    charts.dress(right, f"n = {ns[-1]}", "processor seconds", "|x_t - x*|")
    for axes in (left, middle, right):
        axes.legend(frameon=False, fontsize=SMALL, loc="upper center", bbox_to_anchor=(0.5, -0.14))
    facts = found.facts
    figure.suptitle(f"Exact and sampled Newton, d = {facts['size']}, {facts['draws']} d rows drawn", fontsize=11)
    return figure


DRAWN: dict[str, Callable[[Finding], Figure]] = {
    "lemmas-c15-c16": lemmas,
    "theorem-d1": theorem_d1,
    "newton-time": newton_time,
}
