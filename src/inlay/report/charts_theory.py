"""Pictures of what `inlay lab` measures, each from the numbers of its experiment alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inlay.records.versions import versions
from inlay.report import charts

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from inlay.theory.activation_prompts.lab import Finding


def write(found: Finding, folder: Path, command: Sequence[str] = ()) -> None:
    """Draw an experiment and keep picture, numbers and circumstances in `folder`."""
    claims = [vars(claim) for claim in found.claims]
    facts = {"claims": claims, "settings": found.facts, "command": list(command), "versions": versions()}
    charts.keep(folder, found.name, DRAWN[found.name](found), found.columns, found.rows, facts)


def _column(found: Finding, name: str, **where: Any) -> list[Any]:
    """One column, of the rows whose other columns have the given values."""
    places = {found.columns.index(key.replace("_", " ")): value for key, value in where.items()}
    wanted = found.columns.index(name)
    return [row[wanted] for row in found.rows if all(row[place] == value for place, value in places.items())]


def proposition_1(found: Finding) -> Figure:
    """How the gap between norm tuning and prompt opens as one condition after another is dropped."""
    figure = charts.blank(8.0, 4.0)
    axes = figure.subplots()
    cases = list(dict.fromkeys((row[0], row[1]) for row in found.rows))
    for index, (norm, condition) in enumerate(cases):
        departures = _column(found, "departure", norm=norm, condition=condition)
        gaps = _column(found, "relative gap", norm=norm, condition=condition)
        look = {"color": charts.COLOURS[index], "marker": charts.MARKERS[index], "ms": 4}
        axes.plot(departures, gaps, label=f"{norm}, without {condition}", **look)
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
    largest = max(_column(found, "P"))
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
    """Samples against P on two logarithmic axes, with the claimed orders as lines through the first points."""
    goals = ("error", "risk") if "expected gradient" in _column(found, "gradient") else (found.facts["goal"],)
    figure = charts.blank(5.2 * len(goals) + 0.4, 4.6)
    for axes, goal in zip(figure.subplots(1, len(goals), squeeze=False, sharey=True)[0], goals, strict=True):
        place = found.columns.index(f"samples to zero {goal}")
        for layer, colour in ((1, charts.COLOURS[0]), (2, charts.COLOURS[1])):
            rows = [row for row in found.rows if row[1] == layer]
            mean = [(row[2], row[place]) for row in rows if row[0] != "SGD" and row[place] is not None]
            seeds = [(row[2], row[place]) for row in rows if row[0] == "SGD" and row[place] is not None]
            missed = [(row[2], row[6]) for row in rows if row[0] == "SGD" and row[place] is None]
            if mean:
                axes.plot(
                    *zip(*mean, strict=True),
                    color=colour,
                    label=f"layer {layer}, expected gradient{_slope(found, 'expected gradient', goal, layer)}",
                )
            if seeds and goal == found.facts["goal"]:
                axes.scatter(
                    *zip(*seeds, strict=True),
                    s=16,
                    color=colour,
                    alpha=0.5,
                    linewidths=0,
                    label=f"layer {layer}, SGD{_slope(found, 'SGD', goal, layer)}",
                )
            if missed and goal == found.facts["goal"]:
                axes.scatter(
                    *zip(*missed, strict=True),
                    s=30,
                    marker="^",
                    color=colour,
                    facecolors="none",
                    label=f"layer {layer}, SGD: not reached by here",
                )
            start = (mean or seeds)[:1]
            if start:
                _claimed(axes, layer, sorted({int(row[2]) for row in rows}), *start[0])
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        sizes = sorted({row[2] for row in found.rows})
        axes.set_xticks(sizes, list(map(str, sizes)))
        meaning = {"error": "zero error: every label right", "risk": "zero risk: every margin at least 1/P"}[goal]
        charts.dress(axes, meaning, "tokens P", "samples (batch size times steps)" if goal == goals[0] else "")
        axes.legend(frameon=False, fontsize=7)
    facts = found.facts
    settings = f"step size {facts['step']:g}, batch {facts['batch']}, beta^2 {facts['beta'] ** 2:g}, sigma {facts['noise']:g}/P"
    figure.suptitle(f"Theorem 1: samples needed with a prompt at layer 1 or 2 ({settings})", fontsize=11)
    return figure


def _slope(found: Finding, way: str, goal: str, layer: int) -> str:
    fit = found.facts["exponents"].get(f"{way}, {goal}, layer {layer}")
    return f": P^{fit['slope']:.2f}" if fit else ""


def _claimed(axes: Any, layer: int, sizes: Sequence[int], tokens: int, samples: float) -> None:
    from math import log

    order = {1: lambda p: p, 2: lambda p: p**2 * log(p)}[layer]
    label = {1: "order P", 2: "order P^2 log P"}[layer]
    line = [samples * order(size) / order(tokens) for size in sizes]
    axes.plot(sizes, line, color=charts.COLOURS[layer - 1], linestyle=":", linewidth=1.2, label=f"claimed: {label}")


DRAWN = {"proposition-1": proposition_1, "lemma-1": lemma_1, "theorem-1": theorem_1}
