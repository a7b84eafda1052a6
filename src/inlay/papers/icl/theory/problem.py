"""Section 2: the dictionary, its representation, the tasks, and the moments of the labels.

The labels of a prompt enter every loss of the paper only through their second moments. So the population loss (9), the
loss of a mini-batch and the inference loss are one quadratic form with three sets of moments (`Moments`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from inlay.errors import InlayError

Representation = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class TaskDistribution:
    """How `lambda` is drawn: independent normal entries. Assumption 1 asks for mean 0 and variance 1."""

    mean: float = 0.0
    variance: float = 1.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.mean) and math.isfinite(self.variance) and self.variance >= 0):
            raise InlayError(f"Tasks of mean {self.mean}, variance {self.variance}: give a variance from 0 on.")

    def second(self, m: int) -> Tensor:
        """`E[lambda lambda^T]`, (m, m)."""
        return self.variance * torch.eye(m, dtype=torch.float64) + self.mean**2 * torch.ones(m, m, dtype=torch.float64)


IN_DOMAIN = TaskDistribution()
OUT_OF_DOMAIN = TaskDistribution(mean=1.0, variance=4.0)


@dataclass(frozen=True)
class Moments:
    """`S = E[y y^T]` (N, N) of the prompt's labels, `C = E[y y_k]` (N, K), `s = E[y_k^2]` (K).

    With Assumption 1: `S = Z^T Z + m tau I`, `C = Z^T Zhat + (m tau I, 0)`, `s_k = |f(v_k)|^2 + m tau` (Lemma 5). The
    prediction `<y, a_k>` then has the loss (9) `1/(2K) sum_k (a_k^T S a_k - 2 a_k^T c_k + s_k)`.
    """

    S: Tensor
    C: Tensor
    s: Tensor

    def to(self, like: Tensor) -> Moments:
        return Moments(self.S.to(like), self.C.to(like), self.s.to(like))

    def loss(self, a: Tensor) -> Tensor:
        """The loss (9) of the coefficients `a` (N, K)."""
        return ((a * (self.S @ a - 2 * self.C)).sum() + self.s.sum()) / (2 * len(self.s))

    def slope(self, a: Tensor) -> Tensor:
        """Its derivative with respect to `a`: `(S a - C) / K`."""
        return (self.S @ a - self.C) / len(self.s)

    def minimiser(self) -> Tensor:
        """`A = S^+ C` (34), by the pseudo-inverse, which is the inverse where tau > 0."""
        return torch.linalg.pinv(self.S, hermitian=True) @ self.C

    def infimum(self) -> float:
        """`L*` of Lemma 5, with the `m tau` that (36) and (79) leave out for k > N."""
        return float((self.s.sum() - (self.C * self.minimiser()).sum()) / (2 * len(self.s)))


@dataclass(frozen=True)
class DrawnPrompts:
    """Drawn tasks `lam` (B, m) and their labels `y` (B, K); a prompt shows the first N of each row."""

    lam: Tensor
    y: Tensor
    N: int

    def __len__(self) -> int:
        return len(self.y)

    @property
    def shown(self) -> Tensor:
        """The labels in the prompts, (B, N)."""
        return self.y[:, : self.N]

    def moments(self, rows: Tensor | slice = slice(None)) -> Moments:
        """The sample's moments: with many rows they come near the population's."""
        y = self.y[rows]
        C = y[:, : self.N].T @ y / len(y)
        return Moments(C[:, : self.N], C, y.square().mean(0))


@dataclass(frozen=True)
class InContextProblem:
    """K tokens `v_k` (rows of `tokens`, (K, d)), their representation `f(v_k)` (rows of `features`, (K, m)), N of them
    in the prompt, and noise tau: `y_k = lambda^T (f(v_k) + eps_k)`, `eps_k ~ N(0, tau I_m)` (1).

    Float64 throughout. `N <= K`; `tau = 0` is a problem without noise.
    """

    tokens: Tensor
    features: Tensor
    N: int
    tau: float = 0.01
    tasks: TaskDistribution = IN_DOMAIN

    def __post_init__(self) -> None:
        tokens, features = self.tokens, self.features
        if tokens.ndim != 2 or min(tokens.shape) < 1:
            raise InlayError(f"Tokens of shape {tuple(tokens.shape)}: give (K, d), a row a token, K and d from 1 on.")
        K = len(tokens)
        if features.ndim != 2 or len(features) != K or features.shape[1] < 1:
            raise InlayError(
                f"The representation has the shape {tuple(features.shape)}: f must give (K, m) = ({K}, m) for {K} "
                "tokens, m from 1 on."
            )
        if not 1 <= self.N <= K:
            raise InlayError(f"N = {self.N}, K = {K}: a prompt shows 1 to K of the K tokens. Lower N or raise K.")
        if not (math.isfinite(self.tau) and self.tau >= 0):
            raise InlayError(f"tau = {self.tau}: the noise level is a number from 0 on.")
        for name, values in (("tokens", tokens), ("representation", features)):
            if not values.isfinite().all():
                row = int((~values.isfinite().all(1)).nonzero()[0])
                raise InlayError(f"The {name} of token {row + 1} has NaN or infinite numbers. Clean the inputs, or f.")
        if len(tokens.unique(dim=0)) < K:
            raise InlayError(
                f"{K - len(tokens.unique(dim=0))} of the {K} tokens repeat others: the dictionary holds distinct ones "
                "(Assumption 3). Drop the copies."
            )
        object.__setattr__(self, "tokens", tokens.to(torch.float64))
        object.__setattr__(self, "features", features.to(torch.float64))

    @classmethod
    def sample(
        cls,
        N: int = 30,
        K: int = 200,
        d: int = 100,
        m: int | None = 20,
        tau: float = 0.01,
        seed: int = 0,
        *,
        unit: bool = False,
        f: Representation | None = None,
    ) -> InContextProblem:
        """Tokens from N(0, I_d), of norm 1 where `unit` (as in section 2), represented by N(0, I_m) (as in section 4).

        With `f`, the representation is `f(tokens)`, of shape (K, m).
        """
        for name, size in (("N", N), ("K", K), ("d", d), ("m", 1 if m is None else m)):
            if size < 1:
                raise InlayError(f"{name} = {size}: give a whole number from 1 on.")
        draws = torch.Generator().manual_seed(seed)
        tokens = torch.randn(K, d, generator=draws, dtype=torch.float64)
        if unit:
            if d == 1 and K > 2:
                raise InlayError(
                    f"K = {K} tokens of norm 1 in d = 1: there are only two. Raise d, or use Gaussian tokens."
                )
            tokens = tokens / tokens.norm(dim=1, keepdim=True)
        if f is None:
            return cls(tokens, torch.randn(K, m or 20, generator=draws, dtype=torch.float64), N, tau)
        return cls.of(tokens, f, N, tau, m=m)

    @classmethod
    def of(
        cls,
        tokens: Tensor,
        f: Representation | Tensor,
        N: int,
        tau: float = 0.01,
        *,
        m: int | None = None,
        tasks: TaskDistribution = IN_DOMAIN,
    ) -> InContextProblem:
        """Your own tokens (K, d), and `f` of them: a function, or its values (K, m)."""
        with torch.no_grad():
            features = f(tokens) if callable(f) else f
        if not isinstance(features, Tensor):
            raise InlayError(f"f gave a {type(features).__name__}: it must give a tensor (K, m), a row a token.")
        if m is not None and (features.ndim != 2 or features.shape[1] != m):
            raise InlayError(
                f"The representation has the shape {tuple(features.shape)}, and m = {m} asks for ({len(tokens)}, {m}). "
                "Leave m out, or mend f."
            )
        return cls(tokens, features.detach(), N, tau, tasks)

    def to(self, device: str | torch.device) -> InContextProblem:
        return replace(self, tokens=self.tokens.to(device), features=self.features.to(device))

    @property
    def K(self) -> int:
        return len(self.tokens)

    @property
    def d(self) -> int:
        return self.tokens.shape[1]

    @property
    def m(self) -> int:
        return self.features.shape[1]

    @property
    def V(self) -> Tensor:
        """The prompt's tokens (3), (d, N)."""
        return self.tokens[: self.N].T

    @property
    def Z(self) -> Tensor:
        """Their representation (12), (m, N)."""
        return self.features[: self.N].T

    @property
    def ZQ(self) -> Tensor:
        """The representation of the others (19), (m, K - N)."""
        return self.features[self.N :].T

    def moments(self, tasks: TaskDistribution | None = None) -> Moments:
        """The population's moments, of the training tasks or of others."""
        second = (tasks or self.tasks).second(self.m).to(self.features)
        everything = self.features @ second @ self.features.T
        everything.diagonal().add_(self.tau * second.trace())
        return Moments(everything[: self.N, : self.N], everything[: self.N], everything.diagonal())

    def infimum(self) -> float:
        """`inf L` (Lemma 5): the loss of the ridge regression (20)."""
        return self.moments().infimum()

    def prompts(
        self, count: int, seed: int, tasks: TaskDistribution | None = None, lam: Tensor | None = None
    ) -> DrawnPrompts:
        """Draw `count` tasks (or take `lam`, (B, m)) and label every token.

        `lambda^T eps_k` is drawn as what it is, N(0, tau |lambda|^2): the m numbers of `eps_k` are not needed.
        """
        if count < 1:
            raise InlayError(f"{count} prompts: give a whole number from 1 on.")
        draws = torch.Generator().manual_seed(seed)
        if lam is None:
            kind = tasks or self.tasks
            lam = kind.mean + kind.variance**0.5 * torch.randn(count, self.m, generator=draws, dtype=torch.float64)
        noise = torch.randn(len(lam), self.K, generator=draws, dtype=torch.float64)
        lam, noise = lam.to(self.features), noise.to(self.features)
        y = lam @ self.features.T + self.tau**0.5 * lam.norm(dim=1, keepdim=True) * noise
        return DrawnPrompts(lam, y, self.N)
