"""What the gradients of a scale and a shift of channels are made of: sums over all rows, column by column.

Of `y = W' x + b'`, with `W' = gamma W` and `b' = gamma b + beta`, where `g` is the gradient of `y` and t counts rows:

    dL/dbeta_c = sum_t g_tc,
    dL/dgamma_c = sum_t g_tc (W x_t + b)_c = sum_t g_tc (y_t - b')_c / gamma_c  +  b_c sum_t g_tc.

So what `gamma` multiplied is not needed, `y` will do, which the next operation keeps anyway. `y` is rounded, and where
gamma is small so little of it is `W x` that a division would give rounding errors back as a gradient: no divisor is
nearer to 0 than `LEAST`. Below, the first term is the gradient times `|gamma| / LEAST`: a layer with such a scale is
computed by a pass over its output instead, on a GPU from at most 16 steps later on (`RescalingLayer.has_small_scale`).

Sums are float32 throughout. On a GPU with Triton both are made in one pass: every program adds a share of the rows, and
a second kernel adds the shares in a fixed order, so that the result does not change from run to run.
"""

from __future__ import annotations

import importlib.util
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor

from inlay.attention.launch import Launch, Prepared, multiprocessors, on, unit

LEAST = 2.0**-5
"""The least that is divided by."""
HAS_TRITON = importlib.util.find_spec("triton") is not None
ROWS, COLUMNS, WARPS = 32, 128, 4
"""Of a tile, and how many warps run a program."""
PROGRAMS = 8
"""For each multiprocessor: enough loads under way at once, and few parts."""
PARTS = 16
"""That the second kernel adds at once."""


def affine_gradients(
    g: Tensor, y: Tensor, shift: Tensor | None, gamma: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The gradients of gamma and of beta, given those of `y`; `shift` is `b'`, and None where it and `bias` are 0."""
    if on_chip(g):
        return in_two_stages(g, y, shift, gamma, bias)
    wide = g.float()
    of_beta = wide.sum(0)
    made = y.float() if shift is None else y.float() - shift.float()
    signed = torch.where(gamma < 0, -LEAST, LEAST)
    of_gamma = (wide * made).sum(0) / torch.where(gamma.abs() < LEAST, signed, gamma)
    return of_gamma if bias is None else torch.addcmul(of_gamma, bias.float(), of_beta), of_beta


def on_chip(g: Tensor) -> bool:
    """Whether the kernels run: a trace is given torch's own sums, which it fuses."""
    return g.is_cuda and HAS_TRITON and g.dtype != torch.float64 and not torch.compiler.is_compiling()


@cache
def _launch(name: str, types: tuple[torch.dtype, ...], device: torch.device, constants: tuple[Any, ...]) -> Launch:
    from inlay.methods.column_kernels import parts_kernel, whole_kernel

    return Launch(parts_kernel if name == "parts" else whole_kernel, constants, WARPS)


@lru_cache(maxsize=1024)
def _launches(
    device: torch.device,
    types: tuple[torch.dtype, ...],
    shape: tuple[int, int],
    strides: tuple[int, int],
    given: tuple[bool, bool],
) -> tuple[int, Prepared, Prepared]:
    """How many parts there are; the kernel that makes them, and the one that adds them."""
    (rows, columns), (shifted, biased) = shape, given
    across = -(-columns // COLUMNS)
    tiles = -(-rows // ROWS)
    share = -(-tiles // max(1, PROGRAMS * multiprocessors(device) // across))
    shares = -(-tiles // share)
    step = unit(*strides)
    first = Prepared(
        _launch("parts", types, device, (ROWS, COLUMNS, step, shifted)),
        (across, shares, 1),
        (rows, columns, *(stride // step for stride in strides), share * ROWS),
    )
    second = Prepared(
        _launch("whole", types, device, (PARTS, COLUMNS, biased, LEAST)), (across, 1, 1), (columns, shares)
    )
    return shares, first, second


def in_two_stages(
    g: Tensor, y: Tensor, shift: Tensor | None, gamma: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The gradients of gamma and of beta, by the two kernels."""
    (g_row, g_column), (y_row, y_column), device = g.stride(), y.stride(), g.device
    if g_column != 1:
        g = g.contiguous()
        g_row = g.stride(0)
    if y_column != 1:
        y = y.contiguous()
        y_row = y.stride(0)
    scale = gamma.contiguous()
    by = scale if shift is None else shift.contiguous()
    own = scale if bias is None else bias.contiguous()
    rows, columns = g.shape
    types = (g.dtype, y.dtype, by.dtype, scale.dtype, own.dtype)
    given = (shift is not None, bias is not None)
    shares, first, second = _launches(device, types, (rows, columns), (g_row, y_row), given)
    of_gamma, of_beta = torch.empty((2, columns), dtype=torch.float32, device=device).unbind(0)
    parts = torch.empty((shares, 2, columns), dtype=torch.float32, device=device)
    with on(device):
        first(g, y, by, parts)
        second(parts, scale, own, of_gamma, of_beta)
    return of_gamma, of_beta
