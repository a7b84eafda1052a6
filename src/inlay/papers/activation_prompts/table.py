"""Every visual method on real backbones and real pictures: the runs behind docs/visual-methods.md.

Protocol: 1,000 labelled pictures of each set (`--protocol vtab-1k`: 800 to train on, 200 to select on) and the set's
own test pictures. For each backbone and method the learning rate is chosen from the method's own grid by the 200
held-out pictures of the first set, with seed 0; every set and seed uses it. A seed draws the pictures, the head and the
order. The test pictures choose nothing.

    python -m inlay.papers.activation_prompts.table run --models-dir <folder> --data-dir <folder>
    python -m inlay.papers.activation_prompts.table layers --models-dir <folder> --data-dir <folder>

`run` finds finished runs again and goes on where it stopped; `--workers` processes share the machine, so the times in
these runs' portraits are not to be compared: benchmarks/vision.py measures them, one method at a time.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from inlay.papers.reproduce import kept
from inlay.papers.tables import NO_LIMIT

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
SEEDS = 3


def spec_of(model: str, task: str, method: str, args: argparse.Namespace, **more: Any) -> Any:
    """One run of the protocol."""
    from inlay import Spec

    return Spec(
        model=str(Path(args.models_dir) / model),
        task=task,
        data_dir=args.data_dir,
        method=method,
        protocol="vtab-1k",
        epochs=args.epochs,
        batch_size=64,
        **more,
    )


def job(work: tuple[Any, str]) -> dict[str, Any]:
    """One run: what the tables need of it, or why there is none."""
    import torch

    torch.set_num_threads(1)
    from inlay.errors import InlayError
    from inlay.workflow.tune import tune

    spec, out = work
    begin = time.perf_counter()
    found: dict[str, Any] = {
        "model": Path(spec.model).name,
        "task": spec.task,
        "method": spec.method,
        "rate": spec.learning_rate,
        "seed": spec.seed,
    }
    try:
        run = tune(spec, out, progress=False)
    except InlayError as error:
        return found | {"error": str(error)}
    return found | {
        "validation": run.metrics["validation"]["accuracy"],
        "test": run.metrics["test"]["accuracy"],
        "trained": run.portrait["parameters"]["trained"],
        "peak_bytes": run.portrait["peak_memory"]["bytes"],
        "examples": run.record["examples"],
        "steps": run.record["steps"],
        "seconds": round(time.perf_counter() - begin, 1),
    }


def best_rate(entries: Iterable[dict[str, Any]]) -> float | None:
    """The rate that did best on the pictures held out for selection; of equals, the smallest."""
    known = [e for e in entries if "validation" in e and e["seed"] == 0 and e["task"] == SETS[0]]
    return min(known, key=lambda entry: (-entry["validation"], entry["rate"]))["rate"] if known else None


def made(jobs: list[tuple[Any, str]], workers: int, end: float) -> list[dict[str, Any]]:
    """The results of jobs that several processes share, those that are done by the end of the time."""
    entries: list[dict[str, Any]] = []
    pool = multiprocessing.get_context("spawn").Pool(workers)
    pending = [pool.apply_async(job, (work,)) for work in jobs]
    for number, result in enumerate(pending, start=1):
        try:
            entries.append(result.get(timeout=max(0.1, end - time.monotonic())))
        except multiprocessing.TimeoutError:
            continue
        print(f"[{number}/{len(pending)}]", json.dumps(entries[-1]), flush=True)
    pool.terminate()
    return entries


def run(args: argparse.Namespace) -> None:
    """The rates of every method on the first set with seed 0; then the best of them on every set with every seed."""
    from inlay.methods.registry import get
    from inlay.records.versions import versions

    end = time.monotonic() + args.seconds
    known = json.loads(Path(args.known).read_text())["runs"] if args.known else []
    entries = {_key(entry): entry for entry in known}
    first = args.sets[0]
    pairs = pairs_of(args.models, args.methods)

    def make(wanted: list[tuple[str, str, str, float, int]]) -> None:
        jobs = [
            (spec_of(model, task, method, args, learning_rate=rate, seed=seed), args.out)
            for model, task, method, rate, seed in wanted
            if (model, task, method, rate, seed) not in entries
        ]
        entries.update({_key(entry): entry for entry in made(jobs, args.workers, end)})

    make([(model, first, method, rate, 0) for model, method in pairs for rate in get(method).grid])
    chosen = {pair: best_rate(e for e in entries.values() if (e["model"], e["method"]) == pair) for pair in pairs}
    make(
        [
            (model, task, method, rate, seed)
            for task in args.sets
            for seed in range(SEEDS)
            for (model, method), rate in chosen.items()
            if rate is not None
        ]
    )
    found = {"versions": versions(), "epochs": args.epochs, "device": device(), "runs": list(entries.values())}
    Path(args.results).write_text(kept.as_text(kept.rounded(found)) + "\n")
    print(f"{len(entries)} runs in {args.results}")


def pairs_of(models: Sequence[str], methods: Sequence[str] = METHODS) -> list[tuple[str, str]]:
    return [(m, method) for m in models for method in methods if not (m.startswith("resnet") and method in TOKENS)]


def _key(entry: dict[str, Any]) -> tuple[str, str, str, float, int]:
    return entry["model"], entry["task"], entry["method"], entry["rate"], entry["seed"]


def layers(args: argparse.Namespace) -> None:
    """The runs that `inlay explain layers` will find: the activation prompt at every layer, and the linear probe."""
    end = time.monotonic() + args.seconds
    jobs = []
    for model in args.models:
        for seed in range(SEEDS):
            jobs.append((spec_of(model, args.sets[0], "linear-probe", args, seed=seed), args.out))
            for layer in range(1 + (16 if model.startswith("resnet") else 12)):
                spec = spec_of(model, args.sets[0], "activation-prompt", args, seed=seed, settings={"layers": [layer]})
                jobs.append((spec, args.out))
    made(jobs, args.workers, end)


def device() -> str:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"


# --------------------------------------------------------------------------------------------- the runs that count


def chosen(runs: list[dict[str, Any]], model: str, method: str, task: str) -> list[dict[str, Any]]:
    """The runs of one cell at the rate that was selected, in the order of their seeds."""
    cell = [r for r in runs if (r["model"], r["task"], r["method"]) == (model, task, method)]
    rate = best_rate(r for r in runs if (r["model"], r["method"]) == (model, method))
    return sorted((r for r in cell if r["rate"] == rate and "test" in r), key=lambda r: r["seed"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    doing = commands.add_parser("run", help="make the runs of the tables")
    curves = commands.add_parser("layers", help="make the runs that `inlay explain layers` draws")
    for command, action in ((doing, run), (curves, layers)):
        command.add_argument("--models", nargs="+", default=["vit_tiny_patch16_224", "resnet50_v1"])
        command.add_argument("--models-dir", required=True)
        command.add_argument("--data-dir", required=True)
        command.add_argument("--sets", nargs="+", default=list(SETS))
        command.add_argument("--methods", nargs="+", default=list(METHODS))
        command.add_argument("--epochs", type=float, default=20)
        command.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) // 2))
        command.add_argument("--seconds", type=float, default=NO_LIMIT, help="stop waiting for more after this long")
        command.add_argument("--out", default="runs")
        command.add_argument("--known", help="results of an earlier call: what they have is not run again")
        command.add_argument("--results", default=str(FILE))
        command.set_defaults(do=action)
    args = parser.parse_args()
    args.do(args)


if __name__ == "__main__":
    main()
