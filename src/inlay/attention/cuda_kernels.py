"""torch's fused CUDA kernels, called below autograd.

Three kernels, chosen as `scaled_dot_product_attention` chooses: cuDNN's on Hopper and Blackwell; flash attention
elsewhere, and for a single query, since cuDNN builds a plan for every length it meets; the memory-efficient one for
masks, float32, and causal attention to more or fewer keys than queries (flash would line up the last of both, cuDNN is
not asked). Facts about them that their interfaces do not show, each relied on here:

- None reads its random state without dropout, and an undefined `cum_seq` is what says that tensors are dense.
- With dropout each gives back the state of its random numbers, and its backward pass, handed that state, drops the same
  weights: also when output and log-sum-exp are those of a sum of parts. The memory-efficient one has the state on the
  host, unless a CUDA graph is captured; the others have it on the GPU.
- cuDNN keeps the backward plan by the strides of q, k and v alone: output and gradient must lie as the forward pass
  laid the output. It takes the log-sum-exp as `[batch, heads, length, 1]`.
- The memory-efficient one gives a query that sees nothing output 0 and log-sum-exp 0, as if it saw one key of score 0:
  who sees nothing is read off the mask. It pads the rows of its log-sum-exp to a multiple of 32, takes its output back
  only as it laid it (length before heads), and a bias only in the query's type with rows that start at multiples of 16.
- Head sizes must be multiples of 8: others are filled up with zeros.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from inlay.attention.fused import Attended

aten = torch.ops.aten
CUDNN_SIZE, FLASH_SIZE = 128, 256
CUDNN_VERSION = 90900
"""From here on torch prefers cuDNN's attention on GPUs that have it written for them."""

_CAPABILITY: dict[torch.device, tuple[int, int]] = {}
_PREFERS_CUDNN: dict[torch.device, bool] = {}


def capability(device: torch.device) -> tuple[int, int]:
    if device not in _CAPABILITY:
        _CAPABILITY[device] = torch.cuda.get_device_capability(device)
    return _CAPABILITY[device]


def _prefers_cudnn(device: torch.device) -> bool:
    if device not in _PREFERS_CUDNN:
        version = torch.backends.cudnn.version() or 0
        _PREFERS_CUDNN[device] = version >= CUDNN_VERSION and capability(device) in ((9, 0), (10, 0))
    return _PREFERS_CUDNN[device]


def is_flash(query: Tensor, key: Tensor, mask: Tensor | None, is_causal: bool) -> bool:
    """Whether flash attention, or cuDNN's, can do it."""
    fits = not is_causal or query.size(2) == key.size(2)
    return mask is None and query.dtype.itemsize == 2 and fits and query.size(3) <= FLASH_SIZE


def kernel_for(query: Tensor, key: Tensor, mask: Tensor | None, is_causal: bool) -> str:
    """Which of the three kernels does it."""
    if not is_flash(query, key, mask, is_causal):
        return "efficient"
    prefers = (
        query.size(3) <= CUDNN_SIZE
        and query.size(2) > 1
        and key.size(2) > 1
        and _prefers_cudnn(query.device)
        and torch.backends.cuda.cudnn_sdp_enabled()
        and not torch.are_deterministic_algorithms_enabled()
    )
    return "cudnn" if prefers else "flash"


def kernel_of(query: Tensor, key: Tensor, mask: Tensor | None, is_causal: bool, seed: Tensor | None) -> str:
    """Which of them did it, for the backward pass: what is switched on or off may have changed since. Only with dropout
    does it matter, since each drops weights of its own. Flash attention's state is two numbers, cuDNN's one."""
    if seed is None or seed.numel() == 0 or not is_flash(query, key, mask, is_causal):
        return kernel_for(query, key, mask, is_causal)
    return "flash" if seed.numel() == 2 else "cudnn"


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    scale: float,
    dropout_p: float = 0.0,
) -> Attended:
    """Where nothing is seen the log-sum-exp is -inf, and the output may be anything."""
    kind = kernel_for(query, key, mask, is_causal)
    size, length = query.shape[3], query.shape[2]
    if size % 8 or not query.stride(3) == key.stride(3) == value.stride(3) == 1 or 0 in query.stride():
        query, key, value = _dense(query), _dense(key), _dense(value)
    if kind == "cudnn":
        found = aten._scaled_dot_product_cudnn_attention.default(
            query, key, value, None, True, dropout_p, is_causal, False, scale=scale
        )
        out, lse, seed, offset = found[0], found[1].view(query.shape[:3]), found[6], found[7]
    elif kind == "flash":
        found = aten._scaled_dot_product_flash_attention.default(query, key, value, dropout_p, is_causal, scale=scale)
        out, lse, seed, offset = found[0], found[1], found[6], found[7]
    else:
        added = _added(mask, query, key)
        found = aten._scaled_dot_product_efficient_attention.default(
            query, key, value, added, True, dropout_p, is_causal, scale=scale
        )
        out, lse, seed, offset = found[0], found[1][..., :length], found[2], found[3]
        if mask is not None:
            lse = torch.where(_sees(mask, query, is_causal), lse, -torch.inf)
    out = out if size == out.shape[3] else out[..., :size]
    return (out, lse, seed, offset) if dropout_p else (out, lse, None, None)


def attend_backward(
    g_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    scale: float,
    dropout_p: float = 0.0,
    seed: Tensor | None = None,
    offset: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of query, key and value as fused.py defines them; `lse` is finite."""
    kind = kernel_of(query, key, mask, is_causal, seed)
    if seed is None or offset is None:
        seed = offset = lse  # not read
    size, length, keys = query.shape[3], query.shape[2], key.shape[2]
    g_out, query, key, value, out = _dense(g_out), _dense(query), _dense(key), _dense(value), _dense(out)
    if kind == "cudnn":
        strides = _strides_like(query)
        out, g_out = strided(out, strides), strided(g_out, strides)
        stats = lse.contiguous().unsqueeze(-1)
        found = aten._scaled_dot_product_cudnn_attention_backward.default(
            *(g_out, query, key, value, out, stats, seed, offset),
            *(None, None, None, length, keys, dropout_p, is_causal),
            scale=scale,
        )
    elif kind == "flash":
        found = aten._scaled_dot_product_flash_attention_backward.default(
            *(g_out, query, key, value, out, lse.contiguous()),
            *(None, None, length, keys, dropout_p, is_causal, seed, offset),
            scale=scale,
        )
    else:
        lse = pad(lse, (0, -length % 32), value=torch.inf) if length % 32 else lse.contiguous()
        out = out.transpose(1, 2).contiguous().transpose(1, 2)
        found = aten._scaled_dot_product_efficient_attention_backward.default(
            *(g_out, query, key, value, _added(mask, query, key), out),
            *(lse, seed, offset, dropout_p, [True, True, True, False], is_causal),
            scale=scale,
        )
    g_query, g_key, g_value = found[:3]
    if size == g_query.shape[3]:
        return g_query, g_key, g_value
    return g_query[..., :size], g_key[..., :size], g_value[..., :size]


def _sees(mask: Tensor, query: Tensor, is_causal: bool) -> Tensor:
    """Whether a query may see any key, `[batch, heads, length]` or 1 in place of a size."""
    may = mask if mask.dtype == torch.bool else mask.to(query.dtype) > -torch.inf  # as it is added
    if not is_causal or may.shape[3] == 1:  # the first key is everyone's
        return may.any(-1)
    if may.shape[2] > 1:
        return may.tril().any(-1)
    may = may.squeeze(2).cumsum(-1) > 0  # of keys 0 to i
    more = query.shape[2] - may.shape[2]
    return may[..., : query.shape[2]] if more <= 0 else torch.cat([may, may[..., -1:].expand(-1, -1, more)], -1)


def _dense(x: Tensor) -> Tensor:
    """Without gaps in the last dimension, whose size is a multiple of 8, and without a row that stands for many."""
    if x.shape[-1] % 8:
        return pad(x, (0, -x.shape[-1] % 8))
    return x if x.stride(-1) == 1 and 0 not in x.stride() else x.contiguous()


def _strides_like(x: Tensor) -> tuple[int, ...]:
    """Those of a tensor without gaps whose dimensions lie in the order of x's."""
    _, heads, length, size = x.shape
    own, whole = x.stride(), length * heads * size
    if min(heads, length) > 1 and own in ((whole, size, heads * size, 1), (whole, length * size, size, 1)):
        return own
    strides, step = [0] * x.dim(), 1
    for dim in sorted(range(x.dim()), key=lambda d: (x.stride(d), -d)):
        strides[dim] = step
        step *= x.shape[dim]
    return tuple(strides)


def strided(x: Tensor, strides: tuple[int, ...]) -> Tensor:
    if x.stride() == strides:
        return x
    return torch.empty_strided(x.shape, strides, dtype=x.dtype, device=x.device).copy_(x)


def _added(mask: Tensor | None, query: Tensor, key: Tensor) -> Tensor | None:
    """The mask as something to add to the scores, as the memory-efficient kernel takes it.

    A bias of another type is rounded to the query's, as torch's own attention rounds it under autocast.
    """
    if mask is None:
        return None
    if mask.dtype == torch.bool:
        mask = mask.to(query.dtype).log_()  # of 1 and 0: 0 and -inf
    mask = mask.to(query.dtype)
    keys = key.shape[2]
    if mask.shape[-1] == 1 < keys:
        mask = mask.expand(*mask.shape[:3], keys)
    if keys % 16:
        mask = pad(mask, (0, -keys % 16))[..., :keys]
    elif mask.stride(-1) != 1 or any(stride % 16 for stride in mask.stride()[:-1]):
        mask = mask.contiguous()
    return mask.expand(*query.shape[:3], keys)
