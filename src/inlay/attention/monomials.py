"""Sums over keys from which polynomials of scores are computed without meeting the keys again.

The monomials phi_n of degree n satisfy `phi_n(z) . phi_n(k) = (z . k)^n / n!`. Over rows k_j with weights h_j (values,
or gradients where the rows are queries) let

    S_0 = sum_j h_j  [n, 1, width],    S_n = sum_j phi_n(k_j) h_j  [n, features, width]    (n = 1..p).

Then `phi_n(z) S_n = sum_j (z . k_j)^n / n! h_j`. Rows are `[n, rows, size]`, the first n counting the heads of keys of
all examples. Sums are held in float32 or more, and products are made in the type of z.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from math import comb

import torch
from torch import Tensor

from inlay.attention.term import working_type

Sums = list[Tensor]
"""S_0, S_1, ..., S_p."""
Factors = Sequence[Tensor] | None
"""What multiplies degree 0, 1, ..., p - 1 of each row, `[n, rows, 1]`; degree p has 1, and None is 1 for all."""


def times(x: Tensor, factors: Factors, degree: int) -> Tensor:
    return x if factors is None or degree == len(factors) else x * factors[degree]


def side_by_side(pairs: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """The products of pairs `[..., a, 1]` and `[..., 1, b]`, each as a row of a b, one after the other."""
    if torch.compiler.is_compiling():
        return torch.cat([(left * right).flatten(-2) for left, right in pairs], -1)
    # Written where they belong: joining them would take as long again as making them.
    sizes = [left.shape[-2] * right.shape[-1] for left, right in pairs]
    left, _ = pairs[0]
    found = left.new_empty(*left.shape[:-2], sum(sizes))
    for (left, right), place in zip(pairs, found.split(sizes, -1), strict=True):
        torch.mul(left, right, out=place.unflatten(-1, (left.shape[-2], right.shape[-1])))
    return found


class Monomials(ABC):
    """phi_1, ..., phi_p for vectors of one size."""

    @abstractmethod
    def levels(self, z: Tensor) -> list[Tensor]:
        """phi_1(z), ..., phi_p(z) but for constant factors."""

    def weighted(self, sums: Sums) -> Sums:
        """The sums with the constant factors that `levels` left out, squared."""
        return sums

    @abstractmethod
    def slopes(self, z: Tensor, sums: Sums, h: Tensor, factors: Factors) -> tuple[Tensor, list[Tensor]]:
        """With `f_n = phi_n(z) S_n . h`, row by row: `sum_n factors_n df_n/dz`, and f_1, ..., f_p as `[n, rows, 1]`."""

    def absorb(self, sums: Sums | None, z: Tensor, h: Tensor, factors: Factors = None) -> Sums:
        """The sums with these rows in them; given ones are overwritten."""
        dtype = working_type(z.dtype)
        new = [times(h, factors, 0).sum(1, keepdim=True, dtype=dtype)]
        new += [phi.mT @ times(h, factors, n).to(h.dtype) for n, phi in enumerate(self.levels(z), 1)]
        if sums is None:
            return [x.to(dtype) for x in new]
        return [old.add_(more) for old, more in zip(sums, new, strict=True)]

    def meet(self, z: Tensor, sums: Sums, factors: Factors = None) -> Tensor:
        """`sum_n factors_n phi_n(z) S_n` with n = 0 too, `[n, rows, width]` in the type of the sums."""
        zeroth, *rest = self.weighted(sums)
        found = times(zeroth, factors, 0)
        for n, (phi, part) in enumerate(zip(self.levels(z), rest, strict=True), 1):
            found = found + times(phi @ part.to(z.dtype), factors, n)
        return found


class Pairs(Monomials):
    """Order 2, by outer products of slices.

    Of the coordinates in four parts, each part meets itself and those after it: 5/8 of all products, where each product
    once would be 1/2 but takes a gather. Within a part each product stands twice and is divided by the root of 2.
    """

    def __init__(self, like: Tensor) -> None:
        self.size = like.shape[-1]
        self.step = -(-self.size // 4)
        self.starts = range(0, self.size, self.step)
        self.halves = like.new_ones(len(self.starts), self.size)
        for part, start in enumerate(self.starts):
            self.halves[part, start : start + self.step] = 0.5**0.5
        self.found: tuple[Tensor, Tensor] | None = None

    def levels(self, z: Tensor) -> list[Tensor]:
        halved = z.unsqueeze(-2) * self.halves
        pairs = [
            (z[..., start : start + self.step].unsqueeze(-1), halved[..., part, start:].unsqueeze(-2))
            for part, start in enumerate(self.starts)
        ]
        return [z, side_by_side(pairs)]

    def places(self) -> tuple[Tensor, Tensor]:
        """Where each of all products stands in the second level, and what it is to be multiplied by."""
        index = torch.empty(self.size, self.size, dtype=torch.long, device=self.halves.device)
        weight = torch.ones(self.size, self.size, dtype=working_type(self.halves.dtype), device=index.device)
        begin = 0
        for start in self.starts:
            own, on = slice(start, min(start + self.step, self.size)), slice(start, None)
            wide = self.size - start
            block = torch.arange(begin, begin + (own.stop - start) * wide, device=index.device).reshape(-1, wide)
            index[on, own], index[own, on] = block.mT, block
            weight[own, own] = 2**0.5
            begin += block.numel()
        return index.flatten(), weight.reshape(-1, 1)

    def square(self, second: Tensor) -> Tensor:
        """`sum_j k_j k_j^T (x) h_j`, `[n, size, size, width]`, from S_2."""
        if self.found is None:
            self.found = self.places()
        index, weight = self.found
        return (second[:, index] * weight).unflatten(1, (self.size, self.size))

    def slopes(self, z: Tensor, sums: Sums, h: Tensor, factors: Factors) -> tuple[Tensor, list[Tensor]]:
        first = h @ sums[1].to(h.dtype).mT
        # df_2/dz = M z, where M = sum_j k_j k_j^T (h_j . h) is another matrix for every row. It is never made.
        products = (z.unsqueeze(-1) * h.unsqueeze(-2)).flatten(-2)
        second = products @ self.square(sums[2]).to(h.dtype).flatten(2).mT
        # Euler: z . df_n/dz = n f_n.
        values = [(z * d).sum(-1, keepdim=True, dtype=sums[0].dtype) / n for n, d in enumerate((first, second), 1)]
        return times(first, factors, 1) + second, values


class Words(Monomials):
    """Any order, each product once.

    A product of n coordinates is a word of n letters that never descend. Sorted by the last letter, the words of n - 1
    letters up to v come first, `binomial(v + n - 1, n - 1)` of them; times z_v they are the words of n that end in v.
    """

    def __init__(self, order: int, like: Tensor) -> None:
        self.size = like.shape[-1]
        self.weights = [w.to(like.device, working_type(like.dtype)) for w in weights(self.size, order)]

    def levels(self, z: Tensor) -> list[Tensor]:
        found = [z]
        for n in range(2, len(self.weights) + 1):
            words = found[-1].unsqueeze(-2)
            pairs = [(z[..., v, None, None], words[..., : comb(v + n - 1, n - 1)]) for v in range(self.size)]
            found.append(side_by_side(pairs))
        return found

    def weighted(self, sums: Sums) -> Sums:
        return [sums[0], *(part * weight for part, weight in zip(sums[1:], self.weights, strict=True))]

    def slopes(self, z: Tensor, sums: Sums, h: Tensor, factors: Factors) -> tuple[Tensor, list[Tensor]]:
        levels = self.levels(z)
        parts = [h @ part.to(h.dtype).mT for part in self.weighted(sums)[1:]]
        values = [
            (g * level).sum(-1, keepdim=True, dtype=sums[0].dtype) for g, level in zip(parts, levels, strict=True)
        ]
        slopes = [times(g, factors, n).to(g.dtype) for n, g in enumerate(parts, 1)]
        along = torch.zeros_like(z)
        for n in range(len(levels), 1, -1):  # what a degree gives to the one below, word by word
            begin = 0
            for v in range(self.size):
                count = comb(v + n - 1, n - 1)
                g = slopes[n - 1][..., begin : begin + count]
                along[..., v] += (g * levels[n - 2][..., :count]).sum(-1)
                slopes[n - 2][..., :count] += g * z[..., v, None]
                begin += count
        return along + slopes[0], values


_WEIGHTS: dict[tuple[int, int], list[Tensor]] = {}


@torch.compiler.assume_constant_result
def weights(size: int, order: int) -> list[Tensor]:
    """Of each word of 1, ..., order letters `1 / a!`, a counting its letters: `(z . k)^n / n!` has it so many times."""
    if (size, order) not in _WEIGHTS:
        one = torch.ones(size, dtype=torch.float64)
        words = [(one, one)]  # the weight of a word, and how often its last letter stands at its end
        for n in range(2, order + 1):
            above, runs = words[-1]
            made, lengths = [], []
            for v in range(size):
                count, own = comb(v + n - 1, n - 1), comb(v + n - 2, n - 1)  # of which `own` end in a letter before v
                run = torch.cat([torch.ones(own, dtype=torch.float64), runs[own:count] + 1])
                made.append(above[:count] / run)
                lengths.append(run)
            words.append((torch.cat(made), torch.cat(lengths)))
        _WEIGHTS[size, order] = [weight.unsqueeze(-1) for weight, _ in words]
    return _WEIGHTS[size, order]
