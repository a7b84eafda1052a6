"""What the visual methods cost: time and memory of a training step, side by side in one process; and the trunk cache.

On a GPU: ViT-L/16 and ResNet-101, 128 pictures of 224 pixels, bfloat16 autocast, Adam. On a CPU: ViT-tiny/16 and
ResNet-50, 16 pictures, float32. Weights and pictures are random: what is measured does not depend on them. Every method
takes the same steps from the same kind of start: forward, loss, backward, optimiser. Frozen parts are in eval mode, as
`inlay tune` has them; the peer, PEFT's LoRA (rank 10, as the paper of activation prompts has it), is as PEFT makes it.
Methods take turns, several rounds; a method's figure is the median of its rounds' medians, its spread their range.

The trunk cache is measured by the same steps over pictures whose rows are cached: an epoch after the first.

    python benchmarks/vision.py            # prints the ratios and their goals, writes vision-*.json
    python benchmarks/vision.py --small    # the CPU's models also on a GPU, every method: the portraits in docs/
    python benchmarks/vision.py --rows     # ViT-L/16 on a GPU, every method and the rows of the paper's tables

vision-cuda.json and vision-rows-cuda.json lie where recipes read them, in src/inlay/papers/activation_prompts/kept, the
others in benchmarks/results.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from inlay.methods.attach import attach, trained_parameters
from inlay.methods.registry import all_methods
from inlay.papers.activation_prompts.recipes.protocol import WAYS
from inlay.papers.activation_prompts.table import ROWS
from inlay.papers.reproduce import kept
from inlay.records.versions import versions
from inlay.training.modes import Modes
from inlay.training.precision import rounded_once

RESULTS = Path(__file__).parent / "results"
WITH_THE_PAPER = kept.path("activation_prompts", "")  # recipes read vision-cuda.json and vision-rows-cuda.json
CLASSES, SIDE = 100, 224
PEER = "peft-lora"
NOT_ON_CNN = ("vpt-deep", "adaptformer")
MORE = ("lora", "visual-prompt", "norm", "bias", "vpt-deep", "ssf", "adaptformer", "full")


@dataclass(frozen=True)
class Goal:
    """A ratio of two measurements, and what it may be at most."""

    name: str
    value: float
    bound: float

    def __str__(self) -> str:
        verdict = "met" if self.value <= self.bound else "MISSED"
        return f"{self.name:<62} {self.value:6.3f}  goal <= {self.bound:<5} {verdict}"


def build(name: str) -> nn.Module:
    """A fresh model of the right shape with random weights."""
    return copy.deepcopy(_first_build(name))


@cache
def _first_build(name: str) -> nn.Module:
    from transformers import ResNetConfig, ResNetForImageClassification, ViTConfig, ViTForImageClassification

    torch.manual_seed(0)
    common = {"num_labels": CLASSES}
    if name == "vit-large":
        sizes = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
        return ViTForImageClassification(ViTConfig(**sizes, **common))
    if name == "vit-tiny":
        sizes = {"hidden_size": 192, "num_hidden_layers": 12, "num_attention_heads": 3, "intermediate_size": 768}
        return ViTForImageClassification(ViTConfig(**sizes, **common))
    depths = {"resnet-101": [3, 4, 23, 3], "resnet-50": [3, 4, 6, 3]}[name]
    return ResNetForImageClassification(ResNetConfig(depths=depths, **common))


def adapt(name: str, method: str) -> nn.Module:
    """The model with a method in it, or the method of one of the paper's rows, in the modes in which it is trained."""
    base = build(name)
    if method == PEER:
        from peft import LoraConfig, get_peft_model

        targets = ["q_proj", "v_proj"] if name.startswith("vit") else r".*encoder.*convolution"
        return get_peft_model(
            base, LoraConfig(r=10, lora_alpha=10, target_modules=targets, modules_to_save=["classifier"])
        ).train()
    settings: dict[str, Any] = {}
    if method in ROWS:
        method, settings = WAYS[method].method, dict(WAYS[method].settings)
    modes = Modes(base, new=["classifier"], whole=method == "full")
    settings |= {"image_size": SIDE} if _takes_image_size(method) else {}
    modes.adapt(attach(base, method, newly_initialised=["classifier"], settings=settings))
    modes.train()
    return modes.model


def _takes_image_size(method: str) -> bool:
    found = all_methods()[method]
    return found.config is not None and "image_size" in getattr(found.config_class(), "__dataclass_fields__", {})


class Steps:
    """Training steps of one method on one model, timed."""

    def __init__(self, name: str, method: str, device: torch.device, batch: int) -> None:
        self.device = device
        self.model = adapt(name, method).to(device)
        self.rounding = ExitStack()  # as `tune` trains
        if method != PEER and device.type == "cuda":
            self.rounding.enter_context(rounded_once(self.model, torch.bfloat16))
        self.optimizer = torch.optim.Adam(trained_parameters(self.model).values(), lr=1e-3, fused=device.type == "cuda")
        self.trained = sum(p.numel() for p in trained_parameters(self.model).values())
        generator = torch.Generator().manual_seed(1)
        self.pictures = torch.randn(batch, 3, SIDE, SIDE, generator=generator).to(device)
        self.labels = torch.randint(CLASSES, (batch,), generator=generator).to(device)
        self.medians: list[float] = []
        self.peak = 0

    def autocast(self) -> Any:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda")

    def step(self, pictures: Tensor | None = None) -> None:
        with self.autocast():
            logits = self.model(pixel_values=self.pictures if pictures is None else pictures).logits
            loss = cross_entropy(logits.float(), self.labels)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def infer(self) -> None:
        with torch.no_grad(), self.autocast():
            self.model(pixel_values=self.pictures)

    def timed(self, action: Callable[[], None], repeats: int, warmup: int) -> float:
        """The median of single steps, in milliseconds."""
        for _ in range(warmup):
            action()
        times = []
        for _ in range(repeats):
            self.wait()
            begin = time.perf_counter()
            action()
            self.wait()
            times.append(1e3 * (time.perf_counter() - begin))
        return statistics.median(times)

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def memory(self) -> int:
        """The allocator's maximum over two steps, with this method alone on the device."""
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self.device)
        self.step()
        self.step()
        self.wait()
        return torch.cuda.max_memory_allocated(self.device)


def measure(
    name: str, methods: list[str], device: torch.device, batch: int, rounds: int, repeats: int
) -> dict[str, Any]:
    """Step time, memory and inference throughput of every method on one model."""
    found: dict[str, Any] = {}
    for method in methods:  # memory first: each alone on the device
        if device.type == "cuda":
            alone = Steps(name, method, device, batch)
            alone.step()
            found[method] = {"trained": alone.trained, "peak_bytes": alone.memory()}
            del alone
            gc.collect()
        else:
            found[method] = {}
    medians: dict[str, list[float]] = {method: [] for method in methods}
    inference: dict[str, list[float]] = {method: [] for method in methods}
    for _ in range(rounds):
        for method in methods:
            one = Steps(name, method, device, batch)
            medians[method].append(one.timed(one.step, repeats, warmup=max(2, repeats // 4)))
            found[method]["trained"] = one.trained
            one.rounding.close()  # as `evaluate` and `predict` run
            one.model.eval()
            inference[method].append(1e3 * batch / one.timed(one.infer, repeats, warmup=max(2, repeats // 4)))
            del one
            gc.collect()
    for method, values in medians.items():
        found[method] |= {
            "step_ms": statistics.median(values),
            "rounds_ms": [round(value, 3) for value in values],
            "inference_per_second": statistics.median(inference[method]),
            "rounds_inference": [round(value) for value in inference[method]],
        }
    return found


def measure_cache(
    name: str, method: str, device: torch.device, batch: int, rounds: int, repeats: int
) -> dict[str, Any]:
    """A step of an epoch after the first with the trunk kept, beside the same step without.

    The kept step picks its rows at random out of four batches of them, as an epoch does.
    """
    from inlay.training.trunk.cut import TrunkCache

    plain, kept = [], []
    skipped = ""
    for _ in range(rounds):
        one = Steps(name, method, device, batch)
        plain.append(one.timed(one.step, repeats, warmup=max(2, repeats // 4)))
        with one.autocast():
            trunk = TrunkCache.find(one.model, {"pixel_values": one.pictures, "labels": one.labels})
            rows = trunk.compute({"pixel_values": one.pictures})
        skipped = f"{trunk.blocks_skipped} of {trunk.blocks}"
        store = rows.repeat(4, *[1] * (rows.ndim - 1)) if rows.numel() < 2**30 else rows
        generator = torch.Generator().manual_seed(2)

        def step(
            one: Steps = one, trunk: TrunkCache = trunk, store: Tensor = store, generator: Any = generator
        ) -> None:
            chosen = torch.randint(len(store), (batch,), generator=generator).to(device)
            with trunk.replay(store.index_select(0, chosen)):
                one.step(trunk.placeholders(batch)["pixel_values"])

        kept.append(one.timed(step, repeats, warmup=max(2, repeats // 4)))
        del one, trunk, rows, store, step
        gc.collect()
    return {
        "blocks_skipped": skipped,
        "uncached_ms": statistics.median(plain),
        "cached_ms": statistics.median(kept),
        "ratio": statistics.median(kept) / statistics.median(plain),
        "rounds_ms": [[round(a, 3), round(b, 3)] for a, b in zip(plain, kept, strict=True)],
    }


def goals(found: dict[str, Any], on_gpu: bool) -> list[Goal]:
    """The ratios that the project set itself."""
    steps, caches = found["steps"], found["trunk_cache"]

    def ratio(model: str, method: str, peer: str, key: str = "step_ms") -> float:
        return steps[model][method][key] / steps[model][peer][key]

    ap, probe = "activation-prompt", "linear-probe"
    if on_gpu:
        return [
            Goal("ViT-L: activation prompt / PEFT LoRA, step time", ratio("vit-large", ap, PEER), 0.75),
            Goal("ViT-L: activation prompt / PEFT LoRA, memory", ratio("vit-large", ap, PEER, "peak_bytes"), 0.8),
            Goal("ResNet-101: activation prompt / linear probe, step time", ratio("resnet-101", ap, probe), 1.1),
            Goal("ResNet-101: cached / uncached activation prompt", caches[f"resnet-101 {ap}"]["ratio"], 0.2),
            Goal("ViT-L: cached / uncached activation prompt", caches[f"vit-large {ap}"]["ratio"], 0.97),
        ]
    return [
        Goal("ViT-tiny: activation prompt / PEFT LoRA, step time", ratio("vit-tiny", ap, PEER), 0.8),
        Goal("ResNet-50: activation prompt / PEFT LoRA, step time", ratio("resnet-50", ap, PEER), 0.8),
        Goal("ResNet-50: cached / uncached activation prompt", caches[f"resnet-50 {ap}"]["ratio"], 0.3),
        Goal("ViT-tiny: cached / uncached linear probe", caches[f"vit-tiny {probe}"]["ratio"], 0.3),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--small", action="store_true", help="the CPU's models, every method, wherever this runs")
    which.add_argument("--rows", action="store_true", help="a ViT alone, every method and the rows of the paper")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cpu", "cuda"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--repeats", type=int, help="steps a round")
    parser.add_argument("--results", type=Path, help="another folder for the results")
    args = parser.parse_args()
    device = torch.device(args.device)
    on_gpu = device.type == "cuda"
    large = on_gpu and not args.small
    models = ("vit-large", "resnet-101") if large else ("vit-tiny", "resnet-50")
    models = models[:1] if args.rows else models
    batch, repeats = (128, args.repeats or 20) if on_gpu else (16, args.repeats or 3)
    ap, probe = "activation-prompt", "linear-probe"
    found: dict[str, Any] = {"steps": {}, "trunk_cache": {}}
    for model in models:
        some = [probe, ap, PEER, *(MORE if on_gpu or args.rows else ()), *(ROWS if args.rows else ())]
        methods = [name for name in some if not (model.startswith("resnet") and name in NOT_ON_CNN)]
        found["steps"][model] = measure(model, methods, device, batch, args.rounds, repeats)
        for method, entry in found["steps"][model].items():
            peak = f"{entry['peak_bytes'] / 2**30:7.2f} GiB" if "peak_bytes" in entry else ""
            rate = f"{entry['inference_per_second']:9,.0f} pictures/s"
            print(
                f"{model:<11} {method:<18} {entry['step_ms']:9.1f} ms {peak} {rate}  {entry['rounds_ms']}", flush=True
            )
    for model in () if args.rows else models:
        for method in (ap, probe):
            entry = measure_cache(model, method, device, batch, args.rounds, repeats)
            found["trunk_cache"][f"{model} {method}"] = entry
            times = f"{entry['cached_ms']:.1f} of {entry['uncached_ms']:.1f} ms = {entry['ratio']:.3f}"
            print(f"{model} {method}: {entry['blocks_skipped']} blocks kept, {times}", flush=True)
    about = {
        "command": " ".join(["python", "benchmarks/vision.py", *sys.argv[1:]]),
        "device": torch.cuda.get_device_name(device) if on_gpu else f"cpu, {torch.get_num_threads()} threads",
        "batch": batch,
        "precision": "bfloat16 autocast" if on_gpu else "float32",
        "versions": versions(),
    }
    if not args.rows and (large or not on_gpu):
        checked = goals(found, on_gpu)
        print(*checked, sep="\n")
        found["goals"] = [{"name": g.name, "value": g.value, "bound": g.bound} for g in checked]
    folder = args.results or (WITH_THE_PAPER if large else RESULTS)
    folder.mkdir(parents=True, exist_ok=True)
    kind = "rows-" if args.rows else "small-" if on_gpu and args.small else ""
    target = folder / f"vision-{kind}{device.type}.json"
    target.write_text(json.dumps({**about, **found}, indent=1) + "\n")
    print(f"written to {target.name}")


if __name__ == "__main__":
    main()
