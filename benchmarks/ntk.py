"""What NTK-Attention costs beside torch's fused attention, forward and backward, and in whole models.

On a processor: one layer of attention, batch 1, 8 heads of 64, float32, with the default feature map, Z of rank 16 and
r = 64; all of q, k, v, Z_A, Z_B and kappa need a gradient. The two take turns, so that other work on the machine meets
both. Two ratios: by the clock, the median over turns of the ratio within a turn, with its quartiles; and of the
processor's time, the least of each. On a quiet machine they agree. On a busy one the clock's says little with more than
one thread, as every pass waits for a thread that other work keeps from running: the processor's time with `--threads 1`
is the one to read then. Goals on two cores: at most 1.5 times torch's attention at length 512 and 1.25 times at 2048.

On a GPU (ntk_gpu.py, about two minutes): one layer at three shapes in bfloat16, beside torch's attention and the plain
backend, and at the first beside exact attention to a prefix of 1,024 to 65,536 keys; training steps of models shaped
as RoBERTa-large, GPT-2 medium and Llama 1B beside PEFT's LoRA; and decoding with a KV cache beside the base model. By
the clock with calls queued one after the other, so that launching counts where it takes longer than computing;
`graph_ms` is the computing alone.

Figure 3 of the paper: forward passes of one layer of 8 heads of 32 over L tokens, with a prefix of m: exact, and the
(Z, kappa) of fixed size that stands for it.

    python benchmarks/ntk.py               # on a GPU, if there is one: prints goals, writes results/ntk-cuda.json
    python benchmarks/ntk.py --cpu         # prints the ratios, writes results/ntk_cpu.json
    python benchmarks/ntk.py --cpu --figure3   # writes what the paper keeps: figure_3.json
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from inlay.attention import ntk_attention, prefix_attention, prefix_to_features
from inlay.papers.reproduce import kept

GOALS = {512: 1.5, 2048: 1.25}
RESULTS = Path(__file__).parent / "results"
HEADS, SIZE, RANK = 8, 64, 16
FIGURE_SIZE, FIGURE_LENGTHS, FIGURE_PREFIXES = 32, (32, 64, 128, 256), tuple(2**i for i in range(17))


def contestants(length: int, causal: bool) -> tuple[Callable[[], None], Callable[[], None]]:
    """One forward and backward pass of torch's attention, and of ours, on the same tensors."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, HEADS, length, SIZE, requires_grad=True) for _ in range(3))
    pair = torch.randn(HEADS, SIZE, RANK, requires_grad=True), torch.randn(HEADS, RANK, SIZE, requires_grad=True)
    kappa = torch.rand(HEADS, SIZE, requires_grad=True)
    g = torch.randn(1, HEADS, length, SIZE)

    def floor() -> None:
        torch.autograd.grad(scaled_dot_product_attention(q, k, v, is_causal=causal), (q, k, v), g)

    def ours() -> None:
        torch.autograd.grad(ntk_attention(q, k, v, pair, kappa, is_causal=causal), (q, k, v, *pair, kappa), g)

    return floor, ours


def seconds(run: Callable[[], None]) -> tuple[float, float]:
    """By the clock, and of the processor."""
    clock, processor = time.perf_counter(), time.process_time()
    run()
    return time.perf_counter() - clock, time.process_time() - processor


def compare(length: int, causal: bool, turns: int) -> dict[str, Any]:
    floor, ours = contestants(length, causal)
    floor(), ours()
    theirs, mine = [], []
    for turn in range(turns):
        for run in (floor, ours) if turn % 2 else (ours, floor):  # who goes first changes with the turn
            (theirs if run is floor else mine).append(seconds(run))
    low, middle, high = statistics.quantiles([m / t for (t, _), (m, _) in zip(theirs, mine, strict=True)], n=4)
    return {
        "length": length,
        "causal": causal,
        "torch_ms": 1e3 * min(theirs)[0],
        "ours_ms": 1e3 * min(mine)[0],
        "ratio_clock": middle,
        "ratio_clock_quartiles": [low, high],
        "ratio_processor": min(m for _, m in mine) / min(t for _, t in theirs),
        "goal": GOALS[length],
    }


@torch.no_grad()
def figure3(device: str, least: float = 0.01) -> list[dict[str, Any]]:
    """Rows of L, m, and the milliseconds of a forward pass either way: the fastest within `least` seconds."""
    torch.manual_seed(0)
    rows = []
    for length in FIGURE_LENGTHS:
        q, k, v = (torch.randn(1, HEADS, length, FIGURE_SIZE, device=device) for _ in range(3))
        for m in FIGURE_PREFIXES:
            prefix = [torch.randn(HEADS, m, FIGURE_SIZE, device=device) for _ in range(2)]
            state = prefix_to_features(*prefix)
            both = {
                "ntk_ms": lambda q=q, k=k, v=v, state=state: ntk_attention(q, k, v, *state),
                "exact_ms": lambda q=q, k=k, v=v, prefix=prefix: prefix_attention(q, k, v, *prefix),
            }
            rows.append({"L": length, "m": m} | {name: 1e3 * _least(run, device, least) for name, run in both.items()})
    return rows


def _least(run: Callable[[], object], device: str, least: float) -> float:
    times: list[float] = []
    run()
    while sum(times) < least or len(times) < 3:
        if device == "cuda":
            torch.cuda.synchronize()
        begin = time.perf_counter()
        run()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return min(times)


def about(threads: int) -> dict[str, Any]:
    return {
        "measured": datetime.now(UTC).isoformat(timespec="seconds"),
        "torch": torch.__version__,
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "threads": threads,
        "load": os.getloadavg()[0],
    }


def on_processor(options: argparse.Namespace) -> None:
    torch.set_num_threads(options.threads)
    if options.figure3:
        rows = figure3("cpu")
        record = about(options.threads) | {"heads": HEADS, "head_size": FIGURE_SIZE, "rows": rows}
        (options.out or kept.path("ntk_attention", "figure_3.json")).write_text(json.dumps(record, indent=1) + "\n")
        return
    rows = []
    for length in GOALS:
        for causal in (False, True):
            row = compare(length, causal, options.turns if length < 1024 else max(5, options.turns // 4))
            rows.append(row)
            low, high = row["ratio_clock_quartiles"]
            print(
                f"L {length:5} {'causal' if causal else 'full  '}  "
                f"torch {row['torch_ms']:7.1f} ms  ours {row['ours_ms']:7.1f} ms  "
                f"clock {row['ratio_clock']:.2f} [{low:.2f}, {high:.2f}]  processor {row['ratio_processor']:.2f}  "
                f"goal {row['goal']}"
            )
    (options.out or RESULTS / "ntk_cpu.json").write_text(
        json.dumps(about(options.threads) | {"rows": rows}, indent=2) + "\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    device = parser.add_mutually_exclusive_group()
    device.add_argument("--cpu", action="store_true", help="measure on the processor")
    device.add_argument("--gpu", action="store_true", help="measure on the GPU; the default where there is one")
    parser.add_argument(
        "--figure3", action="store_true", help="on the processor: the paper's figure 3 and nothing else"
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--turns", type=int, default=41, help="at length 512; a quarter as many at 2048")
    parser.add_argument("--rounds", type=int, default=5, help="on the GPU")
    parser.add_argument("--out", type=Path, help="where to write, if not to benchmarks/results")
    options = parser.parse_args()
    if options.gpu or (torch.cuda.is_available() and not options.cpu):
        import ntk_gpu

        ntk_gpu.main(options.out or RESULTS / "ntk-cuda.json", options.rounds, figure3)
    else:
        on_processor(options)


if __name__ == "__main__":
    main()
