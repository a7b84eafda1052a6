"""InfoPrompt beside WARP, IDPG, its own ablations, adapters, LoRA and full training: docs/infoprompt-measured.md.

Few-shot runs of three real models on six tasks, N = 64 and 256, five seeds; and section 6.2's sensitivity to the start,
ten seeds after one epoch. For each model and line of the tables the learning rate is chosen from five, a factor of
about three apart: by the mean accuracy on what is held out of the training data of two tasks, N = 64, with two seeds
that no table uses. Every task, N and seed uses it. Test data choose nothing.

    python -m inlay.papers.infoprompt.table run --models-dir <folder> --data-dir <folder> --workers 16 --seconds 540

Runs come in the order of the groups, within one seed by seed: what the clock cuts off are the last groups' last seeds.
`--known` has results of an earlier call, which are not made again. The workers share the machine, so that times of
these runs are not to be compared: benchmarks/infoprompt.py measures them.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from inlay.papers.reproduce import kept
from inlay.papers.tables import (
    NAMES,
    Entry,
    Key,
    MethodLine,
    TableRun,
    run_all,
    run_options,
    where,
)

FILE = kept.path("infoprompt", "table.json")
TASKS = ("sst2", "rte", "mrpc", "cola", "semeval2010", "wnut17-spans")
CHOOSING = ("sst2", "semeval2010")  # where learning rates are chosen
CHOOSING_SEEDS = (100, 101)
EPOCHS = (1, 2, 5, 10, 20, 30)  # after which the validation part is scored
HELD_OUT, CURVE_ROWS, TEST_ROWS = 500, 256, 1000  # rows that are scored at most: for a choice, on the way, at the end
TRIAL_ROWS = 16  # where it is only tried out
SCORED_BATCH = 64
MOST_LENGTH = 128
MOST_EXAMPLES = {"wnut17-spans": 1975}  # there are no more to train on
PROMPTS = (1e-2, 3e-2, 1e-1, 3e-1, 1.0)
RATES: Mapping[str | None, tuple[float, ...]] = {
    "infoprompt": PROMPTS,
    "warp": PROMPTS,
    "idpg": PROMPTS,
    "adapter-pfeiffer": (1e-4, 3e-4, 1e-3, 3e-3, 1e-2),
    "lora": (1e-4, 3e-4, 1e-3, 3e-3, 1e-2),
    "full": (1e-5, 3e-5, 1e-4, 3e-4, 1e-3),
}


LINES = (
    MethodLine("infoprompt", "infoprompt"),
    MethodLine("warp", "warp"),
    MethodLine("idpg", "idpg"),
    MethodLine("without head loss", "infoprompt", {"gamma": 0.0}),
    MethodLine("without representation loss", "infoprompt", {"beta": 0.0}),
    MethodLine("without both", "infoprompt", {"beta": 0.0, "gamma": 0.0}),
    MethodLine("adapter", "adapter-pfeiffer"),
    MethodLine("lora", "lora"),
    MethodLine("full", "full"),
)
UNIFORM = MethodLine("warp, uniform", "warp", {"initial": "uniform"})


@dataclass(frozen=True)
class FewShotGroup:
    """A model, its lines and seeds, and how they are trained; `name` of the group where its rates are chosen."""

    model: str
    shots: int
    batch_size: int
    rates_of: str
    tasks: tuple[str, ...] = TASKS
    lines: tuple[MethodLine, ...] = LINES
    seeds: int = 5
    epochs: int = 30
    schedule: str = "linear"

    def line(self, name: str) -> MethodLine:
        return next(line for line in self.lines if line.name == name)


# 240 updates at either N: 30 epochs of batches of 8 (as in the paper) and of 32.
GROUPS = {
    "mlm-64": FewShotGroup("minilm_l6_mlm", 64, 8, "mlm-64"),
    "mlm-256": FewShotGroup("minilm_l6_mlm", 256, 32, "mlm-64"),
    "sensitivity": FewShotGroup(
        "minilm_l6_mlm",
        2000,
        8,
        "mlm-64",
        tasks=("sst2", "wnut17-spans"),
        lines=(*LINES[:3], UNIFORM),
        seeds=10,
        epochs=1,
        schedule="constant",
    ),
    "initialisation": FewShotGroup("minilm_l6_mlm", 64, 8, "mlm-64", tasks=("mrpc",), lines=(UNIFORM,)),
    "minilm-64": FewShotGroup("minilm", 64, 8, "minilm-64"),
    "minilm-256": FewShotGroup("minilm", 256, 32, "minilm-64"),
    "smollm2-64": FewShotGroup("smollm2", 64, 8, "smollm2-64"),
    "smollm2-256": FewShotGroup("smollm2", 256, 32, "smollm2-64"),
}


# --------------------------------------------------------------------------------------------------------- the runs


@dataclass(frozen=True)
class FewShotRun(TableRun):
    """One run, and where its model and data lie."""

    @property
    def shots(self) -> int:
        return min(GROUPS[self.group].shots, MOST_EXAMPLES.get(self.task, GROUPS[self.group].shots))

    @property
    def chooses(self) -> bool:
        return self.seed in CHOOSING_SEEDS

    def spec(self) -> Any:
        from inlay import Spec

        group = GROUPS[self.group]
        line = group.line(self.line)
        return Spec(
            model=where(group.model, self.models_dir),
            task=self.task,
            data_dir=self.data_dir,
            method=line.method,
            settings=line.settings,
            learning_rate=self.rate,
            seed=self.seed,
            shots=self.shots,
            batch_size=group.batch_size,
            epochs=group.epochs,
            max_steps=self.steps,
            schedule=group.schedule,
            max_length=MOST_LENGTH,
            evaluations=1,
        )


@functools.cache
def rows(task: str, data_dir: str, shots: int, seed: int) -> Any:
    """A task with its rows: read once by each worker, for all methods."""
    from inlay import Spec, tasks

    return tasks.load(Spec(model="", method="full", task=task, data_dir=data_dir, shots=shots, seed=seed))


def some(data: Any, most: int) -> Any:
    """At most so many rows, the same ones for everybody."""
    import numpy as np

    if len(data) <= most:
        return data
    return data.select(np.sort(np.random.default_rng(0).permutation(len(data))[:most]))


def measure(work: FewShotRun) -> dict[str, Any]:
    """Train, score the held-out part on the way, and in the end the test part, unless the run is to choose a rate."""
    import dataclasses

    from inlay import backbones
    from inlay.methods.registry import get
    from inlay.training import FitOptions, fit
    from inlay.training.evaluation import evaluate
    from inlay.training.objectives import adapt_task

    spec, group = work.spec(), GROUPS[work.group]
    whole = rows(work.task, work.data_dir, work.shots, work.seed)
    none = whole.test.select([])
    # Without them `fit` scores nothing: that is done here, in larger batches.
    task = dataclasses.replace(whole, validation=none, test=none, notes=())
    backbone = backbones.load_for(spec, task)
    # With its prompts, as `fit` trains on it.
    _, prompted, _ = adapt_task(spec.settings, get(spec.method), task, backbone)
    score = spec.with_(batch_size=SCORED_BATCH)
    most = TRIAL_ROWS if work.steps else HELD_OUT if work.chooses else CURVE_ROWS

    def held_out(model: Any) -> dict[str, float]:
        held = dataclasses.replace(prompted, validation=some(whole.validation, most))
        return rounded(evaluate(model, held, "validation", backbone.processor, score)[0])

    a_step = -(-work.shots // group.batch_size)
    curve = Curve(() if work.chooses else {epoch * a_step for epoch in EPOCHS if epoch < group.epochs}, held_out)
    with tempfile.TemporaryDirectory() as folder:
        outcome = fit(
            backbone, task, get(spec.method), spec, Path(folder), FitOptions(progress=False, watchers=[curve.watcher()])
        )
    metric = task.metrics[0]
    curve.scored.append((outcome.steps, held_out(outcome.model)))
    found: dict[str, Any] = {
        "metric": metric,
        "validation": curve.scored[-1][1],
        "trained": outcome.portrait["parameters"]["trained"],
        "steps": outcome.steps,
    }
    if work.chooses:
        return found
    task = dataclasses.replace(prompted, test=some(whole.test, TRIAL_ROWS if work.steps else TEST_ROWS))
    found["test"] = rounded(evaluate(outcome.model, task, "test", backbone.processor, score)[0])
    found["curve"] = [[step, scored[metric]] for step, scored in curve.scored]
    return found | {"losses": losses(outcome.history, [step for step, _ in curve.scored])}


def rounded(metrics: Mapping[str, float]) -> dict[str, float]:
    return {name: round(value, 5) for name, value in metrics.items()}


class Curve:
    """Scores the model after these updates, and leaves it as it was."""

    def __init__(self, steps: Iterable[int], score: Callable[[Any], dict[str, float]]) -> None:
        self.steps, self.score = set(steps), score
        self.scored: list[tuple[int, dict[str, float]]] = []

    def watcher(self) -> Any:
        from transformers import TrainerCallback

        curve = self

        class Watcher(TrainerCallback):
            def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
                if state.global_step in curve.steps:
                    modes = [(module, module.training) for module in model.modules()]
                    curve.scored.append((state.global_step, curve.score(model)))
                    for module, mode in modes:
                        module.training = mode

        return Watcher()


def losses(history: Iterable[Mapping[str, Any]], steps: Iterable[int]) -> list[dict[str, float]]:
    """The mean of each part of the loss up to each of these updates, since the one before."""
    entries = [entry for entry in history if "loss" in entry]
    names = sorted({name for entry in entries for name in entry if name.endswith("loss")})
    found = []
    for before, step in itertools.pairwise((0, *steps)):
        since = [entry for entry in entries if before < entry["step"] <= step]
        found.append({name: round(fmean(entry[name] for entry in since), 4) for name in names if since})
    return found


def wanted(known: Mapping[Key, Entry], args: argparse.Namespace) -> Iterator[FewShotRun]:
    """All that is to be run, the most telling first: rates to choose, then seed by seed what they were chosen for."""

    def work(group: str, line: MethodLine, task: str, rate: float, seed: int) -> FewShotRun:
        return FewShotRun(group, line.name, task, rate, seed, args.models_dir, args.data_dir, args.steps)

    entries = list(known.values())
    for name in args.groups:
        group = GROUPS[name]
        if name == group.rates_of:
            for seed, task, line in itertools.product(CHOOSING_SEEDS[: args.choosing_seeds], CHOOSING, group.lines):
                for rate in RATES[line.method]:
                    yield work(name, line, task, rate, seed)
        chosen = {line.name: best_rate(entries, name, line, args.choosing_seeds) for line in group.lines}
        for seed, task, line in itertools.product(range(min(group.seeds, args.seeds)), group.tasks, group.lines):
            if (best := chosen[line.name]) is not None:
                yield work(name, line, task, best, seed)


def best_rate(entries: Iterable[Entry], group: str, line: MethodLine, seeds: int = len(CHOOSING_SEEDS)) -> float | None:
    """The rate with the best mean accuracy on what was held out; of equals the smallest. None: not all are known.

    Tasks differ by far more than rates do: means are of the same tasks and seeds at every rate, or there is no choice.
    A line that starts in another way than WARP has WARP's rate. A run that came to no end counts as none right.
    """
    scored = held_out_scores(entries, group, line, seeds)
    if any(None in scores for scores in scored.values()):
        return None
    return min(scored, key=lambda rate: (-fmean(score or 0.0 for score in scored[rate]), rate))


def held_out_scores(
    entries: Iterable[Entry], group: str, line: MethodLine, seeds: int
) -> dict[float, list[float | None]]:
    """By rate the accuracy of each task and seed that choose, in one order; None: not run."""
    home = GROUPS[group].rates_of
    name = line.name if line in GROUPS[home].lines else line.method
    found = {
        (entry["rate"], entry["task"], entry["seed"]): entry.get("validation", {}).get("accuracy", 0.0)
        for entry in entries
        if (entry["group"], entry["line"]) == (home, name)
    }
    pairs = list(itertools.product(CHOOSING, CHOOSING_SEEDS[:seeds]))
    return {rate: [found.get((rate, *pair)) for pair in pairs] for rate in RATES[line.method]}


def choice(runs: Iterable[Entry], group: str, line: MethodLine) -> tuple[float, int] | None:
    """The rate that `run` chooses, and by how many seeds: by all of those that choose, or else by the first alone."""
    runs = list(runs)
    for seeds in range(len(CHOOSING_SEEDS), 0, -1):
        if (rate := best_rate(runs, group, line, seeds)) is not None:
            return rate, seeds
    return None


def run(args: argparse.Namespace) -> None:
    """A window of what is wanted is given out: what is known later may be more telling."""
    window = args.workers + 4

    def next_ones(known: Mapping[Key, Entry]) -> Iterator[FewShotRun]:
        missing = (work for work in wanted(known, args) if tuple(work.named.values()) not in known)
        return itertools.islice(missing, window)

    run_all(measure, next_ones, NAMES, args)


# --------------------------------------------------------------------------------------------- the runs that count


def whole(runs: Iterable[Entry]) -> list[Entry]:
    """Without the runs of a task and seed that other lines of the same table lack: the clock cut these off."""
    runs = list(runs)
    lines: dict[Key, set[str]] = {}  # by group and task, and by seed as well
    for entry in runs:
        if "test" in entry:
            for key in ((entry["group"], entry["task"]), (entry["group"], entry["task"], entry["seed"])):
                lines.setdefault(key, set()).add(entry["line"])
    return [
        r for r in runs if "test" not in r or lines[r["group"], r["task"], r["seed"]] == lines[r["group"], r["task"]]
    ]


def cell(runs: Sequence[Entry], group: str, line: MethodLine, task: str) -> dict[int, Entry]:
    """The runs of one cell at the rate that was chosen, by seed; none while a rate is untried."""
    chosen = choice(runs, group, line)
    rate = None if chosen is None else chosen[0]
    return {
        r["seed"]: r
        for r in sorted(runs, key=lambda r: r["seed"])
        if (r["group"], r["line"], r["task"], r["rate"]) == (group, line.name, task, rate) and "test" in r
    }


def value(entry: Entry) -> float:
    """The task's metric, times 100: Matthews for CoLA, accuracy for the others."""
    return 100 * entry["test"][entry["metric"]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    doing = commands.add_parser("run", help="make the runs of the tables")
    run_options(doing, FILE)
    doing.add_argument("--groups", nargs="+", choices=GROUPS, default=list(GROUPS))
    doing.add_argument("--seeds", type=int, default=100, help="fewer seeds than the tables have")
    doing.add_argument("--choosing-seeds", type=int, default=len(CHOOSING_SEEDS), choices=(1, 2))
    doing.add_argument("--steps", type=int, help="fewer updates and rows than the protocol's: to try it out")
    doing.set_defaults(do=run)
    args = parser.parse_args()
    args.do(args)


if __name__ == "__main__":
    main()
