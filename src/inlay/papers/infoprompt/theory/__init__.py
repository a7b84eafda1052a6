"""Appendix C and D of InfoPrompt, computed: softmax regression and its approximate Newton method.

`losses`: L_exp, L_cent, L_reg with gradients and Hessians in closed form, for batches.
`problem`: an instance with its checks, and random ones.
`bounds`: Lemmas C.15 and C.16 as printed, as can be proved without exponentials, and as measured.
`sampling`: a sparse diagonal by leverage scores.
`newton`: Algorithm 1 and Theorem D.1.
`lab`: these as experiments, each with its claims, its numbers and its picture.
"""

from __future__ import annotations

from inlay.papers.infoprompt.theory.bounds import (
    Printed,
    curvature_bound,
    enough_weight,
    hessian_change,
    least_eigenvalue,
    lipschitz_bound,
    weight_ratio,
)
from inlay.papers.infoprompt.theory.losses import curvature, gradient, hessian, l_cent, l_exp, l_reg, predict
from inlay.papers.infoprompt.theory.newton import Path, Sparsified, iterations, newton, solve
from inlay.papers.infoprompt.theory.problem import SoftmaxProblem, draw
from inlay.papers.infoprompt.theory.sampling import (
    SparseDiagonal,
    leverage_scores,
    rows_for,
    sketched_lengths,
    sparsify,
    spectral_error,
)

__all__ = [
    "Path",
    "Printed",
    "SoftmaxProblem",
    "SparseDiagonal",
    "Sparsified",
    "curvature",
    "curvature_bound",
    "draw",
    "enough_weight",
    "gradient",
    "hessian",
    "hessian_change",
    "iterations",
    "l_cent",
    "l_exp",
    "l_reg",
    "least_eigenvalue",
    "leverage_scores",
    "lipschitz_bound",
    "newton",
    "predict",
    "rows_for",
    "sketched_lengths",
    "solve",
    "sparsify",
    "spectral_error",
    "weight_ratio",
]
