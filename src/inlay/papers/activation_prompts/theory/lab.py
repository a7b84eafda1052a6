"""Proposition 1, Lemma 1 and Theorem 1 as experiments: numbers, and beside each claim what was measured."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from inlay.papers.activation_prompts.theory.distance import distances
from inlay.papers.activation_prompts.theory.network import Data
from inlay.papers.activation_prompts.theory.proposition import (
    NormPair,
    batch_norm_from_prompt,
    layer_norm_from_prompt,
    prompt_from_batch_norm,
    prompt_from_layer_norm,
)
from inlay.papers.activation_prompts.theory.samples import Needed, SampleSetting, with_expected_gradient, with_sgd
from inlay.papers.findings import Exponent, Finding, MeasuredClaim, Row, Tick, exponent, verdict

DEPARTURES = (0.0, 1e-4, 1e-3, 1e-2, 1e-1, 1.0)
# From far below what counts as a tie to the most that the paper allows.
NOISES = (1e-12, 1e-10, *(10.0 ** (power / 2) for power in range(-18, -6)), 1e-3, 1e-2, 1e-1, 0.3, 1.0)
# For the expected gradient, which is cheap: as far as a minute goes.
EXPECTED_SIZES = {1: (8, 16, 32, 64, 128, 256), 2: (8, 16, 32, 64, 128)}
# A curve without noise has no interval: its end has a power if its slope there is this close.
NEAR = 0.15
WIDE = 1.0  # an interval of a slope that is wider confirms nothing
# The same in doubles: sums of some hundred numbers of size one.
SAME = 1e-12


def proposition_1(seed: int = 0, images: int = 8, positions: int = 12, channels: int = 6) -> Finding:
    """The gap between norm tuning and prompt, with the conditions met and with one of them dropped, more and more."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    x, weight, delta, beta = (
        normal(images, positions, channels),
        normal(channels, channels),
        normal(channels),
        normal(channels),
    )
    standard = normal(images, positions, channels)
    standard = (standard - standard.mean(2, keepdim=True)) / standard.std(2, correction=0, keepdim=True)
    mu = normal(positions, 1)
    by_position, by_image, by_channel = normal(positions, channels), normal(images, positions, 1), normal(channels)
    sigma = (x @ weight.T).flatten(0, 1).std(0, correction=0)

    def cases(size: float) -> Iterator[tuple[str, str, NormPair]]:
        yield "BN", "delta_p = delta_*", batch_norm_from_prompt(x, weight, delta + size * by_position)
        gamma = sigma * torch.exp(size * by_channel)
        yield "BN", "gamma_d / sigma_d = 1", prompt_from_batch_norm(x, weight, beta, gamma)
        spread = standard * torch.exp(size * by_image)
        yield "LN", "gamma_d / sigma_bp = 1", prompt_from_layer_norm(2 * spread + mu, beta)
        yield "LN", "mu_bp = mu_p", prompt_from_layer_norm(2 * standard + mu + size * by_image, beta)
        yield (
            "LN",
            "delta_pd = beta_d - mu_p",
            layer_norm_from_prompt(2 * standard + mu, beta - mu + size * by_position),
        )

    rows: list[Row] = [
        (norm, condition, size, pair.relative_gap, pair.gap)
        for size in DEPARTURES
        for norm, condition, pair in cases(size)
    ]
    claims = []
    for norm, network in (("BN", "a 1 x 1 convolution and batch norm"), ("LN", "layer norm")):
        met = max(float(row[4] or 0) for row in rows if row[0] == norm and row[2] == 0)
        broken = min(float(row[3] or 0) for row in rows if row[0] == norm and row[2] == DEPARTURES[-1])
        claims += [
            MeasuredClaim(
                f"{network}: the same function as a prompt, under the conditions",
                f"largest gap {met:.1e}",
                verdict(met < SAME),
            ),
            MeasuredClaim(
                f"{network}: each condition is needed",
                f"gap of {broken:.0%} or more with any one dropped",
                verdict(broken > 1e-3),
            ),
        ]
    return Finding("proposition-1", ("norm", "condition", "departure", "relative gap", "largest gap"), rows, claims)


def lemma_1(
    sizes: Sequence[int] = (3, 4, 6, 8, 12, 16, 24, 32, 48, 64), beta: float = 1.0, images: int = 200, seed: int = 0
) -> Finding:
    """Average attention distances without noise for every P and several d_A, and with noise at the largest P."""
    rows: list[Row] = []
    largest = max(sizes)
    outside: list[int] = []
    worst = [0.0, 0.0]
    for tokens in sizes:
        for d_a in sorted({1, max(1, tokens // 4), tokens // 2}):
            found = distances(Data(tokens), d_a, beta)
            first, second = float(found.first), float(found.second)
            rows.append((tokens, d_a, 0.0, first, found.claimed[0], second, found.claimed[1], found.applies))
            worst[0] = max(worst[0], abs(first - found.claimed[0]))
            if found.applies:
                worst[1] = max(worst[1], abs(second - found.claimed[1]))
            elif tokens not in outside:
                outside.append(tokens)
    d_a = largest // 4
    noisy = {}
    for noise in NOISES:
        found = distances(Data(largest, noise / largest), d_a, beta, images, seed)
        noisy[noise] = float(found.first.mean()), float(found.second.mean())
        rows.append(
            (largest, d_a, noise, noisy[noise][0], found.claimed[0], noisy[noise][1], found.claimed[1], found.applies)
        )
    first, second = noisy[0.1]
    claims = [
        MeasuredClaim(
            "layer 1: (1 + d_A)/P, without noise", f"largest difference {worst[0]:.1e}", verdict(worst[0] < SAME)
        ),
        MeasuredClaim(
            f"layer 2: 1/P, without noise, where exp(beta^2) < P - 1 (P > {1 + math.exp(beta**2):.1f})",
            f"largest difference {worst[1]:.1e}",
            verdict(worst[1] < SAME),
        ),
        MeasuredClaim(
            f"with noise, sigma = 0.1/P, P = {largest}: {(1 + d_a) / largest:.3g}, then {1 / largest:.3g}",
            f"{first:.3g}, then {second:.3g} (a key at random: {(largest**2 - 1) / 3 / largest:.3g})",
            verdict(abs(first - (1 + d_a) / largest) < 0.1 * first),
        ),
    ]
    if outside:
        at = [row for row in rows if row[0] in outside]
        same = all(row[5] == row[3] for row in at)
        claims.insert(
            2,
            MeasuredClaim(
                f"lambda_1 < 1/2 (said after A19) also for P = {', '.join(map(str, outside))}",
                "layer 2 keeps layer 1's distance" if same else "layer 2 differs from layer 1",
                verdict(not same),
            ),
        )
    columns = ("P", "d_A", "sigma P", "layer 1", "(1 + d_A)/P", "layer 2", "1/P", "lambda_1 < 1/2")
    return Finding("lemma-1", columns, rows, claims, {"beta": beta, "images": images, "seed": seed})


def theorem_1(
    setting: SampleSetting,
    sizes: Sequence[int] = (8, 12, 16, 24),
    seeds: int = 5,
    tick: Tick | None = None,
) -> Finding:
    """Samples to zero error and zero risk at both layers as P grows, by SGD and by the expected gradient.

    `tick` is told what begins, `trainings(setting, sizes)` times in all.
    """
    tick = tick or (lambda what: None)
    found: list[Needed] = []
    for layer in (1, 2):
        if setting.background == "one":
            tick(f"expected gradient, layer {layer}")
            found += with_expected_gradient(setting, EXPECTED_SIZES[layer], layer)
        for tokens in sizes:
            tick(f"SGD, layer {layer}, P = {tokens}")
            found += with_sgd(setting, tokens, layer, seeds)
    claims: list[MeasuredClaim] = []
    fits: dict[str, dict[str, float]] = {}
    for way, goal in (("SGD", setting.goal), ("expected gradient", "error"), ("expected gradient", "risk")):
        chosen = [needed for needed in found if (needed.seed is None) == (way != "SGD")]
        if chosen:
            claims += _orders(way, goal, chosen, fits)
    rows: list[Row] = [
        (
            "expected gradient" if needed.seed is None else "SGD",
            needed.layer,
            needed.tokens,
            needed.seed,
            needed.error,
            needed.risk,
            needed.spent,
            needed.norm,
        )
        for needed in found
    ]
    columns = (
        "gradient",
        "layer",
        "P",
        "seed",
        "samples to zero error",
        "samples to zero risk",
        "samples drawn",
        "norm",
    )
    return Finding("theorem-1", columns, rows, claims, {**vars(setting), "seeds": seeds, "exponents": fits})


def trainings(setting: SampleSetting, sizes: Sequence[int]) -> int:
    """How often `theorem_1` begins something: the expected gradient where it is defined, and a size, at each layer."""
    return 2 * (len(sizes) + (setting.background == "one"))


def _orders(way: str, goal: str, found: list[Needed], fits: dict[str, dict[str, float]]) -> list[MeasuredClaim]:
    """The theorem's two orders and their comparison, against the slopes that were measured.

    SGD is judged by the interval of its slope over all sizes: one as wide as a whole power agrees with too much to say
    yes, and two that overlap do not say which is steeper. The expected gradient has no spread, and an order is
    about large P: it is judged by its slope between the two largest sizes.
    """
    claims = []
    slopes: list[Exponent] = []
    for layer, words in ((1, "P"), (2, "P^2 log P")):
        at = [needed for needed in found if needed.layer == layer]
        reached = [(needed.tokens, samples) for needed in at if (samples := getattr(needed, goal)) is not None]
        missed = f"; {len(at) - len(reached)} of {len(at)} not reached" if len(reached) < len(at) else ""
        claim = f"{way}, zero {goal}, layer {layer}: order {words}"
        if way != "SGD":
            reached = reached[-2:]
        if len({tokens for tokens, _ in reached}) < 2:
            claims.append(MeasuredClaim(claim, f"too few trainings reached it{missed}", "cannot tell"))
            continue
        tokens, samples = zip(*reached, strict=True)
        fit = exponent(tokens, samples)
        # What the claimed order itself looks like as a power, over the same sizes.
        wanted = exponent(tokens, [claimed_order(layer, size) for size in tokens]).slope
        slopes.append(fit)
        fits[f"{way}, {goal}, layer {layer}"] = {**vars(fit), "claimed": wanted}
        if way == "SGD":
            told, holds = f"P^{fit}, claimed P^{wanted:.2f}", verdict(fit.low <= wanted <= fit.high)
            if holds == "yes" and fit.high - fit.low > WIDE:
                holds = "cannot tell"
        else:
            told, holds = (
                f"P^{fit.slope:.2f} at the end, claimed P^{wanted:.2f}",
                verdict(abs(fit.slope - wanted) < NEAR),
            )
        claims.append(MeasuredClaim(claim, told + missed, holds))
    claim = f"{way}, zero {goal}: layer 2 needs more, order-wise"
    if len(slopes) < 2:
        return [*claims, MeasuredClaim(claim, "too few trainings reached it", "cannot tell")]
    first, second = slopes
    apart = second.low > first.high or first.low > second.high
    told = f"P^{second.slope:.2f} against P^{first.slope:.2f}"
    return [*claims, MeasuredClaim(claim, told, verdict(second.low > first.high) if apart else "cannot tell")]


def claimed_order(layer: int, tokens: float) -> float:
    """Theorem 1: P at layer 1, P^2 log P at layer 2."""
    return tokens if layer == 1 else tokens**2 * math.log(tokens)
