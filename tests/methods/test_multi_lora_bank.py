"""Where Multi-LoRA keeps the `B`s of many tasks: always those that the parameters hold, by few kernels."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import inlay
from inlay.methods.mixture.bank import Bank
from inlay.methods.mixture.rows import TaskRows
from inlay.methods.multi_lora.layer import MultiLoraLayer
from inlay.methods.multi_lora.model import rename_task

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::RuntimeWarning")
WIDTH, DEPTH = 6, 20  # more layers than one bank has


class Stack(nn.Module):
    """Linear layers, one after another."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH))

    def forward(self, x: Tensor, until: int = DEPTH) -> Tensor:
        for step in self.steps[:until]:
            x = x + 0.3 * torch.tanh(step(x))
        return x


def config(**settings: Any) -> inlay.MultiLoraConfig:
    given = {"r": 2, "target_modules": [f"steps.{i}" for i in range(DEPTH)], "modules_to_save": []}
    return inlay.MultiLoraConfig(**{**given, "newly_initialised": [], **settings})


def several(tasks: int = 3, dtype: torch.dtype = torch.float64, **settings: Any) -> Any:
    torch.manual_seed(0)
    model = get_peft_model(Stack().to(dtype), config(**settings), adapter_name="t0")
    for i in range(1, tasks):
        model.add_adapter(f"t{i}", config(**settings))
    stir(model)
    return model.eval()


@torch.no_grad()
def stir(model: nn.Module, seed: int = 1) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.copy_(torch.randn(parameter.shape, generator=generator))


def layers(model: Any) -> list[MultiLoraLayer]:
    return list(model.base_model.routing.layers.values())


def banks(model: Any) -> set[Bank]:
    return {bank for layer in layers(model) for bank, _ in layer.weights[0].banks.values()}


def weights(model: Any, task: str) -> list[nn.Parameter]:
    return [layer.inlay_multi_lora_b[task].weight for layer in layers(model) if task in layer.inlay_multi_lora_b]


def defined(model: Any, x: Tensor, names: list[str]) -> Tensor:
    """`y = x W_0 + b + (alpha_i / r) x A B_i`, row by row and layer by layer."""
    found = []
    for row, name in zip(x, names, strict=True):
        for layer in layers(model):
            y = row @ layer.host.weight.T + layer.host.bias
            if name in layer.inlay_multi_lora_b:
                piece = layer.inlay_multi_lora_b[name]
                y = y + piece.scale * row @ layer.inlay_multi_lora_a.T @ piece.weight[0]
            row = row + 0.3 * torch.tanh(y)
        found.append(row)
    return torch.stack(found)


def rows_of(names: list[str], dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(len(names), 4, WIDTH, generator=torch.Generator().manual_seed(5)).to(dtype)


@torch.no_grad()
def check(model: Any, names: list[str]) -> None:
    x = rows_of(names)
    torch.testing.assert_close(model(x, adapter_names=names), defined(model, x, names), atol=1e-12, rtol=1e-12)


def kept(model: Any, task: str) -> bool:
    """Whether all of a task's parameters lie in banks."""
    inside = {bank.whole.untyped_storage().data_ptr() for bank in banks(model) if bank.whole is not None}
    return all(weight.untyped_storage().data_ptr() in inside for weight in weights(model, task))


NAMES = ["t2", "t0", "t1", "t0"]


# ------------------------------------------------------------------------ whatever is done to the parameters is heeded


def _step(model: Any) -> None:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)
    model(rows_of(NAMES), adapter_names=NAMES).sum().backward()
    optimizer.step()


def _by_data(model: Any) -> None:
    for weight in weights(model, "t1"):
        weight.data.normal_()


def _other_memory_at_one_layer(model: Any) -> None:
    weight = weights(model, "t1")[3]
    weight.data = torch.randn_like(weight)


def _another_parameter(model: Any) -> None:
    for layer in layers(model):
        layer.inlay_multi_lora_b["t1"].weight = nn.Parameter(torch.randn_like(layer.inlay_multi_lora_b["t1"].weight))


def _loaded(model: Any) -> None:
    state = {name: torch.randn_like(value) for name, value in model.state_dict().items() if ".t1." in name}
    model.load_state_dict(state, strict=False)


def _assigned(model: Any) -> None:
    state = {name: torch.randn_like(value) for name, value in model.state_dict().items() if ".t1." in name}
    model.load_state_dict(state, strict=False, assign=True)


def _there_and_back(model: Any) -> None:
    model.to(torch.float32).to(torch.float64)
    stir(model, 9)


def _deleted_and_added(model: Any) -> None:
    model.delete_adapter("t1")
    model.add_adapter("t1", config(lora_alpha=3))
    stir(model, 4)


def _renamed_in_a_ring(model: Any) -> None:
    for old, new in (("t1", "other"), ("t2", "t1"), ("other", "t2")):
        rename_task(model, old, new)


CHANGES = [
    _step,
    _by_data,
    _other_memory_at_one_layer,
    _another_parameter,
    _loaded,
    _assigned,
    _there_and_back,
    _deleted_and_added,
    _renamed_in_a_ring,
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__.strip("_"))
def test_a_change_is_heeded(change: Callable[[Any], None]) -> None:
    model = several()
    check(model, NAMES)
    before = model(rows_of(NAMES), adapter_names=NAMES)
    change(model)
    check(model, NAMES)
    assert not torch.allclose(model(rows_of(NAMES), adapter_names=NAMES)[2], before[2])
    assert all(kept(model, task) for task in ("t0", "t1", "t2"))


def test_parameters_that_stand_in_for_a_call() -> None:
    model = several()
    check(model, NAMES)
    x = rows_of(NAMES)
    others = {name: torch.randn_like(p) for name, p in model.named_parameters() if ".t1." in name}
    with torch.no_grad():
        found = torch.func.functional_call(model, others, (x,), {"adapter_names": NAMES})
        before = model(x, adapter_names=NAMES)
        model.load_state_dict(others, strict=False)
        torch.testing.assert_close(found, model(x, adapter_names=NAMES))
    assert not torch.allclose(found[2], before[2])
    assert torch.equal(found[:2], before[:2])


@pytest.mark.parametrize("grad", [False, True])
def test_a_parameter_replaced_at_any_one_layer_is_heeded(grad: bool) -> None:
    """For good, or for one call: whichever layer and task it is."""
    model = several()
    check(model, NAMES)
    x = rows_of(NAMES)
    names = [name for name, _ in model.named_parameters() if ".t1." in name or ".t2." in name]
    for number, name in enumerate(names):
        stranger = torch.randn_like(model.get_parameter(name)).requires_grad_(grad)
        with torch.set_grad_enabled(grad):
            found = torch.func.functional_call(model, {name: stranger}, (x,), {"adapter_names": NAMES})
        if grad:
            assert torch.autograd.grad(found.sum(), stranger)[0].any(), name
        check(model, NAMES)  # and the call left nothing behind
        if number % 5 == 0:
            place, _, last = name.rpartition(".")
            setattr(model.get_submodule(place), last, nn.Parameter(stranger.detach()))
            check(model, NAMES)
            torch.testing.assert_close(found.detach(), model(x, adapter_names=NAMES))
        else:
            assert not torch.allclose(found, model(x, adapter_names=NAMES)), name


def test_a_parameter_of_the_same_memory_has_the_gradient() -> None:
    model = several()
    check(model, NAMES)
    layer = layers(model)[3]
    old = layer.inlay_multi_lora_b["t1"].weight
    layer.inlay_multi_lora_b["t1"].weight = new = nn.Parameter(old.data)
    model(rows_of(NAMES), adapter_names=NAMES).sum().backward()
    assert old.grad is None
    assert new.grad is not None
    assert new.grad.any()


def test_an_output_that_does_not_lie_in_order() -> None:
    """A host may give a view of something else: then there is nothing to write over."""
    model = several()
    x = rows_of(NAMES)
    with torch.no_grad():
        wanted = model(x, adapter_names=NAMES), model(x)
        for layer in layers(model):
            forward = layer.host.forward
            layer.host.forward = lambda x, forward=forward: forward(x).mT.contiguous().mT.unsqueeze(1)
        turned = model.get_base_model()
        for step in turned.steps:
            step.register_forward_hook(lambda _, args, y: y.squeeze(1))
        torch.testing.assert_close(model(x, adapter_names=NAMES), wanted[0])
        torch.testing.assert_close(model(x), wanted[1])


def test_a_copy_is_a_model_of_its_own() -> None:
    model = several()
    check(model, NAMES)
    other = copy.deepcopy(model)
    before = model(rows_of(NAMES), adapter_names=NAMES)
    stir(other, 7)
    check(other, NAMES)
    assert torch.equal(model(rows_of(NAMES), adapter_names=NAMES), before)
    assert banks(model).isdisjoint(banks(other))


def test_what_is_left_of_a_deleted_task_disturbs_nobody() -> None:
    model = several()
    check(model, NAMES)
    left = weights(model, "t1")
    model.delete_adapter("t1")
    for i in range(3, 20):  # more than there was room for
        model.add_adapter(f"t{i}", config())
        stir(model, i)
        names = [f"t{i}", "t0", "t2", f"t{max(3, i - 2)}"]
        check(model, names)
        for weight in left:
            weight.data.fill_(torch.nan)
        check(model, names)


def test_memory_that_is_someone_elses_stays_where_it_is() -> None:
    """As what distributes or flattens a model has it: parameters are pieces of one tensor, which it writes to."""
    model = several()
    own = [weight for task in ("t0", "t1", "t2") for weight in weights(model, task)]
    flat = torch.cat([weight.detach().flatten() for weight in own])
    for weight, piece in zip(own, flat.split(own[0].numel()), strict=True):
        weight.data = piece.view_as(weight)
    check(model, NAMES)
    flat.normal_()
    check(model, NAMES)
    assert not any(kept(model, task) for task in ("t0", "t1", "t2"))


def test_without_gradients_first_and_then_trained() -> None:
    model = several()
    with torch.inference_mode():
        model(rows_of(NAMES), adapter_names=NAMES)
    assert kept(model, "t1")
    _step(model)
    check(model, NAMES)


# --------------------------------------------------------------------------------------------- unlike tasks, gradients


def unlike() -> Any:
    """Tasks that adapt different layers, with scales of their own."""
    model = several(2, alpha_pattern={"steps.3": 5})
    model.add_adapter("t2", config(target_modules=[f"steps.{i}" for i in range(0, DEPTH, 3)], lora_alpha=7))
    stir(model)
    return model


def test_tasks_that_adapt_different_layers_and_rows_without_a_task() -> None:
    check(unlike(), [*NAMES, "__base__", "t2"])
    check(unlike(), ["t2", "__base__"])


@pytest.mark.parametrize("tasks", [3, 4])
def test_where_a_kernel_finds_each_rows_own(tasks: int) -> None:
    """By slots: the parameters themselves, scales of 0 where a task does not adapt a layer, and all as kernels read it:
    scales without gaps, from multiples of 16 bytes on."""
    model = unlike()
    for i in range(3, tasks):
        model.add_adapter(f"t{i}", config())
    names = ["t2", "__base__", "t0", "t1", "t0", f"t{tasks - 1}"]
    rows = TaskRows.of(names, [f"t{i}" for i in range(tasks)])
    for _ in range(2):
        for layer in layers(model):
            found = rows.located(layer.weights[0], layer.routing)
            assert found is not None
            b, scales, slots = found
            assert scales.is_contiguous()
            assert scales.data_ptr() % 16 == 0
            for name, slot in zip(names, slots.tolist(), strict=True):
                piece = layer.factors.get(name)
                assert scales[slot] == (0 if piece is None else piece.scale)
                if piece is not None:
                    assert b[slot].data_ptr() == piece.weight.data_ptr()
        _other_memory_at_one_layer(model)
        rows = TaskRows.of(names, [f"t{i}" for i in range(tasks)])


@pytest.mark.parametrize("make", [several, unlike])
def test_the_gradients_are_those_of_the_definition(make: Callable[[], Any]) -> None:
    model = make()
    x = rows_of(NAMES).requires_grad_()
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    how = torch.randn(4, 4, WIDTH, dtype=torch.float64)
    found = torch.autograd.grad((model(x, adapter_names=NAMES) * how).sum(), [x, *trained.values()])
    wanted = torch.autograd.grad((defined(model, x, NAMES) * how).sum(), [x, *trained.values()])
    for mine, its in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, its, atol=1e-11, rtol=1e-9)


def test_a_layer_that_took_no_part_has_no_gradient() -> None:
    model = several()
    model(rows_of(NAMES), 5, adapter_names=NAMES).sum().backward()
    for task in ("t0", "t1", "t2"):
        own = weights(model, task)
        assert all(weight.grad is not None and weight.grad.any() for weight in own[:5])
        assert all(weight.grad is None for weight in own[5:])


def test_a_pass_leaves_nothing_behind() -> None:
    model = several()
    gc.collect()
    gc.disable()  # nothing waits for it
    try:
        for train in (False, True):
            with torch.set_grad_enabled(train):
                out = model(rows_of(NAMES), adapter_names=NAMES)
            if train:
                out.sum().backward()
            del out
            assert not [each for each in gc.get_objects() if isinstance(each, TaskRows)]
    finally:
        gc.enable()


# ------------------------------------------------------------------------------------------------------------- kernels


class Kernels(TorchDispatchMode):
    """Counts what computes: each is a kernel or two on a GPU."""

    VIEWS = ("view", "expand", "unbind", "slice", "select.int", "transpose", "aten.t.", "detach", "alias", "split")

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(function)
        if not any(view in name for view in (*self.VIEWS, "squeeze", "empty", "lift_fresh")):
            self.count += 1
        return function(*args, **(kwargs or {}))


def kernels(action: Callable[[], Any]) -> int:
    action()
    with Kernels() as counted:
        action()
    return counted.count


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tasks", [2, 12])
def test_two_kernels_a_layer(dtype: torch.dtype, tasks: int) -> None:
    """And four for every bank of layers: the tasks' `B`s, rounded, for each row; and the rows' places."""
    model = several(12, dtype)
    names = [f"t{i % tasks}" for i in range(12)]
    x = rows_of(names, dtype)
    with torch.no_grad():
        mixed = kernels(lambda: model(x, adapter_names=names))
        with model.disable_adapter():
            base = kernels(lambda: model(x))
    assert mixed - base <= 2 * DEPTH + 4 * len(banks(model))


@pytest.mark.parametrize("tasks", [1, 2, 12])
def test_fewer_kernels_in_training_than_lora_has_for_one_task(tasks: int) -> None:
    model = several(tasks, torch.bfloat16)
    names = [f"t{i % tasks}" for i in range(12)]
    x = rows_of(names, torch.bfloat16)
    torch.manual_seed(0)
    lora = get_peft_model(Stack().bfloat16(), LoraConfig(r=2, target_modules=[f"steps.{i}" for i in range(DEPTH)]))

    def count(adapted: Any, **how: Any) -> int:
        def step() -> None:
            adapted(x, **how).sum().backward()
            adapted.zero_grad()

        return kernels(step)

    found = count(model, adapter_names=names)
    assert found <= count(lora.eval())
    assert found <= 18 * DEPTH, "forward and backward, with the host's own"
