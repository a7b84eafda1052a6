"""Multi-LoRA, section 4 and appendices A and B, as experiments: numbers, and beside each claim what was measured."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from inlay.errors import InlayError
from inlay.papers.findings import Finding, MeasuredClaim, Row, Tick, number, verdict
from inlay.papers.infoprompt.theory import SoftmaxProblem, l_exp
from inlay.papers.multi_lora.theory.constants import Estimates, estimate, points, softmax_bounds
from inlay.papers.multi_lora.theory.loss import Decomposable, Quadratic, counterexample, quadratics, softmax_tasks
from inlay.papers.multi_lora.theory.table import (
    HESSIANS,
    PAPER,
    SAMPLINGS,
    SIZES,
    corrected_hessian,
    printed_hessian,
    sample,
)

SHARED, OWN, ROWS = 4, 3, 24
POINTS, RADIUS = 20, 1.0
MOST_TASKS = 64


@dataclass(frozen=True)
class DecomposableSetting:
    """Numbers k of tasks, seeds, and samples for each entry of table 3."""

    tasks: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    seeds: int = 5
    samples: int = 10000

    def __post_init__(self) -> None:
        if len(self.tasks) < 2 or min(self.tasks) < 1:
            raise InlayError(f"Tasks {list(self.tasks)}: give two numbers or more, from 1 on.")
        if self.seeds < 1 or self.samples < 2:
            raise InlayError(f"{self.seeds} seeds, {self.samples} samples: give 1 seed and 2 samples or more.")


def _shared_only(k: int, seed: int) -> Decomposable:
    """A loss of x alone: the case in which k gamma and k beta are reached."""
    block = torch.zeros(SHARED + OWN, SHARED + OWN, dtype=torch.float64)
    block[:SHARED, :SHARED] = torch.diag(torch.arange(1, SHARED + 1, dtype=torch.float64))
    linear = torch.zeros(SHARED + OWN, dtype=torch.float64)
    linear[0] = 1
    return Decomposable((Quadratic(block, linear),) * k, SHARED)


KINDS: dict[str, Callable[[int, int], Decomposable]] = {
    "quadratic": lambda k, seed: quadratics(k, SHARED, OWN, seed),
    "quadratic, nearly round": lambda k, seed: quadratics(k, SHARED, OWN, seed, condition=1.02),
    "softmax regression": lambda k, seed: softmax_tasks(k, SHARED, OWN, ROWS, seed),
    "x alone": _shared_only,
}


def lemmas(setting: DecomposableSetting, tick: Tick) -> Finding:
    """Constants of parts and whole as the number of tasks grows, for four kinds of loss."""
    rows: list[Row] = []
    found: dict[str, list[Estimates]] = {}
    inside: list[float] = []
    added: list[float] = []
    for kind, make in KINDS.items():
        tick(f"constants, {kind}")
        for k in setting.tasks:
            for seed in range(setting.seeds):
                loss = make(k, seed)
                where = points(loss, POINTS, RADIUS, seed)
                seen = estimate(loss, where)
                found.setdefault(kind, []).append(seen)
                part, whole, frozen = seen.part, seen.whole, seen.frozen
                rows.append(
                    (
                        *(kind, k, seed, part.gamma, part.beta, part.alpha, seen.alpha_0),
                        *(whole.gamma, whole.beta, whole.alpha, frozen.gamma, frozen.beta, frozen.alpha),
                        *(seen.printed_alpha, "yes" if seen.condition else "no"),
                    )
                )
                if kind == "softmax regression":
                    inside += _within(loss, seen)
                if k > 1:
                    added.append(_first_line_of_4_6(loss, where))
    most = max(setting.tasks)
    claims = [*_growth_claims(found, most, added), *_convexity_claims(found)]
    claims.append(
        MeasuredClaim(
            "softmax regression: estimates are within the bounds of `softmax_bounds`",
            f"estimate / bound {min(inside):.2g} to {max(inside):.2g} (gamma, beta; bound / estimate for alpha)",
            verdict(max(inside) <= 1),
        )
    )
    columns = (
        *("kind", "k", "seed", "gamma", "beta", "alpha", "alpha_0"),
        *("whole gamma", "whole beta", "whole alpha", "frozen gamma", "frozen beta", "frozen alpha"),
        *("printed alpha", "condition"),
    )
    facts = {**vars(setting), "d": SHARED, "m": OWN, "n": ROWS, "points": POINTS, "radius": RADIUS}
    return Finding("lemmas-4", columns, rows, claims, facts)


def _growth_claims(found: Mapping[str, Sequence[Estimates]], most: int, added: Sequence[float]) -> list[MeasuredClaim]:
    """Lemmas 4.4 and 4.6: how gamma and beta grow with k."""
    every = [seen for group in found.values() for seen in group]
    only_x = [seen for seen in found["x alone"] if seen.tasks == most]
    return [
        MeasuredClaim(
            "gamma-Lipschitz parts make a (k gamma)-Lipschitz whole (4.4)",
            f"{max(seen.whole.gamma / (seen.tasks * seen.part.gamma) for seen in every):.3g} of k gamma at most, "
            f"over {len(every)} losses",
            verdict(all(seen.whole.gamma <= seen.tasks * seen.part.gamma * (1 + 1e-9) for seen in every)),
        ),
        MeasuredClaim(
            "beta-smooth parts make a (k beta)-smooth whole (4.6)",
            f"{max(seen.whole.beta / (seen.tasks * seen.part.beta) for seen in every):.3g} of k beta at most",
            verdict(all(seen.whole.beta <= seen.tasks * seen.part.beta * (1 + 1e-9) for seen in every)),
        ),
        MeasuredClaim(
            "k gamma and k beta can be no smaller (ours)",
            f"a loss of x alone, k = {most}: {only_x[0].whole.gamma / only_x[0].part.gamma:.3g} gamma, "
            f"{only_x[0].whole.beta / only_x[0].part.beta:.3g} beta",
            verdict(all(abs(seen.whole.beta / seen.part.beta - most) < 1e-9 * most for seen in only_x)),
        ),
        MeasuredClaim(
            "|grad L - grad L~|^2 = |sum_i (grad L_i - grad L~_i)|^2 (4.6, first line of the proof)",
            f"the right side is {min(added):.2g} to {max(added):.2g} times the left: it adds different tasks' y-blocks",
            verdict(max(abs(ratio - 1) for ratio in added) < 1e-9),
        ),
    ]


def _convexity_claims(found: Mapping[str, Sequence[Estimates]]) -> list[MeasuredClaim]:
    """Lemma 4.8: whether the whole is convex; and what a frozen x makes of the constants."""
    convex = [seen for kind, group in found.items() for seen in group if kind != "x alone"]
    allowed = [seen for seen in convex if seen.condition and seen.tasks > 1]
    bent = [seen for seen in convex if seen.printed_alpha < 0]
    return [
        MeasuredClaim(
            "the whole is (alpha / 2)-strongly convex where (k - 1)(alpha_0 - alpha) <= alpha / 2 (4.8)",
            f"the condition is met by {len(allowed)} of {sum(seen.tasks > 1 for seen in convex)} losses with k > 1; "
            + (
                f"there {min(seen.whole.alpha / seen.part.alpha for seen in allowed):.3g} alpha or more"
                if allowed
                else ""
            ),
            verdict(all(seen.whole.alpha >= seen.part.alpha / 2 for seen in allowed)) if allowed else "cannot tell",
        ),
        MeasuredClaim(
            "without that condition the whole may not be convex (after Definition 4.7)",
            f"{min(seen.whole.alpha / seen.part.alpha for seen in convex):.4g} alpha or more, {len(convex)} losses",
            verdict(any(seen.whole.alpha <= 0 for seen in convex)),
        ),
        MeasuredClaim(
            "the whole is alpha-strongly convex, no condition (the correction)",
            "the same",
            verdict(all(seen.whole.alpha >= seen.part.alpha * (1 - 1e-9) for seen in convex)),
        ),
        MeasuredClaim(
            "the matrix of the proof, with H_00 of one task, is the Hessian (4.8)",
            f"it has a negative eigenvalue in {len(bent)} of {len(convex)} losses; the Hessian in none",
            verdict(not bent),
        ),
        MeasuredClaim(
            "with x frozen, as Multi-LoRA runs, beta and alpha are a task's own (ours)",
            f"of a part's: beta {max(seen.frozen.beta / seen.part.beta for seen in convex):.3g} at most, "
            f"alpha {min(seen.frozen.alpha / seen.part.alpha for seen in convex):.3g} or more, gamma sqrt(k) times "
            f"{max(seen.frozen.gamma / seen.part.gamma / math.sqrt(seen.tasks) for seen in convex):.3g} at most",
            verdict(
                all(
                    seen.frozen.beta <= seen.part.beta * (1 + 1e-9)
                    and seen.frozen.alpha >= seen.part.alpha * (1 - 1e-9)
                    and seen.frozen.gamma <= math.sqrt(seen.tasks) * seen.part.gamma * (1 + 1e-9)
                    for seen in convex
                )
            ),
        ),
    ]


def _within(loss: Decomposable, seen: Estimates) -> list[float]:
    """Estimated over bounded, at most 1, for the parts' gamma and beta; the other way round for alpha."""
    # x and y are each within the radius: together within sqrt(2) times it.
    each = [softmax_bounds(part, math.sqrt(2) * RADIUS) for part in loss.parts if isinstance(part, SoftmaxProblem)]
    return [
        seen.part.gamma / max(bound.gamma for bound in each),
        seen.part.beta / max(bound.beta for bound in each),
        min(bound.alpha for bound in each) / seen.part.alpha,
    ]


def _first_line_of_4_6(loss: Decomposable, where: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> float:
    """`|sum_i (grad L_i - grad L~_i)|^2`, added up as d + m numbers, over the true `|grad L - grad L~|^2`."""
    (x, y), (other_x, other_y) = where[0], where[1]
    left = (loss.gradient(x, y) - loss.gradient(other_x, other_y)).square().sum()
    right = (loss.gradients(x, y) - loss.gradients(other_x, other_y)).sum(0).square().sum()
    return float(right / left)


def counterexample_a1(setting: DecomposableSetting, tick: Tick) -> Finding:
    """Lemma A.1's matrix, and the Hessian of the losses that it is made of."""
    tick("counterexample")
    rows: list[Row] = []
    for k in range(1, MOST_TASKS + 1):
        loss = counterexample(k)
        x, y = torch.zeros(1, dtype=torch.float64), torch.zeros(k, 1, dtype=torch.float64)
        printed, true = loss.printed_hessian(x, y), loss.hessian(x, y)
        least = [float(torch.linalg.eigvalsh(matrix)[0]) for matrix in (printed, true)]
        corner = 2 * k + 2 - math.sqrt((2 * k - 2) ** 2 + 9 * k)
        rows.append((k, float(printed.sum()), least[0], min(4 - 3 * math.sqrt(k), 4.0), least[1], corner))
    ks, sums, printed_least, law, true_least, closed = (
        [number(cell) for cell in column] for column in zip(*rows, strict=True)
    )
    first = next(int(k) for k, low in zip(ks, printed_least, strict=True) if low < 0)
    off = [abs(a - b) for a, b in zip(printed_least + true_least, law + closed, strict=True)]
    claims = [
        MeasuredClaim(
            "the entries of H add up to -2k + 4 (A.1, part 1)",
            f"so for k = 1 to {MOST_TASKS}; below 0 from k = 3 on",
            verdict(all(total == 4 - 2 * k for k, total in zip(ks, sums, strict=True))),
        ),
        MeasuredClaim(
            "H is not positive semi-definite (A.1)",
            f"its least eigenvalue is 4 - 3 sqrt(k): below 0 from k = {first} on",
            verdict(first <= 3),
        ),
        MeasuredClaim(
            "H is the Hessian of a sum of k losses with blocks [[4, -3], [-3, 4]]",
            "that has 4k in its corner, not 4",
            verdict(true_least == printed_least),
        ),
        MeasuredClaim(
            "the Hessian of that sum is alpha-strongly convex, alpha = 1 (the correction)",
            f"least eigenvalue 2k + 2 - sqrt((2k - 2)^2 + 9k): {min(true_least):.3g} to {max(true_least):.3g}",
            verdict(min(true_least) >= 1 - 1e-9 and max(off) < 1e-9),
        ),
    ]
    columns = ("k", "sum of entries", "printed", "4 - 3 sqrt(k)", "true", "closed form")
    return Finding("counterexample-a1", columns, rows, claims, {"tasks": MOST_TASKS})


def table_3(setting: DecomposableSetting, tick: Tick) -> Finding:
    """Table 3 for every (n, d), with both Hessians and two ways to draw b."""
    rows: list[Row] = []
    for n, d in SIZES:
        tick(f"table 3, n = {n}, d = {d}")
        for sampling in SAMPLINGS:
            for kind in HESSIANS:
                seen = sample(n, d, setting.samples, seed=0, sampling=sampling, kind=kind)
                numbers: list[float] = []
                for values in (seen.alpha, seen.beta, seen.near, seen.far, seen.gamma):
                    numbers += [float(values.mean()), float(values.std()) / math.sqrt(setting.samples)]
                extremes = (float(seen.alpha.min()), float(seen.beta.max()), float(seen.far.max()))
                rows.append((n, d, sampling, kind, *numbers, *extremes, *PAPER[n, d]))
    columns = (
        *("n", "d", "b", "Hessian", "alpha", "alpha +-", "beta", "beta +-", "M near", "M near +-", "M far", "M far +-"),
        *("gamma", "gamma +-", "least alpha", "largest beta", "largest M far"),
        *("paper alpha", "paper beta", "paper M", "paper gamma"),
    )

    def column(name: str, b: str = "gaussian", kind: str = "corrected") -> list[float]:
        place = columns.index(name)
        return [number(row[place]) for row in rows if row[2] == b and row[3] == kind]

    def over(name: str, paper: str, kind: str = "corrected") -> str:
        ratios = [a / b for a, b in zip(column(name, kind=kind), column(paper), strict=True)]
        return f"{min(ratios):.2g} to {max(ratios):.2g}"

    gammas = [abs(a / b - 1) for a, b in zip(column("gamma"), column("paper gamma"), strict=True)]
    wrong, right = _against_autograd()
    alphas = column("alpha") + column("alpha", b="probabilities")
    claims = [
        MeasuredClaim(
            "the B of Lemma B.4 gives the Hessian", f"off by {wrong:.2g} times its norm", verdict(wrong < 1e-9)
        ),
        MeasuredClaim("the corrected B does", f"off by {right:.0e}", verdict(right < 1e-9)),
        MeasuredClaim(
            "alpha = 0.00",
            f"{min(alphas):.2g} to {max(alphas):.2g} on average: the loss is not convex at a typical point",
            verdict(all(abs(alpha) < 0.005 for alpha in alphas)),
        ),
        MeasuredClaim(
            "gamma = 0.54 to 1.24; A, b and x drawn from N(0, 1)",
            f"{over('gamma', 'paper gamma')} times the paper's",
            verdict(max(gammas) < 0.25),
        ),
        MeasuredClaim(
            "beta = 148 to 2512",
            f"{over('beta', 'paper beta')} times the paper's; with the printed B "
            f"{over('beta', 'paper beta', 'printed')}, and the largest of {setting.samples} draws "
            f"{over('largest beta', 'paper beta', 'printed')}",
            verdict(all(abs(a / b - 1) < 0.25 for a, b in zip(column("beta"), column("paper beta"), strict=True))),
        ),
        MeasuredClaim(
            "M = 21 to 74",
            f"{over('M far', 'paper M')} times the paper's between two draws of x, {over('M near', 'paper M')} nearby; "
            f"with the printed B {over('M far', 'paper M', 'printed')}",
            verdict(all(abs(a / b - 1) < 0.25 for a, b in zip(column("M far"), column("paper M"), strict=True))),
        ),
    ]
    return Finding("table-3", columns, rows, claims, {"samples": setting.samples, "seed": 0})


def _against_autograd(count: int = 20) -> tuple[float, float]:
    """The median relative error of the printed and the corrected Hessian, n = 10, d = 5."""
    generator = torch.Generator().manual_seed(0)
    errors = []
    for _ in range(count):
        A, b, x = (torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in ((10, 5), (10,), (5,)))
        true = torch.autograd.functional.hessian(lambda x, A=A, b=b: l_exp(A, b, x), x)
        errors.append([float((h(A, b, x) - true).norm() / true.norm()) for h in (printed_hessian, corrected_hessian)])
    medians = torch.tensor(errors).median(0).values
    return float(medians[0]), float(medians[1])


SETTING = DecomposableSetting
EXPERIMENTS: dict[str, Callable[[DecomposableSetting, Tick], Finding]] = {
    "lemmas-4": lemmas,
    "counterexample-a1": counterexample_a1,
    "table-3": table_3,
}


def beginnings(name: str, setting: DecomposableSetting) -> int:
    """How often the experiment of that name tells `tick` of something new."""
    return {"lemmas-4": len(KINDS), "counterexample-a1": 1, "table-3": len(SIZES)}[name]
