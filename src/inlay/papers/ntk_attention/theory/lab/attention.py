"""Theorem 3.1 as an experiment: every feature map against exact prefix attention."""

from __future__ import annotations

import math
from collections.abc import Sequence

from inlay.attention import Elu, Favor, FeatureMap, Paper, Taylor
from inlay.papers.findings import Finding, MeasuredClaim, Row, Tick, exponent, number, verdict
from inlay.papers.ntk_attention.theory.approximation import instance, taylor_features
from inlay.papers.ntk_attention.theory.setting import PrefixSetting, falls, geometric

# Where the error no longer depends on which tokens a short prefix happens to have.
LONG = 256
PREFIXES = tuple(4**power for power in range(1, 9))
HEAD, TEXT = 4, 16
ORDERS = (0, 1, 2, 3, 4, 6, 8)


def maps() -> list[tuple[str, FeatureMap, int | None]]:
    """Every feature map with its name and its number of features (None: the map's own)."""
    named: list[tuple[str, FeatureMap, int | None]] = [
        ("paper, r = d", Paper(), HEAD),
        ("elu, r = d", Elu(), HEAD),
        ("elu, r = 2d", Elu(), 2 * HEAD),
        ("elu, r = 4d", Elu(), 4 * HEAD),
    ]
    named += [(f"favor, r = {times or ''}d", Favor(), (times or 1) * HEAD) for times in (None, 16, 256)]
    return named + [(f"taylor, order {order}", Taylor(order=order), None) for order in ORDERS]


def theorem_31(setting: PrefixSetting, tick: Tick, prefixes: Sequence[int] | None = None) -> Finding:
    """The error of NTK-Attention against exact prefix attention as m grows; the order that an error of 1/m needs.

    `prefixes` are the lengths m, two of `LONG` or more among them; None: `PREFIXES`.
    """
    rows: list[Row] = []
    for width in PREFIXES if prefixes is None else prefixes:
        tick(f"error, prefix of {width}")
        for seed in range(setting.seeds):
            found = instance(TEXT, width, HEAD, 1.0, seed)
            for name, phi, features in maps():
                r = features or phi.dimension(HEAD)
                rows.append(("error", name, width, seed, HEAD, 1.0, "1/sqrt(d)", r, None, found.error(phi, features)))
        for scale, power in (("1/sqrt(d)", -0.5), ("1/d", -1.0)):
            size, bound = math.ceil(math.log(width)), math.log(width) ** 0.25
            order = max(
                instance(TEXT, width, size, bound, seed, size**power).order_for(1 / width)
                for seed in range(setting.seeds)
            )
            r = taylor_features(size, order)
            rows.append(("needed", "taylor", width, None, size, bound, scale, r, order, 1 / width))
    claims = []
    ends = {name: _typical(rows, name) for name, _, _ in maps()}
    for kinds, words in (
        (("paper, r = d", "elu, r = d", "elu, r = 2d"), "with the phi of section 3.2"),
        (("favor, r = 16d",), "with random features, r = 16 d"),
        (("taylor, order 2", "taylor, order 4"), "with Taylor features of a fixed order"),
    ):
        fits = {}
        for name in kinds:
            long = [row for row in rows if row[1] == name and number(row[2]) >= LONG]
            fits[name] = exponent([number(row[2]) for row in long], [number(row[9]) for row in long])
        told = "; ".join(f"{name}: {ends[name]:.2g}, m^{fit.slope:.2f}" for name, fit in fits.items())
        claims.append(
            MeasuredClaim(
                f"error <= 1/poly(m) {words} (3.1), d = {HEAD}, entries <= 1, m from {LONG} on",
                told,
                verdict(all(fit.high < -0.5 for fit in fits.values())),
            )
        )
    uniform = ends["taylor, order 0"]
    claims.append(
        MeasuredClaim(
            "the phi of section 3.2 sees more of the prefix than its mean (Taylor order 0)",
            f"errors: paper {ends['paper, r = d']:.2g}, elu {ends['elu, r = d']:.2g}, order 0 {uniform:.2g}",
            verdict(max(ends["paper, r = d"], ends["elu, r = d"]) < 0.8 * uniform),
        )
    )
    errors = [ends[f"taylor, order {order}"] for order in ORDERS if order % 2 == 0]
    claims.append(
        MeasuredClaim(
            "a larger r brings a smaller error (section 3.1): Taylor orders 0, 2, 4, 6, 8",
            ", ".join(f"{error:.1e}" for error in errors),
            verdict(falls(errors)),
        )
    )
    for scale in ("1/sqrt(d)", "1/d"):
        need = [row for row in rows if row[0] == "needed" and row[6] == scale]
        last = need[-1]
        claims.append(
            MeasuredClaim(
                f"1/m with fewer features than tokens, scale {scale}, d = log m, entries <= (log m)^(1/4)",
                f"m = {last[2]}: order {last[8]}, r = {last[7]} features",
                verdict(number(last[7]) < number(last[2])),
            )
        )
    columns = ("kind", "map", "m", "seed", "d", "bound", "scale", "r", "order", "error")
    return Finding("theorem-3-1", columns, rows, claims, {"L": TEXT, "d": HEAD, "seeds": setting.seeds})


def _typical(rows: Sequence[Row], name: str) -> float:
    """The error of a map with the longest prefix, over the seeds."""
    longest = max(number(row[2]) for row in rows)
    return geometric([number(row[9]) for row in rows if row[1] == name and row[2] == longest])
