"""The CUDA backend: torch's own fused kernels, called below autograd, and for `elu` one fused epilogue each way.

NTK-Attention with `elu` runs one of the kernels of cuda_kernels.py and then epilogue.py's, which turns output and
log-sum-exp into `T` and the joint log-denominator in one pass; backward, the same with the gradients. A few queries
without gradients have kernels of their own (decode.py). Other feature maps, and `elu` with very many features, take the
general way of fused.py. For torch.compile each of these is an operator of its own: in it the choice of kernel is not
traced. Operators always lay out length before heads, as models do.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from inlay.attention.call import Call
from inlay.attention.cuda_kernels import attend, attend_backward, capability, is_flash, strided
from inlay.attention.features import Elu, FeatureMap
from inlay.attention.fused import Fused, Kernel, backward_part, forward_part
from inlay.attention.term import State, kept

TYPES = (torch.float32, torch.bfloat16, torch.float16)
OLDEST = (8, 0)
"""Compute capability of the first GPUs with bfloat16 matrix products."""


def _too_old(device: torch.device) -> bool:
    return not torch.compiler.is_compiling() and capability(device) < OLDEST  # asking the device cannot be traced


class CudaKernel(Kernel):
    def shares_keys(self, query: Tensor, key: Tensor, mask: Tensor | None, is_causal: bool) -> bool:
        return is_flash(query, key, mask, is_causal)

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        run = torch.ops.inlay.attention if torch.compiler.is_compiling() else attend
        out, lse = run(query, key, value, mask, is_causal, scale)
        if mask is None:
            return out, lse
        nothing = ~lse.isfinite()
        return out.masked_fill(nothing.unsqueeze(-1), 0), lse.masked_fill(nothing, -torch.inf)

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
    ) -> tuple[Tensor, Tensor, Tensor]:
        run = torch.ops.inlay.attention_backward if torch.compiler.is_compiling() else attend_backward
        found: tuple[Tensor, Tensor, Tensor] = run(g_out, query, key, value, out, lse, mask, is_causal, scale)
        return found


class _Bare(CudaKernel):
    """Inside an operator of ours nothing is traced, and the epilogue itself sees to rows that see nothing."""

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        return attend(query, key, value, mask, is_causal, scale)

    def backward(self, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
        return attend_backward(*args)


_BARE = _Bare()


def ntk(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    scale: float,
    left: Tensor,
    right: Tensor | None,
    kappa: Tensor,
    signed: bool,
) -> tuple[Tensor, Tensor]:
    """`T`; and what is `kept` of each row, as one tensor: the joint log-denominator (0 where it is -inf), ..."""
    from inlay.attention import epilogue

    if key.shape[1] == query.shape[1]:
        out, lse = attend(query, key, value, mask, is_causal, scale)
    else:
        out, lse = forward_part(_BARE, query, key, value, mask, is_causal, scale)
    return epilogue.forward(_dense_last(query), out, lse, left, right, kappa, scale, signed)


def ntk_backward(
    g_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    scale: float,
    left: Tensor,
    right: Tensor | None,
    kappa: Tensor,
    signed: bool,
    found: Tensor,
    stats: Tensor,
    of_inputs: bool,
    of_state: bool,
) -> tuple[Tensor | None, ...]:
    """Gradients of query, key and value, and of left, right and kappa; None for those not asked for."""
    from inlay.attention import epilogue

    g_out = strided(g_out, found.stride())
    g_query = g_key = g_value = None
    if of_inputs:
        rest = query, key, value, found, stats[0], mask, is_causal, scale
        alike = key.shape[1] == query.shape[1]
        g_query, g_key, g_value = attend_backward(g_out, *rest) if alike else backward_part(_BARE, g_out, *rest)
    of_rows = g_out, _dense_last(query), found, stats
    g_state = epilogue.backward(*of_rows, left, right, kappa, scale, g_query, of_state, signed)
    return g_query, g_key, g_value, *g_state


def _dense_last(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def ntk_alone(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> Tensor:
    """`T` of `ntk`, and nothing to differentiate it by."""
    from inlay.attention import decode

    if decode.takes(query, key, value):
        return decode.forward(query, key, value, *rest)
    return ntk(query, key, value, *rest)[0]


def _without_gradient(*args: Any) -> Tensor:
    found: Tensor = (torch.ops.inlay.ntk_alone if torch.compiler.is_compiling() else ntk_alone)(*args)
    return found


class _Ntk(torch.autograd.Function):
    """NTK-Attention with `elu`; Z and kappa, or rho, in their own types."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        is_causal: bool,
        scale: float,
        left: Tensor,
        right: Tensor | None,
        kappa: Tensor,
        signed: bool,
    ) -> Tensor:
        run = torch.ops.inlay.ntk if torch.compiler.is_compiling() else ntk
        found, stats = run(query, key, value, mask, is_causal, scale, left, right, kappa, signed)
        ctx.save_for_backward(query, key, value, mask, left, right, kappa, found, stats)
        ctx.is_causal, ctx.scale, ctx.signed = is_causal, scale, signed
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g_out: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, mask, left, right, kappa, found, stats = ctx.saved_tensors
        needs = ctx.needs_input_grad
        of_inputs, of_state = any(needs[:3]), any(needs[6:9])
        compiling = torch.compiler.is_compiling()
        run = torch.ops.inlay.ntk_backward if compiling else ntk_backward
        state = left, right, kappa, ctx.signed, found, stats, of_inputs, of_state
        grads = run(g_out, query, key, value, mask, ctx.is_causal, ctx.scale, *state)
        if compiling:  # an operator gives tensors only
            grads = [
                grad if wanted else None
                for grad, wanted in zip(grads, _wanted(of_inputs, of_state, right), strict=True)
            ]
        g_query, g_key, g_value, g_left, g_right, g_kappa = grads
        return g_query, g_key, g_value, None, None, None, g_left, g_right, g_kappa, None


def _wanted(of_inputs: bool, of_state: bool, right: Tensor | None) -> list[bool]:
    return [of_inputs] * 3 + [of_state, of_state and right is not None, of_state]


class Cuda(Fused):
    """Memory linear in the length; float32, bfloat16 and float16."""

    name = "cuda"
    kernel = CudaKernel()

    def refuses(self, call: Call) -> str | None:
        tensors = [call.query, call.key, call.value]
        if call.prefix is not None:
            tensors += [call.prefix.key, call.prefix.value]
        query = call.query
        for x in tensors:
            if not x.is_cuda:
                return f"the tensors are on {query.device.type}"
        if torch.version.hip is not None or _too_old(query.device):
            return f"it needs an NVIDIA GPU of compute capability {'.'.join(map(str, OLDEST))} or more"
        if query.dtype not in TYPES:
            return f"the kernels do not take {query.dtype}"
        if call.dropout_p:
            return "the kernels' dropout is not used"
        for x in tensors:
            if x.shape[-1] != query.shape[-1]:
                return "it takes keys and values of one head size"
            if x.numel() == 0:
                return "there is nothing to attend to"
        if call.mask is not None and call.mask.requires_grad:
            return "the kernels give no gradient for the mask"
        return None

    def joined(self, call: Call, features: FeatureMap | None, state: State | None) -> Tensor:
        if state is None or call.prefix is not None or not isinstance(features, Elu) or not _on_chip(call.query, state):
            return super().joined(call, features, state)
        keys = call.query, call.key, call.value, call.mask, call.is_causal, call.scale
        run = _Ntk.apply if torch.is_grad_enabled() else _without_gradient
        found: Tensor = run(*keys, state.left, state.right, state.kappa, state.signed)
        return found


def _on_chip(query: Tensor, state: State) -> bool:
    """Whether the epilogue's tiles fit: it holds Z, or its factors, and as many features of some queries at once."""
    size, rows = query.shape[-1], state.kappa.shape[1]
    blocks = _power(rows // size) * _power(size)
    return HAS_TRITON and blocks <= 512 and size <= 256 and blocks * _power(state.left.shape[-1]) <= 128 * 128


def _power(n: int) -> int:
    return 1 << (n - 1).bit_length()


HAS_TRITON = importlib.util.find_spec("triton") is not None
"""Without it `elu` takes the general way as well."""


def _model_layout(x: Tensor) -> Tensor:
    """Length before heads in memory."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def _empty(x: Tensor) -> Tensor:
    batch, heads, length, size = x.shape
    return x.new_empty(batch, length, heads, size).transpose(1, 2)


@torch.library.custom_op(
    "inlay::attention",
    mutates_args=(),
    schema="(Tensor query, Tensor key, Tensor value, Tensor? mask, bool is_causal, float scale) -> (Tensor, Tensor)",
)
def _attention_op(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    out, lse = attend(query, key, value, mask, is_causal, scale)
    return _model_layout(out), lse.contiguous()


@_attention_op.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool, scale: float) -> Any:
    return _empty(query), query.new_empty(query.shape[:3], dtype=torch.float32)


@torch.library.custom_op(
    "inlay::attention_backward",
    mutates_args=(),
    schema="(Tensor g_out, Tensor query, Tensor key, Tensor value, Tensor out, Tensor lse, Tensor? mask, "
    "bool is_causal, float scale) -> (Tensor, Tensor, Tensor)",
)
def _attention_backward_op(
    g_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, *rest: Any
) -> tuple[Tensor, ...]:
    return tuple(_model_layout(g) for g in attend_backward(g_out, query, key, value, out, lse, *rest))


@_attention_backward_op.register_fake
def _(g_out: Tensor, query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> Any:
    return _empty(query), _empty(key), _empty(value)


@torch.library.custom_op(
    "inlay::ntk",
    mutates_args=(),
    schema="(Tensor query, Tensor key, Tensor value, Tensor? mask, bool is_causal, float scale, Tensor left, "
    "Tensor? right, Tensor kappa, bool signed) -> (Tensor, Tensor)",
)
def _ntk_op(*args: Any) -> tuple[Tensor, Tensor]:
    found, stats = ntk(*args)
    return _model_layout(found), stats


@_ntk_op.register_fake
def _(query: Tensor, *rest: Any) -> Any:
    return _empty(query), query.new_empty((kept(query), *query.shape[:3]), dtype=torch.float32)


@torch.library.custom_op(
    "inlay::ntk_alone",
    mutates_args=(),
    schema="(Tensor query, Tensor key, Tensor value, Tensor? mask, bool is_causal, float scale, Tensor left, "
    "Tensor? right, Tensor kappa, bool signed) -> Tensor",
)
def _ntk_alone_op(*args: Any) -> Tensor:
    return _model_layout(ntk_alone(*args))


@_ntk_alone_op.register_fake
def _(query: Tensor, *rest: Any) -> Any:
    return _empty(query)


@torch.library.custom_op(
    "inlay::ntk_backward",
    mutates_args=(),
    schema="(Tensor g_out, Tensor query, Tensor key, Tensor value, Tensor? mask, bool is_causal, float scale, "
    "Tensor left, Tensor? right, Tensor kappa, bool signed, Tensor found, Tensor stats, bool of_inputs, "
    "bool of_state) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def _ntk_backward_op(g_out: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    grads = ntk_backward(g_out, *rest)
    return (
        *(g_out.new_empty(0) if grad is None else _model_layout(grad) for grad in grads[:3]),
        *(g_out.new_empty(0) if grad is None else grad.clone() for grad in grads[3:]),  # parts of one tensor
    )


@_ntk_backward_op.register_fake
def _(
    g_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    scale: float,
    left: Tensor,
    right: Tensor | None,
    kappa: Tensor,
    signed: bool,
    found: Tensor,
    stats: Tensor,
    of_inputs: bool,
    of_state: bool,
) -> Any:
    wanted = _wanted(of_inputs, of_state, right)
    inputs = [_empty(x) if wants else x.new_empty(0) for x, wants in zip((query, key, value), wanted[:3], strict=True)]
    small = zip((left, left if right is None else right, kappa), wanted[3:], strict=True)
    return *inputs, *(x.new_empty(x.shape) if wants else g_out.new_empty(0) for x, wants in small)
