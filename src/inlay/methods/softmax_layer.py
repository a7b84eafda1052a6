"""A layer that computes the softmax of its host's attention itself, with more in it than the text's keys."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from inlay.errors import InlayError
from inlay.methods.attention_interface import Attend, AttentionLayer

IMPLEMENTATIONS = ("sdpa", "eager")


class SoftmaxLayer(AttentionLayer):
    """Attention of the host's queries over the text and what an adapter adds (`softmax`).

    Mask, causality and bias of position concern the text's keys alone. One such layer can run on a host.
    """

    innermost = True

    def softmax(
        self, query: Tensor, key: Tensor, value: Tensor, dropout_p: float, shares: bool, **how: Any
    ) -> tuple[Tensor, Tensor | None]:
        """The output, (batch, heads, tokens, channels), and, where `shares`, the share of the text's keys in each
        query's softmax, (batch, heads, tokens, 1). `how` is scale, attn_mask and is_causal, as `inlay.attention` takes
        them."""
        raise NotImplementedError

    def attend(
        self, previous: Attend, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        implementation = self.implementation
        if implementation not in IMPLEMENTATIONS or "softcap" in kwargs or "s_aux" in kwargs:
            self._check(implementation, kwargs)
        bias = kwargs.get("position_bias")
        eager = implementation == "eager"
        output, share = self.softmax(
            query,
            key,
            value,
            kwargs.get("dropout") or 0.0,
            shares=eager,
            scale=kwargs.get("scaling"),
            attn_mask=mask if bias is None else with_bias(mask, bias),
            is_causal=mask is None and not eager and query.shape[2] > 1 and self._is_causal(kwargs.get("is_causal")),
        )
        weights = previous(self.host, query, key, value, mask, **kwargs)[1] if eager else None
        weights = None if weights is None or share is None else weights * share
        return output.transpose(1, 2).contiguous(), weights

    def _is_causal(self, is_causal: bool | None) -> bool:
        """As `sdpa` in Transformers decides where there is no mask; a single query is the last, and sees all keys."""
        return bool(getattr(self.host, "is_causal", True) if is_causal is None else is_causal)

    def _check(self, implementation: str, kwargs: dict[str, Any]) -> None:
        if implementation not in IMPLEMENTATIONS:
            raise InlayError(
                f"{type(self).__name__} computes attention itself and reads the masks of "
                f'{" and ".join(IMPLEMENTATIONS)}, not of {implementation!r}: model.set_attn_implementation("sdpa").'
            )
        for name in ("softcap", "s_aux"):
            if kwargs.get(name) is not None:
                raise InlayError(
                    f"{type(self.host).__name__} changes its scores by {name!r}: {type(self).__name__} knows the plain "
                    "softmax only. Take another method for this model."
                )


def with_bias(mask: Tensor | None, bias: Tensor) -> Tensor:
    """What is added to the scores, a bias of position included; hidden keys get what Transformers gives them."""
    if mask is None:
        return bias
    if mask.dtype == torch.bool:
        return torch.where(mask, bias, torch.finfo(bias.dtype).min)
    return bias + mask
