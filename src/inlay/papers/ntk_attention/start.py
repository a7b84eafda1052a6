"""How NTK-Attention's Z_A should start, and at which rate it learns: the short runs behind its defaults.

A decoder, an encoder and a vision transformer, each with every spread of Z_A and three rates, a few steps, one seed.
What counts is the loss of examples that are held out of training; no test data are read.

    python -m inlay.papers.ntk_attention.start --data-dir <folder>      # kept/start.json; half an hour on a CPU
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inlay.papers.reproduce import kept

SPREADS: Mapping[str, Callable[[int], float]] = {
    "1": lambda rows: 1.0,
    "1/sqrt(r)": lambda rows: rows**-0.5,
    "1/r": lambda rows: 1 / rows,
}


@dataclass(frozen=True)
class Trial:
    """A model and a task, how many steps are made, how many held-out examples are scored, and the rates."""

    model: str
    task: str
    options: Mapping[str, Any]
    held_out: int
    rates: tuple[float, ...]


TRIALS = {
    "decoder": Trial(
        "embedded:smollm2", "wikitext2", {"max_steps": 25, "batch_size": 4, "max_length": 32}, 30, (1e-3, 3e-3, 1e-2)
    ),
    "encoder": Trial(
        "embedded:minilm", "sst2", {"max_steps": 40, "batch_size": 32, "max_length": 48}, 300, (3e-3, 1e-2, 3e-2)
    ),
    "vision": Trial("embedded:vit", "digits", {"max_steps": 40, "batch_size": 32}, 300, (3e-3, 1e-2, 3e-2)),
}


def measure(name: str, spread: str, rate: float, data_dir: str) -> dict[str, Any]:
    """One run: held-out loss at the end, and the largest training loss on the way."""
    from transformers import TrainerCallback

    from inlay import Spec, backbones, tasks
    from inlay.methods.ntk_attention import start
    from inlay.methods.registry import get
    from inlay.training import FitOptions, fit

    class Losses(TrainerCallback):
        """What the trainer logs, step by step."""

        def __init__(self) -> None:
            self.seen: list[float] = []

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            self.seen += [logs["loss"]] if "loss" in (logs or {}) else []

    trial = TRIALS[name]
    spec = Spec(
        trial.model,
        "ntk-attention",
        task=trial.task,
        data_dir=data_dir,
        learning_rate=rate,
        evaluations=1,
        precision="float32",
        pooling="own",  # as the kept runs, which are from before a checkpoint's own pooling was read
        **trial.options,
    )
    task = tasks.load(spec)
    if name == "decoder":
        task = dataclasses.replace(task, train=task.train.select(range(2000)))
    held_out = task.validation.select(range(min(trial.held_out, len(task.validation))))
    task = dataclasses.replace(task, validation=held_out, test=held_out)
    backbone = backbones.load_for(spec, task)
    usual, losses = start.spread, Losses()
    try:
        start.spread = SPREADS[spread]  # type: ignore[assignment]
        with tempfile.TemporaryDirectory() as folder:
            outcome = fit(
                backbone,
                task,
                get("ntk-attention"),
                spec,
                Path(folder) / "run",
                FitOptions(progress=False, watchers=[losses]),
            )
    finally:
        start.spread = usual
    found = {"trial": name, "spread": spread, "rate": rate, "validation": outcome.metrics["validation"]}
    return found | {"training": [round(loss, 3) for loss in losses.seen if math.isfinite(loss)]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", required=True)
    parser.add_argument("--trials", nargs="+", choices=TRIALS, default=list(TRIALS))
    parser.add_argument("--results", type=Path, default=kept.path("ntk_attention", "start.json"))
    args = parser.parse_args()
    from inlay.records.versions import versions

    found: dict[str, Any] = {"versions": versions(), "runs": []}
    if args.results.is_file():  # other trials, made before
        found["runs"] = [run for run in json.loads(args.results.read_text())["runs"] if run["trial"] not in args.trials]
    for name in args.trials:
        for rate in TRIALS[name].rates:
            for spread in SPREADS:
                found["runs"].append(measure(name, spread, rate, args.data_dir))
                print(json.dumps(found["runs"][-1]), flush=True)
                args.results.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
