"""What a method trains in a model of the paper's own shape, to the digit: built without weights. And tables with such
counts beside scores."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from inlay.papers.reproduce.results import Results

if TYPE_CHECKING:
    from torch import nn

PARAMETERS = "parameters (M)"
NO_GPU = "There is no GPU here: what takes hours without one was not measured."


def _roberta() -> nn.Module:
    from transformers import RobertaConfig, RobertaModel

    return RobertaModel(RobertaConfig(max_position_embeddings=514, vocab_size=50265, type_vocab_size=1))


def _gpt2(size: int, layers: int, heads: int) -> nn.Module:
    from transformers import GPT2Config, GPT2Model

    return GPT2Model(GPT2Config(n_embd=size, n_layer=layers, n_head=heads))


def _opt(size: int, layers: int, heads: int) -> nn.Module:
    from transformers import OPTConfig, OPTForCausalLM

    config = {"hidden_size": size, "num_hidden_layers": layers, "num_attention_heads": heads, "ffn_dim": 4 * size}
    return OPTForCausalLM(OPTConfig(**config, word_embed_proj_dim=size))


def _vit() -> nn.Module:
    from transformers import ViTConfig, ViTModel

    return ViTModel(ViTConfig())


def _llama(layers: int, keys: int, inner: int) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = {"hidden_size": 4096, "num_hidden_layers": layers, "num_attention_heads": 32, "num_key_value_heads": keys}
    return LlamaForCausalLM(LlamaConfig(**config, intermediate_size=inner))


SHAPES: Mapping[str, Callable[[], nn.Module]] = {
    "RoBERTa-base": _roberta,
    "GPT-2 medium": lambda: _gpt2(1024, 24, 16),
    "GPT-2 tiny": lambda: _gpt2(16, 2, 2),
    "OPT-125M": lambda: _opt(768, 12, 12),
    "OPT-350M": lambda: _opt(1024, 24, 16),
    "OPT-1.3B": lambda: _opt(2048, 24, 32),
    "OPT-2.7B": lambda: _opt(2560, 32, 32),
    "OPT-6.7B": lambda: _opt(4096, 32, 32),
    "ViT-B/16": _vit,
    "Llama-3.1-8B": lambda: _llama(32, 8, 14336),
    # A Llama of its depth and width: its own code is not Transformers'.
    "ChatGLM3-6B": lambda: _llama(28, 32, 13696),
}


def trained(shape: str, method: str, settings: Mapping[str, Any] | None = None) -> int:
    """How many numbers the method trains in a model of this shape, without a head."""
    from inlay.methods.attach import trained_parameters

    return sum(parameter.numel() for parameter in trained_parameters(_adapted(shape, method, settings)).values())


def shared_and_own(shape: str, settings: Mapping[str, Any] | None = None) -> tuple[int, int]:
    """Of Multi-LoRA: the numbers of the `A`s, once for all tasks, and of one task's `B`s."""
    adapted: Any = _adapted(shape, "multi-lora", settings)
    found = adapted.base_model.counted_parameters()
    return found["shared"], found["trained"]


def _adapted(shape: str, method: str, settings: Mapping[str, Any] | None) -> nn.Module:
    import torch

    from inlay.methods.attach import attach

    with torch.device("meta"):
        model = SHAPES[shape]()
    return attach(model, method, settings=settings, newly_initialised=())


def in_millions(numbers: Mapping[tuple[str, str], int]) -> Results:
    """Counts by panel and row, as a column."""
    return Results.of({(panel, row, PARAMETERS): number / 1e6 for (panel, row), number in numbers.items()})


def scores(results: Results) -> Results:
    """A table without its counts."""
    return replace(results, cells={key: cell for key, cell in results.cells.items() if key[2] != PARAMETERS})


def gpu() -> bool:
    """Whether there is one: some runs take hours without."""
    import torch

    return torch.cuda.is_available()
