"""Every registered method on every architecture of the zoo, property by property.

Which cases there are comes from the registry, the zoo and `capabilities.json`: where the file says that a method works
it must hold everything in properties.py, where it says that it does not it must refuse; and the probes must agree. A
method that the file does not know yet is probed here. A case's tests run one after another (conftest.py).
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import properties
import pytest
import torch
from properties import Case

from inlay.anatomy import anatomy
from inlay.methods.registry import all_methods
from probing import probe
from zoo import FAMILIES, tiny

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@cache
def kind(family: str) -> tuple[str, str]:
    parts = anatomy(tiny(family, "base")[0])
    return parts.modality, parts.kind


@cache
def can_checkpoint(family: str) -> bool:
    """Whether Transformers can recompute a family's activations in the backward pass."""
    return tiny(family, "base")[0].supports_gradient_checkpointing  # type: ignore[return-value]


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
# A property is tested where it says something: what a method promises, texts with padding, pictures without.
SAME_AT_START = [case for case in ONCE if case.method.identity_at_start]
ELSEWHERE_AT_START = [case for case in ONCE if not case.method.identity_at_start]
TEXTS = [case for case in ONCE if FAMILIES[case.family].modality == "text"]
IMAGES = [case for case in ONCE if FAMILIES[case.family].modality == "image"]
CHECKPOINTED = [case for case in ONCE if can_checkpoint(case.family)]
# What the properties do not imply is left to the probes: the other tasks, and what is refused.
PROBED = [case for case in EVERY if case not in ONCE]
# T5's classifier runs its decoder, which takes ten times as long to trace as the rest and has nothing of the method's.
# What works on the whole of T5 alone is PEFT's own.
COMPILED = [
    replace(case, task="token-classification") if case.family == "t5" else case
    for case in ADAPTERS
    if case.task != "sequence-to-sequence"
]
# What takes long, or depends on how an architecture is built and not on its details, is tested once a method and kind
# of architecture here, and on all of them in `make test-all`. Inductor takes seconds: on the first kind alone.
KINDS = list({(case.method.name, *kind(case.family)): case for case in reversed(ONCE)}.values())[::-1]
FIRST = list({case.method.name: case for case in reversed(KINDS)}.values())
OTHERS = [case for case in KINDS if case not in FIRST]


def each(cases: list[Case], fast: list[Case] | None = None) -> pytest.MarkDecorator:
    """One test a case; those that are not among the fast ones are left to `make test-all`."""
    marks = {case: () if fast is None or case in fast else (pytest.mark.slow,) for case in cases}
    return pytest.mark.parametrize("case", [pytest.param(case, id=str(case), marks=marks[case]) for case in cases])


@each(SAME_AT_START)
def test_starts_as_the_base(case: Case) -> None:
    properties.starts_as_the_base(case)


@each(ELSEWHERE_AT_START)
def test_starts_elsewhere(case: Case) -> None:
    properties.starts_elsewhere(case)


@each(ONCE)
def test_trains_only_its_own(case: Case) -> None:
    properties.trains_only_its_own(case)


@each(TEXTS)
def test_reads_no_padding(case: Case) -> None:
    properties.reads_no_padding(case)


@each(IMAGES)
def test_reads_no_other_row(case: Case) -> None:
    properties.reads_no_other_row(case)


@each(ONCE, fast=KINDS)
def test_copies_are_independent(case: Case) -> None:
    properties.copies_are_independent(case)


@each(ADAPTERS)
def test_keeps_the_trunk_out_of_the_graph(case: Case) -> None:
    properties.keeps_the_trunk_out_of_the_graph(case)


@each(ONCE)
def test_reloads_to_the_bit(case: Case, tmp_path: Path) -> None:
    properties.reloads_to_the_bit(case, tmp_path)


@each(ADAPTERS)
def test_two_adapters_live_together(case: Case, tmp_path: Path) -> None:
    properties.two_adapters_live_together(case, tmp_path)


@each(ADAPTERS)
def test_disabling_restores_the_base(case: Case) -> None:
    properties.disabling_restores_the_base(case)


@each(MERGEABLE)
def test_merging(case: Case) -> None:
    properties.merges_and_unmerges(case, torch.float32)


@each(MERGEABLE, fast=KINDS)
def test_merging_in_bfloat16(case: Case) -> None:
    properties.merges_and_unmerges(case, torch.bfloat16)


@each(MERGEABLE)
def test_merges_into_a_plain_model(case: Case) -> None:
    properties.merges_into_a_plain_model(case)


@each(ONCE)
def test_has_train_and_eval_modes(case: Case) -> None:
    properties.has_train_and_eval_modes(case)


@each(ONCE)
def test_runs_in_bfloat16(case: Case, tmp_path: Path) -> None:
    properties.runs_in_bfloat16(case, tmp_path)


@each(CHECKPOINTED)
def test_checkpoints_gradients(case: Case) -> None:
    properties.checkpoints_gradients(case)


@each(ADAPTERS)
def test_stacks_after_lora(case: Case, tmp_path: Path) -> None:
    properties.stacks_with_lora(case, tmp_path, lora_first=True)


@each(ADAPTERS, fast=KINDS)
def test_stacks_before_lora(case: Case, tmp_path: Path) -> None:
    properties.stacks_with_lora(case, tmp_path, lora_first=False)


@each(COMPILED, fast=OTHERS)
def test_compiles(case: Case) -> None:
    properties.compiles(case, "eager")


@each(COMPILED, fast=FIRST)
def test_compiles_with_inductor(case: Case) -> None:
    properties.compiles(case, "inductor")


@each(REFUSED)
def test_is_refused_clearly(case: Case) -> None:
    properties.is_refused_clearly(case)


@each(PROBED)
def test_capabilities_are_as_probed(case: Case) -> None:
    fault = probe(case.method, case.base)
    assert (fault is None) == (case in WORKS), fault or "works, though capabilities.json says that it does not"
