"""Gradient descent as experiments: Theorem B.2 and Proposition B.3."""

from __future__ import annotations

import math
from collections.abc import Sequence

from inlay.papers.findings import Finding, MeasuredClaim, Row, Tick, number, verdict
from inlay.papers.ntk_attention.theory.descent import PrefixConstants
from inlay.papers.ntk_attention.theory.kernel import spectrum
from inlay.papers.ntk_attention.theory.setting import (
    EXAMPLES,
    SIZE,
    PrefixSetting,
    both_kernels,
    descents,
    falls,
    geometric,
    kept_steps,
    listed,
    span,
)

EPSILON = 0.01


def theorem_b2(setting: PrefixSetting, tick: Tick) -> Finding:
    """Gradient descent at a usable step, with the decay of Lemma M.4 at every step, for two kinds of data."""
    rows: list[Row] = []
    claims: list[MeasuredClaim] = []
    facts = setting.facts
    for inputs, words in (("unit", "unit inputs"), ("axes", "inputs 0.25 e_i")):
        runs = descents(setting, inputs, tick)
        above: dict[str, list[int]] = {"printed": [], "true": []}
        reached: list[float] = []
        off: dict[str, list[float]] = {"printed": [], "true": []}
        for seed, descent in runs:
            kernels = dict(zip(("printed", "true"), both_kernels(descent.start), strict=True))
            bounds, lines = {}, {}
            for name, found in kernels.items():
                least = float(spectrum(found)[0])
                above[name] += descent.above(least)[:1].tolist()
                bounds[name], lines[name] = descent.decay(least), descent.linearised(found)
                if descent.start.width == setting.widths[-1]:
                    early = slice(1, min(100, setting.steps) + 1)
                    ratio = (lines[name][early] / descent.losses[early]).log10().abs()
                    off[name].append(10 ** float(ratio.mean()))
            n, d = descent.start.x.shape
            rate = descent.start.width * descent.step * float(spectrum(kernels["printed"])[0])
            enough = math.ceil(2 / rate * math.log(n * d / EPSILON))
            if enough <= setting.steps:
                reached.append(float(descent.losses[enough]) / 2)
            for t in kept_steps(setting.steps):
                parts = (descent.losses, bounds["printed"], bounds["true"], lines["printed"], lines["true"])
                rows.append((inputs, descent.start.width, seed, t, *(float(part[t]) for part in parts)))
        for name in ("printed", "true"):
            first = f"; first at step {min(above[name])}" if above[name] else ""
            claims.append(
                MeasuredClaim(
                    f"{words}: |F(t) - Y|^2 <= (1 - m eta lambda / 2)^t |F(0) - Y|^2 (M.4), the {name} kernel's lambda",
                    f"above it at some step in {len(above[name])} of {len(runs)} descents{first}",
                    verdict(not above[name]),
                )
            )
        claims.append(
            MeasuredClaim(
                f"{words}: L <= {EPSILON} after 2 / (m eta lambda) log(n d / {EPSILON}) steps (B.2), lambda printed",
                f"in {sum(loss <= EPSILON for loss in reached)} of the {len(reached)} descents that were that long"
                + (f"; the largest L is {max(reached):.2g}" if reached else ""),
                verdict(max(reached) <= EPSILON) if reached else "cannot tell",
            )
        )
        told = ", ".join(f"{name} kernel {span(off[name], '.3g')}" for name in ("true", "printed"))
        claims.append(
            MeasuredClaim(
                f"{words}: the loss follows the kernel at the start, first 100 steps, m = {setting.widths[-1]}",
                f"off by a factor (geometric mean): {told}",
                verdict(max(off["true"]) < 1.5),
            )
        )
        last = runs[-1][1]
        printed = both_kernels(last.start)[0]
        n, d = last.start.x.shape
        asked = PrefixConstants(n, d, last.start.width, float(spectrum(printed)[0]))
        claims.append(
            MeasuredClaim(
                f"{words}: eta = lambda / (m n^2 d^2 exp(16 B)), m = {asked.width} (M.2)",
                f"10^{asked.step:.0f}; usable: {last.step:.1e}",
                verdict(asked.step > math.log10(last.step) - 3),
            )
        )
        claims.append(
            MeasuredClaim(
                f"{words}: m >= n^2 d^2 exp(30 B) sqrt(log(n d / delta)) / lambda^2 (M.2)",
                f"10^{asked.needed_width:.0f} tokens",
                verdict(asked.needed_width < 9),
            )
        )
        facts = {**facts, f"B, {inputs}": asked.B, f"log10 of the theorem's step, {inputs}": asked.step}
    columns = ("inputs", "m", "seed", "t", "loss", "decay, printed", "decay, true", "line, printed", "line, true")
    return Finding("theorem-b2", columns, rows, claims, facts)


def proposition_b3(setting: PrefixSetting, tick: Tick) -> Finding:
    """The loss against m and compute `C = N D T = (m d) n T`, beside `n d exp(-eta lambda C / (n d))`."""
    rows: list[Row] = []
    late: list[float] = []
    alpha = EXAMPLES * SIZE
    for seed, descent in descents(setting, "unit", tick):
        width = descent.start.width
        least = float(spectrum(both_kernels(descent.start)[0])[0])
        for t in kept_steps(setting.steps):
            compute = width * SIZE * EXAMPLES * t
            law = alpha * math.exp(-descent.step * least * compute / alpha)
            rows.append((width, seed, t, compute, float(descent.losses[t]) / 2, law))
        if width >= 256:
            # The slope of log L over the second half, where the law is a straight line too; rounding ends a descent.
            half = int(min(setting.steps, max(1, (descent.losses > 1e-20 * descent.losses[0]).sum() - 1)))
            fall = math.log(float(descent.losses[half // 2] / descent.losses[half])) / (half - half // 2)
            late.append(fall / (descent.step * least * width))
    middle = {m: _nearest(rows, m, setting.steps // 10) for m in setting.widths}
    ratio = [math.log10(number(row[4]) / number(row[5])) for m in middle for row in middle[m]]
    same_steps = {m: geometric([number(row[4]) for row in middle[m]]) for m in setting.widths}
    budget = setting.widths[0] * alpha * setting.steps
    same_compute = {
        m: geometric([number(row[4]) for row in _nearest(rows, m, budget // (m * alpha))]) for m in setting.widths
    }
    best = min(same_compute, key=lambda m: same_compute[m])
    claims = [
        MeasuredClaim(
            "L is about n d exp(-eta lambda C / (n d)) (B.3)",
            f"after {middle[setting.widths[0]][0][2]} steps 10^{min(ratio):.1f} to 10^{max(ratio):.1f} times that",
            verdict(max(abs(value) for value in ratio) < 1),
        ),
        MeasuredClaim(
            "L falls exponentially with C at one m, at the rate eta lambda / (n d)",
            f"late rate {span(late, '.2f')} times that (m >= 256)" if late else "no m of 256 or more",
            verdict(all(0.8 < rate < 1.25 for rate in late)) if late else "cannot tell",
        ),
        MeasuredClaim(
            f"more compute by a longer prefix: L falls with m, T = {middle[setting.widths[0]][0][2]}",
            listed(same_steps),
            verdict(falls(list(same_steps.values()))),
        ),
        MeasuredClaim(
            f"more parameters pay at the same compute, C = {budget:.2g}",
            listed(same_compute) + f"; least at m = {best}",
            verdict(best == setting.widths[-1]),
        ),
    ]
    columns = ("m", "seed", "T", "C", "L", "law")
    return Finding("proposition-b3", columns, rows, claims, {**setting.facts, "budget": budget})


def _nearest(rows: Sequence[Row], width: int, steps: int) -> list[Row]:
    """The rows of one m at the kept step that is nearest."""
    of = [row for row in rows if row[0] == width]
    near = min((number(row[2]) for row in of), key=lambda t: abs(t - steps))
    return [row for row in of if row[2] == near]
