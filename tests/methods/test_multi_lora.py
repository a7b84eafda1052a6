"""Multi-LoRA: rows of different tasks in one pass, forward and backward, against each task alone and plain loops."""

from __future__ import annotations

import cProfile
import math
import pstats
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import GPT2Config, GPT2LMHeadModel, RobertaConfig, RobertaForSequenceClassification, RobertaModel

import inlay
from inlay.methods.mixture.products import Factors, add_products
from inlay.methods.mixture.rows import Routing, TaskRows
from inlay.methods.multi_lora.layer import MultiLoraLayer
from inlay.methods.multi_lora.shared import draw
from manytasks import TASKS, gradients, inputs, row, several, stir
from zoo import tiny

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::RuntimeWarning")


# ---------------------------------------------------------------------------------------------------- the products


@settings(max_examples=20, deadline=None)
@given(
    rows=st.integers(1, 5),
    tokens=st.integers(1, 4),
    rank=st.integers(1, 3),
    one=st.booleans(),
    kind=st.sampled_from(["whole", "fused", "first"]),
    scale=st.sampled_from([1.0, 0.5, 16 / 3]),
    grad=st.booleans(),
    seed=st.integers(0, 99),
)
def test_products_against_a_loop(
    rows: int, tokens: int, rank: int, one: bool, kind: str, scale: float, grad: bool, seed: int
) -> None:
    """`one`: the same `B` for all rows, which are then one row of tokens where the channels come last."""
    torch.manual_seed(seed)
    parts = ((0, 2), (4, 6)) if kind == "fused" else ((0, 6),)
    width, first = parts[0][1], kind == "first"
    rows = 1 if one and not first else rows
    output = torch.randn(rows, tokens, 6, dtype=torch.float64)
    z = torch.randn(rows, tokens, rank * len(parts), dtype=torch.float64)
    factors = [torch.randn(1 if one else rows, rank, width, dtype=torch.float64) for _ in parts]
    wanted, size = output.clone(), output.abs()
    for i in range(rows):
        for number, (begin, end) in enumerate(parts):
            ours, own = z[i, :, number * rank : (number + 1) * rank], factors[number][0 if one else i]
            wanted[i, :, begin:end] += scale * ours @ own
            size[i, :, begin:end] += scale * ours.abs() @ own.abs()
    turned = (output.mT.contiguous(), z.mT.contiguous()) if first else (output, z)
    with torch.set_grad_enabled(grad):
        found = add_products(turned[0].clone(), turned[1], (factors, scale), parts, first=first)
        half = add_products(
            turned[0].bfloat16(), turned[1], ([f.bfloat16() for f in factors], scale), parts, first=first
        )
    found, half = found.view(turned[0].shape), half.view(turned[0].shape)
    torch.testing.assert_close(found.mT if first else found, wanted)
    assert half.dtype is torch.bfloat16
    apart = ((half.mT if first else half).double() - wanted).abs()
    assert (apart <= 4 * 2**-8 * size).all(), "as far as rounding each number goes"


@pytest.mark.parametrize("kind", ["whole", "fused", "first"])
@pytest.mark.parametrize("one", [True, False])
def test_the_gradients_of_the_products(kind: str, one: bool) -> None:
    torch.manual_seed(0)
    parts, first = ((0, 2), (4, 6)) if kind == "fused" else ((0, 6),), kind == "first"
    rows = 1 if one and not first else 4
    output, z = (torch.randn(rows, 3, width, dtype=torch.float64) for width in (6, 2 * len(parts)))
    turned = [(each.mT if first else each).contiguous().requires_grad_() for each in (output, z)]
    shape = 1 if one else rows, 2, parts[0][1]
    factors = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for _ in parts]

    def run(output: Tensor, z: Tensor, *factors: Tensor) -> Tensor:
        return add_products(output, z, (factors, 16 / 3), parts, first=first)

    assert torch.autograd.gradcheck(run, (*turned, *factors))


def test_the_product_of_one_task_where_rows_do_not_follow_one_another() -> None:
    torch.manual_seed(0)
    output, z = (torch.randn(3, 2, width, dtype=torch.float64).transpose(0, 1) for width in (5, 4))
    weight = torch.randn(1, 4, 5, dtype=torch.float64, requires_grad=True)
    factors: Factors = (weight,), 2.0
    found = add_products(output, z, factors, ((0, 5),)).view(output.shape)
    torch.testing.assert_close(found, output + 2 * z @ weight[0])
    found.sum().backward()
    assert weight.grad is not None
    torch.testing.assert_close(weight.grad[0], 2 * z.sum((0, 1)).unsqueeze(1).expand(4, 5))


@pytest.mark.parametrize("mixed", [False, True])
def test_the_gradient_of_an_adapted_convolution(mixed: bool) -> None:
    """Of a model that is one: by the images and by every `B`, with strides, padding and holes of unlike sizes."""
    torch.manual_seed(0)
    host = nn.Sequential(nn.Conv2d(3, 4, 3, stride=(2, 1), padding=(1, 0), dilation=(1, 2))).double()
    config = {"r": 2, "target_modules": ["0"], "modules_to_save": [], "newly_initialised": []}
    model = get_peft_model(host, inlay.MultiLoraConfig(**config), adapter_name="one")
    model.add_adapter("two", inlay.MultiLoraConfig(**config, lora_alpha=3))
    stir(model)
    x = torch.randn(2, 3, 7, 6, dtype=torch.float64, requires_grad=True)
    trained = [p for p in model.parameters() if p.requires_grad]
    names = ["two", "one"] if mixed else None
    assert len(trained) == 2
    assert torch.autograd.gradcheck(lambda x, *_: model(x, adapter_names=names), (x, *trained))


# ------------------------------------------------------------------------------------------------------ whole models


def test_a_linear_layer_is_what_the_equation_says() -> None:
    model, _ = several("bert")
    name = "bert.encoder.layer.0.attention.self.query"
    host = model.get_base_model().get_submodule(name)
    layer = host.inlay_multi_lora
    a = draw((3, 16), 0, name, "lora").double()
    assert torch.equal(layer.inlay_multi_lora_a, a)
    assert a.abs().max() <= 1 / math.sqrt(16)
    x = torch.randn(3, 4, 16, dtype=torch.float64)
    with torch.no_grad(), layer.routing.forward(TaskRows.of(["stsb", "rte", "stsb"], list(TASKS))):
        found = host(x)
        for i, task in enumerate(["stsb", "rte", "stsb"]):
            b = layer.inlay_multi_lora_b[task].weight[0]
            wanted = x[i] @ host.weight.T + host.bias + 16 / 3 * x[i] @ a.T @ b
            torch.testing.assert_close(found[i], wanted)


@pytest.mark.parametrize("family", ["bert", "roberta", "modernbert", "gpt2", "llama", "t5", "vit", "swin", "resnet"])
def test_a_mixed_batch_is_each_task_alone(family: str) -> None:
    model, batch = several(family)
    names = ["stsb", "rte", "sst2"]
    with torch.no_grad():
        found = model(**inputs(batch), adapter_names=names).logits
        for i, name in enumerate(names):
            model.set_adapter(name)
            alone = model(**inputs(batch)).logits[i]
            assert len(alone) == (TASKS[name] or 3)
            torch.testing.assert_close(found[i, : len(alone)], alone, atol=1e-9, rtol=1e-9)
            assert torch.isinf(found[i, len(alone) :]).all()
        together = model(**inputs(batch), adapter_names=["sst2"] * 3).logits
        model.set_adapter("sst2")
        torch.testing.assert_close(together, model(**inputs(batch)).logits)


@pytest.mark.parametrize("family", ["bert", "gpt2", "vit", "resnet"])
def test_the_gradient_of_each_task_is_that_of_training_it_alone(family: str) -> None:
    model, batch = several(family)
    batch["labels"] = torch.tensor([1, 0, 2, 1, 2], dtype=torch.float64)
    order = [0, 1, 2, 1, 0]
    names = ["rte", "sst2", "stsb", "rte", "sst2"]
    many = row({**inputs(batch)}, *order) | {"labels": batch["labels"]}
    whole = model(**many, adapter_names=names)
    whole.loss.backward()
    found, losses = gradients(model), []
    for task in TASKS:
        model.zero_grad()
        mine = [i for i, name in enumerate(names) if name == task]
        part = row(many, *mine)
        part["labels"] = part["labels"] if task == "stsb" else part["labels"].long()
        loss = model(**part, adapter_names=[task] * len(mine)).loss
        loss.backward()
        losses.append(loss.detach())
        alone = gradients(model)
        assert alone
        assert all(f".{task}." in name for name in alone)
        for name, gradient in alone.items():
            torch.testing.assert_close(found.pop(name), gradient, atol=1e-10, rtol=1e-8)
    assert not found
    torch.testing.assert_close(whole.loss.detach(), torch.stack(losses).sum())


def test_the_loss_of_one_task_is_the_models_own() -> None:
    model, batch = several("bert")
    model.set_adapter("rte")
    torch.testing.assert_close(model(**batch, adapter_names=["rte"] * 3).loss, model(**batch).loss)
    values = {**batch, "labels": torch.tensor([0.5, -1.0, 2.0], dtype=torch.float64)}
    model.set_adapter("stsb")
    found = model(**values, adapter_names=["stsb"] * 3)
    torch.testing.assert_close(model(**values).loss, found.loss)  # the active task's, without a name
    torch.testing.assert_close(found.loss, ((found.logits[:, 0] - values["labels"]) ** 2).mean())


@pytest.mark.parametrize(("family", "task"), [("gpt2", "causal-lm"), ("bert", "token-classification")])
def test_tokens_are_averaged_within_their_task(family: str, task: str) -> None:
    model, batch = several(family, task)
    names = ["rte", "sst2", "rte"]
    found = model(**batch, adapter_names=names).loss
    alone = [model(**row(batch, 0, 2), adapter_names=["rte"] * 2).loss]
    alone.append(model(**row(batch, 1), adapter_names=["sst2"]).loss)
    # Transformers computes a language model's loss in float32.
    torch.testing.assert_close(found.float(), torch.stack(alone).sum().float())


def test_a_loss_that_is_not_a_number_stays_with_its_task() -> None:
    model, batch = several("bert")
    names = ["rte", "sst2", "rte"]
    model(**batch, adapter_names=names).loss.backward()
    wanted = gradients(model)
    model.zero_grad()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".sst2." in name:
                parameter.fill_(torch.nan)
    found = model(**batch, adapter_names=names)
    assert torch.isfinite(found.logits[[0, 2], :3]).all()
    found.loss.backward()
    for name, gradient in gradients(model).items():
        if ".rte." in name:
            assert torch.equal(gradient, wanted[name]), name
        else:
            assert not torch.isfinite(gradient).all()


def test_only_queries_and_values_of_a_fused_projection() -> None:
    model, _ = several("gpt2")
    host = model.get_base_model().transformer.h[0].attn.c_attn
    layer = host.inlay_multi_lora
    assert layer.parts == ((0, 16), (32, 48))
    delta = layer.delta("rte")
    assert delta.shape == host.weight.shape
    assert torch.equal(delta[:, 16:32], torch.zeros(16, 16, dtype=torch.float64))
    assert delta[:, :16].any()
    assert delta[:, 32:].any()


def test_rows_without_a_task_are_the_base_models() -> None:
    model, batch = several("bert")
    with torch.no_grad():
        found = model(**inputs(batch), adapter_names=["__base__", "rte", "__base__"]).logits
        with model.disable_adapter():
            base = model(**inputs(batch)).logits
    torch.testing.assert_close(found[[0, 2]], base[[0, 2]])
    assert not torch.allclose(found[1], base[1])


@pytest.mark.parametrize("target", [["word_embeddings"], ["query", "dense"], ["patch_embeddings.projection", "fc1"]])
def test_other_layers_and_patterns(target: list[str]) -> None:
    family = "vit" if "fc1" in target else "bert"
    model, batch = several(
        family, target_modules=target, rank_pattern={target[-1]: 2}, alpha_pattern={target[-1]: 7}, init="gaussian"
    )
    kinds = {type(layer.host) for layer in model.modules() if isinstance(layer, MultiLoraLayer)}
    assert kinds <= {nn.Linear, nn.Embedding, nn.Conv2d}
    layer = next(v for k, v in Routing.of(model.get_base_model()).layers.items() if k.endswith(target[-1]))
    assert layer.inlay_multi_lora_b["rte"].weight.shape[1] == 2
    assert layer.inlay_multi_lora_b["rte"].scale == 3.5
    names = ["sst2", "rte", "stsb"]
    with torch.no_grad():
        found = model(**inputs(batch), adapter_names=names).logits
        for i, name in enumerate(names):
            model.set_adapter(name)
            alone = model(**inputs(batch)).logits[i]
            torch.testing.assert_close(found[i, : len(alone)], alone)


def test_each_task_has_its_own_alpha_and_dropout_acts_in_training() -> None:
    model, batch = tiny("bert")
    model = get_peft_model(model.double(), inlay.MultiLoraConfig(lora_dropout=0.5), adapter_name="one").eval()
    model.add_adapter("two", inlay.MultiLoraConfig(lora_dropout=0.5, lora_alpha=3))
    stir(model)
    with torch.no_grad():
        found = model(**inputs(batch), adapter_names=["two", "one", "two"]).logits
        for i, name in enumerate(["two", "one", "two"]):
            model.set_adapter(name)
            torch.testing.assert_close(found[i], model(**inputs(batch)).logits[i])
        for module in model.modules():
            if isinstance(module, MultiLoraLayer):
                module.train()
        assert not torch.allclose(model(**inputs(batch)).logits, model(**inputs(batch)).logits)


def test_generation_mixes_tasks() -> None:
    torch.manual_seed(0)
    size = {"vocab_size": 40, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 40, "eos_token_id": 39}
    model = GPT2LMHeadModel(GPT2Config(**size)).eval()
    model = get_peft_model(model, inlay.MultiLoraConfig(task_type="CAUSAL_LM"), adapter_name="e2e")
    model.add_adapter("dart", inlay.MultiLoraConfig(task_type="CAUSAL_LM", lora_alpha=64))
    stir(model)
    prompts = torch.randint(38, (3, 5))
    names = ["e2e", "dart", "e2e"]
    for beams in (1, 3):
        how = {"max_new_tokens": 6, "num_beams": beams, "do_sample": False, "pad_token_id": 0, "min_new_tokens": 6}
        mask = torch.ones_like(prompts)
        found = model.generate(input_ids=prompts, attention_mask=mask, adapter_names=names, **how)
        alone = []
        for i, name in enumerate(names):
            model.set_adapter(name)
            alone.append(model.generate(input_ids=prompts[i : i + 1], attention_mask=mask[:1], **how))
        assert torch.equal(found, torch.cat(alone))
    model.set_adapter("dart")
    other = model.generate(input_ids=prompts, attention_mask=mask, **how)
    assert not torch.equal(found, other)


# ---------------------------------------------------------------------------------------------------------- costs


class Ops(TorchDispatchMode):
    """Counts what reaches the kernels; views cost nothing."""

    VIEWS = (
        "view",
        "expand",
        "unbind",
        "slice",
        "select.int",
        "transpose",
        "aten.t.",
        "detach",
        "alias",
        "split",
        "squeeze",
    )

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not any(view in str(function) for view in self.VIEWS):
            self.count += 1
        return function(*args, **(kwargs or {}))


def test_a_shared_factor_that_someone_makes_a_parameter_is_trained() -> None:
    """By the mixed rows' sum of gradients: here one direction of it against a difference, in float64."""
    model, batch = several("bert")
    layer = next(module for module in model.modules() if isinstance(module, MultiLoraLayer))
    drawn = layer.inlay_multi_lora_a
    del layer.inlay_multi_lora_a
    layer.inlay_multi_lora_a = trained = nn.Parameter(drawn.clone())

    def loss() -> Tensor:
        logits: Tensor = model(**inputs(batch), adapter_names=[*TASKS]).logits
        return logits[logits.isfinite()].square().sum()  # a smaller head has -inf where others have more classes

    loss().backward()
    direction = torch.randn(drawn.shape, generator=torch.Generator().manual_seed(0), dtype=drawn.dtype)
    slope, step = (trained.grad * direction).sum(), 1e-5
    with torch.no_grad():
        ends = []
        for sign in (1, -1):
            trained.copy_(drawn + sign * step * direction)
            ends.append(loss())
    torch.testing.assert_close(slope, (ends[0] - ends[1]) / (2 * step), rtol=1e-6, atol=1e-8)
    assert slope.abs() > 1e-6


@pytest.mark.parametrize("family", ["bert", "roberta"])
def test_the_number_of_kernels_does_not_depend_on_the_number_of_tasks(family: str) -> None:
    model, batch = tiny(family)
    model = get_peft_model(model, inlay.MultiLoraConfig(), adapter_name="t0").eval()
    for i in range(1, 12):
        model.add_adapter(f"t{i}", inlay.MultiLoraConfig(num_labels=2 + i % 3))
    many = {key: value[:1].repeat(12, *[1] * (value.ndim - 1)) for key, value in inputs(batch).items()}
    many["labels"] = torch.zeros(12, dtype=torch.long)

    def count(tasks: int) -> tuple[int, int]:
        with Ops() as forward:
            loss = model(**many, adapter_names=[f"t{i % tasks}" for i in range(12)]).loss
        with Ops() as backward:
            loss.backward()
        model.zero_grad()
        return forward.count, backward.count

    count(3), count(12)  # what is imported, looked up or moved once
    few, more = count(3), count(12)
    assert few[0] == more[0]
    # Autograd writes one gradient for each trained tensor: that alone grows.
    trained = sum(p.requires_grad for p in model.parameters()) // 12
    assert more[1] - few[1] <= trained * (12 - 3)


def test_training_keeps_the_projected_input_and_not_the_input() -> None:
    model, _ = several("bert", dtype=torch.float32)
    host = model.get_base_model().bert.encoder.layer[1].attention.self.query
    x = torch.randn(3, 9, 16, requires_grad=True)
    kept: list[Tensor] = []
    rows = TaskRows.of(["rte", "sst2", "rte"], list(TASKS))
    keeping = torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t)
    with keeping, host.inlay_multi_lora.routing.forward(rows):
        host(x * 2)
    parameters = {p.data_ptr() for p in model.parameters()} | {host.inlay_multi_lora.inlay_multi_lora_a.data_ptr()}
    own = [t for t in kept if t.data_ptr() not in parameters and t.is_floating_point()]
    # `x A`, and each row's own `B`, which is as large however long the rows are.
    assert [tuple(t.shape) for t in own] == [(3, 9, 3), (3, 3, 16)]


def test_a_further_task_costs_the_same_however_many_there_are() -> None:
    model = get_peft_model(tiny("bert")[0], inlay.MultiLoraConfig(target_modules=["query", "value"]), adapter_name="t0")
    calls = {}
    for i in range(1, 65):
        profile = cProfile.Profile()
        config = inlay.MultiLoraConfig(target_modules=["query", "value"])
        profile.enable()
        model.add_adapter(f"t{i}", config)
        profile.disable()
        calls[i] = pstats.Stats(profile).total_calls
    assert calls[63] <= 1.1 * calls[2]
    assert calls[64] <= 2 * calls[1]


def test_the_counts_of_the_papers_table() -> None:
    with torch.device("meta"):
        base = RobertaForSequenceClassification(RobertaConfig(vocab_size=50265))
    config = inlay.MultiLoraConfig(r=8, target_modules=["query", "value"])
    model = get_peft_model(base, config, adapter_name="t0")
    for i in range(1, 8):
        model.add_adapter(f"t{i}", inlay.MultiLoraConfig(r=8, target_modules=["query", "value"]))
    counted = model.base_model.counted_parameters()
    assert counted == {"shared": 147_456, "trained": 1_179_648}
    assert sum(counted.values()) == 1_327_104
    trained = sum(p.numel() for name, p in model.named_parameters() if p.requires_grad and "inlay" in name)
    assert trained == 1_179_648
    with torch.device("meta"):
        plain = RobertaModel(RobertaConfig(vocab_size=50265))
    lora = get_peft_model(plain, LoraConfig(r=8, target_modules=["query", "value"]))
    assert 8 * lora.get_nb_trainable_parameters()[0] == 2_359_296


@pytest.mark.parametrize("tasks", [1, 3])
def test_the_gpt2_medium_counts(tasks: int) -> None:
    with torch.device("meta"):
        base = GPT2LMHeadModel(GPT2Config(n_embd=1024, n_layer=24, n_head=16))
    model = get_peft_model(base, inlay.MultiLoraConfig(r=4), adapter_name="t0")
    for i in range(1, tasks):
        model.add_adapter(f"t{i}", inlay.MultiLoraConfig(r=4))
    assert sum(model.base_model.counted_parameters().values()) == 24 * 2 * (4096 + tasks * 4096)


@pytest.mark.parametrize("family", ["bert", "gpt2", "vit", "resnet"])
def test_mixed_precision(family: str) -> None:
    """Under autocast, and on a base in bfloat16: what comes out has the host's precision, and all gradients come."""
    model, batch = several(family, dtype=torch.float32)
    names = ["rte", "sst2", "stsb"]
    with torch.no_grad():
        exact = model(**inputs(batch), adapter_names=names).logits
    with torch.autocast("cpu", torch.bfloat16):
        found = model(**batch, adapter_names=names)
    found.loss.backward()
    finite = torch.isfinite(exact)
    torch.testing.assert_close(found.logits.float()[finite], exact[finite], atol=0.1, rtol=0.1)
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in model.parameters() if p.requires_grad)
    half, batch = several(family, dtype=torch.bfloat16)
    layer = next(iter(Routing.of(half.get_base_model()).layers.values()))
    assert layer.inlay_multi_lora_b["rte"].weight.dtype == torch.float32
    found = half(**batch, adapter_names=names)
    assert found.logits.dtype == torch.bfloat16
    found.loss.backward()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in half.parameters() if p.requires_grad)


class Products(TorchDispatchMode):
    """The types of what matrices are multiplied."""

    def __init__(self) -> None:
        super().__init__()
        self.types: set[torch.dtype] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(name in str(function) for name in ("mm", "linear", "convolution")):
            self.types |= {each.dtype for each in args if isinstance(each, Tensor)}
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("family", ["bert", "gpt2", "resnet"])
def test_under_autocast_every_product_is_of_its_type(family: str, grad: bool) -> None:
    """Also `x A`, of an x that a norm gives in float32: as autocast does for any linear layer."""
    model, batch = several(family, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16), torch.set_grad_enabled(grad), Products() as products:
        out = model(**inputs(batch), adapter_names=["rte", "sst2", "stsb"]).logits
        if grad:
            out[out.isfinite()].sum().backward()
    assert products.types == {torch.bfloat16}


def test_compiled_with_names() -> None:
    model, batch = several("bert", dtype=torch.float32)
    names = ["sst2", "rte", "stsb"]
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager")
    with torch.no_grad():
        assert torch.equal(
            compiled(**inputs(batch), adapter_names=names).logits, model(**inputs(batch), adapter_names=names).logits
        )
