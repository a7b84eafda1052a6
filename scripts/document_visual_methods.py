"""The tables of docs/visual-methods.md, from what the paper of activation prompts keeps.

python scripts/document_visual_methods.py
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import fmean
from typing import Any

from page_tables import BENCHMARKS, DOCS, difference, fill, head, row, shown

from inlay.papers.activation_prompts.recipes.protocol import SMALL, WAYS
from inlay.papers.activation_prompts.table import FILE, METHODS, ROWS, SEEDS, SETS, chosen, doubts, line_of, pairs_of


def accuracy_table(runs: list[dict[str, Any]], model: str, sets: list[str], cost: dict[str, Any]) -> list[str]:
    """One backbone: every method's accuracy on every set, and what it costs."""
    from inlay.cli.show import count, size

    lines = head("method", *sets, "mean", "trained parameters", "step, ms", "peak memory", "inference, images/s")
    for method in METHODS:
        cells = [chosen(runs, model, method, task) for task in sets]
        if not all(cells):
            continue
        by_seed = [[cell[i]["test"] for cell in cells] for i in range(min(map(len, cells)))]
        paid = cost.get(method, {})
        line = [
            method,
            *(shown([r["test"] for r in cell], SEEDS) for cell in cells),
            shown([sum(values) / len(values) for values in by_seed], SEEDS),
            count(cells[0][0]["trained"]),
            f"{paid['step_ms']:.1f}" if paid else "-",
            size(paid.get("peak_bytes")),
            f"{paid['inference_per_second']:,.0f}" if paid else "-",
        ]
        lines.append(row(*line))
    return lines


def rows_table(runs: list[dict[str, Any]], model: str, sets: list[str]) -> list[str]:
    """The rows of the paper's tables that have settings of their own: accuracy, and the learning rate selected."""
    from inlay.cli.show import count

    lines = head("row", "method", *sets, "mean", "trained parameters", "learning rate")
    for name in ROWS:
        way = WAYS[name]
        cells = [chosen(runs, model, way.method, task, way.settings) for task in sets]
        if min(map(len, cells)) < SEEDS:
            continue
        means = [sum(each["test"] for each in seed) / len(seed) for seed in zip(*cells, strict=True)]
        told = ", ".join(f"{key}={value}" for key, value in way.settings.items())
        lines.append(
            row(
                name,
                f"{way.method} ({told})" if told else way.method,
                *(shown([r["test"] for r in cell], SEEDS) for cell in cells),
                shown(means, SEEDS),
                count(cells[0][0]["trained"]),
                f"{cells[0][0]['rate']:g}",
            )
        )
    return lines


def comparison_table(runs: list[dict[str, Any]], model: str, sets: list[str], method: str) -> list[str]:
    """A method less each row of the paper's tables: over the seeds of the sets' mean, with p-values before and after
    Holm's correction, and over the sets; and what makes the row's learning rate doubtful."""
    from inlay.workflow.statistics import holm, paired

    found = {}
    for name in ROWS:
        way = WAYS[name]
        tests = [
            [
                [r["test"] for r in chosen(runs, model, *one)]
                for one in ((method, task), (way.method, task, way.settings))
            ]
            for task in sets
        ]
        if min(len(values) for test in tests for values in test) < SEEDS:
            continue
        by_seed = [list(map(fmean, zip(*values, strict=True))) for values in zip(*tests, strict=True)]
        by_set = [list(map(fmean, values)) for values in zip(*tests, strict=True)]
        end, tie = doubts(line_of(runs, model, way.method, way.settings))
        told = " and ".join(word for word, true in (("a tie", tie), ("an end of the grid", end)) if true) or "-"
        found[name] = by_seed, by_set, told
    plain = [paired(*by_seed).p for by_seed, _, _ in found.values()]
    lines = head("row", "over the seeds", "p", "p after Holm", "over the four sets", "doubt about the learning rate")
    for (name, (by_seed, by_set, told)), p, raised in zip(found.items(), plain, holm(plain), strict=True):
        values = ["-" if value is None else f"{value:.3f}" for value in (p, raised)]
        lines.append(row(name, difference(*by_seed), *values, difference(*by_set), told))
    return lines


def difference_table(
    runs: list[dict[str, Any]], models: list[str], sets: list[str], better: str, worse: str
) -> list[str]:
    """Points by which one method is above another, set by set; in bold where the interval excludes 0."""
    lines = head("backbone", *sets)
    for model in models:
        pairs = [[[r["test"] for r in chosen(runs, model, one, task)] for one in (better, worse)] for task in sets]
        lines.append(row(model, *(difference(mine, theirs) for mine, theirs in pairs)))
    return lines


def write(args: argparse.Namespace) -> None:
    """Put the tables into the page, between its marks; the words around them are people's."""
    found = json.loads(Path(args.results).read_text())
    costs = json.loads(Path(args.costs).read_text())["steps"] if Path(args.costs).is_file() else {}
    runs = found["runs"]
    models = list(dict.fromkeys(r["model"] for r in runs))
    sets = [task for task in SETS if all(len(chosen(runs, *pair, task)) > 1 for pair in pairs_of(models))]
    shapes = {"vit_tiny_patch16_224": "vit-tiny", "resnet50_v1": "resnet-50"}
    parts = {f"accuracy {m}": accuracy_table(runs, m, sets, costs.get(shapes.get(m, m), {})) for m in models}
    if len(rows := rows_table(runs, SMALL["ViT"], sets)) > len(head("")):
        parts["rows"] = rows
        parts["activation-prompt over rows"] = comparison_table(runs, SMALL["ViT"], sets, "activation-prompt")
    for better, worse in (
        ("activation-prompt", "visual-prompt"),
        ("norm", "activation-prompt"),
        ("activation-prompt", "linear-probe"),
    ):
        parts[f"{better} over {worse}"] = difference_table(runs, models, sets, better, worse)
    fill(Path(args.page), parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", default=str(FILE))
    parser.add_argument("--page", default=str(DOCS / "visual-methods.md"))
    parser.add_argument("--costs", default=str(BENCHMARKS / "vision-small-cuda.json"))
    args = parser.parse_args()
    write(args)


if __name__ == "__main__":
    main()
