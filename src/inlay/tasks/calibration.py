"""Probabilities of classes from a head's outputs, and the temperature that makes them honest.

    p = softmax(z / T)

One T > 0 changes no order of classes, so no prediction. It is chosen on rows that were held out of training, by the
least cross-entropy (Guo et al. 2017, On Calibration of Modern Neural Networks). Few rows may all be right, and the loss
then falls for as long as T does. So of K classes the true one of each of n rows counts `(n + 1) / (n + K)` and the
others `1 / (n + K)` each, as Platt (1999) has it for two classes: there is a minimum, with many rows the same.
"""

from __future__ import annotations

import numpy as np

BINS = 15  # of the score, equally wide
LEAST, MOST = 1e-3, 1e3  # of T; beyond, probabilities are 0 and 1, or all alike
HALVINGS = 60


def to_probabilities(logits: np.ndarray, temperature: float | None = None) -> np.ndarray:
    """softmax(z / T), rows x classes, in float64; None is a T of 1."""
    wide = logits.astype(np.float64)
    wide = wide - wide.max(axis=-1, keepdims=True)
    found: np.ndarray = np.exp(wide if temperature is None else wide / temperature)
    return found / found.sum(axis=-1, keepdims=True)


def choose_temperature(logits: np.ndarray, labels: np.ndarray) -> float:
    """The T of the least cross-entropy with the targets above, on these rows.

    It is convex in `b = 1 / T`, with the derivative `mean_rows(sum_k (p_k - y_k) z_k)`: the one zero is found by
    halving. Outputs that are wrong more than chance have no zero: T is then the largest, and all classes alike.
    """
    rows, classes = logits.shape
    wide = logits.astype(np.float64)
    wide = wide - wide.max(axis=-1, keepdims=True)
    targets = np.full((rows, classes), 1 / (rows + classes))
    targets[np.arange(rows), labels] += rows / (rows + classes)
    low, high = np.log(1 / MOST), np.log(1 / LEAST)
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        slope = ((to_probabilities(wide, float(np.exp(-middle))) - targets) * wide).sum()
        low, high = (low, middle) if slope > 0 else (middle, high)
    return float(np.exp(-(low + high) / 2))


def bin_scores(score: np.ndarray, right: np.ndarray) -> tuple[list[list[float]], float]:
    """For each bin of the score with anything in it: its rows, their mean score and their accuracy. And the expected
    calibration error, sum_b n_b / n |accuracy_b - score_b| (Guo et al. 2017)."""
    place = np.minimum((score * BINS).astype(int), BINS - 1)
    told, error = [], 0.0
    for each in range(BINS):
        inside = place == each
        if count := int(inside.sum()):
            mean, accuracy = float(score[inside].mean()), float(right[inside].mean())
            told.append([count, mean, accuracy])
            error += count / len(score) * abs(accuracy - mean)
    return told, error


def measure_calibration(logits: np.ndarray, labels: np.ndarray, temperature: float | None = None) -> dict[str, float]:
    """The cross-entropy of the true classes (`nll`), and the expected calibration error (`ece`) of the score of the
    predicted class, as of `bin_scores`."""
    shares = to_probabilities(logits, temperature)
    rows = np.arange(len(labels))
    best = logits.argmax(axis=-1)
    _, ece = bin_scores(shares[rows, best], best == labels)
    true = np.maximum(shares[rows, labels], np.finfo(np.float64).tiny)
    return {"nll": float(-np.log(true).mean()), "ece": ece}
