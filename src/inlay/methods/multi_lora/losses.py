"""The loss of a batch that mixes tasks: the sum over tasks of the mean over that task's own labels.

So the gradient of each `B_i` is that of training task i alone on the same rows: definition 1.1 of the paper,
`L(x, y) = sum_i L(x, y_i)`. A class or a token counts by its cross-entropy, a value by its squared error; -100 is "no
label". Rows do not meet, so that a loss which is not a number stays with its task.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

NO_LABEL = -100


def row_losses(logits: Tensor, labels: Tensor, regression: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The summed loss of each row and how many labels it is a sum over.

    `logits` are (rows, ..., outputs), `labels` (rows, ...): whole numbers, also as floats, where values are mixed in.
    `regression` says which rows are values, read from the first output.
    """
    rows = len(logits)
    classes = labels.long()
    if regression is not None:
        classes = torch.where(regression, 0, classes)
    flat = logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
    each = cross_entropy(
        flat.reshape(-1, flat.shape[-1]), classes.reshape(-1), ignore_index=NO_LABEL, reduction="none"
    ).view(rows, -1)
    sums, counts = each.sum(dim=1), classes.ne(NO_LABEL).view(rows, -1).sum(dim=1)
    if regression is not None:
        errors = (flat.reshape(rows, -1)[:, 0] - labels.reshape(rows).to(flat.dtype)) ** 2
        sums = torch.where(regression, errors, sums)
    return sums, counts


def task_sums(sums: Tensor, counts: Tensor, slots: Tensor, tasks: int) -> tuple[Tensor, Tensor]:
    """Each task's summed loss and number of labels."""
    return (
        sums.new_zeros(tasks).index_add(0, slots, sums),
        counts.new_zeros(tasks).index_add(0, slots, counts),
    )


def joint_loss(sums: Tensor, counts: Tensor) -> Tensor:
    """The sum over tasks of each one's mean; a task without a label counts for nothing."""
    return torch.where(counts > 0, sums / counts.clamp(min=1), 0.0).sum()


def shifted(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Logits and labels of a causal language model, the next token's label beside each token's logits."""
    return logits[:, :-1], labels[:, 1:]


def is_value(num_labels: Sequence[int | None]) -> list[bool]:
    """Which tasks are regressions: those with one output, as Transformers has it."""
    return [count == 1 for count in num_labels]
