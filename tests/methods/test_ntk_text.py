"""NTK-Attention that starts from a prompt: its keys, Eq. (4) against the model that reads it, and the fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import PeftModel, PrefixTuningConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

import inlay
from inlay.anatomy import anatomy
from inlay.attention import Elu, Paper, prefix_to_features
from inlay.attention.features import Leaning
from inlay.errors import InlayError
from inlay.methods import prompts
from inlay.methods.ntk_attention.fit import Centring, Seen, Squares, look, solve, watching_all
from inlay.methods.ntk_attention.layer import NTKAttentionLayer, TrainedPrefix
from inlay.methods.ntk_attention.start import scale_of
from inlay.methods.prompts import read, rotary, trained_prefix
from zoo import tiny

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
PROMPT = [5, 17, 9, 30, 41, 8, 23, 12, 6, 19, 33]
TEXT = torch.tensor([[7, 21, 14, 40], [11, 11, 3, 28]])
DECODERS = ["llama", "gpt2", "opt", "gemma"]


def prefixes(model: nn.Module) -> list[TrainedPrefix]:
    return [module for module in model.modules() if isinstance(module, TrainedPrefix)]


def compressed(family: str, **options: Any) -> Any:
    model, _ = tiny(family, "causal-lm")
    config = inlay.NTKAttentionConfig(start="text", prompt_ids=PROMPT, seed=0, **options)
    return get_peft_model(model.double(), config).eval()


def positions(model: Any) -> dict[str, Tensor]:
    """Where text stands behind the prompt, for models that must be told: the others see distances alone."""
    length = TEXT.shape[1]
    return {} if rotary(model) else {"position_ids": torch.arange(len(PROMPT), len(PROMPT) + length).expand(2, -1)}


@torch.no_grad()
def behind_prompt(model: Any) -> Tensor:
    """The logits of the texts with the prompt before them, the plain way."""
    whole = torch.cat([torch.tensor(PROMPT).expand(len(TEXT), -1), TEXT], 1)
    with model.disable_adapter():
        return model(input_ids=whole).logits[:, len(PROMPT) :]


# The keys.


@pytest.mark.parametrize("chunk", [3, 1000])
@pytest.mark.parametrize("family", DECODERS)
def test_keys_and_values_are_those_that_the_attention_function_receives(
    family: str, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _ = tiny(family, "causal-lm")
    monkeypatch.setattr(prompts, "CHUNK", chunk)
    found = read(model, PROMPT)
    received: dict[nn.Module, tuple[Tensor, Tensor]] = {}

    def note(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any) -> Any:
        received[module] = (key, value)
        return sdpa_attention_forward(module, query, key, value, mask, **kwargs)

    AttentionInterface.register("noting_prompt", note)
    ALL_MASK_ATTENTION_FUNCTIONS.register("noting_prompt", ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    model.set_attn_implementation("noting_prompt")
    first = -len(PROMPT) if rotary(model) else 0
    with torch.no_grad():
        model(input_ids=torch.tensor([PROMPT]), position_ids=torch.arange(first, first + len(PROMPT))[None])
    for block in anatomy(model).blocks:
        assert block.attention is not None
        key, value = found.keys_and_values(block.index)
        kept = key.shape[1]  # of a sliding window only what the next token may see
        assert kept == len(PROMPT) or family == "gemma"
        wanted_key, wanted_value = received[block.attention.module]
        torch.testing.assert_close(key, wanted_key[0, :, -kept:])
        torch.testing.assert_close(value, wanted_value[0, :, -kept:])
    assert found.following == (0 if rotary(model) else len(PROMPT))


def test_reading_leaves_the_model_in_its_modes() -> None:
    model, _ = tiny("gpt2", "causal-lm")
    model.train()
    model.transformer.h[0].eval()
    before = [module.training for module in model.modules()]
    read(model, PROMPT)
    assert [module.training for module in model.modules()] == before


# Eq. (4).


@pytest.mark.parametrize(("family", "order"), [("llama", 8), ("gpt2", 6), ("opt", 6)])
def test_with_a_long_polynomial_the_closed_form_is_the_model_that_reads_the_prompt(family: str, order: int) -> None:
    errors = []
    for size in (2, order):
        model = compressed(family, feature_map="taylor", taylor_order=size, rank=4 if family == "llama" else 8)
        with torch.no_grad():
            found = model(input_ids=TEXT, **positions(model)).logits
        errors.append(float((found - behind_prompt(model)).abs().max()))
    with model.disable_adapter(), torch.no_grad():
        nothing = float((model(input_ids=TEXT).logits - behind_prompt(model)).abs().max())
    assert errors[1] < 1e-5
    assert errors[1] < errors[0] < nothing / 10


def test_with_many_random_features_the_closed_form_comes_near() -> None:
    errors = []
    for many in (2, 2000):
        model = compressed("llama", feature_map="favor", feature_multiplier=many, rank=4)
        with torch.no_grad():
            errors.append(float((model(input_ids=TEXT).logits - behind_prompt(model)).abs().mean()))
    assert errors[1] < errors[0] / 3


@settings(deadline=None, max_examples=20)
@given(
    heads=st.sampled_from([1, 2]),
    groups=st.sampled_from([1, 3]),
    size=st.integers(1, 4),
    beta=st.integers(1, 3),
    kind=st.sampled_from([Elu, Paper]),
    seed=st.integers(0, 99),
)
def test_leaning_is_its_base_about_the_centre_times_exp(
    heads: int, groups: int, size: int, beta: int, kind: Any, seed: int
) -> None:
    torch.manual_seed(seed)
    centre, key = torch.randn(heads, size).double(), torch.randn(heads, 5, size).double()
    query, rows, scale = torch.randn(2, heads * groups, 3, size).double(), beta * size, 0.7
    phi = Leaning(base=kind(), centre=centre)
    found, log_scale = phi.of_query(query, rows, scale)
    assert log_scale is not None
    mu = centre.repeat_interleave(groups, 0)[:, None]
    wanted = kind().of_key(query, rows, scale) * ((query * mu).sum(-1, keepdim=True) * scale).exp()
    torch.testing.assert_close(found * log_scale.exp()[..., None], wanted)
    torch.testing.assert_close(phi.of_key(key, rows, scale), kind().of_key(key - centre[:, None], rows, scale))


def test_the_gradient_of_leaning_is_that_of_finite_differences() -> None:
    torch.manual_seed(0)
    phi = Leaning(centre=torch.randn(2, 3).double())
    query = torch.randn(1, 2, 4, 3).double()

    def whole(x: Tensor) -> Tensor:
        found, log_scale = phi.of_query(x, 6, 0.5)
        assert log_scale is not None
        assert not log_scale.requires_grad
        return found * log_scale.exp()[..., None]

    x = query.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(whole(x).sum(), x)
    step = 1e-6
    for index in range(query.numel()):
        moved = torch.zeros(query.numel()).double()
        moved[index] = step
        up, down = (whole(query + sign * moved.view_as(query)).sum() for sign in (1, -1))
        assert float(gradient.flatten()[index]) == pytest.approx(float(up - down) / (2 * step), rel=1e-5, abs=1e-6)


def prefix_tuned(family: str) -> Any:
    """A tiny model with PEFT's prefix tuning, its prefix drawn at random."""
    model = tiny(family, "causal-lm")[0].double()
    torch.manual_seed(0)
    return get_peft_model(model, PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=5)).double().eval()


@pytest.mark.parametrize(("family", "order"), [("llama", 8), ("gpt2", 6)])
def test_a_trained_prefix_in_closed_form_is_prefix_tuning(family: str, order: int) -> None:
    tuned = prefix_tuned(family)
    with torch.no_grad():
        wanted = tuned(input_ids=TEXT).logits
    prefix = trained_prefix(tuned)
    assert (prefix.length, prefix.following) == (5, 0 if family == "llama" else 5)
    config = inlay.NTKAttentionConfig(
        start="text", prompt_length=5, feature_map="taylor", taylor_order=order, rank=4 if family == "llama" else 8
    )
    model = get_peft_model(tuned.get_base_model(), config).eval()
    model.base_model.start_from(prefix)
    places = {} if family == "llama" else {"position_ids": torch.arange(5, 9).expand(2, -1)}
    with torch.no_grad():
        torch.testing.assert_close(model(input_ids=TEXT, **places).logits, wanted, atol=1e-4, rtol=1e-4)
        with model.disable_adapter():
            assert (model(input_ids=TEXT, **places).logits - wanted).abs().max() > 1e-2


def test_a_prefix_of_a_model_that_rotates_otherwise_is_refused() -> None:
    with pytest.raises(InlayError, match=r"Gemma3ForCausalLM rotates its keys in a way"):
        trained_prefix(prefix_tuned("gemma"))


# What is saved.


@pytest.mark.parametrize("kind", ["elu", "favor", "taylor"])
def test_it_reloads_to_the_bit_without_the_prompt(kind: str, tmp_path: Path) -> None:
    model, _ = tiny("llama", "causal-lm")
    config = inlay.NTKAttentionConfig(start="text", prompt_ids=PROMPT, feature_map=kind, task_type="CAUSAL_LM")
    adapted = get_peft_model(model, config).eval()
    assert config.prompt_ids == PROMPT  # the caller's may serve another model
    with torch.no_grad():
        wanted = adapted(input_ids=TEXT).logits
    adapted.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "adapter_config.json").read_text())
    assert saved["prompt_ids"] is None
    assert saved["prompt_length"] == len(PROMPT)
    again = PeftModel.from_pretrained(tiny("llama", "causal-lm")[0], str(tmp_path)).eval()
    with torch.no_grad():
        assert torch.equal(again(input_ids=TEXT).logits, wanted)
    one, other = (
        loaded.generate(input_ids=TEXT, max_new_tokens=5, do_sample=False, pad_token_id=1)
        for loaded in (adapted, again)
    )
    assert torch.equal(one, other)


def test_a_damaged_centre_is_refused(tmp_path: Path) -> None:
    compressed("llama").save_pretrained(tmp_path)
    file = tmp_path / "adapter_model.safetensors"
    tensors = load_file(file)
    name = next(name for name in tensors if "centre" in name)
    tensors[name][0, 0] = torch.nan
    save_file(tensors, file)
    with pytest.raises(InlayError, match=r"centre.*not finite"):
        PeftModel.from_pretrained(tiny("llama", "causal-lm")[0].double(), str(tmp_path))


def test_prompts_do_not_run_side_by_side() -> None:
    model = compressed("llama")
    model.add_adapter("other", inlay.NTKAttentionConfig(start="text", prompt_ids=PROMPT[:4], seed=0))
    model.base_model.set_adapter(["default", "other"])
    with pytest.raises(InlayError, match="centre of its own prompt"):
        model(input_ids=TEXT)


@pytest.mark.slow
def test_it_compiles() -> None:
    model = compressed("llama", feature_map="elu")
    with torch.no_grad():
        wanted = model(input_ids=TEXT).logits
        found = torch.compile(model, backend="eager")(input_ids=TEXT).logits
    torch.testing.assert_close(found, wanted)


# What is refused.


def test_prompts_that_cannot_be_read_are_refused() -> None:
    model, _ = tiny("llama", "causal-lm")
    for ids, words in (
        ([3] * 41, r"41 tokens; LlamaForCausalLM reads 40 in all"),
        ([3, 99], r"token id 99.*0 to 47"),
    ):
        with pytest.raises(InlayError, match=words):
            get_peft_model(model, inlay.NTKAttentionConfig(start="text", prompt_ids=ids))
    with pytest.raises(InlayError, match=r"BertForTokenClassification is no decoder"):
        get_peft_model(
            tiny("bert", "token-classification")[0], inlay.NTKAttentionConfig(start="text", prompt_ids=PROMPT)
        )


def test_rotations_that_change_with_the_length_are_refused() -> None:
    shape = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=48, **shape, max_position_embeddings=40, rope_parameters=rope))
    with pytest.raises(InlayError, match=r"\(dynamic\) changes with the length"):
        read(model, PROMPT)


# The fit.


def plain_sums(query: Tensor, key: Tensor, value: Tensor, scale: float) -> tuple[Tensor, ...]:
    """One head: D, N, E and the attended key of each query, with the prompt before the text."""
    length = len(query)
    grown = (query @ key.T * scale).exp()
    prompt, text = grown[:, :-length], grown[:, -length:].tril()
    total = prompt.sum(1)
    attended = prompt @ key[:-length] / total[:, None]
    return total, prompt @ value[:-length], text.sum(1), attended


@settings(deadline=None, max_examples=15)
@given(length=st.integers(1, 5), before=st.integers(1, 6), groups=st.sampled_from([1, 2]), seed=st.integers(0, 99))
def test_what_is_seen_is_the_plain_sums(length: int, before: int, groups: int, seed: int) -> None:
    torch.manual_seed(seed)
    query = torch.randn(2, 2 * groups, length, 3).double()
    key, value = (torch.randn(2, 2, before + length, 3).double() for _ in range(2))
    real = torch.arange(length) < torch.tensor([[length], [max(1, length - 1)]])
    seen = look(query, key, value, None, 0.6, real)
    at = 0
    for row in range(2):
        count = int(real[row].sum())
        for head in range(2 * groups):
            pair = (key[row, head // groups], value[row, head // groups])
            total, above, text, attended = plain_sums(query[row, head], *pair, 0.6)
            here = slice(at, at + count)
            torch.testing.assert_close(seen.log_prompt[head, here], total.log()[:count])
            torch.testing.assert_close(seen.log_whole[head, here], (total + text).log()[:count])
            torch.testing.assert_close(seen.value[head, here], (above / total[:, None])[:count])
            torch.testing.assert_close(seen.key[head, here], attended[:count])
        at += count


def test_the_centre_is_the_attended_key_as_the_prompt_weighs() -> None:
    """A query that the prompt is most of moves the centre more than one that hardly sees it."""
    model = compressed("llama", feature_map="elu", rank=4)
    torch.manual_seed(0)
    heads, size = 4, 4
    key, share = torch.randn(heads, 2, size).double(), torch.tensor([[0.9, 0.1]] * heads).double()
    seen = Seen(key, share.log(), torch.zeros(heads, 2), key, key, 1.0)
    with watching_all(model, Centring) as (watcher, *_):
        assert watcher.prefix.centre is not None
        watcher.sums = watcher.products(seen)
        watcher.settle()
        torch.testing.assert_close(watcher.prefix.centre(), 0.9 * key[:, 0] + 0.1 * key[:, 1])


def test_the_solution_is_the_least_squares_one() -> None:
    torch.manual_seed(0)
    phi = torch.rand(2, 50, 4).double()
    z, kappa = torch.randn(2, 4, 3).double(), torch.rand(2, 4).double()
    wanted = torch.cat([phi @ z, phi @ kappa[..., None]], -1)
    z_a, z_b, found = solve(phi.mT @ phi, phi.mT @ wanted, 3)
    torch.testing.assert_close(z_a @ z_b, z, atol=2e-2, rtol=1e-2)  # the ridge pulls a little
    torch.testing.assert_close(found, kappa, atol=5e-2, rtol=5e-2)
    # Where the best kappa has a negative entry, 0 is the best that is allowed.
    low = torch.tensor([1.0, -0.5, 1.0, 1.0]).double()
    _, _, found = solve(phi.mT @ phi, phi.mT @ torch.cat([wanted[..., :-1], (phi @ low)[..., None]], -1), 3)
    assert float(found.min()) >= 0
    assert float(found[:, 1].max()) < 1e-2
    # Of a lower rank, no other direction fits these queries better.
    z_a, z_b, _ = solve(phi.mT @ phi, phi.mT @ wanted, 2)
    error = (phi @ (z_a @ z_b - z)).square().sum((1, 2))
    least = torch.linalg.svdvals(phi @ z)[:, 2:].square().sum(-1)
    torch.testing.assert_close(error, least, atol=1e-2, rtol=1e-1)


def test_watching_changes_nothing_and_leaves_nothing() -> None:
    model = compressed("llama", feature_map="elu", feature_multiplier=2, rank=4)
    names = [name for name, _ in model.named_modules()]
    with torch.no_grad():
        wanted = behind_prompt(model)
        for kind in (Centring, Squares):
            with watching_all(model, kind) as watchers:
                with model.disable_adapter():
                    cache = read(model, PROMPT).cache
                cache.batch_repeat_interleave(len(TEXT))
                for watcher in watchers:
                    watcher.sums = None  # the prompt's own queries are not the ones to fit
                with model.disable_adapter():
                    found = model(input_ids=TEXT, past_key_values=cache, position_ids=torch.arange(4).expand(2, -1))
                for watcher in watchers:
                    watcher.settle()
            torch.testing.assert_close(found.logits, wanted, atol=1e-5, rtol=1e-5)
    assert [name for name, _ in model.named_modules()] == names
    with torch.no_grad():
        with model.disable_adapter():
            nothing = (model(input_ids=TEXT).logits - wanted).abs().mean()
        assert (model(input_ids=TEXT).logits - wanted).abs().mean() < nothing / 20


def test_eq_4_of_the_start_is_prefix_to_features() -> None:
    model = compressed("llama", feature_map="elu", feature_multiplier=2, rank=4)
    layer = next(module for module in model.modules() if isinstance(module, NTKAttentionLayer))
    with model.disable_adapter():
        key, value = read(model, PROMPT).keys_and_values(1)
    block = anatomy(model).blocks[0]
    assert block.attention is not None
    phi = Leaning(centre=key.mean(1))
    z, kappa = prefix_to_features(key, value, phi, features=8, scale=scale_of(block.attention), heads=4)
    prefix = layer.inlay_ntk_prefix["default"]
    assert isinstance(prefix, TrainedPrefix)
    z_a, z_b, found = prefix()
    torch.testing.assert_close(z_a @ z_b, z)
    torch.testing.assert_close(found, kappa)
