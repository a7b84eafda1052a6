"""Figures 2(a) and 4: the one-layer transformer trained at printed size; and a run with settings of one's own."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch

from inlay.theory.findings import Claim, Finding, Row, Tick, verdict
from inlay.theory.icl.bounds import assumptions
from inlay.theory.icl.descent import BATCH, EPOCH, SAMPLES, Trace, Watch, descend, held_out, train
from inlay.theory.icl.model import OneLayer
from inlay.theory.icl.problem import Problem
from inlay.theory.icl.setting import Setting, Show, likeness, span

FIGURE_2_HEADS, FIGURE_2_EPOCHS = 64, 200
FIGURE_4_HEADS, FIGURE_4_EPOCHS = (1, 5, 10, 20, 30, 40, 50, 150, 400), 600
# On a CPU the nine trainings stop at 200 epochs, of both kinds of tokens: ten minutes of two cores.
FIGURE_4_EPOCHS_ON_CPU = 200
TOKENS = {"Gaussian": False, "norm 1": True}


def _watching(show: Show, name: str) -> Watch:
    return lambda trace: show(name, trace)


def figure_2a(setting: Setting, tick: Tick, show: Show) -> Finding:
    """Training and inference losses of one layer: Gaussian tokens as printed, in closed form and by samples; norm 1."""
    heads = setting.heads[0] if setting.heads else FIGURE_2_HEADS
    steps = setting.steps or FIGURE_2_EPOCHS * EPOCH
    every = max(1, min(EPOCH, steps // 10))
    samples = max(SAMPLES, setting.batch or BATCH)
    runs: dict[tuple[str, str], Trace] = {}
    rows: list[Row] = []
    for tokens, way in (("Gaussian", "closed form"), ("Gaussian", "samples"), ("norm 1", "closed form")):
        name = f"figure 2(a): {tokens} tokens, {way}"
        tick(name)
        problem = setting.problem(TOKENS[tokens])
        model = OneLayer(problem, heads, seed=setting.seed, dtype=torch.float32)
        batch = (setting.batch or BATCH) if way == "samples" else None
        trace = train(
            model,
            steps,
            rate=setting.rate,
            batch=batch,
            samples=samples,
            seed=setting.seed,
            every=every,
            tests=held_out(problem),
            watch=_watching(show, name),
        )
        runs[tokens, way] = trace
        rows += kept_rows(trace, tokens, way)
    claims: list[Claim] = []
    for (tokens, way), trace in runs.items():
        claims += figure_2_claims(trace, f"{tokens} tokens, {way}")
    exact, sampled = runs["Gaussian", "closed form"], runs["Gaussian", "samples"]
    off = abs(sampled.gap[-1] / exact.gap[-1] - 1)
    claims.append(
        Claim(
            "training on the population loss (9) or on samples is the same",
            f"gap at the end {exact.gap[-1]:.3g} in closed form, {sampled.gap[-1]:.3g} with batches of "
            f"{setting.batch or BATCH} from {samples} samples",
            verdict(off < 0.25),
        )
    )
    facts = {**setting.facts(), "heads": heads, "steps": steps, "infimum": exact.infimum}
    return Finding("icl-figure-2a", ("tokens", "training", *COLUMNS), rows, claims, facts)


COLUMNS = ("step", "epoch", "loss", "gap", "in-domain", "out-of-domain", "seconds")


def kept_rows(trace: Trace, *name: str | int) -> list[Row]:
    return [
        (
            *name,
            step,
            step / EPOCH,
            trace.loss[at],
            trace.gap[at],
            trace.inference["in-domain"][at],
            trace.inference["out-of-domain"][at],
            trace.seconds[at],
        )
        for at, step in enumerate(trace.steps)
    ]


def figure_2_claims(trace: Trace, name: str) -> list[Claim]:
    """What section 4 says of figure 2, for one training."""
    inside, outside = trace.inference["in-domain"], trace.inference["out-of-domain"]
    alike = [likeness(trace.gap, curve) for curve in (inside, outside)]
    fell = [curve[-1] / curve[0] for curve in (trace.loss, inside, outside)]
    above = sum(out > within for out, within in zip(outside, inside, strict=True))
    return [
        Claim(
            f"the three curves descend together; {name}",
            f"to {fell[0]:.3g}, {fell[1]:.3g} and {fell[2]:.3g} of their start (no prediction linear in the labels has "
            f"a training loss below {trace.infimum / trace.loss[0]:.3g}); correlation with the gap's logarithm "
            f"{span(alike, '.3f')}",
            verdict(max(fell) < 0.9 and min(alike) > 0.9),
        ),
        Claim(
            f"the out-of-domain loss is above the in-domain one; {name}",
            f"at {above} of {len(inside)} kept steps, {outside[-1] / inside[-1]:.2g} times it at the end",
            verdict(above == len(inside)),
        ),
        Claim(
            f"the output converges to y* (Theorem 2); {name}",
            f"1/K |yhat - y*|^2 from {inside[0]:.3g} to {inside[-1]:.3g} after {trace.steps[-1]} steps",
            verdict(fell[1] < 0.05),
        ),
    ]


def figure_4(setting: Setting, tick: Tick, show: Show) -> Finding:
    """The population loss for each number of heads, with Gaussian tokens as printed and with tokens of norm 1."""
    every_heads = setting.heads or FIGURE_4_HEADS
    steps = setting.steps or EPOCH * (FIGURE_4_EPOCHS_ON_CPU if setting.on_cpu else FIGURE_4_EPOCHS)
    rows: list[Row] = []
    claims: list[Claim] = []
    for tokens, unit in TOKENS.items():
        problem = setting.problem(unit)
        ends: dict[int, Trace] = {}
        for heads in every_heads:
            name = f"figure 4: {tokens} tokens, H = {heads}"
            tick(name)
            model = OneLayer(problem, heads, seed=setting.seed, dtype=torch.float32)
            # Every fourth of an epoch: instability that heals within an epoch is seen too.
            every = max(1, min(EPOCH // 4, steps // 10))
            trace = train(model, steps, rate=setting.rate, every=every, watch=_watching(show, name))
            ends[heads] = trace
            rows += [
                (tokens, heads, step, step / EPOCH, trace.loss[at], trace.gap[at])
                for at, step in enumerate(trace.steps)
            ]
        claims += figure_4_claims(ends, setting.N, tokens)
    facts = {**setting.facts(), "heads": list(every_heads), "steps": steps, "infimum": problem.infimum()}
    return Finding("icl-figure-4", ("tokens", "H", "step", "epoch", "loss", "gap"), rows, claims, facts)


def largest_rise(gap: Sequence[float]) -> float:
    """The largest factor from one kept gap to the next, while above a millionth of the start: not yet rounding."""
    return max((after / before for before, after in pairwise(gap) if before > 1e-6 * gap[0]), default=1.0)


def figure_4_claims(ends: dict[int, Trace], N: int, tokens: str) -> list[Claim]:
    """What section 4 says of figure 4. A curve has stopped where its last tenth takes off less than 1 %."""
    last = {heads: trace.gap[-1] / trace.gap[0] for heads, trace in ends.items()}
    late = {heads: trace.gap[-1] / trace.gap[int(0.9 * (len(trace.gap) - 1))] for heads, trace in ends.items()}
    few, enough = [heads for heads in ends if heads < N], [heads for heads in ends if heads >= N]

    def told(of: list[int]) -> str:
        return ", ".join(f"H = {heads}: {last[heads]:.2g} (last tenth x {late[heads]:.3f})" for heads in of)

    claims = [
        Claim(
            f"H < N = {N}: the loss stops descending far from its minimum; {tokens} tokens",
            f"gap left of the start: {told(few)}",
            verdict(all(late[heads] > 0.99 and last[heads] > 0.05 for heads in few)) if few else "cannot tell",
        ),
        Claim(
            f"H >= N = {N}: the loss keeps descending; {tokens} tokens",
            f"gap left of the start: {told(enough)}",
            verdict(all(late[heads] < 0.99 for heads in enough)) if enough else "cannot tell",
        ),
    ]
    if 400 in ends:
        rises = {heads: largest_rise(ends[heads].gap) for heads in enough}
        claims.append(
            Claim(
                f"H = 400 is unstable and diverges; {tokens} tokens",
                f"largest rise of the gap within a quarter epoch: x {rises.pop(400):.3f}"
                + (f"; others at H >= N: {span(list(rises.values()), '.3f')}" if rises else "")
                + f"; gap left {last[400]:.2g}, least of all: {'yes' if last[400] == min(last.values()) else 'no'}",
                verdict(largest_rise(ends[400].gap) > 1.5 or last[400] > 1),
            )
        )
    return claims


def free(problem: Problem, setting: Setting, tick: Tick, show: Show, about: str = "") -> Finding:
    """One training with settings of one's own, on any problem; `about` says whose features f is."""
    heads = setting.heads[0] if setting.heads else FIGURE_2_HEADS
    steps = setting.steps or 2000
    name = f"N = {problem.N}, K = {problem.K}, d = {problem.d}, m = {problem.m}, tau = {problem.tau:g}, H = {heads}"
    name = f"{about}: {name}" if about else name
    tick(name)
    dtype = torch.float64 if setting.optimiser == "gd" else torch.float32
    model = OneLayer(problem, heads, seed=setting.seed, dtype=dtype)
    told = assumptions(model)
    tests, watch = held_out(problem), _watching(show, name)
    if setting.optimiser == "gd":
        trace = descend(model, steps, watch=watch)
        rows: list[Row] = [
            (step, step / EPOCH, trace.loss[at], trace.gap[at], None, None, trace.seconds[at])
            for at, step in enumerate(trace.steps)
        ]
    else:
        every = max(1, min(EPOCH, steps // 50))
        samples = max(SAMPLES, setting.batch or 0)
        trace = train(
            model,
            steps,
            rate=setting.rate,
            batch=setting.batch,
            samples=samples,
            every=every,
            tests=tests,
            watch=watch,
        )
        rows = kept_rows(trace)
    claims = [
        *told,
        Claim(
            "the loss descends towards its infimum",
            f"gap from {trace.gap[0]:.4g} to {trace.gap[-1]:.4g} in {steps} steps; infimum {trace.infimum:.4g}",
            verdict(trace.gap[-1] < trace.gap[0]),
        ),
    ]
    facts = {**setting.facts(), "heads": heads, "steps": steps, "infimum": trace.infimum}
    facts |= {"m": problem.m, "d": problem.d, "K": problem.K, "name": name}
    return Finding("icl-run", COLUMNS, rows, claims, facts)
