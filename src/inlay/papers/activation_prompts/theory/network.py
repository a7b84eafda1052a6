"""The two-layer, single-head ViT of the activation-prompt paper, appendix C.3: its data, its weights, its prompts.

Tokens are rows here, (..., P, d); the paper writes them as columns. Where the paper leaves a choice, the class that
makes it says so.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from inlay.errors import InlayError, unknown

NEURONS = 4
BACKGROUNDS = ("one", "mixed")


@dataclass(frozen=True)
class Data:
    """The data model of C.3: one token of an image is `v_1` (label +1) or `v_2` (label -1), the others are background.

        x_j = v_l + epsilon_j,   epsilon_j ~ N(0, sigma^2),   |v_l| = 1,   v_3 . v_4 = zeta,   other pairs orthogonal

    The label, the background and the place of the telling token are drawn evenly. `background="one"`: all background
    tokens of an image are alike, as in the proofs; `"mixed"`: each is drawn by itself, the other reading of "correspond
    to either v_3 or v_4". d = 4, the span of the patterns.
    """

    tokens: int
    sigma: float = 0.0
    zeta: float = -0.5
    background: str = "one"

    def __post_init__(self) -> None:
        if self.tokens < 2:
            raise InlayError(f"{self.tokens} tokens: an image needs at least 2, one that tells and one of background.")
        if not -1 < self.zeta < 0:
            raise InlayError(f"zeta = {self.zeta}: the two backgrounds' inner product must lie between -1 and 0.")
        if self.sigma < 0:
            raise InlayError(f"sigma = {self.sigma}: the noise cannot be negative; 0 is none.")
        if self.background not in BACKGROUNDS:
            raise unknown("background", self.background, BACKGROUNDS)

    @property
    def patterns(self) -> Tensor:
        """`v_1` to `v_4` as rows: the axes, but for `v_4`, which leans on `v_3`."""
        v = torch.eye(NEURONS, dtype=torch.float64)
        v[3, 2], v[3, 3] = self.zeta, math.sqrt(1 - self.zeta**2)
        return v

    def images(self, telling: Tensor, background: Tensor, place: Tensor, generator: torch.Generator) -> Tensor:
        """Images (..., P, d) with pattern `telling` (0 or 1) at `place` and `background` (2 or 3) elsewhere."""
        kinds = background.expand(*telling.shape, self.tokens).clone()
        kinds.scatter_(-1, place[..., None], telling[..., None])
        x = self.patterns[kinds]
        if self.sigma:
            x = x + self.sigma * torch.randn(x.shape, generator=generator, dtype=x.dtype)
        return x

    def draw(self, shape: tuple[int, ...], generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Images (*shape, P, d) and their labels +-1 (*shape)."""
        telling = torch.randint(0, 2, shape, generator=generator)
        each = self.tokens if self.background == "mixed" else 1
        background = torch.randint(2, 4, (*shape, each), generator=generator)
        place = torch.randint(0, self.tokens, shape, generator=generator)
        return self.images(telling, background, place, generator), 1.0 - 2.0 * telling.double()


@dataclass(frozen=True)
class TwoLayerViT:
    """The pretrained network of C.3, equation (A13), with `m = 4` neurons (one of each kind; copies change nothing).

        f(x, delta) = sum_k a_k . relu(W_O2 sum_s z_s softmax_s(beta_2^2 z_s . z_k)),   a_k = (1, -1, 1, -1) / (m P)
        z_k         =             relu(W_O1 sum_s x_s softmax_s(beta_1^2 x_s . x_k)),   W_O1 = (v_1 .. v_4), W_O2 = I

    with `x_j + delta_j` for `x_j` (`layer=1`) or `z_j + delta_j` for `z_j` (`layer=2`), equation (A14).

    The permutation `P_x` acts on token positions: key and value `s` are those of token `order[s]`. (As a matrix beside
    `beta I` it would mix features, and no key would move by d_A.) Keys and values move together, so the sum over s, and
    with it f, does not depend on the order: only the places of the keys do, which is all that Lemma 1 looks at. Unless
    `prompt_stays`: (A63) writes `x_(P_s) + delta_s`, a prompt added after the permutation.
    """

    data: Data
    beta: tuple[float, float] = (1.0, 1.0)
    order: tuple[Tensor | None, Tensor | None] = (None, None)
    prompt_stays: bool = False

    def __call__(self, x: Tensor, delta: Tensor | None = None, layer: int = 1, count: Tensor | None = None) -> Tensor:
        """f for images (..., P, d) and a prompt that broadcasts against them.

        `count` (..., P'): tokens that are the same may be given once, with how often they occur; P is then their sum.
        """
        if layer not in (1, 2):
            raise InlayError(f"A prompt at layer {layer}: the network has the layers 1 and 2.")
        z = self.hidden(x, delta if layer == 1 else None, count)
        each = self._layer(z, delta if layer == 2 else None, 2, count) @ self.signs
        if count is None:
            return each.sum(-1) / (NEURONS * self.data.tokens)
        return (each * count).sum(-1) / (NEURONS * count.sum(-1))

    @property
    def signs(self) -> Tensor:
        """The signs of the output weights: + for `e_1`, `e_3`, - for `e_2`, `e_4`."""
        return torch.tensor([1.0, -1.0, 1.0, -1.0], dtype=torch.float64)

    def hidden(self, x: Tensor, delta: Tensor | None = None, count: Tensor | None = None) -> Tensor:
        """The first layer's output `z`, (..., P, m)."""
        return self._layer(x, delta, 1, count)

    def queries_keys(self, tokens: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """Queries `beta t_i` and keys `beta t_order(j)` of a layer that is given `tokens`."""
        queries, keys = self._moved(tokens, None, layer)
        return self.beta[layer - 1] * queries, self.beta[layer - 1] * keys

    def _moved(self, tokens: Tensor, delta: Tensor | None, layer: int) -> tuple[Tensor, Tensor]:
        """What queries and keys are made of: the prompted tokens, and the same in another order."""
        order = self.order[layer - 1]
        prompted = tokens if delta is None else tokens + delta
        if order is None:
            return prompted, prompted
        if self.prompt_stays and delta is not None:
            return prompted, tokens[..., order, :] + delta
        return prompted, prompted[..., order, :]

    def _layer(self, tokens: Tensor, delta: Tensor | None, layer: int, count: Tensor | None) -> Tensor:
        queries, values = self._moved(tokens, delta, layer)
        scores = self.beta[layer - 1] ** 2 * (queries @ values.transpose(-1, -2))
        if count is not None:
            scores = scores + count.log()[..., None, :]
        mixed = torch.softmax(scores, -1) @ values
        return torch.relu(mixed @ self.data.patterns.T if layer == 1 else mixed)


def hinge(output: Tensor, labels: Tensor, tokens: int | Tensor) -> Tensor:
    """The loss of C.3 for each image: `max(0, 1/P - y f)`."""
    return torch.relu(1 / tokens - labels * output)
