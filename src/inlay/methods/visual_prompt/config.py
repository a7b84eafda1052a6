"""The settings of visual prompting (Bahng et al. 2022; the templates of the activation prompts' paper, section 3)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from peft.utils.peft_types import PeftType

from inlay.errors import InlayError
from inlay.methods.feature_prompts import FeaturePromptConfig


@dataclass
class VisualPromptConfig(FeaturePromptConfig):
    """Perturb the pixels, as the image processor gives them, by something trained that is the same for every image.

    `kind="add"` changes every pixel, and is the activation prompt at layer 0; `"pad"` changes a frame of `width`
    pixels; `"resize-concat"` shrinks the image and puts such a frame around it.
    """

    kinds: ClassVar[tuple[str, ...]] = ("add", "pad", "resize-concat")
    method: ClassVar[str] = "visual-prompt"
    chooses_layers: ClassVar[bool] = False

    width: int | None = field(
        default=None,
        metadata={
            "help": "Of the frame, in pixels; None: of a 224 pixel image 30 for kind='pad' and 48 for "
            "'resize-concat', of others as much in proportion. Says nothing to kind='add'."
        },
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.peft_type = PeftType("INLAY_VISUAL_PROMPT")
        if self.layers not in (None, 0, [0], (0,)):
            raise InlayError(
                f"layers={self.layers!r}: visual-prompt acts on the pixels, layer 0. At other layers it is the method "
                "activation-prompt."
            )
        self.layers = [0]
