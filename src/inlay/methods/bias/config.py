"""The settings of bias tuning (BitFit, Ben Zaken et al. 2022)."""

from __future__ import annotations

from dataclasses import dataclass

from peft.utils.peft_types import PeftType

from inlay.methods.config import InlayConfig


@dataclass
class BiasTuningConfig(InlayConfig):
    """Train the biases of the modules selected, by default of all that have one.

    BitFit's smaller variant, which trains the biases of the queries (the paper's b_q) and of the wide layer of the
    feed-forward block (b_m2) only, is `target_modules=["query", "intermediate.dense"]` on BERT.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self.peft_type = PeftType("INLAY_BIAS")
