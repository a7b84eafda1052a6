"""Each feature map is the kernel it says it is."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from inlay.attention import Favor, Taylor, feature_map, features, ntk_attention, prefix_attention, prefix_to_features
from inlay.attention.features import directions
from inlay.errors import InlayError

few = settings(max_examples=30, deadline=None, derandomize=True)


def kernel(kind: str, q: Tensor, k: Tensor, rows: int, scale: float, **options: object) -> Tensor:
    phi = feature_map(kind, **options)
    of_query, log_scale = phi.of_query(q, rows, scale)
    if log_scale is not None:
        of_query = of_query * log_scale.exp().unsqueeze(-1)
    return of_query @ phi.of_key(k, rows, scale).mT


@few
@given(order=st.integers(0, 7), size=st.integers(1, 4), stretch=st.floats(0.1, 3), seed=st.integers(0, 99))
def test_taylor_is_the_polynomial_and_within_its_bound(order: int, size: int, stretch: float, seed: int) -> None:
    torch.manual_seed(seed)
    q, k = (stretch * torch.randn(5, size, dtype=torch.float64) for _ in range(2))
    scale = 0.7
    x = scale * q @ k.mT
    rows = Taylor(order).dimension(size)
    assert rows == math.comb(size + order, order)
    found = kernel("taylor", q, k, rows, scale, order=order)
    polynomial = sum(x**n / math.factorial(n) for n in range(order + 1))
    torch.testing.assert_close(found, polynomial, rtol=1e-9, atol=1e-9)
    bound = x.abs() ** (order + 1) / math.factorial(order + 1) * x.exp().clamp(min=1)
    assert ((found - x.exp()).abs() <= bound * (1 + 1e-9) + 1e-9).all()
    if order % 2 == 0:
        assert (found > 0).all()


def test_taylor_features_of_large_queries_stay_in_range() -> None:
    q = torch.full((1, 3), 1e8)
    phi, log_scale = Taylor(6).of_query(q, Taylor(6).dimension(3), 1.0)
    assert log_scale is not None
    assert phi.isfinite().all()
    assert phi.abs().max() > 1e-3
    assert log_scale.item() == pytest.approx(6 * math.log(1e8), rel=1e-6)


@pytest.mark.parametrize("rows", [8, 6, 20])
def test_favor_is_unbiased(rows: int) -> None:
    """The mean over seeds of phi(q).phi(k) / exp(scale q.k) is 1, within four standard errors."""
    torch.manual_seed(0)
    q, k = (torch.randn(4, 8, dtype=torch.float64) for _ in range(2))
    scale = 0.05  # short vectors: the ratio has no heavy tail, and few seeds say much
    ratios = torch.stack(
        [kernel("favor", q, k, rows, scale, seed=seed) / (scale * q @ k.mT).exp() for seed in range(1000)]
    )
    error = ratios.std(0) / len(ratios) ** 0.5
    assert ((ratios.mean(0) - 1).abs() < 4 * error).all()
    assert (ratios > 0).all()


def test_favor_gets_better_with_more_features() -> None:
    torch.manual_seed(0)
    q, k = (torch.randn(6, 8, dtype=torch.float64) for _ in range(2))
    right = (0.1 * q @ k.mT).exp()
    errors = [
        torch.stack([(kernel("favor", q, k, rows, 0.1, seed=s) / right - 1).square() for s in range(20)]).mean().sqrt()
        for rows in (16, 256, 4096)
    ]
    assert errors[1] < 0.5 * errors[0]
    assert errors[2] < 0.5 * errors[1]


def test_favor_directions_are_orthogonal_and_follow_the_seed() -> None:
    block = directions(8, 4, 3)[:4]
    products = block @ block.mT
    assert (products - products.diagonal().diag()).abs().max() < 1e-12
    torch.randn(3)  # the global generator has no say
    features._DIRECTIONS.clear()
    assert torch.equal(directions(8, 4, 3)[:4], block)
    assert not torch.equal(directions(8, 4, 3), directions(8, 4, 4))


@pytest.mark.parametrize("kind", ["taylor", "favor"])
def test_a_centre_changes_the_approximation_and_not_the_kernel(kind: str) -> None:
    """About the keys' mean the same number of features comes much closer to exp, with the right gradient."""
    torch.manual_seed(0)
    heads, size, scale = 2, 8, 0.35
    k = 0.1 * torch.randn(heads, 16, size, dtype=torch.float64) + 1.5
    q = torch.randn(heads, 5, size, dtype=torch.float64, requires_grad=True)
    right = (scale * q @ k.mT).exp().detach()
    rows = Taylor(2).dimension(size)
    far = (kernel(kind, q, k, rows, scale) / right - 1).abs().mean()
    found = kernel(kind, q, k, rows, scale, centre=k.mean(1))
    assert (found / right - 1).abs().mean() < 0.5 * far
    # By differences: the factor that carries no gradient must not take any of it away.
    phi = feature_map(kind, centre=k.mean(1))

    def one(q: Tensor) -> Tensor:
        of_query, log_scale = phi.of_query(q, rows, scale)
        assert log_scale is not None
        return ((of_query @ phi.of_key(k, rows, scale).mT).log() + log_scale.unsqueeze(-1)).sum()

    g_found = torch.autograd.grad(one(q), q)[0]
    step = 1e-6 * torch.randn_like(q)
    change = (one(q + step) - one(q - step)) / 2
    assert float(change.detach()) == pytest.approx(float((g_found * step).sum()), rel=1e-4)


def test_grouped_heads_share_a_centre() -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 4, 3, 4).double(), torch.randn(2, 2, 3, 4).double(), torch.randn(2, 2, 3, 4).double()
    pk, pv = 2 + 0.2 * torch.randn(2, 10, 4).double(), torch.randn(2, 10, 4).double()
    taylor = Taylor(8, centre=pk.mean(1))
    found = ntk_attention(q, k, v, *prefix_to_features(pk, pv, taylor, heads=4), feature_map=taylor)
    torch.testing.assert_close(found, prefix_attention(q, k, v, pk, pv), rtol=1e-7, atol=1e-7)


def test_elu_is_a_positive_kernel_that_meets_exp_at_the_origin() -> None:
    """1 at the origin for every r, positive definite, continuous, and r times less than without its norm."""
    torch.manual_seed(0)
    for size, beta in ((4, 1), (4, 2), (64, 1), (64, 4)):
        zero = torch.zeros(1, size, dtype=torch.float64)
        assert kernel("elu", zero, zero, beta * size, 0.1).item() == pytest.approx(1.0)
        z = torch.randn(12, size, dtype=torch.float64)
        gram = kernel("elu", z, z, beta * size, 0.1)
        assert (gram > 0).all()
        assert torch.linalg.eigvalsh(gram).min() > -1e-9
        # Of the size of exp where attention lives; without 1 / sqrt(r) it would be r times as much.
        apart = z[:6], z[6:]
        ratio = (kernel("elu", *apart, beta * size, 0.1) / (0.1 * apart[0] @ apart[1].mT).exp()).median()
        assert 0.2 < ratio < 5
        step = 1e-9
        near = kernel("elu", zero + step, zero, beta * size, 0.1) - kernel("elu", zero - step, zero, beta * size, 0.1)
        assert near.abs().item() < 1e-6


def test_the_plain_backends_gradient_at_the_origin_is_the_limits() -> None:
    """At q = 0 the slope of phi is 1 from both sides: the plain backend's gradient there is that just beside it."""
    torch.manual_seed(0)
    z, kappa = torch.randn(1, 2, 4, 4, dtype=torch.float64), torch.rand(1, 2, 4, dtype=torch.float64)
    k, v = torch.randn(2, 1, 2, 3, 4, dtype=torch.float64)

    def slope(at: float) -> Tensor:
        q = torch.full((1, 2, 3, 4), at, dtype=torch.float64, requires_grad=True)
        out = ntk_attention(q, k, v, z[0], kappa[0], backend="plain")
        return torch.autograd.grad(out.square().sum(), q)[0]

    torch.testing.assert_close(slope(0.0), slope(-1e-9), atol=1e-6, rtol=0)
    torch.testing.assert_close(slope(0.0), slope(1e-9), atol=1e-6, rtol=0)


def test_elu_keeps_its_digits_far_below_zero() -> None:
    z = torch.full((1, 4), -12.0)
    phi, _ = feature_map("elu").of_query(z, 4, 1.0)
    assert phi[0, 0].item() == pytest.approx(math.exp(-12) / 2, rel=1e-6)


def test_paper_jumps_at_zero_as_printed() -> None:
    size = 16
    below, above = (
        feature_map("paper").of_key(torch.full((1, size), x, dtype=torch.float64), size, 0.25)[0, 0]
        for x in (-1e-12, 0.0)
    )
    assert (below - above).item() == pytest.approx(size**-0.25)
    assert above.item() == 1.0


@pytest.mark.parametrize("kind", ["elu", "paper"])
@pytest.mark.parametrize("beta", [1, 2, 3])
def test_the_derivative_by_hand_is_the_derivative(kind: str, beta: int) -> None:
    torch.manual_seed(0)
    phi = feature_map(kind)
    z = torch.randn(7, 4, dtype=torch.float64)
    z[2], z[3, 1] = 0, 0  # the bend of the curve, where both of its pieces could pass a gradient
    z.requires_grad_()
    raw = phi.raw(z, beta * 4, 0.3)  # type: ignore[attr-defined]
    g = torch.randn_like(raw)
    right = torch.autograd.grad(raw, z, g)[0]
    torch.testing.assert_close(phi.pull(z.detach(), raw.detach(), g, 0.3), right)  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", ["elu", "paper", "taylor", "favor"])
def test_a_prefix_read_in_pieces_gives_the_same(kind: str) -> None:
    torch.manual_seed(0)
    k, v = torch.randn(2, 57, 6), torch.randn(2, 57, 6)
    Z, kappa = prefix_to_features(k, v, kind)
    phi = feature_map(kind).of_key(k.double(), kappa.shape[1], 6**-0.5)
    torch.testing.assert_close(Z.double(), torch.einsum("hmr,hmd->hrd", phi, v.double()), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(kappa.double(), phi.sum(1), rtol=1e-5, atol=1e-5)
    for again in (
        prefix_to_features(k, v, kind, chunk=10),
        prefix_to_features(k.split(7, 1), v.split(7, 1), kind),
        prefix_to_features((x for x in k.split(20, 1)), iter(v.split(20, 1)), kind, chunk=3),
    ):
        torch.testing.assert_close(again, (Z, kappa), rtol=1e-5, atol=1e-5)
    wide = prefix_to_features(k, v, kind, heads=4)
    torch.testing.assert_close(wide, (Z.repeat_interleave(2, 0), kappa.repeat_interleave(2, 0)))


def test_sums_keep_their_digits_however_many_pieces_there_are() -> None:
    """3,000 features of about 1/3: summed one at a time in float32, the last digits would be lost."""
    torch.manual_seed(0)
    k, v = torch.randn(1, 3000, 3), torch.rand(1, 3000, 3)
    right = prefix_to_features(k.double(), v.double())
    for found, wanted in zip(prefix_to_features(k, v, chunk=1), right, strict=True):
        assert float((found.double() / wanted - 1).abs().max()) < 1e-7


def test_a_long_prefix_is_never_held_whole() -> None:
    """A generator of 2^16 keys; what is added up last still counts."""
    torch.manual_seed(0)
    made = (torch.randn(1, 1024, 4) for _ in range(64))
    ones = (torch.ones(1, 1024, 4) for _ in range(64))
    Z, kappa = prefix_to_features(made, ones)
    torch.testing.assert_close(Z, kappa.unsqueeze(-1).expand_as(Z))


def test_growing_order_converges_to_prefix_attention() -> None:
    """Theorem 3.1's mechanism: NTK-Attention by Eq. (4) with Taylor features tends to exact prefix attention."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 2, 5, 4, dtype=torch.float64) for _ in range(3))
    pk, pv = (torch.randn(2, 40, 4, dtype=torch.float64) for _ in range(2))
    right = prefix_attention(q, k, v, pk, pv, is_causal=True)
    errors = []
    for order in range(0, 19, 2):
        taylor = Taylor(order)
        found = ntk_attention(q, k, v, *prefix_to_features(pk, pv, taylor), feature_map=taylor, is_causal=True)
        errors.append(float((found - right).abs().max()))
    assert errors[0] > 1e-2
    assert all(later < earlier for earlier, later in itertools.pairwise(errors[1:]))
    assert errors[-1] < 1e-5


def test_random_features_converge_to_prefix_attention() -> None:
    torch.manual_seed(0)
    q, k, v = (0.6 * torch.randn(1, 2, 5, 8, dtype=torch.float64) for _ in range(3))
    pk, pv = (0.6 * torch.randn(2, 40, 8, dtype=torch.float64) for _ in range(2))
    right = prefix_attention(q, k, v, pk, pv)
    errors = []
    for rows in (32, 512, 8192):
        found = [
            ntk_attention(q, k, v, *prefix_to_features(pk, pv, Favor(seed=s), features=rows), feature_map=Favor(seed=s))
            for s in range(8)
        ]
        errors.append(float(torch.stack([(f - right).square().mean() for f in found]).mean().sqrt()))
    assert errors[2] < 0.5 * errors[1] < 0.25 * errors[0]


def test_prefix_to_features_is_differentiable() -> None:
    torch.manual_seed(0)
    k, v = (torch.randn(2, 5, 3, dtype=torch.float64, requires_grad=True) for _ in range(2))
    assert torch.autograd.gradcheck(lambda k, v: prefix_to_features(k, v, "favor", features=6, chunk=2), (k, v))


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: feature_map("elo"), "Did you mean 'elu'"),
        (lambda: Taylor(-1), "order -1"),
        (lambda: feature_map("elu").check(10, 8), "multiple of head_dim = 8"),
        (lambda: Taylor(2).check(8, 8), "are 45, not 8"),
        (lambda: Favor().check(0, 8), "1 or more"),
        (lambda: prefix_to_features([], []), "empty"),
        (lambda: prefix_to_features(torch.ones(1, 3, 4) * torch.nan, torch.ones(1, 3, 4)), "NaN"),
        (lambda: prefix_to_features(torch.ones(1, 3, 4) * 100, torch.ones(1, 3, 4), "favor"), "Give the map a centre"),
        (lambda: prefix_to_features(torch.ones(2, 3, 4), torch.ones(2, 2, 4)), r"\[2, 2, 4\]"),
        (lambda: prefix_to_features([torch.ones(2, 3, 4)] * 2, [torch.ones(2, 3, 4)]), "different numbers of pieces"),
        (lambda: prefix_to_features(torch.ones(2, 3, 4), torch.ones(2, 3, 4), heads=3), "3 query heads"),
    ],
)
def test_what_makes_no_sense_is_refused(make: object, says: str) -> None:
    with pytest.raises(InlayError, match=says):
        make()  # type: ignore[operator]
