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
    Probabilities of classes: `label`, the likeliest, and `score`, its probability. Ordered classes: `label`, the median
    of their distribution, which is what the fewest ranks are expected to be wrong by, and `score`. Several values:
    `values`, by name.
    """
    names = schema.label_names or ()
    if schema.predicts == "values":
        return [{"values": _named(names, row)} for row in unscale(schema, outputs)]
    shares = to_shares(schema, outputs)
    found: list[dict[str, Any]]
    if schema.predicts == "labels":
        chosen = shares >= thresholds_of(schema)
        ranked = np.argsort(-shares, axis=-1, kind="stable")
        ordered = [[int(i) for i in row if own[i]] for row, own in zip(ranked, chosen, strict=True)]
        found = [
            {"labels": [names[i] for i in own], "scores": [float(row[i]) for i in own]}
            for row, own in zip(shares, ordered, strict=True)
        ]
    else:
        best = _median(shares) if schema.predicts == "rank" else shares.argmax(-1)
        found = [{"label": names[i], "score": float(row[i])} for i, row in zip(best, shares, strict=True)]
    if not probabilities:
        return found
    return [answer | {"probabilities": _named(names, row)} for answer, row in zip(found, shares, strict=True)]


def score(schema: TaskSchema, outputs: np.ndarray, targets: np.ndarray) -> dict[str, float]:
    """The task's metrics from outputs and what the loss reads."""
    if schema.predicts == "values":
        return label_metrics.of_columns(
            schema.metrics, schema.label_names or (), unscale(schema, outputs), unscale(schema, targets)
        )
    shares = to_shares(schema, outputs)
    if schema.predicts == "shares":
        return label_metrics.of_shares(schema.metrics, shares, targets.astype(np.float64))
    if schema.predicts == "rank":
        return label_metrics.of_ranks(
            schema.metrics, _median(shares), (targets > HALF).sum(-1), len(schema.label_names or ())
        )
    return label_metrics.of_label_sets(schema.metrics, shares, shares >= thresholds_of(schema), targets > HALF)


def to_shares(schema: TaskSchema, outputs: np.ndarray) -> np.ndarray:
    """The probability of each class or label, rows x names, from a head's outputs."""
    wide = outputs.astype(np.float64)
    if schema.predicts == "labels":
        return np.exp(_log_sigmoid(wide))
    if schema.predicts == "shares":
        shifted = np.exp(wide - wide.max(axis=-1, keepdims=True))
        whole: np.ndarray = shifted / shifted.sum(axis=-1, keepdims=True)
        return whole
    # Ordered: output k is the logit of P(y > k | y >= k), and
    # P(y = k) = P(y <= k | y >= k) prod_{j < k} P(y > j | y >= j).
    nothing = np.zeros((len(wide), 1))
    reached = np.concatenate([nothing, np.cumsum(_log_sigmoid(wide), axis=1)], axis=1)
    stayed = np.concatenate([_log_sigmoid(-wide), nothing], axis=1)
    found: np.ndarray = np.exp(reached + stayed)
    return found


def unscale(schema: TaskSchema, values: np.ndarray) -> np.ndarray:
    """Several values as the data has them, from values as the model is trained on them."""
    outputs = len(schema.label_names or ())
    means, spreads = schema.means or (0.0,) * outputs, schema.deviations or (1.0,) * outputs
    found: np.ndarray = values.astype(np.float64).reshape(len(values), -1) * spreads + means
    return found


def _median(shares: np.ndarray) -> np.ndarray:
    """The first class up to which there is at least half of the probability."""
    found: np.ndarray = (np.cumsum(shares, axis=-1) < HALF - 1e-12).sum(-1)
    return np.minimum(found, shares.shape[-1] - 1)


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
    shares, true = np.exp(_log_sigmoid(outputs.astype(np.float64))), targets > HALF
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


def _log_sigmoid(wide: np.ndarray) -> np.ndarray:
    found: np.ndarray = -np.logaddexp(0.0, -wide)
    return found
