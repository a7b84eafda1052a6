"""Anatomy against what the models do: parts are checked by hooks, shapes and parameters, not by a second table."""

from __future__ import annotations

import importlib
import textwrap
from dataclasses import replace
from typing import Any

import peft
import pytest
import torch
import transformers as hf
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn

import zoo
from inlay.anatomy import (
    Anatomy,
    Block,
    Description,
    Part,
    anatomy,
    feature_shapes,
    head_modules,
    register_anatomy,
)
from inlay.errors import InlayError

TASK_CASES = [case for case in zoo.CASES if case[1] != "base"]
HEADED = [case for case in TASK_CASES if case[1] != "image-text"]  # the vectors of two towers are compared as they are
ATTENTIVE = [family for family in zoo.FAMILIES if family not in ("resnet", "convnext")]
FUSED = ("gpt2", "modernbert")
WITHOUT_FINAL_NORM = ("bert", "roberta", "distilbert", "electra", "mpnet", "deberta-v2", "resnet")
# Parameters of a block that are no projection and no norm, and those of a backbone that lie outside its parts.
ELSEWHERE_IN_BLOCK = (
    "relative_attention_bias",
    "relative_position_bias",
    "layer_scale",
    "pos_key_proj",
    "pos_query_proj",
)
ELSEWHERE = (
    "pooler",
    "downsampl",
    "relative_attention_bias",
    "rel_embeddings",
    "encoder.LayerNorm",
    "shared",
    "decoder",
)


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test registers is forgotten after it."""
    # The package offers the function under the module's name, so the module is asked for by its path.
    module = importlib.import_module("inlay.anatomy")
    monkeypatch.setattr(module, "_DESCRIPTIONS", dict(module._DESCRIPTIONS))


def projections(block: Block) -> list[Part]:
    attention = block.attention
    named = [attention.query, attention.key, attention.value, attention.output] if attention else []
    return [*dict.fromkeys(named), *block.feed_forward]


def skeleton(parts: Anatomy) -> list[str]:
    """Every name in an anatomy, in a fixed order."""
    names = [parts.backbone.name, *(part.name for part in parts.stem_parts)]
    for block in parts.blocks:
        names += [block.name, *(part.name for part in (*projections(block), *block.norms))]
        names += [block.attention.name] if block.attention else []
    rest = (parts.final_norm, parts.head, *parts.norms)
    return names + [part.name for part in rest if part is not None]


def parameters(*parts: Part | None) -> set[int]:
    return {id(parameter) for part in parts if part is not None for parameter in part.module.parameters()}


def in_order_of_execution(model: nn.Module, inputs: dict[str, torch.Tensor], parts: list[Part]) -> list[str]:
    seen: list[str] = []
    handles = [
        part.module.register_forward_hook(lambda *_, name=part.name: seen.append(name))  # type: ignore[misc]
        for part in parts
    ]
    with torch.no_grad():
        model(**inputs)
    for handle in handles:
        handle.remove()
    return seen


@pytest.mark.parametrize(("family", "task"), zoo.CASES)
def test_names_lead_to_the_parts_and_blocks_run_in_order(family: str, task: zoo.Task) -> None:
    model, inputs = zoo.tiny(family, task)
    parts = anatomy(model)
    assert (parts.family, parts.modality) == (family, zoo.FAMILIES[family].modality)
    assert len(parts.blocks) == (4 if parts.kind in ("hierarchical", "convolutional") else 3)
    assert [block.index for block in parts.blocks] == list(range(1, len(parts.blocks) + 1))
    for part in (parts.stem, *parts.stem_parts, *parts.blocks, *parts.norms, parts.final_norm, parts.head):
        assert part is None or model.get_submodule(part.name) is part.module

    in_turn = [*parts.stem_parts, *parts.blocks]
    assert in_order_of_execution(model, inputs, in_turn) == [part.name for part in in_turn]


@pytest.mark.parametrize("family", ATTENTIVE)
def test_feed_forward_runs_in_order_after_attention(family: str) -> None:
    model, inputs = zoo.tiny(family)
    block = anatomy(model).blocks[1]
    assert block.attention is not None
    in_turn = [block.attention.query, block.attention.output, *block.feed_forward]
    assert in_order_of_execution(model, inputs, in_turn) == [part.name for part in in_turn]


@pytest.mark.parametrize("family", ATTENTIVE)
def test_attention_has_the_shapes_of_queries_keys_values_and_output(family: str) -> None:
    model, inputs = zoo.tiny(family)
    parts = anatomy(model)
    widths = feature_shapes(model, inputs)
    for block, (_, width) in zip(parts.blocks, widths, strict=True):
        attention = block.attention
        assert attention is not None
        sizes: dict[str, tuple[int, int]] = {}

        def note(module: nn.Module, args: Any, output: torch.Tensor, role: str, sizes: Any = sizes) -> None:
            sizes[role] = (args[0].shape[-1], output.shape[-1])

        for role in ("query", "key", "value", "output"):
            part: Part = getattr(attention, role)
            part.module.register_forward_hook(lambda *a, role=role: note(*a, role=role))  # type: ignore[misc]
        with torch.no_grad():
            model(**inputs)
        if attention.fused:
            assert attention.query is attention.key is attention.value
            assert sizes["query"] == (width, 3 * width)
        else:
            grouped = width // 2 if family in ("llama", "gemma") else width
            assert sizes["query"] == (width, width)
            assert sizes["key"] == sizes["value"] == (width, grouped)
            roles = zip("qkv", (attention.query, attention.key, attention.value), strict=True)
            assert all(part.name.rpartition(".")[2].startswith(letter) for letter, part in roles)
        assert sizes["output"] == (width, width)
    assert parts.blocks[0].attention is not None
    assert parts.blocks[0].attention.fused == (family in FUSED)
    assert parts.hidden_size == widths[-1][-1]


@pytest.mark.parametrize("family", ATTENTIVE)
def test_without_values_nothing_reaches_the_output_projection(family: str) -> None:
    """Finds values where they are, in a projection of their own or in the last third of a fused one."""
    model, inputs = zoo.tiny(family)
    attention = anatomy(model).blocks[-1].attention
    assert attention is not None
    reached: list[torch.Tensor] = []
    attention.output.module.register_forward_pre_hook(lambda _, args: reached.append(args[0]))

    def erase(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        first = output.shape[-1] * 2 // 3 if attention.fused else 0
        return torch.cat([output[..., :first], torch.zeros_like(output[..., first:])], dim=-1)

    with torch.no_grad():
        model(**inputs)
        attention.value.module.register_forward_hook(erase)
        model(**inputs)
    assert reached[0].abs().max() > 0
    assert reached[1].abs().max() == 0


@pytest.mark.parametrize(("family", "task"), zoo.CASES)
def test_the_norms_are_all_there(family: str, task: zoo.Task) -> None:
    model, _ = zoo.tiny(family, task)
    parts = anatomy(model)

    def norms_below(part: Part) -> list[str]:
        """A norm is what holds a weight vector; every other layer's weight is a matrix or more."""
        return [
            ".".join(filter(None, (part.name, name)))
            for name, module in part.module.named_modules()
            if (weight := module._parameters.get("weight")) is not None and weight.ndim == 1
        ]

    around = Part("", model) if parts.text_tower else parts.backbone
    assert [norm.name for norm in parts.norms] == norms_below(around)
    for block in parts.all_blocks:
        assert block.norms
        assert [norm.name for norm in block.norms] == norms_below(block)
    assert (parts.final_norm is None) == (family in WITHOUT_FINAL_NORM)
    assert parts.final_norm is None or parts.final_norm in parts.norms


@pytest.mark.parametrize(("family", "task"), zoo.CASES)
def test_every_parameter_belongs_to_one_part(family: str, task: zoo.Task) -> None:
    model, _ = zoo.tiny(family, task)
    parts = anatomy(model)
    for block in parts.blocks:
        pieces = [parameters(part) for part in (*projections(block), *block.norms)]
        assert sum(map(len, pieces)) == len(set().union(*pieces))
        left = [n for n, p in block.module.named_parameters() if id(p) not in set().union(*pieces)]
        assert all(any(word in name for word in ELSEWHERE_IN_BLOCK) for name in left), left
    inside = parameters(*parts.stem_parts, *parts.blocks, parts.final_norm)
    left = [n for n, p in parts.backbone.module.named_parameters() if id(p) not in inside]
    assert all(any(word in name for word in ELSEWHERE) for name in left), left

    beyond = parameters(Part("", model)) - parameters(parts.backbone)
    if task == "image-text":
        beside = parameters(*parts.text_tower)
        assert beside
        assert beside < beyond
        return
    assert beyond <= parameters(parts.head, *(Part(n, model.get_submodule(n)) for n in head_modules(model)))


@pytest.mark.parametrize(("family", "task"), HEADED)
def test_the_head_makes_the_logits(family: str, task: zoo.Task) -> None:
    model, inputs = zoo.tiny(family, task)
    head = anatomy(model).head
    assert head is not None
    made: list[torch.Tensor] = []
    head.module.register_forward_hook(lambda *args: made.append(args[-1]))
    with torch.no_grad():
        logits = model(**inputs).logits
    # A decoder's classifier makes logits at every token, of which the model keeps each row's last.
    rows = made[-1].reshape(-1, 1, logits.shape[-1]) == logits.reshape(1, -1, logits.shape[-1])
    assert rows.all(-1).any(0).all()
    assert (head.name in head_modules(model)) == (task not in ("causal-lm", "sequence-to-sequence"))


@pytest.mark.parametrize("family", zoo.FAMILIES)
def test_bare_backbones_have_no_head(family: str) -> None:
    model, _ = zoo.tiny(family, "base")
    assert anatomy(model).head is None
    assert head_modules(model) == []


def test_heads_of_several_modules_are_whole() -> None:
    assert head_modules(zoo.tiny("distilbert")[0]) == ["pre_classifier", "classifier"]
    assert head_modules(zoo.tiny("modernbert")[0]) == ["head", "classifier"]
    assert head_modules(zoo.tiny("deberta-v2")[0]) == ["pooler", "classifier"]


@pytest.mark.parametrize(("family", "task"), zoo.CASES)
def test_a_lora_changes_no_name(family: str, task: zoo.Task) -> None:
    model, _ = zoo.tiny(family, task)
    before, heads = skeleton(anatomy(model)), head_modules(model)
    block = anatomy(model).blocks[0]
    last = block.feed_forward[-1]
    targets = [part.name for part in (block.attention.query, block.attention.output)] if block.attention else []
    config = peft.LoraConfig(r=2, target_modules=[*targets, last.name], modules_to_save=heads or None)

    wrapped = peft.get_peft_model(model, config)
    parts = anatomy(wrapped)
    assert skeleton(parts) == [f"base_model.model.{name}".removesuffix(".") for name in before]
    assert head_modules(wrapped) == [f"base_model.model.{name}" for name in heads]
    assert isinstance(parts.blocks[0].feed_forward[-1].module, BaseTunerLayer)
    if parts.blocks[0].attention is not None:
        assert isinstance(parts.blocks[0].attention.query.module, BaseTunerLayer)
    assert not isinstance(parts.blocks[1].feed_forward[-1].module, BaseTunerLayer)

    injected = peft.inject_adapter_in_model(
        peft.LoraConfig(r=2, target_modules=targets or [last.name]), zoo.tiny(family, task)[0]
    )
    assert skeleton(anatomy(injected)) == before


@pytest.mark.parametrize("family", ["bert", "llama", "resnet"])
def test_wrapped_norms_are_found_once(family: str) -> None:
    model, _ = zoo.tiny(family)
    names = [norm.name for norm in anatomy(model).norms]
    expected = [f"base_model.model.{name}" for name in names]
    if family != "resnet":  # PEFT's own tuning of norms knows layer norms only
        tuned = peft.get_peft_model(zoo.tiny(family)[0], peft.LNTuningConfig(target_modules=names))
        assert [norm.name for norm in anatomy(tuned).norms] == expected
    block = anatomy(model).blocks[0]
    saved = peft.get_peft_model(
        model, peft.LoraConfig(r=2, target_modules=[block.feed_forward[0].name], modules_to_save=names)
    )
    assert [norm.name for norm in anatomy(saved).norms] == expected


def test_paths_lead_into_the_copy_that_peft_trains() -> None:
    model, _ = zoo.tiny("bert")
    config = peft.LoraConfig(r=2, target_modules=["query"], modules_to_save=["intermediate", "classifier"])
    parts = anatomy(peft.get_peft_model(model, config))
    dense = parts.blocks[0].feed_forward[0]
    assert dense.name == "base_model.model.bert.encoder.layer.0.intermediate.modules_to_save.default.dense"
    assert dense.module.weight.requires_grad


def test_virtual_tokens_are_seen_by_the_dry_run() -> None:
    model, _ = zoo.tiny("bert")
    config = peft.PromptTuningConfig(task_type="SEQ_CLS", num_virtual_tokens=5)
    wrapped = peft.get_peft_model(model, config)
    assert anatomy(wrapped).blocks[0].name == "base_model.bert.encoder.layer.0"
    assert feature_shapes(wrapped, {"input_ids": torch.zeros(1, 8, dtype=torch.long)})[0] == (13, 16)


def test_what_a_method_hangs_into_a_block_is_not_part_of_it() -> None:
    model, _ = zoo.tiny("vit")
    before = skeleton(anatomy(model))
    block = anatomy(model).blocks[0].module
    block.inlay_adapter = nn.Sequential(nn.Linear(16, 4), nn.LayerNorm(4))
    assert skeleton(anatomy(model)) == before


def test_a_compiled_model_is_seen_through() -> None:
    model, _ = zoo.tiny("bert")
    compiled = torch.compile(model, backend="eager")
    assert skeleton(anatomy(compiled)) == [f"_orig_mod.{name}" for name in skeleton(anatomy(model))]


@pytest.mark.parametrize(("family", "task"), zoo.CASES)
def test_feature_shapes_are_what_a_hook_sees(family: str, task: zoo.Task) -> None:
    model, inputs = zoo.tiny(family, task)
    seen: list[tuple[int, ...]] = []
    handles = [
        block.module.register_forward_pre_hook(lambda _, args: seen.append(tuple(args[0].shape[1:])))
        for block in anatomy(model).blocks
    ]
    with torch.no_grad():
        model(**inputs)
    for handle in handles:
        handle.remove()
    assert feature_shapes(model, inputs) == seen
    if zoo.FAMILIES[family].modality == "image":
        assert feature_shapes(model, image_size=zoo.IMAGE_SIZE) == seen
    else:
        assert feature_shapes(model) == [(8, 16)] * 3


@pytest.mark.parametrize("family", ["bert", "resnet", "swin"])
def test_a_dry_run_leaves_no_trace(family: str) -> None:
    model, _ = zoo.tiny(family)
    model.train()
    anatomy(model).blocks[1].module.eval()
    modes = [module.training for module in model.modules()]
    state = {name: value.clone() for name, value in model.state_dict().items()}
    rng = torch.get_rng_state()
    feature_shapes(model, image_size=32)
    assert [module.training for module in model.modules()] == modes
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any(module._forward_pre_hooks for module in model.modules())
    assert torch.equal(torch.get_rng_state(), rng)


def test_a_failed_dry_run_leaves_no_trace_either() -> None:
    model, _ = zoo.tiny("vit")
    model.train()
    with pytest.raises(ValueError, match="size"):
        feature_shapes(model, image_size=40)
    assert model.training
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_image_size_is_asked_for_where_the_model_has_none() -> None:
    model, _ = zoo.tiny("resnet")
    del model.config.image_size
    with pytest.raises(InlayError, match=r"ResNetModel does not say .* Pass image_size="):
        feature_shapes(model)
    assert feature_shapes(model, image_size=(32, 64))[0] == (8, 8, 16)


@pytest.mark.parametrize(
    ("config", "family", "kind"),
    [
        (hf.XLMRobertaConfig(**zoo.ENCODER), "roberta", "encoder"),
        (hf.MistralConfig(**zoo.GROUPED), "llama", "decoder"),
        (hf.Qwen2Config(**{k: v for k, v in zoo.GROUPED.items() if k != "head_dim"}), "llama", "decoder"),
        (hf.Qwen3Config(**zoo.GROUPED), "llama", "decoder"),
        (hf.GemmaConfig(**zoo.GROUPED), "gemma", "decoder"),
        (hf.Gemma2Config(**zoo.GROUPED), "gemma", "decoder"),
        (
            hf.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[2, 1], layer_type="basic"),
            "resnet",
            "convolutional",
        ),
    ],
    ids=lambda value: getattr(value, "model_type", None),
)
def test_relatives_share_a_description(config: Any, family: str, kind: str) -> None:
    parts = anatomy(hf.AutoModel.from_config(config))
    assert (parts.family, parts.kind, len(parts.blocks)) == (family, kind, 3)


def test_variants_of_a_family() -> None:
    opt = hf.OPTConfig(
        **_without(zoo.ENCODER, "intermediate_size"), ffn_dim=24, word_embed_proj_dim=8, do_layer_norm_before=False
    )
    parts = anatomy(hf.OPTModel(opt))
    assert parts.final_norm is None
    assert [part.name for part in parts.stem_parts][-1] == "decoder.project_in"

    t5 = hf.T5ForConditionalGeneration(zoo.t5_config())
    assert [block.name for block in anatomy(t5).blocks] == [f"encoder.block.{i}" for i in range(3)]
    masked = hf.BertForMaskedLM(hf.BertConfig(**zoo.ENCODER))
    heads = [anatomy(model).head for model in (t5, masked)]
    assert [head and head.name for head in heads] == ["lm_head", "cls.predictions.decoder"]
    assert head_modules(t5) == head_modules(masked) == []


def _without(settings: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if name not in names}


def test_two_models_in_one_are_refused() -> None:
    model: Any = zoo.tiny("bert")[0]
    model.other = hf.BertModel(model.config)
    with pytest.raises(InlayError, match="holds more than one model: bert, other"):
        anatomy(model)


def test_an_unknown_architecture_says_how_to_describe_it(registry: None) -> None:
    config = hf.AlbertConfig(
        **zoo.SPECIAL, hidden_size=16, num_attention_heads=2, intermediate_size=8, embedding_size=8
    )
    model = hf.AlbertForSequenceClassification(config)
    with pytest.raises(InlayError) as caught:
        anatomy(model)
    message = str(caught.value)
    assert "Unknown architecture 'albert'" in message
    assert "bert, clip" in message
    assert "register_anatomy('albert', Description(" in message
    assert "embeddings, encoder" in message
    # The code that the message shows runs and is heeded: what is wrong then is only its example's paths.
    exec(textwrap.dedent(message[message.index("    from inlay") :]))
    with pytest.raises(InlayError, match=r"The description of 'albert' says 'encoder\.layers'"):
        anatomy(model)


class Mixing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.all, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        query, key, value = self.all(states).chunk(3, dim=-1)
        return self.out((query @ key.mT).softmax(-1) @ value)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mix, self.up, self.down = nn.LayerNorm(8), Mixing(), nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        states = states + self.mix(self.norm(states))
        return states + self.down(self.up(states).relu())


class Toy(nn.Module):
    """A model that no table knows, without a config and with its head inside."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.width = nn.Embedding(10, 8), 8
        self.trunk = nn.Sequential(Layer(), Layer())
        self.answer = nn.Linear(8, 2)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.answer(self.trunk(self.table(ids)).mean(1))


LAYERS = Description("text", "encoder", stem="table", blocks="trunk.*", attention="mix", qkv="all", output="mix.out")


def test_a_model_of_ones_own_can_be_described(registry: None) -> None:
    model = Toy()
    with pytest.raises(InlayError, match=r"Unknown architecture '.*Toy'.*: table, trunk, answer"):
        anatomy(model)
    register_anatomy(Toy, replace(LAYERS, head="answer", hidden_size="width"))
    parts = anatomy(model)
    assert (parts.family, parts.hidden_size) == ("toy", 8)
    assert [block.name for block in parts.blocks] == ["trunk.0", "trunk.1"]
    assert [part.name for part in projections(parts.blocks[1])] == [
        f"trunk.1.{name}" for name in ("mix.all", "mix.out", "up", "down")
    ]
    assert [norm.name for norm in parts.norms] == ["trunk.0.norm", "trunk.1.norm"]
    assert head_modules(model) == ["answer"]
    assert parts.head == Part("answer", model.answer)
    assert feature_shapes(model) == [(8, 8), (8, 8)]


def test_a_description_that_does_not_fit_says_where(registry: None) -> None:
    register_anatomy(Toy, Description("text", "encoder", stem="table", blocks="layers.*", hidden_size="width"))
    with pytest.raises(InlayError, match=r"says 'layers', but 'Toy' has no such thing; its children are: table, trunk"):
        anatomy(Toy())
    register_anatomy(Toy, Description("text", "encoder", stem="table", blocks="trunk.*"))
    with pytest.raises(InlayError, match=r"says 'config\.hidden_size'"):
        anatomy(Toy())


def test_a_model_type_can_be_described(registry: None) -> None:
    class ToyConfig(hf.PretrainedConfig):
        model_type = "toy-lm"
        hidden_size = 8

    class ToyModel(hf.PreTrainedModel):
        config_class = ToyConfig

        def __init__(self, config: ToyConfig) -> None:
            super().__init__(config)
            self.table = nn.Embedding(10, 8)
            self.trunk = nn.ModuleList([Layer(), Layer()])

    register_anatomy("toy-lm", LAYERS)
    assert anatomy(ToyModel(ToyConfig())).family == "toy-lm"


TIMM = {"vit": "vit_tiny_patch16_224", "resnet": "resnet26", "swin": "swin_tiny_patch4_window7_224"}
TIMM_ARGUMENTS: dict[str, dict[str, Any]] = {
    "vit": {"img_size": 32, "patch_size": 8, "embed_dim": 16, "depth": 4, "num_heads": 2},
    "resnet": {"layers": [1, 1, 1, 1], "channels": (4, 4, 8, 8)},
    "swin": {
        "img_size": 32,
        "embed_dim": 8,
        "depths": (2, 2),
        "num_heads": (2, 4),
        "window_size": 4,
    },
}


@pytest.mark.parametrize("family", TIMM)
@pytest.mark.parametrize("wrapped", [False, True], ids=["timm", "transformers"])
def test_timm(family: str, wrapped: bool) -> None:
    timm = pytest.importorskip("timm", reason="needs timm, which is an extra")
    settings = TIMM_ARGUMENTS[family]
    if wrapped:
        config = hf.TimmWrapperConfig(architecture=TIMM[family], num_labels=3, model_args=settings)
        model, prefix = hf.TimmWrapperForImageClassification(config).eval(), "timm_model."
        bare = hf.TimmWrapperModel(config)
    else:
        model, prefix = timm.create_model(TIMM[family], num_classes=3, **settings).eval(), ""
        bare = timm.create_model(TIMM[family], num_classes=0, **settings)
    parts = anatomy(model)
    assert (parts.family, len(parts.blocks)) == (f"timm-{family}", 4)
    assert parts.hidden_size == {"vit": 16, "resnet": 32, "swin": 16}[family]
    head = {"vit": "head", "resnet": "fc", "swin": "head.fc"}[family]
    assert parts.head is not None
    assert parts.head.name == prefix + head
    assert head_modules(model) == [prefix + head]
    assert anatomy(bare).head is None
    assert head_modules(bare) == []
    assert (parts.final_norm is None) == (family == "resnet")

    seen: list[str] = []
    for part in (*parts.stem_parts, *parts.blocks):
        part.module.register_forward_hook(lambda *_, name=part.name: seen.append(name))  # type: ignore[misc]
    with torch.no_grad():
        model(torch.zeros(1, 3, 32, 32))
    assert seen == [part.name for part in (*parts.stem_parts, *parts.blocks)]
    assert feature_shapes(model, image_size=32)[0] == {"vit": (17, 16), "resnet": (64, 8, 8), "swin": (8, 8, 8)}[family]

    norms = [name for name, module in model.named_modules() if isinstance(module, (nn.LayerNorm, nn.BatchNorm2d))]
    assert [norm.name for norm in parts.norms] == norms
    attention = parts.blocks[0].attention
    assert (attention is None) == (family == "resnet")
    if attention is not None:
        assert attention.fused
        assert attention.query.module.out_features == 3 * attention.output.module.out_features

    target = (attention.query if attention else parts.blocks[0].feed_forward[0]).name
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=[target], modules_to_save=[head]))
    assert skeleton(anatomy(adapted)) == [f"base_model.model.{name}".removesuffix(".") for name in skeleton(parts)]


def test_an_undescribed_timm_model_is_named_by_its_class() -> None:
    timm = pytest.importorskip("timm", reason="needs timm, which is an extra")
    with pytest.raises(InlayError, match=r"Unknown architecture 'timm.models.efficientnet.EfficientNet'"):
        anatomy(timm.create_model("efficientnet_b0"))
    wrapper = hf.TimmWrapperModel(hf.TimmWrapperConfig(architecture="efficientnet_b0"))
    with pytest.raises(InlayError, match=r"Unknown architecture 'timm.models.efficientnet.EfficientNet'"):
        anatomy(wrapper)
