"""What PEFT's methods target where the user does not say: read from the anatomy, so the same on every architecture.

Each function takes the model and gives settings of the method's config, or says why the method does not fit. Targets
are whole names, which PEFT takes without a look at `layers_to_transform`: `inlay.methods.targets` looks.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn
from transformers.pytorch_utils import Conv1D

from inlay.anatomy import Attention, Block, Part, anatomy
from inlay.errors import InlayError
from inlay.methods.attention_parts import query_heads
from inlay.methods.capabilities import alternatives
from inlay.methods.plain import base_of, plain_name

LINEAR = (nn.Linear, Conv1D)


def lora(model: nn.Module) -> dict[str, Any]:
    """Queries and values; where there is no attention, the feed-forward layers and convolutions of the blocks."""
    parts = _query_value(model) or _feed_forward(model, (*LINEAR, nn.Conv2d))
    return {"target_modules": _names(parts)}


def vera(model: nn.Module) -> dict[str, Any]:
    """As `lora`, of which VeRA's shared matrices can serve the linear layers only."""
    parts = _query_value(model) or _feed_forward(model, LINEAR)
    if not parts:
        raise InlayError(f"vera adapts linear layers; {_name(model)}'s blocks have none. {alternatives(model, 'vera')}")
    return {"target_modules": _names(parts)}


def ia3(model: nn.Module) -> dict[str, Any]:
    """Keys, values (whose outputs are scaled) and the last feed-forward layer of each block (whose input is)."""
    blocks = anatomy(model).all_blocks
    attention = [part for each in _attentions(model) for part in (each.key, each.value)]
    down = [part for block in blocks if (part := _last(block)) is not None]
    return {"target_modules": _names([*attention, *down]), "feedforward_modules": _names(down)}


def ln(model: nn.Module) -> dict[str, Any]:
    """Layer and RMS norms. A batch norm would take its copy's statistics from the batch: `norm` does it right."""
    batch = nn.modules.batchnorm._NormBase
    parts = [part for part in anatomy(model).norms if not isinstance(_inner(part), batch)]
    if not parts:
        raise InlayError(f"ln adapts layer and RMS norms; {_name(model)} has none. {alternatives(model, 'ln')}")
    return {"target_modules": _names(parts)}


def prompt(model: nn.Module) -> dict[str, Any]:
    """Vectors as long as the token embeddings, which are not everywhere as long as the hidden states. Of a model with
    two parts the encoder alone reads them; PEFT would make as many for the decoder, which nobody reads."""
    own = {"num_transformer_submodules": 1} if anatomy(model).decoder else {}
    return _sizes(model) | {"token_dim": base_of(model).get_input_embeddings().embedding_dim} | own


def prefix(model: nn.Module) -> dict[str, Any]:
    """Keys and values as long as the hidden states, of a decoder beside an encoder as long as its heads together; PEFT
    itself halves them where heads share keys."""
    decoder = anatomy(model).decoder
    attention = decoder[0].attention if decoder else None
    width = anatomy(model).hidden_size if attention is None else query_heads(attention) * attention.head_size
    return _sizes(model) | {"token_dim": width}


def _sizes(model: nn.Module) -> dict[str, Any]:
    """PEFT looks for these under a few spellings; the config's own attributes have them under one."""
    if anatomy(model).modality == "image":
        raise InlayError(
            f"Prompt methods put vectors before the tokens of a text; {_name(model)} reads images. "
            f"{alternatives(model, 'prompt')}"
        )
    if (decoder := anatomy(model).decoder) and (attention := decoder[0].attention):
        return {"num_layers": len(decoder), "num_attention_heads": query_heads(attention)}
    config = base_of(model).config
    return {"num_layers": config.num_hidden_layers, "num_attention_heads": config.num_attention_heads}


def _query_value(model: nn.Module) -> list[Part]:
    return [part for each in _attentions(model) for part in (each.query, each.value)]


def _attentions(model: nn.Module) -> list[Attention]:
    """Those of all blocks, and of a decoder to its encoder."""
    found = [each for block in anatomy(model).all_blocks for each in (block.attention, block.cross)]
    return [each for each in found if each is not None]


def _feed_forward(model: nn.Module, kinds: tuple[type[nn.Module], ...]) -> list[Part]:
    """Linear layers and convolutions of the blocks; low-rank pieces do not fit a convolution in groups."""
    parts = (part for block in anatomy(model).all_blocks for part in block.feed_forward)
    return [part for part in parts if isinstance(_inner(part), kinds) and not _grouped(part)]


def _last(block: Block) -> Part | None:
    return next((part for part in reversed(block.feed_forward) if not _grouped(part)), None)


def _grouped(part: Part) -> bool:
    return getattr(_inner(part), "groups", 1) > 1


def _inner(part: Part) -> nn.Module:
    """The part itself, below another adapter's wrapper."""
    return part.module.get_base_layer() if isinstance(part.module, BaseTunerLayer) else part.module


def _names(parts: Iterable[Part]) -> list[str]:
    return list(dict.fromkeys(plain_name(part.name) for part in parts))


def _name(model: nn.Module) -> str:
    return type(base_of(model)).__name__
