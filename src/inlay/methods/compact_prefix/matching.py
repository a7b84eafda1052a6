"""Few keys that get the attention which a prompt got, for the queries that really come: attention matching (Zweiger et
al. 2026), without gradients.

Of one key-value head, with the queries q_i of all query heads that share it, on texts that follow the prompt; E_i is
the sum of exp(score) over the keys of the text, o_i the attention to them, and D_i the same sum over the m keys of the
prompt:

1. Keys: of `P_ij = exp(s_ij) / (E_i + D_i)`, the whole softmax's weights, the t keys with the largest `mean_i P_ij^2`;
   or by orthogonal matching pursuit of `b_i = D_i / (E_i + D_i)`, the prompt's share, in the columns of P.
2. Biases: `beta_j = log w_j` with `w = argmin_{w >= 0} |P_S w - b|^2`, S the keys that are kept: they take as large a
   share of the softmax as the prompt took.
3. Values: with `C_ij` the weights of the compact softmax, `U = argmin |C U - (T - (1 - sum_j C_ij) o)|^2`, T the
   attention to prompt and text: they give the output that the prompt gave. Pulled a little towards the kept keys' own
   values.

It goes through the layers in one pass over the texts: a layer is matched at the queries that come when the layers below
it answer by their compact prefixes already, so that it makes up for what they lost. Heads that need more keys get more
(`budgets`), as a pass before has seen them attend.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from inlay.anatomy import Block
from inlay.attention import attention_with_lse, prefix_attention
from inlay.attention.call import without_autocast
from inlay.errors import InlayError
from inlay.methods.attention_interface import Attend, AttentionLayer
from inlay.methods.compact_prefix.config import CompactPrefixConfig
from inlay.methods.compact_prefix.layer import CompactPrefix, PrefixStart
from inlay.methods.compact_prefix.start import made
from inlay.methods.prompts import Prompt
from inlay.methods.protocol import Passes

MOST_QUERIES = 4096
"""Of a key-value head: more change nothing that can be seen, and the scores of all would fill the memory."""
RIDGE = 1e-3
"""How much values are pulled towards their own, relative to the mean diagonal."""
LEAST_WEIGHT = 1e-4
"""Of a key: one that the squares would drop keeps a bias that distillation can move."""
ROUNDS = 600
LEAST_KEYS = 4
MOST_SHARE = 4
"""A head has between `LEAST_KEYS` and `MOST_SHARE` times as many keys as the mean."""
CANDIDATES = 512
"""Keys that a pursuit looks at, those with the most attention."""
STEPS = 32
"""Rounds of a pursuit: it takes several keys in each."""

Places = Mapping[str, tuple[Block, CompactPrefix]]


@dataclass(frozen=True)
class HeadQueries:
    """What the queries of one key-value head see: `query` `[n, d]`, the log-sum-exp over the text's keys and attention
    to them, `log_text` `[n]` and `of_text` `[n, d]`, and the prompt's `scores` `[n, m]`."""

    query: Tensor
    log_text: Tensor
    of_text: Tensor
    scores: Tensor
    unmasked: Tensor | None = None
    """The scores without what a sliding window hides: every query sees the whole compact prefix."""

    def on(self, device: str) -> HeadQueries:
        """The same on another device."""
        query, log_text, of_text, scores = (
            x.to(device) for x in (self.query, self.log_text, self.of_text, self.scores)
        )
        unmasked = None if self.unmasked is None else self.unmasked.to(device)
        return HeadQueries(query, log_text, of_text, scores, unmasked)

    @cached_property
    def log_whole(self) -> Tensor:
        """log (E + D)."""
        return torch.logaddexp(self.log_text, self.scores.logsumexp(-1))

    @cached_property
    def weights(self) -> Tensor:
        """P."""
        return (self.scores - self.log_whole[:, None]).exp_()


def fit(
    config: CompactPrefixConfig, places: Places, prompt: Prompt, passes: Passes, tick: Callable[[], None]
) -> dict[str, list[int]]:
    """Match all places of an adapter, at the first batch of the passes; how many keys each head got."""
    lengths = {name: prompt.keys_and_values(block.index)[0].shape[1] for name, (block, _) in places.items()}
    if config.budgets == "unequal":
        with _watching(places, [KeyImportance(p, b, prompt, tick) for b, p in places.values()]) as watchers:
            _run(watchers, passes)
        found = {name: watcher.mean_squares for name, watcher in zip(places, watchers, strict=True)}
        sizes = shared_out(found, config.size)
    else:
        heads = {name: len(prefix.sizes) for name, (_, prefix) in places.items()}
        sizes = {name: [min(config.size, lengths[name])] * heads[name] for name in places}
    made_here = [Matching(prefix, block, prompt, tick, config, sizes[name]) for name, (block, prefix) in places.items()]
    with _watching(places, made_here) as watchers:
        _run(watchers, passes)
        for name, watcher in zip(places, watchers, strict=True):
            if not watcher.done:
                raise InlayError(f"No text passed {name}: the prompt cannot be matched there. Give texts (--texts).")
    return sizes


def shared_out(importance: Mapping[str, Tensor], size: int) -> dict[str, list[int]]:
    """How many keys each head gets, `size` on average: those that matter most of all heads', `[kv_heads, m]` each."""
    flat = {name: found.sort(-1, descending=True)[0] for name, found in importance.items()}
    limits = {name: (min(LEAST_KEYS, size, found.shape[1]), found.shape[1]) for name, found in flat.items()}
    most = {name: min(limits[name][1], MOST_SHARE * size) for name in flat}
    room = sum(min(size, limits[name][1]) * len(found) for name, found in flat.items())
    room -= sum(limits[name][0] * len(found) for name, found in flat.items())
    optional = [found[:, limits[name][0] : most[name]].flatten() for name, found in flat.items()]
    ranked = torch.cat([part.double().cpu() for part in optional]).argsort(descending=True, stable=True)
    taken = torch.zeros(len(ranked), dtype=torch.long)
    taken[ranked[:room]] = 1
    found_sizes, begin = {}, 0
    for name, found in flat.items():
        width = most[name] - limits[name][0]
        part = taken[begin : begin + width * len(found)].view(len(found), width)
        found_sizes[name] = [limits[name][0] + int(count) for count in part.sum(-1)]
        begin += width * len(found)
    return found_sizes


# ---- one head


def match(
    seen: HeadQueries, key: Tensor, value: Tensor, whole: Tensor, count: int, choice: str, bias: bool = True
) -> tuple[Tensor, Tensor, Tensor]:
    """Keys `[count, d]`, values `[count, d]` and biases `[count]` for the prompt's; `whole` is T."""
    if key.device.type == "mps":  # it has no float64
        found = match(seen.on("cpu"), key.cpu(), value.cpu(), whole.cpu(), count, choice, bias)
        return found[0].to(key), found[1].to(value), found[2].to(key)
    weights = seen.weights
    share = weights.sum(-1)
    kept = by_pursuit(weights, share, count) if choice == "pursuit" else by_attention(weights, count)
    columns = weights[:, kept].double()
    if bias:
        mass = non_negative(columns.mT @ columns, columns.mT @ share.double()).clamp(min=LEAST_WEIGHT)
        biases = mass.log().to(key.dtype)
    else:
        biases = torch.zeros(count, dtype=key.dtype, device=key.device)
    scores = (seen.scores if seen.unmasked is None else seen.unmasked)[:, kept] + biases
    log_whole = torch.logaddexp(seen.log_text, scores.logsumexp(-1))
    compact = (scores - log_whole[:, None]).exp().double()
    of_text = (seen.log_text - log_whole).exp()[:, None] * seen.of_text
    own = value[kept].double()
    squares = compact.mT @ compact
    ridge = RIDGE * squares.diagonal().mean().clamp(min=torch.finfo(torch.float64).tiny)
    squares = squares + ridge * torch.eye(count, dtype=torch.float64, device=key.device)
    missing = (whole - of_text).double() - compact @ own
    values = own + torch.linalg.solve(squares, compact.mT @ missing)
    return key[kept], values.to(value.dtype), biases


def by_attention(weights: Tensor, count: int) -> Tensor:
    """The keys with the largest mean square weight, in their order."""
    return weights.square().mean(0).topk(count).indices.sort().values


def by_pursuit(weights: Tensor, share: Tensor, count: int) -> Tensor:
    """The keys whose weights, each times a number of at least 0, add up best to the share, in their order."""
    among = by_attention(weights, min(weights.shape[1], max(CANDIDATES, count)))
    columns = weights[:, among]
    squares, wanted = (columns.mT @ columns).double(), (columns.mT @ share).double()
    size = squares.diagonal().sqrt().clamp(min=torch.finfo(torch.float64).tiny)
    chosen = torch.zeros(len(among), dtype=torch.bool, device=weights.device)
    rest = wanted
    step = math.ceil(count / STEPS)
    while (have := int(chosen.sum())) < count:
        more = (rest / size).masked_fill(chosen, -torch.inf).topk(min(step, count - have)).indices
        chosen[more] = True
        at = chosen.nonzero()[:, 0]
        mass = non_negative(squares[at][:, at], wanted[at], rounds=ROUNDS // 6)
        rest = wanted - squares[:, at] @ mass
    return among[chosen]


def non_negative(squares: Tensor, wanted: Tensor, rounds: int = ROUNDS) -> Tensor:
    """`argmin_{w >= 0} w^T G w / 2 - b^T w` by accelerated projected gradients, G scaled to a diagonal of 1."""
    size = squares.diagonal().sqrt().clamp(min=torch.finfo(squares.dtype).tiny)
    scaled, target = squares / size[:, None] / size, wanted / size
    step = 1 / scaled.abs().sum(-1).max().clamp(min=1)
    found = torch.full_like(target, 1.0) * size  # every key once, as in the prompt
    ahead, pace = found, 1.0
    for _ in range(rounds):
        new = (ahead - step * (scaled @ ahead - target)).clamp(min=0)
        if float((ahead - new) @ (new - found)) > 0:  # it overshot: begin the acceleration again
            pace = 1.0
        quicker = (1 + math.sqrt(1 + 4 * pace**2)) / 2
        ahead = new + (pace - 1) / quicker * (new - found)
        found, pace = new, quicker
    return found / size


# ---- one layer


class TextWatcher(AttentionLayer):
    """Takes part in one attention while texts run behind the prompt; it is asked first, whatever else hangs there.

    The keys that come are the text's, or the prompt's and the text's where the prompt lies in a cache. `real` marks the
    tokens of a batch that are not padding.
    """

    child = "inlay_fit"

    def __init__(self, prefix: CompactPrefix, block: Block, prompt: Prompt, tick: Callable[[], None]) -> None:
        assert block.attention is not None
        super().__init__(block.attention.module)
        # In a tuple, which hides them from nn.Module: the prefix belongs to the adapter.
        self._of = prefix, block, prompt
        self.tick = tick
        self.real: Tensor | None = None

    @property
    def prefix(self) -> CompactPrefix:
        """Of the adapter."""
        return self._of[0]

    def running(self) -> list[str]:
        return [self.child]

    @torch.no_grad()
    def seen(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None
    ) -> Iterator[tuple[HeadQueries, Tensor, Tensor, Tensor]]:
        """Of each key-value head: what its queries see, the prompt's keys and values, and T."""
        length, before = query.shape[2], key.shape[2] - query.shape[2]
        if before:
            prompt_key, prompt_value = key[0, :, :before], value[0, :, :before]
        else:
            prompt_key, prompt_value = self._of[2].keys_and_values(self._of[1].index)
        causal = mask is None
        hidden = _hidden(mask, before, query)
        own = None if mask is None else mask[..., -length:]
        of_text, log_text = attention_with_lse(
            query, key[:, :, before:], value[:, :, before:], attn_mask=own, is_causal=causal, scale=scale
        )
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        groups = query.shape[1] // prompt_key.shape[0]
        real = torch.ones_like(query[:, 0, :, 0], dtype=torch.bool) if self.real is None else self.real
        rows = real.flatten().nonzero()[:, 0]
        most = max(1, MOST_QUERIES // groups)
        rows = rows[torch.linspace(0, len(rows) - 1, min(most, len(rows)), device=rows.device).long()]
        for head in range(len(prompt_key)):
            taken = [x[:, head * groups : (head + 1) * groups].transpose(0, 1) for x in (query, log_text, of_text)]
            q, e, o = (x.flatten(1, 2)[:, rows].flatten(0, 1).to(log_text.dtype) for x in taken)
            k, v = prompt_key[head].to(q), prompt_value[head].to(q)
            scores, unmasked = q @ k.mT * scale, None
            if hidden is not None:
                unmasked = scores
                scores = scores.masked_fill(hidden.flatten(0, 1)[rows].repeat(groups, 1), -torch.inf)
            found = HeadQueries(q, e, o, scores, unmasked)
            yield found, k, v, (e - found.log_whole).exp()[:, None] * o + found.weights @ v


def _hidden(mask: Tensor | None, before: int, query: Tensor) -> Tensor | None:
    """Which of the prompt's keys a query must not see, (rows, tokens, m): those that a sliding window left behind."""
    if mask is None or not before:
        return None
    part = mask[:, 0, :, :before]
    part = ~part if part.dtype == torch.bool else part < -1e4
    return part.expand(query.shape[0], query.shape[2], before) if part.any() else None


class KeyImportance(TextWatcher):
    """How much each key of the prompt weighs: `mean_i P_ij^2`; changes nothing."""

    mean_squares: Tensor

    def attend(
        self, previous: Attend, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        with without_autocast(query):
            views = self.seen(query, key, value, mask, kwargs.get("scaling"))
            self.mean_squares = torch.stack([seen.weights.square().mean(0) for seen, *_ in views])
        self.tick()
        return previous(self.host, query, key, value, mask, **kwargs)


class Matching(TextWatcher):
    """Matches its layer at the first batch that comes, and answers by the compact prefix."""

    def __init__(
        self,
        prefix: CompactPrefix,
        block: Block,
        prompt: Prompt,
        tick: Callable[[], None],
        config: CompactPrefixConfig,
        sizes: Sequence[int],
    ) -> None:
        super().__init__(prefix, block, prompt, tick)
        self.config, self.sizes = config, sizes
        self.done = False

    def attend(
        self, previous: Attend, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        block, before = self._of[1], key.shape[2] - query.shape[2]
        assert block.attention is not None
        with without_autocast(query):
            views = zip(self.seen(query, key, value, mask, kwargs.get("scaling")), self.sizes, strict=True)
            parts = [
                match(seen, k, v, whole, size, self.config.choice, self.config.biases)
                for (seen, k, v, whole), size in views
            ]
        keys, values, biases = (torch.cat(part) for part in zip(*parts, strict=True))
        start: PrefixStart = made(self.config, block.attention, keys, values, biases, self.sizes)
        self.prefix.begin(start)
        self.done = True
        self.tick()
        prefix_key, prefix_value, prefix_bias = self.prefix()
        output = prefix_attention(
            query,
            key[:, :, before:],
            value[:, :, before:],
            prefix_key,
            prefix_value,
            prefix_bias=prefix_bias,
            attn_mask=None if mask is None else mask[..., -query.shape[2] :],
            is_causal=mask is None,
            scale=kwargs.get("scaling"),
        )
        return output.transpose(1, 2).contiguous(), None


@contextmanager
def _watching(places: Places, watchers: Sequence[Any]) -> Iterator[Sequence[Any]]:
    """Let them take part; afterwards the model is as it was."""
    attached: list[TextWatcher] = []
    try:
        for watcher in watchers:
            setattr(watcher.host, TextWatcher.child, watcher)
            attached.append(watcher)
            watcher.attach()
        yield watchers
    finally:
        for watcher in attached:
            watcher.detach()
            delattr(watcher.host, TextWatcher.child)


def _run(watchers: Sequence[TextWatcher], passes: Passes) -> None:
    """The first batch."""
    for real, run in passes():
        for watcher in watchers:
            watcher.real = real
        run()
        return
