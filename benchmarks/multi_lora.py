"""What many tasks on one model cost: mixed batches, training steps and adding a task, beside PEFT's LoRA.

On a GPU: RoBERTa-large, bfloat16, 64 rows of 128 tokens (training: 32 rows, bfloat16 autocast, AdamW). On a CPU: a
RoBERTa of six layers and 384 channels, float32, 64 rows of 32 tokens. Weights and tokens are random: what is measured
does not depend on them. Queries and values are adapted with rank 8. Everything takes turns, several rounds; a figure is
the median of its rounds' medians. What has been measured is written after every section.

- Inference: the body alone, without heads, since PEFT cannot mix RoBERTa's heads; rows go round the tasks. The base
  model without adapters is the floor. Kernel launches are counted by torch's profiler on a GPU, dispatched operations
  on a CPU.
- Training: a classifier with a head for each task, and a fused AdamW, as the Trainer takes it. PEFT's LoRA is as PEFT
  makes it; Multi-LoRA as `inlay tune` trains it, with frozen weights kept rounded under autocast and the trunk in eval
  mode. Any method can be trained so: "PEFT LoRA, trunk as ours" is PEFT's with the same trunk, and beside it no goal
  is set. What is left of the difference there is the method's.
- Joint: one step of each of eight tasks, whose rows have the lengths of GLUE's. PEFT's LoRA has a run a task: eight
  steps, each padded to its longest row. Multi-LoRA has one step of all those rows, in parts of about the same length,
  as `inlay tune --tasks` makes it. So each task sees the same rows in as many steps. Tokens with padding are counted.

    python benchmarks/multi_lora.py            # prints the ratios and their goals, writes results/multi-lora-*.json
    python benchmarks/multi_lora.py --only inference --only training   # beside what the file has of the others
    python benchmarks/multi_lora.py --cpu-time # where others use the machine: the time that this process computed for
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import random
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import RobertaConfig, RobertaForSequenceClassification, RobertaModel

import inlay
from inlay.methods.attach import trained_parameters
from inlay.records.versions import versions
from inlay.training.mixed_batches import split_batch
from inlay.training.modes import Modes
from inlay.training.precision import rounded_once

RESULTS = Path(__file__).parent / "results"
TARGETS = ["query", "value"]
SIZES = {
    "cuda": {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096},
    "cpu": {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536},
}
ROWS, LENGTH, TRAINED = {"cuda": 64, "cpu": 64}, {"cuda": 128, "cpu": 32}, {"cuda": 32, "cpu": 16}
OF_A_TASK = {"cuda": 32, "cpu": 16}  # rows of each of eight tasks in a step
AS_OURS, LIKE = "peft-lora, trunk as ours", "PEFT LoRA, trunk as ours"  # its name in the file, and in the table
OURS, THEIRS = (1, 2, 8, 32, 64), (1, 2, 8, 32)
# Eighths of the lengths of each task's training rows in MiniLM's tokens, pairs together, cut at 128.
GLUE = {
    "sst2": (5, 6, 8, 10, 13, 17, 25, 56),
    "mrpc": (38, 44, 49, 54, 58, 63, 69, 103),
    "cola": (8, 10, 11, 12, 14, 16, 19, 47),
    "rte": (35, 43, 49, 56, 64, 85, 128, 128),
    "stsb": (17, 18, 19, 20, 22, 25, 28, 55),
    "mnli": (21, 28, 33, 38, 43, 50, 60, 128),
    "cb": (46, 57, 66, 72, 82, 100, 128, 128),
    "boolq": (65, 85, 102, 122, 128, 128, 128, 128),
}
SECTIONS = ("inference", "training", "joint", "adding")
LONG_ENOUGH = {"cuda": 300, "cpu": 1500}  # milliseconds a contender and round
clock = time.perf_counter


@dataclass(frozen=True)
class Goal:
    """A ratio of two measurements, and what it may be at most; None: it is only told."""

    name: str
    value: float
    bound: float | None = None

    def __str__(self) -> str:
        if self.bound is None:
            return f"{self.name:<66} {self.value:6.3f}"
        verdict = "met" if self.value <= self.bound else "MISSED"
        return f"{self.name:<66} {self.value:6.3f}  goal <= {self.bound:<5} {verdict}"


def build(device: torch.device, heads: bool = False) -> nn.Module:
    """A fresh model of the right shape with random weights; a body is in the precision it is used in."""
    torch.manual_seed(0)
    config = RobertaConfig(vocab_size=5000, max_position_embeddings=514, num_labels=2, **SIZES[device.type])
    with device:
        model = (RobertaForSequenceClassification if heads else RobertaModel)(config)
    return model if heads or device.type == "cpu" else model.to(torch.bfloat16)


def ours(model: nn.Module, tasks: int) -> Any:
    """Multi-LoRA with this many tasks."""
    adapted = get_peft_model(model, inlay.MultiLoraConfig(r=8, target_modules=TARGETS), adapter_name="t0")
    for i in range(1, tasks):
        adapted.add_adapter(f"t{i}", inlay.MultiLoraConfig(r=8, target_modules=TARGETS))
    return adapted


def theirs(model: nn.Module, tasks: int, **settings: Any) -> Any:
    """PEFT's LoRA with this many adapters."""
    adapted = get_peft_model(model, LoraConfig(r=8, lora_alpha=16, target_modules=TARGETS, **settings), "t0")
    for i in range(1, tasks):
        adapted.add_adapter(f"t{i}", LoraConfig(r=8, lora_alpha=16, target_modules=TARGETS, **settings))
    return adapted


def tokens(device: torch.device, rows: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(5, 5000, (rows, LENGTH[device.type]), generator=generator)
    return {"input_ids": ids.to(device), "attention_mask": torch.ones_like(ids).to(device)}


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def timed(action: Callable[[], Any], device: torch.device, repeats: int) -> float:
    """The median of single runs, in milliseconds; fewer of those that take long."""

    def once() -> float:
        wait(device)
        begin = clock()
        action()
        wait(device)
        return 1e3 * (clock() - begin)

    first = min(once() for _ in range(2))
    few = min(repeats, max(3, int(LONG_ENOUGH[device.type] / max(first, 1e-3))))
    for _ in range(few // 4):
        once()
    return statistics.median(once() for _ in range(few))


class _Dispatched(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return function(*args, **(kwargs or {}))


def launches(action: Callable[[], Any], device: torch.device) -> int:
    """Kernels that one run starts; on a CPU, operations that it dispatches."""
    action()
    if device.type == "cpu":
        with _Dispatched() as mode:
            action()
        return mode.count
    from torch.profiler import ProfilerActivity, profile

    wait(device)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as record:
        action()
        wait(device)
    return sum(event.count for event in record.key_averages() if "LaunchKernel" in event.key)


def inference(device: torch.device, rounds: int, repeats: int) -> dict[str, Any]:
    """A batch whose rows belong to different tasks."""
    rows = ROWS[device.type]
    batch = tokens(device, rows)
    contenders: dict[str, Callable[[], Any]] = {}

    def contend(name: str, model: Any, tasks: int) -> None:
        model.eval()
        names = {} if tasks < 2 else {"adapter_names": [f"t{i % tasks}" for i in range(rows)]}
        contenders[name] = lambda: model(**batch, **names)

    contend("base", build(device), 0)
    most = ours(build(device), max(OURS))
    for tasks in OURS:
        contend(f"multi-lora {tasks}", most, tasks)
    its = theirs(build(device), max(THEIRS))  # PEFT's loop, too, goes round the tasks of the batch alone
    for tasks in THEIRS:
        contend(f"peft-lora {tasks}", its, tasks)
    found: dict[str, Any] = {name: {"rounds_ms": []} for name in contenders}
    with torch.no_grad():
        for _ in range(rounds):
            for name, action in contenders.items():
                found[name]["rounds_ms"].append(round(timed(action, device, repeats), 3))
        for name, action in contenders.items():
            found[name]["ms"] = statistics.median(found[name]["rounds_ms"])
            found[name]["launches"] = launches(action, device)
    base = found["base"]["ms"]
    for name, entry in found.items():
        entry["over_base"] = entry["ms"] / base
        print(f"inference {name:<16} {entry['ms']:9.2f} ms {entry['over_base']:6.2f} x base {entry['launches']:7,d}")
    return found


class Steps:
    """Training steps of one contender."""

    def __init__(self, device: torch.device, kind: str, tasks: int) -> None:
        self.device = device
        self.before = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
        base = build(device, heads=True)
        self.model: Any
        if kind == "peft-lora":
            self.model = theirs(base, 1, task_type="SEQ_CLS").train()
        else:
            modes = Modes(base, new=["classifier"], whole=False)
            self.model = theirs(base, 1, task_type="SEQ_CLS") if kind == AS_OURS else ours(base, tasks)
            modes.adapt(self.model)
            modes.train()
            if device.type == "cuda":
                self.rounded = rounded_once(self.model, torch.bfloat16)  # for as long as these steps are made
                self.rounded.__enter__()
        rows = TRAINED[device.type]
        self.batch: dict[str, Any] = tokens(device, rows) | {"labels": torch.arange(rows, device=device) % 2}
        if kind == "multi-lora":
            self.batch["adapter_names"] = [f"t{i % tasks}" for i in range(rows)]
        self.optimizer = torch.optim.AdamW(trained_parameters(self.model).values(), lr=1e-3, fused=True)

    def step(self) -> None:
        self.update([self.batch])

    def update(self, batches: Iterable[dict[str, Any]]) -> None:
        """One update by the sum of the batches' losses."""
        gpu = self.device.type == "cuda"
        for batch in batches:
            with torch.autocast("cuda", torch.bfloat16) if gpu else nullcontext():
                loss = self.model(**batch).loss
            loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def peak(self) -> int | None:
        """The allocator's maximum over two steps, less what lay there before."""
        if self.device.type == "cpu":
            return None
        self.step()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self.device)
        self.step()
        self.step()
        wait(self.device)
        return torch.cuda.max_memory_allocated(self.device) - self.before

    def kept(self) -> int:
        """Bytes that a forward pass keeps for the backward pass, parameters aside."""
        own = {p.untyped_storage().data_ptr() for p in self.model.parameters()}
        kept: dict[int, int] = {}

        def note(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in own:
                kept[storage.data_ptr()] = storage.nbytes()
            return tensor

        gpu = self.device.type == "cuda"
        keeping = torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor)
        with torch.autocast("cuda", torch.bfloat16) if gpu else nullcontext(), keeping:
            loss = self.model(**self.batch).loss
        del loss
        return sum(kept.values())


@cache
def steps(device: torch.device, kind: str, tasks: int) -> Steps:
    """Made once: a model of this size takes seconds."""
    return Steps(device, kind, tasks)


def training(device: torch.device, rounds: int, repeats: int) -> dict[str, Any]:
    """One step of one task, and of eight mixed at the same number of rows."""
    contenders = {
        "peft-lora 1": ("peft-lora", 1),
        AS_OURS: (AS_OURS, 1),
        "multi-lora 1": ("multi-lora", 1),
        "multi-lora 8": ("multi-lora", 8),
    }
    found: dict[str, Any] = {}
    for name, how in contenders.items():
        one = steps(device, *how)
        found[name] = {"peak_bytes": one.peak(), "kept_bytes": one.kept(), "rounds_ms": []}
    for _ in range(rounds):
        for name, how in contenders.items():
            found[name]["rounds_ms"].append(round(timed(steps(device, *how).step, device, repeats), 3))
    for name, entry in found.items():
        entry["ms"] = statistics.median(entry["rounds_ms"])
        peak = "" if entry["peak_bytes"] is None else f"{entry['peak_bytes'] / 2**30:6.2f} GiB"
        print(f"training  {name:<24} {entry['ms']:9.2f} ms  {peak}  keeps {entry['kept_bytes'] / 2**20:,.0f} MiB")
    return found


def of_lengths(lengths: Sequence[int], device: torch.device) -> dict[str, torch.Tensor]:
    """A batch whose rows are this long, padded to the longest."""
    generator = torch.Generator().manual_seed(1)
    shape = (len(lengths), max(lengths))
    mask = (torch.arange(shape[1]) < torch.tensor(lengths).unsqueeze(1)).long()
    ids = torch.where(mask == 1, torch.randint(5, 5000, shape, generator=generator), 1)
    found = {"input_ids": ids, "attention_mask": mask, "labels": torch.arange(shape[0]) % 2}
    return {name: tensor.to(device) for name, tensor in found.items()}


def joint(device: torch.device, rounds: int, repeats: int) -> dict[str, Any]:
    """One step of eight tasks together, beside a step of each in eight runs."""
    drawn = random.Random(0)
    lengths = {task: drawn.choices(eighths, k=OF_A_TASK[device.type]) for task, eighths in GLUE.items()}
    lora, like, multi = (steps(device, *how) for how in (("peft-lora", 1), (AS_OURS, 1), ("multi-lora", len(GLUE))))
    alone = [of_lengths(own, device) for own in lengths.values()]
    together = of_lengths([*itertools.chain.from_iterable(lengths.values())], device)
    names = [f"t{i}" for i, own in enumerate(lengths.values()) for _ in own]

    def eight_runs(of: Steps) -> None:
        for batch in alone:
            of.update([batch])

    def one_run() -> None:
        multi.update(
            part | {"adapter_names": [names[row] for row in rows]} for rows, part in split_batch(together, device)
        )

    contenders: dict[str, Callable[[], None]] = {
        "peft-lora, eight runs": partial(eight_runs, lora),
        AS_OURS: partial(eight_runs, like),
        "multi-lora, one run": one_run,
    }
    found: dict[str, Any] = {name: {"rounds_ms": []} for name in contenders}
    for _ in range(rounds):
        for name, action in contenders.items():
            found[name]["rounds_ms"].append(round(timed(action, device, repeats), 3))
    of_one = sum(part["input_ids"].numel() for _, part in split_batch(together, device))
    of_eight = sum(batch["input_ids"].numel() for batch in alone)
    for name, entry in found.items():
        entry["ms"] = statistics.median(entry["rounds_ms"])
        entry["tokens"] = of_one if name == "multi-lora, one run" else of_eight
        print(f"joint     {name:<24} {entry['ms']:9.2f} ms  {entry['tokens']:,} tokens with padding")
    return found


def adding(device: torch.device, rounds: int) -> dict[str, Any]:
    """What `add_adapter` takes for the 2nd and the 64th task, in milliseconds; PEFT's, which takes long, on a CPU."""
    found: dict[str, Any] = {}
    contenders: list[tuple[str, Any, Callable[[], Any]]] = [
        ("multi-lora", ours, lambda: inlay.MultiLoraConfig(r=8, target_modules=TARGETS)),
        ("peft-lora", theirs, lambda: LoraConfig(r=8, lora_alpha=16, target_modules=TARGETS)),
    ]
    for name, make, config in contenders[: 1 if device.type == "cuda" else 2]:
        times: dict[int, list[float]] = {2: [], 64: []}
        for _ in range(rounds if make is ours else 1):  # PEFT takes long, and is no goal
            model = make(build(device), 1)
            for number in range(2, 65):
                wait(device)
                begin = clock()
                model.add_adapter(f"t{number - 1}", config())
                wait(device)
                if number in times:
                    times[number].append(1e3 * (clock() - begin))
        found[name] = {str(number): statistics.median(values) for number, values in times.items()}
        second, last = found[name]["2"], found[name]["64"]
        print(f"adding    {name:<16} 2nd {second:8.2f} ms, 64th {last:8.2f} ms, {last / second:5.2f} x")
    return found


def goals(found: dict[str, Any], kind: str) -> list[Goal]:
    """The ratios that the project set itself."""
    checked = []
    if "inference" in found:
        entries = found["inference"]
        over = [entries[f"multi-lora {tasks}"]["over_base"] for tasks in OURS if tasks > 1]
        counts = [entries[f"multi-lora {tasks}"]["launches"] for tasks in OURS if tasks > 1]
        checked += [
            Goal("2 to 64 tasks mixed / base, inference, the slowest", max(over), 1.3 if kind == "cuda" else 1.5),
            Goal("64 tasks / 2 tasks, inference", over[-1] / over[0], 1.1),
            Goal("64 tasks / 2 tasks, kernel launches", counts[-1] / counts[0], 1.0),
        ]
    if "training" in found:
        lora, one, eight = (found["training"][n] for n in ("peft-lora 1", "multi-lora 1", "multi-lora 8"))
        checked += [
            Goal("Multi-LoRA / PEFT LoRA, step time, one task", one["ms"] / lora["ms"], 1.0),
            Goal("Multi-LoRA / PEFT LoRA, kept for the backward pass", one["kept_bytes"] / lora["kept_bytes"], 1.0),
            Goal("eight tasks mixed / one task, step time, same rows", eight["ms"] / one["ms"], 1.15),
        ]
        if lora["peak_bytes"]:
            ratio = one["peak_bytes"] / lora["peak_bytes"]
            checked.insert(-1, Goal("Multi-LoRA / PEFT LoRA, peak memory, one task", ratio, 1.0))
        if AS_OURS in found["training"]:  # not in what was measured before there was this contender
            like = found["training"][AS_OURS]
            whats = {"ms": "step time, one task", "kept_bytes": "kept for the backward pass"}
            whats |= {"peak_bytes": "peak memory, one task"} if like["peak_bytes"] else {}
            checked += [Goal(f"Multi-LoRA / {LIKE}, {told}", one[what] / like[what]) for what, told in whats.items()]
    if "joint" in found:
        runs, run = (found["joint"][name] for name in ("peft-lora, eight runs", "multi-lora, one run"))
        checked.append(Goal("eight tasks jointly / eight PEFT LoRA runs, same rows", run["ms"] / runs["ms"], 0.7))
        if AS_OURS in found["joint"]:
            ratio = run["ms"] / found["joint"][AS_OURS]["ms"]
            checked.append(Goal(f"eight tasks jointly / eight runs of {LIKE}, same rows", ratio))
        checked.append(Goal("the same: tokens with padding, jointly / eight runs", run["tokens"] / runs["tokens"]))
    if "adding" in found:
        entry = found["adding"]["multi-lora"]
        checked.append(Goal("add_adapter, 64th / 2nd", entry["64"] / entry["2"], 2.0))
    return checked


def main() -> None:
    global clock
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cpu", "cuda"])
    parser.add_argument("--rounds", type=int, help="3, on a GPU 2")
    parser.add_argument("--repeats", type=int, help="runs a round")
    parser.add_argument("--only", choices=SECTIONS, action="append", help="measure this alone; may be repeated")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--cpu-time", action="store_true", help="count the process's own time on a CPU")
    args = parser.parse_args()
    warnings.filterwarnings("ignore", category=UserWarning)
    device = torch.device(args.device)
    if args.cpu_time:
        if device.type != "cpu":
            parser.error("--cpu-time says nothing of a GPU")
        clock = time.process_time
    gpu = device.type == "cuda"
    repeats, rounds = args.repeats or (15 if gpu else 3), args.rounds or (2 if gpu else 3)
    sections: dict[str, Callable[[], dict[str, Any]]] = {
        "inference": lambda: inference(device, rounds, repeats),
        "training": lambda: training(device, rounds, repeats),
        "joint": lambda: joint(device, rounds, repeats),
        "adding": lambda: adding(device, rounds),
    }
    about: dict[str, Any] = {
        "device": torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else f"cpu, {torch.get_num_threads()} threads",
        "model": SIZES[device.type],
        "clock": "cpu" if args.cpu_time else "wall",
        "rows": {
            "inference": ROWS[device.type],
            "training": TRAINED[device.type],
            "joint": OF_A_TASK[device.type],
            "length": LENGTH[device.type],
        },
        "versions": versions(),
    }
    args.results.mkdir(parents=True, exist_ok=True)
    target = args.results / f"multi-lora-{device.type}.json"
    found = _sections_of(target, about) if args.only else {}
    for name in args.only or SECTIONS:
        begin = time.perf_counter()
        found[name] = sections[name]()
        print(f"{name}: {time.perf_counter() - begin:.0f} s", flush=True)
        checked = goals(found, device.type)
        written = [{"name": goal.name, "value": goal.value, "bound": goal.bound} for goal in checked]
        command = " ".join(["python", "benchmarks/multi_lora.py", *sys.argv[1:]])
        target.write_text(json.dumps({"command": command, **about, "goals": written, **found}, indent=1) + "\n")
        gc.collect()
    print(*checked, sep="\n")
    print(f"written to {target.name}")


def _sections_of(file: Path, about: dict[str, Any]) -> dict[str, Any]:
    """What was measured before, on the same device and with the same versions."""
    try:
        before = json.loads(file.read_text())
    except (OSError, ValueError):
        return {}
    same = all(before.get(key) == json.loads(json.dumps(value)) for key, value in about.items())
    return {name: before[name] for name in SECTIONS if name in before} if same else {}


if __name__ == "__main__":
    main()
