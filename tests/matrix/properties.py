"""What every method must hold on every architecture it works on, each a function of a case.

A case is a method, a family of the zoo and a task. The functions know nothing of particular methods beyond what the
registry and its config say of them, so that a method added later is tested by being registered.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from peft.mapping import PEFT_TYPE_TO_PREFIX_MAPPING
from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper, ModulesToSaveWrapper
from peft.utils.peft_types import PeftType
from torch import Tensor, nn

from inlay.anatomy import anatomy
from inlay.errors import InlayError
from inlay.methods import registry
from inlay.methods.attach import attach, restore, save, trained_parameters
from inlay.methods.capabilities import capabilities
from inlay.methods.heads import newly_initialised
from inlay.methods.plain import plain_parameters
from inlay.methods.probe import logits, probe
from inlay.methods.registry import Method
from inlay.methods.tuner import InlayTuner
from zoo import tiny

BATCH_NORM = nn.modules.batchnorm._NormBase
# Merging rounds once more, to the base's precision; the logits here are of the order of one.
MERGED = {torch.float32: 1e-5, torch.bfloat16: 5e-2}


@dataclass(frozen=True)
class Case:
    """One method on one architecture for one task."""

    method: Method
    family: str
    task: str = "classification"

    def __str__(self) -> str:
        return f"{self.method.name}-{self.family}-{self.task}"

    def base(self, dtype: torch.dtype = torch.float32) -> tuple[Any, dict[str, Tensor]]:
        """A freshly built base model, always the same, and a batch."""
        model, batch = tiny(self.family, self.task)  # type: ignore[arg-type]
        return model.to(dtype), {k: v.to(dtype) if v.is_floating_point() else v for k, v in batch.items()}

    def adapted(self, dtype: torch.dtype = torch.float32) -> tuple[Any, dict[str, Tensor]]:
        """The base with the method in it."""
        model, batch = self.base(dtype)
        return attach(model, self.method), batch

    def trained(self, seed: int = 1, dtype: torch.dtype = torch.float32) -> tuple[Any, dict[str, Tensor]]:
        """The same, moved away from its start."""
        model, batch = self.adapted(dtype)
        stir(model, seed)
        return model.eval(), batch

    def works(self) -> bool:
        """Whether `capabilities.json` says that it does; a method that is not in there yet is tried."""
        recorded = capabilities()["methods"].get(self.method.name)
        if recorded is None:
            return probe(self.method, lambda: tiny(self.family, self.task)) is None  # type: ignore[arg-type]
        return self.task in recorded.get(self.family, ())


@cache
def base_logits(family: str, task: str, dtype: torch.dtype = torch.float32) -> Tensor:
    """What the base model computes."""
    model, batch = tiny(family, task)  # type: ignore[arg-type]
    batch = {k: v.to(dtype) if v.is_floating_point() else v for k, v in batch.items()}
    return logits(model.to(dtype), batch)


@torch.no_grad()
def stir(model: nn.Module, seed: int, only: str = "") -> None:
    """Move what is trained by a random step that the seed decides."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in sorted(trained_parameters(model).items()):
        if only in name:
            parameter.add_(torch.randn(parameter.shape, generator=generator).to(parameter.dtype), alpha=0.1)


def gradients(model: Any, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """The gradients of one training step, with the same dropout every time."""
    model.zero_grad()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model(**batch).loss.backward()
    return {name: p.grad.clone() for name, p in trained_parameters(model).items() if p.grad is not None}


def starts_as_the_base(case: Case) -> None:
    """Where the registry promises it, the untrained model computes exactly what the base does."""
    if case.method.identity_at_start:
        model, batch = case.adapted()
        assert torch.equal(logits(model, batch), base_logits(case.family, case.task))


def trains_only_its_own(case: Case) -> None:
    """A step of training changes the method's parameters and the new head, and not a bit of anything else."""
    model, batch = case.adapted()
    heads = tuple(f"{name}." for name in newly_initialised(case.base()[0]))
    if case.method.form == "peft":
        prefix = PEFT_TYPE_TO_PREFIX_MAPPING[model.peft_type]
        names = [name for name in trained_parameters(model) if ".modules_to_save." not in name]
        assert names
        assert all(prefix in name or name.startswith("prompt_encoder.") for name in names), names
    before = {name: parameter.detach().clone() for name, parameter in plain_parameters(model).items()}
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    statistics_may_move = case.method.form == "full" or case.method.tuner is None
    found = gradients(model.eval() if statistics_may_move else model.train(), batch)
    moved = [name for name, gradient in found.items() if gradient.abs().sum() > 0]
    assert moved
    optimizer = torch.optim.AdamW(trained_parameters(model).values(), lr=0.1, weight_decay=0.1)
    optimizer.step()
    for name, parameter in plain_parameters(model).items():
        frozen = case.method.form == "peft" or (case.method.form == "head" and not name.startswith(heads))
        if frozen:
            assert torch.equal(parameter, before[name]), name
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, buffers[name]), name
    assert not torch.equal(logits(model, batch), base_logits(case.family, case.task))


def reloads_to_the_bit(case: Case, folder: Path) -> None:
    """What was saved, put into a freshly built base, computes the same to the bit; nothing is pickled."""
    model, batch = case.trained()
    wanted = logits(model, batch)
    save(model, case.method, folder)
    assert not [path.name for path in folder.rglob("*") if path.suffix in (".bin", ".pt", ".pkl")]
    again = restore(case.base()[0], case.method, folder)
    assert torch.equal(logits(again, batch), wanted)
    if case.method.form == "peft":
        plain = PeftModel.from_pretrained(case.base()[0], str(folder))
        assert torch.equal(logits(plain, batch), wanted)


def two_adapters_live_together(case: Case, folder: Path) -> None:
    """Each adapter computes what it does alone, and training one leaves the other as it was."""
    model, batch = case.trained(seed=1)
    first = logits(model, batch)
    model.add_adapter("second", copy.deepcopy(model.peft_config["default"]))
    model.set_adapter("second")
    stir(model, seed=2, only=".second")  # PEFT marks inactive prompts as trainable too; they get no gradient
    second = logits(model, batch)
    assert not torch.equal(first, second)
    save(model, case.method, folder, adapter_name="second")
    assert torch.equal(logits(restore(case.base()[0], case.method, folder), batch), second)
    model.set_adapter("default")
    assert torch.equal(logits(model, batch), first)
    model.delete_adapter("second")
    assert torch.equal(logits(model, batch), first)


def disabling_restores_the_base(case: Case) -> None:
    """Within `disable_adapter` the base model computes, to the bit; after it the adapter does."""
    model, batch = case.adapted()
    # Prompts are no part of the base model, and PEFT leaves a trained head in it when they are disabled.
    prompt = model.active_peft_config.is_prompt_learning
    stir(model, seed=1, only="prompt_encoder" if prompt else "")
    trained = logits(model, batch)
    assert not torch.equal(trained, base_logits(case.family, case.task))
    with model.disable_adapter():
        assert torch.equal(logits(model, batch), base_logits(case.family, case.task))
    assert torch.equal(logits(model, batch), trained)


def merging_changes_nothing(case: Case, dtype: torch.dtype) -> None:
    """A merged adapter computes what it does unmerged, up to a rounding."""
    model, batch = case.trained(dtype=dtype)
    wanted = logits(model, batch)
    model.merge_adapter()
    assert any(module.merged for module in model.modules() if isinstance(module, BaseTunerLayer))
    torch.testing.assert_close(logits(model, batch), wanted, atol=MERGED[dtype], rtol=MERGED[dtype])


def unmerging_undoes_merging(case: Case, dtype: torch.dtype) -> None:
    """Every bit of the base is as it was, and the adapter acts as before. PEFT's own methods subtract: nearly."""
    model, batch = case.trained(dtype=dtype)
    wanted = logits(model, batch)
    before = {name: parameter.detach().clone() for name, parameter in plain_parameters(model).items()}
    model.merge_adapter()
    model.unmerge_adapter()
    for name, parameter in plain_parameters(model).items():
        same(parameter, before[name], model, dtype)
    same(logits(model, batch), wanted, model, dtype)


def disabling_a_merged_adapter_restores_the_base(case: Case, dtype: torch.dtype) -> None:
    """As `disabling_restores_the_base`, for an adapter that lies in the base's weights."""
    model, batch = case.trained(dtype=dtype)
    wanted = logits(model, batch)
    model.merge_adapter()
    with model.disable_adapter():
        same(logits(model, batch), base_logits(case.family, case.task, dtype), model, dtype)
    same(logits(model, batch), wanted, model, dtype)


def merges_into_a_plain_model(case: Case) -> None:
    """`merge_and_unload` leaves the base's own class and modules, nothing of PEFT's, and computes what it did."""
    model, batch = case.trained()
    wanted = logits(model, batch)
    base, _ = case.base()
    composite = any(not hasattr(base.get_submodule(name), "weight") for name in newly_initialised(base))
    unloads = type(model.base_model)._replace_module is not BaseTuner._replace_module
    try:
        plain = model.merge_and_unload()
    except AttributeError:
        if isinstance(model.base_model, InlayTuner) or unloads or not composite:
            raise
        pytest.xfail("PEFT unloads a head of several modules as if it had one weight")
    torch.testing.assert_close(logits(plain, batch), wanted, atol=MERGED[torch.float32], rtol=MERGED[torch.float32])
    assert type(plain) is type(base)
    left = [
        type(module) for module in plain.modules() if isinstance(module, (BaseTunerLayer, AuxiliaryTrainingWrapper))
    ]
    if model.peft_type == PeftType.LN_TUNING and set(left) == {ModulesToSaveWrapper}:
        pytest.xfail("PEFT's LN tuning leaves its wrapper around the head")
    assert not left
    assert [(name, type(m)) for name, m in plain.named_modules()] == [
        (name, type(m)) for name, m in base.named_modules()
    ]
    assert plain.state_dict().keys() == base.state_dict().keys()


def same(found: Tensor, wanted: Tensor, model: Any, dtype: torch.dtype) -> None:
    """To the bit with one of inlay's methods in the model; PEFT's own methods unmerge by arithmetic."""
    if isinstance(model.base_model, InlayTuner):
        assert torch.equal(found, wanted)
    else:
        torch.testing.assert_close(found, wanted, atol=MERGED[dtype], rtol=MERGED[dtype])


def has_train_and_eval_modes(case: Case) -> None:
    """Training mode runs, leaves nothing behind, and eval mode computes the same before and after it."""
    model, batch = case.trained()
    before = logits(model, batch)
    model.train()
    if case.method.tuner is None:  # a trainer's part: frozen batch norms stay in eval mode
        for module in model.modules():
            if isinstance(module, BATCH_NORM):
                module.eval()
    assert torch.isfinite(model(**batch).loss)
    assert any(module.training for module in model.modules())
    model.eval()
    assert not any(module.training for module in model.modules())
    assert torch.equal(logits(model, batch), before)


def runs_in_bfloat16(case: Case, folder: Path) -> None:
    """A base in bfloat16 starts as it is, trains with finite gradients and reloads to the bit."""
    model, batch = case.adapted(torch.bfloat16)
    if case.method.identity_at_start:
        assert torch.equal(logits(model, batch), base_logits(case.family, case.task, torch.bfloat16))
    found = gradients(model, batch)
    assert found
    assert all(torch.isfinite(gradient).all() for gradient in found.values())
    stir(model, seed=1)
    wanted = logits(model, batch)
    assert wanted.dtype == torch.bfloat16
    assert torch.isfinite(wanted).all()
    save(model, case.method, folder)
    assert torch.equal(logits(restore(case.base(torch.bfloat16)[0], case.method, folder), batch), wanted)


def checkpoints_gradients(case: Case) -> None:
    """Recomputing activations in the backward pass gives the same gradients, whichever came first."""
    model, batch = case.trained()
    if not getattr(case.base()[0], "supports_gradient_checkpointing", False):
        pytest.skip(f"Transformers does not checkpoint {case.family}")
    wanted = gradients(model.train(), batch)
    before, _ = case.base()
    before.gradient_checkpointing_enable()
    if (
        case.method.form == "peft" and model.peft_type == PeftType.PREFIX_TUNING
    ):  # PEFT's prefixes are a cache of keys, which checkpointing turns off
        with pytest.raises(InlayError, match="gradient checkpointing"):
            attach(before, case.method)
        return
    before = attach(before, case.method)
    before.load_state_dict(model.state_dict())
    model.gradient_checkpointing_enable()
    for checkpointed in (before.train(), model):
        found = gradients(checkpointed, batch)
        assert found.keys() == wanted.keys()
        for name, gradient in found.items():
            torch.testing.assert_close(gradient, wanted[name], msg=lambda text, name=name: f"{name}: {text}")


def compiles(case: Case, backend: str) -> None:
    """A compiled model computes what the model does: to the bit where nothing is fused, else also its gradients."""
    model, batch = case.adapted()
    shorten(model)
    stir(model, seed=1)
    torch._dynamo.reset()
    compiled = torch.compile(model.eval(), backend=backend)
    if backend == "eager":
        assert torch.equal(logits(compiled, batch), logits(model, batch))
        return
    wanted = gradients(model, batch)
    for name, gradient in gradients(compiled, batch).items():
        torch.testing.assert_close(gradient, wanted[name.removeprefix("_orig_mod.")], atol=1e-4, rtol=1e-3)


def shorten(model: Any) -> None:
    """Keep the first block and the first that is trained where blocks are all of a kind: each takes time to compile."""
    blocks = anatomy(model).blocks
    parents = {block.name.rpartition(".")[0] for block in blocks}
    parent = model.get_submodule(parents.pop())
    if not parents and isinstance(parent, nn.ModuleList):
        trained = [index for index, block in enumerate(parent) if any(p.requires_grad for p in block.parameters())]
        first = trained[0] if trained else 0
        del parent[first + 1 :]
        del parent[1:first]


def stacks_with_lora(case: Case, folder: Path, lora_first: bool) -> None:
    """Beside a LoRA, put in before or after it: both act, both are saved, and both load again to the bit."""
    lora = registry.get("lora")
    order = [(lora, "low_rank"), (case.method, "other")]
    if not lora_first:
        order.reverse()
    model, batch = case.base()
    layers = []
    for seed, (method, name) in enumerate(order):
        if layers and _clash(case, lora_first):
            with pytest.raises(InlayError, match=r"both wrap|the prompt last"):
                attach(model, method, adapter_name=name)
            return
        model = attach(model, method, adapter_name=name)
        before = logits(model, batch)
        stir(model, seed, only=name)
        assert not torch.equal(logits(model, batch), before)
        layers.append(model)
    wanted = logits(model, batch)
    for (method, name), layer in zip(order, layers, strict=True):
        save(layer, method, folder / name, adapter_name=name)
    again, _ = case.base()
    for method, name in order:
        again = restore(again, method, folder / name, adapter_name=name)
    assert torch.equal(logits(again, batch), wanted)


def _clash(case: Case, lora_first: bool) -> bool:
    """Prompts stand around a model, and two of PEFT's methods would both stand around one module."""
    model, lora = case.adapted()[0], attach(case.base()[0], "lora")
    if model.active_peft_config.is_prompt_learning:
        return not lora_first
    ours = isinstance(model.base_model, InlayTuner)
    shared = set(model.base_model.targeted_module_names) & set(lora.base_model.targeted_module_names)
    return not ours and model.peft_type != lora.peft_type and bool(shared)


def is_refused_clearly(case: Case) -> None:
    """Where a method does not work it says so at once, and names one that does."""
    model, _ = case.base()
    with pytest.raises(InlayError) as caught:
        attach(model, case.method)
    text = str(caught.value)
    assert type(model).__name__ in text
    named = text.partition("These work on it: ")[2].rstrip(".").split(", ")
    assert set(named) <= registry.all_methods().keys() - {case.method.name}, text
