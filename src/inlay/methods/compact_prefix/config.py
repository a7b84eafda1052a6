"""The settings of a compact prefix."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from peft.utils.peft_types import PeftType
from torch import nn

from inlay.errors import InlayError, unknown
from inlay.methods.config import InlayConfig

STARTS = ("random", "text")
BUDGETS = ("unequal", "equal")
CHOICES = ("pursuit", "attention")
USUAL_SIZE = 32


@dataclass
class CompactPrefixConfig(InlayConfig):
    """How many keys every head gets, and where they start; by default in every block.

    `seed` is filled in: a random start follows from it.
    """

    distillation_rate: ClassVar[float] = 1e-2

    size: int = field(
        default=USUAL_SIZE,
        metadata={"help": "How many keys a key-value head has on average: as many tokens as the prefix takes room of."},
    )
    biases: bool = field(
        default=True,
        metadata={"help": "Whether every key has a trained bias; without, it is prefix tuning as PEFT has it."},
    )
    start: str = field(
        default="random",
        metadata={"help": "`random`: keys from N(0, 1), values 0; `text`: the prompt of `prompt_ids`, by segments."},
    )
    budgets: str = field(
        default="unequal",
        metadata={
            "help": "Where `inlay compress` fits it: `unequal`, heads that need more keys get more; `equal`, all the "
            "same number."
        },
    )
    choice: str = field(
        default="pursuit",
        metadata={
            "help": "Which of the prompt's keys `inlay compress` keeps: by orthogonal matching `pursuit` of its share "
            "of the softmax, or those with the largest root-mean-square `attention`, which is quicker."
        },
    )
    prompt_ids: list[int] | None = field(
        default=None,
        metadata={"help": "The token ids of the prompt that `start=text` begins from; dropped when it was read."},
    )
    prompt_length: int | None = field(default=None, metadata={"help": "Filled in: how many tokens that prompt had."})
    sizes: dict[str, list[int]] | None = field(
        default=None,
        metadata={"help": "Filled in: how many keys each head of an attention has, where they have not all `size`."},
    )
    seed: int | None = field(
        default=None, metadata={"help": "A random start follows from it; None: drawn from torch's seed."}
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.peft_type = PeftType("INLAY_COMPACT_PREFIX")
        for name, allowed in (("start", STARTS), ("budgets", BUDGETS), ("choice", CHOICES)):
            if getattr(self, name) not in allowed:
                raise unknown(name, getattr(self, name), allowed)
        if isinstance(self.size, bool) or self.size < 1:
            raise InlayError(f"size={self.size!r} must be a whole number of at least 1; {USUAL_SIZE} is usual.")
        if self.prompt_ids is not None and self.start != "text":
            raise InlayError(
                f"prompt_ids are read where start='text', and start={self.start!r}. Leave one of them out."
            )
        if self.start == "text" and self.prompt_ids is None and self.prompt_length is None:
            raise InlayError(
                "start='text' begins from a prompt: give its token ids, prompt_ids=tokenizer(text).input_ids, or call "
                "`inlay compress`."
            )
        if self.prompt_ids is not None:
            self.prompt_ids = list(self.prompt_ids)
            if not self.prompt_ids:
                raise InlayError("prompt_ids is empty: the prompt must have one token or more.")
        for name, sizes in (self.sizes or {}).items():
            if not sizes or any(isinstance(size, bool) or size < 1 for size in sizes):
                raise InlayError(f"sizes[{name!r}] = {sizes}: every head has at least 1 key.")

    def to_dict(self) -> dict[str, Any]:
        """Without the prompt, where it has been read: it may be long, or nobody else's business."""
        return super().to_dict() | ({} if self.prompt_length is None else {"prompt_ids": None})

    @classmethod
    def for_prompt(cls, settings: Mapping[str, Any], model: nn.Module) -> dict[str, Any]:
        fixed = {"prompt_ids", "prompt_length", "sizes", "seed"} & settings.keys()
        if fixed or settings.get("start", "text") != "text":
            raise InlayError(f"{', '.join(sorted(fixed)) or 'start'}: compress sets this itself. Leave it out.")
        return {"start": "text"} | dict(settings)

    def sizes_at(self, name: str, heads: int) -> list[int]:
        """How many keys each key-value head of an attention has."""
        found = (self.sizes or {}).get(name, [self.size] * heads)
        if len(found) != heads:
            raise InlayError(
                f"The adapter has keys for {len(found)} heads at {name}, and this model has {heads}: it belongs to "
                "another model. Load it into the one it was trained on."
            )
        return list(found)
