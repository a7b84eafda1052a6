"""What every method must hold on every architecture it works on, each a function of a case.

A case is a method, a family of the zoo and a task. The functions know nothing of particular methods beyond what the
registry and its config say of them, so that a method added later is tested by being registered.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from autograd_graph import leaves, lies_in, tensors, untrained_from_the_input
from moulds import Mould
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
from inlay.methods.registry import Method
from inlay.methods.tuner import InlayTuner
from probing import logits, probe
from zoo import tiny

BATCH_NORM = nn.modules.batchnorm._NormBase
WHOLE = ("bert", "llama", "vit", "resnet")  # benchmarks/compile_sweep.py tries their training steps too
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

    def __hash__(self) -> int:
        return hash(str(self))  # the settings of a method cannot be hashed

    def base(self, dtype: torch.dtype = torch.float32) -> tuple[Any, dict[str, Tensor]]:
        """A base model as if it were freshly built, always the same, and a batch."""
        mould, batch = _base(self.family, self.task, dtype)
        return mould.cast(), dict(batch)

    def adapted(
        self, dtype: torch.dtype = torch.float32, adapter_name: str = "default"
    ) -> tuple[Any, dict[str, Tensor]]:
        """The base with the method in it."""
        return _adapted(self, dtype, adapter_name).cast(), dict(_base(self.family, self.task, dtype)[1])

    def trained(self, seed: int = 1, dtype: torch.dtype = torch.float32) -> tuple[Any, dict[str, Tensor]]:
        """The same, moved away from its start."""
        model, batch = self.adapted(dtype)
        stir(model, seed)
        return model.eval(), batch

    def works(self) -> bool:
        """Whether `capabilities.json` says that it does; a method that is not in there yet is tried."""
        recorded = capabilities()["methods"].get(self.method.name)
        if recorded is None:
            return probe(self.method, self.base) is None
        return self.task in recorded.get(self.family, ())


@cache
def _base(family: str, task: str, dtype: torch.dtype) -> tuple[Mould, dict[str, Tensor]]:
    model, batch = tiny(family, task)  # type: ignore[arg-type]
    return Mould(model.to(dtype)), {k: v.to(dtype) if v.is_floating_point() else v for k, v in batch.items()}


@lru_cache(maxsize=128)
def _adapted(case: Case, dtype: torch.dtype, adapter_name: str) -> Mould:
    return Mould(attached(case, dtype, adapter_name))


def attached(case: Case, dtype: torch.dtype = torch.float32, adapter_name: str = "default") -> Any:
    """The base with the method put into it now; always with the same random start."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return attach(case.base(dtype)[0], case.method, adapter_name=adapter_name)


@cache
def base_logits(family: str, task: str, dtype: torch.dtype = torch.float32) -> Tensor:
    """What the base model computes."""
    mould, batch = _base(family, task, dtype)
    return logits(mould.cast(), batch)


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
    """The untrained model computes exactly what the base does."""
    model, batch = case.adapted()
    assert torch.equal(logits(model, batch), base_logits(case.family, case.task))


def starts_elsewhere(case: Case) -> None:
    """The untrained model computes something else than the base, as the registry says and the documentation prints."""
    model, batch = case.adapted()
    found, base = logits(model, batch), base_logits(case.family, case.task)
    assert torch.isfinite(found).all()
    assert found.shape != base.shape or not torch.equal(found, base)


def trains_only_its_own(case: Case) -> None:
    """A step changes the method's parameters and the new head, and not a bit of anything else; each of them counts."""
    model, batch = case.adapted()
    heads = newly_initialised(case.base()[0])
    trained = trained_parameters(model)
    own = {name: p for name, p in trained.items() if case.method.form == "head" or not _within(name, heads)}
    assert own
    if case.method.form == "peft":
        prefix = PEFT_TYPE_TO_PREFIX_MAPPING[model.peft_type]
        assert all(prefix in name or name.startswith("prompt_encoder.") for name in own), list(own)
    before = {name: parameter.detach().clone() for name, parameter in plain_parameters(model).items()}
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    start = logits(model, batch)
    statistics_may_move = case.method.form == "full" or case.method.tuner is None
    found = gradients(model.eval() if statistics_may_move else model.train(), batch)
    assert any(found[name].abs().sum() > 0 for name in own if name in found)
    for parameters in (own, trained):  # the head learns anyway: what the method learns must tell without it
        torch.optim.AdamW(parameters.values(), lr=0.1, weight_decay=0.1).step()
        now = logits(model, batch)
        assert now.shape != start.shape or not torch.equal(now, start)
    for name, parameter in plain_parameters(model).items():
        frozen = case.method.form == "peft" or (case.method.form == "head" and not _within(name, heads))
        if frozen:
            assert torch.equal(parameter, before[name]), name
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, buffers[name]), name
    assert not torch.equal(logits(model, batch), base_logits(case.family, case.task))


def _within(name: str, modules: Iterable[str]) -> bool:
    """Whether a parameter belongs to one of the modules of the base, PEFT's wrappers left aside."""
    return any(f".{module}." in f".{name}" for module in modules)


def reads_no_padding(case: Case) -> None:
    """What stands after a text changes nothing of its class, nor of its tokens where each has an answer of its own."""
    model, batch = case.trained()
    lengths = batch["attention_mask"].sum(dim=1).tolist()
    assert min(lengths) < max(lengths)
    for each in (case.base()[0], model):
        together = logits(each, batch)
        for i, length in enumerate(lengths):
            row = {name: batch[name][i : i + 1, :length] for name in ("input_ids", "attention_mask")}
            row |= {name: batch[name][i : i + 1] for name in batch if name == "decoder_input_ids"}
            alone = logits(each, row)[0]
            wanted = together[i] if alone.ndim == 1 else together[i, : len(alone)]
            torch.testing.assert_close(alone, wanted, atol=1e-4, rtol=1e-4)


def reads_no_other_row(case: Case) -> None:
    """A picture's class is the same alone and among others."""
    model, batch = case.trained()
    pictures = batch["pixel_values"]
    together = logits(model, batch)
    alone = torch.cat([logits(model, {"pixel_values": picture[None]}) for picture in pictures])
    torch.testing.assert_close(alone, together, atol=1e-4, rtol=1e-4)


def copies_are_independent(case: Case) -> None:
    """A copy of an adapted model computes the same, and what happens to it does not reach the original."""
    model = attached(case)
    stir(model, seed=1)
    mould, batch = case.trained()
    wanted = logits(model, batch)
    for twin in (copy.deepcopy(model), mould):
        assert torch.equal(logits(twin, batch), wanted)
        stir(twin, seed=2)
        assert not torch.equal(logits(twin, batch), wanted)
    assert torch.equal(logits(model, batch), wanted)


def keeps_the_trunk_out_of_the_graph(case: Case) -> None:
    """Nothing before the first trained part enters the autograd graph, with the method in the last block if it can."""
    model, batch = case.base()
    blocks = anatomy(model).blocks
    try:
        model = attach(model, case.method, settings={"layers": [len(blocks)]})
    except InlayError:  # no such setting, or no meaning here
        model = attach(case.base()[0], case.method)
    trained = trained_parameters(model)
    clean = untrained_from_the_input(model)
    outputs: dict[str, list[Tensor]] = {}

    def note(name: str) -> Callable[[nn.Module, Any, Any], None]:
        return lambda module, args, output: outputs.setdefault(name, []).extend(tensors(output))

    for part in clean:
        part.module.register_forward_hook(note(part.name))
    loss = model.train()(**batch).loss
    assert outputs.keys() == {part.name for part in clean}
    for name, found in outputs.items():
        assert found, name
        assert not any(tensor.requires_grad or tensor.grad_fn is not None for tensor in found), name
    names = {id(parameter): name for name, parameter in trained.items()}
    ends = {names.get(id(leaf), "something that is not trained") for leaf in leaves(loss)}
    assert ends
    assert ends <= trained.keys()


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


def merges_and_unmerges(case: Case, dtype: torch.dtype) -> None:
    """A merged adapter computes what it does unmerged, up to a rounding, and may be disabled; unmerging undoes it.

    Every bit of the base is as it was then, and the adapter acts as before. PEFT's own methods subtract: nearly.
    """
    model, batch = case.trained(dtype=dtype)
    wanted = logits(model, batch)
    before = {name: parameter.detach().clone() for name, parameter in plain_parameters(model).items()}
    model.merge_adapter()
    assert any(module.merged for module in model.modules() if isinstance(module, BaseTunerLayer))
    torch.testing.assert_close(logits(model, batch), wanted, atol=MERGED[dtype], rtol=MERGED[dtype])
    with model.disable_adapter():
        same(logits(model, batch), base_logits(case.family, case.task, dtype), model, dtype)
    same(logits(model, batch), wanted, model, dtype)
    model.merge_adapter()  # disabling took it out
    model.unmerge_adapter()
    for name, parameter in plain_parameters(model).items():
        same(parameter, before[name], model, dtype)
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
    """A compiled model computes what the model does: to the bit where nothing is fused, else also its gradients.

    One graph on `WHOLE`; of other families Transformers itself breaks some.
    """
    model, batch = case.adapted()
    shorten(model, keep=1 if backend == "inductor" else 2)
    stir(model, seed=1)
    torch._dynamo.reset()
    compiled = torch.compile(model.eval(), backend=backend, fullgraph=case.family in WHOLE)
    if backend == "eager":
        assert torch.equal(logits(compiled, batch), logits(model, batch))
        return
    wanted = gradients(model, batch)
    found = {name.removeprefix("_orig_mod."): gradient for name, gradient in gradients(compiled, batch).items()}
    assert found
    assert found.keys() == wanted.keys()
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, wanted[name], atol=1e-4, rtol=1e-3)


def shorten(model: Any, keep: int) -> None:
    """Leave blocks out, since compiling takes time for each: a stage's first stay, and `keep` that the method is in."""
    blocks = [block.name for block in anatomy(model).blocks]
    trained = list(trained_parameters(model))
    adapted = [block for block in blocks if any(lies_in(name, [block]) for name in trained)]
    kept = [block for block in blocks if block.endswith(".0")]
    missing = keep - len(set(kept) & set(adapted))
    kept += [block for block in adapted if block not in kept][: max(missing, 0)]
    for block in reversed(blocks):
        if block not in kept:
            parent, _, place = block.rpartition(".")
            del model.get_submodule(parent)[int(place)]


def stacks_with_lora(case: Case, folder: Path, lora_first: bool) -> None:
    """Beside a LoRA, put in before or after it: both act, both are saved, and both load again to the bit."""
    lora = replace(case, method=registry.get("lora"))
    order = [(lora, "low_rank"), (case, "other")]
    if not lora_first:
        order.reverse()
    (first, first_name), (second, second_name) = order
    below, batch = first.adapted(adapter_name=first_name)
    if _clash(case, lora_first):
        with pytest.raises(InlayError, match=r"both wrap|the prompt last"):
            attach(below, second.method, adapter_name=second_name)
        return
    stir(below, 0, only=first_name)
    alone = logits(below, batch)
    assert not torch.equal(alone, base_logits(case.family, case.task))
    above = attach(below, second.method, adapter_name=second_name)
    stir(above, 1, only=second_name)
    wanted = logits(above, batch)
    assert not torch.equal(wanted, alone)
    save(below, first.method, folder / first_name, adapter_name=first_name)
    save(above, second.method, folder / second_name, adapter_name=second_name)
    again, _ = case.base()
    for each, name in order:
        again = restore(again, each.method, folder / name, adapter_name=name)
    assert torch.equal(logits(again, batch), wanted)


def _clash(case: Case, lora_first: bool) -> bool:
    """Prompts stand around a model, and two of PEFT's methods would both stand around one module."""
    model = case.adapted()[0]
    if model.active_peft_config.is_prompt_learning:
        return not lora_first
    if isinstance(model.base_model, InlayTuner) or model.peft_type == PeftType.LORA:
        return False
    lora = replace(case, method=registry.get("lora")).adapted()[0]
    return bool(set(model.base_model.targeted_module_names) & set(lora.base_model.targeted_module_names))


def is_refused_clearly(case: Case) -> None:
    """Where a method does not work it says so at once, and names one that does."""
    model, _ = case.base()
    with pytest.raises(InlayError) as caught:
        attach(model, case.method)
    text = str(caught.value)
    assert type(model).__name__ in text
    named = text.partition("These work on it: ")[2].rstrip(".").split(", ")
    assert set(named) <= registry.all_methods().keys() - {case.method.name}, text
