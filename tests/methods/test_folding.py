"""Where an adapter is folded into its host's parameters, where it acts on the output, and that both are the same."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module
from peft import get_peft_model
from torch import Tensor, nn
from transformers.models.convnext.modeling_convnext import ConvNextLayerNorm
from transformers.pytorch_utils import Conv1D

import inlay
from inlay.methods.tuner import ChildLayer

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


class Net(nn.Module):
    """A model of one module."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


class Twice(nn.Linear):
    """A linear layer of a class of its own, which computes something else."""

    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


CONFIGS = {"bias": inlay.BiasTuningConfig, "ssf": inlay.SSFConfig}
Module = tuple[Callable[[], nn.Module], tuple[int, ...], int]
# A module, the shape of an input, the axis of the channels.
FOLDED: dict[str, Module] = {
    "linear": (lambda: nn.Linear(5, 4), (2, 3, 5), -1),
    "linear of a vector": (lambda: nn.Linear(5, 4), (5,), -1),
    "gpt2": (lambda: Conv1D(4, 5), (2, 3, 5), -1),
    "layer norm": (lambda: nn.LayerNorm(4), (2, 3, 4), -1),
    "group norm": (lambda: nn.GroupNorm(2, 4), (2, 4, 3), 1),
    "rms norm": (lambda: nn.RMSNorm(4), (2, 3, 4), -1),
    "conv1d": (lambda: nn.Conv1d(2, 4, 2), (2, 2, 6), 1),
    "conv2d": (lambda: nn.Conv2d(2, 4, 2, stride=2, padding=1, padding_mode="circular"), (2, 2, 4, 5), 1),
    "conv3d": (lambda: nn.Conv3d(2, 4, 2), (2, 2, 3, 3, 3), 1),
}
ONLY_BIAS = ("conv1d", "conv2d", "conv3d")
ON_THE_OUTPUT: dict[str, Module] = {
    "a class of its own": (lambda: Twice(5, 4), (2, 3, 5), -1),
    "batch norm": (lambda: nn.BatchNorm2d(4), (2, 4, 3, 3), 1),
    "convnext": (lambda: ConvNextLayerNorm(4, data_format="channels_first"), (2, 4, 3, 3), 1),
}
CASES = [
    (method, kind, True)
    for method in CONFIGS
    for kind in FOLDED
    if not (method == "ssf" and kind in ONLY_BIAS) and not (method == "bias" and kind == "rms norm")
]
CASES += [(method, kind, False) for method in CONFIGS for kind in ON_THE_OUTPUT]
CASES += [("ssf", kind, False) for kind in ONLY_BIAS]


def adapted(inner: nn.Module, *methods: str, model: nn.Module | None = None) -> Any:
    model = Net(inner) if model is None else model
    for method in methods:
        wrapped = get_peft_model(model, CONFIGS[method](newly_initialised=[]), adapter_name=method)
    return stirred(wrapped.eval())


@torch.no_grad()
def stirred(model: Any) -> Any:
    for name, parameter in model.named_parameters():
        if "inlay_" in name:
            parameter.copy_(torch.randn_like(parameter))
            parameter.requires_grad_()
    return model


def numbers(inner: nn.Module, method: str) -> tuple[Tensor | float, Tensor | float]:
    """What an adapter multiplies by and adds."""
    piece = getattr(inner, f"inlay_{method}").pieces[method]
    if method == "bias":
        return 1.0, piece.weight
    return 1 + piece.weight, 0.0 if piece.bias is None else piece.bias


def along(axis: int, ndim: int, values: Tensor | float) -> Tensor | float:
    if not isinstance(values, Tensor):
        return values
    shape = [1] * ndim
    shape[axis] = -1
    return values.reshape(shape)


@pytest.mark.parametrize(("method", "kind", "folds"), CASES)
def test_both_ways_compute_what_the_equation_says(method: str, kind: str, folds: bool) -> None:
    torch.manual_seed(0)
    make, shape, axis = (FOLDED | ON_THE_OUTPUT)[kind]
    inner = make().double()
    with torch.no_grad():
        for parameter in inner.parameters():
            parameter.copy_(torch.randn_like(parameter))
    plain = copy.deepcopy(inner).eval()
    model = adapted(inner, method)
    assert ("forward" in inner.__dict__) is folds
    assert bool(inner._forward_hooks) is not folds
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    scale, shift = (along(axis, len(shape), one) for one in numbers(inner, method))
    wanted = scale * plain(x) + shift
    found = model(x)
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10)
    trained = [x, *(p for name, p in model.named_parameters() if "inlay_" in name)]
    g = torch.randn_like(wanted)
    for mine, theirs in zip(
        torch.autograd.grad(found, trained, g), torch.autograd.grad(wanted, trained, g), strict=True
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-9)
    with model.disable_adapter():
        assert torch.equal(model(x), plain(x))
    model.unload()
    assert "forward" not in inner.__dict__
    assert torch.equal(inner(x), plain(x))


@pytest.mark.parametrize("order", [("bias", "ssf"), ("ssf", "bias")])
@pytest.mark.parametrize("taken_off", ["bias", "ssf"])
@pytest.mark.parametrize("kind", ["linear", "layer norm"])
def test_two_methods_on_one_module_act_in_the_order_in_which_they_came(
    order: tuple[str, str], taken_off: str, kind: str
) -> None:
    torch.manual_seed(0)
    make, shape, _ = FOLDED[kind]
    inner = make().double()
    plain, model = copy.deepcopy(inner), Net(inner)
    wrapped = {method: adapted(inner, method, model=model) for method in order}
    x = torch.randn(shape, dtype=torch.float64)

    def wanted(*methods: str) -> Tensor:
        y = plain(x)
        for method in methods:
            scale, shift = numbers(inner, method)
            y = scale * y + shift
        return y

    torch.testing.assert_close(model(x), wanted(*order), rtol=1e-12, atol=1e-12)
    left = next(method for method in order if method != taken_off)
    alone = wanted(left)
    wrapped[taken_off].unload()
    torch.testing.assert_close(model(x), alone, rtol=1e-12, atol=1e-12)
    wrapped[left].unload()
    assert torch.equal(model(x), plain(x))
    assert not inner._forward_hooks
    assert "forward" not in inner.__dict__


class Encoder(nn.Module):
    """Layers of torch's, which in eval mode read the weights of their modules and call none of them."""

    def __init__(self, norm_first: bool) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 12, batch_first=True, dropout=0.0, norm_first=norm_first)
        self.inner = nn.TransformerEncoder(layer, 2, enable_nested_tensor=not norm_first)

    def forward(self, x: Tensor, padding: Tensor | None = None) -> Tensor:
        return self.inner(x, src_key_padding_mask=padding)


@pytest.mark.parametrize("method", [*CONFIGS, "norm"])
@pytest.mark.parametrize(("norm_first", "padded"), [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_an_encoder_layer_of_torch_s_does_not_pass_adapters_over(
    method: str, norm_first: bool, padded: bool, copied: Callable[[Any], Any]
) -> None:
    torch.manual_seed(0)
    plain = Encoder(norm_first).eval()
    x, padding = torch.randn(3, 5, 8), torch.arange(5) >= torch.tensor([[5], [3], [2]]) if padded else None
    seen = ~padding if padded else torch.ones(3, 5, dtype=torch.bool)
    with torch.no_grad():
        base = plain(x, padding)[seen]
    model = copy.deepcopy(plain)
    config = (CONFIGS | {"norm": inlay.NormTuningConfig})[method]
    stirred(get_peft_model(model, config(newly_initialised=[])))
    model.train()
    wanted = model(x, padding)[seen].detach()
    assert not torch.allclose(wanted, base, atol=0.1)
    model.eval()
    for one in (model, copied(model)):
        with torch.no_grad():
            torch.testing.assert_close(one(x, padding)[seen], wanted)
        if not padded:  # torch's encoder drops padding there, and its attention then takes no gradients
            torch.testing.assert_close(one(x)[seen], wanted)


def test_torch_s_own_way_through_an_encoder_layer_is_back_when_adapters_are_gone() -> None:
    model = Encoder(norm_first=False).eval()
    wrapped = [get_peft_model(model, CONFIGS[method](newly_initialised=[]), adapter_name=method) for method in CONFIGS]
    assert any(module._forward_pre_hooks for module in model.modules())
    for one in wrapped:
        one.unload()
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())


def test_elsewhere_no_hook_is_added_for_it() -> None:
    inner = nn.Linear(5, 4)
    adapted(inner, "bias")
    assert not inner._forward_pre_hooks


class Counting(ModelHook):
    """One of Accelerate's hooks, such as those that bring weights to a device."""

    calls = 0

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        return args, kwargs


@pytest.mark.parametrize("method", CONFIGS)
@pytest.mark.parametrize("first", [True, False])
def test_hooks_of_accelerate_run_whichever_came_first(method: str, first: bool) -> None:
    torch.manual_seed(0)
    inner, hook = nn.Linear(5, 4), Counting()
    plain, x = copy.deepcopy(inner), torch.randn(3, 5)
    if first:
        add_hook_to_module(inner, hook)
    model = adapted(inner, method)
    if not first:
        add_hook_to_module(inner, hook)
    scale, shift = numbers(inner, method)
    torch.testing.assert_close(model(x), scale * plain(x) + shift)
    assert hook.calls == 1
    model.unload()
    assert torch.equal(inner(x), plain(x))
    assert hook.calls == 2
    remove_hook_from_module(inner)
    assert torch.equal(inner(x), plain(x))
    assert hook.calls == 2


def test_a_method_that_comes_after_accelerate_s_hook_finds_the_first_one_s_output() -> None:
    torch.manual_seed(0)
    inner, hook = nn.LayerNorm(4), Counting()
    plain, x, model = copy.deepcopy(inner), torch.randn(3, 4), Net(inner)
    adapted(inner, "bias", model=model)
    add_hook_to_module(inner, hook)
    tuned = get_peft_model(model, inlay.NormTuningConfig(newly_initialised=[]), adapter_name="norm")
    copied = inner.inlay_norm.pieces["norm"]
    with torch.no_grad():
        copied.weight.mul_(3)
    shift = inner.inlay_bias.pieces["bias"].weight
    wanted = F.layer_norm(x, (4,), 3 * plain.weight, plain.bias, plain.eps) + shift
    torch.testing.assert_close(model(x), wanted)
    with tuned.disable_adapter():
        assert torch.equal(model(x), plain(x))
    assert hook.calls == 1


@pytest.mark.parametrize("method", CONFIGS)
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_have_their_own_forward(method: str, copied: Callable[[Any], Any]) -> None:
    model, x = adapted(nn.Linear(5, 4), method), torch.randn(3, 5)
    wanted = model(x)
    again = copied(model)
    assert torch.equal(again(x), wanted)
    stirred(again)
    assert not torch.equal(again(x), wanted)
    assert torch.equal(model(x), wanted)
    inner = again.get_base_model().inner
    again.unload()
    assert "forward" not in inner.__dict__
    assert torch.equal(model(x), wanted)


def test_the_bias_is_added_up_in_float32_and_rounded_once() -> None:
    torch.manual_seed(0)
    for make, compute in ((lambda: nn.Linear(5, 4), F.linear), (lambda: nn.LayerNorm(4), None)):
        inner = make().bfloat16()
        model = Net(inner)
        adapted(inner, "bias", model=model)
        adapter = get_peft_model(model, inlay.BiasTuningConfig(newly_initialised=[]), adapter_name="two")
        stirred(adapter)
        adapter.base_model.set_adapter(["bias", "two"])
        pieces = inner.inlay_bias.pieces
        assert {piece.weight.dtype for piece in pieces.values()} == {torch.float32}
        total = (inner.bias.float() + pieces["bias"].weight + pieces["two"].weight).bfloat16()
        x = torch.randn(3, 5 if compute else 4).bfloat16().requires_grad_()
        wanted = compute(x, inner.weight, total) if compute else F.layer_norm(x, (4,), inner.weight, total, inner.eps)
        assert torch.equal(model(x), wanted)


def kept(model: Any, x: Tensor) -> int:
    """How many numbers a pass keeps for the backward pass, parameters aside."""
    own = {p.data_ptr() for p in model.parameters()}
    sizes: dict[int, int] = {}

    def pack(one: Tensor) -> Tensor:
        if one.data_ptr() not in own:
            sizes[one.untyped_storage().data_ptr()] = one.untyped_storage().size() // one.element_size()
        return one

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda one: one):
        model(x)
    return sum(sizes.values())


@pytest.mark.parametrize("kind", ["linear", "gpt2", "layer norm", "group norm", "conv2d"])
def test_a_bias_keeps_nothing_for_the_backward_pass(kind: str) -> None:
    make, shape, _ = FOLDED[kind]
    inner = make()
    x = torch.randn(shape)
    model = adapted(inner, "bias")
    assert kept(model, x) == 0
    plain = nn.Sequential(make().requires_grad_(False))
    x.requires_grad_()
    # A norm keeps its statistics and input for the gradient of the input, a linear layer its weight only.
    assert kept(model, x) <= kept(plain, x) + 4


def test_a_weight_that_trains_gets_its_gradient() -> None:
    for method in CONFIGS:
        model = adapted(nn.Linear(5, 4), method)
        inner = model.get_base_model().inner
        inner.weight.requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            model(torch.randn(3, 5)).float().sum().backward()
        assert inner.weight.grad.abs().sum() > 0


class Special(Tensor):
    """A kind of tensor that says itself how it multiplies, as quantised weights do."""


@pytest.mark.parametrize("method", CONFIGS)
def test_a_special_weight_is_left_to_its_own_product(method: str) -> None:
    torch.manual_seed(0)
    for make in (lambda: nn.Linear(5, 4), lambda: nn.LayerNorm(5)):
        inner = make()
        plain = copy.deepcopy(inner)
        model, x = adapted(inner, method), torch.randn(3, 5)
        inner.weight = nn.Parameter(inner.weight.data.as_subclass(Special), requires_grad=False)
        layer = getattr(inner, f"inlay_{method}")
        assert layer.folded(inner, [method], x) is None
        scale, shift = numbers(inner, method)
        torch.testing.assert_close(model(x).as_subclass(Tensor), scale * plain(x) + shift)


@pytest.mark.parametrize("kind", ["linear", "gpt2", "layer norm", "conv2d"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_bias_costs_the_graph_one_addition(kind: str, dtype: torch.dtype) -> None:
    """Its host is torch's own operation, with torch's own gradients, under autocast too."""
    make, shape, _ = FOLDED[kind]
    model = adapted(make(), "bias")
    plain = make().requires_grad_(False)
    plain.bias.requires_grad_()
    names: list[list[str]] = []
    for one in (model, plain):
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            y = one(torch.randn(shape, requires_grad=True))
        names.append(operations(y))
    found, wanted = names
    assert sorted(found) == sorted([*wanted, "AddBackward0"])


def operations(y: Tensor) -> list[str]:
    """The names of everything between an output and its leaves."""
    seen, ahead = set(), [y.grad_fn]
    while ahead:
        node = ahead.pop()
        if node is not None and node not in seen:
            seen.add(node)
            ahead += [one for one, _ in node.next_functions]
    return [node.name() for node in seen]


def test_running_is_what_is_active_known_and_neither_merged_nor_disabled() -> None:
    model = adapted(nn.Linear(5, 4), "bias")
    layer = next(module for module in model.modules() if isinstance(module, ChildLayer))
    assert layer.running() == ["bias"]
    layer._active_adapter = "bias"
    assert layer.running() == ["bias"]
    layer._active_adapter = ["bias", "another"]
    assert layer.running() == ["bias"]
    with model.disable_adapter():
        assert layer.running() == []
    model.merge_adapter()
    assert layer.running() == []
    model.unmerge_adapter()
    assert layer.running() == ["bias"]
