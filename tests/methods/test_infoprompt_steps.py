"""A training step of InfoPrompt: its operations, how often it waits for a device, the cache, how far it moves."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import get_peft_model
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import inlay
from inlay.errors import InlayError
from inlay.methods.attach import trained_parameters
from inlay.methods.infoprompt import layer
from inlay.methods.infoprompt.layer import InfoPromptLayer
from inlay.methods.infoprompt.phi import PhiCache, encoded, keys, moved_left
from inlay.methods.infoprompt.pieces import Pieces
from zoo import VOCABULARY, tiny

MASK = VOCABULARY - 1
WAITING = {"cpu", "item", "tolist", "numpy", "nonzero", "__bool__", "__int__", "__float__", "__index__"}


def made(**given: Any) -> tuple[Any, dict[str, Tensor]]:
    """A model as `tune` trains it, what is frozen in eval mode, and a batch with masks."""
    torch.manual_seed(0)
    model, batch = tiny("bert", "classification")
    batch["input_ids"] = batch["input_ids"].masked_fill(batch["input_ids"] == MASK, MASK - 1)
    batch["input_ids"][:, 1] = MASK
    adapted = get_peft_model(model, inlay.InfoPromptConfig(**{"mask_token_id": MASK} | given))
    mine = set(layer_of(adapted).modules())
    for module in adapted.modules():
        module.training = module in mine
    return adapted, batch


def layer_of(model: Any) -> InfoPromptLayer:
    return next(module for module in model.modules() if isinstance(module, InfoPromptLayer))


def pieces_of(model: Any) -> Pieces:
    return layer_of(model).inlay_infoprompt_pieces["default"]


class Operations(TorchDispatchMode):
    """How many operations reach a device; views do not."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not func.is_view and func._schema.name not in ("aten::detach", "aten::lift_fresh")
        return func(*args, **(kwargs or {}))


class Waits(TorchFunctionMode):
    """What makes the host wait for a device, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        chosen = args[1] if name == "__getitem__" else ()
        if any(isinstance(each, Tensor) for each in (chosen if isinstance(chosen, tuple) else (chosen,))):
            self.seen["by a mask"] += 1
        elif name in WAITING:
            self.seen[name] += 1
        return func(*args, **(kwargs or {}))


# ------------------------------------------------------------------------------------------------- operations


def operations(**given: Any) -> tuple[int, int]:
    """Of a step's forward and backward pass, with Phi(X) in the cache."""
    model, batch = made(**given)
    model(**batch).loss.backward()
    model.zero_grad()
    with Operations() as forward:
        loss = model(**batch).loss
    with Operations() as backward:
        loss.backward()
    return forward.count, backward.count


def test_a_step_has_few_operations_more_than_with_prompts_alone() -> None:
    """On a GPU a small step takes as long as its operations take to launch: these are what InfoPrompt may add."""
    warp = operations(encoder="static", beta=0.0, gamma=0.0)
    infoprompt = operations()
    assert infoprompt[0] - warp[0] <= 60
    assert infoprompt[1] - warp[1] <= 60


def test_known_texts_make_the_host_wait_once() -> None:
    cache, ids = PhiCache(), torch.arange(12).reshape(3, 4)
    batch = {"input_ids": ids, "token_type_ids": torch.zeros_like(ids)}
    real = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [0, 1, 1, 1]]).bool()
    first = cache.get(batch, real, vectors, "now")
    with Waits() as waits, Operations() as done:
        again = cache.get(batch, real, vectors, "now")
    assert torch.equal(again, first)
    assert waits.seen["cpu"] == 1
    assert set(waits.seen) <= {"cpu", "numpy"}, "the second is of what is on the host already"
    assert done.count <= 5


def test_a_step_of_known_texts_waits_once_more_than_with_prompts_alone() -> None:
    seen = []
    for method in ({"encoder": "static", "beta": 0.0, "gamma": 0.0}, {}):
        model, batch = made(**method)
        model(**batch)
        with Waits() as waits:
            model(**batch).loss.backward()
        seen.append(waits.seen)
    assert seen[1] - seen[0] == Counter({"cpu": 1, "numpy": 1})


WARP = {"encoder": "static", "beta": 0.0, "gamma": 0.0}
ROW = "Row 1 of the batch has no mask token"
ON_DEVICE = "every row needs 0 places for prompts .negative ids. and the mask token"


def without_mask(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    ids = batch["input_ids"].clone()
    ids[1, 1] = MASK - 1
    return batch | {"input_ids": ids}


@pytest.mark.parametrize("method", [WARP, {}, {"cache": False}])
def test_a_missing_mask_is_not_silent_where_looking_makes_the_host_wait(
    method: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU: in the first pass, in evaluation, and in training, where known texts make nobody wait for it."""
    monkeypatch.setattr(layer, "waits", lambda device: True)
    model, batch = made(**method)
    with pytest.raises(InlayError, match=ROW):
        model(**without_mask(batch))
    model(**batch)
    by_device = method.get("cache", True) is False or method is WARP
    for _ in range(2):  # nor when it comes again
        with pytest.raises(RuntimeError if by_device else InlayError, match=ON_DEVICE if by_device else ROW):
            model(**without_mask(batch))
    with Waits() as waits:
        model(**batch)
    assert waits.seen["nonzero"] == 0, "by which `check` looks"
    with pytest.raises(InlayError, match=ROW):
        model.eval()(**without_mask(batch))


@pytest.mark.parametrize("method", [WARP, {}])
def test_a_missing_place_is_not_silent_where_looking_makes_the_host_wait(
    method: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layer, "waits", lambda device: True)
    model, batch = made(placeholders=True, num_prompt_tokens=1, **method)
    ids = torch.cat([batch["input_ids"][:, :2], torch.full((3, 1), -1), batch["input_ids"][:, 2:]], dim=1)
    right = {"input_ids": ids, "labels": batch["labels"]}
    ids = ids.clone()
    ids[2, 2] = 7
    model(**right)
    with pytest.raises((InlayError, RuntimeError), match="places for prompts"):
        model(**right | {"input_ids": ids})


@pytest.mark.parametrize("method", [WARP, {}])
def test_a_missing_mask_is_not_silent_in_what_is_compiled(method: dict[str, Any]) -> None:
    model, batch = made(**method)
    compiled = torch.compile(model, backend="eager")
    compiled(**batch)
    with pytest.raises((InlayError, RuntimeError), match=f"{ROW}|{ON_DEVICE}"):
        compiled(**without_mask(batch))


@pytest.mark.parametrize("half", [None, torch.bfloat16])
def test_a_compiled_model_is_one_graph_and_keeps_phi(half: torch.dtype | None) -> None:
    """Each copy by its own encoder, as it is when it runs."""
    first, batch = made()
    second = copy.deepcopy(first)
    with torch.no_grad():
        for parameter in second.parameters():
            parameter.mul_(1.1)
    wanted, found = [], []
    with torch.autocast("cpu", half or torch.bfloat16, enabled=half is not None):
        for model in (first.eval(), second.eval()):
            torch.compiler.reset()
            wanted.append(model(**batch).logits)
            layer_of(model).clear_cache()
            compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
            before = layer_of(model).recalled
            found.append([compiled(**batch).logits for _ in range(2)])
            recalled, computed = (now - then for now, then in zip(layer_of(model).recalled, before, strict=True))
            assert (recalled, computed) == (3, 3)
    for logits, (once, again) in zip(wanted, found, strict=True):
        torch.testing.assert_close(once, logits)
        assert torch.equal(once, again)
    assert not torch.allclose(wanted[0], wanted[1])


def test_a_compiled_step_has_the_gradients_of_the_plain_one() -> None:
    model, batch = made()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    steps = []
    for called in (model, compiled):
        torch.manual_seed(1)
        model.zero_grad()
        called(**batch).loss.backward()
        steps.append({name: p.grad.clone() for name, p in trained_parameters(model).items()})
    plain, traced = steps
    assert all(gradient.abs().sum() > 0 for gradient in plain.values())
    for name, gradient in plain.items():
        torch.testing.assert_close(traced[name], gradient, msg=lambda text, name=name: f"{name}: {text}")


# ------------------------------------------------------------------------------------------------- the cache


def vectors(batch: dict[str, Tensor]) -> Tensor:
    """In the encoder's place: two vectors a row, which depend on all that is given."""
    both = sum(value.double() * (1 + i) for i, (_, value) in enumerate(sorted(batch.items())))
    assert isinstance(both, Tensor)
    return torch.stack([both.sum(1), both.square().sum(1)], dim=1).unsqueeze(-1)


@settings(max_examples=25, deadline=None)
@given(
    batches=st.lists(st.lists(st.integers(0, 40), min_size=1, max_size=5), min_size=1, max_size=8),
    most=st.sampled_from([0, 3, 1000]),
    seed=st.integers(0, 9),
)
def test_the_cache_gives_what_is_computed_whatever_it_keeps(batches: list[list[int]], most: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    texts = [torch.randint(1, 9, (1 + i % 6,), generator=generator) for i in range(41)]
    cache = PhiCache(most_bytes=most * 2 * 8)
    for numbers in batches:
        width = max(len(texts[i]) for i in numbers)
        ids = torch.stack([torch.nn.functional.pad(texts[i], (0, width - len(texts[i]))) for i in numbers])
        wanted = torch.cat([vectors({"input_ids": texts[i].unsqueeze(0)}) for i in numbers])
        assert torch.equal(cache.get({"input_ids": ids}, ids > 0, vectors, "now"), wanted)
    different = {tuple(texts[i].tolist()) for numbers in batches for i in numbers}
    assert len(cache) == min(most, len(different))


def test_a_table_grows_and_keeps_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inlay.methods.infoprompt.phi.FEWEST_ROWS", 1)
    cache, ids = PhiCache(), torch.arange(20).reshape(10, 2)
    real = torch.ones_like(ids).bool()
    for end in range(1, 11):
        cache.get({"input_ids": ids[:end]}, real[:end], vectors, "now")
    assert cache.computed == len(cache) == 10
    assert torch.equal(cache.get({"input_ids": ids}, real, vectors, "now"), vectors({"input_ids": ids}))
    assert cache.computed == 10
    cache.get({"input_ids": ids}, real, vectors, "other circumstances")
    assert (cache.computed, len(cache)) == (20, 10)


def test_texts_are_known_by_their_own_tokens_and_all_that_is_said_of_them() -> None:
    text = torch.tensor([5, 6, 7])
    right, left = torch.nn.functional.pad(text, (0, 2)), torch.nn.functional.pad(text, (2, 0))
    both = torch.stack([right, left])
    one, other = keys({"input_ids": both, "attention_mask": (both > 0).long()}, both > 0)
    assert one == other
    alone = text.unsqueeze(0)
    real = torch.ones_like(alone).bool()
    zeros = torch.zeros_like(alone)
    given = [{}, {"token_type_ids": zeros}, {"token_type_ids": zeros + 1}, {"position_ids": zeros}]
    found = [keys({"input_ids": alone} | more, real)[0] for more in given]
    assert found[0] == one
    assert len(set(found)) == 4


@pytest.mark.parametrize(("device", "calls"), [("cpu", [(1, 4), (1, 1)]), ("meta", [(2, 4)])])
def test_texts_are_encoded_one_by_one_on_a_cpu_and_together_elsewhere(
    device: str, calls: list[tuple[int, int]]
) -> None:
    ids = torch.arange(12).reshape(3, 4).to(device)
    real = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 1], [0, 0, 1, 0]]).bool().to(device)
    seen = []

    def compute(rows: dict[str, Tensor]) -> Tensor:
        seen.append(tuple(rows["input_ids"].shape))
        return rows["input_ids"].new_zeros(len(rows["input_ids"]), 2, 1)

    assert encoded({"input_ids": ids}, real, [0, 2], compute).shape == (2, 2, 1)
    assert seen == calls
    encoded({"input_ids": ids}, real, range(3), compute)
    assert len(seen) == len(calls) + (3 if device == "cpu" else 1)


@pytest.mark.parametrize("family", ["bert", "distilbert", "gpt2", "opt", "roberta", "llama"])
@pytest.mark.parametrize("masked", [True, False])
def test_texts_padded_on_the_left_are_encoded_as_without_padding(family: str, masked: bool) -> None:
    """What devices other than CPUs compute of a batch is what a CPU computes of each text alone."""
    model = tiny(family, "base")[0].eval()
    text = torch.tensor([[5, 6, 7, 8, 9, 10], [11, 12, 13, 0, 0, 0], [0, 0, 14, 15, 16, 17], [0, 18, 19, 20, 0, 0]])
    real = text > 0
    batch = {"input_ids": text.masked_fill(~real, 1), **({"attention_mask": real.long()} if masked else {})}

    @torch.no_grad()
    def compute(rows: dict[str, Tensor]) -> Tensor:
        states = model(**rows).last_hidden_state
        kept = rows.get("attention_mask", torch.ones_like(rows["input_ids"]))[..., None]
        return torch.stack([(states * kept).sum(1) / kept.sum(1), states[:, 0]], 1)

    wanted = encoded(batch, real, range(4), compute)
    torch.testing.assert_close(compute(moved_left(batch, real)), wanted, atol=1e-5, rtol=1e-5)
    if masked and family in ("bert", "distilbert", "gpt2"):  # absolute positions
        assert not torch.allclose(compute(batch)[2:, 0], wanted[2:, 0], atol=1e-4)


def test_what_was_seen_in_inference_mode_serves_in_training() -> None:
    model, batch = made()
    few = {name: value[:2] for name, value in batch.items()}
    with torch.inference_mode():
        model(**few)
    for _ in range(2):
        model(**batch).loss.backward()
    with torch.inference_mode():
        model(**{name: value.flip(0) for name, value in batch.items()})
    assert pieces_of(model).cache.computed == 3
    assert all(p.grad is not None and p.grad.isfinite().all() for p in trained_parameters(model).values())


def test_what_is_put_into_the_encoder_later_is_noticed() -> None:
    from peft import LoraConfig, inject_adapter_in_model

    model, batch = made()
    cache, encoder = pieces_of(model).cache, layer_of(model).host

    def computed() -> int:
        model(**batch)
        return cache.computed

    assert [computed(), computed()] == [3, 3]
    norm = encoder.encoder.layer[0].output.LayerNorm
    encoder.encoder.layer[0].output.LayerNorm = copy.deepcopy(norm)
    assert [computed(), computed()] == [6, 6], "another module"
    norm = encoder.encoder.layer[0].output.LayerNorm
    norm.weight = torch.nn.Parameter(norm.weight.detach().clone(), requires_grad=False)
    assert [computed(), computed()] == [9, 9], "another parameter"
    norm.weight.data = norm.weight.data.clone()
    assert [computed(), computed()] == [12, 12], "other data"
    norm.weight.requires_grad_()
    assert computed() == 12
    norm.weight.requires_grad_(False)
    encoder.encoder.layer[1].attention.self.dropout.train()
    assert computed() == 12
    encoder.eval()
    layer_of(model).train()
    assert computed() == 15, "what it was in the meantime is not known"
    inject_adapter_in_model(LoraConfig(target_modules=["query"]), encoder, adapter_name="low")
    assert [computed(), len(copy.deepcopy(model).state_dict())] == [15, len(model.state_dict())]
    with torch.inference_mode():
        other, batch = made()
        assert other(**batch).loss.isfinite()


def test_nothing_is_left_of_before_an_adapter_was_merged() -> None:
    """PEFT merges by `weight.data +=`, which changes neither a version nor a place in memory."""
    from peft import LoraConfig, LoraModel

    model, batch = made()
    encoder, cache = layer_of(model).host, pieces_of(model).cache
    with torch.no_grad():
        before = model(**batch).logits
        low = LoraModel(encoder, LoraConfig(target_modules=["query"], init_lora_weights=False), "low")
        model(**batch)
        assert len(cache) == 0
        low.merge_and_unload()
        encoder.eval()
        for parameter in encoder.encoder.parameters():
            parameter.requires_grad_(False)
        after = model(**batch).logits
        assert len(cache) == 3
        layer_of(model).clear_cache()
        assert torch.equal(model(**batch).logits, after)
    assert not torch.allclose(after, before)


def test_adapters_have_caches_of_their_own() -> None:
    model, batch = made()
    model.add_adapter("second", inlay.InfoPromptConfig(state="mean"))
    with torch.no_grad():
        for name in ("default", "second", "default"):
            model.set_adapter(name)
            model.eval()(**batch)
    pieces = layer_of(model).inlay_infoprompt_pieces
    assert [pieces[name].cache.computed for name in ("default", "second")] == [3, 3]


def test_activations_that_are_recomputed_change_nothing() -> None:
    found = []
    for checkpointed in (False, True):
        model, batch = made()
        if checkpointed:
            base = model.get_base_model()
            base.gradient_checkpointing_enable({"use_reentrant": False})
            for layer in base.bert.encoder.layer:
                layer.training = True  # whatever drops something stays in eval mode
        for _ in range(2):
            torch.manual_seed(1)
            model.zero_grad()
            model(**batch).loss.backward()
        found.append([p.grad for p in trained_parameters(model).values()])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


# ------------------------------------------------------------------------------------------------- the units


def moved(parts: torch.nn.Module, value: Callable[[], Tensor], rate: float) -> Tensor:
    """By how much one step of Adam against random forces moves a value, entry by entry."""
    optimizer = torch.optim.Adam(parts.parameters(), lr=rate, eps=1e-30)
    before = value()
    force = torch.randn(before.shape, generator=torch.Generator().manual_seed(3), dtype=before.dtype)
    (before * force).sum().backward()
    before = before.detach().clone()
    optimizer.step()
    return value().detach() - before


@settings(max_examples=12, deadline=None)
@given(
    encoder=st.sampled_from(["static", "per-token", "shared-bottleneck"]),
    rate=st.floats(1e-3, 0.3),
    sizes=st.tuples(*[st.sampled_from([0.01, 0.3, 1.0, 20.0])] * 3),
    tokens=st.sampled_from([1, 4]),
)
def test_a_step_moves_a_prompt_by_the_rate_in_the_unit_of_embeddings(
    encoder: str, rate: float, sizes: tuple[float, float, float], tokens: int
) -> None:
    model, _ = made(encoder=encoder, sizes=list(sizes), num_prompt_tokens=tokens, bottleneck=32)
    pieces = pieces_of(model)
    embedded, of_phi, of_z = sizes
    phi = torch.randn(1, 16, generator=torch.Generator().manual_seed(2)) * of_phi
    by = moved(pieces.prompts, lambda: pieces.prompts(phi, 1), rate) / (rate * embedded)
    if encoder == "static":
        torch.testing.assert_close(by.abs(), torch.ones_like(by), rtol=1e-3, atol=1e-3)
    else:  # by two matrices, which both move it
        assert 0.3 < float(by.square().mean().sqrt()) < 3
    theta = moved(pieces.theta, pieces.theta, rate) * (of_z * 16**0.5 / rate)
    torch.testing.assert_close(theta.abs(), torch.ones_like(theta), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("rate", [1e-3, 0.1])
def test_a_step_moves_plain_numbers_by_the_rate_itself(rate: float) -> None:
    model, _ = made(encoder="static", sizes=[0.01, 20.0, 5.0], units=False)
    pieces = pieces_of(model)
    for by in (
        moved(pieces.prompts, lambda: pieces.prompts(None, 1), rate),
        moved(pieces.theta, pieces.theta, rate),
    ):
        torch.testing.assert_close(by.abs(), torch.full_like(by, rate), rtol=1e-3, atol=1e-6)
