"""Losses that Transformers' own heads do not compute, put on a model: they take the place of the one in its output.

The model computes its logits, and whatever loss it knows; a hook on it then computes this one, before the hooks of any
method that adds something to the loss. A loss is the mean over rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, log_softmax

from inlay.backbones import answer_outputs

NO_LABEL = -100
_ATTRIBUTE = "inlay_loss"


class WeightedClasses:
    """`L = 1/N sum_i w[y_i] (-log softmax(z_i)[y_i])`: cross-entropy in which each class has a weight.

    Divided by the rows and not by their weights, so that a batch of rare classes moves more than one of frequent ones,
    however an update is split. The weights have the mean 1 over the training rows.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        self.weights = tuple(weights)

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
        labels = labels.reshape(-1)
        kept = labels.ne(NO_LABEL)
        each = cross_entropy(_exact(logits), labels, ignore_index=NO_LABEL, reduction="none")
        weights = torch.tensor(self.weights, dtype=each.dtype, device=each.device)
        return (each * weights[labels.clamp(min=0)]).sum() / kept.sum()


class SoftLabels:
    """`L = 1/N sum_i sum_k t_ik (-log softmax(z_i)[k])`: cross-entropy with the probabilities `t` of the classes."""

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
        logits = _exact(logits)
        return -(labels.to(logits.dtype) * log_softmax(logits, dim=-1)).sum(-1).mean()


class OrderedClasses:
    """The negative log-likelihood of continuation-ratio logits (CORN, Shi, Cao and Raschka, 2021).

    Output `k` of `K - 1` is the logit of `P(y > k | y >= k)`. Of a row of class `y` the questions `k <= y` count, since
    the others were never asked: `L = 1/N sum_i sum_{k <= y_i} BCE(z_ik, [y_i > k])`, which is `-log P(y_i)`. Labels are
    the answers `[y > k]`. `P(y > k)` is the product of the first conditional probabilities: it falls in `k`, whatever
    the outputs.
    """

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
        logits = _exact(logits)
        answers = labels.to(logits.dtype)
        asked = torch.cat((torch.ones_like(answers[:, :1]), answers[:, :-1]), dim=1)
        each = binary_cross_entropy_with_logits(logits, answers, reduction="none")
        return (each * asked).sum(-1).mean()


Loss = WeightedClasses | SoftLabels | OrderedClasses


def of_schema(schema: Any) -> Loss | None:
    """The loss that a task needs beside those of Transformers; None: it needs none."""
    predicts = getattr(schema, "predicts", None)
    if predicts == "shares":
        return SoftLabels()
    if predicts == "rank":
        return OrderedClasses()
    weights = getattr(schema, "class_weights", None)
    return None if weights is None else WeightedClasses(weights)


def install(model: nn.Module, loss: Loss | None) -> None:
    """Let the model's output have this loss, where it is given labels; None changes nothing."""
    if loss is None:
        return
    setattr(model, _ATTRIBUTE, loss)
    model.register_forward_hook(_after, with_kwargs=True)


def installed(model: nn.Module) -> Loss | None:
    """The loss that was put on a model."""
    return getattr(model, _ATTRIBUTE, None)


def follow_prompt(model: nn.Module, base: nn.Module) -> None:
    """Put the loss of `base` on `model` too, where that is a prompt of PEFT's around it: some compute a loss there."""
    config = getattr(model, "active_peft_config", None)
    if not getattr(config, "is_prompt_learning", False) or model is base:
        return
    if _ATTRIBUTE not in vars(model):
        install(model, installed(base))
    if answer_outputs.installed(base) and not answer_outputs.installed(model):
        answer_outputs.install(model)


def _after(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
    labels, loss = kwargs.get("labels"), installed(model)
    if labels is None or loss is None:
        return None
    if isinstance(output, Mapping):
        return type(output)(**dict(output) | {"loss": loss(output["logits"], labels)})
    return (loss(output[1], labels), *output[1:])


def _exact(logits: Tensor) -> Tensor:
    return logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
