"""What a score has to beat: always answering the class that is most frequent in training."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np

from inlay.tasks import kinds

if TYPE_CHECKING:
    from inlay.tasks.task import Task


def majority(task: Task) -> dict[str, Any] | None:
    """The metrics of the majority class on the test split, as JSON-ready data; None where an example has no one class,
    or nothing to be tested on. Of classes that are equally frequent the first is taken."""
    if task.kind not in kinds.ONE_LABEL or not len(task.test) or not len(task.train):
        return None
    names = task.label_names or ()
    counts = Counter(task.train["label"])
    answer = max(range(len(names)), key=lambda label: counts[label])
    labels = np.asarray(task.test["label"])
    constant = np.zeros((len(labels), len(names)))
    constant[:, answer] = 1
    return {
        "answer": str(names[answer]),
        "examples": len(labels),
        "metrics": {name: float(value) for name, value in task.compute_metrics(constant, labels).items()},
    }
