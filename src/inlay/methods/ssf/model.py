"""The tuner of SSF (Lian et al. 2022): every linear layer, convolution and norm of the backbone, its stem included."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers.pytorch_utils import Conv1D

from inlay.anatomy import in_backbone, is_norm
from inlay.methods.capabilities import alternatives
from inlay.methods.channels import NEVER_CALLED, Convolution
from inlay.methods.plain import base_of, plain_modules
from inlay.methods.rescaling import RescalingTuner
from inlay.methods.ssf.layer import SSFLayer
from inlay.methods.tuner import ChildLayer


class SSFModel(RescalingTuner):
    """`get_peft_model(model, SSFConfig())` makes one of these."""

    prefix = "inlay_ssf_"
    child = "inlay_ssf"
    tuner_layer_cls = SSFLayer

    @classmethod
    def fits(cls, module: nn.Module) -> bool:
        """An operation that multiplies by its weight; not a transposed convolution, whose weight runs otherwise."""
        if getattr(module, "weight", None) is None or isinstance(module, NEVER_CALLED):
            return False
        if isinstance(module, Convolution):
            return not module.transposed
        leaf = all(isinstance(child, ChildLayer) for child in module.children())
        return isinstance(module, (nn.Linear, Conv1D)) or (is_norm(module) and leaf and module.weight.ndim == 1)

    def hosts(self, config: Any) -> list[str]:
        """Within the backbone: a head is trained whole, and a language model's is often its embeddings' weight."""
        inside = in_backbone(base_of(self.model))
        return [name for name, module in plain_modules(self.model) if name and inside(name) and self.fits(module)]

    @classmethod
    def refusal(cls, model: nn.Module) -> str:
        """Rare: a backbone without any layer of a known kind."""
        name = type(model).__name__
        return f"ssf scales linear layers, convolutions and norms, and {name} has none. {alternatives(model, 'ssf')}"
