"""Ordinary LoRAs mixed in one pass: `inlay.mix` and `inlay.AdapterPool` beside PEFT's own loop and the bare model.

Models, batches and the clock are those of multi_lora.py (RoBERTa-large in bfloat16 on a GPU; six layers of 384 channels
in float32 on a CPU; random weights; queries and values, rank 8, but for the mixed ranks). Contenders take turns; a
figure is the median of its rounds' medians. Each LoRA has an A, a rank and a scale of its own.

- Inference: the body, 64 rows that go round the adapters. `mixed ranks`: 4, 8, 16, 32 and 64.
- Decoding: a Llama (on a GPU of 1B parameters), 64 rows with 64 LoRAs on all linear layers, one token a row behind a
  cache of 64: the time of a pass.
- Joint: a step of eight LoRAs together, 1/8 of the rows each, beside a step of each alone with those rows.
- Tiers: a pool of BERT-base with 500 adapters on a CPU and 2,000 on a GPU, as files: what it takes to add the second
  and the last, and a batch of 64 rows with 64 adapters drawn from all, in slots, in memory, and on disk.

    python benchmarks/mixing.py                      # prints ratios and goals, writes results/mixing-<device>.json
    python benchmarks/mixing.py --only tiers --cpu-time
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import multi_lora as shapes
import torch
from commands import command as called_by
from multi_lora import Goal, build, tokens
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file
from torch import nn
from transformers import BertConfig, BertForSequenceClassification, DynamicCache, LlamaConfig, LlamaForCausalLM

import inlay
from inlay.records.versions import versions

RESULTS = Path(__file__).parent / "results"
RANKS = (4, 8, 16, 32, 64)
MIXED, THEIRS = (2, 8, 64), (2, 8, 32)
LLAMA = {
    "cuda": {"hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8}
    | {"intermediate_size": 8192, "vocab_size": 128256},
    "cpu": {"hidden_size": 512, "num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 4}
    | {"intermediate_size": 1536, "vocab_size": 32000},
}
MANY = {"cuda": 2000, "cpu": 500}
ROWS = 64
SECTIONS = ("inference", "decoding", "joint", "tiers")


def loras(model: nn.Module, ranks: list[int], targets: Any = shapes.TARGETS, **more: Any) -> Any:
    """A PEFT model with a LoRA of each rank, no two alike."""
    found: Any = None
    for number, rank in enumerate(ranks):
        config = LoraConfig(r=rank, lora_alpha=8 + number, target_modules=targets, init_lora_weights=False, **more)
        if found is None:
            found = get_peft_model(model, config, "t0")
        else:
            found.add_adapter(f"t{number}", config)
    return found.to(model.dtype)


def names_of(count: int, rows: int = ROWS) -> list[str]:
    return [f"t{row % count}" for row in range(rows)]


def turns(contenders: dict[str, Callable[[], Any]], device: torch.device, args: Any) -> dict[str, Any]:
    """Each contender's time, with what it is of the first's."""
    found: dict[str, Any] = {name: {"rounds_ms": []} for name in contenders}
    for _ in range(args.rounds):
        for name, action in contenders.items():
            found[name]["rounds_ms"].append(round(shapes.timed(action, device, args.repeats), 3))
    first = None
    for name, entry in found.items():
        entry["ms"] = statistics.median(entry["rounds_ms"])
        first = first or entry["ms"]
        entry["over_first"] = entry["ms"] / first
        print(f"  {name:<34} {entry['ms']:9.2f} ms {entry['over_first']:7.2f} x", flush=True)
    return found


def pooled(model: Any, folder: Path, adapted: Any) -> Any:
    """A pool with the adapters of a PEFT model, by their files."""
    adapted.save_pretrained(str(folder))
    pool = inlay.AdapterPool(model, slots=ROWS)
    for name in adapted.peft_config:
        pool.add(name, str(folder / name))
    return pool


@torch.no_grad()
def inference(device: torch.device, args: Any) -> dict[str, Any]:
    batch = tokens(device, ROWS)
    base = build(device).eval()
    contenders: dict[str, Callable[[], Any]] = {"base": lambda: base(**batch)}
    with tempfile.TemporaryDirectory() as scratch:
        for label, ranks in (("", [8] * ROWS), (", mixed ranks", [RANKS[i % len(RANKS)] for i in range(ROWS)])):
            adapted = loras(build(device), ranks).eval()
            pool = pooled(build(device), Path(scratch) / str(len(contenders)), adapted)
            inlay.mix(adapted)
            for count in MIXED if not label else (ROWS,):
                names = names_of(count)
                contenders[f"inlay.mix {count}{label}"] = _call(adapted, batch, names)
                contenders[f"AdapterPool {count}{label}"] = _call(pool, batch, names)
                contenders[f"AdapterPool {count}{label}"]()  # read, and into its slots
        peft = loras(build(device), [8] * max(THEIRS)).eval()
        for count in THEIRS:
            contenders[f"PEFT {count}"] = _call(peft, batch, names_of(count))
        ours = shapes.ours(build(device), ROWS).eval()
        contenders["multi-lora 64"] = _call(ours, batch, names_of(ROWS))
        return turns(contenders, device, args)


def _call(model: Any, batch: dict[str, Any], names: list[str]) -> Callable[[], Any]:
    return lambda: model(**batch, adapter_names=names)


def llama(device: torch.device) -> Any:
    torch.manual_seed(0)
    with device:
        model = LlamaForCausalLM(LlamaConfig(**LLAMA[device.type]))
    return (model if device.type == "cpu" else model.to(torch.bfloat16)).eval()


@torch.no_grad()
def decoding(device: torch.device, args: Any) -> dict[str, Any]:
    ids = torch.randint(5, 5000, (ROWS, 64), generator=torch.Generator().manual_seed(1)).to(device)
    base = llama(device)
    cache = base(input_ids=ids, use_cache=True).past_key_values

    def one_token(model: Any, **names: Any) -> Callable[[], Any]:
        def run() -> Any:
            own = DynamicCache(config=base.config)
            for number, layer in enumerate(cache.layers):
                own.update(layer.keys, layer.values, number)
            return model(input_ids=ids[:, :1], past_key_values=own, **names)

        return run

    contenders = {"base": one_token(base)}
    with tempfile.TemporaryDirectory() as scratch:
        adapted = loras(llama(device), [8] * ROWS, "all-linear").eval()
        pool = pooled(llama(device), Path(scratch), adapted)
        inlay.mix(adapted)
        for name, model in (("inlay.mix 64", adapted), ("AdapterPool 64", pool)):
            contenders[name] = one_token(model, adapter_names=names_of(ROWS))
            contenders[name]()
        peft = loras(llama(device), [8] * max(THEIRS), "all-linear").eval()
        contenders["PEFT 32"] = one_token(peft, adapter_names=names_of(max(THEIRS)))
        return turns(contenders, device, args)


def joint(device: torch.device, args: Any) -> dict[str, Any]:
    rows = shapes.TRAINED[device.type]
    batch = tokens(device, rows) | {"labels": torch.arange(rows, device=device) % 2}
    together = inlay.mix(loras(build(device, heads=True), [8] * 8, task_type="SEQ_CLS")).train()
    alone = loras(build(device, heads=True), [8], task_type="SEQ_CLS").train()
    share = rows // 8

    def step(model: Any, optimizer: Any, rows: dict[str, Any], **names: Any) -> None:
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss = model(**rows, **names).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    def optimizer_of(model: Any) -> Any:
        return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4, fused=True)

    of_all, of_one = optimizer_of(together), optimizer_of(alone)
    parts = [{key: value[share * i : share * (i + 1)] for key, value in batch.items()} for i in range(8)]
    names = [f"t{row // share}" for row in range(rows)]
    contenders: dict[str, Callable[[], Any]] = {
        "eight runs of PEFT's LoRA": lambda: [step(alone, of_one, part) for part in parts],
        "inlay.mix, eight together": lambda: step(together, of_all, batch, adapter_names=names),
    }
    return turns(contenders, device, args)


def write_adapters(folder: Path, count: int, config: BertConfig) -> None:
    """LoRAs of random numbers with heads of unlike sizes, in PEFT's format."""
    generator = torch.Generator().manual_seed(0)
    width = config.hidden_size
    for number in range(count):
        tensors = {}
        for layer in range(config.num_hidden_layers):
            for which in shapes.TARGETS:
                name = f"base_model.model.bert.encoder.layer.{layer}.attention.self.{which}"
                tensors[f"{name}.lora_A.weight"] = 0.02 * torch.randn(8, width, generator=generator)
                tensors[f"{name}.lora_B.weight"] = 0.02 * torch.randn(width, 8, generator=generator)
        labels = 2 + number % 5
        tensors["base_model.model.classifier.weight"] = torch.randn(labels, width, generator=generator)
        tensors["base_model.model.classifier.bias"] = torch.zeros(labels)
        place = folder / f"t{number}"
        place.mkdir(parents=True)
        save_file(tensors, place / "adapter_model.safetensors")
        settings = LoraConfig(task_type="SEQ_CLS", r=8, target_modules=shapes.TARGETS, modules_to_save=["classifier"])
        settings.save_pretrained(str(place))


@torch.no_grad()
def tiers(device: torch.device, args: Any) -> dict[str, Any]:
    count, clock = args.many or MANY[device.type], shapes.clock
    torch.manual_seed(0)
    config = BertConfig(vocab_size=5000)
    with device:
        model = BertForSequenceClassification(config).eval()
        bare = BertForSequenceClassification(config).eval()
    if device.type == "cuda":
        model, bare = model.to(torch.bfloat16), bare.to(torch.bfloat16)
    batch, chance = tokens(device, ROWS), random.Random(0)
    found: dict[str, Any] = {"adapters": count, "passes_ms": {}}
    with tempfile.TemporaryDirectory() as scratch:
        write_adapters(Path(scratch), count, config)
        pool = inlay.AdapterPool(model, slots=128)
        times = []
        for number in range(count):
            begin = clock()
            pool.add(f"t{number}", str(Path(scratch) / f"t{number}"))
            times.append(1e3 * (clock() - begin))
        found |= {"second_ms": statistics.median(times[1:11]), "last_ms": statistics.median(times[-10:])}
        print(f"  adding: 2nd to 11th {found['second_ms']:.2f} ms, last ten of {count} {found['last_ms']:.2f} ms")
        shuffled = [f"t{number}" for number in range(count)]

        def passes(where: str, choose: Callable[[], list[str]]) -> None:
            each = []
            for _ in range(args.rounds + 1):
                names = choose()
                shapes.wait(device)
                begin = clock()
                pool(**batch, adapter_names=names)
                shapes.wait(device)
                each.append(1e3 * (clock() - begin))
            found["passes_ms"][where] = statistics.median(each[1:])
            print(f"  64 of {count} adapters, {where:<20} {found['passes_ms'][where]:9.2f} ms", flush=True)

        def base() -> None:
            bare(**batch)

        found["base_ms"] = shapes.timed(base, device, args.repeats)
        print(f"  base model {found['base_ms']:9.2f} ms")
        chance.shuffle(shuffled)
        fresh = iter(range(0, count - ROWS, ROWS))

        def on_disk() -> list[str]:
            begin = next(fresh)
            return shuffled[begin : begin + ROWS]

        passes("read from disk", on_disk)
        pool.prefetch(shuffled)
        passes("drawn, in memory", lambda: chance.sample(shuffled, ROWS))
        last = chance.sample(shuffled, ROWS)
        pool(**batch, adapter_names=last)
        passes("in slots", lambda: chance.sample(last, ROWS))
    return found


def goals(found: dict[str, Any]) -> list[Goal]:
    """What the project set itself; the bounds are for a GPU."""
    checked = []
    if "inference" in found:
        over = {name: entry["over_first"] for name, entry in found["inference"].items()}
        for who in ("inlay.mix", "AdapterPool"):
            checked += [
                Goal(f"{who}, 2 to 64 LoRAs / base", max(over[f"{who} {count}"] for count in MIXED), 1.35),
                Goal(f"{who}, 64 LoRAs of ranks 4 to 64 / base", over[f"{who} 64, mixed ranks"], 1.6),
            ]
        checked.append(Goal("PEFT, 32 LoRAs / base", over["PEFT 32"]))
        checked.append(Goal("PEFT, 32 LoRAs / inlay.mix, 64", over["PEFT 32"] / over["inlay.mix 64"]))
        checked.append(Goal("Multi-LoRA, 64 tasks / base", over["multi-lora 64"]))
    if "decoding" in found:
        for who in ("inlay.mix", "AdapterPool"):
            checked.append(Goal(f"{who}, a token of 64 rows / base", found["decoding"][f"{who} 64"]["over_first"], 1.3))
        checked.append(Goal("PEFT, 32 LoRAs, a token of 64 rows / base", found["decoding"]["PEFT 32"]["over_first"]))
    if "joint" in found:
        value = found["joint"]["inlay.mix, eight together"]["over_first"]
        checked.append(Goal("eight LoRAs together / eight runs", value, 0.3))
    if "tiers" in found:
        entry = found["tiers"]
        checked.append(Goal("adding the last / the second adapter", entry["last_ms"] / entry["second_ms"], 1.5))
        checked += [
            Goal(f"64 of {entry['adapters']} adapters, {where} / base", value / entry["base_ms"])
            for where, value in entry["passes_ms"].items()
        ]
    return checked


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cpu", "cuda"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--many", type=int, help="adapters of `tiers`")
    parser.add_argument("--only", choices=SECTIONS, action="append")
    parser.add_argument("--cpu-time", action="store_true", help="count the process's own time on a CPU")
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args()
    device = torch.device(args.device)
    if args.cpu_time and device.type == "cpu":
        shapes.clock = time.process_time
    target = args.results / f"mixing-{device.type}.json"
    kept = json.loads(target.read_text()) if target.is_file() else {}
    for section in args.only or SECTIONS:
        print(section, flush=True)
        kept[section] = {"inference": inference, "decoding": decoding, "joint": joint, "tiers": tiers}[section](
            device, args
        )
        about = {"command": called_by(), "versions": versions(), "clock": "processor" if args.cpu_time else "wall"}
        kept.setdefault("made", {})[section] = about
        args.results.mkdir(parents=True, exist_ok=True)
        target.write_text(json.dumps(kept, indent=1) + "\n")
    print(*goals(kept), sep="\n")


if __name__ == "__main__":
    main()
