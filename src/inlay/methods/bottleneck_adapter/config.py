"""The settings of bottleneck adapters (Houlsby et al. 2019; Pfeiffer et al. 2021)."""

from __future__ import annotations

from dataclasses import dataclass, field

from peft.utils.peft_types import PeftType

from inlay.errors import InlayError, unknown
from inlay.methods.bottleneck import check_bottleneck
from inlay.methods.config import InlayConfig

PLACEMENTS = ("houlsby", "pfeiffer")


@dataclass
class BottleneckAdapterConfig(InlayConfig):
    """Where the adapters go, and what they are; by default in every block.

    `houlsby` sets two into a block, after the attention's output projection and after the feed-forward; `pfeiffer`
    the latter alone. Either stands before the block's residual sum.
    """

    placement: str = field(
        default="houlsby", metadata={"help": "`houlsby`: after attention and feed-forward; `pfeiffer`: the latter."}
    )
    bottleneck: int = field(default=64, metadata={"help": "Width of the bottleneck, the paper's m."})
    reduction_factor: float | None = field(
        default=None,
        metadata={"help": "Width of the features by that of the bottleneck; takes the place of the latter."},
    )
    activation: str = field(default="gelu", metadata={"help": "relu, gelu, silu, tanh or identity."})
    dropout: float = field(default=0.0, metadata={"help": "Dropout within the bottleneck."})
    init_std: float = field(
        default=0.0,
        metadata={
            "help": "Spread of W_up at the start. 0 starts as the base model exactly; 0.01 nearly so, as Houlsby et al."
        },
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.peft_type = PeftType("INLAY_ADAPTER")
        if self.placement not in PLACEMENTS:
            raise unknown("placement", self.placement, PLACEMENTS)
        check_bottleneck(self.bottleneck, self.activation, self.dropout)
        if self.reduction_factor is not None and not self.reduction_factor > 0:
            raise InlayError(
                f"reduction_factor={self.reduction_factor!r} must be positive, such as 16; or leave it out."
            )
        if not self.init_std >= 0:
            raise InlayError(f"init_std={self.init_std!r} must not be negative; 0 starts as the base model exactly.")
