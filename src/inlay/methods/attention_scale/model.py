"""The tuner of attention scaling (after Basu et al. 2023, ATTNSCALE): the projections of every attention module."""

from __future__ import annotations

from torch import nn

from inlay.anatomy import Attention, Block, anatomy, is_norm
from inlay.methods.attention_scale.config import PARTS, AttentionScaleConfig
from inlay.methods.attention_scale.layer import AttentionScaleLayer, ScaledChannels
from inlay.methods.capabilities import alternatives
from inlay.methods.channels import width_out
from inlay.methods.plain import plain_modules, plain_name
from inlay.methods.rescaling import RescalingTuner


class AttentionScaleModel(RescalingTuner):
    """`get_peft_model(model, AttentionScaleConfig())` makes one of these."""

    prefix = "inlay_attention_scale_"
    child = "inlay_attention_scale"
    tuner_layer_cls = AttentionScaleLayer

    def hosts(self, config: AttentionScaleConfig) -> list[str]:
        return list(self._places(config))

    def settings_at(self, config: AttentionScaleConfig, name: str) -> ScaledChannels:
        return self._places(config)[name]

    def _places(self, config: AttentionScaleConfig) -> dict[str, ScaledChannels]:
        """Where the method acts, by the plain name of the host."""
        modules = dict(plain_modules(self.model))
        found: dict[str, ScaledChannels] = {}
        for block in anatomy(self.model).all_blocks:
            attention = block.attention
            if attention is None:
                continue
            for part in PARTS[config.scale]:
                name = _host(block, attention, part)
                host = modules[name]
                fused = attention.fused and not is_norm(host)
                channels = host.weight.numel() if is_norm(host) else width_out(host)
                width = channels // 3 if fused else channels
                start = 2 * width if fused and part == "value" else 0
                earlier = found[name].spans if name in found else ()
                repeat = attention.head_size if config.per == "head" else 1
                found[name] = ScaledChannels(channels, (*earlier, (start, start + width)), repeat)
        return found

    @classmethod
    def refusal(cls, model: nn.Module) -> str:
        """Convolutional networks."""
        name = type(model).__name__
        return f"attention-scale needs attention, and {name} has none. {alternatives(model, 'attention-scale')}"


def _host(block: Block, attention: Attention, part: str) -> str:
    """The projection, or the norm of the queries where one follows it: that would undo a scale set before it."""
    inside = f"{attention.name}."
    for norm in block.norms:
        if part == "query" and norm.name.startswith(inside):
            return plain_name(norm.name)
    return plain_name(getattr(attention, part).name)
