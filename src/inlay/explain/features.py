"""What leaves the stem and every block of a model, reduced at once to Gram matrices of a minibatch.

A layer's features may be hundreds of thousands of numbers an example; the Gram matrix of n examples is n x n. It is
taken inside the forward pass, so that no more than one layer's features are held at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from contextlib import contextmanager
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from inlay.anatomy import Anatomy, anatomy
from inlay.errors import InlayError, unknown

Reduction = Literal["flat", "mean", "cls"]
REDUCTIONS: tuple[str, ...] = get_args(Reduction)
OUTLIER = 10.0  # times the median norm of a layer's tokens
CHUNK = 1 << 15  # features multiplied at a time, in double precision


class Grams:
    """The Gram matrices of the minibatch that last went through the model, the stem first; see `watching`.

    Set `mask` (rows x tokens, 1 for a real token) before a minibatch of texts. `outlying`: the layers (0 the stem) of
    which the mean over their other tokens is taken in place of all positions in a row; see `has_outliers`.
    """

    def __init__(self, parts: Anatomy, how: str, outlying: Set[int] = frozenset()) -> None:
        self.parts = parts
        self.how = how
        self.outlying = outlying
        self.mask: Tensor | None = None
        self._seen: list[Tensor] = []

    def take(self) -> Tensor:
        """The matrices, (1 + blocks, n, n) in float64, and a clean slate."""
        found, self._seen = torch.stack(self._seen), []
        return found

    def note(self, features: Tensor) -> None:
        """Add the next layer's."""
        if len(self._seen) in self.outlying:
            self._seen.append(gram(mean_of_others(features)))
        else:
            self._seen.append(gram(rows_of(features, self.parts.kind, self.how, self.mask)))


def find_outlying(model: nn.Module, batch: Mapping[str, Tensor]) -> set[int]:
    """The layers (0 the stem) that have outlier tokens on a minibatch of images; none of a convolutional model."""
    parts, found = anatomy(model), set[int]()

    def look(layer: int, output: Any) -> None:
        features = output if isinstance(output, Tensor) else next(v for v in output if isinstance(v, Tensor))
        if features.ndim == 3 and has_outliers(features):
            found.add(layer)

    handles = [
        block.module.register_forward_hook(lambda module, args, output, layer=layer: look(layer, output))
        for layer, block in enumerate(parts.blocks, start=1)
    ]
    try:
        model(**batch)
    finally:
        for handle in handles:
            handle.remove()
    return found


def has_outliers(features: Tensor) -> bool:
    """Whether some tokens (examples x tokens x channels) are so large that they drown the others: `OUTLIER` times the
    median norm. Large vision transformers, and some small ones, keep a few such tokens in their late blocks (Darcet et
    al. 2024): nearly all variance of all positions in a row is then that of where they stand."""
    norms = features.float().norm(dim=-1)
    return bool((norms > OUTLIER * norms.median()).any())


def mean_of_others(features: Tensor) -> Tensor:
    """The mean over an example's tokens that are no outliers."""
    norms = features.float().norm(dim=-1, keepdim=True)
    usual = (norms <= OUTLIER * norms.median()).to(features)
    return (features * usual).sum(1) / usual.sum(1).clamp(min=1)


@contextmanager
def watching(model: nn.Module, how: str, outlying: Set[int] = frozenset()) -> Iterator[Grams]:
    """Take the Gram matrices of every forward pass made inside of this."""
    parts = anatomy(model)
    check_reduction(how, parts, model)
    grams = Grams(parts, how, outlying)

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        grams.note(next(value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)))

    def after(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        grams.note(output if isinstance(output, Tensor) else next(v for v in output if isinstance(v, Tensor)))

    handles = [parts.blocks[0].module.register_forward_pre_hook(before, with_kwargs=True)]
    handles += [block.module.register_forward_hook(after) for block in parts.blocks]
    try:
        yield grams
    finally:
        for handle in handles:
            handle.remove()


def check_reduction(how: str, parts: Anatomy, model: nn.Module) -> None:
    """Refuse a name that means nothing, and a class token that the model does not have."""
    if how not in REDUCTIONS:
        raise unknown("way to reduce features", how, REDUCTIONS)
    if how == "cls" and parts.kind != "encoder":
        raise InlayError(
            f"{type(model).__name__} ({parts.kind}) has no class token to compare by. Use --features flat or mean."
        )


def rows_of(features: Tensor, kind: str, how: str, mask: Tensor | None = None) -> Tensor:
    """One vector an example: all positions in a row (flat), their mean, or the first position (cls).

    Positions that a mask calls padding are zero in `flat` and left out of `mean`. A prompt's virtual tokens stand
    before the text and count as real, but the class token is the text's own.
    """
    if features.ndim == 4:  # channels x height x width in convolutional models, channels last in the others
        features = features.flatten(2).transpose(1, 2) if kind == "convolutional" else features.flatten(1, 2)
    ahead = 0 if mask is None else features.shape[1] - mask.shape[1]
    if how == "cls":
        return features[:, ahead]
    if mask is None:
        return features.flatten(1) if how == "flat" else features.mean(1)
    real = nn.functional.pad(mask.to(features), (ahead, 0), value=1.0)[..., None]
    if how == "flat":
        return (features * real).flatten(1)
    return (features * real).sum(1) / real.sum(1)


def gram(rows: Tensor) -> Tensor:
    """X X' in float64, of centred columns.

    Centring changes no unbiased HSIC (it adds a_i + a_j to the entries off the diagonal, which the estimator cancels)
    and keeps a large common mean from drowning what differs.
    """
    total = torch.zeros(len(rows), len(rows), dtype=torch.float64, device=rows.device)
    for columns in rows.split(CHUNK, dim=1):
        columns = columns.double()
        columns = columns - columns.mean(0)
        total += columns @ columns.T
    return total
