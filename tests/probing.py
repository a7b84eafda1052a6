"""Find out whether a method works on a model: attach it, train it a step, save it, put it back, and look.

Used to write `capabilities.json`, and by the test matrix to check it. Nothing is declared by hand.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from inlay.errors import InlayError
from inlay.methods.attach import attach, restore, save, trained_parameters
from inlay.methods.heads import newly_initialised
from inlay.methods.registry import Method

Build = Callable[[], tuple[nn.Module, dict[str, Tensor]]]
STEP = 0.1
TOLERANCE = 1e-4


def probe(method: Method, build: Build) -> str | None:
    """Why the method does not work on the model that `build` makes, with a batch and labels for it; None: it works."""
    try:
        return _fault(method, build)
    except (InlayError, ValueError, TypeError, KeyError, AttributeError, RuntimeError, NotImplementedError) as error:
        return f"{type(error).__name__}: {error}"


def _fault(method: Method, build: Build) -> str | None:
    model, batch = build()
    before, alone = logits(model, batch), _row_by_row(model, batch)
    heads = tuple(newly_initialised(model))
    adapted = attach(model, method, force=True)
    loss = adapted(**batch).loss
    loss.backward()
    if not math.isfinite(loss.item()):
        return f"the loss is {loss.item()}"
    # A head always learns; the method must too.
    own = {name: p for name, p in trained_parameters(adapted).items() if not any(head in name for head in heads)}
    if method.form == "head":
        own = trained_parameters(adapted)
    if not any(p.grad is not None and p.grad.abs().sum() > 0 for p in own.values()):
        return "nothing of the method's own receives a gradient"
    with torch.no_grad():
        for parameter in own.values():
            if parameter.grad is not None:
                parameter.sub_(STEP * torch.sign(parameter.grad))
    after = logits(adapted, batch)
    if after.shape == before.shape and torch.equal(after, before):
        return "training changes nothing"
    # PEFT's prompts hide the token ids, without which decoders read a padded row's class from its padding.
    reads_padding = alone is not None and not torch.allclose(_row_by_row(adapted, batch), after, atol=TOLERANCE)
    if reads_padding and torch.allclose(alone, before, atol=TOLERANCE):
        return "a row's class depends on the padding after it"
    with tempfile.TemporaryDirectory() as folder:
        save(adapted, method, folder)
        again = restore(build()[0], method, folder)
    return None if torch.equal(logits(again, batch), after) else "what was saved does not give the same model"


def _row_by_row(model: Any, batch: dict[str, Tensor]) -> Any:
    """The logits of each text by itself, without padding; None where there is not one row of logits a text."""
    if "attention_mask" not in batch or batch["labels"].ndim > 1:
        return None
    lengths = batch["attention_mask"].sum(dim=1).tolist()
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    rows = [{name: value[i : i + 1, :length] for name, value in inputs.items()} for i, length in enumerate(lengths)]
    return torch.cat([logits(model, row) for row in rows])


@torch.no_grad()
def logits(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """The model's outputs in eval mode, labels left out."""
    model.eval()
    return model(**{name: value for name, value in batch.items() if name != "labels"}).logits


def cost(method: Method) -> int | None:
    """How many parameters of BERT-base the method trains, a new head aside; None where it does not apply."""
    from transformers import BertConfig, BertForSequenceClassification

    with torch.device("meta"):
        model = BertForSequenceClassification(BertConfig(num_labels=2))
    heads = tuple(newly_initialised(model))
    try:
        adapted = attach(model, method)
    except InlayError:
        return None
    trained = trained_parameters(adapted).items()
    if method.form == "full":
        return sum(parameter.numel() for _, parameter in trained)
    return sum(p.numel() for name, p in trained if not any(head in name for head in heads))
