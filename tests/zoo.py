"""Tiny random models of every family that inlay supports, built from a config in hundredths of a second.

`tiny(family, task)` gives a model in eval mode and a batch it can be called with. Everything follows from the
seed alone, and the caller's random state is left as it was. Freshly built models have zero biases, unit norms and
zero batch statistics, which would hide a piece that is dropped or doubled: every parameter is moved a little.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
import transformers as hf
from torch import nn
from transformers import PretrainedConfig

from inlay.backbones import answer_outputs, towers
from inlay.tasks.encode import IGNORED
from inlay.tasks.windows import FIRST, LAST, LEGAL

Task = Literal[
    "base",
    "classification",
    "token-classification",
    "causal-lm",
    "sequence-to-sequence",
    "question-answering",
    "image-text",
]

VOCABULARY, LENGTH, IMAGE_SIZE = 48, 9, 32
PAD, BOS, EOS = 1, 0, 2
ROW_LENGTHS = (9, 6, 3)  # tokens in each row of a batch; the rest is padding

SPECIAL = {"vocab_size": VOCABULARY, "pad_token_id": PAD, "bos_token_id": BOS, "eos_token_id": EOS}
ENCODER = SPECIAL | {
    "hidden_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 40,
}
GROUPED = ENCODER | {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4}
VISION = {
    "hidden_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "image_size": IMAGE_SIZE,
    "patch_size": 8,
}


@dataclass(frozen=True)
class Family:
    """How to build one family: its config and the tasks for which Transformers has a class."""

    config: Callable[[], PretrainedConfig]
    modality: Literal["text", "image"]
    tasks: tuple[Task, ...]


def clip_config() -> PretrainedConfig:
    text = {k: v for k, v in ENCODER.items() if k != "num_hidden_layers"}
    return hf.CLIPConfig(text_config={**text, "num_hidden_layers": 1}, vision_config=VISION, projection_dim=16)


def gpt2_config() -> PretrainedConfig:
    return hf.GPT2Config(**SPECIAL, n_embd=16, n_layer=3, n_head=2, n_inner=24, n_positions=40)


def t5_config() -> PretrainedConfig:
    return hf.T5Config(
        **SPECIAL,
        decoder_start_token_id=PAD,
        d_model=16,
        d_kv=8,
        d_ff=24,
        num_layers=3,
        num_decoder_layers=1,
        num_heads=2,
        relative_attention_num_buckets=8,
        relative_attention_max_distance=16,
    )


_TOKENS: tuple[Task, ...] = ("base", "classification", "token-classification")
_READS: tuple[Task, ...] = (*_TOKENS, "question-answering")
_CAUSAL: tuple[Task, ...] = ("base", "classification", "causal-lm")
_IMAGES: tuple[Task, ...] = ("base", "classification")

FAMILIES: dict[str, Family] = {
    "bert": Family(lambda: hf.BertConfig(**ENCODER), "text", _READS),
    "roberta": Family(lambda: hf.RobertaConfig(**ENCODER), "text", _READS),
    "distilbert": Family(
        lambda: hf.DistilBertConfig(
            **SPECIAL, dim=16, n_layers=3, n_heads=2, hidden_dim=24, max_position_embeddings=40
        ),
        "text",
        _READS,
    ),
    "electra": Family(lambda: hf.ElectraConfig(**ENCODER, embedding_size=12), "text", _READS),
    "modernbert": Family(
        lambda: hf.ModernBertConfig(
            **ENCODER, cls_token_id=BOS, sep_token_id=EOS, local_attention=6, global_attn_every_n_layers=2
        ),
        "text",
        _READS,
    ),
    "mpnet": Family(lambda: hf.MPNetConfig(**ENCODER), "text", _READS),
    "deberta-v2": Family(
        lambda: hf.DebertaV2Config(**ENCODER, relative_attention=True, pos_att_type=["p2c", "c2p"], position_buckets=8),
        "text",
        _READS,
    ),
    "gpt2": Family(gpt2_config, "text", (*_CAUSAL, "token-classification", "question-answering")),
    "opt": Family(
        lambda: hf.OPTConfig(
            **SPECIAL,
            hidden_size=16,
            word_embed_proj_dim=16,
            ffn_dim=24,
            num_hidden_layers=3,
            num_attention_heads=2,
            max_position_embeddings=40,
        ),
        "text",
        (*_CAUSAL, "question-answering"),
    ),
    "llama": Family(
        lambda: hf.LlamaConfig(**GROUPED), "text", (*_CAUSAL, "token-classification", "question-answering")
    ),
    "gemma": Family(
        lambda: hf.Gemma3TextConfig(
            **GROUPED,
            sliding_window=4,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        ),
        "text",
        _CAUSAL,
    ),
    "t5": Family(t5_config, "text", (*_TOKENS, "sequence-to-sequence")),
    "vit": Family(lambda: hf.ViTConfig(**VISION), "image", _IMAGES),
    # Two classes answer to the task, and the auto class chooses by the architectures that a checkpoint names.
    "deit": Family(lambda: hf.DeiTConfig(**VISION, architectures=["DeiTForImageClassification"]), "image", _IMAGES),
    "dinov2": Family(
        lambda: hf.Dinov2Config(**{k: v for k, v in VISION.items() if k != "intermediate_size"}, mlp_ratio=2),
        "image",
        _IMAGES,
    ),
    "swin": Family(
        lambda: hf.SwinConfig(
            image_size=IMAGE_SIZE, patch_size=4, embed_dim=8, depths=[2, 2], num_heads=[2, 4], window_size=4
        ),
        "image",
        _IMAGES,
    ),
    "clip": Family(clip_config, "image", (*_IMAGES, "image-text")),
    # A ResNet's config has no image size of its own; `backbones.load` tells it the processor's, in this place.
    "resnet": Family(
        lambda: hf.ResNetConfig(embedding_size=8, hidden_sizes=[16, 32], depths=[2, 2], image_size=IMAGE_SIZE),
        "image",
        _IMAGES,
    ),
    "convnext": Family(
        lambda: hf.ConvNextConfig(
            num_stages=2,
            hidden_sizes=[8, 16],
            depths=[2, 2],
            image_size=IMAGE_SIZE,
            layer_scale_init_value=0.5,
        ),
        "image",
        _IMAGES,
    ),
}
CASES: tuple[tuple[str, Task], ...] = tuple((name, task) for name, f in FAMILIES.items() for task in f.tasks)


def tiny(
    family: str, task: Task = "classification", seed: int = 0, num_labels: int = 3
) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """A tiny random model of `family` for `task`, in eval mode, and a batch for it.

    The batch has labels except for the task "base", whose models take none. Text has real padding: one row is
    whole, the others end in it.
    """
    description = FAMILIES[family]
    if task not in description.tasks:
        raise ValueError(f"{family} has no model for {task!r}; it has {', '.join(description.tasks)}.")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = _build(family, description, task, num_labels)
        _stir(model)
        if task == "image-text":
            return model.eval(), _text(task, num_labels) | _images("base", num_labels) | {"labels": _pairs()}
        inputs = _text(task, num_labels) if description.modality == "text" else _images(task, num_labels)
    return model.eval(), inputs


def _build(family: str, description: Family, task: Task, num_labels: int) -> nn.Module:
    config: Any = description.config()
    if task == "base":
        if family == "clip":
            return hf.CLIPVisionModel(config.vision_config)
        return hf.T5EncoderModel(config) if family == "t5" else hf.AutoModel.from_config(config)
    if task == "causal-lm":
        return hf.AutoModelForCausalLM.from_config(config)
    if task == "sequence-to-sequence":
        return hf.AutoModelForSeq2SeqLM.from_config(config)
    if task == "question-answering":
        model = hf.AutoModelForQuestionAnswering.from_config(config)
        answer_outputs.install(model)
        return model
    if task == "image-text":
        model = hf.AutoModelForZeroShotImageClassification.from_config(config)
        towers.install(model)
        return model
    config.num_labels = num_labels
    if task == "token-classification":
        return hf.AutoModelForTokenClassification.from_config(config)
    if description.modality == "image":
        return hf.AutoModelForImageClassification.from_config(config)
    return hf.AutoModelForSequenceClassification.from_config(config)


@torch.no_grad()
def _stir(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.add_(torch.randn_like(parameter), alpha=0.05)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            assert module.running_mean is not None
            assert module.running_var is not None
            module.running_mean.normal_(std=0.1)
            module.running_var.uniform_(0.5, 1.5)


def _text(task: Task, num_labels: int) -> dict[str, torch.Tensor]:
    lengths = torch.tensor(ROW_LENGTHS)
    position = torch.arange(LENGTH)
    mask = (position < lengths[:, None]).long()
    ids = torch.randint(EOS + 1, VOCABULARY, (len(lengths), LENGTH))
    ids[:, 0] = BOS
    ids[torch.arange(len(lengths)), lengths - 1] = EOS
    ids = ids.masked_fill(mask == 0, PAD)
    inputs = {"input_ids": ids, "attention_mask": mask}
    if task == "causal-lm":
        inputs["labels"] = ids.masked_fill(mask == 0, -100)
    elif task == "sequence-to-sequence":  # what is written is given too, for a pass without labels
        inputs["labels"] = ids.roll(1, 0)[:, :6].masked_fill(ids.roll(1, 0)[:, :6] == PAD, -100)
        inputs["decoder_input_ids"] = torch.cat([torch.full((len(lengths), 1), PAD), ids.roll(1, 0)[:, :5]], dim=1)
    elif task == "token-classification":
        inputs["labels"] = torch.randint(num_labels, ids.shape).masked_fill(mask == 0, -100)
    elif task == "question-answering":
        inputs["labels"] = _answers(mask)
    elif task == "classification":
        inputs["labels"] = torch.arange(len(lengths)) % num_labels
    return inputs


def _answers(mask: torch.Tensor) -> torch.Tensor:
    """Answers before the end of the text; the last row has none, for which its first token stands."""
    legal = torch.where(mask == 1, LEGAL, IGNORED)
    for row, length in enumerate(ROW_LENGTHS[:-1]):
        legal[row, length - 4] = FIRST
        legal[row, length - 2] = LAST
    legal[-1, 0] = FIRST | LAST
    return legal


def _pairs() -> torch.Tensor:
    """Each image's own text, and none that belongs to another."""
    return torch.eye(len(ROW_LENGTHS), dtype=torch.long)


def _images(task: Task, num_labels: int) -> dict[str, torch.Tensor]:
    rows = len(ROW_LENGTHS)
    inputs = {"pixel_values": torch.randn(rows, 3, IMAGE_SIZE, IMAGE_SIZE)}
    return inputs if task == "base" else inputs | {"labels": torch.arange(rows) % num_labels}
