"""Examples per second, measured in blocks of the run itself, so that nothing is run twice to be timed.

A run's updates fall into a fixed number of equal blocks; each block is one repetition. The first update (allocations,
caches, kernels chosen) is left out where there are others.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

BLOCKS = 10


class Speed:
    """Counts examples and seconds per block; plain data, so that a resumed run counts on."""

    def __init__(self, total_steps: int, blocks: dict[str, list[float]] | None = None) -> None:
        self.total_steps = total_steps
        self.blocks = dict(blocks or {})

    def add(self, step: int, examples: int, seconds: float) -> None:
        """Count one update: `step` from 1."""
        if step == 1 and self.total_steps > 1:
            return
        block = self.blocks.setdefault(str((step - 1) * BLOCKS // self.total_steps), [0.0, 0.0])
        block[0] += examples
        block[1] += seconds

    def rates(self) -> list[float]:
        """Examples per second, one number a block."""
        return [examples / seconds for examples, seconds in self.blocks.values() if seconds > 0]

    def seconds(self) -> float:
        """Seconds in all, but for the first update."""
        return sum(seconds for _, seconds in self.blocks.values())


def spread(values: Sequence[float]) -> dict[str, Any] | None:
    """Mean, standard deviation and number of repetitions; None for no values."""
    if not values:
        return None
    return {
        "mean": statistics.fmean(values),
        "spread": statistics.stdev(values) if len(values) > 1 else None,
        "repetitions": len(values),
    }
