"""The tables and plots of docs/cost.md, from what benchmarks/own_loop.py and benchmarks/growth.py found.

python scripts/document_cost.py --write    # bring the tables up to date
python scripts/document_cost.py --draw     # the tables, and docs/images/cost/*.png
python scripts/document_cost.py --check    # fail where the tables are not
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from matplotlib.ticker import FuncFormatter
from page_tables import BENCHMARKS, DOCS, filled, head, row

from inlay.report.charts import drawing as charts

PAGE, RESULTS, IMAGES = DOCS / "cost.md", BENCHMARKS, DOCS / "images" / "cost"
COMPILED = "-compiled"  # how rows end whose models are cut to a few layers
NONE = ["Not measured yet."]
DEVICES = ("cuda", "cpu")
DECADE = 10
PACKAGES = ("torch", "transformers", "peft")
Point = Sequence[float | None]


def read(name: str, device: str) -> dict[str, Any]:
    """What a benchmark kept for a device; empty where it has not run."""
    file = RESULTS / f"{name}-{device}.json"
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}


# What each method costs


def table_of_costs(found: Mapping[str, Any], compiled: bool) -> list[str]:
    """A line for every ratio: ours, the peer, the quotient with its range over the rounds, the goal."""
    rows = {name: entry for name, entry in found.get("rows", {}).items() if name.endswith(COMPILED) == compiled}
    if not rows:
        return NONE
    titles = ["work", "ours", "peer", "ratio", "over the rounds", *([] if compiled else ["goal", "met"])]
    lines = head(*titles)
    for entry in rows.values():
        for line in entry["lines"]:
            cells = [line["work"], *_values(line)]
            lines.append(row(*cells, *([] if compiled else _verdict(line))))
    notes = [
        f"{contender}: {one['note']}"
        for entry in rows.values()
        for contender, one in entry.get("measured", {}).items()
        if one.get("note")
    ]
    return [*lines, "", *provenance(rows.values()), *([""] if notes else []), *_bullets(notes)]


def _values(line: Mapping[str, Any]) -> list[str]:
    if line.get("ratio") is None:
        return ["not measured", "", "", ""]
    sizes = [f"{line[key]:.{_digits(line[key])}f} {line['unit']}" for key in ("ours_value", "peer_value")]
    spread = "{:.2f} to {:.2f}".format(*line["spread"]) if line.get("spread") else ""
    return [*sizes, f"{line['ratio']:.2f}", spread]


def _digits(value: float) -> int:
    return 3 if value < 1 else 2 if value < 10 else 1 if value < 1000 else 0


def _verdict(line: Mapping[str, Any]) -> list[str]:
    if line["goal"] is None:
        return ["", ""]
    return [f"{'keep' if line['keep'] else '<='} {line['goal']:.2f}", "yes" if line["met"] else "**missed**"]


def _bullets(texts: Iterable[str]) -> list[str]:
    return [f"- {text}" for text in texts]


def provenance(entries: Iterable[Mapping[str, Any]]) -> list[str]:
    """Which machines, commits and versions made these; a commit with `+` had changes."""
    made: dict[tuple[str, ...], int] = {}
    for entry in entries:
        about = entry["versions"]
        commit = str(about["commit"] or "unknown")
        machine = str(about.get("gpu") or f"{about.get('cpu')}, {about.get('threads')} threads")
        key = (machine, commit[:12] + "+" * commit.endswith("+"), *(str(about[name]) for name in PACKAGES))
        made[key] = made.get(key, 0) + 1
    texts = [
        f"{machine}, commit {commit}, torch {torch}, Transformers {transformers}, PEFT {peft}"
        + (f" ({count} row{'s' * (count > 1)})" if len(made) > 1 else "")
        for (machine, commit, torch, transformers, peft), count in made.items()
    ]
    return [f"Measured on {'; '.join(texts)}."]


def goals(found: Mapping[str, Any]) -> list[str]:
    """How many goals are met, and which are not."""
    set_goals = [
        line for entry in found.get("rows", {}).values() for line in entry["lines"] if line.get("goal") is not None
    ]
    if not set_goals:
        return NONE
    missed = [line for line in set_goals if not line["met"]]
    met = len(set_goals) - len(missed)
    device = str(found["device"]).replace("cpu, ", "a CPU with ")
    if not missed:
        return [f"On {device} {'the one goal is' if met == 1 else f'all {met} goals are'} met."]
    told = [f"{line['work']}: {_ratio(line)}, goal {line['goal']:.2f}" for line in missed]
    are = "is" if met == 1 else "are"
    return [f"On {device} {met} of {len(set_goals)} goals {are} met. Missed:", "", *_bullets(told)]


def _ratio(line: Mapping[str, Any]) -> str:
    return "not measured" if line.get("ratio") is None else f"{line['ratio']:.2f}"


# How cost grows


def grown(device: str) -> list[str]:
    """A line for every curve: from the least to the greatest x, time and memory, and by how much they grew."""
    found = read("growth", device)
    if not found:
        return NONE
    lines = head("what grows", "curve", "from", "to", "time, ms", "times", "memory, MiB", "times")
    for plot in found["plots"].values():
        name = f"{plot['about']}: {plot['x']}"
        for curve, points in plot["curves"].items():
            (x, ms, peak), (last_x, last_ms, last_peak) = points[0], points[-1]
            memory = ["", ""] if peak is None else [f"{_mib(peak)} to {_mib(last_peak)}", f"{last_peak / peak:.1f}"]
            time = f"{ms:.{_digits(ms)}f} to {last_ms:.{_digits(last_ms)}f}"
            lines.append(row(name, curve, f"{x:,.0f}", f"{last_x:,.0f}", time, f"{last_ms / ms:.1f}", *memory))
            name = ""
    failed = [text for plot in found["plots"].values() for text in plot["failed"]]
    return [*lines, "", *provenance(found["plots"].values()), *_ended(failed)]


def _mib(size: float) -> str:
    return f"{size / 2**20:,.0f}"


def _ended(failed: Sequence[str]) -> list[str]:
    return ["", "Curves that end early:", "", *_bullets(failed)] if failed else []


def drawn() -> dict[str, Any]:
    """The plots that there are, a GPU's where it has been measured."""
    return next((found for device in DEVICES if (found := read("growth", device))), {})


def pictures() -> list[str]:
    """The plots, each with what it shows."""
    found = drawn()
    if not found:
        return NONE
    shown = []
    for name, plot in found["plots"].items():
        if plot["curves"]:
            shown += [f"![{plot['about']}, against {plot['x']}](images/cost/{name}.png)", ""]
    return shown[:-1]


def _plain(value: float, _: object = None) -> str:
    """A number on an axis: 512, 4k, 64k, 0.5."""
    if value >= 1024 and value % 1024 == 0:
        return f"{value / 1024:g}k"
    return f"{value:g}"


def _leads(value: float) -> bool:
    """Whether a number is 2 or 5 times a power of ten: others stand too close on a logarithmic axis."""
    return f"{value:e}"[0] in "25"


def draw() -> None:
    IMAGES.mkdir(parents=True, exist_ok=True)
    found = drawn()
    for name, plot in found.get("plots", {}).items():
        if plot["curves"]:
            charts.save(chart(plot, found["device"]), IMAGES / f"{name}.png")


def chart(plot: Mapping[str, Any], device: str) -> Any:
    """Time, and memory beside it where it was measured, against what grows; logarithmic where it spans a decade."""
    memory = any(point[2] is not None for points in plot["curves"].values() for point in points)
    figure = charts.blank(11.0 if memory else 7.5, 4.2)
    figure.suptitle(f"{plot['about']} ({device})", fontsize=10, x=0.01, ha="left")
    panels = figure.subplots(1, 2 if memory else 1, squeeze=False)[0]
    names = [("Time", "time, ms", 1, 1.0), ("Peak memory", "memory, GiB", 2, 2.0**30)]
    for axes, (title, label, place, unit) in zip(panels, names[: len(panels)], strict=True):
        for index, (curve, points) in enumerate(plot["curves"].items()):
            style = {"color": charts.COLOURS[index % 7], "marker": charts.MARKERS[index % 7], "ms": 4, "lw": 1.2}
            axes.plot([p[0] for p in points], [p[place] / unit for p in points], label=curve, **style)
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(FuncFormatter(_plain))
        values = [p[place] / unit for points in plot["curves"].values() for p in points]
        if max(values) > DECADE * min(values):
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter(FuncFormatter(_plain))
            axes.yaxis.set_minor_formatter(FuncFormatter(lambda value, _: _plain(value) if _leads(value) else ""))
        else:
            axes.set_ylim(0, 1.1 * max(values))
        charts.dress(axes, title, plot["x"], label)
    charts.legend_beside(panels[-1])
    return figure


# The page


def page() -> str:
    """docs/cost.md as it should be."""
    parts: dict[str, list[str]] = {"plots": pictures()}
    for device in DEVICES:
        costs = read("own-loop", device)
        parts |= {
            f"goals {device}": goals(costs),
            f"costs {device}": table_of_costs(costs, compiled=False),
            f"compiled {device}": table_of_costs(costs, compiled=True),
            f"growth {device}": grown(device),
        }
    return filled(PAGE, parts)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--write", action="store_true", help="bring the tables up to date")
    action.add_argument("--draw", action="store_true", help="the tables and the plots")
    action.add_argument("--check", action="store_true", help="say whether the tables are out of date")
    options = parser.parse_args(arguments)
    wanted = page()
    if options.check:
        if PAGE.read_text(encoding="utf-8") == wanted:
            return 0
        print("docs/cost.md is out of date: run python scripts/document_cost.py --draw", file=sys.stderr)
        return 1
    PAGE.write_text(wanted, encoding="utf-8")
    if options.draw:
        draw()
    return 0


if __name__ == "__main__":
    sys.exit(main())
