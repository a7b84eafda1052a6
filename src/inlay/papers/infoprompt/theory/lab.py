"""InfoPrompt, appendix C and D, as experiments: numbers, and beside each claim what was measured."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from inlay.errors import InlayError
from inlay.papers.findings import Finding, Holds, MeasuredClaim, Row, Tick, number, verdict
from inlay.papers.infoprompt.theory import bounds
from inlay.papers.infoprompt.theory.newton import Path, Sparsified, iterations, newton, solve
from inlay.papers.infoprompt.theory.problem import SoftmaxProblem, draw
from inlay.papers.infoprompt.theory.sampling import leverage_scores, sparsify, spectral_error

R = 4.0  # the least that the lemmas allow
LEMMA_ROWS, LEMMA_SIZE, POINTS = (16, 64, 256), 4, 8
CONVERGENCE_ROWS, CONVERGENCE_SIZE = 8192, 16
# Draws for a column of A. The count that is proved is six times that; this one gives spectral errors about 0.3.
DRAWS = 64


@dataclass(frozen=True)
class SoftmaxSetting:
    """Sizes of the instances that are timed, seeds, and the error epsilon to be reached."""

    rows: tuple[int, ...] = (16384, 32768, 65536, 131072, 262144)
    size: int = 256
    seeds: int = 5
    epsilon: float = 1e-3

    def __post_init__(self) -> None:
        if not 0 < self.epsilon < 0.1:
            raise InlayError(f"epsilon = {self.epsilon}: theorem D.1 has it above 0 and below 0.1.")
        if self.size < 2 or self.seeds < 1:
            raise InlayError(f"d = {self.size}, {self.seeds} seeds: give d of 2 or more and 1 seed or more.")
        if len(self.rows) < 2 or min(self.rows) < 4 * self.size:
            raise InlayError(
                f"n = {list(self.rows)} with d = {self.size}: give two sizes or more, from 4 d = {4 * self.size} on."
            )


def lemmas(setting: SoftmaxSetting, tick: Tick) -> Finding:
    """Lemmas C.15 and C.16 on random instances with |A| = R: what is needed, what is proved, what is printed."""
    rows: list[Row] = []
    for n in LEMMA_ROWS:
        tick(f"bounds, n = {n}")
        for targets, heavy in (("probabilities", 0.0), ("probabilities", 30.0), ("gaussian", 0.0), ("gaussian", 30.0)):
            for seed in range(setting.seeds):
                problem = draw(n, LEMMA_SIZE, seed, norm=R, targets=targets, heavy=heavy)
                rows.append((targets, "uneven" if heavy else "even", n, seed, *_bounds(problem, seed)))
    columns = (
        "b",
        "rows of A",
        "n",
        "seed",
        "least eigenvalue of B",
        "|B|",
        "|B|, bound",
        "log10 R_0",
        "least eigenvalue / l, printed weights",
        "least eigenvalue / l, our weights",
        "least W^2 / B~",
        "largest W^2 / B~",
        "Lipschitz, near",
        "Lipschitz, far",
        "Lipschitz, bound",
        "log10 Lipschitz, printed",
    )
    found = Finding("lemmas-c15-c16", columns, rows, [], {"R": R, "d": LEMMA_SIZE, "points": POINTS})

    def all_of(name: str) -> list[float]:
        return [number(row[columns.index(name)]) for row in rows]

    weights, ours = (all_of(f"least eigenvalue / l, {whose} weights") for whose in ("printed", "our"))
    low, high = all_of("least W^2 / B~"), all_of("largest W^2 / B~")
    near, far = all_of("Lipschitz, near"), all_of("Lipschitz, far")
    change = [max(pair) for pair in zip(near, far, strict=True)]
    least, norms, bound = all_of("least eigenvalue of B"), all_of("|B|"), all_of("|B|, bound")
    lipschitz = all_of("Lipschitz, bound")
    claims = [
        MeasuredClaim(
            "H >= l I where w_i^2 >= 10 R_0 + l / sigma_min(A)^2 (C.15, part 1)",
            f"the least eigenvalue is {min(weights):.2g} l or more in {len(rows)} instances, {POINTS} points each",
            verdict(min(weights) >= 1),
        ),
        MeasuredClaim(
            "R_0 = exp(R^2 + log n) is of the size that is needed (C.15)",
            f"B goes down to {min(least):.2g}; R_0 is 10^{min(all_of('log10 R_0')):.0f} or more",
            verdict(min(least) < -0.01 * 10 ** min(all_of("log10 R_0"))),
        ),
        MeasuredClaim(
            "10 + 6 |b| + |<1, b>| / 2 in place of 10 R_0 is enough (ours)",
            f"|B| is {max(a / b for a, b in zip(norms, bound, strict=True)):.2g} of it at most; the least eigenvalue "
            f"of H is {min(ours):.3g} l or more",
            verdict(min(ours) >= 1 and all(a <= b for a, b in zip(norms, bound, strict=True))),
        ),
        MeasuredClaim(
            "0.99 B~ <= W^2 <= 1.01 B~ where w_i^2 >= 10^4 R_0 + l / sigma_min(A)^2 (C.15, part 2)",
            f"W^2 is 1 - {1 - min(low):.0e} to 1 + {max(high) - 1:.0e} of B~",
            verdict(min(low) >= 0.99 and max(high) <= 1.01),
        ),
        MeasuredClaim(
            "|H(x) - H(y)| <= n^4 exp(R^2 + log n) |x - y| (C.16)",
            f"{max(change):.2g} |x - y| at most; printed: 10^{min(all_of('log10 Lipschitz, printed')):.0f} or more",
            verdict(all(math.log10(a) <= b for a, b in zip(change, all_of("log10 Lipschitz, printed"), strict=True))),
        ),
        MeasuredClaim(
            "C.16 needs |A (x - y)|_inf < 0.01",
            f"the ratio is {max(far):.2g} at most far apart, {max(near):.2g} near",
            verdict(max(far) > max(lipschitz)),
        ),
        MeasuredClaim(
            "|A|^3 (31 + 13 |b| + 3 |<1, b>|) / 2 bounds it for all x, y (ours)",
            f"measured is {max(a / b for a, b in zip(change, lipschitz, strict=True)):.2g} of it at most",
            verdict(all(a <= b for a, b in zip(change, lipschitz, strict=True))),
        ),
    ]
    return replace(found, claims=claims)


def _bounds(problem: SoftmaxProblem, seed: int) -> tuple[float, ...]:
    """A row of `lemmas`, without its name."""
    A, b, n = problem.A, problem.b, problem.rows
    printed = bounds.Printed(n, R)
    points, others = (bounds.ball(POINTS, problem.size, R, 2 * seed + which) for which in (0, 1))
    unit = others / others.norm(dim=1, keepdim=True)
    spectra = [torch.linalg.eigvalsh(problem.curvature(x)) for x in points]
    least = 1.0

    def weighted(squared: float) -> SoftmaxProblem:
        return problem.with_weights(torch.full_like(b, squared**0.5))

    asked = weighted(printed.weight(A, least, 10))
    ours = weighted(bounds.enough_weight(A, b, least))
    tight = weighted(printed.weight(A, least, 1e4))
    ratios = [bounds.weight_ratio(tight, x) for x in points]
    bare = replace(problem, parts=("exp", "cent"))
    # 0.002 apart: |A (x - y)|_inf is below 0.01, as no row of A is longer than |A| = R = 4.
    near = max(bounds.hessian_change(bare, x, x + 0.002 * u) for x, u in zip(points, unit, strict=True))
    far = max(bounds.hessian_change(bare, x, y) for x, y in zip(points, others, strict=True))
    return (
        min(float(values[0]) for values in spectra),
        max(float(values.abs().max()) for values in spectra),
        bounds.curvature_bound(b),
        printed.R_0,
        min(bounds.least_eigenvalue(asked, x) for x in points) / least,
        min(bounds.least_eigenvalue(ours, x) for x in points) / least,
        min(low for low, _ in ratios),
        max(high for _, high in ratios),
        near,
        far,
        bounds.lipschitz_bound(A, b),
        printed.lipschitz,
    )


@dataclass(frozen=True)
class Case:
    """One way to run Algorithm 1, on one kind of instance, with the error to reach."""

    name: str
    instance: Callable[[int], SoftmaxProblem]
    start: Callable[[SoftmaxProblem, int], Tensor]
    how: Sparsified | None
    epsilon: float
    sign: int = -1


def theorem_weights(problem: SoftmaxProblem) -> SoftmaxProblem:
    """Weights as theorem D.1 wants them for a start at distance 1: `100 M + l / sigma^2`, `M |x_0 - x*| = 0.1 l`."""
    printed = bounds.Printed(problem.rows, R)
    least = 10 * 10**printed.R_0
    return problem.with_weights(torch.full_like(problem.b, printed.weight(problem.A, least, 100) ** 0.5))


def cases() -> list[Case]:
    """What is compared; n = 8192, d = 16."""
    n, d = CONVERGENCE_ROWS, CONVERGENCE_SIZE

    def plain(seed: int) -> SoftmaxProblem:
        return draw(n, d, seed, spread=1.0)

    def strong(seed: int) -> SoftmaxProblem:
        return draw(n, d, seed, spread=1.0, weight=10 / n)

    def literal(seed: int) -> SoftmaxProblem:
        return theorem_weights(draw(n, d, seed, norm=R))

    def uneven(seed: int) -> SoftmaxProblem:
        return draw(n, d, seed, spread=0.2, heavy=5.0)

    def zero(problem: SoftmaxProblem, seed: int) -> Tensor:
        return torch.zeros_like(problem.A[0])

    def one_away(problem: SoftmaxProblem, seed: int) -> Tensor:
        there = bounds.ball(1, problem.size, 1.0, seed)[0]
        return there / there.norm()

    drawn, once = Sparsified(rows=DRAWS * d), Sparsified(rows=DRAWS * d, anew="nothing")
    only_weights = replace(drawn, diagonal="weights")
    return [
        Case("exact", plain, zero, None, 1e-6),
        Case(f"sampled, {DRAWS} d rows", plain, zero, drawn, 1e-6),
        Case(f"sampled once, {DRAWS} d rows", plain, zero, once, 1e-6),
        Case("sampled, rows as proved", plain, zero, Sparsified(error=0.25), 1e-6),
        Case("D = W^2, w^2 = 1/n", plain, zero, only_weights, 1e-6),
        Case("D = W^2, w^2 = 10/n", strong, zero, only_weights, 1e-6),
        Case("D = W^2, weights of D.1", literal, one_away, only_weights, 1e-6),
        Case("uneven rows, by leverage", uneven, zero, drawn, 1e-6),
        Case("uneven rows, drawn evenly", uneven, zero, replace(drawn, scores="even"), 1e-6),
        Case("plus in line 8", plain, zero, None, 1e-6, sign=1),
    ]


def theorem_d1(setting: SoftmaxSetting, tick: Tick) -> Finding:
    """The error of Algorithm 1 at every step beside `exp(-t)`, which is what T of the theorem amounts to."""
    rows: list[Row] = []
    reached: dict[str, list[tuple[int | None, int]]] = {}
    solutions: dict[str, list[float]] = {}
    for case in cases():
        tick(case.name)
        for seed in range(setting.seeds):
            problem = case.instance(seed)
            solution, x0 = solve(problem), case.start(problem, seed)
            start = float((x0 - solution).norm())
            T = iterations(start, case.epsilon)
            path = _until_it_fails(problem, x0, T, case, seed)
            errors = path.errors(solution).tolist()
            rows += [(case.name, seed, t, error, start * math.exp(-t), path.drawn) for t, error in enumerate(errors)]
            reached.setdefault(case.name, []).append((path.reached(solution, case.epsilon), T))
            solutions.setdefault(case.name, []).append(float(solution.norm()))
    spectral = _spectral(setting)

    def in_time(name: str, words: str) -> MeasuredClaim:
        steps = reached[name]
        met = [step for step, _ in steps if step is not None]
        told = f"in {len(met)} of {len(steps)} runs"
        if met:
            told += (
                f", after {min(met)} to {max(met)} steps; T = {min(T for _, T in steps)} to {max(T for _, T in steps)}"
            )
        return MeasuredClaim(words, told, verdict(len(met) == len(steps)))

    even = f"|x_T - x*| <= 1e-6 with T = log(|x_0 - x*| / 1e-6) (D.1), w_i^2 = 1/n: {DRAWS} d rows"
    literal = "D = W^2, weights of D.1"
    claims = [
        in_time(f"sampled, {DRAWS} d rows", even),
        in_time(f"sampled once, {DRAWS} d rows", "the same, drawn once for all steps"),
        in_time("sampled, rows as proved", "the same, as many rows as matrix Bernstein asks for"),
        in_time(literal, "the same under the theorem's own conditions, D = W^2, |x_0 - x*| = 1"),
        MeasuredClaim(
            "under those conditions there is something to regress: |x*| > 1e-6",
            f"|x*| is {max(solutions[literal]):.0e} at most: x_0 = 0 is the answer",
            verdict(min(solutions[literal]) > 1e-6),
        ),
        in_time("D = W^2, w^2 = 10/n", "D = W^2 will do with w_i^2 = 10/n"),
        in_time("D = W^2, w^2 = 1/n", "D = W^2 will do with w_i^2 = 1/n"),
        in_time("uneven rows, by leverage", f"a column that one row in 200 has: {DRAWS} d rows by leverage scores"),
        in_time("uneven rows, drawn evenly", f"the same, {DRAWS} d rows drawn evenly"),
        in_time("plus in line 8", "x + H^-1 g, as line 8 is printed, finds the minimum"),
        MeasuredClaim(
            "A^T D~ A is within 0.25 of A^T D A, rows as proved",
            f"{spectral['rows as proved']:.2g} at most; with {DRAWS} d rows {spectral[f'{DRAWS} d rows']:.2g}",
            verdict(spectral["rows as proved"] <= 0.25),
        ),
    ]
    facts = {"n": CONVERGENCE_ROWS, "d": CONVERGENCE_SIZE, "seeds": setting.seeds, "epsilon": 1e-6, "draws": DRAWS}
    return Finding("theorem-d1", ("case", "seed", "t", "error", "exp(-t)", "rows drawn"), rows, claims, facts)


def _until_it_fails(problem: SoftmaxProblem, x0: Tensor, steps: int, case: Case, seed: int) -> Path:
    """The run as far as it gets: a Hessian that is not positive definite ends it."""
    how = replace(case.how, seed=seed) if case.how else None
    while True:
        try:
            return newton(problem, x0, steps, approximate=how, sign=case.sign)
        except InlayError:
            steps -= 1


def _spectral(setting: SoftmaxSetting) -> dict[str, float]:
    """The largest spectral error of a draw, for both counts of rows."""
    found: dict[str, float] = {}
    for seed in range(setting.seeds):
        problem = draw(CONVERGENCE_ROWS, CONVERGENCE_SIZE, seed, heavy=5.0)
        D = problem.local(torch.zeros_like(problem.A[0])).D
        scores = leverage_scores(problem.A, D)
        generator = torch.Generator().manual_seed(seed)
        for name, rows in (
            (f"{DRAWS} d rows", DRAWS * CONVERGENCE_SIZE),
            ("rows as proved", Sparsified(error=0.25).count(CONVERGENCE_SIZE)),
        ):
            error = spectral_error(problem.A, D, sparsify(problem.A, D, rows, scores, generator))
            found[name] = max(found.get(name, 0.0), error)
    return found


def newton_time(setting: SoftmaxSetting, tick: Tick) -> Finding:
    """Time to reach epsilon and the error after T steps, against n: exact Newton and Algorithm 1, two ways."""
    d, epsilon = setting.size, setting.epsilon
    ways = {
        "exact": None,
        "sampled": Sparsified(rows=DRAWS * d),
        "sampled, first scores": Sparsified(rows=DRAWS * d, anew="rows"),
    }
    rows: list[Row] = []
    took: dict[str, dict[int, list[float]]] = {name: {} for name in ways}
    needed: dict[str, list[tuple[int | None, int]]] = {name: [] for name in ways}
    for n in setting.rows:
        tick(f"Newton's method, n = {n}")
        problem = draw(n, d, 0, spread=2.0)
        x0 = torch.zeros_like(problem.A[0])
        solution, T = x0, 8
        for name, how in ways.items():
            path = newton(problem, x0, T, approximate=how)
            if name == "exact":
                # Eight steps go down to rounding, or in circles; the others run for the theorem's number.
                settled = problem.gradient(path.points[-1]).norm() < 1e-8 * problem.gradient(x0).norm()
                solution = path.points[-1] if bool(settled) else solve(problem)
                T = iterations(float((x0 - solution).norm()), epsilon)
            step = path.reached(solution, epsilon)
            needed[name].append((step, T))
            if step is not None:
                took[name][n] = [path.seconds[step], path.seconds[-1] / path.steps]
            errors = path.errors(solution).tolist()
            rows += [
                (n, name, t, seconds, error, path.drawn)
                for t, (seconds, error) in enumerate(zip(path.seconds, errors, strict=True))
            ]
    last = setting.rows[-1]
    claims = []
    for name in list(ways)[1:]:
        steps = [f"{step}" if step is not None else "none" for step, _ in needed[name]]
        claims.append(
            MeasuredClaim(
                f"|x_T - x*| <= {epsilon:g} with T = {needed[name][-1][1]} (D.1): {name}, {DRAWS} d rows",
                f"steps needed, n = {setting.rows[0]} to {last}: {', '.join(steps)}",
                verdict(all(step is not None and step <= T for step, T in needed[name])),
            )
        )
        for place, words in ((1, "a step"), (0, f"all steps to {epsilon:g}")):
            pairs = {n: took["exact"][n][place] / took[name][n][place] for n in took[name] if n in took["exact"]}
            claims.append(
                MeasuredClaim(
                    f"faster than exact Newton for n >> d, {words}: {name}",
                    ", ".join(f"n = {n // d} d: {ratio:.2f} x" for n, ratio in pairs.items()) or "never got there",
                    _faster(pairs.get(last, 0.0)),
                )
            )
    facts = {**vars(setting), "draws": DRAWS, "threads": torch.get_num_threads()}
    return Finding("newton-time", ("n", "way", "t", "seconds", "error", "rows drawn"), rows, claims, facts)


def _faster(ratio: float) -> Holds:
    """Times that differ by less than a fifth say nothing: the machine's noise is of that size."""
    return "cannot tell" if 1 / 1.2 < ratio < 1.2 else verdict(ratio > 1)


SETTING = SoftmaxSetting
EXPERIMENTS: dict[str, Callable[[SoftmaxSetting, Tick], Finding]] = {
    "lemmas-c15-c16": lemmas,
    "theorem-d1": theorem_d1,
    "newton-time": newton_time,
}


def beginnings(name: str, setting: SoftmaxSetting) -> int:
    """How often the experiment of that name tells `tick` of something new."""
    counts: dict[str, Sequence[object]] = {
        "lemmas-c15-c16": LEMMA_ROWS,
        "theorem-d1": cases(),
        "newton-time": setting.rows,
    }
    return len(counts[name])
