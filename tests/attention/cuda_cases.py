"""Calls of the CUDA backend and what they must give: the definition in float64, values and every gradient."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from inlay.attention.join import UNSEEN, finite

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
"""The CPU for kernels in Triton's interpreter."""
BOUND = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}


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
        return {name: x.double().to(DEVICE) for name, x in made.items()}

    def state(self) -> dict[str, Tensor]:
        torch.manual_seed(1)
        rows = self.blocks * self.size
        made = {"left": torch.randn(self.heads, rows, self.rank or self.size) / (self.rank or 1) ** 0.5}
        if self.rank is not None:
            made["right"] = torch.randn(self.heads, self.rank, self.size)
        made["kappa"] = self.kappa * torch.rand(self.heads, rows)
        return {name: x.double().to(DEVICE) for name, x in made.items()}

    def masking(self) -> Tensor | None:
        torch.manual_seed(2)
        keys = self.keys or self.length
        if self.mask == "none":
            return None
        if self.mask == "padding":
            seen = torch.rand(self.batch, 1, 1, keys) > 0.3
            seen[0, ..., : keys // 2] = False  # causal: many a query sees nothing
            return seen.to(DEVICE)
        if self.mask == "rows":
            seen = torch.rand(self.batch, 1, self.length, keys) > 0.5
            seen[:, :, 1] = False
            return seen.to(DEVICE)
        if self.mask == "left":  # of the first example all but the last key, of the others fewer
            start = torch.arange(self.batch).mul(-keys // 3).add(keys - 1).clamp(min=0)
            return (torch.arange(keys) >= start[:, None])[:, None, None].to(DEVICE)
        if self.mask == "none seen":
            seen = torch.rand(self.batch, 1, 1, keys) > 0.5
            seen[0] = False
            return seen.to(DEVICE)
        if self.mask == "most negative":
            hidden = torch.rand(self.batch, 1, self.length, keys) > 0.5
            hidden[0] = True
            return hidden.to(self.dtype).mul(torch.finfo(self.dtype).min).to(DEVICE)
        return torch.randn(1, self.heads, self.length, keys).to(self.dtype).to(DEVICE)


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
    tensors: dict[str, Tensor],
    case: Case,
    scale: float,
    state: dict[str, Tensor] | None = None,
    factors: Tensor | float = 1.0,
) -> tuple[Tensor, Tensor]:
    """T and the logarithm of its denominator, shifted by a constant of the row that is at least 0. `factors` multiply
    the weights of the numerator: those of dropout, 0 or 1 / (1 - p)."""
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
    alone = most < UNSEEN  # sees one key of weight 1, of value 0 or the mean of all
    most = most.clamp(min=0) if state is not None else finite(most)
    weights = (scores - most).exp()
    top, bottom = (weights * factors) @ value, weights.sum(-1, keepdim=True)
    if state is not None:
        phi = elu_features(query, case.blocks, scale)
        z = state["left"] @ state["right"] if "right" in state else state["left"]
        shrunk = (-most).exp()
        seen = scores.masked_fill(scores.isneginf().all(-1, keepdim=True), 0).softmax(-1) * scores.isfinite()
        top, bottom = torch.where(alone, (seen * factors) @ value, top), torch.where(alone, 1.0, bottom)
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
        weight = torch.randn(r.shape).to(case.dtype).to(DEVICE)
        ours, theirs = ours + (f * weight).sum(), theirs + (r * weight.double()).sum()
    grads = torch.autograd.grad(ours, list(mine.values()), allow_unused=True)
    truth = torch.autograd.grad(theirs, list(true.values()), allow_unused=True)
    # Each gradient by its own size; one that is next to nothing beside the others is a difference of large terms.
    least = 0.01 * max(rms(t) for t in truth if t is not None)
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

DECODINGS = [
    made
    for base in (replace(FP32, length=1, keys=77), replace(BF16, length=1, keys=77), replace(FP16, length=1, keys=77))
    for made in (
        base,
        replace(base, groups=4, mask="left"),
        replace(base, groups=4, mask="none seen", strided=False),
        replace(base, length=5, mask="rows", groups=3),
        replace(base, length=16, kv_heads=1, groups=2, mask="most negative"),
        replace(base, length=9, keys=40, causal=True),
    )
] + [
    replace(BF16, length=1, keys=1),
    replace(BF16, length=2, keys=64, mask="bias", groups=2),
    replace(BF16, length=7, keys=3, causal=True, mask="padding"),
    replace(BF16, batch=1, kv_heads=1, length=1, keys=2500, groups=4),
    replace(BF16, batch=1, kv_heads=1, length=3, keys=2500, mask="padding"),
    replace(BF16, length=1, keys=130, size=36, mask="left"),
    replace(BF16, length=1, keys=130, size=80, groups=2),
    replace(BF16, length=4, keys=130, rank=None),
    replace(BF16, length=4, keys=130, blocks=3, rank=5),
    replace(BF16, length=1, keys=130, size=128, blocks=2, kappa=1e-30),
    replace(BF16, length=1, keys=130, size=256, rank=8),
    replace(FP32, length=2, keys=130, size=256, rank=8),
    replace(FP32, length=2, keys=130, size=128, mask="left"),
]
"""A few queries, without gradients."""
