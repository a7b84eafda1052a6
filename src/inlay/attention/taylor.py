"""Attention by the Taylor polynomial of exp, in time and memory linear in the length (NTK-Attention, Corollary N.3).

For query i let `mu_i` be the mean of the keys it may see, `c_i = scale q_i . mu_i` and
`x_ij = scale q_i . (k_j - mu_i)`. Then `exp(scale q_i . k_j) = exp(c_i) exp(x_ij)` holds exactly, and the backend of
order p computes

    out_i = sum_j P(x_ij) v_j / sum_j P(x_ij),   lse_i = c_i + log sum_j P(x_ij),   P(x) = sum_{n <= p} x^n / n!.

It equals attention but for `P(x) / exp(x)`; taylor_error.py bounds what follows from that. p is even: P is then
positive everywhere. In causal attention each query has a mean of its own, as the mean of all keys would tell it of
later ones. Since `x_ij = y_ij - b_i` with `y = scale q . (k - m)` and `b = scale q . (mu_i - m)` for any one m,

    P(y - b) = sum_n P_{p-n}(-b) y^n / n!     (P_n: of order n),

the same sums over keys (monomials.py) serve every query: b changes factors only. m is the mean of all keys, which keeps
y small; nothing but rounding depends on it.

Causal attention goes by chunks. Queries meet the keys of their own chunk by the masked polynomial of the scores, and
those of the chunks before by a running state. The backward pass computes all this again: one sweep forward with the
states of the keys for the gradient of queries, one sweep back with states of the queries for those of keys and values.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from inlay.attention.call import Call
from inlay.attention.features import Taylor
from inlay.attention.fused import Attended, Fused, Kernel
from inlay.attention.monomials import Factors, Monomials, Pairs, Sums, Words
from inlay.attention.term import working_type

MOST_FEATURES = 2**16
"""Beyond, exact attention is faster up to lengths of 100,000 and more."""
CHUNKS = {"cpu": (256, 256), "cuda": (256, 1024)}
"""How many queries and keys are taken at a time, by device: with up to `MANY` features, and with more."""
MANY = 1024
ROOM = {"cpu": 2**20, "cuda": 2**27}
"""How many features are held at once, by device: so many heads are taken at a time. On a CPU they fit its cache."""
LEAST = 0.01
"""P is greater: 1/2 for p = 2, 0.27 for p = 4. Where rounding says otherwise, for scores in the hundreds, the sum of P
is taken to be as much a key, and is not divided by."""


def polynomial(x: Tensor, order: int) -> Tensor:
    """`sum_{n <= order} x^n / n!`, of order 1 or more."""
    found, term = x + 1, x
    for n in range(2, order + 1):
        found = torch.addcmul(found, term, x, value=1 / n)
        term = term * x / n if n < order else term
    return found


@dataclass(frozen=True)
class View:
    """One call as the sweeps see it; n counts the heads of keys of all examples, g the query heads that share them.

    Where queries are not told apart by causality, those of one head of keys are one long row of queries (g = 1).
    """

    query: Tensor
    """`[n, g, length, d]`: scale q."""
    key: Tensor
    """`[n, keys, d]`: k - m, and 0 where hidden."""
    value: Tensor
    """`[n, keys, width]`: `[v | 1]`, and 0 where hidden; of half types filled with 0 to a multiple of 8."""
    mean: Tensor
    """m, `[n, 1, 1, d]`."""
    drift: Tensor | None
    """`mu_i - m`, `[n, 1, length, d]`; None where it is 0."""
    shift: Tensor | None
    """b, `[n, g, length, 1]`; None where it is 0."""
    lean: Tensor
    """c, `[n, g, length, 1]`; -inf where nothing is seen."""
    seen: Tensor
    """How many keys a query sees, `[n or 1, 1, length or 1, 1]`."""
    factors: Factors
    """`P_{p-n}(-b)` for n < p, each `[n, g, length, 1]`."""
    chunk: int
    heads: int
    """How many of n are to be taken at a time."""

    @classmethod
    def of(
        cls, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool, scale: float, order: int
    ) -> View:
        dtype = working_type(query.dtype)
        product = torch.bfloat16 if query.dtype == torch.bfloat16 else dtype  # powers leave the range of float16
        n, size, groups = key.shape[0] * key.shape[1], key.shape[-1], query.shape[1] // key.shape[1]
        z = (query.to(dtype) * scale).to(product).reshape(n, groups if causal else 1, -1, size)
        k = key.to(dtype).reshape(n, -1, size)
        v = _with_ones(value.to(product).reshape(n, *value.shape[2:]))
        seen = torch.ones_like(k[:1, :, :1])
        if mask is not None:
            visible = mask.expand(*key.shape[:2], 1, -1).reshape(n, -1, 1)
            k, v, seen = k.masked_fill(~visible, 0), v.masked_fill(~visible, 0), visible.to(dtype)
        mean = k.sum(1, keepdim=True) / seen.sum(1, keepdim=True).clamp(min=1)
        k = k - mean if mask is None else (k - mean) * seen
        count = (seen.cumsum(1) if causal else seen.sum(1, keepdim=True)).unsqueeze(1)
        mean, wide = mean.unsqueeze(1), z.to(dtype)
        lean = wide @ mean.mT
        drift = shift = factors = None
        if causal:
            drift = k.cumsum(1).unsqueeze(1) / count.clamp(min=1)
            shift = (wide * drift).sum(-1, keepdim=True)
            factors = [polynomial(-shift, order - n) for n in range(order)]
            lean = lean + shift
        lean = lean.masked_fill(count == 0, -torch.inf)
        return cls(z, k.to(product), v, mean, drift, shift, lean, count, factors, *_portion(size, order, query.device))

    def apart(self) -> list[View]:
        """Views of as many heads as are to be taken at a time."""
        if len(self.key) <= self.heads:
            return [self]
        return [
            View(
                self.query[here],
                self.key[here],
                self.value[here],
                self.mean[here],
                None if self.drift is None else self.drift[here],
                None if self.shift is None else self.shift[here],
                self.lean[here],
                self.seen if len(self.seen) == 1 else self.seen[here],
                None if self.factors is None else [factor[here] for factor in self.factors],
                self.chunk,
                self.heads,
            )
            for here in _chunks(len(self.key), self.heads)
        ]

    @property
    def causal(self) -> bool:
        return self.shift is not None

    @property
    def direct(self) -> bool:
        """So few keys that scores are cheaper than sums."""
        return not self.causal and self.key.shape[1] <= self.chunk

    def rows(self, x: Tensor, here: slice) -> Tensor:
        """`[n, g, length, ...]` of these queries, in one row."""
        return x[:, :, here].flatten(1, 2)

    def rows_back(self, pieces: list[Tensor]) -> Tensor:
        """The pieces of all chunks, `[n, g, length, ...]`."""
        return _joined([piece.unflatten(1, (self.query.shape[1], -1)) for piece in pieces], 2)

    def factors_of(self, here: slice) -> Factors:
        return None if self.factors is None else [self.rows(factor, here) for factor in self.factors]

    def near(self, here: slice) -> slice | None:
        """The keys that these queries meet by their scores."""
        return here if self.causal else slice(None) if self.direct else None

    def excess(self, here: slice, near: slice) -> Tensor:
        """x of these queries and keys."""
        y = self.rows(self.query, here) @ self.key[:, near].mT
        return y if self.shift is None else y.sub_(self.rows(self.shift, here))

    def hide(self, weights: Tensor) -> Tensor:
        """0 in place of what lies ahead in the chunk."""
        if self.causal:
            weights.unflatten(1, (self.query.shape[1], -1)).tril_()
        return weights

    def forwards(self, monomials: Monomials) -> Iterator[tuple[slice, Sums | None]]:
        """Chunks of queries, each with the sums over those keys that it sees and does not meet by their scores."""
        sums = None
        if not self.causal and not self.direct:
            for here in _chunks(self.key.shape[1], self.chunk):
                sums = monomials.absorb(sums, self.key[:, here], self.value[:, here])
        length = self.query.shape[2]
        for here in _chunks(length, self.chunk):
            yield here, sums
            if self.causal and here.stop < length:
                sums = monomials.absorb(sums, self.key[:, here], self.value[:, here])

    def backwards(self, monomials: Monomials, h: Tensor) -> Iterator[tuple[slice, Sums | None]]:
        """Chunks of keys, the last one first, each with the sums over the queries that see it from other chunks."""
        sums = None
        if not self.causal and not self.direct:
            for here in _chunks(self.query.shape[2], self.chunk):
                sums = monomials.absorb(sums, self.rows(self.query, here), self.rows(h, here))
        for here in reversed(_chunks(self.key.shape[1], self.chunk)):
            yield here, sums
            if self.causal and here.start:
                z = self.rows(self.query, here)
                sums = monomials.absorb(sums, z, self.rows(h, here), self.factors_of(here))


def _joined(pieces: Sequence[Tensor], dim: int = 0) -> Tensor:
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)


def _with_ones(value: Tensor) -> Tensor:
    value = pad(value, (0, 1), value=1.0)
    return pad(value, (0, -value.shape[-1] % 8)) if value.dtype.itemsize == 2 else value


def _portion(size: int, order: int, device: torch.device) -> tuple[int, int]:
    """How many rows, and of how many heads, are taken at a time."""
    kind = device.type if device.type in CHUNKS else "cuda"
    features = Taylor(order).dimension(size)
    chunk = CHUNKS[kind][features > MANY]
    return chunk, max(1, ROOM[kind] // (chunk * features))


def _chunks(length: int, chunk: int) -> list[slice]:
    return [slice(start, min(start + chunk, length)) for start in range(0, length, chunk)]


class TaylorKernel(Kernel):
    """The two formulas of fused.py with P(x) in place of exp(x)."""

    one_size = False

    def __init__(self, order: int) -> None:
        self.order = order

    def shares_keys(self, query: Tensor, key: Tensor, mask: Tensor | None, is_causal: bool) -> bool:
        return True

    def monomials(self, key: Tensor) -> Monomials:
        return Pairs(key) if self.order == 2 else Words(self.order, key)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        is_causal: bool,
        scale: float,
        dropout_p: float,
    ) -> Attended:
        view = View.of(query, key, value, mask, is_causal, scale, self.order)
        monomials, size = self.monomials(view.key), value.shape[-1]
        found = [self._attend(part, monomials, size, query.dtype) for part in view.apart()]
        out, lse = (_joined(pieces) for pieces in zip(*found, strict=True))
        return out.reshape(*query.shape[:3], size), lse.reshape(query.shape[:3]), None, None

    def _attend(self, view: View, monomials: Monomials, size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        least = (LEAST * view.seen).masked_fill(view.seen == 0, 1).expand(view.lean.shape)
        outs, wholes = [], []
        for here, sums in view.forwards(monomials):
            total = None
            if (near := view.near(here)) is not None:
                weights = view.hide(polynomial(view.excess(here, near), self.order))
                total = weights @ view.value[:, near]
            if sums is not None:
                met = monomials.meet(view.rows(view.query, here), sums, view.factors_of(here))
                total = met if total is None else met.add_(total)
            assert total is not None
            whole = torch.maximum(total[..., size : size + 1], view.rows(least, here))
            outs.append((total[..., :size] / whole).to(dtype))
            wholes.append(whole)
        return view.rows_back(outs), view.rows_back(wholes).log() + view.lean

    def backward(
        self,
        g_out: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        lse: Tensor,
        mask: Tensor | None,
        is_causal: bool,
        scale: float,
        dropout_p: float,
        seed: Tensor | None,
        offset: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """With `h_i = exp(c_i - lse_i) [g_i | -delta_i]`, `a_ij = h_i . [v_j | 1]` and P' the P of order p - 1:

            g_value_j = sum_i P(x_ij) h_i,          g_x_ij = P'(x_ij) a_ij,
            g_c_i     = sum_j P(x_ij) a_ij,         g_b_i  = g_c_i - sum_j g_x_ij.

        m has no gradient, as nothing depends on it.
        """
        view = View.of(query, key, value, mask, is_causal, scale, self.order)
        monomials, size = self.monomials(view.key), value.shape[-1]
        dtype = view.lean.dtype
        delta = (g_out.to(dtype) * out).sum(-1, keepdim=True)
        h = torch.cat([g_out.to(dtype), -delta], -1).reshape(*view.query.shape[:3], size + 1)
        h = h * (view.lean - lse.to(dtype).reshape(view.lean.shape)).exp()
        h = pad(h, (0, view.value.shape[-1] - size - 1)).to(view.value.dtype)
        parts = view.apart()
        weights = h.split([len(part.key) for part in parts])
        found = [self._pull(part, monomials, size, own) for part, own in zip(parts, weights, strict=True)]
        g_query, g_key, g_value = (_joined(pieces) for pieces in zip(*found, strict=True))
        return (
            g_query.mul_(scale).reshape(query.shape).to(query.dtype),
            g_key.reshape(key.shape).to(key.dtype),
            g_value.reshape(value.shape).to(value.dtype),
        )

    def _pull(self, view: View, monomials: Monomials, size: int, h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients of z, keys and values."""
        dtype = view.lean.dtype
        g_key = torch.zeros_like(view.key, dtype=dtype)
        g_value = torch.zeros_like(view.value, dtype=dtype)
        found = []
        for here, sums in view.forwards(monomials):
            found.append(self._of_queries(view, monomials, here, sums, view.rows(h, here), g_key, g_value))
        g_z, g_lean, g_shift = (view.rows_back(list(pieces)) for pieces in zip(*found, strict=True))
        del found
        for here, sums in view.backwards(monomials, h):
            if sums is not None:
                k = view.key[:, here]
                g_value[:, here] += monomials.meet(k, sums)
                g_key[:, here] += monomials.slopes(k, sums, view.value[:, here], None)[0]
        g_z.addcmul_(g_lean, view.mean)
        # mu_i is a mean of keys: each of them has its share of the gradient.
        share = (g_shift * view.query).sum(1).div_(view.seen.squeeze(1).clamp(min=1))
        total = share.sum(1, keepdim=True)
        if view.drift is not None:
            g_z.addcmul_(g_shift, view.drift)
            total = share.add_(total - share.cumsum(1))  # of the queries from this key on
        visible = view.value[..., size : size + 1]
        return g_z, g_key.add_(total).mul_(visible), g_value[..., :size].mul_(visible)

    def _of_queries(
        self,
        view: View,
        monomials: Monomials,
        here: slice,
        sums: Sums | None,
        h: Tensor,
        g_key: Tensor,
        g_value: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients at z, c and b of a chunk of queries; those of the keys it meets by scores are added."""
        dtype = g_key.dtype
        z = view.rows(view.query, here)
        g_z = g_lean = g_shift = torch.zeros_like(z[..., :1], dtype=dtype)
        if (near := view.near(here)) is not None:
            x = view.excess(here, near)
            weights = view.hide(polynomial(x, self.order))
            a = view.hide(h @ view.value[:, near].mT)
            g_x = polynomial(x, self.order - 1).mul_(a)
            g_value[:, near] += weights.mT @ h
            g_key[:, near] += g_x.mT @ z
            g_z = g_z + g_x @ view.key[:, near]
            g_lean = weights.mul_(a).sum(-1, keepdim=True, dtype=dtype)
            g_shift = g_lean - g_x.sum(-1, keepdim=True, dtype=dtype)
        if sums is not None:
            factors = view.factors_of(here)
            along, values = monomials.slopes(z, sums, h, factors)
            g_z = g_z + along
            zeroth = (h * sums[0]).sum(-1, keepdim=True)
            # The sum over j of P_{p-n}(-b) y^n / n!; b has a part in c too, so that of its factor one power is left.
            powers = [*(factors or [1.0] * self.order), 1.0, 0.0]
            for n, value in enumerate((zeroth, *values)):
                g_lean = g_lean + powers[n] * value
                g_shift = g_shift + (powers[n] - powers[n + 1]) * value
        return g_z, g_lean, g_shift


class TaylorAttention(Fused):
    """Approximate, so that it is never chosen but by its name: `taylor` of order 2, `taylor-4` of order 4."""

    def __init__(self, order: int) -> None:
        self.name = "taylor" if order == 2 else f"taylor-{order}"
        self.order = order
        self.kernel = TaylorKernel(order)

    def refuses(self, call: Call) -> str | None:
        if call.dropout_p:
            return "it has no scores to drop"
        if call.prefix is not None and call.prefix.bias is not None:
            return "it has no scores to add prefix_bias to"
        if call.mask is not None and (call.mask.dtype != torch.bool or call.mask.shape[1:3] != (1, 1)):
            return "it takes a boolean mask that hides keys, [batch, 1, 1, keys], and is_causal"
        if call.is_causal and call.query.shape[2] != call.key.shape[2]:
            return f"is_causal needs as many keys as queries, not {call.key.shape[2]} and {call.query.shape[2]}"
        if call.query.numel() == 0 or call.key.numel() == 0 or call.value.numel() == 0:
            return "there is nothing to attend to"
        features = Taylor(self.order).dimension(call.query.shape[-1])
        if features > MOST_FEATURES:
            return f"order {self.order} has {features} features at head_dim {call.query.shape[-1]}"
        return None
