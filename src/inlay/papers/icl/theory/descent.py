"""Training: gradient descent (10) with two step sizes, and section 4's Adam on the population loss or on samples."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import torch

from inlay.errors import InlayError
from inlay.papers.icl.theory.model import OneLayer, quadratic
from inlay.papers.icl.theory.problem import IN_DOMAIN, OUT_OF_DOMAIN, DrawnPrompts, InContextProblem

if TYPE_CHECKING:
    from matplotlib.figure import Figure

RATE, BATCH, SAMPLES, TESTS = 1e-4, 256, 10_000, 200
EPOCH = math.ceil(SAMPLES / BATCH)
WARM_UP = 3  # steps before a training on a GPU is recorded
Result = TypeVar("Result")


@dataclass
class Trace:
    """What was seen at the kept steps: the population loss (or a sample's), its gap to `infimum`, inference losses.

    `seconds` is the time since the start, `inference` has `1/K |yhat - y*|^2` for each test set, `eta_Q` and `eta_w`
    are gradient descent's last step sizes.
    """

    infimum: float
    steps: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    loss: list[float] = field(default_factory=list)
    gap: list[float] = field(default_factory=list)
    inference: dict[str, list[float]] = field(default_factory=dict)
    eta_Q: float | None = None
    eta_w: float | None = None
    began: float = field(default_factory=time.perf_counter)

    def note(
        self,
        step: int,
        loss: float,
        gap: float,
        inference: Mapping[str, float] | None = None,
        seconds: float | None = None,
    ) -> None:
        self.steps.append(step)
        self.seconds.append(time.perf_counter() - self.began if seconds is None else seconds)
        self.loss.append(loss)
        self.gap.append(gap)
        for name, value in (inference or {}).items():
            self.inference.setdefault(name, []).append(value)

    @property
    def curves(self) -> dict[str, list[float]]:
        """Everything to draw against `steps`, by name."""
        return {"training loss": self.loss, "gap to the infimum": self.gap, **self.inference}

    def plot(self) -> Figure:
        """The curves on a logarithmic axis, with the infimum."""
        from inlay.papers.icl.charts.training import curves

        return curves(self)


Watch = Callable[[Trace], None]


def held_out(problem: InContextProblem, count: int = TESTS, seed: int = 0) -> dict[str, DrawnPrompts]:
    """Section 4's: as in training, and `lambda ~ N(1, 4 I)`."""
    draws = 1_000 + 20_000 * seed  # never the seed of the training's own samples, 10,000 + seed
    return {
        "in-domain": problem.prompts(count, draws, IN_DOMAIN),
        "out-of-domain": problem.prompts(count, draws + 1, OUT_OF_DOMAIN),
    }


def usable_steps(model: OneLayer) -> tuple[float, float]:
    """Step sizes (eta_Q, eta_w) for which descent at fixed Q is safe: the loss is quadratic in w, with the largest
    eigenvalue `max_k lambda_max(B_k B_k^T) / K`. `eta_Q` is the same; `descend` halves both where the loss rises.

    In float64 and on the CPU: attention that is one-hot but for `1e-38` keeps other eigensolvers from converging.
    """
    with torch.no_grad():
        s = model.attention().to("cpu", torch.float64).permute(2, 0, 1)  # C_k^T, (K, H, N)
        largest = torch.linalg.eigvalsh(s.transpose(1, 2) @ s)[:, -1].max()
        norm = torch.linalg.eigvalsh(model.problem.moments().S.cpu())[-1]
    eta = model.problem.K / float(largest * norm)
    return eta, eta


def descend(
    model: OneLayer,
    steps: int,
    *,
    eta_Q: float | None = None,
    eta_w: float | None = None,
    watch: Watch | None = None,
) -> Trace:
    """(10) on the population loss, every step kept.

    With both step sizes given they are used as they are. Otherwise `usable_steps` gives them, and a step that raises
    the loss is taken back and tried again at half of both.
    """
    if steps < 1:
        raise InlayError(f"{steps} steps: give a whole number from 1 on.")
    if (eta_Q is None) != (eta_w is None):
        raise InlayError(f"eta_Q = {eta_Q}, eta_w = {eta_w}: give both step sizes, or neither.")
    for name, eta in (("eta_Q", eta_Q), ("eta_w", eta_w)):
        if eta is not None and not eta > 0:
            raise InlayError(f"{name} = {eta}: a step size is a number above 0.")
    halving = eta_Q is None or eta_w is None
    if eta_Q is None or eta_w is None:
        eta_Q, eta_w = usable_steps(model)
    trace = Trace(model.infimum)

    def gap_of(a: torch.Tensor) -> float:
        return float(quadratic(a - model.A, model.S)) / 2

    before = gap_of(model.step())
    trace.note(0, before + model.infimum, before)
    for t in range(1, steps + 1):
        Q, w = model.Q.detach().clone(), model.w.detach().clone()
        by_Q, by_w = model.Q.grad, model.w.grad
        assert by_Q is not None
        assert by_w is not None
        while True:
            with torch.no_grad():
                model.Q.copy_(Q - eta_Q * by_Q)
                model.w.copy_(w - eta_w * by_w)
            after = gap_of(model.step())
            if not halving or after <= before or eta_w < 1e-300:
                break
            eta_Q, eta_w = eta_Q / 2, eta_w / 2
        before = after
        trace.note(t, before + model.infimum, before)
        trace.eta_Q, trace.eta_w = eta_Q, eta_w
        if watch:
            watch(trace)
    return trace


@dataclass(frozen=True)
class Batches:
    """Mini-batches of `size` from `samples` prompts, which the seed draws and puts in order, anew in each epoch."""

    size: int = BATCH
    samples: int = SAMPLES
    seed: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.size <= self.samples:
            raise InlayError(f"Batches of {self.size} from {self.samples} samples: give 1 to {self.samples}.")

    def order(self) -> Iterator[torch.Tensor]:
        """The rows of one batch after another, without end; an epoch's batches from its last to its first."""
        generator = torch.Generator().manual_seed(self.seed)
        while True:
            yield from reversed(torch.randperm(self.samples, generator=generator).split(self.size))


def train(
    model: OneLayer,
    steps: int,
    *,
    rate: float = RATE,
    batches: Batches | None = None,
    every: int = EPOCH,
    seconds: float | None = None,
    tests: Mapping[str, DrawnPrompts] | None = None,
    watch: Watch | None = None,
) -> Trace:
    """Adam at `rate`: on the population loss in closed form, or on mini-batches.

    The loss kept every `every` steps is the population's, or the whole sample's. With `seconds`, training ends at the
    first kept step after so many.
    """
    if steps < 1 or every < 1:
        raise InlayError(f"{steps} steps, kept every {every}: give whole numbers from 1 on.")
    if not rate > 0:
        raise InlayError(f"A learning rate of {rate}: give a number above 0.")
    squares = {name: test.moments().S.to(model.S) for name, test in (tests or {}).items()}
    drawn = None if batches is None else model.problem.prompts(batches.samples, batches.seed + 10_000)
    whole = model.moments if drawn is None else drawn.moments().to(model.S)
    order = None if batches is None or batches.size == batches.samples else batches.order()
    graphs = order is None and model.Q.is_cuda
    optimiser = torch.optim.Adam([model.Q, model.w], lr=rate, fused=True, capturable=graphs)
    trace = Trace(model.infimum)
    gradients: Callable[[], torch.Tensor] = partial(model.step, whole)
    update: Callable[[], object] = optimiser.step

    def note(t: int, a: torch.Tensor) -> None:
        away = a - model.A
        inference = {name: float(quadratic(away, second)) for name, second in squares.items()}
        gap = float(quadratic(away, model.S)) / 2
        trace.note(t, float(whole.loss(a)) if drawn is not None else model.infimum + gap, gap, inference)
        if watch:
            watch(trace)

    for t in range(steps):
        if graphs and t == WARM_UP:
            gradients, update = recorded(gradients), recorded(update)
        if drawn is not None and order is not None:
            gradients = partial(model.step, drawn.moments(next(order).to(drawn.y.device)).to(model.S))
        a = gradients()
        if t % every == 0:
            note(t, a)
            # What is kept is read from the device, so that its work is done when the clock is read.
            if seconds is not None and t > 0 and trace.seconds[-1] >= seconds:
                return trace
        update()
    with torch.no_grad():
        note(steps, model.coefficients())
    return trace


def recorded(work: Callable[[], Result]) -> Callable[[], Result]:
    """The same work on the same tensors as one CUDA graph: a step of one layer is short, and launching its kernels
    one by one takes longer than they do. What it returned while it was recorded has the new values after each call.

    Recording runs nothing. What allocates on its first call has to have run before.
    """
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = work()

    def again() -> Result:
        graph.replay()
        return result

    return again
