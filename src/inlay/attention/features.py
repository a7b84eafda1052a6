"""Feature maps phi for NTK-Attention: phi(q) . phi(k) stands for exp(scale q . k) (NTK-Attention, Eq. (3)).

Each map says which kernel phi(q) . phi(k) really is. `elu` and `paper` are positive kernels of their own, the first
equal to exp at the origin only; `taylor` is the Taylor polynomial of exp, exact as its order grows; `favor` is exp
itself in expectation over its seed.

A map may give the features of a query up to a factor: the true features are `phi * exp(log_scale)`, row by row. The
factor is a constant of the row chosen to keep `phi` within range; it carries no gradient and needs none, since the
product does not depend on it.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

import torch
from torch import Tensor

from inlay.errors import InlayError, unknown


class FeatureMap(ABC):
    """phi: R^d -> R^r, applied to the last dimension."""

    name: ClassVar[str]
    kernel: ClassVar[str]
    """What phi(q) . phi(k) is."""
    positive: ClassVar[bool] = True
    """No feature is ever negative, so that phi(q) . kappa >= 0 for every kappa >= 0."""

    def dimension(self, head_dim: int) -> int:
        """r where nothing else decides it."""
        return head_dim

    def check(self, features: int, head_dim: int) -> None:
        """Raise where the map cannot have `features` features."""
        if features < 1 or features % head_dim:
            raise InlayError(
                f"The feature map {self.name!r} has a multiple of head_dim = {head_dim} features, not {features}. "
                f"Give kappa and Z {head_dim}, {2 * head_dim}, ... rows."
            )

    @abstractmethod
    def of_query(self, query: Tensor, features: int, scale: float) -> tuple[Tensor, Tensor | None]:
        """(phi, log_scale): `[..., features]` and `[...]`, or None for a factor of 1."""

    @abstractmethod
    def of_key(self, key: Tensor, features: int, scale: float) -> Tensor:
        """phi(key), `[..., features]`, without a factor: it is summed over the prefix."""


class Elementwise(FeatureMap):
    """phi acts on each coordinate by itself; r = beta d.

    beta = 2 is `[phi(z), phi(-z)]`, as both signs of a coordinate then count. Further pairs, for beta = 3, 4, ..., see
    `2 z`, `4 z`, ...: other functions of the same coordinate, or they would add nothing to what a matrix Z can say.

    The pieces are separate because the fused backends write the derivative by hand: `phi = norm * curve(inner * z)`.
    """

    @abstractmethod
    def inner(self, scale: float) -> float:
        """What multiplies z before the curve."""

    @abstractmethod
    def curve(self, z: Tensor) -> Tensor:
        """The function of one coordinate."""

    @abstractmethod
    def slope(self, z: Tensor, factor: float, value: Tensor) -> Tensor:
        """Its derivative at `factor * z`, where its value is `value`; a new tensor."""

    @abstractmethod
    def norm(self, features: int) -> float:
        """What multiplies every feature."""

    def factors(self, features: int, head_dim: int, scale: float) -> list[float]:
        """What multiplies z in each of the beta blocks."""
        inner = self.inner(scale)
        return [inner * (-1) ** block * 2 ** (block // 2) for block in range(features // head_dim)]

    def raw(self, z: Tensor, features: int, scale: float) -> Tensor:
        """phi / norm."""
        blocks = [self.curve(z * factor) for factor in self.factors(features, z.shape[-1], scale)]
        return blocks[0] if len(blocks) == 1 else torch.cat(blocks, -1)

    def pull(self, z: Tensor, raw: Tensor, g_raw: Tensor, scale: float) -> Tensor:
        """The gradient at z, from that at `raw = self.raw(z)`."""
        head_dim = z.shape[-1]
        found: Tensor | None = None
        for block, factor in enumerate(self.factors(raw.shape[-1], head_dim, scale)):
            here = slice(block * head_dim, (block + 1) * head_dim)
            part = self.slope(z, factor, raw[..., here]).mul_(g_raw[..., here]).mul_(factor)
            found = part if found is None else found.add_(part)
        assert found is not None
        return found

    def of_query(self, query: Tensor, features: int, scale: float) -> tuple[Tensor, Tensor | None]:
        return self.of_key(query, features, scale), None

    def of_key(self, key: Tensor, features: int, scale: float) -> Tensor:
        return self.raw(key, features, scale) * self.norm(features)


@dataclass(frozen=True)
class Elu(Elementwise):
    """`phi(z) = (ELU(z sqrt(scale)) + 1) / sqrt(r)`: continuous, positive; the default.

    The kernel is 1 at the origin whatever r is, thanks to `1 / sqrt(r)`. It grows as `scale q . k / r`, so it is no
    approximation of exp away from the origin: Z and kappa are trained for it.
    """

    name: ClassVar[str] = "elu"
    kernel: ClassVar[str] = "mean over r of (ELU(q_i sqrt(scale)) + 1)(ELU(k_i sqrt(scale)) + 1); 1 at the origin"

    def inner(self, scale: float) -> float:
        return math.sqrt(scale)

    def norm(self, features: int) -> float:
        return features**-0.5

    def curve(self, z: Tensor) -> Tensor:
        # exp(min(z, 0)) + max(z, 0), not ELU(z) + 1: that sum would round a feature of e^-10 to two digits.
        # Only the exponential has a slope at 0: of two clamps both would pass a gradient there, 2 in all.
        return z.relu() + z.clamp(max=0).exp_()

    def slope(self, z: Tensor, factor: float, value: Tensor) -> Tensor:
        return value.clamp(max=1)  # e^z below 0, 1 above: the curve is e^z and 1 + z


@dataclass(frozen=True)
class Paper(Elementwise):
    """`phi(z) = d^(-1/4) (z if z >= 0 else e^z) + 1`, as printed in section 3.2.

    It jumps down by `d^(-1/4)` at 0, ignores `scale`, and has no `1 / sqrt(r)`: its kernel is near r where exp is 1.
    """

    name: ClassVar[str] = "paper"
    kernel: ClassVar[str] = "sum over r of phi(q_i) phi(k_i); about r near the origin, where exp is 1"

    def inner(self, scale: float) -> float:
        return 1.0

    def norm(self, features: int) -> float:
        return 1.0

    def curve(self, z: Tensor) -> Tensor:
        return torch.where(z >= 0, z, z.clamp(max=0).exp()) * z.shape[-1] ** -0.25 + 1

    def slope(self, z: Tensor, factor: float, value: Tensor) -> Tensor:
        z = z * factor
        return torch.where(z >= 0, torch.ones_like(z), z.clamp(max=0).exp()) * z.shape[-1] ** -0.25


@dataclass(frozen=True)
class Centred(FeatureMap):
    """A map whose kernel approximates exp, about a centre `mu` (`[kv_heads, d]`, by default the origin).

    `exp(q . k) = exp(q . mu) exp(q . (k - mu))` holds exactly, so the keys may be taken about any point: about their
    mean they are shorter, and the approximation of the second factor better.
    """

    centre: Tensor | None = field(default=None, compare=False, kw_only=True)

    def lean(self, query: Tensor, scale: float) -> Tensor | None:
        """`scale q . mu`, `[...]`; queries that share keys share their centre."""
        if self.centre is None:
            return None
        centre = self.centre.to(query).repeat_interleave(query.shape[-3] // self.centre.shape[0], 0)
        return (query * centre[:, None]).sum(-1) * scale

    def about_centre(self, key: Tensor) -> Tensor:
        return key if self.centre is None else key - self.centre.to(key)[:, None]


@dataclass(frozen=True)
class Leaning(Centred):
    """A map of single coordinates about a centre: `phi(q) exp(scale q . mu)` of queries, `phi(k - mu)` of keys.

    The sums of `exp(scale q . k)` that Z and kappa stand for differ between queries by orders of magnitude, and a curve
    as flat as `elu` cannot follow. About a centre that the queries attend to, `exp(scale q . mu)` follows instead.
    """

    base: Elementwise = field(default_factory=Elu)
    name: ClassVar[str] = "leaning"
    kernel: ClassVar[str] = "exp(scale q . mu) times the base's kernel of q and k - mu"

    def check(self, features: int, head_dim: int) -> None:
        self.base.check(features, head_dim)

    def of_query(self, query: Tensor, features: int, scale: float) -> tuple[Tensor, Tensor | None]:
        phi = self.base.of_key(query, features, scale)
        if (lean := self.lean(query, scale)) is None:
            return phi, None
        # A factor of 1 that has the gradient of exp(lean).
        return phi * (lean - lean.detach()).exp().unsqueeze(-1), lean.detach()

    def of_key(self, key: Tensor, features: int, scale: float) -> Tensor:
        return self.base.of_key(self.about_centre(key), features, scale)


@dataclass(frozen=True)
class Taylor(Centred):
    """All monomials up to degree p: `phi_a(z) = (z sqrt(scale))^a / sqrt(a!)` for multi-indices `|a| <= p`.

    `phi(q) . phi(k) = sum_{n <= p} (scale q . k)^n / n!`, with `r = binomial(d + p, p)`: each monomial once, where the
    tensor powers would hold it up to n! times. With x = scale q . k the error is at most
    `|x|^(p + 1) / (p + 1)! max(1, e^x)`. For even p the polynomial is positive; for odd p it is negative for x far
    below 0, and the sum it enters may then lose its meaning. Features are of either sign: only a kappa made by
    Eq. (4) keeps the denominator positive.
    """

    order: int = 2
    name: ClassVar[str] = "taylor"
    kernel: ClassVar[str] = "the Taylor polynomial of exp(scale q . k) of the given order"
    positive: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.order < 0:
            raise InlayError(f"A Taylor polynomial of order {self.order} does not exist. Choose an order of 0 or more.")

    def dimension(self, head_dim: int) -> int:
        return math.comb(head_dim + self.order, self.order)

    def check(self, features: int, head_dim: int) -> None:
        if features != (right := self.dimension(head_dim)):
            raise InlayError(
                f"The Taylor features of order {self.order} at head_dim = {head_dim} are {right}, not {features}. "
                "Make Z and kappa with prefix_to_features and this map."
            )

    def levels(self, z: Tensor) -> list[Tensor]:
        """The monomials of degree 0, 1, ..., p, each `[..., count]`."""
        found = [torch.ones_like(z[..., :1])]
        for parent, variable, root in monomials(z.shape[-1], self.order):
            parent, variable = parent.to(z.device), variable.to(z.device)
            found.append(found[-1][..., parent] * z[..., variable] * root.to(z))
        return found

    def of_query(self, query: Tensor, features: int, scale: float) -> tuple[Tensor, Tensor | None]:
        z = query * math.sqrt(scale)
        # With y = z / m a monomial of degree n is m^n y^a; m^p goes into the factor and no power overflows.
        size = z.detach().abs().amax(-1, keepdim=True).clamp(min=1)
        log_size = size.log()
        levels = self.levels(z / size)
        phi = torch.cat([level * ((n - self.order) * log_size).exp() for n, level in enumerate(levels)], -1)
        log_scale = self.order * log_size.squeeze(-1)
        if (lean := self.lean(query, scale)) is not None:
            # A factor of 1 that has the gradient of exp(lean).
            phi = phi * (lean - lean.detach()).exp().unsqueeze(-1)
            log_scale = log_scale + lean.detach()
        return phi, log_scale

    def of_key(self, key: Tensor, features: int, scale: float) -> Tensor:
        return torch.cat(self.levels(self.about_centre(key) * math.sqrt(scale)), -1)


# Dictionaries, not functools' caches: torch.compile sees through them and takes the tensors as they are.
_MONOMIALS: dict[tuple[int, int], list[tuple[Tensor, Tensor, Tensor]]] = {}
_DIRECTIONS: dict[tuple[int, int, int], Tensor] = {}


def monomials(variables: int, order: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    """How to make the monomials of degree n from those of degree n - 1, for n = 1..order: parent, variable, factor.

    A monomial is a word of variables that never descends, so each is made once, from the word without its last letter.
    Dividing by the root of that letter's count in the word gives `1 / sqrt(a!)` in the end.
    """
    if (variables, order) in _MONOMIALS:
        return _MONOMIALS[variables, order]
    last = torch.zeros(1, dtype=torch.long)
    run = torch.zeros(1, dtype=torch.long)
    found = []
    for _ in range(order):
        choices = variables - last
        parent = torch.repeat_interleave(torch.arange(len(last)), choices)
        first = choices.cumsum(0) - choices
        variable = torch.arange(len(parent)) - first[parent] + last[parent]
        run = torch.where(variable == last[parent], run[parent] + 1, 1)
        last = variable
        found.append((parent, variable, run.double().rsqrt()))
    _MONOMIALS[variables, order] = found
    return found


@dataclass(frozen=True)
class Favor(Centred):
    """Positive random features: `phi_j(z) = exp(w_j . z' - |z'|^2 / 2) / sqrt(r)`, `z' = z sqrt(scale)`.

    For `w_j ~ N(0, I)` the expectation of `phi(q) . phi(k)` is `exp(scale q . k)`. The `w_j` are orthogonal within
    each block of d, which keeps the expectation and lowers the variance, and come from `seed` alone. Features of keys
    with `|z'|^2 / 2` beyond 80 or so vanish in float32: give a `centre`.
    """

    seed: int = 0
    name: ClassVar[str] = "favor"
    kernel: ClassVar[str] = "exp(scale q . k) in expectation over the seed"

    def check(self, features: int, head_dim: int) -> None:
        if features < 1:
            raise InlayError(f"Random features must be 1 or more, not {features}. Give kappa and Z at least one row.")

    def exponent(self, z: Tensor, features: int) -> Tensor:
        return z @ directions(features, z.shape[-1], self.seed).to(z).mT - z.square().sum(-1, keepdim=True) / 2

    def of_query(self, query: Tensor, features: int, scale: float) -> tuple[Tensor, Tensor | None]:
        exponent = self.exponent(query * math.sqrt(scale), features)
        if (lean := self.lean(query, scale)) is not None:
            exponent = exponent + lean.unsqueeze(-1)
        most = exponent.detach().amax(-1, keepdim=True)
        return (exponent - most).exp() * features**-0.5, most.squeeze(-1)

    def of_key(self, key: Tensor, features: int, scale: float) -> Tensor:
        return self.exponent(self.about_centre(key) * math.sqrt(scale), features).exp() * features**-0.5


def directions(features: int, head_dim: int, seed: int) -> Tensor:
    """`[features, head_dim]`: standard normal vectors, orthogonal within each block of head_dim."""
    if (features, head_dim, seed) in _DIRECTIONS:
        return _DIRECTIONS[features, head_dim, seed]
    generator = torch.Generator().manual_seed(seed)

    def normal() -> Tensor:
        return torch.randn(head_dim, head_dim, generator=generator, dtype=torch.float64)

    blocks = []
    for _ in range(-(-features // head_dim)):
        q, r = torch.linalg.qr(normal())
        turned = q * r.diagonal().sign()  # without the signs the rotation would not be uniform
        blocks.append(turned.mT * normal().norm(dim=1, keepdim=True))
    _DIRECTIONS[features, head_dim, seed] = torch.cat(blocks)[:features]
    return _DIRECTIONS[features, head_dim, seed]


FEATURE_MAPS: dict[str, type[FeatureMap]] = {kind.name: kind for kind in (Elu, Paper, Taylor, Favor)}


def feature_map(kind: str | FeatureMap, **options: Any) -> FeatureMap:
    """The map of that name, with its options (`order` of `taylor`, `seed` of `favor`, `centre` of both)."""
    if isinstance(kind, FeatureMap):
        return kind
    if not isinstance(kind, str):
        raise InlayError(f"feature_map={kind!r}: give a name ({', '.join(sorted(FEATURE_MAPS))}) or a FeatureMap.")
    if kind not in FEATURE_MAPS:
        raise unknown("feature map", kind, FEATURE_MAPS)
    if options:
        known = {entry.name for entry in fields(FEATURE_MAPS[kind])}  # type: ignore[arg-type]
        for name in options.keys() - known:
            raise unknown(f"option of the feature map {kind!r}:", name, known)
    return FEATURE_MAPS[kind](**options)
