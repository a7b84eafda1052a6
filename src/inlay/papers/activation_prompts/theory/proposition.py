"""Proposition 1 of the activation-prompt paper (appendix C.2): norm tuning as an activation prompt, and the other way.

Shapes: features are (B, P, D), images by positions by channels; the paper writes D x P. Every function returns a `Pair`
of the two outputs. Under the proposition's conditions they are the same numbers. Where a condition does not hold, means
stand in for the one value it asks for, so the same functions measure how far a real layer is from the proposition.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from inlay.errors import InlayError


@dataclass(frozen=True)
class NormPair:
    """What norm tuning and the prompt make of the same input, and what they were given to do it.

    `departures` says how far each condition of the proposition is from holding, as the largest absolute deviation.
    """

    normed: Tensor
    prompted: Tensor
    gamma: Tensor
    beta: Tensor
    delta: Tensor
    departures: dict[str, float]

    @property
    def gap(self) -> float:
        """The largest absolute difference between the two outputs."""
        return float((self.normed - self.prompted).abs().max())

    @property
    def relative_gap(self) -> float:
        """The distance between the two outputs, as a fraction of the normed one's size."""
        return float((self.normed - self.prompted).norm() / self.normed.norm())


def batch_norm(z: Tensor, gamma: Tensor, beta: Tensor) -> Tensor:
    """Equation (A3), BN: `gamma_d (z_bdp - mu_d) / sigma_d + beta_d`, moments over images and positions, no epsilon."""
    mu, sigma = _moments(z, (0, 1))
    return gamma * (z - mu) / sigma + beta


def layer_norm(z: Tensor, gamma: Tensor, beta: Tensor) -> Tensor:
    """Equation (A3), LN: `gamma_d (z_bdp - mu_bp) / sigma_bp + beta_d`, moments over channels, no epsilon."""
    mu, sigma = _moments(z, (2,))
    return gamma * (z - mu) / sigma + beta


def batch_norm_from_prompt(x: Tensor, weight: Tensor, delta: Tensor) -> NormPair:
    """The batch norm that does what a prompt before a 1 x 1 convolution does, equations (A4) to (A8).

        z = W x,   gamma_d = sigma_d,   beta_d = w_d delta_* + mu_d:   BN(z) = W (x + delta)

    `x` (B, P, C) is the convolution's input, `weight` (D, C), `delta` (C,) or (P, C). A prompt that differs between
    positions has no equal among norms, whose shift is the same everywhere: `delta_*` is then its mean.
    """
    _check(x, delta)
    shared = delta.reshape(-1, delta.shape[-1]).mean(0)
    mu, sigma = _moments(x @ weight.T, (0, 1))
    beta = weight @ shared + mu[0, 0]
    departures = {"delta_p = delta_*": float((delta - shared).abs().max())}
    return _batch_norm_pair(x, weight, sigma[0, 0], beta, delta, departures)


def prompt_from_batch_norm(x: Tensor, weight: Tensor, beta: Tensor, gamma: Tensor | None = None) -> NormPair:
    """The prompt that does what a tuned batch norm does: `W delta = beta - mu`, equation (A8) solved for `delta`.

    A solution needs `beta - mu` in the range of W (always so if W is onto, never for most `beta` if it has more rows
    than columns) and `gamma = sigma`, which is what None takes. Otherwise the least-squares solution is taken.
    """
    z = x @ weight.T
    _check(z, beta)
    mu, sigma = _moments(z, (0, 1))
    gamma = sigma[0, 0] if gamma is None else gamma
    delta = torch.linalg.pinv(weight) @ (beta - mu[0, 0])
    departures = {
        "gamma_d / sigma_d = 1": float((gamma / sigma[0, 0] - 1).abs().max()),
        "beta - mu in the range of W": float((weight @ delta - (beta - mu[0, 0])).abs().max()),
    }
    return _batch_norm_pair(x, weight, gamma, beta, delta, departures)


def layer_norm_from_prompt(z: Tensor, delta: Tensor) -> NormPair:
    """The layer norm that does what a prompt does, equations (A10) and (A11).

        gamma_d = sigma_bp,   beta_d = delta_pd + mu_p:   LN(z) = z + delta

    The prompted output is the unnormalised one. `z` (B, P, D), `delta` (P, D). The right side may depend on neither b
    nor p: only prompts of the form `delta_pd = beta_d - mu_p` have an equal.
    """
    _check(z, delta)
    mu, _ = _moments(z, (2,))
    wanted = delta + mu.mean(0)
    return _layer_norm_pair(z, wanted.mean(0), delta, {"delta_pd + mu_p = beta_d": _spread(wanted, 0)})


def prompt_from_layer_norm(z: Tensor, beta: Tensor) -> NormPair:
    """The prompt that does what a layer norm with shift `beta` does: `delta_pd = beta_d - mu_p`, (A11) solved."""
    _check(z, beta)
    mu, _ = _moments(z, (2,))
    return _layer_norm_pair(z, beta, beta - mu.mean(0), {})


def _batch_norm_pair(
    x: Tensor, weight: Tensor, gamma: Tensor, beta: Tensor, delta: Tensor, departures: dict[str, float]
) -> NormPair:
    return NormPair(batch_norm(x @ weight.T, gamma, beta), (x + delta) @ weight.T, gamma, beta, delta, departures)


def _layer_norm_pair(z: Tensor, beta: Tensor, delta: Tensor, departures: dict[str, float]) -> NormPair:
    mu, sigma = _moments(z, (2,))
    gamma = sigma.mean().expand(z.shape[2])
    departures = {
        "gamma_d / sigma_bp = 1": float((gamma[0] / sigma - 1).abs().max()),
        "mu_bp = mu_p": _spread(mu, 0),
        **departures,
    }
    return NormPair(layer_norm(z, gamma, beta), z + delta, gamma, beta, delta, departures)


def _moments(z: Tensor, over: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Mean and (biased) standard deviation, with the axes kept. A constant has no norm without an epsilon."""
    variance, mean = torch.var_mean(z, over, correction=0, keepdim=True)
    if float(variance.detach().min()) == 0:
        raise InlayError(
            "The features to be normed do not vary, so equation (A3) divides by zero. Give more than one image or "
            "position (batch norm), or more than one channel (layer norm), with differing values."
        )
    return mean, variance.sqrt()


def _spread(values: Tensor, over: int) -> float:
    return float((values - values.mean(over, keepdim=True)).abs().max())


def _check(features: Tensor, vector: Tensor) -> None:
    """`vector` is one value a channel, or one a position and channel."""
    if features.dim() != 3:
        raise InlayError(f"Features of shape {tuple(features.shape)}: give (images, positions, channels).")
    allowed = (tuple(features.shape[2:]), tuple(features.shape[1:]))
    if tuple(vector.shape) not in allowed:
        raise InlayError(
            f"A vector of shape {tuple(vector.shape)} does not fit features of shape {tuple(features.shape)}: give "
            f"{' or '.join(map(str, allowed))}."
        )
