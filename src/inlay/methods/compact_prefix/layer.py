"""A compact prefix inside one attention module."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from inlay.attention import LEAST_BIAS, prefix_attention
from inlay.errors import InlayError
from inlay.methods.loaded import LoadedParameter
from inlay.methods.softmax_layer import SoftmaxLayer

Prefix = tuple[Tensor, Tensor, Tensor | None]
"""Keys and values, `[kv_heads, t, d]` or `[rows, kv_heads, t, d]`, and a bias for every key."""


@dataclass(frozen=True)
class PrefixStart:
    """The first keys and values of one attention, `[n, d]`, head after head, and biases `[n]`, None for none;
    `sizes` says how many keys each head has, n in all."""

    keys: Tensor
    values: Tensor
    biases: Tensor | None
    sizes: tuple[int, ...]


class CompactPrefix(nn.Module):
    """The keys, values and biases of one adapter. Heads may have different numbers of keys. They are stored head after
    head, and filled up with hidden keys to the longest head when they are used."""

    place: Tensor
    hidden: Tensor

    def __init__(self, start: PrefixStart) -> None:
        super().__init__()
        self.keys = LoadedParameter(start.keys)
        self.values = LoadedParameter(start.values)
        self.biases = None if start.biases is None else LoadedParameter(start.biases)
        self._fill(start.sizes, start.keys.device)

    def begin(self, start: PrefixStart) -> None:
        """Begin again, elsewhere, and perhaps with other sizes."""
        for name in ("keys", "values", "biases"):
            part, found = getattr(self, name), getattr(start, name)
            if part is not None:
                part.weight.data = found.to(part.weight)
        self._fill(start.sizes, self.keys.weight.device)

    def _fill(self, sizes: tuple[int, ...], device: torch.device) -> None:
        """Which key lies at every place of the longest head, and where none does."""
        self.sizes = sizes
        place, hidden = _places(sizes, device)
        self.register_buffer("place", place, persistent=False)
        self.register_buffer("hidden", hidden, persistent=False)

    def forward(self) -> Prefix:
        key, value = self.keys(), self.values()
        bias = None if self.biases is None else self.biases()
        heads, most = len(self.sizes), max(self.sizes)
        if min(self.sizes) == most:
            return (
                key.view(heads, most, -1),
                value.view(heads, most, -1),
                None if bias is None else bias.view(heads, most),
            )
        if self.place.device != key.device:  # the model was made without values, on `meta`, and then loaded
            self._fill(self.sizes, key.device)
        bias = key.new_zeros(self.place.shape) if bias is None else bias[self.place]
        return key[self.place], value[self.place], bias.masked_fill(self.hidden, LEAST_BIAS)


def _places(sizes: Sequence[int], device: torch.device) -> tuple[Tensor, Tensor]:
    """For every head and place of the longest: which key lies there, and whether none does."""
    counts = torch.tensor(sizes, device=device)
    at = torch.arange(max(sizes), device=device).expand(len(sizes), -1)
    hidden = at >= counts[:, None]
    return (counts.cumsum(0) - counts)[:, None] + at.masked_fill(hidden, 0), hidden


class CompactPrefixLayer(SoftmaxLayer):
    """Of one query head, over the text's keys k_i, v_i and the t keys c_j, values u_j and biases b_j of its key head:

        T = (sum_i exp(scale q . k_i) v_i + sum_j exp(scale q . c_j + b_j) u_j)
            / (sum_i exp(scale q . k_i) + sum_j exp(scale q . c_j + b_j))

    so that key j counts as `exp(b_j)` keys. Every query sees the whole prefix. The prefixes of several running adapters
    stand one beside the other. Rows of a batch may belong to different adapters.
    """

    child = "inlay_compact"
    adapter_layer_names = ("inlay_compact_prefix",)
    mixes = True

    def __init__(self, host: nn.Module) -> None:
        super().__init__(host)
        self._kept: tuple[Any, Prefix] | None = None

    def update_layer(self, adapter_name: str, start: PrefixStart) -> None:
        self.pieces[adapter_name] = CompactPrefix(start)

    def running(self) -> list[str]:
        """In a batch of rows with adapters of their own, those that any row has."""
        names = self.row_names()
        if names is None or self._disable_adapters:
            return super().running()
        return [name for name in dict.fromkeys(names) if name in self.pieces]

    def softmax(
        self, query: Tensor, key: Tensor, value: Tensor, dropout_p: float, shares: bool, **how: Any
    ) -> tuple[Tensor, Tensor | None]:
        prefix_key, prefix_value, bias = self._prefix(query)
        prefix = {"prefix_key": prefix_key, "prefix_value": prefix_value, "prefix_bias": bias}
        output = prefix_attention(query, key, value, **prefix, dropout_p=dropout_p, **how)
        if not shares:
            return output, None
        # What attention to values of 1 in the text and 0 in the prefix gives.
        prefix["prefix_value"] = torch.zeros_like(prefix_key[..., :1])
        return output, prefix_attention(query, key, torch.ones_like(key[..., :1]), **prefix, **how)

    def _prefix(self, query: Tensor) -> Prefix:
        """What the rows see. In a pass without gradients over rows of several adapters it is gathered once: `generate`
        is one pass, all its tokens together."""
        rows = self.row_names()
        if rows is None:
            return self._made(self.running(), None)
        if len(rows) != len(query):
            raise InlayError(
                f"adapter_names has {len(rows)} names, and a layer was given {len(query)} rows. Give one name for each "
                "row; a model that divides or joins rows inside runs one adapter at a time."
            )
        if torch.is_grad_enabled() or torch.compiler.is_compiling():
            return self._made(self.running(), rows)
        kept = self._kept
        if kept is None or kept[0] is not self._mixed or kept[1][0].dtype != query.dtype:
            key, value, bias = self._made(self.running(), rows)
            kept = self._kept = self._mixed, (key.to(query.dtype), value.to(query.dtype), bias)
        return kept[1]

    def end_pass(self) -> None:
        self._kept = None

    def _made(self, names: list[str], rows: list[str] | None) -> Prefix:
        each = {name: self.pieces[name]() for name in names}
        if rows is None:
            return _joined(list(each.values()), -2) if len(each) > 1 else each[names[0]]
        known = _filled([*each.values(), _nothing(next(iter(each.values())))])
        order = {name: place for place, name in enumerate(names)}
        index = torch.tensor([order.get(name, len(names)) for name in rows], device=known[0].device)
        key, value, bias = (part[index] for part in known)
        return key, value, bias


def _joined(prefixes: Sequence[Prefix], dim: int) -> Prefix:
    """Of several adapters, one behind the other."""
    keys, values, biases = zip(*prefixes, strict=True)
    if all(bias is None for bias in biases):
        return torch.cat(keys, dim), torch.cat(values, dim), None
    return torch.cat(keys, dim), torch.cat(values, dim), torch.cat([_bias(prefix) for prefix in prefixes], dim + 1)


def _filled(prefixes: Sequence[Prefix]) -> tuple[Tensor, Tensor, Tensor]:
    """Of several adapters, as rows of one tensor, filled up with hidden keys to the longest."""
    most = max(prefix[0].shape[1] for prefix in prefixes)
    found: tuple[list[Tensor], list[Tensor], list[Tensor]] = [], [], []
    for prefix in prefixes:
        more = most - prefix[0].shape[1]
        found[0].append(nn.functional.pad(prefix[0], (0, 0, 0, more)))
        found[1].append(nn.functional.pad(prefix[1], (0, 0, 0, more)))
        found[2].append(nn.functional.pad(_bias(prefix), (0, more), value=LEAST_BIAS))
    return torch.stack(found[0]), torch.stack(found[1]), torch.stack(found[2])


def _bias(prefix: Prefix) -> Tensor:
    return prefix[0].new_zeros(prefix[0].shape[:-1]) if prefix[2] is None else prefix[2]


def _nothing(like: Prefix) -> Prefix:
    """A hidden key, for rows without an adapter."""
    key, value = (part.new_zeros(part.shape[0], 1, part.shape[2]) for part in like[:2])
    return key, value, key.new_full(key.shape[:2], LEAST_BIAS)
