"""The gate and the temperature of prompts at one block (GateVPT, Yoo et al. 2023)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from inlay.methods.attention_interface import Attend, AttentionLayer
from inlay.methods.token_prompts import TokenPlace, TokenPromptLayer
from inlay.methods.vpt.config import VPTConfig

COLDEST, HOTTEST = 0.01, 10.0  # the authors' bounds on the temperature


class PromptGate(nn.Module):
    """`g` of one block."""

    def __init__(self, logit: float, device: torch.device) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((1,), float(logit), device=device))

    def forward(self, entered: Tensor, left: Tensor) -> Tensor:
        """sigmoid(g) * left + (1 - sigmoid(g)) * entered."""
        gate = self.weight.sigmoid().to(left.dtype)
        return gate * left + (1 - gate) * entered


class VPTPromptLayer(TokenPromptLayer):
    """Prompts at one block, and GateVPT's gate on how much it changes those that run through (Yoo et al., section 4):

        [x_i, Z', E_i] = L_i([x_(i-1), Z_(i-1), E_(i-1)]),      Z_i = sigmoid(g_i) Z' + (1 - sigmoid(g_i)) Z_(i-1)

    for every block but the last, behind which the prompts are dropped.
    """

    adapter_layer_names = ("inlay_vpt_prompts", "inlay_vpt_gate")

    def update_layer(self, adapter_name: str, place: TokenPlace) -> None:
        super().update_layer(adapter_name, place)
        if place.config.gated and not place.leaves:
            weight = next(self.host.parameters())
            self.inlay_vpt_gate[adapter_name] = PromptGate(place.config.gate_initial, weight.device)

    def after(self, host: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        """Mix the prompts that entered with those that left."""
        prompts = self.current()
        for name in self.running():
            if name in self.inlay_vpt_gate and prompts is not None:
                entered = next(value for value in args if isinstance(value, Tensor))
                before, left, after = prompts.split(output)
                mixed = self.inlay_vpt_gate[name](prompts.split(entered)[1], left)
                output = torch.cat((before, mixed, after), dim=1)
        return super().after(host, args, output)


class Temperature(nn.Module):
    """`tau` of one block's attention, 1 at the start."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1, device=device))

    def forward(self, query: Tensor) -> Tensor:
        """q / tau: the logits are linear in the queries."""
        return query / self.weight.clamp(COLDEST, HOTTEST).to(query.dtype)


class TemperatureLayer(AttentionLayer):
    """GateVPT's attention shaping (Yoo et al., section 4): softmax(Q K^T / (tau sqrt(d))) V, tau trained."""

    child = "inlay_vpt"
    adapter_layer_names = ("inlay_vpt_temperature",)

    def update_layer(self, adapter_name: str, config: VPTConfig) -> None:
        self.pieces[adapter_name] = Temperature(next(self.host.parameters()).device)

    def attend(
        self, previous: Attend, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        for name in self.running():
            query = self.pieces[name](query)
        return previous(self.host, query, key, value, mask, **kwargs)
