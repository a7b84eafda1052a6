"""The settings of activation prompts (Visual Prompting Reimagined: The Power of Activation Prompts, section 3)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from peft.utils.peft_types import PeftType

from inlay.anatomy import Anatomy
from inlay.errors import InlayError
from inlay.methods.feature_prompts import FeaturePromptConfig

AUTO = "auto"
DEFAULT_BLOCK = 3


@dataclass
class ActivationPromptConfig(FeaturePromptConfig):
    """Perturb the input of one block, or of several, by something trained that is the same for every input.

    `layers` counts from 1: `3` is the input of block 3; `0` is the pixels. `"auto"` is block 3 of a transformer and
    the last block but one of a convolutional model.
    """

    kinds: ClassVar[tuple[str, ...]] = ("add", "product", "concat")
    method: ClassVar[str] = "activation-prompt"

    layers: int | str | list[int] | None = field(  # type: ignore[assignment]
        default=AUTO,
        metadata={
            "help": "Blocks, counted from 1, at whose input the prompt acts; 0: the pixels; 'auto': 3, or on a "
            "convolutional model the last block but one."
        },
    )
    per_position: bool | None = field(
        default=None,
        metadata={
            "help": "Whether every position of the feature map has values of its own; None: on images yes, on texts, "
            "which differ in length, no. Says nothing to kind='concat'."
        },
    )
    length: int = field(default=10, metadata={"help": "How many tokens kind='concat' adds."})

    def __post_init__(self) -> None:
        super().__post_init__()
        self.peft_type = PeftType("INLAY_ACTIVATION_PROMPT")
        self.layers = _layers(self.layers)
        if self.length < 1:
            raise InlayError(f"length={self.length!r}: a prompt of kind 'concat' has at least one token.")

    @classmethod
    def auto_layers(cls, parts: Anatomy) -> list[int]:
        count = len(parts.blocks)
        return [max(1, count - 1) if parts.kind == "convolutional" else min(DEFAULT_BLOCK, count)]


def _layers(given: Any) -> list[int] | str:
    """A list of layers in order, or "auto", from any way of writing it: 3, "3", "1,3", [3], (3,)."""
    if given is None or given == AUTO:
        return AUTO
    parts = given.split(",") if isinstance(given, str) else given if isinstance(given, Sequence) else [given]
    try:
        found = sorted({int(part) for part in parts if not isinstance(part, (bool, float))})
    except (TypeError, ValueError):
        found = []
    if not found or len(found) != len(parts) or found[0] < 0:
        raise InlayError(
            f"layers={given!r}: give blocks counted from 1, each once, such as 3 or [1, 3]; 0 is the pixels; or 'auto'."
        )
    return found
