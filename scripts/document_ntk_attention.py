"""The tables of docs/ntk-attention-measured.md, from what the paper keeps and what benchmarks/ntk.py found; figure 3.

python scripts/document_ntk_attention.py            # the tables
python scripts/document_ntk_attention.py --draw     # docs/images/ntk-figure-3.png, from kept/figure_3.json
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from page_tables import BENCHMARKS, DOCS, difference, fill, head, row, shown

from inlay.papers.ntk_attention.table import ANSWERS, BESIDE, FILE, GROUPS, SEEDS, UNTRAINED, beside, cell
from inlay.papers.reproduce import kept

BESIDE_FILE = kept.path("activation_prompts", "table.json")


def lines_of(group: str) -> list[str]:
    names = [line.name for line in GROUPS[group].lines]
    return [*names, *BESIDE] if group == "vision" else names


def scale(metric: str) -> tuple[float, int]:
    """What a metric is multiplied by to be shown, and its digits: accuracy is in per cent."""
    return (1, 2) if metric == "perplexity" else (100, 1)


def results_table(runs: Sequence[dict[str, Any]], group: str) -> list[str]:
    """Every line's test metric on every task; the mean over the tasks, or the share of answers that are right."""
    from inlay.cli.show import count

    tasks = GROUPS[group].tasks
    last = [f"gsm8k, correct of {ANSWERS}, %"] if group == "language" else ["mean"]
    lines = head("method", "trained parameters", "learning rate", *tasks, *last)
    for name in lines_of(group):
        cells = [cell(runs, group, name, task) for task in tasks]
        if not all(cells):
            continue
        wanted = 1 if name == UNTRAINED else SEEDS
        values = [[r["test"] for r in found] for found in cells]
        line = [
            name,
            count(cells[0][0]["trained"]) if cells[0][0]["trained"] else "0",
            f"{cells[0][0]['rate']:g}" if cells[0][0]["rate"] else "-",
            *(shown(each, wanted, *scale(found[0]["metric"])) for each, found in zip(values, cells, strict=True)),
        ]
        if group == "language":
            right = [r["answers"] for r in cells[-1] if "answers" in r]
            line.append(shown(right, wanted) if right else "-")
        else:
            by_seed = [[each[seed] for each in values] for seed in range(min(map(len, values)))]
            line.append(shown([fmean(each) for each in by_seed], wanted))
        lines.append(row(*line))
    return lines


def difference_table(runs: Sequence[dict[str, Any]], group: str) -> list[str]:
    """NTK-Attention minus each other line, paired by seed; bold where the 95 % interval excludes 0."""
    tasks = GROUPS[group].tasks
    lines = head("ntk-attention minus", *tasks)
    for name in lines_of(group):
        cells = []
        for task in tasks if name not in ("ntk-attention", UNTRAINED) else ():
            mine, theirs = ({r["seed"]: r for r in cell(runs, group, one, task)} for one in ("ntk-attention", name))
            seeds = sorted(set(mine) & set(theirs))
            if not seeds:
                break
            a, b = ([side[seed]["test"] for seed in seeds] for side in (mine, theirs))
            cells.append(difference(a, b, *scale(mine[seeds[0]]["metric"])))
        if len(cells) == len(tasks):
            lines.append(row(name, *cells))
    return lines


def cost_table(gpu: Path, cpu: Path) -> list[str]:
    """What benchmarks/ntk.py was to reach and reached."""
    found = [(g["name"], g["bound"], g["value"]) for g in json.loads(gpu.read_text())["goals"]] if gpu.is_file() else []
    for one in json.loads(cpu.read_text())["rows"] if cpu.is_file() else ():
        name = f"two CPU cores, L {one['length']}{', causal' if one['causal'] else ''}: NTK / SDPA"
        found.append((name, one["goal"], one["ratio_clock"]))
    return [*head("", "goal", "measured"), *(row(name, f"{bound:g}", f"{value:.3f}") for name, bound, value in found)]


def step_table(gpu: Path) -> list[str]:
    """A training step of whole models: by the clock, what of it the GPU computes, and the memory."""
    steps = json.loads(gpu.read_text())["steps"] if gpu.is_file() else {}
    lines = ["| model | | step, ms | GPU compute, ms | peak, GiB |", "| --- | --- | ---: | ---: | ---: |"]
    for model, methods in steps.items():
        for name, entry in methods.items():
            numbers = entry["step_ms"], entry["computing_ms"], entry["peak_bytes"] / 2**30
            lines.append(f"| {model} | {name} | " + " | ".join(f"{number:.1f}" for number in numbers) + " |")
    return lines


def write(args: argparse.Namespace) -> None:
    """Put the tables into the page, between its marks; the words around them are people's."""
    runs, others = (json.loads(Path(file).read_text())["runs"] for file in (args.results, args.beside))
    runs = [*runs, *beside(others)]
    parts = {group: results_table(runs, group) for group in GROUPS}
    parts |= {f"{group} differences": difference_table(runs, group) for group in GROUPS}
    parts |= {"costs": cost_table(Path(args.gpu), Path(args.cpu)), "steps": step_table(Path(args.gpu))}
    fill(Path(args.page), parts)


def draw(args: argparse.Namespace) -> None:
    """Figure 3 of the paper from what benchmarks/ntk.py measured."""
    from inlay.papers.ntk_attention.charts.cost import cost
    from inlay.report.charts import drawing as charts

    charts.save(cost(json.loads(Path(args.measured).read_text())["rows"]), Path(args.image))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", default=str(FILE))
    parser.add_argument("--page", default=str(DOCS / "ntk-attention-measured.md"))
    parser.add_argument("--beside", default=str(BESIDE_FILE))
    parser.add_argument("--gpu", default=str(BENCHMARKS / "ntk-cuda.json"))
    parser.add_argument("--cpu", default=str(BENCHMARKS / "ntk_cpu.json"))
    parser.add_argument("--draw", action="store_true", help="draw figure 3 and write nothing")
    parser.add_argument("--measured", default=str(kept.path("ntk_attention", "figure_3.json")))
    parser.add_argument("--image", default=str(DOCS / "images" / "ntk-figure-3.png"))
    args = parser.parse_args()
    (draw if args.draw else write)(args)


if __name__ == "__main__":
    main()
