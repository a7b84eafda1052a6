"""Appendix B and Theorem 3.1 of NTK-Attention, computed.

`network`: the stylised network F(W, x, a), its data, start and gradient.
`kernel`: the neural tangent kernel as printed, as it is, and the limits of both for a long prefix.
`descent`: gradient descent with the decay of Theorem B.2 beside it, and the constants that the theorem asks for.
`drift`: Lemma B.1, how far the kernel moves with the weights.
`approximation`: Theorem 3.1, NTK-Attention against exact prefix attention.
`lab`: these as experiments, each with its claims, its numbers and its picture.
"""

from __future__ import annotations

from inlay.papers.ntk_attention.theory.approximation import Instance, instance, taylor_features
from inlay.papers.ntk_attention.theory.descent import (
    Decomposition,
    Descent,
    PrefixConstants,
    decomposition,
    descend,
    usable_step,
)
from inlay.papers.ntk_attention.theory.drift import drift, random_drift, worst_drift
from inlay.papers.ntk_attention.theory.kernel import printed_kernel, printed_limit, spectrum, true_kernel, true_limit
from inlay.papers.ntk_attention.theory.network import PrefixProblem, draw, expected_start, gradient, predict

__all__ = [
    "Decomposition",
    "Descent",
    "Instance",
    "PrefixConstants",
    "PrefixProblem",
    "decomposition",
    "descend",
    "draw",
    "drift",
    "expected_start",
    "gradient",
    "instance",
    "predict",
    "printed_kernel",
    "printed_limit",
    "random_drift",
    "spectrum",
    "taylor_features",
    "true_kernel",
    "true_limit",
    "usable_step",
    "worst_drift",
]
