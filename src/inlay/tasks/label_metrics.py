"""Metrics of sets of labels, by scikit-learn where it has them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from inlay.errors import unknown


def of_label_sets(names: Sequence[str], shares: np.ndarray, chosen: np.ndarray, true: np.ndarray) -> dict[str, float]:
    """The named metrics of label sets: rows x labels, of probabilities, of what is answered, and of what is right."""
    return {name: _found(name, _OF_SETS)(shares, chosen, true) for name in names}


def _micro_f1(shares: np.ndarray, chosen: np.ndarray, true: np.ndarray) -> float:
    """F1 over all pairs of a row and a label."""
    both = float((chosen & true).sum())
    total = float(chosen.sum() + true.sum())
    return 2 * both / total if total else 0.0


def _macro_f1(shares: np.ndarray, chosen: np.ndarray, true: np.ndarray) -> float:
    """Mean of the labels' F1 over the labels that occur, as answered or as right."""
    total = chosen.sum(0) + true.sum(0)
    each = 2 * (chosen & true).sum(0)[total > 0] / total[total > 0]
    return float(each.mean()) if len(each) else 0.0


def _average_precision(shares: np.ndarray, chosen: np.ndarray, true: np.ndarray) -> float:
    """Mean of the labels' average precision over the labels that some row has. No threshold has a say."""
    from sklearn.metrics import average_precision_score

    there = true.any(0)
    return float(average_precision_score(true[:, there], shares[:, there], average="macro")) if there.any() else 0.0


def _subset_accuracy(shares: np.ndarray, chosen: np.ndarray, true: np.ndarray) -> float:
    """Share of the rows whose whole set is right."""
    return float(np.mean((chosen == true).all(1)))


_OF_SETS: dict[str, Callable[[np.ndarray, np.ndarray, np.ndarray], float]] = {
    "average-precision": _average_precision,
    "micro-f1": _micro_f1,
    "macro-f1": _macro_f1,
    "subset-accuracy": _subset_accuracy,
}
ALL = (*_OF_SETS,)
LOWER_IS_BETTER: frozenset[str] = frozenset()


def _found(name: str, known: dict[str, Callable[..., float]]) -> Callable[..., float]:
    if name not in known:
        raise unknown("metric", name, known)
    return known[name]
