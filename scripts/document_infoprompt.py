"""The tables of docs/infoprompt-measured.md, from what InfoPrompt's paper keeps, and its figure 3.

python scripts/document_infoprompt.py            # the tables of inlay.papers.infoprompt.table, control and why
python scripts/document_infoprompt.py --draw     # figure 3, docs/images/infoprompt/figure-3
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from page_tables import DOCS, difference, fill, head, row, with_error

from inlay.papers.infoprompt import why
from inlay.papers.infoprompt.control import CONTROL, GROUP
from inlay.papers.infoprompt.table import (
    EPOCHS,
    FILE,
    GROUPS,
    LINES,
    PROMPTS,
    TASKS,
    UNIFORM,
    cell,
    choice,
    held_out_scores,
    value,
    whole,
)
from inlay.papers.tables import Entry, MethodLine


def by_seed(runs: Sequence[Entry], group: str, line: MethodLine) -> dict[int, float]:
    """The mean over all tasks of each seed that has all of them."""
    cells = [cell(runs, group, line, task) for task in GROUPS[group].tasks]
    seeds = set.intersection(*(set(found) for found in cells))
    return {seed: fmean(value(found[seed]) for found in cells) for seed in sorted(seeds)}


def results_table(runs: Sequence[Entry], group: str) -> list[str]:
    """Every line's test metric on every task, mean and standard error; the mean over the tasks."""
    from inlay.cli.show import count

    lines = head("method", "trained parameters", "learning rate", *GROUPS[group].tasks, "mean", "seeds")
    for line in GROUPS[group].lines:
        cells = [cell(runs, group, line, task) for task in GROUPS[group].tasks]
        if not all(cells):
            continue
        first = next(iter(cells[0].values()))
        mean = by_seed(runs, group, line)
        lines.append(
            row(
                line.name,
                count(first["trained"]),
                f"{first['rate']:g}",
                *(with_error([value(entry) for entry in found.values()]) for found in cells),
                with_error(list(mean.values())) if mean else "-",
                str(min(map(len, cells))),
            )
        )
    return lines


def difference_table(runs: Sequence[Entry], group: str) -> list[str]:
    """InfoPrompt minus each other line, paired by seed; the mean over tasks with the p of a paired t-test."""
    from scipy.stats import ttest_rel

    tasks = GROUPS[group].tasks
    lines = head("infoprompt minus", *tasks, "mean", "p")
    mine = {task: cell(runs, group, LINES[0], task) for task in tasks}
    for line in LINES[1:]:
        cells = []
        for task in tasks:
            theirs = cell(runs, group, line, task)
            seeds = sorted(set(mine[task]) & set(theirs))
            if seeds:
                pair = [[value(one[seed]) for seed in seeds] for one in (mine[task], theirs)]
                cells.append(difference(pair[0], pair[1], size=1))
        a, b = mean_pair(runs, group, LINES[0], line)
        if len(cells) < len(tasks) or not a:
            continue
        p = f"{ttest_rel(a, b).pvalue:.3f}" if len(a) > 1 and stdev(x - y for x, y in zip(a, b, strict=True)) else "-"
        lines.append(row(line.name, *cells, difference(a, b, size=1), p))
    return lines


def mean_pair(runs: Sequence[Entry], group: str, one: MethodLine, other: MethodLine) -> tuple[list[float], list[float]]:
    """The means over tasks of two lines, of the seeds that both have."""
    mine, theirs = by_seed(runs, group, one), by_seed(runs, group, other)
    seeds = sorted(set(mine) & set(theirs))
    return [mine[seed] for seed in seeds], [theirs[seed] for seed in seeds]


def summary_table(runs: Sequence[Entry], groups: Sequence[str]) -> list[str]:
    """InfoPrompt minus each other line, prompt methods minus LoRA: the mean over tasks, for all models and N."""
    lora = next(line for line in LINES if line.name == "lora")
    pairs = [(LINES[0], line) for line in LINES[1:]] + [
        (line, lora) for line in LINES if line.method in ("warp", "idpg")
    ]
    lines = head("", *map(titled, groups))
    for one, other in pairs:
        found = [mean_pair(runs, group, one, other) for group in groups]
        cells = (difference(*each, size=1) if each[0] else "-" for each in found)
        lines.append(row(f"{one.name} minus {other.name}", *cells))
    return lines


def titled(group: str) -> str:
    return f"{GROUPS[group].model}, N = {GROUPS[group].shots}"


def early_table(runs: Sequence[Entry], groups: Sequence[str]) -> list[str]:
    """The first epochs on what is held out, the mean over tasks: what InfoPrompt is ahead by, how much seeds differ."""
    epochs, others = EPOCHS[:3], [line for line in LINES if line.name in ("warp", "without both")]
    ahead = [f"minus {line.name}, epoch {epoch}" for line in others for epoch in epochs]
    spread = LINES[:3]
    lines = head("model and N", *ahead, *(f"SD at epoch 1, {line.name}" for line in spread))
    for group in groups:
        curves = {line.name: curve_of(runs, group, line) for line in (*spread, *others)}
        mine = curves[LINES[0].name]
        cells = []
        for line, epoch in itertools.product(others, epochs):
            theirs = curves[line.name]
            seeds = sorted(set(mine.get(epoch, ())) & set(theirs.get(epoch, ())))
            pair = [[found[epoch][seed] for seed in seeds] for found in (mine, theirs)]
            cells.append(difference(pair[0], pair[1], size=1) if seeds else "-")
        first = [list(curves[line.name].get(1, {}).values()) for line in spread]
        lines.append(row(titled(group), *cells, *(f"{stdev(each):.1f}" if len(each) > 1 else "-" for each in first)))
    return lines


def curve_of(
    runs: Sequence[Entry], group: str, line: MethodLine, tasks: Sequence[str] = TASKS
) -> dict[int, dict[int, float]]:
    """The mean over tasks of the validation metric, by epoch and seed."""
    a_step = -(-GROUPS[group].shots // GROUPS[group].batch_size)
    cells = [cell(runs, group, line, task) for task in tasks]
    found: dict[int, dict[int, float]] = {}
    for seed in sorted(set.intersection(*(set(each) for each in cells))):
        for points in zip(*(each[seed]["curve"] for each in cells), strict=True):
            found.setdefault(points[0][0] // a_step, {})[seed] = 100 * fmean(each for _, each in points)
    return found


def curve_table(runs: Sequence[Entry], group: str) -> list[str]:
    """How far each line has come after so many epochs, on what is held out, and how much seeds differ at first."""
    lines = head("after epochs", *map(str, EPOCHS), "SD over seeds after epoch 1")
    for line in GROUPS[group].lines:
        found = curve_of(runs, group, line)
        if not found:
            continue
        first = list(found[1].values()) if 1 in found else []
        spread = f"{stdev(first):.1f}" if len(first) > 1 else "-"
        shown = [with_error(list(found[epoch].values())) if epoch in found else "-" for epoch in EPOCHS]
        lines.append(row(line.name, *shown, spread))
    return lines


def loss_table(runs: Sequence[Entry], group: str) -> list[str]:
    """The parts of InfoPrompt's loss in the first and the last stretch of training, by task."""
    names = ("task_loss", "head_loss", "representation_loss")
    lines = head("task", *(f"{name.replace('_', ' ')}, {when}" for name in names for when in ("first epoch", "end")))
    for task in GROUPS[group].tasks:
        found = [entry["losses"] for entry in cell(runs, group, LINES[0], task).values() if entry["losses"]]
        if found:
            cells = (f"{fmean(each[i][name] for each in found):.2f}" for name in names for i in (0, -1))
            lines.append(row(task, *cells))
    return lines


def losses_table(runs: Sequence[Entry], groups: Sequence[str]) -> list[str]:
    """InfoPrompt's information losses in each stretch of training, the mean over seeds and tasks; the worst task."""
    spans = [f"epochs {a + 1} to {b}" if b > a + 1 else f"epoch {b}" for a, b in stretches()]
    lines = head("model and N, loss", *spans, "largest of a task at the end")
    for group, name in itertools.product(groups, ("head_loss", "representation_loss")):
        by_task: dict[str, list[float]] = {}
        for task in GROUPS[group].tasks:
            found = [entry["losses"] for entry in cell(runs, group, LINES[0], task).values() if entry["losses"]]
            if found:
                by_task[task] = [fmean(stretch[name] for stretch in each) for each in zip(*found, strict=True)]
        if by_task:
            means = (fmean(each) for each in zip(*by_task.values(), strict=True))
            worst = max(by_task, key=lambda task: by_task[task][-1])
            end = f"{by_task[worst][-1]:.2f} ({worst})"
            lines.append(row(f"{titled(group)}, {name.split('_')[0]}", *(f"{mean:.2f}" for mean in means), end))
    return lines


def stretches() -> Iterator[tuple[int, int]]:
    return itertools.pairwise((0, *EPOCHS))


def official_table(runs: Sequence[Entry], groups: Sequence[str]) -> list[str]:
    """SemEval's official macro-F1, mean and standard error."""
    lines = head("method", *map(titled, groups))
    for line in LINES:
        cells = [cell(runs, group, line, "semeval2010").values() for group in groups]
        scored = [[100 * entry["test"]["semeval-f1"] for entry in each] for each in cells]
        lines.append(row(line.name, *(with_error(each) if each else "-" for each in scored)))
    return lines


def sensitivity_table(runs: Sequence[Entry]) -> list[str]:
    """Test accuracy after one epoch, mean and standard error over ten seeds, as section 6.2 has it."""
    group = GROUPS["sensitivity"]
    lines = head("method", *(f"{task}{what}" for task in group.tasks for what in ("", ", SD")), "seeds")
    for line in group.lines:
        cells = [[value(e) for e in cell(runs, "sensitivity", line, task).values()] for task in group.tasks]
        if all(len(found) > 1 for found in cells):
            shown = itertools.chain(*((with_error(found), f"{stdev(found):.1f}") for found in cells))
            lines.append(row(line.name, *shown, str(min(map(len, cells)))))
    return lines


def initialisation_table(runs: Sequence[Entry]) -> list[str]:
    """Section 6.1: how prompts start, on MRPC."""
    lines = head("initialisation", "mrpc, N = 64")
    for name, group, line in (
        ("warp, random uniform", "initialisation", UNIFORM),
        ("warp, sampled vocabulary", "mlm-64", LINES[1]),
        ("infoprompt", "mlm-64", LINES[0]),
    ):
        if found := cell(runs, group, line, "mrpc"):
            lines.append(row(name, with_error([value(entry) for entry in found.values()])))
    return lines


def rates_table(runs: Sequence[Entry]) -> list[str]:
    """What was held out, by rate: the mean over the two tasks and the seeds that choose; the choice is bold.

    A line of which runs are missing has made no choice, and shows no means: they would be of unlike runs.
    """
    homes = [name for name, group in GROUPS.items() if group.rates_of == name]
    lines = head("model and method", *(f"learning rate {i + 1}" for i in range(len(PROMPTS))), "seeds")
    for home in homes:
        for line in GROUPS[home].lines:
            if not any((entry["group"], entry["line"]) == (home, line.name) for entry in runs):
                continue
            best, seeds = choice(runs, home, line) or (None, 0)
            cells = []
            for rate, scores in held_out_scores(runs, home, line, seeds).items():
                mean = f"{100 * fmean(score or 0.0 for score in scores):.1f}" if scores else "-"
                cells.append(f"**{rate:g}: {mean}**" if rate == best else f"{rate:g}: {mean}")
            lines.append(row(f"{GROUPS[home].model}, {line.name}", *cells, str(seeds or "-")))
    return lines


def write(args: argparse.Namespace) -> None:
    """Put the tables into the page, between its marks; the words around them are people's, and so is which of the
    groups have a place there."""
    runs = whole(json.loads(Path(args.results).read_text())["runs"])
    page = Path(args.page).read_text()
    tables = [name for name, group in GROUPS.items() if group.tasks == TASKS and f"<!-- {name} -->" in page]
    parts = {name: results_table(runs, name) for name in tables}
    parts |= {f"{name} differences": difference_table(runs, name) for name in tables}
    parts |= {f"{name} curves": curve_table(runs, name) for name in tables}
    parts |= {f"{name} losses": loss_table(runs, name) for name in tables}
    parts |= {
        "summary": summary_table(runs, tables),
        "early": early_table(runs, tables),
        "official": official_table(runs, tables),
        "losses": losses_table(runs, tables),
        "sensitivity": sensitivity_table(runs),
        "initialisation": initialisation_table(runs),
        "rates": rates_table(runs),
    }
    fill(Path(args.page), parts)


def draw(args: argparse.Namespace) -> None:
    """Figure 3: learning curves of one group, for the two tasks of the paper's and the mean over all."""
    from inlay.papers.infoprompt.explain.charts import learning_curves
    from inlay.report.charts import drawing as charts

    found = json.loads(Path(args.results).read_text())
    runs = whole(found["runs"])
    subjects = {"sst2": ("sst2",), "wnut17-spans": ("wnut17-spans",), "mean of six tasks": TASKS}
    panels = {
        title: {
            line.name: {epoch: list(seeds.values()) for epoch, seeds in found.items()}
            for line in LINES
            if line.name not in ("without head loss", "without representation loss")
            and (found := curve_of(runs, args.group, line, tasks))
        }
        for title, tasks in subjects.items()
    }
    rows = [
        (title, name, epoch, seed, round(each, 3))
        for title, lines in panels.items()
        for name, points in lines.items()
        for epoch, values in points.items()
        for seed, each in enumerate(values)
    ]
    group = GROUPS[args.group]
    titled = {f"{title}, {group.model}, N = {group.shots}": lines for title, lines in panels.items()}
    figure = learning_curves(titled, "held-out metric x 100")
    facts = {
        "command": "python scripts/document_infoprompt.py --draw",
        "group": args.group,
        "versions": found["versions"],
    }
    charts.keep(Path(args.folder), "figure-3", figure, ("subject", "method", "epoch", "seed", "value"), rows, facts)


def control_table(control: dict[str, Any], runs: list[Entry]) -> list[str]:
    """The control beside the lines of the decoder's table, of the same seeds."""
    lines = head("", *TASKS, "mean")
    scored = {
        f"logistic regression, {reading}": [control["tasks"][task][reading] for task in TASKS]
        for reading in control["tasks"][TASKS[0]]
    }
    for line in GROUPS[GROUP].lines:
        cells = [cell(runs, GROUP, line, task) for task in TASKS]
        scored[line.name] = [[value(each[seed]) for seed in control["seeds"]] for each in cells]
    for name, by_task in scored.items():
        means = [fmean(each) for each in zip(*by_task, strict=True)]
        lines.append(row(name, *(with_error(each) for each in (*by_task, means))))
    return lines


def write_control(page: Path) -> None:
    runs = whole(json.loads(FILE.read_text())["runs"])
    fill(page, {"control": control_table(json.loads(CONTROL.read_text()), runs)})


def why_runs(runs: Sequence[Entry], group: str, task: str, name: str) -> dict[int, Entry]:
    """The runs of one cell by seed."""
    return {
        entry["seed"]: entry
        for entry in runs
        if (entry["group"], entry["task"], entry["prompts"]) == (group, task, name) and "test" in entry
    }


def steps_table(runs: Sequence[Entry]) -> list[str]:
    """Test accuracy of each line, mean and standard error, and by how much it is above prompts made of the text."""
    lines = head("prompts", *(f"{title}{what}" for title in why.TITLES for what in ("", f", minus {why.OF_THE_TEXT}")))
    for name in why.LINES:
        cells = []
        for group, task in why.COLUMNS:
            mine, theirs = why_runs(runs, group, task, name), why_runs(runs, group, task, why.OF_THE_TEXT)
            seeds = sorted(set(mine) & set(theirs))
            a, b = ([value(found[seed]) for seed in seeds] for found in (mine, theirs))
            cells += [
                with_error(a) if a else "-",
                difference(a, b, size=1) if a and name != why.OF_THE_TEXT else "",
            ]
        lines.append(row(name, *cells))
    return lines


def fit_table(runs: Sequence[Entry]) -> list[str]:
    """The loss on the rows trained on, in the last stretch of training, and that on the test rows: means over seeds."""
    lines = head("prompts", *(f"{title}, {what}" for title in why.TITLES for what in ("training loss", "test loss")))
    for name in why.LINES:
        cells = []
        for group, task in why.COLUMNS:
            found = why_runs(runs, group, task, name).values()
            trained = [entry["losses"][-1]["task_loss"] for entry in found]
            test = [entry["test"]["loss"] for entry in found]
            cells += [f"{fmean(trained):.4f}", f"{fmean(test):.2f}"] if found else ["-", "-"]
        lines.append(row(name, *cells))
    return lines


def spread_table(runs: Sequence[Entry]) -> list[str]:
    """How much texts differ in Phi(X), by model and task."""
    lines = head("model", *why.TASKS)
    for group in why.GROUPS:
        found = [why_runs(runs, group, task, why.OF_THE_TEXT).get(why.SEEDS[0]) for task in why.TASKS]
        shown = (f"{each['spread']:.2f}" if each else "-" for each in found)
        lines.append(row(GROUPS[group].model, *shown))
    return lines


def write_why(page: Path) -> None:
    runs = json.loads(why.FILE.read_text())["runs"]
    fill(page, {"steps": steps_table(runs), "fit": fit_table(runs), "spread": spread_table(runs)})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", default=str(FILE))
    parser.add_argument("--page", default=str(DOCS / "infoprompt-measured.md"))
    parser.add_argument("--draw", action="store_true", help="draw figure 3 and write nothing")
    parser.add_argument(
        "--group", choices=[name for name, group in GROUPS.items() if group.tasks == TASKS], default="mlm-256"
    )
    parser.add_argument("--folder", default=str(DOCS / "images" / "infoprompt" / "figure-3"))
    args = parser.parse_args()
    if args.draw:
        draw(args)
        return
    write(args)
    write_control(Path(args.page))
    write_why(Path(args.page))


if __name__ == "__main__":
    main()
