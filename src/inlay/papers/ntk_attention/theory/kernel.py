"""The neural tangent kernel of the stylised network: the printed one, the true one, and where both tend.

All are (n d, n d) with blocks (k1, k2) of entries (i, j), and all are divided by m as in Definition K.1, so that with
the true one a step of gradient descent is `vec(F - Y) <- (I - m eta H) vec(F - Y)` to first order.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.func import jacrev

from inlay.papers.ntk_attention.theory.network import predict


def printed_kernel(W: Tensor, x: Tensor, a: Tensor) -> Tensor:
    """Definition K.1: `x_i . x_j / m sum_r m S_ir <v_k1r, S_i> m S_jr <v_k2r, S_j>`, `v_kr = beta_kr 1 - beta_k`."""
    d, m = W.shape
    S, beta = (x @ W).softmax(1), W * a
    G = m * S * (beta[:, None] - (beta @ S.T)[..., None])  # (d, n, m)
    G = G.flatten(0, 1)
    return G @ G.T / m * (x @ x.T).repeat(d, d)


def true_kernel(W: Tensor, x: Tensor, a: Tensor) -> Tensor:
    """`J J^T / m` with J the derivative of vec(F) by W, from autograd.

    By Eq. (9) a row of J is `m S_ir (<v_kr, S_i> x_i + a_r e_k)`. The printed kernel is what is left without `a_r e_k`.
    """
    J = jacrev(lambda weights: predict(weights, x, a).T.reshape(-1))(W).flatten(1)
    return J @ J.T / W.shape[1]


def printed_limit(x: Tensor) -> Tensor:
    """The printed kernel as m grows: `x_i . x_j exp(x_i . x_j) (delta_k1k2 + s_k1 s_k2)`, `s = x_i + x_j`.

    `m S_ir -> exp(w_r . x_i - |x_i|^2 / 2)` and `<beta_k, S_i> -> 0`, so each entry is a Gaussian integral over w.
    """
    s = x[:, None] + x
    return _blocks((x @ x.T)[..., None, None] * (_eye(x) + s[..., None] * s[..., None, :]), x)


def true_limit(x: Tensor) -> Tensor:
    """The true kernel as m grows: the printed limit and

        exp(x_i . x_j) (delta_k1k2 + x_jk1 s_k2 + s_k1 x_ik2),   s = x_i + x_j

    The first term comes from `(a_r e_k1) . (a_r e_k2)`, which no sign makes small since `a_r^2 = 1`.
    """
    s = x[:, None] + x
    of_i, of_j = x[:, None, None, :], x[None, :, :, None]
    return printed_limit(x) + _blocks(_eye(x) + of_j * s[..., None, :] + s[..., None] * of_i, x)


def _eye(x: Tensor) -> Tensor:
    return torch.eye(x.shape[1], dtype=x.dtype)


def _blocks(entries: Tensor, x: Tensor) -> Tensor:
    """`exp(x_i . x_j)` times entries (i, j, k1, k2), as the paper's matrix of blocks."""
    n, d = x.shape
    return ((x @ x.T).exp()[..., None, None] * entries).permute(2, 0, 3, 1).reshape(n * d, n * d)


def spectrum(kernel: Tensor) -> Tensor:
    """Eigenvalues from the least to the largest."""
    return torch.linalg.eigvalsh((kernel + kernel.T) / 2)


def apart(kernel: Tensor, other: Tensor) -> float:
    """`|K - K'|_F / |K|_F`."""
    return float((kernel - other).norm() / kernel.norm())


KERNELS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {"printed": printed_kernel, "true": true_kernel}
