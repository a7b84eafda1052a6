"""The tables of docs/multi-lora-measured.md, from what its paper keeps and what benchmarks/multi_lora.py found.

python scripts/document_multi_lora.py
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev

from page_tables import BENCHMARKS, DOCS, difference, fill, head, row, shown

from inlay.papers.multi_lora.table import (
    ENCODER,
    FILE,
    GROUPS,
    OTHER_AS,
    best_rate,
    cell,
    rate_of,
    seeds_of,
    untried,
)
from inlay.papers.tables import Entry


def rows_of(runs: Sequence[Entry], group: str, name: str, what: str) -> dict[int, list[float]] | None:
    """A line's results on all tasks, by the seeds that have them all; None where there are none."""
    cells = [cell(runs, group, name, task, what) for task in GROUPS[group].tasks]
    seeds = sorted(set.intersection(*(set(each) for each in cells)))
    return {seed: [each[seed] for each in cells] for seed in seeds} or None


def header(first: Sequence[str], tasks: Sequence[str]) -> list[str]:
    return head(*first, *tasks, "mean")


def results_table(runs: Sequence[Entry], group: str) -> list[str]:
    """Every line's test score on every task, and the mean over the tasks."""
    from inlay.cli.show import count

    what, size = ("bleu", 1.0) if GROUPS[group].written else ("test", 100.0)
    lines = header(("method", "parameters", "learning rate"), GROUPS[group].tasks)
    for line in GROUPS[group].lines:
        by_seed = rows_of(runs, group, line.name, what)
        if by_seed is None:
            continue
        rate = best_rate(runs, group, line)
        own = [r for r in runs if (r["group"], r["line"], r["rate"], r["seed"]) == (group, line.name, rate, 0)]
        columns = [*zip(*by_seed.values(), strict=True), [fmean(each) for each in by_seed.values()]]
        due = "".join(f" ({each:g} not tried yet)" for each in untried(runs, group, line))
        first = line.name, count(sum(r["numbers"] for r in own)) if rate else "0", f"{rate:g}{due}" if rate else "-"
        lines.append(row(*first, *(shown(values, seeds_of(group, line), size) for values in columns)))
    return lines


def difference_table(runs: Sequence[Entry], group: str) -> list[str]:
    """Multi-LoRA minus each other line, paired by seed."""
    what, size = ("bleu", 1.0) if GROUPS[group].written else ("test", 100.0)
    lines = header(("multi-lora minus",), GROUPS[group].tasks)
    mine = rows_of(runs, group, "multi-lora", what) or {}
    for line in GROUPS[group].lines:
        theirs = rows_of(runs, group, line.name, what) or {}
        if line.name != "multi-lora" and set(mine) & set(theirs):
            lines.append(paired(line.name, mine, theirs, size))
    return lines


def paired(name: str, mine: Mapping[int, Sequence[float]], theirs: Mapping[int, Sequence[float]], size: float) -> str:
    """A row of differences, task by task and of the means."""
    seeds = sorted(set(mine) & set(theirs))
    sides = ([[*side[seed], fmean(side[seed])] for seed in seeds] for side in (mine, theirs))
    columns = zip(*(list(zip(*side, strict=True)) for side in sides), strict=True)
    return row(name, *(difference(a, b, size) for a, b in columns))


def questions_table(runs: Sequence[Entry]) -> list[str]:
    """Together with a frozen `A` (the method), minus each task alone, a trained shared `A`, and a trained `A` each."""
    lines = header(("together, A frozen, minus", "learning rate"), ENCODER.tasks)
    mine = rows_of(runs, "encoder", "multi-lora", "test") or {}
    for text, group, name in (
        ("alone, A frozen", "questions", "alone"),
        ("together, A trained", "questions", "trained A"),
        ("alone, A trained (LoRA)", "encoder", "lora"),
    ):
        theirs = rows_of(runs, group, name, "test") or {}
        if set(mine) & set(theirs):
            rate = rate_of(runs, group, GROUPS[group].line(name))
            lines.append(paired(f"{text} | {rate:g}", mine, theirs, 100.0))
    return lines


def draws_table(runs: Sequence[Entry]) -> list[str]:
    """How far results lie apart over seeds of `A` with all else the same, and over seeds of all else with one `A`."""
    lines = header(("",), ENCODER.tasks)
    base = rows_of(runs, "encoder", "multi-lora", "test") or {}
    others = [rows_of(runs, "questions", f"A of seed {seed}", "test") for seed in OTHER_AS]
    draws = [base[0], *(each[0] for each in others if each)] if 0 in base else []
    for text, found in ((f"A of {len(draws)} seeds", draws), (f"{len(base)} seeds of all else", list(base.values()))):
        if len(found) > 1:
            columns = [*zip(*found, strict=True), [fmean(each) for each in found]]
            cells = [f"{100 * fmean(each):.1f} (SD {100 * stdev(each):.1f})" for each in columns]
            lines.append(row(text, *cells))
    return lines


def cost_table(places: Mapping[str, Sequence[Path]]) -> list[str]:
    """What benchmarks/multi_lora.py was to reach and reached, by the last of a machine's files that has it."""
    lines = ["| | | goal | measured |", "| --- | --- | ---: | ---: |"]
    for machine, paths in places.items():
        found = [json.loads(path.read_text())["goals"] for path in paths if path.is_file()]
        for name, goal in {goal["name"]: goal for goals in found for goal in goals}.items():
            bound = "-" if goal["bound"] is None else f"{goal['bound']:g}"
            missed = goal["bound"] is not None and goal["value"] > goal["bound"]
            lines.append(f"| {machine} | {name} | {bound} | {goal['value']:.2f}{' (missed)' if missed else ''} |")
    return lines


def write(args: argparse.Namespace) -> None:
    """Put the tables into the page, between its marks."""
    results = Path(args.results)
    runs = json.loads(results.read_text())["runs"] if results.is_file() else []
    machines = {"H200": list(map(Path, args.gpu)), "CPU": [Path(args.cpu)]}
    parts = {"costs": cost_table(machines)}
    for group in ("encoder", "larger", "decoder"):
        parts[group], parts[f"{group} differences"] = results_table(runs, group), difference_table(runs, group)
    fill(Path(args.page), parts | {"questions": questions_table(runs), "draws": draws_table(runs)})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", default=str(FILE))
    parser.add_argument("--page", default=str(DOCS / "multi-lora-measured.md"))
    on_gpu = [str(BENCHMARKS / f"multi-lora-cuda{part}.json") for part in ("", "-training")]
    parser.add_argument("--gpu", nargs="+", default=on_gpu, help="later ones replace what earlier ones have")
    parser.add_argument("--cpu", default=str(BENCHMARKS / "multi-lora-cpu.json"))
    args = parser.parse_args()
    write(args)


if __name__ == "__main__":
    main()
