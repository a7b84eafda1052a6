"""NTK-Attention and the attention sink of a decoder: short runs of its settings for the first token, and of LoRA.

SmolLM2 on running text: a few steps, three seeds, the learning rates that the long table chose. What counts is the
perplexity of held-out text; no test data are read. These runs rank settings; they say nothing of long training. A run
that is in the file is not made again.

    OMP_NUM_THREADS=1 nice -n 19 python -m inlay.papers.ntk_attention.sink --data-dir <folder>       # kept/sink.json
    python -m inlay.papers.ntk_attention.sink --data-dir <folder> --steps 240 --results <file>       # longer ones
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from inlay.papers.reproduce import kept

STEPS = 60
OPTIONS = {"batch_size": 2, "max_length": 64}
ROWS = 12_000  # of training, as in the long table
HELD_OUT = 30  # rows of validation: lines of text, joined and cut into blocks
SEEDS = (0, 1, 2)


@dataclass(frozen=True)
class Line:
    """A method, its learning rate and its settings."""

    method: str
    rate: float
    settings: Mapping[str, Any] = field(default_factory=dict)


def ntk(**settings: Any) -> Line:
    return Line("ntk-attention", 1e-2, {"rank": 13, "skip_first": False} | settings)


LINES = {
    "as it was": ntk(),
    "skip_first": ntk(skip_first=True),
    "centred": ntk(centred=True),
    "lora": Line("lora", 3e-3),
    "skip_first and centred": ntk(skip_first=True, centred=True),
    "skip_first, r = 2d, s = 8": ntk(skip_first=True, feature_multiplier=2, rank=8),
}


def measure(name: str, seed: int, steps: int, data_dir: str) -> dict[str, Any]:
    """One run: the perplexity of held-out text at the end."""
    from inlay import Spec, backbones, tasks
    from inlay.methods.registry import get
    from inlay.training import FitOptions, fit

    line = LINES[name]
    spec = Spec(
        "embedded:smollm2",
        line.method,
        task="wikitext2",
        data_dir=data_dir,
        learning_rate=line.rate,
        seed=seed,
        settings=dict(line.settings),
        evaluations=1,
        precision="float32",
        max_steps=steps,
        **OPTIONS,
    )
    task = tasks.load(spec)
    held_out = task.validation.select(range(HELD_OUT))
    task = dataclasses.replace(
        task, train=task.train.select(range(ROWS)), validation=held_out, test=held_out.select(range(10))
    )
    before = time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        backbone = backbones.load_for(spec, task)
        outcome = fit(backbone, task, get(line.method), spec, Path(folder) / "run", FitOptions(progress=False))
    return {
        "line": name,
        "seed": seed,
        "validation": outcome.metrics["validation"],
        "trained": outcome.portrait["parameters"]["trained"],
        "processor_seconds": round(time.process_time() - before),
    }


def untrained(data_dir: str) -> dict[str, Any]:
    """The base model: its perplexity, and the mean log-sum-exp of its scores at position 0 and elsewhere."""
    from inlay import Spec, backbones, tasks
    from inlay.attention import attention_with_lse
    from inlay.methods.softmax_layer import SoftmaxLayer
    from inlay.training.evaluation import evaluate

    seen: list[tuple[float, float]] = []

    class Looking(SoftmaxLayer):
        """Notes the log-sum-exp of one attention."""

        child = "inlay_looking"

        def running(self) -> list[str]:
            return [self.child]

        def softmax(self, query: Any, key: Any, value: Any, dropout_p: float, shares: bool, **how: Any) -> Any:
            output, lse = attention_with_lse(query, key, value, **how)
            seen.append((float(lse[:, :, 0].mean()), float(lse[:, :, 1:].mean())))
            return output, None

    spec = Spec("embedded:smollm2", "lora", task="wikitext2", data_dir=data_dir, precision="float32", **OPTIONS)
    task = tasks.load(spec)
    task = dataclasses.replace(task, validation=task.validation.select(range(HELD_OUT)))
    backbone = backbones.load_for(spec, task)
    metrics = evaluate(backbone.model, task, "validation", backbone.processor, spec)[0]
    return {"validation": metrics} | _log_sums(backbone, task, Looking, seen)


def _log_sums(backbone: Any, task: Any, kind: Any, seen: list[tuple[float, float]]) -> dict[str, float]:
    import torch

    from inlay.anatomy import anatomy
    from inlay.methods.watching import watching

    text = " ".join(str(value) for row in task.validation.select(range(20)) for value in row.values())
    ids = backbone.processor(text, return_tensors="pt").input_ids[:, : 64 * 8].reshape(8, 64)
    hosts = [block.attention.module for block in anatomy(backbone.model).blocks if block.attention is not None]
    with watching([kind(host) for host in hosts]), torch.no_grad():
        backbone.model.eval()(input_ids=ids)
    first, others = (sum(column) / len(column) for column in zip(*seen, strict=True))
    return {"log_sum_at_first": round(first, 2), "log_sum_elsewhere": round(others, 2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", required=True)
    parser.add_argument("--lines", nargs="+", choices=LINES, default=list(LINES))
    parser.add_argument("--seeds", nargs="+", type=int, default=list(SEEDS))
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--results", type=Path, default=kept.path("ntk_attention", "sink.json"))
    args = parser.parse_args()
    from inlay.records.versions import versions

    found: dict[str, Any] = {"versions": versions(), "options": {"max_steps": args.steps} | OPTIONS, "runs": []}
    if args.results.is_file():
        found = json.loads(args.results.read_text())
        if found["options"]["max_steps"] != args.steps:
            told = found["options"]["max_steps"]
            raise SystemExit(f"{args.results} has runs of {told} steps: give another --results.")
    if "untrained" not in found:
        found["untrained"] = untrained(args.data_dir)
        args.results.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    known = {(run["line"], run["seed"]) for run in found["runs"]}
    for seed in args.seeds:
        for name in args.lines:
            if (name, seed) in known:
                continue
            found["runs"].append(measure(name, seed, args.steps, args.data_dir))
            assert math.isfinite(found["runs"][-1]["validation"]["perplexity"])
            print(json.dumps(found["runs"][-1]), flush=True)
            args.results.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
