"""Every backend against the oracle: values and every gradient, over shapes, masks, types and grouped heads."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from attention_oracle import attend, gap
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from inlay.attention import attention_with_lse, feature_map, ntk_attention, prefix_attention
from inlay.errors import InlayError

BACKENDS = ("plain", "cpu")
BOUND = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
MASKS = ("none", "padding", "causal", "causal+padding", "rows", "heads", "bias")
few = settings(max_examples=20, deadline=None, derandomize=True)


@dataclass(frozen=True)
class Case:
    batch: int
    kv_heads: int
    groups: int
    length: int
    keys: int
    size: int
    mask: str
    dtype: torch.dtype
    strided: bool
    seed: int

    def tensors(self) -> dict[str, Tensor]:
        """float64, but with values that the type can hold: the oracle starts from the same numbers."""
        torch.manual_seed(self.seed)
        heads = self.kv_heads * self.groups
        made = {
            "query": torch.randn(self.batch, heads, self.length, self.size),
            "key": torch.randn(self.batch, self.kv_heads, self.keys, self.size),
            "value": torch.randn(self.batch, self.kv_heads, self.keys, self.size),
        }
        return {name: x.to(self.dtype).double() for name, x in made.items()}

    def masking(self) -> tuple[Tensor | None, bool]:
        torch.manual_seed(self.seed + 1)
        heads = self.kv_heads * self.groups
        seen = torch.rand(self.batch, 1, 1, self.keys) > 0.3
        seen[..., 0] = True
        seen[0, ..., 0] = self.seed % 2 == 0  # causal: a first query that sees nothing
        if self.mask == "rows":
            seen = torch.rand(self.length, self.keys) > 0.5
            seen[0] = False
        if self.mask == "heads":
            seen = torch.rand(self.batch, heads, self.length, self.keys) > 0.5
        if self.mask == "bias":
            return torch.randn(1, heads, self.length, self.keys).to(self.dtype), False
        return None if self.mask in ("none", "causal") else seen, self.mask.startswith("causal")


cases = st.builds(
    Case,
    batch=st.integers(1, 2),
    kv_heads=st.integers(1, 2),
    groups=st.integers(1, 2),
    length=st.integers(1, 4),
    keys=st.integers(1, 5),
    size=st.sampled_from([1, 3, 8]),
    mask=st.sampled_from(MASKS),
    dtype=st.sampled_from(list(BOUND)),
    strided=st.booleans(),
    seed=st.integers(0, 99),
)


def given_to(case: Case, tensors: dict[str, Tensor], fixed: tuple[str, ...] = ()) -> dict[str, Tensor]:
    """The tensors as a user hands them over; Z, kappa and the prefix may keep their own type."""
    made = {}
    for name, x in tensors.items():
        x = x.to(torch.float32 if name in fixed and case.dtype.itemsize == 2 else case.dtype)
        if case.strided and x.dim() == 4:  # as a model has them: heads come after the length
            x = x.transpose(1, 2).contiguous().transpose(1, 2)
        made[name] = x.detach().requires_grad_()
    return made


def compare(
    case: Case, found: list[Tensor], right: list[Tensor], mine: dict[str, Tensor], true: dict[str, Tensor]
) -> None:
    """Values, and the gradients of one random combination of them."""
    bound = BOUND[case.dtype]
    torch.manual_seed(case.seed + 2)
    ours, theirs = torch.zeros(()), torch.zeros((), dtype=torch.float64)
    for f, r in zip(found, right, strict=True):
        assert torch.equal(f.isneginf(), r.isneginf())
        f, r = f.masked_fill(f.isneginf(), 0), r.masked_fill(r.isneginf(), 0)
        assert gap(f, r) <= bound
        weight = torch.randn(r.shape).to(case.dtype)
        ours, theirs = ours + (f * weight).sum(), theirs + (r * weight.double()).sum()
    grads = torch.autograd.grad(ours, list(mine.values()), allow_unused=True)
    truth = torch.autograd.grad(theirs, list(true.values()), allow_unused=True)
    whole = max(float(t.abs().max()) for t in truth if t is not None and t.numel())
    for name, g, t in zip(mine, grads, truth, strict=True):
        t = torch.zeros_like(true[name]) if t is None else t
        assert g is not None, name
        # One gradient may be next to nothing beside the others, a difference of large terms: hence `whole`.
        part = 0.5 if case.dtype.itemsize == 2 else 0.1
        assert float((g.double() - t).abs().max()) <= bound * max(float(t.abs().max()), part * whole), name


@pytest.mark.parametrize("backend", BACKENDS)
@few
@given(case=cases)
def test_attention_with_lse(backend: str, case: Case) -> None:
    true = {name: x.requires_grad_() for name, x in case.tensors().items()}
    mine = given_to(case, true)
    mask, causal = case.masking()
    found = attention_with_lse(**mine, attn_mask=mask, is_causal=causal, backend=backend)
    assert found[0].dtype == case.dtype
    right = attend(**true, mask=mask, is_causal=causal)
    compare(case, list(found), list(right), mine, true)


def feature_case(case: Case, kind: str, beta: int) -> dict[str, Tensor]:
    tensors = case.tensors()
    heads, size = case.kv_heads * case.groups, case.size
    rows = feature_map(kind).dimension(size) if kind == "taylor" else beta * size
    tensors["Z_A"] = torch.randn(heads, rows, 2).double()
    tensors["Z_B"] = torch.randn(heads, 2, size).double()
    tensors["kappa"] = torch.rand(heads, rows).double()
    if kind == "taylor":  # positive, as Eq. (4) makes it: the constant feature outweighs the others
        tensors["kappa"] = tensors["kappa"] * 0.05
        tensors["kappa"][:, 0] += 3
    return tensors


@pytest.mark.parametrize("backend", BACKENDS)
@few
@given(case=cases, kind=st.sampled_from(["elu", "elu", "paper", "taylor", "favor"]), beta=st.integers(1, 4))
def test_ntk_attention(backend: str, case: Case, kind: str, beta: int) -> None:
    true = {name: x.requires_grad_() for name, x in feature_case(case, kind, beta).items()}
    mine = given_to(case, true, fixed=("Z_A", "Z_B", "kappa"))
    mask, causal = case.masking()
    scale = 0.3
    found = ntk_attention(
        mine["query"],
        mine["key"],
        mine["value"],
        (mine["Z_A"], mine["Z_B"]),
        mine["kappa"],
        feature_map=kind,
        scale=scale,
        attn_mask=mask,
        is_causal=causal,
        backend=backend,
    )
    assert found.dtype == case.dtype

    def phi(z: Tensor) -> Tensor:
        return printed_features(kind, z, true["kappa"].shape[1], scale)

    def alone(z: Tensor) -> float:
        log_scale = feature_map(kind).of_query(z[None], true["kappa"].shape[1], scale)[1]
        return 1.0 if log_scale is None else max(1.0, float(log_scale.exp()))

    right, _ = attend(
        true["query"],
        true["key"],
        true["value"],
        mask=mask,
        is_causal=causal,
        scale=scale,
        alone=alone,
        phi=phi,
        Z=true["Z_A"] @ true["Z_B"],
        kappa=true["kappa"],
    )
    compare(case, [found], [right], mine, true)


def printed_features(kind: str, z: Tensor, rows: int, scale: float) -> Tensor:
    """phi as the design prints it, coordinate by coordinate; the random and polynomial ones have their own tests."""
    size = len(z)
    if kind in ("taylor", "favor"):
        phi, log_scale = feature_map(kind).of_query(z[None], rows, scale)
        assert log_scale is not None
        return phi[0] * log_scale.exp()
    found = []
    for block in range(rows // size):
        for x in z * (-1) ** block * 2 ** (block // 2):
            if kind == "elu":
                found.append((torch.nn.functional.elu(x * math.sqrt(scale)) + 1) / math.sqrt(rows))
            else:
                found.append(size**-0.25 * (x if x >= 0 else x.exp()) + 1)
    return torch.stack(found)


@pytest.mark.parametrize("backend", BACKENDS)
@few
@given(
    case=cases,
    prefix=st.integers(0, 4),
    shared=st.booleans(),
    bias=st.sampled_from([None, 1.0, 8.0]),
    hides=st.booleans(),
)
def test_prefix_attention(backend: str, case: Case, prefix: int, shared: bool, bias: float | None, hides: bool) -> None:
    tensors = case.tensors()
    shape = (case.kv_heads, prefix, case.size) if shared else (case.batch, case.kv_heads, prefix, case.size)
    names = ["prefix_key", "prefix_value"]
    for name in names:
        tensors[name] = torch.randn(shape).to(case.dtype).double()
    if bias is not None:  # of its own type, with more digits than half precision has
        names.append("prefix_bias")
        tensors["prefix_bias"] = bias * torch.randn(shape[:-1]).double()
        if hides and prefix:
            tensors["prefix_bias"][..., 0] = -math.inf
        if case.dtype != torch.float64:
            tensors["prefix_bias"] = tensors["prefix_bias"].float().double()
    true = {name: x.requires_grad_() for name, x in tensors.items()}
    mine = given_to(case, true, fixed=("prefix_bias",))
    mask, causal = case.masking()
    found = prefix_attention(**mine, attn_mask=mask, is_causal=causal, backend=backend)
    right, _ = attend(**true, mask=mask, is_causal=causal)
    if prefix == 0:
        for name in names:
            true.pop(name), mine.pop(name)
    compare(case, [found], [right], mine, true)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_key_with_a_bias_counts_as_many_keys(backend: str, dtype: torch.dtype) -> None:
    """exp(log n) keys are the key n times; a bias that half precision alone would round by 0.03."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 4, 5, 64, dtype=dtype) for _ in range(3))
    pk, pv = torch.randn(4, 3, 64, dtype=dtype), torch.randn(4, 3, 64, dtype=dtype)
    bias = torch.tensor([1000.0, 37.0, 1.0]).log().expand(4, 3)
    repeated = torch.repeat_interleave(torch.arange(3), torch.tensor([1000, 37, 1]))
    found = prefix_attention(q, k, v, pk, pv, prefix_bias=bias, backend=backend)
    right = prefix_attention(*(x.double() for x in (q, k, v, pk[:, repeated], pv[:, repeated])))
    assert gap(found, right) <= BOUND[dtype] / 2


@pytest.mark.parametrize("backend", BACKENDS)
def test_hidden_prefixes_are_not_there(backend: str) -> None:
    """Rows whose prefix is hidden whole, and prefixes of unlike lengths filled up to one."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(3, 2, 4, 8) for _ in range(3))
    pk, pv = torch.randn(3, 2, 5, 8), torch.randn(3, 2, 5, 8)
    bias = torch.randn(3, 2, 5)
    bias[1] = -math.inf
    bias[2, :, 2:] = -1e4
    found = prefix_attention(q, k, v, pk, pv, prefix_bias=bias, is_causal=True, backend=backend)
    torch.testing.assert_close(
        found[1:2], attention_with_lse(q[1:2], k[1:2], v[1:2], is_causal=True, backend=backend)[0]
    )
    shorter = prefix_attention(
        q[2:], k[2:], v[2:], pk[2:, :, :2], pv[2:, :, :2], prefix_bias=bias[2:, :, :2], is_causal=True, backend=backend
    )
    torch.testing.assert_close(found[2:], shorter)


def test_a_bias_of_another_shape_is_refused() -> None:
    q = torch.randn(2, 4, 5, 8)
    with pytest.raises(InlayError, match=r"prefix_bias has shape \[4, 2\].*\[4, 3\]"):
        prefix_attention(q, q, q, torch.randn(4, 3, 8), torch.randn(4, 3, 8), prefix_bias=torch.zeros(4, 2))
    with pytest.raises(InlayError, match="prefix_bias"):
        prefix_attention(q, q, q, q[0], q[0], prefix_bias=torch.zeros(4, 5), backend="taylor")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("causal", [False, True])
def test_at_a_real_size_every_gradient_by_itself(backend: str, dtype: torch.dtype, causal: bool) -> None:
    """Several of the kernel's blocks; the definition in float64, written out."""
    torch.manual_seed(0)
    length, size, scale = 200, 64, 0.125
    shapes = {"query": (2, 4, length, size), "key": (2, 2, length, size), "value": (2, 2, length, size)}
    mine = {name: torch.randn(shape).to(dtype).requires_grad_() for name, shape in shapes.items()}
    mine["Z"] = torch.randn(4, size, size).requires_grad_()
    mine["kappa"] = (5 * torch.rand(4, size)).requires_grad_()
    seen = torch.rand(2, 1, 1, length) > 0.2
    seen[0, ..., 0] = False
    true = {name: x.detach().double().requires_grad_() for name, x in mine.items()}
    hidden = ~seen | (torch.ones(length, length).triu(1).bool() if causal else torch.zeros(1, 1).bool())
    weights = (scale * true["query"] @ true["key"].repeat_interleave(2, 1).mT).exp().masked_fill(hidden, 0)
    phi = (torch.nn.functional.elu(true["query"] * scale**0.5) + 1) / size**0.5
    top = weights @ true["value"].repeat_interleave(2, 1) + phi @ true["Z"]
    alone = hidden.all(-1, keepdim=True)  # sees one key of weight 1 and value 0
    right = top / (weights.sum(-1, keepdim=True) + alone + phi @ true["kappa"].unsqueeze(-1))
    found = ntk_attention(**mine, attn_mask=seen, is_causal=causal, backend=backend)
    g = torch.randn(found.shape).to(dtype)
    pairs = zip(
        ("output", *mine),
        (found, *torch.autograd.grad(found, list(mine.values()), g)),
        (right, *torch.autograd.grad(right, list(true.values()), g.double())),
        strict=True,
    )
    for name, f, r in pairs:
        assert float((f.detach().double() - r.detach()).norm() / r.detach().norm()) <= BOUND[dtype], name


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradcheck(backend: str) -> None:
    torch.manual_seed(0)

    def made(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, requires_grad=True)

    q, k, v = made(2, 2, 3, 4), made(2, 1, 3, 4), made(2, 1, 3, 4)
    seen = torch.tensor([[True, True, False], [False, False, True]])[:, None, None]
    options = {"attn_mask": seen, "is_causal": True, "backend": backend}
    Z_A, Z_B, kappa = made(2, 8, 2), made(2, 2, 4), torch.rand(2, 8, dtype=torch.float64, requires_grad=True)

    def both(*args: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = attention_with_lse(*args, **options)
        return out, lse.masked_fill(lse.isneginf(), 0)

    assert torch.autograd.gradcheck(both, (q, k, v))
    assert torch.autograd.gradcheck(
        lambda q, k, v, a, b, kappa: ntk_attention(q, k, v, (a, b), kappa, **options), (q, k, v, Z_A, Z_B, kappa)
    )
    assert torch.autograd.gradcheck(lambda *a: prefix_attention(*a, **options), (q, k, v, made(1, 2, 4), made(1, 2, 4)))
    assert torch.autograd.gradcheck(
        lambda *a: prefix_attention(*a[:-1], prefix_bias=a[-1], **options),
        (q, k, v, made(2, 1, 2, 4), made(2, 1, 2, 4), made(2, 1, 2)),
    )
