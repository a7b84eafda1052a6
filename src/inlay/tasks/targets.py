"""What a model is trained on for a row's label: a number, or a list of as many numbers as its head has outputs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from inlay.tasks.schema import TaskSchema


def to_targets(schema: TaskSchema, labels: Sequence[Any]) -> list[Any]:
    """The labels of rows, as a task keeps them, as the loss reads them.

    Label sets become a 1 or 0 for each label. Class `r` of `K` ordered ones becomes the answers to `K - 1` questions:
    is it above class `k`? Values are standardised as the training rows are. Classes and probabilities stay as they are.
    """
    if schema.predicts == "value":
        return [(value - schema.mean) / schema.deviation for value in labels]
    if schema.predicts == "labels":
        outputs = range(len(schema.label_names or ()))
        return [[float(i in chosen) for i in outputs] for chosen in map(set, labels)]
    if schema.predicts == "rank":
        return [[float(rank > k) for k in range(schema.num_labels or 0)] for rank in labels]
    if schema.predicts == "values":
        scales = list(zip(schema.means or (), schema.deviations or (), strict=True))
        return [[(v - mean) / spread for v, (mean, spread) in zip(row, scales, strict=True)] for row in labels]
    return [list(map(float, row)) for row in labels] if schema.predicts == "shares" else list(labels)


def strata(schema: TaskSchema, rows: Sequence[Mapping[str, Any]]) -> list[int] | None:
    """The class by which each row is drawn into splits; None: it has none.

    Of a set of labels it is the rarest one in these rows, and rows without a label are a class of their own; of
    probabilities it is the likeliest class.
    """
    if schema.predicts in ("class", "rank"):
        return [row["label"] for row in rows]
    if schema.predicts == "shares":
        return [max(range(len(row["label"])), key=row["label"].__getitem__) for row in rows]
    if schema.predicts == "labels":
        counts = Counter(label for row in rows for label in row["label"])
        nothing = len(schema.label_names or ())
        return [min(row["label"], key=lambda label: (counts[label], label), default=nothing) for row in rows]
    return None
