"""What one layer's matching costs: operations, waits for the device, and processor time.

A GPU is idle for most of a matching: its operations are so small that it waits for the host to ask for the next. So
their number is what counts there, and it is the same on a CPU. Queries, keys and values are random, with the shapes of
SmolLM2 behind a prompt of --tokens tokens; an operation is one that runs, not a view.

    python benchmarks/matching.py

Results are kept by commit in results/matching-cpu.json. To compare, copy this file into another working tree.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from commands import command as called_by
from torch.utils._python_dispatch import TorchDispatchMode

from inlay.methods.compact_prefix.matching import CANDIDATES, MOST_QUERIES, Candidates, HeadQueries, match
from inlay.records.versions import versions

RESULTS = Path(__file__).parent / "results" / "matching-cpu.json"
HEADS, SIZE, LAYERS = 3, 64, 30
"""Of SmolLM2-135M: key-value heads, channels of each, layers."""
COUNTS = {"equal": (128, 128, 128), "unequal": (40, 130, 214)}
VIEWS = {"view", "expand", "t", "transpose", "slice", "select", "unsqueeze", "squeeze", "diagonal", "alias", "detach"}
WAITS = {"_local_scalar_dense", "nonzero", "lift_fresh"}
"""A value that is read, a shape that depends on values, and numbers that are sent."""


class Asked(TorchDispatchMode):
    """Counts what runs."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def head(tokens: int, generator: torch.Generator) -> Candidates:
    """A head whose keys are in clusters, as those of a text are."""

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    centres = 1.5 * drawn(tokens // 5, SIZE)
    key = centres[torch.randint(len(centres), (tokens,), generator=generator)] + 0.3 * drawn(tokens, SIZE)
    value, query = drawn(tokens, SIZE), drawn(MOST_QUERIES, SIZE)
    scores, log_text, of_text = query @ key.mT / SIZE**0.5, drawn(len(query)) + 3, drawn(len(query), SIZE)
    log_whole = torch.logaddexp(log_text, scores.logsumexp(-1))
    whole = (log_text - log_whole).exp()[:, None] * of_text + (scores - log_whole[:, None]).exp() @ value
    return Candidates.of(HeadQueries(log_text, of_text, scores, log_whole, whole), key, value, None, CANDIDATES)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    heads = [head(args.tokens, generator) for _ in range(HEADS)]
    found = {}
    for name, counts in COUNTS.items():
        match(heads, counts, "pursuit")
        with Asked() as asked:
            match(heads, counts, "pursuit")
        seconds = []
        for _ in range(args.repeats):
            begin = time.process_time()
            match(heads, counts, "pursuit")
            seconds.append(time.process_time() - begin)
        found[name] = {
            "operations": sum(count for each, count in asked.counts.items() if each not in VIEWS),
            "waits": sum(asked.counts[each] for each in WAITS),
            "processor_seconds": min(seconds),
        }
        print(name, found[name])
    kept: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {}
    about = versions()
    kept[about["commit"][:7]] = {"command": called_by(), "versions": about, "layers": LAYERS, "results": found}
    RESULTS.write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    main()
