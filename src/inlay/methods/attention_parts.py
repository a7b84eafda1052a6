"""What a method must know of an attention module: its heads, and what it multiplies scores by."""

from __future__ import annotations

from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn

from inlay.anatomy import Attention
from inlay.methods.channels import width_out

# They scale the queries themselves, and tell the attention function to scale by 1.
SCALE_QUERIES = ("opt",)


def bare(module: nn.Module) -> nn.Module:
    """The frozen projection inside a LoRA, if there is one around it."""
    return module.get_base_layer() if isinstance(module, BaseTunerLayer) else module


def query_heads(attention: Attention) -> int:
    return _width(attention.query.module, attention) // attention.head_size


def key_heads(attention: Attention) -> int:
    """Fewer than query heads where these share keys."""
    return _width(attention.key.module, attention) // attention.head_size


def _width(projection: nn.Module, attention: Attention) -> int:
    width = width_out(bare(projection))
    return width // 3 if attention.fused else width


def scale_of(attention: Attention) -> float:
    """What the attention function will be told to multiply the scores by."""
    module = attention.module
    if module.config.model_type in SCALE_QUERIES:
        return 1.0
    found = (getattr(module, name, None) for name in ("scaling", "scale"))
    return next((scale for scale in found if isinstance(scale, float)), attention.head_size**-0.5)
