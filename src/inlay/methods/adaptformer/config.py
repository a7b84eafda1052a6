"""The settings of AdaptFormer (Chen et al. 2022)."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from peft.utils.peft_types import PeftType

from inlay.errors import InlayError
from inlay.methods.bottleneck import check_bottleneck
from inlay.methods.config import InlayConfig


@dataclass
class AdaptFormerConfig(InlayConfig):
    """The bottleneck beside the feed-forward, and how much of it is added; by default in every block."""

    bottleneck: int = field(default=64, metadata={"help": "Width of the bottleneck, the paper's d-hat."})
    scale: float = field(default=0.1, metadata={"help": "The paper's s, by which the bottleneck's output is scaled."})
    learnable_scale: bool = field(default=False, metadata={"help": "Train s too, from `scale`, one for each block."})
    activation: str = field(default="relu", metadata={"help": "relu, gelu, silu, tanh or identity."})
    dropout: float = field(default=0.0, metadata={"help": "Dropout within the bottleneck; the authors' code has 0.1."})

    def __post_init__(self) -> None:
        super().__post_init__()
        self.peft_type = PeftType("INLAY_ADAPTFORMER")
        check_bottleneck(self.bottleneck, self.activation, self.dropout)
        if self.scale == 0 or not math.isfinite(self.scale):
            raise InlayError(f"scale={self.scale!r} would leave nothing to train; the paper's is 0.1.")
