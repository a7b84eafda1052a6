"""The settings of visual prompt tuning (Jia et al. 2022) and of its gated form (Yoo et al. 2023)."""

from __future__ import annotations

from dataclasses import dataclass, field

from peft.utils.peft_types import PeftType

from inlay.errors import InlayError, unknown
from inlay.methods.config import InlayConfig

INITIAL = ("xavier", "normal", "zeros")


@dataclass
class TokenPromptConfig(InlayConfig):
    """Trained tokens among those of an image.

    Prompts enter at the blocks named in `layers` and run on to the next block at which prompts enter, which replace
    them, or to the end. `layers=None` is every block where `deep`, else the first. `layers=[6]` is VPT at one
    layer: what lies before block 6 is as it was, and is no part of training.
    """

    layers: list[int] | None = field(
        default=None,
        metadata={"help": "Blocks at which prompts enter, counted from 1; None: all where deep, else the first."},
    )
    num_prompt_tokens: int = field(default=10, metadata={"help": "How many prompts stand beside the patches, p."})
    deep: bool = field(
        default=True, metadata={"help": "Whether blocks have prompts of their own; otherwise one set runs through."}
    )
    dropout: float = field(default=0.0, metadata={"help": "The share of the prompts' entries dropped in training."})
    initial: str = field(
        default="xavier",
        metadata={"help": "xavier: VPT's, uniform by patch and hidden size; normal: of deviation 0.02; zeros."},
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_prompt_tokens < 1:
            raise InlayError(f"num_prompt_tokens={self.num_prompt_tokens}: give at least 1; 10 and 50 are usual.")
        if not 0 <= self.dropout < 1:
            raise InlayError(f"dropout={self.dropout}: give a share from 0 to below 1.")
        if self.initial not in INITIAL:
            raise unknown("initial", self.initial, INITIAL)
        if self.layers is not None and not self.layers:
            raise InlayError("layers=[]: name a block, counted from 1, or leave it out.")
        if not self.deep and self.layers is not None and len(self.layers) > 1:
            raise InlayError(f"layers={self.layers}: one set of prompts enters at one block. Or set deep=True.")


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
