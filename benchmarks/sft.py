"""`inlay tune` beside TRL's SFTTrainer: tokens a second, and the loss of every step.

Both train the same LoRA from the same start on the same conversations in the same order and batches, with the same
optimiser, length and precision. `inlay` is called as a user calls it (`inlay.tune`). TRL gets the tokens and labels
that inlay makes of the conversations, so that what is compared is training; gradient checkpointing, on by default in
TRL and for large models in inlay, is off. A third arm is inlay with --pack. The arms take turns, each in a process of
its own. The first step is left out. A rate is real tokens, padding aside, by the clock and by the time of processors,
which other work on the machine stretches less; ratios are of the medians over rounds.

TRL is needed for this alone and is no dependency: pip install --no-deps trl==1.16.0. Without a network give its
unpacked wheel instead: --trl FOLDER. The conversations are drawn here, so only the model is needed beside the
repository: --model FOLDER, whose tokenizer must have a chat template.

    python benchmarks/sft.py                                             # writes results/sft-cpu.json
    python benchmarks/sft.py --device cuda --model FOLDER --trl FOLDER --batch-size 32 --max-length 1024 --steps 40
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from commands import command as called_by

RESULTS = Path(__file__).parent / "results"
ARMS = ("inlay", "inlay --pack", "trl")
RATE, SEED = 1e-3, 0
SETTINGS = {"r": 16, "target_modules": "all-linear"}
WORDS = (
    "the",
    "of",
    "and",
    "to",
    "in",
    "is",
    "it",
    "was",
    "for",
    "on",
    "as",
    "with",
    "they",
    "at",
    "one",
    "have",
    "from",
)


def draw(path: Path, rows: int, longest: int) -> None:
    """Conversations of one to three exchanges, most of them short, with the splits that a run needs."""
    drawn = random.Random(SEED)

    def said(most: float) -> str:
        return " ".join(drawn.choices(WORDS, k=1 + min(longest // 4, int(drawn.expovariate(1 / most)))))

    with path.open("w", encoding="utf-8") as file:
        for number in range(rows + 2):
            turns = []
            for _ in range(drawn.choice([1, 1, 1, 2, 3])):
                turns += [{"role": "user", "content": said(longest / 24)}]
                turns += [{"role": "assistant", "content": said(longest / 12)}]
            split = ("validation", "test")[number - rows] if number >= rows else "train"
            file.write(json.dumps({"messages": turns, "split": split}) + "\n")


def clock(device: str) -> Any:
    """Notes the time after every step."""
    import torch
    from transformers import TrainerCallback

    class Clock(TrainerCallback):
        def __init__(self) -> None:
            self.times: list[tuple[float, float]] = []

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            if device == "cuda":
                torch.cuda.synchronize()
            self.times.append((time.perf_counter(), time.process_time()))

    return Clock()


def spec_of(args: argparse.Namespace, pack: bool) -> Any:
    """The run, as a user would ask for it."""
    import inlay

    return inlay.Spec(
        model=args.model,
        data=str(args.folder / "chats.jsonl"),
        method="lora",
        settings=SETTINGS,
        seed=SEED,
        max_steps=args.steps,
        batch_size=args.batch_size,
        max_length=args.max_length,
        learning_rate=RATE,
        warmup=0.0,
        schedule="constant",
        evaluations=1,
        precision=args.precision,
        pack=pack,
        gradient_checkpointing=False,  # the default of a large model on a GPU
    )


def train_inlay(args: argparse.Namespace, watch: Any, pack: bool) -> list[float]:
    """Through `inlay.tune`; the loss of every step."""
    import inlay

    with tempfile.TemporaryDirectory() as out:
        run = inlay.tune(spec_of(args, pack), out, progress=False, watchers=[watch])
        return [entry["loss"] for entry in run.history() if "loss" in entry]


def train_trl(args: argparse.Namespace, watch: Any) -> list[float]:
    """Through SFTTrainer, with the adapter that inlay would begin with and the rows that it would read."""
    from datasets import Dataset
    from transformers import set_seed
    from trl import SFTConfig, SFTTrainer

    from inlay import tasks
    from inlay.methods.registry import get
    from inlay.training.objectives import SingleTask

    backbone, objective, method = load(args), SingleTask(tasks.load(spec_of(args, False))), get("lora")
    rows, order = rows_of(args, backbone)
    set_seed(SEED)
    settings, _ = objective.settle(SETTINGS, method, backbone)
    model = objective.attach(backbone, method, settings, SEED)
    data = Dataset.from_list([{name: rows[number][name] for name in ("input_ids", "labels")} for number in order])
    with tempfile.TemporaryDirectory() as out:
        how = SFTConfig(
            output_dir=out,
            max_steps=args.steps,
            per_device_train_batch_size=args.batch_size,
            learning_rate=RATE,
            lr_scheduler_type="constant",
            warmup_steps=0,
            weight_decay=0.0,
            max_grad_norm=1.0,
            max_length=None,
            gradient_checkpointing=False,
            train_sampling_strategy="sequential",
            bf16=args.precision == "bfloat16",
            use_cpu=args.device == "cpu",
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            seed=SEED,
        )
        trainer = SFTTrainer(model, how, train_dataset=data, processing_class=backbone.processor, callbacks=[watch])
        trainer.train()
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def load(args: argparse.Namespace) -> Any:
    """The model and its tokenizer."""
    from inlay import backbones

    return backbones.load(args.model, kind="causal-lm", seed=SEED)


def rows_of(args: argparse.Namespace, backbone: Any) -> tuple[Any, list[int]]:
    """The training rows as inlay reads them, and the order of its first epoch."""
    from inlay import tasks
    from inlay.training.objectives import EpochSampler

    task = tasks.load(spec_of(args, False))
    rows = task.encode("train", backbone.processor, args.max_length, model_config=backbone.model.config)
    return rows, list(EpochSampler(len(rows), SEED))[: args.steps * args.batch_size]


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """One arm in this process."""
    import torch

    from inlay.records.versions import versions

    if args.device == "cuda" and not torch.cuda.is_available():
        sys.exit("--device cuda: PyTorch sees no CUDA device here. Leave it out to measure on the CPU.")
    watch = clock(args.device)
    losses = train_trl(args, watch) if args.arm == "trl" else train_inlay(args, watch, args.arm == "inlay --pack")
    rows, order = rows_of(args, load(args))
    sizes = [int(rows.lengths[order[i : i + args.batch_size]].sum()) for i in range(0, len(order), args.batch_size)]
    seconds, processor = (watch.times[-1][i] - watch.times[0][i] for i in (0, 1))
    tokens = sum(sizes[1:])
    peak = torch.cuda.max_memory_allocated() / 2**20 if args.device == "cuda" else None
    return {
        "losses": losses,
        "tokens": tokens,
        "tokens_per_second": tokens / seconds,
        "tokens_per_processor_second": tokens / processor,
        "peak_gpu_mib": peak,
        "versions": versions() | ({"trl": sys.modules["trl"].__version__} if args.arm == "trl" else {}),
    }


def compare(rounds: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Rates, ratios to TRL's, and how far the losses are from TRL's."""
    found: dict[str, Any] = {}
    for arm, made in rounds.items():
        found[arm] = {"losses": made[0]["losses"], "peak_gpu_mib": made[0]["peak_gpu_mib"]}
        for name in ("tokens_per_second", "tokens_per_processor_second"):
            rates = [each[name] for each in made]
            found[arm][name] = {"median": statistics.median(rates), "range": [min(rates), max(rates)]}
    for arm in found:
        theirs = found["trl"]
        for name in ("tokens_per_second", "tokens_per_processor_second"):
            found[arm][f"{name}, of TRL's"] = found[arm][name]["median"] / theirs[name]["median"]
        apart = [abs(a - b) / b for a, b in zip(found[arm]["losses"], theirs["losses"], strict=True)]
        found[arm]["furthest loss from TRL's"] = max(apart)
    return found


def take_turns(args: argparse.Namespace) -> dict[str, list[dict[str, Any]]]:
    """Every arm in every round, in a process of its own."""
    rounds: dict[str, list[dict[str, Any]]] = {arm: [] for arm in ARMS}
    environment = dict(os.environ) | {"HF_HUB_OFFLINE": "1", "ACCELERATE_USE_CPU": str(args.device == "cpu").lower()}
    if args.trl is not None:
        paths = [str(args.trl), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment["PYTHONPATH"] = os.pathsep.join(paths)
    for number in range(args.rounds):
        for arm in ARMS:
            words = [sys.executable, __file__, *sys.argv[1:], "--arm", arm, "--folder", str(args.folder)]
            done = subprocess.run(words, env=environment, stdout=subprocess.PIPE, text=True, check=False)
            if done.returncode:
                sys.exit(f"{arm} ended with status {done.returncode}. For TRL: pip install --no-deps trl==1.16.0.")
            rounds[arm].append(json.loads(done.stdout.splitlines()[-1]))
            print(f"round {number + 1}, {arm}: {rounds[arm][-1]['tokens_per_second']:,.0f} tokens a second", flush=True)
    return rounds


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="embedded:smollm2", help="an embedded model, or the folder of one")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--precision", choices=["float32", "bfloat16"])
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--max-length", type=int, default=192)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--trl", type=Path, help="the folder of TRL's unpacked wheel, where it is not installed")
    parser.add_argument("--arm", choices=ARMS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(words)
    args.precision = args.precision or ("bfloat16" if args.device == "cuda" else "float32")
    return args


def main() -> None:
    args = parse()
    if args.arm is not None:
        print(json.dumps(measure(args)))
        return
    with tempfile.TemporaryDirectory() as folder:
        args.folder = Path(folder)
        draw(args.folder / "chats.jsonl", args.steps * args.batch_size, args.max_length)
        before = os.getloadavg()[0]
        rounds = take_turns(args)
    found = compare(rounds)
    for arm, made in found.items():
        print(f"{arm}: {json.dumps({name: value for name, value in made.items() if name != 'losses'})}")
    load = [before, os.getloadavg()[0]]
    result = {"arms": found, "command": called_by(), "load": load, "versions": rounds["trl"][0]["versions"]}
    (RESULTS / f"sft-{args.device}.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
