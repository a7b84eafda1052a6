"""The bottleneck of adapters, and where a block's feed-forward begins and ends.

Shared by the sequential adapters (Houlsby et al. 2019) and by AdaptFormer's parallel one (Chen et al. 2022).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from inlay.anatomy import Block, Part
from inlay.errors import InlayError, unknown
from inlay.methods.channels import beside

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": nn.functional.relu,
    "gelu": nn.functional.gelu,
    "silu": nn.functional.silu,
    "tanh": torch.tanh,
    "identity": lambda hidden: hidden,
}


class Projection(nn.Linear):
    """A linear layer that computes in the precision of what it is given: PEFT keeps adapters in float32."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight.to(x.dtype), self.bias.to(x.dtype))


class Bottleneck(nn.Module):
    """B(x) = W_up dropout(act(W_down x + b_down)) + b_up

    `W_down` starts at random (Kaiming, as a linear layer does) and all else at zero, so that `B = 0`; `up_std` makes
    `W_up` start from N(0, up_std^2) instead. `squeeze` and `expand` are its two halves.
    """

    def __init__(
        self,
        host: nn.Module,
        width: int,
        size: int,
        *,
        activation: str = "relu",
        dropout: float = 0.0,
        up_std: float = 0.0,
    ) -> None:
        super().__init__()
        self.down = Projection(width, size, **beside(host.weight))
        self.up = Projection(size, width, **beside(host.weight))
        self.dropout = nn.Dropout(dropout)
        self.activation = activation
        nn.init.kaiming_uniform_(self.down.weight, a=math.sqrt(5))
        nn.init.normal_(self.up.weight, std=up_std)
        nn.init.zeros_(self.down.bias)
        nn.init.zeros_(self.up.bias)

    def squeeze(self, x: Tensor) -> Tensor:
        """`dropout(act(W_down x + b_down))`."""
        return self.dropout(ACTIVATIONS[self.activation](self.down(x)))

    def expand(self, hidden: Tensor) -> Tensor:
        """`W_up hidden + b_up`."""
        return self.up(hidden)

    def forward(self, x: Tensor) -> Tensor:
        """`B(x)`."""
        return self.expand(self.squeeze(x))


def check_bottleneck(bottleneck: int, activation: str, dropout: float) -> None:
    """An error for settings that make no bottleneck."""
    if isinstance(bottleneck, bool) or not isinstance(bottleneck, int) or bottleneck < 1:
        raise InlayError(f"bottleneck={bottleneck!r} must be a whole number of at least 1, such as 64.")
    if activation not in ACTIVATIONS:
        raise unknown("activation", activation, ACTIVATIONS)
    if not 0 <= dropout < 1:
        raise InlayError(f"dropout={dropout!r} must be at least 0 and less than 1.")


def feed_forward_ends(block: Block) -> tuple[Part, Part] | None:
    """The first and the last linear layer of a block's feed-forward; None where it has none, as in a ResNet.

    They are children of one module, or, as in BERT, the last two linear layers of the block. A convolution is
    neither: ConvNeXt's feed-forward is what follows its own.
    """
    linear = [part for part in block.feed_forward if not _convolves(part.module)]
    if len(linear) < 2:
        return None
    last = linear[-1]
    siblings = [part for part in linear if part.name.rpartition(".")[0] == last.name.rpartition(".")[0]]
    return (siblings[0] if len(siblings) > 1 else linear[-2]), last


def _convolves(module: nn.Module) -> bool:
    """Also through a LoRA around it."""
    return isinstance(getattr(module, "base_layer", module), nn.modules.conv._ConvNd)
