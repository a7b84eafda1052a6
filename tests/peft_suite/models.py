"""Tiny models in place of those that PEFT's tests load from the hub: same architectures, same names, made here.

They lie in a folder that is laid out as the hub's own cache, so that every way of loading finds them without a network.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch
import transformers as hf
from peft import LoraConfig
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PretrainedConfig

import zoo

COMMIT = "0" * 40
STIRS = 4  # so that what a tiny model writes depends on what it reads
WORDS = ("the", "a", "cat", "dog", "sat", "on", "mat", "hello", "world", "this", "is", "text")
# No token of PEFT's tests is padding: RoBERTa gives all of it one position, and attention could tell nothing apart.
SPECIAL = {"vocab_size": 128, "pad_token_id": 0, "bos_token_id": 3, "eos_token_id": 2}
SIZES = {"hidden_size": 32, "num_hidden_layers": 2}
TEXT = zoo.ENCODER | SPECIAL | SIZES
GROUPED = zoo.GROUPED | SPECIAL | SIZES | {"head_dim": 16}


def _gpt(kind: type[PretrainedConfig], **more: int) -> PretrainedConfig:
    return kind(**SPECIAL, n_embd=32, n_layer=2, n_head=2, n_inner=48, n_positions=40, **more)


def _opt() -> PretrainedConfig:
    sizes = {key: TEXT[key] for key in TEXT if key != "intermediate_size"}
    return hf.OPTConfig(**sizes, word_embed_proj_dim=32, ffn_dim=48)


def _gemma() -> PretrainedConfig:
    return hf.Gemma3TextConfig(**GROUPED, sliding_window=4, layer_types=["sliding_attention", "full_attention"])


def _t5() -> PretrainedConfig:
    return hf.T5Config(
        **SPECIAL,
        decoder_start_token_id=SPECIAL["pad_token_id"],
        d_model=32,
        d_kv=16,
        d_ff=48,
        num_layers=2,
        num_heads=2,
    )


def _bart() -> PretrainedConfig:
    one = {"layers": 2, "attention_heads": 2, "ffn_dim": 48}
    sides = {f"{side}_{name}": value for side in ("encoder", "decoder") for name, value in one.items()}
    last = {"decoder_start_token_id": SPECIAL["eos_token_id"], "forced_eos_token_id": SPECIAL["eos_token_id"]}
    return hf.BartConfig(**SPECIAL, d_model=32, max_position_embeddings=40, **last, **sides)


def _deberta(kind: type[PretrainedConfig], **more: int) -> PretrainedConfig:
    return kind(**TEXT, relative_attention=True, pos_att_type=["p2c", "c2p"], **more)


def _resnet() -> PretrainedConfig:
    return hf.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], num_labels=3, layer_type="basic", image_size=32
    )


# By the name of the repository on the hub: the class, and its config.
MODELS: dict[str, tuple[str, Callable[[], PretrainedConfig]]] = {
    "peft-internal-testing/tiny-random-OPTForCausalLM": ("OPTForCausalLM", _opt),
    "peft-internal-testing/opt-125m": ("OPTForCausalLM", _opt),
    "peft-internal-testing/tiny-random-GPT2LMHeadModel": ("GPT2LMHeadModel", lambda: _gpt(hf.GPT2Config)),
    "peft-internal-testing/tiny-random-GPTJForCausalLM": ("GPTJForCausalLM", lambda: _gpt(hf.GPTJConfig, rotary_dim=4)),
    "trl-internal-testing/tiny-random-LlamaForCausalLM": ("LlamaForCausalLM", lambda: hf.LlamaConfig(**GROUPED)),
    "peft-internal-testing/tiny-dummy-qwen2": ("Qwen2ForCausalLM", lambda: hf.Qwen2Config(**GROUPED)),
    "hf-internal-testing/tiny-random-Gemma3ForCausalLM": ("Gemma3ForCausalLM", _gemma),
    "peft-internal-testing/tiny-random-T5ForConditionalGeneration-calibrated": ("T5ForConditionalGeneration", _t5),
    "peft-internal-testing/tiny-random-BartForConditionalGeneration": ("BartForConditionalGeneration", _bart),
    "peft-internal-testing/tiny-random-BertModel": ("BertModel", lambda: hf.BertConfig(**TEXT)),
    "peft-internal-testing/tiny-random-RobertaModel": ("RobertaModel", lambda: hf.RobertaConfig(**TEXT)),
    "peft-internal-testing/tiny-random-DebertaModel": ("DebertaModel", lambda: _deberta(hf.DebertaConfig)),
    "peft-internal-testing/tiny-random-DebertaV2Model": (
        "DebertaV2Model",
        lambda: _deberta(hf.DebertaV2Config, position_buckets=8),
    ),
    "peft-internal-testing/tiny-random-BertForSequenceClassification": (
        "BertForSequenceClassification",
        lambda: hf.BertConfig(**TEXT),
    ),
    "peft-internal-testing/tiny-random-RobertaForSequenceClassification": (
        "RobertaForSequenceClassification",
        lambda: hf.RobertaConfig(**TEXT),
    ),
    "trl-internal-testing/tiny-LlamaForSequenceClassification-3.2": (
        "LlamaForSequenceClassification",
        lambda: hf.LlamaConfig(**GROUPED),
    ),
    "peft-internal-testing/tiny-random-ResNetForImageClassification": ("ResNetForImageClassification", _resnet),
}
IMAGES = {"image_processor_type": "ConvNextImageProcessor", "size": {"shortest_edge": 32}, "crop_pct": 0.875}
LORA, REVISION = "peft-internal-testing/tiny-opt-lora-revision", "test"  # an adapter, of which the config is read


def write_cache(folder: Path) -> None:
    """Write all of them into a folder that `HF_HUB_CACHE` can name."""
    LoraConfig(base_model_name_or_path="peft-internal-testing/opt-125m", task_type="CAUSAL_LM").save_pretrained(
        _snapshot(folder, LORA, REVISION)
    )
    for name, (kind, config) in MODELS.items():
        snapshot = _snapshot(folder, name, "main")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = getattr(hf, kind)(config())
            for _ in range(STIRS):
                zoo._stir(model)
        model.save_pretrained(snapshot)
        if kind == "ResNetForImageClassification":
            (snapshot / "preprocessor_config.json").write_text(json.dumps(IMAGES))
        else:
            tokenizer().save_pretrained(snapshot)


def _snapshot(folder: Path, name: str, revision: str) -> Path:
    """The folder of one revision of a repository, as the hub's cache has it."""
    place = folder / f"models--{name.replace('/', '--')}"
    snapshot = place / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (place / "refs").mkdir()
    (place / "refs" / revision).write_text(COMMIT)
    return snapshot


def tokenizer() -> hf.PreTrainedTokenizerFast:
    """Some words, and every printable character for the rest."""
    special = {"<pad>": 0, "<unk>": 1, "</s>": 2, "<s>": 3}
    rest = [*WORDS, *(chr(code) for code in range(33, 127))]
    vocabulary = special | {word: 4 + i for i, word in enumerate(dict.fromkeys(rest))}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.decoder = decoders.WordPiece()
    return hf.PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token="<s>", eos_token="</s>", pad_token="<pad>", unk_token="<unk>"
    )
