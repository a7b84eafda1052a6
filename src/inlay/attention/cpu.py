"""The fused CPU backend: torch's flash attention for the CPU, called below autograd.

torch differentiates the kernel's output but not the log-sum-exp it returns with it; fused.py does. Facts about the
kernel that its interface does not show: it gives a log-sum-exp of 0 where a query may see no key, reads a last
dimension whose stride is not 1 as if it were, and ends the process on empty tensors. It has no dropout: chunked.py has.
"""

from __future__ import annotations

import torch
from torch import Tensor

from inlay.attention import chunked
from inlay.attention.call import Call, in_function_transform, transformed
from inlay.attention.fused import Attended, Fused, Kernel

FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
TYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


class CpuKernel(Kernel):
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
        if dropout_p:
            given = query, key, value, mask, is_causal, scale, dropout_p
            if not torch.compiler.is_compiling() and not transformed():
                return chunked.attend(*given)
            out, lse, seed = torch.ops.inlay.dropped_attention(*given)
            return out, lse, seed, seed
        added = _added(mask, query.dtype)
        out, lse = FORWARD(_dense(query), _dense(key), _dense(value), 0.0, is_causal, attn_mask=added, scale=scale)
        if added is not None:
            lse = lse.masked_fill(_sees_nothing(added, is_causal, query.shape[2]), -torch.inf)
        return out, lse, None, None

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
        found: tuple[Tensor, Tensor, Tensor]
        if seed is not None:
            seen = torch.compiler.is_compiling() or transformed()
            run = torch.ops.inlay.dropped_attention_backward if seen else chunked.attend_backward
            found = run(g_out, query, key, value, out, lse, mask, is_causal, scale, dropout_p, seed)
            return found
        found = BACKWARD(
            *(_dense(x) for x in (g_out, query, key, value, out)),
            lse,
            0.0,
            is_causal,
            attn_mask=_added(mask, query.dtype),
            scale=scale,
        )
        return found


def _dense(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _added(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """The mask as something to add to the scores, in a type that the kernel takes."""
    if mask is None:
        return None
    if mask.dtype == torch.bool:
        return torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, -torch.inf)
    if mask.dtype == torch.float32 and dtype.itemsize == 2:
        return _dense(mask)  # taken as it is; in half precision its most negative number would become -inf
    return _dense(mask.to(dtype))


def _sees_nothing(added: Tensor, is_causal: bool, length: int) -> Tensor:
    """Which queries may see no key, broadcastable to `[batch, heads, length]`."""
    keys = added.shape[-1]
    hidden = added == -torch.inf
    if not is_causal:
        return hidden.all(-1)
    if hidden.shape[2] == 1:  # hidden so far, at each query's last key
        so_far = hidden[:, :, 0].long().cumprod(-1).bool()
        last = torch.arange(length, device=added.device).clamp(max=keys - 1)
        return so_far[..., last]
    future = torch.ones(length, keys, dtype=torch.bool, device=added.device).triu(1)
    return (hidden | future).all(-1)


class Cpu(Fused):
    """Memory linear in the length; float32, float64, bfloat16 and float16."""

    name = "cpu"
    kernel = CpuKernel()

    def refuses(self, call: Call) -> str | None:
        tensors = [call.query, call.key, call.value]
        if call.prefix is not None:
            tensors += [call.prefix.key, call.prefix.value]
        if any(x.device.type != "cpu" for x in tensors):
            return f"the tensors are on {call.query.device.type}"
        if call.query.dtype not in TYPES:
            return f"the kernel does not take {call.query.dtype}"
        if call.dropout_p and in_function_transform():
            return "a function is transformed (torch.func), and what is dropped must be seen"
        if any(x.shape[-1] != call.query.shape[-1] for x in tensors):
            return "the kernel takes keys and values of one head size"
        if any(x.numel() == 0 for x in tensors):
            return "there is nothing to attend to"
        if call.mask is not None and call.mask.requires_grad:
            return "the kernel gives no gradient for the mask"
        return None
