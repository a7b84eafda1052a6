"""AdaptFormer of one block (Chen et al. 2022, section 3.2, equations 3 and 4)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from inlay.methods.adaptformer.config import AdaptFormerConfig
from inlay.methods.bottleneck import Bottleneck
from inlay.methods.channels import width_in
from inlay.methods.tuner import HookedLayer, on_first_tensor


@dataclass(frozen=True)
class BranchPlace:
    """What the layer on a feed-forward's first projection must know: the last one."""

    config: AdaptFormerConfig
    last: nn.Module


class BranchScale(nn.Module):
    """`s` of one adapter, where it is trained."""

    def __init__(self, value: float, reference: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((1,), value, dtype=reference.dtype, device=reference.device))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight.to(x.dtype)


class Branch(Bottleneck):
    """`s B(x)` of one adapter."""

    def __init__(self, host: nn.Module, config: AdaptFormerConfig) -> None:
        super().__init__(host, width_in(host), config.bottleneck, activation=config.activation, dropout=config.dropout)
        self.constant = config.scale
        self.scale = BranchScale(config.scale, self.down.weight) if config.learnable_scale else None

    def expand(self, hidden: Tensor) -> Tensor:
        expanded = super().expand(hidden)
        return expanded * self.constant if self.scale is None else self.scale(expanded)


class AdaptFormerLayer(HookedLayer):
    """Beside a block's feed-forward, which reads `x` (in a ViT the normed features, LN(x')):

        y = MLP(x) + s B(x),      B(x) = W_up relu(W_down x + b_down) + b_up = 0 at the start.

    The host is the feed-forward's first projection: `x` is taken where it enters, and what was made of it is added to
    what leaves the last projection. What waits in between is the narrow `relu(W_down x + b_down)`: `W_up` is applied
    at the end and must keep it for the backward pass, so a recomputation (gradient checkpointing) always comes as far
    as taking it, and nothing is left over.
    """

    adapter_layer_names = ("inlay_adaptformer_branch",)

    def __init__(self, host: nn.Module) -> None:
        super().__init__(host)
        self._last: tuple[nn.Module, ...] = ()  # in a tuple, as the host is
        self._waiting: dict[str, Tensor] = {}

    def attach(self) -> None:
        self._handles = [self.host.register_forward_pre_hook(self.before, with_kwargs=True)]

    def update_layer(self, adapter_name: str, place: BranchPlace) -> None:
        if not self._last:
            self._last = (place.last,)
            self._handles.append(place.last.register_forward_hook(self.after))
        self.pieces[adapter_name] = Branch(self.host, place.config)

    def before(self, host: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The forward pre-hook of the first projection."""

        def take(x: Tensor) -> Tensor:
            self._waiting = {name: self.pieces[name].squeeze(x) for name in self.running()}
            return x

        return on_first_tensor(take, args, kwargs)

    def after(self, host: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        """The forward hook of the last projection."""
        waiting, self._waiting = self._waiting, {}
        for name, hidden in waiting.items():
            output = output + self.pieces[name].expand(hidden)
        return output
