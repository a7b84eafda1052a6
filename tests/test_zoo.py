"""The zoo itself: deterministic, tiny, padded, and usable for the task it was built for."""

from __future__ import annotations

import pytest
import torch

import zoo


@pytest.mark.parametrize(("family", "task"), zoo.CASES)
def test_models_are_tiny_deterministic_and_run(family: str, task: zoo.Task) -> None:
    state = torch.get_rng_state()
    model, inputs = zoo.tiny(family, task, seed=3)
    again, inputs_again = zoo.tiny(family, task, seed=3)
    assert torch.equal(torch.get_rng_state(), state)
    assert not model.training
    assert sum(parameter.numel() for parameter in model.parameters()) < 100_000
    assert all(torch.equal(value, inputs_again[name]) for name, value in inputs.items())

    with torch.no_grad():
        outputs, outputs_again = model(**inputs), again(**inputs)
    assert torch.equal(outputs[0], outputs_again[0])
    assert torch.isfinite(outputs[0]).all()
    assert ("labels" in inputs) == (task != "base")
    if zoo.FAMILIES[family].modality == "text":
        assert inputs["attention_mask"].sum(1).tolist() == list(zoo.ROW_LENGTHS)


def test_seeds_differ() -> None:
    (first, _), (second, _) = zoo.tiny("bert", seed=0), zoo.tiny("bert", seed=1)
    assert not torch.equal(first.classifier.weight, second.classifier.weight)


def test_a_task_that_a_family_lacks_is_named() -> None:
    with pytest.raises(ValueError, match="vit has no model for 'causal-lm'"):
        zoo.tiny("vit", "causal-lm")
