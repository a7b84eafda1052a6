"""Low-rank products by slot: calls, and what is right of them in float64. They are the same with and without a GPU."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

from inlay.methods.low_rank import add_by_slot, fits

BOUND = {torch.float32: 1e-5, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}


@dataclass(frozen=True)
class Product:
    """One call, drawn from a seed."""

    dtype: torch.dtype = torch.float32
    x_dtype: torch.dtype = torch.float32
    bank: torch.dtype = torch.float32
    slots: tuple[int, ...] = (2, 1, 2, 0, 3)  # 0: no task; 3 does not adapt the layer
    shape: tuple[int, ...] = (5, 7)  # of the leading axes
    sizes: tuple[int, int] = (24, 40)
    rank: int = 3
    thirds: tuple[int, ...] | None = None
    own_a: bool = False

    @property
    def parts(self) -> list[tuple[int, int]]:
        width = self.sizes[1] // (3 if self.thirds else 1)
        return [(third * width, (third + 1) * width) for third in self.thirds or (0,)]

    @property
    def offsets(self) -> tuple[int, int]:
        begins = [begin for begin, _ in self.parts]
        return begins[0], begins[-1] - begins[0]

    def tensors(self, device: str = "cpu") -> dict[str, Tensor]:
        """The arguments of the call."""
        generator = torch.Generator().manual_seed(hash((self.shape, self.sizes, self.rank, self.slots)) % 2**31)
        parts, (begin, end) = len(self.parts), self.parts[0]

        def draw(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator)

        count = max(self.slots) + 2
        a = draw(*([count] if self.own_a else []), parts * self.rank, self.sizes[0]) / self.sizes[0] ** 0.5
        b = draw(count, parts, self.rank, end - begin)
        scales = torch.tensor([0.0, *(0.5 + i % 7 for i in range(1, count))])
        scales[3 if count > 3 else 0] = 0
        out, x = draw(*self.shape, self.sizes[1]).to(self.dtype), draw(*self.shape, self.sizes[0]).to(self.x_dtype)
        a, b, slots = a.to(self.bank), b.to(self.bank), torch.tensor(self.slots)
        found = {"out": out, "x": x, "a": a, "b": b, "scales": scales, "slots": slots}
        return {name: tensor.to(device) for name, tensor in found.items()}

    def add(self, out: Tensor, **rest: Tensor) -> Tensor:
        """What becomes of a copy of `out`."""
        found = out.clone()
        add_by_slot(found, **rest, offsets=self.offsets)
        return found


def defined(case: Product, given: dict[str, Tensor]) -> Tensor:
    """`out[i] + scale (x[i] A^T) B`, row by row, in float64."""
    out, x, a, b, scales, _ = (each.double().cpu() for each in given.values())
    found = out.reshape(len(case.slots), -1, case.sizes[1]).clone()
    x = x.reshape(len(case.slots), -1, case.sizes[0])
    for row, slot in enumerate(case.slots):
        own = a[slot] if case.own_a else a
        for part, (begin, end) in enumerate(case.parts):
            z = x[row] @ own[part * case.rank : (part + 1) * case.rank].T
            found[row, :, begin:end] += scales[slot] * z @ b[slot, part]
    return found.view(out.shape)


def check(case: Product, device: str = "cpu") -> None:
    given = case.tensors(device)
    assert fits(*[*given.values()][:4])
    found = case.add(**given)
    before, found, wanted = (
        each.reshape(len(case.slots), -1).double().cpu() for each in (given["out"], found, defined(case, given))
    )
    error = (found - wanted).abs() / wanted.abs().mean(1, keepdim=True)
    assert float(error.max()) <= 8 * BOUND[case.dtype], (case, float(error.max()))
    assert float(error.mean()) <= BOUND[case.dtype], (case, float(error.mean()))
    for row, slot in enumerate(case.slots):
        assert torch.equal(found[row], before[row]) == (float(given["scales"][slot]) == 0), (case, row)


CASES = [
    *(
        Product(dtype, x_dtype, bank)
        for dtype, x_dtype, bank in itertools.product(BOUND, (torch.float32, torch.bfloat16), BOUND)
    ),
    *(Product(rank=rank, sizes=sizes) for rank in (1, 16, 17, 64) for sizes in ((130, 64), (64, 193))),
    *(Product(thirds=thirds, sizes=(24, 72), own_a=own) for thirds in ((0, 2), (1,), (1, 2)) for own in (False, True)),
    *(Product(shape=shape) for shape in ((5,), (5, 1), (5, 33), (5, 2, 20), (10, 4), (5, 70))),
    Product(slots=(1,), shape=(3, 9)),
    Product(slots=tuple(range(1, 65)), shape=(64, 3), dtype=torch.bfloat16),
]
