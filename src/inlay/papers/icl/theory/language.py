"""Beyond the paper: do the answers of a pretrained language model follow ridge regression in context?

Prompts are lines of two-digit numbers, `x=07 y=43`, from tasks of the paper's form: `y = lambda^T (f(x) + eps)` (1),
`lambda ~ N(0, I_m)`, scaled, rounded and cut to 0..99. The last line lacks its y. What answers may be a language model
or anything else that gives probabilities of 00 to 99 for a text.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from inlay.errors import InlayError
from inlay.papers.findings import Finding, Holds, MeasuredClaim, Row, Tick

# Probabilities (B, 100) of the answers 00 to 99 to each of B texts.
Answerer = Callable[[Sequence[str]], Tensor]
SIZES = (1, 2, 4, 8, 16, 32)
MIDDLE, SCALE, TAU = 50.0, 15.0, 0.01
STRENGTHS = tuple(10 ** (power / 4) for power in range(-16, 17))
WIDTHS = tuple(10 ** (power / 8) for power in range(-8, 25))
RESAMPLES = 1000


def linear(x: Tensor) -> Tensor:
    """`f(x) = (1, u)`, u of mean 0 and variance 1 over 0..99; (..., 2)."""
    u = (x - 49.5) / math.sqrt((100**2 - 1) / 12)
    return torch.stack([torch.ones_like(u), u], -1)


def basis(x: Tensor) -> Tensor:
    """`f(x) = (1, u, sqrt(2) cos v, sqrt(2) sin v)` with v once around the circle; (..., 4)."""
    v = 2 * math.pi * x / 100
    waves = torch.stack([v.cos(), v.sin()], -1) * math.sqrt(2)
    return torch.cat([linear(x), waves], -1)


KINDS: dict[str, Callable[[Tensor], Tensor]] = {"linear": linear, "basis functions": basis}


@dataclass(frozen=True)
class TextTasks:
    """B tasks: inputs `x` (B, n + 1) without repeats, written labels `y` (B, n + 1); the last one is asked for."""

    kind: str
    x: Tensor
    y: Tensor

    @classmethod
    def sample(cls, kind: str, count: int, most: int, seed: int) -> TextTasks:
        if count < 2:
            raise InlayError(f"{count} tasks: give 2 or more.")
        draws = torch.Generator().manual_seed(seed)
        x = torch.stack([torch.randperm(100, generator=draws)[: most + 1] for _ in range(count)]).double()
        f = KINDS[kind](x)
        m = f.shape[-1]
        lam = torch.randn(count, 1, m, generator=draws, dtype=torch.float64)
        noisy = f + TAU**0.5 * torch.randn(f.shape, generator=draws, dtype=torch.float64)
        y = (MIDDLE + SCALE / math.sqrt(m) * (lam * noisy).sum(-1)).round().clamp(0, 99)
        return cls(kind, x, y)

    @property
    def m(self) -> int:
        return KINDS[self.kind](self.x[:1, :1]).shape[-1]

    @property
    def asked(self) -> Tensor:
        """The labels that are asked for, (B)."""
        return self.y[:, -1]

    def texts(self, N: int) -> list[str]:
        """The prompts with N examples."""
        return [
            "".join(f"x={int(x):02d} y={int(y):02d}\n" for x, y in zip(xs[:N], ys[:N], strict=True))
            + f"x={int(xs[-1]):02d} y="
            for xs, ys in zip(self.x.tolist(), self.y.tolist(), strict=True)
        ]

    def ridge(self, N: int, strength: float) -> Tensor:
        """Ridge regression's answers (20) with N examples, `Z Z^T + strength I`, (B)."""
        f = KINDS[self.kind](self.x)
        Z, query = f[:, :N], f[:, -1]
        to_unit = math.sqrt(self.m) / SCALE
        away = strength * torch.eye(self.m, dtype=torch.float64)
        right = Z.transpose(1, 2) @ ((self.y[:, :N] - MIDDLE) * to_unit)[..., None]
        lam = torch.linalg.solve(Z.transpose(1, 2) @ Z + away, right)[..., 0]
        return (MIDDLE + (query * lam).sum(-1) / to_unit).clamp(0, 99)

    def smoothed(self, N: int, width: float) -> Tensor:
        """A kernel average of the labels shown, by `exp(-(x - x_i)^2 / (2 width^2))`: softmax attention by nearness.

        A small width copies the nearest label, a large one gives the mean of all.
        """
        away = (self.x[:, :N] - self.x[:, -1:]).square() / (2 * width**2)
        return ((-away).softmax(1) * self.y[:, :N]).sum(1)

    def mean(self, N: int) -> Tensor:
        """The mean of the labels shown."""
        return self.y[:, :N].mean(1)

    def nearest(self, N: int) -> Tensor:
        """The label of the nearest x shown: what copying would answer."""
        near = (self.x[:, :N] - self.x[:, -1:]).abs().argmin(1)
        return self.y.gather(1, near[:, None])[:, 0]


def distance(one: Tensor, other: Tensor) -> float:
    """Root mean square difference."""
    return float((one - other).square().mean().sqrt())


def in_context(answer: Answerer, name: str, tick: Tick, *, count: int = 40, seed: int = 0) -> Finding:
    """Compare the answers with ridge regression's, at the strength that matches them best, as N grows."""
    values = torch.arange(100, dtype=torch.float64)
    rows: list[Row] = []
    claims: list[MeasuredClaim] = []
    for kind in KINDS:
        tasks = TextTasks.sample(kind, count, max(SIZES), seed)
        said: dict[int, Tensor] = {}
        matched: dict[int, float] = {}
        widths: dict[int, float] = {}
        for N in SIZES:
            tick(f"{name}: {kind}, N = {N}")
            odds = answer(tasks.texts(N)).to(torch.float64)
            said[N] = odds @ values / odds.sum(1)
            best = min(STRENGTHS, key=lambda strength, N=N: distance(tasks.ridge(N, strength), said[N]))  # type: ignore[misc]
            matched[N] = best
            near = tasks.ridge(N, best)
            width = min(WIDTHS, key=lambda width, N=N: distance(tasks.smoothed(N, width), said[N]))  # type: ignore[misc]
            smooth = tasks.smoothed(N, width)
            widths[N] = width
            by_theory = tasks.ridge(N, tasks.m * TAU)
            rows.append(
                (
                    kind,
                    N,
                    distance(said[N], tasks.asked),
                    distance(odds.argmax(1).double(), tasks.asked),
                    distance(by_theory, tasks.asked),
                    distance(near, tasks.asked),
                    best,
                    distance(said[N], near),
                    distance(said[N], by_theory),
                    distance(said[N], tasks.mean(N)),
                    distance(said[N], tasks.nearest(N)),
                    width,
                    distance(said[N], smooth),
                    float((odds.sum(1)).mean()),
                    *_interval(said[N] - tasks.asked),
                    *_interval(by_theory - tasks.asked),
                    *_interval(said[N] - near),
                    *_interval(said[N] - smooth),
                )
            )
        claims += _claims(tasks, said, matched, widths)
    theory = {kind: f(torch.zeros(1)).shape[-1] * TAU for kind, f in KINDS.items()}
    facts = {"model": name, "tasks": count, "seed": seed, "tau": TAU, "scale": SCALE, "m tau": theory}
    return Finding("icl-language", COLUMNS, rows, claims, facts)


COLUMNS = (
    "tasks",
    "N",
    "error, model",
    "error, model's likeliest answer",
    "error, ridge m tau",
    "error, matched ridge",
    "matched strength",
    "model from matched ridge",
    "model from ridge m tau",
    "model from the mean of the labels",
    "model from the nearest label",
    "matched width",
    "model from matched kernel average",
    "probability on two digits",
    *(
        f"{name}, {end}"
        for name in (
            "error, model",
            "error, ridge m tau",
            "model from matched ridge",
            "model from matched kernel average",
        )
        for end in ("low", "high")
    ),
)


def _claims(
    tasks: TextTasks, said: dict[int, Tensor], matched: dict[int, float], widths: dict[int, float]
) -> list[MeasuredClaim]:
    """What the theory would lead one to expect of a transformer in context, for one kind of tasks."""
    few, most = SIZES[1], SIZES[-1]
    near = {N: tasks.ridge(N, matched[N]) for N in (few, most)}
    smooth = (said[most] - tasks.smoothed(most, widths[most])).square()
    error = {N: (said[N] - tasks.asked).square() for N in (few, most)}
    theory = (tasks.ridge(most, tasks.m * TAU) - tasks.asked).square()
    apart = {N: (said[N] - near[N]).square() for N in (few, most)}
    wanted = tasks.m * TAU
    return [
        MeasuredClaim(
            f"{tasks.kind}: the error falls as N grows from {few} to {most}",
            f"{_root(error[few])} to {_root(error[most])}; ridge regression with m tau: {_root(theory)} at N = {most}",
            _less(error[most], error[few]),
        ),
        MeasuredClaim(
            f"{tasks.kind}: the answers come nearer to the best matching ridge regression, N = {few} to {most}",
            f"{_root(apart[few])} to {_root(apart[most])} (in units of y, whose spread is about {SCALE:g})",
            _less(apart[most], apart[few]),
        ),
        MeasuredClaim(
            f"{tasks.kind}: at N = {most} ridge regression explains the answers better than a kernel average of "
            "labels, each with its one parameter fitted",
            f"off by {_root(apart[most])}; the kernel average of width {widths[most]:.3g}: {_root(smooth)}",
            _less(apart[most], smooth),
        ),
        MeasuredClaim(
            f"{tasks.kind}: the matching strength is the theory's m tau = {wanted:g}, within a factor of 10",
            ", ".join(f"N = {N}: {matched[N]:.3g}" for N in SIZES),
            "yes" if all(0.1 <= matched[N] / wanted <= 10 for N in SIZES[2:]) else "no",
        ),
    ]


def _root(squares: Tensor) -> str:
    return f"{float(squares.mean().sqrt()):.1f}"


def _interval(differences: Tensor) -> tuple[float, float]:
    """95 % of a root mean square, by a bootstrap over the tasks."""
    draws = torch.Generator().manual_seed(0)
    picks = torch.randint(len(differences), (RESAMPLES, len(differences)), generator=draws)
    roots = differences.square()[picks].mean(1).sqrt().sort().values
    return float(roots[int(0.025 * RESAMPLES)]), float(roots[int(0.975 * RESAMPLES)])


def _less(one: Tensor, other: Tensor) -> Holds:
    """Whether the mean of `one` is below that of `other`: by a bootstrap over the tasks, 95 %."""
    draws = torch.Generator().manual_seed(0)
    picks = torch.randint(len(one), (RESAMPLES, len(one)), generator=draws)
    differences = (one - other)[picks].mean(1).sort().values
    low, high = differences[int(0.025 * RESAMPLES)], differences[int(0.975 * RESAMPLES)]
    return "yes" if high < 0 else "no" if low > 0 else "cannot tell"
