"""Our layers inside Transformers' attention: names, masks, stacking, leaving, copies and what is saved."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import get_peft_model
from torch import Tensor, nn
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import inlay
from inlay.anatomy import anatomy
from inlay.errors import InlayError
from inlay.methods.attach import attach
from inlay.methods.attention_interface import (
    Attend,
    AttentionLayer,
    children,
    on_interface,
    with_child,
    without_child,
)
from probing import logits
from zoo import tiny

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


class Louder(AttentionLayer):
    """Multiplies the values, and what comes out once more."""

    child = "inlay_louder"
    adapter_layer_names = ("inlay_louder_factor",)

    def __init__(self, host: nn.Module) -> None:
        super().__init__(host)
        self.inlay_louder_factor = nn.ModuleDict({"default": nn.Identity()})
        self._active_adapter = "default"

    def attend(
        self, previous: Attend, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        output, weights = previous(self.host, query, key, 2 * value, mask, **kwargs)
        return 3 * output, weights


def make_louder(model: nn.Module) -> list[Louder]:
    layers = []
    for block in anatomy(model).blocks:
        assert block.attention is not None
        layer = block.attention.module.inlay_louder = Louder(block.attention.module)
        layer.attach()
        layers.append(layer)
    return layers


def be_quiet(layers: list[Louder]) -> None:
    for layer in layers:
        layer.detach()
        del layer.host.inlay_louder


def implementation(model: Any) -> str:
    module = anatomy(model).blocks[0].attention
    assert module is not None
    return module.module.config._attn_implementation


@pytest.mark.parametrize("start", ["eager", "sdpa", "flash_attention_2"])
def test_an_implementation_is_registered_with_the_mask_of_the_one_behind_it(start: str) -> None:
    name = with_child(start, "inlay_a")
    assert name == f"inlay_a_{start}"
    assert name in ALL_ATTENTION_FUNCTIONS
    assert ALL_MASK_ATTENTION_FUNCTIONS[name] is ALL_MASK_ATTENTION_FUNCTIONS[start]
    assert with_child(name, "inlay_a") == name
    both = with_child(name, "inlay_b")
    assert both == f"inlay_b_inlay_a_{start}"
    assert ALL_MASK_ATTENTION_FUNCTIONS[both] is ALL_MASK_ATTENTION_FUNCTIONS[start]
    assert children(both) == ["inlay_b", "inlay_a"]
    assert without_child(both, "inlay_b") == name
    assert without_child(both, "inlay_a") == f"inlay_b_{start}"
    assert without_child(without_child(both, "inlay_a"), "inlay_b") == start
    assert without_child(start, "inlay_a") == start


@pytest.mark.parametrize("family", ["vit", "clip", "bert", "llama", "gpt2", "t5"])
@pytest.mark.parametrize("start", ["eager", "sdpa"])
def test_a_layer_decides_what_goes_in_and_what_comes_out(family: str, start: str) -> None:
    model, batch = tiny(family, "base")
    model.set_attn_implementation(start)
    attention = anatomy(model).blocks[-1].attention
    assert attention is not None
    seen: list[Tensor] = []
    attention.output.module.register_forward_pre_hook(lambda _, args: seen.append(args[0].detach()))
    model(**batch)
    layers = make_louder(model)
    for layer in layers[:-1]:
        layer.enable_adapters(False)
    model(**batch)
    torch.testing.assert_close(seen[1], 6 * seen[0])
    layers[-1].enable_adapters(False)
    model(**batch)
    assert torch.equal(seen[2], seen[0])
    be_quiet(layers)
    assert implementation(model) == start


@pytest.mark.parametrize("louder_first", [True, False])
def test_two_methods_stack_and_either_leaves_first(louder_first: bool) -> None:
    model, batch = tiny("vit")
    base = logits(model, batch)
    layers = make_louder(model)
    louder = logits(model, batch)
    be_quiet(layers)
    assert torch.equal(logits(model, batch), base)

    layers = make_louder(model) if louder_first else []
    torch.manual_seed(0)
    adapted = attach(model, "e2vpt")
    prompted = None if louder_first else logits(adapted, batch)
    layers = layers or make_louder(model)
    order = ["inlay_e2vpt", "inlay_louder"]
    assert children(implementation(model)) == (order if louder_first else order[::-1])
    both = logits(adapted, batch)
    if louder_first:
        be_quiet(layers)
        assert implementation(model) == "inlay_e2vpt_sdpa"
        prompted = logits(adapted, batch)
        model = adapted.unload()
    else:
        model = adapted.unload()
        assert implementation(model) == "inlay_louder_sdpa"
        assert torch.equal(logits(model, batch), louder)
        be_quiet(layers)
    assert prompted is not None
    assert not any(torch.equal(both, other) for other in (base, louder, prompted))
    assert implementation(model) == "sdpa"
    assert torch.equal(logits(model, batch), base)


def test_another_implementation_chosen_later_does_not_lose_the_layer() -> None:
    model, batch = tiny("vit")
    model = attach(model, "e2vpt")
    before = logits(model, batch)
    model.get_base_model().set_attn_implementation("eager")
    after = logits(model, batch)
    assert implementation(model) == "inlay_e2vpt_eager"
    torch.testing.assert_close(after, before)
    with model.disable_adapter():
        assert not torch.allclose(logits(model, batch), after)
    assert implementation(model.unload()) == "eager"


def test_only_the_blocks_that_have_a_layer_ask_it() -> None:
    model, batch = tiny("vit")
    model = get_peft_model(model, inlay.E2VPTConfig(layers=[3]))
    blocks = anatomy(model).blocks
    assert [hasattr(block.attention.module, "inlay_e2vpt") for block in blocks] == [False, False, True]  # type: ignore[union-attr]
    assert implementation(model) == "inlay_e2vpt_sdpa"
    assert torch.isfinite(logits(model, batch)).all()


def test_copies_go_their_own_way() -> None:
    model, batch = tiny("vit")
    base = logits(model, batch)
    model = attach(model, "e2vpt")
    wanted = logits(model, batch)
    other = copy.deepcopy(model)
    assert torch.equal(logits(other, batch), wanted)
    plain = model.unload()
    assert torch.equal(logits(plain, batch), base)
    assert implementation(other) == "inlay_e2vpt_sdpa"
    assert torch.equal(logits(other, batch), wanted)


def test_a_model_made_from_the_same_config_computes_as_ever() -> None:
    model, batch = tiny("vit")
    base = logits(model, batch)
    state = model.state_dict()
    attach(model, "e2vpt")
    other = type(model)(model.config).eval()
    other.load_state_dict(state)
    assert torch.equal(logits(other, batch), base)


def test_nothing_saved_names_our_implementation(tmp_path: Path) -> None:
    model, _ = tiny("vit")
    adapted = attach(model, "e2vpt")
    adapted.save_pretrained(tmp_path / "adapter")
    model.config.save_pretrained(tmp_path / "config")
    assert model.config._attn_implementation == "inlay_e2vpt_sdpa"
    for path in tmp_path.rglob("*.json"):
        assert "inlay_e2vpt_sdpa" not in path.read_text()
    saved = json.loads((tmp_path / "config/config.json").read_text())
    assert not [key for key in saved if "attn_implementation" in key]


@pytest.mark.parametrize(("family", "wanted"), [("vit", True), ("t5", True), ("mpnet", False), ("deberta-v2", False)])
def test_who_is_on_the_interface(family: str, wanted: bool) -> None:
    attention = anatomy(tiny(family, "base")[0]).blocks[0].attention
    assert attention is not None
    assert on_interface(attention.module) is wanted
    if not wanted:
        with pytest.raises(InlayError, match=type(attention.module).__name__):
            Louder(attention.module).attach()
