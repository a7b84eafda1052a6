"""Sums over the rows of a matrix against float64: torch's own way, and the Triton kernels where they can run.

Without a GPU the kernels run in Triton's interpreter, where Triton is installed, and a NumPy that it knows (3.6: before
2.4): `TRITON_INTERPRET=1 pytest tests/methods/test_column_sums.py`. On a machine with torch and a GPU but no pytest:
`python tests/methods/test_column_sums.py`.
"""

from __future__ import annotations

import importlib.util
import itertools
import os

import torch
from torch import Tensor

from inlay.methods import column_sums as module
from inlay.methods.column_sums import COLUMNS, LEAST, PARTS, ROWS, affine_gradients

ON_GPU = torch.cuda.is_available()
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton") is not None
KERNELS = INTERPRETED or (ON_GPU and module.HAS_TRITON)
DEVICE = "cuda" if ON_GPU else "cpu"
# Less than a tile, a whole one, one more; many shares, and columns of more than one program.
SHAPES = [(1, 1), (5, 3), (ROWS, COLUMNS), (ROWS + 1, COLUMNS + 1), (ROWS * PARTS * 3 + 7, 40), (300, 2 * COLUMNS + 8)]
TYPES = [torch.bfloat16, torch.float16, torch.float32]


def given(rows: int, columns: int, dtype: torch.dtype, seed: int = 0) -> tuple[Tensor, ...]:
    """g, y, b', gamma and b."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(DEVICE)

    gamma = draw(columns)
    gamma[:3] = torch.tensor([0.0, -0.5 * LEAST, 0.5 * LEAST])[:columns]
    return draw(rows, columns).to(dtype), draw(rows, columns).to(dtype), draw(columns).to(dtype), gamma, draw(columns)


def check(
    found: tuple[Tensor, Tensor], g: Tensor, y: Tensor, shift: Tensor | None, gamma: Tensor, bias: Tensor | None
) -> None:
    """Against the formulas of column_sums.py in float64; to what float32 rounds, many times over."""
    g, y, gamma = g.double(), y.double(), gamma.double()
    by = 0 if shift is None else shift.double()
    of_beta = g.sum(0)
    divisor = torch.where(gamma < 0, -1, 1) * gamma.abs().clamp(min=LEAST)
    of_gamma = (g * (y - by)).sum(0) / divisor + (0 if bias is None else bias.double() * of_beta)
    within = (g.abs() * (y.abs() + abs(by))).sum(0) / divisor.abs()
    within = within + (0 if bias is None else bias.double().abs() * g.abs().sum(0))
    for mine, wanted, size in zip(found, (of_gamma, of_beta), (within, g.abs().sum(0)), strict=True):
        assert mine.dtype == torch.float32
        assert ((mine.double() - wanted).abs() <= 1e-5 * size).all(), (mine, wanted)


def check_case(run: object, shape: tuple[int, int], dtype: torch.dtype) -> None:
    g, y, shift, gamma, bias = given(*shape, dtype)
    for by, own in ((shift, bias), (None, None), (shift, None)):
        check(run(g, y, by, gamma, own), g, y, by, gamma, own)  # type: ignore[operator]
    # Rows that lie apart, and columns that do.
    wide, turned = torch.cat([g, g], 1), g.t().contiguous().t()
    for other in (wide[:, : shape[1]], turned):
        check(run(other, y, shift, gamma, bias), g, y, shift, gamma, bias)  # type: ignore[operator]
        check(run(g, other, shift, gamma, bias), g, g, shift, gamma, bias)  # type: ignore[operator]


def check_repeats() -> None:
    """The same numbers every time."""
    some = given(ROWS * PARTS * 5 + 3, COLUMNS + 5, torch.bfloat16)
    first = module.in_two_stages(*some)
    for _ in range(5):
        for mine, again in zip(first, module.in_two_stages(*some), strict=True):
            assert torch.equal(mine, again)


try:
    import pytest
except ModuleNotFoundError:
    pytest = None  # type: ignore[assignment]

if pytest is not None:
    needs_kernels = pytest.mark.skipif(not KERNELS, reason="no GPU, and Triton's interpreter is not on")
    each = pytest.mark.parametrize(("shape", "dtype"), list(itertools.product(SHAPES, TYPES)))

    @each
    def test_torch_s_own_way(shape: tuple[int, int], dtype: torch.dtype) -> None:
        check_case(affine_gradients, shape, dtype)

    @each
    @needs_kernels
    def test_the_kernels(shape: tuple[int, int], dtype: torch.dtype) -> None:
        check_case(module.in_two_stages, shape, dtype)

    @needs_kernels
    def test_the_kernels_repeat_themselves() -> None:
        check_repeats()


if __name__ == "__main__":
    for shape, dtype in itertools.product(SHAPES, TYPES):
        check_case(affine_gradients, shape, dtype)
        check_case(module.in_two_stages, shape, dtype)
    check_repeats()
    print(f"{len(SHAPES) * len(TYPES)} cases on {DEVICE}: right")
