"""Bias tuning and SSF on a GPU: right, and at what cost.

    python tests/methods/channels_on_gpu.py [--measure] [--batch 128]

Without --measure: outputs and gradients in half precision against float64, whether they repeat to the bit, inside a
CUDA graph, and traced by inductor without a break. With it: milliseconds a step and peak memory of ViT-L in a plain
loop under bfloat16 autocast, beside norm tuning and PEFT's LoRA. The goals: bias <= 1.03 x norm, ssf <= 1.1 x LoRA.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from peft import LoraConfig, get_peft_model
from transformers import ViTConfig, ViTForImageClassification
from transformers.pytorch_utils import Conv1D

import inlay

ROUNDING = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


class Net(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


def adapted(config: Any, make: Callable[[], nn.Module]) -> tuple[Any, nn.Module]:
    torch.manual_seed(0)
    inner = make().cuda()
    model = get_peft_model(Net(inner), config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.copy_(torch.randn_like(parameter).clamp(-3, 0.6) * 0.3)
    return model, inner


def check_linear(method: str, kind: type, dtype: torch.dtype, bias: bool) -> None:
    """One linear layer of a size at which SSF's kernels run, twice; bias tuning leaves it to torch."""
    inputs, outputs, rows = 96, 1024, 8200
    made = {nn.Linear: lambda: nn.Linear(inputs, outputs, bias=bias), Conv1D: lambda: Conv1D(outputs, inputs)}[kind]
    config = {"bias": inlay.BiasTuningConfig, "ssf": inlay.SSFConfig}[method](newly_initialised=[])
    model, inner = adapted(config, made)
    x = torch.randn(2, rows // 2, inputs, device="cuda").to(dtype).float().requires_grad_()
    g = torch.randn(2, rows // 2, outputs, device="cuda").to(dtype)
    piece = getattr(inner, f"inlay_{method}").pieces["default"]
    trained = list(piece.parameters())
    passes = []
    for _ in range(2):
        with torch.autocast("cuda", dtype):
            y = model(x)
        assert ("_ScaledLinear" in type(y.grad_fn).__name__) is (method == "ssf"), y.grad_fn
        passes.append((y, *torch.autograd.grad(y, [x, *trained], g)))
    for one, again in zip(*passes, strict=True):
        assert torch.equal(one, again)
    weight = inner.weight.double()
    weight = weight.t() if kind is Conv1D else weight
    own = inner.bias.double() if bias or kind is Conv1D else torch.zeros(outputs, device="cuda").double()
    gamma = 1 + piece.weight.double() if method == "ssf" else torch.ones_like(own)
    beta = {"bias": piece.weight, "ssf": getattr(piece, "bias", None)}[method]
    beta = torch.zeros_like(own) if beta is None else beta.double()
    wide, upstream = x.double().view(-1, inputs), g.double().view(-1, outputs)
    f = wide @ weight.t() + own
    size = gamma.abs() * (wide.abs() @ weight.abs().t() + own.abs()) + beta.abs()
    of_scale = ((upstream * f).sum(0), (upstream.abs() * size).sum(0) / gamma.abs())
    of_shift = (upstream.sum(0), 1e-2 * upstream.abs().sum(0))
    of_bias = (of_shift[0], of_shift[1] + of_shift[0].abs())  # torch rounds the sum
    wanted = [
        (gamma * f + beta, size),
        ((upstream * gamma) @ weight, (upstream.abs() * gamma.abs()) @ weight.abs()),
        *((of_scale, of_shift) if method == "ssf" else (of_bias,)),
    ]
    for found, (value, within) in zip(passes[0], wanted, strict=False):
        error = (found.double().view(value.shape) - value).abs()
        assert (error <= 2 * ROUNDING[dtype] * within + 1e-6).all(), (method, kind, dtype, (error / within).max())


def vit(size: str) -> tuple[Any, Callable[[int], dict[str, Tensor]]]:
    wide = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
    small = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 512}
    torch.manual_seed(0)
    model = ViTForImageClassification(ViTConfig(**(wide if size == "large" else small), num_labels=100))

    def batch(rows: int) -> dict[str, Tensor]:
        pixels = torch.randn(rows, 3, 224, 224, device="cuda")
        return {"pixel_values": pixels, "labels": torch.arange(rows, device="cuda") % 100}

    return model.cuda(), batch


CONFIGS: dict[str, Callable[[], Any]] = {
    "norm": lambda: inlay.NormTuningConfig(),
    "bias": lambda: inlay.BiasTuningConfig(),
    "ssf": lambda: inlay.SSFConfig(),
    "lora": lambda: LoraConfig(r=10, target_modules=["q_proj", "v_proj"], modules_to_save=["classifier"]),
}


def step_of(model: Any, batch: dict[str, Tensor]) -> Callable[[], None]:
    def step() -> None:
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(**batch).loss
        loss.backward()

    return step


def check_captured(method: str) -> None:
    """A CUDA graph of a pass gives the gradients of the pass."""
    model, batch = vit("small")
    model = get_peft_model(model, CONFIGS[method]()).train()
    step = step_of(model, batch(32))
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            model.zero_grad()
            step()
    torch.cuda.synchronize()
    trained = [p for p in model.parameters() if p.requires_grad]
    wanted = [p.grad.clone() for p in trained]
    graph = torch.cuda.CUDAGraph()
    model.zero_grad()
    with torch.cuda.graph(graph):
        step()
    graph.replay()
    torch.cuda.synchronize()
    for parameter, gradient in zip(trained, wanted, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=2e-2, atol=1e-3)


def check_compiled(method: str) -> None:
    model, batch = vit("small")
    model = get_peft_model(model, CONFIGS[method]()).train()
    given = batch(32)
    gradients = []
    for run in (model, torch.compile(model, fullgraph=True)):
        model.zero_grad()
        step_of(run, given)()
        gradients.append([p.grad.clone() for p in model.parameters() if p.requires_grad])
    for found, wanted in zip(*gradients, strict=True):
        assert (found - wanted).norm() <= 5e-2 * wanted.norm() + 1e-4, (found - wanted).norm() / wanted.norm()


def cost(config: Any, rows: int, steps: int = 20) -> tuple[float, float, float]:
    """Milliseconds a step, the median; GiB at most in these steps, and in the first one."""
    model, batch = vit("large")
    model = get_peft_model(model, config).train()
    optimiser = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
    forward_and_backward = step_of(model, batch(rows))

    def step() -> None:
        forward_and_backward()
        optimiser.step()
        optimiser.zero_grad()

    torch.cuda.reset_peak_memory_stats()
    step()
    first = torch.cuda.max_memory_allocated()
    for _ in range(4):
        step()
    torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(steps):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        step()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return sorted(times)[steps // 2], torch.cuda.max_memory_allocated() / 2**30, first / 2**30


def measure(rows: int) -> None:
    found = {}
    for method, config in CONFIGS.items():
        found[method] = time, memory, first = cost(config(), rows)
        torch.cuda.empty_cache()
        print(f"{method:6} {time:7.1f} ms  {memory:6.2f} GiB (first step {first:.2f})")
    for one, other, goal in (("bias", "norm", 1.03), ("ssf", "lora", 1.1)):
        time, memory, _ = (mine / theirs for mine, theirs in zip(found[one], found[other], strict=True))
        print(f"{one} / {other}: step {time:.3f}, memory {memory:.3f} (goal {goal})")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--measure", action="store_true")
    parser.add_argument("--batch", type=int, default=128)
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    if options.measure:
        measure(options.batch)
        return
    for dtype in ROUNDING:
        check_linear("bias", nn.Linear, dtype, True)
        check_linear("bias", Conv1D, dtype, True)
        for bias in (True, False):
            check_linear("ssf", nn.Linear, dtype, bias)
        check_linear("ssf", Conv1D, dtype, True)
    print("linear layers: right")
    for method in ("bias", "ssf"):
        check_captured(method)
        print(f"{method} in a CUDA graph: right")
    for method in ("bias", "ssf"):
        check_compiled(method)
        print(f"{method} by inductor: right")


if __name__ == "__main__":
    main()
