"""Figure 3: time and parameters of one layer as the prefix grows (appendix E.2)."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from inlay.papers.ntk_attention.recipes import protocol as p
from inlay.papers.reproduce import kept
from inlay.papers.reproduce.predicates import Test, above, numbered
from inlay.papers.reproduce.recipe import PRINTED, READING, Claim, Recipe, RecipeScale, Verdict
from inlay.papers.reproduce.results import Key, ResultCell, Results

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from inlay.papers.reproduce.bench import Bench

EXACT = "Prefix Attention"
COUNTS = "parameters"
HEADS, SIZE = 8, 32
LONG = 4096  # from here on the prefix, and not the text or calling, takes the time


def panel_of(length: float) -> str:
    return f"ms, L = {length:g}"


def figure_3(bench: Bench, settings: Mapping[str, Any]) -> Results:
    """The numbers of one layer by its formula (they are the paper's x axis), and the time of a forward pass."""
    found = kept.benchmark("ntk_attention", "figure_3", "python benchmarks/ntk.py --cpu --figure3")
    rows = timed(**settings) if found is None else found[0]["rows"]
    cells: dict[Key, ResultCell] = {}
    for m in dict.fromkeys(row["m"] for row in rows):
        cells[COUNTS, EXACT, str(m)] = ResultCell((m * SIZE + 3 * SIZE**2,))
        cells[COUNTS, p.NTK, str(m)] = ResultCell((SIZE * SIZE + SIZE + 3 * SIZE**2,))
    for row in rows:
        cells[panel_of(row["L"]), EXACT, str(row["m"])] = ResultCell((row["exact_ms"],))
        cells[panel_of(row["L"]), p.NTK, str(row["m"])] = ResultCell((row["ntk_ms"],))
    return Results(cells, notes=() if found is None else (found[1],))


def timed(
    lengths: tuple[int, ...],
    prefixes: tuple[int, ...],
    least: float = 0.0,
    heads: int = HEADS,
    repeats: int | None = None,
) -> list[dict[str, float]]:
    """Milliseconds of a forward pass of one attention either way: the fastest within `least` seconds.

    With `repeats`, as the paper has it: the mean over so many, with what the layer projects: the text for both, and for
    the exact one the prefix as well (Algorithms 3 and 4).
    """
    import torch

    from inlay.attention import ntk_attention, prefix_attention, prefix_to_features

    rows = []
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Any:
        return torch.randn(*shape, generator=generator)

    with torch.no_grad():
        for length in lengths:
            q, k, v = (draw(1, heads, length, SIZE) for _ in range(3))
            for m in prefixes:
                keys, values = draw(heads, m, SIZE), draw(heads, m, SIZE)
                features = prefix_to_features(keys, values)
                if repeats is None:
                    exact = _fastest(partial(prefix_attention, q, k, v, keys, values), least)
                    ours = _fastest(partial(ntk_attention, q, k, v, *features), least)
                else:
                    weights = [draw(SIZE, SIZE) / SIZE**0.5 for _ in range(3)]
                    exact = _mean(partial(_exact_layer, q, keys, weights), repeats)
                    ours = _mean(partial(_ntk_layer, q, features, weights), repeats)
                rows.append({"L": length, "m": m, "exact_ms": 1e3 * exact, "ntk_ms": 1e3 * ours})
    return rows


def _exact_layer(text: Any, prefix: Any, weights: Any) -> Any:
    """Algorithm 3: the prefix goes through the frozen projections at every pass."""
    from inlay.attention import prefix_attention

    q, k, v = (text @ weight for weight in weights)
    return prefix_attention(q, k, v, prefix @ weights[1], prefix @ weights[2])


def _ntk_layer(text: Any, features: Any, weights: Any) -> Any:
    """Algorithm 4."""
    from inlay.attention import ntk_attention

    q, k, v = (text @ weight for weight in weights)
    return ntk_attention(q, k, v, *features)


def _mean(run: Callable[[], object], repeats: int) -> float:
    run()
    begin = time.perf_counter()
    for _ in range(repeats):
        run()
    return (time.perf_counter() - begin) / repeats


def _fastest(run: Callable[[], object], least: float) -> float:
    run()
    times: list[float] = []
    while sum(times) < least or len(times) < 3:
        begin = time.perf_counter()
        run()
        times.append(time.perf_counter() - begin)
    return min(times)


def order(row: str, low: float, high: float) -> Test:
    """How time grows with m where m is large: the slope of its logarithm lies in a range, at every L."""

    def test(results: Results) -> Verdict:
        from inlay.papers.findings import exponent

        slopes = []
        for panel in results.panels:
            long = [(m, cell) for m, cell in numbered(results, row, panel) if m >= LONG]
            if panel != COUNTS and len(long) > 1:
                slopes.append(exponent([m for m, _ in long], [cell.mean for _, cell in long]).slope)
        if not slopes:
            return Verdict.untested(f"the table has no times of {row} with m from {LONG} on")
        told = f"m^{min(slopes):.2f} to m^{max(slopes):.2f} from m = {LONG} on"
        return Verdict.of(low <= min(slopes) and max(slopes) <= high, told)

    return test


def close_to(m: int, factor: float) -> Test:
    """NTK-Attention takes about as long as a prefix of m, at every L."""

    def test(results: Results) -> Verdict:
        ratios = []
        for panel in results.panels:
            ours, exact = results.get(p.NTK, str(m), panel), results.get(EXACT, str(m), panel)
            if panel != COUNTS and ours is not None and exact is not None:
                ratios.append(ours.mean / exact.mean)
        if not ratios:
            return Verdict.untested(f"the table has no times at m = {m}")
        told = f"{min(ratios):.2f} to {max(ratios):.2f} times that of m = {m}"
        return Verdict.of(1 / factor <= min(ratios) and max(ratios) <= factor, told)

    return test


def count(row: str, m: int, value: int) -> Test:
    def test(results: Results) -> Verdict:
        cell = results.get(row, str(m), COUNTS)
        if cell is None:
            return Verdict.untested(f"the table has no count at m = {m}")
        return Verdict.of(cell.mean == value, f"{cell.mean:,.0f} against {value:,}")

    return test


def drawn(printed: Results | None, ours: Results) -> Figure:
    """Times against m, for every length of the text."""
    from inlay.papers.ntk_attention.charts.cost import cost

    rows = []
    for panel in ours.panels:
        exact = dict(numbered(ours, EXACT, panel))
        for m, cell in numbered(ours, p.NTK, panel) if panel != COUNTS else ():
            length = float(panel.rpartition(" ")[2])
            rows.append({"L": length, "m": m, "exact_ms": exact[m].mean, "ntk_ms": cell.mean})
    return cost(rows)


PLACES = {"lengths": (32, 64, 128, 256), "prefixes": tuple(2**i for i in range(17))}
FULL = {**PLACES, "least": 0.01}
RECIPES = (
    Recipe(
        name="ntk-attention/figure-3",
        title="Time and parameters of one layer as the prefix grows",
        printed=p.printed("figure-3"),
        scales={
            "paper": RecipeScale(
                "One head of 32 with its projections, those of the prefix too, L = 32 to 256, m = 1 to 65,536, the "
                "mean of 10,000 passes, on a processor. Not in the paper, ours: Z of full rank, fixed inputs.",
                "an hour on one core",
                settings={**PLACES, "heads": 1, "repeats": 10_000},
            ),
            "here": RecipeScale(
                "8 heads of 32, L = 32 to 256, m = 1 to 65,536, the fastest pass; keys and values of the prefix are "
                "given, so that exact attention is spared projecting them. What benchmarks/ntk.py measured is read.",
                "seconds; with --fresh 1 min on two cores",
                settings=FULL,
            ),
            "smoke": RecipeScale(
                "L = 32, m = 32 to 16,384.",
                "1 s",
                settings={"lengths": (32,), "prefixes": (32, 1024, 4096, 16384), "heads": 1, "repeats": 2},
            ),
        },
        run=figure_3,
        claims=(
            Claim("The time of exact prefix attention is quadratic in m", order(EXACT, 1.8, 2.2), "appendix E.2"),
            Claim("It is linear in m (ours)", order(EXACT, 0.8, 1.2), "Algorithm 1"),
            Claim("NTK-Attention's does not grow with m", order(p.NTK, -1.0, 0.1), "appendix E.2"),
            Claim(
                "NTK-Attention costs about as much as a prefix of 32: within a factor of 1.5",
                close_to(32, 1.5),
                READING,
            ),
            Claim(
                "A prefix of 1,024 has more parameters than NTK-Attention",
                above(EXACT, p.NTK, columns=["1024"], panels=[COUNTS]),
                "appendix E.2",
            ),
            Claim("A prefix of 1,024 has 35,840 parameters", count(EXACT, 1024, 35840), PRINTED),
            Claim("NTK-Attention has 4,128", count(p.NTK, 1024, 4128), PRINTED),
        ),
        draw=drawn,
        notes=("The paper prints one pair of counts and draws the rest.",),
    ),
)
