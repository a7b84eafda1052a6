"""Pictures of what `inlay lab` measures, each from the numbers of its experiment alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from inlay.report.charts import drawing as charts

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from inlay.papers.findings import Finding


def proposition_1(found: Finding) -> Figure:
    """How the gap between norm tuning and prompt opens as one condition after another is dropped."""
    figure = charts.blank(8.0, 4.0)
    axes = figure.subplots()
    cases = list(dict.fromkeys((row[0], row[1]) for row in found.rows))
    for index, (norm, condition) in enumerate(cases):
        departures = found.column("departure", norm=norm, condition=condition)
        gaps = found.column("relative gap", norm=norm, condition=condition)
        label = f"{norm}, without {condition}"
        axes.plot(departures, gaps, color=charts.COLOURS[index], marker=charts.MARKERS[index], ms=4, label=label)
    axes.set_xscale("symlog", linthresh=1e-4)
    axes.set_yscale("log")
    title = "Proposition 1: norm tuning against a prompt. At 0 all conditions hold"
    charts.dress(axes, title, "how far one condition is from holding", "relative gap between the outputs")
    charts.legend_beside(axes)
    return figure


def lemma_1(found: Finding) -> Figure:
    """The distances without noise on their claimed lines, and what noise makes of them."""
    figure = charts.blank(10.0, 4.4)
    left, right = figure.subplots(1, 2)
    largest = max(found.column("P"))
    d_a = largest // 4
    noisy = [row for row in found.rows if row[2]]
    quarter = [row for row in found.rows if not row[2] and row[1] == max(1, int(row[0]) // 4)]  # type: ignore[arg-type]
    sizes = [row[0] for row in quarter]
    for index, (layer, claim, label) in enumerate(((3, 4, "(1 + d_A)/P"), (5, 6, "1/P"))):
        colour, name = charts.COLOURS[index], f"layer {index + 1}"
        left.plot(sizes, [row[claim] for row in quarter], color=colour, linewidth=1, label=f"{name}, claimed: {label}")
        left.plot(
            sizes, [row[layer] for row in quarter], charts.MARKERS[index], color=colour, label=f"{name}, measured"
        )
        right.plot(
            [row[2] for row in noisy], [row[layer] for row in noisy], color=colour, marker=charts.MARKERS[index], ms=4
        )
        right.axhline(noisy[0][claim], color=colour, linewidth=1, linestyle="--")
    right.axhline((largest**2 - 1) / 3 / largest, color=charts.GREY, linestyle=":", label="a key drawn at random")
    left.set_xscale("log", base=2)
    left.set_yscale("log")
    left.set_xticks(sizes, list(map(str, sizes)))
    left.set_yticks([0.02, 0.05, 0.1, 0.2, 0.5], ["0.02", "0.05", "0.1", "0.2", "0.5"])
    left.minorticks_off()
    right.set_xscale("log")
    right.set_yscale("log")
    charts.dress(left, "Without noise, d_A = P/4", "tokens P", "average attention distance")
    charts.dress(right, f"With noise, P = {largest}, d_A = {d_a} (dashed: claimed)", "noise, sigma P", "")
    left.legend(frameon=False, fontsize=8)
    right.legend(frameon=False, fontsize=8)
    figure.suptitle(
        f"Lemma 1: attention distance before and after layer 1 (beta = {found.facts['beta']:.3g})", fontsize=11
    )
    return figure


def theorem_1(found: Finding) -> Figure:
    """Samples against P on two logarithmic axes, with the claimed orders as lines from the first point on."""
    facts = found.facts
    goals = ("error", "risk") if "expected gradient" in found.column("gradient") else (facts["goal"],)
    figure = charts.blank(6.0 * len(goals), 5.2)
    for axes, goal in zip(figure.subplots(1, len(goals), squeeze=False, sharey=True)[0], goals, strict=True):
        for layer in (1, 2):
            _samples(axes, found, goal, layer)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        sizes = [size for size in sorted({int(size) for size in found.column("P")}) if size & (size - 1) == 0]
        axes.set_xticks(sizes, list(map(str, sizes)))
        axes.minorticks_off()
        meaning = {"error": "zero error: every label right", "risk": "zero risk: every margin at least 1/P"}[goal]
        charts.dress(axes, meaning, "tokens P", "samples (batch size times steps)" if goal == goals[0] else "")
        axes.legend(frameon=False, fontsize=7, ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.14))
    settings = f"step size {facts['step']:g}, batch {facts['batch']}, beta^2 {facts['beta'] ** 2:.3g}"
    title = f"Theorem 1: samples needed with a prompt at layer 1 or 2 ({settings}, sigma {facts['noise']:g}/P)"
    figure.suptitle(title, fontsize=11)
    return figure


def _samples(axes: Axes, found: Finding, goal: str, layer: int) -> None:
    """One layer's points, curve and claimed line."""
    from inlay.papers.activation_prompts.theory.lab import claimed_order

    colour = charts.COLOURS[layer - 1]
    name = f"samples to zero {goal}"
    sizes = found.column("P", gradient="expected gradient", layer=layer)
    mean = list(zip(sizes, found.column(name, gradient="expected gradient", layer=layer), strict=True))
    start: list[tuple[int, float]] = [pair for pair in mean if pair[1] is not None]
    if start:
        label = f"layer {layer}, expected gradient{_slope(found, 'expected gradient', goal, layer)}"
        axes.plot([p for p, _ in start], [n for _, n in start], color=colour, marker=".", linewidth=1.2, label=label)
    if goal == found.facts["goal"]:
        sizes = found.column("P", gradient="SGD", layer=layer)
        samples = found.column(name, gradient="SGD", layer=layer)
        drawn = found.column("samples drawn", gradient="SGD", layer=layer)
        seeds = [(p, n) for p, n in zip(sizes, samples, strict=True) if n is not None]
        missed = [(p, n) for p, n, reached in zip(sizes, drawn, samples, strict=True) if reached is None]
        if seeds:
            label = f"layer {layer}, SGD, each seed{_slope(found, 'SGD', goal, layer)}"
            axes.scatter(
                [p for p, _ in seeds], [n for _, n in seeds], s=18, color=colour, alpha=0.45, linewidths=0, label=label
            )
        if missed:
            label = f"layer {layer}, SGD, not reached by then"
            axes.scatter(
                [p for p, _ in missed],
                [n for _, n in missed],
                s=30,
                marker="^",
                color="none",
                edgecolors=colour,
                label=label,
            )
        start = start or seeds
    if start:
        first, samples_there = start[0]
        line = [samples_there * claimed_order(layer, size) / claimed_order(layer, first) for size, _ in start]
        label = f"claimed: order {'P' if layer == 1 else 'P^2 log P'}"
        axes.plot([size for size, _ in start], line, color=colour, linestyle=":", linewidth=1.2, label=label)


def _slope(found: Finding, way: str, goal: str, layer: int) -> str:
    fit = found.facts["exponents"].get(f"{way}, {goal}, layer {layer}")
    return f": P^{fit['slope']:.2f}{'' if way == 'SGD' else ' at the end'}" if fit else ""


DRAWN = {"proposition-1": proposition_1, "lemma-1": lemma_1, "theorem-1": theorem_1}
