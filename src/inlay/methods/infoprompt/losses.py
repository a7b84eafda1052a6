"""InfoPrompt's two information losses (Wu et al., NeurIPS 2023, sections 3.1 and 3.2) as plain functions.

Both are InfoNCE: a positive score against those of K - 1 negatives,

    L_NCE = log( exp(l_1) / sum_k exp(l_k) ) <= 0,      I >= log K + L_NCE      (never more than log K)

The model minimises `-L_NCE`; the constant log K changes no gradient. No label is used anywhere. Where an example has
fewer negatives than K - 1, all it has are taken, and its bound is the smaller log K.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

LOG_DEVIATIONS = (-2.0, 10.0)


def nce(scores: Tensor) -> Tensor:
    """`L_NCE` of each example from its scores, B x K, the positive's first."""
    return functional.log_softmax(scores, dim=1)[:, 0]


def nce_loss(scores: Tensor) -> Tensor:
    """The mean of `-L_NCE`: to tell the positive from the negatives is to classify, its class the first."""
    return functional.cross_entropy(scores, scores.new_zeros(len(scores), dtype=torch.long))


def all_scores(positive: Tensor, negatives: Tensor, valid: Tensor | None = None) -> Tensor:
    """B x K: `positive` (B) first, then the `negatives` (B x N), of which those that are not `valid` do not count."""
    if valid is not None:
        negatives = torch.where(valid, negatives, -math.inf)
    return torch.cat((positive.unsqueeze(1), negatives), dim=1)


def sample_context(
    embedded: Tensor, usable: Tensor, count: int, generator: torch.Generator | None = None
) -> tuple[Tensor, Tensor]:
    """`count` different tokens of each example, at random, as B x N x D and which of them are there to be had.

    `embedded` (B x L x D) are the tokens' embeddings, `usable` (B x L) marks those that are neither padding, special
    nor prompts. An example with fewer gives all it has; the rest is marked as not valid.
    """
    draw = torch.rand(usable.shape, generator=generator, device=usable.device)
    keys = torch.where(usable, draw, -1.0)
    found, places = keys.topk(min(count, usable.shape[1]), dim=1)
    chosen = embedded.gather(1, places.unsqueeze(-1).expand(-1, -1, embedded.shape[-1]))
    return chosen, found >= 0


def head_scores(prompt: Tensor, theta: Tensor, negatives: Tensor, valid: Tensor | None, w1: Tensor) -> Tensor:
    """The scores of the head loss (section 3.1), B x K, of texts whose prompts have the mean `prompt` (B x D):

        l(P, theta | X) = mean_i(p_i)^T W_1 mean_c(theta_c)

    with the prompts as the positive and tokens of the same text (B x N x D) as negatives. `theta` are the class vectors
    (C x H), `w1` is D x H. The tokens are given: no gradient reaches their embeddings.
    """
    direction = w1 @ theta.mean(0)
    return all_scores(prompt @ direction, negatives.detach() @ direction, valid)


def gaussian(mean: Tensor, log_deviation: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation, the logarithm of the latter kept within bounds."""
    # `hardtanh` is `clamp`, whose way back is five operations instead of one.
    return mean, functional.hardtanh(log_deviation, *LOG_DEVIATIONS).exp()


def sample(
    mean: Tensor, deviation: Tensor, count: int | None = None, generator: torch.Generator | None = None
) -> Tensor:
    """One draw of each example's N(mean, deviation), B x H; or `count` of them, B x count x H."""
    if count is not None:
        mean, deviation = mean.unsqueeze(1), deviation.unsqueeze(1)
    shape = mean.shape if count is None else (mean.shape[0], count, mean.shape[2])
    noise = torch.randn(shape, generator=generator, device=mean.device, dtype=mean.dtype)
    return torch.addcmul(mean, deviation, noise)


def representation_scores(prompt: Tensor, positive: Tensor, negatives: Tensor, w2: Tensor) -> Tensor:
    """The scores of the representation loss (section 3.2), B x K, of texts whose prompts have the mean `prompt`:

        l(P, z | X) = mean_i(p_i)^T W_2 z / sqrt(D)

    with z ~ N(f_mu(Z), f_sigma(Z)) (B x H) as the positive and K - 1 draws of N(f_mu(Z'), f_sigma(Z')) (B x N x H) of
    the same example's `Z' = Phi(X)`, which has seen no prompt, as negatives. `prompt` is B x D, `w2` D x H.
    """
    direction = prompt @ w2 / math.sqrt(prompt.shape[-1])
    samples = torch.cat((positive.unsqueeze(1), negatives), dim=1)
    return torch.bmm(samples, direction.unsqueeze(-1)).squeeze(-1)


def standard_kl(mean: Tensor, deviation: Tensor) -> Tensor:
    """KL(N(mean, deviation) || N(0, 1)) of each example, averaged over its dimensions: as the released code adds it."""
    return 0.5 * (mean.square() + deviation.square() - 1 - 2 * deviation.log()).mean(-1)
