"""How cost grows: time and memory against length, tasks, adapters, the prefix's length and the model's size.

Each curve changes one thing and keeps the rest: forward and backward of one attention layer, training steps of stacks
of a few stock blocks (own_loop.py's plain loop), and forward passes with many adapters. A point is the median of three
timings; memory is the allocator's peak over a step, on a GPU alone. Every curve has its peer beside it.

    python benchmarks/growth.py                  # about 90 s on a GPU, two minutes on two cores; results/growth-*.json
    python benchmarks/growth.py --only tasks     # one plot, beside what the file has of the others
    python scripts/document_cost.py --draw       # the plots, and docs/cost.md
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from commands import command as called_by
from multi_lora import ours as multi_lora_of
from multi_lora import theirs as lora_of
from ntk_gpu import RANK
from own_loop import (
    BASE,
    LORA,
    MULTI,
    NTK,
    RESULTS,
    SDPA,
    Loop,
    Setting,
    Work,
    alone,
    batch_for,
    build,
    device_name,
    first_line,
    timed,
)
from peft import PrefixTuningConfig, get_peft_model
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import inlay
from inlay.attention import ntk_attention, prefix_attention
from inlay.records.versions import versions

PREFIX, EXACT = "PEFT prefix tuning", "exact prefix"
Run = Callable[[], object]


@dataclass
class Plot:
    """One thing that grows, and curves over it: points of x, milliseconds, bytes."""

    about: str
    x: str
    curves: dict[str, list[tuple[float, float, int | None]]] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)

    def add(self, setting: Setting, curve: str, x: float, make: Callable[[], Run]) -> None:
        """Measure what `make` makes, alone on the device; what does not fit ends its curve."""
        try:
            with alone(setting):
                ms, peak = _measured(make, setting)
        except Exception as failure:
            self.failed.append(f"{curve} at {x:g}: {first_line(failure)}")
            print(f"    {self.failed[-1]}", flush=True)
            return
        self.curves.setdefault(curve, []).append((x, ms, peak))

    def beside(self, setting: Setting, x: float, runs: dict[str, Run]) -> None:
        """The same for what can stay side by side; no memory is told."""
        for curve, run in runs.items():
            run(), run()
            self.curves.setdefault(curve, []).append((x, statistics.median(timed(run, setting)), None))


def _measured(make: Callable[[], Run], setting: Setting) -> tuple[float, int | None]:
    """The run is gone when this returns."""
    run = make()
    run(), run()
    setting.wait()
    if setting.gpu:
        torch.cuda.reset_peak_memory_stats()
    ms = statistics.median(timed(run, setting))
    return ms, torch.cuda.max_memory_allocated() if setting.gpu else None


# One attention layer


def tensors(setting: Setting, heads: int, length: int) -> dict[str, Any]:
    """Queries, keys and values of one row, (Z, rho) and a gradient: heads of 64."""
    torch.manual_seed(0)
    dtype = torch.bfloat16 if setting.gpu else torch.float32

    def made(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(*size, device=setting.device, dtype=dtype).requires_grad_()

    found: dict[str, Any] = {name: made(1, heads, length, 64, dtype=dtype) for name in "qkv"}
    found["pair"], found["rho"] = (made(heads, 64, RANK), made(heads, RANK, 64)), made(heads, 64)
    return found | {"g": torch.randn_like(found["q"]), "made": partial(made, dtype=dtype)}


def layer_run(kind: str, setting: Setting, heads: int, length: int, m: int = 0, dropout: float = 0.0) -> Run:
    """Forward and backward of one causal layer."""
    one = tensors(setting, heads, length)
    q, k, v, g = (one[name] for name in "qkvg")
    if kind == SDPA:
        return lambda: torch.autograd.grad(
            scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropout), (q, k, v), g
        )
    if kind == EXACT:
        prefix = [one["made"](heads, m, 64) for _ in range(2)]
        return lambda: torch.autograd.grad(prefix_attention(q, k, v, *prefix, is_causal=True), (q, k, v, *prefix), g)
    pair, rho = one["pair"], one["rho"]

    def ours() -> object:
        out = ntk_attention(q, k, v, pair, rho, signed=True, is_causal=True, dropout_p=dropout)
        return torch.autograd.grad(out, (q, k, v, *pair, rho), g)

    return ours


def by_length(setting: Setting) -> Plot:
    heads, lengths = (16, [2**i for i in range(9, 17)]) if setting.gpu else (4, [128, 256, 512, 1024, 2048])
    plot = Plot(f"One causal attention layer, {heads} heads of 64, forward and backward", "length L")
    for dropout in (0.0, 0.1):
        for length in lengths:
            if dropout and length > (16384 if setting.gpu else 1024):
                continue
            for kind in (NTK, SDPA):
                name = f"{kind}, dropout {dropout}" if dropout else kind
                plot.add(setting, name, length, partial(layer_run, kind, setting, heads, length, dropout=dropout))
    return plot


def by_prefix(setting: Setting) -> Plot:
    heads, length = (16, 1024) if setting.gpu else (4, 256)
    plot = Plot(f"One causal attention layer, {heads} heads of 64, L {length}, with a prefix of m", "prefix length m")
    for m in (2**i for i in (range(6, 17, 2) if setting.gpu else range(4, 13, 2))):
        plot.add(setting, EXACT, m, partial(layer_run, EXACT, setting, heads, length, m))
        plot.add(setting, NTK, m, partial(layer_run, NTK, setting, heads, length))
    return plot


# Training steps


def step_run(work: Work, method: str, setting: Setting, m: int | None = None) -> Run:
    """A step of the plain loop; a prefix of m is PEFT's."""
    attach = None
    if m is not None:

        def attach(base: Any) -> Any:
            return get_peft_model(base, PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=m))

    return Loop(work, method, setting, attach).step


def llama(setting: Setting, length: int, width: int | None = None, layers: int = 2) -> Work:
    """A few blocks of Llama, of the 8B shape or narrower, with a small vocabulary."""
    width = width or (4096 if setting.gpu else 512)
    changed = {
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": max(2, width // (128 if setting.gpu else 64)),
        "num_key_value_heads": max(1, width // 512),
        "intermediate_size": 7 * width // 2,
        "vocab_size": 8000,
        "max_position_embeddings": 65536,
    }
    dtype = torch.bfloat16 if setting.gpu else torch.float32
    return Work("llama-8b", (1, length), dtype, changed=tuple(changed.items()))


def steps_by_length(setting: Setting) -> Plot:
    about = f"A training step of two blocks of Llama, {4096 if setting.gpu else 512} channels, one row of L tokens"
    plot = Plot(about, "length L")
    for length in (1024, 4096, 16384, 32768) if setting.gpu else (64, 256, 1024):
        for method in (NTK, MULTI, LORA):
            plot.add(setting, method, length, partial(step_run, llama(setting, length), method, setting))
    return plot


def encoder_steps_by_length(setting: Setting) -> Plot:
    model, rows = ("roberta-large", 16) if setting.gpu else ("roberta-small", 4)
    about = f"A training step of four blocks of {model}, {rows} rows of L tokens, dropout 0.1"
    plot = Plot(about, "length L")
    changed = (("max_position_embeddings", 4100), ("num_hidden_layers", 4))
    for length in (128, 512, 2048) if setting.gpu else (32, 128, 512):
        for method in (NTK, LORA):
            work = Work(model, (rows, length), changed=changed)
            plot.add(setting, method, length, partial(step_run, work, method, setting))
    return plot


def steps_by_prefix(setting: Setting) -> Plot:
    length = 512 if setting.gpu else 64
    plot = Plot(f"A training step of two blocks of Llama, {length} tokens, with a prefix of m", "prefix length m")
    work = llama(setting, length)
    for m in (16, 256, 4096, 16384) if setting.gpu else (16, 64, 256, 1024):
        plot.add(setting, PREFIX, m, partial(step_run, work, PREFIX, setting, m))
        plot.add(setting, NTK, m, partial(step_run, work, NTK, setting))
    return plot


def by_size(setting: Setting) -> Plot:
    """x in millions of parameters; width, then depth."""
    length = 2048 if setting.gpu else 64
    plot = Plot(
        f"A training step of Llama blocks, one row of {length} tokens", "parameters of the base model, millions"
    )
    sizes = [(512, 4), (1024, 4), (2048, 4), (4096, 4), (4096, 8)] if setting.gpu else [(128, 4), (256, 4), (512, 4)]
    for width, layers in sizes:
        work = llama(setting, length, width, layers)
        with torch.device("meta"):
            base = build(work.model, Setting(torch.device("meta")), work.dtype, **dict(work.changed))
        millions = sum(p.numel() for p in base.parameters()) / 1e6
        for method in (NTK, MULTI, LORA):
            plot.add(setting, method, millions, partial(step_run, work, method, setting))
    return plot


# Many adapters


def bodies(setting: Setting, shape: tuple[int, int]) -> tuple[Callable[[], Any], dict[str, Tensor]]:
    """Six blocks of RoBERTa without heads, which PEFT cannot mix, and a batch."""
    model = "roberta-large" if setting.gpu else "roberta-small"
    batch = batch_for(model, shape, setting)
    del batch["labels"]
    dtype = torch.bfloat16 if setting.gpu else torch.float32
    layers = {"num_hidden_layers": 6 if setting.gpu else 3}
    return partial(build, model, setting, dtype, head=False, **layers), batch


@torch.no_grad()
def _forward(model: Any, batch: dict[str, Tensor], names: list[str] | None = None) -> None:
    model(**batch, **({} if names is None else {"adapter_names": names}))


def by_tasks(setting: Setting) -> Plot:
    rows = 256
    make, batch = bodies(setting, (rows, 32 if setting.gpu else 8))
    plot = Plot(
        f"A forward pass over {rows} rows whose tasks are mixed (bfloat16 weights on a GPU)", "tasks in a batch"
    )
    counts = [2**i for i in range(9)]
    most = 32 if setting.gpu else 8
    ours, theirs, base = multi_lora_of(make(), max(counts)).eval(), lora_of(make(), most).eval(), make().eval()
    for tasks in counts:
        names = [f"t{i % tasks}" for i in range(rows)]
        runs: dict[str, Run] = {MULTI: partial(_forward, ours, batch, names), BASE: partial(_forward, base, batch)}
        if tasks <= most:
            runs[f"{LORA}, mixed"] = partial(_forward, theirs, batch, names)
        plot.beside(setting, tasks, runs)
    return plot


def by_adapters(setting: Setting) -> Plot:
    """Loaded, of which one runs; and stacked: all of them run, one on the other."""
    make, batch = bodies(setting, (32, 64 if setting.gpu else 16))
    plot = Plot("A forward pass with k adapters loaded, one active; or k active (stacked)", "adapters k")
    makers: dict[str, Callable[[Any, int], Any]] = {MULTI: multi_lora_of, LORA: lora_of, NTK: _ntk_of}
    for k in (1, 2, 4, 8, 16) if setting.gpu else (1, 2, 4, 8):
        for name, maker in makers.items():
            model = maker(make(), k).eval()
            model.set_adapter("t0")
            plot.beside(setting, k, {f"{name}, loaded": partial(_forward, model, batch)})
            model.base_model.set_adapter([f"t{i}" for i in range(k)])
            plot.beside(setting, k, {f"{name}, stacked": partial(_forward, model, batch)})
            del model
    return plot


def _ntk_of(model: Any, adapters: int) -> Any:
    adapted = get_peft_model(model, inlay.NTKAttentionConfig(seed=0), adapter_name="t0")
    for i in range(1, adapters):
        adapted.add_adapter(f"t{i}", inlay.NTKAttentionConfig(seed=0))
    return adapted


PLOTS: dict[str, Callable[[Setting], Plot]] = {
    "length": by_length,
    "length-encoder": encoder_steps_by_length,
    "length-decoder": steps_by_length,
    "tasks": by_tasks,
    "adapters": by_adapters,
    "prefix": by_prefix,
    "prefix-step": steps_by_prefix,
    "size": by_size,
}


def show(plot: dict[str, Any]) -> Iterable[str]:
    for curve, points in plot["curves"].items():
        cells = (
            f"{x:g}: {ms:.2f} ms" + ("" if peak is None else f" {peak / 2**20:,.0f} MiB") for x, ms, peak in points
        )
        yield f"  {curve:<28} " + ", ".join(cells)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cpu", "cuda"])
    parser.add_argument("--only", action="append", choices=list(PLOTS), help="measure this alone; may be repeated")
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args()
    warnings.filterwarnings("ignore", category=UserWarning)
    device = torch.device(args.device)
    setting = Setting(device, rounds=1, timings=3, least=0.1 if device.type == "cuda" else 0.05)
    target = args.results / f"growth-{device.type}.json"
    args.results.mkdir(parents=True, exist_ok=True)
    try:
        plots = json.loads(target.read_text())["plots"]
    except (OSError, ValueError, KeyError):
        plots = {}
    command = called_by()
    begin, made_with = time.perf_counter(), versions()
    for name in args.only or PLOTS:
        started = time.perf_counter()
        try:
            with alone(setting):
                plot = PLOTS[name](setting)
        except Exception as failure:
            plot = Plot(f"{name}, not measured", "", failed=[f"{name}: {first_line(failure)}"])
        about = {"command": command, "versions": made_with, "seconds": round(time.perf_counter() - started, 1)}
        plots[name] = {"about": plot.about, "x": plot.x, "curves": plot.curves, "failed": plot.failed, **about}
        print(f"{name}: {plot.about} ({about['seconds']:.0f} s)", *show(plots[name]), sep="\n", flush=True)
        ordered = {each: plots[each] for each in PLOTS if each in plots}
        target.write_text(json.dumps({"device": device_name(device), "plots": ordered}, indent=1) + "\n")
    print(f"{time.perf_counter() - begin:.0f} s, written to {target}")


if __name__ == "__main__":
    main()
