"""Metrics of sets of labels, of probabilities, of ordered classes and of several values."""

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
# ------------------------------------------------------------------------------------------ probabilities of classes


def of_shares(names: Sequence[str], shares: np.ndarray, true: np.ndarray) -> dict[str, float]:
    """The named metrics of predicted probabilities, rows x classes, beside those that are right."""
    return {name: _found(name, _OF_SHARES)(shares, true) for name in names}


def _kl(shares: np.ndarray, true: np.ndarray) -> float:
    """Mean of `sum_k t_k log(t_k / p_k)`; a probability of 0 counts as the smallest number that there is."""
    floor = np.finfo(np.float64).tiny
    ratio = np.log(np.maximum(true, floor)) - np.log(np.maximum(shares, floor))
    return float(np.mean(np.where(true > 0, true * ratio, 0.0).sum(-1)))


def _brier(shares: np.ndarray, true: np.ndarray) -> float:
    """Mean of `sum_k (p_k - t_k)^2`, from 0 to 2."""
    return float(np.mean(((shares - true) ** 2).sum(-1)))


def _argmax_accuracy(shares: np.ndarray, true: np.ndarray) -> float:
    """Share of the rows whose likeliest class is the one that is right with the highest probability."""
    return float(np.mean(shares.argmax(-1) == true.argmax(-1)))


_OF_SHARES: dict[str, Callable[[np.ndarray, np.ndarray], float]] = {
    "kl": _kl,
    "brier": _brier,
    "accuracy": _argmax_accuracy,
}


# ------------------------------------------------------------------------------------------------- ordered classes


def of_ranks(names: Sequence[str], predicted: np.ndarray, true: np.ndarray, classes: int) -> dict[str, float]:
    """The named metrics of predicted ranks among so many ordered classes, counted from 0."""
    return {name: _found(name, _OF_RANKS)(predicted, true, classes) for name in names}


def _quadratic_kappa(predicted: np.ndarray, true: np.ndarray, classes: int) -> float:
    """Cohen's kappa with quadratic weights: `1 - sum (i-j)^2 O_ij / sum (i-j)^2 E_ij`; 0 where all is one class."""
    distance = (np.arange(classes)[:, None] - np.arange(classes)) ** 2
    shares = [np.bincount(each, minlength=classes) / len(each) for each in (true, predicted)]
    expected = float((distance * np.outer(*shares)).sum())
    return 1.0 - float(np.mean((predicted - true) ** 2)) / expected if expected else 0.0


_OF_RANKS: dict[str, Callable[[np.ndarray, np.ndarray, int], float]] = {
    "quadratic-kappa": _quadratic_kappa,
    "rank-mae": lambda predicted, true, _: float(np.mean(np.abs(predicted - true))),
    "within-one": lambda predicted, true, _: float(np.mean(np.abs(predicted - true) <= 1)),
    "accuracy": lambda predicted, true, _: float(np.mean(predicted == true)),
}


# -------------------------------------------------------------------------------------------------- several values


def of_columns(
    names: Sequence[str], columns: Sequence[str], predicted: np.ndarray, true: np.ndarray
) -> dict[str, float]:
    """The named metrics of values, rows x columns: the mean over the columns, and each column's, as in `mse[price]`."""
    each = {name: [_found(name, _OF_COLUMN)(p, t) for p, t in zip(predicted.T, true.T, strict=True)] for name in names}
    means = {name: float(np.mean(found)) for name, found in each.items()}
    if len(columns) < 2:
        return means
    return means | {
        f"{name}[{column}]": value for name, found in each.items() for column, value in zip(columns, found, strict=True)
    }


def _pearson(predicted: np.ndarray, true: np.ndarray) -> float:
    from scipy.stats import pearsonr

    return 0.0 if _constant(predicted, true) else float(pearsonr(predicted, true).statistic)


def _spearman(predicted: np.ndarray, true: np.ndarray) -> float:
    from scipy.stats import spearmanr

    return 0.0 if _constant(predicted, true) else float(spearmanr(predicted, true).statistic)


def _constant(predicted: np.ndarray, true: np.ndarray) -> bool:
    return len(true) < 2 or np.ptp(predicted) == 0 or np.ptp(true) == 0


def _r2(predicted: np.ndarray, true: np.ndarray) -> float:
    """`1 - sum (p - t)^2 / sum (t - mean t)^2`; 0 where all true values are the same."""
    spread = float(((true - true.mean()) ** 2).sum())
    return 1.0 - float(((predicted - true) ** 2).sum()) / spread if spread else 0.0


_OF_COLUMN: dict[str, Callable[[np.ndarray, np.ndarray], float]] = {
    "pearson": _pearson,
    "spearman": _spearman,
    "r2": _r2,
    "mse": lambda predicted, true: float(np.mean((predicted - true) ** 2)),
}

ALL = tuple(dict.fromkeys((*_OF_SETS, *_OF_SHARES, *_OF_RANKS, *_OF_COLUMN)))
LOWER_IS_BETTER = frozenset({"kl", "brier", "rank-mae", "mse"})


def _found(name: str, known: dict[str, Callable[..., float]]) -> Callable[..., float]:
    if name not in known:
        raise unknown("metric", name, known)
    return known[name]
