"""From which length on attention by Taylor polynomials pays, and what its error is (NTK-Attention, Corollary N.3).

Speed: one layer of attention, batch 1, by torch's own (exact), by the backend `taylor`, and NTK-Attention over it
(r = d, Z of rank 16), forward, and with the gradients of q, k and v. The least of a few runs, which take turns; on a
CPU the processor's time of one thread, as other work must not count. The crossover is the length where the ratio to
exact attention passes 1, interpolated between measured lengths on a logarithmic scale; None where it does not up to the
longest. Memory is what a forward and backward pass adds to its inputs at its peak: on a GPU at every length, on a CPU
at 16k in processes of their own.

Errors: q, k and v from N(0, 1) with the usual scale, and with q scaled so that the largest |x| is 0.5, 1 and 2
(`taylor_bound`), against exact attention in the same type. `error` is the largest difference over the largest |v|,
which the bound limits (rounding comes on top); `relative` is the norm of the difference over that of the exact output.

Real models, on a CPU: scores of MiniLM (512 tokens) and SmolLM2 (2,048 tokens) on English text, head by head; and the
loss of SmolLM2 when every layer attends by Taylor polynomials.

    python benchmarks/taylor_attention.py          # on a GPU, if there is one: about a minute
    python benchmarks/taylor_attention.py --cpu    # 1k to 32k, and real models: a few minutes
    python benchmarks/taylor_attention.py --quick  # does it run; writes nothing

It prints the ratios and writes results/taylor-attention-cpu.json or -cuda.json.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from commands import command as called_by
from torch import Tensor
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from inlay.attention import attention_with_lse, ntk_attention, taylor, taylor_bound
from inlay.records.versions import versions

RESULTS = Path(__file__).parent / "results"
PAGES = ("README.md", "docs/architecture.md", "docs/compress.md", "docs/ntk-attention-measured.md")
RANK = 16


@dataclass(frozen=True)
class Layer:
    """One layer, and up to which length it is measured."""

    head_dim: int
    heads: int
    order: int
    longest: int
    dtype: str = "float32"

    @property
    def backend(self) -> str:
        return "taylor" if self.order == 2 else f"taylor-{self.order}"


LAYERS = {
    "cpu": (Layer(16, 1, 2, 2**15), Layer(16, 1, 4, 2**15), Layer(32, 1, 2, 2**15), Layer(64, 1, 2, 2**15)),
    "cuda": (Layer(64, 16, 2, 2**18, "bfloat16"), Layer(128, 8, 2, 2**17, "bfloat16")),
}


def measured(runs: dict[str, Callable[[], object]], device: torch.device, turns: int) -> dict[str, float]:
    """Milliseconds of each, the least of its turns; on a GPU also the mebibytes that it added."""
    clock = time.perf_counter if device.type == "cuda" else time.process_time
    times: dict[str, list[float]] = {name: [] for name in runs}
    found: dict[str, float] = {}
    for turn in range(turns + 1):
        for name, run in runs.items():
            if device.type == "cuda":
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
            begin = clock()
            made = run()
            if device.type == "cuda":
                torch.cuda.synchronize()
            if turn:
                times[name].append(clock() - begin)
            if device.type == "cuda":
                found[f"{name}_mib"] = round((torch.cuda.max_memory_allocated() - before) / 2**20, 1)
            del made
    return found | {f"{name}_ms": round(1e3 * min(taken), 3) for name, taken in times.items()}


MEMORY = """
import sys, torch
from pathlib import Path
from torch.nn.functional import scaled_dot_product_attention
from inlay.attention import attention_with_lse
def run(length):
    q, k, v = (torch.randn(1, 1, length, 64, requires_grad=True) for _ in range(3))
    before = peak()
    if sys.argv[1] == "exact":
        out = scaled_dot_product_attention(q, k, v, is_causal=True)
    else:
        out, _ = attention_with_lse(q, k, v, is_causal=True, backend="taylor")
    torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
    return (peak() - before) / 1024
def peak():
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))
run(512)
print(run(16384))
"""


def memory() -> dict[str, float]:
    """Mebibytes of a causal pass forward and backward at 16k, one head of 64, on a processor."""
    found = {}
    for way in ("exact", "taylor"):
        made = subprocess.run([sys.executable, "-c", MEMORY, way], capture_output=True, text=True, check=True)
        found[f"{way}_mib"] = round(float(made.stdout), 1)
    return found


def speed(layer: Layer, length: int, causal: bool, device: torch.device, turns: int) -> dict[str, Any]:
    torch.manual_seed(0)
    dtype = getattr(torch, layer.dtype)
    shape = (1, layer.heads, length, layer.head_dim)
    q, k, v = (torch.randn(shape, device=device, dtype=dtype, requires_grad=True) for _ in range(3))
    Z = [torch.randn(layer.heads, *sides, device=device) for sides in ((shape[-1], RANK), (RANK, shape[-1]))]
    kappa, g = torch.rand(layer.heads, shape[-1], device=device), torch.randn(shape, device=device, dtype=dtype)
    ways: dict[str, Callable[[], Tensor]] = {
        "exact": lambda: scaled_dot_product_attention(q, k, v, is_causal=causal),
        "taylor": lambda: attention_with_lse(q, k, v, is_causal=causal, backend=layer.backend)[0],
        "ntk": lambda: ntk_attention(q, k, v, (Z[0], Z[1]), kappa, is_causal=causal, backend=layer.backend),
    }
    with torch.no_grad():
        forward = measured(ways, device, turns)
    backward = {name: lambda way=way: torch.autograd.grad(way(), (q, k, v), g) for name, way in ways.items()}
    both = measured(backward, device, turns)
    row = asdict(layer) | {"length": length, "causal": causal, "forward": forward, "forward_backward": both}
    for kind, found in (("forward", forward), ("forward_backward", both)):
        row[f"{kind}_ratio"] = round(found["taylor_ms"] / found["exact_ms"], 3)
        row[f"{kind}_ntk_ratio"] = round(found["ntk_ms"] / found["exact_ms"], 3)
    return row


def crossover(rows: list[dict[str, Any]], ratio: str) -> int | None:
    """The length from which on the ratio stays below 1."""
    above = [i for i, row in enumerate(rows) if row[ratio] >= 1]
    if not above:
        return int(rows[0]["length"])
    last = above[-1]
    if last + 1 == len(rows):
        return None
    a, b = (math.log(row["length"]) for row in rows[last : last + 2])
    x, y = (math.log(row[ratio]) for row in rows[last : last + 2])
    return round(math.exp(a + (b - a) * x / (x - y)))


@torch.no_grad()
def errors(layer: Layer, length: int, causal: bool, device: torch.device) -> list[dict[str, Any]]:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, layer.heads, length, layer.head_dim, device=device) for _ in range(3))
    natural = taylor_bound(q, k, is_causal=causal, order=layer.order).largest
    found = []
    for largest in (None, 0.5, 1.0, 2.0):
        inputs = [x.to(getattr(torch, layer.dtype)) for x in (q if largest is None else q * (largest / natural), k, v)]
        right = scaled_dot_product_attention(*inputs, is_causal=causal).double()
        off = attention_with_lse(*inputs, is_causal=causal, backend=layer.backend)[0].double() - right
        bound = taylor_bound(*inputs[:2], is_causal=causal, order=layer.order)
        found.append(
            asdict(layer)
            | {"length": length, "causal": causal, "scores": "N(0, 1)" if largest is None else f"max |x| = {largest}"}
            | {"largest": round(bound.largest, 3), "bound": float(f"{bound.error:.3g}")}
            | {"error": float(f"{off.abs().max() / inputs[2].abs().max():.3g}")}
            | {"relative": float(f"{off.norm() / right.norm():.3g}")}
        )
    return found


def text() -> str:
    return "\n".join((Path(__file__).parents[1] / page).read_text(encoding="utf-8") for page in PAGES)


@torch.no_grad()
def scores(name: str, kind: str | None, length: int, causal: bool) -> dict[str, Any]:
    """Head by head, on what the model itself computes: the largest |x|, without and with the mean taken off, and the
    error of the output; and the model's loss, if it has one, when it attends so in every layer."""
    from transformers import AttentionInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    from inlay import load_backbone

    backbone = load_backbone(name, kind=kind)
    model = backbone.model.eval()
    ids = backbone.processor(text(), return_tensors="pt", truncation=True, max_length=length)["input_ids"]
    heads: list[dict[str, float]] = []
    instead: list[str] = []

    def attend(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any) -> Any:
        scale = options.get("scaling") or query.shape[-1] ** -0.5
        given = {"is_causal": causal, "scale": scale}
        out = scaled_dot_product_attention(query, key, value, **given, enable_gqa=True)
        if instead:
            return attention_with_lse(query, key, value, **given, backend=instead[0])[0].transpose(1, 2), None
        near, norm = {}, out.norm(dim=(2, 3))
        for order, backend in ((2, "taylor"), (4, "taylor-4")):
            if (backend == "taylor") or query.shape[-1] <= 32:
                off = attention_with_lse(query, key, value, **given, backend=backend)[0] - out
                near[order] = (off.norm(dim=(2, 3)) / norm)[0].tolist()
        groups = query.shape[1] // key.shape[1]
        for head in range(query.shape[1]):
            q, k = query[:, head : head + 1], key[:, head // groups : head // groups + 1]
            whole = scale * q[0, 0] @ k[0, 0].mT
            plain = float((whole.tril() if causal else whole).abs().max())
            largest = taylor_bound(q, k, **given).largest
            heads.append({"uncentred": plain, "largest": largest} | {f"relative_{p}": e[head] for p, e in near.items()})
        return out.transpose(1, 2), None

    AttentionInterface.register("measured_scores", attend)
    ALL_MASK_ATTENTION_FUNCTIONS.register("measured_scores", ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    model.set_attn_implementation("measured_scores")
    loss: dict[str, float] = {}
    for backend in (None, "taylor"):
        instead[:] = [] if backend is None else [backend]
        logits = model(input_ids=ids).logits
        if causal:
            loss[backend or "exact"] = round(float(cross_entropy(logits[0, :-1], ids[0, 1:])), 3)
    found: dict[str, Any] = {"model": name, "length": ids.shape[1], "heads": len(heads), "loss": loss or None}
    for column in heads[0]:
        ordered = sorted(head[column] for head in heads)
        found[column] = {
            "least": round(ordered[0], 3),
            "median": round(statistics.median(ordered), 3),
            "most": round(ordered[-1], 3),
        }
    found["heads_below_1"] = sum(head["largest"] < 1 for head in heads)
    found["heads_below_2"] = sum(head["largest"] < 2 for head in heads)
    return found


def shown(row: dict[str, Any]) -> str:
    said = [f"d {row['head_dim']} order {row['order']} {'causal' if row['causal'] else 'full  '} L {row['length']:6}"]
    for kind in ("forward", "forward_backward"):
        times = row[kind]
        said.append(
            f"{kind}: exact {times['exact_ms']:.2f} ms, taylor x {row[f'{kind}_ratio']:.2f}, "
            f"ntk x {row[f'{kind}_ntk_ratio']:.2f}"
        )
        if "exact_mib" in times:
            said.append(f"MiB: exact {times['exact_mib']:.0f}, taylor {times['taylor_mib']:.0f}")
    return "  ".join(said)


def shown_error(row: dict[str, Any]) -> str:
    return (
        f"d {row['head_dim']} order {row['order']} {'causal' if row['causal'] else 'full  '} L {row['length']} "
        f"{row['scores']:13} max |x| {row['largest']:6.2f}  error {row['error']:.2g} <= {row['bound']:.2g}  "
        f"relative {row['relative']:.2g}"
    )


def layers(options: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Speed, crossovers and errors of every layer."""
    rows, crossings, wrong = [], [], []
    names = ("forward", "forward_ntk", "forward_backward", "forward_backward_ntk")
    for layer in LAYERS[device.type]:
        longest = min(layer.longest, 2**11 if options.quick else options.longest)
        for causal in (True, False):
            here = []
            for length in (2**n for n in range(10, longest.bit_length())):
                here.append(speed(layer, length, causal, device, 1 if length > options.longest // 4 else 3))
                print(shown(here[-1]), flush=True)
            found = asdict(layer) | {"causal": causal} | {name: crossover(here, f"{name}_ratio") for name in names}
            print("  crossover:", {name: found[name] for name in names})
            rows += here
            crossings.append(found)
            wrong += errors(layer, min(longest, 4096), causal, device)
    for row in wrong:
        print(shown_error(row))
    return {"crossover": crossings, "errors": wrong, "speed": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpu", action="store_true", help="measure on the processor; the default without a GPU")
    parser.add_argument("--longest", type=int, default=2**18, help="at most this length")
    parser.add_argument("--chunk", type=int, help="instead of the backend's own")
    parser.add_argument("--quick", action="store_true", help="lengths of 1k and 2k, and no file")
    parser.add_argument("--out", type=Path, help="where to write, if not to benchmarks/results")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() and not options.cpu else "cpu")
    options.longest = min(options.longest, max(layer.longest for layer in LAYERS[device.type]))
    torch.set_num_threads(1)
    if options.chunk:
        taylor.CHUNKS[device.type] = (options.chunk, options.chunk)
    begin = time.perf_counter()
    found = layers(options, device)
    if device.type == "cpu":
        found["memory"] = memory()
        print(found["memory"])
        found["models"] = [
            scores("embedded:minilm", None, 512, False),
            scores("embedded:smollm2", "causal-lm", 128 if options.quick else 2048, True),
        ]
        for model in found["models"]:
            print(model)
    made = {
        "command": called_by(),
        "seconds": round(time.perf_counter() - begin),
        "chunks": taylor.CHUNKS[device.type],
        "versions": versions(),
        **found,
    }
    if not options.quick:
        (options.out or RESULTS / f"taylor-attention-{device.type}.json").write_text(json.dumps(made, indent=1) + "\n")


if __name__ == "__main__":
    main()
