"""The losses of softmax regression with their gradients and Hessians in closed form (InfoPrompt, appendix C.1 to C.6).

Everything is a function of `z = A x` first: `dL/dx = A^T dL/dz` and `d^2 L/dx^2 = A^T B A`. Every B here is a diagonal
matrix and two outer products, `B = diag(D) + f h^T + h f^T`, so no n x n matrix is needed. Leading dimensions of A, b,
w and x are a batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from inlay.errors import unknown

PARTS = ("exp", "cent", "reg")
BLOCK = 1024


def check_parts(parts: Sequence[str]) -> tuple[str, ...]:
    """The names of losses, each known."""
    for part in parts:
        if part not in PARTS:
            raise unknown("loss", part, PARTS)
    return tuple(parts)


def times(A: Tensor, x: Tensor) -> Tensor:
    """`A x` for every x of a batch."""
    return (A @ x[..., None])[..., 0]


def predict(A: Tensor, x: Tensor) -> Tensor:
    """`f(x) = exp(A x) / <exp(A x), 1>` (Definition C.4)."""
    return times(A, x).softmax(-1)


def l_exp(A: Tensor, b: Tensor, x: Tensor) -> Tensor:
    """`L_exp = 0.5 |f(x) - b|^2` (Definition C.6)."""
    return 0.5 * (predict(A, x) - b).square().sum(-1)


def l_cent(A: Tensor, b: Tensor, x: Tensor) -> Tensor:
    """`L_cent = -<b, log f(x)>` (Definition C.7)."""
    return -(b * times(A, x).log_softmax(-1)).sum(-1)


def l_reg(A: Tensor, w: Tensor, x: Tensor) -> Tensor:
    """`L_reg = 0.5 |W A x|^2`, `W = diag(w)` (Definition C.8)."""
    return 0.5 * (w * times(A, x)).square().sum(-1)


def slope(f: Tensor, b: Tensor, parts: Sequence[str]) -> Tensor:
    """`dL/dz` of the parts that depend on f alone, (..., n).

    exp:  `f . c - <c, f> f` with `c = f - b`
    cent: `<1, b> f - b` (Lemma C.10, part 3)
    """
    found = torch.zeros_like(f)
    if "exp" in parts:
        c = f - b
        found = found + f * c - (c * f).sum(-1, keepdim=True) * f
    if "cent" in parts:
        found = found + b.sum(-1, keepdim=True) * f - b
    return found


def curvature(f: Tensor, b: Tensor, parts: Sequence[str]) -> tuple[Tensor, Tensor]:
    """D and h, both (..., n), of `B = diag(D) + f h^T + h f^T`, for the parts that depend on f alone.

    exp:  `B = <3f - 2b, f> f f^T + (b.f) f^T + f (b.f)^T - <f - b, f> diag(f) + diag((2f - b).f)
           - 2 ((f.f) f^T + f (f.f)^T)`
    cent: `B = <1, b> (diag(f) - f f^T)` (Definition C.13)
    """
    D, h = torch.zeros_like(f), torch.zeros_like(f)
    if "exp" in parts:
        D = D + (2 * f - b) * f - ((f - b) * f).sum(-1, keepdim=True) * f
        h = h + 0.5 * ((3 * f - 2 * b) * f).sum(-1, keepdim=True) * f + b * f - 2 * f * f
    if "cent" in parts:
        total = b.sum(-1, keepdim=True)
        D, h = D + total * f, h - 0.5 * total * f
    return D, h


def gram(A: Tensor, D: Tensor) -> Tensor:
    """`A^T diag(D) A`, (..., d, d); one instance goes block by block of rows, which stay in the processor's cache."""
    if A.ndim > 2:
        return A.mT @ (D[..., None] * A)
    found = A.new_zeros(A.shape[1], A.shape[1])
    for rows, weights in zip(A.split(BLOCK), D.split(BLOCK), strict=True):
        found = torch.addmm(found, rows.T, weights[:, None] * rows)
    return found


def products(A: Tensor, *vectors: Tensor) -> Tensor:
    """`A^T v` for each of the vectors, (len(vectors), d), in one pass over A (n, d)."""
    stacked = torch.stack(vectors)
    found = A.new_zeros(len(vectors), A.shape[1])
    for rows, part in zip(A.split(BLOCK), stacked.split(BLOCK, 1), strict=True):
        found = torch.addmm(found, part, rows)
    return found


def gradient(A: Tensor, b: Tensor, w: Tensor, x: Tensor, parts: Sequence[str] = PARTS) -> Tensor:
    """`dL/dx`, (..., d): two products with A."""
    z = times(A, x)
    r = slope(z.softmax(-1), b, parts)
    if "reg" in parts:
        r = r + w.square() * z
    return times(A.mT, r)


def hessian(A: Tensor, b: Tensor, w: Tensor, x: Tensor, parts: Sequence[str] = PARTS) -> Tensor:
    """`d^2 L/dx^2 = A^T diag(D) A + (A^T f)(A^T h)^T + (A^T h)(A^T f)^T`, (..., d, d): O(n d^2)."""
    f = predict(A, x)
    D, h = curvature(f, b, parts)
    if "reg" in parts:
        D = D + w.square()
    cross = times(A.mT, f)[..., :, None] * times(A.mT, h)[..., None, :]
    return gram(A, D) + cross + cross.mT
