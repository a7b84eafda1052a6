"""Sections 3.2 and 3.3: the ridge regressions that the trained transformer stands for, and the one it is held against.

All predictors here are linear in the prompt's labels, `yhat = a^T y`, so that their errors have closed forms too.
"""

from __future__ import annotations

import torch
from torch import Tensor

from inlay.errors import InlayError
from inlay.papers.icl.theory.problem import InContextProblem


def coefficients(problem: InContextProblem, strength: float) -> Tensor:
    """`(I, Z^T (Z Z^T + strength I)^+ ZQ)` (66), (N, K): given labels as they are, ridge regression for the others."""
    if strength < 0:
        raise InlayError(f"A ridge strength of {strength}: give a number from 0 on.")
    Z = problem.Z
    away = torch.eye(problem.m).to(Z) * strength
    inner = torch.linalg.pinv(Z @ Z.T + away, hermitian=True)
    return torch.cat([torch.eye(problem.N).to(Z), Z.T @ inner @ problem.ZQ], 1)


def star(problem: InContextProblem) -> Tensor:
    """The coefficients of `y*` (22): strength `m tau`, by (20) and (67)."""
    return coefficients(problem, problem.m * problem.tau)


def best(problem: InContextProblem) -> Tensor:
    """The coefficients of `y_best` (23): strength `N tau`, by (25)."""
    return coefficients(problem, problem.N * problem.tau)


def solution(problem: InContextProblem, shown: Tensor, strength: float) -> Tensor:
    """`argmin 1/(2N) sum_i (y_i - lambda^T f(v_i))^2 + strength/(2N) |lambda|^2` for each prompt (B, N), (B, m).

    (20) is `strength = m tau`, (25) is `strength = N tau`.
    """
    Z = problem.Z
    away = torch.eye(problem.m).to(Z) * strength
    return shown.to(Z) @ Z.T @ torch.linalg.pinv(Z @ Z.T + away, hermitian=True)
