"""Every visual method on real backbones and real pictures: the runs behind docs/visual-methods.md and the recipes.

Protocol: 1,000 labelled pictures of each set (`--protocol vtab-1k`: 800 to train on, 200 to select on) and the set's
own test pictures. For each backbone and method the learning rate is chosen from the method's own grid by the 200
held-out pictures of the first set, with seed 0; every set and seed uses it. A seed draws the pictures, the head and the
order. The test pictures choose nothing. A row of the paper's tables that has settings of its own (`--rows`) has its
rate chosen for itself, in the same way.

    python -m inlay.papers.activation_prompts.table run --models-dir <folder> --data-dir <folder>
    python -m inlay.papers.activation_prompts.table run --rows VPT-50 GATEVPT ... --models-dir ... --data-dir ...
    python -m inlay.papers.activation_prompts.table layers --models-dir <folder> --data-dir <folder>

`run` makes the grids first, and then row after row in the order given: what the clock cuts off are whole rows. The
results are kept after each run; `--known` has those of an earlier call, which are not made again. `--workers` processes
share the machine, so the times in these runs' portraits are not to be compared: benchmarks/vision.py measures them, one
method at a time.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inlay.papers.activation_prompts.recipes.protocol import WAYS
from inlay.papers.reproduce import kept
from inlay.papers.tables import Entry, MethodLine, run_all, run_options, where

FILE = kept.path("activation_prompts", "table.json")
SETS = ("oxford-pets", "flowers102", "caltech101", "cifar10")
METHODS = (
    "linear-probe",
    "visual-prompt",
    "activation-prompt",
    "norm",
    "bias",
    "vpt-deep",
    "ssf",
    "adaptformer",
    "lora",
    "full",
)
TOKENS = ("vpt-deep", "adaptformer")  # need a transformer
# Rows of the paper's tables that are none of these methods at its default settings.
ROWS = (
    "VPT-50",
    "GATEVPT",
    "E2VPT",
    "ADAPTER",
    "VPT-SHALLOW",
    "LoRA-10",
    "AP-PRODUCT",
    "AP-CONCATE",
    "AP-3",
    "AP-5",
    "LoRA-1",
    "LoRA-20",
    "LoRA-50",
)
SEEDS = 3
NAMES = ("model", "task", "method", "row", "rate", "seed")  # what tells one run from another


@dataclass(frozen=True)
class VisionRun:
    """One run to make. `line.name` is empty for a method at its default settings, which is no row of its own."""

    model: str
    line: MethodLine
    task: str
    rate: float | None
    seed: int
    epochs: float
    models_dir: str
    data_dir: str
    out: str

    @property
    def named(self) -> Entry:
        """What tells it from others, and its settings where they are not the method's own."""
        own = {"row": self.line.name, "settings": dict(self.line.settings)} if self.line.name else {}
        named = {"model": self.model, "task": self.task, "method": self.line.method, "rate": self.rate}
        return named | {"seed": self.seed} | own


def measure(work: VisionRun) -> Entry:
    """One run of the protocol: what the tables need of it."""
    from inlay import Spec
    from inlay.workflow.tune import tune

    assert work.line.method is not None
    spec = Spec(
        model=where(work.model, work.models_dir),
        task=work.task,
        data_dir=work.data_dir,
        method=work.line.method,
        settings=dict(work.line.settings),
        protocol="vtab-1k",
        epochs=work.epochs,
        batch_size=64,
        learning_rate=work.rate,
        seed=work.seed,
    )
    run = tune(spec, work.out, progress=False)
    return {
        "validation": run.metrics["validation"]["accuracy"],
        "test": run.metrics["test"]["accuracy"],
        "trained": run.portrait["parameters"]["trained"],
        "peak_bytes": run.portrait["peak_memory"]["bytes"],
        "examples": run.record["examples"],
        "steps": run.record["steps"],
    }


def run(args: argparse.Namespace) -> None:
    """The rates of every line on the first set with seed 0; then the best of them on every set with every seed."""
    run_all(measure, lambda entries: wanted(entries.values(), args), NAMES, args)


def lines_of(args: argparse.Namespace) -> list[MethodLine]:
    """The rows that were asked for; without any, the methods at their default settings."""
    if args.rows:
        return [MethodLine(row, WAYS[row].method, WAYS[row].settings) for row in args.rows]
    return [MethodLine("", method) for method in args.methods]


def wanted(entries: Iterable[Entry], args: argparse.Namespace) -> Iterator[VisionRun]:
    """What is known to be needed: every line's grid, and the other runs of the lines whose rates are known."""
    from inlay.methods.registry import get

    known = [entry for entry in entries if entry["model"] in args.models]
    common = {name: getattr(args, name) for name in ("epochs", "models_dir", "data_dir", "out")}
    first, rest = args.sets[0], []
    for model, line in itertools.product(args.models, lines_of(args)):
        if not fits(model, line):
            continue
        grid = [
            VisionRun(model=model, line=line, task=first, rate=rate, seed=0, **common)
            for rate in get(str(line.method)).grid
        ]
        yield from grid
        made = [e for e in known if (e["model"], e["method"], e.get("row", "")) == (model, line.method, line.name)]
        tried = {e["rate"] for e in made if e["task"] == first and e["seed"] == 0}
        if all(each.rate in tried for each in grid) and (rate := best_rate(made, first)) is not None:
            rest += [
                dataclasses.replace(grid[0], task=task, rate=rate, seed=seed)
                for task in args.sets
                for seed in range(args.seeds)
            ]
    yield from rest


def fits(model: str, line: MethodLine) -> bool:
    """Whether a model has what a line needs: tokens are a transformer's."""
    tokens = WAYS[line.name].tokens if line.name else line.method in TOKENS
    return not (tokens and model.startswith("resnet"))


def pairs_of(models: Sequence[str]) -> list[tuple[str, str]]:
    """The models with each method at its default settings that they can have."""
    return [(m, method) for m, method in itertools.product(models, METHODS) if fits(m, MethodLine("", method))]


def layers(args: argparse.Namespace) -> None:
    """The runs that `inlay explain layers` will find: the activation prompt at every layer, and the linear probe."""
    common = {name: getattr(args, name) for name in ("epochs", "models_dir", "data_dir", "out")}
    work = []
    for model in args.models:
        prompts = [
            MethodLine(str(layer), "activation-prompt", {"layers": [layer]})
            for layer in range(1 + (16 if model.startswith("resnet") else 12))
        ]
        for seed in range(args.seeds):
            work += [
                VisionRun(model=model, line=line, task=args.sets[0], rate=None, seed=seed, **common)
                for line in (MethodLine("", "linear-probe"), *prompts)
            ]
    run_all(measure, lambda _: work, NAMES, args)


# --------------------------------------------------------------------------------------------- the runs that count


def best_rate(entries: Iterable[Entry], first: str = SETS[0]) -> float | None:
    """The rate that did best on the pictures held out for selection; of equals, the smallest."""
    known = [e for e in entries if "validation" in e and e["seed"] == 0 and e["task"] == first]
    return min(known, key=lambda entry: (-entry["validation"], entry["rate"]))["rate"] if known else None


def line_of(runs: Iterable[Entry], model: str, method: str, settings: Mapping[str, Any] | None = None) -> list[Entry]:
    """The runs of a model with a method, without `settings` those at its default settings."""
    own = dict(settings) if settings else None
    return [r for r in runs if (r["model"], r["method"], r.get("settings") or None) == (model, method, own)]


def chosen(
    runs: Iterable[Entry], model: str, method: str, task: str, settings: Mapping[str, Any] | None = None
) -> list[Entry]:
    """The runs of one cell at the rate that was selected, in the order of their seeds."""
    line = line_of(runs, model, method, settings)
    rate = best_rate(line)
    return sorted((r for r in line if (r["task"], r["rate"]) == (task, rate) and "test" in r), key=lambda r: r["seed"])


def doubts(line: Iterable[Entry], first: str = SETS[0]) -> tuple[bool, bool]:
    """Of the rate that was selected for a line: whether it is at an end of those tried, and whether another did as
    well on the pictures held out."""
    tried = {e["rate"]: e["validation"] for e in line if (e["task"], e["seed"]) == (first, 0) and "validation" in e}
    best = max(tried.values(), default=None)
    ties = sorted(rate for rate, value in tried.items() if value == best)
    return bool(ties) and ties[0] in (min(tried), max(tried)), len(ties) > 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    doing = commands.add_parser("run", help="make the runs of the tables")
    curves = commands.add_parser("layers", help="make the runs that `inlay explain layers` draws")
    run_options(doing, FILE)
    run_options(curves, Path("layers.json"))
    which = doing.add_mutually_exclusive_group()
    which.add_argument("--methods", nargs="+", default=list(METHODS), help="methods at their default settings")
    which.add_argument("--rows", nargs="+", choices=ROWS, help="rows of the paper's tables, the most important first")
    for command, action in ((doing, run), (curves, layers)):
        command.add_argument("--models", nargs="+", default=["vit_tiny_patch16_224", "resnet50_v1"])
        command.add_argument("--sets", nargs="+", default=list(SETS))
        command.add_argument("--epochs", type=float, default=20)
        command.add_argument("--seeds", type=int, default=SEEDS)
        command.add_argument("--out", default="runs")
        command.set_defaults(do=action)
    args = parser.parse_args()
    args.do(args)


if __name__ == "__main__":
    main()
