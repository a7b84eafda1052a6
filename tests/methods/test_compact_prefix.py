"""The compact prefix in real (tiny) models: what it computes, sizes by head, mixed rows, and what is refused."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor

import inlay
from inlay.errors import InlayError
from inlay.methods.compact_prefix.layer import CompactPrefixLayer
from inlay.methods.prompts import read
from inlay.methods.shared_prompt import sharing
from zoo import tiny

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
FAMILIES = ("llama", "gpt2", "opt", "gemma")
IDS = [5, 9, 3, 7, 11, 6, 8, 4]


def decoder(family: str = "llama") -> tuple[Any, dict[str, Tensor]]:
    model, batch = tiny(family, "causal-lm")
    return model.eval(), {name: value for name, value in batch.items() if name != "labels"}


def adapted(family: str = "llama", seed: int = 1, **settings: Any) -> tuple[Any, dict[str, Tensor]]:
    model, batch = decoder(family)
    found = get_peft_model(model, inlay.CompactPrefixConfig(task_type="CAUSAL_LM", **settings))
    stir(found, seed)
    return found.eval(), batch


@torch.no_grad()
def stir(model: Any, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.add_(torch.randn(parameter.shape, generator=generator))


def layers(model: Any) -> list[CompactPrefixLayer]:
    return [module for module in model.modules() if isinstance(module, CompactPrefixLayer)]


@torch.no_grad()
def logits(model: Any, batch: dict[str, Tensor], **more: Any) -> Tensor:
    return model(**batch, **more).logits


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_one_layer_computes_its_equation(implementation: str) -> None:
    """By the definition, head by head in float64, with queries and keys as the attention function receives them."""
    model, batch = adapted(size=3, layers=[1])
    model.base_model.model.set_attn_implementation(implementation)
    (layer,) = layers(model)
    caught: dict[str, Any] = {}
    computed = layer.softmax

    def softmax(query: Tensor, key: Tensor, value: Tensor, *rest: Any, **how: Any) -> Any:
        caught.update(
            query=query, key=key, value=value, scale=how["scale"], found=computed(query, key, value, *rest, **how)[0]
        )
        return caught["found"], None

    layer.softmax = softmax  # type: ignore[method-assign]
    rows = batch["input_ids"][:1, :6]
    logits(model, {"input_ids": rows})
    query, key, value = (caught[name].double() for name in ("query", "key", "value"))
    prefix_key, prefix_value, bias = (part.double() for part in layer.pieces["default"]())
    groups = query.shape[1] // key.shape[1]
    for head in range(query.shape[1]):
        own = head // groups
        for place in range(rows.shape[1]):
            q = query[0, head, place]
            text = (key[0, own, : place + 1] @ q * caught["scale"]).exp()
            prefix = (prefix_key[own] @ q * caught["scale"] + bias[own]).exp()
            top = text @ value[0, own, : place + 1] + prefix @ prefix_value[own]
            right = top / (text.sum() + prefix.sum())
            torch.testing.assert_close(caught["found"][0, head, place].double(), right, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_text_start_of_the_prompts_own_length_is_the_prompt(family: str) -> None:
    model, batch = decoder(family)
    prompt = read(model, IDS)
    config = inlay.CompactPrefixConfig(task_type="CAUSAL_LM", start="text", prompt_ids=IDS, size=len(IDS))
    ids = batch["input_ids"][:1, :4]
    if family in ("llama", "opt"):  # Gemma 3 has windows, which forget a prompt; see docs/compress.md
        with sharing(model, prompt):
            positions = torch.arange(prompt.following, prompt.following + 4)[None]
            right = logits(model, {"input_ids": ids, "position_ids": positions})
    found = get_peft_model(model, config).eval()
    assert found.peft_config["default"].prompt_length == len(IDS)
    assert found.peft_config["default"].to_dict()["prompt_ids"] is None
    for layer in layers(found):
        _, _, bias = layer.pieces["default"]()
        assert torch.equal(bias, torch.zeros_like(bias))
    if family == "llama":
        torch.testing.assert_close(logits(found, {"input_ids": ids}), right, atol=1e-5, rtol=1e-5)
    elif family == "opt":
        torch.testing.assert_close(
            logits(found, {"input_ids": ids, "position_ids": positions}), right, atol=1e-5, rtol=1e-5
        )


def test_heads_of_unlike_sizes_are_as_if_each_were_alone(tmp_path: Path) -> None:
    """What hides the places that fill up is exact, and both lengths survive a reload."""
    model, batch = adapted(size=4)
    names = model.peft_config["default"].target_modules
    heads = len(layers(model)[0].pieces["default"].sizes)
    sizes = {name: [1 + (3 * number + head) % 5 for head in range(heads)] for number, name in enumerate(names)}
    uneven, _ = adapted(size=4, sizes=sizes)
    for layer, (name, own) in zip(layers(uneven), sizes.items(), strict=True):
        piece = layer.pieces["default"]
        assert list(piece.sizes) == own, name
        key, value, bias = piece()
        assert key.shape[1] == max(own)
        begin = 0
        for head, size in enumerate(own):
            assert torch.equal(key[head, :size], piece.keys.weight[begin : begin + size])
            assert torch.equal(value[head, :size], piece.values.weight[begin : begin + size])
            assert (bias[head, size:] <= -1e4).all()
            begin += size
        assert begin == len(piece.biases.weight)
    before = logits(uneven, batch)
    uneven.save_pretrained(tmp_path)
    again = PeftModel.from_pretrained(decoder()[0], str(tmp_path)).eval()
    assert torch.equal(logits(again, batch), before)
    copied = copy.deepcopy(uneven)
    stir(copied, 5)
    assert torch.equal(logits(uneven, batch), before)


def test_without_biases_it_is_prefix_tuning() -> None:
    model, batch = adapted(size=3, biases=False)
    with_biases, _ = adapted(size=3)
    assert not any("biases" in name for name, _ in model.named_parameters())
    with torch.no_grad():
        for mine, other in zip(layers(model), layers(with_biases), strict=True):
            other.pieces["default"].keys.weight.copy_(mine.pieces["default"].keys.weight)
            other.pieces["default"].values.weight.copy_(mine.pieces["default"].values.weight)
            other.pieces["default"].biases.weight.zero_()
    torch.testing.assert_close(logits(model, batch), logits(with_biases, batch), atol=1e-6, rtol=1e-6)


def three(model: Any) -> None:
    """Two more adapters of other sizes, one of them without biases."""
    for name, size, biases in (("b", 5, True), ("c", 2, False)):
        model.add_adapter(name, inlay.CompactPrefixConfig(task_type="CAUSAL_LM", size=size, biases=biases))
        model.set_adapter(name)
        stir(model, size)
    model.set_adapter("default")
    model.eval()


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_with_prompts_of_their_own(family: str) -> None:
    model, batch = adapted(family, size=3)
    three(model)
    batch = {name: value[:1].expand(5, -1) for name, value in batch.items()}
    names = ["b", "__base__", "default", "c", "b"]
    found = logits(model, batch, adapter_names=names)
    for row, name in enumerate(names):
        one = {key: value[row : row + 1] for key, value in batch.items()}
        if name == "__base__":
            with model.disable_adapter():
                right = logits(model, one)
        else:
            model.set_adapter(name)
            right = logits(model, one)
        torch.testing.assert_close(found[row : row + 1], right, atol=2e-5, rtol=1e-4)
    assert (found[0] - found[3]).abs().max() > 1e-3
    torch.testing.assert_close(found[0], found[4], atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("more", [{}, {"num_beams": 2}, {"num_return_sequences": 2, "num_beams": 2}])
def test_rows_generate_with_prompts_of_their_own(more: dict[str, int]) -> None:
    model, batch = adapted(size=3)
    three(model)
    ids = batch["input_ids"][:1, :4].expand(4, -1)
    names = ["c", "default", "__base__", "b"]
    how: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None, **more}
    with torch.no_grad():
        found = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), adapter_names=names, **how)
        each = more.get("num_return_sequences", 1)
        for row, name in enumerate(names):
            one = {"input_ids": ids[:1], "attention_mask": torch.ones_like(ids[:1])}
            if name == "__base__":
                with model.disable_adapter():
                    right = model.generate(**one, **how)
            else:
                model.set_adapter(name)
                right = model.generate(**one, **how)
            assert torch.equal(found[row * each : (row + 1) * each], right), name
    assert len({tuple(row) for row in found.tolist()}) > 1


def test_what_was_gathered_for_one_pass_is_not_used_in_the_next() -> None:
    model, batch = adapted(size=3)
    three(model)
    batch = {name: value[:1].expand(2, -1) for name, value in batch.items()}
    first = logits(model, batch, adapter_names=["b", "c"])
    other = logits(model, batch, adapter_names=["c", "b"])
    torch.testing.assert_close(first.flip(0), other, atol=1e-6, rtol=1e-6)
    model.set_adapter("b")
    stir(model, 9)
    assert not torch.allclose(logits(model, batch, adapter_names=["b", "c"])[0], first[0], atol=1e-3)


def test_too_few_names_and_training_are_refused() -> None:
    model, batch = adapted(size=3)
    three(model)
    with pytest.raises(InlayError, match=r"1 names, and a layer was given"):
        logits(model, batch, adapter_names=["b"])
    with pytest.raises(InlayError, match=r"Unknown adapter in adapter_names 'd'"):
        logits(model, batch, adapter_names=["d"] * len(batch["input_ids"]))


def test_two_running_prefixes_stand_side_by_side() -> None:
    """Their sums add up, in either order, as one adapter with the keys of both."""
    model, batch = adapted(size=3)
    three(model)
    model.base_model.set_adapter(["default", "b", "c"])
    found = logits(model, batch)
    model.base_model.set_adapter(["c", "b", "default"])
    torch.testing.assert_close(logits(model, batch), found, atol=1e-5, rtol=1e-4)
    whole, _ = adapted(size=3 + 5 + 2)
    with torch.no_grad():
        for mine, other in zip(layers(model), layers(whole), strict=True):
            parts = [mine.pieces[name]() for name in ("default", "b", "c")]
            bias = [torch.zeros_like(key[..., 0]) if own is None else own for key, _, own in parts]
            piece = other.pieces["default"]
            piece.keys.weight.copy_(torch.cat([key for key, _, _ in parts], 1).flatten(0, 1))
            piece.values.weight.copy_(torch.cat([value for _, value, _ in parts], 1).flatten(0, 1))
            piece.biases.weight.copy_(torch.cat(bias, 1).flatten())
    torch.testing.assert_close(logits(whole, batch), found, atol=1e-5, rtol=1e-4)


def test_beside_a_lora_and_not_with_another_softmax(tmp_path: Path) -> None:
    model, batch = decoder()
    both = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False), adapter_name="low")
    get_peft_model(both.get_base_model(), inlay.CompactPrefixConfig(size=2), adapter_name="short")
    ntk = get_peft_model(decoder()[0], inlay.NTKAttentionConfig(), adapter_name="ntk")
    with pytest.raises(InlayError, match=r"has a NTKAttentionLayer already.*compact-prefix.*layers"):
        get_peft_model(ntk.get_base_model(), inlay.CompactPrefixConfig(size=2), adapter_name="short")
    apart = get_peft_model(decoder()[0], inlay.NTKAttentionConfig(layers=[1]), adapter_name="ntk")
    get_peft_model(apart.get_base_model(), inlay.CompactPrefixConfig(size=2, layers=[2]), adapter_name="short")
    assert torch.isfinite(logits(apart, batch)).all()


def test_attention_weights_are_the_texts_share() -> None:
    model, batch = adapted(size=3)
    model.base_model.model.set_attn_implementation("eager")
    with torch.no_grad():
        found = model(**batch, output_attentions=True).attentions[0]
    assert (found.sum(-1) < 1 - 1e-3).any()
    with model.disable_adapter(), torch.no_grad():
        bare = model(**batch, output_attentions=True).attentions[0]
    rows = bare.sum(-1) > 0.5
    share = found.sum(-1, keepdim=True)
    torch.testing.assert_close((bare * share)[rows], found[rows], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"size": 0}, "size=0"),
        ({"start": "zero"}, "Unknown start 'zero'.*random"),
        ({"budgets": "some"}, "Unknown budgets 'some'.*unequal"),
        ({"choice": "best"}, "Unknown choice 'best'.*pursuit"),
        ({"prompt_ids": [1]}, "start='text'"),
        ({"start": "text"}, "prompt_ids=tokenizer"),
        ({"start": "text", "prompt_ids": []}, "prompt_ids is empty"),
        ({"sizes": {"a": [3, 0]}}, "every head has at least 1 key"),
    ],
)
def test_settings_that_do_not_fit(given: dict[str, Any], words: str) -> None:
    with pytest.raises(InlayError, match=words):
        inlay.CompactPrefixConfig(**given)


def test_an_adapter_of_another_model_is_refused(tmp_path: Path) -> None:
    model, _ = adapted(size=3)
    model.save_pretrained(tmp_path)
    other = decoder("gpt2")[0]
    with pytest.raises(InlayError, match=r"belongs to another model"):
        PeftModel.from_pretrained(other, str(tmp_path))


def test_nothing_is_kept_after_a_mixed_pass(tmp_path: Path) -> None:
    model, batch = adapted(size=3)
    three(model)
    logits(model, batch, adapter_names=["b"] * len(batch["input_ids"]))
    assert all(layer._kept is None for layer in layers(model))


def test_a_row_that_sees_nothing_has_finite_gradients() -> None:
    """No prefix, and a mask of the most negative number, as padding on the left has it."""
    model, batch = adapted(size=3)
    model.base_model.model.set_attn_implementation("eager")
    ids = batch["input_ids"][:2, :5]
    inputs = model.get_input_embeddings()(ids).detach().requires_grad_()
    mask = torch.ones_like(ids)
    mask[:, :2] = 0
    model(inputs_embeds=inputs, attention_mask=mask, adapter_names=["__base__", "default"]).logits.sum().backward()
    assert inputs.grad is not None
    assert torch.isfinite(inputs.grad).all()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)


def test_unequal_sizes_load_without_values_first(tmp_path: Path) -> None:
    model, batch = adapted(size=4)
    names = model.peft_config["default"].target_modules
    heads = len(layers(model)[0].pieces["default"].sizes)
    uneven, _ = adapted(size=4, sizes={name: [1 + head for head in range(heads)] for name in names})
    uneven.save_pretrained(tmp_path)
    again = PeftModel.from_pretrained(decoder()[0], str(tmp_path), low_cpu_mem_usage=True).eval()
    assert torch.equal(logits(again, batch), logits(uneven, batch))
