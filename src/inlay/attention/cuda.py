"""The CUDA backend: torch's own fused kernels, called below autograd, and for `elu` one fused epilogue each way.

NTK-Attention with `elu` runs one of the kernels of cuda_kernels.py and then epilogue.py's, which turns output and
log-sum-exp into `T` and the joint log-denominator in one pass; backward, the same with the gradients. A few queries
without gradients have kernels of their own (decode.py). Other feature maps, and `elu` with very many features, take the
general way of fused.py. For torch.compile each of these is an operator of its own: in it the choice of kernel is not
traced. Operators always lay out length before heads, as models do.
"""

from __future__ import annotations

import importlib
import importlib.util
from functools import cache
from typing import Any

import torch
from torch import Tensor

from inlay.attention.call import Call, in_function_transform
from inlay.attention.cuda_kernels import attend, attend_backward, capability, is_flash, kernel_for, kernel_of, strided
from inlay.attention.features import Elu, FeatureMap
from inlay.attention.fused import Attended, Fused, Kernel, backward_part, forward_part, share_lost_rows
from inlay.attention.once import differentiable_once
from inlay.attention.term import State, kept

TYPES = (torch.float32, torch.bfloat16, torch.float16)
OLDEST = (8, 0)
"""Compute capability of the first GPUs with bfloat16 matrix products."""


def _too_old(device: torch.device) -> bool:
    return not torch.compiler.is_compiling() and capability(device) < OLDEST  # asking the device cannot be traced


@cache
def _kernels(name: str) -> Any:
    """A module that needs Triton, imported when it is first used: an import in a function takes as long as a launch."""
    return importlib.import_module(f"inlay.attention.{name}")


class CudaKernel(Kernel):
    def shares_keys(self, query: Tensor, key: Tensor, mask: Tensor | None, is_causal: bool) -> bool:
        return is_flash(query, key, mask, is_causal)

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
        run = torch.ops.inlay.attention if torch.compiler.is_compiling() else attend
        out, lse, seed, offset = run(query, key, value, mask, is_causal, scale, dropout_p)
        if mask is not None:
            nothing = ~lse.isfinite()
            out, lse = out.masked_fill(nothing.unsqueeze(-1), 0), lse.masked_fill(nothing, -torch.inf)
        return (out, lse, seed, offset) if dropout_p else (out, lse, None, None)

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
        run = torch.ops.inlay.attention_backward if torch.compiler.is_compiling() else attend_backward
        how = mask, is_causal, scale, dropout_p, seed, offset
        found: tuple[Tensor, Tensor, Tensor] = run(g_out, query, key, value, out, lse, *how)
        return found


class _Bare(CudaKernel):
    """Inside an operator of ours nothing is traced, and the epilogue itself sees to rows that see nothing."""

    def forward(self, *args: Any) -> Attended:
        return attend(*args)

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
    dropout_p: float,
    left: Tensor,
    right: Tensor | None,
    kappa: Tensor,
    signed: bool,
) -> Attended:
    """`T`; what is `kept` of each row, as one tensor: the joint log-denominator (0 where it is -inf), ...; and with
    dropout the state of the random numbers."""
    given = query, key, value, mask, is_causal, scale, dropout_p
    alike = key.shape[1] == query.shape[1]
    out, lse, seed, offset = attend(*given) if alike else forward_part(_BARE, *given)
    found, stats = _kernels("epilogue").forward(_dense_last(query), out, lse, left, right, kappa, scale, signed)
    return found, stats, seed, offset


def ntk_backward(
    g_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    scale: float,
    dropout_p: float,
    left: Tensor,
    right: Tensor | None,
    kappa: Tensor,
    signed: bool,
    found: Tensor,
    stats: Tensor,
    seed: Tensor | None,
    offset: Tensor | None,
    of_inputs: bool,
    of_state: bool,
) -> tuple[Tensor | None, ...]:
    """Gradients of query, key and value, and of left, right and kappa; None for those not asked for."""
    g_out = strided(g_out, found.stride())
    g_query = g_key = g_value = None
    if of_inputs:
        rest = query, key, value, found, stats[0], mask, is_causal, scale, dropout_p, seed, offset
        alike = key.shape[1] == query.shape[1]
        g_keys = strided(share_lost_rows(g_out, mask, is_causal, stats[0], stats[1]), found.stride())
        g_query, g_key, g_value = attend_backward(g_keys, *rest) if alike else backward_part(_BARE, g_keys, *rest)
    of_rows = g_out, _dense_last(query), found, stats
    g_state = _kernels("epilogue").backward(*of_rows, left, right, kappa, scale, g_query, of_state, signed)
    return g_query, g_key, g_value, *g_state


def _dense_last(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def ntk_alone(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    scale: float,
    dropout_p: float,
    *state: Any,
) -> Tensor:
    """`T` of `ntk`, and nothing to differentiate it by."""
    decode = _kernels("decode")
    if not dropout_p and decode.takes(query, key, value):
        return decode.forward(query, key, value, mask, is_causal, scale, *state)
    return ntk(query, key, value, mask, is_causal, scale, dropout_p, *state)[0]


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
        dropout_p: float,
        left: Tensor,
        right: Tensor | None,
        kappa: Tensor,
        signed: bool,
    ) -> Tensor:
        run = torch.ops.inlay.ntk if torch.compiler.is_compiling() else ntk
        found, *sums = run(query, key, value, mask, is_causal, scale, dropout_p, left, right, kappa, signed)
        ctx.save_for_backward(query, key, value, mask, left, right, kappa, found, *sums)
        ctx.given = is_causal, scale, dropout_p, signed
        return found

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, g_out: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, mask, left, right, kappa, found, *sums = ctx.saved_tensors
        is_causal, scale, dropout_p, signed = ctx.given
        needs = ctx.needs_input_grad
        of_inputs, of_state = needs[0] or needs[1] or needs[2], needs[7] or needs[8] or needs[9]
        compiling = torch.compiler.is_compiling()
        run = torch.ops.inlay.ntk_backward if compiling else ntk_backward
        state = left, right, kappa, signed, found, *sums, of_inputs, of_state
        grads = run(g_out, query, key, value, mask, is_causal, scale, dropout_p, *state)
        if compiling:  # an operator gives tensors only
            grads = [
                grad if wanted else None
                for grad, wanted in zip(grads, _wanted(of_inputs, of_state, right), strict=True)
            ]
        g_query, g_key, g_value, g_left, g_right, g_kappa = grads
        return g_query, g_key, g_value, None, None, None, None, g_left, g_right, g_kappa, None


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
        if call.dropout_p and in_function_transform():
            return "a function is transformed (torch.func), and what is dropped must be seen"
        for x in tensors:
            if x.shape[-1] != query.shape[-1]:
                return "it takes keys and values of one head size"
            if x.numel() == 0:
                return "there is nothing to attend to"
        if call.mask is not None and call.mask.requires_grad:
            return "the kernels give no gradient for the mask"
        return None

    def joined(self, call: Call, features: FeatureMap | None, state: State | None) -> Tensor:
        if state is None or call.prefix is not None or type(features) is not Elu or not _on_chip(call.query, state):
            return super().joined(call, features, state)
        keys = call.query, call.key, call.value, call.mask, call.is_causal, call.scale, call.dropout_p
        run = _Ntk.apply if torch.is_grad_enabled() else _without_gradient
        found: Tensor = run(*keys, state.left, state.right, state.kappa, state.signed)
        return found


def _on_chip(query: Tensor, state: State) -> bool:
    """Whether the epilogue's tiles fit: it holds Z, or its factors, and as many features of some queries at once."""
    return HAS_TRITON and _fits(query.shape[-1], state.kappa.shape[1], state.left.shape[-1])


def _fits(size: int, rows: int, rank: int) -> bool:
    blocks = _power(rows // size) * _power(size)
    return blocks <= 512 and size <= 256 and blocks * _power(rank) <= 128 * 128


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


def _as_integers(state: Tensor | None, like: Tensor) -> Tensor:
    """What an operator gives of a state: tensors only, and of a type that every compiler knows."""
    return like.new_empty(0, dtype=torch.int64) if state is None else state.view(torch.int64)


def _as_given(state: Tensor | None, kernel: str) -> Tensor | None:
    """The state as its kernel takes it, from what `_as_integers` made of it."""
    return state.view(torch.uint64) if state is not None and kernel == "flash" and state.numel() else state


def _empty_states(query: Tensor, key: Tensor, mask: Tensor | None, is_causal: bool, dropout_p: float) -> list[Tensor]:
    """Of the shapes and on the devices that the kernels have them."""
    if not dropout_p:
        return [query.new_empty(0, dtype=torch.int64) for _ in range(2)]
    kernel = kernel_for(query, key, mask, is_causal)
    device = "cpu" if kernel == "efficient" else query.device
    sizes: tuple[tuple[int, ...], ...] = ((2,) if kernel == "flash" else (), ())
    return [torch.empty(size, dtype=torch.int64, device=device) for size in sizes]


@torch.library.custom_op(
    "inlay::attention",
    mutates_args=(),
    schema="(Tensor query, Tensor key, Tensor value, Tensor? mask, bool is_causal, float scale, float dropout_p) -> "
    "(Tensor, Tensor, Tensor, Tensor)",
    tags=(torch.Tag.nondeterministic_seeded,),
)
def _attention_op(query: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    out, lse, *state = attend(query, *rest)
    return _model_layout(out), lse.contiguous(), *(_as_integers(each, query) for each in state)


@_attention_op.register_fake
def _(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool, scale: float, dropout_p: float
) -> Any:
    lse = query.new_empty(query.shape[:3], dtype=torch.float32)
    return _empty(query), lse, *_empty_states(query, key, mask, is_causal, dropout_p)


@torch.library.custom_op(
    "inlay::attention_backward",
    mutates_args=(),
    schema="(Tensor g_out, Tensor query, Tensor key, Tensor value, Tensor out, Tensor lse, Tensor? mask, "
    "bool is_causal, float scale, float dropout_p, Tensor? seed, Tensor? offset) -> (Tensor, Tensor, Tensor)",
)
def _attention_backward_op(
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
    *state: Tensor | None,
) -> tuple[Tensor, ...]:
    kernel = kernel_of(query, key, mask, is_causal, state[0])
    seed, offset = (_as_given(each, kernel) for each in state)
    given = g_out, query, key, value, out, lse, mask, is_causal, scale, dropout_p, seed, offset
    return tuple(_model_layout(g) for g in attend_backward(*given))


@_attention_backward_op.register_fake
def _(g_out: Tensor, query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> Any:
    return _empty(query), _empty(key), _empty(value)


@torch.library.custom_op(
    "inlay::ntk",
    mutates_args=(),
    schema="(Tensor query, Tensor key, Tensor value, Tensor? mask, bool is_causal, float scale, float dropout_p, "
    "Tensor left, Tensor? right, Tensor kappa, bool signed) -> (Tensor, Tensor, Tensor, Tensor)",
    tags=(torch.Tag.nondeterministic_seeded,),
)
def _ntk_op(query: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    found, stats, *state = ntk(query, *rest)
    return _model_layout(found), stats, *(_as_integers(each, query) for each in state)


@_ntk_op.register_fake
def _(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    scale: float,
    dropout_p: float,
    *rest: Any,
) -> Any:
    stats = query.new_empty((kept(query), *query.shape[:3]), dtype=torch.float32)
    return _empty(query), stats, *_empty_states(query, key, mask, is_causal, dropout_p)


@torch.library.custom_op(
    "inlay::ntk_alone",
    mutates_args=(),
    schema="(Tensor query, Tensor key, Tensor value, Tensor? mask, bool is_causal, float scale, float dropout_p, "
    "Tensor left, Tensor? right, Tensor kappa, bool signed) -> Tensor",
    tags=(torch.Tag.nondeterministic_seeded,),
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
    "float dropout_p, Tensor left, Tensor? right, Tensor kappa, bool signed, Tensor found, Tensor stats, "
    "Tensor? seed, Tensor? offset, bool of_inputs, bool of_state) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def _ntk_backward_op(g_out: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    query, key, _, mask, is_causal = rest[:5]
    kernel = kernel_of(query, key, mask, is_causal, rest[-4])
    state = (_as_given(each, kernel) for each in rest[-4:-2])
    grads = ntk_backward(g_out, *rest[:-4], *state, *rest[-2:])
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
    dropout_p: float,
    left: Tensor,
    right: Tensor | None,
    kappa: Tensor,
    signed: bool,
    found: Tensor,
    stats: Tensor,
    seed: Tensor | None,
    offset: Tensor | None,
    of_inputs: bool,
    of_state: bool,
) -> Any:
    wanted = _wanted(of_inputs, of_state, right)
    inputs = [_empty(x) if wants else x.new_empty(0) for x, wants in zip((query, key, value), wanted[:3], strict=True)]
    small = zip((left, left if right is None else right, kappa), wanted[3:], strict=True)
    return *inputs, *(x.new_empty(x.shape) if wants else g_out.new_empty(0) for x, wants in small)
