"""E2VPT against plain attention in float64; pruning by importance, and rewinding."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import plain_vit
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import PeftModel, get_peft_model
from plain_vit import Prompting
from torch import Tensor, nn
from transformers import ViTConfig
from transformers.models.vit.modeling_vit import ViTAttention

import inlay
from inlay.errors import InlayError
from inlay.methods.attach import attach, restore, save, trained_parameters
from inlay.methods.e2vpt.layer import AttentionPlace, E2VPTPromptLayer, KeyValueLayer
from inlay.methods.e2vpt.pruning import Importance, importance, prune, rewind
from probing import logits
from zoo import tiny

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
BLOCKS, HIDDEN = 3, 16


def host(heads: int, size: int, implementation: str) -> ViTAttention:
    config = ViTConfig(hidden_size=heads * size, num_attention_heads=heads, attn_implementation=implementation)
    return ViTAttention(config).double().eval()


def key_values(host: ViTAttention, tokens: int, shared: bool, seed: int = 0) -> tuple[KeyValueLayer, nn.Parameter]:
    config = inlay.E2VPTConfig(num_kv_tokens=tokens, share_key_value=shared, seed=seed)
    layer = host.inlay_e2vpt = KeyValueLayer(host)
    layer.attach()
    layer.update_layer("default", AttentionPlace(config, 1, host.num_attention_heads, host.head_dim))
    layer._active_adapter = "default"
    return layer, layer.inlay_e2vpt_key_value["default"].weight


def plain(host: ViTAttention, x: Tensor, weight: Tensor, hidden: Tensor | None = None) -> Tensor:
    return plain_vit.attention(host, x, 1, Prompting(keys_values={1: (weight[0], weight[-1])}), hidden)


@settings(deadline=None, max_examples=25)
@given(
    batch=st.integers(1, 3),
    length=st.integers(1, 6),
    heads=st.integers(1, 3),
    size=st.integers(1, 4),
    tokens=st.integers(1, 5),
    shared=st.booleans(),
    seed=st.integers(0, 9),
)
def test_attention_is_that_over_prompts_and_keys(
    batch: int, length: int, heads: int, size: int, tokens: int, shared: bool, seed: int
) -> None:
    torch.manual_seed(seed)
    module = host(heads, size, "sdpa")
    _, weight = key_values(module, tokens, shared, seed)
    assert weight.shape == (1 if shared else 2, tokens, heads * size)
    x = torch.randn(batch, length, heads * size, dtype=torch.float64)
    copied = weight.detach().clone().requires_grad_()
    found, wanted = module(x)[0], plain(module, x, copied)
    torch.testing.assert_close(found, wanted)
    coefficients = torch.randn_like(found)
    (found * coefficients).sum().backward()
    (wanted * coefficients).sum().backward()
    torch.testing.assert_close(weight.grad, copied.grad)


@pytest.mark.parametrize("shared", [True, False])
def test_gradients_are_those_of_finite_differences(shared: bool) -> None:
    torch.manual_seed(0)
    module = host(2, 2, "sdpa")
    layer, weight = key_values(module, 2, shared)
    x = torch.randn(1, 3, 4, dtype=torch.float64, requires_grad=True)

    def run(x: Tensor, weight: Tensor) -> Tensor:
        name = "inlay_e2vpt.inlay_e2vpt_key_value.default.weight"
        return torch.func.functional_call(module, {name: weight}, (x,))[0]

    assert torch.autograd.gradcheck(run, (x, weight.detach().clone().requires_grad_()))
    assert layer.running() == ["default"]


@pytest.mark.parametrize("kind", ["bool", "float"])
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_a_mask_hides_keys_and_never_prompts(implementation: str, kind: str) -> None:
    torch.manual_seed(0)
    module = host(2, 4, implementation)
    _, weight = key_values(module, 3, shared=False)
    x = torch.randn(2, 5, 8, dtype=torch.float64)
    hidden = torch.zeros(2, 5, dtype=torch.bool)
    hidden[0, 2:] = True
    mask = ~hidden[:, None, None, :].expand(-1, 1, 5, -1)
    if kind == "float" or implementation == "eager":
        mask = torch.zeros(mask.shape, dtype=x.dtype).masked_fill(~mask, float("-inf"))
    rounding = 1e-6 if implementation == "eager" else 1e-12  # Transformers' eager softmax is in float32
    torch.testing.assert_close(module(x, mask)[0], plain(module, x, weight, hidden), rtol=rounding, atol=rounding)


def adapted(family: str = "vit", **options: Any) -> tuple[PeftModel, dict[str, Tensor]]:
    """A tiny model in float64 with prompts away from their start."""
    model, batch = tiny(family)
    model = get_peft_model(model, inlay.E2VPTConfig(**{"num_prompt_tokens": 4} | options)).double().eval()
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        for parameter in trained_parameters(model).values():
            parameter.add_(torch.randn_like(parameter), alpha=0.3)
    return model, {name: value.double() if value.is_floating_point() else value for name, value in batch.items()}


def prompt_layers(model: nn.Module) -> list[E2VPTPromptLayer]:
    return [module for module in model.modules() if isinstance(module, E2VPTPromptLayer)]


def prompting(model: nn.Module, rows: dict[int, list[int]] | None = None) -> Prompting:
    """The model's prompts as plain tensors; of block b the rows given, else all."""
    found = Prompting()
    for layer in prompt_layers(model):
        prompts: Any = layer.pieces["default"]
        if prompts.weight is not None:
            block = prompts.place.block
            tokens = prompts.tokens().detach().clone()
            found.prompts[block] = tokens if rows is None else tokens[rows[block]]
    attentions = [module for module in model.modules() if isinstance(module, KeyValueLayer)]
    for layer in attentions:
        added: Any = layer.inlay_e2vpt_key_value["default"]
        found.keys_values[added.place.block] = (added.weight[0].detach(), added.weight[-1].detach())
    return found


def plain_logits(model: PeftModel, batch: dict[str, Tensor], what: Prompting) -> Tensor:
    base: Any = model.get_base_model()

    class Bare:
        vit = base.vit
        classifier = base.classifier.modules_to_save["default"]

    return plain_vit.logits(Bare, batch["pixel_values"], what)


@pytest.mark.parametrize("options", [{}, {"deep": False}, {"num_kv_tokens": 0}, {"layers": [2]}], ids=str)
def test_the_whole_model_is_the_plain_one(options: dict[str, Any]) -> None:
    model, batch = adapted(share_key_value=False, **options)
    wanted = plain_logits(model, batch, prompting(model))
    torch.testing.assert_close(logits(model, batch), wanted, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize(
    ("options", "count"),
    [
        ({}, BLOCKS * (10 + 5) * HIDDEN),
        ({"share_key_value": False}, BLOCKS * (10 + 2 * 5) * HIDDEN),
        ({"num_kv_tokens": 0}, BLOCKS * 10 * HIDDEN),
        ({"deep": False, "num_kv_tokens": 2}, (10 + BLOCKS * 2) * HIDDEN),
        ({"layers": [1, 3]}, 2 * (10 + 5) * HIDDEN),
    ],
    ids=str,
)
def test_as_many_parameters_as_the_formula_says(options: dict[str, Any], count: int) -> None:
    model = get_peft_model(tiny("vit")[0], inlay.E2VPTConfig(**options))
    assert own_parameters(model) == count


def own_parameters(model: nn.Module) -> int:
    return sum(p.numel() for name, p in trained_parameters(model).items() if "inlay_e2vpt_" in name)


def test_importance_is_the_gradient_of_masks() -> None:
    model, batch = adapted(num_segments=4)
    halves = [{name: value[part] for name, value in batch.items()} for part in (slice(0, 1), slice(1, 3))]
    state, modes = copy.deepcopy(model.state_dict()), [module.training for module in model.train().modules()]
    scores = importance(model, halves)
    assert [module.training for module in model.modules()] == modes
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())

    model.eval()
    tokens = {block: torch.zeros(4, dtype=torch.float64) for block in (1, 2, 3)}
    segments = {block: torch.zeros(4, 4, dtype=torch.float64) for block in (1, 2, 3)}
    for half in halves:
        what = prompting(model)
        rho = {block: torch.ones(4, 1, 1, dtype=torch.float64, requires_grad=True) for block in what.prompts}
        sigma = {block: torch.ones(4, 4, 1, dtype=torch.float64, requires_grad=True) for block in what.prompts}
        for block, value in what.prompts.items():
            what.prompts[block] = (value.view(4, 4, 4) * rho[block] * sigma[block]).view(4, 16)
        nn.functional.cross_entropy(plain_logits(model, half, what), half["labels"]).backward()
        for block in rho:
            tokens[block] += rho[block].grad.abs().view(-1) / 2  # type: ignore[union-attr]
            segments[block] += sigma[block].grad.abs().view(4, 4) / 2  # type: ignore[union-attr]
    for block in tokens:
        torch.testing.assert_close(scores.tokens[block], tokens[block])
        torch.testing.assert_close(scores.segments[block], segments[block])


@pytest.mark.parametrize("deep", [True, False])
def test_a_pruned_prompt_is_as_if_it_had_never_been(deep: bool) -> None:
    model, batch = adapted(deep=deep)
    scores = importance(model, [batch])
    rows = {block: sorted(value.topk(2).indices.tolist()) for block, value in scores.tokens.items()}
    absent = plain_logits(model, batch, prompting(model, rows))
    zeroed = prompting(model)
    for block, value in zeroed.prompts.items():
        gone = torch.ones(4, 1, dtype=torch.float64)
        gone[rows[block]] = 0
        zeroed.prompts[block] = value * (1 - gone)
    prune(model, scores, token_ratio=0.5)
    torch.testing.assert_close(logits(model, batch), absent, rtol=1e-9, atol=1e-10)
    assert not torch.allclose(logits(model, batch), plain_logits(model, batch, zeroed))
    assert own_parameters(model) == ((BLOCKS if deep else 1) * 2 + BLOCKS * 5) * HIDDEN


def test_a_pruned_segment_is_zero_and_no_parameter() -> None:
    model, batch = adapted(num_segments=8)
    before = {layer: layer.pieces["default"].weight.detach().clone() for layer in prompt_layers(model)}
    scores = importance(model, [batch])
    prune(model, scores, segment_ratio=0.75)
    assert own_parameters(model) == BLOCKS * (4 * 2 * 2 + 5 * HIDDEN)
    for block, (layer, weight) in enumerate(before.items(), start=1):
        prompts: Any = layer.pieces["default"]
        tokens, pieces = prompts.tokens().detach().view(4, 8, 2), weight.view(4, 8, 2)
        for row in range(4):
            best = set(scores.segments[block][row].topk(2).indices.tolist())
            for piece in range(8):
                assert torch.equal(tokens[row, piece], pieces[row, piece] if piece in best else torch.zeros(2).double())
    found = model.train()(**batch).loss
    found.backward()
    assert all(p.grad is not None for name, p in trained_parameters(model).items() if "inlay_e2vpt_" in name)


@pytest.mark.parametrize("deep", [True, False])
def test_what_is_left_reloads_to_the_bit_and_is_rewound(deep: bool, tmp_path: Path) -> None:
    torch.manual_seed(3)
    model, batch = tiny("vit")
    model = attach(model, "e2vpt", settings={"deep": deep})
    start = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = torch.optim.SGD(trained_parameters(model).values(), lr=0.1)
    model(**batch).loss.backward()
    optimizer.step()
    scores = importance(model, [batch])
    prune(model, scores, token_ratio=0.3, segment_ratio=0.5)
    prune(model, importance(model, [batch]), token_ratio=0.5, segment_ratio=0.5)
    wanted = logits(model, batch)
    save(model, "e2vpt", tmp_path)
    again = restore(tiny("vit")[0], "e2vpt", tmp_path)
    assert torch.equal(logits(again, batch), wanted)
    plain_peft = PeftModel.from_pretrained(tiny("vit")[0], str(tmp_path)).eval()
    assert torch.equal(logits(plain_peft, batch), wanted)
    kept = json.loads((tmp_path / "adapter_config.json").read_text())["kept"]
    assert {len(tokens) for tokens in kept.values()} == {4}  # of 10: three go, then half of seven, rounded down
    assert {len(segments) for tokens in kept.values() for _, segments in tokens} == {4}  # 16, 8, 4

    rewind(again)
    for layer in prompt_layers(again):
        prompts: Any = layer.pieces["default"]
        if prompts.weight is not None:
            block = prompts.place.block
            full = start[f"base_model.model.vit.layers.{block - 1}.inlay_e2vpt.inlay_e2vpt_prompts.default.weight"]
            for row, (token, segments) in enumerate(kept[str(block)]):
                pieces = full[token].view(16, 1)
                assert torch.equal(prompts.weight[row], pieces[segments].view(-1))
    found = again.state_dict()
    for name, value in start.items():
        if "key_value" in name or "classifier" in name:
            assert torch.equal(found[name], value), name


def test_a_pruned_model_trains_copies_and_compiles() -> None:
    model, batch = tiny("vit")
    model = attach(model, "e2vpt")
    prune(model, importance(model, [batch]), token_ratio=0.5, segment_ratio=0.5)
    rewind(model)
    other = copy.deepcopy(model)
    wanted = logits(model, batch)
    assert torch.equal(logits(other, batch), wanted)
    torch._dynamo.reset()
    del model.get_base_model().vit.layers[1:]  # compiling takes time for each
    del other.get_base_model().vit.layers[1:]
    wanted = logits(model, batch)
    assert torch.equal(logits(torch.compile(model, backend="eager"), batch), wanted)
    optimizer = torch.optim.SGD(trained_parameters(model).values(), lr=0.1)
    model(**batch).loss.backward()
    optimizer.step()
    assert not torch.equal(logits(model, batch), wanted)
    assert torch.equal(logits(other, batch), wanted)


def test_mistakes_in_pruning_are_named() -> None:
    model, batch = adapted()
    scores = importance(model, [batch])
    with pytest.raises(InlayError, match="token_ratio=1"):
        prune(model, scores, token_ratio=1)
    with pytest.raises(InlayError, match=r"segment_ratio=-0\.5"):
        prune(model, scores, segment_ratio=-0.5)
    with pytest.raises(InlayError, match="no batch"):
        importance(model, [])
    prune(model, scores, token_ratio=0.5)
    with pytest.raises(InlayError, match="compute them again"):
        prune(model, scores, token_ratio=0.5)
    with pytest.raises(InlayError, match="compute them again"):
        prune(model, Importance({}, {}))
    with pytest.raises(InlayError, match="no e2vpt adapter"):
        importance(tiny("vit")[0], [batch])  # type: ignore[arg-type]
    odd, batch = adapted(num_segments=5)
    with pytest.raises(InlayError, match=r"These do: \[1, 2, 4, 8, 16\]"):
        importance(odd, [batch])


@pytest.mark.parametrize("options", [{"num_kv_tokens": -1}, {"num_segments": 0}], ids=str)
def test_settings_that_make_no_sense_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(InlayError, match=next(iter(options))):
        inlay.E2VPTConfig(**options)
