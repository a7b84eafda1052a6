"""Attention by Taylor polynomials: equal to its definition with the scores in full, and near attention by its bound.

The checks that need a GPU run where there is one: `pytest tests/attention/test_taylor_attention.py -k gpu`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from unittest.mock import patch

import pytest
import torch
from attention_oracle import gap
from hypothesis import given, settings
from hypothesis import strategies as st
from peak_memory import peak_memory
from torch import Tensor
from torch.nn.functional import elu, scaled_dot_product_attention

from inlay.attention import (
    BACKENDS,
    Taylor,
    attention_with_lse,
    ntk_attention,
    prefix_attention,
    prefix_to_features,
    taylor_bound,
    taylor_error,
)
from inlay.attention import taylor as module
from inlay.attention.backends import choose
from inlay.attention.call import make_call
from inlay.attention.monomials import _WEIGHTS
from inlay.errors import InlayError

BOUND = {torch.float64: 1e-11, torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 3e-3}
NAMES = {2: "taylor", 4: "taylor-4"}
some = settings(max_examples=50, deadline=None, derandomize=True)


@contextmanager
def in_chunks(size: int, room: int = 2**20) -> Iterator[None]:
    """Short enough for a test to have several; and with little room for features, heads are taken apart too."""
    with patch.dict(module.CHUNKS, {"cpu": (size, size)}), patch.dict(module.ROOM, {"cpu": room}):
        yield


def sums(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool, scale: float, order: int
) -> tuple[Tensor, Tensor, Tensor]:
    """`sum_j P(x_ij) v_j`, `sum_j P(x_ij)` and `c_i`, with every score: the definition."""
    groups = query.shape[1] // key.shape[1]
    key, value = (x.expand(len(query), *x.shape[1:]).repeat_interleave(groups, 1) for x in (key, value))
    seen = torch.ones(len(query), 1, query.shape[2], key.shape[2], dtype=torch.bool, device=query.device)
    seen = seen.tril() if causal else seen
    seen = seen if mask is None else seen & mask
    mu = seen.to(key.dtype) @ key / seen.sum(-1, keepdim=True).clamp(min=1)
    x = scale * torch.einsum("bhid,bhijd->bhij", query, key.unsqueeze(2) - mu.unsqueeze(3))
    weights = torch.stack([x**n / math.factorial(n) for n in range(order + 1)]).sum(0) * seen
    return weights @ value, weights.sum(-1), scale * (query * mu).sum(-1)


def attend(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool, scale: float, order: int
) -> tuple[Tensor, Tensor]:
    top, bottom, c = sums(query, key, value, mask, causal, scale, order)
    nothing = bottom == 0
    safe = bottom.masked_fill(nothing, 1)
    return top / safe.unsqueeze(-1), (c + safe.log()).masked_fill(nothing, -math.inf)


@dataclass(frozen=True)
class Shape:
    batch: int
    kv_heads: int
    groups: int
    length: int
    size: int
    value_size: int
    causal: bool
    padding: str
    order: int
    chunk: int
    room: int
    dtype: torch.dtype
    seed: int

    def tensors(self) -> dict[str, Tensor]:
        """float64, with values that the type can hold; keys lie about a point that is not the origin."""
        torch.manual_seed(self.seed)
        made = {
            "query": torch.randn(self.batch, self.kv_heads * self.groups, self.length, self.size),
            "key": torch.randn(self.batch, self.kv_heads, self.length, self.size) + torch.randn(self.size),
            "value": torch.randn(self.batch, self.kv_heads, self.length, self.value_size),
        }
        return {name: x.to(self.dtype).double().requires_grad_() for name, x in made.items()}

    def mask(self) -> Tensor | None:
        if self.padding == "none":
            return None
        at = torch.arange(self.length)
        lengths = torch.randint(0, self.length + 1, (self.batch, 1), generator=torch.Generator().manual_seed(self.seed))
        seen = at < lengths if self.padding == "right" else at >= lengths
        if self.padding == "both":
            seen = seen & (at < self.length - 1)
        return seen[:, None, None]

    def given(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """As a model has them: heads come after the length."""
        return {
            name: x.detach().to(self.dtype).transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()
            for name, x in tensors.items()
        }


shapes = st.builds(
    Shape,
    batch=st.integers(1, 2),
    kv_heads=st.integers(1, 2),
    groups=st.integers(1, 3),
    length=st.integers(1, 13),
    size=st.sampled_from([1, 2, 5, 8]),
    value_size=st.sampled_from([3, 8]),
    causal=st.booleans(),
    padding=st.sampled_from(["none", "left", "right", "both"]),
    order=st.sampled_from([2, 4]),
    chunk=st.sampled_from([2, 3, 8, 16]),
    room=st.sampled_from([1, 100, 2**20]),
    dtype=st.sampled_from(list(BOUND)),
    seed=st.integers(0, 99),
)


def compare(
    dtype: torch.dtype,
    found: list[Tensor],
    right: list[Tensor],
    mine: dict[str, Tensor],
    true: dict[str, Tensor],
) -> None:
    """Values, and every gradient of one random combination of them."""
    ours, theirs = torch.zeros(()), torch.zeros((), dtype=torch.float64)
    for f, r in zip(found, right, strict=True):
        assert torch.equal(f.isneginf(), r.isneginf())
        f, r = f.masked_fill(f.isneginf(), 0), r.masked_fill(r.isneginf(), 0)
        assert gap(f, r) <= BOUND[dtype]
        weight = torch.randn(r.shape).to(dtype)
        ours, theirs = ours + (f * weight).sum(), theirs + (r * weight.double()).sum()
    grads = torch.autograd.grad(ours, list(mine.values()))
    truth = torch.autograd.grad(theirs, list(true.values()))
    whole = max(float(t.abs().max()) for t in truth)
    for name, g, t in zip(mine, grads, truth, strict=True):
        size = max(float(t.abs().max()), 0.3 * whole)  # one may be the difference of large terms, and next to nothing
        assert float((g.double() - t).abs().max()) <= BOUND[dtype] * size, name


@some
@given(shape=shapes)
def test_it_is_its_definition(shape: Shape) -> None:
    """Output and log-sum-exp, over shapes, paddings, types, orders and chunks."""
    true, mask = shape.tensors(), shape.mask()
    mine = shape.given(true)
    with in_chunks(shape.chunk, shape.room):
        found = attention_with_lse(
            **mine, attn_mask=mask, is_causal=shape.causal, scale=0.3, backend=NAMES[shape.order]
        )
        assert found[0].dtype == shape.dtype
        right = attend(**true, mask=mask, causal=shape.causal, scale=0.3, order=shape.order)
        compare(shape.dtype, list(found), list(right), mine, true)


@some
@given(shape=shapes)
def test_ntk_attention_is_its_definition(shape: Shape) -> None:
    """T = (exp(c) sum P v + phi Z) / (exp(c) sum P + phi kappa); a query that sees nothing has 1 in place of sum P."""
    true, mask, scale = shape.tensors(), shape.mask(), 0.3
    heads, size = shape.kv_heads * shape.groups, shape.size
    more = {"Z": torch.randn(heads, size, shape.value_size), "kappa": torch.rand(heads, size)}
    mine = shape.given(true) | {
        name: x.to(torch.promote_types(shape.dtype, x.dtype)).requires_grad_() for name, x in more.items()
    }
    true |= {name: x.double().requires_grad_() for name, x in more.items()}
    with in_chunks(shape.chunk, shape.room):
        found = ntk_attention(**mine, attn_mask=mask, is_causal=shape.causal, scale=scale, backend=NAMES[shape.order])
        q, k, v, Z, kappa = true.values()
        top, bottom, c = sums(q, k, v, mask, shape.causal, scale, shape.order)
        alone = bottom == 0
        weight = c.masked_fill(alone, 0).exp()
        phi = (elu(q * scale**0.5) + 1) / size**0.5
        whole = weight * bottom.masked_fill(alone, 1) + (phi @ kappa.unsqueeze(-1)).squeeze(-1)
        right = (weight.unsqueeze(-1) * top + phi @ Z) / whole.unsqueeze(-1)
        compare(shape.dtype, [found], [right], mine, true)


@some
@given(shape=shapes, prefix=st.integers(1, 9), shared=st.booleans())
def test_prefix_attention_is_its_definition(shape: Shape, prefix: int, shared: bool) -> None:
    """The prefix by the same polynomial, about the mean of its own keys."""
    true, mask = shape.tensors(), shape.mask()
    batch = 1 if shared else shape.batch
    for name, size in (("prefix_key", shape.size), ("prefix_value", shape.value_size)):
        true[name] = torch.randn(batch, shape.kv_heads, prefix, size).to(shape.dtype).double().requires_grad_()
    mine = shape.given(true)
    with in_chunks(shape.chunk, shape.room):
        found = prefix_attention(**mine, attn_mask=mask, is_causal=shape.causal, scale=0.3, backend=NAMES[shape.order])
        q, k, v, pk, pv = true.values()
        parts = [
            sums(q, k, v, mask, shape.causal, 0.3, shape.order),
            sums(q, pk, pv, None, False, 0.3, shape.order),
        ]
        top = torch.stack([c.exp().unsqueeze(-1) * top for top, _, c in parts]).sum(0)
        bottom = torch.stack([c.exp() * bottom for _, bottom, c in parts]).sum(0)
        compare(shape.dtype, [found], [top / bottom.unsqueeze(-1)], mine, true)


@pytest.mark.parametrize("order", NAMES)
@pytest.mark.parametrize("causal", [False, True])
def test_gradcheck(order: int, causal: bool) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, h, 5, 3, dtype=torch.float64, requires_grad=True) for h in (2, 1, 1))
    Z, kappa = torch.randn(2, 3, 3, dtype=torch.float64, requires_grad=True), torch.rand(2, 3, dtype=torch.float64)
    seen = torch.tensor([[False, True, True, False, True], [True, True, True, True, False]])[:, None, None]
    options = {"attn_mask": seen, "is_causal": causal, "backend": NAMES[order]}

    def with_lse(*x: Tensor) -> tuple[Tensor, ...]:
        out, lse = attention_with_lse(*x, **options)
        return out, lse.masked_fill(lse.isneginf(), 0)

    with in_chunks(2, room=1):
        assert torch.autograd.gradcheck(with_lse, (q, k, v))
        assert torch.autograd.gradcheck(lambda *x: ntk_attention(*x, **options), (q, k, v, Z, kappa.requires_grad_()))


@pytest.mark.parametrize(("size", "order"), [(8, 4), (16, 4), (64, 2), (128, 2)])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_at_real_sizes(size: int, order: int, causal: bool, dtype: torch.dtype) -> None:
    """With its own chunks, of which there are two; half precision loses at most twice what exact attention does."""
    torch.manual_seed(0)
    about = {"query": 0.0, "key": 2 * torch.randn(size), "value": 0.0}
    mine = {name: (torch.randn(1, 1, 300, size) + at).to(dtype).requires_grad_() for name, at in about.items()}
    true = {name: x.detach().double().requires_grad_() for name, x in mine.items()}
    g = torch.randn(1, 1, 300, size).to(dtype)
    scale = 0.5 / size**0.5

    def errors(found: Tensor, right: Tensor) -> list[float]:
        ours = [found, *torch.autograd.grad(found, list(mine.values()), g)]
        theirs = [right, *torch.autograd.grad(right, list(true.values()), g.double())]
        return [float((f.double() - r).detach().norm() / r.detach().norm()) for f, r in zip(ours, theirs, strict=True)]

    found, _ = attention_with_lse(**mine, is_causal=causal, scale=scale, backend=NAMES[order])
    ours = errors(found, attend(**true, mask=None, causal=causal, scale=scale, order=order)[0])
    if dtype == torch.float32:
        assert max(ours) <= 2e-5
        return
    exact = [scaled_dot_product_attention(*x.values(), is_causal=causal, scale=scale) for x in (mine, true)]
    assert all(f <= 2 * e + 2e-3 for f, e in zip(ours, errors(*exact), strict=True)), ours


def test_later_keys_change_nothing() -> None:
    """Their mean must not show either: a query's own mean is that of the keys it sees."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 20, 4, dtype=torch.float64) for _ in range(3))
    others = k.clone(), v.clone()
    for other in others:
        other[:, :, 11:] = 5 + torch.randn(1, 2, 9, 4)
    for chunk in (4, 64):
        with in_chunks(chunk):
            before, after = (
                attention_with_lse(q, *rest, is_causal=True, backend="taylor") for rest in ((k, v), others)
            )
        for a, b in zip(before, after, strict=True):
            torch.testing.assert_close(a[:, :, :11], b[:, :, :11], rtol=1e-11, atol=1e-11)
            assert not torch.allclose(a[:, :, 11:], b[:, :, 11:], rtol=1e-3)


def test_what_hidden_keys_hold_is_never_read() -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 1, 9, 4) for _ in range(3))
    seen = torch.arange(9) % 3 > 0
    right = attention_with_lse(q, k, v, attn_mask=seen, is_causal=True, backend="taylor")
    k[:, :, ~seen] = v[:, :, ~seen] = math.nan
    k.requires_grad_()
    found = attention_with_lse(q, k, v, attn_mask=seen, is_causal=True, backend="taylor")
    for f, r in zip(found, right, strict=True):
        assert torch.equal(f, r)
    (g,) = torch.autograd.grad(found[0].sum(), k)
    assert (g[:, :, ~seen] == 0).all()


@some
@given(
    size=st.sampled_from([1, 4, 16]),
    length=st.integers(1, 40),
    spread=st.floats(0.01, 6),
    order=st.sampled_from(list(NAMES)),
    causal=st.booleans(),
    padding=st.booleans(),
    seed=st.integers(0, 999),
)
def test_the_error_is_within_the_bound(
    size: int, length: int, spread: float, order: int, causal: bool, padding: bool, seed: int
) -> None:
    """Against attention itself, output and log-sum-exp, for scores from nothing to far beyond what P follows."""
    torch.manual_seed(seed)
    q, k, v = (torch.randn(2, h, length, size, dtype=torch.float64) for h in (2, 1, 1))
    q, k = q * spread, k + torch.randn(size)
    mask = (torch.rand(2, 1, 1, length) > 0.3) if padding else None
    options = {"attn_mask": mask, "is_causal": causal}
    found, lse = attention_with_lse(q, k, v, **options, backend=NAMES[order])
    right, true_lse = attention_with_lse(q, k, v, **options, backend="plain")
    bound = taylor_bound(q, k, **options, order=order)
    rough = taylor_bound(q, k, **options, order=order, exact=False)
    assert float((found - right).abs().max()) <= bound.error * float(v.abs().max()) + 1e-11
    assert bound.largest <= rough.largest * (1 + 1e-12) + 1e-12
    assert bound.error <= rough.error + 1e-12
    off = (lse - true_lse)[~lse.isneginf()]
    P = [sum((sign * bound.largest) ** n / math.factorial(n) for n in range(order + 1)) for sign in (1, -1)]
    assert (off <= math.log(P[1]) + bound.largest + 1e-9).all()
    assert (off >= math.log(P[0]) - bound.largest - 1e-9).all()


@pytest.mark.parametrize("causal", [False, True])
def test_the_largest_score_is_the_largest(causal: bool) -> None:
    """Over several pieces of rows, by the definition."""
    torch.manual_seed(0)
    q, k = torch.randn(2, 4, 300, 3, dtype=torch.float64), torch.randn(2, 2, 300, 3, dtype=torch.float64) + 2
    mask = torch.rand(2, 1, 1, 300) > 0.3
    seen = mask & (torch.ones(300, 300).tril().bool() if causal else torch.ones(300, 300).bool())
    key = k.repeat_interleave(2, 1)
    mu = seen.double() @ key / seen.sum(-1, keepdim=True).clamp(min=1)
    x = 0.7 * (q @ key.mT - (q * mu).sum(-1, keepdim=True))
    found = taylor_bound(q, k, attn_mask=mask, is_causal=causal, scale=0.7)
    assert found.largest == pytest.approx(float((x * seen).abs().max()), rel=1e-12)


def test_the_bound_is_tight_and_what_it_says_of_the_theorem() -> None:
    """Two keys at x = +-B come near it; it falls as B^(p+1) / (p+1)!; with B fixed only the order lowers it."""
    for B, share in ((0.01, 0.98), (0.1, 0.9), (1.0, 0.45)):
        q = torch.full((1, 1, 1, 1), B, dtype=torch.float64)
        k = torch.tensor([1.0, -1.0], dtype=torch.float64).reshape(1, 1, 2, 1)
        found, right = (attention_with_lse(q, k, k, backend=name)[0] for name in ("taylor", "plain"))
        bound = taylor_bound(q, k)
        assert bound.largest == pytest.approx(B)
        assert share * bound.error <= float((found - right).abs()) <= bound.error
    for order in (2, 4, 6):
        leading = 0.05 ** (order + 1) / math.factorial(order + 1)
        assert taylor_error(0.05, order) == pytest.approx(leading, rel=0.02, abs=1e-15)
    assert taylor_error(0.0) == 0.0
    assert [taylor_error(B) for B in (0.5, 1, 2, 4)] == sorted(taylor_error(B) for B in (0.5, 1, 2, 4))
    assert taylor_error(1e200) == 2.0
    # The order that an error of 1/L takes for B = 1: it grows with L, slower than its logarithm.
    orders = [next(p for p in range(2, 99, 2) if taylor_error(1.0, p) <= 1 / 2**n) for n in (10, 14, 18)]
    assert orders == [6, 8, 10]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("order", NAMES)
@pytest.mark.parametrize("causal", [False, True])
def test_finite_whatever_the_scores(dtype: torch.dtype, order: int, causal: bool) -> None:
    """Scores of +-1e4, of which the polynomial knows nothing: values and gradients are numbers."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 12, 4) for _ in range(3))
    q, k = q * 100 / q.norm(dim=-1, keepdim=True), k * 200 / k.norm(dim=-1, keepdim=True)
    assert float((0.5 * q @ k.mT).abs().max()) > 5e3
    mine = [x.to(dtype).requires_grad_() for x in (q, k, v)]
    with in_chunks(4):
        for size in (1.0, 0.0) if dtype.itemsize == 4 else (1.0,):  # with 0 the output itself is beyond half types
            kappa = torch.full((2, 4), size)
            Z = torch.randn(2, 4, 4, requires_grad=True)
            out = ntk_attention(*mine, Z, kappa, is_causal=causal, backend=NAMES[order])
            grads = torch.autograd.grad(out.float().sum(), [*mine, Z])
            assert all(bool(x.isfinite().all()) for x in (out, *grads))


def test_the_whole_of_the_corollary() -> None:
    """Text and prefix both by Taylor features: near exact prefix attention, within the bound of either part."""
    torch.manual_seed(0)
    q, k, v = (0.5 * torch.randn(1, 2, 200, 8, dtype=torch.float64) for _ in range(3))
    pk, pv = (0.5 * torch.randn(2, 500, 8, dtype=torch.float64) for _ in range(2))
    phi = Taylor(4, centre=pk.mean(1))
    found = ntk_attention(
        q, k, v, *prefix_to_features(pk, pv, phi), feature_map=phi, is_causal=True, backend="taylor-4"
    )
    right = prefix_attention(q, k, v, pk, pv, is_causal=True)
    largest = max(taylor_bound(q, k, is_causal=True).largest, taylor_bound(q, pk.expand(1, 2, 500, 8), order=4).largest)
    values = max(float(v.abs().max()), float(pv.abs().max()))
    error = float((found - right).abs().max())
    assert 1e-9 < error <= taylor_error(largest, 4) * values
    assert error < 1e-3


CALLS: dict[str, Callable[..., Tensor]] = {
    "ntk": lambda q, k, v, Z, **options: ntk_attention(q, k, v, Z, torch.ones(4, 5), **options),
    "lse": lambda q, k, v, Z, **options: attention_with_lse(q, k, v, **options)[1] + 0 * Z.sum(),
}


@pytest.mark.parametrize(("call", "order"), [("ntk", 2), ("lse", 2), ("ntk", 4)])
def test_compiles_without_a_break(call: str, order: int) -> None:
    torch.manual_seed(0)
    inputs = [torch.randn(2, h, 5, 5, requires_grad=True) for h in (4, 2, 2)]
    inputs.append(torch.randn(4, 5, 5, requires_grad=True))
    mask = torch.rand(2, 1, 1, 5) > 0.2
    mask[..., 0] = True

    def run(*x: Tensor) -> Tensor:
        return CALLS[call](*x, attn_mask=mask, is_causal=True, backend=NAMES[order])

    torch.compiler.reset()
    _WEIGHTS.clear()  # or an earlier call would have made what this one compiles
    with in_chunks(3):
        found, right = torch.compile(run, backend="aot_eager", fullgraph=True)(*inputs), run(*inputs)
        torch.testing.assert_close(found, right)
        g = torch.randn_like(right)
        torch.testing.assert_close(
            torch.autograd.grad(found, inputs, g), torch.autograd.grad(right, inputs, g), rtol=1e-4, atol=1e-5
        )


def test_autocast_casts_the_tensors() -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 9, 8) for _ in range(3))
    with torch.autocast("cpu", torch.bfloat16):
        found, lse = attention_with_lse(q, k, v, backend="taylor")
    assert found.dtype == torch.bfloat16
    assert lse.dtype == torch.float32
    assert torch.equal(found, attention_with_lse(*(x.bfloat16() for x in (q, k, v)), backend="taylor")[0])


def test_it_is_never_chosen() -> None:
    q = torch.randn(1, 1, 4, 8)
    assert choose(None, make_call(q, q, q)).name == "cpu"
    assert choose(None, make_call(q, q, q, dropout_p=0.1)).name == "cpu"
    assert set(NAMES.values()) < set(BACKENDS)
    with pytest.raises(InlayError, match=r"Backends that can: cpu, plain\. "):
        attention_with_lse(q, q, q, attn_mask=torch.ones(4, 4).bool(), backend="taylor")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dropout_p": 0.1}, "no scores to drop"),
        ({"attn_mask": torch.ones(4, 4).bool()}, "boolean mask that hides keys"),
        ({"attn_mask": torch.zeros(1, 1, 1, 4)}, "boolean mask that hides keys"),
        ({"attn_mask": torch.ones(1, 2, 1, 4).bool()}, "boolean mask that hides keys"),
        ({"is_causal": True, "keys": 5}, "as many keys as queries, not 5 and 4"),
        ({"size": 64, "backend": "taylor-4"}, "order 4 has 814385 features at head_dim 64"),
        ({"keys": 0}, "nothing to attend to"),
    ],
)
def test_what_it_refuses(options: dict[str, object], message: str) -> None:
    size, keys = options.pop("size", 8), options.pop("keys", 4)
    q, k = torch.randn(1, 2, 4, size), torch.randn(1, 2, keys, size)
    with pytest.raises(InlayError, match=message):
        attention_with_lse(q, k, k, **({"backend": "taylor"} | options))


@pytest.mark.parametrize("size", [0.05, 1.0, 3.0])
def test_the_bound_holds_with_a_prefix(size: float) -> None:
    """Whose keys may be larger than those of the text."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 2, 6, 4, dtype=torch.float64) * scale for scale in (1.0, 0.05, 1.0))
    prefix_key, prefix_value = size * torch.randn(2, 5, 4, dtype=torch.float64), torch.randn(2, 5, 4).double()
    found, wanted = (
        prefix_attention(q, k, v, prefix_key, prefix_value, is_causal=True, backend=backend)
        for backend in ("taylor", "plain")
    )
    text = taylor_bound(q, k, is_causal=True)
    whole = taylor_bound(q, k, is_causal=True, prefix_key=prefix_key)
    error = float((found - wanted).abs().max() / max(v.abs().max(), prefix_value.abs().max()))
    assert text.largest < whole.largest
    assert 0 < error <= whole.error
    assert size < 1 or error > text.error, "the text's own bound would not do"


def test_mistakes_about_the_bound() -> None:
    q = torch.randn(1, 1, 4, 8)
    for order in (0, 1, 3):
        with pytest.raises(InlayError, match=f"order={order}: it must be even"):
            taylor_bound(q, q, order=order)
    with pytest.raises(InlayError, match="0 or more"):
        taylor_error(-1.0)
    with pytest.raises(InlayError, match="no bound for this call: it takes a boolean mask"):
        taylor_bound(q, q, attn_mask=torch.zeros(4, 4))


def test_memory_is_linear_and_features_are_never_all_held() -> None:
    """At a length of 8192 one matrix of scores is 256 MiB and the features of all keys are 82 MiB; one tensor of 64
    columns is 2 MiB. The plain backend, at half the length, shows that the measurement sees such a matrix."""

    def peak(length: int, causal: bool, backend: str) -> float:
        q, k, v = (torch.randn(1, 1, length, 64, requires_grad=True) for _ in range(3))
        return peak_memory(lambda: attention_with_lse(q, k, v, is_causal=causal, backend=backend)[0].sum().backward())

    assert max(peak(8192, True, "taylor"), peak(8192, False, "taylor")) < 48
    assert peak(4096, True, "plain") > 64


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("order", NAMES)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_on_a_gpu_it_is_its_definition(order: int, causal: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    size = 64 if order == 2 else 12
    mine = [torch.randn(2, h, 2100, size, device="cuda").to(dtype).requires_grad_() for h in (4, 2, 2)]
    seen = torch.rand(2, 1, 1, 2100, device="cuda") > 0.2
    options = {"is_causal": causal, "scale": 0.5 / size**0.5, "attn_mask": seen}
    found, lse = attention_with_lse(*mine, **options, backend=NAMES[order])
    g = torch.randn_like(found)
    grads = torch.autograd.grad(found, mine, g)
    true = [x.detach().double().cpu().requires_grad_() for x in mine]
    cpu = options | {"attn_mask": seen.cpu()}  # float64 on the processor, which the other tests hold to the definition
    right, right_lse = attention_with_lse(*true, **cpu, backend=NAMES[order])
    truth = torch.autograd.grad(right, true, g.double().cpu())
    bound = {torch.float32: 2e-3, torch.float16: 2e-3, torch.bfloat16: 3e-2}[dtype]  # float32 products may be in TF32
    for f, r in zip((found, lse, *grads), (right, right_lse, *truth), strict=True):
        hidden = r.isneginf()
        f, r = f.cpu().double().masked_fill(hidden, 0), r.masked_fill(hidden, 0)
        assert float((f - r).norm() / r.norm()) <= bound
