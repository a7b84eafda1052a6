"""Prompts of about 2,000 tokens compressed into adapters of SmolLM2: the numbers behind docs/compress.md.

The prompts are instructions with worked examples (`e2e`: restaurants in data and in words; `gsm8k`: sums and their
solutions), as many as fit, read from a folder of `<name>/<split>.jsonl.gz`. Continuations are the prompted model's own,
and, for evaluation alone, real ones: further examples of the same kind, where the prompt's benefit is a real one. For
each setting of the adapter: Eq. (4), the least-squares fit, and distillation from there.

    python -m inlay.papers.ntk_attention.compression --data-dir <folder>     # on a GPU, a few minutes
    python -m inlay.papers.ntk_attention.compression --data-dir <folder> --tokens 300 --texts 40 --steps 10 --only 1

Writes kept/compression.json after every setting: what is done when the time is up is kept.
"""

from __future__ import annotations

import argparse
import gzip
import json
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from inlay.papers.reproduce import kept

RESULTS = kept.path("ntk_attention", "compression.json")
INSTRUCTIONS = {
    "e2e": "You write one or two short sentences about a restaurant. You are given its data: each field has a name "
    "and, in square brackets, a value. Mention every field and add nothing. Examples follow.\n\n",
    "gsm8k": "You solve word problems from primary school. Think step by step, write each calculation between << and "
    ">> and give the result on the last line after four hash signs. Examples follow.\n\n",
}
FILES = {"e2e": "e2e_nlg", "gsm8k": "gsm8k"}
FORMS = {
    "e2e": "Data: {meaning_representation}\nText: {human_reference}\n\n",
    "gsm8k": "Question: {question}\nAnswer: {answer}\n\n",
}
# Settings of the adapter, those to know first first, and the learning rate of the distillation.
SETTINGS: list[tuple[dict[str, Any], float]] = [
    ({"feature_map": "elu", "feature_multiplier": 2, "rank": 64}, 3e-3),
    ({"feature_map": "elu", "feature_multiplier": 2, "rank": 64}, 1e-2),
    ({"feature_map": "elu", "feature_multiplier": 1, "rank": 16}, 3e-3),
    ({"feature_map": "favor", "feature_multiplier": 2, "rank": 64}, 3e-3),
    ({"feature_map": "taylor", "taylor_order": 2, "rank": 64}, 3e-3),
    ({"feature_map": "elu", "feature_multiplier": 4, "rank": 64}, 3e-3),
    ({"feature_map": "elu", "feature_multiplier": 2, "rank": 16}, 3e-3),
    ({"feature_map": "elu", "feature_multiplier": 2, "rank": 4}, 3e-3),
    ({"feature_map": "favor", "feature_multiplier": 8, "rank": 64}, 3e-3),
    ({"feature_map": "elu", "feature_multiplier": 2, "rank": 64}, 1e-3),
]
SAMPLED_AT_ONCE = 64
FIRST = 500  # examples that a prompt is made of


def examples(kind: str, folder: Path, split: str) -> list[str]:
    """The examples of a split, in their order, as the prompt writes them."""
    with gzip.open(folder / FILES[kind] / f"{split}.jsonl.gz", "rt", encoding="utf-8") as file:
        return [FORMS[kind].format(**json.loads(line)) for line in file]


def make_prompt(kind: str, folder: Path, tokenizer: Any, tokens: int) -> str:
    """The instruction and those of the first examples that fit into `tokens`, in their order."""
    text = INSTRUCTIONS[kind]
    count = len(tokenizer(text).input_ids)
    for example in examples(kind, folder, "train")[:FIRST]:
        more = len(tokenizer(example).input_ids)
        if count + more > tokens:
            continue
        text, count = text + example, count + more
    return text


def measure(
    args: argparse.Namespace, kind: str, backbone: Any, text: str, end: float, keep: Callable[[dict[str, Any]], None]
) -> None:
    """Every setting on one prompt, each kept when it is done; texts are drawn once."""
    import torch

    from inlay.methods import attach
    from inlay.training import distil
    from inlay.training.batches import Placement
    from inlay.training.plan import pick_device, pick_dtype
    from inlay.workflow.compress import parted, share, split

    device = pick_device()
    place = Placement(device, pick_dtype(args.precision, device), args.batch_size)
    backbone.model.to(device)
    tokenizer = backbone.processor
    lead, ids = split(tokenizer, text)
    real = [
        tokenizer(example, add_special_tokens=False).input_ids[: args.length * 2]
        for example in examples(kind, Path(args.data_dir), "test")[: args.real]
    ]
    texts: list[list[int]] | None = None
    for settings, rate in SETTINGS[: args.only]:
        if time.monotonic() > end:
            break
        begin = time.perf_counter()
        adapted: Any = attach.attach(
            backbone.model,
            "ntk-attention",
            newly_initialised=[],
            task_kind="causal-lm",
            settings=settings | {"start": "text", "seed": 0, "prompt_ids": ids},
        ).eval()
        pair = distil.Pair(adapted, ids, place, lead)
        if texts is None:
            many = distil.Pair(adapted, ids, Placement(device, place.dtype, SAMPLED_AT_ONCE), lead)
            texts = many.sample(args.texts, args.length, 0)
        train, held = parted(texts)
        sets = {"own": held, "real": real}
        scores, losses, distilling = compress(pair, train, sets, args.steps, rate)
        keep(
            {
                "prompt": kind,
                "prompt_tokens": len(ids),
                "settings": settings,
                "learning_rate": rate,
                "parameters": sum(weight.numel() for weight in attach.trained_parameters(adapted).values()),
                "seconds": round(time.perf_counter() - begin, 1),
                "seconds_distilling": round(distilling, 1),
                "losses": [round(loss, 4) for loss in losses],
                "scores": {
                    name: {
                        who: asdict(value) | {"perplexity": value.perplexity, "recovered": share(rows, who)}
                        for who, value in rows.items()
                    }
                    for name, rows in scores.items()
                },
            }
        )
        for name, by in scores.items():
            told = ", ".join(f"{who} {value.perplexity:.2f} ({share(by, who) or 0:.0%})" for who, value in by.items())
            print(f"{kind} {name} {settings} lr {rate:g}: {told}", flush=True)
        adapted.unload()
        if device.type == "cuda":
            torch.cuda.empty_cache()


def compress(
    pair: Any, train: list[list[int]], sets: dict[str, list[list[int]]], steps: int, rate: float
) -> tuple[dict[str, dict[str, Any]], list[float], float]:
    """Eq. (4), the fit and the distillation: their scores on each set, the distillation's losses, and its seconds."""
    from inlay.training import distil
    from inlay.workflow.compress import CHECKED, CLOSED, DISTILLED, FITTED, NOTHING, PROMPTED

    scores = {
        name: {
            PROMPTED: distil.scores(pair, rows, pair.prompted),
            NOTHING: distil.scores(pair, rows, lambda ids: pair.bare(ids, adapter=False)),
            CLOSED: distil.scores(pair, rows, pair.bare),
        }
        for name, rows in sets.items()
    }
    if distil.can_fit(pair):
        distil.fit(pair, train)
        for name, rows in sets.items():
            scores[name][FITTED] = distil.scores(pair, rows, pair.bare)
    begin = time.perf_counter()
    learn = [row for number, row in enumerate(train, 1) if number % CHECKED]
    losses = distil.distil(pair, learn, steps=steps, learning_rate=rate, check=train[CHECKED - 1 :: CHECKED])
    for name, rows in sets.items():
        scores[name][DISTILLED] = distil.scores(pair, rows, pair.bare)
    return scores, losses, time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="embedded:smollm2")
    parser.add_argument("--data-dir", required=True, help="A folder with e2e_nlg/ and gsm8k/.")
    parser.add_argument("--prompts", default="e2e,gsm8k")
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--texts", type=int, default=320)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--real", type=int, default=64)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--precision", default="float32")
    parser.add_argument("--only", type=int, default=len(SETTINGS), help="Only the first so many settings.")
    parser.add_argument("--seconds", type=float, default=500, help="Begin no further setting after this time.")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()

    from inlay import backbones
    from inlay.records.versions import versions

    end = time.monotonic() + args.seconds
    backbone = backbones.load(args.model, kind="causal-lm")
    kinds = args.prompts.split(",")
    given = {name: value for name, value in vars(args).items() if name not in ("out", "data_dir", "model")}
    report: dict[str, Any] = {"model": backbone.source, "arguments": given, "versions": versions(), "results": []}

    def keep(result: dict[str, Any]) -> None:
        report["results"].append(result)
        args.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")

    for number, kind in enumerate(kinds):
        text = make_prompt(kind, Path(args.data_dir), backbone.processor, args.tokens)
        left = end - time.monotonic()
        measure(args, kind, backbone, text, time.monotonic() + left / (len(kinds) - number), keep)


if __name__ == "__main__":
    main()
