"""What NTK-Attention costs beside torch's fused attention, forward and backward.

One layer of attention: batch 1, 8 heads of 64, float32, with the default feature map, Z of rank 16 and r = 64; all of
q, k, v, Z_A, Z_B and kappa need a gradient. The two take turns, so that other work on the machine meets both. Two
ratios: by the clock, the median over turns of the ratio within a turn, with its quartiles; and of the processor's time,
the least of each. On a quiet machine they agree. On a busy one the clock's says little with more than one thread, as
every pass waits for a thread that other work keeps from running: the processor's time with `--threads 1` is the one to
read then. Goals on two cores: at most 1.5 times torch's attention at length 512 and 1.25 times at 2048.

    python benchmarks/ntk.py --cpu      # prints the ratios, writes benchmarks/results/ntk_cpu.json
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

from inlay.attention import ntk_attention

GOALS = {512: 1.5, 2048: 1.25}
RESULTS = Path(__file__).parent / "results" / "ntk_cpu.json"
HEADS, SIZE, RANK = 8, 64, 16


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpu", action="store_true", required=True, help="measure on the processor")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--turns", type=int, default=41, help="at length 512; a quarter as many at 2048")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
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
    record = {
        "measured": datetime.now(UTC).isoformat(timespec="seconds"),
        "torch": torch.__version__,
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "threads": options.threads,
        "load": os.getloadavg()[0],
        "rows": rows,
    }
    options.out.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
