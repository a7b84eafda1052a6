"""Matching a prompt with few keys, against definitions in float64 and solvers of scipy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import nnls
from torch import Tensor

from inlay.methods.compact_prefix.matching import (
    LEAST_WEIGHT,
    HeadQueries,
    by_attention,
    by_pursuit,
    match,
    non_negative,
    shared_out,
)


def example(queries: int, keys: int, size: int, seed: int, spread: float = 2.0) -> dict[str, Tensor]:
    """Queries, a text and a prompt of clustered keys, float64."""
    generator = torch.Generator().manual_seed(seed)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    centres = spread * drawn(max(1, keys // 5), size)
    key = centres[torch.randint(len(centres), (keys,), generator=generator)] + 0.3 * drawn(keys, size)
    query, text_key, text_value = drawn(queries, size), drawn(6, size), drawn(6, size)
    text = query @ text_key.mT / size**0.5
    return {
        "query": query,
        "key": key,
        "value": drawn(keys, size),
        "log_text": text.logsumexp(-1),
        "of_text": text.softmax(-1) @ text_value,
        "scores": query @ key.mT / size**0.5,
    }


def seen(made: dict[str, Tensor]) -> HeadQueries:
    return HeadQueries(made["query"], made["log_text"], made["of_text"], made["scores"])


def output(made: dict[str, Tensor], key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
    """Attention to the text and to these keys, by its definition."""
    scores = made["query"] @ key.mT / made["query"].shape[1] ** 0.5 + bias
    of_text = made["log_text"].exp()[:, None]
    return (of_text * made["of_text"] + scores.exp() @ value) / (of_text + scores.exp().sum(-1, keepdim=True))


@settings(max_examples=25, deadline=None, derandomize=True)
@given(rows=st.integers(3, 60), columns=st.integers(1, 20), seed=st.integers(0, 999))
def test_squares_with_weights_of_at_least_0(rows: int, columns: int, seed: int) -> None:
    """As good as scipy's active sets, up to what 600 rounds leave."""
    chance = np.random.default_rng(seed)
    a, b = chance.random((rows, columns)) ** 3, chance.random(rows)
    found = non_negative(torch.tensor(a.T @ a), torch.tensor(a.T @ b)).numpy()
    assert (found >= 0).all()
    best = nnls(a, b)[1]
    assert np.linalg.norm(a @ found - b) <= best + 2e-3 * np.linalg.norm(b)


def test_weights_match_the_prompts_share() -> None:
    """The second step, with the solver of scipy on the same columns."""
    made = example(200, 40, 8, 0)
    whole = output(made, made["key"], made["value"], torch.zeros(40, dtype=torch.float64))
    key, _, bias = match(seen(made), made["key"], made["value"], whole, 10, "attention")
    weights = (made["scores"] - torch.logaddexp(made["log_text"], made["scores"].logsumexp(-1))[:, None]).exp()
    kept = weights.square().mean(0).sort(descending=True).indices[:10].sort().values
    assert torch.equal(key, made["key"][kept])
    right, residual = nnls(weights[:, kept].numpy(), weights.sum(-1).numpy())
    found = weights[:, kept].numpy() @ bias.exp().numpy() - weights.sum(-1).numpy()
    assert np.linalg.norm(found) <= residual + 1e-3 * np.linalg.norm(weights.sum(-1).numpy())
    assert bias.exp().numpy() == pytest.approx(right, abs=0.05 * right.max() + LEAST_WEIGHT)


def test_values_give_the_output_of_the_prompt() -> None:
    """The third step: no other values do better by more than the pull towards the own ones costs."""
    made = example(300, 40, 8, 1)
    whole = output(made, made["key"], made["value"], torch.zeros(40, dtype=torch.float64))
    key, value, bias = match(seen(made), made["key"], made["value"], whole, 12, "attention")
    off = (output(made, key, value, bias) - whole).norm() / whole.norm()
    scores = made["query"] @ key.mT / 8**0.5 + bias
    weights = (scores - torch.logaddexp(made["log_text"], scores.logsumexp(-1))[:, None]).exp()
    of_text = (1 - weights.sum(-1, keepdim=True)) * made["of_text"]
    best = torch.linalg.lstsq(weights, whole - of_text).solution
    least = (weights @ best + of_text - whole).norm() / whole.norm()
    assert least <= off <= 1.02 * least + 1e-3
    kept = torch.stack([(made["key"] == row).all(-1).nonzero()[0, 0] for row in key])
    truncated = output(made, key, made["value"][kept], torch.zeros_like(bias))
    assert off < 2 / 3 * (truncated - whole).norm() / whole.norm()


@pytest.mark.parametrize("choice", ["attention", "pursuit"])
def test_all_keys_are_the_prompt_itself(choice: str) -> None:
    made = example(100, 9, 4, 2)
    whole = output(made, made["key"], made["value"], torch.zeros(9, dtype=torch.float64))
    key, value, bias = match(seen(made), made["key"], made["value"], whole, 9, choice)
    assert torch.equal(key, made["key"])
    torch.testing.assert_close(output(made, key, value, bias), whole, atol=1e-4, rtol=0)


def test_a_pursuit_leaves_out_what_another_key_says_already() -> None:
    """Twenty copies of the heaviest key: attention keeps those, a pursuit takes one and goes on."""
    made = example(400, 30, 8, 3)
    heaviest = int(made["scores"].exp().mean(0).argmax())
    keys = torch.cat([made["key"], made["key"][heaviest].expand(19, -1)])
    made |= {"key": keys, "scores": made["query"] @ keys.mT / 8**0.5}
    weights = seen(made).weights
    chosen = [choose(weights, *more) for choose, more in ((by_attention, (6,)), (by_pursuit, (weights.sum(-1), 6)))]

    def left(kept: Tensor) -> float:
        return float(nnls(weights[:, kept].numpy(), weights.sum(-1).numpy())[1])

    assert left(chosen[1]) < 0.7 * left(chosen[0])
    assert all(len(kept) == 6 and kept.tolist() == sorted(set(kept.tolist())) for kept in chosen)


def test_heads_that_need_more_get_more() -> None:
    flat, steep = torch.full((40,), 0.5), torch.logspace(0, -8, 40)
    found = shared_out({"a": torch.stack([flat, steep]), "b": torch.stack([steep, steep])}, 8)
    sizes = [size for name in ("a", "b") for size in found[name]]
    assert sum(sizes) == 4 * 8
    assert sizes[0] == max(sizes)
    assert min(sizes) >= 4
    assert max(sizes) <= 32
    few = shared_out({"a": torch.rand(2, 3), "b": torch.rand(1, 50)}, 10)  # a window that holds 3 keys
    assert few["a"] == [3, 3]
    assert few["b"] == [10]
