"""What the experiments about prefixes share: their setting, their descents, and how numbers are told."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from torch import Tensor

from inlay.errors import InlayError
from inlay.papers.findings import Row, Tick, number
from inlay.papers.ntk_attention.theory.descent import Descent, descend, usable_step
from inlay.papers.ntk_attention.theory.kernel import printed_kernel, true_kernel
from inlay.papers.ntk_attention.theory.network import PrefixProblem, draw

EXAMPLES, SIZE = 4, 3


@dataclass(frozen=True)
class PrefixSetting:
    """Lengths m of the prefix, seeds, and gradient descent at `c / (m lambda_max)` for `steps` steps."""

    widths: tuple[int, ...] = (16, 64, 256, 1024, 4096)
    seeds: int = 3
    steps: int = 3000
    c: float = 1.0

    def __post_init__(self) -> None:
        if len(self.widths) < 2 or min(self.widths) < EXAMPLES:
            raise InlayError(f"Prefixes of {list(self.widths)} tokens: give two lengths or more, from {EXAMPLES} on.")
        if self.seeds < 1 or self.steps < 10 or not (math.isfinite(self.c) and self.c > 0):
            raise InlayError(
                f"{self.seeds} seeds, {self.steps} steps, c = {self.c}: give 1 seed, 10 steps or more and c above 0."
            )

    @property
    def facts(self) -> dict[str, object]:
        return {**vars(self), "n": EXAMPLES, "d": SIZE}


def both_kernels(problem: PrefixProblem) -> tuple[Tensor, Tensor]:
    """(printed, true) at the start."""
    where = (problem.W, problem.x, problem.a)
    return printed_kernel(*where), true_kernel(*where)


def descents(setting: PrefixSetting, inputs: str, tick: Tick) -> list[tuple[int, Descent]]:
    """Gradient descent from every start, with the seed: unit inputs, or short ones along the axes."""
    found = []
    for width in setting.widths:
        tick(f"gradient descent, {inputs} inputs, m = {width}")
        for seed in range(setting.seeds):
            if inputs == "unit":
                problem = draw(width, EXAMPLES, SIZE, seed)
            else:
                problem = draw(width, SIZE, SIZE, seed, inputs="axes", length=0.25)
            step = usable_step(true_kernel(problem.W, problem.x, problem.a), width, setting.c)
            found.append((seed, descend(problem, step, setting.steps)))
    return found


def kept_steps(most: int) -> list[int]:
    """0 and about twenty steps a decade up to `most`."""
    return sorted({0, most, *(min(most, round(10 ** (power / 20))) for power in range(int(20 * math.log10(most)) + 1))})


def column(rows: Sequence[Row], place: int) -> list[float]:
    return [number(row[place]) for row in rows]


def span(numbers: Sequence[float], form: str) -> str:
    low, high = format(min(numbers), form), format(max(numbers), form)
    return low if low == high else f"{low} to {high}"


def geometric(numbers: Sequence[float]) -> float:
    return math.exp(sum(math.log(max(value, 1e-300)) for value in numbers) / len(numbers))


def listed(by_width: dict[int, float]) -> str:
    return ", ".join(f"m = {m}: {value:.1e}" for m, value in by_width.items())


def falls(numbers: Sequence[float]) -> bool:
    return all(after < before for before, after in pairwise(numbers))
