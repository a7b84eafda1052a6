"""The kernel as experiments: printed and true, the start (Lemma M.6), and drift (Lemma B.1)."""

from __future__ import annotations

import math
from statistics import median

import torch

from inlay.papers.findings import Finding, MeasuredClaim, Row, Tick, exponent, number, verdict
from inlay.papers.ntk_attention.theory.descent import PrefixConstants, decomposition, usable_step
from inlay.papers.ntk_attention.theory.drift import random_drift, worst_drift
from inlay.papers.ntk_attention.theory.kernel import apart, printed_kernel, printed_limit, spectrum, true_limit
from inlay.papers.ntk_attention.theory.network import draw, expected_start
from inlay.papers.ntk_attention.theory.setting import (
    EXAMPLES,
    SIZE,
    PrefixSetting,
    both_kernels,
    column,
    descents,
    span,
)

# |F(0) - Y|_F needs no kernel, so it is followed further, and with more draws, than anything else.
START_WIDTHS, START_DRAWS = tuple(4**power for power in range(2, 9)), 60
LONG = 4096
RADII = (1e-4, 1e-3, 1e-2, 1e-1, 1.0)
# Ascent differentiates the kernel: longer prefixes are left to gradient descent.
LONGEST_FOR_ASCENT = 1024
# Small enough that the terms of second order do not count, as in the theorem.
SMALL_STEP = 0.01
ROUNDING = 1e-12  # eigenvalues this small beside the largest cannot be told from 0


def kernel(setting: PrefixSetting, tick: Tick) -> Finding:
    """The printed and the true kernel as m grows, their limits, and the terms of Lemma L.1 at the start."""
    rows: list[Row] = []
    for width in setting.widths:
        tick(f"kernels, m = {width}")
        for seed in range(setting.seeds):
            problem = draw(width, EXAMPLES, SIZE, seed)
            printed, true = both_kernels(problem)
            step = usable_step(true, width, SMALL_STEP)
            terms = decomposition(problem, step)
            r = problem.residual
            unit = width * step * float(spectrum(printed)[0]) * terms.before
            rows.append(
                (
                    width,
                    seed,
                    *(float(spectrum(found)[place]) for found in (printed, true) for place in (0, -1)),
                    apart(true, printed),
                    apart(printed_limit(problem.x), printed),
                    apart(true_limit(problem.x), true),
                    terms.c_0 / unit,
                    terms.c_12 / unit,
                    terms.c_11 / (width * step * float(r @ printed @ r)),
                )
            )
    columns = (
        "m",
        "seed",
        "printed lambda_min",
        "printed lambda_max",
        "true lambda_min",
        "true lambda_max",
        "apart",
        "printed from its limit",
        "true from its limit",
        "C_0 / (m eta lambda |F - Y|^2)",
        "C_12 / (m eta lambda |F - Y|^2)",
        "C_11 / (m eta r H r)",
    )
    limits = [draw(1, EXAMPLES, SIZE, seed).x for seed in range(setting.seeds)]
    gap = [apart(true_limit(x), printed_limit(x)) for x in limits]
    claims = _kernel_claims(setting, rows, gap)
    return Finding("kernel", columns, rows, claims, {**setting.facts, "limit gap": gap})


def _kernel_claims(setting: PrefixSetting, rows: list[Row], gap: list[float]) -> list[MeasuredClaim]:
    """What the rows of `kernel` say of the paper's claims; `gap`: how far the two limits are apart."""
    last = [row for row in rows if row[0] == setting.widths[-1]]

    def least(place: int) -> float:
        return min(abs(number(row[place])) for row in last)

    ratio = [number(row[5]) / number(row[3]) for row in last]
    fits = [exponent(column(rows, 0), column(rows, place)) for place in (7, 8)]
    return [
        MeasuredClaim(
            "H is the kernel of the network (Definition K.1)",
            f"off by {span(column(last, 6), '.0%')} at m = {setting.widths[-1]}; {span(gap, '.0%')} in the limit",
            verdict(max(gap) < 0.05),
        ),
        MeasuredClaim(
            "lambda_min(H*) > 0 (assumed)",
            f"{min(column(rows, 2)):.2g} or more over all m; the true kernel's {min(column(rows, 4)):.2g}",
            verdict(all(number(row[2]) > ROUNDING * number(row[3]) for row in rows)),
        ),
        MeasuredClaim(
            "what H leaves out is minor: |C_0| <= 0.1 m eta lambda |F - Y|^2 (L.4)",
            f"{least(9):.3g} or more times m eta lambda |F - Y|^2 at m = {setting.widths[-1]}",
            verdict(max(abs(number(row[9])) for row in last) <= 0.1),
        ),
        MeasuredClaim(
            "|C_12| <= 0.1 m eta lambda |F - Y|^2 (L.5)",
            f"{least(10):.3g} or more at m = {setting.widths[-1]}",
            verdict(max(abs(number(row[10])) for row in last) <= 0.1),
        ),
        MeasuredClaim(
            "C_11 <= -1.6 m eta r H r (L.2)",
            f"{span(column(last, 11), '.3g')} at m = {setting.widths[-1]}",
            verdict(max(number(row[11]) for row in last) <= -1.6),
        ),
        MeasuredClaim(
            "both kernels tend to the limits in closed form (ours)",
            f"printed m^{fits[0]}, true m^{fits[1]}",
            verdict(all(fit.high < 0 for fit in fits)),
        ),
        MeasuredClaim(
            "1 / (m lambda_max(H)) is a stable step: 2 or less for the true kernel",
            f"m eta lambda_max(true) = {span(ratio, '.3g')}",
            verdict(max(ratio) <= 2),
        ),
    ]


def lemma_m6(setting: PrefixSetting, tick: Tick) -> Finding:
    """`|F(0) - Y|_F` as m grows, beside its closed form and the lemma's bound."""
    tick("start")
    rows: list[Row] = []
    for width in START_WIDTHS:
        for seed in range(START_DRAWS):
            problem = draw(width, EXAMPLES, SIZE, seed)
            norm = float(problem.residual.norm())
            rows.append((width, seed, norm, math.sqrt(expected_start(problem.x, width) + EXAMPLES)))
    fit = exponent(column(rows, 0), column(rows, 2))
    squares = [(number(row[2]) / number(row[3])) ** 2 for row in rows if number(row[0]) >= LONG]
    mean = sum(squares) / len(squares)
    error = 2 * torch.tensor(squares).std().item() / math.sqrt(len(squares))
    allowed = math.sqrt(EXAMPLES * SIZE)
    first, last = (median(column([row for row in rows if row[0] == m], 2)) for m in (START_WIDTHS[0], START_WIDTHS[-1]))
    claims = [
        MeasuredClaim(
            f"|F(0) - Y|_F <= O(sqrt(n d)) (M.6); sqrt(n d) = {allowed:.3g}",
            f"m^{fit}: {first:.3g} at m = {START_WIDTHS[0]}, {last:.3g} at m = {START_WIDTHS[-1]}",
            verdict(fit.low <= 0),
        ),
        MeasuredClaim(
            f"|F(0)|_F^2 is m sum_i (d + 4 |x_i|^2) exp(|x_i|^2) on average (ours), m from {LONG} on",
            f"{mean:.2f} +- {error:.2f} times that",
            verdict(abs(mean - 1) <= error),
        ),
    ]
    facts = {"n": EXAMPLES, "d": SIZE, "draws": START_DRAWS, "sqrt(n d)": allowed, "exponent": vars(fit)}
    return Finding("lemma-m6", ("m", "seed", "|F(0) - Y|_F", "expected"), rows, claims, facts)


def lemma_b1(setting: PrefixSetting, tick: Tick) -> Finding:
    """How far the printed kernel moves within R, at random and at worst, and how far descent goes."""
    rows: list[Row] = []
    bound = PrefixConstants(EXAMPLES, SIZE, 1, 1.0)
    widths = [width for width in setting.widths if width <= LONGEST_FOR_ASCENT] or [setting.widths[0]]
    for width in widths:
        tick(f"kernel drift, m = {width}")
        for seed in range(setting.seeds):
            problem = draw(width, EXAMPLES, SIZE, seed)
            for radius in RADII:
                for where, change in (
                    ("random", random_drift(problem, radius)),
                    ("worst", worst_drift(problem, radius)),
                ):
                    rows.append((where, width, seed, radius, None, change, bound.drift(radius), None))
    kept: dict[int, list[float]] = {}
    for seed, descent in descents(setting, "unit", tick):
        start, x, a = descent.start, descent.start.x, descent.start.a
        printed, after = printed_kernel(start.W, x, a), printed_kernel(descent.W, x, a)
        least = float(spectrum(after)[0] / spectrum(printed)[0])
        kept.setdefault(start.width, []).append(least)
        most, middle = float(descent.moved.max()), float(descent.moved.median())
        change = float((after - printed).norm())
        rows.append(("descent", start.width, seed, most, middle, change, bound.drift(most), least))
    worst = [row for row in rows if row[0] == "worst"]
    small = [row for row in worst if number(row[3]) <= 0.1]
    fit = exponent(column(small, 3), column(small, 5))
    ended = [row for row in rows if row[0] == "descent"]
    at_end = [row for row in ended if row[1] == setting.widths[-1]]
    path = exponent(column(ended, 1), column(ended, 4))
    edge = max(column([row for row in worst if row[3] == 0.01], 5))
    low = {m: min(found) for m, found in kept.items()}
    claims = [
        MeasuredClaim(
            "|H - H*|_F <= 8 R sqrt(n d) exp(22 B), R <= 0.01 (B.1)",
            f"{edge:.2g} at worst at R = 0.01; the bound is 10^{bound.drift(0.01):.0f}",
            verdict(math.log10(edge) <= bound.drift(0.01)),
        ),
        MeasuredClaim("the change is of order R, up to R = 0.1", f"R^{fit}", verdict(abs(fit.slope - 1) < 0.1)),
        MeasuredClaim(
            "gradient descent stays within R < 0.01 (M.1, K.3)",
            f"m = {setting.widths[-1]}: a column moves {span(column(at_end, 3), '.2g')} at most, "
            f"{span(column(at_end, 4), '.2g')} in the middle",
            verdict(max(column(ended, 3)) < 0.01),
        ),
        MeasuredClaim(
            "a column moves less in a longer prefix, of order 1/m (D of M.1 with M.6)",
            f"the middle one m^{path}",
            verdict(path.low <= -1 <= path.high),
        ),
        MeasuredClaim(
            f"lambda_min(H(t)) >= lambda / 2 (K.4), at the end of descent, m = {setting.widths[-1]}",
            ", ".join(f"m = {m}: {found:.2f}" for m, found in low.items()) + " times lambda at the least",
            verdict(low[setting.widths[-1]] >= 0.5),
        ),
    ]
    columns = ("where", "m", "seed", "R", "middle", "|H - H*|_F", "log10 of the bound", "lambda_min kept")
    return Finding("lemma-b1", columns, rows, claims, {**setting.facts, "B": bound.B})
