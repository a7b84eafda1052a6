"""The plain backend: attention as its definition reads, by ordinary operations on any device.

It holds the whole matrix of scores, takes every option, and can be differentiated more than once. The other backends
fall back to it for what their kernels cannot do, and are tested against the same oracle.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import dropout

from inlay.attention.biased import hiding
from inlay.attention.call import Call
from inlay.attention.features import FeatureMap
from inlay.attention.join import finite, mix, weigh
from inlay.attention.term import State, plain_term, working_type


class Plain:
    """`softmax(scale q k^T + mask) v`, the matrix of scores in full."""

    name = "plain"

    def refuses(self, call: Call) -> str | None:
        return None

    def with_lse(self, call: Call) -> tuple[Tensor, Tensor]:
        out, lse = _attend(call, call.key, call.value, call.mask, call.is_causal)
        return out.to(call.query.dtype), lse

    def joined(self, call: Call, features: FeatureMap | None, state: State | None) -> Tensor:
        parts = [_attend(call, call.key, call.value, call.mask, call.is_causal)]
        if call.prefix is not None:
            bias = None if call.prefix.bias is None else hiding(call.prefix.bias)
            parts.append(_attend(call, call.prefix.key, call.prefix.value, None, False, bias))
        outputs, lses = zip(*parts, strict=True)
        if features is None or state is None:
            return mix(outputs, weigh(lses, None, None), None, call.query.dtype)
        term = plain_term(features, call.query, state, call.scale)
        weights = weigh(lses, term.denominator, term.log_scale)
        return mix(outputs, weights, term.numerator, call.query.dtype)


def _attend(
    call: Call, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp in the working type; 0 and -inf for a query that may see no key."""
    dtype = working_type(call.query.dtype)
    groups = call.query.shape[1] // key.shape[1]
    key, value = (x.to(dtype).repeat_interleave(groups, 1) for x in (key, value))
    scores = (call.query.to(dtype) * call.scale) @ key.mT
    if bias is not None:
        scores = scores + bias.to(dtype).repeat_interleave(groups, 1).unsqueeze(2)
    if is_causal:
        scores = scores.masked_fill(torch.ones_like(scores[0, 0], dtype=torch.bool).triu(1), -torch.inf)
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask.to(dtype)
    if key.shape[2] == 0:
        return scores @ value, scores.sum(-1) - torch.inf
    most = finite(scores.detach().amax(-1, keepdim=True))
    weights = (scores - most).exp()
    whole = weights.sum(-1, keepdim=True)
    nothing = whole == 0
    safe = whole.masked_fill(nothing, 1)  # or the gradient of log(0) would make its neighbours NaN
    lse = (most + safe.log()).masked_fill(nothing, -torch.inf).squeeze(-1)
    return dropout(weights / safe, call.dropout_p) @ value, lse
