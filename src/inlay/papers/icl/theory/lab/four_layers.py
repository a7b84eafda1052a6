"""Figures 2(b) and 5: the four-layer transformer."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from inlay.papers.findings import Finding, Holds, MeasuredClaim, Row, Tick, verdict
from inlay.papers.icl.theory.deep import DeepTransformer, train_deep
from inlay.papers.icl.theory.descent import BATCH, EPOCH, SAMPLES, Batches, Trace, held_out
from inlay.papers.icl.theory.lab.one_layer import FIGURE_2_EPOCHS, figure_2_claims, of_one_start
from inlay.papers.icl.theory.setting import InContextSetting, Show
from inlay.papers.icl.theory.traces import COLUMNS, read_traces, trace_rows

FIGURE_2_HEADS = 8
FIGURE_5_HEADS, FIGURE_5_SECONDS = (1, 2, 4, 8, 16, 32, 64), 100.0
# On a CPU the printed 200 epochs of 40 batches of 256 would take most of a day: so many seconds instead.
FIGURE_2B_SECONDS_ON_CPU = 240.0


def deep_batch(setting: InContextSetting) -> int:
    """256 as printed; 16 on a CPU, where a step with 256 prompts takes several seconds."""
    return setting.batch or (16 if setting.on_cpu else BATCH)


def figure_2b(setting: InContextSetting, tick: Tick, show: Show) -> Finding:
    """Training and inference losses of four layers; ends at the steps or at the seconds, whichever come first."""
    heads = setting.heads[0] if setting.heads else FIGURE_2_HEADS
    seconds, steps, batch = setting.seconds, setting.steps, deep_batch(setting)
    if steps is None and setting.on_cpu:
        seconds = seconds or FIGURE_2B_SECONDS_ON_CPU
    elif steps is None:
        steps = FIGURE_2_EPOCHS * EPOCH
    name = "figure 2(b): four layers"
    tick(name)
    problem = setting.problem()
    trace = train_deep(
        DeepTransformer(problem, heads, seed=setting.seed),
        steps=steps,
        seconds=seconds,
        rate=setting.rate,
        batches=Batches(batch, seed=setting.seed),
        every=EPOCH if steps is None else max(1, min(EPOCH, steps // 10)),
        tests=held_out(problem, seed=setting.seed),
        watch=lambda kept: show(name, kept),
    )
    epoch = math.ceil(SAMPLES / batch)
    facts = {**setting.facts("2b"), "heads": heads, "steps": trace.steps[-1], "seconds": seconds, "batch": batch}
    facts |= {"steps in an epoch": epoch, "infimum": trace.infimum, "training seconds": trace.seconds[-1]}
    found = Finding("icl-figure-2b", COLUMNS, trace_rows(trace, epoch), [], facts)
    return replace(found, claims=figure_2b_claims(found))


def figure_2b_claims(found: Finding) -> list[MeasuredClaim]:
    (trace,) = read_traces(found).values()
    facts = found.facts
    return figure_2_claims(trace, f"four layers, batch {facts['batch']}", facts["steps in an epoch"])


def figure_5(setting: InContextSetting, tick: Tick, show: Show) -> Finding:
    """Final losses against H, and training losses, in a fixed wall-clock time each."""
    every_heads = setting.heads or FIGURE_5_HEADS
    seconds, batch = setting.seconds or FIGURE_5_SECONDS, deep_batch(setting)
    epoch = math.ceil(SAMPLES / batch)
    problem = setting.problem()
    rows: list[Row] = []
    for heads in every_heads:
        name = f"figure 5: four layers, H = {heads}"
        tick(name)

        def watch(kept: Trace, name: str = name) -> None:
            show(name, kept)

        trace = train_deep(
            DeepTransformer(problem, heads, seed=setting.seed),
            steps=setting.steps,
            seconds=seconds,
            rate=setting.rate,
            batches=Batches(batch, seed=setting.seed),
            every=10,
            tests=held_out(problem, seed=setting.seed),
            watch=watch,
        )
        rows += trace_rows(trace, epoch, heads)
    facts = {**setting.facts("5"), "heads": sorted(every_heads), "seconds": seconds, "batch": batch}
    facts |= {"infimum": problem.infimum(), "steps in an epoch": epoch, "training seconds": seconds * len(every_heads)}
    found = Finding("icl-figure-5", ("H", *COLUMNS), rows, [], facts)
    return replace(found, claims=figure_5_claims(found))


def figure_5_claims(found: Finding) -> list[MeasuredClaim]:
    """What section 4 says of figure 5."""
    runs = {int(heads): trace for (heads,), trace in read_traces(found, "H").items() if isinstance(heads, int)}
    seconds = found.facts["seconds"]
    ends = {heads: trace.loss[-1] for heads, trace in runs.items()}
    steps = {heads: trace.steps[-1] for heads, trace in runs.items()}
    order = sorted(runs)
    common = min(steps.values())
    at_common = {
        heads: trace.loss[max(at for at, step in enumerate(trace.steps) if step <= common)]
        for heads, trace in runs.items()
    }
    best = min(ends, key=lambda heads: ends[heads])
    # On a plateau near the start there is no order to speak of.
    fell = [trace.loss[-1] < 0.9 * trace.loss[0] for trace in runs.values()]
    took, batch = min(trace.seconds[-1] for trace in runs.values()), found.facts["batch"]
    # A step may end somewhat past the time, and the last one that is kept somewhat before it.
    short = [f"{took:.0f} of {FIGURE_5_SECONDS:.0f} s"] if took < 0.95 * FIGURE_5_SECONDS else []
    short += [f"batches of {batch} in place of {BATCH}"] if batch != BATCH else []
    claims = [
        MeasuredClaim(
            "four layers need no large H: the loss falls for every H",
            f"training loss at the end by H: {_listed(ends)}; at the start {runs[order[0]].loss[0]:.3g}",
            verdict(all(fell)) if any(fell) else "cannot tell",
        ),
        MeasuredClaim(
            "in a fixed time a small H ends lowest (H = 4 in the paper)",
            f"in {seconds:g} s lowest at H = {best}",
            verdict(best <= 8) if len(order) > 2 and any(fell) else "cannot tell",
        ),
        MeasuredClaim(
            "a larger H completes fewer iterations in that time",
            "steps by H: " + ", ".join(f"{heads}: {steps[heads]}" for heads in order),
            verdict(steps[order[-1]] < 0.9 * steps[order[0]]),
        ),
        MeasuredClaim(
            f"a large H (32, 64) descends more slowly by the step; after {common} steps each",
            f"training loss by H: {_listed(at_common)}",
            _slower(at_common) if any(fell) else "cannot tell",
        ),
    ]
    return [of_one_start(claim, ", ".join(short)) for claim in claims]


def _listed(losses: Mapping[int, float]) -> str:
    return ", ".join(f"{heads}: {losses[heads]:.3g}" for heads in sorted(losses))


def _slower(at_common: dict[int, float]) -> Holds:
    """Whether every large H is behind every small one, where there are both."""
    large = [loss for heads, loss in at_common.items() if heads >= 32]
    small = [loss for heads, loss in at_common.items() if heads <= 8]
    return verdict(min(large) > max(small)) if large and small else "cannot tell"
