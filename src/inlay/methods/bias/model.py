"""The tuner of bias tuning (BitFit, Ben Zaken et al. 2022): every bias the base model has, whatever carries it."""

from __future__ import annotations

from torch import nn
from transformers.pytorch_utils import Conv1D

from inlay.methods.bias.layer import BiasLayer
from inlay.methods.capabilities import alternatives
from inlay.methods.channels import NEVER_CALLED, ChannelsNorm, Convolution
from inlay.methods.tuner import InlayTuner

# Modules known to add their bias to their output.
CARRIERS = (nn.Linear, Conv1D, Convolution, nn.LayerNorm, *ChannelsNorm)


class BiasTuningModel(InlayTuner):
    """`get_peft_model(model, BiasTuningConfig())` makes one of these."""

    prefix = "inlay_bias_"
    child = "inlay_bias"
    tuner_layer_cls = BiasLayer

    @classmethod
    def fits(cls, module: nn.Module) -> bool:
        """A module with a bias that it adds to its output."""
        carries = isinstance(module, CARRIERS) and not isinstance(module, NEVER_CALLED)
        return carries and getattr(module, "bias", None) is not None

    @classmethod
    def refusal(cls, model: nn.Module) -> str:
        """Llama, T5, ModernBERT and their like have no biases at all."""
        name = type(model).__name__
        return f"bias trains the biases that a model has, and {name} has none. {alternatives(model, 'bias')}"
