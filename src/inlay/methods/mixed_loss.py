"""The loss of a batch that mixes tasks: the sum over tasks of the mean over that task's own labels.

So the gradient of each task's parameters is that of training the task alone on the same rows: definition 1.1 of the
Multi-LoRA paper, `L(x, y) = sum_i L(x, y_i)`. A class or a token counts by its cross-entropy, a value by its squared
error; -100 is "no label". Rows do not meet, so that a loss which is not a number stays with its task.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from inlay.errors import InlayError

NO_LABEL = -100


def task_losses(
    logits: Tensor,
    labels: Tensor,
    slots: Tensor,
    tasks: int,
    *,
    regression: Tensor | None = None,
    causal: bool = False,
) -> tuple[Tensor, Tensor]:
    """Each task's summed loss and how many labels it is a sum over.

    `logits` are (rows, ..., outputs), `labels` (rows, ...): whole numbers, also as floats, where values are mixed in.
    `slots` gives the number of each row's task, below `tasks`. `regression` says which rows are values, read from the
    first output. `causal`: the logits of each token are those of the next token's label.
    """
    if causal:
        logits, labels, regression = logits[:, :-1], labels[:, 1:], None
    sums, counts = _row_losses(logits, labels, regression)
    return (
        sums.new_zeros(tasks).index_add(0, slots, sums),
        counts.new_zeros(tasks).index_add(0, slots, counts),
    )


def joint_loss(sums: Tensor, counts: Tensor) -> Tensor:
    """The sum over tasks of each one's mean; a task without a label counts for nothing."""
    return torch.where(counts > 0, sums / counts.clamp(min=1), 0.0).sum()


def check_labels(labels: Tensor, names: Sequence[str], outputs: Mapping[str, int | None]) -> None:
    """An error for a class that its row's task does not have; `outputs` are the tasks' by name, of a regression 1.

    Only where labels are at hand: on a GPU it would be waited for, and the loss is infinite there.
    """
    if labels.device.type != "cpu" or torch.compiler.is_compiling():
        return
    values = labels.numpy().reshape(len(names), -1)
    most = np.array([outputs[name] or np.inf for name in names]).reshape(-1, 1)
    wrong = (values != NO_LABEL) & (most > 1) & ~((values >= 0) & (values < most) & (values == np.floor(values)))
    if wrong.any():
        row, place = (int(i[0]) for i in wrong.nonzero())
        raise InlayError(
            f"Row {row} has the label {values[row, place]}, and its task {names[row]!r} the classes 0 to "
            f"{int(most[row, 0]) - 1}. Give it one of them, or {NO_LABEL} for none."
        )


def _row_losses(logits: Tensor, labels: Tensor, regression: Tensor | None) -> tuple[Tensor, Tensor]:
    """Each row's summed loss and number of labels."""
    rows = len(logits)
    if len(labels) != rows or labels.numel() * logits.shape[-1] != logits.numel():
        raise InlayError(
            f"The labels are {tuple(labels.shape)}, and the logits {tuple(logits.shape)}: rows of several tasks, or of "
            "one with a head of its own size, have one class or value each, or one for each token."
        )
    classes, kept = labels.long(), labels.ne(NO_LABEL)
    if regression is not None:
        regression = regression & kept.view(rows)
        classes = torch.where(regression, 0, classes.view(rows))
    flat = logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
    each = cross_entropy(
        flat.reshape(-1, flat.shape[-1]), classes.reshape(-1), ignore_index=NO_LABEL, reduction="none"
    ).view(rows, -1)
    sums = each.sum(dim=1) if each.shape[1] > 1 else each.view(rows)
    counts = kept.view(rows, -1).sum(dim=1)
    if regression is not None:
        errors = (flat.reshape(rows, -1)[:, 0] - labels.reshape(rows).to(flat.dtype)) ** 2
        sums = torch.where(regression, errors, sums)
    return sums, counts
