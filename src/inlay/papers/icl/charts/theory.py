"""Pictures of what `inlay lab icl` measures without training at printed size, each from its numbers alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from inlay.report.charts import drawing as charts

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from inlay.papers.findings import Finding

EXAMPLES = "N (examples in the prompt)"


def below(figure: Figure, axes: Axes, columns: int) -> None:
    """One legend for all panels, from the labels of one of them."""
    figure.legend(
        *axes.get_legend_handles_labels(), loc="outside lower center", ncols=columns, frameon=False, fontsize=9
    )


def positive(xs: Sequence[float], ys: Sequence[float | None]) -> tuple[list[float], list[float]]:
    """The points that a logarithmic axis can show."""
    pairs = [(x, y) for x, y in zip(xs, ys, strict=True) if y is not None and y > 0]
    return [x for x, _ in pairs], [y for _, y in pairs]


def figure_3(found: Finding) -> Figure:
    """The printed gap, the error against the labels, and by how much `y_best` is the worse."""
    from matplotlib.ticker import LogLocator, NullFormatter

    facts = found.facts
    figure = charts.blank(13.0, 4.4)
    gap, error, worse = figure.subplots(1, 3)
    sizes, m = sorted(set(found.column("N"))), facts["m"]
    blue, red = charts.COLOURS[:2]

    def means(name: str) -> list[float]:
        return [sum(values) / len(values) for N in sizes if (values := found.column(name, N=N))]

    names = [f"excess error, {name}" for name in ("y*", "y_best")]
    star, best = (means(name) for name in names)
    lead = [b - a for a, b in zip(found.column(names[0]), found.column(names[1]), strict=True)]
    drawn = ((gap, means("gap"), found.column("gap")), (worse, [b - a for a, b in zip(star, best, strict=True)], lead))
    for axes, values, each in drawn:
        # In two pieces: at N = m both are 0, which a logarithmic axis cannot show.
        for side in ([N for N in sizes if m > N], [N for N in sizes if m < N]):
            axes.plot(side, [dict(zip(sizes, values, strict=True))[N] for N in side], color=blue)
        apart = [(N, value) for N, value in zip(found.column("N"), each, strict=True) if m != N]
        axes.plot(*positive(*zip(*apart, strict=True)), "o", color=blue, alpha=0.25, ms=3)
        axes.annotate(
            "0 at N = m,\nby construction", (m, 0.02), xycoords=("data", "axes fraction"), ha="center", fontsize=8
        )
    error.plot(sizes, star, color=blue, label=r"$\hat y^\star$, strength $m\tau$")
    error.plot(sizes, best, "s", color=red, mfc="none", ms=5, label=r"$\hat y^{\,best}$, strength $N\tau$")
    error.legend(frameon=False, fontsize=9)
    for axes in (gap, error, worse):
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.axvline(m, color=charts.GREY, linestyle=":", linewidth=1)
    for axes in (gap, worse):
        axes.set_ylim(axes.get_ylim()[0] / 2, None)  # room for the words below the curves
    charts.dress(gap, "As printed", EXAMPLES, r"$\|\hat y^\star - \hat y^{\,best}\|_2^2\,/\,K$")
    charts.dress(error, "Left out: the error of both", EXAMPLES, "mean square error beyond the noise")
    charts.dress(worse, r"The error of $\hat y^{\,best}$ less that of $\hat y^\star$", EXAMPLES, "difference")
    words = f"Figure 3: m = {m}, K = {facts['K']}, tau = {facts['tau']:g}; lines are means over {facts['draws']} draws"
    figure.suptitle(words, fontsize=11)
    return figure


def theorem_1(found: Finding) -> Figure:
    """The gap and (18), a panel an instance."""
    names = list(dict.fromkeys(found.column("instance")))
    figure = charts.blank(9.0, 7.0)
    panels = figure.subplots(2, 2).flatten()
    for place, (axes, name) in enumerate(zip(panels, names, strict=True)):
        steps = found.column("step", instance=name)
        measured = positive(steps, found.column("gap", instance=name))
        axes.plot(*measured, color=charts.COLOURS[0], label="measured")
        bound = positive(steps, found.column("bound (18)", instance=name))
        axes.plot(*bound, "--", color=charts.COLOURS[1], label="bound (18)")
        axes.set_yscale("log")
        floor, (low, high) = found.facts["rounding"], axes.get_ylim()
        words = name
        if low < floor:
            axes.axhspan(low, floor, color=charts.GREY, alpha=0.15, linewidth=0)
            axes.set_ylim(low, high)
            words = f"{name}; grey: below {floor:g}, rounding"
        charts.dress(axes, words, "step" if place > 1 else "", "" if place % 2 else "loss less its infimum")
    below(figure, panels[0], 2)
    figure.suptitle("Theorem 1 at its own step sizes (15), (16), with L of (61): norm 1, m = N, tau = 1", fontsize=11)
    return figure


def theorem_2(found: Finding) -> Figure:
    """The error of most prompts along the descent, with epsilon and T."""
    facts = found.facts
    names = list(dict.fromkeys(found.column("instance")))
    figure = charts.blank(3.6 * len(names), 4.2)
    panels = figure.subplots(1, len(names), squeeze=False)[0]
    quantile = found.columns[2]
    for axes, name in zip(panels, names, strict=True):
        steps = found.column("step", instance=name)
        for index, (place, label) in enumerate(((quantile, quantile), ("largest error", "the largest"))):
            values = positive(steps, found.column(place, instance=name))
            axes.plot(*values, color=charts.COLOURS[index], label=label)
        axes.axhline(facts["epsilon"], color=charts.GREY, linestyle=":", label=f"epsilon = {facts['epsilon']:g}")
        axes.axvline(found.column("T", instance=name)[0], color=charts.COLOURS[2], linestyle="--", label="T of (21)")
        axes.set_yscale("log")
        charts.dress(axes, name, "step", r"$\|\hat y - \hat y^\star\|_2^2\,/\,2K$" if axes is panels[0] else "")
    below(figure, panels[0], 4)
    figure.suptitle(f"Theorem 2 over {facts['prompts']:,} prompts, delta = {facts['delta']:g}", fontsize=11)
    return figure


def proposition_1(found: Finding) -> Figure:
    """Full rank and least singular values against H."""
    figure = charts.blank(10.0, 4.4)
    left, right = figure.subplots(1, 2)
    for index, tokens in enumerate(dict.fromkeys(found.column("tokens"))):
        style = {"color": charts.COLOURS[index], "marker": charts.MARKERS[index], "ms": 5, "label": tokens}
        heads = found.column("H", tokens=tokens)
        left.plot(heads, found.column("share with full rank", tokens=tokens), **style)
        least = found.column("least singular value, median of starts", tokens=tokens)
        right.plot(heads, [max(value, 1e-20) for value in least], **style)
    right.set_yscale("log")
    charts.dress(left, "in floating point", "heads H", r"share of the $C_k$ with full row rank")
    charts.dress(right, "median of the starts; 0 is drawn at 1e-20", "heads H", r"least singular value over $k$")
    for axes in (left, right):
        axes.axvline(found.facts["N"], color=charts.GREY, linestyle=":", label="H = N")
    below(figure, left, 4)
    figure.suptitle(f"Proposition 1: N = {found.facts['N']}, {found.facts['draws']} starts", fontsize=11)
    return figure


def section_3_3(found: Finding) -> Figure:
    """What one head leaves at least, and what trainings of one head and of N leave."""
    figure = charts.blank(7.0, 4.4)
    axes = figure.subplots()
    for index, name in enumerate(name for name in dict.fromkeys(found.column("number")) if "gap" in name):
        style = {"color": charts.COLOURS[index], "marker": charts.MARKERS[index], "ms": 5, "label": name}
        axes.plot(found.column("draw", number=name), found.column("value", number=name), linestyle="", **style)
    axes.set_yscale("log")
    axes.set_xticks(range(0, found.facts["draws"], 5))
    charts.dress(axes, f"N = {found.facts['N']}, K = {found.facts['K']}", "draw of the problem", r"$L - \inf L$")
    below(figure, axes, 3)
    return figure


def language(found: Finding) -> Figure:
    """Errors of the model and of ridge regression, what its answers are near to, and the strength that matches."""
    facts = found.facts
    kinds = list(dict.fromkeys(found.column("tasks")))
    figure = charts.blank(13.5, 8.0)
    errors = {
        "error, model": facts["model"].removeprefix("embedded:"),
        "error, ridge m tau": r"ridge, strength $m\tau$",
    }
    away = {
        "model from matched ridge": "ridge, matched strength",
        "model from matched kernel average": "kernel average, matched width",
        "model from ridge m tau": r"ridge, strength $m\tau$",
        "model from the mean of the labels": "mean of the labels",
        "model from the nearest label": "label of the nearest x",
    }
    for across, kind in zip(figure.subplots(len(kinds), 3, squeeze=False), kinds, strict=True):
        sizes = found.column("N", tasks=kind)
        for axes, names in zip(across[:2], (errors, away), strict=True):
            for index, (name, label) in enumerate(names.items()):
                style: dict[str, Any] = {"color": charts.COLOURS[index], "marker": charts.MARKERS[index], "ms": 4}
                axes.plot(sizes, found.column(name, tasks=kind), label=label, **style)
                if f"{name}, low" in found.columns:
                    band = [found.column(f"{name}, {end}", tasks=kind) for end in ("low", "high")]
                    axes.fill_between(sizes, *band, color=charts.COLOURS[index], alpha=0.15, linewidth=0)
            axes.set_ylim(0, None)
        across[2].plot(
            sizes, found.column("matched strength", tasks=kind), "o-", color=charts.COLOURS[0], ms=4, label="matched"
        )
        wanted = facts["m tau"][kind]
        across[2].axhline(wanted, color=charts.COLOURS[1], linestyle="--", label=r"theory: $m\tau$")
        across[2].set_yscale("log")
        for axes in across:
            axes.set_xscale("log", base=2)
            axes.set_xticks(sizes, list(map(str, sizes)))
            axes.minorticks_off()
            axes.legend(frameon=False, fontsize=8)
        charts.dress(across[0], f"{kind}: error of the answer", EXAMPLES, "root mean square, units of y")
        charts.dress(across[1], f"{kind}: distance of the model's answer from", EXAMPLES, "")
        charts.dress(across[2], f"{kind}: ridge strength", EXAMPLES, "")
    words = f"{facts['model']} in context: {facts['tasks']} tasks of each kind, y from 0 to 99; bands: 95 %"
    figure.suptitle(words, fontsize=11)
    return figure


DRAWN: dict[str, Callable[[Finding], Figure]] = {
    "icl-figure-3": figure_3,
    "icl-theorem-1": theorem_1,
    "icl-theorem-2": theorem_2,
    "icl-proposition-1": proposition_1,
    "icl-section-3-3": section_3_3,
    "icl-language": language,
}
