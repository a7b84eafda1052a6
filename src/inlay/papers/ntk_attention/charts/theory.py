"""Pictures of what `inlay lab prefix` measures, each from the numbers of its experiment alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from inlay.report.charts import drawing as charts

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from inlay.papers.findings import Finding

SMALL = 8


def _widths(axes: Axes, widths: Sequence[int], unit: str = "length of the prefix m") -> None:
    """A logarithmic axis of lengths, with the lengths themselves as ticks."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(widths, list(map(str, widths)))
    axes.set_xlabel(unit)
    axes.minorticks_off()


def _all(found: Finding, name: str) -> list[int]:
    return sorted(set(found.column(name)))


def kernel(found: Finding) -> Figure:
    """Least eigenvalues and distances as m grows; the terms that the proof calls minor."""
    figure = charts.blank(12.0, 4.4)
    left, middle, right = figure.subplots(1, 3)
    widths = _all(found, "m")
    for index, name in enumerate(("printed", "true")):
        colour, marker = charts.COLOURS[index], charts.MARKERS[index]
        dots = {"color": colour, "marker": marker, "alpha": 0.7, "linestyle": "none", "ms": 5}
        left.plot(found.column("m"), found.column(f"{name} lambda_min"), label=f"{name}, least", **dots)
        left.plot(found.column("m"), found.column(f"{name} lambda_max"), label=f"{name}, largest", mfc="none", **dots)
        middle.plot(found.column("m"), found.column(f"{name} from its limit"), label=f"{name}, from its limit", **dots)
    apart = {"color": charts.COLOURS[2], "marker": charts.MARKERS[2], "linestyle": "none", "ms": 5, "alpha": 0.7}
    middle.plot(found.column("m"), found.column("apart"), label="printed from true", **apart)
    gap = found.facts["limit gap"]
    middle.axhline(sum(gap) / len(gap), color=charts.COLOURS[2], linestyle=":", label="printed from true, in the limit")
    for index, name in enumerate(("C_0", "C_12")):
        sizes = [abs(value) for value in found.column(f"{name} / (m eta lambda |F - Y|^2)")]
        right.plot(
            found.column("m"), sizes, charts.MARKERS[index], color=charts.COLOURS[index + 3], ms=5, label=f"|{name}|"
        )
    right.axhline(0.1, color=charts.GREY, linestyle="--", label="claimed: at most 0.1")
    for axes, title, y in (
        (left, "Eigenvalues", "eigenvalue"),
        (middle, "Relative distances (Frobenius)", "relative distance"),
        (right, "Terms the proof calls minor (L.4, L.5)", "in units of m eta lambda |F - Y|^2"),
    ):
        charts.dress(axes, title, "", y)
        _widths(axes, widths)
        axes.set_yscale("log")
        axes.legend(frameon=False, fontsize=SMALL, loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=2)
    middle.set_yticks([0.1, 0.2, 0.5, 1.0], ["0.1", "0.2", "0.5", "1"])
    middle.minorticks_off()
    figure.suptitle(_title("The kernel as printed and as it is", found), fontsize=11)
    return figure


def lemma_m6(found: Finding) -> Figure:
    """The loss at the start against m."""
    figure = charts.blank(7.0, 4.2)
    axes = figure.subplots()
    widths = _all(found, "m")
    axes.plot(
        found.column("m"),
        found.column("|F(0) - Y|_F"),
        "o",
        color=charts.COLOURS[0],
        alpha=0.3,
        ms=4,
        label="measured",
    )
    expected = [sum(values) / len(values) for m in widths if (values := found.column("expected", m=m))]
    axes.plot(widths, expected, color=charts.COLOURS[1], label="closed form, grows as sqrt(m)")
    axes.axhline(found.facts["sqrt(n d)"], color=charts.GREY, linestyle="--", label="sqrt(n d), as the lemma has it")
    charts.dress(axes, _title("Lemma M.6: the error at the start", found), "", "|F(0) - Y|_F")
    _widths(axes, widths)
    axes.set_yscale("log")
    axes.legend(frameon=False, fontsize=SMALL)
    return figure


def lemma_b1(found: Finding) -> Figure:
    """Drift of the kernel against R, and how far gradient descent goes."""
    figure = charts.blank(11.0, 4.6)
    left, right = figure.subplots(1, 2)
    widths = sorted(set(found.column("m", where="worst")))
    for index, width in enumerate(widths):
        for where, line, mark in (("random", ":", "none"), ("worst", "-", None)):
            radii = sorted(set(found.column("R", where=where, m=width)))
            drifts = [max(found.column("|H - H*|_F", where=where, m=width, R=radius)) for radius in radii]
            label = f"m = {width}, {'worst found' if where == 'worst' else 'at random'}"
            colour = charts.COLOURS[index]
            left.plot(radii, drifts, color=colour, linestyle=line, marker="o", ms=4, mfc=mark or colour, label=label)
    bound = min(found.column("log10 of the bound", where="worst", R=0.01))
    ended = {"where": "descent"}
    left.plot(
        found.column("R", **ended), found.column("|H - H*|_F", **ended), "k*", ms=7, label="after gradient descent"
    )
    left.axvline(0.01, color=charts.GREY, linestyle="--", label=f"R = 0.01; the bound there is 10^{bound:.0f}")
    left.set_xscale("log")
    left.set_yscale("log")
    charts.dress(left, "Drift of the printed kernel", "R, the most that a column moves", "|H - H*|_F")
    for index, (name, label) in enumerate((("R", "the column that moves most"), ("middle", "the median column"))):
        right.plot(
            found.column("m", **ended),
            found.column(name, **ended),
            charts.MARKERS[index],
            color=charts.COLOURS[index],
            label=label,
        )
    right.axhline(0.01, color=charts.GREY, linestyle="--", label="R = 0.01, the most the lemma allows")
    charts.dress(right, "How far gradient descent moves", "", "|w_r(T) - w_r(0)|")
    _widths(right, _all(found, "m"))
    right.set_yscale("log")
    for axes in (left, right):
        axes.legend(frameon=False, fontsize=SMALL, loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=2)
    figure.suptitle(_title("Lemma B.1: the kernel's drift", found), fontsize=11)
    return figure


def theorem_b2(found: Finding) -> Figure:
    """The loss of one descent a kind of data, with the decays and the linearised losses."""
    figure = charts.blank(11.0, 4.8)
    width = max(found.column("m"))
    for axes, (inputs, words) in zip(
        figure.subplots(1, 2), (("unit", "unit inputs"), ("axes", "inputs 0.25 e_i")), strict=True
    ):
        of: dict[str, Any] = {"inputs": inputs, "m": width, "seed": 0}
        t = found.column("t", **of)
        losses = found.column("loss", **of)
        axes.plot(t, losses, color=charts.COLOURS[6], linewidth=2, label="measured |F(t) - Y|^2")
        for index, name in enumerate(("printed", "true")):
            colour = charts.COLOURS[index]
            axes.plot(
                t,
                found.column(f"decay, {name}", **of),
                "--",
                color=colour,
                label=f"bound, lambda of the {name} kernel",
            )
            line = found.column(f"line, {name}", **of)
            axes.plot(t, line, ":", color=colour, label=f"linearised with the {name} kernel")
        axes.set_yscale("log")
        axes.set_ylim(max(1e-16, min(losses) / 30), 10 * max(losses))
        step = found.facts[f"log10 of the theorem's step, {inputs}"]
        charts.dress(axes, f"{words}, m = {width}; the theorem's step: 10^{step:.0f}", "step t", "|F(t) - Y|^2")
        axes.legend(frameon=False, fontsize=SMALL, loc="upper center", bbox_to_anchor=(0.5, -0.13), ncols=2)
    title = f"Theorem B.2: gradient descent at {found.facts['c']:g} / (m lambda_max), and (1 - m eta lambda / 2)^t"
    figure.suptitle(title, fontsize=11)
    return figure


def proposition_b3(found: Finding) -> Figure:
    """The loss against compute for every m, and what the law says."""
    figure = charts.blank(11.0, 4.6)
    left, right = figure.subplots(1, 2)
    widths = _all(found, "m")
    for index, width in enumerate(widths):
        colour = charts.COLOURS[index % len(charts.COLOURS)]
        times = found.column("T", m=width, seed=0)[1:]
        computes = found.column("C", m=width, seed=0)[1:]
        losses = found.column("L", m=width, seed=0)[1:]
        left.plot(computes, losses, color=colour, label=f"m = {width}")
        left.plot(computes, found.column("law", m=width, seed=0)[1:], ":", color=colour, linewidth=1)
        right.plot(times, losses, color=colour, label=f"m = {width}")
    left.axvline(found.facts["budget"], color=charts.GREY, linestyle="--", linewidth=1, label="one budget")
    charts.dress(left, "At the same compute (dotted: the law)", "compute C = m d n T", "loss L")
    charts.dress(right, "At the same number of steps", "steps T", "")
    for axes in (left, right):
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_ylim(1e-12, None)
        axes.legend(frameon=False, fontsize=SMALL, ncols=2)
    figure.suptitle(_title("Proposition B.3: loss against length and compute", found), fontsize=11)
    return figure


def theorem_31(found: Finding) -> Figure:
    """Errors against m for every map, and the features that an error of 1/m needs."""
    from matplotlib import colormaps

    figure = charts.blank(12.0, 5.4)
    left, right = figure.subplots(1, 2, width_ratios=(1.5, 1))
    lengths = _all(found, "m")
    names = list(dict.fromkeys(found.column("map", kind="error")))
    orders = [name for name in names if name.startswith("taylor")]
    shades = colormaps["Blues"]
    others = iter(charts.COLOURS[1:])  # blue is for the Taylor orders
    colours: dict[str, Any] = {}
    for name in names:
        kind = name.split(",")[0]
        if kind == "taylor":
            colours[name] = shades(0.35 + 0.65 * orders.index(name) / max(1, len(orders) - 1))
        else:
            colours[name] = colours[kind] = colours.get(kind) or next(others)
    lines = {"r = d": "-", "r = 2d": "--", "r = 4d": ":", "r = 16d": "--", "r = 256d": ":"}
    for name in names:
        means = [sum(errors) / len(errors) for m in lengths if (errors := found.column("error", map=name, m=m))]
        left.plot(lengths, means, color=colours[name], linestyle=lines.get(name.split(", ")[1], "-"), label=name)
    left.plot(lengths, [1 / m for m in lengths], color=charts.GREY, linestyle=(0, (1, 3)), label="1/m")
    left.set_yscale("log")
    facts = found.facts
    charts.dress(
        left, f"d = {facts['d']}, entries up to 1, scale 1/sqrt(d), L = {facts['L']}", "", "largest error, Eq. (5)"
    )
    _widths(left, lengths)
    left.legend(frameon=False, fontsize=SMALL, loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=4)
    for index, scale in enumerate(("1/sqrt(d)", "1/d")):
        features = found.column("r", kind="needed", scale=scale)
        marked = {"color": charts.COLOURS[index], "marker": charts.MARKERS[index], "ms": 5}
        right.plot(lengths, features, label=f"Taylor features for an error of 1/m, scale {scale}", **marked)
        for m, r, order in zip(lengths, features, found.column("order", kind="needed", scale=scale), strict=True):
            right.annotate(str(order), (m, r), xytext=(4, -10), textcoords="offset points", fontsize=7)
    right.plot(lengths, lengths, color=charts.GREY, linestyle="--", label="as many as tokens")
    right.set_yscale("log")
    charts.dress(right, "d = log m, entries up to (log m)^(1/4) (numbers: order)", "", "features r")
    _widths(right, lengths)
    right.legend(frameon=False, fontsize=SMALL, loc="upper center", bbox_to_anchor=(0.5, -0.12))
    figure.suptitle("Theorem 3.1: NTK-Attention against exact prefix attention", fontsize=11)
    return figure


def _title(words: str, found: Finding) -> str:
    return f"{words} (n = {found.facts['n']}, d = {found.facts['d']})"


DRAWN: dict[str, Callable[[Finding], Figure]] = {
    "kernel": kernel,
    "lemma-m6": lemma_m6,
    "lemma-b1": lemma_b1,
    "theorem-b2": theorem_b2,
    "proposition-b3": proposition_b3,
    "theorem-3-1": theorem_31,
}
