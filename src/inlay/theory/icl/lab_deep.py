"""Figures 2(b) and 5: the four-layer transformer."""

from __future__ import annotations

from inlay.theory.findings import Claim, Finding, Holds, Row, Tick, verdict
from inlay.theory.icl.deep import DeepTransformer, train_deep
from inlay.theory.icl.descent import EPOCH, Trace, held_out
from inlay.theory.icl.lab_training import COLUMNS, FIGURE_2_EPOCHS, figure_2_claims, kept_rows
from inlay.theory.icl.setting import Setting, Show

FIGURE_2_HEADS = 8
FIGURE_5_HEADS, FIGURE_5_SECONDS = (1, 2, 4, 8, 16, 32, 64), 100.0
# On a CPU the printed 200 epochs of 40 batches of 256 would take most of a day: so many seconds instead.
FIGURE_2B_SECONDS_ON_CPU = 240.0


def figure_2b(setting: Setting, tick: Tick, show: Show) -> Finding:
    """Training and inference losses of four layers."""
    heads = setting.heads[0] if setting.heads else FIGURE_2_HEADS
    seconds, steps = setting.seconds, setting.steps
    if steps is None and seconds is None:
        seconds, steps = (FIGURE_2B_SECONDS_ON_CPU, None) if setting.on_cpu else (None, FIGURE_2_EPOCHS * EPOCH)
    name = "figure 2(b): four layers"
    tick(name)
    problem = setting.problem()
    trace = train_deep(
        DeepTransformer(problem, heads, seed=setting.seed),
        steps=steps,
        seconds=seconds,
        rate=setting.rate,
        batch=setting.deep_batch,
        every=EPOCH if steps is None else max(1, min(EPOCH, steps // 10)),
        tests=held_out(problem),
        seed=setting.seed,
        watch=lambda kept: show(name, kept),
    )
    claims = figure_2_claims(trace, f"four layers, batch {setting.deep_batch}")
    facts = {**setting.facts(), "heads": heads, "steps": trace.steps[-1], "seconds": trace.seconds[-1]}
    facts |= {"batch": setting.deep_batch, "infimum": trace.infimum}
    return Finding("icl-figure-2b", COLUMNS, kept_rows(trace), claims, facts)


def figure_5(setting: Setting, tick: Tick, show: Show) -> Finding:
    """Final losses against H, and training losses, in a fixed wall-clock time each."""
    every_heads = setting.heads or FIGURE_5_HEADS
    seconds = setting.seconds or FIGURE_5_SECONDS
    problem = setting.problem()
    runs: dict[int, Trace] = {}
    rows: list[Row] = []
    for heads in every_heads:
        name = f"figure 5: four layers, H = {heads}"
        tick(name)

        def watch(kept: Trace, name: str = name) -> None:
            show(name, kept)

        runs[heads] = train_deep(
            DeepTransformer(problem, heads, seed=setting.seed),
            steps=setting.steps,
            seconds=seconds,
            rate=setting.rate,
            batch=setting.deep_batch,
            every=10,
            tests=held_out(problem),
            seed=setting.seed,
            watch=watch,
        )
        rows += kept_rows(runs[heads], heads)
    ends = {heads: trace.loss[-1] for heads, trace in runs.items()}
    steps = {heads: trace.steps[-1] for heads, trace in runs.items()}
    order = sorted(every_heads)
    common = min(steps.values())
    at_common = {
        heads: trace.loss[max(at for at, step in enumerate(trace.steps) if step <= common)]
        for heads, trace in runs.items()
    }
    best = min(ends, key=lambda heads: ends[heads])
    # On a plateau near the start there is no order to speak of.
    fell = [trace.loss[-1] < 0.9 * trace.loss[0] for trace in runs.values()]
    listed = ", ".join(f"{heads}: {ends[heads]:.3g}" for heads in order)
    claims = [
        Claim(
            "four layers need no large H: the loss falls for every H",
            f"training loss at the end by H: {listed}; at the start {runs[order[0]].loss[0]:.3g}",
            verdict(all(fell)) if any(fell) else "cannot tell",
        ),
        Claim(
            f"in {seconds:g} s a small H ends lowest (H = 4 in the paper)",
            f"lowest at H = {best}",
            verdict(best <= 8) if len(order) > 2 and any(fell) else "cannot tell",
        ),
        Claim(
            "a larger H completes fewer iterations in that time",
            "steps by H: " + ", ".join(f"{heads}: {steps[heads]}" for heads in order),
            verdict(steps[order[-1]] < 0.9 * steps[order[0]]),
        ),
        Claim(
            f"a large H (32, 64) descends more slowly by the step; after {common} steps each",
            "training loss by H: " + ", ".join(f"{heads}: {at_common[heads]:.3g}" for heads in order),
            _slower(at_common) if any(fell) else "cannot tell",
        ),
    ]
    facts = {**setting.facts(), "heads": order, "seconds": seconds, "batch": setting.deep_batch}
    facts |= {"infimum": problem.infimum()}
    return Finding("icl-figure-5", ("H", *COLUMNS), rows, claims, facts)


def _slower(at_common: dict[int, float]) -> Holds:
    """Whether every large H is behind every small one, where there are both."""
    large = [loss for heads, loss in at_common.items() if heads >= 32]
    small = [loss for heads, loss in at_common.items() if heads <= 8]
    return verdict(min(large) > max(small)) if large and small else "cannot tell"
