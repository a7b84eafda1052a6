"""E2VPT (Han et al. 2023) at one block: prompts that can be pruned, and prompts in the keys and values of attention."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from inlay.methods.attention_interface import Attend, AttentionLayer
from inlay.methods.channels import like
from inlay.methods.e2vpt.config import E2VPTConfig, Kept
from inlay.methods.token_prompts import TokenPlace, TokenPromptLayer, TokenPrompts


class PrunedPrompts(TokenPrompts):
    """Prompts of which pruning may have left a part (section 3.3, token-wise and segment-wise).

    The paper multiplies a prompt by a mask `rho_k` of 0 or 1, and each of its segments by another. Here a pruned prompt
    is not there: a row of zeros would still take its share of every softmax. A pruned segment is zero, since a
    token cannot lack channels. What is pruned is no parameter either: `weight` has a row for every prompt that is
    kept, with the segments of it that are.
    """

    index: Tensor

    def __init__(self, place: TokenPlace, weight: Tensor | None) -> None:
        super().__init__(place, weight)
        self.kept: Kept | None = None

    @property
    def count(self) -> int:
        """How many prompts there are, those pruned aside."""
        # Not by `super()`, whose properties torch.compile cannot read.
        return self.place.config.num_prompt_tokens if self.kept is None else len(self.kept)

    def keep(self, kept: Kept, full: Tensor | None) -> None:
        """Become the given prompts and segments of `full`, p x D; without it, of prompts that run through."""
        self.kept = kept
        if full is not None:
            index = torch.tensor([segments for _, segments in kept], device=full.device)
            self.register_buffer("index", index, persistent=False)
            self.weight = nn.Parameter(self.part(full), self.weight.requires_grad)

    def part(self, full: Tensor) -> Tensor:
        """What is kept of `full`, p x D, as `weight` holds it."""
        if self.kept is None:
            return full
        rows = full[[token for token, _ in self.kept]].unflatten(-1, (self.place.config.num_segments, -1))
        return rows.gather(1, self._positions(rows)).flatten(1)

    def tokens(self) -> Tensor:
        """The prompts that are kept, zero in the segments that are not."""
        if self.kept is None:
            return self.weight
        segments = self.place.config.num_segments
        rows = self.weight.new_zeros(len(self.kept), segments, self.place.hidden_size // segments)
        return rows.scatter(1, self._positions(rows), self.weight.unflatten(-1, (self.index.shape[1], -1))).flatten(1)

    def _positions(self, rows: Tensor) -> Tensor:
        return self.index[..., None].expand(-1, -1, rows.shape[-1])


class E2VPTPromptLayer(TokenPromptLayer):
    """Prompts at one block, as VPT has them, and the same ones again on demand: their first values are not lost."""

    adapter_layer_names = ("inlay_e2vpt_prompts",)

    def update_layer(self, adapter_name: str, place: TokenPlace) -> None:
        start = self.start(place) if place.enters else None
        prompts = PrunedPrompts(place, start)
        if place.config.kept is not None:
            prompts.keep(place.config.kept[str(place.entry)], start)
        self.pieces[adapter_name] = prompts

    def start(self, place: TokenPlace) -> Tensor:
        """The values that all prompts of this block had before training."""
        return self.initial(place, _generator(place.config, 2 * place.block))


@dataclass(frozen=True)
class AttentionPlace:
    """Which attention this is, and how wide its keys are."""

    config: E2VPTConfig
    block: int
    heads: int
    head_size: int


class KeyValuePrompts(nn.Module):
    """`P_K` and `P_V` of one adapter, each n x (H d); one set for both where they are shared."""

    def __init__(self, place: AttentionPlace, weight: Tensor) -> None:
        super().__init__()
        self.place = place
        self.weight = nn.Parameter(weight)
        self.dropout = nn.Dropout(place.config.dropout)

    def forward(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """[P_K, K] and [P_V, V], of (batch, heads, tokens, channels)."""
        heads = self.weight.unflatten(-1, (self.place.heads, -1)).transpose(1, 2).to(key.dtype)
        added = [self.dropout(one.expand(len(key), -1, -1, -1)) for one in (heads[0], heads[-1])]
        return torch.cat((added[0], key), dim=2), torch.cat((added[1], value), dim=2)


class KeyValueLayer(AttentionLayer):
    """Prompts in the keys and values of one attention (section 3.2):

        softmax(Q [P_K, K]^T / sqrt(d)) [P_V, V],      P_K = P_V where they are shared.

    Queries have none, so the number of tokens stays. A mask is widened: everyone sees the prompts.
    """

    child = "inlay_e2vpt"
    adapter_layer_names = ("inlay_e2vpt_key_value",)

    def update_layer(self, adapter_name: str, place: AttentionPlace) -> None:
        self.pieces[adapter_name] = KeyValuePrompts(place, self.start(place))

    def start(self, place: AttentionPlace) -> Tensor:
        """He's uniform values, for n x d inputs to each head, as the authors' code has them."""
        generator = _generator(place.config, 2 * place.block + 1)
        tokens = place.config.num_kv_tokens
        shape = (1 if place.config.share_key_value else 2, tokens, place.heads * place.head_size)
        bound = math.sqrt(6 / (tokens * place.head_size))
        return like(self.host, torch.zeros(shape, device="cpu").uniform_(-bound, bound, generator=generator))

    def attend(
        self, previous: Attend, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        tokens = key.shape[2]
        for name in self.running():
            key, value = self.pieces[name](key, value)
        if mask is not None:
            free = True if mask.dtype == torch.bool else 0.0
            mask = nn.functional.pad(mask, (key.shape[2] - tokens, 0), value=free)
        return previous(self.host, query, key, value, mask, **kwargs)


def _generator(config: E2VPTConfig, stream: int) -> torch.Generator:
    assert config.seed is not None  # filled in before any layer is made
    return torch.Generator().manual_seed(config.seed + stream)
