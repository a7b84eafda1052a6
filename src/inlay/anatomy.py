"""What a backbone is made of: stem, blocks, attention, feed-forward, norms, final norm and head.

This is the one place that knows how architectures name their parts. Everything that speaks of "layer l" asks
`anatomy(model)`. An architecture is described by a handful of dotted paths (`Description`); what follows from a
module's type alone, namely norms and feed-forward layers, is found by type. PEFT's wrappers are seen through: a
LoRA around the query projection is the query part, under the same name as the projection that it wraps.

The paths are those of Transformers 5.22 and timm 1.0. Others are added with `register_anatomy`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from inlay.errors import InlayError, unknown

Modality = Literal["text", "image"]
Kind = Literal["encoder", "decoder", "hierarchical", "convolutional"]

NORMS = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, _NormBase)  # batch and instance norms share _NormBase
PROJECTIONS = (nn.Linear, Conv1D, nn.Conv2d)
EXAMPLE_TOKENS = 8
HEAD_SIZES = ("head_dim", "attention_head_size", "key_value_proj_dim")


@dataclass(frozen=True)
class Part:
    """A module and its dotted path in the model that `anatomy` was given."""

    name: str
    module: nn.Module = field(repr=False)


@dataclass(frozen=True)
class Attention(Part):
    """The module that computes attention, and its projections.

    Where one projection makes queries, keys and values together (`fused`), all three are that same part and its
    output is the three in this order. `output` may lie outside of the module, as it does in BERT.
    """

    query: Part
    key: Part
    value: Part
    output: Part
    fused: bool = False

    @property
    def head_size(self) -> int:
        """The number of channels of one head, by whichever of its names the architecture calls it."""
        found = (getattr(self.module, name, None) for name in HEAD_SIZES)
        size = next((size for size in found if size), None)
        if size is None:
            raise InlayError(f"{type(self.module).__name__} does not say how large its heads are: {HEAD_SIZES}.")
        return int(size)


@dataclass(frozen=True)
class Block(Part):
    """One layer l of the trunk, counted from 1.

    `feed_forward` are the linear layers and convolutions outside of attention, `norms` every norm in the block;
    both in the order in which the model registers them. `cross` is the attention of a decoder to what its encoder read.
    """

    index: int
    attention: Attention | None
    feed_forward: tuple[Part, ...]
    norms: tuple[Part, ...]
    cross: Attention | None = None


@dataclass(frozen=True)
class Anatomy:
    """The parts of a model. Names are paths in the model that was asked about, wrappers included.

    `backbone` is the pretrained trunk without a task's head. `stem` makes vectors of tokens or pixels; `stem_parts`
    is it and all else that acts before the first block. `norms` are all of the backbone's, also those outside
    the blocks. `head` makes the final outputs: a classifier or a language-model head; None for a bare backbone.
    `leading_tokens` is how many tokens a vision transformer puts before its patches: class, distillation, registers.
    `decoder` are the blocks of the decoder where a model writes what its encoder read: counted on from `blocks`, which
    are the encoder's. A classifier made of such a model has none. `text_tower` are the blocks of the tower that reads
    texts, where a model reads images in another one beside it: counted on from `blocks`, which are those of the images.
    """

    family: str
    modality: Modality
    kind: Kind
    hidden_size: int
    backbone: Part
    stem: Part
    stem_parts: tuple[Part, ...]
    blocks: tuple[Block, ...]
    final_norm: Part | None
    norms: tuple[Part, ...]
    head: Part | None
    leading_tokens: int
    decoder: tuple[Block, ...] = ()
    text_tower: tuple[Block, ...] = ()

    @property
    def all_blocks(self) -> tuple[Block, ...]:
        """The blocks, and those of a decoder or of a tower of texts that is beside them."""
        return (*self.blocks, *self.decoder, *self.text_tower)


@dataclass(frozen=True)
class Description:
    """Where an architecture keeps its parts: dotted paths, separated by spaces where there are several.

    `stem`, `blocks` and `final_norm` start at the backbone, which is the model without its task's head, or at its
    child `root` where it has one; `*` stands for every child, in order. `attention` and `output` start at a block,
    `qkv` at the attention module: three names, or one where a single projection makes all three. The first path of
    `stem` must exist; of `final_norm` the first that exists is taken. `head` is needed only where the backbone
    itself holds it. `hidden_size` is an attribute of the backbone; of a list the last entry counts. `leading` are the
    parameters, from the backbone, that are put before the patches of an image, those that exist. `pooling` is what the
    classifier of a text model reads: the pooler's output, or the first or the last token's state. `decoder` are the
    blocks beside an encoder that write, with the same attention; `cross` and `cross_output` are theirs to the encoder.
    `text_root` is the child of the whole model that reads texts where `root` reads images; its parts have the same
    names.
    """

    modality: Modality
    kind: Kind
    stem: str
    blocks: str
    attention: str = ""
    qkv: str = ""
    output: str = ""
    final_norm: str = ""
    head: str = ""
    root: str = ""
    hidden_size: str = "config.hidden_size"
    family: str = ""
    leading: str = ""
    pooling: str = ""
    decoder: str = ""
    cross: str = ""
    cross_output: str = ""
    text_root: str = ""


# fmt: off
_BERT = Description("text", "encoder", stem="embeddings embeddings_project", blocks="encoder.layer.*",
                    attention="attention.self", qkv="query key value", output="attention.output.dense",
                    pooling="first")
_LLAMA = Description("text", "decoder", stem="embed_tokens", blocks="layers.*", attention="self_attn",
                     qkv="q_proj k_proj v_proj", output="self_attn.o_proj", final_norm="norm", pooling="last")
_VIT = Description("image", "encoder", stem="embeddings", blocks="layers.*", attention="attention",
                   qkv="q_proj k_proj v_proj", output="attention.o_proj", final_norm="layernorm",
                   leading="embeddings.cls_token embeddings.distillation_token")
_CLIP = replace(_VIT, root="vision_model", stem="embeddings pre_layrnorm", blocks="encoder.layers.*",
                attention="self_attn", output="self_attn.out_proj", final_norm="post_layernorm", family="clip",
                leading="embeddings.class_embedding", text_root="text_model")
_SIGLIP = replace(_CLIP, stem="embeddings", family="siglip", leading="")
_T5 = Description("text", "encoder", stem="encoder.embed_tokens", blocks="encoder.block.*",
                  attention="layer.0.SelfAttention", qkv="q k v", output="layer.0.SelfAttention.o",
                  final_norm="encoder.final_layer_norm", decoder="decoder.block.*", cross="layer.1.EncDecAttention",
                  cross_output="layer.1.EncDecAttention.o", family="t5")
_BART = Description("text", "encoder", stem="encoder.embed_tokens encoder.embed_positions encoder.layernorm_embedding",
                    blocks="encoder.layers.*", attention="self_attn", qkv="q_proj k_proj v_proj",
                    output="self_attn.out_proj", decoder="decoder.layers.*", cross="encoder_attn",
                    cross_output="encoder_attn.out_proj", family="bart")
_RESNET = Description("image", "convolutional", stem="embedder", blocks="encoder.stages.*.layers.*",
                      hidden_size="config.hidden_sizes")
_TIMM_VIT = Description("image", "encoder", stem="patch_embed pos_drop patch_drop norm_pre", blocks="blocks.*",
                        attention="attn", qkv="qkv", output="attn.proj", final_norm="norm fc_norm", head="head",
                        hidden_size="num_features", family="timm-vit", leading="cls_token reg_token")

# By `config.model_type`, or by the path of a class for models that have no such config.
_DESCRIPTIONS: dict[str, Description] = {
    "bert": replace(_BERT, pooling="pooler"),
    "electra": _BERT,
    "roberta": _BERT,
    "xlm-roberta": replace(_BERT, family="roberta"),
    # Its projection makes queries, keys and values together, head by head: no third of it is one of them.
    "deberta": replace(_BERT, attention="", qkv="", output=""),
    "deberta-v2": replace(_BERT, qkv="query_proj key_proj value_proj"),
    "mpnet": replace(_BERT, attention="attention.attn", qkv="q k v", output="attention.attn.o"),
    "distilbert": replace(_BERT, blocks="transformer.layer.*", attention="attention", qkv="q_lin k_lin v_lin",
                          output="attention.out_lin"),
    "modernbert": replace(_BERT, blocks="layers.*", attention="attn", qkv="Wqkv", output="attn.Wo",
                          final_norm="final_norm"),
    "t5": _T5,
    "mt5": _T5,
    "bart": _BART,
    "mbart": replace(_BART, final_norm="encoder.layer_norm"),
    "pegasus": replace(_BART, final_norm="encoder.layer_norm"),
    "m2m_100": replace(_BART, final_norm="encoder.layer_norm"),
    "marian": _BART,
    "gpt2": Description("text", "decoder", stem="wte wpe drop", blocks="h.*", attention="attn", qkv="c_attn",
                        output="attn.c_proj", final_norm="ln_f", pooling="last"),
    "gptj": Description("text", "decoder", stem="wte drop", blocks="h.*", attention="attn",
                        qkv="q_proj k_proj v_proj", output="attn.out_proj", final_norm="ln_f", pooling="last"),
    "opt": replace(_LLAMA, stem="decoder.embed_tokens decoder.embed_positions decoder.project_in",
                   blocks="decoder.layers.*", output="self_attn.out_proj", final_norm="decoder.final_layer_norm"),
    "llama": _LLAMA,
    "mistral": replace(_LLAMA, family="llama"),
    "qwen2": replace(_LLAMA, family="llama"),
    "qwen3": replace(_LLAMA, family="llama"),
    "gemma": _LLAMA,
    "gemma2": replace(_LLAMA, family="gemma"),
    "gemma3_text": replace(_LLAMA, family="gemma"),
    "vit": _VIT,
    "deit": _VIT,
    "dinov2": replace(_VIT, blocks="encoder.layer.*"),
    "swin": replace(_VIT, kind="hierarchical", blocks="encoder.layers.*.blocks.*"),
    "clip": _CLIP,
    "clip_vision_model": _CLIP,
    "siglip": _SIGLIP,
    "siglip_vision_model": _SIGLIP,
    "resnet": _RESNET,
    "convnext": replace(_RESNET, stem="embeddings", final_norm="layernorm"),
    "timm.models.vision_transformer.VisionTransformer": _TIMM_VIT,
    "timm.models.swin_transformer.SwinTransformer": replace(
        _TIMM_VIT, kind="hierarchical", blocks="layers.*.blocks.*", head="head.fc", family="timm-swin"),
    "timm.models.resnet.ResNet": replace(
        _RESNET, stem="conv1 bn1 act1 maxpool", blocks="layer1.* layer2.* layer3.* layer4.*", head="fc",
        hidden_size="num_features", family="timm-resnet"),
}
# fmt: on


def register_anatomy(key: str | type[nn.Module], description: Description) -> None:
    """Describe an architecture of your own: by its `config.model_type`, or by its class where it has none.

    A later description of the same key replaces the earlier one, also one of inlay's. The family's name is the key's
    unless the description gives one.
    """
    if isinstance(key, str):
        _DESCRIPTIONS[key] = description
    else:
        _DESCRIPTIONS[_class_path(key)] = replace(description, family=description.family or key.__name__.lower())


def anatomy(model: nn.Module) -> Anatomy:
    """The parts of `model`, which may be a bare backbone, a model for a task, or either one wrapped by PEFT."""
    whole = _find_whole(model)
    backbone, description = _find_backbone(whole)
    stem, *rest = description.stem.split()
    stem_parts = (_require(backbone, stem, description), *_existing(backbone, " ".join(rest)))
    blocks = [part for path in description.blocks.split() for part in _expand(backbone, path, description)]
    writes = description.decoder and _language_head(whole) is not None
    decoder = _expand(backbone, description.decoder, description) if writes else []
    beside = replace(description, cross="")  # an encoder's blocks have none
    towers = _towers(whole, description)
    texts = _expand(towers[1], description.blocks, description) if towers else []
    around = whole if towers else backbone  # the norms of both towers are the model's
    return Anatomy(
        family=description.family,
        modality=description.modality,
        kind=description.kind,
        hidden_size=_hidden_size(backbone.module, description),
        backbone=backbone,
        stem=stem_parts[0],
        stem_parts=stem_parts,
        blocks=tuple(_block(part, index, beside) for index, part in enumerate(blocks, start=1)),
        decoder=tuple(_block(part, len(blocks) + index, description) for index, part in enumerate(decoder, start=1)),
        final_norm=next(iter(_existing(backbone, description.final_norm)), None),
        norms=tuple(_of_type(around, is_norm)),
        text_tower=tuple(_block(part, len(blocks) + index, beside) for index, part in enumerate(texts, start=1)),
        head=None if towers else _head(whole, backbone, description),
        leading_tokens=_leading_tokens(backbone.module, description),
    )


def kind_of(model_type: str) -> Kind | None:
    """How models of a Transformers model type are built; None where the type alone does not say."""
    description = _DESCRIPTIONS.get(model_type)
    return description.kind if description else None


def pooling_of(model_type: str) -> str | None:
    """What the classifier of a model type reads of the last states; None where the type alone does not say."""
    description = _DESCRIPTIONS.get(model_type)
    return (description.pooling or None) if description else None


def with_towers() -> frozenset[str]:
    """The Transformers model types with a tower for images and one for texts beside it."""
    found = (key for key, description in _DESCRIPTIONS.items() if description.text_root)
    return frozenset(key for key in found if not key.endswith("_vision_model"))


def head_modules(model: nn.Module) -> list[str]:
    """The names of the modules that a task adds to the pretrained backbone: a classifier, its own pooler.

    A language-model head is not among them: it is pretrained with the backbone, and often tied to its embeddings. A
    module that is none of Transformers' and that nobody has described has none that could be told from its body.
    """
    whole, backbone, description = _whole_and_backbone(model)
    language_head = _language_head(whole)
    added = [part for part in _beside(whole, backbone) if language_head not in part.module.modules()]
    return [part.name for part in (*added, *_existing(backbone, description.head if description else ""))]


def in_backbone(model: nn.Module) -> Callable[[str], bool]:
    """Tells of a module's name whether it is in the pretrained trunk, and so in no head.

    A language-model head is in none, also where Transformers has no base model beside it, as in T5. An architecture
    that nobody has described is divided as Transformers divides it; a plain module is all trunk.
    """
    whole, backbone, _ = _whole_and_backbone(model)
    inside = _join(backbone.name, "")
    head = _language_head(whole)
    heads = [_join(whole.name, name) for name, module in whole.module.named_modules() if module is head]

    def tell(name: str) -> bool:
        return f"{name}.".startswith(f"{inside}." if inside else "") and not any(
            f"{name}.".startswith(f"{one}.") for one in heads
        )

    return tell


def tower_modules(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """Of a model with a tower for images and one for texts, the names of the children of each, `image` and `text`: the
    tower and the projection behind it. Empty where a model has no two towers."""
    whole = _known_inside(model)
    described = None if whole is None else _DESCRIPTIONS.get(_base_model(whole)[1] or "")
    if whole is None or described is None or not _towers(whole, described):
        return {}
    inside = [name for name, _ in whole.module.named_children()]
    words = {"image": ("vision", "visual"), "text": ("text",)}
    return {tower: tuple(_join(whole.name, n) for n in inside if n.startswith(own)) for tower, own in words.items()}


def feature_shapes(
    model: nn.Module,
    example: Mapping[str, torch.Tensor] | torch.Tensor | None = None,
    image_size: int | tuple[int, int] | None = None,
) -> list[tuple[int, ...]]:
    """The shape, less the batch, of what enters each block, in the model's own layout.

    Tokens x hidden size in transformers, channels x height x width in convolutional models; timm's Swin alone has
    height x width x channels. Found by a dry run of `example`, or of one blank image or eight tokens where none is
    given. The run stops at the last block; modes, buffers, gradients and the random state are left as they were.
    """
    parts = anatomy(model)
    if example is None:
        example = _example(model, parts, image_size)
    shapes: list[tuple[int, ...]] = []

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        entering = next(value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor))
        shapes.append(tuple(entering.shape[1:]))
        if module is parts.blocks[-1].module:
            raise _Seen

    modes = [(module, module.training) for module in model.modules()]
    handles = [block.module.register_forward_pre_hook(note, with_kwargs=True) for block in parts.blocks]
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=devices):
            model.eval()
            model(**example) if isinstance(example, Mapping) else model(example)
    except _Seen:
        pass
    finally:
        for handle in handles:
            handle.remove()
        for module, training in modes:
            module.training = training
    return shapes


class _Seen(Exception):
    """Ends the dry run: nothing is asked of what lies behind the last block, a head or a decoder."""


def _find_whole(model: nn.Module) -> Part:
    """The outermost model proper: what is left without the wrappers of PEFT, the compiler or data parallelism."""
    found = _known_inside(model)
    if found is None:
        raise _unknown_architecture(_class_path(type(model)), model)
    return found


def _known_inside(model: nn.Module) -> Part | None:
    named = model.named_modules()
    return next((Part(n, m) for n, m in named if _is_pretrained(m) or _key_by_class(m) is not None), None)


def _whole_and_backbone(model: nn.Module) -> tuple[Part, Part, Description | None]:
    """The model proper and its trunk, also where nobody has described the architecture."""
    whole = _known_inside(model)
    if whole is None:
        return Part("", model), Part("", model), None
    backbone, key = _base_model(whole)
    if key not in _DESCRIPTIONS:
        return whole, backbone, None
    if _towers(whole, _DESCRIPTIONS[key]) is not None:
        return whole, whole, _DESCRIPTIONS[key]
    return whole, *_find_backbone(whole)


def _towers(whole: Part, description: Description) -> tuple[Part, Part] | None:
    """The towers for images and for texts of a model that has both."""
    if not description.text_root:
        return None
    image, text = _descend(whole, description.root), _descend(whole, description.text_root)
    return None if image is None or text is None else (image, text)


def _base_model(whole: Part) -> tuple[Part, str | None]:
    """What Transformers calls the base model, or all of it, and the key of its description."""
    model, backbone, model_type = whole.module, whole, None
    if _is_pretrained(model):
        backbone = _descend(whole, model.base_model_prefix) or whole
        # The wrapper of timm's models says nothing of what it wraps; the class of what it wraps does.
        model_type = model.config.model_type if _is_pretrained(backbone.module) else None
    return backbone, _key_by_class(model) or _key_by_class(backbone.module) or model_type


def _find_backbone(whole: Part) -> tuple[Part, Description]:
    """The pretrained trunk of a model, and its description."""
    model = whole.module
    backbone, key = _base_model(whole)
    if key is None or key not in _DESCRIPTIONS:
        raise _unknown_architecture(key or _class_path(type(backbone.module)), backbone.module)
    description = _DESCRIPTIONS[key]
    if description.root:
        backbone = _descend(backbone, description.root) or backbone

    if _towers(whole, description) is not None:
        return backbone, replace(description, family=description.family or key)
    inside = set(backbone.module.modules())
    others = [
        name
        for name, module in model.named_modules()
        if _is_pretrained(module) and module not in inside and backbone.module not in module.modules()
    ]
    if others:
        raise InlayError(
            f"{type(model).__name__} holds more than one model: {', '.join([backbone.name, *others])}. "
            "Give the one that you mean."
        )
    return backbone, replace(description, family=description.family or key)


def _block(part: Part, index: int, description: Description) -> Block:
    attention = cross = None
    inside: set[nn.Module] = set()
    if description.attention:
        attention = _attention(part, description.attention, description.output, description)
        inside = {*attention.module.modules(), attention.output.module}
    if description.cross:
        cross = _attention(part, description.cross, description.cross_output, description)
        inside |= {*cross.module.modules(), cross.output.module}
    linear = _of_type(part, lambda module: isinstance(module, PROJECTIONS))
    feed_forward = tuple(found for found in linear if found.module not in inside)
    return Block(part.name, part.module, index, attention, feed_forward, tuple(_of_type(part, is_norm)), cross)


def _attention(block: Part, path: str, output: str, description: Description) -> Attention:
    place = _require(block, path, description)
    projections = [_require(place, name, description) for name in description.qkv.split()]
    fused = len(projections) == 1
    query, key, value = projections * 3 if fused else projections
    return Attention(place.name, place.module, query, key, value, _require(block, output, description), fused)


def _head(whole: Part, backbone: Part, description: Description) -> Part | None:
    """What makes the final outputs: the language-model head, or the last of the modules that a task adds."""
    language_head = _language_head(whole)
    for name, module in whole.module.named_modules():
        if module is language_head:
            return Part(_join(whole.name, name), module)
    candidates = (*_existing(backbone, description.head), *_beside(whole, backbone))
    return candidates[-1] if candidates else None


def _language_head(whole: Part) -> nn.Module | None:
    return whole.module.get_output_embeddings() if _is_pretrained(whole.module) else None


def _beside(whole: Part, backbone: Part) -> list[Part]:
    """The children of a task's model that hold parameters, less the backbone."""
    if backbone.module is whole.module:
        return []
    return [
        Part(_join(whole.name, name), module)
        for name, module in whole.module.named_children()
        if next(module.parameters(), None) is not None and backbone.module not in module.modules()
    ]


def _hidden_size(backbone: nn.Module, description: Description) -> int:
    found: Any = backbone
    for step in description.hidden_size.split("."):
        if not hasattr(found, step):
            raise _misdescribed(description, description.hidden_size, Part("", backbone))
        found = getattr(found, step)
    return int(found[-1] if isinstance(found, Sequence) else found)


def _leading_tokens(backbone: nn.Module, description: Description) -> int:
    """One for a vector, as many as it has rows for a matrix."""
    count = 0
    for path in description.leading.split():
        place, _, name = path.rpartition(".")
        owner = _descend(Part("", backbone), place) if place else Part("", backbone)
        found = None if owner is None else getattr(_unwrap(owner).module, name, None)
        if isinstance(found, torch.Tensor):
            count += found.shape[-2] if found.ndim > 1 else 1
    return count


# Walking through modules, seeing through PEFT's wrappers.


def _wrapped(module: nn.Module) -> str | None:
    """The path at which a PEFT wrapper keeps the module that it stands for, or None if it is no wrapper."""
    if "base_layer" in module._modules:
        return "base_layer"
    if "original_module" not in module._modules:
        return None
    copies = module._modules.get("modules_to_save", {})
    return next((f"modules_to_save.{name}" for name in module.active_adapters if name in copies), "original_module")


def _unwrap(part: Part) -> Part:
    """What a PEFT wrapper stands for, or the part itself if it is no wrapper."""
    inner = _wrapped(part.module)
    return part if inner is None else _unwrap(Part(_join(part.name, inner), part.module.get_submodule(inner)))


def _descend(part: Part, path: str) -> Part | None:
    for step in path.split("."):
        # A wrapper may have the wanted child itself; what it stands for is asked first.
        part = _unwrap(part)
        child = part.module._modules.get(step)
        if child is None:
            return None
        part = Part(_join(part.name, step), child)
    return part


def _require(part: Part, path: str, description: Description) -> Part:
    found = _descend(part, path)
    if found is None:
        raise _misdescribed(description, path, part)
    return found


def _existing(part: Part, paths: str) -> tuple[Part, ...]:
    """Those of the paths that lead somewhere; a placeholder that does nothing counts as absent."""
    found = [_descend(part, path) for path in paths.split()]
    return tuple(one for one in found if one is not None and not isinstance(_unwrap(one).module, nn.Identity))


def _expand(part: Part, path: str, description: Description) -> list[Part]:
    """All parts that a path with `*` in it stands for, in the order of the containers."""
    before, star, after = path.partition(".*")
    found = _require(part, before, description)
    if not star:
        return [found]
    children = [Part(_join(found.name, name), child) for name, child in found.module.named_children()]
    rest = after.removeprefix(".")
    return [one for child in children for one in _expand(child, rest, description)] if rest else children


def _of_type(part: Part, wanted: Callable[[nn.Module], bool]) -> Iterator[Part]:
    """All parts within `part` that are, or stand for, a wanted module; what our methods added is passed over."""
    bare = _unwrap(part)
    if wanted(bare.module):
        yield part
        return
    for name, child in bare.module.named_children():
        if not name.startswith("inlay_"):
            yield from _of_type(Part(_join(bare.name, name), child), wanted)


def is_norm(module: nn.Module) -> bool:
    """By type, or by the name of the class, since every architecture brings an RMSNorm of its own."""
    named = type(module).__name__.lower()
    return isinstance(module, NORMS) or named.endswith("norm") or "rmsnorm" in named


def _is_pretrained(module: nn.Module) -> bool:
    """By the type proper: a compiled model answers `isinstance` for the model that it wraps."""
    return issubclass(type(module), PreTrainedModel)


def _join(*names: str) -> str:
    return ".".join(name for name in names if name)


def _class_path(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _key_by_class(module: nn.Module) -> str | None:
    paths = (_class_path(kind) for kind in type(module).__mro__)
    return next((path for path in paths if path in _DESCRIPTIONS), None)


# The dry run's example.


def _example(
    model: nn.Module, parts: Anatomy, image_size: int | tuple[int, int] | None
) -> dict[str, torch.Tensor] | torch.Tensor:
    backbone = parts.backbone.module
    parameter = next(backbone.parameters())
    if parts.modality == "text":
        blank = torch.zeros(1, EXAMPLE_TOKENS, dtype=torch.long, device=parameter.device)
    else:
        channels = getattr(getattr(backbone, "config", None), "num_channels", 3)
        size = _pair(image_size) if image_size else stated_image_size(backbone)
        if size is None:
            raise InlayError(
                f"{type(backbone).__name__} does not say what size of image it takes. Pass image_size=, such as 224."
            )
        blank = torch.zeros(1, channels, *size, dtype=parameter.dtype, device=parameter.device)
    whole = _find_whole(model).module
    if parts.text_tower:  # whose main input are the texts
        return {"pixel_values": blank}
    return {whole.main_input_name: blank} if _is_pretrained(whole) else blank


def stated_image_size(backbone: nn.Module) -> tuple[int, int] | None:
    """The size of image that a backbone says it takes: in its config, its patch embedding or its checkpoint's card."""
    card = getattr(backbone, "pretrained_cfg", None) or {}
    size = (
        getattr(getattr(backbone, "config", None), "image_size", None)
        or getattr(getattr(backbone, "patch_embed", None), "img_size", None)
        or card.get("input_size", ())[-2:]
    )
    return _pair(size) if size else None


def _pair(size: int | Sequence[int]) -> tuple[int, int]:
    """Height and width."""
    return (size, size) if isinstance(size, int) else (int(size[0]), int(size[1]))


# Errors.


def _unknown_architecture(key: str, model: nn.Module) -> InlayError:
    children = ", ".join(name for name, _ in model.named_children()) or "(none)"
    return unknown(
        "architecture",
        key,
        {description.family or name for name, description in _DESCRIPTIONS.items()},
        f"Describe it once, with paths as in `model.named_modules()` (its children here: {children}):\n\n"
        "    from inlay.anatomy import Description, register_anatomy\n\n"
        f"    register_anatomy({key!r}, Description(\n"
        '        modality="text", kind="encoder", stem="embeddings", blocks="encoder.layers.*",\n'
        '        attention="attention", qkv="query key value", output="attention.out", final_norm="norm"))\n',
    )


def _misdescribed(description: Description, path: str, part: Part) -> InlayError:
    children = ", ".join(name for name, _ in part.module.named_children()) or "(none)"
    return InlayError(
        f"The description of {description.family!r} says {path!r}, but {part.name or type(part.module).__name__!r} "
        f"has no such thing; its children are: {children}. Correct it and call register_anatomy again."
    )
