"""What InfoPrompt costs: an epoch with and without the cache of Phi(X), beside WARP; a step beside PEFT's LoRA.

Epochs: 256 texts of 8 to 48 tokens, batches of 8, a model shaped as MiniLM (on a GPU as BERT-base), four prompt
tokens, Adam. The methods take turns, epoch by epoch, after each has seen a batch of other texts of every width: some
libraries plan for a shape when they first see it, which would count against whoever comes first. An epoch with the
cache is the mean of 30, of which the first fills it: `(first + 29 later) / 30`, `later` the median of those measured;
so are the others'. The floor of with / without is 2/3: a pass forward and one back, of three; on a CPU it is less, as
what is not kept is encoded text by text there. Times are of the processor on a CPU, where other work must not count,
and by the clock on a GPU.

Steps, on a GPU: models shaped as RoBERTa-large, batches of 8 and 32 texts of 128 tokens, bfloat16 autocast, as `inlay
tune` trains: frozen parts in eval mode, frozen weights rounded once. The peer, PEFT's LoRA of rank 8 on queries and
values, is trained in the same way, new head included. InfoPrompt without its cache is there too.

    python benchmarks/infoprompt.py           # prints the ratios and their goals, writes results/infoprompt-*.json
    python benchmarks/infoprompt.py --quick   # one round: does it run
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import BertConfig, BertForSequenceClassification, RobertaConfig, RobertaForSequenceClassification

from inlay.frozen import unchanging
from inlay.methods.attach import attach, trained_parameters
from inlay.records.versions import versions
from inlay.training.modes import Modes
from inlay.training.precision import rounded_once

RESULTS = Path(__file__).parent / "results"
TEXTS, BATCH, EPOCHS, LENGTHS = 256, 8, 30, (8, 48)
MASK, FIRST_WORD = 4, 10
TOKENS = {"mask_token_id": MASK, "special_token_ids": list(range(FIRST_WORD))}  # as `inlay tune` gives them
GOALS = {"with / without cache": 0.75, "with cache / WARP": 1.2, "step / PEFT's LoRA r 8": 0.8}
METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "infoprompt": ("infoprompt", TOKENS),
    "without cache": ("infoprompt", {**TOKENS, "cache": False}),
    "warp": ("warp", TOKENS),
    "lora": ("lora", {"r": 8}),
}


def small_model(device: torch.device) -> Any:
    """MiniLM's shape, or BERT-base's where there is a GPU."""
    if device.type == "cuda":
        return BertForSequenceClassification(BertConfig(num_labels=2))
    shape = {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536}
    return BertForSequenceClassification(BertConfig(**shape, num_labels=2))


def large_model() -> Any:
    """RoBERTa-large's shape."""
    shape = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
    return RobertaForSequenceClassification(
        RobertaConfig(**shape, vocab_size=50265, max_position_embeddings=514, type_vocab_size=1, num_labels=2)
    )


def texts(count: int, shortest: int, longest: int, seed: int = 0) -> list[list[int]]:
    """Random texts with a mask before their end."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for length in torch.randint(shortest, longest + 1, (count,), generator=generator).tolist():
        words = torch.randint(FIRST_WORD, 20_000, (length - 3,), generator=generator).tolist()
        found.append([0, *words, MASK, 2])
    return found


def batches(rows: list[list[int]], size: int, epoch: int, device: torch.device) -> Iterator[dict[str, Tensor]]:
    """One epoch's batches, shuffled by its number, each padded to its longest text."""
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(epoch)).tolist()
    for start in range(0, len(rows), size):
        chosen = [rows[i] for i in order[start : start + size]]
        width = max(map(len, chosen))
        ids = torch.tensor([row + [1] * (width - len(row)) for row in chosen])
        labels = torch.tensor([row[1] % 2 for row in chosen])
        batch = {"input_ids": ids, "attention_mask": (ids != 1).long(), "labels": labels}
        yield {name: value.to(device) for name, value in batch.items()}


class Contestant:
    """A model with one method in it, trained as `tune` does."""

    def __init__(self, make: Callable[[], Any], name: str, device: torch.device, stack: ExitStack) -> None:
        torch.manual_seed(0)
        with device:  # the large ones take long to draw on a CPU
            model = make()
        model.config.pad_token_id = 1
        method, settings = METHODS[name]
        modes = Modes(model, new=["classifier"], whole=False)
        self.model: Any = attach(model, method, settings=settings, newly_initialised=["classifier"]).to(device)
        modes.adapt(self.model)
        modes.train()
        self.dtype = torch.bfloat16 if device.type == "cuda" else None
        stack.enter_context(rounded_once(self.model, self.dtype))
        stack.enter_context(unchanging(self.model))
        self.optimizer = torch.optim.AdamW(
            trained_parameters(self.model).values(), lr=1e-4, fused=device.type == "cuda"
        )
        self.device = device

    def step(self, batch: dict[str, Tensor]) -> None:
        cast = nullcontext() if self.dtype is None else torch.autocast(self.device.type, self.dtype)
        with cast:
            loss = self.model(**batch).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def seconds(device: torch.device, run: Callable[[], None]) -> float:
    """The processor's on a CPU, by the clock on a GPU."""
    if device.type == "cpu":
        begin = time.process_time()
        run()
        return time.process_time() - begin
    torch.cuda.synchronize()
    begin = time.perf_counter()
    run()
    torch.cuda.synchronize()
    return time.perf_counter() - begin


def epochs(device: torch.device, rounds: int) -> dict[str, list[float]]:
    """Seconds of the first epoch and of later ones, by contestant."""
    rows = texts(TEXTS, *LENGTHS)
    names = ("infoprompt", "without cache", "warp")
    with ExitStack() as stack:
        found = {name: Contestant(lambda: small_model(device), name, device, stack) for name in names}
        for one in found.values():
            for width in range(LENGTHS[0] + 1, LENGTHS[1] + 1):
                others = [*texts(BATCH - 1, LENGTHS[0], width - 1, seed=width), *texts(1, width, width, seed=width)]
                one.step(next(batches(others, BATCH, 0, device)))
        times: dict[str, list[float]] = {name: [] for name in names}
        for epoch in range(rounds + 1):
            for name, one in found.items():

                def run(one: Contestant = one, epoch: int = epoch) -> None:
                    for batch in batches(rows, BATCH, epoch, device):
                        one.step(batch)

                times[name].append(seconds(device, run))
    return times


def steps(device: torch.device, size: int, rounds: int, repeats: int = 10) -> dict[str, float]:
    """Milliseconds of a step of the large model, by contestant; Phi(X) is in the cache, as after the first epoch."""
    rows = texts(size, 128, 128)
    with ExitStack() as stack:
        found = {name: Contestant(large_model, name, device, stack) for name in METHODS}
        batch = next(batches(rows, size, 0, device))
        times: dict[str, list[float]] = {name: [] for name in found}
        for turn in range(rounds + 1):
            for name, one in found.items():

                def run(one: Contestant = one) -> None:
                    for _ in range(repeats):
                        one.step(batch)

                took = seconds(device, run)
                if turn:
                    times[name].append(1e3 * took / repeats)
    return {name: statistics.median(took) for name, took in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one round each")
    quick = parser.parse_args().quick
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rounds = 1 if quick else 9
    measured = epochs(device, rounds)
    by_epoch = {
        name: (first + (EPOCHS - 1) * statistics.median(later)) / EPOCHS for name, (first, *later) in measured.items()
    }
    ratios = {
        "with / without cache": by_epoch["infoprompt"] / by_epoch["without cache"],
        "with cache / WARP": by_epoch["infoprompt"] / by_epoch["warp"],
    }
    made: dict[str, Any] = {"seconds_per_epoch": by_epoch, "epochs_measured": measured, "versions": versions()}
    if device.type == "cuda":
        made["step_ms"] = {size: steps(device, size, rounds) for size in (8, 32)}
        worst = max(each["infoprompt"] / each["lora"] for each in made["step_ms"].values())
        ratios["step / PEFT's LoRA r 8"] = worst
    made["ratios"] = ratios
    for name, value in ratios.items():
        verdict = "met" if value <= GOALS[name] else "MISSED"
        print(f"{name:<26} {value:6.3f}  goal <= {GOALS[name]:<5} {verdict}")
    if not quick:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / f"infoprompt-{device.type}.json").write_text(json.dumps(made, indent=2) + "\n")


if __name__ == "__main__":
    main()
