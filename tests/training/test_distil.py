"""Distillation of a prompt: teacher and student against the plain way, the loss, the optimiser, and that it learns."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from peft import get_peft_model
from torch import Tensor, nn

import inlay
from inlay.methods.attach import trained_parameters
from inlay.training.batches import Placement
from inlay.training.distil import Batch, Pair, Relative, batches, can_fit, distil, divergence, fit, scores
from zoo import tiny

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
PROMPT = [5, 17, 9, 30, 41, 8, 23, 12, 6, 19, 33]
HERE = Placement(torch.device("cpu"), None, 2)


def louder(model: nn.Module) -> nn.Module:
    """Random models hardly listen to what stands before: larger values make the prompt matter."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if any(part in name for part in ("v_proj", "o_proj", "q_proj", "k_proj")):
                parameter.mul_(8)
    return model


def make_pair(family: str = "llama", lead: tuple[int, ...] = (), **options: Any) -> Pair:
    model = louder(tiny(family, "causal-lm")[0]).double()
    settings = {"feature_map": "elu", "feature_multiplier": 2, "rank": 4, **options}
    config = inlay.NTKAttentionConfig(start="text", prompt_ids=PROMPT, seed=0, task_type="CAUSAL_LM", **settings)
    return Pair(get_peft_model(model, config).eval(), [*lead, *PROMPT], HERE, lead)


@torch.no_grad()
def plain(pair: Pair, ids: Tensor, before: list[int], adapter: bool) -> Tensor:
    whole = torch.cat([torch.tensor(before, dtype=torch.long).expand(len(ids), -1), ids], 1)
    if adapter:
        return pair.model(input_ids=whole).logits
    with pair.model.disable_adapter():
        return pair.model(input_ids=whole).logits


@pytest.mark.parametrize("lead", [(), (0,)])
@pytest.mark.parametrize("family", ["llama", "gpt2", "opt", "gemma"])
def test_both_are_what_the_model_computes_with_and_without_the_prompt(family: str, lead: tuple[int, ...]) -> None:
    pair = make_pair(family, lead, rank=2)
    ids = torch.tensor([[7, 21, 14, 40], [11, 11, 3, 28]])
    first = max(len(lead) - 1, 0)
    wanted = plain(pair, ids, [*lead, *PROMPT], adapter=False)[:, len(PROMPT) + first :]
    torch.testing.assert_close(pair.prompted(ids), wanted, atol=1e-5, rtol=1e-5)
    assert torch.equal(pair.bare(ids), plain(pair, ids, list(lead), adapter=True)[:, first:])
    assert torch.equal(pair.bare(ids, adapter=False), plain(pair, ids, list(lead), adapter=False)[:, first:])
    # Twice the same: the prompt's cache is not grown by the texts.
    assert torch.equal(pair.prompted(ids), pair.prompted(ids))


@pytest.mark.parametrize("lead", [(), (0,)])
def test_scores_are_those_of_one_text_at_a_time(lead: tuple[int, ...]) -> None:
    pair = make_pair(lead=lead)
    texts = [[7, 21, 14, 40], [11, 3], [9, 9, 30]]
    nll, kl, tokens, places = 0.0, 0.0, 0, 0
    for text in texts:
        ids = torch.tensor([text])
        student = pair.bare(ids)[0].log_softmax(-1)
        teacher = plain(pair, ids, [*lead, *PROMPT], adapter=False)[0, -len(text) - bool(lead) :].log_softmax(-1)
        targets = text if lead else text[1:]
        nll -= sum(float(student[at, token]) for at, token in enumerate(targets))
        tokens += len(targets)
        kl += float((teacher.exp() * (teacher - student)).sum())
        places += len(teacher)
    found = scores(pair, texts, pair.bare)
    assert found.nll == pytest.approx(nll / tokens, rel=1e-5)
    assert found.divergence == pytest.approx(kl / places, rel=1e-4)
    assert found.tokens == tokens
    assert found.perplexity == pytest.approx(math.exp(found.nll))
    assert scores(pair, texts, pair.prompted).divergence == pytest.approx(0, abs=1e-9)


def test_divergence_is_torchs() -> None:
    torch.manual_seed(0)
    teacher, student = torch.randn(2, 3, 5), torch.randn(2, 3, 5)
    kept = torch.tensor([[True, True, False], [True, False, False]])
    wanted = nn.functional.kl_div(
        student[kept].log_softmax(-1), teacher[kept].log_softmax(-1), log_target=True, reduction="batchmean"
    )
    torch.testing.assert_close(divergence(teacher, student, kept), wanted)


def test_batches_pad_on_the_right() -> None:
    first, second = batches([[5, 6, 7], [8], [9, 4]], HERE)
    assert isinstance(first, Batch)
    assert first.real.tolist() == [[True, True, True], [True, False, False]]
    assert first.ids[0].tolist() == [5, 6, 7]
    assert second.ids.tolist() == [[9, 4]]


def test_samples_follow_from_the_seed_and_the_prompt() -> None:
    pair = make_pair()
    one, same, other = (pair.sample(40, 3, seed) for seed in (0, 0, 1))
    assert one == same != other
    assert {len(text) for text in one} == {3}
    assert len(one) == 40
    # First tokens come as often as the prompted model says.
    many = torch.tensor(pair.sample(2000, 1, 5)).flatten()
    assert pair.prompt.logits is not None
    wanted = pair.prompt.logits[0].softmax(-1)
    often = torch.bincount(many, minlength=len(wanted)) / len(many)
    assert float((often - wanted).abs().max()) < 5 * math.sqrt(float(wanted.max()) / 2000)


@pytest.mark.parametrize("lead", [(), (0,)])
def test_rows_that_share_the_prompt_are_as_those_that_each_have_it(lead: tuple[int, ...]) -> None:
    shared, copied = make_pair(lead=lead), make_pair(lead=lead)
    assert shared.shared
    copied.shared = False
    ids = torch.tensor([[7, 21, 14, 40], [11, 11, 3, 28]])
    torch.testing.assert_close(shared.prompted(ids), copied.prompted(ids), atol=1e-10, rtol=1e-10)
    assert shared.sample(2, 6, 0) == copied.sample(2, 6, 0)
    assert torch.equal(shared.go_on(ids, 5, prompted=True), copied.go_on(ids, 5, prompted=True))
    texts = ids.tolist()
    for pair in (shared, copied):
        fit(pair, texts)
    other = trained_parameters(copied.model)
    for name, weight in trained_parameters(shared.model).items():
        torch.testing.assert_close(weight, other[name], atol=1e-8, rtol=1e-8)


@pytest.mark.parametrize("family", ["llama", "gpt2", "opt", "gemma"])
def test_the_last_logits_alone_are_the_last_of_all(family: str) -> None:
    pair = make_pair(family, (0,), rank=2)
    ids = torch.tensor([[7, 21, 14, 40], [11, 11, 3, 28]])
    found = pair.prompted(ids, last_only=True)
    assert found.shape == (2, 1, 48)
    torch.testing.assert_close(found, pair.prompted(ids)[:, -1:], atol=1e-10, rtol=1e-10)


def test_a_prompt_that_is_shared_is_in_no_cache() -> None:
    for family, length in (("llama", 0), ("gemma", len(PROMPT))):
        pair = make_pair(family, rank=2)
        with pair._prompting(3) as cache:
            assert cache.get_seq_length() == length


@pytest.mark.parametrize("family", ["llama", "opt", "gemma"])
def test_what_is_written_begins_as_given_and_goes_on_as_the_prompted_model_does(family: str) -> None:
    pair = make_pair(family, rank=2)
    with torch.no_grad():  # next to certain of what comes next: a draw is then the likeliest token
        head = pair.model.get_base_model().lm_head
        head.weight.mul_(1e5)
    starts = [[7, 21, 14], [11], [9, 4, 4, 4, 30, 3], [5, 5]]
    told: list[int] = []
    found = pair.write(starts, 6, 0, told.append)
    assert sum(told) == 4 * 6
    for start, text in zip(starts, found, strict=True):
        more = pair.go_on(torch.tensor([start]), 6 - len(start), prompted=True)[0].tolist()
        assert text == start + more
    assert pair.write([[7, 21, 14, 8]], 3, 0) == [[7, 21, 14]]
    assert pair.write([], 3, 0) == []
    assert pair.write(starts, 6, 5) == pair.write(starts, 6, 5)


def test_a_step_is_relative_to_the_size_of_each_head() -> None:
    weight = nn.Parameter(torch.tensor([[100.0, 100.0], [0.01, -0.01], [0.0, 0.0]]))
    optimiser = Relative([weight], lr=0.1)
    for _ in range(3):  # of a gradient that stays the same, Adam's step is the rate
        before = weight.detach().clone()
        weight.grad = torch.tensor([[1.0, -2.0], [1e-4, 5.0], [1.0, 0.0]])
        optimiser.step()
        moved = weight.detach() - before
        torch.testing.assert_close(moved, torch.tensor([[-10.0, 10.0], [-1e-3, -1e-3], [-0.1, 0.0]]))


@pytest.mark.parametrize("kind", ["elu", "taylor"])
def test_it_learns_and_the_model_stays(kind: str) -> None:
    pair = make_pair(feature_map=kind, feature_multiplier=1, rank=2)
    with torch.no_grad():  # somewhere wrong: the closed form is good where scores are small, as in random models
        for name, weight in trained_parameters(pair.model).items():
            weight.mul_(-1 if ".z_b." in name else 1)
    texts = pair.sample(24, 6, 0)
    train, held = texts[:16], texts[16:]
    start = scores(pair, held, pair.bare).divergence
    frozen = {name: value.clone() for name, value in pair.model.state_dict().items() if "inlay_ntk" not in name}
    losses = distil(pair, train, steps=60, learning_rate=5e-2)
    assert len(losses) == 60
    assert scores(pair, held, pair.bare).divergence < start / 2
    assert all(torch.equal(value, pair.model.state_dict()[name]) for name, value in frozen.items())
    assert can_fit(pair) is (kind == "elu")
    assert {name.split(".")[-2] for name in trained_parameters(pair.model)} == (
        {"z_a", "z_b", "kappa"} if kind == "elu" else {"z_a", "z_b"}
    )


def test_it_ends_where_it_was_best_for_texts_to_check() -> None:
    pair = make_pair()
    texts = pair.sample(12, 6, 0)
    before = {name: weight.detach().clone() for name, weight in trained_parameters(pair.model).items()}
    start = scores(pair, texts[8:], pair.bare).divergence
    distil(pair, texts[:8], steps=3, learning_rate=30.0, check=texts[8:])  # nothing good can come of that rate
    assert scores(pair, texts[8:], pair.bare).divergence == start
    assert all(torch.equal(weight, before[name]) for name, weight in trained_parameters(pair.model).items())
    distil(pair, texts[:8], steps=3, learning_rate=30.0)
    assert scores(pair, texts[8:], pair.bare).divergence > start


def test_the_fit_beats_the_closed_form_where_features_are_few() -> None:
    pair = make_pair(feature_multiplier=1)
    texts = pair.sample(96, 6, 0)
    closed = scores(pair, texts[64:], pair.bare).divergence
    nothing = scores(pair, texts[64:], lambda ids: pair.bare(ids, adapter=False)).divergence
    fit(pair, texts[:64])
    fitted = scores(pair, texts[64:], pair.bare).divergence
    assert fitted < closed
    assert fitted < nothing / 2


def test_gradients_are_clipped(monkeypatch: pytest.MonkeyPatch) -> None:
    """To a norm of next to nothing: then nothing moves."""
    monkeypatch.setattr("inlay.training.distil.CLIP", 1e-30)
    pair = make_pair()
    before = {name: weight.detach().clone() for name, weight in trained_parameters(pair.model).items()}
    distil(pair, [[7, 21, 14, 40], [11, 3]], steps=2, learning_rate=1e-2)
    for name, weight in trained_parameters(pair.model).items():
        torch.testing.assert_close(weight, before[name], rtol=1e-12, atol=1e-12)


def test_it_comes_to_the_same_twice() -> None:
    found = []
    for _ in range(2):
        pair = make_pair()
        found.append(distil(pair, pair.sample(6, 4, 0), steps=3, learning_rate=1e-2, seed=3))
    assert found[0] == found[1]
