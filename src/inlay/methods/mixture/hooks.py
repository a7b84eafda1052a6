"""Hooks on the base model for passes that name their tasks: as many names as rows, and a loss for each task.

Transformers computes a loss for all rows alike and for one number of labels. Where tasks are mixed, or a task's head
has another size than the base's, the labels are kept back and the loss is computed here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from inlay.errors import InlayError
from inlay.methods.mixed_loss import check_labels, joint_loss, task_losses
from inlay.methods.mixing import BASE, batch_of, other_length, tensors_in
from inlay.methods.mixture.rows import Routing, TaskRows

DECODED = ("decoder_input_ids", "decoder_inputs_embeds")
CAUSAL = ("ForCausalLM", "LMHeadModel")
UNSHIFTED = ("WithLMHeadModel",)  # XLM's and Flaubert's: a token's logits are those of its own label


class ModelHooks:
    """The pair of hooks; `outputs` says how many outputs a task's own head has, None where it has none."""

    def __init__(self, model: nn.Module, routing: Routing, outputs: Callable[[str], int | None]) -> None:
        self.routing, self.outputs = routing, outputs
        routing.handles += [
            model.register_forward_pre_hook(self.before, with_kwargs=True),
            model.register_forward_hook(self.after),
        ]

    def before(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Count the rows; keep the labels back where the model could not use them."""
        rows = self.routing.rows
        if rows is None:
            return None
        check_rows(model, args, kwargs, rows)
        rows.items = kwargs.get("num_items_in_batch")
        if kwargs.get("labels") is None:
            return None
        if not rows.mixed and self._labels(model, rows.tasks[0]) == base_labels(model):
            return None
        rows.labels = kwargs["labels"]
        given = {**kwargs, "labels": None}
        if _shifts(model) and all(kwargs.get(name) is None for name in DECODED):
            given[DECODED[0]] = model.prepare_decoder_input_ids_from_labels(labels=rows.labels)
        return args, given

    def after(self, model: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """Put the loss of the rows' tasks into the output."""
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            # By these tensors a backward pass can enter the model.
            self.routing.follow(tensor for tensor in tensors_in(output) if tensor.requires_grad)
        rows = self.routing.rows
        if rows is None or rows.labels is None:
            if rows is not None and rows.mixed and torch.is_grad_enabled():
                self._refuse_own_loss(model, output)
            return None
        labels, rows.labels = rows.labels, None
        loss = self._loss(model, rows, output["logits"] if isinstance(output, Mapping) else output[0], labels)
        if isinstance(output, tuple) and not isinstance(output, Mapping):
            return (loss, *output)
        return type(output)(**{"loss": loss, **output})  # the loss comes first, as Transformers has it

    def _loss(self, model: nn.Module, rows: TaskRows, logits: Tensor, labels: Tensor) -> Tensor:
        causal, values = _is_causal(model), [False]
        if not causal and not _shifts(model):
            own = {task: None if task == BASE else self.outputs(task) for task in rows.tasks}
            # Where no task has a head of its own, what the labels say is one of the logits: a word, a class, a choice.
            usual = base_labels(model) if any(own.values()) else logits.shape[-1]
            outputs = {task: count or usual for task, count in own.items()}
            check_labels(labels, rows.names(len(labels)), outputs)
            values = [count == 1 for count in outputs.values()]  # one output is a regression, as Transformers has it
        slots = rows.slots(logits.device)
        slots = torch.zeros(len(logits), dtype=torch.long, device=logits.device) if slots is None else slots
        regression = None
        if any(values):
            key = ("values", *values)
            regression = rows.kept(key, logits.device, lambda: torch.tensor(values)).index_select(0, slots)
        sums, counts = task_losses(logits, labels, slots, len(rows.tasks), regression=regression, causal=causal)
        # As Transformers' Trainer asks for it: of the labels of a whole update, in this call's part of which these are.
        return joint_loss(sums, counts) if rows.items is None else sums.sum() / rows.items

    def _refuse_own_loss(self, model: nn.Module, output: Any) -> None:
        """An error for a loss that the model made of other arguments than `labels`: it is a mean over all rows."""
        loss = output.get("loss") if isinstance(output, Mapping) else None
        if isinstance(loss, Tensor) and loss.requires_grad:
            raise InlayError(
                f"{type(model).__name__} made a loss of arguments other than labels, a mean over the rows of all "
                "tasks: leave them out and compute each task's loss from the outputs, or train one task at a time."
            )

    def _labels(self, model: nn.Module, task: str) -> int | None:
        return (None if task == BASE else self.outputs(task)) or base_labels(model)


def base_labels(model: nn.Module) -> int | None:
    """How many outputs the base model's own head has."""
    return getattr(getattr(model, "config", None), "num_labels", None)


def check_rows(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], rows: TaskRows) -> bool:
    """An error where a call's rows are not as many as the names; whether they could be counted. Where they never are,
    the layers count what enters them, and take nothing but one row for each name."""
    given = batch_of(model, args, kwargs)
    rows.counted = rows.counted or given is not None
    if given is None or rows.count is None or len(given) in (rows.count, rows.count * rows.copies):
        return given is not None
    raise other_length(rows.count, len(given))


def copies_of(model: nn.Module, kwargs: Mapping[str, Any]) -> int:
    """How many times each row is repeated when a text is continued: by beams, or by several answers."""
    config = kwargs.get("generation_config") or getattr(model, "generation_config", None)
    names = ("num_beams", "num_return_sequences")
    return max(int(asked or 1) for name in names for asked in (kwargs.get(name), getattr(config, name, None)))


def _shifts(model: nn.Module) -> bool:
    """Whether it is an encoder-decoder that writes: its decoder's inputs are the labels, a place on."""
    return hasattr(model, "prepare_decoder_input_ids_from_labels")


def _is_causal(model: nn.Module) -> bool:
    """Whether the logits of a token are those of the next one's label: of models that see, too, whose name ends as an
    encoder-decoder's does."""
    name = type(model).__name__
    decodes = _shifts(model) or getattr(model.config, "is_encoder_decoder", False)
    if name.endswith(UNSHIFTED):
        return False
    return name.endswith(CAUSAL) or (name.endswith("ForConditionalGeneration") and not decodes)
