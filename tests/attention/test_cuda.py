"""The CUDA backend against the definition in float64: values and every gradient; without a GPU, what needs none.

On a machine that has torch and a GPU but no pytest: `python tests/attention/test_cuda.py`. The Triton kernels by
themselves also run without a GPU: `TRITON_INTERPRET=1 pytest tests/attention/test_cuda.py`, where Triton is installed.
"""

from __future__ import annotations

import importlib.util
import math
import os
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from inlay.attention import attention_with_lse, cuda_kernels, feature_map, ntk_attention, prefix_attention
from inlay.attention.join import finite, mix, weigh
from inlay.errors import InlayError

try:
    import pytest
except ModuleNotFoundError:
    pytest = None  # type: ignore[assignment]

ON_GPU = torch.cuda.is_available()
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton") is not None
BOUND = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
BACKENDS = ("cuda", "plain")


@dataclass(frozen=True)
class Case:
    """One call: which shapes, which mask, which numbers."""

    dtype: torch.dtype = torch.bfloat16
    batch: int = 2
    kv_heads: int = 2
    groups: int = 1
    length: int = 130
    keys: int | None = None
    size: int = 64
    mask: str = "none"
    causal: bool = False
    blocks: int = 1
    rank: int | None = 16
    strided: bool = True
    kappa: float = 1.0

    @property
    def heads(self) -> int:
        return self.kv_heads * self.groups

    def tensors(self) -> dict[str, Tensor]:
        """In float64, with values that the type can hold."""
        torch.manual_seed(0)
        keys = self.keys or self.length
        shapes = {"query": (self.heads, self.length), "key": (self.kv_heads, keys), "value": (self.kv_heads, keys)}
        made = {n: torch.randn(self.batch, h, m, self.size).to(self.dtype) for n, (h, m) in shapes.items()}
        return {name: x.double().cuda() for name, x in made.items()}

    def state(self) -> dict[str, Tensor]:
        torch.manual_seed(1)
        rows = self.blocks * self.size
        made = {"left": torch.randn(self.heads, rows, self.rank or self.size) / (self.rank or 1) ** 0.5}
        if self.rank is not None:
            made["right"] = torch.randn(self.heads, self.rank, self.size)
        made["kappa"] = self.kappa * torch.rand(self.heads, rows)
        return {name: x.double().cuda() for name, x in made.items()}

    def masking(self) -> Tensor | None:
        torch.manual_seed(2)
        keys = self.keys or self.length
        if self.mask == "none":
            return None
        if self.mask == "padding":
            seen = torch.rand(self.batch, 1, 1, keys) > 0.3
            seen[0, ..., : keys // 2] = False  # causal: many a query sees nothing
            return seen.cuda()
        if self.mask == "rows":
            seen = torch.rand(self.batch, 1, self.length, keys) > 0.5
            seen[:, :, 1] = False
            return seen.cuda()
        return torch.randn(1, self.heads, self.length, keys).to(self.dtype).cuda()


def handed_over(case: Case, true: dict[str, Tensor], own_type: tuple[str, ...] = ()) -> dict[str, Tensor]:
    """The tensors as a model has them: heads after the length in memory; Z and kappa in float32."""
    made = {}
    for name, x in true.items():
        x = x.to(torch.float32 if name in own_type else case.dtype)
        if case.strided and x.dim() == 4:
            x = x.transpose(1, 2).contiguous().transpose(1, 2)
        made[name] = x.detach().requires_grad_()
    return made


def definition(
    tensors: dict[str, Tensor], case: Case, scale: float, state: dict[str, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """T and the logarithm of its denominator, shifted by a constant of the row that is at least 0."""
    query, key, value = (tensors[name] for name in ("query", "key", "value"))
    key, value = (x.repeat_interleave(case.groups, 1) for x in (key, value))
    scores = scale * query @ key.mT
    mask = case.masking()
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask.double()
    if case.causal:
        scores = scores.masked_fill(torch.ones_like(scores[0, 0]).triu(1).bool(), -math.inf)
    if "prefix_key" in tensors:
        prefix_key, prefix_value = (
            tensors[name].expand(case.batch, -1, -1, -1).repeat_interleave(case.groups, 1)
            for name in ("prefix_key", "prefix_value")
        )
        scores = torch.cat([scale * query @ prefix_key.mT, scores], -1)
        value = torch.cat([prefix_value, value], -2)
    most = scores.detach().amax(-1, keepdim=True)
    most = most.clamp(min=0) if state is not None else finite(most)
    weights = (scores - most).exp()
    top, bottom = weights @ value, weights.sum(-1, keepdim=True)
    if state is not None:
        phi = elu_features(query, case.blocks, scale)
        z = state["left"] @ state["right"] if "right" in state else state["left"]
        shrunk = (-most).exp()
        top, bottom = top + shrunk * (phi @ z), bottom + shrunk * (phi @ state["kappa"].unsqueeze(-1))
    nothing = bottom == 0
    safe = bottom.masked_fill(nothing, 1)
    lse = (safe.log() + most).masked_fill(nothing, -math.inf)
    return (top / safe).masked_fill(nothing, 0), lse.squeeze(-1)


def elu_features(query: Tensor, blocks: int, scale: float) -> Tensor:
    made = [query * (-1) ** block * 2 ** (block // 2) for block in range(blocks)]
    z = torch.cat(made, -1) * scale**0.5
    return (torch.nn.functional.elu(z) + 1) / (blocks * query.shape[-1]) ** 0.5


def compare(
    case: Case, found: list[Tensor], right: list[Tensor], mine: dict[str, Tensor], true: dict[str, Tensor]
) -> None:
    """Values, and the gradients of one random combination of them, each by its root mean square."""
    torch.manual_seed(3)
    ours: Any = 0.0
    theirs: Any = 0.0
    for f, r in zip(found, right, strict=True):
        assert torch.equal(f.isneginf(), r.isneginf())
        f, r = f.masked_fill(f.isneginf(), 0), r.masked_fill(r.isneginf(), 0)
        close("value", f, r, BOUND[case.dtype])
        weight = torch.randn(r.shape).to(case.dtype).cuda()
        ours, theirs = ours + (f * weight).sum(), theirs + (r * weight.double()).sum()
    grads = torch.autograd.grad(ours, list(mine.values()), allow_unused=True)
    truth = torch.autograd.grad(theirs, list(true.values()), allow_unused=True)
    # One gradient may be next to nothing beside the others, a difference of large terms: hence `least`.
    least = (0.5 if case.dtype.itemsize == 2 else 0.1) * max(rms(t) for t in truth if t is not None)
    for name, g, t in zip(mine, grads, truth, strict=True):
        assert g is not None, name
        close(name, g, torch.zeros_like(true[name]) if t is None else t, BOUND[case.dtype], least)


def rms(x: Tensor) -> float:
    return float(x.detach().double().square().mean().sqrt())


def close(name: str, found: Tensor, right: Tensor, bound: float, least: float = 1e-12) -> None:
    assert found.shape == right.shape, (name, found.shape, right.shape)
    assert found.isfinite().all(), f"{name} is not finite"
    error, size = rms(found.detach().double() - right.detach()), max(rms(right), least)
    assert error <= bound * size, f"{name}: off by {error / size:.2g}, at most {bound:.2g}"


FP32, BF16, FP16 = Case(torch.float32), Case(torch.bfloat16), Case(torch.float16)
# Triton compiles anew for every head size, rank and number of blocks: only few of them occur.
CASES = (
    [
        made
        for base in (FP32, BF16)
        for made in (
            replace(base, mask="padding", causal=True, groups=2),
            replace(base, mask="padding", causal=True, keys=100),
            replace(base, mask="rows", groups=2, keys=131),
            replace(base, mask="rows", causal=True),
            base,
            replace(base, causal=True),
            replace(base, causal=True, keys=150),
            replace(base, causal=True, length=150, keys=100),
            replace(base, mask="padding"),
            replace(base, mask="padding", groups=2),
            replace(base, mask="bias", length=33, keys=47),
            replace(base, groups=3),
            replace(base, length=1, keys=77, groups=2),
            replace(base, length=1, keys=77, groups=2, mask="padding"),
            replace(base, length=1, keys=1),
            replace(base, length=7, keys=1),
            replace(base, causal=True, strided=False),
            replace(base, size=80, causal=True),
            replace(base, size=80, strided=False),
            replace(base, size=36),
            replace(base, size=36, mask="padding"),
            replace(base, rank=None, causal=True),
            replace(base, kappa=1e-30),
            replace(base, batch=3, kv_heads=3, length=301, keys=301, causal=True),
        )
    ]
    + [
        replace(BF16, groups=4, causal=True, size=128),
        replace(BF16, size=128, blocks=2),
        replace(BF16, blocks=3, rank=5),
        replace(BF16, size=128, rank=None),
        replace(BF16, size=256, rank=8),
    ]
    + [FP16, replace(FP16, causal=True, groups=2), replace(FP16, mask="padding", size=80)]
)


def check_lse(case: Case, backend: str) -> None:
    true = {name: x.requires_grad_() for name, x in case.tensors().items()}
    mine = handed_over(case, true)
    found = attention_with_lse(**mine, attn_mask=case.masking(), is_causal=case.causal, backend=backend)
    assert found[0].dtype == case.dtype
    compare(case, list(found), list(definition(true, case, case.size**-0.5)), mine, true)


def check_ntk(case: Case, backend: str) -> None:
    true = {name: x.requires_grad_() for name, x in case.tensors().items()}
    state = {name: x.requires_grad_() for name, x in case.state().items()}
    mine = handed_over(case, true)
    small = handed_over(case, state, ("left", "right", "kappa"))
    scale = 0.15
    z = (small["left"], small["right"]) if "right" in small else small["left"]
    options = {"scale": scale, "attn_mask": case.masking(), "is_causal": case.causal}
    found = ntk_attention(**mine, Z=z, kappa=small["kappa"], backend=backend, **options)
    assert found.dtype == case.dtype
    right, _ = definition(true, case, scale, state)
    compare(case, [found], [right], mine | small, true | state)


def check_signed(dtype: torch.dtype, backend: str, device: str = "cuda") -> None:
    """rho in place of kappa: as its magnitude; of slope +1 at 0, of either sign."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 2, 20, 64, device=device).to(dtype) for _ in range(3))
    left, right = torch.randn(2, 64, 16, device=device), torch.randn(2, 16, 64, device=device)
    rho = torch.randn(2, 64, device=device)
    rho[:, :2] = torch.tensor([0.0, -0.0])
    sign = torch.where(rho < 0, -1.0, 1.0)
    rho.requires_grad_()
    kappa = rho.detach().abs().requires_grad_()
    results = []
    for given, signed in ((rho, True), (kappa, False)):
        out = ntk_attention(q, k, v, (left, right), given, signed=signed, backend=backend)
        results.append((out, *torch.autograd.grad(out.float().square().sum(), given)))
    assert torch.equal(results[0][0], results[1][0])
    close("rho", results[0][1], (results[1][1] * sign).double(), BOUND[dtype])


def check_prefix(case: Case, backend: str, shared: bool) -> None:
    tensors = case.tensors()
    torch.manual_seed(4)
    for name in ("prefix_key", "prefix_value"):
        made = torch.randn(1 if shared else case.batch, case.kv_heads, 37, case.size)
        tensors[name] = made.to(case.dtype).double().cuda()
    true = {name: x.requires_grad_() for name, x in tensors.items()}
    mine = handed_over(case, true)
    found = prefix_attention(**mine, attn_mask=case.masking(), is_causal=case.causal, backend=backend)
    right, _ = definition(true, case, case.size**-0.5)
    compare(case, [found], [right], mine, true)


def check_identity(dtype: torch.dtype, causal: bool) -> None:
    """With Z = 0 and kappa = 0 the output is the kernel's own, to the bit."""
    case = Case(dtype, causal=causal)
    mine, small = handed_over(case, case.tensors()), handed_over(case, case.state(), ("left", "right", "kappa"))
    zero = torch.zeros_like(small["right"]), torch.zeros_like(small["kappa"])
    found = ntk_attention(**mine, Z=(small["left"], zero[0]), kappa=zero[1], is_causal=causal, backend="cuda")
    assert torch.equal(found, attention_with_lse(**mine, is_causal=causal, backend="cuda")[0])
    with torch.no_grad():
        assert torch.equal(
            found, ntk_attention(**mine, Z=(small["left"], zero[0]), kappa=zero[1], is_causal=causal, backend="cuda")
        )
    theirs = torch.nn.functional.scaled_dot_product_attention(*mine.values(), is_causal=causal)
    close("torch's own", found, theirs.double(), 1e-2)


def check_extremes(dtype: torch.dtype, mask: str) -> None:
    """Logits of +-1e4: one key takes all, or the features do; everything stays finite."""
    case = Case(dtype, mask=mask, causal=mask == "padding")
    tensors = case.tensors()
    for sign in (1, -1):
        far = dict(tensors, query=tensors["query"] * 64, key=sign * tensors["query"] * 32)
        mine, small = handed_over(case, far), handed_over(case, case.state(), ("left", "right", "kappa"))
        options = {"attn_mask": case.masking(), "is_causal": case.causal, "backend": "cuda"}
        z = small["left"], small["right"]
        found = ntk_attention(**mine, Z=z, kappa=small["kappa"], **options)
        right, _ = definition(far, case, case.size**-0.5, {n: x.detach().double() for n, x in small.items()})
        close("value", found, right, 2e-2)
        for name, g in zip(
            (*mine, *small), torch.autograd.grad(found.sum(), [*mine.values(), *small.values()]), strict=True
        ):
            assert g.isfinite().all(), name


def check_layouts(dtype: torch.dtype) -> None:
    """Views that are neither contiguous nor a model's: a packed projection, gaps in the last dimension, a row twice."""
    torch.manual_seed(0)
    case = Case(dtype)
    packed = torch.randn(2, 50, 3, 4, 64, device="cuda").to(dtype)
    views = {"packed": packed.permute(2, 0, 3, 1, 4).unbind(0)}
    views["gaps"] = torch.randn(3, 2, 4, 50, 128, device="cuda").to(dtype)[..., ::2].unbind(0)
    views["repeated"] = torch.randn(3, 1, 4, 50, 64, device="cuda").to(dtype).expand(3, 2, 4, 50, 64).unbind(0)
    state = handed_over(replace(case, kv_heads=4), replace(case, kv_heads=4).state(), ("left", "right", "kappa"))
    for name, (q, k, v) in views.items():
        results = []
        for copied in (False, True):
            leaves = [(x.contiguous() if copied else x).detach().requires_grad_() for x in (q, k, v)]
            out = ntk_attention(*leaves, (state["left"], state["right"]), state["kappa"], backend="cuda")
            results.append([out, *torch.autograd.grad(out.sum(), [*leaves, *state.values()])])  # an expanded gradient
        for found, right in zip(*results, strict=True):
            close(name, found, right.double(), 1e-2 if dtype.itemsize == 2 else 1e-5)


def check_other_maps(kind: str) -> None:
    """The general way on CUDA beside the plain backend."""
    case = Case(torch.float32, causal=True, size=16)
    mine = handed_over(case, case.tensors())
    phi = feature_map(kind)
    torch.manual_seed(0)
    rows = phi.dimension(16)
    z, kappa = torch.randn(2, rows, 16, device="cuda"), 0.05 * torch.rand(2, rows, device="cuda")
    kappa[:, 0] += 3
    z.requires_grad_(), kappa.requires_grad_()
    leaves = [*mine.values(), z, kappa]
    pairs = []
    for backend in BACKENDS:
        out = ntk_attention(**mine, Z=z, kappa=kappa, feature_map=phi, is_causal=True, backend=backend)
        pairs.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
    for found, right in zip(*pairs, strict=True):
        close(kind, found, right.double(), 1e-4)


def check_needs(which: str) -> None:
    """Nothing is computed, nor asked of the kernels, for what needs no gradient."""
    case = Case(torch.bfloat16)
    mine = {name: x.detach() for name, x in handed_over(case, case.tensors()).items()}
    small = {n: x.detach() for n, x in handed_over(case, case.state(), ("left", "right", "kappa")).items()}
    leaves = mine if which == "inputs" else small
    for x in leaves.values():
        x.requires_grad_()
    out = ntk_attention(**mine, Z=(small["left"], small["right"]), kappa=small["kappa"], backend="cuda")
    assert all(g.abs().max() > 0 for g in torch.autograd.grad(out.square().sum(), list(leaves.values())))


def check_launches() -> None:
    """Kernels are launched directly, and the same for pointers that Triton would compile anew for."""
    from inlay.attention import epilogue

    case = Case(torch.bfloat16, causal=True)
    small = handed_over(case, case.state(), ("left", "right", "kappa"))
    mine = handed_over(case, case.tensors())
    odd = {
        n: torch.cat([x.detach().reshape(-1)[:1], x.detach().reshape(-1)])[1:].view(x.shape) for n, x in small.items()
    }
    leaves = [*mine.values()]
    results = []
    for state in (small, small, odd):
        out = ntk_attention(**mine, Z=(state["left"], state["right"]), kappa=state["kappa"], is_causal=True)
        results.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
    assert epilogue.Launch.directly
    assert odd["left"].data_ptr() % 16
    for other in results[1:]:
        for found, right in zip(other, results[0], strict=True):
            close("again", found, right.double(), 1e-2)


def check_deterministic() -> None:
    """The sums over batch and length do not depend on the order in which programs finish."""
    case = Case(torch.bfloat16, batch=4, length=700)
    mine = handed_over(case, case.tensors())
    small = handed_over(case, case.state(), ("left", "right", "kappa"))
    results = []
    for _ in range(3):
        out = ntk_attention(**mine, Z=(small["left"], small["right"]), kappa=small["kappa"], backend="cuda")
        results.append(torch.autograd.grad(out.square().sum(), list(small.values())))
    assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other, strict=True))


def check_compiled(compiler: str, mask: str) -> None:
    case = Case(torch.bfloat16, causal=mask == "none", groups=2, mask=mask)
    mine, small = handed_over(case, case.tensors()), handed_over(case, case.state(), ("left", "right", "kappa"))
    seen = case.masking()

    def run(*given: Tensor) -> Tensor:
        q, k, v, left, right, kappa = given
        return ntk_attention(q, k, v, (left, right), kappa, attn_mask=seen, is_causal=case.causal)

    leaves = [*mine.values(), *small.values()]
    torch.compiler.reset()
    pairs = []
    for call in (torch.compile(run, backend=compiler, fullgraph=True), run):
        out = call(*leaves)
        pairs.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
    for found, right in zip(*pairs, strict=True):
        close(compiler, found, right.double(), 1e-2)


def check_captured() -> None:
    """Forward and backward inside a CUDA graph."""
    case = Case(torch.bfloat16, causal=True)
    mine, small = handed_over(case, case.tensors()), handed_over(case, case.state(), ("left", "right", "kappa"))
    leaves = [*mine.values(), *small.values()]

    def run() -> list[Tensor]:
        z = small["left"], small["right"]
        out = ntk_attention(**mine, Z=z, kappa=small["kappa"], is_causal=True, backend="cuda")
        return [out, *torch.autograd.grad(out, leaves, torch.ones_like(out))]

    right = [x.clone() for x in run()]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run(), run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run()
    graph.replay()
    torch.cuda.synchronize()
    for f, r in zip(found, right, strict=True):
        close("captured", f, r.double(), 1e-2)


def check_autocast() -> None:
    case = Case(torch.float32)
    mine, small = handed_over(case, case.tensors()), handed_over(case, case.state(), ("left", "right", "kappa"))
    z = small["left"], small["right"]
    with torch.autocast("cuda", torch.bfloat16):
        found = ntk_attention(**mine, Z=z, kappa=small["kappa"])
    assert found.dtype == torch.bfloat16
    rounded = {name: x.detach().bfloat16() for name, x in mine.items()}
    assert torch.equal(found, ntk_attention(**rounded, Z=z, kappa=small["kappa"]))
    assert torch.autograd.grad(found.sum(), small["left"])[0].dtype == torch.float32


def check_chosen() -> None:
    case = Case(torch.bfloat16)
    mine = handed_over(case, case.tensors())
    chosen = attention_with_lse(**mine)[0]
    assert torch.equal(chosen, attention_with_lse(**mine, backend="cuda")[0])
    attention_with_lse(**{n: x.double() for n, x in mine.items()})  # float64 goes to plain


EPILOGUES = [
    (batch, heads, length, size, blocks, rank, dtype)
    for dtype in (torch.float32, torch.bfloat16, torch.float16)
    for batch, heads, length, size, blocks, rank in (
        (2, 3, 137, 64, 1, 16),
        (2, 1, 1, 64, 1, 16),
        (1, 2, 33, 36, 1, 16),
        (2, 2, 33, 64, 1, None),
        (1, 2, 40, 64, 3, 5),
    )
    if dtype == torch.bfloat16 or (blocks == 1 and rank is not None)
]


def check_epilogue(
    batch: int, heads: int, length: int, size: int, blocks: int, rank: int | None, dtype: torch.dtype
) -> None:
    """The kernels by themselves, beside join.py in float64: the reference that needs neither a GPU nor Triton."""
    from inlay.attention import epilogue

    torch.manual_seed(0)
    device = "cuda" if ON_GPU else "cpu"

    def made(*shape: int) -> Tensor:
        return torch.randn(*shape).to(device)

    q, out, g = (made(batch, length, heads, size).to(dtype).transpose(1, 2) for _ in range(3))
    lse = 3 * made(batch, heads, length)
    lse[0, 0, 0], out[0, 0, 0] = math.nan, math.nan
    left = made(heads, blocks * size, rank or size)
    right = None if rank is None else made(heads, rank, size)
    kappa = made(heads, blocks * size).abs()
    seen = out.double().masked_fill(lse.isnan().unsqueeze(-1), 0)
    found, (total, weight) = epilogue.forward(q, out, lse, left, right, kappa, 0.3)

    true = {"q": q, "left": left, "right": right, "kappa": kappa}
    leaves = {name: x.double().requires_grad_() for name, x in true.items() if x is not None}
    keys = lse.double().masked_fill(lse.isnan(), -math.inf)
    phi = elu_features(leaves["q"], blocks, 0.3)
    z = leaves["left"] @ leaves["right"] if rank is not None else leaves["left"]
    weights = weigh([keys], (phi @ leaves["kappa"].unsqueeze(-1)).squeeze(-1), None)
    right_found = mix([seen], weights, phi @ z)
    close("T", found, right_found, BOUND[dtype])
    close("total", total, finite(weights.total), 1e-5)
    assert weights.feature is not None
    close("weight", weight, weights.feature, 1e-5)

    g = torch.empty_like(found).copy_(g)
    g[0, 0, 0] = 0  # of weight exp(40): it would drown the others
    truth = torch.autograd.grad(right_found, list(leaves.values()), g.double())
    g_query = torch.zeros_like(q)
    sums = epilogue.backward(g, q, found, torch.stack([total, weight]), left, right, kappa, 0.3, g_query, True)
    grads = [g_query, *(x for x in sums if x is not None)]
    whole = max(rms(t) for t in truth)
    for name, f, t in zip(leaves, grads, truth, strict=True):
        close(name, f, t, 2 * BOUND[dtype], 0.1 * whole)


def gpu_checks() -> list[tuple[Callable[..., None], tuple[Any, ...]]]:
    some = [case for case in CASES if case.dtype == torch.bfloat16 and case.blocks == 1 and case.rank == 16]
    made: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
    made += [(check_epilogue, case) for case in EPILOGUES]
    made += [(check, (case, "cuda")) for check in (check_lse, check_ntk) for case in CASES]
    made += [(check, (case, "plain")) for check in (check_lse, check_ntk) for case in CASES[:5]]
    made += [(check_signed, (dtype, backend)) for dtype in (torch.float32, torch.bfloat16) for backend in BACKENDS]
    made += [(check_prefix, (case, "cuda", shared)) for case in (*some[:8], FP32) for shared in (True, False)]
    made += [(check_identity, (dtype, causal)) for dtype in (torch.float32, torch.bfloat16) for causal in (False, True)]
    made += [(check_extremes, (dtype, mask)) for dtype in BOUND for mask in ("none", "padding", "rows")]
    made += [(check_layouts, (dtype,)) for dtype in (torch.float32, torch.bfloat16)]
    made += [(check_other_maps, (kind,)) for kind in ("paper", "taylor", "favor")]
    made += [(check_needs, (which,)) for which in ("inputs", "state")]
    made += [(check_compiled, ("aot_eager", "none")), (check_compiled, ("aot_eager", "rows"))]
    made += [(check_compiled, ("inductor", "padding"))]
    made += [(check_launches, ())]
    return [*made, (check_deterministic, ()), (check_captured, ()), (check_autocast, ()), (check_chosen, ())]


def named(check: Callable[..., None], args: tuple[Any, ...]) -> str:
    return f"{check.__name__}{args}".replace("torch.", "")


if pytest is not None:
    CHECKS = gpu_checks()

    @pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
    @pytest.mark.parametrize(("check", "args"), CHECKS, ids=[named(*one) for one in CHECKS])
    def test_on_a_gpu(check: Callable[..., None], args: tuple[Any, ...]) -> None:
        check(*args)

    @pytest.mark.skipif(
        ON_GPU or not INTERPRETED, reason="needs Triton and TRITON_INTERPRET=1; on a GPU it runs anyway"
    )
    @pytest.mark.parametrize("args", EPILOGUES, ids=str)
    def test_epilogue_interpreted(args: tuple[Any, ...]) -> None:
        check_epilogue(*args)

    @pytest.mark.parametrize("kind", ["cudnn", "flash", "efficient"])
    @pytest.mark.parametrize("size", [64, 36])
    def test_each_kernel_takes_what_it_is_handed(kind: str, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
        """Arguments and shapes, by the kernels' own description for tensors without data."""
        monkeypatch.setattr(cuda_kernels, "_kind", lambda *call: kind)
        q, g = (torch.empty(2, 33, 4, size, device="meta", dtype=torch.bfloat16).transpose(1, 2) for _ in range(2))
        mask = torch.empty(2, 1, 1, 33, device="meta", dtype=torch.bool) if kind == "efficient" else None
        out, lse = cuda_kernels.attend(q, q, q, mask, False, 0.1)
        assert out.shape == q.shape
        assert lse.shape == q.shape[:3]
        grads = cuda_kernels.attend_backward(g, q, q, q, out, lse, mask, False, 0.1)
        assert [x.shape for x in grads] == [q.shape] * 3

    @pytest.mark.parametrize("shape", [(1, 1, 1, 33), (2, 1, 7, 33), (1, 4, 7, 48), (2, 1, 1, 48), (2, 4, 7, 1)])
    @pytest.mark.parametrize("kind", [torch.bool, torch.float32, torch.bfloat16])
    def test_a_mask_as_the_kernel_takes_it(shape: tuple[int, ...], kind: torch.dtype) -> None:
        keys = 48 if shape[-1] == 48 else 33
        q, k = torch.empty(2, 4, 7, 8, dtype=torch.bfloat16), torch.empty(2, 4, keys, 8, dtype=torch.bfloat16)
        torch.manual_seed(0)
        mask = torch.rand(shape) > 0.5 if kind == torch.bool else torch.randn(shape).to(kind)
        added = cuda_kernels._added(mask, q, k)
        assert added is not None
        assert added.dtype == q.dtype
        assert added.shape == (2, 4, 7, keys)
        assert all(stride % 16 == 0 for stride in added.stride()[:-1])
        assert added.stride(-1) == 1
        right = torch.zeros(shape).masked_fill(~mask, -math.inf) if kind == torch.bool else mask.to(q.dtype)
        assert torch.equal(added, right.expand(2, 4, 7, keys).to(q.dtype))

    @pytest.mark.parametrize("kind", [torch.bool, torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("causal", [False, True])
    @pytest.mark.parametrize("length", [5, 7, 12])
    @pytest.mark.parametrize("shape", [(2, 1, 1, 7), (1, 3, 1, 7), (2, 1, 0, 7), (1, 3, 0, 7), (2, 3, 0, 1)])
    def test_who_sees_nothing(kind: torch.dtype, causal: bool, length: int, shape: tuple[int, ...]) -> None:
        """Against the scores in full; a bias that the query's type cannot hold hides as -inf does."""
        torch.manual_seed(length)
        mask = torch.rand(shape[0], shape[1], shape[2] or length, shape[3]) > 0.7
        mask[0, 0, 0, : shape[3] // 2] = False
        scores = torch.zeros(2, 3, length, 7).masked_fill(~mask, -math.inf)
        if causal:
            scores = scores.masked_fill(torch.ones(length, 7).triu(1).bool(), -math.inf)
        if kind != torch.bool:
            mask = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min).to(kind)
        found = cuda_kernels._sees(mask, torch.empty(2, 3, length, 8, dtype=torch.bfloat16), causal)
        assert torch.equal(found.expand(2, 3, length), scores.amax(-1) > -math.inf)

    @pytest.mark.parametrize("backend", ["cpu", "plain"])
    def test_rho_in_place_of_kappa(backend: str) -> None:
        check_signed(torch.float32, backend, "cpu")

    def test_strides_as_torch_would_choose_them() -> None:
        packed = torch.empty(2, 5, 3, 4, 8).permute(2, 0, 3, 1, 4)[0]
        for x in (torch.empty(2, 4, 5, 8), torch.empty(2, 5, 4, 8).transpose(1, 2), packed):
            assert tuple(cuda_kernels._strides_like(x)) == torch.empty_like(x).stride()

    def test_ordinary_memory_is_refused() -> None:
        q = torch.randn(1, 1, 2, 8)
        with pytest.raises(InlayError, match="the tensors are on cpu. Backends that can: cpu, plain"):
            attention_with_lse(q, q, q, backend="cuda")


def main() -> None:
    begin, failed = time.perf_counter(), 0
    checks = gpu_checks()
    for number, (check, args) in enumerate(checks):
        if number % 20 == 0:
            print(
                f"{number:4} of {len(checks)} after {time.perf_counter() - begin:5.1f} s: {named(check, args)}",
                flush=True,
            )
        try:
            check(*args)
            torch.cuda.synchronize()
        except Exception:
            failed += 1
            print(f"FAILED {named(check, args)}", traceback.format_exc(limit=-3), sep="\n", flush=True)
            if failed >= 12:
                break
    print(f"{len(checks)} checks, {failed} failed, {time.perf_counter() - begin:.0f} s, {torch.cuda.get_device_name()}")
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
