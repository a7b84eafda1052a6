"""The settings of NTK-Attention (Liang et al. 2024, section 3)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from peft.utils.peft_types import PeftType
from torch import nn

from inlay.anatomy import anatomy
from inlay.attention import FEATURE_MAPS, Elu, Favor, FeatureMap, Taylor, feature_map
from inlay.attention.features import Elementwise, Leaning
from inlay.errors import InlayError, unknown
from inlay.methods.config import InlayConfig

STARTS = ("zero", "prefix", "text")
USUAL_RANK = 16
USUAL_ORDER = 2


@dataclass
class NTKAttentionConfig(InlayConfig):
    """How large the prefix's stand-in is, by which features it is seen, and where it starts; by default in every block.

    `seed` is filled in: what is random follows from it, the directions of `favor` for as long as the adapter lives.
    """

    rank: int | None = field(
        default=None,
        metadata={"help": "The rank s of Z = Z_A Z_B, at most the head size d; None: the smaller of 16 and d // 2."},
    )
    factored: bool = field(
        default=True,
        metadata={
            "help": "False: Z itself in place of Z_A Z_B, and no rank; smaller than factors of a rank near the head "
            "size."
        },
    )
    feature_multiplier: int = field(
        default=1, metadata={"help": "beta: there are r = beta d features. `taylor` has a number of its own."}
    )
    feature_map: str | None = field(
        default=None,
        metadata={
            "help": f"What phi is: {', '.join(sorted(FEATURE_MAPS))} (see inlay.attention). None: `taylor` where a "
            "text starts it, as that approximates exp; else `elu`."
        },
    )
    taylor_order: int = field(default=USUAL_ORDER, metadata={"help": "The order of `taylor`: 2, 4, ..."})
    start: str = field(
        default="zero",
        metadata={
            "help": "`zero`: as the base model; `prefix`: Eq. (4) of a random prefix, cut to the rank; `text`: of the "
            "keys and values of `prompt_ids`."
        },
    )
    prompt_ids: list[int] | None = field(
        default=None,
        metadata={"help": "The token ids of the prompt that `start=text` begins from; dropped when it was read."},
    )
    prompt_length: int | None = field(default=None, metadata={"help": "Filled in: how many tokens that prompt had."})
    prefix_length: int = field(default=32, metadata={"help": "The length m of the prefix that `start=prefix` draws."})
    seed: int | None = field(
        default=None, metadata={"help": "What is random follows from it; None: drawn from torch's seed."}
    )
    skip_first: bool = field(
        default=False,
        metadata={
            "help": "The term is off for a query that sees one key only: the first token of a decoder's text, where it "
            "would overwrite the attention sink."
        },
    )
    centred: bool = field(
        default=False,
        metadata={"help": "phi(q) exp(scale q . mu) in place of phi(q), mu being the key of a first token; decoders."},
    )
    centre_id: int | None = field(
        default=None, metadata={"help": "The id of that token; None: the model's own first token (BOS)."}
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.peft_type = PeftType("INLAY_NTK_ATTENTION")
        if self.start not in STARTS:
            raise unknown("start", self.start, STARTS)
        if self.feature_map is None:
            self.feature_map = Taylor.name if self.start == "text" else Elu.name
        if self.feature_map not in FEATURE_MAPS:
            raise unknown("feature_map", self.feature_map, FEATURE_MAPS)
        self._check_prompt()
        self._check_sink()
        if self.rank is not None:
            if not self.factored:
                raise InlayError(f"rank={self.rank}: Z itself (factored=False) has none. Leave one of them out.")
            _at_least_one("rank", self.rank, f"or leave it out for {USUAL_RANK} or half the head size")
        _at_least_one("feature_multiplier", self.feature_multiplier, "1 and 2 are usual")
        _at_least_one("prefix_length", self.prefix_length, "32 is usual")
        if self.feature_map != Taylor.name and self.taylor_order != USUAL_ORDER:
            raise InlayError(
                f"taylor_order={self.taylor_order} says nothing to feature_map={self.feature_map!r}. Leave it out, or "
                f"give feature_map={Taylor.name!r}."
            )
        if self.feature_map == Taylor.name:
            if self.taylor_order < 2 or self.taylor_order % 2:
                raise InlayError(
                    f"taylor_order={self.taylor_order}: give 2, 4, ...; a polynomial of odd order turns negative, and "
                    "the softmax could divide by 0."
                )
            if self.feature_multiplier != 1:
                raise InlayError(
                    f"feature_multiplier={self.feature_multiplier}: the features of 'taylor' are as many as its order "
                    "makes them. Leave it out, or raise taylor_order."
                )

    def _check_prompt(self) -> None:
        if self.prompt_ids is None:
            if self.start == "text" and self.prompt_length is None:
                raise InlayError(
                    "start='text' begins from a prompt: give its token ids, "
                    "prompt_ids=tokenizer(text).input_ids, or call `inlay compress`."
                )
            return
        if self.start != "text":
            raise InlayError(
                f"prompt_ids are read where start='text', and start={self.start!r}. Leave one of them out."
            )
        self.prompt_ids = list(self.prompt_ids)
        wrong = [token for token in self.prompt_ids if isinstance(token, bool) or not isinstance(token, int)]
        if wrong or not self.prompt_ids:
            raise InlayError(
                f"prompt_ids must be a list of one token id or more; got {wrong[0]!r} in it."
                if wrong
                else "prompt_ids is empty: the prompt must have one token or more."
            )

    def _check_sink(self) -> None:
        """What concerns the first token of a text, where nothing stands before it."""
        if self.skip_first and self.start == "text":
            raise InlayError(
                "skip_first=True hides the prefix from the first token, and start='text' puts a prompt before it. "
                "Leave one of them out."
            )
        if self.centred and self.start != "zero":
            raise InlayError(
                f"centred=True takes the key of a first token as the centre, and start={self.start!r} has keys of its "
                "own. Leave one of them out."
            )
        if self.centre_id is not None and not self.centred:
            raise InlayError(
                f"centre_id={self.centre_id} says nothing without centred=True. Leave it out, or give both."
            )

    def to_dict(self) -> dict[str, Any]:
        """Without the prompt, where it has been read: what it leaves behind is in the weights. The text itself may be
        long, or nobody else's business."""
        return super().to_dict() | ({} if self.prompt_length is None else {"prompt_ids": None})

    @classmethod
    def for_prompt(cls, settings: Mapping[str, Any], model: nn.Module) -> dict[str, Any]:
        """Many features and all ranks, unless given: it is one prompt, not a sweep."""
        fixed = {
            *("prompt_ids", "prompt_length", "prefix_length", "seed"),
            *("skip_first", "centred", "centre_id"),
        } & settings.keys()
        if fixed or settings.get("start", "text") != "text":
            raise InlayError(f"{', '.join(sorted(fixed)) or 'start'}: compress sets this itself. Leave it out.")
        if "taylor_order" in settings and settings.get("feature_map") != Taylor.name:
            raise InlayError(
                f"taylor_order={settings['taylor_order']!r} says nothing to features other than 'taylor'. Leave it "
                "out, or give feature_map='taylor' too (--set feature_map=taylor)."
            )
        usual: dict[str, Any] = {"feature_map": Elu.name}
        attention = next((block.attention for block in anatomy(model).blocks if block.attention is not None), None)
        # All ranks: Z itself, or its factors where they are asked for. Without attention, attaching says what is wrong
        # with the model.
        if attention is not None and settings.get("rank", attention.head_size) == attention.head_size:
            if settings.get("factored"):
                usual["rank"] = attention.head_size
            else:
                settings = {name: value for name, value in settings.items() if name != "rank"}
                usual["factored"] = False
        if settings.get("feature_map", Elu.name) != Taylor.name:
            usual["feature_multiplier"] = 2
        return usual | dict(settings) | {"start": "text"}

    @property
    def has_centre(self) -> bool:
        """Whether phi is taken about a point that is saved with the adapter."""
        return self.centred or self.start == "text"

    def features(self) -> FeatureMap:
        """phi."""
        if self.feature_map == Taylor.name:
            return feature_map(Taylor.name, order=self.taylor_order)
        if self.feature_map == Favor.name:
            return feature_map(Favor.name, seed=self.seed)
        assert self.feature_map is not None
        found = feature_map(self.feature_map)
        # Real keys are far from the origin, so that a prompt's features are taken about a centre; every map can.
        return Leaning(base=found) if self.has_centre and isinstance(found, Elementwise) else found

    def rows(self, head_size: int) -> int:
        """r."""
        if self.feature_map == Taylor.name:
            return self.features().dimension(head_size)
        return self.feature_multiplier * head_size

    def rank_at(self, head_size: int) -> int:
        """s, for heads of this size."""
        if not self.factored:
            return head_size
        if self.rank is None:
            return max(1, min(USUAL_RANK, head_size // 2))
        if self.rank > head_size:
            raise InlayError(
                f"rank={self.rank} is larger than the model's head size, {head_size}, and would add nothing. Give 1 to "
                f"{head_size}; the paper takes at most half, {max(1, head_size // 2)}."
            )
        return self.rank


def _at_least_one(name: str, value: int, hint: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InlayError(f"{name}={value!r} must be a whole number of at least 1; {hint}.")
