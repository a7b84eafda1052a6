"""What needs no training at printed size: figure 3, Theorems 1 and 2 where they say something, Proposition 1."""

from __future__ import annotations

import math
from itertools import pairwise

import torch

from inlay.papers.findings import Finding, MeasuredClaim, Row, Tick, verdict
from inlay.papers.icl.theory import ridge
from inlay.papers.icl.theory.bounds import BoundConstants, assumptions, constants, needed_steps, zeta_0
from inlay.papers.icl.theory.descent import TESTS, descend
from inlay.papers.icl.theory.model import OneLayer, quadratic
from inlay.papers.icl.theory.problem import InContextProblem
from inlay.papers.icl.theory.proposition import attention_at_start, ranks
from inlay.papers.icl.theory.setting import InContextSetting, Show, span

FIGURE_3_N, FIGURE_3_M, DRAWS = tuple(range(50, 151, 5)), 100, 10
# (N, K, H, beta) with unit-norm tokens, m = N, tau = 1: sizes at which the theorems' constants say something.
INSTANCES = ((2, 4, 2, 1.0), (2, 4, 4, 3.0), (3, 5, 8, 3.0), (4, 6, 16, 3.0))
SMALL_D, SMALL_TAU = 5, 1.0
# A gap below this is rounding in float64, and is not held against the bound.
ROUNDING = 1e-25
EPSILON, DELTA, BALL = 0.05, 0.1, 2.0
PROMPTS = 10_000
RANK_DRAWS, GAUSSIAN_D = 200, 100


def figure_3(setting: InContextSetting, tick: Tick, show: Show) -> Finding:
    """`1/K |y* - y_best|^2` against N, and beside it the errors of both against the labels."""
    m = FIGURE_3_M if setting.m is None else setting.m
    sizes = [N for N in FIGURE_3_N if N < setting.K and setting.m is None] or _around(m, setting.K)
    rows: list[Row] = []
    tick("figure 3")
    for N in sizes:
        for draw in range(DRAWS):
            problem = InContextProblem.sample(N, setting.K, setting.d, m, setting.tau, setting.seed * DRAWS + draw)
            moments, test = problem.moments(), problem.prompts(TESTS, 1_000 + setting.seed)
            star, best = ridge.star(problem), ridge.best(problem)
            apart = quadratic(star - best, moments.S)
            drawn = (test.shown @ (star - best)).square().mean()
            lam = [ridge.solution(problem, test.shown, strength) for strength in (m * setting.tau, N * setting.tau)]
            # Errors for the tokens whose labels are not given, beyond the labels' own noise m tau.
            errors = [float((test.shown @ a - test.y)[:, N:].square().mean()) for a in (star, best)]
            exact = [2 * float(moments.loss(a)) * setting.K / (setting.K - N) - m * setting.tau for a in (star, best)]
            shrunk = float(lam[0].norm() / lam[1].norm())
            rows.append((N, draw, float(apart), float(drawn), *exact, *errors, shrunk))
    columns = (
        "N",
        "draw",
        "gap",
        "gap, 200 prompts",
        "excess error, y*",
        "excess error, y_best",
        "error, y*",
        "error, y_best",
        "|lambda| ratio",
    )
    gaps = {N: _mean(rows, N, 2) for N in sizes}
    least = min(gaps, key=lambda N: gaps[N])
    shrink = {N: _mean(rows, N, 8) for N in sizes}
    wins = [(_mean(rows, N, 4), _mean(rows, N, 5)) for N in sizes if m != N]
    below, above = [N for N in sizes if m > N], [N for N in sizes if m < N]
    claims = [
        MeasuredClaim(
            f"the gap between y* and y_best is smallest at N = m = {m} (figure 3)",
            f"least at N = {least}: {gaps[least]:.2g}; {gaps[sizes[0]]:.2g} at N = {sizes[0]}, {gaps[sizes[-1]]:.2g} "
            f"at N = {sizes[-1]}. At N = m (20) and (25) are the same equation, so it is 0 by construction",
            verdict(least == m) if m in sizes else "cannot tell",
        ),
        MeasuredClaim(
            "the closer N is to m, the better the transformer's prediction is",
            f"the error of y* beyond the noise: {_mean(rows, sizes[0], 4):.3g} at N = {sizes[0]}, "
            f"{_mean(rows, m, 4):.3g} at N = {m}, {_mean(rows, sizes[-1], 4):.3g} at N = {sizes[-1]}"
            if m in sizes
            else "N = m is not among the sizes",
            verdict(min(sizes, key=lambda N: _mean(rows, N, 4)) == m) if m in sizes else "cannot tell",
        ),
        MeasuredClaim(
            "y_best is the best prediction one could hope for (23)",
            f"y* has the smaller error in {sum(star < best for star, best in wins)} of {len(wins)} sizes N != m",
            verdict(all(best <= star for star, best in wins)),
        ),
        MeasuredClaim(
            "N < m: the transformer underfits, its |lambda| is smaller",
            f"|lambda of (20)| / |lambda of (25)|: {span([shrink[N] for N in below])}" if below else "no N < m",
            verdict(all(shrink[N] < 1 for N in below)) if below else "cannot tell",
        ),
        MeasuredClaim(
            "N > m: the transformer overfits, it captures noise",
            f"|lambda| ratio {span([shrink[N] for N in above])}, but y* has the smaller error in "
            f"{sum(_mean(rows, N, 4) < _mean(rows, N, 5) for N in above)} of {len(above)} sizes"
            if above
            else "no N > m",
            verdict(all(_mean(rows, N, 4) > _mean(rows, N, 5) for N in above)) if above else "cannot tell",
        ),
    ]
    return Finding("icl-figure-3", columns, rows, claims, {**setting.facts("3"), "m": m, "draws": DRAWS})


def _around(m: int, K: int) -> list[int]:
    return sorted({min(K - 1, max(1, round(m * share))) for share in (0.5, 0.6, 0.7, 0.8, 0.9, 1, 1.1, 1.2, 1.35, 1.5)})


def _mean(rows: list[Row], N: int, place: int) -> float:
    values = [float(row[place]) for row in rows if row[0] == N]  # type: ignore[arg-type]
    return sum(values) / len(values)


def small_model(N: int, K: int, heads: int, beta: float, seed: int) -> OneLayer:
    """An instance of `INSTANCES`."""
    problem = InContextProblem.sample(N, K, d=SMALL_D, m=N, tau=SMALL_TAU, seed=seed, unit=True)
    return OneLayer(problem, heads, beta=beta, seed=seed)


def _used(model: OneLayer, beta: float, found: BoundConstants) -> dict[str, object]:
    """For the record: the instance, and how it was trained."""
    problem = model.problem
    sizes = {"N": problem.N, "K": problem.K, "d": problem.d, "m": problem.m, "tau": problem.tau, "unit": True}
    return {**sizes, "H": model.heads, "beta": beta, "optimiser": "gd", "eta_Q": found.eta_Q, "eta_w": found.eta_w}


def theorem_1(setting: InContextSetting, tick: Tick, show: Show) -> Finding:
    """Gradient descent at the theorem's step sizes, with (18) at every step; the constants at printed size."""
    steps = setting.steps or 2000
    rows: list[Row] = []
    claims: list[MeasuredClaim] = []
    facts: dict[str, object] = {**setting.facts("theorem-1"), "steps": steps, "rounding": ROUNDING}
    for N, K, heads, beta in INSTANCES:
        tick(f"theorem 1, N = {N}")
        model = small_model(N, K, heads, beta, setting.seed)
        found = constants(model)
        held = [claim.claim for claim in assumptions(model, B=BALL) if claim.holds != "yes"]
        trace = descend(model, steps, eta_Q=found.eta_Q, eta_w=found.eta_w)
        bound = found.bound(torch.arange(steps + 1, dtype=torch.float64))
        over = [t for t in range(steps + 1) if trace.gap[t] > float(bound[t]) * (1 + 1e-9) + ROUNDING]
        name = f"N = {N}, K = {K}, H = {heads}"
        rows += [(name, t, trace.gap[t], float(bound[t])) for t in _kept(steps)]
        used = _used(model, beta, found)
        facts[name] = {**used, **vars(found), "L": found.L, "L as printed": found.L_printed, "rate": found.rate}
        claims.append(
            MeasuredClaim(
                f"(18): the gap is below (1 - eta_w zeta_0 / (2K))^t of its start; {name}",
                f"above it, beyond rounding ({ROUNDING:g}), at {len(over)} of {steps + 1} steps; at the end "
                f"{trace.gap[-1]:.2g}{' (rounding)' if trace.gap[-1] < ROUNDING else ''}, the bound "
                f"{float(bound[-1]):.2g}; assumptions " + ("all hold" if not held else f"broken: {', '.join(held)}"),
                verdict(not over),
            )
        )
    claims += _constants_at_printed_size(setting.seed)
    tick("theorem 1, rate against H")
    claims.append(_rate_against_heads(setting))
    return Finding("icl-theorem-1", ("instance", "step", "gap", "bound (18)"), rows, claims, facts)


def _kept(steps: int) -> list[int]:
    return sorted({round(steps * share / 400) for share in range(401)})


def _constants_at_printed_size(seed: int) -> list[MeasuredClaim]:
    """What Theorem 1 has to say of figure 2's model."""
    claims = []
    setting = InContextSetting(seed=seed)
    for unit, words in ((False, "Gaussian tokens, as in section 4"), (True, "tokens of norm 1, as in section 2")):
        model = OneLayer(setting.problem(unit), 64, seed=seed)
        zeta, norm = zeta_0(model), math.sqrt(float(torch.linalg.eigvalsh(model.S)[-1]))
        # The largest rate that any gamma gives: see `constants`.
        rate = zeta / (2 * math.sqrt(2) * 64 * norm**2)
        half = math.log(2) / rate if rate > 0 else math.inf
        claims.append(
            MeasuredClaim(
                f"(18) says something at N = {setting.N}, H = 64: {words}",
                f"zeta_0 = {zeta:.2g}; (18) halves in {half:.2g} steps at best",
                verdict(half < 1e5),
            )
        )
    return claims


def _rate_against_heads(setting: InContextSetting) -> MeasuredClaim:
    """`zeta_0 / (2 sqrt(2) H |Zbar|^2)`, the best rate, as H grows: means over draws at N = 2."""
    rates = {}
    for heads in (2, 4, 8, 16, 64, 256):
        models = [small_model(2, 4, heads, 1.0, 20 * setting.seed + draw) for draw in range(20)]
        norms = [float(torch.linalg.eigvalsh(model.S)[-1]) for model in models]
        found = [zeta_0(model) / (2 * math.sqrt(2) * heads * norm) for model, norm in zip(models, norms, strict=True)]
        rates[heads] = sum(found) / len(found)
    falls = all(after <= before for before, after in zip(list(rates.values()), list(rates.values())[1:], strict=False))
    return MeasuredClaim(
        "a larger H makes the guaranteed rate slower (after (18))",
        "best rate by H: "
        + ", ".join(f"{heads}: {rate:.2g}" for heads, rate in rates.items())
        + "; zeta_0 grows with H too",
        verdict(falls),
    )


def theorem_2(setting: InContextSetting, tick: Tick, show: Show) -> Finding:
    """After T steps (21), how many of many prompts are within epsilon of y* (22)."""
    rows: list[Row] = []
    claims = []
    facts: dict[str, object] = {**setting.facts("theorem-2"), "epsilon": EPSILON, "delta": DELTA, "B": BALL}
    for N, K, heads, beta in INSTANCES[:3]:
        tick(f"theorem 2, N = {N}")
        model = small_model(N, K, heads, beta, setting.seed)
        problem, found = model.problem, constants(model)
        name = f"N = {N}, K = {K}, H = {heads}"
        T = needed_steps(problem, found, EPSILON, DELTA, BALL)
        facts[name] = {**_used(model, beta, found), "T": T}
        lam = torch.randn(
            PROMPTS, problem.m, generator=torch.Generator().manual_seed(setting.seed), dtype=torch.float64
        )
        prompts = problem.prompts(PROMPTS, setting.seed + 1, lam=BALL * lam / lam.norm(dim=1, keepdim=True))
        star = prompts.shown @ ridge.star(problem)
        enough, share = None, 0.0
        for begun, ended in _chunks(T, 100):
            with torch.no_grad():
                errors = (model(prompts.shown) - star).square().sum(1) / (2 * K)
            share = float((errors <= EPSILON).double().mean())
            rows.append((name, begun, float(errors.quantile(1 - DELTA)), float(errors.max()), share, T))
            if enough is None and share >= 1 - DELTA:
                enough = begun
            if ended > begun:
                descend(model, ended - begun, eta_Q=found.eta_Q, eta_w=found.eta_w)
        claims.append(
            MeasuredClaim(
                f"after T = {T} steps (21), error <= {EPSILON}, probability {1 - DELTA:g}, |lambda| = {BALL:g}; {name}",
                f"{share:.2%} of {PROMPTS} prompts; {1 - DELTA:.0%} of them from about step {enough} on",
                verdict(share >= 1 - DELTA),
            )
        )
    columns = ("instance", "step", f"{1 - DELTA:g} quantile of the error", "largest error", "share within epsilon", "T")
    return Finding("icl-theorem-2", columns, rows, claims, {**facts, "prompts": PROMPTS})


def _chunks(total: int, most: int) -> list[tuple[int, int]]:
    """(begin, end) of about `most` parts of 0..total, and last (total, total)."""
    ends = sorted({round(total * part / most) for part in range(most + 1)})
    return [*pairwise(ends), (total, total)]


def proposition_1(setting: InContextSetting, tick: Tick, show: Show) -> Finding:
    """The rank of `C_k` over random starts as H passes N: as assumed, with a token twice, and at printed scale."""
    N, K, d = 6, 10, 5
    tick("proposition 1")
    draws = torch.Generator().manual_seed(setting.seed)
    unit = torch.randn(K, d, generator=draws, dtype=torch.float64)
    unit = unit / unit.norm(dim=1, keepdim=True)
    twice = unit.clone()
    twice[1] = twice[0]
    gaussian = f"Gaussian tokens, d = {GAUSSIAN_D}"
    cases = {"unit tokens": unit, gaussian: None, "a token twice": twice}
    rows: list[Row] = []
    full: dict[tuple[str, int], float] = {}
    for name, given in cases.items():
        for heads in (1, 3, 5, 6, 8, 12, 24):
            found, least = [], []
            for seed in range(setting.seed * RANK_DRAWS, (setting.seed + 1) * RANK_DRAWS):
                tokens = given if given is not None else InContextProblem.sample(N, K, GAUSSIAN_D, 1, seed=seed).tokens
                C = attention_at_start(tokens, N, heads, seed)
                found.append(float((ranks(C) == N).double().mean()))
                values = torch.linalg.svdvals(C)
                least.append(float(values[:, N - 1].min()) if heads >= N else 0.0)
            full[name, heads] = sum(found) / len(found)
            rows.append((name, heads, N, full[name, heads], sorted(least)[len(least) // 2]))
    enough, few = (6, 8, 12, 24), (1, 3, 5)
    claims = [
        MeasuredClaim(
            f"H >= N = {N}: full row rank with probability 1 (Proposition 1)",
            f"{span([full['unit tokens', heads] for heads in enough], '.2%')} of the C_k in {RANK_DRAWS} starts",
            verdict(all(full["unit tokens", heads] == 1 for heads in enough)),
        ),
        MeasuredClaim(
            f"so too with Gaussian tokens in d = {GAUSSIAN_D}, in floating point",
            ", ".join(f"H = {heads}: {full[gaussian, heads]:.0%}" for heads in enough)
            + "; scores of size d make attention one-hot, and tokens that no head looks at count 0",
            verdict(all(full[gaussian, heads] == 1 for heads in enough)),
        ),
        MeasuredClaim(
            "H < N: never",
            f"{span([full[name, heads] for name in cases for heads in few], '.2%')} of the C_k",
            verdict(all(full[name, heads] == 0 for name in cases for heads in few)),
        ),
        MeasuredClaim(
            "a token twice in the prompt: never, whatever H",
            f"{span([full['a token twice', heads] for heads in enough], '.2%')} of the C_k",
            verdict(all(full["a token twice", heads] == 0 for heads in enough)),
        ),
    ]
    columns = ("tokens", "H", "N", "share with full rank", "least singular value, median of starts")
    facts = {**setting.facts("proposition-1"), "N": N, "K": K, "d": d, "d of Gaussian tokens": GAUSSIAN_D}
    return Finding("icl-proposition-1", columns, rows, claims, {**facts, "draws": RANK_DRAWS})
