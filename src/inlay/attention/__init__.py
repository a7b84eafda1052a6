"""Attention whose softmax also sums what no key holds (NTK-Attention, Algorithms 1 and 2); torch alone.

functional.py  attention_with_lse, ntk_attention, prefix_attention
prefix.py      prefix_to_features, Eq. (4)
features.py    the feature maps and the kernels they stand for
term.py        phi(q) [Z | kappa]
biased.py      a bias for every key of a prefix, as one more channel
join.py        how parts of one softmax are put together in log space
call.py        the arguments, checked
backends.py    which backend computes a call
plain.py       the definition, with the scores in full
fused.py       what fused kernels share: gradients, grouped heads, shared prefixes
cpu.py         torch's fused CPU kernel; with dropout, chunks of queries (chunked.py)
cuda.py        the CUDA backend, and its operators for torch.compile
cuda_kernels.py  torch's fused CUDA kernels
taylor.py      approximate attention, linear in the length, by Taylor polynomials (monomials.py)
taylor_error.py  how far it can be from attention
epilogue.py    the feature term of `elu` beside them, in Triton (epilogue_kernels.py)
decode.py      a few queries without gradients, whole, in Triton (decode_kernels.py)
once.py        gradients that cannot be differentiated again
launch.py      how Triton kernels are launched
"""

from __future__ import annotations

from inlay.attention.backends import BACKENDS
from inlay.attention.biased import LEAST_BIAS
from inlay.attention.features import FEATURE_MAPS, Elu, Favor, FeatureMap, Paper, Taylor, feature_map
from inlay.attention.functional import attention_with_lse, ntk_attention, prefix_attention
from inlay.attention.prefix import prefix_to_features
from inlay.attention.taylor_error import TaylorBound, taylor_bound, taylor_error

__all__ = [
    "BACKENDS",
    "FEATURE_MAPS",
    "LEAST_BIAS",
    "Elu",
    "Favor",
    "FeatureMap",
    "Paper",
    "Taylor",
    "TaylorBound",
    "attention_with_lse",
    "feature_map",
    "ntk_attention",
    "prefix_attention",
    "prefix_to_features",
    "taylor_bound",
    "taylor_error",
]
