"""The tuner of norm tuning: every normalisation layer of the base model that has a scale."""

from __future__ import annotations

from torch import nn

from inlay.anatomy import is_norm
from inlay.methods.capabilities import alternatives
from inlay.methods.norm.layer import NormLayer
from inlay.methods.tuner import ChildLayer, InlayTuner


class NormTuningModel(InlayTuner):
    """`get_peft_model(model, NormTuningConfig())` makes one of these."""

    prefix = "inlay_norm_"
    child = "inlay_norm"
    tuner_layer_cls = NormLayer

    @classmethod
    def fits(cls, module: nn.Module) -> bool:
        """A normalisation layer with a scale, and no block of several modules that is called a norm."""
        leaf = all(isinstance(child, ChildLayer) for child in module.children())
        return is_norm(module) and leaf and getattr(module, "weight", None) is not None

    @classmethod
    def refusal(cls, model: nn.Module) -> str:
        """Rare: a model without norms, or whose norms have no scale."""
        name = type(model).__name__
        return f"norm trains scales of normalisation layers, and {name} has none. {alternatives(model, 'norm')}"
