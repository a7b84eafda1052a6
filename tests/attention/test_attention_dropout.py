"""Dropout on a CPU: by chunks of queries, against the definition in float64 with the same weights dropped."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from cuda_cases import DEVICE, Case, close, definition
from dropout_checks import (
    CALLS,
    DROPPING,
    check_dropout,
    check_dropout_compiled,
    check_dropout_follows_the_seed,
    check_the_share_that_is_dropped,
    dropped,
    run,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from peak_memory import peak_memory
from torch._subclasses.fake_tensor import FakeTensorMode

from inlay.attention import chunked, ntk_attention
from inlay.errors import InlayError

pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="on a GPU test_cuda.py runs these checks")
SMALL = {"batch": 2, "kv_heads": 2, "size": 8, "rank": 4}


@pytest.mark.parametrize("entries", [chunked.ENTRIES, 600, 300])  # everything, some heads, some queries at a time
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("case", DROPPING, ids=str)
def test_values_and_gradients(case: Case, call: str, entries: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunked, "ENTRIES", entries)
    length = 13 if case.dtype == torch.float32 else 40  # of few rows in half precision kappa's gradient is rounding
    keys = None if case.keys is None else length + 4
    check_dropout(replace(case, length=length, keys=keys, **SMALL), call, "cpu")


@settings(max_examples=60, deadline=None)
@given(
    length=st.integers(2, 9),
    keys=st.integers(1, 9),
    groups=st.sampled_from([1, 3]),
    causal=st.booleans(),
    mask=st.sampled_from(["none", "padding", "rows", "left", "bias"]),
    call=st.sampled_from(CALLS),
)
def test_any_shape(length: int, keys: int, groups: int, causal: bool, mask: str, call: str) -> None:
    """In float64, to its last digits; nothing may be dropped of so few weights, so that only values are compared."""
    case = Case(torch.float64, 1, 2, groups, length, keys, 8, mask, causal, rank=None)
    true = case.tensors() if call != "prefix" else case.tensors() | _prefix()
    state = case.state() if call == "ntk" else {}
    found = run(call, true, state, case, "cpu")
    factors = dropped(call, true, state, case, "cpu")
    right = definition(true, case, 0.15, state or None, factors)
    close("value", found[0], right[0], 1e-12)


def _prefix() -> dict[str, torch.Tensor]:
    torch.manual_seed(4)
    return {name: torch.randn(1, 2, 5, 8, dtype=torch.float64) for name in ("prefix_key", "prefix_value")}


def test_gradients_by_differences(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunked, "ENTRIES", 40)
    torch.manual_seed(0)
    tensors = [torch.randn(1, 2, 5, 4, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    left = torch.randn(2, 4, 4, dtype=torch.float64, requires_grad=True)
    kappa = torch.rand(2, 4, dtype=torch.float64, requires_grad=True)

    def attend(*given: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(3)
        return ntk_attention(*given[:3], given[3], given[4], is_causal=True, dropout_p=0.4, backend="cpu")

    assert torch.autograd.gradcheck(attend, [*tensors, left, kappa])


@pytest.mark.parametrize("entries", [chunked.ENTRIES, 3 * 64**2, 64**2, 16 * 64])
@pytest.mark.parametrize("call", CALLS)
def test_every_chunk_drops_its_own_share(call: str, entries: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One chunk of everything, of three heads, of one, of 16 queries."""
    monkeypatch.setattr(chunked, "ENTRIES", entries)
    check_the_share_that_is_dropped(call, "cpu")


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("entries", [2**21, 2**14, 3 * 2**10, 5000, 300, 1])
def test_chunks_cover_every_query_of_every_head_once(
    entries: int, causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None has more scores than it may, beside those of one query; and they are as few as that allows, almost."""
    monkeypatch.setattr(chunked, "ENTRIES", entries)
    query, key = torch.empty(6, 5, 200, 1), torch.empty(6, 5, 160, 1)
    covered = torch.zeros(query.shape[:3])
    sizes = []
    for rows, seen in chunked._chunks(query, key, causal):
        covered[rows] += 1
        assert rows[:2] == seen[:2]
        assert seen[2] == slice(0, min(160, rows[2].stop) if causal else 160)
        sizes.append(covered[rows].numel() * 160)
    assert (covered == 1).all()
    assert max(sizes) <= max(entries, 160)
    assert len(sizes) <= 3 * 2 ** (1 + causal) * max(1, 6 * 5 * 200 * 160 / max(entries, 160))


def test_the_seed_decides() -> None:
    check_dropout_follows_the_seed(Case(torch.float32, length=20, **SMALL), "cpu")


@pytest.mark.parametrize("mask", ["none", "padding"])
def test_compiled(mask: str) -> None:
    check_dropout_compiled("aot_eager", mask)


def test_recomputed_layers_drop_the_same() -> None:
    """Gradient checkpointing: torch gives the generator back its state."""
    case = Case(torch.float64, length=20, **SMALL)
    given, state = case.tensors(), case.state()
    value = given["value"].requires_grad_()

    def attend(v: torch.Tensor) -> torch.Tensor:
        z = state["left"], state["right"]
        rest = {"Z": z, "kappa": state["kappa"], "dropout_p": 0.3}
        return ntk_attention(given["query"], given["key"], v, **rest)

    torch.manual_seed(5)
    right = torch.autograd.grad(attend(value).square().sum(), value)[0]
    for reentrant in (False, True):
        torch.manual_seed(5)
        out = torch.utils.checkpoint.checkpoint(attend, value, use_reentrant=reentrant)
        torch.rand(3)
        value.grad = None
        out.square().sum().backward()
        assert torch.equal(value.grad, right)


@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
def test_a_gradient_is_not_differentiated_again_in_silence(dropout_p: float) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 5, 4, requires_grad=True) for _ in range(3))
    Z, kappa = torch.randn(2, 4, 4), torch.rand(2, 4)
    out = ntk_attention(q, k, v, Z, kappa, dropout_p=dropout_p)
    plain = torch.autograd.grad(out.sum(), q, retain_graph=True)[0]
    recorded = torch.autograd.grad(out.sum(), q, create_graph=True)[0]
    assert torch.equal(recorded, plain)
    with pytest.raises(InlayError, match="first derivatives only"):
        recorded.square().sum().backward()
    out = ntk_attention(q, k, v, Z, kappa, dropout_p=dropout_p, backend="plain")
    torch.autograd.grad(out.sum(), q, create_graph=True)[0].square().sum().backward()


def test_transformed_functions_and_fake_tensors() -> None:
    q, k, v = (torch.randn(1, 2, 5, 4) for _ in range(3))
    Z, kappa = torch.randn(2, 4, 4), torch.rand(2, 4)

    def attend(query: torch.Tensor) -> torch.Tensor:
        return ntk_attention(query, k, v, Z, kappa, signed=True, dropout_p=0.3)

    assert torch.func.grad(lambda query: attend(query).sum())(q).shape == q.shape
    assert torch.func.vmap(attend, randomness="different")(torch.stack([q, q])).shape == (2, *q.shape)
    with FakeTensorMode():
        fakes = [torch.empty(1, 2, 5, 4, requires_grad=True) for _ in range(3)]
        out = ntk_attention(*fakes, torch.empty(2, 4, 4), torch.empty(2, 4), signed=True, dropout_p=0.3)
        out.sum().backward()
    assert fakes[0].grad is not None


def test_the_scores_are_never_held_in_full() -> None:
    """8,192 tokens: the scores would be 256 MiB, and several of them."""
    q, k, v = (torch.randn(1, 1, 8192, 8, requires_grad=True) for _ in range(3))
    Z, kappa = torch.randn(1, 8, 8, requires_grad=True), torch.rand(1, 8, requires_grad=True)

    def run() -> None:
        ntk_attention(q, k, v, Z, kappa, is_causal=True, dropout_p=0.1).sum().backward()

    assert peak_memory(run) < 150
