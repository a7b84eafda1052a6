"""Many compressed prompts in one batch: the time of a generated token, beside one prompt, none, and full prompts.

Each row of a batch names its prompt (`adapter_names`), in `generate` of Transformers, as users call it. Contenders: the
bare model; one compact prefix for all rows; one of its own for each row, all of one size, and of sizes 16 to 512; and
full prompts of --tokens tokens in the cache, one a row. What the prefixes hold is random: their values make no
difference to the time. A token's time is that of a long generation less that of one token; on a CPU it is processor
time, which other work on the machine changes less.

    python benchmarks/many_prompts.py                                   # SmolLM2, 64 rows, prompts of 2,000 tokens
    python benchmarks/many_prompts.py --rows 16 --tokens 500 --new 8
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from commands import command as called_by
from peft import get_peft_model
from transformers import DynamicCache

import inlay
from inlay import backbones
from inlay.records.versions import versions
from inlay.training.plan import pick_device, pick_dtype

RESULTS = Path(__file__).parent / "results"
SIZES = (16, 32, 64, 128, 256, 512)
TEXT = 16


def prompts_cache(model: Any, rows: int, tokens: int) -> DynamicCache:
    """Keys and values of full prompts, each row its own."""
    config = model.config
    heads, size = config.num_key_value_heads, getattr(config, "head_dim", None)
    size = size or config.hidden_size // config.num_attention_heads
    cache = DynamicCache(config=config)
    for layer in range(config.num_hidden_layers):
        like = {"dtype": model.dtype, "device": model.device}
        cache.update(
            torch.randn(rows, heads, tokens, size, **like), torch.randn(rows, heads, tokens, size, **like), layer
        )
    return cache


def clock(run: Callable[[int], None], new: int, device: torch.device) -> float:
    """Seconds a token: what `new` more tokens take."""

    def timed(tokens: int) -> float:
        if device.type == "cuda":
            torch.cuda.synchronize()
        now = time.perf_counter if device.type == "cuda" else time.process_time
        begin = now()
        run(tokens)
        if device.type == "cuda":
            torch.cuda.synchronize()
        return now() - begin

    return (timed(1 + new) - timed(1)) / new


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="embedded:smollm2")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=2000, help="of a full prompt")
    parser.add_argument("--size", type=int, default=128, help="kept tokens of a compressed one")
    parser.add_argument("--new", type=int, default=16, help="tokens generated")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--precision", default="auto")
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args()
    device = pick_device()
    backbone = backbones.load(args.model, kind="causal-lm")
    base: Any = backbone.model.to(device, pick_dtype(args.precision, device) or torch.float32).eval()
    ids = torch.randint(5, base.config.vocab_size, (args.rows, TEXT), device=device)
    mask, quiet = torch.ones_like(ids), {"do_sample": False, "pad_token_id": 0, "eos_token_id": None}

    def bare(new: int) -> None:
        base.generate(ids, attention_mask=mask, max_new_tokens=new, **quiet)

    full: dict[str, Any] = {}

    def behind_full(new: int) -> None:
        more = full["cache"].get_seq_length() - args.tokens
        if more:
            full["cache"].crop(-more)
        seen = torch.ones(args.rows, args.tokens + TEXT, dtype=torch.long, device=device)
        before = torch.zeros(args.rows, args.tokens, dtype=torch.long, device=device)
        base.generate(
            torch.cat([before, ids], 1), attention_mask=seen, past_key_values=full["cache"], max_new_tokens=new, **quiet
        )

    times: dict[str, list[float]] = {"no prompt": [], "full prompts": []}
    full["cache"] = prompts_cache(base, args.rows, args.tokens)
    held = {"no prompt": 0, "full prompts": sum(2 * layer.keys.nbytes for layer in full["cache"].layers)}
    for _ in range(args.repeats):
        times["no prompt"].append(clock(bare, args.new, device))
        times["full prompts"].append(clock(behind_full, args.new, device))
    full.clear()
    model: Any = get_peft_model(base, inlay.CompactPrefixConfig(size=args.size), adapter_name="alike0")
    for number in range(1, args.rows):
        model.add_adapter(f"alike{number}", inlay.CompactPrefixConfig(size=args.size))
    for number in range(args.rows):
        model.add_adapter(f"unlike{number}", inlay.CompactPrefixConfig(size=SIZES[number % len(SIZES)]))
    model.requires_grad_(False).eval()
    rows = {
        "one prompt": None,
        "one prompt, named": ["alike0"] * args.rows,
        f"{args.rows} prompts of {args.size}": [f"alike{number}" for number in range(args.rows)],
        f"{args.rows} prompts of 16 to 512": [f"unlike{number}" for number in range(args.rows)],
    }
    model.set_adapter("alike0")
    for who, names in rows.items():
        held[who] = sum(
            value.nbytes
            for name, value in model.named_parameters()
            if any(f".{own}." in name for own in set(names or ["alike0"]))
        )

    def runner(names: list[str] | None) -> Callable[[int], None]:
        more = {} if names is None else {"adapter_names": names}
        return lambda new: model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=new, **quiet, **more)

    for _ in range(args.repeats):
        for who, names in rows.items():
            times.setdefault(who, []).append(clock(runner(names), args.new, device))
    one = statistics.median(times["one prompt"])
    found = {
        who: {
            "seconds_a_token": statistics.median(each),
            "all": each,
            "to_one_prompt": statistics.median(each) / one,
            "to_no_prompt": statistics.median(each) / statistics.median(times["no prompt"]),
            "bytes": held[who],
        }
        for who, each in times.items()
    }
    for who, each in found.items():
        told = f"{1e3 * each['seconds_a_token']:8.1f} ms a token, {each['to_one_prompt']:5.2f} x one prompt"
        print(f"{who:28} {told}, {each['to_no_prompt']:5.2f} x no prompt, {each['bytes'] / 2**20:8.1f} MiB")
    record = {"command": called_by(), "versions": versions(), "model": args.model, "rows": args.rows}
    record |= {"prompt_tokens": args.tokens, "results": found}
    args.results.mkdir(parents=True, exist_ok=True)
    (args.results / f"many-prompts-{device.type}.json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
