"""Multi-LoRA beside LoRA, VeRA and full fine-tuning: the runs behind docs/multi-lora-measured.md.

- encoder: MiniLM on eight tasks, five seeds. Multi-LoRA trains all eight in one run, 32 rows of each a step on average;
  the others have a run a task with 32 rows a step. So every task sees as many rows by every method.
- larger: all-mpnet-base-v2, a sentence encoder of 12 layers of 768, in the same way, three seeds.
- decoder: SmolLM2-135M on E2E, WebNLG and DART; corpus BLEU of texts that it writes for some of the test inputs.
- questions: what the paper leaves open, on the encoder. Are tasks hurt by being trained together; is a shared `A` that
  is trained better than a frozen one; does it matter which `A` was drawn.

The learning rate of a line is chosen from three, a factor of about three apart, and one above them where the largest of
the three was the best, by the mean over its group's tasks of the score on what is held out of training, with seed 0;
every task and seed uses it. A table says which of them have not been tried yet. Test rows choose nothing. The state
after the last step counts. Lines come in the order of their weight: what the clock cuts off are whole lines.

    python -m inlay.papers.multi_lora.table run --models-dir <folder> --data-dir <folder> --workers 16 --seconds 480

A model is looked for in --models-dir under its name, or its name and a version (`smollm2-...`, as the cache of `inlay`
has it); otherwise the embedded one is taken, where there is one. `--known` has results of an earlier call, which are
not made again. The workers share the machine, so that times of these runs are not to be compared:
benchmarks/multi_lora.py measures them.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import tempfile
from collections.abc import Iterator, Mapping, Sequence
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

FILE = kept.path("multi_lora", "table.json")

ALL = "all"  # the task of a run that has all of its group
RATES: Mapping[str | None, tuple[float, ...]] = {
    None: (0.0,),  # nothing is trained
    "multi-lora": (1e-3, 3e-3, 1e-2),
    "lora": (3e-4, 1e-3, 3e-3),
    "vera": (3e-3, 1e-2, 3e-2),
    "full": (3e-5, 1e-4, 3e-4),
}


@dataclass(frozen=True)
class TaskLine(MethodLine):
    """A line of a table: a method with settings; without a method the model as it comes.

    `joint`: one run for all tasks. `trained_a`: the shared factor is trained too. `like` names the line of another
    group whose rate is used. `seeds`, where they are not the group's. `above`: a rate beyond those of the method.
    """

    joint: bool = False
    trained_a: bool = False
    like: tuple[str, str] | None = None
    seeds: int | None = None
    above: float | None = None

    @property
    def rates(self) -> tuple[float, ...]:
        """The rates to choose from."""
        return RATES[self.method] + (() if self.above is None else (self.above,))


@dataclass(frozen=True)
class TaskGroup:
    """A model, its tasks and the lines of its table, the most important first.

    `options` are fields of the spec of a run of one task, `rows` how many a task may bring to training, drawn by the
    seed; texts are written for `written` of the test inputs; `pooling` is what heads read.
    """

    model: str
    tasks: tuple[str, ...]
    seeds: int
    lines: tuple[TaskLine, ...]
    options: Mapping[str, Any]
    rows: int
    written: int = 0
    pooling: str = "auto"

    def line(self, name: str) -> TaskLine:
        return next(line for line in self.lines if line.name == name)


TOGETHER = TaskLine("multi-lora", "multi-lora", joint=True, above=3e-2)
ENCODER = TaskGroup(
    model="minilm",
    tasks=("sst2", "mrpc", "cola", "rte", "stsb", "mnli-small", "cb", "boolq"),
    seeds=5,
    lines=(
        TOGETHER,
        TaskLine("lora", "lora"),
        TaskLine("vera", "vera", above=0.1),
        TaskLine("untrained", None, joint=True),
        TaskLine("full", "full"),
    ),
    options={"max_steps": 300, "batch_size": 32, "max_length": 128},
    rows=10_000,
    pooling="own",  # the kept runs are from before a checkpoint's own pooling was read: lines of a table must be alike
)
LARGER = dataclasses.replace(ENCODER, model="all-mpnet-base-v2", seeds=3)
OTHER_AS = (1, 2, 3, 4)
QUESTIONS = dataclasses.replace(
    ENCODER,
    lines=(
        TaskLine("trained A", "multi-lora", joint=True, trained_a=True),
        TaskLine("alone", "multi-lora", like=("encoder", "multi-lora"), seeds=3),
        *(
            TaskLine(f"A of seed {seed}", "multi-lora", {"seed": seed}, True, like=("encoder", "multi-lora"), seeds=1)
            for seed in OTHER_AS
        ),
    ),
)
DECODER = TaskGroup(
    model="smollm2",
    tasks=("e2e", "webnlg", "dart"),
    seeds=3,
    lines=(
        TaskLine("multi-lora", "multi-lora", {"r": 4, "lora_alpha": 32}, joint=True, above=3e-2),
        TaskLine("lora", "lora", {"r": 4, "lora_alpha": 32}, above=1e-2),
        TaskLine("untrained", None, joint=True, seeds=1),
        TaskLine("vera", "vera", above=0.1),
        TaskLine("full", "full", above=1e-3),
    ),
    options={"max_steps": 200, "batch_size": 16, "max_length": 256},
    rows=5_000,
    written=200,
)
GROUPS = {"encoder": ENCODER, "questions": QUESTIONS, "decoder": DECODER, "larger": LARGER}


# --------------------------------------------------------------------------------------------------------- the runs


@dataclass(frozen=True)
class TaskRun(TableRun):
    """One run, where its model and data lie, and how much less than the protocol asks for is done, to try it out."""

    limit: int | None = None

    @property
    def tasks(self) -> tuple[str, ...]:
        return GROUPS[self.group].tasks if self.task == ALL else (self.task,)

    def spec(self, task: str | None = None) -> Any:
        """Of the run, or of one of its tasks."""
        from inlay import Spec

        group = GROUPS[self.group]
        line, options = group.line(self.line), dict(group.options)
        of_all = task is None and len(self.tasks) > 1
        if of_all:
            options |= {"batch_size": options["batch_size"] * len(self.tasks), "sampling": "uniform"}
        if self.steps:
            options["max_steps"] = self.steps
        return Spec(
            model=where(group.model, self.models_dir),
            task=None if of_all else task or self.task,
            tasks=self.tasks if of_all else (),
            data_dir=self.data_dir,
            method=line.method or "full",
            learning_rate=self.rate or None,
            seed=self.seed,
            settings=line.settings,
            evaluations=1,
            pooling=group.pooling,
            **options,
        )


def measure(work: TaskRun) -> dict[str, Any]:
    """The scores of a run: of each task on what is held out and on the test set."""
    from inlay import backbones
    from inlay.methods.registry import get
    from inlay.training import FitOptions, fit
    from inlay.training.joint import SeveralTasks
    from inlay.workflow.settle import name_adapters

    line = GROUPS[work.group].line(work.line)
    names = name_adapters(work.tasks)
    loaded = {names[task]: load(work, task) for task in work.tasks}
    tasks = {name: task for name, (task, _) in loaded.items()}
    if line.method is None:
        return {"scores": as_it_comes(work, names, loaded), "numbers": 0, "steps": 0}
    first, spec = next(iter(tasks.values())), work.spec()
    backbone = backbones.load_for(spec, first)
    method, heads = get(line.method), {name.rpartition(".")[2] for name in backbone.newly_initialised}
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "run"
        if line.joint:
            objective = with_trained_a() if line.trained_a else SeveralTasks
            outcome = fit(backbone, objective(tasks), method, spec, place, FitOptions(progress=False))
            metrics = outcome.metrics
        else:
            outcome = fit(backbone, first, method, spec, place, FitOptions(progress=False))
            metrics = {
                split: {f"{next(iter(tasks))}/{metric}": value for metric, value in own.items()}
                for split, own in outcome.metrics.items()
            }
    trained = {name: p.numel() for name, p in outcome.model.named_parameters() if p.requires_grad}
    shared = outcome.portrait["parameters"].get("shared", 0) * (not line.trained_a)
    scores: dict[str, dict[str, Any]] = {}
    for task, name in names.items():
        metric = tasks[name].selection_metric
        if f"{name}/{metric}" not in metrics["test"]:
            continue  # it failed, and says so in the notes
        scores[task] = {"metric": metric} | {split: metrics[split][f"{name}/{metric}"] for split in metrics}
        if loaded[name][1] is not None:
            if line.joint:
                outcome.model.set_adapter(name, inference_mode=True)  # from here on nothing counts as trained
            scores[task]["bleu"] = bleu(outcome.model, *loaded[name], backbone.processor, spec)
    return {
        "scores": scores,
        "numbers": shared + sum(n for name, n in trained.items() if not heads.intersection(name.split("."))),
        "steps": outcome.steps,
    } | ({"notes": outcome.notes} if outcome.notes else {})


def load(work: TaskRun, name: str) -> tuple[Any, Any]:
    """A task with as many training rows as may be used, and its schema where texts are to be written: training itself
    writes none."""
    from inlay import tasks
    from inlay.tasks.metrics import OF_TEXTS

    group = GROUPS[work.group]
    task = tasks.load(work.spec(name))
    most = min(work.limit or group.rows, len(task.train))
    task = dataclasses.replace(task, train=task.train.shuffle(seed=work.seed).select(range(most)))
    for split in ("validation", "test") if work.limit else ():
        fewer = task.split(split).select(range(min(work.limit or 0, len(task.split(split)))))
        task = dataclasses.replace(task, **{split: fewer})
    if not task.generates:
        return task, None
    # The same test inputs for every method and seed.
    task = dataclasses.replace(
        task,
        test=task.test.shuffle(seed=0).select(range(min(group.written, len(task.test)))),
        validation=task.validation.select(range(min(group.written, len(task.validation)))),
    )
    whole = task.schema
    known = tuple(each for each in whole.metrics if each not in OF_TEXTS)
    return task.with_schema(dataclasses.replace(whole, metrics=known)), whole


def as_it_comes(work: TaskRun, names: Mapping[str, str], loaded: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The scores of the model without training: a head is as its seed drew it."""
    from inlay import backbones
    from inlay.training.evaluation import evaluate

    scores: dict[str, dict[str, Any]] = {}
    for name in work.tasks:
        task, schema = loaded[names[name]]
        spec, metric = work.spec(name), task.selection_metric
        backbone = backbones.load_for(spec, task)
        found = {
            split: evaluate(backbone.model, task, split, backbone.processor, spec)[0][metric]
            for split in ("validation", "test")
        }
        scores[name] = {"metric": metric} | found
        if schema is not None:
            scores[name]["bleu"] = bleu(backbone.model, task, schema, backbone.processor, spec)
    return scores


def bleu(model: Any, task: Any, schema: Any, processor: Any, spec: Any) -> float:
    """Corpus BLEU of the texts that the model writes for the task's test inputs, in one batch."""
    from inlay.training.batches import Placement
    from inlay.training.generation import generate

    place = dataclasses.replace(Placement.of(spec), batch_size=len(task.test))
    texts = generate(model.to(place.device).eval(), schema, task.test, processor, spec.max_length, place)
    return schema.score_texts(texts, task.test)["bleu"]


def with_trained_a() -> Any:
    """An objective of several tasks that trains the shared `A`s too, by the sum of the tasks' gradients and clipped by
    a norm of their own. No part of the method: it is here to be compared with."""
    from torch import nn

    from inlay.training.joint import SeveralTasks

    class TrainedA(SeveralTasks):
        def attach(self, *given: Any) -> Any:
            model: Any = super().attach(*given)
            for layer in model.base_model.routing.layers.values():
                drawn = layer.inlay_multi_lora_a
                del layer.inlay_multi_lora_a
                layer.inlay_multi_lora_a = nn.Parameter(drawn.clone())
            return model

        def divide(self, trained: Mapping[str, nn.Parameter]) -> dict[str, list[nn.Parameter]]:
            self.shared = {name: p for name, p in trained.items() if name.endswith("inlay_multi_lora_a")}
            return super().divide({name: p for name, p in trained.items() if name not in self.shared})

        def clip(self) -> Any:
            nn.utils.clip_grad_norm_(list(self.shared.values()), self.trainer.args.max_grad_norm)
            return super().clip()

    return TrainedA


def run(args: argparse.Namespace) -> None:
    """Every line's rates with seed 0; then, as soon as its rate is known, its other seeds."""
    ranked = [(rank, name, line) for name in args.groups for rank, line in enumerate(GROUPS[name].lines)]
    chosen = [(name, line) for _, name, line in sorted(ranked, key=lambda each: each[0])]

    def works(name: str, line: TaskLine, rate: float, seed: int) -> Iterator[TaskRun]:
        for task in (ALL,) if line.joint else GROUPS[name].tasks:
            yield TaskRun(name, line.name, task, rate, seed, args.models_dir, args.data_dir, args.steps, args.limit)

    def wanted(entries: dict[Key, Entry]) -> Iterator[TaskRun]:
        own = [(name, line) for name, line in chosen if line.like is None]
        for name, line in own:
            for rate in line.rates:
                yield from works(name, line, rate, 0)
        for name, line in chosen:
            best = rate_of(list(entries.values()), name, line, settled=True)
            if best is not None:
                for seed in range(seeds_of(name, line, args.seeds)):
                    yield from works(name, line, best, seed)

    run_all(measure, wanted, NAMES, args)


def seeds_of(group: str, line: TaskLine, most: int | None = None) -> int:
    found = line.seeds or GROUPS[group].seeds
    return min(found, most or found)


# --------------------------------------------------------------------------------------------- the runs that count


def best_rate(runs: Sequence[Entry], group: str, line: TaskLine, settled: bool = False) -> float | None:
    """The rate that did best with seed 0 on what is held out, on average over the tasks; of equals, the smallest.

    None where one of the method's own rates is still to be tried; if it is to be `settled`, the one above them too. A
    rate that failed on a task is not taken.
    """
    due = untried(runs, group, line)
    if due and (settled or due != [line.above]):
        return None
    means = {}
    for rate in line.rates:
        found = _tried(runs, group, line, rate)
        scores = {task: score for r in found for task, score in r.get("scores", {}).items()}
        if len(scores) == len(GROUPS[group].tasks):
            means[rate] = fmean(worth(score) for score in scores.values())
    return min(means, key=lambda rate: (-means[rate], rate), default=None)


def _tried(runs: Sequence[Entry], group: str, line: TaskLine, rate: float) -> list[Entry]:
    """The runs that speak for a rate."""
    return [r for r in runs if (r["group"], r["line"], r["seed"], r["rate"]) == (group, line.name, 0, rate)]


def untried(runs: Sequence[Entry], group: str, line: TaskLine) -> list[float]:
    """The rates of a line that lack runs."""
    due = 1 if line.joint else len(GROUPS[group].tasks)
    return [rate for rate in line.rates if len(_tried(runs, group, line, rate)) < due]


def rate_of(runs: Sequence[Entry], group: str, line: TaskLine, settled: bool = False) -> float | None:
    """The rate of a line: its own, or that of the line which it is to be like."""
    return best_rate(runs, *((group, line) if line.like is None else _found(*line.like)), settled=settled)


def _found(group: str, name: str) -> tuple[str, TaskLine]:
    return group, GROUPS[group].line(name)


def worth(score: Mapping[str, Any]) -> float:
    """A score on what is held out, such that more is better and means over tasks mean something."""
    return -math.log(score["validation"]) if score["metric"] == "perplexity" else score["validation"]


def cell(runs: Sequence[Entry], group: str, name: str, task: str, what: str) -> dict[int, float]:
    """What a line reached on a task at the rate that was selected, by seed."""
    return {seed: value for seed, (value, _) in measured(runs, group, name, task, what).items()}


def measured(runs: Sequence[Entry], group: str, name: str, task: str, what: str) -> dict[int, tuple[float, int]]:
    """The same, and after how many steps."""
    line = GROUPS[group].line(name)
    rate = rate_of(runs, group, line)
    own = [r for r in runs if (r["group"], r["line"], r["rate"]) == (group, name, rate) and task in r.get("scores", {})]
    return {r["seed"]: (r["scores"][task][what], r["steps"]) for r in own}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    doing = commands.add_parser("run", help="make the runs of the tables")
    run_options(doing, FILE)
    doing.add_argument("--groups", type=_groups, default=list(GROUPS), help=f"some of {','.join(GROUPS)}")
    doing.add_argument("--seeds", type=int, help="at most so many")
    doing.add_argument("--steps", type=int, help="another number of steps than the protocol's")
    doing.add_argument("--limit", type=int, help="no more rows of a split than this: to try it out")
    doing.set_defaults(do=run)
    args = parser.parse_args()
    args.do(args)


def _groups(text: str) -> list[str]:
    found = text.split(",")
    if not set(found) <= set(GROUPS):
        raise argparse.ArgumentTypeError(f"{text}: give some of {','.join(GROUPS)}")
    return found


if __name__ == "__main__":
    main()
