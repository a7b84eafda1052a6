"""The settings of attention scaling (after Basu et al. 2023, ATTNSCALE)."""

from __future__ import annotations

from dataclasses import dataclass, field

from peft.utils.peft_types import PeftType

from inlay.errors import unknown
from inlay.methods.config import InlayConfig

PARTS = {"logits": ("query",), "values": ("value",), "both": ("query", "value")}
PER = ("channel", "head")


@dataclass
class AttentionScaleConfig(InlayConfig):
    """What of the attention is scaled, and how finely; by default in every block."""

    scale: str = field(
        default="logits",
        metadata={"help": "`logits` (through the queries), `values` (what a head gives), or `both`."},
    )
    per: str = field(
        default="channel",
        metadata={"help": "One scale a `channel` of the queries or values, or one a `head`."},
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.peft_type = PeftType("INLAY_ATTENTION_SCALE")
        if self.scale not in PARTS:
            raise unknown("scale", self.scale, PARTS)
        if self.per not in PER:
            raise unknown("per", self.per, PER)
