"""What a method must know of a module that it adapts: its channels, and where what is trained beside it lies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

Convolution = nn.modules.conv._ConvNd
ChannelsNorm = (nn.modules.batchnorm._NormBase, nn.GroupNorm)  # batch and instance norms share _NormBase
# nn.MultiheadAttention reads its projection's weight and bias without calling it: a hook on it would never run.
NEVER_CALLED = (nn.modules.linear.NonDynamicallyQuantizableLinear,)


def channel_axis(module: nn.Module) -> int:
    """The axis of the module's output along which its bias runs: 1 where that is (N, C, ...), else the last."""
    if isinstance(module, (Convolution, *ChannelsNorm)):
        return 1
    if isinstance(module, nn.LayerNorm):
        # Norms over the channels of an image are LayerNorms that permute: ConvNeXt's in Transformers, timm's 2d one.
        first = getattr(module, "data_format", None) == "channels_first" or type(module).__name__.endswith("2d")
        return 1 if first else -1
    return -1


def widths(module: nn.Module) -> tuple[int | None, int | None]:
    """How many channels enter and leave a module; of an embedding, its words enter. None where it says neither."""
    if isinstance(module, (nn.Linear, Conv1D)):
        return width_in(module), width_out(module)
    if isinstance(module, Convolution):
        return module.in_channels, module.out_channels
    if isinstance(module, nn.Embedding):
        return module.num_embeddings, module.embedding_dim
    weight = getattr(module, "weight", None)
    return (weight.shape[0],) * 2 if isinstance(weight, Tensor) and weight.ndim == 1 else (None, None)


def width_in(projection: nn.Module) -> int:
    """How many channels enter a linear layer, or GPT-2's transposed kind of it."""
    return projection.nx if isinstance(projection, Conv1D) else projection.in_features


def width_out(projection: nn.Module) -> int:
    """How many channels leave a linear layer, or GPT-2's transposed kind of it."""
    return projection.nf if isinstance(projection, Conv1D) else projection.out_features


def beside(weight: Tensor) -> dict[str, Any]:
    """Device and precision of a parameter that is trained beside a weight; float32 beside quantised ones."""
    return {"dtype": weight.dtype if weight.is_floating_point() else torch.float32, "device": weight.device}


def like(own: nn.Module | Tensor, values: Tensor) -> Tensor:
    """`values` where a module or a weight is, in single precision or, where its own is double, in that."""
    if isinstance(own, nn.Module):
        parameters = list(own.parameters())
        whole = next((parameter for parameter in parameters if parameter.is_floating_point()), None)
        if whole is None:  # all of them quantised
            return values.to(parameters[0].device, torch.float32)
        own = whole
    return values.to(own.device, torch.promote_types(own.dtype, torch.float32))


def is_plain(weight: Tensor) -> bool:
    """Whether a weight is an ordinary tensor of numbers: not quantised, not one of a mesh's shards."""
    return type(weight) in (nn.Parameter, Tensor) and weight.is_floating_point()


def _linear(host: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return F.linear(x, weight, bias)


def _transposed_linear(host: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    rows = x.reshape(-1, x.shape[-1])
    made = rows @ weight if bias is None else torch.addmm(bias, rows, weight)
    return made if x.ndim == 2 else made.view(*x.shape[:-1], weight.shape[1])


def _convolution(host: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    found: Tensor = host._conv_forward(x, weight, bias)
    return found


def _layer_norm(host: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    shape, eps = host.normalized_shape, host.eps
    trained = [one for one in (weight, bias) if one is not None and one.requires_grad]
    if not (trained and sums_roughly(x)):
        return F.layer_norm(x, shape, weight, bias, eps)
    # Each joins once more as its difference from itself: nothing is added, and its gradient is an ordinary sum.
    made = F.layer_norm(x, shape, weight.detach(), None if bias is None else bias.detach(), eps)
    if weight.requires_grad:
        made = made + F.layer_norm(x, shape, eps=eps) * _nothing(weight, made)
    if bias is not None and bias.requires_grad:
        made = made + _nothing(bias, made)
    return made


def sums_roughly(x: Tensor) -> bool:
    """Whether torch's layer norm would add up the gradients of its weight and bias in half precision: on a CPU it does,
    row by row, and a sum that has grown takes up no further row. Of 4,096 rows in bfloat16 a fifth arrives."""
    return x.device.type == "cpu" and x.dtype.itemsize == 2 and torch.is_grad_enabled()


def _nothing(trained: Tensor, beside: Tensor) -> Tensor:
    """0, with the gradient of what is trained."""
    return (trained - trained.detach()).to(beside.dtype)


def _rms_norm(host: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return F.rms_norm(x, host.normalized_shape, weight, host.eps)


def _group_norm(host: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return F.group_norm(x, host.num_groups, weight, bias, host.eps)


Computation = Callable[[Any, Tensor, Tensor, Tensor | None], Tensor]
LINEAR: dict[type, Computation] = {nn.Linear: _linear, Conv1D: _transposed_linear}
CONVOLUTIONS: dict[type, Computation] = dict.fromkeys((nn.Conv1d, nn.Conv2d, nn.Conv3d), _convolution)
PLAIN_NORMS: dict[type, Computation] = {nn.LayerNorm: _layer_norm, nn.RMSNorm: _rms_norm, nn.GroupNorm: _group_norm}
COMPUTED = LINEAR | CONVOLUTIONS | PLAIN_NORMS
"""What modules of exactly these classes compute, with a weight and a bias that are given: of the module, the input, the
weight and the bias. A subclass may compute something else."""
