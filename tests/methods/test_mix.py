"""`inlay.mix`: PEFT's LoRAs of any kind in one pass, beside PEFT's own loop over them."""

from __future__ import annotations

import copy
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora.layer import LoraLayer
from peft.utils.other import ModulesToSaveWrapper
from torch import Tensor, nn

import inlay
from inlay.errors import InlayError
from inlay.methods.mixture.rows import TaskRows
from zoo import tiny

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::RuntimeWarning")
BASE = "__base__"
KINDS: dict[str, tuple[str, Any, dict[str, Any]]] = {
    "bert": ("bert", "classification", {"target_modules": ["query", "value", "dense"]}),
    "gpt2": ("gpt2", "causal-lm", {"target_modules": ["c_attn", "c_fc"], "fan_in_fan_out": True}),
    "llama": ("llama", "causal-lm", {"target_modules": "all-linear"}),
    "embedding": ("bert", "classification", {"target_modules": ["word_embeddings", "query"]}),
    "convolutions": (
        "resnet",
        "classification",
        {"target_modules": ["convolution"], "modules_to_save": ["classifier.1"]},  # PEFT mixes no nn.Sequential
    ),
    "patches": ("vit", "classification", {"target_modules": ["projection", "q_proj"]}),
    "t5": ("t5", "base", {"target_modules": ["q", "v"]}),
}
# Adapters that differ in all that an adapter may choose.
OWN: dict[str, dict[str, Any]] = {
    "a": {"r": 2, "lora_alpha": 3},
    "b": {"r": 5, "lora_alpha": 7, "use_rslora": True},
    "c": {"r": 2, "lora_alpha": 8},
}


def mixed(kind: str, own: dict[str, dict[str, Any]] = OWN, mixing: bool = True, **more: Any) -> tuple[Any, Any]:
    family, task, settings = KINDS[kind]
    base, batch = tiny(family, task)
    kinds = {"causal-lm": "CAUSAL_LM", "classification": "SEQ_CLS"}
    if task in kinds and family not in ("vit", "resnet"):
        settings = {"task_type": kinds[task], **settings}
    model: Any = None
    for name, each in own.items():
        config = LoraConfig(**{**settings, **each, **more})
        if model is None:
            model = get_peft_model(base, config, adapter_name=name)
        else:
            model.add_adapter(name, config)
    stir(model)
    return (inlay.mix(model) if mixing else model).eval(), batch


@torch.no_grad()
def stir(model: nn.Module) -> None:
    """Give every adapter values of its own."""
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_" in name or "modules_to_save" in name:
            parameter.copy_(0.15 * torch.randn(parameter.shape, generator=generator))


def inputs(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return {key: value for key, value in batch.items() if key != "labels"}


def rows_of(batch: dict[str, Tensor], names: list[str]) -> dict[str, Tensor]:
    """As many rows as names: the batch's, again and again."""
    count = len(next(iter(batch.values())))
    place = torch.tensor([i % count for i in range(len(names))])
    return {key: value[place] for key, value in batch.items()}


def outputs(model: Any, batch: dict[str, Tensor], **how: Any) -> Tensor:
    found = model(**inputs(batch), **how)
    return found.logits if hasattr(found, "logits") else found.last_hidden_state


def same(found: Tensor, expected: Tensor) -> None:
    """But for what float32 rounds: 1e-6 of the largest value."""
    torch.testing.assert_close(found, expected, atol=1e-6 * max(1, expected.abs().max().item()), rtol=0)


NAMES = ["a", BASE, "b", "c", "a", "b"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("names", [NAMES, ["b"] * 3, [BASE] * 2, ["c", "c", BASE]], ids=["all", "one", "base", "half"])
@torch.no_grad()
def test_the_outputs_are_those_of_pefts_loop(kind: str, names: list[str]) -> None:
    model, batch = mixed(kind, mixing=False)
    batch = rows_of(batch, names)
    expected = outputs(model, batch, adapter_names=names)
    inlay.mix(model)
    for _ in range(2):
        same(outputs(model, batch, adapter_names=names), expected)
    inlay.unmix(model)
    torch.testing.assert_close(outputs(model, batch, adapter_names=names), expected, atol=0, rtol=0)


@torch.no_grad()
def test_factors_with_biases() -> None:
    own = {name: {**each, "lora_bias": name != "a"} for name, each in OWN.items()}
    model, batch = mixed("bert", own, mixing=False)
    batch = rows_of(batch, NAMES)
    expected = outputs(model, batch, adapter_names=NAMES)
    inlay.mix(model)
    same(outputs(model, batch, adapter_names=NAMES), expected)
    for name, parameter in model.named_parameters():
        if "lora_B.b.bias" in name:
            parameter.zero_()
    assert not torch.allclose(outputs(model, batch, adapter_names=NAMES)[2], expected[2])


@pytest.mark.parametrize("kind", KINDS)
def test_an_oracle_of_float64_agrees(kind: str) -> None:
    """Each row alone, with the product written into the weight: nothing of the mixed pass, and nothing of PEFT's."""
    model, batch = mixed(kind)
    model.double()
    batch = {k: v.double() if v.is_floating_point() else v for k, v in rows_of(batch, NAMES).items()}
    found = outputs(model, batch, adapter_names=NAMES)
    for row, name in enumerate(NAMES):
        alone = copy.deepcopy(model)
        inlay.unmix(alone)
        heads = [m for m in alone.modules() if isinstance(m, ModulesToSaveWrapper)]
        if name != BASE:
            alone.set_adapter(name)
            for layer in alone.modules():
                if isinstance(layer, LoraLayer) and name in layer.scaling:
                    write(layer, name)
        one = {k: v[row : row + 1] for k, v in batch.items()}
        for head in heads:
            head.original_module = head.original_module if name == BASE else head.modules_to_save[name]
        with torch.no_grad(), alone.disable_adapter():
            wanted = outputs(alone, one)
        torch.testing.assert_close(found[row : row + 1], wanted, atol=1e-10, rtol=1e-10)


@torch.no_grad()
def write(layer: Any, name: str) -> None:
    """`W + s B A`, written out."""
    base, scale = layer.get_base_layer(), layer.scaling[name]
    if name in layer.lora_embedding_A:
        base.weight += scale * (layer.lora_embedding_B[name] @ layer.lora_embedding_A[name]).T
        return
    a, b = layer.lora_A[name].weight, layer.lora_B[name].weight
    product = torch.einsum("mr,r...->m...", b.flatten(1), a)
    base.weight += scale * (product.T if base.weight.shape != product.shape or layer.fan_in_fan_out_ else product)


@pytest.fixture(autouse=True)
def _transposed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether a layer keeps its weight the other way round, said once for all kinds of layer."""
    monkeypatch.setattr(
        LoraLayer, "fan_in_fan_out_", property(lambda self: getattr(self, "fan_in_fan_out", False)), False
    )


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(
    ("kind", "checkpointed"),
    [(kind, False) for kind in ("bert", "gpt2", "embedding", "convolutions", "llama")]
    + [(kind, True) for kind in ("bert", "gpt2", "embedding", "llama")],  # ResNet has no checkpointing
)
def test_the_gradients_are_those_of_each_adapter_trained_alone(kind: str, checkpointed: bool) -> None:
    model, batch = mixed(kind)
    model.double()
    batch = {k: v.double() if v.is_floating_point() else v for k, v in rows_of(batch, NAMES).items()}
    silence(model)
    if checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    model(**batch, adapter_names=NAMES).loss.backward()
    found = gradients(model)
    model.zero_grad()
    inlay.unmix(model)
    wanted: dict[str, Tensor] = {}
    for name in OWN:
        model.set_adapter(name)
        rows = [row for row, own in enumerate(NAMES) if own == name]
        model(**{key: value[rows] for key, value in batch.items()}).loss.backward()
        wanted |= {key: value for key, value in gradients(model).items() if f".{name}" in key}
        model.zero_grad()
    assert set(found) == set(wanted)
    rounds = kind in ("gpt2", "llama")  # Transformers' loss of a language model is of logits in float32
    assert wanted
    for name, gradient in found.items():
        torch.testing.assert_close(
            gradient, wanted[name], atol=1e-6 if rounds else 1e-10, rtol=0, msg=lambda text, n=name: f"{n}: {text}"
        )


def silence(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if isinstance(module, nn.BatchNorm2d):
            module.eval()
            module.train = lambda mode=True, module=module: module  # type: ignore[method-assign,misc]


def test_dropout_of_each_row_is_its_own_adapters() -> None:
    own = {
        name: {**each, "lora_dropout": share}
        for (name, each), share in zip(OWN.items(), (0.0, 0.5, 1 - 1e-6), strict=True)
    }
    model, batch = mixed("llama", own)
    names = ["a", "b", "c", BASE] * 4
    batch = {key: value[:1].expand(len(names), -1) for key, value in batch.items()}
    quiet = outputs(model, batch, adapter_names=names)
    model.train()
    first, again = (outputs(model, batch, adapter_names=names) for _ in range(2))
    for row, name in enumerate(names):
        assert torch.allclose(first[row], quiet[row], atol=1e-6) == (name in ("a", BASE)), name
        assert torch.equal(first[row], again[row]) == (name != "b")
    # With all dropped, a row of `c` is the base's.
    base = next(first[row] for row, name in enumerate(names) if name == BASE)
    for row, name in enumerate(names):
        assert name != "c" or torch.allclose(first[row], base, atol=1e-6)


def test_a_dropped_input_has_the_mean_of_the_whole() -> None:
    model, _ = mixed(
        "llama", {n: {**each, "lora_dropout": s} for (n, each), s in zip(OWN.items(), (0.1, 0.5, 0.7), strict=True)}
    )
    layer = next(layer for layer in model.modules() if isinstance(layer, LoraLayer))
    model.train()
    rows = TaskRows.of(["a", "b", "c"], list(OWN))
    found = layer._dropped(torch.ones(3, 4000, 8), rows, ["a", "b", "c"])
    for row, share in enumerate((0.1, 0.5, 0.7)):
        assert found[row].mean().item() == pytest.approx(1, abs=0.03)
        assert (found[row] == 0).float().mean().item() == pytest.approx(share, abs=0.02)


def with_labels(labels: int) -> nn.Module:
    """The same model with a head of this size."""
    model = tiny("bert", num_labels=labels)[0]
    body = {name: value for name, value in tiny("bert")[0].state_dict().items() if "classifier" not in name}
    model.load_state_dict(body, strict=False)
    return model


def test_heads_of_unlike_sizes_are_loaded_and_trained(tmp_path: Path) -> None:
    folders = {}
    for name, labels in {"two": 2, "five": 5, "value": 1}.items():
        base = with_labels(labels)
        one = get_peft_model(base, LoraConfig(task_type="SEQ_CLS", r=labels + 1, target_modules=["query"]))
        stir(one)
        one.save_pretrained(str(folders.setdefault(name, tmp_path / name)))
    base, batch = with_labels(2), tiny("bert")[1]
    model: Any = PeftModel.from_pretrained(base, str(folders["two"]), adapter_name="two", is_trainable=True)
    inlay.mix(model)
    for name in ("five", "value"):
        model.load_adapter(str(folders[name]), name, is_trainable=True)
    names = ["five", "two", "value", BASE, "five"]
    batch = rows_of(batch, names)
    model.eval()
    found = outputs(model, batch, adapter_names=names)
    assert found.shape == (5, 5)
    for row, name in enumerate(names):
        labels = {"two": 2, "five": 5, "value": 1, BASE: 2}[name]
        other: Any = with_labels(labels)
        if name != BASE:
            other = PeftModel.from_pretrained(other, str(folders[name])).eval()
        alone = outputs(other, {key: value[row : row + 1] for key, value in batch.items()})[0]
        torch.testing.assert_close(found[row, :labels], alone, atol=1e-6, rtol=1e-6)
        assert (found[row, labels:] == -torch.inf).all()
    batch["labels"] = torch.tensor([4, 1, 0, 0, 2])
    model.train()
    loss = model(**batch, adapter_names=names).loss
    assert torch.isfinite(loss)
    loss.backward()
    for name in folders:
        own = {key: value for key, value in gradients(model).items() if f".{name}." in key}
        assert any("classifier" in key for key in own)
        assert any("lora_B" in key for key in own)
    batch["labels"][1] = 3
    with pytest.raises(InlayError, match="two"):
        model(**batch, adapter_names=names)


@torch.no_grad()
def test_adapters_come_and_go(tmp_path: Path) -> None:
    model, batch = mixed("bert")
    model.save_pretrained(str(tmp_path))
    names = ["a", "b", BASE]
    first = outputs(model, batch, adapter_names=names)
    model.delete_adapter("c")
    with pytest.raises(InlayError, match=r"'c'.*a, b"):
        model(**inputs(batch), adapter_names=["c", "a", "a"])
    torch.testing.assert_close(outputs(model, batch, adapter_names=names), first, atol=0, rtol=0)
    # One of another rank, at layers that no other has.
    model.add_adapter("d", LoraConfig(task_type="SEQ_CLS", r=9, target_modules=["key", "query"]))
    stir(model)
    found = outputs(model, batch, adapter_names=["d", "a", BASE])
    inlay.unmix(model)
    torch.testing.assert_close(found, outputs(model, batch, adapter_names=["d", "a", BASE]), atol=1e-6, rtol=1e-6)
    inlay.mix(model)
    model.load_adapter(str(tmp_path / "b"), "again")
    model.eval()
    again = outputs(model, batch, adapter_names=["a", "again", BASE])
    torch.testing.assert_close(again[1], first[1], atol=1e-6, rtol=1e-6)


@torch.no_grad()
def test_a_change_of_a_parameter_is_heeded() -> None:
    model, batch = mixed("bert")
    names = ["a", "b", BASE]
    for change in (lambda p: p.mul_(1.5), lambda p: setattr(p, "data", p.data * 0.5)):
        outputs(model, batch, adapter_names=names)
        for name, parameter in model.named_parameters():
            if "lora_B.b" in name:
                change(parameter)
        found = outputs(model, batch, adapter_names=names)
        model.base_model.set_adapter("b")
        same(found[1], outputs(model, batch)[1])
    for layer in model.modules():
        if isinstance(layer, LoraLayer):
            layer.set_scale("b", 3.0)
    found = outputs(model, batch, adapter_names=names)
    same(found[1], outputs(model, batch)[1])


@torch.no_grad()
def test_disabled_and_merged_adapters() -> None:
    model, batch = mixed("bert")
    names = ["a", "b", BASE]
    plain = outputs(model, batch, adapter_names=[BASE] * 3)
    with model.disable_adapter():
        torch.testing.assert_close(outputs(model, batch, adapter_names=names), plain, atol=1e-6, rtol=1e-6)
    before = outputs(model, batch, adapter_names=names)
    model.merge_adapter(["a"])
    with pytest.raises(InlayError, match=r"a is merged.*unmerge_adapter"):
        outputs(model, batch, adapter_names=names)
    model.unmerge_adapter()
    torch.testing.assert_close(outputs(model, batch, adapter_names=names), before, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("how", [{}, {"num_beams": 2}, {"do_sample": False, "num_return_sequences": 1}])
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@torch.no_grad()
def test_generation(kind: str, how: dict[str, Any]) -> None:
    model, batch = mixed(kind)
    names, more = ["a", "b", BASE], {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, **how}
    batch = {"input_ids": batch["input_ids"][:, :5], "attention_mask": torch.ones(3, 5, dtype=torch.long)}
    found = model.generate(**batch, adapter_names=names, **more)
    inlay.unmix(model)
    assert torch.equal(found, model.generate(**batch, adapter_names=names, **more))


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"use_dora": True}, "DoRA"),
        ({"bias": "all"}, "biases of the base model"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices"),
    ],
)
def test_what_cannot_be_mixed_is_refused_by_name(config: dict[str, Any], why: str) -> None:
    model, batch = mixed("bert", {"good": {"r": 2}, "bad": {"r": 2, **config}}, mixing=False)
    with pytest.raises(InlayError, match=f"'bad'.*{why}.*delete_adapter"):
        inlay.mix(model)
    assert type(model.base_model).__name__ == "LoraModel"
    assert not any("Mixed" in type(module).__name__ for module in model.modules())
    model.delete_adapter("bad")
    inlay.mix(model)
    model.add_adapter("bad", LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["query", "value", "dense"], **config))
    model.eval()
    with pytest.raises(InlayError, match=f"'bad'.*{why}"):
        model(**inputs(batch), adapter_names=["good", "bad", BASE])
    assert torch.isfinite(outputs(model, batch, adapter_names=["good", BASE, "good"])).all()


def test_experts_are_refused() -> None:
    """They are given tokens of all rows together: a number that can be divided by chance would be divided wrongly."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList([nn.Linear(4, 4) for _ in range(2)])

        def forward(self, x: Tensor) -> Tensor:
            return sum(expert(x.view(-1, 4)[place::2]) for place, expert in enumerate(self.experts))

    model = get_peft_model(Layer(), LoraConfig(target_modules=["0", "1"]))
    with pytest.raises(InlayError, match=r"experts\.0, an expert"):
        inlay.mix(model)


def test_the_trainers_number_of_labels_divides_the_loss() -> None:
    """As the model's own loss does where all rows have one adapter."""
    model, batch = mixed("llama")
    batch = rows_of(batch, NAMES)
    found = model(**batch, adapter_names=NAMES, num_items_in_batch=40).loss
    each = [
        model(**{k: v[i : i + 1] for k, v in batch.items()}, adapter_names=[name], num_items_in_batch=40).loss
        for i, name in enumerate(NAMES)
    ]
    torch.testing.assert_close(found, torch.stack(each).sum(), atol=1e-5, rtol=1e-5)


def test_a_loss_of_other_arguments_than_labels_is_refused() -> None:
    from transformers import BertConfig, BertForQuestionAnswering

    config = BertConfig(vocab_size=48, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
    model: Any = get_peft_model(
        BertForQuestionAnswering(config), LoraConfig(r=2, target_modules=["query"]), adapter_name="a"
    )
    model.add_adapter("b", LoraConfig(r=2, target_modules=["query"]))
    inlay.mix(model)
    batch = {"input_ids": torch.randint(5, 40, (2, 6))}
    where = {"start_positions": torch.tensor([1, 2]), "end_positions": torch.tensor([2, 3])}
    with pytest.raises(InlayError, match="other than labels"):
        model(**batch, **where, adapter_names=["a", "b"])
    assert model(**batch, adapter_names=["a", "b"]).start_logits.requires_grad
    assert model(**batch, **where, adapter_names=["a", "a"]).loss.requires_grad


def test_a_lora_inside_of_what_is_another_adapters_head_is_refused() -> None:
    base, _ = tiny("roberta", "classification")
    model: Any = get_peft_model(
        base, LoraConfig(r=2, target_modules=["query"], modules_to_save=["classifier"]), adapter_name="a"
    )
    model.add_adapter("b", LoraConfig(r=2, target_modules=r"classifier\..*dense"))
    with pytest.raises(InlayError, match=r"'b' cannot be mixed.*classifier\..*dense.*modules_to_save"):
        inlay.mix(model)


def test_models_with_tokens_first_are_refused() -> None:
    from transformers import XLNetConfig, XLNetModel

    config = XLNetConfig(vocab_size=48, d_model=16, n_layer=1, n_head=2, d_inner=16)
    model = get_peft_model(XLNetModel(config), LoraConfig(r=2, target_modules=["layer_1"]))
    with pytest.raises(InlayError, match="'xlnet'"):
        inlay.mix(model)
    with pytest.raises(InlayError, match="'xlnet'"):
        inlay.AdapterPool(XLNetModel(config))


def test_bad_input(tmp_path: Path) -> None:
    model, batch = mixed("bert")
    for names, what in (
        (["a", "b"], "2 names.*3 rows"),
        (["a", "x", "b"], "'x'.*a, b, c"),
        ("a", "list"),
        ([], "list"),
        ([1, 2, 3], "list"),
    ):
        with pytest.raises(InlayError, match=what):
            model(**inputs(batch), adapter_names=names)
    for other in (tiny("bert")[0], inlay):
        with pytest.raises(InlayError, match="PeftModel with LoRAs"):
            inlay.mix(other)
    with pytest.raises(InlayError, match="was not mixed"):
        inlay.unmix(mixed("bert", mixing=False)[0])
    assert inlay.mix(model) is model
    # Of another base, truncated, a name twice: the others go on.
    wide, _ = tiny("gpt2", "causal-lm")
    get_peft_model(wide, LoraConfig(target_modules=["c_attn"])).save_pretrained(str(tmp_path / "other"))
    model.save_pretrained(str(tmp_path / "own"))
    weights = tmp_path / "own" / "b" / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-40])
    before = outputs(model, batch, adapter_names=["a", "b", "c"])
    for folder, name, what in (
        ("own/a", "a", "already"),
        ("own/b", "new", "own/b"),
        ("other", "new", "of this base model"),
        ("nowhere", "new", "nowhere"),
    ):
        with pytest.raises((InlayError, ValueError), match=what):
            model.load_adapter(str(tmp_path / folder), name)
        assert set(model.peft_config) == set(OWN)
        torch.testing.assert_close(outputs(model, batch, adapter_names=["a", "b", "c"]), before, atol=0, rtol=0)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@torch.no_grad()
def test_half_precision_rounds_no_more_than_pefts_loop(dtype: torch.dtype, autocast: bool) -> None:
    """Layer by layer, against float32: what a whole tiny model makes of rounding is chance."""
    model, _ = mixed("llama", mixing=False)
    generator, names = torch.Generator().manual_seed(0), ["a", BASE, "b", "c", "a", "b"]
    layers = [layer for layer in model.modules() if isinstance(layer, LoraLayer)]
    given = [torch.randn(len(names), 200, layer.in_features, generator=generator) for layer in layers]
    wanted = [layer(x, adapter_names=names) for layer, x in zip(layers, given, strict=True)]
    if not autocast:
        model.to(dtype)
        given = [x.to(dtype) for x in given]
    with torch.autocast("cpu", dtype, enabled=autocast):
        theirs = [layer(x, adapter_names=names) for layer, x in zip(layers, given, strict=True)]
        inlay.mix(model)
        with model.base_model.routing.forward(TaskRows.of(names, list(OWN))):
            found = [layer(x) for layer, x in zip(layers, given, strict=True)]
    for right, own, other in zip(wanted, found, theirs, strict=True):
        assert own.dtype == other.dtype == dtype
        errors = [(each.float() - right).pow(2).mean().sqrt() for each in (own, other)]
        assert errors[0] <= 1.1 * errors[1]


def test_copies_saving_and_threads(tmp_path: Path) -> None:
    model, batch = mixed("bert")
    names = ["a", "b", "c"]
    expected = outputs(model, batch, adapter_names=names).detach()
    copied = copy.deepcopy(model)
    for parameter in model.parameters():
        parameter.data.mul_(1.1)
    torch.testing.assert_close(outputs(copied, batch, adapter_names=names), expected, atol=1e-6, rtol=1e-6)
    copied.save_pretrained(str(tmp_path))
    back = PeftModel.from_pretrained(tiny("bert")[0], str(tmp_path / "b")).eval()
    torch.testing.assert_close(outputs(back, batch)[1], expected[1], atol=1e-6, rtol=1e-6)
    found: dict[int, Tensor] = {}

    def run(number: int) -> None:
        own = [names[(row + number) % 3] for row in range(3)]
        with torch.no_grad():
            for _ in range(5):
                found[number] = outputs(copied, batch, adapter_names=own)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(3)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    for number in range(3):
        own = [names[(row + number) % 3] for row in range(3)]
        torch.testing.assert_close(found[number], outputs(copied, batch, adapter_names=own), atol=1e-6, rtol=1e-6)


def test_every_adapter_trains_and_pefts_loop_is_back_after_unmix() -> None:
    model, batch = mixed("bert")
    names = ["a", "b", "c"]
    model.set_adapter("a")
    model.train()
    silence(model)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for _ in range(15):
        loss = model(**batch, adapter_names=names).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
    for name, parameter in model.named_parameters():
        own = "lora_" in name or "modules_to_save" in name
        assert torch.equal(parameter, before[name]) != own, name
    inlay.unmix(model)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained
    assert all(".a" in name for name in trained)
    with pytest.raises(ValueError, match="training mode"):
        model(**batch, adapter_names=names)


@torch.no_grad()
def test_compiled() -> None:
    model, batch = mixed("bert")
    expected = outputs(model, batch, adapter_names=["a", "b", BASE])
    compiled = torch.compile(model, backend="aot_eager")
    torch.testing.assert_close(outputs(compiled, batch, adapter_names=["a", "b", BASE]), expected, atol=1e-6, rtol=1e-6)


def test_unload_and_merge_give_a_plain_model() -> None:
    for finish in ("unload", "merge_and_unload"):
        model, batch = mixed("bert")
        model.set_adapter("b")
        wanted = (
            outputs(model, batch) if finish == "merge_and_unload" else outputs(model, batch, adapter_names=[BASE] * 3)
        )
        plain = getattr(model, finish)()
        assert not any("Mixed" in type(module).__name__ or isinstance(module, LoraLayer) for module in plain.modules())
        if finish == "merge_and_unload":
            torch.testing.assert_close(outputs(plain, batch), wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("trained", [False, True])
def test_an_adapter_of_another_rank_that_comes_after_a_pass(trained: bool) -> None:
    model, batch = mixed("llama", {"a": {"r": 2}})
    rows = ["a", BASE] * len(batch["input_ids"])
    names = rows[: len(batch["input_ids"])]
    with torch.set_grad_enabled(trained):
        model(**batch, adapter_names=names)
    before = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    model.add_adapter("b", LoraConfig(r=5, target_modules="all-linear", task_type="CAUSAL_LM"))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".b." in name:
                parameter.normal_(std=0.4)  # in place: the others stay where they lie
    assert all(parameter.data_ptr() == before.get(n, parameter.data_ptr()) for n, parameter in model.named_parameters())
    names = ["b" if name == BASE else name for name in names]
    plain = copy.deepcopy(model)
    inlay.unmix(plain)
    with torch.set_grad_enabled(trained):
        found = model(**batch, adapter_names=names).logits
    with torch.no_grad():
        wanted = plain(**batch, adapter_names=names).logits
    assert (found - wanted).abs().max() <= 1e-5 * wanted.abs().max()


def seeing() -> tuple[Any, dict[str, Tensor]]:
    """A model that sees and writes: its name ends as an encoder-decoder's does, and it is none."""
    import transformers as hf

    small = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = hf.LlavaConfig(
        text_config=hf.LlamaConfig(**small, vocab_size=64, num_key_value_heads=2),
        vision_config=hf.CLIPVisionConfig(**small, image_size=8, patch_size=4),
        image_token_index=1,
    )
    ids = torch.randint(2, 64, (4, 5), generator=torch.Generator().manual_seed(0))
    return hf.LlavaForConditionalGeneration(config), {"input_ids": ids}


def masked() -> tuple[Any, dict[str, Tensor]]:
    import transformers as hf

    base, batch = tiny("bert", "base")
    return hf.BertForMaskedLM(base.config), {"input_ids": batch["input_ids"][[0, 1, 0, 1]]}


def translating() -> tuple[Any, dict[str, Tensor]]:
    import transformers as hf

    base, batch = tiny("t5", "base")
    return hf.T5ForConditionalGeneration(base.config), {"input_ids": batch["input_ids"][[0, 1, 0, 1]]}


@pytest.mark.parametrize(("made", "targets"), [(seeing, "q_proj"), (masked, "query"), (translating, "q")])
@pytest.mark.parametrize("dictionary", [True, False])
def test_each_tasks_loss_is_its_own_whatever_writes(made: Any, targets: str, dictionary: bool) -> None:
    base, batch = made()
    model: Any = get_peft_model(base.eval(), LoraConfig(r=2, target_modules=[targets]), "a")
    model.add_adapter("b", LoraConfig(r=3, target_modules=[targets]))
    stir(model)
    labels, wanted = batch["input_ids"].clone(), 0.0
    for name, rows in (("a", [0, 1, 2]), ("b", [3])):
        model.set_adapter(name)
        with torch.no_grad():
            wanted += model(input_ids=batch["input_ids"][rows], labels=labels[rows]).loss.item()
    inlay.mix(model)
    out = model(**batch, labels=labels, adapter_names=["a", "a", "a", "b"], return_dict=dictionary)
    assert (out.loss if dictionary else out[0]).item() == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize("kind", ["bert", "embedding"])
def test_what_trained_trains_again_after_adapters_were_off(kind: str) -> None:
    model, _ = mixed(kind)
    before = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    with model.disable_adapter():
        assert not any(parameter.requires_grad for parameter in model.parameters())
        with model.disable_adapter():
            pass
    assert {name for name, parameter in model.named_parameters() if parameter.requires_grad} == before
