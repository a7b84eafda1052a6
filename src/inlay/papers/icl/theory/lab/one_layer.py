"""Figures 2(a) and 4: the one-layer transformer trained at printed size; and a run with settings of one's own."""

from __future__ import annotations

from dataclasses import replace

import torch

from inlay.papers.findings import Finding, MeasuredClaim, Row, Tick, number, verdict
from inlay.papers.icl.theory.bounds import assumptions
from inlay.papers.icl.theory.descent import (
    BATCH,
    EPOCH,
    SAMPLES,
    Batches,
    Trace,
    Watch,
    descend,
    held_out,
    train,
    usable_steps,
)
from inlay.papers.icl.theory.model import OneLayer
from inlay.papers.icl.theory.problem import InContextProblem
from inlay.papers.icl.theory.setting import InContextSetting, Show, likeness, span
from inlay.papers.icl.theory.traces import COLUMNS, ROUNDING, read_traces, rises, trace_rows

FIGURE_2_HEADS, FIGURE_2_EPOCHS = 64, 200
FIGURE_4_HEADS, FIGURE_4_EPOCHS = (1, 5, 10, 20, 30, 40, 50, 150, 400), 600
# On a CPU the nine trainings stop at 200 epochs, of both kinds of tokens: ten minutes of two cores.
FIGURE_4_EPOCHS_ON_CPU = 200
# At the printed rate nothing is unstable: so many times that rate, for so many steps, shows where it begins.
FASTER, FASTER_STEPS = 100, 240
LOWEST = 1.5e-3  # what counts as the 10^-3 of figure 4's axis
# Figure 2: what counts as falling equally far, and as near y*: a share of the start, in-domain and out-of-domain.
APART, NEAR = 3.0, 0.05
TOKENS = {"Gaussian": False, "norm 1": True}
EXACT, BATCHES, ONE_BATCH = "closed form", "samples", "samples, one batch"
FIGURE_2A = (("Gaussian", EXACT), ("Gaussian", BATCHES), ("Gaussian", ONE_BATCH), ("norm 1", EXACT))


def _watching(show: Show, name: str) -> Watch:
    return lambda trace: show(name, trace)


def figure_2a(setting: InContextSetting, tick: Tick, show: Show) -> Finding:
    """Training and inference losses of one layer: Gaussian tokens as printed, in closed form and by samples; norm 1."""
    heads = setting.heads[0] if setting.heads else FIGURE_2_HEADS
    steps = setting.steps or FIGURE_2_EPOCHS * EPOCH
    batch = setting.batch or BATCH
    rows: list[Row] = []
    took = 0.0
    for tokens, way in FIGURE_2A:
        name = f"figure 2(a): {tokens} tokens, {way}"
        tick(name)
        problem = setting.problem(TOKENS[tokens])
        size = {EXACT: None, BATCHES: batch, ONE_BATCH: SAMPLES}[way]
        trace = train(
            OneLayer(problem, heads, seed=setting.seed, dtype=torch.float32),
            steps,
            rate=setting.rate,
            batches=None if size is None else Batches(size, seed=setting.seed),
            every=max(1, min(EPOCH, steps // 10)),
            seconds=setting.seconds,
            tests=held_out(problem, seed=setting.seed),
            watch=_watching(show, name),
        )
        rows += trace_rows(trace, EPOCH, tokens, way)
        took += trace.seconds[-1]
    facts = {**setting.facts("2a"), "heads": heads, "steps": steps, "batch": batch, "infimum": trace.infimum}
    facts["training seconds"] = took
    found = Finding("icl-figure-2a", ("tokens", "training", *COLUMNS), rows, [], facts)
    return replace(found, claims=figure_2a_claims(found))


def figure_2a_claims(found: Finding) -> list[MeasuredClaim]:
    """Figure 2's claims for each training but the one that shows the limit; and the limit."""
    runs = read_traces(found, "tokens", "training")
    claims: list[MeasuredClaim] = []
    for (tokens, way), trace in runs.items():
        claims += figure_2_claims(trace, f"{tokens} tokens, {way}", EPOCH) if way != ONE_BATCH else []
    ends = {way: runs["Gaussian", way].gap[-1] for way in (EXACT, BATCHES, ONE_BATCH)}
    # As a loss, not as a gap: a sample's minimiser has a gap of its own, of the order of `inf L N / samples`.
    least = found.facts["infimum"]
    off = {way: abs((gap + least) / (ends[EXACT] + least) - 1) for way, gap in ends.items()}
    claims.append(
        MeasuredClaim(
            "the population loss (9) is the limit of training on samples",
            f"gap at the end {ends[EXACT]:.3g} in closed form; {ends[ONE_BATCH]:.3g} with all {SAMPLES} samples in "
            f"every step (the population loss is then {off[ONE_BATCH]:.2%} off); {ends[BATCHES]:.3g} with batches of "
            f"{found.facts['batch']} ({off[BATCHES]:.2%} off)",
            verdict(off[ONE_BATCH] < 0.01 and off[ONE_BATCH] <= off[BATCHES]),
            seeds=1,
        )
    )
    return claims


def figure_2_claims(trace: Trace, name: str, epoch: int) -> list[MeasuredClaim]:
    """What section 4 says of figure 2, for one training; `epoch` is the number of steps that see every sample once.

    Curves that descend together have one shape, and the inference losses fall equally far, within a factor of `APART`.
    Before the printed epochs are over nothing is judged: what is so until then may turn.
    """
    inside, outside = trace.inference["in-domain"], trace.inference["out-of-domain"]
    alike = [likeness(trace.gap, curve) for curve in (inside, outside)]
    fell = [curve[-1] / curve[0] for curve in (trace.loss, inside, outside)]
    apart = max(fell[1] / fell[2], fell[2] / fell[1])
    above = sum(out > within for out, within in zip(outside, inside, strict=True))
    epochs = trace.steps[-1] / epoch
    short = cut_short(epochs, FIGURE_2_EPOCHS)
    claims = [
        MeasuredClaim(
            f"the three curves descend together; {name}",
            f"to {fell[0]:.3g}, {fell[1]:.3g} and {fell[2]:.3g} of their start (no prediction linear in the labels has "
            f"a training loss below {trace.infimum / trace.loss[0]:.3g}); correlation with the gap's logarithm "
            f"{span(alike, '.3f')}; the inference losses fall equally far within a factor of {apart:.2g}",
            verdict(max(fell) < 0.9 and min(alike) > 0.9 and apart < APART),
        ),
        MeasuredClaim(
            f"the out-of-domain loss is above the in-domain one; {name}",
            f"at {above} of {len(inside)} kept steps, {outside[-1] / inside[-1]:.2g} times it at the end",
            verdict(above == len(inside)),
        ),
        MeasuredClaim(
            f"the output converges to y* (Theorem 2); {name}",
            f"1/K |yhat - y*|^2 from {inside[0]:.3g} to {inside[-1]:.3g} in-domain, from {outside[0]:.3g} to "
            f"{outside[-1]:.3g} out-of-domain, after {trace.steps[-1]} steps ({epochs:.0f} of the printed "
            f"{FIGURE_2_EPOCHS} epochs)",
            verdict(max(fell[1:]) < NEAR),
        ),
    ]
    return [of_one_start(claim, short) for claim in claims]


def cut_short(epochs: float, printed: int) -> str:
    """Why a training is not judged that ended before the paper's did; nothing where it did not."""
    return "" if epochs >= printed else f"{epochs:.0f} of {printed} epochs"


def of_one_start(claim: MeasuredClaim, short: str) -> MeasuredClaim:
    """A claim about a training from one start, which says nothing where that was cut short."""
    return replace(claim, seeds=1, short=short, holds="cannot tell" if short else claim.holds)


FIGURE_4_COLUMNS = ("tokens", "rate", "H", "step", "epoch", "loss", "gap", "largest rise")


def figure_4(setting: InContextSetting, tick: Tick, show: Show) -> Finding:
    """The population loss for each number of heads: Gaussian tokens as printed, tokens of norm 1, and a larger rate."""
    every_heads = setting.heads or FIGURE_4_HEADS
    steps = setting.steps or EPOCH * (FIGURE_4_EPOCHS_ON_CPU if setting.on_cpu else FIGURE_4_EPOCHS)
    rows: list[Row] = []
    safe: dict[str, dict[int, float]] = {}
    took = 0.0
    for tokens, times in (*((tokens, 1) for tokens in TOKENS), ("Gaussian", FASTER)):
        problem, rate = setting.problem(TOKENS[tokens]), times * setting.rate
        for heads in every_heads:
            name = f"figure 4: {tokens} tokens, learning rate {rate:g}, H = {heads}"
            tick(name)
            model = OneLayer(problem, heads, seed=setting.seed, dtype=torch.float32)
            if times == 1:
                safe.setdefault(tokens, {})[heads] = usable_steps(model)[1]
            length = steps if times == 1 else min(steps, FASTER_STEPS)
            # Looked at every fourth of an epoch: instability that heals within an epoch is seen too. Kept are some 60
            # places, each with the largest rise since the one before.
            every = max(1, min(EPOCH // 4, length // 60))
            watch = _watching(show, name)
            trace = train(model, length, rate=rate, every=every, seconds=setting.seconds, watch=watch)
            took += trace.seconds[-1]
            rows += [
                (tokens, rate, heads, trace.steps[at], trace.steps[at] / EPOCH, trace.loss[at], trace.gap[at], rise)
                for at, rise in rises(trace.gap, max(1, length // every // 60))
            ]
    facts = {**setting.facts("4"), "heads": list(every_heads), "steps": steps, "infimum": problem.infimum()}
    facts |= {"largest safe eta_w of gradient descent": safe, "training seconds": took}
    found = Finding("icl-figure-4", FIGURE_4_COLUMNS, rows, [], facts)
    return replace(found, claims=figure_4_claims(found))


def figure_4_claims(found: Finding) -> list[MeasuredClaim]:
    """What section 4 says of figure 4. A curve has stopped where its last tenth takes off less than 1 %, unless it has
    come down to rounding. Before the printed epochs are over nothing is judged: a slow curve stops later."""
    facts = found.facts
    N, rate, runs = facts["N"], facts["rate"], read_traces(found, "tokens", "rate", "H")
    rise: dict[tuple[object, ...], float] = {}
    for row in found.rows:
        if row[7] is not None:
            rise[row[:3]] = max(rise.get(row[:3], 0.0), number(row[7]))
    claims: list[MeasuredClaim] = []
    ends = min(trace.steps[-1] for (_, at, _), trace in runs.items() if at == rate)
    short = cut_short(ends / EPOCH, FIGURE_4_EPOCHS)
    for tokens in TOKENS:
        of = {heads: trace for (kind, at, heads), trace in runs.items() if (kind, at) == (tokens, rate)}
        last = {heads: trace.gap[-1] / trace.gap[0] for heads, trace in of.items()}
        late = {heads: trace.gap[-1] / trace.gap[int(0.9 * (len(trace.gap) - 1))] for heads, trace in of.items()}
        few, enough = [heads for heads in of if number(heads) < N], [heads for heads in of if number(heads) >= N]
        told = {
            heads: f"H = {heads}: {last[heads]:.2g} (last tenth x {late[heads]:.3f})"
            + (f" after {trace.steps[-1]} steps" if trace.steps[-1] < facts["steps"] else "")
            for heads, trace in of.items()
        }
        claims += [
            MeasuredClaim(
                f"H < N = {N}: the loss stops descending far from its minimum; {tokens} tokens",
                "gap left of the start: " + ", ".join(told[heads] for heads in few),
                verdict(all(late[heads] > 0.99 and last[heads] > 0.05 for heads in few)) if few else "cannot tell",
            ),
            MeasuredClaim(
                f"H >= N = {N}: the loss keeps descending; {tokens} tokens",
                "gap left of the start: " + ", ".join(told[heads] for heads in enough),
                verdict(all(late[heads] < 0.99 or last[heads] < ROUNDING for heads in enough))
                if enough
                else "cannot tell",
            ),
        ]
        if 400 in of:
            others = [rise[tokens, rate, heads] for heads in enough if heads != 400]
            claims.append(
                MeasuredClaim(
                    f"H = 400 is unstable and diverges; {tokens} tokens",
                    f"largest rise of the gap from one step looked at to the next: x {rise[tokens, rate, 400]:.3f}"
                    + (f"; others at H >= N: {span(others, '.3f')}" if others else "")
                    + f"; gap left {last[400]:.2g}, least of all: {'yes' if last[400] == min(last.values()) else 'no'}",
                    verdict(rise[tokens, rate, 400] > 1.5 or not last[400] <= 1),
                )
            )
    judged = [of_one_start(claim, short) for claim in claims]
    return [*judged, *(of_one_start(claim, "") for claim in _unstable(found, rise)), _depth(found, short)]


def _unstable(found: Finding, rise: dict[tuple[object, ...], float]) -> list[MeasuredClaim]:
    """What the larger rate does; and gradient descent's own limit, which falls with H."""
    rate = FASTER * found.facts["rate"]
    by_heads = {heads: factor for (_, at, heads), factor in rise.items() if at == rate}
    if len(by_heads) < 2:
        return []
    most, worst = max(by_heads, key=number), max(by_heads, key=lambda heads: by_heads[heads])  # type: ignore[arg-type]
    safe = found.facts["largest safe eta_w of gradient descent"]["Gaussian"]
    safe = {int(heads): eta for heads, eta in safe.items()}
    return [
        MeasuredClaim(
            f"the largest H is the least stable: Gaussian tokens at {FASTER} times the learning rate",
            "largest rise of the gap from one step looked at to the next, by H: "
            + ", ".join(f"{heads}: x {factor:.2f}" for heads, factor in by_heads.items())
            + f"; gradient descent's largest safe eta_w at the start: {safe[min(safe)]:.2g} at H = {min(safe)}, "
            f"{safe[max(safe)]:.2g} at H = {max(safe)}",
            verdict(worst == most and by_heads[most] > 1.5),
        )
    ]


def _depth(found: Finding, short: str) -> MeasuredClaim:
    """The printed axis. Where the infimum is above it, no training from any start reaches it."""
    facts = found.facts
    least = min(number(row[5]) for row in found.rows)
    claim = MeasuredClaim(
        "the population loss falls to 10^-3, as on the printed axis",
        f"least {least:.3g}; its infimum is {facts['infimum']:.3g} at tau = {facts['tau']:g}",
        verdict(least <= LOWEST),
    )
    return claim if facts["infimum"] > LOWEST else of_one_start(claim, short)


def free(problem: InContextProblem, setting: InContextSetting, tick: Tick, show: Show, about: str = "") -> Finding:
    """One training with settings of one's own, on any problem; `about` says whose features f is."""
    heads = setting.heads[0] if setting.heads else FIGURE_2_HEADS
    steps = setting.steps or 2000
    name = f"N = {problem.N}, K = {problem.K}, d = {problem.d}, m = {problem.m}, tau = {problem.tau:g}, H = {heads}"
    name = f"{about}: {name}" if about else name
    tick(name)
    dtype = torch.float64 if setting.optimiser == "gd" else torch.float32
    model = OneLayer(problem, heads, seed=setting.seed, dtype=dtype)
    told = assumptions(model)
    watch = _watching(show, name)
    if setting.optimiser == "gd":
        trace = descend(model, steps, watch=watch)
    else:
        trace = train(
            model,
            steps,
            rate=setting.rate,
            batches=None if setting.batch is None else Batches(setting.batch, seed=setting.seed),
            every=max(1, min(EPOCH, steps // 50)),
            seconds=setting.seconds,
            tests=held_out(problem, seed=setting.seed),
            watch=watch,
        )
    claims = [
        *told,
        MeasuredClaim(
            "the loss descends towards its infimum",
            f"gap from {trace.gap[0]:.4g} to {trace.gap[-1]:.4g} in {trace.steps[-1]} steps; infimum "
            f"{trace.infimum:.4g}",
            verdict(trace.gap[-1] < trace.gap[0]),
        ),
    ]
    facts = {**setting.facts("run"), "heads": heads, "steps": trace.steps[-1], "infimum": trace.infimum, "name": name}
    facts |= {"m": problem.m, "d": problem.d, "K": problem.K, "training seconds": trace.seconds[-1]}
    return Finding("icl-run", COLUMNS, trace_rows(trace, EPOCH), claims, facts)
