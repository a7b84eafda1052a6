"""Evaluation runs rows of about the same length together, and gives back each row's own answer in the split's place."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import toys
from torch import nn

import zoo
from inlay.records import Spec
from inlay.tasks.encode import Encoded
from inlay.training import evaluate, predict
from inlay.training.batches import order_by_length

SPEC = Spec(model="toy", method="lora", task="toy", batch_size=8)


def widths(model: nn.Module) -> list[int]:
    """The lengths to which the batches are padded that the model is called with from now on."""
    seen: list[int] = []
    model.register_forward_pre_hook(lambda _, __, given: seen.append(given["input_ids"].shape[1]), with_kwargs=True)
    return seen


def alone(model: nn.Module, rows: toys.Rows) -> list[Any]:
    """What the model says of each row by itself, with nothing padded."""
    with torch.no_grad():
        return [model(**toys.collate([row]))["logits"][0].numpy() for row in rows]


def tagged(count: int) -> toys.ToyTask:
    """Every token has a tag; rows differ in length."""
    rows = toys.text_rows(count, 5)
    for row in rows:
        row["labels"] = [number % 3 for number in row["input_ids"]]
    return toys.ToyTask(kind="token-classification", test=rows)


def ideal(rows: toys.Rows) -> list[int]:
    """The longest of every eight rows, when they are sorted."""
    return sorted((len(row["input_ids"]) for row in rows), reverse=True)[:: SPEC.batch_size]


def test_rows_are_padded_to_their_like_and_answered_in_order() -> None:
    task, model = toys.text_task(), toys.backbone().model.eval()
    expected = alone(model, task.test)
    seen = widths(model)
    metrics, predictions = evaluate(model, task, "test", None, SPEC)
    assert seen == ideal(task.test)
    np.testing.assert_allclose(predictions, np.stack(expected), rtol=1e-5, atol=1e-6)
    truth = np.array([row["labels"] for row in task.test])
    assert metrics["accuracy"] == np.mean(np.stack(expected).argmax(-1) == truth)
    scores = torch.tensor(np.stack(expected), dtype=torch.float64)
    assert metrics["loss"] == pytest.approx(float(nn.functional.cross_entropy(scores, torch.tensor(truth))), rel=1e-6)


def test_tokens_come_back_to_their_rows() -> None:
    task, model = tagged(21), toys.backbone("bert", "token-classification").model.eval()
    expected = alone(model, task.test)
    seen = widths(model)
    metrics, predictions = evaluate(model, task, "test", None, SPEC)
    assert seen == ideal(task.test)
    for found, wanted in zip(predictions, expected, strict=True):
        np.testing.assert_allclose(found[: len(wanted)], wanted, rtol=1e-5, atol=1e-6)
    right = [one.argmax(-1) == row["labels"] for one, row in zip(expected, task.test, strict=True)]
    assert metrics["accuracy"] == np.concatenate(right).mean()


class Unlabelled(toys.ToyTask):
    """Takes new rows, which have no labels."""

    def encode_inputs(self, rows: toys.Rows, processor: Any, max_length: int | None) -> Encoded:
        return Encoded({name: [row[name] for row in rows] for name in ("input_ids", "attention_mask")})


def test_new_rows_are_answered_in_order() -> None:
    rows, model = toys.text_rows(21, 6), toys.backbone().model.eval()
    expected = alone(model, rows)
    seen = widths(model)
    predictions, _ = predict(model, Unlabelled(), rows, None, SPEC)
    assert seen == ideal(rows)
    np.testing.assert_allclose(predictions, np.stack(expected), rtol=1e-5, atol=1e-6)


def test_the_order_is_certain_and_pictures_keep_theirs() -> None:
    encoded = Encoded({"input_ids": [[zoo.BOS] * length for length in (2, 5, 2, 7, 5)]})
    assert order_by_length(encoded) == [3, 1, 4, 0, 2]
    assert order_by_length(toys.image_rows(3, 1)) == [0, 1, 2]
