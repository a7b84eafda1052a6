"""Where the prompts of InfoPrompt stand in a batch of texts, and whether its rows have the places for them.

A batch of L tokens a row becomes one of S = L + n_p slots. Every row has the same number of prompts, each row its own
places. The shapes never depend on what the tensors hold, so that all of it can be compiled. To launch one of these
small operations on a GPU takes as long as to launch a large one: there are as few as can be.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from inlay.backbones.pooled import first_of, last_of, pool
from inlay.errors import InlayError
from inlay.methods.infoprompt.phi import Batch
from inlay.methods.infoprompt.pieces import Site

TENSORS = ("input_ids", "attention_mask", "token_type_ids", "position_ids")


@dataclass(frozen=True)
class Slots:
    """The slots of the tokens (B x L) and of the prompts (B x n_p), in order."""

    tokens: Tensor
    prompts: Tensor

    @classmethod
    def of(cls, prompt: Tensor, count: int) -> Slots:
        """From the mask of the prompts' slots, B x S, of which every row has `count`."""
        order = prompt.byte().sort(dim=1, stable=True).indices
        length = prompt.shape[1] - count
        return cls(order[:, :length], order[:, length:])

    @classmethod
    def inserted(cls, where: Tensor, length: int) -> Slots:
        """For prompts that go before the tokens `where` (B x n_p) of the `length` in a row; that number: at the end."""
        token = torch.arange(length, device=where.device)
        rank = torch.arange(where.shape[1], device=where.device)
        return cls(token + (where.unsqueeze(2) <= token).sum(1), where.sort(dim=1).values + rank)

    @property
    def shape(self) -> tuple[int, int]:
        """B, S."""
        rows, length = self.tokens.shape
        return rows, length + self.prompts.shape[1]

    def _place_and_source(self) -> tuple[Tensor, Tensor]:
        """The number of each slot, S, and the token there or, where a prompt stands, after it, B x S."""
        place = torch.arange(self.shape[1], device=self.tokens.device)
        before = (self.prompts.unsqueeze(1) < place.unsqueeze(1)).sum(2)
        return place, (place - before).clamp(max=self.tokens.shape[1] - 1)

    def spread(self, values: Tensor, at_prompts: float) -> Tensor:
        """B x L values over the slots; `at_prompts` where the prompts stand."""
        return values.new_full(self.shape, at_prompts).scatter_(1, self.tokens, values)

    def like_the_next(self, values: Tensor) -> Tensor:
        """B x L values over the slots; a prompt has what the token after it has."""
        return values.gather(1, self._place_and_source()[1])

    def positions(self, given: Tensor) -> Tensor:
        """Positions that were given for the tokens, moved on by the prompts before them."""
        place, source = self._place_and_source()
        return given.expand(len(source), -1).gather(1, source) + place - source

    def without(self, states: Tensor) -> Tensor:
        """B x S x ... of all slots -> B x L x ... of the tokens."""
        index = self.tokens.reshape(*self.tokens.shape, *(1,) * (states.ndim - 2))
        return states.gather(1, index.expand(-1, -1, *states.shape[2:]))

    def of_tokens(self, places: Tensor) -> Tensor:
        """The slots of one token a row (B)."""
        return self.tokens.gather(1, places.unsqueeze(1)).squeeze(1)

    def put(self, prompts: Tensor, embedded: Tensor) -> Tensor:
        """B x S x D of embedded slots with the prompts (B x n_p x D) in theirs."""
        index = self.prompts.unsqueeze(-1).expand(-1, -1, prompts.shape[-1])
        return embedded.scatter(1, index, prompts.to(embedded.dtype))


def within(real: Tensor) -> Tensor:
    """B x L: the real tokens less the first and the last of each row."""
    inner = real[:, :-2] & real[:, 1:-1] & real[:, 2:]
    return pad(inner, (1, real.shape[1] - 1 - inner.shape[1]))


def usual_places(real: Tensor, masks: Tensor | None, count: int, *, causal: bool) -> Tensor:
    """Before which tokens `count` prompts go (B x count) in texts without places of their own.

    With a mask: before it, after the first token, after the mask, before the last token. Without: before the last token
    and after the first. In a causal model after the first alone: no token sees what comes after it, and between a text
    and the token where its class is read they seem to do harm. More prompts go round these places again.
    """
    begin, last = first_of(real) + 1, last_of(real)
    if causal:
        places = [begin]
    elif masks is None:
        places = [torch.maximum(last, begin).minimum(last + 1), begin]
    else:
        places = [masks, begin, masks + 1, torch.maximum(last, begin)]
    return torch.stack([places[i % len(places)] for i in range(count)], dim=1)


def read(states: Tensor, real: Tensor | None, how: str, masks: Tensor | None = None) -> Tensor:
    """One state a row (B x H) of B x S x H: at the mask, of the first or last real slot, or the real ones' mean."""
    if how == "mask":
        assert masks is not None
        return states.gather(1, masks[:, None, None].expand(-1, 1, states.shape[-1])).squeeze(1)
    assert real is not None
    return pool(states, real, how)


# ---- the batch


def texts_in(kwargs: dict[str, Any], root: nn.Module) -> Batch:
    """The tensors of B x L that describe the texts."""
    if kwargs.get("input_ids") is None:
        raise InlayError(
            f"{type(root).__name__} with prompts in the text reads input_ids, not inputs_embeds: places are "
            "found by the tokens."
        )
    found = {name: kwargs[name] for name in TENSORS if kwargs.get(name) is not None}
    for name, value in found.items():
        if value.ndim != 2:
            raise InlayError(f"{name} has shape {tuple(value.shape)}: give a row a text, B x L.")
    rows = len(found["input_ids"])
    return {name: value.expand(rows, -1) for name, value in found.items()}


def with_room(batch: Batch, slots: Slots, filler: int) -> Batch:
    """The same tensors with room for the prompts, where the ids have the token `filler`."""
    made = {"input_ids": slots.spread(batch["input_ids"], filler)}
    if "attention_mask" in batch:
        made["attention_mask"] = slots.spread(batch["attention_mask"], 1)
    if "token_type_ids" in batch:
        made["token_type_ids"] = slots.like_the_next(batch["token_type_ids"])
    if "position_ids" in batch:
        made["position_ids"] = slots.positions(batch["position_ids"])
    return made


def real_tokens(site: Site, batch: Batch) -> Tensor:
    """Which tokens are not padding, B x L."""
    if "attention_mask" in batch:
        return batch["attention_mask"].bool()
    if site.config.pad_token_id is not None:
        return batch["input_ids"] != site.config.pad_token_id
    return torch.ones_like(batch["input_ids"], dtype=torch.bool)


def first_masks(site: Site, batch: Batch) -> Tensor | None:
    """Each text's mask, where a state is read there."""
    if not reads_masks(site):
        return None
    return first_of(batch["input_ids"] == site.config.mask_token_id)


# ---- what is wrong with it


def reads_masks(site: Site) -> bool:
    """Whether a state is read at the mask."""
    return "mask" in (site.state, site.phi) and site.config.mask_token_id is not None


def waits(device: torch.device) -> bool:
    """Whether to look at what a tensor holds makes the host wait for its device."""
    return device.type != "cpu"


def _wrong(site: Site, ids: Tensor) -> tuple[Tensor, Tensor | None]:
    """Which rows (B) have a wrong number of places for prompts, and which have no mask where a state is read there."""
    wanted = site.config.num_prompt_tokens if site.config.placeholders else 0
    places = (ids < 0).sum(1) != wanted
    if not reads_masks(site):
        return places, None
    return places, (ids != site.config.mask_token_id).all(1)


def check(site: Site, ids: Tensor) -> None:
    """Refuse rows that lack a mask or a place, and those with too many places."""
    places, masks = (None if found is None else found.nonzero() for found in _wrong(site, ids))
    assert places is not None
    if len(places):
        row, placed = int(places[0]), site.config.placeholders
        hint = "encode texts with inlay.tasks.prompts.encode" if placed else "or set placeholders=True"
        raise InlayError(
            f"Row {row} of the batch has {int((ids[row] < 0).sum())} places for prompts (negative ids) and should have "
            f"{site.config.num_prompt_tokens if placed else 0}: {hint}."
        )
    if masks is not None and len(masks):
        raise InlayError(
            f"Row {int(masks[0])} of the batch has no mask token ({site.config.mask_token_id}), and Z is read there. "
            "Put {mask} into the template, or read another state: mean, first or last."
        )


def assert_right(site: Site, ids: Tensor) -> None:
    """The same without waiting: the device ends what it does, with this message, when it comes to a wrong row."""
    places, masks = _wrong(site, ids)
    right = ~(places if masks is None else places | masks).any()
    wanted = site.config.num_prompt_tokens if site.config.placeholders else 0
    needed = "" if masks is None else f" and the mask token {site.config.mask_token_id}"
    torch._assert_async(right, f"InfoPrompt: every row needs {wanted} places for prompts (negative ids){needed}")
