"""What a prefix costs as it grows: figure 3 of "Towards Infinite-Long Prefix in Transformer" (appendix E.2)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from inlay.report.charts import drawing as charts

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def cost(rows: Sequence[Mapping[str, float]]) -> Figure:
    """Time of one attention against the length m of the prefix, for every length L of the text.

    A row has `L`, `m`, `exact_ms` (Algorithm 1, whose time is linear in m: the grey line rises as m does) and `ntk_ms`
    (Algorithm 2, in which m does not occur).
    """
    figure = charts.blank(7.5, 4.6)
    axes = figure.subplots()
    for index, length in enumerate(sorted({row["L"] for row in rows})):
        own = sorted((row for row in rows if row["L"] == length), key=lambda row: row["m"])
        m = [row["m"] for row in own]
        style: dict[str, Any] = {"color": charts.COLOURS[index], "marker": charts.MARKERS[index], "ms": 4, "lw": 1.2}
        axes.plot(m, [row["exact_ms"] for row in own], label=f"exact prefix, L = {length:g}", **style)
        axes.plot(m, [row["ntk_ms"] for row in own], "--", mfc="none", label=f"NTK-Attention, L = {length:g}", **style)
    last = max(rows, key=lambda row: (row["m"], row["L"]))
    far = [last["m"] / 64, last["m"]]
    axes.plot(far, [1.8 * last["exact_ms"] * m / last["m"] for m in far], ":", color=charts.GREY, label="linear in m")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    charts.dress(axes, "One attention with a prefix, forward", "length of the prefix m", "time, ms")
    charts.legend_beside(axes)
    return figure
