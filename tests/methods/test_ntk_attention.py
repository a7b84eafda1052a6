"""NTK-Attention in whole models against an explicit softmax in float64; starts, caches, stacking and refusals."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    Gemma2Config,
    Gemma2ForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    ViTConfig,
    ViTForImageClassification,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.models.vit.modeling_vit import ViTAttention

import inlay
from inlay.anatomy import anatomy
from inlay.attention import FEATURE_MAPS, FeatureMap, prefix_attention, prefix_to_features
from inlay.errors import InlayError
from inlay.methods.attach import attach, restore, save, trained_parameters
from inlay.methods.attention_interface import children
from inlay.methods.ntk_attention.layer import Kappa, NTKAttentionLayer
from inlay.methods.ntk_attention.start import Start, low_rank, scale_of
from probing import logits
from zoo import FAMILIES, PAD, tiny

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
OFF_THE_INTERFACE = ("mpnet", "deberta-v2")
WITHOUT_ATTENTION = ("resnet", "convnext")
FITTING = [family for family in FAMILIES if family not in (*OFF_THE_INTERFACE, *WITHOUT_ATTENTION)]


def layers(model: nn.Module) -> list[NTKAttentionLayer]:
    return [module for module in model.modules() if isinstance(module, NTKAttentionLayer)]


def adapted(family: str, task: Any = "classification", **options: Any) -> tuple[Any, dict[str, Tensor]]:
    """A tiny model with an adapter away from its start."""
    model, batch = tiny(family, task)
    model = get_peft_model(model, inlay.NTKAttentionConfig(**{"seed": 0} | options)).eval()
    stir(model)
    return model, batch


@torch.no_grad()
def stir(model: nn.Module, seed: int = 1, only: str = "inlay_ntk") -> None:
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in sorted(trained_parameters(model).items()):
        if only in name:
            parameter.add_(torch.randn(parameter.shape, generator=generator).to(parameter), alpha=0.5)


@torch.no_grad()
def outputs(model: Any, batch: dict[str, Tensor]) -> Tensor:
    return model.eval()(**batch).last_hidden_state


# The oracle: Algorithm 2 as it is printed, with the scores in full.


def phi(z: Tensor, features: FeatureMap, rows: int, scale: float) -> Tensor:
    """The two maps of single coordinates written out; the others are judged in tests/attention."""
    size = z.shape[-1]
    signs = [(-1) ** block * 2 ** (block // 2) for block in range(rows // size)]
    if features.name == "elu":
        return torch.cat([nn.functional.elu(z * sign * scale**0.5) + 1 for sign in signs], -1) / rows**0.5
    if features.name == "paper":
        pieces = [torch.where(z * sign >= 0, z * sign, (z * sign).exp()) for sign in signs]
        return torch.cat(pieces, -1) * size**-0.25 + 1
    return features.of_key(z, rows, scale)


def plain(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    added: Tensor | None,
    scale: float,
    features: FeatureMap,
    z_a: Tensor,
    z_b: Tensor,
    kappa: Tensor,
) -> tuple[Tensor, Tensor]:
    """T and what each key weighs in it."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = query @ key.mT * scale
    grown = (scores if added is None else scores + added).exp()
    seen = phi(query, features, kappa.shape[-1], scale)
    whole = grown.sum(-1, keepdim=True) + seen @ kappa[..., None]
    return (grown @ value + seen @ z_a @ z_b) / whole, grown / whole


@pytest.fixture
def oracle() -> Iterator[Callable[..., None]]:
    """`oracle(model, prefixes)` lets the attention of each block be `plain`; prefixes are (features, *tensors)."""
    held: dict[nn.Module, tuple[Any, ...]] = {}

    def attention(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        added = kwargs.get("position_bias")
        if mask is not None:
            added = mask if added is None else mask + added
        if module not in held:  # a decoder behind the blocks
            features = FEATURE_MAPS["elu"]()
            nothing = [query.new_zeros(query.shape[1], query.shape[-1], n) for n in (1, 1)]
            prefix = (features, nothing[0], nothing[1].mT, nothing[0][..., 0])
        else:
            prefix = held[module]
        scale = kwargs.get("scaling")
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        found, weights = plain(query, key, value, added, scale, *prefix)
        return found.transpose(1, 2), weights

    AttentionInterface.register("plain_oracle", attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register("plain_oracle", ALL_MASK_ATTENTION_FUNCTIONS["eager"])

    def use(model: Any, prefixes: list[tuple[Any, ...]]) -> None:
        for block, prefix in zip(anatomy(model).blocks, prefixes, strict=True):
            assert block.attention is not None
            held[block.attention.module] = prefix
            block.attention.module.config._attn_implementation_internal = "plain_oracle"
        model.set_attn_implementation("plain_oracle")

    yield use
    held.clear()


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("family", FITTING)
def test_whole_models_compute_the_plain_softmax(family: str, implementation: str, oracle: Callable[..., None]) -> None:
    model, batch = tiny(family, "base")
    batch = {name: value.double() if value.is_floating_point() else value for name, value in batch.items()}
    model = model.double()
    wanted_model = copy.deepcopy(model)
    model.set_attn_implementation(implementation)
    model = get_peft_model(model, inlay.NTKAttentionConfig(feature_multiplier=2, seed=0)).eval()
    stir(model)
    copies = []
    for layer in layers(model):
        prefix = layer.inlay_ntk_prefix["default"]
        tensors = [part.weight.detach().clone().requires_grad_() for part in (prefix.z_a, prefix.z_b, prefix.kappa)]
        assert not torch.equal(tensors[2], tensors[2].abs())  # some rho are negative
        copies.append((prefix.features, *tensors))
    oracle(wanted_model, [(features, z_a, z_b, rho.abs()) for features, z_a, z_b, rho in copies])
    keep = batch["attention_mask"].bool() if "attention_mask" in batch else ...
    found = model(**batch).last_hidden_state[keep]
    wanted = wanted_model(**batch).last_hidden_state[keep]
    # The rotary embedding, the softmax of T5 and others of Transformers are in float32 even here.
    torch.testing.assert_close(found, wanted, atol=1e-6, rtol=1e-6)
    coefficients = torch.randn_like(found)
    (found * coefficients).sum().backward()
    (wanted * coefficients).sum().backward()
    for layer, (_, *tensors) in zip(layers(model), copies, strict=True):
        prefix = layer.inlay_ntk_prefix["default"]
        for part, tensor in zip((prefix.z_a, prefix.z_b, prefix.kappa), tensors, strict=True):
            assert tensor.grad is not None
            torch.testing.assert_close(part.weight.grad, tensor.grad, atol=1e-5, rtol=1e-5)


def host(heads: int, size: int) -> ViTAttention:
    config = ViTConfig(hidden_size=heads * size, num_attention_heads=heads, attn_implementation="sdpa")
    return ViTAttention(config).double().eval()


@settings(deadline=None, max_examples=30)
@given(
    heads=st.integers(1, 3),
    size=st.integers(2, 5),
    rank=st.integers(1, 5),
    beta=st.integers(1, 4),
    kind=st.sampled_from(sorted(FEATURE_MAPS)),
    length=st.integers(1, 5),
    seed=st.integers(0, 9),
)
def test_every_map_and_rank_is_the_plain_softmax(
    heads: int, size: int, rank: int, beta: int, kind: str, length: int, seed: int
) -> None:
    torch.manual_seed(seed)
    config = inlay.NTKAttentionConfig(
        rank=min(rank, size), feature_multiplier=1 if kind == "taylor" else beta, feature_map=kind, seed=seed
    )
    module, rows = host(heads, size), config.rows(size)
    # kappa as a prefix would give it, so that Taylor's denominator stays positive
    keys = torch.randn(heads, 3, size, dtype=torch.float64)
    z, kappa = prefix_to_features(keys, torch.randn_like(keys), config.features(), features=rows)
    start = Start(config.features(), *low_rank(z, config.rank_at(size)), kappa)
    layer = module.inlay_ntk = NTKAttentionLayer(module)
    layer.attach()
    layer.update_layer("default", start)
    layer._active_adapter = "default"
    x = torch.randn(2, length, heads * size, dtype=torch.float64, requires_grad=True)
    found = module(x)[0]
    apart = [part.detach().clone().requires_grad_() for part in (start.z_a, start.z_b, kappa)]
    y = x.detach().clone().requires_grad_()
    query, key, value = (
        proj(y).unflatten(-1, (heads, size)).transpose(1, 2) for proj in (module.q_proj, module.k_proj, module.v_proj)
    )
    wanted = plain(query, key, value, None, size**-0.5, start.features, *apart)[0]
    wanted = module.o_proj(wanted.transpose(1, 2).flatten(-2))
    torch.testing.assert_close(found, wanted)
    coefficients = torch.randn_like(found)
    (found * coefficients).sum().backward()
    (wanted * coefficients).sum().backward()
    torch.testing.assert_close(x.grad, y.grad)
    prefix = layer.inlay_ntk_prefix["default"]
    assert len(list(prefix.parameters())) == (2 if kind == "taylor" else 3)
    for part, tensor in zip((prefix.z_a, prefix.z_b, prefix.kappa), apart, strict=True):
        if part.weight.requires_grad:
            torch.testing.assert_close(part.weight.grad, tensor.grad)


def test_gradients_are_those_of_finite_differences() -> None:
    torch.manual_seed(0)
    module = host(2, 2)
    layer = module.inlay_ntk = NTKAttentionLayer(module)
    layer.attach()
    tensors = [torch.randn(2, *shape, dtype=torch.float64) for shape in ((4, 1), (1, 2), (4,))]
    layer.update_layer("default", Start(FEATURE_MAPS["elu"](), *tensors))
    layer._active_adapter = "default"
    x = torch.randn(1, 3, 4, dtype=torch.float64, requires_grad=True)

    def run(x: Tensor, *parts: Tensor) -> Tensor:
        names = (f"inlay_ntk.inlay_ntk_prefix.default.{name}.weight" for name in ("z_a", "z_b", "kappa"))
        return torch.func.functional_call(module, dict(zip(names, parts, strict=True)), (x,))[0]

    assert torch.autograd.gradcheck(run, (x, *(tensor.requires_grad_() for tensor in tensors)))


def test_kappa_leaves_zero() -> None:
    kappa = Kappa(torch.tensor([0.0, -0.0, 2.0, -3.0]))
    found = kappa()
    assert torch.equal(found, torch.tensor([0.0, 0.0, 2.0, 3.0]))
    found.sum().backward()
    assert torch.equal(kappa.weight.grad, torch.tensor([1.0, 1.0, 1.0, -1.0]))


# Starts.


@pytest.mark.parametrize("family", FITTING)
def test_it_starts_as_the_base_and_leaves_it_at_the_first_step(family: str) -> None:
    for implementation in ("sdpa", "eager"):
        model, batch = tiny(family)
        model.set_attn_implementation(implementation)
        base = logits(model, batch)
        model = get_peft_model(model, inlay.NTKAttentionConfig())
        torch.testing.assert_close(logits(model, batch), base, atol=1e-5, rtol=1e-5)
    own = {name: parameter for name, parameter in trained_parameters(model).items() if "inlay_ntk" in name}
    for moved in (False, True):  # Z_A waits for Z_B, as in a LoRA
        model(**batch).loss.backward()
        for name, parameter in own.items():
            assert bool(parameter.grad.abs().sum() > 0) is (moved or ".z_a." not in name), name
        torch.optim.Adam(own.values(), lr=0.01).step()
        model.zero_grad()
        assert not torch.allclose(logits(model, batch), base, atol=1e-5)


@pytest.mark.parametrize("family", FITTING)
def test_the_scale_is_the_one_that_the_attention_function_is_told(family: str) -> None:
    model, batch = tiny(family, "base")
    told: dict[nn.Module, float] = {}

    def note(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any) -> Any:
        scaling = kwargs.get("scaling")
        told[module] = query.shape[-1] ** -0.5 if scaling is None else scaling
        return query.transpose(1, 2), None

    AttentionInterface.register("noting", note)
    ALL_MASK_ATTENTION_FUNCTIONS.register("noting", ALL_MASK_ATTENTION_FUNCTIONS["eager"])
    model.set_attn_implementation("noting")
    model(**batch)
    for block in anatomy(model).blocks:
        assert block.attention is not None
        assert scale_of(block.attention) == pytest.approx(told[block.attention.module])


@pytest.mark.parametrize("family", ["vit", "gpt2", "opt", "t5", "llama", "gemma"])
def test_a_prefix_start_is_the_prefix_through_the_frozen_projections(family: str) -> None:
    """With all ranks and a Taylor polynomial long enough it is exact prefix attention."""
    model, _ = tiny(family, "base")
    model = model.double()
    first = anatomy(model).blocks[0]
    assert first.attention is not None
    size = first.attention.head_size
    config = inlay.NTKAttentionConfig(
        feature_map="taylor", taylor_order=8, rank=size, start="prefix", prefix_length=5, seed=7, layers=[1]
    )
    at, width = first.attention, anatomy(model).hidden_size
    prefix = torch.randn(5, width, generator=torch.Generator().manual_seed(8)).double()
    with torch.no_grad():
        if at.fused:
            key, value = at.key.module(prefix)[:, width : 2 * width], at.value.module(prefix)[:, 2 * width :]
        else:
            key, value = at.key.module(prefix), at.value.module(prefix)
        key, value = (x.view(5, -1, size).transpose(0, 1) for x in (key, value))
        if family == "gemma":
            key = at.module.k_norm(key)
    layer = layers(get_peft_model(model, config))[0]
    heads = len(layer.inlay_ntk_prefix["default"].z_a.weight)
    torch.manual_seed(0)
    query = torch.randn(2, heads, 4, size, dtype=torch.float64)
    query = nn.functional.normalize(query, dim=-1) / (scale_of(at) * key.norm(dim=-1).max())  # scores up to 1
    own = torch.randn(2, key.shape[0], 3, size, dtype=torch.float64)
    hidden = torch.zeros(2, 1, 4, 3, dtype=torch.float64)
    found = layer.attend(None, query, own, own, hidden, scaling=scale_of(at))[0]  # type: ignore[arg-type]
    wanted = prefix_attention(query, own, own, key, value, scale=scale_of(at))
    torch.testing.assert_close(found.transpose(1, 2), wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", sorted(FEATURE_MAPS))
@pytest.mark.parametrize("start", ["zero", "prefix"])
def test_what_is_random_follows_from_the_seed_and_reloads(kind: str, start: str, tmp_path: Path) -> None:
    options = {"feature_map": kind, "start": start}
    torch.manual_seed(0)
    model, batch = adapted("bert", seed=None, **options)
    wanted = logits(model, batch)
    model.save_pretrained(tmp_path)
    seed = json.loads((tmp_path / "adapter_config.json").read_text())["seed"]
    torch.manual_seed(1)
    again = PeftModel.from_pretrained(tiny("bert")[0], str(tmp_path))
    assert torch.equal(logits(again, batch), wanted)
    same, other = (adapted("bert", seed=number, **options)[0] for number in (seed, seed + 1))
    for a, b, c in zip(layers(model), layers(same), layers(other), strict=True):
        state = a.state_dict()
        assert all(torch.equal(value, state[name]) for name, value in b.state_dict().items())
        assert not all(torch.equal(value, state[name]) for name, value in c.state_dict().items())


def test_z_a_starts_as_small_as_its_features_are_many() -> None:
    for multiplier in (1, 4):
        model = get_peft_model(tiny("bert")[0], inlay.NTKAttentionConfig(seed=0, feature_multiplier=multiplier, rank=8))
        drawn = torch.cat([layer.inlay_ntk_prefix["default"].z_a().flatten() for layer in layers(model)])
        assert float(drawn.std()) == pytest.approx((8 * multiplier) ** -0.5, rel=0.15)


def test_low_rank_is_the_nearest_of_its_rank() -> None:
    torch.manual_seed(0)
    z = torch.randn(2, 6, 4)
    for rank in range(1, 5):
        left, right = low_rank(z, rank)
        assert left.shape == (2, 6, rank)
        wanted = torch.linalg.svdvals(z.double())[:, rank:].square().sum(-1)
        torch.testing.assert_close((z - left @ right).square().sum((-1, -2)), wanted)


# Size.


def test_the_counts_are_those_of_the_formula() -> None:
    def count(model: nn.Module, **options: Any) -> int:
        model = get_peft_model(model, inlay.NTKAttentionConfig(newly_initialised=[], **options))
        return sum(parameter.numel() for parameter in trained_parameters(model).values())

    with torch.device("meta"):
        opt = OPTForCausalLM(
            OPTConfig(hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, ffn_dim=4096, vocab_size=32)
        )
        vit = ViTForImageClassification(ViTConfig())
    assert count(opt, rank=10, feature_multiplier=2) == 24 * 16 * (128 * 10 + 10 * 64 + 128) == 786_432
    assert count(vit, rank=32) == 12 * 12 * (64 * 32 + 32 * 64 + 64) == 599_040


def test_the_default_rank_is_sixteen_or_half_the_head_size() -> None:
    config = inlay.NTKAttentionConfig()
    assert [config.rank_at(size) for size in (1, 4, 32, 64, 128)] == [1, 2, 16, 16, 16]
    assert inlay.NTKAttentionConfig(rank=64).rank_at(64) == 64


# Text that grows: caches, padding on the left, packing.


@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.parametrize("family", ["llama", "gpt2", "opt", "gemma"])
def test_generation_with_a_cache_is_generation_without(family: str, cache: str | None) -> None:
    model, _ = adapted(family, "causal-lm")
    ids = torch.randint(3, 40, (2, 5), generator=torch.Generator().manual_seed(0))
    options: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": PAD, "eos_token_id": None}
    options |= {"output_logits": True, "return_dict_in_generate": True}
    whole = model.generate(input_ids=ids, use_cache=False, **options)
    kept = model.generate(input_ids=ids, use_cache=True, cache_implementation=cache, **options)
    assert torch.equal(whole.sequences, kept.sequences)
    torch.testing.assert_close(torch.stack(whole.logits), torch.stack(kept.logits), atol=1e-5, rtol=1e-5)
    with model.disable_adapter():
        base = model.generate(input_ids=ids, use_cache=True, **options)
    assert not torch.allclose(torch.stack(base.logits), torch.stack(kept.logits), atol=1e-3)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_padding_on_the_left_changes_nothing(family: str) -> None:
    model, _ = adapted(family, "causal-lm")
    ids = torch.randint(3, 40, (2, 6), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    options: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": PAD, "eos_token_id": None}
    padded = model.generate(input_ids=ids.masked_fill(mask == 0, PAD), attention_mask=mask, **options)
    alone = model.generate(input_ids=ids[1:, 3:], attention_mask=mask[1:, 3:], **options)
    assert torch.equal(padded[1, 6:], alone[0, 3:])
    # In a plain call the user says where the text begins, as `generate` does: phi sees positions, not distances.
    where = (mask.cumsum(1) - 1).clamp(min=0)
    whole = model(input_ids=ids, attention_mask=mask, position_ids=where).logits[1, 3:]
    torch.testing.assert_close(whole, model(input_ids=ids[1:, 3:]).logits[0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_gradients_at_the_start_are_as_large_with_padding_on_the_left(implementation: str) -> None:
    """The first real token is predicted from a row of padding, which sees nothing."""
    largest = []
    for real in (slice(3, None), slice(None, 3)):
        model, _ = tiny("llama", "causal-lm")
        model.set_attn_implementation(implementation)
        model = get_peft_model(model, inlay.NTKAttentionConfig(seed=0))
        ids = torch.randint(3, 40, (1, 6), generator=torch.Generator().manual_seed(0))
        mask = torch.zeros_like(ids)
        mask[:, real] = 1
        model(input_ids=ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100)).loss.backward()
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        largest.append(max(float(parameter.grad.abs().max()) for parameter in trained))
    assert 0 < largest[0] < 10 * largest[1]


def test_packed_texts_do_not_see_each_other_and_all_see_the_prefix() -> None:
    model, _ = adapted("llama", "causal-lm")
    ids = torch.randint(3, 40, (1, 7), generator=torch.Generator().manual_seed(0))
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2]])
    packed = model(input_ids=ids, position_ids=positions, use_cache=False).logits
    apart = [model(input_ids=piece).logits for piece in (ids[:, :4], ids[:, 4:])]
    torch.testing.assert_close(packed, torch.cat(apart, 1), atol=1e-5, rtol=1e-5)


# Beside others.


def test_two_prefixes_add_up() -> None:
    model, batch = adapted("bert", "base", rank=2)
    model.add_adapter("second", inlay.NTKAttentionConfig(rank=3, seed=5))
    model.set_adapter("second")
    stir(model, seed=3, only=".second.")
    model.base_model.set_adapter(["default", "second"])
    for layer in layers(model):
        assert layer.running() == ["default", "second"]
    both = outputs(model, batch)
    model.base_model.set_adapter(["second", "default"])
    torch.testing.assert_close(outputs(model, batch), both)
    sums = []
    for layer in layers(model):
        one, other = (layer.inlay_ntk_prefix[name] for name in ("default", "second"))
        z = one.z_a() @ one.z_b() + other.z_a() @ other.z_b()
        sums.append((low_rank(z.detach(), 8), (one.kappa() + other.kappa()).detach()))
    single, _ = adapted("bert", "base", rank=8)
    with torch.no_grad():
        for layer, ((z_a, z_b), kappa) in zip(layers(single), sums, strict=True):
            prefix = layer.inlay_ntk_prefix["default"]
            for part, value in zip((prefix.z_a, prefix.z_b, prefix.kappa), (z_a, z_b, kappa), strict=True):
                part.weight.copy_(value)
    torch.testing.assert_close(outputs(single, batch), both, atol=1e-5, rtol=1e-5)


def test_z_itself_is_z_of_all_ranks() -> None:
    """One matrix in place of its factors: the same outputs and gradients of kappa, alone and beside another prefix."""
    apart, batch = adapted("bert", "base", rank=8)
    whole, _ = adapted("bert", "base", factored=False)
    with torch.no_grad():
        for one, other in zip(layers(apart), layers(whole), strict=True):
            factors, own = one.inlay_ntk_prefix["default"], other.inlay_ntk_prefix["default"]
            assert own.z_b is None
            own.z_a.weight.copy_(factors.z_a.weight @ factors.z_b.weight)
            own.kappa.weight.copy_(factors.kappa.weight)
    torch.testing.assert_close(outputs(whole, batch), outputs(apart, batch))
    gradients = []
    for model in (apart, whole):
        model(**batch).last_hidden_state.square().mean().backward()
        gradients.append([layer.inlay_ntk_prefix["default"].kappa.weight.grad for layer in layers(model)])
        model.add_adapter("second", inlay.NTKAttentionConfig(rank=2, seed=5))
        model.set_adapter("second")
        stir(model, seed=3, only=".second.")
        model.base_model.set_adapter(["default", "second"])
    torch.testing.assert_close(gradients[1], gradients[0], atol=1e-6, rtol=1e-4)
    torch.testing.assert_close(outputs(whole, batch), outputs(apart, batch))


@torch.no_grad()
def test_z_itself_is_saved_and_starts_as_the_base_model(tmp_path: Path) -> None:
    base, batch = tiny("bert", "base")
    wanted = base.eval()(**batch).last_hidden_state
    model = get_peft_model(base, inlay.NTKAttentionConfig(factored=False, seed=0)).eval()
    torch.testing.assert_close(outputs(model, batch), wanted)
    stir(model)
    moved = outputs(model, batch)
    assert not torch.allclose(moved, wanted, atol=1e-3)
    model.save_pretrained(tmp_path)
    again = PeftModel.from_pretrained(tiny("bert", "base")[0], str(tmp_path))
    torch.testing.assert_close(outputs(again, batch), moved)
    with pytest.raises(InlayError, match=r"rank=3: Z itself \(factored=False\) has none"):
        inlay.NTKAttentionConfig(factored=False, rank=3)


def test_prefixes_seen_by_different_features_run_one_at_a_time() -> None:
    model, batch = adapted("bert", "base")
    model.add_adapter("second", inlay.NTKAttentionConfig(feature_multiplier=2))
    model.base_model.set_adapter(["default", "second"])
    with pytest.raises(InlayError, match=r"default, second have different feature maps.*set_adapter"):
        outputs(model, batch)


@pytest.mark.parametrize("first", ["e2vpt", "ntk-attention"])
def test_it_computes_what_methods_around_it_leave_of_keys_and_values(first: str) -> None:
    second = "ntk-attention" if first == "e2vpt" else "e2vpt"
    found = []
    for order in ((first, second), (second, first)):
        model, batch = tiny("vit")
        for method in order:
            torch.manual_seed(0)
            model = attach(model, method, settings={"seed": 3}, adapter_name=method.replace("-", "_"))
        stir(model)
        at = anatomy(model).blocks[0].attention
        assert at is not None
        assert children(at.module.config._attn_implementation) == ["inlay_e2vpt", "inlay_ntk"]
        found.append(logits(model, batch))
    only, _ = tiny("vit")
    only = attach(only, "ntk-attention", settings={"seed": 3}, adapter_name="ntk_attention")
    stir(only)
    torch.testing.assert_close(found[0], found[1], atol=1e-6, rtol=1e-6)
    assert not torch.allclose(found[0], logits(only, batch), atol=1e-4)


@pytest.mark.parametrize("family", ["bert", "llama", "t5"])
def test_eager_attention_says_what_each_key_weighs(family: str, oracle: Callable[..., None]) -> None:
    model, batch = tiny(family, "base")
    twin = copy.deepcopy(model)
    model.set_attn_implementation("eager")
    model = get_peft_model(model, inlay.NTKAttentionConfig(seed=0)).eval()
    stir(model)
    prefixes = [layer.inlay_ntk_prefix["default"] for layer in layers(model)]
    oracle(twin, [(prefix.features, *(part.detach() for part in prefix())) for prefix in prefixes])
    found = model(**batch, output_attentions=True).attentions
    wanted = twin(**batch, output_attentions=True).attentions
    real = batch["attention_mask"].bool()
    for a, b in zip(found, wanted, strict=True):
        rows = a.transpose(1, 2)[real]
        torch.testing.assert_close(rows, b.transpose(1, 2)[real], atol=1e-5, rtol=1e-4)
        assert bool((rows.sum(-1) < 1).all())  # the rest is the prefix's


def test_dropout_reaches_the_keys() -> None:
    model, batch = adapted("bert")
    model.get_base_model().config.attention_probs_dropout_prob = 0.5
    for layer in layers(model):
        layer.host.dropout.p = 0.5
        layer.host.train()
    found = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        found.append(model(**batch).logits)
    assert torch.equal(found[0], found[1])
    assert not torch.allclose(found[0], found[2])


@pytest.mark.parametrize("kind", sorted(FEATURE_MAPS))
def test_half_precision_is_near_single(kind: str) -> None:
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        model, batch = tiny("llama")
        model = get_peft_model(model.to(dtype), inlay.NTKAttentionConfig(seed=0, feature_map=kind)).eval()
        stir(model)
        assert all(parameter.dtype == torch.float32 for layer in layers(model) for parameter in layer.parameters())
        found.append(logits(model, batch))
    assert found[1].dtype == torch.bfloat16
    torch.testing.assert_close(found[1].float(), found[0], atol=0.1, rtol=0.1)


# What is refused.


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank": 0}, "rank=0"),
        ({"rank": 2.5}, r"rank=2\.5"),
        ({"feature_multiplier": 0}, "feature_multiplier=0"),
        ({"prefix_length": 0}, "prefix_length=0"),
        ({"feature_map": "relu"}, r"Unknown feature_map 'relu'.*elu, favor, paper, taylor"),
        ({"start": "random"}, r"Unknown start 'random'.*prefix, text, zero"),
        ({"start": "text"}, r"start='text' begins from a prompt.*prompt_ids"),
        ({"start": "text", "prompt_ids": []}, r"prompt_ids is empty"),
        ({"start": "text", "prompt_ids": [3, "w4"]}, r"prompt_ids=\[3, 'w4'\] will not do: give a list"),
        ({"prompt_ids": [3]}, r"prompt_ids are read where start='text'"),
        ({"feature_map": "taylor", "taylor_order": 3}, "taylor_order=3: give 2, 4"),
        ({"feature_map": "taylor", "taylor_order": 0}, "taylor_order=0"),
        ({"feature_map": "taylor", "feature_multiplier": 2}, "feature_multiplier=2"),
    ],
)
def test_settings_that_make_no_sense_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InlayError, match=message):
        inlay.NTKAttentionConfig(**options)


def test_a_rank_beyond_the_head_size_is_refused_before_anything_is_attached() -> None:
    model, _ = tiny("bert")
    with pytest.raises(InlayError, match=r"rank=9 is larger than the model's head size, 8.*1 to 8"):
        get_peft_model(model, inlay.NTKAttentionConfig(rank=9))
    assert not layers(model)
    get_peft_model(model, inlay.NTKAttentionConfig(rank=8))


@pytest.mark.parametrize(
    ("family", "reason"),
    [(family, "attention interface") for family in OFF_THE_INTERFACE]
    + [(family, "it has no attention") for family in WITHOUT_ATTENTION],
)
def test_models_without_a_place_for_it_are_refused(family: str, reason: str) -> None:
    model, _ = tiny(family)
    with pytest.raises(InlayError, match=rf"{type(model).__name__}: .*{reason}.*These work on it: "):
        get_peft_model(model, inlay.NTKAttentionConfig())


def test_timm_is_refused() -> None:
    timm = pytest.importorskip("timm", reason="needs timm, which is an extra")
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=1, num_classes=3)
    with pytest.raises(InlayError, match=r"VisionTransformer: .* does not look its function up"):
        get_peft_model(model, inlay.NTKAttentionConfig())


def test_capped_scores_are_refused() -> None:
    shape = {"hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
    model = Gemma2ForCausalLM(Gemma2Config(**shape, num_hidden_layers=1, intermediate_size=8, vocab_size=8))
    with pytest.raises(InlayError, match="Gemma2ForCausalLM: Gemma2Attention caps its scores"):
        get_peft_model(model, inlay.NTKAttentionConfig())
    model.model.layers[0].self_attn.attn_logit_softcapping = None
    adapted = get_peft_model(model, inlay.NTKAttentionConfig())
    model.model.layers[0].self_attn.attn_logit_softcapping = 50.0
    with pytest.raises(InlayError, match="Gemma2Attention changes its scores by 'softcap'"):
        adapted(input_ids=torch.zeros(1, 2, dtype=torch.long))


def test_a_sink_among_the_scores_is_refused() -> None:
    """As gpt-oss hands one to its attention function."""
    model, _ = adapted("llama", "causal-lm")
    with pytest.raises(InlayError, match="LlamaAttention changes its scores by 's_aux'"):
        model(input_ids=torch.zeros(1, 2, dtype=torch.long), s_aux=torch.zeros(4))


def test_an_implementation_with_other_masks_is_refused_and_runs_when_disabled() -> None:
    model, batch = adapted("llama", "causal-lm")
    wanted = logits(model, batch)
    AttentionInterface.register("another", sdpa_attention_forward)
    ALL_MASK_ATTENTION_FUNCTIONS.register("another", ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    model.get_base_model().set_attn_implementation("another")
    with pytest.raises(InlayError, match=r"'another': model.set_attn_implementation"):
        logits(model, batch)
    with model.disable_adapter():
        assert not torch.allclose(logits(model, batch), wanted)
    model.get_base_model().set_attn_implementation("sdpa")
    assert torch.equal(logits(model, batch), wanted)


def test_an_adapter_of_more_layers_is_refused_on_load(tmp_path: Path) -> None:
    adapted("llama", "causal-lm")[0].save_pretrained(tmp_path)
    model, _ = tiny("llama", "causal-lm")
    model.model.layers = model.model.layers[:1]
    model.config.num_hidden_layers = 1
    with pytest.raises(InlayError, match=r"has no 'model.layers.1.self_attn': it belongs to another model"):
        PeftModel.from_pretrained(model, str(tmp_path))


def test_heads_of_another_size_are_refused_on_load(tmp_path: Path) -> None:
    model, _ = adapted("vit")
    save(model, "ntk-attention", tmp_path)
    config = copy.deepcopy(tiny("vit")[0].config)
    config.num_attention_heads = 4
    for load in (
        lambda: PeftModel.from_pretrained(ViTForImageClassification(config), str(tmp_path)),
        lambda: restore(ViTForImageClassification(config), "ntk-attention", tmp_path),
    ):
        with pytest.raises(InlayError, match=r"shape \W2, 8, 4\W.*needs \W4, 4, 2\W"):
            load()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_values_that_are_not_finite_are_refused_on_load(bad: float, tmp_path: Path) -> None:
    model, _ = adapted("vit")
    model.save_pretrained(tmp_path)
    file = tmp_path / "adapter_model.safetensors"
    tensors = load_file(file)
    name = next(name for name in tensors if "kappa" in name)
    tensors[name][0, 0] = bad
    save_file(tensors, file, metadata={"format": "pt"})
    for load in (
        lambda: PeftModel.from_pretrained(tiny("vit")[0], str(tmp_path)),
        lambda: restore(tiny("vit")[0], "ntk-attention", tmp_path),
    ):
        with pytest.raises(InlayError, match="not finite"):
            load()
