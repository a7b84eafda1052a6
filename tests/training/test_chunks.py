"""A prompt read in chunks, against the same prompt read at once."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import zoo
from inlay.attention import LEAST_BIAS
from inlay.methods import attach
from inlay.training import distil
from inlay.training.batches import Placement
from inlay.training.chunks import chunks_of, read_in_chunks

PLACE = Placement(torch.device("cpu"), None, 8)
LENGTH, TOKENS = 12, 60


def drawn(count: int, length: int, seed: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    found: list[list[int]] = torch.randint(5, zoo.VOCABULARY, (count, length), generator=generator).tolist()
    return found


def adapted(context: int, size: int, **more: Any) -> Any:
    model = zoo.tiny("llama", "causal-lm")[0].double().eval()
    model.config.max_position_embeddings = context
    settings: dict[str, Any] = {"start": "text", "seed": 0, "prompt_length": TOKENS, "size": size} | more
    return attach.attach(model, "compact-prefix", newly_initialised=[], task_kind="causal-lm", settings=settings).eval()


@pytest.mark.parametrize("lead", [[], [zoo.BOS]], ids=["plain", "token of beginning"])
@pytest.mark.parametrize("most", [30, 17])
def test_chunks_of_which_all_is_kept_are_the_prompt(lead: list[int], most: int) -> None:
    """The next chunk begins with no token of beginning, whatever a text begins with."""
    model = adapted(context=4096, size=64)
    ids = [*lead, *drawn(1, TOKENS - len(lead), 0)[0]]
    texts = drawn(40, LENGTH, 1)
    pair = read_in_chunks(model, chunks_of(ids, most), PLACE, lead, LENGTH, lambda pair: texts)
    assert pair.prompt.ids == tuple(ids), "texts are made of its words: of all of them"
    whole = distil.Pair(model, ids, PLACE, lead)
    some = torch.tensor(texts[:8])
    torch.testing.assert_close(pair.prompted(some), whole.prompted(some), atol=1e-6, rtol=1e-6)


def test_keys_beyond_the_context_stay_at_its_end_and_the_others_in_their_places() -> None:
    """In the first layer, where a key is its token's, turned: every key stands before the chunk that is read."""
    model = adapted(context=40, size=64)
    base = model.get_base_model()
    ids = drawn(1, TOKENS, 0)[0]
    texts = drawn(20, LENGTH, 1)
    prompt = read_in_chunks(model, chunks_of(ids, 14), PLACE, [], LENGTH, lambda pair: texts).prompt
    assert prompt.earlier is not None
    with torch.no_grad(), model.disable_adapter():
        places = torch.tensor([[max(LENGTH - 40, number - TOKENS) for number in range(TOKENS)]])
        cache = base.model(input_ids=torch.tensor([ids]), position_ids=places, use_cache=True).past_key_values
    found, wanted = prompt.keys_and_values(1)[0], cache.layers[0].keys[0]
    nearest, which = torch.cdist(found.detach(), wanted, compute_mode="donot_use_mm_for_euclid_dist").min(-1)
    assert float(nearest.max()) < 1e-5
    assert torch.equal(places[0][which], prompt.positions(1))
    assert int(prompt.positions(1)[:, :-12].max()) == -13


@pytest.mark.parametrize("biases", [True, False])
def test_what_fills_up_a_shorter_head_is_never_kept(biases: bool) -> None:
    model = adapted(context=4096, size=16, biases=biases)
    texts = drawn(40, LENGTH, 1)
    pair = read_in_chunks(model, chunks_of(drawn(1, 100, 0)[0], 25), PLACE, [], LENGTH, lambda pair: texts)
    filled = [pair.prompt.biases(block) for block in (1, 2, 3)]
    assert any(bool((each < LEAST_BIAS / 2).any()) for each in filled if each is not None), "heads of one length"
    distil.fit(pair, texts)
    for _, prefix in model.base_model._prefixes("default").values():
        if biases:
            assert float(prefix.biases.weight.detach().min()) > LEAST_BIAS / 2
        keys = [tuple(key.tolist()) for key in prefix.keys.weight.detach()]
        assert len(set(keys)) == len(keys), "what fills up is a copy"


def test_texts_of_kinds_that_come_in_turn_are_all_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of three times as many texts as fit, not every third."""
    model = adapted(context=4096, size=4)
    pair = distil.Pair(model, drawn(1, TOKENS, 0)[0], PLACE)
    texts = [[number % 3 + 5] * LENGTH for number in range(3 * 96)]
    seen: list[int] = []

    def look(passes: Any, prompt: Any, tick: Any) -> None:
        monkeypatch.setattr(pair, "prompted", lambda ids, last_only: seen.extend(ids[:, 0].tolist()))
        for _, run in passes():
            run()

    monkeypatch.setattr(model.base_model, "fit_passes", look)
    distil.fit(pair, texts)
    assert len(seen) == 96
    assert min(seen.count(kind) for kind in (5, 6, 7)) > 20
