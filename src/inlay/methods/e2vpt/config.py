"""The settings of E2VPT (Han et al. 2023)."""

from __future__ import annotations

from dataclasses import dataclass, field

from peft.utils.peft_types import PeftType

from inlay.errors import InlayError
from inlay.methods.token_prompts import TokenPromptConfig

# The prompts that pruning left at a block: of each its number, counted from 0, and the segments that it keeps.
Kept = list[tuple[int, list[int]]]


@dataclass
class E2VPTConfig(TokenPromptConfig):
    """Prompts beside the patches, and prompts beside the keys and values of every block that `layers` names.

    `seed` and `kept` are filled in: the prompts' first values follow from `seed`, so that they can be gone back to, and
    `kept` says what pruning left (see `inlay.methods.e2vpt.pruning`).
    """

    num_kv_tokens: int = field(default=5, metadata={"help": "How many keys and values are added; 0: none."})
    share_key_value: bool = field(
        default=True, metadata={"help": "Whether the added keys and values are the same numbers, as the authors have."}
    )
    num_segments: int = field(
        default=16, metadata={"help": "Into how many pieces pruning divides a prompt; must divide the hidden size."}
    )
    seed: int | None = field(
        default=None, metadata={"help": "The prompts' first values follow from it; None: drawn from torch's seed."}
    )
    kept: dict[str, Kept] | None = field(
        default=None, metadata={"help": "Filled in by pruning: by block, the prompts and segments that are left."}
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.peft_type = PeftType("INLAY_E2VPT")
        if self.num_kv_tokens < 0:
            raise InlayError(f"num_kv_tokens={self.num_kv_tokens}: give 0 or more; 5 is usual.")
        if self.num_segments < 1:
            raise InlayError(f"num_segments={self.num_segments}: give at least 1; the authors' code has 16.")
