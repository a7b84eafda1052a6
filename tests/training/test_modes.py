"""Frozen parts stand still, trained parts train, and gradient checkpointing changes neither."""

from __future__ import annotations

import pytest
import torch
import transformers as hf
from peft import LoraConfig, get_peft_model
from torch import nn

import zoo
from inlay.anatomy import head_modules
from inlay.errors import InlayError
from inlay.methods.attach import attach
from inlay.methods.infoprompt.layer import InfoPromptLayer
from inlay.training.modes import Modes


def adapted(
    family: str, method: str, task: zoo.Task = "classification", **settings: object
) -> tuple[nn.Module, Modes, dict]:
    base, batch = zoo.tiny(family, task)
    new = head_modules(base)
    modes = Modes(base, new=new, whole=method == "full")
    torch.manual_seed(0)
    model = attach(base, method, newly_initialised=new, settings=settings)
    modes.adapt(model)
    return model, modes, batch


def training(model: nn.Module) -> set[str]:
    return {name for name, module in model.named_modules() if module.training}


@pytest.mark.parametrize("method", ["lora", "bias", "norm", "linear-probe", "full"])
@pytest.mark.parametrize("family", ["bert", "gpt2", "opt", "vit", "resnet", "convnext"])
def test_a_frozen_base_is_a_fixed_function(family: str, method: str) -> None:
    model, modes, batch = adapted(family, method)
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    modes.train()
    with torch.no_grad():
        first, second = (model(**batch)["logits"] for _ in range(2))
    moved = [name for name, buffer in model.named_buffers() if not torch.equal(buffer, before[name])]
    if method == "full":
        assert training(model) == {name for name, _ in model.named_modules()}
        assert bool(moved) == (family == "resnet")
    else:
        assert not moved
        # BERT's dropout stands in front of the head, outside the body: that alone is random.
        assert torch.equal(first, second) == (family != "bert")


def test_what_stands_outside_the_body_trains_with_the_head() -> None:
    model, modes, _ = adapted("bert", "linear-probe")
    modes.train()
    assert training(model) == {"dropout", "classifier"}
    assert set(modes.trained_tensors()) == {"classifier.weight", "classifier.bias"}


def test_an_uninitialised_part_that_the_method_does_not_train_stands_still() -> None:
    """A masked language model comes without the pooler: prompts with a head of their own leave it alone."""
    base, batch = zoo.tiny("bert", "classification")
    modes = Modes(base, new=["bert.pooler", "classifier"], whole=False)
    model = attach(
        base,
        "infoprompt",
        newly_initialised=["bert.pooler", "classifier"],
        settings={"pad_token_id": 0, "state": "mean"},
    )
    modes.adapt(model)
    modes.train()
    assert not {name for name in training(model) if ".pooler" in name or "encoder" in name}
    (layer,) = [module for module in model.modules() if isinstance(module, InfoPromptLayer)]
    for _ in range(3):
        model(**batch)
    (pieces,) = layer.inlay_infoprompt_pieces.values()
    assert pieces.cache.computed == len({tuple(row) for row in batch["input_ids"].tolist()})


@pytest.mark.parametrize("family", ["bert", "roberta", "llama"])
def test_checkpointed_layers_count_as_frozen_where_they_compute_in_eval_mode(family: str) -> None:
    """So InfoPrompt's Phi(X) is kept; and the gradients are those without checkpointing."""
    found = []
    for checkpointing in (False, True):
        model, modes, batch = adapted(family, "infoprompt", pad_token_id=0, state="mean", beta=0, gamma=0)
        if checkpointing:
            modes.checkpoint()
        modes.train()
        (layer,) = [module for module in model.modules() if isinstance(module, InfoPromptLayer)]
        for _ in range(3):
            model.zero_grad()
            model(**batch)["loss"].backward()
        assert layer.recalled[1] == len({tuple(row) for row in batch["input_ids"].tolist()})
        found.append([parameter.grad for parameter in model.parameters() if parameter.grad is not None])
        modes.close()
        model.train()
        model(**batch)
        assert len(next(iter(layer.inlay_infoprompt_pieces.values())).cache) == 0, "a plain Trainer's mode"
    assert found[0]
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_a_new_head_trains_with_its_own_dropout() -> None:
    model, modes, _ = adapted("roberta", "lora")
    modes.train()
    on = training(model)
    head = "base_model.model.classifier.modules_to_save.default"
    assert {head, f"{head}.dropout", f"{head}.dense"} <= on
    assert not any("original_module" in name or ".encoder.layer.0.output" in name for name in on)


def test_an_adapters_own_dropout_works() -> None:
    model, modes, batch = adapted("vit", "lora", lora_dropout=0.5)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter)
    modes.train()
    assert any("lora_dropout" in name for name in training(model))
    with torch.no_grad():
        assert not torch.equal(model(**batch)["logits"], model(**batch)["logits"])


def test_functional_dropout_of_frozen_attention_is_off() -> None:
    config = hf.OPTConfig(
        vocab_size=48, hidden_size=16, word_embed_proj_dim=16, ffn_dim=24, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=40, dropout=0.5, attention_dropout=0.5, layerdrop=0.5, num_labels=2, pad_token_id=1,
    )  # fmt: skip
    base = hf.OPTForSequenceClassification(config)
    modes = Modes(base, new=["score"], whole=False)
    modes.adapt(get_peft_model(base, LoraConfig(task_type="SEQ_CLS", target_modules=["q_proj"])))
    ids = torch.arange(3, 20)[None]
    modes.train()
    with torch.no_grad():
        assert torch.equal(modes.model(input_ids=ids)["logits"], modes.model(input_ids=ids)["logits"])


class Normed(nn.Module):
    """A head with a batch norm, as some image models have."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.out = nn.BatchNorm1d(32), nn.Linear(32, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.norm(x))


def test_batch_norm_moves_its_statistics_only_in_a_new_head() -> None:
    base, batch = zoo.tiny("resnet")
    base.classifier = nn.Sequential(nn.Flatten(), Normed())
    modes = Modes(base, new=["classifier"], whole=False)
    modes.adapt(attach(base, "lora", newly_initialised=["classifier"], settings={"target_modules": ["convolution"]}))
    before = {name: buffer.clone() for name, buffer in modes.model.named_buffers()}
    modes.train()
    modes.model(**batch)
    moved = {name for name, buffer in modes.model.named_buffers() if not torch.equal(buffer, before[name])}
    head = "base_model.model.classifier.modules_to_save.default.1.norm"
    assert moved == {f"{head}.running_mean", f"{head}.running_var", f"{head}.num_batches_tracked"}
    assert moved <= set(modes.trained_tensors())
    assert not any("resnet" in name and "running" in name for name in modes.trained_tensors())


def test_full_keeps_batch_statistics_with_what_it_trains() -> None:
    _, modes, _ = adapted("resnet", "full")
    assert any(name.endswith("running_var") for name in modes.trained_tensors())
    _, modes, _ = adapted("resnet", "norm")
    assert not any("running" in name for name in modes.trained_tensors())


def gradients(family: str, method: str, checkpointing: bool) -> tuple[dict[str, torch.Tensor], int, bool]:
    model, modes, batch = adapted(family, method, **({"lora_dropout": 0.2} if method == "lora" else {}))
    if checkpointing:
        modes.checkpoint()
    modes.train()
    kept = 0

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal kept
        kept += tensor.numel()
        return tensor

    torch.manual_seed(0)
    reaches_embeddings = []
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            module.register_forward_hook(lambda m, a, out: reaches_embeddings.append(out.requires_grad))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(**batch)["loss"]
    loss.backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    modes.close()
    assert not training(model)
    assert not any(getattr(module, "gradient_checkpointing", False) for module in model.modules())
    return found, kept, any(reaches_embeddings)


@pytest.mark.parametrize("method", ["lora", "bias", "full"])
@pytest.mark.parametrize("family", ["bert", "opt", "gpt2", "vit", "swin"])
def test_gradient_checkpointing_changes_memory_and_nothing_else(family: str, method: str) -> None:
    plain, kept, _ = gradients(family, method, checkpointing=False)
    checkpointed, kept_less, reaches_embeddings = gradients(family, method, checkpointing=True)
    assert plain.keys() == checkpointed.keys()
    for name, gradient in plain.items():
        torch.testing.assert_close(checkpointed[name], gradient, rtol=1e-5, atol=1e-7, msg=name)
    assert kept_less < 0.7 * kept
    assert reaches_embeddings == (method == "full" and family not in ("vit", "swin"))


def test_a_model_without_gradient_checkpointing_is_refused_clearly() -> None:
    base = nn.Linear(2, 2)
    with pytest.raises(InlayError, match="Linear does not support gradient checkpointing"):
        Modes(base, new=[], whole=False).checkpoint()


def test_prefixes_and_gradient_checkpointing_do_not_go_together() -> None:
    _, modes, _ = adapted("bert", "prefix")
    with pytest.raises(InlayError, match="prefix tuning"):
        modes.checkpoint()
