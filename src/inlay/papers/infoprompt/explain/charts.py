"""Pictures of prompts: how their information is distributed, the surface they were trained on, how fast they learn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Any

from inlay.report.charts import drawing as charts
from inlay.workflow.explain.explanation import model_name, subject_name

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from inlay.papers.infoprompt.explain.information import Information
    from inlay.papers.infoprompt.explain.landscape import Landscape

LEAST_LEFT = 1e-6  # nats: the bound is computed in float32


def information(found: Information) -> Figure:
    """A distribution over texts for each source, its mean as a line: InfoPrompt's figure 1.

    Where all are at the end of the bound, what is left to it is drawn instead, on a logarithmic scale.
    """
    import numpy as np
    from scipy.stats import gaussian_kde

    def across(values: Sequence[float]) -> Any:
        return np.log10(np.maximum(found.most - np.array(values), LEAST_LEFT)) if found.full else np.array(values)

    figure = charts.blank(8.0, 4.4)
    axes = figure.subplots()
    values = {source.name: across(source.values) for source in found.sources}
    low, high = min(map(np.min, values.values())), max(map(np.max, values.values()))
    room = 0.1 * max(high - low, 1e-3)
    x = np.linspace(low - room, high + room if found.full else min(high + room, found.most), 400)  # it ends there
    for colour, source in zip(charts.COLOURS * 3, found.sources, strict=False):
        label = f"{source.name}: {fmean(source.values):.3f}"
        density = (
            gaussian_kde(values[source.name])(x) if np.ptp(values[source.name]) > 1e-6 else np.full_like(x, np.nan)
        )
        shown = 10**x if found.full else x
        axes.plot(shown, density, color=colour, label=label)
        axes.fill_between(shown, density, color=colour, alpha=0.12, linewidth=0)
        mean = found.most - fmean(source.values) if found.full else fmean(source.values)
        axes.axvline(mean, color=colour, linestyle=":", linewidth=1)
    subject = f"{subject_name(found.spec)}, {model_name(found.spec.model)}"
    title = f"Information of prompts, {subject}, {found.examples} texts (K = {found.negatives})"
    said = "bound on I(P; Z | X), nats a text"
    if found.full:
        axes.set_xscale("log")
        said = f"what the {said}, lacks of log K = {found.most:.3f}: all are full"
    elif high > 0.5 * found.most:
        axes.axvline(found.most, color=charts.GREY, linestyle="--", linewidth=1, label=f"log K: {found.most:.3f}")
    charts.dress(axes, title, said, "density")
    charts.legend_beside(axes)
    return figure


def landscape(found: Landscape) -> Figure:
    """A surface for each loss with the paths upon it, a star where each began, a dot where it ended: InfoPrompt's
    figure 2.

    A path's own losses are not on the surface's scale, which has what the training ended with: they are written down.
    """
    figure = charts.blank(5.6 * len(found.values), 5.0)
    subject = f"{subject_name(found.spec)}, {model_name(found.spec.model)}"
    for axes, (name, table) in zip(
        figure.subplots(1, len(found.values), squeeze=False)[0], found.values.items(), strict=True
    ):
        drawn = axes.contourf(found.x, found.y, table, levels=24, cmap="cividis")
        figure.colorbar(drawn, ax=axes, label=f"{name} loss, mean of {found.examples} texts")
        for colour, path in zip((charts.COLOURS[2], charts.COLOURS[3]), found.paths, strict=False):
            across, up = zip(*path.points, strict=True)
            losses = {"task": path.task, "representation": path.representation}.get(name, ())
            words = f"{path.name}, {path.steps[-1]} steps"
            words += f": loss from {losses[0]:.3g} (star) to {losses[-1]:.3g} (dot)" if losses else ""
            axes.plot(across, up, color=colour, linewidth=1.6, label=words)
            axes.plot(across[0], up[0], marker="*", ms=12, color=colour, markeredgecolor="white")
            axes.plot(across[-1], up[-1], marker="o", ms=6, color=colour, markeredgecolor="white")
        fixed = "critic" if name == "representation" else "class vectors"
        title = f"{name} loss, {subject}\nsurface: by the {fixed} after the last step of {found.paths[0].name};"
        title += "\nby earlier ones losses were others: a path's own are below"
        charts.dress(axes, title, "component 1 of the embeddings, from their mean", "component 2")
        axes.grid(visible=False)
        axes.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.13), frameon=False)
    return figure


def learning_curves(panels: Mapping[str, Mapping[str, Mapping[int, Sequence[float]]]], what: str) -> Figure:
    """How far each method has come after so many epochs, a panel a subject: InfoPrompt's figure 3.

    A panel has the values of the seeds for each method and epoch: the line is their mean, the band its standard error.
    """
    from inlay.workflow.statistics import standard_error

    figure = charts.blank(4.2 * len(panels) + 2.0, 4.0)
    grid = figure.subplots(1, len(panels), squeeze=False)[0]
    for axes, (title, methods) in zip(grid, panels.items(), strict=True):
        for index, (name, points) in enumerate(methods.items()):
            colour, shape = charts.COLOURS[index % 7], charts.MARKERS[index % 7]
            epochs = sorted(points)
            means = [fmean(points[epoch]) for epoch in epochs]
            errors = [standard_error(points[epoch]) or 0.0 for epoch in epochs]
            axes.plot(epochs, means, color=colour, marker=shape, ms=4, lw=1.4, label=name)
            low, high = ([m + sign * e for m, e in zip(means, errors, strict=True)] for sign in (-1, 1))
            axes.fill_between(epochs, low, high, color=colour, alpha=0.12, linewidth=0)
        axes.set_xscale("log")
        axes.set_xticks(epochs, map(str, epochs))
        axes.minorticks_off()
        charts.dress(axes, title, "epochs", what)
    charts.legend_beside(grid[-1])
    return figure
