"""The loss of rows of several tasks: what counts, what does not, and labels that cannot be."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from inlay.errors import InlayError
from inlay.methods.mixture.rows import NAMES_KEPT
from inlay.methods.multi_lora.model import rename_task
from manytasks import gradients, inputs, several

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::RuntimeWarning")
NAMES = ["rte", "sst2", "stsb", "stsb"]  # of 3 and 5 classes, and values


def four() -> tuple[Any, dict[str, torch.Tensor]]:
    model, batch = several("bert")
    return model, {key: value[[0, 1, 2, 0]] for key, value in inputs(batch).items()}


@pytest.mark.parametrize("without", [0, 2, 3])
def test_a_row_without_a_label_counts_for_nothing(without: int) -> None:
    """Also a value: its task's mean is over the others, and where there are none the task is as if absent."""
    model, batch = four()
    labels = torch.tensor([1.0, 4.0, 0.5, -100.5], dtype=torch.float64)  # a value may well be near it
    labels[without] = -100
    kept = [i for i in range(4) if i != without]
    found = model(**batch, labels=labels, adapter_names=NAMES).loss
    found.backward()
    mine = gradients(model)
    model.zero_grad()
    fewer = {key: value[kept] for key, value in batch.items()}
    wanted = model(**fewer, labels=labels[kept], adapter_names=[NAMES[i] for i in kept]).loss
    wanted.backward()
    torch.testing.assert_close(found, wanted)
    its = gradients(model)
    for name, gradient in mine.items():
        torch.testing.assert_close(gradient, its.get(name, torch.zeros_like(gradient)))


def test_what_a_name_means_now() -> None:
    """Not what it meant in the passes before, of which something is kept by the names."""
    model, batch = four()
    call = batch | {"labels": torch.tensor([1.0, 4.0, 2.0, 0.0], dtype=torch.float64), "adapter_names": NAMES}
    before = model(**call).loss
    for old, new in (("stsb", "other"), ("rte", "stsb"), ("other", "rte")):
        rename_task(model, old, new)
    found = model(**call).loss
    torch.testing.assert_close(found, copy.deepcopy(model)(**call).loss)  # which has kept nothing
    assert not torch.isclose(found, before)


def test_what_is_kept_of_names_is_bounded() -> None:
    model, batch = four()
    with torch.no_grad():
        for i in range(2 * NAMES_KEPT):
            names = ["rte" if i >> j & 1 else "sst2" for j in range(6)]
            model(**{key: value[[0, 1, 2, 0, 1, 2]] for key, value in batch.items()}, adapter_names=names)
    assert len(model.base_model.routing._places) == NAMES_KEPT
    assert copy.deepcopy(model).base_model.routing._places == {}


@pytest.mark.parametrize(
    ("labels", "said"),
    [
        ([3, 0, 0, 0], "Row 0 has the label 3.0, and its task 'rte' the classes 0 to 2"),
        ([0, 5, 0, 0], "Row 1 .* 'sst2' the classes 0 to 4"),
        ([0, -1, 0, 0], "Row 1 has the label -1.0"),
        ([0, 1.5, 0, 0], "Row 1 has the label 1.5"),
        ([0, float("nan"), 0, 0], "Row 1 has the label nan"),
    ],
)
def test_a_class_that_a_task_does_not_have(labels: list[float], said: str) -> None:
    model, batch = four()
    with pytest.raises(InlayError, match=said):
        model(**batch, labels=torch.tensor(labels, dtype=torch.float64), adapter_names=NAMES)
    model.set_adapter("sst2")
    with pytest.raises(InlayError, match="Row 2 has the label 5, and its task 'sst2'"):
        model(**batch, labels=torch.tensor([0, 4, 5, 0]))


def test_several_classes_a_row_are_not_mixed() -> None:
    model, batch = four()
    with pytest.raises(InlayError, match=r"labels are \(4, 3\).*one class or value each"):
        model(**batch, labels=torch.zeros(4, 3), adapter_names=["rte", "rte", "sst2", "rte"])
