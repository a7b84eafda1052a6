"""The stylised network of NTK-Attention, appendix B.1, with its data, its start and its gradient, in float64.

Prefix attention over one query, without the text's own keys: the prefix is W = P^T, a column a token, and a random sign
a_r stands for the value projection. The multiplication by m is the paper's.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from inlay.errors import InlayError, unknown

INPUTS = ("unit", "axes")


@dataclass(frozen=True)
class PrefixProblem:
    """A data set with `|x_i| <= 1` and `|y_i| = 1`, and a start: x, y (n, d), W (d, m), a (m)."""

    x: Tensor
    y: Tensor
    W: Tensor
    a: Tensor

    @property
    def width(self) -> int:
        """m, the length of the prefix."""
        return self.W.shape[1]

    def at(self, W: Tensor) -> PrefixProblem:
        """The same data elsewhere."""
        return replace(self, W=W)

    @property
    def residual(self) -> Tensor:
        """`vec(F(W) - Y)`, (n d): the coordinate k counts first, then the example i, as in the blocks of H."""
        return (predict(self.W, self.x, self.a) - self.y).T.reshape(-1)


def predict(W: Tensor, x: Tensor, a: Tensor) -> Tensor:
    """Eq. (6): `F(W, x, a) = m sum_r exp(w_r . x) w_r a_r / sum_r exp(w_r . x)`, for x (n, d); (n, d)."""
    return W.shape[1] * (x @ W).softmax(1) @ (W * a).T


def gradient(problem: PrefixProblem) -> Tensor:
    """Of Eq. (7), (d, m), by Claim J.12: `m sum_ik (F_ik - y_ik) S_ir (<v_kr, S_i> x_i + a_r e_k)`."""
    x, W, a, m = problem.x, problem.W, problem.a, problem.width
    S, beta = (x @ W).softmax(1), W * a
    mean = S @ beta.T
    r = m * mean - problem.y
    push = r @ beta - (r * mean).sum(1, keepdim=True)  # sum_k r_ik <v_kr, S_i>
    return m * (x.T @ (S * push) + r.T @ (S * a))


def draw(
    width: int, examples: int, size: int, seed: int = 0, *, inputs: str = "unit", length: float = 1.0
) -> PrefixProblem:
    """Data and start: `w_r ~ N(0, I)`, `a_r` a fair sign, `y_i` uniform on the sphere.

    Inputs of norm `length`: `unit` are uniform on the sphere, `axes` are the first basis vectors. Data and start come
    from different generators, so that one data set meets prefixes of every length.
    """
    if min(width, examples, size) < 1:
        raise InlayError(f"m = {width}, n = {examples}, d = {size}: give whole numbers from 1 on.")
    if not 0 < length <= 1:
        raise InlayError(f"Inputs of norm {length}: the paper has |x_i| <= 1; give a number above 0 and up to 1.")
    data, start = torch.Generator().manual_seed(seed), torch.Generator().manual_seed(seed + 1_000_003)

    def sphere() -> Tensor:
        found = torch.randn(examples, size, generator=data, dtype=torch.float64)
        return found / found.norm(dim=1, keepdim=True)

    x, y = sphere(), sphere()
    if inputs == "axes":
        if examples > size:
            raise InlayError(f"{examples} inputs along {size} axes: give at most as many inputs as axes.")
        x = torch.eye(size, dtype=torch.float64)[:examples]
    elif inputs != "unit":
        raise unknown("kind of inputs", inputs, INPUTS)
    W = torch.randn(size, width, generator=start, dtype=torch.float64)
    a = torch.randint(0, 2, (width,), generator=start).double() * 2 - 1
    return PrefixProblem(length * x, y, W, a)


def expected_start(x: Tensor, width: int) -> float:
    """`E |F(0)|_F^2` for large m: `m sum_i (d + 4 |x_i|^2) exp(|x_i|^2)`.

    The signs make the m terms of `F_k = sum_r a_r w_rk (m S_r)` independent with mean 0, and `m S_r` tends to
    `exp(w_r . x - |x|^2 / 2)`; `E w_k^2 exp(2 w . x) = (1 + 4 x_k^2) exp(2 |x|^2)` is a Gaussian integral.
    """
    squares = x.square().sum(1)
    return float(width * ((x.shape[1] + 4 * squares) * squares.exp()).sum())
