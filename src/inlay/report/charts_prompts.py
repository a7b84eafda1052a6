"""Pictures of prompts: how their information is distributed, and the surface on which they were trained."""

from __future__ import annotations

from statistics import fmean
from typing import TYPE_CHECKING

from inlay.report import charts
from inlay.workflow.explain import model_name, subject_name

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from inlay.workflow.explain_landscape import Landscape
    from inlay.workflow.explain_prompts import Information


def information(found: Information) -> Figure:
    """A distribution over texts for each source, its mean as a line: InfoPrompt's figure 1."""
    import numpy as np
    from scipy.stats import gaussian_kde

    figure = charts.blank(8.0, 4.4)
    axes = figure.subplots()
    low = min(min(source.values) for source in found.sources)
    high = max(max(source.values) for source in found.sources)
    room = 0.1 * max(high - low, 1e-3)
    x = np.linspace(low - room, high + room, 400)
    for colour, source in zip(charts.COLOURS * 3, found.sources, strict=False):
        label = f"{source.name}: {fmean(source.values):.3f}"
        if np.ptp(source.values) > 1e-6:
            density = gaussian_kde(source.values)(x)
            axes.plot(x, density, color=colour, label=label)
            axes.fill_between(x, density, color=colour, alpha=0.12, linewidth=0)
        else:
            axes.plot([], [], color=colour, label=label)
        axes.axvline(fmean(source.values), color=colour, linestyle=":", linewidth=1)
    subject = f"{subject_name(found.spec)}, {model_name(found.spec.model)}"
    title = f"Information of prompts, {subject}, {found.examples} texts (K = {found.negatives})"
    charts.dress(axes, title, "bound on I(P; Z | X), nats a text", "density")
    charts.legend_beside(axes)
    return figure


def landscape(found: Landscape) -> Figure:
    """A surface for each loss with the paths upon it, a star where each began: InfoPrompt's figure 2."""
    figure = charts.blank(5.4 * len(found.values), 4.6)
    subject = f"{subject_name(found.spec)}, {model_name(found.spec.model)}"
    for axes, (name, table) in zip(
        figure.subplots(1, len(found.values), squeeze=False)[0], found.values.items(), strict=True
    ):
        drawn = axes.contourf(found.x, found.y, table, levels=24, cmap="cividis")
        figure.colorbar(drawn, ax=axes, label=f"{name} loss, mean of {found.examples} texts")
        for colour, path in zip((charts.COLOURS[2], charts.COLOURS[3]), found.paths, strict=False):
            across, up = zip(*path.points, strict=True)
            axes.plot(across, up, color=colour, linewidth=1.6, label=f"{path.name}, {path.steps[-1]} steps")
            axes.plot(across[0], up[0], marker="*", ms=12, color=colour, markeredgecolor="white")
        charts.dress(axes, f"{name} loss, {subject}", "component 1 of the embeddings, from their mean", "component 2")
        axes.grid(visible=False)
        axes.legend(fontsize=8, loc="upper right")
    return figure
