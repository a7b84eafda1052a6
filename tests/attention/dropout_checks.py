"""Attention with dropout against its definition in float64, with the same weights dropped; on a CPU and on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from cuda_cases import DEVICE, Case, close, compare, definition, handed_over
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from inlay.attention import attention_with_lse, ntk_attention, prefix_attention

CALLS = ("lse", "ntk", "prefix")
COMPILERS = ("aot_eager", "inductor")
P = 0.3
SCALE = 0.15
PREFIX = 21
DROPPING = [
    made
    for dtype in (torch.float32, torch.bfloat16)
    for base in (Case(dtype, length=70),)
    for made in (
        base,
        replace(base, causal=True, groups=2),
        replace(base, mask="padding", causal=True),
        replace(base, mask="left", groups=2, length=64),
        replace(base, mask="rows", keys=90),
        replace(base, mask="bias", batch=1),
        replace(base, mask="none seen"),
        replace(base, keys=40, size=32, strided=False),
    )
]


def run(call: str, given: dict[str, Tensor], state: dict[str, Tensor], case: Case, backend: str | None) -> list[Tensor]:
    """What a public function gives, as a list."""
    options: dict[str, Any] = {
        "attn_mask": case.masking(),
        "is_causal": case.causal,
        "scale": SCALE,
        "dropout_p": P,
        "backend": backend,
    }
    torch.manual_seed(7)
    if call == "ntk":
        z = (state["left"], state["right"]) if "right" in state else state["left"]
        return [ntk_attention(**given, Z=z, kappa=state["kappa"], **options)]
    return [prefix_attention(**given, **options)] if call == "prefix" else [*attention_with_lse(**given, **options)]


def dropped(
    call: str, given: dict[str, Tensor], state: dict[str, Tensor], case: Case, backend: str | None
) -> Tensor | float:
    """0 where the call drops a weight, 1 / (1 - p) where it does not, `[batch, heads, length, keys]`.

    Values that are unit vectors show the weights, as many keys at a time as a value has channels. What is dropped does
    not depend on the values: every run begins with the same seed.
    """
    state = {name: torch.zeros_like(x) if name in ("left", "right") else x for name, x in state.items()}
    names = ["prefix_value", "value"] if call == "prefix" else ["value"]
    found = []
    for name in names:
        keys = given[name].shape[2]
        for first in range(0, keys, case.size):
            values = {each: torch.zeros_like(given[each]) for each in names}
            here = torch.arange(min(case.size, keys - first), device=DEVICE)
            values[name][:, :, first + here, here] = 1
            with torch.no_grad():
                found.append(run(call, given | values, state, case, backend)[0][..., : len(here)] != 0)
    return torch.cat(found, -1).double() / (1 - P)


def tensors_of(case: Case, call: str) -> dict[str, Tensor]:
    made = case.tensors()
    if call == "prefix":
        torch.manual_seed(4)
        for name in ("prefix_key", "prefix_value"):
            drawn = torch.randn(1, case.kv_heads, PREFIX, case.size)
            made[name] = drawn.to(case.dtype).double().to(DEVICE)
    return made


def check_dropout(case: Case, call: str, backend: str | None) -> None:
    """Values and every gradient."""
    true = {name: x.requires_grad_() for name, x in tensors_of(case, call).items()}
    state = {name: x.requires_grad_() for name, x in case.state().items()} if call == "ntk" else {}
    mine = handed_over(case, true)
    small = {name: x.detach().to(_own(case)).requires_grad_() for name, x in state.items()}
    factors = dropped(call, mine, small, case, backend)
    assert 0.02 < float((factors == 0).double().mean()) < 0.98
    right = definition(true, case, SCALE, state or None, factors)
    found = run(call, mine, small, case, backend)
    compare(case, found, list(right[: len(found)]), mine | small, true | state)


def check_the_share_that_is_dropped(call: str, backend: str | None, rows: int = 16) -> None:
    """Of every few rows of every head and example the share P is dropped, and no two of them drop the same."""
    case = Case(torch.float32, batch=2, kv_heads=2, groups=2, length=64, size=32, rank=4)
    given, state = (
        handed_over(case, tensors_of(case, call)),
        handed_over(case, case.state(), ("left", "right", "kappa")),
    )
    gone = torch.as_tensor(dropped(call, given, state, case, backend)) == 0
    patterns = gone.unflatten(2, (-1, rows)).flatten(3).flatten(0, 2).double()  # [blocks, rows x keys]
    count = patterns.shape[1]
    sigmas = (patterns.mean(1) - P).abs() / (P * (1 - P) / count) ** 0.5
    assert sigmas.max() < 4.5, sigmas
    alike = (patterns - P) @ (patterns - P).mT / (P * (1 - P) * count)  # correlations: 1 / sqrt(count) by chance
    assert alike.fill_diagonal_(0).abs().max() < 6 / count**0.5, alike


def _own(case: Case) -> torch.dtype:
    return case.dtype if case.dtype == torch.float64 else torch.float32


def check_dropout_follows_the_seed(case: Case, backend: str | None) -> None:
    given, state = handed_over(case, case.tensors()), handed_over(case, case.state(), ("left", "right", "kappa"))
    first, again = (run("ntk", given, state, case, backend)[0] for _ in range(2))
    other = ntk_attention(
        **given, Z=(state["left"], state["right"]), kappa=state["kappa"], scale=SCALE, dropout_p=P, backend=backend
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def check_dropout_compiled(compiler: str, mask: str) -> None:
    """Compiled, values and gradients are those of one mask; which, the compiler decides. Against plain differences."""
    case = Case(torch.float32, causal=mask == "none", mask=mask, length=40, batch=1)
    mine = handed_over(case, case.tensors())
    small = handed_over(case, case.state(), ("left", "right", "kappa"))
    seen, leaves = case.masking(), [*mine.values(), *small.values()]

    def attend(*given: Tensor) -> Tensor:
        q, k, v, left, right, kappa = given
        return ntk_attention(
            q, k, v, (left, right), kappa, attn_mask=seen, is_causal=case.causal, scale=SCALE, dropout_p=P
        )

    torch.compiler.reset()
    compiled = torch.compile(attend, backend=compiler, fullgraph=True)

    def seeded(call: Callable[..., Tensor], *given: Tensor) -> Tensor:
        torch.manual_seed(7)
        return call(*given)

    out = seeded(compiled, *leaves)
    weight = torch.randn_like(out)
    grads = torch.autograd.grad(out, leaves, weight)
    assert torch.equal(out, seeded(compiled, *leaves))
    # The output is linear in the values, and in Z: with the same seed the gradient gives it back.
    value, right = leaves[2], leaves[4]
    numbers = (grads[2] * value).sum() + (grads[4] * right).sum()
    close("linear", numbers[None], (out * weight).sum()[None].double(), 1e-4)
    # Along the gradient of all others, by differences in float32 at a step that shows the slope.
    step = 1e-2
    for place in (0, 1, 5):
        towards = grads[place] / grads[place].norm()
        moved = [
            seeded(compiled, *(leaf + sign * step * towards if i == place else leaf for i, leaf in enumerate(leaves)))
            for sign in (1, -1)
        ]
        slope = ((moved[0] - moved[1]) * weight).sum() / (2 * step)
        close(f"slope of {place}", slope[None], grads[place].norm()[None].double(), 2e-2)


def check_dropout_captured() -> None:
    """Inside a CUDA graph every replay drops others, and the gradients are of what was dropped."""
    case = Case(torch.bfloat16, causal=True)
    mine = handed_over(case, case.tensors())
    small = handed_over(case, case.state(), ("left", "right", "kappa"))
    leaves = [*mine.values(), *small.values()]

    def step() -> list[Tensor]:
        z = small["left"], small["right"]
        out = ntk_attention(**mine, Z=z, kappa=small["kappa"], is_causal=True, dropout_p=P, backend="cuda")
        return [out.detach(), *torch.autograd.grad(out, leaves, torch.ones_like(out))]

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step(), step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    seen = []
    for _ in range(2):
        graph.replay()
        torch.cuda.synchronize()
        out, g_value, g_right = found[0].double(), found[3].double(), found[5].double()
        numbers = (g_value * mine["value"]).sum() + (g_right * small["right"]).sum()
        close("captured", numbers[None], out.sum()[None], 2e-2)
        seen.append(found[0].clone())
    assert not torch.equal(*seen)


def check_dropout_outside_of_its_context() -> None:
    """The backward pass runs where another kernel would be chosen: it drops what the forward pass did."""
    case = Case(torch.bfloat16, length=70)
    true = {name: x.requires_grad_() for name, x in case.tensors().items()}
    state = {name: x.requires_grad_() for name, x in case.state().items()}
    mine = handed_over(case, true)
    small = {name: x.detach().float().requires_grad_() for name, x in state.items()}
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        factors = dropped("ntk", mine, small, case, "cuda")
        found = run("ntk", mine, small, case, "cuda")
    right = definition(true, case, SCALE, state, factors)
    compare(case, found, [right[0]], mine | small, true | state)
