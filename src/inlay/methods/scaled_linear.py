"""A linear layer with a scale and a shift for every channel, in half precision: what the layer costs by itself, almost.

    y = gamma (W x + b) + beta = W' x + b',      W' = gamma W,      b' = gamma b + beta.

`W'` and `b'` are made in float32 and rounded once, which autocast does with a weight anyway. For the backward pass
neither `x` nor `W x + b` is kept: `y` is, which the next operation keeps in most places (attention, activations), and
column_sums.py says how the gradient of gamma comes from it.

Where a model changes `y` in place, it would not be there any more. So a layer keeps copies until it has seen that its
model leaves them alone; `RescalingLayer.outputs_stay` says what is known. None of this is done in float32 and float64,
which users choose for their precision.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.pytorch_utils import Conv1D

from inlay.attention.call import in_function_transform
from inlay.attention.once import differentiable_once
from inlay.errors import InlayError
from inlay.methods.channels import LINEAR, is_plain
from inlay.methods.column_sums import affine_gradients

if TYPE_CHECKING:
    from inlay.methods.rescaling import RescalingLayer

_reshaped = torch.ops.aten._unsafe_view.default  # a view only in memory
HALF = (torch.float16, torch.bfloat16)
SMALL = 2**20
"""Numbers of an output: below, a pass over it takes less time than Python takes for what replaces it."""


def computes_in(x: Tensor, weight: Tensor, bias: Tensor | None) -> torch.dtype | None:
    """The half precision in which a linear layer multiplies `x`; None: in another, or its weight is trained or special.

    Autocast leaves what is in float64 alone.
    """
    if not is_plain(weight) or weight.requires_grad or (bias is not None and bias.requires_grad):
        return None
    device = x.device.type
    if not torch.is_autocast_enabled(device):
        return x.dtype if x.dtype in HALF and weight.dtype == x.dtype else None
    found = torch.get_autocast_dtype(device)
    wide = torch.float64 in (x.dtype, weight.dtype)
    return found if found in HALF and not wide else None


def scaled_linear(layer: RescalingLayer, host: Any, x: Tensor, adapter_name: str) -> Tensor | None:
    """`gamma (W x + b) + beta` of a layer's host, with an adapter's gamma and beta; None where a pass over the output
    costs less, or a scale is too small to be divided by.

    `W'` costs a pass over the weight. That is for nothing where the weight has to be rounded anyway, and pays where
    more rows are multiplied than it has inputs: not for the one row of a token that is generated.
    """
    weight = host.weight
    inputs, outputs = weight.shape if type(host) is Conv1D else weight.shape[::-1]
    size = x.numel()
    if size * outputs < SMALL * inputs or torch.compiler.is_compiling() or in_function_transform():
        return None
    bias = host.bias
    dtype = computes_in(x, weight, bias)
    if dtype is None or (weight.dtype == dtype and size < inputs * inputs):
        return None
    gamma, beta = layer.pieces[adapter_name]()
    if torch.is_grad_enabled() and gamma.requires_grad and layer.has_small_scale(adapter_name, gamma):
        return None
    frozen = weight, bias, type(host), dtype
    if not torch.is_grad_enabled():
        return _forward(x, gamma, beta, frozen)[0]
    found: Tensor = _ScaledLinear.apply(x, gamma, beta, frozen, layer)
    return found


Frozen = tuple[Tensor, Tensor | None, type, torch.dtype]
"""A host's weight and bias, its class, and the precision in which it multiplies."""


def _forward(x: Tensor, gamma: Tensor, beta: Tensor | None, frozen: Frozen) -> tuple[Tensor, Tensor, Tensor | None]:
    """`y`, `W'` and `b'`."""
    weight, bias, kind, dtype = frozen
    # Each by one kernel, rounding included.
    folded = torch.empty_like(weight, dtype=dtype)
    torch.mul(weight, gamma if kind is Conv1D else gamma.unsqueeze(1), out=folded)
    shift = None
    if bias is not None:
        shift = torch.empty_like(bias, dtype=dtype)
        if beta is None:
            torch.mul(bias, gamma, out=shift)
        else:
            torch.addcmul(beta, bias, gamma, out=shift)
    if x.dtype != dtype:
        x = x.to(dtype)
    if x.ndim == 2:
        return LINEAR[kind](None, x, folded, shift), folded, shift
    *outer, inputs = x.shape
    rows = LINEAR[kind](None, x.reshape(-1, inputs), folded, shift)
    # No view, or autograd would not let anybody change it in place.
    return _reshaped(rows, (*outer, rows.shape[1])), folded, shift


class _ScaledLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, gamma: Tensor, beta: Tensor | None, frozen: Frozen, layer: RescalingLayer
    ) -> Tensor:
        y, folded, shift = _forward(x, gamma, beta, frozen)
        stays, watch = layer.outputs_stay, None
        if stays is None:
            watch = y.detach()  # counts changes in place together with y
            watch.data = y.new_empty(0)  # and holds nothing
            ctx.version = watch._version
        ctx.of = x.shape, x.dtype, frozen[2], layer, watch
        ctx.save_for_backward(folded, y if stays else y.clone(), shift, gamma, frozen[1])
        return y

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        return _gradients(ctx, g)


def _gradients(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
    folded, y, shift, gamma, bias = _saved(ctx)
    shape, dtype, kind, layer, watch = ctx.of
    if watch is not None and layer.outputs_stay is None:
        layer.outputs_stay = watch._version == ctx.version
    if g.ndim != 2:
        g, y = g.reshape(-1, g.shape[-1]), y.reshape(-1, g.shape[-1])
    needs_x, needs_gamma, needs_beta, _, _ = ctx.needs_input_grad
    of_x = of_gamma = of_beta = None
    if needs_x:
        of_x = torch.mm(g, folded.t() if kind is Conv1D else folded).view(shape)
        if of_x.dtype != dtype:
            of_x = of_x.to(dtype)
    if needs_gamma or needs_beta:
        of_gamma, of_beta = affine_gradients(g, y, shift, gamma, bias)
    return of_x, of_gamma, of_beta if needs_beta else None, None, None


def _saved(ctx: Any) -> Any:
    try:
        return ctx.saved_tensors
    except RuntimeError as error:
        if "modified by an inplace operation" not in str(error):
            raise
        _, _, kind, layer, _ = ctx.of
        layer.outputs_stay = False
        raise InlayError(
            f"The output of a {kind.__name__} was changed in place, by an adapter or a hook that came later. Its "
            "layer keeps copies from now on: run this step again."
        ) from error
