"""Matching a prompt with few keys, against definitions in float64 and solvers of scipy."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import nnls
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from inlay.methods.compact_prefix.choice import PURSUED, ROUNDS, STEPS, by_pursuit, non_negative, on_device, weights_of
from inlay.methods.compact_prefix.matching import LEAST_WEIGHT, Candidates, HeadQueries, match, shared_out


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
    whole = output(made, made["key"], made["value"], torch.zeros(len(made["key"]), dtype=torch.float64))
    log_whole = torch.logaddexp(made["log_text"], made["scores"].logsumexp(-1))
    return HeadQueries(made["log_text"], made["of_text"], made["scores"], log_whole, whole)


def matched(made: dict[str, Tensor], count: int, choice: str) -> tuple[Tensor, Tensor, Tensor]:
    """One head alone."""
    return match([Candidates.of(seen(made), made["key"], made["value"], None, 512)], [count], choice)[0]


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
    found = non_negative(torch.tensor(a.T @ a)[None], torch.tensor(a.T @ b)[None])[0].numpy()
    assert (found >= 0).all()
    best = nnls(a, b)[1]
    assert np.linalg.norm(a @ found - b) <= best + 2e-3 * np.linalg.norm(b)


def test_weights_match_the_prompts_share() -> None:
    """The second step, with the solver of scipy on the same columns."""
    made = example(200, 40, 8, 0)
    key, _, bias = matched(made, 10, "attention")
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
    key, value, bias = matched(made, 12, "attention")
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
    key, value, bias = matched(made, 9, choice)
    assert torch.equal(key, made["key"])
    torch.testing.assert_close(output(made, key, value, bias), whole, atol=1e-4, rtol=0)


def test_a_pursuit_leaves_out_what_another_key_says_already() -> None:
    """Twenty copies of the heaviest key: attention keeps those, a pursuit takes one and goes on."""
    made = example(400, 30, 8, 3)
    heaviest = int(made["scores"].exp().mean(0).argmax())
    keys = torch.cat([made["key"], made["key"][heaviest].expand(19, -1)])
    values = torch.cat([made["value"], made["value"][heaviest].expand(19, -1)])
    made |= {"key": keys, "value": values, "scores": made["query"] @ keys.mT / 8**0.5}
    weights = seen(made).weights
    keys = [matched(made, 6, choice)[0] for choice in ("attention", "pursuit")]
    chosen = [torch.stack([(made["key"] == row).all(-1).nonzero()[-1, 0] for row in kept]) for kept in keys]

    def left(kept: Tensor) -> float:
        return float(nnls(weights[:, kept].numpy(), weights.sum(-1).numpy())[1])

    assert left(chosen[1]) < 0.7 * left(chosen[0])
    assert len(set(chosen[1].tolist())) == 6


@pytest.mark.parametrize("choice", ["attention", "pursuit"])
def test_heads_of_a_layer_do_not_touch_each_other(choice: str) -> None:
    """Three heads at once, of 3, 40 and 12 keys: each as if it were alone."""
    made, counts = [example(150, 60, 8, seed) for seed in (4, 5, 6)], [3, 40, 12]
    heads = [Candidates.of(seen(each), each["key"], each["value"], None, 512) for each in made]
    for together, each, count in zip(match(heads, counts, choice), made, counts, strict=True):
        assert together[0].shape == (count, 8)
        for found, alone in zip(together, matched(each, count, choice), strict=True):
            torch.testing.assert_close(found, alone, atol=1e-7, rtol=1e-6)


def test_a_pursuit_against_its_definition() -> None:
    """Orthogonal matching pursuit with scipy's solver, a key at a time."""
    made = example(200, 30, 8, 7)
    weights, share = seen(made).weights, seen(made).weights.sum(-1)
    kept: list[int] = []
    rest = share.numpy()
    for _ in range(8):
        size = weights.square().sum(0).sqrt().numpy()
        gain = weights.numpy().T @ rest / size
        gain[kept] = -np.inf
        kept.append(int(gain.argmax()))
        mass = nnls(weights[:, kept].numpy(), share.numpy())[0]
        rest = share.numpy() - weights[:, kept].numpy() @ mass
    found = by_pursuit((weights.mT @ weights)[None], (weights.mT @ share)[None], [8])[0]
    assert found[:5].tolist() == kept[:5]
    left = [nnls(weights[:, at].numpy(), share.numpy())[1] for at in (kept, found.tolist())]
    assert left[1] <= 1.05 * left[0] + 1e-9


def plain_weights(squares: Tensor, wanted: Tensor, begin: Tensor | None, rounds: int) -> Tensor:
    """One head's weights, each round as it is written: a gradient step, no weight below 0, Nesterov's momentum, which
    begins again where it points uphill."""
    size = squares.diagonal().sqrt()
    scaled, target = squares / size / size[:, None], wanted / size
    step = 1 / max(1.0, float(scaled.abs().sum(-1).max()))
    found = size if begin is None else begin * size
    ahead, pace = found, 1.0
    for _ in range(rounds):
        new = (ahead - step * (scaled @ ahead - target)).clamp(min=0)
        if float((ahead - new) @ (new - found)) > 0:
            pace = 1.0
        after = (1 + math.sqrt(1 + 4 * pace**2)) / 2
        ahead = new + (pace - 1) / after * (new - found)
        found, pace = new, after
    return found / size


def plain_pursuit(squares: Tensor, wanted: Tensor, count: int) -> list[int]:
    """One head's keys: in each of at most `STEPS` steps as many more, those that correlate most with what is left."""
    kept: list[int] = []
    mass = wanted.new_zeros(0)
    while len(kept) < count:
        rest = wanted - squares[:, kept] @ mass
        gain = rest / squares.diagonal().sqrt()
        gain[kept] = -math.inf
        more = min(math.ceil(count / STEPS), count - len(kept))
        kept += gain.sort(descending=True).indices[:more].tolist()
        begin = torch.nn.functional.pad(mass, (0, more))
        mass = plain_weights(squares[kept][:, kept], wanted[kept], begin, PURSUED)
    return kept


def problems(counts: Sequence[int], keys: int, seed: int) -> tuple[Tensor, Tensor]:
    """For as many heads: `P^T P` and `P^T b`."""
    weights = [seen(example(200, keys, 8, seed + number)).weights for number in range(len(counts))]
    return (
        torch.stack([each.mT @ each for each in weights]),
        torch.stack([each.mT @ each.sum(-1) for each in weights]),
    )


@pytest.mark.parametrize("counts", [[9], [3, 40, 12], [33, 32, 64], [70, 1]])
def test_heads_together_against_each_alone_and_plainly(counts: list[int]) -> None:
    """The same keys, and the same weights up to rounding."""
    squares, wanted = problems(counts, 80, 20)
    kept = by_pursuit(squares, wanted, counts)
    assert [row.tolist() for row in kept] == [
        plain_pursuit(*each) for each in zip(squares, wanted, counts, strict=True)
    ]
    at = torch.nn.utils.rnn.pad_sequence(kept, batch_first=True)
    found = weights_of(squares, wanted, at, on_device(counts, at.device))
    for head, (row, count) in enumerate(zip(kept, counts, strict=True)):
        right = plain_weights(squares[head][row][:, row], wanted[head][row], None, ROUNDS)
        torch.testing.assert_close(found[head, :count], right, rtol=1e-9, atol=1e-11)
        assert not found[head, count:].any()


class Asked(TorchDispatchMode):
    """Which operations ran."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def test_matching_never_waits_for_the_device() -> None:
    """No value is read, no number is sent, and no shape depends on values; a round is ten products, sums and
    comparisons and one view of all heads together."""
    counts = [40, 3, 12]
    made = [example(150, 60, 8, seed) for seed in (4, 5, 6)]
    match([Candidates.of(seen(made[0]), made[0]["key"], made[0]["value"], None, 512)], [3], "pursuit")  # fills caches
    heads = [Candidates.of(seen(each), each["key"], each["value"], None, 512) for each in made]
    with Asked() as asked:
        match(heads, counts, "pursuit")
    waits = {"_local_scalar_dense", "nonzero", "lift_fresh", "is_nonzero", "masked_select", "equal", "unique"}
    assert not waits & asked.counts.keys(), asked.counts
    squares, wanted = problems(counts, 20, 0)
    ran = []
    for rounds in (10, 30, 10, 30):  # the first two fill caches
        with Asked() as asked:
            non_negative(squares, wanted, rounds=rounds)
        ran.append(sum(asked.counts.values()))
    assert ran[3] - ran[2] == 20 * 11


def test_weights_begin_where_they_are_told_and_end_at_the_same() -> None:
    made = example(200, 20, 8, 8)
    weights = seen(made).weights
    squares, wanted = (weights.mT @ weights)[None], (weights.mT @ weights.sum(-1))[None]
    at, begin = torch.arange(6)[None], torch.tensor([[5.0, 0, 0, 0, 0, 2.0]], dtype=torch.float64)
    cold, warm = (weights_of(squares, wanted, at, torch.tensor([5]), start) for start in (None, begin))
    right = nnls(weights[:, :5].numpy(), weights.sum(-1).numpy())[0]
    for found in (cold, warm):
        assert float(found[0, 5]) == 0
        np.testing.assert_allclose(found[0, :5].numpy(), right, atol=2e-2 * right.max())


def test_a_token_that_only_stands_before_the_text_without_the_prompt() -> None:
    """Its key takes a part of the softmax: the compact prefix takes what is left of the prompt's, and gives T."""
    made = example(400, 40, 8, 9)
    plain = seen(made)
    generator = torch.Generator().manual_seed(1)
    lead = torch.randn(400, generator=generator, dtype=torch.float64)  # scores of the lead's key
    value = torch.randn(8, generator=generator, dtype=torch.float64)
    with_lead = torch.logaddexp(made["log_text"], lead)
    of_text = (made["log_text"] - with_lead).exp()[:, None] * made["of_text"] + (lead - with_lead).exp()[
        :, None
    ] * value
    view = HeadQueries(with_lead, of_text, made["scores"], plain.log_whole, plain.whole, leads=True)
    key, values, bias = match([Candidates.of(view, made["key"], made["value"], None, 512)], [20], "pursuit")[0]
    scores = made["scores"][:, [int((made["key"] == row).all(-1).nonzero()[0, 0]) for row in key]] + bias
    mass = (scores - plain.log_whole[:, None]).exp().sum(-1)
    wanted = (1 - (with_lead - plain.log_whole).exp()).clamp(min=0)
    assert (mass - wanted).norm() < 0.15 * wanted.norm()
    student = made | {"log_text": with_lead, "of_text": of_text}
    blind = matched(made, 20, "pursuit")  # the same, without knowing of it
    off = [(output(student, *found) - plain.whole).norm() for found in ((key, values, bias), blind)]
    assert off[0] < off[1]
    compact = (scores - torch.logaddexp(with_lead, scores.logsumexp(-1))[:, None]).exp()
    missing = plain.whole - (1 - compact.sum(-1, keepdim=True)) * of_text
    best = torch.linalg.lstsq(compact, missing).solution
    assert off[0] <= 1.05 * (compact @ best - missing).norm()


def test_keys_with_biases_of_their_own_count_so_often() -> None:
    """A key that stands for three is three keys."""
    made = example(100, 9, 4, 10)
    bias = torch.zeros(9, dtype=torch.float64)
    bias[4] = np.log(3)
    once = made | {"scores": made["scores"] + bias}
    thrice = {name: made[name] for name in ("query", "log_text", "of_text")}
    for name in ("key", "value"):
        thrice[name] = torch.cat([made[name], made[name][4:5], made[name][4:5]])
    thrice["scores"] = torch.cat([made["scores"], made["scores"][:, 4:5], made["scores"][:, 4:5]], 1)
    whole = output(thrice, thrice["key"], thrice["value"], torch.zeros(11, dtype=torch.float64))
    view = seen(once)
    view = HeadQueries(view.log_text, view.of_text, view.scores, view.log_whole, whole)
    found = match([Candidates.of(view, made["key"], made["value"], bias, 512)], [9], "pursuit")[0]
    torch.testing.assert_close(output(made, *found), whole, atol=1e-4, rtol=0)


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
