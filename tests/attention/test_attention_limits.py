"""Extremes: scores of 10^4, nothing to see, kappa of 0; memory; what is refused; compilation and autocast."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from peak_memory import peak_memory
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from inlay.attention import (
    Elu,
    Taylor,
    attention_with_lse,
    feature_map,
    ntk_attention,
    prefix_attention,
    prefix_to_features,
)
from inlay.errors import InlayError

BACKENDS = ("plain", "cpu")


def made(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape).to(dtype).requires_grad_()


def finite(out: Tensor, tensors: list[Tensor]) -> bool:
    grads = torch.autograd.grad(out.float().sum(), tensors)
    return bool(out.isfinite().all()) and all(bool(g.isfinite().all()) for g in grads)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["elu", "paper", "favor"])
@pytest.mark.parametrize("level", [-1e4, 1e4, 0.0])
@pytest.mark.parametrize("kappa", [0.0, 1e-30, 1e-3, 1.0])
def test_finite_whatever_the_scores(backend: str, dtype: torch.dtype, kind: str, level: float, kappa: float) -> None:
    """All scores near `level`, one query that sees nothing, Z of order 1: values and every gradient."""
    torch.manual_seed(0)
    q, k, v = made(1, 2, 4, 8, dtype=dtype), made(1, 2, 4, 8, dtype=dtype), made(1, 2, 4, 8, dtype=dtype)
    bias = torch.full((4, 4), level, dtype=dtype)
    bias[1] = -torch.inf
    Z, weight = made(2, 8, 8), torch.full((2, 8), kappa, requires_grad=True)
    out = ntk_attention(q, k, v, Z, weight, feature_map=kind, attn_mask=bias, backend=backend)
    assert finite(out, [q, k, v, Z, weight])


@pytest.mark.parametrize("backend", BACKENDS)
def test_finite_for_large_queries_and_keys(backend: str) -> None:
    """Scores of +-1e4 from the vectors themselves, both signs in one row."""
    torch.manual_seed(0)
    q, k, v, Z = made(1, 1, 6, 4), made(1, 1, 6, 4), made(1, 1, 6, 4), made(1, 4, 4)
    with torch.no_grad():
        q *= 100 / q.norm(dim=-1, keepdim=True)
        k *= 200 / k.norm(dim=-1, keepdim=True)
    assert (0.5 * q @ k.mT).abs().max() > 5e3
    for kappa in (torch.zeros(1, 4), torch.ones(1, 4)):
        kappa.requires_grad_()
        assert finite(ntk_attention(q, k, v, Z, kappa, is_causal=True, backend=backend), [q, k, v, Z, kappa])
        assert finite(prefix_attention(q, k, v, k[0], v[0], is_causal=True, backend=backend), [q, k, v])
    wide = ntk_attention(
        q, k, v, *prefix_to_features(k[0] / 100, v[0], Taylor(4)), feature_map=Taylor(4), backend=backend
    )
    assert finite(wide, [q, k, v])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("level", [-1e4, -45.0, 0.0, 1e4])
def test_without_features_it_is_attention(backend: str, level: float) -> None:
    """Z = 0 and kappa = 0, the start of training: the base model's output and gradients, wherever the scores lie."""
    torch.manual_seed(0)
    q, k, v = (made(2, 2, 5, 8, dtype=torch.float64) for _ in range(3))
    bias = torch.full((5, 5), level, dtype=torch.float64)
    nothing = torch.zeros(2, 8, 8, dtype=torch.float64), torch.zeros(2, 8, dtype=torch.float64)
    out = ntk_attention(q, k, v, *nothing, attn_mask=bias, backend=backend)
    right = scaled_dot_product_attention(q, k, v, attn_mask=bias)
    torch.testing.assert_close(out, right)
    g = torch.randn_like(out)
    torch.testing.assert_close(torch.autograd.grad(out, (q, k, v), g), torch.autograd.grad(right, (q, k, v), g))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_query_that_sees_nothing_gets_the_features_alone(backend: str) -> None:
    torch.manual_seed(0)
    q, k, v, Z = made(1, 1, 2, 4), made(1, 1, 3, 4), made(1, 1, 3, 4), made(1, 4, 4)
    kappa = torch.rand(1, 4)
    seen = torch.tensor([[False] * 3, [True] * 3])
    out = ntk_attention(q, k, v, Z, kappa, attn_mask=seen, scale=0.5, backend=backend)
    phi = (torch.nn.functional.elu(q[0, 0, 0] * 0.5**0.5) + 1) / 2
    torch.testing.assert_close(out[0, 0, 0], phi @ Z[0] / (1 + phi @ kappa[0]))
    alone, lse = attention_with_lse(q, k, v, attn_mask=seen, backend=backend)
    assert torch.equal(alone[0, 0, 0], torch.zeros(4))
    assert lse[0, 0, 0] == -torch.inf
    both = prefix_attention(q, k, v, k[0], v[0], attn_mask=seen, backend=backend)
    torch.testing.assert_close(both[0, 0, 0], scaled_dot_product_attention(q, k, v)[0, 0, 0])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", ["elu", "taylor", "favor"])
@pytest.mark.parametrize("hidden", [-torch.inf, torch.finfo(torch.float32).min, torch.finfo(torch.float16).min])
def test_a_query_that_sees_nothing_has_no_larger_gradients_than_others(backend: str, kind: str, hidden: float) -> None:
    """At the start of training (Z_B = 0, kappa = 0) and with a Z that is large: padding on the left has such rows, and
    the loss of the first real token is read from the last of them."""
    torch.manual_seed(0)
    q, k, v = made(1, 2, 3, 4), made(1, 2, 3, 4), made(1, 2, 3, 4)
    rows = feature_map(kind).dimension(4)
    left, right, kappa = made(2, rows, 4), made(2, 4, 4), torch.zeros(2, rows, requires_grad=True)
    bias = torch.zeros(3, 3)
    bias[1] = hidden
    for size in (0.0, 100.0):
        Z = left, (size * right.detach()).requires_grad_()
        out = ntk_attention(q, k, v, Z, kappa, feature_map=kind, attn_mask=bias, backend=backend)
        grads = torch.autograd.grad(out[:, :, 1].sum(), [q, *Z, kappa])
        assert out.abs().max() <= 5 + 15 * size
        assert max(float(g.abs().max()) for g in grads) < 50 + 5 * size**2


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", ["elu", "taylor"])
def test_float16_has_no_infinities(backend: str, kind: str) -> None:
    """kappa = 0 and a Z that is not: with one key of score -45, and with none."""
    torch.manual_seed(0)
    q, k, v = (made(1, 1, 4, 8, dtype=torch.float16) for _ in range(3))
    bias = torch.zeros(4, 4)
    bias[0], bias[1] = -45, -torch.inf
    Z = made(1, feature_map(kind).dimension(8), 8)
    kappa = torch.zeros(1, Z.shape[1])
    out = ntk_attention(q, k, v, Z, kappa, feature_map=kind, attn_mask=bias, backend=backend)
    assert out.isfinite().all()
    assert out[0, 0, 0].abs().max() == torch.finfo(torch.float16).max


@pytest.mark.parametrize("shared", [True, False])
def test_prefix_attention_is_attention_over_all_keys(shared: bool) -> None:
    """Against torch's own attention over concatenated keys, with the mask a user would have to build for it."""
    torch.manual_seed(0)
    q, k, v = made(3, 4, 50, 16), made(3, 2, 50, 16), made(3, 2, 50, 16)
    pk, pv = (made(2, 70, 16) if shared else made(3, 2, 70, 16) for _ in range(2))
    out = prefix_attention(q, k, v, pk, pv, is_causal=True)
    whole_k, whole_v = (
        torch.cat([p.expand(3, 2, 70, 16), x], 2).repeat_interleave(2, 1) for p, x in ((pk, k), (pv, v))
    )
    seen = torch.cat([torch.ones(50, 70), torch.ones(50, 50).tril()], 1).bool()
    right = scaled_dot_product_attention(q, whole_k, whole_v, attn_mask=seen)
    torch.testing.assert_close(out, right, rtol=1e-5, atol=1e-6)
    g = torch.randn_like(out)
    inputs = (q, k, v, pk, pv)
    for f, r in zip(torch.autograd.grad(out, inputs, g), torch.autograd.grad(right, inputs, g), strict=True):
        torch.testing.assert_close(f, r, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("call", ["ntk", "prefix", "lse"])
def test_dropout_leaves_the_mean_and_the_denominator(call: str) -> None:
    torch.manual_seed(0)
    q, k, v = made(1, 1, 3, 4), made(1, 1, 6, 4), made(1, 1, 6, 4)
    Z, kappa = torch.randn(1, 4, 4), torch.rand(1, 4)

    def run(p: float) -> Tensor:
        if call == "lse":
            out, lse = attention_with_lse(q, k, v, dropout_p=p)
            torch.testing.assert_close(lse, attention_with_lse(q, k, v)[1])
            return out
        if call == "ntk":
            return ntk_attention(q, k, v, Z, kappa, dropout_p=p)
        return prefix_attention(q, k, v, k[0], v[0], dropout_p=p)

    with torch.no_grad():
        runs = torch.stack([run(0.4) for _ in range(600)])
        right = run(0.0)
    assert runs.std(0).max() > 0.05
    assert ((runs.mean(0) - right).abs() < 5 * runs.std(0) / 600**0.5 + 1e-6).all()


def test_a_mask_that_is_trained_has_its_gradient() -> None:
    """A trained position bias goes by the plain backend; the fused kernel would drop its gradient."""
    torch.manual_seed(0)
    q, k, v, bias = made(1, 2, 3, 4), made(1, 2, 3, 4), made(1, 2, 3, 4), made(1, 2, 3, 3)
    out = ntk_attention(q, k, v, torch.randn(2, 4, 4), torch.rand(2, 4), attn_mask=bias)
    assert torch.autograd.grad(out.sum(), bias)[0].abs().max() > 0
    with pytest.raises(InlayError, match="no gradient for the mask"):
        attention_with_lse(q, k, v, attn_mask=bias, backend="cpu")


def test_memory_is_linear_in_the_length() -> None:
    """A matrix of scores of 4096 x 4096 is 64 MiB: fused passes stay far below one, and the plain one shows that the
    measurement would see it."""
    Z, kappa = torch.randn(1, 16, 16, requires_grad=True), torch.rand(1, 16, requires_grad=True)
    q, k, v = (torch.randn(1, 1, 4096, 16, requires_grad=True) for _ in range(3))

    def run(kind: str) -> None:
        if kind == "lse":
            out, lse = attention_with_lse(q, k, v, is_causal=True)
            (out.sum() + lse.sum()).backward()
        elif kind == "prefix":
            prefix_attention(q, k, v, k[0], v[0]).sum().backward()
        else:
            ntk_attention(q, k, v, Z, kappa, backend=kind).sum().backward()

    fused = {kind: peak_memory(lambda kind=kind: run(kind)) for kind in ("lse", "prefix", "cpu")}
    assert max(fused.values()) < 24, fused
    assert peak_memory(lambda: run("plain")) > 64


@pytest.mark.parametrize(("call", "backend"), [("ntk", "cpu"), ("prefix", "cpu"), ("lse", "cpu"), ("ntk", "plain")])
def test_compiles_without_a_break(call: str, backend: str) -> None:
    torch.manual_seed(0)
    q, k, v, Z, kappa = made(2, 4, 5, 8), made(2, 2, 5, 8), made(2, 2, 5, 8), made(4, 8, 8), torch.rand(4, 8)

    def run(q: Tensor, k: Tensor, v: Tensor, Z: Tensor) -> Tensor:
        if call == "ntk":
            return ntk_attention(q, k, v, Z, kappa, is_causal=True, backend=backend)
        if call == "prefix":
            return prefix_attention(q, k, v, k[0], v[0], is_causal=True, backend=backend) + 0 * Z.sum()
        out, lse = attention_with_lse(q, k, v, is_causal=True, backend=backend)
        return out * lse.unsqueeze(-1) + 0 * Z.sum()

    torch.compiler.reset()
    inputs = (q, k, v, Z)
    right = run(*inputs)
    found = torch.compile(run, backend="aot_eager", fullgraph=True)(*inputs)
    torch.testing.assert_close(found, right)
    g = torch.randn_like(right)
    torch.testing.assert_close(torch.autograd.grad(found, inputs, g), torch.autograd.grad(right, inputs, g))


@pytest.mark.parametrize("kind", ["favor", "taylor"])
def test_other_maps_compile(kind: str) -> None:
    torch.manual_seed(0)
    q, k, v = made(1, 2, 5, 4), made(1, 2, 5, 4), made(1, 2, 5, 4)
    Z, kappa = prefix_to_features(k[0].detach(), v[0].detach(), kind)

    def run(q: Tensor) -> Tensor:
        return ntk_attention(q, k, v, Z, kappa, feature_map=kind)

    torch.compiler.reset()
    torch.testing.assert_close(torch.compile(run, backend="aot_eager", fullgraph=True)(q), run(q))


@pytest.mark.parametrize("backend", BACKENDS)
def test_autocast_casts_the_tensors_and_not_our_sums(backend: str) -> None:
    torch.manual_seed(0)
    q, k, v, Z, kappa = made(1, 2, 5, 8), made(1, 2, 5, 8), made(1, 2, 5, 8), made(2, 8, 8), torch.rand(2, 8)
    lower = [x.bfloat16() for x in (q, k, v)]
    with torch.autocast("cpu", torch.bfloat16):
        found = ntk_attention(q, k, v, Z, kappa, backend=backend)
    assert torch.equal(found, ntk_attention(*lower, Z, kappa, backend=backend))
    assert found.dtype == torch.bfloat16
    found.sum().backward()
    assert Z.grad is not None
    assert Z.grad.dtype == torch.float32


def test_nothing_is_computed_for_what_needs_no_gradient() -> None:
    """In a first layer the frozen q, k and v need none: the kernel's backward pass is not called."""
    from inlay.attention.cpu import CpuKernel

    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 5, 8) for _ in range(3))
    Z, kappa = made(2, 8, 8), torch.rand(2, 8)
    out = ntk_attention(q, k, v, Z, kappa, backend="cpu")
    backward = CpuKernel.backward
    try:
        CpuKernel.backward = None  # type: ignore[method-assign,assignment]
        assert torch.autograd.grad(out.sum(), Z)[0].abs().max() > 0
    finally:
        CpuKernel.backward = backward  # type: ignore[method-assign]


def test_every_layout_of_memory() -> None:
    """The fused kernel misreads a last dimension with gaps; views of one must give what copies give."""
    torch.manual_seed(0)
    wide = [torch.randn(1, 2, 5, 16) for _ in range(3)]
    bias = torch.randn(5, 10)[:, ::2]
    q, k, v = (x[..., ::2] for x in wide)
    found = attention_with_lse(q, k, v, attn_mask=bias, backend="cpu")
    right = attention_with_lse(*(x.contiguous() for x in (q, k, v)), attn_mask=bias.contiguous(), backend="plain")
    torch.testing.assert_close(found, right)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_bias_in_float32_beside_half_precision_keeps_its_digits(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    q, k, v = (made(1, 1, 4, 8, dtype=dtype) for _ in range(3))
    bias = 30 + torch.rand(4, 4)  # of which half precision would keep two digits
    bias[1] = torch.finfo(torch.float32).min
    found = attention_with_lse(q, k, v, attn_mask=bias, backend="cpu")
    right = attention_with_lse(q, k, v, attn_mask=bias, backend="plain")
    torch.testing.assert_close(found[1], right[1], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(found[0], right[0], rtol=1e-2, atol=1e-2)
    assert finite(found[0], [q, k, v])


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_denominator_eaten_up_by_negative_features_stays_finite(backend: str) -> None:
    """An odd Taylor polynomial is negative far below 0: nothing it says is meant there, but it must not spread NaN."""
    torch.manual_seed(0)
    q, k, v = made(1, 1, 3, 4), made(1, 1, 3, 4), made(1, 1, 3, 4)
    away = -5 * q[0].detach()
    odd = Taylor(1)
    out = ntk_attention(q, k, v, *prefix_to_features(away, v[0], odd), feature_map=odd, scale=1.0, backend=backend)
    assert finite(out, [q, k, v])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("whole", [0.05, 1e-3])
def test_a_denominator_that_negative_features_leave_something_of_is_right(backend: str, whole: float) -> None:
    """Only what would be below a millionth of the keys' share is held there."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 1, 3, 4, dtype=torch.float64) for _ in range(3))
    Z, kappa = torch.zeros(1, 5, 4, dtype=torch.float64), torch.zeros(1, 5, dtype=torch.float64)
    kappa[0, 0] = whole - 3  # the constant feature of `taylor`; three keys of score 0 weigh 3
    out = ntk_attention(0 * q, k, v, Z, kappa, feature_map=Taylor(1), backend=backend)
    torch.testing.assert_close(out, (v.sum(2, keepdim=True) / whole).expand_as(out))


def test_empty_tensors() -> None:
    """The fused kernel ends the process on them; they go by the plain backend."""
    q, k, v = torch.randn(1, 1, 2, 4), torch.randn(1, 1, 0, 4), torch.randn(1, 1, 0, 4)
    out, lse = attention_with_lse(q, k, v)
    assert torch.equal(out, torch.zeros(1, 1, 2, 4))
    assert (lse == -torch.inf).all()
    assert attention_with_lse(q[:, :, :0], q, q)[0].shape == (1, 1, 0, 4)
    Z, kappa = torch.randn(1, 4, 4), torch.rand(1, 4)
    assert ntk_attention(q, k, v, Z, kappa).isfinite().all()


Q, K, Z4, K4 = torch.ones(1, 4, 3, 8), torch.ones(1, 2, 3, 8), torch.ones(4, 8, 8), torch.ones(4, 8)


@pytest.mark.parametrize(
    ("run", "says"),
    [
        (lambda: attention_with_lse(Q, K, K, backend="cudo"), "Known: cpu, cuda, plain"),
        (lambda: attention_with_lse(Q, K, K[..., :4], backend="cpu"), "one head size. Backends that can: plain"),
        (lambda: attention_with_lse(Q[0], K, K), r"query has shape \[4, 3, 8\]"),
        (lambda: attention_with_lse(Q, K, K.double()), "cast them to one type"),
        (lambda: attention_with_lse(Q, K[..., :4], K), "head_dim 8 and key 4"),
        (lambda: attention_with_lse(Q[:, :3], K, K), "3 query heads"),
        (lambda: attention_with_lse(Q, K, K[:, :, :2]), "only their last sizes may differ"),
        (lambda: attention_with_lse(torch.cat([Q, Q]), K, K), "same batch size"),
        (lambda: attention_with_lse(Q, K, K, scale=-1.0), "greater than 0"),
        (lambda: attention_with_lse(Q, K, K, dropout_p=1.0), "less than 1"),
        (lambda: attention_with_lse(Q, K, K, attn_mask=torch.ones(2, 3).bool()), r"must broadcast"),
        (lambda: attention_with_lse(Q, K, K, attn_mask=torch.ones(3, 3).long()), r"\.bool\(\)"),
        (lambda: ntk_attention(Q, K, K, Z4, K4[:2]), "with 4 heads"),
        (lambda: ntk_attention(Q, K, K, Z4[:, :4], K4), r"\[4, 8, 8\]"),
        (lambda: ntk_attention(Q, K, K, (Z4, Z4[:, :2]), K4), "with one s"),
        (lambda: ntk_attention(Q, K, K, Z4[:, :6], K4[:, :6]), "multiple of head_dim = 8"),
        (lambda: ntk_attention(Q, K, K, Z4, K4, feature_map="fabor"), "Did you mean 'favor'"),
        (lambda: ntk_attention(Q, K, K, Z4, K4, feature_map=3), "feature_map=3: give a name"),
        (lambda: ntk_attention(Q, K, K, Z4, -K4), "kappa has values below 0.*the least is -1"),
        (lambda: ntk_attention(Q, K, K, Z4, K4 * torch.nan), "below 0 or NaN"),
        (lambda: feature_map("elu", order=3), "Unknown option of the feature map 'elu': 'order'"),
        (lambda: prefix_to_features(K[0], K[0], chunk=0), "chunk=0"),
        (lambda: prefix_to_features(K[0], K[0], heads=0), "0 query heads"),
        (lambda: prefix_attention(Q, K, K, K[0, 0], K[0, 0]), r"\[heads, m, head_dim\]"),
        (lambda: prefix_attention(Q, K, K, torch.ones(2, 2, 3, 8), torch.ones(2, 2, 3, 8)), "2 rows"),
    ],
)
def test_bad_input_gets_one_clear_error(run: Callable[[], object], says: str) -> None:
    with pytest.raises(InlayError, match=says):
        run()


def test_the_choice_of_backend() -> None:
    from inlay.attention.backends import choose
    from inlay.attention.call import make_call

    q = torch.randn(1, 2, 3, 4)
    chosen = {
        (dropout, device): choose(None, make_call(*[q.to(device)] * 3, dropout_p=dropout)).name
        for dropout, device in itertools.product((0.0, 0.1), ("cpu", "meta"))
    }
    assert chosen == {(0.0, "cpu"): "cpu", (0.1, "cpu"): "cpu", (0.0, "meta"): "plain", (0.1, "meta"): "plain"}
    assert (
        ntk_attention(*[q.to("meta")] * 3, torch.ones(2, 4, 4, device="meta"), torch.ones(2, 4, device="meta")).shape
        == q.shape
    )


class Unhashable(Elu):
    """A feature map as somebody may write it: with equality, and without a hash."""

    __hash__ = None  # type: ignore[assignment]


def test_calls_that_look_alike_are_told_apart() -> None:
    torch.manual_seed(0)
    q, Z, kappa = torch.randn(1, 2, 3, 4), torch.randn(2, 4, 4), torch.rand(2, 4)
    wanted = ntk_attention(q, q, q, Z, kappa)
    for _ in range(2):
        assert torch.equal(ntk_attention(q, q, q, Z, kappa, feature_map=Unhashable()), wanted)
    scale = torch.tensor(0.5)
    half = ntk_attention(q, q, q, Z, kappa, scale=scale)
    assert torch.equal(half, ntk_attention(q, q, q, Z, kappa, scale=0.5))
    scale.fill_(0.25)
    assert torch.equal(ntk_attention(q, q, q, Z, kappa, scale=scale), ntk_attention(q, q, q, Z, kappa, scale=0.25))
    with pytest.raises(InlayError, match="below 0"):
        ntk_attention(q, q, q, Z, -kappa)
    with pytest.raises(InlayError, match="must broadcast"):
        ntk_attention(q, q, q, Z, kappa, attn_mask=torch.ones(5, 3).bool())


@pytest.mark.parametrize("call", ["lse", "ntk"])
@pytest.mark.parametrize("dropout_p", [0.0, 1e-12])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gradients_of_rows_whose_keys_all_get_the_most_negative_number(
    call: str, dropout_p: float, causal: bool, dtype: torch.dtype
) -> None:
    """As the definition has them: the mean of the values, whose gradient is shared among them."""
    torch.manual_seed(0)
    inputs = [torch.randn(2, 2, 4, 8, dtype=dtype, requires_grad=True) for _ in range(3)]
    state = [torch.randn(2, 8, 8, dtype=dtype, requires_grad=True), torch.rand(2, 8, dtype=dtype, requires_grad=True)]
    least = torch.finfo(dtype).min
    for shape in ((2, 1, 4, 4), (2, 1, 1, 4)):
        mask = torch.zeros(shape, dtype=dtype)
        mask[0, 0, 0] = least
        mask[1, 0, :, :2] = least
        grads = []
        for backend in ("cpu", "plain"):
            options = {"attn_mask": mask, "is_causal": causal, "backend": backend, "dropout_p": dropout_p}
            leaves = inputs
            if call == "lse":
                out = attention_with_lse(*inputs, **options)[0]
            else:
                out, leaves = ntk_attention(*inputs, *state, **options), [*inputs, *state]
            weight = torch.arange(out.numel(), dtype=dtype).reshape(out.shape).cos()
            grads.append(torch.autograd.grad((out * weight).sum(), leaves))
        # With features those of query and key are approximate in such rows.
        for found, right in zip(*(each if call == "lse" else each[2:] for each in grads), strict=True):
            torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-5)
