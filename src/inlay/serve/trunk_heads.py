"""Heads of another class than the served model's own, on the states of its trunk.

One pass serves classifiers, taggers and embeddings though Transformers has a class for each: what differs between
those is the head. A class is loaded once, its trunk taken out and what the shared trunk computed put in its place.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPoolingAndCrossAttentions

from inlay.backbones.loading import Backbone
from inlay.backbones.pooled import CHILD, POOLER
from inlay.errors import InlayError, listed
from inlay.methods.mixture.heads import output_layer, outputs_in
from inlay.methods.plain import plain_modules
from inlay.methods.saving import compare


class TrunkStates(nn.Module):
    """Stands where a trunk was, and returns the states it was given, pooled as that trunk would."""

    def __init__(self, trunk: Any) -> None:
        super().__init__()
        self.config = trunk.config
        pooler = getattr(trunk, POOLER, None)
        self.pooler = pooler if isinstance(pooler, nn.Module) else None
        self.pooling = getattr(trunk, CHILD, None)
        if self.pooling is not None:
            self.pooling.hook = None  # on the trunk, which goes
        self.states: Tensor | None = None

    def forward(self, input_ids: Any = None, attention_mask: Any = None, **_: Any) -> Any:
        """What the trunk returns, of these states."""
        assert self.states is not None
        pooled = None if self.pooler is None else self.pooler(self.states)
        output = BaseModelOutputWithPoolingAndCrossAttentions(last_hidden_state=self.states, pooler_output=pooled)
        if self.pooling is not None:
            output = self.pooling.after(self, (), {"attention_mask": attention_mask}, output)
        return output


class TrunkHead(nn.Module):
    """A model without its trunk."""

    def __init__(self, model: Any, new: list[str]) -> None:
        super().__init__()
        self.model, self.new, self.outputs = model, new, 0

    @classmethod
    def of(cls, backbone: Backbone) -> TrunkHead:
        """That of a loaded model, whose trunk is let go."""
        model = backbone.model
        setattr(model, model.base_model_prefix, TrunkStates(getattr(model, model.base_model_prefix)))
        return cls(model.requires_grad_(False).eval(), backbone.newly_initialised)

    def holding(self, tensors: Mapping[str, Tensor], source: str) -> TrunkHead:
        """A copy with an adapter's own head; an error where that is none, or of another shape."""
        found = copy.deepcopy(self)
        if (outputs := outputs_in(found.model, tensors)) is None:
            raise InlayError(f"{source} has no head for {type(self.model).__name__}, and the base model has none.")
        place = output_layer(dict(plain_modules(found.model)), found.model)
        assert place is not None
        old = found.model.get_submodule(place)
        parent, _, last = place.rpartition(".")
        new = nn.Linear(old.in_features, outputs, bias=old.bias is not None).to(old.weight.device, old.weight.dtype)
        setattr(found.model.get_submodule(parent), last, new)
        found.outputs = outputs
        state = found.model.state_dict()
        lacking = [
            key for key in state if key not in tensors and key.startswith(tuple(f"{name}." for name in self.new))
        ]
        extra = [key for key in tensors if key not in state]
        if lacking or extra:
            what = f"lacks {listed(lacking, 3)}" if lacking else f"holds {listed(extra, 3)}, which have no place"
            raise InlayError(f"The head of {source} does not fit {type(self.model).__name__}: it {what}.")
        compare(dict(tensors), {key: state[key] for key in tensors}, Path(source))
        found.model.load_state_dict(dict(tensors), strict=False)
        return found.requires_grad_(False).eval()

    def run(self, states: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        """Its logits, of the trunk's last states and what the trunk was given."""
        trunk = getattr(self.model, self.model.base_model_prefix)
        trunk.states = states.to(next(self.model.parameters()).dtype)  # of mixed precision they are half
        try:
            with torch.no_grad():
                found: Tensor = self.model(
                    input_ids=batch["input_ids"].to(states.device),
                    attention_mask=batch["attention_mask"].to(states.device),
                )["logits"]
            return found
        finally:
            trunk.states = None
