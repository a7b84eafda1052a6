"""A prompt shared by the rows of a batch: the same logits as with the prompt in every row, where it can be shared."""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
import transformers as hf
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import get_peft_model
from torch import Tensor, nn
from transformers import DynamicCache

import inlay
from inlay.anatomy import anatomy
from inlay.errors import InlayError
from inlay.methods.prompts import Earlier, Prompt, read, rotated
from inlay.methods.shared_prompt import SharedPrompt, can_share, read_behind, sharing
from zoo import GROUPED, SPECIAL, tiny

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
PROMPT = [5, 17, 9, 30, 41, 8, 23, 12, 6, 19, 33]
TEXT = torch.tensor([[7, 21, 14, 40, 9], [11, 11, 3, 28, 30], [6, 6, 6, 6, 6]])
CAPS = {"query_pre_attn_scalar": 4, "layer_types": ["full_attention"] * 3, "sliding_window": 4}
OTHERS = {
    "qwen2": lambda: hf.Qwen2Config(**GROUPED),
    "qwen3": lambda: hf.Qwen3Config(**GROUPED),
    "mistral": lambda: hf.MistralConfig(**GROUPED, sliding_window=None),
    "mistral that slides": lambda: hf.MistralConfig(**GROUPED, sliding_window=4),
    "gemma2 that caps": lambda: hf.Gemma2Config(**GROUPED, **CAPS, attn_logit_softcapping=5.0),
    "gemma2 that does not": lambda: hf.Gemma2Config(**GROUPED, **CAPS, attn_logit_softcapping=None),
    "gpt-j": lambda: hf.GPTJConfig(**SPECIAL, n_embd=16, n_layer=3, n_head=2, n_positions=40, rotary_dim=4),
}
SHARED = ["llama", "gpt2", "opt", "qwen2", "qwen3", "mistral", "gemma2 that does not"]
NOT_SHARED = ["gemma", "mistral that slides", "gemma2 that caps", "gpt-j"]


def decoder(family: str) -> Any:
    """A tiny decoder that listens to what stands before: random models hardly do."""
    if family in OTHERS:
        torch.manual_seed(0)
        model: nn.Module = hf.AutoModelForCausalLM.from_config(OTHERS[family]()).eval()
    else:
        model, _ = tiny(family, "causal-lm")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if any(part in name for part in ("attn", "k_proj", "q_proj", "v_proj", "o_proj")) and "norm" not in name:
                parameter.mul_(8)
    return model


def places(prompt: Prompt, begin: int, end: int) -> Tensor:
    return torch.arange(prompt.following + begin, prompt.following + end).expand(len(TEXT), -1)


@torch.no_grad()
def in_every_row(model: Any, prompt: Prompt) -> Tensor:
    """The logits of the texts, each with the prompt's tokens before it."""
    whole = torch.cat([torch.tensor(PROMPT).expand(len(TEXT), -1), TEXT], 1)
    positions = torch.cat([places(prompt, -prompt.length, 0), places(prompt, 0, TEXT.shape[1])], 1)
    found: Tensor = model(input_ids=whole, attention_mask=torch.ones_like(whole), position_ids=positions).logits
    return found[:, len(PROMPT) :]


@torch.no_grad()
def beside(model: Any, prompt: Prompt, *steps: int) -> Tensor:
    """The same with the prompt shared, read in steps of so many tokens with a cache, or at once without."""
    found, cache = [], DynamicCache(config=model.config) if steps else None
    ends = list(accumulate(steps)) or [TEXT.shape[1]]
    with sharing(model, prompt):
        for begin, end in pairwise([0, *ends]):
            found += [
                model(
                    input_ids=TEXT[:, begin:end],
                    attention_mask=torch.ones_like(TEXT[:, :end]),
                    position_ids=places(prompt, begin, end),
                    past_key_values=cache,
                    use_cache=cache is not None,
                ).logits
            ]
    assert cache is None or cache.get_seq_length() == TEXT.shape[1]  # the text alone
    return torch.cat(found, 1)


@pytest.mark.parametrize(
    ("family", "implementation"),
    [(family, kind) for family in SHARED for kind in ("sdpa", "eager") if kind == "eager" or "gemma2" not in family],
)
def test_it_is_the_model_that_reads_the_prompt_in_every_row(family: str, implementation: str) -> None:
    model = decoder(family)
    model.set_attn_implementation(implementation)
    prompt = read(model, PROMPT)
    assert can_share(model, prompt)
    wanted = in_every_row(model, prompt)
    with torch.no_grad():
        nothing = model(input_ids=TEXT, position_ids=places(prompt, 0, TEXT.shape[1])).logits
    assert (nothing - wanted).abs().mean() > 1e-3, "the prompt must matter"
    for steps in ((), (5,), (1, 1, 1, 1, 1), (2, 1, 2)):
        torch.testing.assert_close(beside(model, prompt, *steps), wanted, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("family", ["llama", "gpt2", "opt"])
def test_in_half_precision_it_is_as_near_as_the_plain_way(family: str) -> None:
    model = decoder(family)
    exact = in_every_row(model, read(model, PROMPT))
    model = model.bfloat16()
    prompt = read(model, PROMPT)
    plain = (in_every_row(model, prompt).float() - exact).abs().mean()
    assert prompt.keys_and_values(1)[0].dtype == torch.bfloat16
    assert (beside(model, prompt).float() - exact).abs().mean() < 1.5 * plain
    assert (beside(model, prompt, 2, 1, 1, 1).float() - exact).abs().mean() < 1.5 * plain


@pytest.mark.parametrize("family", NOT_SHARED)
def test_where_it_would_not_be_exact_it_is_not_shared(family: str) -> None:
    model = decoder(family)
    assert not can_share(model, read(model, PROMPT))


def test_neither_where_another_implementation_runs_nor_of_a_part_of_the_prompt() -> None:
    model = decoder("llama")
    prompt = read(model, PROMPT)
    assert can_share(model, prompt)
    model.config._attn_implementation_internal = "flash_attention_2"
    assert not can_share(model, prompt)
    model.set_attn_implementation("sdpa")
    prompt.cache.crop(-3)
    assert not can_share(model, prompt)


def test_afterwards_the_model_is_as_it_was() -> None:
    model = decoder("llama")
    prompt = read(model, PROMPT)
    names, implementation = [name for name, _ in model.named_modules()], model.config._attn_implementation
    hooks = [len(module._forward_pre_hooks) for module in model.modules()]
    with torch.no_grad():
        wanted = model(input_ids=TEXT).logits
    with sharing(model, prompt):
        assert sum(isinstance(module, SharedPrompt) for module in model.modules()) == 3
    with pytest.raises(IndexError), sharing(model, prompt):
        model(input_ids=TEXT + 1000)
    assert [name for name, _ in model.named_modules()] == names
    assert [len(module._forward_pre_hooks) for module in model.modules()] == hooks
    assert model.config._attn_implementation == implementation
    with torch.no_grad():
        assert torch.equal(model(input_ids=TEXT).logits, wanted)


def test_an_adapter_that_computes_attention_must_be_off() -> None:
    model = decoder("llama")
    prompt = read(model, PROMPT)
    wanted = in_every_row(model, prompt)
    config = inlay.NTKAttentionConfig(start="text", prompt_ids=PROMPT, seed=0)
    adapted = get_peft_model(model, config).eval()
    implementation = model.config._attn_implementation
    with pytest.raises(InlayError, match=r"NTKAttentionLayer runs in LlamaAttention.*disable_adapter"):
        beside(adapted, prompt)
    assert model.config._attn_implementation == implementation
    with adapted.disable_adapter():
        torch.testing.assert_close(beside(adapted, prompt), wanted, atol=2e-5, rtol=2e-5)
    assert model.config._attn_implementation == implementation


def test_a_bias_of_position_is_refused() -> None:
    model = decoder("llama")
    attention = anatomy(model).blocks[0].attention
    assert attention is not None
    layer = SharedPrompt(attention.module, torch.zeros(2, 3, 4), torch.zeros(2, 3, 4))
    query = torch.zeros(1, 4, 2, 4)
    with pytest.raises(InlayError, match="bias of position"):
        layer.attend(lambda: None, query, query[:, :2], query[:, :2], None, position_bias=torch.zeros(1, 4, 2, 2))


@settings(deadline=None, max_examples=20)
@given(
    rows=st.integers(1, 3),
    length=st.integers(1, 4),
    before=st.integers(1, 5),
    masked=st.sampled_from([None, torch.bool, torch.float64]),
    seed=st.integers(0, 99),
)
def test_joined_is_what_the_cache_would_give(
    rows: int, length: int, before: int, masked: torch.dtype | None, seed: int
) -> None:
    torch.manual_seed(seed)
    key, value = (torch.randn(2, before, 3).double() for _ in range(2))
    more, less = (torch.randn(rows, 2, length, 3).double() for _ in range(2))
    seen = torch.rand(rows, 1, length, length) > 0.5
    mask = seen if masked == torch.bool else torch.zeros(seen.shape).double().masked_fill(~seen, -torch.inf)
    found = SharedPrompt(nn.Linear(1, 1), key, value).joined(more, less, None if masked is None else mask)
    for row in range(rows):
        assert torch.equal(found[0][row], torch.cat([key, more[row]], 1))
        assert torch.equal(found[1][row], torch.cat([value, less[row]], 1))
    if masked is None:
        assert found[2] is None
        return
    assert found[2] is not None
    assert found[2].dtype == masked
    allowed = found[2] if masked == torch.bool else found[2] == 0
    assert allowed[..., :before].all()
    assert torch.equal(allowed[..., before:], seen)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral"])
@torch.no_grad()
def test_the_rest_of_a_prompt_behind_what_stands_for_its_beginning(family: str) -> None:
    """With all keys of the beginning, rotated to their place, it is the whole prompt."""
    model = decoder(family).double()
    whole, first = read(model, PROMPT, logits=True), read(model, PROMPT[:6])
    blocks, positions = [], []
    for block in anatomy(model).blocks:
        assert block.attention is not None
        key, value = first.keys_and_values(block.index)
        moved = rotated(model, block.attention.module, key[None], -len(PROMPT[6:]))[0]
        # One key more, that hides, and one key as two halves.
        key, value = torch.cat([moved, moved[:, :2]], 1), torch.cat([value, value[:, :2]], 1)
        bias = key.new_zeros(key.shape[:2])
        bias[:, [0, -2]], bias[:, -1] = -torch.log(torch.tensor(2.0, dtype=key.dtype)), -1e4
        blocks.append((key, value, bias))
        positions.append((torch.tensor([*range(6), 0, 1]) - len(PROMPT)).expand(len(key), -1))
    found = read_behind(model, Earlier(blocks, tuple(PROMPT[:6]), positions), PROMPT[6:], logits=True)
    assert found.ids == tuple(PROMPT)
    assert found.positions(1)[0, -1] == -1
    assert (found.tokens, found.length, found.following) == (len(PROMPT), len(PROMPT) - 6, whole.following)
    close = {"atol": 1e-6, "rtol": 1e-5}  # the model's own cosines and sines are float32
    torch.testing.assert_close(found.logits, whole.logits, **close)
    logits = []
    for prompt in (whole, found):
        with sharing(model, prompt):
            logits.append(model(input_ids=TEXT, position_ids=places(prompt, 0, TEXT.shape[1]), use_cache=False).logits)
    torch.testing.assert_close(*logits, **close)
