"""Where the prompts of InfoPrompt stand in a batch of texts: tensors in, tensors out, without a look at the values.

A batch of L tokens a row becomes one of S = L + n_p slots. Every row has the same number of prompts, each row its own
places. The shapes never depend on what the tensors hold, so that all of it can be compiled.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Slots:
    """What stands in each slot (B x S): a prompt or not, of what rank, and the token there or after it.

    `tokens` (B x L) are the slots of the tokens, in order.
    """

    prompt: Tensor
    rank: Tensor
    source: Tensor
    tokens: Tensor

    @classmethod
    def of(cls, prompt: Tensor, count: int) -> Slots:
        """From the mask of the prompts' slots."""
        before = prompt.long().cumsum(1) - prompt.long()
        place = torch.arange(prompt.shape[1], device=prompt.device).expand_as(prompt)
        length = prompt.shape[1] - count
        tokens = torch.argsort(prompt.long(), dim=1, stable=True)[:, :length]
        source = (place - before).clamp(max=length - 1)
        return cls(prompt, before.clamp(max=count - 1), source, tokens)

    @classmethod
    def inserted(cls, where: Tensor, length: int) -> Slots:
        """For prompts that go before the tokens `where` (B x n_p) of the `length` in a row; that number: at the end."""
        rows, count = where.shape
        slots = where.sort(dim=1).values + torch.arange(count, device=where.device)
        prompt = torch.zeros(rows, length + count, dtype=torch.bool, device=where.device)
        return cls.of(prompt.scatter(1, slots, True), count)

    def spread(self, values: Tensor, at_prompts: Tensor) -> Tensor:
        """B x L values over the slots; `at_prompts` (broadcast to B x S) where the prompts stand."""
        return torch.where(self.prompt, at_prompts, values.gather(1, self.source))

    def like_the_next(self, values: Tensor) -> Tensor:
        """B x L values over the slots; a prompt has what the token after it has."""
        return values.gather(1, self.source)

    def positions(self, given: Tensor) -> Tensor:
        """Positions that were given for the tokens, moved on by the prompts before them."""
        place = torch.arange(self.prompt.shape[1], device=given.device)
        return given.expand(len(self.prompt), -1).gather(1, self.source) + place - self.source

    def without(self, states: Tensor) -> Tensor:
        """B x S x ... of all slots -> B x L x ... of the tokens."""
        index = self.tokens.reshape(*self.tokens.shape, *(1,) * (states.ndim - 2))
        return states.gather(1, index.expand(-1, -1, *states.shape[2:]))

    def of_tokens(self, places: Tensor) -> Tensor:
        """The slots of one token a row (B)."""
        return self.tokens.gather(1, places.clamp(max=self.tokens.shape[1] - 1).unsqueeze(1)).squeeze(1)

    def put(self, prompts: Tensor, embedded: Tensor) -> Tensor:
        """B x S x D of embedded slots with the prompts (B x n_p x D) in theirs."""
        index = self.rank.unsqueeze(-1).expand(-1, -1, prompts.shape[-1])
        return torch.where(self.prompt.unsqueeze(-1), prompts.gather(1, index).to(embedded.dtype), embedded)


def ends(real: Tensor) -> tuple[Tensor, Tensor]:
    """The first and the last real token of each row, whichever side the padding is on."""
    place = torch.arange(real.shape[1], device=real.device)
    last = torch.where(real, place, -1).amax(1).clamp(min=0)
    first = torch.where(real, place, real.shape[1]).amin(1)
    return torch.minimum(first, last), last


def mask_at(ids: Tensor, mask: int) -> Tensor:
    """The place of each row's first mask token; the number of tokens where a row has none."""
    place = torch.arange(ids.shape[1], device=ids.device)
    return torch.where(ids == mask, place, ids.shape[1]).amin(1)


def usual_places(real: Tensor, masks: Tensor | None, count: int, *, causal: bool) -> Tensor:
    """Before which tokens `count` prompts go (B x count) in texts without places of their own.

    With a mask: before it, after the first token, after the mask, before the last token. Without: before the last token
    and after the first. In a causal model the end is the mask's place: there, and after the first token. More prompts
    go round these places again.
    """
    first, last = ends(real)
    if causal:
        places = [last + 1, first + 1]
    elif masks is None:
        places = [torch.maximum(last, first + 1).minimum(last + 1), first + 1]
    else:
        places = [masks, first + 1, masks + 1, torch.maximum(last, first + 1)]
    return torch.stack([places[i % len(places)] for i in range(count)], dim=1)


def read(states: Tensor, real: Tensor, how: str, masks: Tensor | None = None) -> Tensor:
    """One state a row (B x H) of B x S x H: at the mask, of the first or last real slot, or the real ones' mean."""
    if how == "mean":
        weight = real.to(states.dtype).unsqueeze(-1)
        return (states * weight).sum(1) / weight.sum(1).clamp(min=1)
    if how == "mask":
        assert masks is not None
        place = masks.clamp(max=states.shape[1] - 1)
    else:
        place = ends(real)[how == "last"]
    return states.gather(1, place[:, None, None].expand(-1, 1, states.shape[-1])).squeeze(1)
