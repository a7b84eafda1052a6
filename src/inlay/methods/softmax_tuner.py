"""What the tuners of softmax layers share: they adapt every attention module that looks its function up, and may start
from a prompt that the model reads."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import nn

from inlay.anatomy import Attention, Block, anatomy
from inlay.errors import InlayError
from inlay.methods.attention_interface import on_interface
from inlay.methods.capabilities import alternatives
from inlay.methods.plain import plain_name
from inlay.methods.prompts import Prompt, read
from inlay.methods.softmax_layer import SoftmaxLayer
from inlay.methods.tuner import InlayTuner

SEEDS = 2**31


class SoftmaxTuner(InlayTuner):
    """A tuner whose layers are `SoftmaxLayer`s. Its config has the settings `seed`, `prompt_ids` and `prompt_length`,
    which are filled in here."""

    method: ClassVar[str]
    """Its name in the registry, for messages."""
    prompt: Prompt | None = None
    """While an adapter that starts from one is put in."""
    known: dict[str, Block] | None = None
    """The places, while an adapter is put in: they are asked for at each of them."""

    def hosts(self, config: Any) -> list[str]:
        return list(self.places())

    def places(self) -> dict[str, Block]:
        """The blocks whose attention can be adapted, by the plain name of the attention module."""
        if self.known is not None:
            return self.known
        attentions = [(block, block.attention) for block in anatomy(self.model).all_blocks]
        return {plain_name(at.name): block for block, at in attentions if at is not None and why_not(at) is None}

    def _prepare_adapter_config(self, peft_config: Any, model_config: dict[str, Any]) -> Any:
        places = self.places()
        if peft_config.seed is None:
            peft_config.seed = int(torch.randint(SEEDS, (), device="cpu"))
        if peft_config.resolved:  # loaded: PEFT would leave out what has no place
            elsewhere = [name for name in peft_config.target_modules if name not in places]
            if elsewhere:
                raise InlayError(
                    f"The adapter was trained at {len(peft_config.target_modules)} attentions, and "
                    f"{type(self.model).__name__} has no {elsewhere[0]!r}: it belongs to another model. Load it into "
                    "the one it was trained on."
                )
        if peft_config.prompt_ids is not None and not next(self.model.parameters()).is_meta:
            self.prompt = read(self.model, peft_config.prompt_ids)
            peft_config.prompt_length = len(peft_config.prompt_ids)
        found = super()._prepare_adapter_config(peft_config, model_config)
        for name in found.target_modules or ():
            attention = places[name].attention
            assert attention is not None
            for other in attention.module.children():
                if isinstance(other, SoftmaxLayer) and not isinstance(other, self.tuner_layer_cls):
                    raise InlayError(
                        f"{name} has a {type(other).__name__} already, which computes its softmax, as {self.method} "
                        "would. Put this adapter on other layers (`layers`), or into a model of its own."
                    )
        return found

    def inject_adapter(self, *args: Any, **kwargs: Any) -> None:
        self.known = self.places()
        try:
            super().inject_adapter(*args, **kwargs)
        finally:
            self.prompt = self.known = None

    @classmethod
    def refusal(cls, model: nn.Module) -> str:
        """Convolutional networks; MPNet, DeBERTa and timm's models; Gemma 2."""
        attention = next((block.attention for block in anatomy(model).blocks if block.attention is not None), None)
        reason = "it has no attention" if attention is None else why_not(attention)
        return f"{cls.method} cannot adapt {type(model).__name__}: {reason}. {alternatives(model, cls.method)}"


def why_not(attention: Attention) -> str | None:
    """Why the softmax of an attention module cannot be computed in its place; None if it can."""
    name = type(attention.module).__name__
    if not on_interface(attention.module):
        return f"{name} does not look its function up in Transformers' attention interface"
    if getattr(attention.module, "attn_logit_softcapping", None):
        return f"{name} caps its scores, which are then no plain softmax"
    return None
