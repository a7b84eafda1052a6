"""The settings of InfoPrompt (Wu et al. 2023, sections 3 and 4.2), WARP and IDPG."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from peft.utils.peft_types import PeftType

from inlay.errors import InlayError, unknown
from inlay.methods.config import InlayConfig

if TYPE_CHECKING:
    from torch import nn

    from inlay.tasks.schema import TaskSchema

ENCODERS: tuple[str, ...] = ("per-token", "shared-bottleneck", "static")
STATES: tuple[str, ...] = ("mask", "mean", "first", "last")
ACTIVATIONS: tuple[str, ...] = ("none", "gelu")
INITIAL: tuple[str, ...] = ("vocabulary", "uniform", "words")
PEFTS_HEADS = ("classifier", "score")
OWN_HEAD = "inlay_infoprompt_theta"


class OwnHead(list[str]):
    """Names of modules to save, the class vectors in place of a head.

    PEFT's typed models add the model's head to every config, after which it is trained and saved: not to this one. They
    also want a list that is not empty, so it names what stands in the head's place; no module has that name.
    """

    def __init__(self, names: Iterable[str] = ()) -> None:
        super().__init__([OWN_HEAD])
        self.extend(names)

    def extend(self, names: Iterable[str]) -> None:
        super().extend(name for name in names if name not in (*PEFTS_HEADS, *self))


@dataclass
class InfoPromptConfig(InlayConfig):
    """Prompt tokens in the text, class vectors on a state `Z`, and how much their information counts.

    `encoder` says where the prompts come from: `per-token` (InfoPrompt: a linear bottleneck of `Phi(X)` a token),
    `shared-bottleneck` (IDPG: one nonlinear network for all) or `static` (WARP: trained vectors). `beta` weighs the
    representation loss, `gamma` the head loss.

    The class vectors stand in place of the model's own head, which is neither trained nor saved.
    """

    chooses_layers: ClassVar[bool] = False
    stand_ins: ClassVar[Mapping[str, Any]] = {"mask_token_id": 0, "initial_ids": [0]}

    num_prompt_tokens: int = field(default=4, metadata={"help": "How many prompt tokens a text gets, n_p."})
    encoder: str = field(default="per-token", metadata={"help": f"Where prompts come from: {', '.join(ENCODERS)}."})
    bottleneck: int = field(default=64, metadata={"help": "The width of the encoder's bottleneck."})
    activation: str | None = field(
        default=None, metadata={"help": "none or gelu; None: gelu for the shared bottleneck, none otherwise."}
    )
    beta: float = field(default=0.1, metadata={"help": "The weight of the representation loss."})
    gamma: float = field(default=0.05, metadata={"help": "The weight of the head loss."})
    num_negatives: int = field(
        default=32, metadata={"help": "K: one positive and K - 1 negatives; all tokens where a text has fewer."}
    )
    state: str | None = field(
        default=None,
        metadata={
            "help": "Where Z is read: mask, mean, first or last. None: what heads read where a pooling was chosen; "
            "else last in a decoder; in an encoder the mask, but the mean for one that was not trained to fill masks, "
            "or whose mask token is not known."
        },
    )
    phi: str | None = field(
        default=None,
        metadata={"help": "Where the encoder reads Phi(X): as state. None: first in an encoder, last in a decoder."},
    )
    mask_token_id: int | None = field(default=None, metadata={"help": "The tokenizer's mask token."})
    pad_token_id: int | None = field(default=None, metadata={"help": "Padding; None: as the model's config says."})
    special_token_ids: list[int] | None = field(
        default=None,
        metadata={
            "help": "Tokens that are never negatives, the tokenizer's all_special_ids; None: those that the model's "
            "config names, and in an encoder each text's first and last token."
        },
    )
    placeholders: bool = field(
        default=False,
        metadata={"help": "Whether the ids hold a negative number at each place of a prompt; else places are found."},
    )
    template: str | None = field(
        default=None,
        metadata={"help": "The text with its places, as in '{soft_prompt} {sentence} {mask}'; `inlay tune` reads it."},
    )
    cue: str | None = field(
        default=None,
        metadata={
            "help": "What a text ends in, in a decoder, where a prompt would be its end; None: the task's words or "
            "'Answer:', '': nothing. `inlay tune` reads it."
        },
    )
    initial: str = field(default="vocabulary", metadata={"help": f"How static prompts start: {', '.join(INITIAL)}."})
    initial_words: str | None = field(default=None, metadata={"help": "The words that `initial=words` starts from."})
    initial_ids: list[int] | None = field(default=None, metadata={"help": "Filled in: the tokens of those words."})
    label_words: list[str] | None = field(
        default=None, metadata={"help": "A word a class, from whose embeddings the class vectors start."}
    )
    label_ids: list[list[int]] | None = field(
        default=None, metadata={"help": "Filled in: the tokens of those words; of several the mean is taken."}
    )
    detach_prompts: bool = field(
        default=False, metadata={"help": "As released: the representation loss does not reach P itself."}
    )
    predict_from_sample: bool = field(
        default=False,
        metadata={
            "help": "As released: classes are predicted from the sample of Z, in evaluation from its mean f_mu(Z)."
        },
    )
    kl_weight: float = field(default=0.0, metadata={"help": "As released (0.1): the weight of a KL to N(0, I)."})
    units: bool = field(
        default=True,
        metadata={
            "help": "Train each part in its own unit; False: plain numbers, for which the paper's rate is 0.001; the "
            "critics then start from the identity."
        },
    )
    sizes: list[float] | None = field(
        default=None,
        metadata={"help": "Filled in: the size of an entry of word embeddings, of Phi(X) and of Z."},
    )
    cache: bool = field(default=True, metadata={"help": "Keep Phi(X) of each text for as long as it cannot change."})

    def __post_init__(self) -> None:
        super().__post_init__()
        self.peft_type = PeftType("INLAY_INFOPROMPT")
        for name, allowed in (("encoder", ENCODERS), ("initial", INITIAL)):
            if getattr(self, name) not in allowed:
                raise unknown(name, getattr(self, name), allowed)
        for name, allowed in (("state", STATES), ("phi", STATES), ("activation", ACTIVATIONS)):
            if getattr(self, name) is not None and getattr(self, name) not in allowed:
                raise unknown(name, getattr(self, name), allowed)
        for name, least in (("num_prompt_tokens", 1), ("bottleneck", 1), ("num_negatives", 2)):
            if getattr(self, name) < least:
                raise InlayError(f"{name}={getattr(self, name)}: give at least {least}.")
        for name in ("beta", "gamma", "kl_weight"):
            if getattr(self, name) < 0:
                raise InlayError(f"{name}={getattr(self, name)} must not be negative; 0 leaves that loss out.")
        if self.state == "mask" and self.mask_token_id is None:
            raise InlayError(
                "state='mask' needs mask_token_id, the tokenizer's mask token. Give it, or read the mean, first or "
                "last state."
            )
        if self.initial == "words" and self.initial_ids is None:
            raise InlayError("initial='words' needs the words' tokens: give initial_ids (or initial_words to tune).")
        if self.predict_from_sample and not self.beta:
            raise InlayError("predict_from_sample=True needs the representation loss: give a beta above 0.")
        # The class vectors are the head: one that loading left uninitialised is not read.
        new = self.newly_initialised or ()
        self.modules_to_save = [name for name in self.modules_to_save or () if name not in new]

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, OwnHead(value or ()) if name == "modules_to_save" else value)

    @property
    def informed(self) -> bool:
        """Whether `Phi(X)` is needed: to make prompts, or as the negatives of Z."""
        return self.encoder != "static" or self.beta > 0

    @property
    def packable(self) -> bool:
        """Never: prompts, and what they are made of, belong to a row."""
        return False

    @property
    def num_virtual_tokens(self) -> int:
        """How many positions the model adds to what it is given: none where the ids hold places already."""
        return 0 if self.placeholders else self.num_prompt_tokens

    @classmethod
    def for_tokenizer(cls, tokenizer: Any, **settings: Any) -> InfoPromptConfig:
        """Settings with the mask, the padding and the special tokens of a tokenizer; what is given counts."""
        return cls(**{**tokens_of(tokenizer), **settings})

    @classmethod
    def for_task(
        cls, settings: Mapping[str, Any], schema: TaskSchema | None, processor: Any, model: nn.Module
    ) -> tuple[dict[str, Any], TaskSchema | None, list[str]]:
        """The settings with what a task, a tokenizer and a model say, the task with places for prompts, and notes. A
        task without a schema says nothing: the method then finds places itself."""
        from inlay.methods.infoprompt.task import for_task

        return (dict(settings), None, []) if schema is None else for_task(settings, schema, processor, model)


def tokens_of(tokenizer: Any) -> dict[str, Any]:
    return {
        "mask_token_id": getattr(tokenizer, "mask_token_id", None),
        "pad_token_id": getattr(tokenizer, "pad_token_id", None),
        "special_token_ids": sorted(set(tokenizer.all_special_ids)),
    }
