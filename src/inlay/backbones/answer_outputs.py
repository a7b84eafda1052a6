"""What a model that finds answers gives: the logits of first and last tokens side by side, and a loss over them.

Transformers' heads for answers give two outputs and take two positions. Here such a model takes `labels` and gives
`logits` (B x L x 2) as every other one does. `labels` (B x L) mark what may be an answer:

    -100   never a part of an answer: the question, special tokens, padding
       0   may be the first or the last token of the answer
       1, 2, 3   the first token of the answer, the last one, both

With the legal tokens A of a row, and its answer from i to j,

    L = -1/2 ( log softmax_{t in A}(z_t1)[i] + log softmax_{t in A}(z_t2)[j] ),

the mean over the rows that have an answer marked. Transformers' own loss has all tokens in the softmax, padding too, so
that it depends on the batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from inlay.tasks.windows import FIRST, LAST, LEGAL

_LABELS = "_inlay_answer_labels"


def install(model: nn.Module) -> None:
    """Let a model for answers take `labels`, and give `logits` and their loss."""
    model.register_forward_pre_hook(_before, with_kwargs=True)
    model.register_forward_hook(_after, with_kwargs=True)


def installed(model: nn.Module) -> bool:
    """Whether a model takes `labels` in this way."""
    return _before in model._forward_pre_hooks.values()


def has_answer(labels: Tensor) -> Tensor:
    """Which rows have their answer marked."""
    return labels.gt(LEGAL).any(-1)


def span_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """L of logits B x L' x 2; of a prompt's tokens before the text, L' has more than the labels."""
    logits = logits[:, logits.shape[1] - labels.shape[1] :]
    exact = logits.to(torch.promote_types(logits.dtype, torch.float32))
    shares = exact.masked_fill(labels.lt(LEGAL).unsqueeze(-1), -torch.inf).log_softmax(1)
    known = has_answer(labels)
    places = torch.stack([(labels.clamp(min=0) & mark).argmax(1) for mark in (FIRST, LAST)], -1)
    each = -shares.gather(1, places.unsqueeze(1)).squeeze(1).sum(-1) / 2
    return torch.where(known, each, 0.0).sum() / known.sum()


def _before(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    kwargs = dict(kwargs)
    setattr(model, _LABELS, kwargs.pop("labels", None))
    return args, kwargs


def _after(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
    labels = getattr(model, _LABELS, None)
    setattr(model, _LABELS, None)
    if not isinstance(output, Mapping):
        return None
    made: Any = output
    made["logits"] = torch.stack([made["start_logits"], made["end_logits"]], -1)
    if labels is not None:
        made["loss"] = span_loss(made["logits"], labels)
    return made
