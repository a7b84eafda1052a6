"""Theorem 1 of the activation-prompt paper (appendix C.4): samples until a prompt at layer 1 or 2 makes no mistake.

The theorem: order P at layer 1 and order P^2 log P at layer 2; batch size and step size do not depend on P. Two ways to
train. `with_sgd` is the theorem's: fresh batches, a prompt a position, noise. `with_expected_gradient` follows the mean
gradient without noise, which is what the proofs compute (A40, A82); it is exact and cheap.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from inlay.errors import InlayError, unknown
from inlay.papers.activation_prompts.theory.network import Data, TwoLayerViT, hinge

GOALS = ("error", "risk")
CHUNK = 128
SHORTEST_WINDOW = 50
# What may remain of the largest loss, 1/P: rounding, and the last of an endless approach.
ROUNDING = 1e-9


@dataclass(frozen=True)
class SampleSetting:
    """How to train, the same for every P. `step` is eta; the noise is `sigma = noise / P`, as the paper bounds it.

    `beta` is not 1 by default because a prompt at layer 2 that draws all attention to the telling token gives
    `f = lambda_1 / 4`, and reaches the margin 1/P only if `exp(beta_1^2) >= 4 (P - 1)/(P - 4)`: more than 4, and P > 4.

    Training ends when the goal has been reached and kept for as many steps again: "error", no image of the held-out set
    is classified wrongly; "risk", the hinge loss of each is 0, the paper's own measure. It is given up after `budget`
    times the theorem's larger order, `P^2 log P / eta` steps.
    """

    step: float = 4.0
    batch: int = 16
    beta: float = math.sqrt(3)
    zeta: float = -0.5
    noise: float = 0.1
    background: str = "one"
    prompt_stays: bool = False
    goal: str = "error"
    held_out: int = 1024
    budget: float = 24.0

    def __post_init__(self) -> None:
        if self.goal not in GOALS:
            raise unknown("goal", self.goal, GOALS)
        Data(2, self.noise, self.zeta, self.background)  # refuses what the data cannot have, before any work
        for name in ("step", "batch", "beta", "held_out", "budget"):
            if getattr(self, name) <= 0:
                raise InlayError(f"{name} = {getattr(self, name)}: give a number above 0.")

    def model(self, tokens: int, *, noise: bool = True, order: Tensor | None = None) -> TwoLayerViT:
        """The network for images of so many tokens."""
        data = Data(tokens, self.noise / tokens if noise else 0.0, self.zeta, self.background)
        return TwoLayerViT(data, (self.beta, self.beta), (order, order), self.prompt_stays)

    def most_steps(self, tokens: int) -> int:
        """When to give up."""
        return math.ceil(self.budget * tokens**2 * math.log(tokens) / self.step)


@dataclass(frozen=True)
class Needed:
    """What one training took. `error` and `risk` are samples (batch size times steps) until zero, None if not reached.

    `seed` is None for the expected gradient. `spent` is where training ended, and `norm` the length that the prompt had
    there at a position (root mean square over positions).
    """

    layer: int
    tokens: int
    seed: int | None
    error: int | None
    risk: int | None
    spent: int
    norm: float


def with_sgd(setting: SampleSetting, tokens: int, layer: int, seeds: int) -> list[Needed]:
    """Train a prompt (P, d) from zero by SGD, all seeds side by side, each on images of its own.

    The held-out set is looked at after 1, 2, ... steps, and from 20 on each time 5 % more have been made.
    """
    # The order of keys matters only if the prompt stays behind; it is then drawn once for a size.
    drawn = torch.randperm(tokens, generator=torch.Generator().manual_seed(tokens))
    model = setting.model(tokens, order=drawn if setting.prompt_stays else None)
    generators = [torch.Generator().manual_seed(seed) for seed in range(seeds)]
    held = [model.data.draw((setting.held_out,), generator) for generator in generators]
    batches = [_batches(model.data, setting.batch, generator) for generator in generators]
    going = list(range(seeds))
    delta = torch.zeros(seeds, 1, tokens, 4, dtype=torch.float64)
    error, risk = [Since() for _ in going], [Since() for _ in going]
    goal = error if setting.goal == "error" else risk
    last = setting.most_steps(tokens)
    ended = [last] * seeds
    look = 0
    for step in range(last + 1):
        if step == look:
            look += max(1, step // 20)
            for seed in going:
                worst = _worst_margin(model, held[seed], delta[seed], layer)
                error[seed].see(step, worst > 0)
                risk[seed].see(step, worst >= (1 - ROUNDING) / tokens)
                if goal[seed].kept(step):
                    ended[seed] = step
            going = [seed for seed in going if not goal[seed].kept(step)]
            if not going:
                break
        x, labels = map(torch.stack, zip(*(next(batches[seed]) for seed in going), strict=True))
        moving = delta[going].requires_grad_()
        loss = hinge(model(x, moving, layer), labels, tokens).mean(1).sum()
        (gradient,) = torch.autograd.grad(loss, moving)
        delta[going] -= setting.step * gradient

    def needed(seed: int, end: int) -> Needed:
        found, norm = (error[seed].samples(end, setting), risk[seed].samples(end, setting)), _norm(delta[seed])
        return Needed(layer, tokens, seed, *found, end * setting.batch, norm)

    return [needed(seed, end) for seed, end in enumerate(ended)]


def _batches(data: Data, size: int, generator: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
    """Fresh batches without end, drawn several at a time because drawing has a price of its own."""
    while True:
        yield from zip(*data.draw((32, size), generator), strict=True)


@dataclass
class Since:
    """Since when something has held without a break."""

    step: int | None = None

    def see(self, step: int, holds: bool) -> None:
        """Take note of one look."""
        self.step = (step if self.step is None else self.step) if holds else None

    def kept(self, step: int) -> bool:
        """Whether it has held for as long again as it took, and for no fewer than `SHORTEST_WINDOW` steps."""
        return self.step is not None and step - self.step >= max(self.step, SHORTEST_WINDOW)

    def samples(self, end: int, setting: SampleSetting) -> int | None:
        """The samples it took, if by the step `end` it was kept."""
        return self.step * setting.batch if self.step is not None and self.kept(end) else None


def _norm(delta: Tensor) -> float:
    return float(delta.square().sum(-1).mean().sqrt())


def _worst_margin(model: TwoLayerViT, held: tuple[Tensor, Tensor], delta: Tensor, layer: int) -> float:
    """The smallest `y f` on held-out images; a mistake ends the search early, for nothing else matters then."""
    worst = math.inf
    with torch.no_grad():
        for x, labels in zip(held[0].split(CHUNK), held[1].split(CHUNK), strict=True):
            worst = min(worst, float((labels * model(x, delta, layer)).min()))
            if worst <= 0:
                break
    return worst


def with_expected_gradient(
    setting: SampleSetting, tokens: Sequence[int], layer: int, most_steps: int = 40_000
) -> list[Needed]:
    """Follow the mean gradient over all noise-free images, for all P side by side. A step counts as a batch.

    The mean image treats all positions alike, so the prompt stays the same at each, its gradient there is 1/P of the
    gradient of a shared one, and the background of an image is one token that occurs P - 1 times. It is given up after
    `most_steps`: steps are cheap here, so the budget of `setting` does not bind.
    """
    if setting.background != "one":
        raise InlayError("The expected gradient is computed for images with one background: leave background='one'.")
    model = setting.model(max(tokens), noise=False)
    sizes, images, labels, count = _every_image(model, tokens)
    delta = torch.zeros(len(tokens), 1, 1, 4, dtype=torch.float64, requires_grad=True)
    error = torch.full((len(tokens),), -1)
    risk = error.clone()
    for step in range(most_steps + 1):
        output = model(images, delta, layer, count)
        worst = (labels * output.detach()).amin(-1)
        error = torch.where(worst > 0, torch.where(error < 0, step, error), -1)
        risk = torch.where((risk < 0) & (worst * sizes >= 1 - ROUNDING), step, risk)
        going = risk < 0
        if step == most_steps or not going.any():
            break
        (gradient,) = torch.autograd.grad(hinge(output, labels, sizes[:, None]).mean(-1).sum(), delta)
        with torch.no_grad():
            delta -= setting.step * torch.where(going, 1 / sizes, 0.0)[:, None, None, None] * gradient

    def samples(steps: int) -> int | None:
        return steps * setting.batch if steps >= 0 else None

    return [
        Needed(layer, size, None, samples(e), samples(r), (r if r >= 0 else most_steps) * setting.batch, _norm(prompt))
        for size, e, r, prompt in zip(tokens, error.tolist(), risk.tolist(), delta.detach(), strict=True)
    ]


def expected_push(setting: SampleSetting, tokens: int, layer: int, delta: Sequence[float]) -> Tensor:
    """Where the mean gradient pushes, at one position, a prompt that is `delta` at each: minus the gradient, (4,)."""
    model = setting.model(tokens, noise=False)
    sizes, images, labels, count = _every_image(model, [tokens])
    prompt = torch.tensor(delta, dtype=torch.float64, requires_grad=True)
    loss = hinge(model(images, prompt, layer, count), labels, sizes[:, None]).mean()
    return -torch.autograd.grad(loss, prompt)[0] / tokens


def _every_image(model: TwoLayerViT, tokens: Sequence[int]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The sizes; the four kinds of image without noise, as two tokens; their labels; how often each token occurs."""
    sizes = torch.tensor(list(tokens), dtype=torch.float64)
    images = model.data.patterns[torch.tensor([[0, 2], [0, 3], [1, 2], [1, 3]])]
    labels = torch.tensor([1.0, 1.0, -1.0, -1.0], dtype=torch.float64)
    return sizes, images, labels, torch.stack([torch.ones_like(sizes), sizes - 1], -1)[:, None, :]
