"""The loss that never has all logits is the loss of Transformers, with its gradients."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import Gemma2Config, Gemma2ForCausalLM, LlamaConfig, LlamaForCausalLM

import inlay
from inlay.methods.attach import attach, trained_parameters
from inlay.training import lean_loss as module
from inlay.training.lean_loss import lean_loss
from zoo import tiny

SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
}


def llama(**more: Any) -> Any:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES, **more))


def batch(rows: int = 3, length: int = 7, masked: float = 0.4, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 61, (rows, length), generator=generator)
    labels = ids.masked_fill(torch.rand(ids.shape, generator=generator) < masked, -100)
    labels[0, -1] = 3  # at least one
    return {"input_ids": ids, "labels": labels}


def loss_and_gradients(model: nn.Module, given: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    loss = model(**given).loss
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def same(model: nn.Module, given: dict[str, Any]) -> None:
    expected, gradients = loss_and_gradients(model, given)
    with lean_loss(model) as lean:
        assert lean
        found, lean_gradients = loss_and_gradients(model, given)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    assert lean_gradients.keys() == gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(lean_gradients[name], gradient, rtol=1e-4, atol=1e-6, msg=name)


def oracle(model: Any, given: dict[str, Tensor]) -> Tensor:
    """The formula at the top of lean_loss.py, token by token."""
    hidden = model.model(input_ids=given["input_ids"]).last_hidden_state
    terms = []
    for row, labels in zip(hidden, given["labels"], strict=True):
        for place, label in enumerate(labels[1:].tolist()):
            if label != -100:
                scores = model.lm_head.weight @ row[place]
                terms.append(torch.logsumexp(scores, 0) - scores[label])
    return torch.stack(terms).sum() / len(terms)


@settings(max_examples=15, deadline=None)
@given(st.integers(1, 4), st.integers(2, 9), st.sampled_from([0.0, 0.5, 0.95]), st.sampled_from([1, 61 * 2, 10**6]))
def test_it_is_the_formula(rows: int, length: int, masked: float, piece: int) -> None:
    """In float64, with its gradients, whatever the size of a piece."""
    model = llama().double()
    given = batch(rows, length, masked, seed=rows + 10 * length)
    model.zero_grad()
    expected = oracle(model, given)
    expected.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(module, "PIECE", piece)
        with lean_loss(model):
            found, lean_gradients = loss_and_gradients(model, given)
    torch.testing.assert_close(found, expected.detach(), rtol=1e-12, atol=1e-12)
    for name, gradient in gradients.items():
        torch.testing.assert_close(lean_gradients[name], gradient, rtol=1e-10, atol=1e-12, msg=name)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("method", ["lora", "ntk-attention", "compact-prefix", "full"])
def test_the_loss_and_the_gradients_are_those_of_transformers(family: str, method: str) -> None:
    model, given = tiny(family, "causal-lm")
    same(attach(model, method), dict(given))


def test_tied_weights_and_a_head_that_is_trained() -> None:
    same(llama(tie_word_embeddings=True), batch())
    wanted = LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"])
    same(get_peft_model(llama(), wanted), batch())
    same(get_peft_model(llama(), LoraConfig(target_modules=["lm_head"], init_lora_weights=False)), batch())


def test_what_counts_the_labels_itself() -> None:
    same(llama(), batch() | {"num_items_in_batch": torch.tensor(11)})


def test_in_mixed_precision() -> None:
    model = get_peft_model(llama(), LoraConfig(target_modules="all-linear", init_lora_weights=False))
    with torch.autocast("cpu", torch.bfloat16):
        expected, gradients = loss_and_gradients(model, batch())
        with lean_loss(model):
            found, lean_gradients = loss_and_gradients(model, batch())
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
    for name, gradient in gradients.items():
        assert (lean_gradients[name] - gradient).norm() <= 0.02 * gradient.norm() + 1e-4, name


def test_without_a_label_it_is_not_a_number_and_moves_nothing() -> None:
    model = llama()
    given = batch()
    given["labels"][:] = -100
    with lean_loss(model):
        loss = model(**given).loss
        assert loss.isnan()
        torch.where(torch.tensor(False), loss, 0.0).backward()
    assert all(p.grad is None or not p.grad.any() for p in model.parameters())


def test_other_passes_are_as_ever() -> None:
    model, given = llama().eval(), batch()
    logits = model(**given).logits
    with lean_loss(model):
        assert model(**given).logits is None
        assert torch.equal(model(given["input_ids"]).logits, logits)
        with torch.no_grad():
            assert torch.equal(model(**given).logits, logits)
        assert model.generate(given["input_ids"], max_new_tokens=2, do_sample=False).shape == (3, 9)
        assert torch.equal(model(**given, return_dict=False)[1], logits)


def test_everything_is_put_back() -> None:
    model = llama()
    before = dict(vars(model)), dict(vars(model.lm_head))
    with lean_loss(model):
        model(**batch())
        other = copy.deepcopy(model)
    assert (dict(vars(model)), dict(vars(model.lm_head))) == before
    assert model(**batch()).logits is not None
    expected, found = model(**batch()).loss, other(**batch()).loss
    torch.testing.assert_close(found, expected)


def test_a_wrapper_that_stays_does_no_harm() -> None:
    """Accelerate puts its own forward around a model's, and takes it away later."""
    model = llama()
    with lean_loss(model):
        inner = model.forward
        model.forward = lambda *args, **kwargs: inner(*args, **kwargs)
        assert model(**batch()).logits is None
    assert model(**batch()).logits is not None


def test_a_model_that_changes_its_logits_keeps_its_own_way() -> None:
    """Gemma 2 caps them: what the loss is given is not what the head gave."""
    torch.manual_seed(0)
    model = Gemma2ForCausalLM(Gemma2Config(**SIZES, final_logit_softcapping=5.0, attention_dropout=0.5)).train()
    torch.manual_seed(1)
    expected, gradients = loss_and_gradients(model, batch())
    torch.manual_seed(1)
    with lean_loss(model):
        found, lean_gradients = loss_and_gradients(model, batch())
    assert torch.equal(found, expected)
    assert all(torch.equal(lean_gradients[name], gradient) for name, gradient in gradients.items())


@pytest.mark.parametrize(("family", "task"), [("bert", "classification"), ("vit", "classification"), ("t5", "base")])
def test_other_models_are_left_alone(family: str, task: Any) -> None:
    model, _ = tiny(family, task)
    with inlay.lean_loss(model) as lean:
        assert lean is False


def test_pieces_hold_less_than_the_whole() -> None:
    """The largest tensor of a step has a piece's logits, not all of them."""
    model = llama()
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):  # type: ignore[misc]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            largest = max(
                [
                    largest,
                    *(each.numel() for each in (out if isinstance(out, tuple) else (out,)) if isinstance(each, Tensor)),
                ]
            )
            return out

    given = batch(8, 64, masked=0.0)
    with pytest.MonkeyPatch.context() as patched, Watch():
        patched.setattr(module, "PIECE", 61 * 16)
        with lean_loss(model):
            model(**given).loss.backward()
        lean, largest = largest, 0
        model(**given).loss.backward()
    assert lean < largest == 8 * 64 * 61


def test_lean_loss_trains_the_adapter_of_a_run() -> None:
    """What `trained_parameters` has is what gets gradients, as without."""
    base, given = tiny("llama", "causal-lm")
    model = attach(base, "lora")
    with lean_loss(model):
        model(**given).loss.backward()
    assert all(p.grad is not None for p in trained_parameters(model).values())
