"""Trained tokens among those of an image, as visual prompt tuning (Jia et al. 2022) and E2VPT (Han et al. 2023) have.

Nothing is remembered from one block to the next: the tokens themselves carry the prompts, and each block's layer
knows where they stand. So recomputation in the backward pass and two forward passes before one backward are safe.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from inlay.anatomy import Anatomy, Block, anatomy
from inlay.errors import InlayError, unknown
from inlay.methods.attention_interface import on_interface
from inlay.methods.capabilities import alternatives
from inlay.methods.channels import like
from inlay.methods.config import InlayConfig
from inlay.methods.plain import base_of, plain_name
from inlay.methods.tuner import ChildLayer, HookedLayer, InlayTuner, on_first_tensor

INITIAL = ("xavier", "normal", "zeros")
NORMAL = 0.02
MASKS = ("attention_mask", "attn_mask")


@dataclass
class TokenPromptConfig(InlayConfig):
    """Trained tokens among those of an image.

    Prompts enter at the blocks named in `layers` and run on to the next block at which prompts enter, which replace
    them, or to the end. `layers=None` is every block where `deep`, else the first. `layers=[6]` is VPT at one
    layer: what lies before block 6 is as it was, and is no part of training.
    """

    goes_by_blocks: ClassVar[bool] = True

    layers: list[int] | None = field(
        default=None,
        metadata={"help": "Blocks at which prompts enter, counted from 1; None: all where deep, else the first."},
    )
    num_prompt_tokens: int = field(default=10, metadata={"help": "How many prompts stand beside the patches, p."})
    deep: bool = field(
        default=True, metadata={"help": "Whether blocks have prompts of their own; otherwise one set runs through."}
    )
    dropout: float = field(default=0.0, metadata={"help": "The share of the prompts' entries dropped in training."})
    initial: str = field(
        default="xavier",
        metadata={"help": "xavier: VPT's, uniform by patch and hidden size; normal: of deviation 0.02; zeros."},
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_prompt_tokens < 1:
            raise InlayError(f"num_prompt_tokens={self.num_prompt_tokens}: give at least 1; 10 and 50 are usual.")
        if not 0 <= self.dropout < 1:
            raise InlayError(f"dropout={self.dropout}: give a share from 0 to below 1.")
        if self.initial not in INITIAL:
            raise unknown("initial", self.initial, INITIAL)
        if self.layers is not None and not self.layers:
            raise InlayError("layers=[]: name a block, counted from 1, or leave it out.")
        if not self.deep and self.layers is not None and len(self.layers) > 1:
            raise InlayError(f"layers={self.layers}: one set of prompts enters at one block. Or set deep=True.")


@dataclass(frozen=True)
class TokenPlace:
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


class TokenPrompts(nn.Module):
    """`P` of one adapter at one block, p x D; without a weight where the prompts come from an earlier block."""

    weight: nn.Parameter

    def __init__(self, place: TokenPlace, weight: Tensor | None) -> None:
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


class TokenPromptLayer(HookedLayer):
    """Prompts at one block L_i, whose input is the class token x and the patches E (VPT, equations 4 to 6):

        deep:     [x_i, _, E_i] = L_i([x_(i-1), P_(i-1), E_(i-1)])           P_(i-1) trained, for every block
        shallow:  [x_i, Z_i, E_i] = L_i([x_(i-1), Z_(i-1), E_(i-1)])         Z_0 = P trained, for the first alone

    and behind the last block the prompts are dropped, so that a head that pools tokens pools the image's own.
    """

    def update_layer(self, adapter_name: str, place: TokenPlace) -> None:
        self.pieces[adapter_name] = TokenPrompts(place, self.initial(place) if place.enters else None)

    def initial(self, place: TokenPlace, generator: torch.Generator | None = None) -> Tensor:
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

    def current(self) -> TokenPrompts | None:
        """The prompts that take part in a forward pass; None where adapters are disabled or have none here."""
        names = self.running()
        if len(names) > 1:
            raise InlayError(f"Prompts of one adapter at a time, not of {', '.join(names)}: call set_adapter.")
        return self.pieces[names[0]] if names else None


def _widened(prompts: TokenPrompts, value: Any) -> Any:
    return prompts.widen(value) if isinstance(value, Tensor) and value.ndim > 2 else value


class TokenPromptTuner(InlayTuner):
    """Puts a layer on every block that prompts go through, and on the attention modules that the method asks for."""

    prompt_layer: ClassVar[type[TokenPromptLayer]]
    attention_layer: ClassVar[type[ChildLayer]]
    method: ClassVar[str]

    def attended(self, config: Any, parts: Anatomy) -> list[Block]:
        """The blocks whose attention the method takes part in."""
        raise NotImplementedError

    def _targets(self, config: TokenPromptConfig) -> list[str]:
        if config.target_modules is not None or config.exclude_modules is not None:
            raise InlayError(f"{self.method} goes by blocks: name them in layers, not in target_modules.")
        parts = self.parts()
        self._refuse_another()
        blocks = [plain_name(block.name) for block in parts.blocks[self.entries(config)[0] - 1 :]]
        attended = self.attended(config, parts)
        for block in attended:
            if block.attention is None or not on_interface(block.attention.module):
                raise InlayError(
                    f"{self.method} takes part in attention by way of Transformers' attention interface, and "
                    f"{type(base_of(self.model)).__name__} is not on it. {alternatives(self.model, self.method)}"
                )
        return blocks + [plain_name(block.attention.name) for block in attended if block.attention is not None]

    def _refuse_another(self) -> None:
        """Each takes out what stands where it put its own, and would take out the other's."""
        for module in self.model.modules():
            if isinstance(module, TokenPromptLayer) and not isinstance(module, self.prompt_layer):
                raise InlayError(
                    f"The model has prompts of another method already ({type(module).__name__}): unload them, or use "
                    "one method with more prompts."
                )

    def parts(self) -> Anatomy:
        """The model's anatomy, if it is a vision transformer with one sequence of tokens."""
        parts = anatomy(self.model)
        if parts.modality != "image" or parts.kind != "encoder":
            raise InlayError(self.refusal(self.model))
        return parts

    def entries(self, config: TokenPromptConfig) -> list[int]:
        """The blocks at which prompts enter, in order."""
        last = len(self.parts().blocks)
        entries = sorted(set(config.layers or (range(1, last + 1) if config.deep else (1,))))
        for block in entries:
            if not 1 <= block <= last:
                raise InlayError(f"layers={config.layers!r}: there is no layer {block}; the model has 1 to {last}.")
        return entries

    def layer_class(self, name: str) -> type[ChildLayer]:
        """Blocks have prompts; the other hosts are attention modules."""
        return self.prompt_layer if self._block(name) is not None else self.attention_layer

    def settings_at(self, config: TokenPromptConfig, name: str) -> Any:
        """A block's layer is told what the prompts do there."""
        block = self._block(name)
        if block is None:
            return config
        parts, entries = self.parts(), self.entries(config)
        projection = next(module for module in parts.stem.module.modules() if isinstance(module, nn.Conv2d))
        return TokenPlace(
            config=config,
            block=block,
            entry=max(entry for entry in entries if entry <= block),
            leaves=block == len(parts.blocks) or block + 1 in entries,
            leading=parts.leading_tokens,
            hidden_size=parts.hidden_size,
            fan=projection.weight[0].numel(),
        )

    def _block(self, name: str) -> int | None:
        return next((block.index for block in self.parts().blocks if plain_name(block.name) == name), None)

    @classmethod
    def refusal(cls, model: nn.Module) -> str:
        """Text models, convolutional networks, and transformers with windows."""
        parts, name = anatomy(model), type(base_of(model)).__name__
        if parts.modality == "text":
            reason = f"{name} reads text, for which there are prompt and prefix"
        elif parts.kind == "hierarchical":
            reason = f"{name} attends within windows, in which tokens beside the patches have no place"
        else:
            reason = f"{name} has a feature map and no tokens"
        return f"{cls.method} puts tokens beside an image's patches; {reason}. {alternatives(model, cls.method)}"
