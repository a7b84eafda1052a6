"""Z and kappa by least squares: what a prompt does to the queries that really come, not to all that might.

Eq. (4) of NTK-Attention is as good as `phi(q) . phi(k)` is near `exp(scale q . k)`: with few features, not good. But
queries are known once there are texts to follow the prompt, and so is what each should receive. With
`D(q) = sum_j exp(scale q . k_j)` and `N(q) = sum_j exp(scale q . k_j) v_j` over the prompt's keys, `E(q)` the sum over
the keys of the text, and `w = 1 / (E + D)`, the weight that a query's denominator gives to errors, of each head

    mu    = sum_q w D (sum_j softmax_j(scale q . k_j) k_j) / sum_q w D,
    kappa = argmin_{kappa >= 0} sum_q w^2 (phi(q) kappa - D(q))^2,    Z = argmin_Z sum_q w^2 |phi(q) Z - N(q)|^2.

`mu` is the centre of phi: the key that the queries attend to on average. It is the slope of `log D` there, so that
`exp(scale q . mu)` follows what of `D` varies most. Without it the fit is worse than no prompt: D ranges over orders of
magnitude. Everything is a sum over queries, and nothing grows with the texts. This is ours; the paper has Eq. (4).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from inlay.methods.attention_interface import Attend, AttentionLayer
from inlay.methods.ntk_attention.layer import NTKAttentionLayer, TrainedPrefix
from inlay.methods.shared_prompt import SharedPrompt
from inlay.methods.watching import watching

RIDGE = 1e-4
"""Added to the diagonal, relative to its mean: features that hardly occur stay small."""
ROUNDS = 300


@dataclass(frozen=True)
class Seen:
    """The queries of a batch, `[heads, n, d]`, and what the prompt is to them: `log D` and `log (E + D)`, `[heads, n]`,
    and the keys and values of the prompt averaged by softmax, `[heads, n, d]`."""

    query: Tensor
    log_prompt: Tensor
    log_whole: Tensor
    key: Tensor
    value: Tensor
    scale: float

    @property
    def share(self) -> Tensor:
        """`w D`: how much of the softmax is the prompt's."""
        return (self.log_prompt - self.log_whole).exp()


class Watcher(AttentionLayer):
    """Sees the queries of one attention behind a prompt; changes nothing. The prompt's keys are before the text's, or
    beside the attention (`SharedPrompt`).

    `real` marks the tokens of a batch that are not padding.
    """

    child = "inlay_fit"

    def __init__(self, host: nn.Module, prefix: TrainedPrefix) -> None:
        super().__init__(host)
        self._prefix = (prefix,)  # in a tuple, which hides it from nn.Module: it belongs to the adapter
        self.real: Tensor | None = None
        self.sums: tuple[Tensor, Tensor] | None = None

    @property
    def prefix(self) -> TrainedPrefix:
        return self._prefix[0]

    def running(self) -> list[str]:
        return [self.child]

    def attend(
        self, previous: Attend, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        shared: Any = self.host._modules.get(SharedPrompt.child)
        with torch.no_grad():
            keys, values, seen = (key, value, mask) if shared is None else shared.joined(key, value, mask)
            found = self.products(look(query, keys, values, seen, kwargs.get("scaling"), self.real))
            self.sums = found if self.sums is None else (self.sums[0] + found[0], self.sums[1] + found[1])
        return previous(self.host, query, key, value, mask, **kwargs)

    def products(self, seen: Seen) -> tuple[Tensor, Tensor]:
        """What is summed over the queries."""
        raise NotImplementedError

    def settle(self) -> None:
        """Put what follows from the sums into the adapter."""
        raise NotImplementedError


class Centring(Watcher):
    """mu."""

    def products(self, seen: Seen) -> tuple[Tensor, Tensor]:
        share = seen.share[..., None]
        return (share * seen.key).sum(1).double(), share.sum(1).double()

    @torch.no_grad()
    def settle(self) -> None:
        assert self.sums is not None
        assert self.prefix.centre is not None
        above, below = self.sums
        self.prefix.centre.weight.copy_(above / below.clamp(min=torch.finfo(below.dtype).tiny))


class Squares(Watcher):
    """Z and kappa, about the centre that is there."""

    def products(self, seen: Seen) -> tuple[Tensor, Tensor]:
        phi, log_scale = self.prefix.features.of_query(seen.query[None], self.prefix.kappa.weight.shape[-1], seen.scale)
        weight = -seen.log_whole if log_scale is None else log_scale[0] - seen.log_whole
        phi = (phi[0] * weight.exp()[..., None]).double()
        share = seen.share[..., None]
        return phi.mT @ phi, phi.mT @ torch.cat([share * seen.value, share], -1).double()

    @torch.no_grad()
    def settle(self) -> None:
        assert self.sums is not None
        z_a, z_b, kappa = solve(*self.sums, self.prefix.z_a.weight.shape[-1])
        if self.prefix.z_b is None:
            z_a = z_a @ z_b
        for part, found in ((self.prefix.z_a, z_a), (self.prefix.z_b, z_b), (self.prefix.kappa, kappa)):
            if part is not None:
                part.weight.copy_(found)


def look(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None, real: Tensor | None
) -> Seen:
    """What the queries at the end of the keys see of those before them."""
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    query, key, value = (x.to(torch.promote_types(x.dtype, torch.float32)) for x in (query, key, value))
    groups, length = query.shape[1] // key.shape[1], query.shape[2]
    key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
    before = key.shape[2] - length
    of_prompt, of_text = (query @ key.mT * scale + hidden(mask, query, key)).split([before, length], -1)
    log_prompt, log_text = of_prompt.logsumexp(-1), of_text.logsumexp(-1)
    weights = of_prompt.softmax(-1).nan_to_num()  # a sliding window may have left the prompt behind
    kept = torch.ones(len(query), length, dtype=torch.bool, device=query.device) if real is None else real

    def flat(x: Tensor) -> Tensor:
        """(heads, real tokens, ...)."""
        return x.transpose(0, 1)[:, kept]

    return Seen(
        query=flat(query),
        log_prompt=flat(log_prompt),
        log_whole=flat(torch.logaddexp(log_prompt, log_text)),
        key=flat(weights @ key[:, :, :before]),
        value=flat(weights @ value[:, :, :before]),
        scale=scale,
    )


def hidden(mask: Tensor | None, query: Tensor, key: Tensor) -> Tensor:
    """What is added to the scores: 0, and -inf where a key must not be seen."""
    length, keys = query.shape[2], key.shape[2]
    if mask is None:  # every earlier token, as with a single query
        mask = torch.ones(length, keys, dtype=torch.bool, device=query.device).tril(keys - length)
    if mask.dtype == torch.bool:
        return torch.zeros_like(mask, dtype=query.dtype).masked_fill(~mask, -torch.inf)
    return mask.to(query.dtype).masked_fill(mask < -1e4, -torch.inf)  # float16's most negative number is -65504


def solve(products: Tensor, targets: Tensor, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """Z_A `[heads, r, s]`, Z_B `[heads, s, d]` and kappa `[heads, r]` from `G = sum w^2 phi phi^T` and
    `sum w^2 phi [N | D]`.

    Of the matrices of rank s the one nearest to Z for these queries: its rows lie in the span V of the largest
    eigenvectors of `Z^T G Z`, so `Z_A = Z V` and `Z_B = V^T`. kappa by multiplicative steps
    `kappa <- kappa b / (G kappa)`, which descend and never turn negative: no feature is, and so nothing in G and b.
    """
    tiny = torch.finfo(products.dtype).tiny
    diagonal = products.diagonal(dim1=-2, dim2=-1)
    ridge = RIDGE * diagonal.mean(-1, True).clamp(min=tiny)
    held = products + torch.diag_embed(ridge.expand_as(diagonal))
    z = torch.linalg.solve(held, targets[..., :-1])
    span = torch.linalg.eigh(z.mT @ held @ z)[1][..., -rank:]
    wanted = targets[..., -1:].clamp(min=0)
    kappa = (wanted.sum(1, True) / held.sum((1, 2))[:, None, None].clamp(min=tiny)).expand_as(wanted)
    for _ in range(ROUNDS):
        kappa = kappa * wanted / (held @ kappa).clamp(min=tiny)
    return z @ span, span.mT, kappa[..., 0]


@contextmanager
def watching_all(model: nn.Module, kind: type[Watcher], adapter_name: str = "default") -> Iterator[Sequence[Watcher]]:
    """Watch every attention that the adapter is in; afterwards the model is as it was."""
    layers = [module for module in model.modules() if isinstance(module, NTKAttentionLayer)]
    prefixes = [(layer.host, layer.inlay_ntk_prefix[adapter_name]) for layer in layers]
    watchers = [kind(host, prefix) for host, prefix in prefixes if isinstance(prefix, TrainedPrefix)]
    with watching(watchers):
        yield watchers
