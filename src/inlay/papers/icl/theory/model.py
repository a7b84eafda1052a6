"""Section 2: the one-layer transformer with H heads, and the gradient of its loss in closed form."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from inlay.errors import InlayError
from inlay.papers.icl.theory.problem import InContextProblem, Moments


class OneLayer(nn.Module):
    """`yhat_k = <y, sum_h w_hk softmax(V^T Q_h v_k)>` (8), with `Q_h` (d, d) and `w_h` (K) trained.

    The sum is the column `a_k` of `Ahat(theta)` (35). A loss that depends on the labels' moments alone has, with
    `G = (S Ahat - C) / K` and `s^h_k` the softmax,

        dL/dw_hk = <s^h_k, G_k>
        dL/dQ_h  = V (sum_k w_hk s^h_k * (G_k - dL/dw_hk) v_k^T)

    which is `H (d^2 + K N)` numbers and `H N d (d + K)` operations a step (up to a constant factor), whatever the
    number of prompts. The start is `Q ~ N(0, beta^2)` and `w = 0` (Proposition 1, Theorem 1).
    """

    tokens: Tensor
    S: Tensor
    C: Tensor
    s: Tensor
    A: Tensor

    def __init__(
        self,
        problem: InContextProblem,
        heads: int,
        *,
        beta: float = 1.0,
        seed: int = 0,
        dtype: torch.dtype = torch.float64,
    ) -> None:
        super().__init__()
        if heads < 1:
            raise InlayError(f"heads = {heads}: give a whole number from 1 on (N = {problem.N} or more to converge).")
        if beta <= 0:
            raise InlayError(f"beta = {beta}: the start's standard deviation is a number above 0.")
        self.problem, self.heads, self.infimum = problem, heads, problem.infimum()
        draws = torch.Generator().manual_seed(seed)
        Q = beta * torch.randn(heads, problem.d, problem.d, generator=draws, dtype=torch.float64)
        place = {"dtype": dtype, "device": problem.tokens.device}
        self.Q = nn.Parameter(Q.to(**place))
        self.w = nn.Parameter(torch.zeros(heads, problem.K, **place))
        moments = problem.moments()
        kept = {"tokens": problem.tokens, "S": moments.S, "C": moments.C, "s": moments.s, "A": moments.minimiser()}
        for name, value in kept.items():
            self.register_buffer(name, value.to(**place), persistent=False)

    @property
    def moments(self) -> Moments:
        """The population's."""
        return Moments(self.S, self.C, self.s)

    def attention(self) -> Tensor:
        """`s^h_k = softmax(V^T Q_h v_k)` for all h and k: `C_k` (13) side by side, (H, N, K)."""
        return attention(self.tokens, self.Q, self.problem.N)

    def coefficients(self) -> Tensor:
        """`Ahat(theta)` (35), (N, K)."""
        return (self.w[:, None] * self.attention()).sum(0)

    def forward(self, shown: Tensor) -> Tensor:
        """(8): from the labels in the prompts (B, N) to the predictions (B, K)."""
        return shown.to(self.w) @ self.coefficients()

    @torch.no_grad()
    def population_loss(self) -> float:
        """`L(theta)` (9)."""
        return float(self.moments.loss(self.coefficients()))

    @torch.no_grad()
    def gap(self) -> float:
        """`L(theta) - inf L` (11), as `1/(2K) sum_k |Zbar delta_k|^2` (36): no difference of near numbers."""
        return float(quadratic(self.coefficients() - self.A, self.S)) / 2

    @torch.no_grad()
    def step(self, moments: Moments | None = None) -> Tensor:
        """Put the gradient of the moments' loss (default: the population's) into `.grad`; returns `Ahat(theta)`."""
        s = self.attention()
        a = (self.w[:, None] * s).sum(0)
        G = (moments or self.moments).slope(a)  # (N, K)
        by_w = (s * G).sum(1)
        by_score = s.mul_(G - by_w[:, None]).mul_(self.w[:, None])  # in the place of s, which is not needed again
        pushed = (by_score.flatten(0, 1) @ self.tokens).view(self.heads, self.problem.N, -1)
        # Contiguous, because the fused Adam reads gradients in the order of memory.
        self.Q.grad = (self.tokens[: self.problem.N].T @ pushed).contiguous()
        self.w.grad = by_w.contiguous()
        return a


def attention(tokens: Tensor, Q: Tensor, N: int) -> Tensor:
    """`softmax(V^T Q_h v_k)` (13) for `tokens` (K, d), of which the first N are V, and `Q` (H, d, d); (H, N, K)."""
    pulled = tokens[:N] @ Q  # V^T Q_h, (H, N, d)
    return (pulled.flatten(0, 1) @ tokens.T).view(len(Q), N, -1).softmax(1)


def quadratic(difference: Tensor, second: Tensor) -> Tensor:
    """`1/K sum_k x_k^T M x_k` over the columns of `difference` (N, K): the mean of `<y, x_k>^2` where M = E[y y^T]."""
    return (difference * (second @ difference)).sum() / difference.shape[1]
