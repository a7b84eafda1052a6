"""The temperature of classes' probabilities, against torch in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from inlay.tasks.calibration import LEAST, MOST, choose_temperature, measure_calibration, to_probabilities
from inlay.tasks.schema import TaskSchema


def drawn(seed: int, rows: int, classes: int, spread: float) -> tuple[np.ndarray, np.ndarray]:
    """Logits that know something of the labels, and are too sure by `spread`."""
    generator = np.random.default_rng(seed)
    labels = generator.integers(classes, size=rows)
    logits = generator.normal(size=(rows, classes)) + 1.5 * np.eye(classes)[labels]
    return (logits * spread).astype(np.float32), labels


def loss(logits: np.ndarray, labels: np.ndarray, log_temperature: torch.Tensor) -> torch.Tensor:
    """The cross-entropy with smoothed targets, by torch."""
    rows, classes = logits.shape
    targets = (torch.nn.functional.one_hot(torch.tensor(labels), classes) * rows + 1.0) / (rows + classes)
    scaled = torch.tensor(logits, dtype=torch.float64) / log_temperature.exp()
    return -(targets * scaled.log_softmax(-1)).sum(-1).mean()


@settings(deadline=None, max_examples=25)
@given(
    seed=st.integers(0, 999),
    rows=st.integers(3, 60),
    classes=st.integers(2, 5),
    spread=st.sampled_from([0.1, 1.0, 5.0, 30.0]),
)
def test_it_is_where_the_loss_has_no_slope(seed: int, rows: int, classes: int, spread: float) -> None:
    logits, labels = drawn(seed, rows, classes, spread)
    found = choose_temperature(logits, labels)
    assert LEAST <= found <= MOST * (1 + 1e-9)
    at = torch.tensor(np.log(found), requires_grad=True, dtype=torch.float64)
    here = loss(logits, labels, at)
    here.backward()
    if found < MOST * 0.999:
        assert abs(float(at.grad)) < 1e-6
    for other in (found * 1.05, found / 1.05):
        if LEAST < other < MOST:
            assert float(loss(logits, labels, torch.tensor(np.log(other), dtype=torch.float64))) >= float(here.detach())


def test_it_undoes_a_scale() -> None:
    logits, labels = drawn(0, 20_000, 3, 1.0)
    one, seven = choose_temperature(logits, labels), choose_temperature(logits * 7, labels)
    assert seven == pytest.approx(7 * one, rel=1e-5)


def test_rows_that_are_all_right_do_not_make_it_certain() -> None:
    labels = np.array([0, 1, 0, 1])
    found = choose_temperature(np.eye(2)[labels] * 4.0, labels)
    # Four rows and two classes: the true class counts 5 of 6. The gap of 4 over T is then log 5.
    assert found == pytest.approx(4 / np.log(5), rel=1e-9)


def test_outputs_worse_than_chance_say_nothing() -> None:
    labels = np.array([0, 1] * 20)
    logits = np.eye(2)[1 - labels] * 4.0
    found = choose_temperature(logits, labels)
    assert found == pytest.approx(MOST)
    assert to_probabilities(logits, found) == pytest.approx(np.full((40, 2), 0.5), abs=2e-3)


def test_the_numbers_are_those_written_out() -> None:
    logits, labels = drawn(3, 200, 4, 3.0)
    wanted = torch.nn.functional.cross_entropy(torch.tensor(logits).double() / 2.5, torch.tensor(labels))
    shares = (torch.tensor(logits).double() / 2.5).softmax(-1)
    score, best = shares.max(-1)
    error = 0.0
    for k in range(15):
        own = (score >= k / 15) & ((score < (k + 1) / 15) if k < 14 else torch.ones_like(score, dtype=torch.bool))
        if own.any():
            right = (best[own] == torch.tensor(labels)[own]).double().mean()
            error += float(own.double().mean() * (right - score[own].mean()).abs())
    found = measure_calibration(logits, labels, 2.5)
    assert found["nll"] == pytest.approx(float(wanted), rel=1e-12)
    assert found["ece"] == pytest.approx(error, rel=1e-9)


def schema(temperature: float | None) -> TaskSchema:
    return TaskSchema("t", "classification", ("text",), ("accuracy",), ("a", "b", "c"), temperature=temperature)


def test_answers_keep_their_class_and_say_another_score() -> None:
    logits, _ = drawn(1, 50, 3, 10.0)
    plain, calibrated = (schema(t).decode(logits, probabilities=True) for t in (None, 4.0))
    wanted = torch.tensor(logits).double()
    for answers, shares in ((plain, wanted.softmax(-1)), (calibrated, (wanted / 4).softmax(-1))):
        for answer, row in zip(answers, shares, strict=True):
            assert list(answer["probabilities"].values()) == pytest.approx(row.tolist(), abs=1e-12)
            assert answer["score"] == pytest.approx(float(row.max()), abs=1e-12)
    assert [each["label"] for each in plain] == [each["label"] for each in calibrated]


def test_a_class_is_that_of_the_outputs_where_probabilities_are_alike() -> None:
    logits = np.array([[0.0, 1e-16, 0.0]])
    (answer,) = schema(1e3).decode(logits)
    assert answer["label"] == "b"


def test_it_is_kept_and_earlier_tasks_have_none() -> None:
    data = schema(2.5).to_json()
    assert TaskSchema.from_json(data).temperature == 2.5
    del data["temperature"]
    assert TaskSchema.from_json(data).temperature is None
