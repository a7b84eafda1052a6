"""The settings of norm tuning."""

from __future__ import annotations

from dataclasses import dataclass

from peft.utils.peft_types import PeftType

from inlay.methods.config import InlayConfig


@dataclass
class NormTuningConfig(InlayConfig):
    """Train scale and shift of the normalisation layers selected, by default of all: layer, RMS, batch, group norms.

    A batch norm keeps the base model's running statistics, in training too: it starts as the base model computes, and
    the base model is left as it was.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self.peft_type = PeftType("INLAY_NORM")
