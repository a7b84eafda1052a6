"""The settings of section 4's experiments, and how their numbers are told."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from inlay.errors import InlayError, did_you_mean, unknown
from inlay.papers.icl.theory.descent import EPOCH, RATE, SAMPLES, Trace
from inlay.papers.icl.theory.problem import InContextProblem

OPTIMISERS = ("adam", "gd")
# Who wants to see a training as it goes: its name, and what has been kept so far.
Show = Callable[[str, Trace], None]

_SIZES = ("N", "K", "d", "m", "tau")
_ADAM = ("heads", "steps", "seconds", "rate", "seed", "device")
# What each experiment reads of a setting, and of the command's other options. 2a and 4 train both kinds of tokens; the
# theorems, Proposition 1 and section 3.3 have instances of their own; figure 3 goes through many N.
_READS = {
    "2a": (*_SIZES, *_ADAM, "batch"),
    "2b": (*_SIZES, *_ADAM, "batch", "unit"),
    "3": ("K", "d", "m", "tau", "seed"),
    "4": (*_SIZES, *_ADAM),
    "5": (*_SIZES, *_ADAM, "batch", "unit"),
    "theorem-1": ("steps", "seed"),
    "theorem-2": ("seed",),
    "proposition-1": ("seed",),
    "section-3-3": ("seed",),
    "language": ("model", "tasks", "seed", "device"),
    "run": (*_SIZES, "unit", *_ADAM, "batch", "optimiser", "features", "task", "data-dir"),
}


def reads(name: str, optimiser: str) -> tuple[str, ...]:
    """What the experiment of that name reads. Gradient descent has step sizes of its own, and no clock."""
    idle = ("rate", "seconds", "batch") if optimiser == "gd" else ()
    return tuple(option for option in _READS[name] if option not in idle)


@dataclass(frozen=True)
class InContextSetting:
    """Section 4's values, for all figures but where a figure has its own. None: the figure's own.

    `unit`: tokens of norm 1, as section 2 has them; section 4 draws them from N(0, I). `heads` are those compared in
    figures 4 and 5, and the first of them is the model of a free run. `seconds` is the time that one training may take.
    """

    N: int = 30
    K: int = 200
    d: int = 100
    m: int | None = None
    tau: float = 0.01
    heads: tuple[int, ...] | None = None
    steps: int | None = None
    seconds: float | None = None
    batch: int | None = None
    rate: float = RATE
    seed: int = 0
    unit: bool = False
    device: str = "cpu"
    optimiser: str = "adam"

    def __post_init__(self) -> None:
        if self.heads is not None and (not self.heads or min(self.heads) < 1):
            raise InlayError(f"heads = {list(self.heads)}: give whole numbers from 1 on.")
        if self.steps is not None and self.steps < 1:
            raise InlayError(f"steps = {self.steps}: give a whole number from 1 on.")
        if self.seconds is not None and not self.seconds > 0:
            raise InlayError(f"seconds = {self.seconds}: give a number above 0.")
        if not self.rate > 0:
            raise InlayError(f"rate = {self.rate}: a learning rate is a number above 0.")
        if self.batch is not None and not 1 <= self.batch <= SAMPLES:
            raise InlayError(f"batch = {self.batch}: give 1 to {SAMPLES}, the number of samples.")
        if self.optimiser not in OPTIMISERS:
            raise unknown("optimiser", self.optimiser, OPTIMISERS)
        if self.batch is not None and self.optimiser == "gd":
            raise InlayError("Gradient descent runs on the population loss: leave the batch out, or take adam.")
        try:
            torch.zeros(1, device=self.device)
        except (RuntimeError, AssertionError) as error:
            hint = did_you_mean(self.device, ("cpu", "cuda"))
            raise InlayError(
                f"Device {self.device!r} is not there: use cpu, or cuda where there is one.{hint}"
            ) from error
        # Refuses what makes no sense, before any work. N against K is for those that read N: see `lab.check`.
        InContextProblem.sample(
            min(self.N, self.K), self.K, self.d, 20 if self.m is None else self.m, self.tau, unit=self.unit
        )

    @property
    def on_cpu(self) -> bool:
        return torch.device(self.device).type == "cpu"

    def problem(self, unit: bool | None = None) -> InContextProblem:
        m = 20 if self.m is None else self.m
        drawn = InContextProblem.sample(
            self.N, self.K, self.d, m, self.tau, self.seed, unit=self.unit if unit is None else unit
        )
        return drawn.to(self.device)

    def facts(self, name: str) -> dict[str, object]:
        """What the experiment of that name reads, for the record."""
        known = {**vars(self), "m": 20 if self.m is None else self.m}
        found = {option: known[option] for option in reads(name, self.optimiser) if option in known}
        return {**found, "optimiser": self.optimiser, "steps in an epoch": EPOCH} if "heads" in found else found


def span(numbers: Sequence[float], form: str = ".3g") -> str:
    low, high = format(min(numbers), form), format(max(numbers), form)
    return low if low == high else f"{low} to {high}"


def likeness(one: Sequence[float], other: Sequence[float]) -> float:
    """The correlation of two curves' logarithms: 1 where they descend together."""
    pair = torch.tensor([[math.log(max(value, 1e-30)) for value in curve] for curve in (one, other)])
    return float(torch.corrcoef(pair.double())[0, 1])
