"""What a head's outputs say where an example is not given one class, one value or a text: in words, and scored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from inlay.tasks import label_metrics

if TYPE_CHECKING:
    from inlay.tasks.schema import TaskSchema

HALF = 0.5


def decode(schema: TaskSchema, outputs: np.ndarray, *, probabilities: bool) -> list[dict[str, Any]]:
    """An answer for each row of outputs.

    Label sets: `labels`, those whose probability reaches their threshold, the likeliest first, and their `scores`.
    """
    names = schema.label_names or ()
    shares = _sigmoid(outputs)
    chosen = shares >= thresholds_of(schema)
    found: list[dict[str, Any]] = []
    for row, own in zip(shares, chosen, strict=True):
        ordered = [int(i) for i in np.argsort(-row, kind="stable") if own[i]]
        answer = {"labels": [names[i] for i in ordered], "scores": [float(row[i]) for i in ordered]}
        found.append(answer | ({"probabilities": _named(names, row)} if probabilities else {}))
    return found


def score(schema: TaskSchema, outputs: np.ndarray, targets: np.ndarray) -> dict[str, float]:
    """The task's metrics from outputs and what the loss reads."""
    shares = _sigmoid(outputs)
    return label_metrics.of_label_sets(schema.metrics, shares, shares >= thresholds_of(schema), targets > HALF)


def thresholds_of(schema: TaskSchema) -> np.ndarray:
    """From which probability a label is given, label by label."""
    if schema.thresholds is not None:
        return np.asarray(schema.thresholds)
    return np.full(len(schema.label_names or ()), HALF)


# ------------------------------------------------------------------------------------------------------ thresholds

FEWEST = 10  # rows with a label, and without it, from which on it gets a threshold of its own


def choose_thresholds(outputs: np.ndarray, targets: np.ndarray) -> tuple[float, ...]:
    """The threshold of each label with the highest F1 on these rows.

    A label that too few of the rows have, or lack, gets the one threshold of all labels that has the highest micro-F1.
    Of several that are equally good, the one nearest to a half is taken.
    """
    shares, true = _sigmoid(outputs), targets > HALF
    common = _best(shares.ravel(), true.ravel())
    enough = (true.sum(0) >= FEWEST) & ((~true).sum(0) >= FEWEST)
    return tuple(_best(shares[:, i], true[:, i]) if enough[i] else common for i in range(shares.shape[1]))


def _best(shares: np.ndarray, true: np.ndarray) -> float:
    """The threshold with the highest F1: halfway between two neighbouring probabilities."""
    if not true.any():
        return HALF
    order = np.argsort(-shares, kind="stable")
    ranked = shares[order]
    hits = np.cumsum(true[order])
    f1 = 2 * hits / (np.arange(1, len(ranked) + 1) + true.sum())
    last = np.append(ranked[1:] < ranked[:-1], True)  # where a threshold can stand: after equal ones
    between = (ranked + np.append(ranked[1:], 0.0)) / 2
    good = last & (f1 >= f1[last].max() - 1e-12)
    candidates = np.where((ranked >= HALF) & (np.append(ranked[1:], 0.0) < HALF), HALF, between)[good]
    return float(candidates[np.argmin(np.abs(candidates - HALF))])


def _named(names: Sequence[str], row: np.ndarray) -> Mapping[str, float]:
    return dict(zip(names, map(float, row), strict=True))


def _sigmoid(outputs: np.ndarray) -> np.ndarray:
    wide = outputs.astype(np.float64)
    return np.exp(-np.logaddexp(0.0, -wide))
