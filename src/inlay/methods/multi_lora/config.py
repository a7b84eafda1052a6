"""The settings of Multi-LoRA."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from peft.utils.peft_types import PeftType
from torch import Tensor, nn

from inlay.errors import InlayError, unknown
from inlay.methods.config import InlayConfig
from inlay.methods.multi_lora.shared import INITS
from inlay.methods.plain import WRAPPED

SLICES = ("query", "key", "value")


@dataclass
class MultiLoraConfig(InlayConfig):
    """One task of Multi-LoRA. What shapes or draws the shared `A` must be the same for every task on a model: `r`,
    `rank_pattern`, `seed`, `init` and `fused`. Without `target_modules`: the projections of queries and values."""

    shared_settings: ClassVar[tuple[str, ...]] = ("r", "rank_pattern", "seed", "init", "fused")

    r: int = field(default=8, metadata={"help": "The rank: columns of A, rows of each B."})
    lora_alpha: float = field(default=16, metadata={"help": "The product is scaled by lora_alpha / r."})
    lora_dropout: float = field(default=0.0, metadata={"help": "Share of the input dropped before A, in training."})
    rank_pattern: dict[str, int] = field(
        default_factory=dict, metadata={"help": "Ranks of modules whose names end in, or match, these keys."}
    )
    alpha_pattern: dict[str, float] = field(
        default_factory=dict, metadata={"help": "lora_alpha of modules whose names end in, or match, these keys."}
    )
    seed: int = field(default=0, metadata={"help": "What every A is drawn from, with the name of its module."})
    init: str = field(
        default="lora", metadata={"help": "How A is drawn: lora (uniform, as LoRA does) or gaussian (N(0, 1))."}
    )
    fused: list[str] = field(
        default_factory=lambda: ["query", "value"],
        metadata={"help": "What to adapt of a projection that makes queries, keys and values together, as GPT-2's."},
    )
    num_labels: int | None = field(
        default=None,
        metadata={"help": "Outputs of the task's own head; 1 is regression. None: as many as the base model has."},
    )
    head_seed: int | None = field(
        default=None,
        metadata={"help": "What a head of another size than the base model's is drawn from. None: from seed."},
    )
    places: dict[str, dict[str, Any]] | None = field(
        default=None, metadata={"help": "Filled in: kind, shape of A and adapted channels of each adapted module."}
    )
    checksum: str | None = field(
        default=None, metadata={"help": "Filled in: what the A's hash to. Another one on loading is an error."}
    )

    def settle(self, base: nn.Module, tensors: Mapping[str, Tensor]) -> None:
        """Take from the saved head how many outputs a task has that does not say: it was trained alone, on a base model
        with as many, and may now come into one that has others."""
        from inlay.methods.mixture.heads import outputs_in

        if self.num_labels is None:
            self.num_labels = outputs_in(base, {name.removeprefix(WRAPPED): each for name, each in tensors.items()})

    @property
    def was_saved(self) -> bool:
        """Whether these settings have been a task's before: each of these two is filled in then."""
        return self.resolved or self.places is not None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.peft_type = PeftType("INLAY_MULTI_LORA")
        for name, rank in {"r": self.r, **self.rank_pattern}.items():
            if not isinstance(rank, int) or rank < 1:
                raise InlayError(f"{name}={rank!r}: a rank is a whole number from 1.")
        if not 0 <= self.lora_dropout < 1:
            raise InlayError(f"lora_dropout={self.lora_dropout!r} is a share: give 0 <= lora_dropout < 1.")
        for name in ("seed", "head_seed"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < 2**63:
                raise InlayError(f"{name}={value!r} must be a whole number from 0 to {2**63 - 1}.")
        if self.init not in INITS:
            raise unknown("init", self.init, INITS)
        for part in self.fused:
            if part not in SLICES:
                raise unknown("part of a fused projection", part, SLICES)
        if not self.fused:
            raise InlayError(f"fused=[] would adapt nothing: name some of {', '.join(SLICES)}.")
        if self.num_labels is not None and self.num_labels < 1:
            raise InlayError(f"num_labels={self.num_labels!r}: a head has at least one output.")
