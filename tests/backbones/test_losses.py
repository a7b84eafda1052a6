"""Losses put on a model: what they are worth, in every method's output, and in an update however it is split."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import zoo
from inlay.backbones import losses
from inlay.errors import InlayError
from inlay.methods.attach import attach
from inlay.methods.registry import all_methods, get
from inlay.records import Spec
from inlay.tasks import kinds
from inlay.tasks.schema import TaskSchema
from inlay.training import FitOptions, FitResult, fit

sys.path.insert(0, str(Path(__file__).parents[1] / "training"))
import toys

WEIGHTS = (0.25, 1.0, 3.5)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def weighted(logits: np.ndarray, labels: np.ndarray) -> float:
    rows = [-WEIGHTS[y] * log_softmax(z)[y] for z, y in zip(logits, labels, strict=True) if y >= 0]
    return float(np.sum(rows) / len(rows))


def binary(logits: np.ndarray, labels: np.ndarray) -> float:
    return float(np.mean(np.logaddexp(0, logits) - labels * logits))


def soft(logits: np.ndarray, labels: np.ndarray) -> float:
    return float(np.mean([-(t * log_softmax(z)).sum() for z, t in zip(logits, labels, strict=True)]))


def ordered(logits: np.ndarray, labels: np.ndarray) -> float:
    """-log P(y) by the products of conditional probabilities, one row after another."""
    found = []
    for z, answers in zip(logits, labels, strict=True):
        above = 1 / (1 + np.exp(-z))
        rank = int(answers.sum())
        likelihood = np.prod(above[:rank]) * (1 - above[rank] if rank < len(z) else 1.0)
        found.append(-np.log(likelihood))
    return float(np.mean(found))


def draw_shares(rng: Any, rows: int) -> torch.Tensor:
    return torch.tensor(rng.dirichlet([0.5] * 3, rows))


def draw_ranks(rng: Any, rows: int) -> torch.Tensor:
    return torch.tensor(rng.integers(0, 5, (rows, 1)) > np.arange(4)).double()


# Transformers' own: no loss of ours, and the `problem_type` that the kind of task has.
NATIVE: dict[str, tuple[str, Any, Any]] = {
    "regression": (
        "regression",
        lambda logits, labels: float(np.mean((logits - labels) ** 2)),
        lambda rng, rows: torch.tensor(rng.normal(size=(rows, 4)), dtype=torch.float32),
    ),
    "multi_label_classification": (
        "multi_label_classification",
        binary,
        lambda rng, rows: torch.tensor(rng.integers(0, 2, (rows, 4)), dtype=torch.float32),
    ),
}
CASES: dict[str, tuple[Any, Any, Any]] = {
    "class weights": (
        losses.WeightedClasses(WEIGHTS),
        weighted,
        lambda rng, rows: torch.tensor(rng.integers(0, 3, rows)),
    ),
    "soft labels": (losses.SoftLabels(), soft, draw_shares),
    "ordered classes": (losses.OrderedClasses(), ordered, draw_ranks),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_loss_is_that_of_plain_float64(case: str, dtype: torch.dtype) -> None:
    loss, oracle, draw = CASES[case]
    rng = np.random.default_rng(0)
    for rows in (1, 2, 7):
        labels = draw(rng, rows)
        outputs = labels.shape[-1] if labels.ndim > 1 else 3
        logits = torch.tensor(rng.normal(0, 4, (rows, outputs))).to(dtype)
        found = float(loss(logits, labels))
        rel = 1e-12 if dtype is torch.float64 else 1e-5
        assert found == pytest.approx(oracle(logits.double().numpy(), labels.numpy()), rel=rel)


@pytest.mark.parametrize("case", CASES)
def test_gradients_are_right(case: str) -> None:
    loss, _, draw = CASES[case]
    rng = np.random.default_rng(1)
    labels = draw(rng, 4)
    outputs = labels.shape[-1] if labels.ndim > 1 else 3
    logits = torch.tensor(rng.normal(size=(4, outputs)), requires_grad=True)
    assert torch.autograd.gradcheck(lambda z: loss(z, labels), logits)


def test_rows_without_a_label_do_not_count() -> None:
    logits = torch.tensor(np.random.default_rng(2).normal(size=(4, 3)))
    labels = torch.tensor([0, -100, 2, -100])
    found = losses.WeightedClasses(WEIGHTS)(logits, labels)
    assert float(found) == pytest.approx(weighted(logits.numpy(), labels.numpy()), rel=1e-12)


PROBLEMS: dict[type, str] = {
    losses.SoftLabels: "multi_label_classification",
    losses.OrderedClasses: "multi_label_classification",
}


def test_tasks_say_which_loss_they_need() -> None:
    for name, kind in kinds.TABLE.items():
        schema = TaskSchema("t", name, ("text",), (), ("a", "b"))
        found = losses.of_schema(schema)
        if kind.predicts in ("shares", "rank"):
            assert found is not None
            assert kind.loss == PROBLEMS[type(found)]
        else:
            assert found is None
    weighted_task = TaskSchema("t", "classification", ("text",), (), ("a", "b"), class_weights=(1.0, 2.0))
    assert isinstance(losses.of_schema(weighted_task), losses.WeightedClasses)


def adapted(method: str, loss: Any, num_labels: int) -> tuple[Any, dict[str, torch.Tensor]]:
    """A tiny text model, or a vision model for methods of these, with the loss and the method; and a batch for it."""
    for family in ("bert", "vit"):
        model, batch = zoo.tiny(family, "classification", num_labels=num_labels)
        settings = {"image_size": zoo.IMAGE_SIZE} if family == "vit" and get(method).takes("image_size") else {}
        # As `backbones.load` sets it for the kind: a type whose targets have the same shape.
        model.config.problem_type = loss if isinstance(loss, str) else PROBLEMS.get(type(loss))
        losses.install(model, None if isinstance(loss, str) else loss)
        try:
            return attach(model, method, settings=settings).eval(), batch
        except InlayError:
            continue
    raise AssertionError(f"{method} fits neither a BERT nor a ViT")


@pytest.mark.parametrize("case", [*CASES, *NATIVE])
def test_the_loss_is_in_the_output_of_every_method(case: str) -> None:
    loss, oracle, draw = (CASES | NATIVE)[case]
    rng = np.random.default_rng(3)
    for method in all_methods():
        labels = draw(rng, 3)
        model, batch = adapted(method, loss, labels.shape[-1] if labels.ndim > 1 else 3)
        labels = labels.float() if labels.is_floating_point() else labels
        output = model(**{**batch, "labels": labels})
        expected = oracle(output["logits"].detach().double().numpy(), labels.numpy())
        assert output["loss"].item() == pytest.approx(expected, rel=1e-5), method
        assert output["loss"].requires_grad
        assert model(**{name: value for name, value in batch.items() if name != "labels"}).get("loss") is None, method


def trained(folder: Path, loss: Any, **changes: Any) -> FitResult:
    task, backbone = toys.text_task(train=22), toys.backbone("bert", dropout=0.0)
    losses.install(backbone.model, loss)
    spec = Spec(model="toy", method="lora", task="toy", epochs=1, batch_size=16, learning_rate=1e-2, **changes)
    return fit(backbone, task, get("lora"), spec, folder, FitOptions(progress=False))


def test_an_update_is_the_same_however_it_is_split(tmp_path: Path) -> None:
    loss = losses.WeightedClasses(WEIGHTS)
    runs = [trained(tmp_path / str(n), loss, gradient_accumulation=n) for n in (1, 4)]
    whole, split = ([entry["loss"] for entry in run.history if "loss" in entry] for run in runs)
    assert split == pytest.approx(whole, rel=2e-4)
    plain = trained(tmp_path / "plain", None)
    assert plain.history[0] != runs[0].history[0]
