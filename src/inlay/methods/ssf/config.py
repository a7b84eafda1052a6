"""The settings of SSF (Lian et al. 2022)."""

from __future__ import annotations

from dataclasses import dataclass, field

from peft.utils.peft_types import PeftType

from inlay.errors import InlayError
from inlay.methods.config import InlayConfig


@dataclass
class SSFConfig(InlayConfig):
    """Scale and shift what leaves the modules selected, by default every linear layer, convolution and norm."""

    init_std: float = field(
        default=0.0,
        metadata={
            "help": "Spread of the scales around 1 and of the shifts around 0 at the start. 0 starts as the base model "
            "exactly; the authors' code has 0.02."
        },
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.peft_type = PeftType("INLAY_SSF")
        if not self.init_std >= 0:
            raise InlayError(f"init_std={self.init_std!r} must not be negative; 0 starts as the base model exactly.")
