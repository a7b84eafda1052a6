"""The tuner of AdaptFormer (Chen et al. 2022): the feed-forward of every block."""

from __future__ import annotations

from torch import nn

from inlay.anatomy import anatomy
from inlay.methods.adaptformer.config import AdaptFormerConfig
from inlay.methods.adaptformer.layer import AdaptFormerLayer, BranchPlace
from inlay.methods.bottleneck import feed_forward_ends
from inlay.methods.capabilities import alternatives
from inlay.methods.plain import plain_modules, plain_name
from inlay.methods.tuner import InlayTuner


class AdaptFormerModel(InlayTuner):
    """`get_peft_model(model, AdaptFormerConfig())` makes one of these."""

    prefix = "inlay_adaptformer_"
    child = "inlay_adaptformer"
    tuner_layer_cls = AdaptFormerLayer

    def hosts(self, config: AdaptFormerConfig) -> list[str]:
        return list(self._ends())

    def settings_at(self, config: AdaptFormerConfig, name: str) -> BranchPlace:
        return BranchPlace(config, dict(plain_modules(self.model))[self._ends()[name]])

    def _ends(self) -> dict[str, str]:
        """The plain names of the last projections of feed-forwards by those of the first ones."""
        ends = [feed_forward_ends(block) for block in anatomy(self.model).all_blocks]
        return {plain_name(pair[0].name): plain_name(pair[1].name) for pair in ends if pair is not None}

    @classmethod
    def refusal(cls, model: nn.Module) -> str:
        """Convolutional networks whose blocks have no feed-forward of linear layers."""
        name = type(model).__name__
        return (
            f"adaptformer goes beside the feed-forward of a block, and the blocks of {name} have none. "
            f"{alternatives(model, 'adaptformer')}"
        )
