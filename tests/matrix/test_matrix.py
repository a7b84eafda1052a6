"""Every registered method on every architecture of the zoo, property by property.

Which cases there are comes from the registry, the zoo and `capabilities.json`: where the file says that a method works
it must hold everything in properties.py, where it says that it does not it must refuse; and the probes must agree. A
method that the file does not know yet is probed here.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import properties
import pytest
import torch
from properties import Case

from inlay.methods.probe import probe
from inlay.methods.registry import all_methods
from zoo import FAMILIES, tiny

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

EVERY = [
    Case(method, family, task)
    for method in all_methods().values()
    for family, description in FAMILIES.items()
    for task in description.tasks
    if task != "base"
]
WORKS = [case for case in EVERY if case.works()]
REFUSED = [case for case in EVERY if case not in WORKS]
# One task a family where the task adds nothing to what is tested: the first that works.
ONCE = list({(case.method.name, case.family): case for case in reversed(WORKS)}.values())[::-1]
ADAPTERS = [case for case in ONCE if case.method.form == "peft"]
MERGEABLE = [case for case in ADAPTERS if case.method.mergeable]
# T5's classifier runs its decoder, which takes ten times as long to trace as the rest and has nothing of the method's.
COMPILED = [replace(case, task="token-classification") if case.family == "t5" else case for case in ADAPTERS]
# Inductor takes many seconds: once a method here, on a small family; on all others in `make test-all`.
FAST = list({case.method.name: case for case in reversed(COMPILED)}.values())


def each(cases: list[Case]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", cases, ids=str)


@each(ONCE)
def test_starts_as_the_base(case: Case) -> None:
    properties.starts_as_the_base(case)


@each(ONCE)
def test_trains_only_its_own(case: Case) -> None:
    properties.trains_only_its_own(case)


@each(ONCE)
def test_reloads_to_the_bit(case: Case, tmp_path: Path) -> None:
    properties.reloads_to_the_bit(case, tmp_path)


@each(ADAPTERS)
def test_two_adapters_live_together(case: Case, tmp_path: Path) -> None:
    properties.two_adapters_live_together(case, tmp_path)


@each(ADAPTERS)
def test_disabling_restores_the_base(case: Case) -> None:
    properties.disabling_restores_the_base(case)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@each(MERGEABLE)
def test_merging(case: Case, dtype: torch.dtype) -> None:
    properties.merging_changes_nothing(case, dtype)
    properties.unmerging_undoes_merging(case, dtype)
    properties.disabling_a_merged_adapter_restores_the_base(case, dtype)


@each(MERGEABLE)
def test_merges_into_a_plain_model(case: Case) -> None:
    properties.merges_into_a_plain_model(case)


@each(ONCE)
def test_has_train_and_eval_modes(case: Case) -> None:
    properties.has_train_and_eval_modes(case)


@each(ONCE)
def test_runs_in_bfloat16(case: Case, tmp_path: Path) -> None:
    properties.runs_in_bfloat16(case, tmp_path)


@each(ONCE)
def test_checkpoints_gradients(case: Case) -> None:
    properties.checkpoints_gradients(case)


@pytest.mark.parametrize("lora_first", [True, False], ids=["after-lora", "before-lora"])
@each(ADAPTERS)
def test_stacks_with_lora(case: Case, tmp_path: Path, lora_first: bool) -> None:
    properties.stacks_with_lora(case, tmp_path, lora_first)


@each(COMPILED)
def test_compiles(case: Case) -> None:
    properties.compiles(case, "eager")


@pytest.mark.parametrize(
    "case", [pytest.param(case, id=str(case), marks=() if case in FAST else pytest.mark.slow) for case in COMPILED]
)
def test_compiles_with_inductor(case: Case) -> None:
    properties.compiles(case, "inductor")


@each(REFUSED)
def test_is_refused_clearly(case: Case) -> None:
    properties.is_refused_clearly(case)


@each(EVERY)
def test_capabilities_are_as_probed(case: Case) -> None:
    fault = probe(case.method, lambda: tiny(case.family, case.task))
    assert (fault is None) == (case in WORKS), fault or "works, though capabilities.json says that it does not"
