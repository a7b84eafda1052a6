"""Prompts at one block (VPT, Jia et al. 2022, section 3.2), their gate and temperature (GateVPT, Yoo et al. 2023).

Nothing is remembered from one block to the next: the tokens themselves carry the prompts, and each block's layer
knows where they stand. So recomputation in the backward pass and two forward passes before one backward are safe.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from inlay.errors import InlayError
from inlay.methods.attention_interface import Attend, AttentionLayer
from inlay.methods.tuner import HookedLayer, on_first_tensor
from inlay.methods.vpt.config import TokenPromptConfig, VPTConfig

NORMAL = 0.02
COLDEST, HOTTEST = 0.01, 10.0  # the authors' bounds on the temperature


@dataclass(frozen=True)
class Place:
    """What one adapter's prompts do at one block, counted from 1.

    They stand after the first `leading` tokens of the image; they entered at the block `entry`, this one or an earlier
    one; they leave behind this block, or they run on into the next. `fan` is the size of a patch in pixels and
    channels, for their first values.
    """

    config: Any
    block: int
    entry: int
    leaves: bool
    leading: int
    hidden_size: int
    fan: int

    @property
    def enters(self) -> bool:
        """Whether the prompts enter here."""
        return self.entry == self.block


class Prompts(nn.Module):
    """`P` of one adapter at one block, p x D; without a weight where the prompts come from an earlier block."""

    weight: nn.Parameter

    def __init__(self, place: Place, weight: Tensor | None) -> None:
        super().__init__()
        self.place = place
        self.register_parameter("weight", None if weight is None else nn.Parameter(weight))
        self.dropout = nn.Dropout(place.config.dropout)

    @property
    def count(self) -> int:
        """How many prompts there are, p."""
        return self.place.config.num_prompt_tokens

    def tokens(self) -> Tensor:
        """P itself."""
        return self.weight

    def enter(self, x: Tensor) -> Tensor:
        """[cls, E] -> [cls, P, E]."""
        prompts = self.dropout(self.tokens().to(x.dtype).expand(len(x), -1, -1))
        before, after = x[:, : self.place.leading], x[:, self.place.leading :]
        return torch.cat((before, prompts, after), dim=1)

    def split(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The tokens before the prompts, the prompts, and the patches behind them."""
        start = self.place.leading
        return x[:, :start], x[:, start : start + self.count], x[:, start + self.count :]

    def widen(self, mask: Tensor) -> Tensor:
        """An attention mask with rows and columns for the prompts: everyone sees them, and they see what cls sees."""
        start, free = self.place.leading, (True if mask.dtype == torch.bool else 0.0)
        rows = mask[..., :1, :].expand(*mask.shape[:-2], self.count, -1)
        mask = torch.cat((mask[..., :start, :], rows, mask[..., start:, :]), dim=-2)
        columns = mask.new_full((*mask.shape[:-1], self.count), free)
        return torch.cat((mask[..., :start], columns, mask[..., start:]), dim=-1)


class Gate(nn.Module):
    """`g` of one block."""

    def __init__(self, logit: float, device: torch.device) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((1,), float(logit), device=device))

    def forward(self, entered: Tensor, left: Tensor) -> Tensor:
        """sigmoid(g) * left + (1 - sigmoid(g)) * entered."""
        gate = self.weight.sigmoid().to(left.dtype)
        return gate * left + (1 - gate) * entered


class PromptLayer(HookedLayer):
    """Prompts at one block L_i, whose input is the class token x and the patches E (VPT, equations 4 to 6):

        deep:     [x_i, _, E_i] = L_i([x_(i-1), P_(i-1), E_(i-1)])           P_(i-1) trained, for every block
        shallow:  [x_i, Z_i, E_i] = L_i([x_(i-1), Z_(i-1), E_(i-1)])         Z_0 = P trained, for the first alone

    and behind the last block the prompts are dropped, so that a head that pools tokens pools the image's own.
    """

    def __init__(self, host: nn.Module) -> None:
        super().__init__(host)
        for name in self.adapter_layer_names:
            setattr(self, name, nn.ModuleDict())

    @property
    def prompts(self) -> nn.ModuleDict:
        """The prompts by adapter."""
        return getattr(self, self.adapter_layer_names[0])

    def update_layer(self, adapter_name: str, place: Place) -> None:
        self.prompts[adapter_name] = Prompts(place, self.initial(place) if place.enters else None)

    def initial(self, place: Place, generator: torch.Generator | None = None) -> Tensor:
        """The prompts' first values; VPT's are uniform within sqrt(6 / (patch size + hidden size))."""
        config: TokenPromptConfig = place.config
        weight = torch.zeros(config.num_prompt_tokens, place.hidden_size, device="cpu")
        if config.initial == "xavier":
            bound = math.sqrt(6 / (place.fan + place.hidden_size))
            weight.uniform_(-bound, bound, generator=generator)
        elif config.initial == "normal":
            weight.normal_(std=NORMAL, generator=generator)
        return like(self.host, weight)

    def before(self, host: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Put the prompts in, where they enter; make room for them in a mask."""
        prompts = self.current()
        if prompts is None:
            return None
        args = (*args[:1], *(_widened(prompts, value) for value in args[1:]))
        kwargs = {name: _widened(prompts, value) if name in MASKS else value for name, value in kwargs.items()}
        return on_first_tensor(prompts.enter, args, kwargs) if prompts.place.enters else (args, kwargs)

    def after(self, host: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        """Take the prompts out, where they leave."""
        prompts = self.current()
        if prompts is None or not prompts.place.leaves:
            return output
        before, _, after = prompts.split(output)
        return torch.cat((before, after), dim=1)

    def current(self) -> Prompts | None:
        """The prompts that take part in a forward pass; None where adapters are disabled or have none here."""
        names = self.running()
        if len(names) > 1:
            raise InlayError(f"Prompts of one adapter at a time, not of {', '.join(names)}: call set_adapter.")
        return self.prompts[names[0]] if names else None


class VPTPromptLayer(PromptLayer):
    """Prompts at one block, and GateVPT's gate on how much it changes those that run through (Yoo et al., section 4):

        [x_i, Z', E_i] = L_i([x_(i-1), Z_(i-1), E_(i-1)]),      Z_i = sigmoid(g_i) Z' + (1 - sigmoid(g_i)) Z_(i-1)

    for every block but the last, behind which the prompts are dropped.
    """

    adapter_layer_names = ("inlay_vpt_prompts", "inlay_vpt_gate")

    def update_layer(self, adapter_name: str, place: Place) -> None:
        super().update_layer(adapter_name, place)
        if place.config.gated and not place.leaves:
            weight = next(self.host.parameters())
            self.inlay_vpt_gate[adapter_name] = Gate(place.config.gate_initial, weight.device)

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

    def __init__(self, host: nn.Module) -> None:
        super().__init__(host)
        self.inlay_vpt_temperature = nn.ModuleDict()

    def update_layer(self, adapter_name: str, config: VPTConfig) -> None:
        self.inlay_vpt_temperature[adapter_name] = Temperature(next(self.host.parameters()).device)

    def attend(
        self, previous: Attend, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        for name in self.running():
            query = self.inlay_vpt_temperature[name](query)
        return previous(self.host, query, key, value, mask, **kwargs)


MASKS = ("attention_mask", "attn_mask")


def _widened(prompts: Prompts, value: Any) -> Any:
    return prompts.widen(value) if isinstance(value, Tensor) and value.ndim > 2 else value


def like(host: nn.Module, weight: Tensor) -> Tensor:
    """`weight` where the host is, in single precision or, where the host's is double, in that."""
    own = next(parameter for parameter in host.parameters() if parameter.is_floating_point())
    return weight.to(own.device, torch.promote_types(own.dtype, torch.float32))
