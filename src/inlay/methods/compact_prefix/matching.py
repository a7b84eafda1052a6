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

A text may begin with tokens that it lacks behind the prompt: the token of beginning of Llama or Gemma. Then E and o
count these tokens' keys, T and `E' + D` do not, and what is left for the prefix is `b = 1 - E / (E' + D)`.

It goes through the layers in one pass over the texts: a layer is matched at the queries that come when the layers below
it answer by their compact prefixes already, so that it makes up for what they lost. Heads that need more keys get more
(`budgets`), as a pass before has seen them attend.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from inlay.anatomy import Block
from inlay.attention import LEAST_BIAS, attention_with_lse, prefix_attention
from inlay.attention.call import without_autocast
from inlay.errors import InlayError
from inlay.methods.attention_interface import Attend, AttentionLayer
from inlay.methods.compact_prefix.choice import by_pursuit, on_device, weights_of
from inlay.methods.compact_prefix.config import CompactPrefixConfig
from inlay.methods.compact_prefix.layer import CompactPrefix, PrefixStart
from inlay.methods.compact_prefix.start import made
from inlay.methods.prompts import Prompt
from inlay.methods.protocol import Passes
from inlay.methods.watching import watching

MOST_QUERIES = 4096
"""Of a key-value head: more change nothing that can be seen, and the scores of all would fill the memory."""
RIDGE = 1e-3
"""How much values are pulled towards their own, relative to the mean diagonal."""
LEAST_WEIGHT = 1e-4
"""Of a key: one that the squares would drop keeps a bias that distillation can move."""
LEAST_KEYS = 4
MOST_SHARE = 4
"""A head has between `LEAST_KEYS` and `MOST_SHARE` times as many keys as the mean."""
CANDIDATES = 512
"""Keys that a pursuit looks at, those with the most attention."""

Places = Mapping[str, tuple[Block, CompactPrefix]]


def fit(
    config: CompactPrefixConfig, places: Places, prompt: Prompt, passes: Passes, tick: Callable[[], None]
) -> dict[str, list[int]]:
    """Match all places of an adapter, at the first batch of the passes; how many keys each head got."""
    lengths = {name: prompt.keys_and_values(block.index)[0].shape[1] for name, (block, _) in places.items()}
    if config.budgets == "unequal":
        with watching([KeyImportance(p, b, prompt, tick) for b, p in places.values()]) as watchers:
            _run(watchers, passes)
        found = {name: watcher.mean_squares for name, watcher in zip(places, watchers, strict=True)}
        sizes = shared_out(found, config.size)
    else:
        heads = {name: len(prefix.sizes) for name, (_, prefix) in places.items()}
        sizes = {name: [min(config.size, lengths[name])] * heads[name] for name in places}
    sizes = {name: _at_most_seen(sizes[name], prompt.biases(block.index)) for name, (block, _) in places.items()}
    made_here = [Matching(prefix, block, prompt, tick, config, sizes[name]) for name, (block, prefix) in places.items()]
    with watching(made_here) as watchers:
        _run(watchers, passes)
        for name, watcher in zip(places, watchers, strict=True):
            if not watcher.done:
                raise InlayError(f"No text passed {name}: the prompt cannot be matched there. Give texts (--texts).")
    return sizes


def _at_most_seen(sizes: list[int], biases: Tensor | None) -> list[int]:
    """No head keeps more than what is not hidden: a prompt in chunks has heads of different lengths, filled up."""
    if biases is None:
        return sizes
    seen = (biases > LEAST_BIAS / 2).sum(-1).tolist()
    return [min(size, max(1, count)) for size, count in zip(sizes, seen, strict=True)]


def shared_out(importance: Mapping[str, Tensor], size: int) -> dict[str, list[int]]:
    """How many keys each head gets, `size` on average: those that matter most of all heads', `[kv_heads, m]` each."""
    flat = {name: found.sort(-1, descending=True)[0] for name, found in importance.items()}
    limits = {name: (min(LEAST_KEYS, size, found.shape[1]), found.shape[1]) for name, found in flat.items()}
    most = {name: min(limits[name][1], MOST_SHARE * size) for name in flat}
    room = sum(min(size, limits[name][1]) * len(found) for name, found in flat.items())
    room -= sum(limits[name][0] * len(found) for name, found in flat.items())
    optional = [found[:, limits[name][0] : most[name]].flatten() for name, found in flat.items()]
    ranked = torch.cat(optional).cpu().argsort(descending=True, stable=True)
    taken = torch.zeros(len(ranked), dtype=torch.long)
    taken[ranked[:room]] = 1
    found_sizes, begin = {}, 0
    for name, found in flat.items():
        width = most[name] - limits[name][0]
        part = taken[begin : begin + width * len(found)].view(len(found), width)
        found_sizes[name] = [limits[name][0] + int(count) for count in part.sum(-1)]
        begin += width * len(found)
    return found_sizes


# ---- the heads of one layer


@dataclass(frozen=True)
class HeadQueries:
    """What n queries of one key-value head see.

    `log_text` `[n]` is log E, `of_text` `[n, d]` attention to these keys; `scores` `[n, m]` are the prompt's;
    `log_whole` is log (E' + D), and `whole` `[n, d]` is T.
    """

    log_text: Tensor
    of_text: Tensor
    scores: Tensor
    log_whole: Tensor
    whole: Tensor
    leads: bool = False
    """Whether E counts keys that E' does not."""
    unmasked: Tensor | None = None
    """The scores without what a sliding window hides: every query sees the whole compact prefix."""

    @property
    def weights(self) -> Tensor:
        """P."""
        return (self.scores - self.log_whole[:, None]).exp_()


@dataclass(frozen=True)
class Candidates:
    """One head, cut down to the c keys that may be kept: `weights` `[n, c]` are their columns of P, beside them their
    scores, keys, values and biases; `share` `[n]` is b."""

    seen: HeadQueries
    weights: Tensor
    share: Tensor
    scores: Tensor
    key: Tensor
    value: Tensor
    bias: Tensor | None

    @classmethod
    def of(cls, seen: HeadQueries, key: Tensor, value: Tensor, bias: Tensor | None, count: int) -> Candidates:
        """Those with the largest mean square weight, in their order."""
        weights = seen.weights
        at = weights.square().mean(0).topk(min(count, weights.shape[1])).indices.sort().values
        share = weights.sum(-1)
        if seen.leads:
            share = (1 - (seen.log_text - seen.log_whole).exp()).clamp(min=0)
        scores = (seen.scores if seen.unmasked is None else seen.unmasked)[:, at]
        small = replace(seen, scores=scores[:, :0], unmasked=None)  # the others' scores may be large
        return cls(small, weights[:, at], share, scores, key[at], value[at], None if bias is None else bias[at])


def match(
    heads: Sequence[Candidates], counts: Sequence[int], choice: str, biases: bool = True
) -> list[tuple[Tensor, Tensor, Tensor]]:
    """For each head of a layer, its count of keys and values `[count, d]` and biases `[count]`."""
    device = heads[0].key.device
    exact = torch.device("cpu") if device.type == "mps" else device  # mps has no float64
    squares = torch.stack([head.weights.mT @ head.weights for head in heads]).to(exact).double()
    wanted = torch.stack([head.weights.mT @ head.share for head in heads]).to(exact).double()
    if choice == "pursuit":
        kept = by_pursuit(squares, wanted, counts)
    else:
        ranked = squares.diagonal(dim1=1, dim2=2).argsort(descending=True, stable=True)
        kept = [row[:count] for row, count in zip(ranked, counts, strict=True)]
    kept = [row.sort().values for row in kept]
    masses: list[Tensor | None] = [None] * len(heads)
    if biases:
        at = torch.nn.utils.rnn.pad_sequence(kept, batch_first=True)
        found = weights_of(squares, wanted, at, on_device(counts, exact)).clamp(min=LEAST_WEIGHT)
        masses = [row[:count].to(device) for row, count in zip(found, counts, strict=True)]
    return [_valued(*each) for each in zip(heads, [at.to(device) for at in kept], masses, strict=True)]


def _valued(head: Candidates, kept: Tensor, mass: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """The third step."""
    key, own, seen = head.key[kept], head.value[kept], head.seen
    bias = key.new_zeros(len(kept)) if mass is None else mass.log().to(key.dtype)
    scores = head.scores[:, kept] + bias  # which hold the prompt's own biases already
    log_whole = torch.logaddexp(seen.log_text, scores.logsumexp(-1))
    compact = (scores - log_whole[:, None]).exp()
    of_text = (seen.log_text - log_whole).exp()[:, None] * seen.of_text
    values = own + _least_squares(compact, seen.whole - of_text - compact @ own).to(own.dtype)
    return key, values, bias if head.bias is None else bias + head.bias[kept]


def _least_squares(compact: Tensor, missing: Tensor) -> Tensor:
    """`argmin_U |C U - M|^2 + ridge |U|^2`, in float64 but on a device without it."""
    exact = compact.cpu() if compact.device.type == "mps" else compact
    exact, missing = exact.double(), missing.to(exact.device).double()
    squares = exact.mT @ exact
    ridge = RIDGE * squares.diagonal().mean().clamp(min=torch.finfo(torch.float64).tiny)
    squares.diagonal().add_(ridge)
    # As in `solve`, but without a wait for the device, which would ask whether it went well.
    return torch.linalg.solve_ex(squares, exact.mT @ missing).result.to(compact.dtype).to(compact.device)


# ---- one layer


class TextWatcher(AttentionLayer):
    """Takes part in one attention while texts run behind the prompt; it is asked first, whatever else hangs there.

    The keys that come are the text's, or the prompt's and the text's where the prompt lies in a cache. `real` numbers
    the tokens of a batch that are neither padding nor the text's lead.
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
    ) -> Iterator[tuple[HeadQueries, Tensor, Tensor, Tensor | None]]:
        """Of each key-value head: what its queries see, and the prompt's keys, values and biases."""
        _, block, prompt = self._of
        # Mixed precision leaves queries and keys in float32 behind rotary embeddings, and values in half.
        exact = torch.promote_types(torch.promote_types(query.dtype, key.dtype), value.dtype)
        query, key, value = query.to(exact), key.to(exact), value.to(exact)
        lead, length, before = prompt.lead, query.shape[2], key.shape[2] - query.shape[2]
        if before:
            prompt_key, prompt_value, bias = key[0, :, :before], value[0, :, :before], None
        else:
            prompt_key, prompt_value = prompt.keys_and_values(block.index)
            bias = prompt.biases(block.index)
        hidden = _hidden(mask, before, query)
        text = _Text(query, key[:, :, before:], value[:, :, before:], None if mask is None else mask[..., -length:])
        of_text, log_text = text.attention(0, scale)
        of_own, log_own = text.attention(lead, scale) if lead else (of_text, log_text)
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        groups = query.shape[1] // prompt_key.shape[0]
        assert self.real is not None
        most = min(max(1, MOST_QUERIES // groups), len(self.real))
        rows = self.real[torch.linspace(0, len(self.real) - 1, most, device=query.device).long()]
        for head in range(len(prompt_key)):
            of_head = slice(head * groups, (head + 1) * groups)
            taken = [x[:, of_head].transpose(0, 1) for x in (query, log_text, of_text, log_own, of_own)]
            q, e, o, e_own, o_own = (x.flatten(1, 2)[:, rows].flatten(0, 1).to(log_text.dtype) for x in taken)
            k, v = prompt_key[head].to(q), prompt_value[head].to(q)
            b = None if bias is None else bias[head].to(q)
            scores, unmasked = q @ k.mT * scale, None
            scores = scores if b is None else scores + b
            if hidden is not None:
                unmasked = scores
                scores = scores.masked_fill(hidden.flatten(0, 1)[rows].repeat(groups, 1), -torch.inf)
            log_whole = torch.logaddexp(e_own, scores.logsumexp(-1))
            whole = (e_own - log_whole).exp()[:, None] * o_own + (scores - log_whole[:, None]).exp_() @ v
            yield HeadQueries(e, o, scores, log_whole, whole, bool(lead), unmasked), k, v, b


@dataclass(frozen=True)
class _Text:
    """The queries of a text, and the text's own keys, values and mask (None: each sees those before it)."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None

    def attention(self, without: int, scale: float | None) -> tuple[Tensor, Tensor]:
        """Attention and log-sum-exp, as if the first so many tokens were not there; theirs are 0."""
        query, key, value = (x[:, :, without:] for x in (self.query, self.key, self.value))
        mask = None if self.mask is None else self.mask[..., without:, without:]
        output, lse = attention_with_lse(query, key, value, attn_mask=mask, is_causal=mask is None, scale=scale)
        if not without:
            return output, lse
        return torch.nn.functional.pad(output, (0, 0, without, 0)), torch.nn.functional.pad(lse, (without, 0))


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
            self.mean_squares = torch.stack([seen.weights.square_().mean(0) for seen, *_ in views])
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
            views = self.seen(query, key, value, mask, kwargs.get("scaling"))
            among = max(CANDIDATES, *self.sizes)
            heads = [Candidates.of(seen, k, v, b, among) for seen, k, v, b in views]
            parts = match(heads, self.sizes, self.config.choice, self.config.biases)
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


def _run(watchers: Sequence[TextWatcher], passes: Passes) -> None:
    """The first batch."""
    for real, run in passes():
        numbers = real.flatten().nonzero()[:, 0]  # once for all layers: it waits for the device
        for watcher in watchers:
            watcher.real = numbers
        run()
        return
