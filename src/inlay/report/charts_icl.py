"""Pictures of what `inlay lab icl` measures, each from the numbers of its experiment alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from inlay.report import charts
from inlay.report.charts_theory import column

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from inlay.theory.findings import Finding
    from inlay.theory.icl.descent import Trace

SMALL = 8
LOSSES = (
    ("loss", "training loss (9)"),
    ("in-domain", "inference loss, in-domain"),
    ("out-of-domain", "inference loss, out-of-domain"),
)


def _below(axes: Axes, columns: int = 2, offset: float = -0.16) -> None:
    axes.legend(frameon=False, fontsize=SMALL, loc="upper center", bbox_to_anchor=(0.5, offset), ncols=columns)


def _epochs(axes: Axes, epoch: int) -> None:
    """Epochs below, steps above: the paper's "iteration" could be either, and fits an epoch."""

    def steps(epochs: Any) -> Any:
        return epochs * epoch

    def epochs(steps: Any) -> Any:
        return steps / epoch

    above = axes.secondary_xaxis("top", functions=(steps, epochs))
    above.set_xlabel("Adam steps", fontsize=SMALL)
    above.tick_params(labelsize=SMALL)


def _positive(xs: Sequence[float], ys: Sequence[float | None]) -> tuple[list[float], list[float]]:
    """The points that a logarithmic axis can show."""
    pairs = [(x, y) for x, y in zip(xs, ys, strict=True) if y is not None and y > 0]
    return [x for x, _ in pairs], [y for _, y in pairs]


def curves(trace: Trace) -> Figure:
    """A training of one's own, from `Trace.plot()`."""
    figure = charts.blank()
    axes = figure.subplots()
    for index, (name, values) in enumerate(trace.curves.items()):
        axes.plot(*_positive(trace.steps, values), color=charts.COLOURS[index], label=name)
    axes.axhline(trace.infimum, color=charts.GREY, linestyle="--", label="infimum of the loss")
    axes.set_yscale("log")
    charts.dress(axes, "Training", "step", "loss")
    charts.legend_beside(axes)
    return figure


def run(found: Finding) -> Figure:
    """A training of one's own, from the command line."""
    figure = charts.blank(8.5, 4.4)
    axes = figure.subplots()
    steps = column(found, "step")
    for index, (name, label) in enumerate((*LOSSES, ("gap", "gap to the infimum"))):
        axes.plot(*_positive(steps, column(found, name)), color=charts.COLOURS[index], label=label)
    axes.axhline(found.facts["infimum"], color=charts.GREY, linestyle="--", label="infimum of the loss")
    axes.set_yscale("log")
    charts.dress(axes, found.facts["name"], "step", "loss")
    charts.legend_beside(axes)
    return figure


def figure_2a(found: Finding) -> Figure:
    """Losses of one layer against epochs and steps."""
    figure = charts.blank(11.0, 5.0)
    ways = {"Gaussian": ("closed form", "samples"), "norm 1": ("closed form",)}
    for axes, (tokens, trained) in zip(figure.subplots(1, 2), ways.items(), strict=True):
        for way in trained:
            of = {"tokens": tokens, "training": way}
            for index, (name, label) in enumerate(LOSSES):
                style = "-" if way == "closed form" else ":"
                values = _positive(column(found, "epoch", **of), column(found, name, **of))
                axes.plot(*values, style, color=charts.COLOURS[index], label=f"{label}, {way}")
        axes.axhline(found.facts["infimum"], color=charts.GREY, linestyle="--", label="infimum of the training loss")
        axes.set_yscale("log")
        words = "Gaussian tokens, as printed" if tokens == "Gaussian" else "tokens of norm 1"
        charts.dress(axes, words, "epochs of 10,000 samples", "loss")
        _epochs(axes, found.facts["steps in an epoch"])
        _below(axes)
    figure.suptitle(f"Figure 2(a): one layer, {_sizes(found)}, Adam {found.facts['rate']:g}", fontsize=11)
    return figure


def figure_2b(found: Finding) -> Figure:
    """Losses of four layers against epochs and steps."""
    figure = charts.blank(7.0, 4.8)
    axes = figure.subplots()
    for index, (name, label) in enumerate(LOSSES):
        axes.plot(
            *_positive(column(found, "step"), column(found, name)),
            color=charts.COLOURS[index],
            label=label,
        )
    axes.axhline(found.facts["infimum"], color=charts.GREY, linestyle="--", label="infimum of the one-layer loss")
    axes.set_yscale("log")
    title = f"Figure 2(b): four layers, {_sizes(found)}\nbatch {found.facts['batch']}, on {found.facts['device']}"
    charts.dress(axes, title, "Adam steps (40 are an epoch at batch 256)", "loss")
    _below(axes)
    return figure


def _sizes(found: Finding) -> str:
    facts = found.facts
    heads = facts["heads"]
    m = 20 if facts["m"] is None else facts["m"]
    shown = f", H = {heads}" if isinstance(heads, int) else ""
    return f"N = {facts['N']}, K = {facts['K']}, d = {facts['d']}, m = {m}, tau = {facts['tau']:g}{shown}"


def figure_3(found: Finding) -> Figure:
    """The printed gap, and the errors that it leaves out."""
    figure = charts.blank(11.0, 4.6)
    left, right = figure.subplots(1, 2)
    sizes = sorted(set(column(found, "N")))
    m = found.facts["m"]

    def means(name: str) -> list[float]:
        return [sum(values) / len(values) for N in sizes if (values := column(found, name, N=N))]

    gaps = dict(zip(sizes, means("gap"), strict=True))
    for side in ([N for N in sizes if m > N], [N for N in sizes if m < N]):
        label = "mean over draws; 0 at N = m, by construction" if side and side[0] < m else None
        left.plot(side, [gaps[N] for N in side], color=charts.COLOURS[0], label=label)
    left.plot(column(found, "N"), column(found, "gap"), "o", color=charts.COLOURS[0], alpha=0.25, ms=3)
    left.set_yscale("log")
    left.set_ylim(min(gap for N, gap in gaps.items() if m != N) / 5, None)
    charts.dress(left, "As printed: 1/K |y* - y_best|^2", "N (examples in the prompt)", "gap")
    for index, (name, label) in enumerate((("y*", "y*, strength m tau"), ("y_best", "y_best, strength N tau"))):
        right.plot(
            sizes,
            means(f"excess error, {name}"),
            color=charts.COLOURS[index],
            marker=charts.MARKERS[index],
            ms=4,
            label=label,
        )
    errors = [means(f"excess error, {name}") for name in ("y_best", "y*")]
    worse = [best - star for best, star in zip(*errors, strict=True)]
    right.plot(*_positive(sizes, worse), ":", color=charts.GREY, label="y_best's error less y*'s")
    right.set_yscale("log")
    charts.dress(
        right,
        "Left out: the error against the labels",
        "N (examples in the prompt)",
        "mean square error beyond the noise",
    )
    for axes in (left, right):
        axes.axvline(m, color=charts.GREY, linestyle=":", label="N = m")
        _below(axes)
    facts = found.facts
    figure.suptitle(f"Figure 3: m = {m}, K = {facts['K']}, tau = {facts['tau']:g}, {facts['draws']} draws", fontsize=11)
    return figure


def figure_4(found: Finding) -> Figure:
    """The population loss and its gap for each H, for both kinds of tokens."""
    from matplotlib import colormaps

    figure = charts.blank(11.0, 8.4)
    heads = sorted(set(column(found, "H")))
    colours = [colormaps["viridis"](index / max(1, len(heads) - 1)) for index in range(len(heads))]
    for across, tokens in zip(figure.subplots(2, 2), ("Gaussian", "norm 1"), strict=True):
        for axes, name in zip(across, ("loss", "gap"), strict=True):
            for colour, H in zip(colours, heads, strict=True):
                of: dict[str, Any] = {"tokens": tokens, "H": H}
                epochs, values = column(found, "epoch", **of), column(found, name, **of)
                axes.plot(*_positive(epochs, values), color=colour, linewidth=1.3, label=f"H = {H}")
            if name == "loss":
                axes.axhline(found.facts["infimum"], color=charts.GREY, linestyle="--", label="infimum")
            axes.set_yscale("log")
            words = f"{tokens} tokens{', as printed' if tokens == 'Gaussian' else ''}"
            charts.dress(
                axes, f"{words}: {'population loss' if name == 'loss' else 'its gap to the infimum'}", "epochs", name
            )
            _epochs(axes, found.facts["steps in an epoch"])
        charts.legend_beside(across[1])
    figure.suptitle(f"Figure 4: one layer, {_sizes(found)}, Adam {found.facts['rate']:g}", fontsize=11)
    return figure


def figure_5(found: Finding) -> Figure:
    """Final losses against H, training curves by step and by time."""
    from matplotlib import colormaps

    figure = charts.blank(14.0, 4.8)
    ends, by_step, by_time = figure.subplots(1, 3)
    heads = sorted(set(column(found, "H")))
    for index, (name, label) in enumerate(LOSSES):
        last = [column(found, name, H=H)[-1] for H in heads]
        ends.plot(heads, last, color=charts.COLOURS[index], marker=charts.MARKERS[index], ms=4, label=label)
    ends.set_xscale("log", base=2)
    ends.set_xticks(heads, list(map(str, heads)))
    ends.minorticks_off()
    for index, H in enumerate(heads):
        colour = colormaps["viridis"](index / max(1, len(heads) - 1))
        losses = column(found, "loss", H=H)
        by_step.plot(column(found, "step", H=H), losses, color=colour, label=f"H = {H}")
        by_time.plot(column(found, "seconds", H=H), losses, color=colour, label=f"H = {H}")
    seconds = found.facts["seconds"]
    charts.dress(ends, f"(a) after {seconds:g} s", "heads H", "loss at the end")
    charts.dress(by_step, "(b) training loss by step", "Adam steps", "loss")
    charts.dress(by_time, "training loss by time", "seconds", "loss")
    for axes in (ends, by_step, by_time):
        axes.set_yscale("log")
        _below(axes, 3)
    device, batch = found.facts["device"], found.facts["batch"]
    figure.suptitle(
        f"Figure 5: four layers, {_sizes(found)}; {seconds:g} s each on {device}, batch {batch}", fontsize=11
    )
    return figure


def theorem_1(found: Finding) -> Figure:
    """The gap and (18), a panel an instance."""
    names = list(dict.fromkeys(column(found, "instance")))
    figure = charts.blank(3.6 * len(names), 4.2)
    for axes, name in zip(figure.subplots(1, len(names), squeeze=False)[0], names, strict=True):
        steps = column(found, "step", instance=name)
        axes.plot(*_positive(steps, column(found, "gap", instance=name)), color=charts.COLOURS[0], label="measured")
        bound = _positive(steps, column(found, "bound (18)", instance=name))
        axes.plot(*bound, "--", color=charts.COLOURS[1], label="bound (18)")
        axes.set_yscale("log")
        charts.dress(axes, name, "step", "gap to the infimum")
        _below(axes)
    figure.suptitle(
        "Theorem 1 at its own step sizes (15), (16), with L of (61): unit-norm tokens, m = N, tau = 1", fontsize=11
    )
    return figure


def theorem_2(found: Finding) -> Figure:
    """The error of most prompts along the descent, with epsilon and T."""
    names = list(dict.fromkeys(column(found, "instance")))
    figure = charts.blank(4.2 * len(names), 4.2)
    quantile = found.columns[2]
    for axes, name in zip(figure.subplots(1, len(names), squeeze=False)[0], names, strict=True):
        steps = column(found, "step", instance=name)
        for index, (place, label) in enumerate(((quantile, quantile), ("largest error", "the largest"))):
            values = _positive(steps, column(found, place, instance=name))
            axes.plot(*values, color=charts.COLOURS[index], label=label)
        axes.axhline(found.facts["epsilon"], color=charts.GREY, linestyle=":", label="epsilon")
        axes.axvline(column(found, "T", instance=name)[0], color=charts.COLOURS[2], linestyle="--", label="T (21)")
        axes.set_yscale("log")
        charts.dress(axes, name, "step", "1/(2K) |yhat - y*|^2")
        _below(axes)
    figure.suptitle(f"Theorem 2 over {found.facts['prompts']} prompts, delta = {found.facts['delta']:g}", fontsize=11)
    return figure


def proposition_1(found: Finding) -> Figure:
    """Full rank and least singular values against H."""
    figure = charts.blank(11.0, 4.6)
    left, right = figure.subplots(1, 2)
    for index, tokens in enumerate(dict.fromkeys(column(found, "tokens"))):
        style = {"color": charts.COLOURS[index], "marker": charts.MARKERS[index], "ms": 5, "label": tokens}
        heads = column(found, "H", tokens=tokens)
        left.plot(heads, column(found, "share with full rank", tokens=tokens), **style)
        least = column(found, "least singular value, median of starts", tokens=tokens)
        right.plot(heads, [max(value, 1e-20) for value in least], **style)
    right.set_yscale("log")
    charts.dress(left, "Share of the C_k with full row rank, in floating point", "heads H", "share")
    charts.dress(right, "Least singular value over k (median of starts; 0 drawn at 1e-20)", "heads H", "")
    for axes in (left, right):
        axes.axvline(found.facts["N"], color=charts.GREY, linestyle=":", label="H = N")
        _below(axes)
    figure.suptitle(f"Proposition 1: N = {found.facts['N']}, {found.facts['draws']} starts", fontsize=11)
    return figure


def language(found: Finding) -> Figure:
    """Errors of the model and of ridge regression, and what the model's answers are near to, as N grows."""
    kinds = list(dict.fromkeys(column(found, "tasks")))
    figure = charts.blank(11.0, 8.6)
    shown = {
        "error, model": "the model (mean of its answers)",
        "error, ridge m tau": "ridge regression, strength m tau",
        "error, matched ridge": "ridge regression, matched to the model",
    }
    away = {
        "model from matched ridge": "ridge regression, matched strength",
        "model from ridge m tau": "ridge regression, strength m tau",
        "model from the mean of the labels": "mean of the labels shown",
        "model from the nearest label": "label of the nearest x",
    }
    for across, kind in zip(figure.subplots(len(kinds), 2, squeeze=False), kinds, strict=True):
        for axes, names in zip(across, (shown, away), strict=True):
            sizes = column(found, "N", tasks=kind)
            for index, (name, label) in enumerate(names.items()):
                style = {"color": charts.COLOURS[index], "marker": charts.MARKERS[index], "ms": 4}
                axes.plot(sizes, column(found, name, tasks=kind), label=label, **style)
            axes.set_xscale("log", base=2)
            axes.set_xticks(sizes, list(map(str, sizes)))
            axes.minorticks_off()
            axes.set_ylim(0, None)
            _below(axes)
        charts.dress(across[0], f"{kind}: error of the answer", "N (examples in the prompt)", "root mean square")
        charts.dress(across[1], f"{kind}: the model's answer is so far from", "N (examples in the prompt)", "")
    title = f"{found.facts['model']} in context, {found.facts['tasks']} tasks of each kind (y from 0 to 99)"
    figure.suptitle(title, fontsize=11)
    return figure


DRAWN: dict[str, Callable[[Finding], Figure]] = {
    "icl-run": run,
    "icl-figure-2a": figure_2a,
    "icl-figure-2b": figure_2b,
    "icl-figure-3": figure_3,
    "icl-figure-4": figure_4,
    "icl-figure-5": figure_5,
    "icl-theorem-1": theorem_1,
    "icl-theorem-2": theorem_2,
    "icl-proposition-1": proposition_1,
    "icl-language": language,
}
