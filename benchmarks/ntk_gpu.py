"""The GPU's part of ntk.py: one layer, whole models' training steps, and decoding, beside their peers.

Ratios are to what torch's attention chooses on the machine: cuDNN's kernel on an H200 with torch 2.11, faster than
the flash kernel that earlier releases chose. A graph that cannot be captured is a goal missed.
"""

from __future__ import annotations

import gc
import json
import math
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from vision import PEER, Goal, Steps

from inlay.attention import ntk_attention, prefix_attention
from inlay.methods.attach import attach, trained_parameters
from inlay.records.versions import versions
from inlay.training.modes import Modes
from inlay.training.precision import rounded_once

OURS, BASE = "ntk-attention", "no adapter"
PREFIXES = (1024, 8192, 65536)
RANK = 16
PROMPT, TOKENS, LONGEST = 128, 64, 1024


@dataclass(frozen=True)
class Shape:
    batch: int
    heads: int
    length: int
    size: int
    causal: bool
    goal: float

    def __str__(self) -> str:
        return f"B{self.batch} H{self.heads} L{self.length} D{self.size}{' causal' if self.causal else ''}"


SHAPES = (
    Shape(8, 16, 2048, 64, True, 1.15),
    Shape(8, 16, 512, 64, False, 1.3),
    Shape(4, 32, 4096, 128, True, 1.15),
)


def milliseconds(run: Callable[[], object], least: float = 30.0) -> float:
    """Of one call, among as many in a row as take `least` milliseconds: the longer of launching and computing."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    calls = 1
    while True:
        torch.cuda.synchronize()
        begin.record()
        for _ in range(calls):
            run()
        end.record()
        torch.cuda.synchronize()
        taken = begin.elapsed_time(end)
        if taken >= least:
            return taken / calls
        calls = max(2 * calls, int(1.2 * calls * least / max(taken, 1e-3)))


def replayed(run: Callable[[], object]) -> Callable[[], object]:
    """The same inside a CUDA graph: computing alone."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def by_turns(runs: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    for run in runs.values():
        run(), run(), run()
    found: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            found[name].append(milliseconds(run))
    return found


def layer(shape: Shape, rounds: int, prefixes: tuple[int, ...]) -> dict[str, Any]:
    """One attention layer, forward and backward in bfloat16; every tensor needs a gradient.

    `one_thread` is by the clock with autograd on the calling thread: without it a thread of its own runs the backward
    pass, which for one small layer costs more than it brings.
    """
    torch.manual_seed(0)
    whole = (shape.batch, shape.heads, shape.length, shape.size)

    def made(*size: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.randn(*size, device="cuda", dtype=dtype).requires_grad_()

    q, k, v = (made(*whole) for _ in range(3))
    g = torch.randn_like(q)
    pair = (
        made(shape.heads, shape.size, RANK, dtype=torch.float32),
        made(shape.heads, RANK, shape.size, dtype=torch.float32),
    )
    kappa = torch.rand(shape.heads, shape.size, device="cuda").requires_grad_()

    def floor() -> object:
        return torch.autograd.grad(scaled_dot_product_attention(q, k, v, is_causal=shape.causal), (q, k, v), g)

    def ours(backend: str | None = None) -> object:
        out = ntk_attention(q, k, v, pair, kappa, is_causal=shape.causal, backend=backend)
        return torch.autograd.grad(out, (q, k, v, *pair, kappa), g)

    main = by_turns({"sdpa": floor, "ntk": ours}, rounds)
    with torch.autograd.set_multithreading_enabled(False):
        single = by_turns({"sdpa": floor, "ntk": ours}, rounds)
    found: dict[str, Any] = {f"{name}_ms": statistics.median(ms) for name, ms in main.items()}
    found |= {f"{name}_one_thread_ms": statistics.median(ms) for name, ms in single.items()}
    found["rounds_ms"] = {name: [round(x, 4) for x in ms] for name, ms in main.items()}
    found["ratio"] = statistics.median(n / s for n, s in zip(main["ntk"], main["sdpa"], strict=True))
    found["ratio_one_thread"] = found["ntk_one_thread_ms"] / found["sdpa_one_thread_ms"]
    try:
        graphs = by_turns({"sdpa": replayed(floor), "ntk": replayed(ours)}, rounds)
        found |= {f"{name}_graph_ms": statistics.median(ms) for name, ms in graphs.items()}
        found["ratio_graph"] = found["ntk_graph_ms"] / found["sdpa_graph_ms"]
    except RuntimeError as failure:
        found["graph_failed"] = (str(failure) or repr(failure)).splitlines()[0]
    found["plain_ms"] = _slow(lambda: ours("plain"))
    found["prefix_ms"] = {}
    for m in prefixes:
        prefix_key, prefix_value = (made(shape.heads, m, shape.size) for _ in range(2))

        def exact(prefix_key: Tensor = prefix_key, prefix_value: Tensor = prefix_value) -> object:
            out = prefix_attention(q, k, v, prefix_key, prefix_value, is_causal=shape.causal)
            return torch.autograd.grad(out, (q, k, v, prefix_key, prefix_value), g)

        found["prefix_ms"][m] = _slow(exact)
    gc.collect()
    torch.cuda.empty_cache()
    return found


def _slow(run: Callable[[], object]) -> float:
    run()
    return statistics.median(milliseconds(run, least=1.0) for _ in range(3))


def build(name: str) -> tuple[nn.Module, dict[str, Tensor], list[str]]:
    """A model of that shape with random weights, a batch with labels, and what PEFT's LoRA adapts in it."""
    from transformers import (
        GPT2Config,
        GPT2LMHeadModel,
        LlamaConfig,
        LlamaForCausalLM,
        RobertaConfig,
        RobertaForSequenceClassification,
    )

    torch.manual_seed(0)
    large = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
    llama = {"hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8}
    with torch.device("cuda"):
        if name == "roberta-large":
            sizes = {"vocab_size": 50265, "max_position_embeddings": 514, "type_vocab_size": 1, "num_labels": 2}
            model: nn.Module = RobertaForSequenceClassification(RobertaConfig(**large, **sizes))
            shape, targets = (32, 128), ["query", "value"]
        elif name == "gpt2-medium":
            model = GPT2LMHeadModel(GPT2Config(n_embd=1024, n_layer=24, n_head=16))
            shape, targets = (16, 512), ["c_attn"]
        else:
            model = LlamaForCausalLM(LlamaConfig(**llama, intermediate_size=8192, vocab_size=128256, head_dim=64))
            shape, targets = (8, 512), ["q_proj", "v_proj"]
        ids = torch.randint(4, 50000, shape)
        labels = torch.randint(2, (shape[0],)) if name == "roberta-large" else ids
    return model, {"input_ids": ids, "labels": labels}, targets


class TextSteps(Steps):
    """Training steps on a batch of text: bfloat16 autocast, AdamW.

    `BASE` trains nothing: forward and back to the first layer's input, which no method inside the layers can undercut.
    """

    def __init__(self, name: str, method: str) -> None:
        self.device = torch.device("cuda")
        self.model: nn.Module
        base, self.batch, targets = build(name)
        new = ["classifier"] if name == "roberta-large" else []
        self.rounding = ExitStack()
        if method == BASE:
            self.model = base.requires_grad_(False).eval()
            base.get_input_embeddings().register_forward_hook(lambda module, given, out: out.requires_grad_())
            self.rounding.enter_context(rounded_once(self.model, torch.bfloat16))
        elif method == PEER:
            from peft import LoraConfig, get_peft_model

            config = LoraConfig(r=8, lora_alpha=8, target_modules=targets, modules_to_save=new or None)
            self.model = get_peft_model(base, config).train()
        else:
            modes = Modes(base, new=new, whole=False)
            modes.adapt(attach(base, method, newly_initialised=new))
            modes.train()
            self.model = modes.model
            self.rounding.enter_context(rounded_once(self.model, torch.bfloat16))
        trained = [p for p in trained_parameters(self.model).values() if p.requires_grad]
        self.trained = sum(p.numel() for p in trained)
        self.optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=True) if trained else None

    def step(self, pictures: Tensor | None = None) -> None:
        with self.autocast():
            loss = self.model(**self.batch).loss
        loss.backward()
        if self.optimizer is not None:
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)

    def computing(self, steps: int = 3) -> float:
        """Milliseconds that the GPU is at work in a step, however long it waits in between."""
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            for _ in range(steps):
                self.step()
            self.wait()
        return sum(entry.self_device_time_total for entry in profiler.key_averages()) / (1e3 * steps)


def steps(name: str, rounds: int, repeats: int) -> dict[str, Any]:
    """Time and memory of a training step: ours, PEFT's LoRA and none at all, one after the other, several times."""
    found: dict[str, Any] = {}
    times: dict[str, list[float]] = {OURS: [], PEER: [], BASE: []}
    for turn in range(rounds):
        for method in times:
            one = TextSteps(name, method)
            one.step()
            if turn == 0:
                found[method] = {"trained": one.trained, "peak_bytes": one.memory()}
            times[method].append(one.timed(one.step, repeats, warmup=4))
            if turn == 0:
                found[method]["computing_ms"] = one.computing()
            one.rounding.close()
            del one
            gc.collect()
            torch.cuda.empty_cache()
    for method, values in times.items():
        found[method] |= {"step_ms": statistics.median(values), "rounds_ms": [round(x, 3) for x in values]}
    return found


class Decoder:
    """Greedy decoding of a Llama-1B-shaped model in bfloat16, one sequence, token by token with a KV cache."""

    def __init__(self, method: str | None) -> None:
        model, _, _ = build("llama-1b")
        model = model.to(torch.bfloat16)
        self.config = model.config
        if method is not None:
            model = attach(model, method, newly_initialised=[])
        self.model = model.eval()
        self.prompt = torch.randint(
            4, 50000, (1, PROMPT), device="cuda", generator=torch.Generator("cuda").manual_seed(1)
        )

    @torch.no_grad()
    def per_token(self) -> float:
        """Milliseconds, the cache growing with every token."""
        found = self.model(input_ids=self.prompt, use_cache=True)
        cache, token = found.past_key_values, found.logits[:, -1:].argmax(-1)
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(TOKENS):
            token = self.model(input_ids=token, past_key_values=cache, use_cache=True).logits[:, -1:].argmax(-1)
        torch.cuda.synchronize()
        return 1e3 * (time.perf_counter() - begin) / TOKENS

    @torch.no_grad()
    def graphed(self) -> Callable[[], float]:
        """The same with a cache of fixed length, one step captured and replayed."""
        from transformers import StaticCache

        cache = StaticCache(config=self.config, max_cache_len=LONGEST)
        token = self.model(input_ids=self.prompt, past_key_values=cache, use_cache=True).logits[:, -1:].argmax(-1)

        def step() -> None:
            token.copy_(self.model(input_ids=token, past_key_values=cache, use_cache=True).logits[:, -1:].argmax(-1))

        def begin_again() -> None:
            for one in cache.layers:
                one.cumulative_length.fill_(PROMPT)

        replay = replayed(step)

        def measure() -> float:
            begin_again()
            torch.cuda.synchronize()
            begin = time.perf_counter()
            for _ in range(TOKENS):
                replay()
            torch.cuda.synchronize()
            return 1e3 * (time.perf_counter() - begin) / TOKENS

        return measure


def decoding(rounds: int) -> dict[str, Any]:
    decoders = {"base": Decoder(None), "ntk": Decoder(OURS)}
    found: dict[str, Any] = {}
    for decoder in decoders.values():
        decoder.per_token()
    rows = {name: [] for name in decoders}
    for _ in range(rounds):
        for name, decoder in decoders.items():
            rows[name].append(decoder.per_token())
    found["eager"] = _ratios(rows)
    try:
        replays = {name: decoder.graphed() for name, decoder in decoders.items()}
    except RuntimeError as failure:  # of what Transformers does in a step, perhaps
        found["graph_failed"] = (str(failure) or repr(failure)).splitlines()[0]
        return found
    rows = {name: [] for name in decoders}
    for _ in range(rounds):
        for name, measure in replays.items():
            rows[name].append(measure())
    found["graph"] = _ratios(rows)
    return found


def _ratios(rows: dict[str, list[float]]) -> dict[str, Any]:
    ratio = statistics.median(n / b for n, b in zip(rows["ntk"], rows["base"], strict=True))
    return {"ratio": ratio, **{f"{name}_ms": statistics.median(ms) for name, ms in rows.items()}}


def goals(found: dict[str, Any]) -> list[Goal]:
    made = []
    for shape in SHAPES:
        entry = found["layer"][str(shape)]
        made.append(Goal(f"{shape}: NTK / SDPA", entry["ratio"], shape.goal))
        made.append(Goal(f"{shape}: the same, computing alone", entry.get("ratio_graph", math.inf), shape.goal))
    # (Z, kappa) is of one size whatever prefix it stands for, and so is its time: what is left to show is that it is
    # less than that of the prefix.
    first = found["layer"][str(SHAPES[0])]
    for m, taken in first["prefix_ms"].items():
        made.append(Goal(f"{SHAPES[0]}: NTK / exact prefix of {m}", first["ntk_ms"] / taken, 1.0))
    bounds = {"roberta-large": 0.6, "gpt2-medium": 0.9, "llama-1b": 0.9}
    for name, bound in bounds.items():
        mine, peer = (found["steps"][name][method] for method in (OURS, PEER))
        made.append(Goal(f"{name}: NTK / PEFT LoRA, step time", mine["step_ms"] / peer["step_ms"], bound))
        ratio = mine["computing_ms"] / peer["computing_ms"]
        made.append(Goal(f"{name}: the same, computing alone", ratio, bound))
        if name == "roberta-large":
            made.append(Goal(f"{name}: NTK / PEFT LoRA, memory", mine["peak_bytes"] / peer["peak_bytes"], 1.0))
    made.append(Goal("decoding: NTK / base, time per token", found["decoding"]["eager"]["ratio"], 1.15))
    captured = found["decoding"].get("graph", {"ratio": math.inf})
    made.append(Goal("decoding in CUDA graphs: NTK / base", captured["ratio"], 1.05))
    return made


def main(out: Path, rounds: int, figure: Callable[[str], list[dict[str, Any]]]) -> None:
    begin = time.perf_counter()
    found: dict[str, Any] = {"layer": {}, "steps": {}}
    for shape in SHAPES:
        entry = found["layer"][str(shape)] = layer(shape, rounds, PREFIXES if shape == SHAPES[0] else ())
        failed = f", no graph: {entry['graph_failed']}" if "graph_failed" in entry else ""
        print(f"{time.perf_counter() - begin:5.1f} s  {shape}: {_numbers(entry)}{failed}", flush=True)
    for name in ("roberta-large", "gpt2-medium", "llama-1b"):
        found["steps"][name] = steps(name, min(rounds, 2), repeats=12)
        for method, entry in found["steps"][name].items():
            numbers = f"{entry['step_ms']:.1f} ms, computing {entry['computing_ms']:.1f} ms, "
            numbers += f"{entry['peak_bytes'] / 2**30:.2f} GiB"
            print(f"{time.perf_counter() - begin:5.1f} s  {name} {method}: {numbers}", flush=True)
    found["decoding"] = decoding(min(rounds, 4))
    print(f"{time.perf_counter() - begin:5.1f} s  decoding: {json.dumps(found['decoding'])}", flush=True)
    found["figure3"] = figure("cuda")
    checked = goals(found)
    print(*checked, sep="\n")
    about = {
        "command": " ".join(["python", "benchmarks/ntk.py", *sys.argv[1:]]),
        "device": torch.cuda.get_device_name(),
        "precision": "bfloat16",
        "cudnn": torch.backends.cudnn.version(),
        "versions": versions(),
    }
    verdicts = [
        {"name": g.name, "value": g.value if math.isfinite(g.value) else None, "bound": g.bound} for g in checked
    ]
    out.write_text(json.dumps({**about, **found, "goals": verdicts}, indent=1) + "\n")
    print(f"{time.perf_counter() - begin:5.1f} s  written to {out.name}")


def _numbers(entry: dict[str, Any]) -> str:
    simple = {name: value for name, value in entry.items() if isinstance(value, float)}
    return ", ".join(f"{name} {value:.3f}" for name, value in simple.items())
