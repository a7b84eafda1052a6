"""Section 4 and appendices A and B of Multi-LoRA, computed.

`loss`: `L(x, y) = sum_i L_i(x, y_i)` with its gradient and Hessian, as they are and as the proof of Lemma 4.8 has them.
`constants`: Lipschitz, smoothness and convexity constants of the parts and the whole, estimated and bounded.
`table`: table 3, softmax regression with the printed and the corrected Hessian.
`lab`: these as experiments, each with its claims, its numbers and its picture.
"""

from __future__ import annotations

from inlay.papers.multi_lora.theory.constants import (
    Estimates,
    LossConstants,
    estimate,
    lemma_bounds,
    points,
    softmax_bounds,
)
from inlay.papers.multi_lora.theory.loss import (
    Decomposable,
    Quadratic,
    TaskLoss,
    arrow,
    counterexample,
    quadratics,
    softmax_tasks,
)
from inlay.papers.multi_lora.theory.table import Sampled, corrected_hessian, printed_hessian, sample

__all__ = [
    "Decomposable",
    "Estimates",
    "LossConstants",
    "Quadratic",
    "Sampled",
    "TaskLoss",
    "arrow",
    "corrected_hessian",
    "counterexample",
    "estimate",
    "lemma_bounds",
    "points",
    "printed_hessian",
    "quadratics",
    "sample",
    "softmax_bounds",
    "softmax_tasks",
]
