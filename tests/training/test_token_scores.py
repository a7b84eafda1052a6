"""An evaluation of a language model never has all logits at once, and finds what it would find with them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import LoraConfig, PrefixTuningConfig, PromptTuningConfig, get_peft_model
from test_lean_loss import SIZES, batch, llama
from torch import Tensor, nn
from transformers import Gemma2Config, Gemma2ForCausalLM

import zoo
from inlay.methods.attach import attach
from inlay.tasks.schema import TaskSchema
from inlay.training import lean_loss as module
from inlay.training.lean_loss import lean_loss, token_scores

SCHEMA = TaskSchema("toy", "causal-lm", ("text",), ("perplexity",), answers=True)


def both_ways(model: nn.Module, given: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The loss and what is kept of each row: with all logits, and without."""
    model.eval()
    with torch.no_grad():
        whole = model(**given)
        with token_scores(model) as tokens:
            lean = model(**given)
            scores = tokens.take()
    assert scores is not None
    assert lean.logits is None
    assert tokens.take() is None
    kept = SCHEMA.reduce_logits(whole.logits, given["labels"])
    return whole.loss, kept, lean.loss, SCHEMA.reduce_tokens(*scores, given["labels"])


def adapted(method: str) -> nn.Module:
    if method == "none":
        return llama()
    if method == "prompt":
        return get_peft_model(llama(), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3))
    if method == "prefix":
        return get_peft_model(llama(), PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3))
    if method == "head":
        return get_peft_model(llama(), LoraConfig(target_modules=["lm_head"], init_lora_weights=False))
    return attach(llama(), method)


@pytest.mark.parametrize("method", ["none", "lora", "head", "prompt", "prefix", "ntk-attention", "multi-lora"])
@pytest.mark.parametrize("piece", [61 * 2, 10**6])
def test_the_numbers_are_those_of_all_logits(method: str, piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PIECE", piece)
    for masked in (0.0, 0.6):
        loss, kept, lean_loss_, lean_kept = both_ways(adapted(method), batch(masked=masked))
        torch.testing.assert_close(lean_loss_, loss, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(lean_kept, kept, rtol=1e-6, atol=1e-6)


def test_a_row_that_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    model, given = llama().eval(), batch(rows=2, masked=0.5)
    with torch.no_grad():
        best = model(given["input_ids"]).logits[0, :-1].argmax(-1)
    given["labels"][0, 1:] = best
    *_, kept = both_ways(model, given)
    assert kept[:, 2].tolist() == [1.0, 0.0]


def test_a_row_without_labels() -> None:
    given = batch(rows=2)
    given["labels"][1] = -100
    loss, kept, lean, lean_kept = both_ways(llama(), given)
    torch.testing.assert_close(lean, loss)
    torch.testing.assert_close(lean_kept, kept)
    given["labels"][:] = -100
    loss, kept, lean, lean_kept = both_ways(llama(), given)
    assert loss.isnan()
    assert lean.isnan()
    torch.testing.assert_close(lean_kept, kept)


def test_the_head_sees_labelled_places_only_and_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PIECE", 61 * 4)
    model, seen = llama(), []
    forward = model.lm_head.forward
    model.lm_head.forward = lambda rows: seen.append(len(rows)) or forward(rows)
    given = batch(rows=4, length=9, masked=0.5)
    with torch.no_grad(), token_scores(model):
        model(**given)
    assert sum(seen) == int((given["labels"][:, 1:] != -100).sum())
    assert max(seen) <= 4


def test_within_a_training_that_makes_no_logits_either() -> None:
    model, given = attach(llama(), "lora"), batch()
    loss, kept, *_ = both_ways(model, given)
    with lean_loss(model):
        for _ in range(2):
            model.train()
            model(**given).loss.backward()
            model.eval()
            with torch.no_grad():
                with token_scores(model) as tokens:
                    found = model(**given)
                    scores = tokens.take()
                assert model(**given).logits is not None, "as ever outside of it"
            assert scores is not None
            torch.testing.assert_close(found.loss, loss, rtol=1e-6, atol=1e-6)
            torch.testing.assert_close(SCHEMA.reduce_tokens(*scores, given["labels"]), kept, rtol=1e-6, atol=1e-6)
    assert "forward" not in vars(model.get_base_model())


@pytest.mark.parametrize("own", ["gemma2", "bert"])
def test_a_model_with_its_own_way_keeps_it(own: str) -> None:
    if own == "gemma2":
        torch.manual_seed(0)
        model: Any = Gemma2ForCausalLM(Gemma2Config(**SIZES)).eval()
        given = batch()
    else:
        model, given = zoo.tiny("bert", "classification")
    with torch.no_grad(), token_scores(model) as tokens:
        found = model(**given)
        assert found.logits is not None
        assert tokens.take() is None
