"""Gradients of scales and shifts in half precision: sums over thousands of rows, against float64."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import get_peft_model
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

import inlay

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
C, ROWS = 32, 2**15  # so many rows that outputs have `scaled_linear.SMALL` numbers
CONFIGS = {"bias": inlay.BiasTuningConfig, "ssf": inlay.SSFConfig, "norm": inlay.NormTuningConfig}
MODULES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(C, C), (ROWS, C)),
    "gpt2": (lambda: Conv1D(C, C), (8, ROWS // 8, C)),
    "conv1d": (lambda: nn.Conv1d(C, C, 1), (32, C, ROWS // 32)),
    "layer norm": (lambda: nn.LayerNorm(C), (ROWS, C)),
    "layer norm, few rows": (lambda: nn.LayerNorm(C), (16, 256, C)),
    "layer norm of two axes": (lambda: nn.LayerNorm((4, C)), (ROWS // 4, 4, C)),
    "group norm": (lambda: nn.GroupNorm(2, C), (32, C, ROWS // 32)),
    "group norm, many short rows": (lambda: nn.GroupNorm(2, C), (ROWS // 4, C, 4)),
    "rms norm": (lambda: nn.RMSNorm(C), (ROWS, C)),
    "batch norm": (lambda: nn.BatchNorm1d(C), (32, C, ROWS // 32)),
}
NORMS = tuple(kind for kind in MODULES if "norm" in kind)
CASES = [
    (method, kind)
    for method in CONFIGS
    for kind in MODULES
    if not (method == "norm" and kind not in NORMS)
    and not (method == "bias" and kind == "rms norm")
    and not (method != "norm" and kind == "layer norm of two axes")
]


class Net(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


def adapted(inner: nn.Module, method: str) -> Any:
    torch.manual_seed(1)
    model = get_peft_model(Net(inner), CONFIGS[method](newly_initialised=[]))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "inlay_" in name:
                parameter.add_(0.2 * torch.rand_like(parameter))
    return model


def gradients(model: Any, x: Tensor, g: Tensor, dtype: torch.dtype | None) -> dict[str, Tensor]:
    with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
        y = model(x)
    y.backward(g.to(y.dtype))
    return {name: p.grad.double() for name, p in model.named_parameters() if p.grad is not None} | {
        "x": x.grad.double()
    }


@pytest.mark.parametrize(("method", "kind"), CASES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("autocast", [True, False])
def test_sums_over_many_rows_arrive(method: str, kind: str, dtype: torch.dtype, autocast: bool) -> None:
    torch.manual_seed(0)
    make, shape = MODULES[kind]
    inner = make().requires_grad_(False)
    x = torch.randn(shape).to(dtype)
    mine = adapted(copy.deepcopy(inner) if autocast else copy.deepcopy(inner).to(dtype), method)
    exact = adapted(inner, method).double()
    with torch.no_grad():  # what half precision has made of the weights, and of the adapter's first numbers
        for name, parameter in exact.named_parameters():
            parameter.copy_(dict(mine.named_parameters())[name])
        y = exact(x.double())
        g = (torch.rand_like(y) + 0.3 * y).to(dtype)  # neither sum is small beside its terms
    wanted = gradients(exact, x.double().requires_grad_(), g.double(), None)
    found = gradients(mine, x.clone().requires_grad_(), g, dtype if autocast else None)
    assert found.keys() == wanted.keys()
    assert len(found) > 1
    for name, gradient in wanted.items():
        error = (found[name] - gradient).norm() / gradient.norm()
        assert error < 0.02, (name, float(error))


@pytest.mark.parametrize("method", CONFIGS)
def test_what_a_layer_norm_computes_does_not_depend_on_whether_it_trains(method: str) -> None:
    torch.manual_seed(0)
    model = adapted(nn.LayerNorm(C).bfloat16(), method)
    x = torch.randn(64, C).bfloat16().requires_grad_()
    trained = model(x)
    with torch.no_grad():
        assert torch.equal(model(x), trained)


def test_second_derivatives_of_a_layer_norm_that_adds_up_exactly() -> None:
    """The sums are ordinary operations: differentiated again, they are right."""
    from inlay.methods import channels

    torch.manual_seed(0)
    norm, x = nn.LayerNorm(6).double(), torch.randn(5, 6, dtype=torch.float64, requires_grad=True)
    weight, bias = (torch.randn(6, dtype=torch.float64, requires_grad=True) for _ in range(2))

    def second(exactly: bool) -> tuple[Tensor, ...]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(channels, "sums_roughly", lambda x: exactly)
            made = channels.PLAIN_NORMS[nn.LayerNorm](norm, x, weight, bias)
        first = torch.autograd.grad(made.pow(3).sum(), (x, weight, bias), create_graph=True)
        return torch.autograd.grad(sum(one.pow(2).sum() for one in first), (x, weight, bias))

    for mine, theirs in zip(second(True), second(False), strict=True):
        torch.testing.assert_close(mine, theirs)
