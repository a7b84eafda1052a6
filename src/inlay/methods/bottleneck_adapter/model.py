"""The tuner of bottleneck adapters (Houlsby et al. 2019; Pfeiffer et al. 2021)."""

from __future__ import annotations

from torch import nn

from inlay.anatomy import anatomy
from inlay.methods.bottleneck import feed_forward_ends
from inlay.methods.bottleneck_adapter.config import BottleneckAdapterConfig
from inlay.methods.bottleneck_adapter.layer import AdapterLayer
from inlay.methods.capabilities import alternatives
from inlay.methods.plain import plain_name
from inlay.methods.tuner import InlayTuner


class BottleneckAdapterModel(InlayTuner):
    """`get_peft_model(model, BottleneckAdapterConfig())` makes one of these."""

    prefix = "inlay_adapter_"
    child = "inlay_adapter"
    tuner_layer_cls = AdapterLayer

    def hosts(self, config: BottleneckAdapterConfig) -> list[str]:
        """The last projections of attention, for `houlsby`, and of the feed-forward, block by block."""
        found = []
        for block in anatomy(self.model).all_blocks:
            if block.attention is not None and config.placement == "houlsby":
                found.append(block.attention.output.name)
            ends = feed_forward_ends(block)
            if ends is not None:
                found.append(ends[1].name)
        return [plain_name(name) for name in found]

    @classmethod
    def refusal(cls, model: nn.Module) -> str:
        """Convolutional networks whose blocks have no feed-forward of linear layers."""
        name = type(model).__name__
        return (
            f"adapter goes after attention and the feed-forward of a block, and the blocks of {name} have neither. "
            f"{alternatives(model, 'adapter')}"
        )
