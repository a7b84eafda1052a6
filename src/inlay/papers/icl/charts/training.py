"""Pictures of what `inlay lab icl` measures in training, each from the numbers of its experiment alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from inlay.papers.icl.charts import theory as charts_icl_theory
from inlay.papers.icl.charts.theory import below, positive
from inlay.report.charts import drawing as charts

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from inlay.papers.findings import Finding
    from inlay.papers.icl.theory.descent import Trace

SMALL = 8
LOSSES = (
    ("loss", "training loss (9)"),
    ("in-domain", "inference loss, in-domain"),
    ("out-of-domain", "inference loss, out-of-domain"),
)


def _epochs(axes: Axes, epoch: int) -> None:
    """Epochs below, steps above: the paper's "iteration" could be either, and fits an epoch."""

    def steps(epochs: Any) -> Any:
        return epochs * epoch

    def epochs(steps: Any) -> Any:
        return steps / epoch

    above = axes.secondary_xaxis("top", functions=(steps, epochs))
    above.set_xlabel("Adam steps", fontsize=SMALL)
    above.tick_params(labelsize=SMALL)


def _shades(count: int) -> list[Any]:
    """From dark to light, without the palest, which white paper swallows."""
    from matplotlib import colormaps

    return [colormaps["viridis"](0.92 * index / max(1, count - 1)) for index in range(count)]


def _sizes(found: Finding) -> str:
    facts = found.facts
    heads = facts["heads"]
    shown = f", H = {heads}" if isinstance(heads, int) else ""
    return f"N = {facts['N']}, K = {facts['K']}, d = {facts['d']}, m = {facts['m']}, tau = {facts['tau']:g}{shown}"


def _length(found: Finding, printed: int) -> str:
    """How far the longest training went, where it is less far than the printed one."""
    epochs = max(found.column("epoch"))
    return f"; {epochs:.0f} of the printed {printed} epochs" if epochs < printed else ""


def curves(trace: Trace) -> Figure:
    """A training of one's own, from `Trace.plot()`."""
    figure = charts.blank()
    axes = figure.subplots()
    for index, (name, values) in enumerate(trace.curves.items()):
        axes.plot(*positive(trace.steps, values), color=charts.COLOURS[index], label=name)
    axes.axhline(trace.infimum, color=charts.GREY, linestyle="--", label="infimum of the loss")
    axes.set_yscale("log")
    charts.dress(axes, "Training", "step", "loss")
    charts.legend_beside(axes)
    return figure


def run(found: Finding) -> Figure:
    """A training of one's own, from the command line."""
    figure = charts.blank(8.5, 4.4)
    axes = figure.subplots()
    steps = found.column("step")
    for index, (name, label) in enumerate((*LOSSES, ("gap", "training loss less its infimum"))):
        points = positive(steps, found.column(name))
        if points[0]:
            axes.plot(*points, color=charts.COLOURS[index], label=label)
    axes.axhline(found.facts["infimum"], color=charts.GREY, linestyle="--", label="infimum of the training loss")
    axes.set_yscale("log")
    charts.dress(axes, found.facts["name"], "step", "loss")
    charts.legend_beside(axes)
    return figure


def figure_2a(found: Finding) -> Figure:
    """Losses of one layer against epochs and steps."""
    from inlay.papers.icl.theory.lab.one_layer import FIGURE_2_EPOCHS

    figure = charts.blank(11.0, 5.0)
    batch = found.facts["batch"]
    ways = {"closed form": ("-", ""), "samples": (":", f", batches of {batch}")}
    panels = figure.subplots(1, 2, sharey=True)
    for axes, tokens in zip(panels, ("Gaussian", "norm 1"), strict=True):
        for way, (style, words) in ways.items():
            of = {"tokens": tokens, "training": way}
            for index, (name, label) in enumerate(LOSSES):
                points = positive(found.column("epoch", **of), found.column(name, **of))
                if points[0]:
                    axes.plot(*points, style, color=charts.COLOURS[index], label=label + words)
        axes.axhline(found.facts["infimum"], color=charts.GREY, linestyle="--", label="infimum of the training loss")
        axes.set_yscale("log")
        words = "Gaussian tokens, as printed" if tokens == "Gaussian" else "tokens of norm 1"
        charts.dress(axes, words, "epochs of 10,000 samples", "loss" if tokens == "Gaussian" else "")
        _epochs(axes, found.facts["steps in an epoch"])
    below(figure, panels[0], 3)
    words = f"Figure 2(a): one layer, {_sizes(found)}, Adam {found.facts['rate']:g}{_length(found, FIGURE_2_EPOCHS)}"
    figure.suptitle(words, fontsize=11)
    return figure


def figure_2b(found: Finding) -> Figure:
    """Losses of four layers against epochs and steps."""
    from inlay.papers.icl.theory.lab.one_layer import FIGURE_2_EPOCHS

    facts = found.facts
    figure = charts.blank(7.4, 4.8)
    axes = figure.subplots()
    for index, (name, label) in enumerate(LOSSES):
        points = positive(found.column("epoch"), found.column(name))
        axes.plot(*points, color=charts.COLOURS[index], label=label)
    axes.axhline(facts["infimum"], color=charts.GREY, linestyle="--", label="least loss of one layer (Lemma 5)")
    axes.set_yscale("log")
    charts.dress(axes, "", "epochs of 10,000 samples", "loss")
    _epochs(axes, facts["steps in an epoch"])
    below(figure, axes, 2)
    words = f"Figure 2(b): four layers, Adam {facts['rate']:g}, batch {facts['batch']}{_length(found, FIGURE_2_EPOCHS)}"
    figure.suptitle(f"{words}\n{_sizes(found)}", fontsize=10)
    return figure


def figure_4(found: Finding) -> Figure:
    """The population loss and its gap for each H: both kinds of tokens, and the larger rate."""
    from inlay.papers.icl.theory.lab.one_layer import FIGURE_4_EPOCHS

    facts = found.facts
    figure = charts.blank(10.5, 11.0)
    heads = sorted(set(found.column("H")))
    rates = sorted(set(found.column("rate")))
    parts = [("Gaussian", rates[0], "Gaussian tokens, as printed"), ("norm 1", rates[0], "tokens of norm 1")]
    parts += [("Gaussian", rate, f"Gaussian tokens, Adam {rate:g}") for rate in rates[1:]]
    panels = figure.subplots(len(parts), 2, squeeze=False)
    for across, (tokens, rate, words) in zip(panels, parts, strict=True):
        for axes, name in zip(across, ("loss", "gap"), strict=True):
            for colour, H in zip(_shades(len(heads)), heads, strict=True):
                of: dict[str, Any] = {"tokens": tokens, "rate": rate, "H": H}
                points = positive(found.column("epoch", **of), found.column(name, **of))
                axes.plot(*points, color=colour, linewidth=1.4, label=f"H = {H}")
            if name == "loss":
                axes.axhline(facts["infimum"], color=charts.GREY, linestyle="--", label="infimum of the loss")
            axes.set_yscale("log")
            label = "population loss (9)" if name == "loss" else "loss less its infimum"
            charts.dress(axes, words, "epochs of 10,000 samples", label)
            _epochs(axes, facts["steps in an epoch"])
    below(figure, panels[0][0], 5)
    words = f"Figure 4: one layer, {_sizes(found)}, Adam {facts['rate']:g}{_length(found, FIGURE_4_EPOCHS)}"
    figure.suptitle(words, fontsize=11)
    return figure


def figure_5(found: Finding) -> Figure:
    """Final losses against H, training curves by step and by time."""
    facts = found.facts
    figure = charts.blank(13.0, 4.6)
    ends, by_step, by_time = figure.subplots(1, 3, sharey=True)
    heads = sorted(set(found.column("H")))
    for index, (name, label) in enumerate(LOSSES):
        last = [found.column(name, H=H)[-1] for H in heads]
        ends.plot(heads, last, color=charts.COLOURS[index], marker=charts.MARKERS[index], ms=4, label=label)
    ends.set_xscale("log", base=2)
    ends.set_xticks(heads, list(map(str, heads)))
    ends.minorticks_off()
    for colour, H in zip(_shades(len(heads)), heads, strict=True):
        losses = found.column("loss", H=H)
        by_step.plot(found.column("epoch", H=H), losses, color=colour, linewidth=1.4, label=f"H = {H}")
        by_time.plot(found.column("seconds", H=H), losses, color=colour, linewidth=1.4)
    charts.dress(ends, f"(a) losses after {facts['seconds']:g} s", "heads H", "loss")
    charts.dress(by_step, "(b) training loss by epoch", "epochs of 10,000 samples", "")
    charts.dress(by_time, "training loss by time", "seconds", "")
    _epochs(by_step, facts["steps in an epoch"])
    ends.set_yscale("log")
    ends.legend(frameon=False, fontsize=SMALL)
    by_time.axhline(facts["infimum"], color=charts.GREY, linestyle="--")
    by_step.axhline(facts["infimum"], color=charts.GREY, linestyle="--", label="least loss of one layer")
    below(figure, by_step, 8)
    words = f"Figure 5: four layers, {_sizes(found)}; {facts['seconds']:g} s each, batch {facts['batch']}"
    figure.suptitle(words, fontsize=11)
    return figure


DRAWN: dict[str, Callable[[Finding], Figure]] = {
    "icl-run": run,
    "icl-figure-2a": figure_2a,
    "icl-figure-2b": figure_2b,
    "icl-figure-4": figure_4,
    "icl-figure-5": figure_5,
    **charts_icl_theory.DRAWN,
}
