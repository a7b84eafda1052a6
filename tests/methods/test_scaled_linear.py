"""Scales and shifts that are folded into a linear layer in half precision, against float64: values, gradients, what is
kept for the backward pass, and what happens where a model changes an output in place."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import AdaLoraConfig, get_peft_model
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.pytorch_utils import Conv1D

import inlay
from inlay.errors import InlayError
from inlay.methods import scaled_linear
from inlay.methods.column_sums import LEAST
from inlay.methods.rescaling import LEFT_ALONE, STEPS, RescalingLayer, SmallScale
from inlay.methods.ssf.layer import SSFLayer
from zoo import FAMILIES, tiny

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
EPS = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}  # of one rounding, at most
KINDS = {
    "linear": lambda k, c: nn.Linear(k, c),
    "linear without bias": lambda k, c: nn.Linear(k, c, bias=False),
    "gpt2": lambda k, c: Conv1D(c, k),
}


@pytest.fixture(autouse=True, scope="module")
def _outputs_of_any_size() -> Iterator[None]:
    """What is worth folding here is small."""
    kept, scaled_linear.SMALL = scaled_linear.SMALL, 0
    yield
    scaled_linear.SMALL = kept


def layer_on(host: nn.Module, gamma: Tensor, beta: Tensor | None) -> SSFLayer:
    layer = SSFLayer(host.requires_grad_(False))
    layer.attach()
    layer.update_layer("default", inlay.SSFConfig())
    layer.float().set_adapter("default")
    piece = layer.pieces["default"]
    with torch.no_grad():
        piece.weight.copy_(gamma - 1)
        if beta is not None:
            piece.bias.copy_(beta)
    return layer


def kept_for_backward(output: Tensor) -> list[Tensor]:
    """What the operation that made an output saved."""
    return [one for one in output.grad_fn.saved_tensors if one is not None]


def folded(output: Tensor) -> bool:
    return type(output.grad_fn).__name__ == "_ScaledLinearBackward"


class Reference:
    """Everything in float64, of the numbers as they are given."""

    def __init__(self, host: nn.Module, x: Tensor, gamma: Tensor, beta: Tensor | None, g: Tensor) -> None:
        weight = host.weight.double()
        weight = weight.t() if isinstance(host, Conv1D) else weight
        bias = torch.zeros(len(weight)) if getattr(host, "bias", None) is None else host.bias
        self.bias, rows = bias.double(), x.double().reshape(-1, x.shape[-1])
        self.gamma, self.beta = gamma.double(), torch.zeros_like(self.bias) if beta is None else beta.double()
        self.f = rows @ weight.t() + self.bias
        self.y = self.gamma * self.f + self.beta
        g = g.double().reshape(self.y.shape)
        self.of_x = (g * self.gamma) @ weight
        self.of_beta = g.sum(0)
        self.through_weight = (g * (self.f - self.bias)).sum(0)
        self.of_gamma = (g * self.f).sum(0)
        # What roundings can add up to. Of a product: of its factors; of y: of itself.
        within = rows.abs() @ weight.abs().t()
        self.y_error = self.gamma.abs() * within + (self.gamma * self.bias).abs() + self.beta.abs()
        self.x_error = (g.abs() * self.gamma.abs()) @ weight.abs()
        self.gamma_error = (g.abs() * self.y_error).sum(0) / self.gamma.abs().clamp(min=LEAST)
        self.beta_error = g.abs().sum(0)


def run(host: nn.Module, layer: SSFLayer, x: Tensor, g: Tensor, dtype: torch.dtype, autocast: bool) -> Any:
    x = x.clone().requires_grad_()
    with torch.autocast("cpu", dtype, enabled=autocast):
        y = host(x)
    assert folded(y)
    assert y.dtype == dtype
    trained = [p for p in layer.parameters() if p.requires_grad]
    return y, torch.autograd.grad(y, [x, *trained], g.to(dtype))


def compared(kind: str, dtype: torch.dtype, autocast: bool, gamma: Tensor, beta: Tensor, rows: int, seed: int) -> None:
    torch.manual_seed(seed)
    channels, inputs = len(gamma), 6
    own = torch.float32 if autocast else dtype
    host = KINDS[kind](inputs, channels)
    with torch.no_grad():
        for parameter in host.parameters():
            parameter.copy_(torch.randn_like(parameter))
    host.to(own)
    shift = beta if getattr(host, "bias", None) is not None else None
    # Rounded: the reference is told the numbers that the layer gets.
    x, g = (torch.randn(2, rows, size).to(dtype).to(own) for size in (inputs, channels))
    wanted = Reference(host, x, gamma, shift, g)
    layer = layer_on(host, gamma, shift)
    eps = 2 * EPS[dtype]  # once in what is multiplied, once in the result
    y, (of_x, of_gamma, *of_beta) = run(host, layer, x, g, dtype, autocast)
    close(y.reshape(wanted.y.shape), wanted.y, eps * wanted.y_error)
    close(of_x.reshape(wanted.of_x.shape), wanted.of_x, eps * wanted.x_error)
    damped = wanted.through_weight * (gamma.double().abs() / LEAST).clamp(max=1)
    close(of_gamma, damped + wanted.bias * wanted.of_beta, eps * wanted.gamma_error)
    if (gamma.abs() >= LEAST).all():
        close(of_gamma, wanted.of_gamma, eps * wanted.gamma_error)
    assert len(of_beta) == (shift is not None)
    for found in of_beta:
        close(found, wanted.of_beta, 1e-5 * wanted.beta_error)
    assert {found.dtype for found in (of_gamma, *of_beta)} == {torch.float32}
    assert of_x.dtype == own


def close(found: Tensor, wanted: Tensor, bound: Tensor) -> None:
    excess = (found.double() - wanted).abs() - bound - 1e-6
    assert excess.max() <= 0, (found, wanted, bound)


@settings(deadline=None, max_examples=60)
@given(
    st.sampled_from(sorted(KINDS)),
    st.sampled_from(list(EPS)),
    st.booleans(),
    st.lists(st.floats(0.1, 3), min_size=1, max_size=7),
    st.booleans(),
    st.sampled_from([0.0, 0.5, 30.0]),
    st.integers(9, 30),
    st.integers(0, 2**31),
)
def test_values_and_gradients(
    kind: str, dtype: torch.dtype, autocast: bool, scales: list[float], turned: bool, shift: float, rows: int, seed: int
) -> None:
    gamma = torch.tensor(scales) * (-1 if turned else 1)
    compared(kind, dtype, autocast, gamma, shift * torch.linspace(-1, 1, len(gamma)), rows, seed)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", EPS)
def test_near_a_scale_of_0_the_gradient_stays_small_and_finite(
    kind: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until a layer on a GPU asks whether it has such a scale."""
    monkeypatch.setattr(RescalingLayer, "has_small_scale", lambda *given: False)
    gamma = torch.tensor([0.0, 1e-3, -1e-3, 0.02, -0.03, LEAST, -LEAST, 0.04])
    for shift in (0.0, 1.0):
        compared(kind, dtype, True, gamma, torch.full_like(gamma, shift), 40, 3)


def test_a_layer_with_a_scale_near_0_is_not_folded() -> None:
    torch.manual_seed(0)
    host = nn.Linear(6, 3).bfloat16()
    layer = layer_on(host, torch.tensor([1.0, 0.02, 0.0]), torch.zeros(3))
    x = torch.randn(40, 6).bfloat16()
    y = host(x)
    assert not folded(y)
    f = (x.double() @ host.weight.double().t() + host.bias.double()).sum(0)
    found = torch.autograd.grad(y.sum(), layer.pieces["default"].weight)[0]
    torch.testing.assert_close(found.double(), f, rtol=3e-2, atol=0.3)
    layer.pieces["default"].weight.data.zero_()  # past autograd, which counts no change
    assert folded(host(x))


class OnGpu(Tensor):
    """Numbers that take long to ask for."""

    is_cuda = True


@pytest.mark.parametrize("kind", [Tensor, OnGpu])
def test_every_adapter_is_asked_for_itself(kind: type[Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of one layer, changed as often: what is so of the one is not so of the other."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    torch.manual_seed(0)
    host = nn.Linear(6, 3).bfloat16()
    layer = layer_on(host, torch.ones(3), torch.zeros(3))
    layer.update_layer("small", inlay.SSFConfig())
    with torch.no_grad():
        layer.pieces["small"].weight.sub_(0.999)
        for piece in layer.pieces.values():
            for parameter in piece.parameters():
                while parameter._version < 3:
                    parameter.add_(0)
    x = torch.randn(40, 6).bfloat16()
    for name, wanted in (("default", True), ("small", False), ("default", True)):
        layer.set_adapter(name)
        assert folded(host(x)) is wanted, name
        gamma, _ = layer.pieces[name]()
        assert layer.has_small_scale(name, gamma.detach().as_subclass(kind)) is not wanted


def test_on_a_gpu_an_answer_holds_for_an_adapter_and_some_steps() -> None:
    """What a GPU is not asked in every step, here of tensors on a CPU."""
    known, small, large = SmallScale(), torch.zeros(3), torch.ones(3)
    assert known.of([(1, 0)], small, ask=True)
    assert known.of([(1, 0)], large, ask=True), "the same parameters, unchanged: a pass that is recomputed"
    found = [known.of([(1, change)], large, ask=True) for change in range(1, STEPS + 1)]
    assert found == [True] * (STEPS - 1) + [False]
    assert not known.of([(1, STEPS + 1)], small, ask=True)
    unasked = SmallScale()
    assert not unasked.of([(1, 0)], small, ask=False), "a graph is captured"


def test_a_scale_can_change_its_sign() -> None:
    """By small steps, which no momentum carries over 0."""
    torch.manual_seed(0)
    host = nn.Linear(16, 16, bias=False)
    layer = layer_on(host, torch.full((16,), 0.05), None)
    weight, x = layer.pieces["default"].weight, torch.randn(128, 16)
    wanted = -(x @ host.weight.t()).detach()
    optimizer = torch.optim.SGD([weight], lr=1.0)
    for _ in range(200):
        with torch.autocast("cpu", torch.bfloat16):
            y = host(x)
        optimizer.zero_grad()
        (y.float() - wanted).square().mean().backward()
        optimizer.step()
    assert (1 + weight).max() < -0.5


def test_functions_are_transformed_as_before() -> None:
    host = nn.Linear(6, 5).bfloat16()
    layer_on(host, torch.full((5,), 2.0), torch.ones(5))
    x = torch.randn(3, 40, 6).bfloat16()
    assert torch.func.grad(lambda z: host(z).float().sum())(x).shape == x.shape
    torch.testing.assert_close(torch.func.vmap(host)(x), host(x), rtol=2e-2, atol=2e-2)


def test_a_linear_layer_in_half_precision_starts_as_it_was_to_the_bit() -> None:
    torch.manual_seed(0)
    x = torch.randn(40, 6).bfloat16()
    for make in KINDS.values():
        host = make(6, 5).bfloat16()
        wanted = host(x)
        layer_on(host, torch.ones(5), torch.zeros(5) if getattr(host, "bias", None) is not None else None)
        assert folded(host(x))
        assert torch.equal(host(x), wanted)
        with torch.no_grad():
            assert torch.equal(host(x), wanted)


def test_other_precisions_and_trained_weights_keep_the_plain_way() -> None:
    x = torch.randn(40, 6)
    host = nn.Linear(6, 5)
    layer_on(host, torch.full((5,), 2.0), torch.ones(5))
    assert not folded(host(x))
    with torch.autocast("cpu", torch.bfloat16):
        assert folded(host(x))
        assert not folded(host.double()(x.double()))
        host.float().weight.requires_grad_()
        y = host(x)
    assert not folded(y)
    y.sum().backward()
    assert host.weight.grad is not None


def test_a_second_derivative_is_refused_and_the_first_is_the_same_where_it_is_recorded() -> None:
    torch.manual_seed(0)
    host = nn.Linear(6, 5).bfloat16()
    layer = layer_on(host, torch.full((5,), 2.0), torch.ones(5))
    trained = [p for p in layer.parameters() if p.requires_grad]
    x = torch.randn(4, 10, 6).bfloat16().requires_grad_()
    wanted = torch.autograd.grad(host(x).square().sum(), [x, *trained])
    found = torch.autograd.grad(host(x).square().sum(), [x, *trained], create_graph=True)
    for one, other in zip(found, wanted, strict=True):
        assert torch.equal(one, other)
        with pytest.raises(InlayError, match="first derivatives only"):
            one.sum().backward()


def test_few_rows_are_not_worth_a_pass_over_the_weight() -> None:
    host = nn.Linear(6, 5).bfloat16()
    layer_on(host, torch.full((5,), 2.0), torch.ones(5))
    few, many = (torch.randn(rows, 6).bfloat16() for rows in (5, 6))
    assert not folded(host(few))
    assert folded(host(many))
    torch.testing.assert_close(host(few), host(torch.cat([few, many]))[:5], rtol=2e-2, atol=2e-2)


def test_small_outputs_are_not_worth_the_python() -> None:
    host = nn.Linear(6, 5).bfloat16()
    layer_on(host, torch.full((5,), 2.0), torch.ones(5))
    scaled_linear.SMALL = 41 * 5
    try:
        assert not folded(host(torch.randn(40, 6).bfloat16()))
        assert folded(host(torch.randn(41, 6).bfloat16()))
    finally:
        scaled_linear.SMALL = 0


class Net(nn.Module):
    """Two linear layers, and something between that may write where the first has written."""

    def __init__(self, between: Any) -> None:
        super().__init__()
        self.first, self.second, self.between = nn.Linear(6, 8), nn.Linear(8, 3), between

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.between(self.first(x)))


def add_in_place(y: Tensor) -> Tensor:
    y += 1
    return y


def through_a_view(y: Tensor) -> Tensor:
    y[..., :2].mul_(3)
    return y


OVERWRITING = {
    "relu": (nn.ReLU(inplace=True), nn.ReLU()),
    "sum": (add_in_place, lambda y: y + 1),
    "view": (through_a_view, lambda y: torch.cat([y[..., :2] * 3, y[..., 2:]], -1)),
}


def gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        model(x).square().sum().backward()
    return [p.grad.clone() for p in model.parameters() if p.requires_grad]


def scaled(between: Any) -> Any:
    torch.manual_seed(0)
    model = get_peft_model(Net(between), inlay.SSFConfig(target_modules=["first", "second"], newly_initialised=[]))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter), alpha=0.2)
    return model


def staying(model: nn.Module) -> list[bool | None]:
    return [module.outputs_stay for module in model.modules() if isinstance(module, RescalingLayer)]


@pytest.mark.parametrize("what", OVERWRITING)
@pytest.mark.parametrize("shape", [(40,), (4, 10)])
def test_an_output_that_is_overwritten_is_copied(what: str, shape: tuple[int, ...]) -> None:
    overwriting, plain = (scaled(between) for between in OVERWRITING[what])
    x = torch.randn(*shape, 6)
    assert staying(overwriting) == [None, None]
    for _ in range(3):
        for found, wanted in zip(gradients(overwriting, x), gradients(plain, x), strict=True):
            assert torch.equal(found, wanted)
    assert staying(overwriting) == [False, True]
    assert staying(plain) == [True, True]


def test_an_output_that_stays_is_kept_as_it_is_and_the_input_is_not() -> None:
    model = scaled(nn.Identity())
    x = torch.randn(40, 6)
    first = model.get_base_model().first
    for stays in (False, True):
        with torch.autocast("cpu", torch.bfloat16):
            y = first(x)
        kept = kept_for_backward(y)
        assert any(one.data_ptr() == y.data_ptr() for one in kept) is stays
        assert not any(one.shape == x.shape for one in kept)
        gradients(model, x)


def test_what_overwrites_later_is_an_error_that_says_what_to_do() -> None:
    model = scaled(nn.Identity())
    x = torch.randn(40, 6)
    gradients(model, x)
    model.get_base_model().between = nn.ReLU(inplace=True)
    with pytest.raises(InlayError, match=r"Linear was changed in place.*run this step again"):
        gradients(model, x)
    wanted = scaled(nn.ReLU())
    for found, expected in zip(gradients(model, x), gradients(wanted, x), strict=True):
        assert torch.equal(found, expected)


def test_adapters_that_write_in_place_are_not_trusted() -> None:
    model, batch = tiny("bert", "base")
    around = AdaLoraConfig(target_modules=["query"], total_step=10, init_lora_weights=False)
    get_peft_model(model, around, adapter_name="one")
    adapted = get_peft_model(model, inlay.SSFConfig(newly_initialised=[]), adapter_name="two")
    assert set(staying(adapted)) == {None}
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            adapted(**batch).last_hidden_state.float().square().mean().backward()
    assert set(staying(adapted)) >= {False, True}


@pytest.mark.parametrize(
    ("family", "task"), [(name, task) for name, family in FAMILIES.items() for task in family.tasks]
)
def test_the_architectures_that_are_trusted_leave_outputs_alone(family: str, task: str) -> None:
    model, batch = tiny(family, task)
    adapted = get_peft_model(model, inlay.SSFConfig(newly_initialised=[])).train()
    layers = [module for module in adapted.modules() if isinstance(module, SSFLayer)]
    assert type(model).__module__.split(".")[2] in LEFT_ALONE
    assert {layer.outputs_stay for layer in layers} == {True}
    for layer in layers:
        layer.outputs_stay = None
    with torch.autocast("cpu", torch.bfloat16):
        output = adapted(**batch)
    sum(value.float().square().sum() for value in output.values() if _differentiable(value)).backward()
    seen = {layer.outputs_stay for layer in layers if type(layer.host) in (nn.Linear, Conv1D)}
    assert False not in seen
    assert True in seen or not any(type(layer.host) in (nn.Linear, Conv1D) for layer in layers)


def _differentiable(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputing_gives_the_same_gradients(reentrant: bool) -> None:
    for between in (nn.ReLU(), nn.ReLU(inplace=True)):
        model = scaled(between)
        x = torch.randn(40, 6, requires_grad=True)
        wanted = gradients(model, x)
        again = copy.deepcopy(model)
        for layer in again.modules():
            if isinstance(layer, RescalingLayer):
                layer.outputs_stay = None
        net = again.get_base_model()
        forward = net.forward
        net.forward = lambda x, forward=forward: checkpoint(forward, x, use_reentrant=reentrant)
        for _ in range(2):
            for found, expected in zip(gradients(again, x), wanted, strict=True):
                assert torch.equal(found, expected)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("config", [inlay.SSFConfig, inlay.BiasTuningConfig, inlay.AttentionScaleConfig])
def test_a_trace_has_no_breaks(config: type, backend: str) -> None:
    model, batch = tiny("vit")
    adapted = get_peft_model(model, config()).eval()
    torch._dynamo.reset()
    compiled = torch.compile(adapted, backend=backend, fullgraph=True)
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            found, wanted = compiled(**batch), adapted(**batch)
        torch.testing.assert_close(found.logits, wanted.logits, rtol=3e-2, atol=3e-2)
        for one in (found, wanted):
            one.loss.backward()


def test_a_layer_is_right_after_the_model_was_cast() -> None:
    torch.manual_seed(0)
    host = nn.Linear(6, 5)
    layer = layer_on(host, torch.full((5,), 2.0), torch.ones(5))
    x = torch.randn(40, 6)
    wanted = 2 * F.linear(x, host.weight, host.bias) + 1
    host.bfloat16()
    layer.float()
    torch.testing.assert_close(host(x.bfloat16()).float(), wanted, rtol=3e-2, atol=3e-2)
