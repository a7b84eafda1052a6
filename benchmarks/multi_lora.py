"""What many tasks on one model cost: mixed batches, training steps and adding a task, beside PEFT's LoRA.

On a GPU: RoBERTa-large, bfloat16, 64 rows of 128 tokens (training: 32 rows, bfloat16 autocast, AdamW). On a CPU: a
RoBERTa of six layers and 384 channels, float32, 64 rows of 32 tokens. Weights and tokens are random: what is measured
does not depend on them. Queries and values are adapted with rank 8. Everything takes turns, several rounds; a figure is
the median of its rounds' medians.

- Inference: the body alone, without heads, since PEFT cannot mix RoBERTa's heads; rows go round the tasks. The base
  model without adapters is the floor. Kernel launches are counted by torch's profiler on a GPU, dispatched operations
  on a CPU.
- Training: a classifier with a head for each task. PEFT's LoRA is as PEFT makes it; Multi-LoRA as `inlay tune` trains
  it, with frozen weights kept rounded under autocast and the trunk in eval mode.
- Joint: the time for the rows of eight tasks in mixed batches, beside the same rows in eight runs of PEFT's LoRA with
  batches of the same size. Both take as many steps.

    python benchmarks/multi_lora.py            # prints the ratios and their goals, writes results/multi-lora-*.json
    python benchmarks/multi_lora.py --only inference
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from functools import cache
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
from inlay.training.modes import Modes
from inlay.training.precision import rounded_once

RESULTS = Path(__file__).parent / "results"
TARGETS = ["query", "value"]
SIZES = {
    "cuda": {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096},
    "cpu": {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536},
}
ROWS, LENGTH, TRAINED = {"cuda": 64, "cpu": 64}, {"cuda": 128, "cpu": 32}, {"cuda": 32, "cpu": 16}
OURS, THEIRS = (1, 2, 8, 32, 64), {"cuda": (1, 2, 8, 32), "cpu": (1, 2, 8, 32)}
SECTIONS = ("inference", "training", "adding")


@dataclass(frozen=True)
class Goal:
    """A ratio of two measurements, and what it may be at most."""

    name: str
    value: float
    bound: float

    def __str__(self) -> str:
        verdict = "met" if self.value <= self.bound else "MISSED"
        return f"{self.name:<66} {self.value:6.3f}  goal <= {self.bound:<5} {verdict}"


@cache
def _built(kind: str, heads: bool) -> nn.Module:
    torch.manual_seed(0)
    config = RobertaConfig(vocab_size=5000, max_position_embeddings=514, num_labels=2, **SIZES[kind])
    return (RobertaForSequenceClassification if heads else RobertaModel)(config)


def build(device: torch.device, heads: bool = False) -> nn.Module:
    """A fresh model of the right shape with random weights; a body is in the precision it is used in."""
    model = copy.deepcopy(_built(device.type, heads)).to(device)
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
    """The median of single runs, in milliseconds."""
    for _ in range(max(2, repeats // 4)):
        action()
    times = []
    for _ in range(repeats):
        wait(device)
        begin = time.perf_counter()
        action()
        wait(device)
        times.append(1e3 * (time.perf_counter() - begin))
    return statistics.median(times)


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
    for tasks in THEIRS[device.type]:
        contend(f"peft-lora {tasks}", theirs(build(device), tasks), tasks)
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
        base = build(device, heads=True)
        self.stack = ExitStack()
        if kind == "peft-lora":
            self.model: Any = theirs(base, 1, task_type="SEQ_CLS").train()
        else:
            modes = Modes(base, new=["classifier"], whole=False)
            self.model = ours(base, tasks)
            modes.adapt(self.model)
            modes.train()
            if device.type == "cuda":
                self.stack.enter_context(rounded_once(self.model, torch.bfloat16))
        rows = TRAINED[device.type]
        self.batch = tokens(device, rows) | {"labels": torch.arange(rows, device=device) % 2}
        if kind != "peft-lora":
            self.batch["adapter_names"] = [f"t{i % tasks}" for i in range(rows)]
        trained = list(trained_parameters(self.model).values())
        self.optimizer = torch.optim.AdamW(trained, lr=1e-3, fused=device.type == "cuda")

    def step(self) -> None:
        gpu = self.device.type == "cuda"
        with torch.autocast("cuda", torch.bfloat16) if gpu else nullcontext():
            loss = self.model(**self.batch).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def peak(self) -> int | None:
        """The allocator's maximum over two steps, with this contender alone on the device."""
        if self.device.type == "cpu":
            return None
        self.step()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self.device)
        self.step()
        self.step()
        wait(self.device)
        return torch.cuda.max_memory_allocated(self.device)

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


def training(device: torch.device, rounds: int, repeats: int) -> dict[str, Any]:
    """One step of one task, and of eight mixed at the same number of rows."""
    contenders = {"peft-lora 1": ("peft-lora", 1), "multi-lora 1": ("multi-lora", 1), "multi-lora 8": ("multi-lora", 8)}
    found: dict[str, Any] = {}
    for name, how in contenders.items():
        alone = Steps(device, *how)
        found[name] = {"peak_bytes": alone.peak(), "kept_bytes": alone.kept(), "rounds_ms": []}
        alone.stack.close()
        del alone
        gc.collect()
    for _ in range(rounds):
        for name, how in contenders.items():
            one = Steps(device, *how)
            found[name]["rounds_ms"].append(round(timed(one.step, device, repeats), 3))
            one.stack.close()
            del one
            gc.collect()
    for name, entry in found.items():
        entry["ms"] = statistics.median(entry["rounds_ms"])
        peak = "" if entry["peak_bytes"] is None else f"{entry['peak_bytes'] / 2**30:6.2f} GiB"
        print(f"training  {name:<16} {entry['ms']:9.2f} ms  {peak}  keeps {entry['kept_bytes'] / 2**20:,.0f} MiB")
    return found


def adding(device: torch.device, rounds: int) -> dict[str, Any]:
    """What `add_adapter` takes for the 2nd and the 64th task, in milliseconds."""
    found: dict[str, Any] = {}
    for name, make, config in (
        ("multi-lora", ours, lambda: inlay.MultiLoraConfig(r=8, target_modules=TARGETS)),
        ("peft-lora", theirs, lambda: LoraConfig(r=8, lora_alpha=16, target_modules=TARGETS)),
    ):
        times: dict[int, list[float]] = {2: [], 64: []}
        for _ in range(rounds):
            model = make(build(device), 1)
            for number in range(2, 65):
                wait(device)
                begin = time.perf_counter()
                model.add_adapter(f"t{number - 1}", config())
                wait(device)
                if number in times:
                    times[number].append(1e3 * (time.perf_counter() - begin))
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
            Goal("eight tasks jointly / eight PEFT LoRA runs, same rows", eight["ms"] / lora["ms"], 0.7),
        ]
        if lora["peak_bytes"]:
            ratio = one["peak_bytes"] / lora["peak_bytes"]
            checked.insert(-2, Goal("Multi-LoRA / PEFT LoRA, peak memory, one task", ratio, 1.0))
    if "adding" in found:
        entry = found["adding"]["multi-lora"]
        checked.append(Goal("add_adapter, 64th / 2nd", entry["64"] / entry["2"], 2.0))
    return checked


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cpu", "cuda"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--repeats", type=int, help="runs a round")
    parser.add_argument("--only", choices=SECTIONS, action="append", help="measure this alone; may be repeated")
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args()
    warnings.filterwarnings("ignore", category=UserWarning)
    device = torch.device(args.device)
    repeats = args.repeats or (20 if device.type == "cuda" else 3)
    sections: dict[str, Callable[[], dict[str, Any]]] = {
        "inference": lambda: inference(device, args.rounds, repeats),
        "training": lambda: training(device, args.rounds, repeats),
        "adding": lambda: adding(device, args.rounds),
    }
    found = {name: run() for name, run in sections.items() if args.only is None or name in args.only}
    checked = goals(found, device.type)
    print(*checked, sep="\n")
    about = {
        "command": " ".join(["python", "benchmarks/multi_lora.py", *sys.argv[1:]]),
        "device": torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else f"cpu, {torch.get_num_threads()} threads",
        "model": SIZES[device.type],
        "rows": {"inference": ROWS[device.type], "training": TRAINED[device.type], "length": LENGTH[device.type]},
        "versions": versions(),
        "goals": [{"name": goal.name, "value": goal.value, "bound": goal.bound} for goal in checked],
    }
    args.results.mkdir(parents=True, exist_ok=True)
    target = args.results / f"multi-lora-{device.type}.json"
    target.write_text(json.dumps({**about, **found}, indent=1) + "\n")
    print(f"written to {target.name}")


if __name__ == "__main__":
    main()
