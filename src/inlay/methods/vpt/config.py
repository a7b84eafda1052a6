"""The settings of visual prompt tuning (Jia et al. 2022) and of its gated form (Yoo et al. 2023)."""

from __future__ import annotations

from dataclasses import dataclass, field

from peft.utils.peft_types import PeftType

from inlay.errors import InlayError
from inlay.methods.token_prompts import TokenPromptConfig


@dataclass
class VPTConfig(TokenPromptConfig):
    """Visual prompt tuning: shallow, deep (the default), or gated.

    `gated` and `temperature` are GateVPT's, and belong to prompts that run through (`deep=False`): for every block a
    gate on how much it changes the prompts, and a temperature of its attention.
    """

    gated: bool = field(default=False, metadata={"help": "A trained gate a block on how much it changes the prompts."})
    gate_initial: float = field(
        default=-5.0, metadata={"help": "The gates' logit at the start: -5 lets blocks change prompts by 0.7 %."}
    )
    temperature: bool = field(default=False, metadata={"help": "A trained temperature of each block's attention."})

    def __post_init__(self) -> None:
        super().__post_init__()
        self.peft_type = PeftType("INLAY_VPT")
        if self.gated and self.deep:
            raise InlayError("gated=True is for prompts that run through the blocks: set deep=False.")
