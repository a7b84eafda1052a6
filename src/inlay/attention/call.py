"""One call of attention, checked and in one shape for every backend."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

from inlay.errors import InlayError


class Prefix(NamedTuple):
    """Keys and values that every query sees, `[batch or 1, kv_heads, m, head_dim]`; one row is shared by the batch.
    `bias`, `[batch or 1, kv_heads, m]`, is added to the scaled scores."""

    key: Tensor
    value: Tensor
    bias: Tensor | None = None


class Call(NamedTuple):
    """Queries `[batch, heads, length, head_dim]` over keys and values `[batch, kv_heads, keys, head_dim]`.

    `mask` is None or four-dimensional and broadcasts to `[batch, heads, length, keys]`: boolean (True may be seen) or
    added to the scaled scores. `is_causal` lets query i see keys 0..i, as in torch. Both may be given.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    is_causal: bool
    scale: float
    dropout_p: float
    prefix: Prefix | None = None


def autocasts(query: Tensor) -> bool:
    device = query.device.type
    # Asking whether a device has autocast at all cannot be traced by every torch.
    return (device in ("cpu", "cuda") or torch.amp.is_autocast_available(device)) and torch.is_autocast_enabled(device)


def in_function_transform() -> bool:
    """Whether torch.func differentiates or maps the function that calls."""
    compiling = torch.compiler.is_compiling()  # then the compiler sees to it, and the question cannot be traced
    return not compiling and torch._C._functorch.peek_interpreter_stack() is not None


def transformed() -> bool:
    """Whether a call is part of something that sees operations, and not only what they give: torch.func, a mode that
    dispatches (fake tensors, a tracer). Never asked while a graph is compiled."""
    return in_function_transform() or torch._C._len_torch_dispatch_stack() > 0


def lowered(*tensors: Tensor) -> tuple[Tensor, ...]:
    """As autocast would round them, and torch's own attention does."""
    lower = torch.get_autocast_dtype(tensors[0].device.type)
    return tuple(x.to(lower) if x.dtype != torch.float64 else x for x in tensors)


def without_autocast(tensor: Tensor) -> AbstractContextManager[object]:
    """For products whose types are chosen by hand."""
    if not autocasts(tensor):
        return nullcontext()
    device = tensor.device.type
    return torch.autocast(device, enabled=False) if torch.compiler.is_compiling() else _WithoutAutocast(device)


class _WithoutAutocast(AbstractContextManager[None]):
    """As `torch.autocast(device, enabled=False)` inside an enabled one, at a tenth of its cost."""

    def __init__(self, device: str) -> None:
        self.device = device

    def __enter__(self) -> None:
        torch.set_autocast_enabled(self.device, False)

    def __exit__(self, *error: object) -> None:
        torch.set_autocast_enabled(self.device, True)


def make_call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    dropout_p: float = 0.0,
    prefix_key: Tensor | None = None,
    prefix_value: Tensor | None = None,
    prefix_bias: Tensor | None = None,
) -> Call:
    """Check the arguments against each other; raise an `InlayError` that names what does not fit."""
    if autocasts(query):
        query, key, value = lowered(query, key, value)
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.dim() != 4:
            raise InlayError(
                f"{name} has shape {_shape(tensor)}; attention takes [batch, heads, length, head_dim]. "
                "Add the missing dimensions, with size 1 if there is one only."
            )
    if not query.dtype == key.dtype == value.dtype:
        raise InlayError(
            f"query, key and value are of types {query.dtype}, {key.dtype} and {value.dtype}; cast them to one type."
        )
    _check_keys("key", "value", key, value, query)
    if key.shape[0] != query.shape[0]:
        raise InlayError(f"query has {query.shape[0]} rows and key {key.shape[0]}; both need the same batch size.")
    scale = query.shape[-1] ** -0.5 if scale is None else float(scale)
    if not scale > 0:
        raise InlayError(f"scale is {scale}; it must be greater than 0. Leave it out for 1 / sqrt(head_dim).")
    if not 0 <= dropout_p < 1:
        raise InlayError(f"dropout_p is {dropout_p}; it must be at least 0 and less than 1.")
    prefix = None
    if prefix_key is not None and prefix_value is not None:
        prefix = _make_prefix(prefix_key, prefix_value, prefix_bias, query)
    mask = None if attn_mask is None else _make_mask(attn_mask, query, key)
    return Call(query, key, value, mask, is_causal, scale, dropout_p, prefix)


def _make_mask(mask: Tensor, query: Tensor, key: Tensor) -> Tensor:
    full = (*query.shape[:3], key.shape[2])
    padded = (1,) * (4 - mask.dim()) + tuple(mask.shape)
    if mask.dim() > 4 or any(size not in (1, whole) for size, whole in zip(padded, full, strict=True)):
        raise InlayError(
            f"attn_mask has shape {_shape(mask)}; it must broadcast to [batch, heads, length, keys] = {list(full)}."
        )
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise InlayError(
            f"attn_mask is of type {mask.dtype}; it must be boolean (True may be seen) or a floating-point number to "
            "add to the scores. Convert a mask of zeros and ones with .bool()."
        )
    return mask.reshape(padded)


def _make_prefix(key: Tensor, value: Tensor, bias: Tensor | None, query: Tensor) -> Prefix | None:
    if bias is not None and bias.shape != key.shape[:-1]:
        raise InlayError(
            f"prefix_bias has shape {_shape(bias)}; with prefix_key of shape {_shape(key)} it must be "
            f"{list(key.shape[:-1])}: one number for each key."
        )
    if key.dim() == 3 and value.dim() == 3:
        key, value = key.unsqueeze(0), value.unsqueeze(0)
        bias = None if bias is None else bias.unsqueeze(0)
    if key.dim() != 4 or value.dim() != 4:
        raise InlayError(
            f"prefix_key and prefix_value have shapes {_shape(key)} and {_shape(value)}; they are "
            "[heads, m, head_dim] for one prefix shared by the batch, or [batch, heads, m, head_dim]."
        )
    _check_keys("prefix_key", "prefix_value", key, value, query)
    if key.shape[0] not in (1, query.shape[0]):
        raise InlayError(f"prefix_key has {key.shape[0]} rows; it needs 1, or the query's {query.shape[0]}.")
    return None if key.shape[2] == 0 else Prefix(key.to(query.dtype), value.to(query.dtype), bias)


def _check_keys(key_name: str, value_name: str, key: Tensor, value: Tensor, query: Tensor) -> None:
    if key.shape[:3] != value.shape[:3]:
        raise InlayError(
            f"{key_name} has shape {_shape(key)} and {value_name} {_shape(value)}; only their last sizes may differ."
        )
    if key.shape[-1] != query.shape[-1]:
        raise InlayError(f"query has head_dim {query.shape[-1]} and {key_name} {key.shape[-1]}; they must be equal.")
    if key.shape[1] == 0 or query.shape[1] % key.shape[1]:
        raise InlayError(
            f"{query.shape[1]} query heads cannot share {key.shape[1]} heads of {key_name}: the first must be a "
            "multiple of the second."
        )


def _shape(tensor: Tensor) -> list[int]:
    return list(tensor.shape)
