"""How good what a model says of each row is: greater is better, and the mean is what the metric in words is of."""

from __future__ import annotations

from statistics import fmean
from typing import Any

import numpy as np

from inlay.tasks import kept
from inlay.tasks.schema import TaskSchema

WORDS = {
    "class": "share of rows that are right",
    "labels": "share of a row's labels that are right",
    "shares": "squared distance of the probabilities, less is better",
    "rank": "ranks off, less is better",
    "values": "squared error of the standardised values, less is better",
    "value": "squared error, less is better",
    "tags": "share of a row's tags that are right",
    "text": "loss per token, less is better",
    "masked": "loss per masked token, less is better",
    "vector": "reciprocal rank of what belongs to a row",
    "span": "F1 of the words of an answer",
}


def score_rows(schema: TaskSchema, rows: Any, encoded: Any, outputs: np.ndarray) -> list[float]:
    """A number for each row of a split, from the outputs as `reduce_logits` leaves them; greater is better.

    Of a text it is its loss, divided by the mean number of tokens of a text, so that the mean over rows is the loss per
    token; of masked tokens in the same way.
    """
    found = kept.OF[schema.predicts](kept.TestedRows(schema, rows, encoded, outputs)).values
    if schema.predicts in ("text", "masked"):
        counted = "tokens" if schema.predicts == "text" else "masked"
        losses, tokens = (np.asarray(found[name].to_pylist(), dtype=np.float64) for name in ("loss", counted))
        return (-losses * tokens / max(tokens.mean(), 1.0)).tolist()
    if schema.predicts == "shares":
        true, said = (np.asarray(found[name].to_pylist()) for name in ("label", "probabilities"))
        return (-((true - said) ** 2).sum(-1)).tolist()
    if schema.predicts == "values":
        true, said = (np.asarray(found[name].to_pylist()) for name in ("label", "prediction"))
        return (-(((true - said) / (schema.deviations or 1.0)) ** 2).mean(-1)).tolist()
    if schema.predicts == "vector" and "rank" in found:
        ways = [found[name].to_pylist() for name in ("rank", kept.IMAGE_RANK) if name in found]
        return (1 / np.asarray(ways, dtype=np.float64)).mean(axis=0).tolist()
    if schema.predicts == "span":
        return found["f1"].to_pylist()
    pairs = list(zip(found["label"].to_pylist(), found["prediction"].to_pylist(), strict=True))
    if schema.predicts == "value":
        return [-((true - said) ** 2) for true, said in pairs]
    if schema.predicts == "labels":
        many = len(schema.label_names or ()) or 1
        return [1 - len(set(true) ^ set(said)) / many for true, said in pairs]
    if schema.predicts == "rank":
        names = schema.label_names or ()
        return [-abs(float(names.index(true) - names.index(said))) for true, said in pairs]
    if schema.predicts == "tags":
        return [fmean(a == b for a, b in zip(*pair, strict=True)) if pair[0] else 1.0 for pair in pairs]
    return [float(true == said) for true, said in pairs]


def shown(schema: TaskSchema, mean: float) -> float:
    """A mean of these numbers as people know it: errors and losses are positive."""
    return abs(mean) if schema.predicts in ("value", "values", "shares", "rank", "text", "masked") else mean
