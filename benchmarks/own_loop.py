"""What our methods cost in a user's own loop: stock models, PEFT's API, a plain training loop, beside their peers.

Models have stock configurations (dropout too) and random weights. Methods are attached by `get_peft_model` and used as
the manuals have it: `model.train()`, bfloat16 autocast on a GPU, `loss.backward()`, AdamW; `model.generate`;
`inlay.attention.ntk_attention`. Nothing is set in eval mode and no weights are rounded before: `inlay tune` does both,
a user's loop does neither. Lines that say so have the loop inside `inlay.rounded_once`.

Methods take turns, several rounds, and in training every turn builds its model anew with nothing else on the device. A
turn has several timings, each of as many steps as take a while, with one synchronisation at either end: a loop that
waits for Python shows it. A round's figure is the median of its timings, a method's figure the median of its rounds.
Memory is the allocator's peak during those steps, weights and optimiser included.

    python benchmarks/own_loop.py                   # the table, under ten minutes on an idle GPU; results/own-loop-*
    python benchmarks/own_loop.py --compiled        # the same steps compiled, on models of six layers (minutes more)
    python benchmarks/own_loop.py --only vit-large  # one row, beside what the file has of the others
    python benchmarks/own_loop.py --list            # the rows
    python benchmarks/own_loop.py --quick           # that everything runs: two layers, one round; no goals, no file

Each row is kept with the versions and the commit that made it.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from commands import command as called_by
from multi_lora import ours as multi_lora_of
from multi_lora import theirs as lora_of
from ntk_gpu import RANK, Shape, replayed
from peft import LoraConfig, get_peft_model
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import inlay
from inlay.attention import ntk_attention
from inlay.records.versions import versions

RESULTS = Path(__file__).parent / "results"
NTK, MULTI, PROMPT, BIAS, NORM, SSF = "ntk-attention", "multi-lora", "activation-prompt", "bias", "norm", "ssf"
LORA, BASE, SDPA = "PEFT LoRA", "base model", "SDPA"
FLOOR = "a vector before block 1"  # trained alone: the whole backward pass and next to nothing else
LARGE = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
SMALL = {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536}
TINY = {"hidden_size": 192, "num_hidden_layers": 12, "num_attention_heads": 3, "intermediate_size": 768}
LLAMA_8B = {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
}
LLAMA_SMALL = {
    "hidden_size": 512,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "intermediate_size": 1408,
    "vocab_size": 32000,
}
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "roberta-large": ("Roberta", {**LARGE, "vocab_size": 50265, "max_position_embeddings": 514, "type_vocab_size": 1}),
    "roberta-small": ("Roberta", {**SMALL, "vocab_size": 5000, "max_position_embeddings": 514, "type_vocab_size": 1}),
    "bert-base": ("Bert", {}),
    "gpt2-medium": ("GPT2", {"n_embd": 1024, "n_layer": 24, "n_head": 16}),
    "vit-large": ("ViT", LARGE),
    "vit-tiny": ("ViT", TINY),
    "llama-8b": ("Llama", LLAMA_8B),
    "llama-small": ("Llama", LLAMA_SMALL),
}
HEADS = {
    "Roberta": "ForSequenceClassification",
    "Bert": "ForSequenceClassification",
    "GPT2": "LMHeadModel",
    "ViT": "ForImageClassification",
    "Llama": "ForCausalLM",
}
TASKS = {"Roberta": "SEQ_CLS", "Bert": "SEQ_CLS", "GPT2": "CAUSAL_LM", "Llama": "CAUSAL_LM"}
CLASSES, NEW_TOKENS, PROMPT_TOKENS = 100, 32, 32
FEW_LAYERS = 6  # of the models that are compiled
KEEPS = 1.02  # what "keep" leaves to chance


@dataclass
class Setting:
    """How long to measure, and on what."""

    device: torch.device
    rounds: int = 3
    timings: int = 3
    least: float = 0.35  # seconds of a timing
    layers: int | None = None  # of every model; None: its own number

    @property
    def gpu(self) -> bool:
        return self.device.type == "cuda"

    def autocast(self, wanted: bool = True) -> Any:
        return torch.autocast("cuda", torch.bfloat16) if self.gpu and wanted else nullcontext()

    def wait(self) -> None:
        if self.gpu:
            torch.cuda.synchronize(self.device)


@dataclass
class Found:
    """What was measured of one contender: milliseconds of every timing by rounds, and the peak of memory."""

    rounds_ms: list[list[float]] = field(default_factory=list)
    peak_bytes: int | None = None
    trained: int | None = None
    note: str | None = None
    failure: str | None = None

    def of_rounds(self) -> list[float]:
        return [statistics.median(timings) for timings in self.rounds_ms]

    @property
    def ms(self) -> float:
        return statistics.median(self.of_rounds())

    @property
    def failed(self) -> bool:
        """Also where some rounds went well: an average of those would hide it."""
        return self.failure is not None or not self.rounds_ms


@dataclass(frozen=True)
class Line:
    """One line of the table: ours / peer, and what the quotient may be at most."""

    work: str
    ours: str
    peer: str
    goal: float | None = None
    memory: bool = False
    keep: bool = False

    def made(self, found: dict[str, Found]) -> dict[str, Any]:
        """For the file; nothing where there is no memory to tell of."""
        entry = asdict(self) | {"unit": "GiB" if self.memory else "ms"}
        mine, other = found[self.ours], found[self.peer]
        if mine.failed or other.failed:
            reasons = [one.failure for one in (mine, other) if one.failed]
            return entry | {"met": None if self.goal is None else False, "failed": "; ".join(map(str, reasons))}
        if self.memory:
            if mine.peak_bytes is None or other.peak_bytes is None:
                return {}
            values: tuple[float, float] = mine.peak_bytes / 2**30, other.peak_bytes / 2**30
        else:
            values = mine.ms, other.ms
            each = [a / b for a, b in zip(mine.of_rounds(), other.of_rounds(), strict=True)]
            entry["spread"] = [min(each), max(each)]
        return entry | {
            "ours_value": values[0],
            "peer_value": values[1],
            "ratio": values[0] / values[1],
            "met": None if self.goal is None else self.meets(values[0] / values[1]),
        }

    def meets(self, ratio: float) -> bool:
        """Goals have two digits, and so has what is compared with them."""
        assert self.goal is not None
        return round(ratio, 2) <= self.goal * (KEEPS if self.keep else 1)


@dataclass(frozen=True)
class Row:
    """What is measured together: its contenders take turns."""

    name: str
    about: str
    measure: Callable[[Setting], dict[str, Found]]
    lines: tuple[Line, ...]


# Models and batches


def build(name: str, setting: Setting, dtype: torch.dtype = torch.float32, head: bool = True, **changed: Any) -> Any:
    """A stock model of random weights on the device; without its head: the body."""
    import transformers

    kind, sizes = CONFIGS[name]
    more = {"num_labels": CLASSES if kind == "ViT" else 2} if kind not in ("GPT2", "Llama") else {}
    if setting.layers is not None:
        more[_layers_key(name)] = setting.layers
    config = getattr(transformers, f"{kind}Config")(**{**sizes, **changed, **more})
    torch.manual_seed(0)
    with setting.device:
        model = getattr(transformers, f"{kind}{HEADS[kind] if head else 'Model'}")._from_config(config, dtype=dtype)
    if kind == "GPT2":  # unnamed, Transformers takes the same loss and warns in every step, which cannot be compiled
        model.loss_type = "ForCausalLM"
    return model


def adapted(model: Any, name: str, method: str) -> Any:
    """As a user does it."""
    kind = CONFIGS[name][0]
    task = {"task_type": TASKS[kind]} if kind in TASKS else {}
    if method == LORA:
        if kind == "ViT":  # PEFT has no targets of its own for it
            targets, heads = ["q_proj", "v_proj"], ["classifier"]
            return get_peft_model(model, LoraConfig(r=10, target_modules=targets, modules_to_save=heads))
        return get_peft_model(model, LoraConfig(r=8, **task))
    configs: dict[str, Callable[..., Any]] = {
        NTK: inlay.NTKAttentionConfig,
        MULTI: inlay.MultiLoraConfig,
        PROMPT: inlay.ActivationPromptConfig,
        BIAS: inlay.BiasTuningConfig,
        NORM: inlay.NormTuningConfig,
        SSF: inlay.SSFConfig,
    }
    if method == FLOOR:
        return get_peft_model(model, inlay.ActivationPromptConfig(layers=1, **task))
    return get_peft_model(model, configs[method](**task))


def batch_for(name: str, shape: tuple[int, ...], setting: Setting) -> dict[str, Tensor]:
    """Random rows with labels; text has its mask, all ones."""
    generator = torch.Generator().manual_seed(1)
    kind = CONFIGS[name][0]
    if kind == "ViT":
        found = {"pixel_values": torch.randn(shape[0], 3, 224, 224, generator=generator)}
        found["labels"] = torch.randint(CLASSES, shape[:1], generator=generator)
    else:
        ids = torch.randint(5, 5000, shape, generator=generator)
        found = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        found["labels"] = ids if TASKS[kind] == "CAUSAL_LM" else torch.randint(2, shape[:1], generator=generator)
    return {key: value.to(setting.device) for key, value in found.items()}


# Clocks


def pace(run: Callable[[], object], setting: Setting) -> int:
    """How many calls a timing has: as many as take `least`. On a GPU two at the least, as none is waited for."""
    once = _taken(run, setting, 1)
    return max(2 if setting.gpu else 1, min(1000, round(setting.least / max(once, 1e-6))))


def timed(run: Callable[[], object], setting: Setting, calls: int | None = None) -> list[float]:
    """Milliseconds of one call in every timing."""
    calls = calls or pace(run, setting)
    return [1e3 * _taken(run, setting, calls) / calls for _ in range(setting.timings)]


def _taken(run: Callable[[], object], setting: Setting, calls: int) -> float:
    setting.wait()
    begin = time.perf_counter()
    for _ in range(calls):
        run()
    setting.wait()
    return time.perf_counter() - begin


def by_turns(runs: dict[str, Callable[[], object]], setting: Setting, calls: int | None = None) -> dict[str, Found]:
    """Contenders that can stay side by side."""
    found = {name: Found() for name in runs}
    each: dict[str, int] = {}
    for name, run in runs.items():
        run()
        each[name] = calls or pace(run, setting)
    for _ in range(setting.rounds):
        for name, run in runs.items():
            found[name].rounds_ms.append(timed(run, setting, each[name]))
    return found


@contextmanager
def alone(setting: Setting) -> Iterator[None]:
    """What is built inside is gone afterwards."""
    try:
        yield
    finally:
        gc.collect()
        if setting.gpu:
            torch.cuda.empty_cache()


@contextmanager
def noting(*found: Found) -> Iterator[None]:
    """What cannot be measured says why, and the others go on."""
    try:
        yield
    except Exception as failure:
        for one in found:
            one.failure = first_line(failure)


# Training


@dataclass(frozen=True)
class Work:
    """A training step of a model."""

    model: str
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    layers: int | None = None
    changed: tuple[tuple[str, Any], ...] = ()  # of the configuration


class Loop:
    """The plain loop: forward under autocast, backward, AdamW, gradients set to None."""

    def __init__(self, work: Work, method: str, setting: Setting, attach: Callable[[Any], Any] | None = None) -> None:
        layers = {} if work.layers is None else {_layers_key(work.model): work.layers}
        base = build(work.model, setting, work.dtype, **layers, **dict(work.changed))
        self.setting = setting
        self.model = self.called = attach(base) if attach else adapted(base, work.model, method)
        self.model.train()
        self.batch = batch_for(work.model, work.shape, setting)
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.trained = sum(p.numel() for p in trained)
        self.optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=setting.gpu)

    def step(self) -> None:
        with self.setting.autocast():
            loss = self.called(**self.batch).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def compile(self) -> str:
        """Whole if it can be; what was compiled, and why not more."""
        torch._dynamo.reset()
        try:
            self.called = torch.compile(self.model, fullgraph=True)
            self.step()
            return "fullgraph"
        except Exception as failure:
            torch._dynamo.reset()
            self.called = torch.compile(self.model)
            self.step()
            return f"with graph breaks: {first_line(failure)}"

    def measure(self, into: Found, warmup: int = 2) -> None:
        for _ in range(warmup):
            self.step()
        self.setting.wait()
        if self.setting.gpu:
            torch.cuda.reset_peak_memory_stats()
        into.rounds_ms.append(timed(self.step, self.setting))
        into.trained = self.trained
        if self.setting.gpu:
            into.peak_bytes = max(into.peak_bytes or 0, torch.cuda.max_memory_allocated())


def _layers_key(model: str) -> str:
    return "n_layer" if CONFIGS[model][0] == "GPT2" else "num_hidden_layers"


ROUNDED = ", rounded once"


def train(work: Work, methods: tuple[str, ...], setting: Setting) -> dict[str, Found]:
    """Each method by turns, alone on the device."""
    found = {method: Found() for method in methods}
    for _ in range(setting.rounds):
        for method in methods:
            with alone(setting), noting(found[method]):
                loop = Loop(work, method.removesuffix(ROUNDED), setting)
                with inlay.rounded_once(loop.model, torch.bfloat16 if method.endswith(ROUNDED) else None):
                    loop.measure(found[method])
                del loop
    return found


CHECKPOINTED = ", checkpointing"


def train_llama(work: Work, methods: tuple[str, ...], setting: Setting) -> dict[str, Found]:
    """Each method without and with gradient checkpointing: the model takes as long to build as to measure."""
    found = {method + way: Found() for way in ("", CHECKPOINTED) for method in methods}
    for _ in range(min(setting.rounds, 2)):
        for method in methods:
            with alone(setting), noting(found[method], found[method + CHECKPOINTED]):
                loop = Loop(work, method, setting)
                loop.measure(found[method], warmup=1)
                loop.model.gradient_checkpointing_enable()
                loop.measure(found[method + CHECKPOINTED], warmup=1)
                del loop
    return found


COMPILED = ", compiled"


def train_compiled(work: Work, methods: tuple[str, ...], setting: Setting) -> dict[str, Found]:
    """Each method as it is and compiled, one after the other: compiling takes too long to do it every round."""
    found = {method + way: Found() for way in ("", COMPILED) for method in methods}
    for method in methods:
        with alone(setting), noting(*(found[method + way] for way in ("", COMPILED))):
            loop = Loop(work, method, setting)
            for way in ("", COMPILED):
                entry = found[method + way]
                if way:
                    begin = time.perf_counter()
                    entry.note = f"{loop.compile()}; {time.perf_counter() - begin:.0f} s to compile"
                    print(f"    {method}: {entry.note}", flush=True)
                for _ in range(setting.rounds):
                    loop.measure(entry)
            del loop
            torch._dynamo.reset()
    return found


# Mixed tasks


def mix(model: str, shape: tuple[int, int], weights: torch.dtype, setting: Setting) -> dict[str, Found]:
    """The body alone, without heads, which PEFT cannot mix; rows go round the tasks."""
    batch = batch_for(model, shape, setting)
    del batch["labels"]
    make = partial(build, model, setting, weights, head=False)
    contenders: dict[str, Callable[[], object]] = {}

    def contend(name: str, adapted: Any, tasks: int, mode: Any = torch.no_grad) -> None:
        names = {"adapter_names": [f"t{i % tasks}" for i in range(shape[0])]} if tasks else {}

        def run() -> None:
            with mode(), setting.autocast(weights == torch.float32):
                adapted(**batch, **names)

        contenders[name] = run

    base, ours, theirs = make().eval(), multi_lora_of(make(), 64).eval(), lora_of(make(), 8).eval()
    contend(BASE, base, 0)
    for tasks in (2, 8, 64):
        contend(f"{MULTI} {tasks}", ours, tasks)
    for tasks in (2, 8):
        contend(f"{LORA} {tasks}", theirs, tasks)
    contend(f"{BASE}, inference_mode", base, 0, torch.inference_mode)
    contend(f"{MULTI} 64, inference_mode", ours, 64, torch.inference_mode)
    return by_turns(contenders, replace(setting, least=min(setting.least, 0.15)))


# Generation


def generate(
    model: str, rows: tuple[int, ...], caches: tuple[str, ...], setting: Setting, layers: int | None = None
) -> dict[str, Found]:
    """Greedy decoding, in milliseconds a new token, reading the prompt included.

    `static` is the static cache without the compilation that `generate` would begin by itself, `compiled` is with it:
    torch.compile(mode="reduce-overhead").
    """
    dtype = torch.bfloat16 if setting.gpu else torch.float32
    changed = {} if layers is None else {"num_hidden_layers": layers}
    models = {BASE: build(model, setting, dtype, **changed).eval()}
    models[NTK] = adapted(build(model, setting, dtype, **changed), model, NTK).eval()
    settings: dict[str, dict[str, Any]] = {
        "default": {},
        "static": {"cache_implementation": "static", "disable_compile": True},
        "compiled": {"cache_implementation": "static"},
    }
    found: dict[str, Found] = {}
    for cache in caches:
        runs: dict[str, Callable[[], object]] = {}
        for count in rows:
            batch = batch_for(model, (count, PROMPT_TOKENS), setting)
            del batch["labels"]
            more = {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS, "do_sample": False, "pad_token_id": 0}
            for name, one in models.items():
                key = f"{name}, {count} rows, {cache} cache"
                runs[key] = partial(one.generate, **batch, **more, **settings[cache])
        if cache == "compiled":
            torch._dynamo.reset()
        for name, entry in by_turns(runs, replace(setting, timings=1), calls=1).items():
            entry.rounds_ms = [[ms / NEW_TOKENS for ms in timings] for timings in entry.rounds_ms]
            found[name] = entry
    return found


def generation_lines(
    title: str, rows: tuple[int, ...], caches: tuple[str, ...], goals: dict[tuple[int, str], float]
) -> tuple[Line, ...]:
    return tuple(
        Line(
            f"{title}, {count} row{'s' * (count > 1)}, {cache} cache: NTK-Attention / base, time per token",
            f"{NTK}, {count} rows, {cache} cache",
            f"{BASE}, {count} rows, {cache} cache",
            goals.get((count, cache)),
        )
        for cache in caches
        for count in rows
    )


# The attention layer


GRAPH = ", CUDA graph"
ONE_THREAD = ", one thread"


def layer(shape: Shape, setting: Setting) -> dict[str, Found]:
    """Forward and backward, every tensor with a gradient; on a GPU in bfloat16, and inside a CUDA graph too."""
    torch.manual_seed(0)
    setting = replace(setting, least=min(setting.least, 0.1))
    dtype = torch.bfloat16 if setting.gpu else torch.float32

    def made(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(*size, device=setting.device, dtype=dtype).requires_grad_()

    q, k, v = (made(shape.batch, shape.heads, shape.length, shape.size, dtype=dtype) for _ in range(3))
    g = torch.randn_like(q)
    pair = made(shape.heads, shape.size, RANK), made(shape.heads, RANK, shape.size)
    rho = made(shape.heads, shape.size)

    def floor() -> object:
        return torch.autograd.grad(scaled_dot_product_attention(q, k, v, is_causal=shape.causal), (q, k, v), g)

    def ours() -> object:
        out = ntk_attention(q, k, v, pair, rho, signed=True, is_causal=shape.causal)
        return torch.autograd.grad(out, (q, k, v, *pair, rho), g)

    runs: dict[str, Callable[[], object]] = {NTK: ours, SDPA: floor}
    found = by_turns(runs, setting)
    if setting.gpu:
        with torch.autograd.set_multithreading_enabled(False):
            alone = by_turns({name + ONE_THREAD: run for name, run in runs.items()}, setting)
        found |= alone
    if setting.gpu:
        captured = {name + GRAPH: Found() for name in runs}
        with noting(*captured.values()):
            captured = by_turns({name + GRAPH: replayed(run) for name, run in runs.items()}, setting)
        found |= captured
    return found


def layers(shapes: tuple[Shape, ...], setting: Setting) -> dict[str, Found]:
    found: dict[str, Found] = {}
    for shape in shapes:
        with alone(setting):
            found |= {f"{name}, {shape}": entry for name, entry in layer(shape, setting).items()}
    return found


def layer_lines(shapes: tuple[Shape, ...], kept: tuple[float, ...] = ()) -> tuple[Line, ...]:
    work = "attention layer {}: NTK-Attention / SDPA, forward and backward"
    made = [Line(work.format(s), f"{NTK}, {s}", f"{SDPA}, {s}", s.goal or None) for s in shapes]
    if kept:
        title = work + ", set_multithreading_enabled(False)"
        made += [Line(title.format(s), f"{NTK}{ONE_THREAD}, {s}", f"{SDPA}{ONE_THREAD}, {s}") for s in shapes]
    for s, goal in zip(shapes, kept, strict=False):
        title = work.format(s) + ", in a CUDA graph"
        made.append(Line(title, f"{NTK}{GRAPH}, {s}", f"{SDPA}{GRAPH}, {s}", goal, keep=True))
    return tuple(made)


# The table


def step_and_memory(work: str, ours: str, peer: str, step: float | None, memory: float | None) -> tuple[Line, Line]:
    return Line(f"{work}, step", ours, peer, step), Line(f"{work}, memory", ours, peer, memory, memory=True)


def rounded(work: str, method: str) -> tuple[Line, Line]:
    """What `inlay.rounded_once` changes for a method, beside itself: it would do the same for the peer."""
    return step_and_memory(f"{work} inside inlay.rounded_once / without", method + ROUNDED, method, None, None)


def mixed_lines(title: str, two: float | None, many: float | None) -> tuple[Line, ...]:
    return (
        Line(f"{title}: 2 tasks mixed / base", f"{MULTI} 2", BASE, two),
        Line(f"{title}: 8 tasks mixed / base", f"{MULTI} 8", BASE),
        Line(f"{title}: 64 tasks mixed / base", f"{MULTI} 64", BASE, many),
        Line(f"{title}: 64 / base, inference_mode", f"{MULTI} 64, inference_mode", f"{BASE}, inference_mode"),
        Line(f"{title}: 2 tasks, Multi-LoRA / PEFT LoRA mixed", f"{MULTI} 2", f"{LORA} 2"),
        Line(f"{title}: 8 tasks, Multi-LoRA / PEFT LoRA mixed", f"{MULTI} 8", f"{LORA} 8"),
    )


VISION = (PROMPT, LORA, BIAS, NORM, SSF)


def vision_lines(title: str, goals: tuple[float | None, ...]) -> tuple[Line, ...]:
    """Five goals: of activation prompts step and memory, of bias step, of SSF step and memory."""
    return (
        *step_and_memory(f"{title}: activation prompt / PEFT LoRA r 10", PROMPT, LORA, *goals[:2]),
        Line(f"{title}: bias / norm, step", BIAS, NORM, goals[2]),
        *step_and_memory(f"{title}: SSF / PEFT LoRA r 10", SSF, LORA, *goals[3:]),
    )


def gpu_rows() -> list[Row]:
    shapes = (
        Shape(8, 16, 2048, 64, True, 1.2),
        Shape(8, 16, 512, 64, False, 1.6),
        Shape(4, 32, 4096, 128, True, 0),
        Shape(1, 16, 32768, 64, True, 0),
    )
    llama = Work("llama-8b", (4, 2048), torch.bfloat16)
    trained = "Llama 8B, 4 x 2048"
    lines: list[Line] = []
    for way in ("", CHECKPOINTED):
        for method, title in ((NTK, "NTK-Attention"), (MULTI, "Multi-LoRA")):
            work = f"{trained}{way}: {title} / PEFT LoRA"
            lines += step_and_memory(work, method + way, LORA + way, 0.92, None)
            lines[-1] = replace(lines[-1], goal=1.0 if way else 0.86, keep=True)
        lines += step_and_memory(f"{trained}{way}: {FLOOR} / PEFT LoRA", FLOOR + way, LORA + way, None, None)
    decoded, few = "Llama 8B, `generate`", "Llama 8B of 8 layers, `generate`"
    counts = (16, 1, 64)
    roberta = "RoBERTa-large, 32 x 128, dropout 0.1: NTK-Attention / PEFT LoRA"
    gpt2 = "GPT-2 medium, 16 x 512, dropout 0.1: NTK-Attention / PEFT LoRA"
    vit = "ViT-L/16, 128 images"
    return [
        Row(
            "roberta-large",
            "training, 32 x 128, stock dropout",
            partial(train, Work("roberta-large", (32, 128)), (NTK, LORA, NTK + ROUNDED, FLOOR)),
            (
                *step_and_memory(roberta, NTK, LORA, 0.8, 0.8),
                *rounded("RoBERTa-large, 32 x 128, dropout 0.1: NTK-Attention", NTK),
                *step_and_memory(f"RoBERTa-large, 32 x 128: {FLOOR} / PEFT LoRA", FLOOR, LORA, None, None),
            ),
        ),
        Row(
            "gpt2-medium",
            "training, 16 x 512, stock dropout",
            partial(train, Work("gpt2-medium", (16, 512)), (NTK, LORA, NTK + ROUNDED)),
            (
                *step_and_memory(gpt2, NTK, LORA, 1.0, 0.95),
                *rounded("GPT-2 medium, 16 x 512, dropout 0.1: NTK-Attention", NTK),
            ),
        ),
        Row(
            "mixed",
            "64 rows x 128 of RoBERTa-large, float32 weights, autocast, tasks mixed",
            partial(mix, "roberta-large", (64, 128), torch.float32),
            mixed_lines("RoBERTa-large, 64 rows, autocast", 1.15, 1.3),
        ),
        Row(
            "mixed-bf16",
            "the same, weights in bfloat16",
            partial(mix, "roberta-large", (64, 128), torch.bfloat16),
            mixed_lines("RoBERTa-large, 64 rows, bfloat16 weights", 1.1, 1.25),
        ),
        Row(
            "generate",
            f"Llama 8B, {NEW_TOKENS} new tokens, the default cache and the static one",
            partial(generate, "llama-8b", counts, ("default", "static")),
            generation_lines(decoded, counts, ("default", "static"), {(16, "default"): 1.10}),
        ),
        Row(
            "generate-compiled",
            "8 of the 32 layers, static cache, torch.compile(mode='reduce-overhead')",
            partial(generate, "llama-8b", (16,), ("default", "compiled"), layers=8),
            generation_lines(few, (16,), ("default", "compiled"), {}),
        ),
        Row(
            "attention",
            "one layer, forward and backward, in a plain loop and in a CUDA graph",
            partial(layers, shapes),
            layer_lines(shapes, (1.14, 1.26, 1.10, 1.02)),
        ),
        Row(
            "vit-large",
            "training, 128 images",
            partial(train, Work("vit-large", (128,)), (*VISION, PROMPT + ROUNDED)),
            (*vision_lines(vit, (0.75, 0.8, 1.03, 1.1, 1.1)), *rounded(f"{vit}: activation prompt", PROMPT)),
        ),
        Row(
            "llama-8b",
            "training, bfloat16 weights",
            partial(train_llama, llama, (NTK, MULTI, LORA, FLOOR)),
            tuple(lines),
        ),
    ]


def compiled_rows(gpu: bool) -> list[Row]:
    """The training steps once more, six layers of each model: as they are, and compiled."""
    shapes: dict[str, tuple[tuple[int, ...], str]] = {
        "roberta-large": ((32, 128), "RoBERTa-large"),
        "gpt2-medium": ((16, 512), "GPT-2 medium"),
        "vit-large": ((128,), "ViT-L/16"),
    }
    if not gpu:
        shapes = {"bert-base": ((8, 64), "BERT-base"), "vit-tiny": ((16,), "ViT-tiny/16")}
    rows = []
    for model, (shape, title) in shapes.items():
        vision = CONFIGS[model][0] == "ViT"
        pairs = ((PROMPT, LORA), (BIAS, NORM), (SSF, LORA)) if vision else ((NTK, LORA),)
        lines: list[Line] = []
        for ours, peer in pairs:
            for way in ("", COMPILED):
                work = f"{title} of {FEW_LAYERS} layers{way or ', eager'}: {ours} / {peer}"
                lines += step_and_memory(work, ours + way, peer + way, None, None)
        work = Work(model, shape, layers=FEW_LAYERS)
        methods = VISION if vision else (NTK, LORA)
        about = f"training, {FEW_LAYERS} layers, eager and compiled (inductor)"
        rows.append(Row(f"{model}-compiled", about, partial(train_compiled, work, methods), tuple(lines)))
    return rows


def cpu_rows() -> list[Row]:
    shapes = (Shape(2, 8, 128, 64, False, 0), Shape(2, 8, 512, 64, True, 0), Shape(1, 8, 2048, 64, True, 0))
    title = "Llama of 8 layers and 512 channels, `generate`"
    return [
        Row(
            "bert-base",
            "training, 8 x 64, stock dropout",
            partial(train, Work("bert-base", (8, 64)), (NTK, LORA)),
            (Line("BERT-base, 8 x 64, dropout 0.1: NTK-Attention / PEFT LoRA, step", NTK, LORA, 1.0),),
        ),
        Row(
            "vit-tiny",
            "training, 16 images",
            partial(train, Work("vit-tiny", (16,)), VISION),
            vision_lines("ViT-tiny/16, 16 images", (None,) * 5),
        ),
        Row(
            "mixed",
            "64 rows x 32 of a RoBERTa of 6 layers and 384 channels, tasks mixed",
            partial(mix, "roberta-small", (64, 32), torch.float32),
            mixed_lines("RoBERTa of 6 layers, 64 rows", None, None),
        ),
        Row(
            "generate",
            f"{NEW_TOKENS} new tokens",
            partial(generate, "llama-small", (4, 1), ("default", "static")),
            generation_lines(title, (4, 1), ("default", "static"), {}),
        ),
        Row("attention", "one layer, forward and backward", partial(layers, shapes), layer_lines(shapes)),
    ]


def rows_of(gpu: bool) -> tuple[list[Row], list[Row]]:
    """The table, and what is made on demand."""
    return (gpu_rows() if gpu else cpu_rows()), compiled_rows(gpu)


# Running it


def first_line(failure: BaseException) -> str:
    return f"{type(failure).__name__}: {(str(failure) or repr(failure)).strip().splitlines()[0]}"[:300]


def told(line: dict[str, Any]) -> str:
    """One line of the table, for a person."""
    goal = ""
    if line["goal"] is not None:
        goal = f"goal {'keep' if line['keep'] else '<='} {line['goal']:<5g} {'met' if line['met'] else 'MISSED'}"
    if line.get("ratio") is None:
        return f"{line['work']:<92} not measured  {goal}  {line.get('failed', '')}"
    spread = "{:.3f} .. {:.3f}".format(*line["spread"]) if "spread" in line else ""
    values = f"{line['ours_value']:9.3f} /{line['peer_value']:9.3f} {line['unit']:<3}"
    return f"{line['work']:<92} {values} = {line['ratio']:6.3f}  {spread:<16} {goal}"


def make(row: Row, setting: Setting, command: str) -> dict[str, Any]:
    """Measure a row; one that fails has missed its goals, and the others go on."""
    begin = time.perf_counter()
    entry: dict[str, Any] = {"about": row.about, "command": command, "versions": versions()}
    try:
        with alone(setting):
            found = row.measure(setting)
    except Exception as failure:
        entry["failed"] = first_line(failure)
        entry["lines"] = [asdict(line) | {"met": None if line.goal is None else False} for line in row.lines]
    else:
        entry["lines"] = [made for line in row.lines if (made := line.made(found))]
        entry["measured"] = {name: asdict(one) | {"ms": None if one.failed else one.ms} for name, one in found.items()}
    entry["seconds"] = round(time.perf_counter() - begin, 1)
    return entry


def kept_rows(file: Path) -> dict[str, Any]:
    """What was measured before, each row with its own versions."""
    try:
        return json.loads(file.read_text())["rows"]
    except (OSError, ValueError, KeyError):
        return {}


def divided(row: Row, entry: dict[str, Any]) -> Row:
    """A row's lines, made of what its entry has measured; those of contenders that were not there yet are left out."""
    measured = entry.get("measured", {})
    found = {name: Found(**{key: value for key, value in one.items() if key != "ms"}) for name, one in measured.items()}
    if found:
        lines = [line for line in row.lines if line.ours in found and line.peer in found]
        entry["lines"] = [made for line in lines if (made := line.made(found))]
    return row


def without_goals(row: Row) -> Row:
    """Goals are for whole models and quiet measurements."""
    return replace(row, lines=tuple(replace(line, goal=None) for line in row.lines))


def show(name: str, entry: dict[str, Any]) -> None:
    commit = (entry["versions"].get("commit") or "unknown")[:12]
    print(f"{name}: {entry['about']}  ({entry['seconds']:.0f} s, commit {commit})")
    if "failed" in entry:
        print(f"    FAILED: {entry['failed']}")
    for line in entry["lines"]:
        print(f"  {told(line)}")
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    device_help = "by default the GPU, where there is one"
    parser.add_argument(
        "--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cpu", "cuda"], help=device_help
    )
    parser.add_argument("--only", action="append", metavar="ROW", help="measure this row alone; may be repeated")
    parser.add_argument("--compiled", action="store_true", help="the rows that compile training steps, alone")
    parser.add_argument("--list", action="store_true", help="name the rows and measure nothing")
    parser.add_argument("--quick", action="store_true", help="two layers, one round, no goals: that everything runs")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each contender; more where the host is noisy")
    parser.add_argument(
        "--minutes", type=float, default=8.0, help="no row is begun later than this; the last takes about 1.5 minutes"
    )
    parser.add_argument(
        "--divide", action="store_true", help="measure nothing: make the lines again from the file's timings"
    )
    parser.add_argument("--results", type=Path, help="another folder for the results")
    args = parser.parse_args()
    warnings.filterwarnings("ignore", category=UserWarning)
    begin = time.perf_counter()
    device = torch.device(args.device)
    table, compiled = rows_of(device.type == "cuda")
    every = {row.name: row for row in (*table, *compiled)}
    if args.list:
        print(*(f"{row.name:<24} {row.about}" for row in every.values()), sep="\n")
        return
    unknown = set(args.only or ()) - every.keys()
    if unknown:
        parser.error(f"no row {', '.join(sorted(unknown))}; there are {', '.join(every)}")
    chosen = [every[name] for name in args.only] if args.only else compiled if args.compiled else table
    setting = Setting(device, rounds=args.rounds)
    if device.type == "cpu":
        setting.timings, setting.least = 2, 0.2
    if args.quick:
        setting = Setting(device, rounds=1, timings=1, least=0.01, layers=2)
        chosen = [without_goals(row) for row in chosen]
    folder = args.results or (None if args.quick else RESULTS)
    target = folder / f"own-loop-{device.type}.json" if folder else None
    command = called_by()
    rows = kept_rows(target) if target else {}
    name = device_name(device) if target is None or not args.divide else json.loads(target.read_text())["device"]
    if args.divide:
        chosen = [divided(row, rows[row.name]) for row in every.values() if row.name in rows]
    for row in chosen:
        if time.perf_counter() - begin > 60 * args.minutes:
            print(f"{row.name}: not begun, {args.minutes:g} minutes are over; --only {row.name} makes it")
            continue
        rows[row.name] = entry = rows[row.name] if args.divide else make(row, setting, command)
        show(row.name, entry)
        if target:
            target.parent.mkdir(parents=True, exist_ok=True)
            ordered = {name: rows[name] for name in every if name in rows}
            target.write_text(json.dumps({"device": name, "rows": ordered}, indent=1) + "\n")
    missed = [line["work"] for row in chosen if row.name in rows for line in rows[row.name]["lines"] if _missed(line)]
    if not args.quick:
        print(f"missed: {'; '.join(missed) or 'none'}")
    print(f"{time.perf_counter() - begin:.0f} s" + (f", written to {target}" if target else ", nothing written"))


def _missed(line: dict[str, Any]) -> bool:
    return line["met"] is False


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"cpu, {torch.get_num_threads()} threads"


if __name__ == "__main__":
    main()
