"""NTK-Attention beside LoRA and prefix tuning: the runs behind docs/ntk-attention-measured.md.

Four groups of cells, three seeds each: SmolLM2-135M on running text and worked answers, MiniLM on five tasks of
SuperGLUE and two of GLUE, a ViT-tiny on pictures. For each model and line of its table the learning rate is chosen by
the held-out part of the group's first task, with seed 0; every task and seed uses it. Test data choose nothing. A
line's other runs follow once its rate is known, the lines in the order of their weight: what the clock cuts off are
whole lines.

    python -m inlay.papers.ntk_attention.table run --models-dir <folder> --data-dir <folder> --workers 16 --seconds 400

A model is looked for in --models-dir under its name, or its name and a version (`smollm2-...`, as the cache of `inlay`
has it); otherwise the embedded one is taken. `--known` has results of an earlier call, which are not made again, but
for those of NTK-Attention that started otherwise than it does now. The
workers share the machine, so that times of these runs are not to be compared: benchmarks/ntk.py measures them.
"""

from __future__ import annotations

import argparse
import dataclasses
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
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

FILE = kept.path("ntk_attention", "table.json")

SEEDS = 3
ANSWERS = 200  # questions of GSM8K's test set that are answered in full
UNTRAINED = "untrained"
START = "1/sqrt(r)"  # the spread of Z_A; runs of NTK-Attention with another, or none said, are made again
# Three of each method's grid, a factor of about three apart. NTK-Attention's 0.001 did worst on the decoder in short
# runs (kept/start.json), and in the long ones with the old start 0.03 was the best of these three.
RATES: Mapping[str, tuple[float, ...]] = {
    "ntk-attention": (3e-3, 1e-2, 3e-2),
    "lora": (3e-4, 1e-3, 3e-3),
    "prefix": (1e-2, 3e-2, 1e-1),
    "linear-probe": (3e-3, 1e-2, 3e-2),
    "full": (3e-5, 1e-4, 3e-4),
}


@dataclass(frozen=True)
class ModelGroup:
    """A model, its tasks (the rate is chosen on the first), the lines of its table, the most important first.

    `options` are fields of the spec, `own` those of single tasks; `rows` of training are used where it is given.
    """

    model: str
    tasks: tuple[str, ...]
    lines: tuple[MethodLine, ...]
    options: Mapping[str, Any]
    own: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    rows: Mapping[str, int] = field(default_factory=dict)

    def line(self, name: str) -> MethodLine:
        return next(line for line in self.lines if line.name == name)


def prefix(length: int, start: str | None = None) -> MethodLine:
    """PEFT's prefix, which starts from N(0, 1), or one that starts from zero."""
    name = f"prefix, m = {length}" + (f", from {start}" if start else "")
    return MethodLine(name, "prefix", {"num_virtual_tokens": length} | ({"init_weights": start} if start else {}))


# 30 layers of 9 heads of 64 with 3 heads of keys. LoRA of rank 8 and a prefix of 40 train 460,800 numbers each,
# NTK-Attention 270 (128 s + 64): 466,560 with s = 13.
LANGUAGE = ModelGroup(
    model="smollm2",
    tasks=("wikitext2", "gsm8k"),
    lines=(
        MethodLine(UNTRAINED, None),
        MethodLine("ntk-attention", "ntk-attention", {"rank": 13}),
        MethodLine("lora", "lora"),
        prefix(40),
        prefix(40, "zero"),
        prefix(160, "zero"),
        prefix(1, "zero"),
        prefix(160),
        prefix(1),
    ),
    options={"max_steps": 300, "evaluations": 1, "max_length": 512},
    own={"wikitext2": {"batch_size": 4}, "gsm8k": {"batch_size": 8}},
    rows={"wikitext2": 12_000},
)
# 6 layers of 12 heads of 32: LoRA of rank 8 and a prefix of 16 train 73,728 numbers, NTK-Attention 76,032 by default.
ENCODER = ModelGroup(
    model="minilm",
    tasks=("rte", "cb", "boolq", "copa", "multirc"),
    lines=(
        MethodLine("ntk-attention", "ntk-attention"),
        MethodLine("lora", "lora"),
        prefix(16),
        prefix(100),
        prefix(1),
        MethodLine("linear-probe", "linear-probe"),
        prefix(16, "zero"),
        MethodLine("full", "full"),
    ),
    options={"max_steps": 300, "batch_size": 32, "evaluations": 5, "max_length": 256},
    own={"boolq": {"shots": 2000}, "multirc": {"shots": 2000}},
)
# The same where this encoder has something to say: the rates are chosen on SST-2.
SENTENCES = ModelGroup(model="minilm", tasks=("sst2", "mrpc"), lines=ENCODER.lines, options=ENCODER.options)
# The other lines are in the table of activation prompts, by the same protocol: the whole grid on Oxford Pets.
VISION = ModelGroup(
    model="vit_tiny_patch16_224",
    tasks=("oxford-pets", "flowers102", "cifar10"),
    lines=(MethodLine("ntk-attention", "ntk-attention"),),
    options={"protocol": "vtab-1k", "epochs": 20.0, "batch_size": 64},
)
GROUPS = {"language": LANGUAGE, "encoder": ENCODER, "sentences": SENTENCES, "vision": VISION}
BESIDE = ("linear-probe", "lora", "vpt-deep", "full")  # read from that table


# --------------------------------------------------------------------------------------------------------- the runs


@dataclass(frozen=True)
class ModelRun(TableRun):
    """One run, and where its model and data lie."""

    def spec(self) -> Any:
        from inlay import Spec

        group = GROUPS[self.group]
        line = group.line(self.line)
        options = dict(group.options) | dict(group.own.get(self.task, {}))
        if self.steps:
            options["max_steps"] = self.steps
        return Spec(
            model=where(group.model, self.models_dir),
            task=self.task,
            data_dir=self.data_dir,
            method=line.method or "full",
            learning_rate=self.rate or None,
            seed=self.seed,
            settings=line.settings,
            **options,
        )


def rates(group: str, line: MethodLine) -> tuple[float, ...]:
    """What the learning rate is chosen from; 0 stands for none at all."""
    from inlay.methods.registry import get

    if line.method is None:
        return (0.0,)
    return get(line.method).grid if group == "vision" else RATES[line.method]


def measure(work: ModelRun) -> dict[str, Any]:
    from inlay import backbones, tasks
    from inlay.methods.registry import get
    from inlay.tasks.metrics import OF_TEXTS
    from inlay.training import FitOptions, fit
    from inlay.training.evaluation import evaluate

    spec, line = work.spec(), GROUPS[work.group].line(work.line)
    task = tasks.load(spec)
    if rows := GROUPS[work.group].rows.get(work.task):
        task = dataclasses.replace(task, train=task.train.select(range(min(rows, len(task.train)))))
    whole = task.schema
    # Texts are written once, after the training and for some questions only.
    known = tuple(name for name in whole.metrics if name not in OF_TEXTS)
    task = task.with_schema(dataclasses.replace(whole, metrics=known))
    backbone = backbones.load_for(spec, task)
    found: dict[str, Any] = {"metric": task.metrics[0]}
    if line.method == "ntk-attention":
        found["start"] = START
    if line.method is None:
        model, trained = backbone.model, 0
        metrics = {split: evaluate(model, task, split, backbone.processor, spec)[0] for split in ("validation", "test")}
    else:
        with tempfile.TemporaryDirectory() as folder:
            outcome = fit(backbone, task, get(line.method), spec, Path(folder) / "run", FitOptions(progress=False))
        model, metrics = outcome.model, outcome.metrics
        trained = outcome.portrait["parameters"]["trained"]
        found |= {"steps": outcome.steps, "best_step": outcome.best_step}
    if whole.generates and not work.steps:
        found["answers"] = answered(model, task, whole, backbone.processor, spec)
    return found | {
        "validation": metrics["validation"][task.metrics[0]],
        "test": metrics["test"][task.metrics[0]],
        "trained": trained,
        "examples": {split: len(task.split(split)) for split in ("train", "validation", "test")},
    }


def answered(model: Any, task: Any, schema: Any, processor: Any, spec: Any) -> float:
    """The share of the first questions of the test set whose final answer is right, in one batch."""
    from inlay.training.batches import Placement
    from inlay.training.generation import generate

    rows = task.test.select(range(min(ANSWERS, len(task.test))))
    place = dataclasses.replace(Placement.of(spec), batch_size=len(rows))
    texts = generate(model.to(place.device).eval(), schema, rows, processor, spec.max_length, place)
    return schema.score_texts(texts, rows)["answer-accuracy"]


def run(args: argparse.Namespace) -> None:
    """Every line's rates on its group's first task; then, as soon as its rate is known, its other tasks and seeds."""
    ranked = [(rank, name, line) for name in args.groups for rank, line in enumerate(GROUPS[name].lines)]
    chosen = [(name, line) for _, name, line in sorted(ranked, key=lambda each: each[0])]

    def work(name: str, line: MethodLine, task: str, rate: float, seed: int) -> ModelRun:
        return ModelRun(name, line.name, task, rate, seed, args.models_dir, args.data_dir, args.steps)

    def wanted(entries: dict[Key, Entry]) -> Iterator[ModelRun]:
        for name, line in chosen:
            yield from (work(name, line, GROUPS[name].tasks[0], rate, 0) for rate in rates(name, line))
        for name, line in chosen:
            tried = [entries.get((name, line.name, GROUPS[name].tasks[0], rate, 0)) for rate in rates(name, line)]
            rate = None if None in tried else best_rate([entry for entry in tried if entry])
            if rate is not None:
                seeds = range(1 if line.method is None else args.seeds)
                yield from (work(name, line, task, rate, seed) for task in GROUPS[name].tasks for seed in seeds)

    run_all(measure, wanted, NAMES, args, usable)


def usable(entry: Entry) -> bool:
    """Whether a run came to its end and, of NTK-Attention, from the start that it has now."""
    return "error" not in entry and (entry["line"] != "ntk-attention" or entry.get("start") == START)


def best_rate(entries: Iterable[dict[str, Any]]) -> float | None:
    """The rate that did best on what is held out for selection; of equals, the smallest."""
    from inlay.tasks.metrics import greater_is_better

    known = [entry for entry in entries if "validation" in entry]
    sign = {entry["metric"]: -1 if greater_is_better(entry["metric"]) else 1 for entry in known}
    return min(known, key=lambda e: (sign[e["metric"]] * e["validation"], e["rate"]))["rate"] if known else None


# --------------------------------------------------------------------------------------------- the runs that count


def cell(runs: Sequence[dict[str, Any]], group: str, line: str, task: str) -> list[dict[str, Any]]:
    """The runs of one cell at the rate that was selected, in the order of their seeds; none while a rate is untried."""
    known = [r for r in runs if (r["group"], r["line"]) == (group, line) and (usable(r) or "error" in r)]
    tried = [r for r in known if r["task"] == GROUPS[group].tasks[0] and r["seed"] == 0]
    mine = next((one for one in GROUPS[group].lines if one.name == line), None)  # None: a line of the visual table
    if mine is not None and not set(rates(group, mine)) <= {r["rate"] for r in tried}:
        return []
    own, rate = [r for r in known if "test" in r], best_rate(tried)
    return sorted((r for r in own if r["task"] == task and r["rate"] == rate), key=lambda r: r["seed"])


def beside(found: Iterable[Entry]) -> list[Entry]:
    """The runs of the visual methods' table, at default settings, as ours."""
    return [
        {**r, "group": "vision", "line": r["method"], "metric": "accuracy"}
        for r in found
        if r["model"] == VISION.model and r["method"] in BESIDE and r["task"] in VISION.tasks and not r.get("settings")
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    doing = commands.add_parser("run", help="make the runs of the tables")
    run_options(doing, FILE)
    doing.add_argument("--groups", nargs="+", choices=GROUPS, default=list(GROUPS))
    doing.add_argument("--seeds", type=int, default=SEEDS)
    doing.add_argument("--steps", type=int, help="fewer steps than the protocol's, and no answers: to try it out")
    doing.set_defaults(do=run)
    args = parser.parse_args()
    args.do(args)


if __name__ == "__main__":
    main()
