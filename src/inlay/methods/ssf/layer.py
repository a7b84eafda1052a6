"""SSF of one module (Lian et al. 2022, section 3.2, equations 3 and 4)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from inlay.methods.channels import beside, widths
from inlay.methods.rescaling import RescalingLayer
from inlay.methods.ssf.config import SSFConfig


class ScaleShift(nn.Module):
    """`gamma` and `beta` of one adapter. `weight` is `gamma - 1`: any weight decay pulls towards the base model."""

    def __init__(self, host: nn.Module, init_std: float) -> None:
        super().__init__()
        weight, bias = host.weight, getattr(host, "bias", None)
        channels = widths(host)[1] or weight.shape[0]  # quantised weights have shapes of their own
        self.weight = nn.Parameter(torch.zeros(channels, **beside(weight)))
        self.bias = None if bias is None else nn.Parameter(torch.zeros_like(bias))
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=init_std)

    def forward(self) -> tuple[Tensor, Tensor | None]:
        """`(gamma, beta)`."""
        return 1 + self.weight, self.bias


class SSFLayer(RescalingLayer):
    """After its host `f`, an operation of the backbone with output channels c:

        y_c = gamma_c f(x)_c + beta_c,      gamma = 1, beta = 0 at the start.

    A host without a bias gets no `beta`, so that it takes everything in when it is merged and stays what it was.
    """

    adapter_layer_names = ("inlay_ssf_affine",)

    def update_layer(self, adapter_name: str, config: SSFConfig) -> None:
        self.pieces[adapter_name] = ScaleShift(self.host, config.init_std)
